"""The same quantities by several packages: ours, PyTorch by hand, and peers where installed.

Each function returns its quantities by name. A process imports one package only, because several
share the import name `curvlinops`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from copy import deepcopy
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from problems import Problem
from scipy.sparse.linalg import LinearOperator, cg, eigsh
from torch import Tensor, nn

HESSIAN, GGN, FISHER = "Hessian", "GGN", "empirical Fisher"
HESSIAN_COLUMNS, GGN_COLUMNS = "Hessian, 16 columns", "GGN, 16 columns"
KFAC, KFAC_EMPIRICAL, KFAC_TYPE2 = "KFAC mc", "KFAC empirical", "KFAC type-2"
KFAC_PRODUCT, EKFAC = "KFAC product", "EKFAC and product"
#: Damping and product, from factors. Damping is large enough that rounding errors are small.
PLAIN, HEURISTIC, EXACT = (f"KFAC inverse {how}" for how in ("plain", "heuristic", "exact"))
DAMPING = 1e-2
#: Quantities of real size: an inverse with little damping, products with what is there already.
SMALL, SMALL_DAMPING = "KFAC inverse plain, damping 1e-3", 1e-3
INVERSE_PRODUCT, EKFAC_PRODUCT = "product of a KFAC inverse", "EKFAC product"
LOGDET, LEADING = "KFAC log-determinant, damping 1e-3", "GGN, 3 eigenpairs"
GRADIENTS, NORMS, DIAGONAL = "gradients of samples", "norms of gradients", "GGN diagonal"
#: Inner products of gradients of samples with vectors, which may have matrices of rank 2.
SCORES, MANY_SCORES = "scores, 32 columns", "scores, 64 columns"
LOW_RANK_SCORES = "scores, 64 columns of rank 2"
TRACE, HUTCHINSON = "GGN, Hutch++ trace", "GGN, Hutchinson"
PRODUCTS, MATVECS = 30, 20
#: Tasks from end to end: SciPy's tolerances, and SGD whose gradients KFAC preconditions.
EIGENPAIRS, SOLVE, TRAINING = "GGN, 10 eigenpairs", "GGN, CG", "KFAC, 10 steps of training"
PAIRS, TOLERANCE = 10, 1e-3
SHIFT, PRECISION = 0.1, 1e-6
STEPS, RATE = 10, 1e-3


class Quantity(NamedTuple):
    """Something to compute.

    Attributes:
        build: Makes an operator, or what plays its role.
        ask: Computes the result.
        keep: Enters a context in which the operator's later results take less time.
        comparable: Whether all packages have the same numbers: neither random nor scaled otherwise.
    """

    build: Callable[[Problem], Any]
    ask: Callable[[Any], Any]
    keep: Callable[[Any], AbstractContextManager] | None = None
    comparable: bool = True


Quantities = dict[str, Quantity]


def per_output(name: str) -> bool:
    """Return whether a quantity takes a backward pass for each output of a sample."""
    return "type-2" in name or name in (DIAGONAL, "GGN trace")


@cache
def vectors(dim: int, *columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return random vectors, the same in each process."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(dim, *columns, generator=generator, dtype=dtype).to(device)


def multiply(A: Any, *columns: int) -> Tensor:
    """Multiply with random vectors."""
    dtype, device = getattr(A, "torch_dtype", torch.float32), getattr(A, "device", "cpu")
    return A @ vectors(A.shape[1], *columns, dtype=dtype, device=device)


def gradient() -> Quantity:
    """Return the unit of all times: a forward and a backward pass over all data."""

    def ask(p: Problem) -> list[tuple[Tensor, ...]]:
        params = list(p.params.values()) if isinstance(p.params, dict) else p.params
        return [torch.autograd.grad(p.loss(p.model(X), y), params) for X, y in p.data]

    return Quantity(lambda p: p, ask)


def solve(matvec: Callable[[Tensor], Tensor], dim: int, device: torch.device) -> Tensor:
    """Solve a shifted system with SciPy's CG, on the CPU."""

    def shifted(v: np.ndarray) -> np.ndarray:
        return matvec(torch.from_numpy(v).to(device)).cpu().numpy() + SHIFT * v

    A = LinearOperator((dim, dim), shifted, dtype=np.float32)
    return torch.from_numpy(cg(A, np.ones(dim, dtype=np.float32), rtol=PRECISION)[0])


def largest(A: Any, pairs: int = PAIRS) -> np.ndarray:
    """Return the largest eigenvalues by SciPy's eigsh."""
    v0 = np.random.default_rng(0).standard_normal(A.shape[0], dtype=np.float32)
    return eigsh(A, pairs, which="LA", tol=TOLERANCE, v0=v0)[0]


def scores(rows: list[Tensor], columns: int) -> Tensor:
    """Return the inner products of gradients of samples with random vectors."""
    flat = torch.cat([row.flatten(1) for row in rows], 1)
    return flat @ vectors(flat.shape[1], columns, dtype=torch.float32, device=flat.device)


def damped_solve(B: Tensor, A: Tensor, gradient: Tensor) -> Tensor:
    """Solve with a Kronecker product plus a multiple of the identity, by eigendecompositions."""
    (b, Q_B), (a, Q_A) = torch.linalg.eigh(B), torch.linalg.eigh(A)
    return Q_B @ (Q_B.T @ gradient @ Q_A / (b[:, None] * a + SHIFT)) @ Q_A.T


def ours(check_deterministic: bool = True) -> Quantities:
    """Return this package's quantities. A version that lacks a name refuses what needs it."""
    import curvlinops

    def operator(kind: str, **options: Any) -> Callable[[Problem], Any]:
        def build(p: Problem) -> Any:
            with_loss = () if "Jacobian" in kind else (p.loss,)
            more = p.options if with_loss else p.options | {"reduction": None}
            more = {key: value for key, value in more.items() if value is not None} | options
            arguments = (p.model, *with_loss, p.params, p.data)
            checked = {"check_deterministic": check_deterministic}
            return getattr(curvlinops, f"{kind}LinearOperator")(*arguments, **more, **checked)

        return build

    def product(kind: str, *columns: int, **options: Any) -> Quantity:
        build = operator(kind, **options)
        return Quantity(build, lambda A: multiply(A, *columns), lambda A: A.linearized())

    def method(kind: str, name: str, **options: Any) -> Quantity:
        return Quantity(operator(kind, **options), lambda A: getattr(A, name)())

    def low_rank_scores(p: Problem) -> Callable[[], Tensor]:
        A = operator(samples)(p)
        P = vectors(A.shape[1], 64, dtype=A.torch_dtype, device=A.device)
        return partial(A.scores, A.low_rank(P, 2))

    def factors(kind: str = "KFAC", **options: Any) -> Quantity:
        def ask(K: Any) -> list:
            K.compute_kronecker_factors()
            # mappings, but not always dictionaries
            return [dict(K.input_covariances), dict(K.gradient_covariances)]

        return Quantity(operator(kind, **options), ask, comparable=False)

    def from_factors(ask: Callable[[Any], Any], kind: str = "KFAC", **options: Any) -> Quantity:
        def build(p: Problem) -> Any:
            K = operator(kind, **options)(p)
            K.compute_kronecker_factors()
            return K

        return Quantity(build, ask, comparable=False)

    def inverse(damping: float = DAMPING, **options: bool) -> Callable[[Any], Any]:
        return lambda K: multiply(K.inverse(damping, **options))

    def inverted(p: Problem) -> Any:
        return operator("KFAC")(p).inverse(DAMPING)

    def cg_solve(G: Any) -> Tensor:
        b = torch.ones(G.shape[0], dtype=G.torch_dtype, device=G.device)
        return curvlinops.CGInverseLinearOperator(G.damped(SHIFT), rtol=PRECISION) @ b

    def train(p: Problem) -> list[Tensor]:
        from curvlinops.training import KFACPreconditioner

        ((X, y),), optimizer = p.data, torch.optim.SGD(p.params, RATE)
        often = {"update_every": 1, "invert_every": 1}
        preconditioner = KFACPreconditioner(operator("KFAC")(p), optimizer, SHIFT, **often)
        for _ in range(STEPS):
            optimizer.zero_grad()
            p.loss(p.model(X), y).backward()
            preconditioner.step(X, y)
            optimizer.step()
        return p.params

    def of_ggn(ask: Callable[[Any], Any], comparable: bool = True) -> Quantity:
        return Quantity(operator("GGN"), ask, comparable=comparable)

    def eigenvalues(G: Any, pairs: int = PAIRS) -> Tensor:
        return curvlinops.eigsh(G, min(pairs, G.shape[0]), "LA", tol=TOLERANCE, seed=0).eigenvalues

    def trace(G: Any) -> Tensor:
        return curvlinops.hutchpp_trace(G, min(PRODUCTS, G.shape[0] // 3 * 3), seed=0)

    samples, diagonal = "PerSampleGradient", "GGNDiagonal"
    found = {
        HESSIAN: product("Hessian"),
        GGN: product("GGN"),
        FISHER: product("EF"),
        HESSIAN_COLUMNS: product("Hessian", 16),
        GGN_COLUMNS: product("GGN", 16),
        KFAC: factors(),
        KFAC_EMPIRICAL: factors(fisher_type="empirical"),
        KFAC_TYPE2: factors(fisher_type="type-2"),
        KFAC_PRODUCT: from_factors(multiply),
        PLAIN: from_factors(inverse()),
        HEURISTIC: from_factors(inverse(use_heuristic_damping=True)),
        EXACT: from_factors(inverse(use_exact_damping=True)),
        SMALL: from_factors(inverse(SMALL_DAMPING)),
        INVERSE_PRODUCT: Quantity(inverted, multiply, comparable=False),
        LOGDET: from_factors(lambda K: K.damped(SMALL_DAMPING).logdet()),
        LEADING: of_ggn(partial(eigenvalues, pairs=3)),
        EKFAC: Quantity(operator("EKFAC"), multiply, comparable=False),
        EKFAC_PRODUCT: Quantity(operator("EKFAC"), multiply, comparable=False),
        GRADIENTS: method(samples, "gradients"),
        NORMS: method(samples, "norms"),
        SCORES: Quantity(operator(samples), lambda A: multiply(A, 32)),
        MANY_SCORES: Quantity(operator(samples), lambda A: multiply(A, 64)),
        LOW_RANK_SCORES: Quantity(low_rank_scores, lambda scores: scores()),
        DIAGONAL: method(diagonal, "diagonal"),
        EIGENPAIRS: of_ggn(eigenvalues),
        TRACE: of_ggn(trace, comparable=False),
        SOLVE: of_ggn(cg_solve),
        TRAINING: Quantity(lambda p: p, train, comparable=False),
        # for comparisons of two versions
        "sampled Fisher": product("FisherMC"),
        "empirical Fisher by sample": product("EF", terms="sample"),
        "Jacobian": product("Jacobian"),
        "transposed Jacobian": product("TransposedJacobian"),
        "gradients, transposed product": Quantity(operator(samples), lambda A: multiply(A.T)),
        "GGN trace": method(diagonal, "trace"),
        "sampled GGN diagonal": method(diagonal, "diagonal", mc_samples=1),
        HUTCHINSON: of_ggn(lambda G: curvlinops.hutchinson_trace(G, MATVECS, seed=0)),
        "GGN, XTrace": of_ggn(lambda G: curvlinops.xtrace(G, 20, seed=0)),
        "GGN, density": of_ggn(
            lambda G: list(curvlinops.lanczos_approximate_spectrum(G, 15, seed=0))
        ),
    }
    for name in ("dense", "gram", "second_moment"):
        found[f"gradients, {name}"] = method(samples, name)
    for fisher in ("mc", "type-2", "empirical"):
        for approx in ("expand", "reduce"):
            options = {"fisher_type": fisher, "kfac_approx": approx, "fallback": "dense"}
            name = f"{fisher} {approx}"
            for kind in ("KFAC", "EKFAC"):
                found[f"{kind} {name}, factors"] = factors(kind, **options)
            # the bases of EKFAC-reduce are arbitrary in null spaces
            for kind in ("KFAC",) if approx == "reduce" else ("KFAC", "EKFAC"):
                for what, ask in {
                    "product": lambda K: [multiply(K), K.diagonal(), K.trace()],
                    "inverse": lambda K: [
                        multiply(K.inverse(DAMPING)),
                        K.inverse(DAMPING).logdet(),
                    ],
                    "logdet": lambda K: K.logdet(),
                }.items():
                    found[f"{kind} {name}, {what}"] = from_factors(ask, kind, **options)
    return found


def by_hand() -> Quantities:
    """Return what a few lines of plain PyTorch compute on one batch, without checks."""
    from torch.func import functional_call, grad, vmap

    def flat(tensors: Any, start: int = 0) -> Tensor:
        return torch.cat([t.flatten(start) for t in tensors], start)

    def split(v: Tensor, params: list[Tensor]) -> list[Tensor]:
        parts = v.split([p.numel() for p in params])
        return [part.view_as(p) for part, p in zip(parts, params, strict=True)]

    class Hessian:
        """Products through the graph of the gradient, which may be kept."""

        def __init__(self, p: Problem):
            ((self.X, self.y),), self.p, self.kept = p.data, p, None
            self.dim = sum(param.numel() for param in p.params)

        def graph(self) -> Any:
            loss = self.p.loss(self.p.model(self.X), self.y)
            return torch.autograd.grad(loss, self.p.params, create_graph=True)

        def product(self, graph: Any, v: Tensor) -> Tensor:
            v = split(v, self.p.params)
            return flat(torch.autograd.grad(graph, self.p.params, v, retain_graph=True))

        def __enter__(self) -> None:
            self.kept = self.graph()

        def __exit__(self, *_: object) -> None:
            self.kept = None

        def __call__(self, *columns: int) -> Tensor:
            device = self.p.params[0].device
            v, graph = vectors(self.dim, *columns, dtype=torch.float32, device=device), self.kept
            graph = self.graph() if graph is None else graph
            if not columns:
                return self.product(graph, v)
            return vmap(partial(self.product, graph), 1, 1, chunk_size=4)(v)

    class GaussNewton(Hessian):
        """Products by `J^T H J v`, with `J v` by two backward passes."""

        def roots(self) -> tuple[Tensor, Tensor, Tensor]:
            """Return outputs, copies of them, and gradients of the loss by the copies."""
            z = self.p.model(self.X)
            inner = z.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.p.loss(inner, self.y), inner, create_graph=True)
            return z, inner, g

        def graph(self) -> Any:
            z, inner, g = self.roots()
            w = torch.zeros_like(z, requires_grad=True)
            return z, w, torch.autograd.grad(z, self.p.params, w, create_graph=True), inner, g

        def product(self, graph: Any, v: Tensor) -> Tensor:
            z, w, Jw, inner, g = graph
            v = split(v, self.p.params)
            (Jv,) = torch.autograd.grad(Jw, w, v, retain_graph=True)
            (HJv,) = torch.autograd.grad(g, inner, Jv, retain_graph=True)
            return flat(torch.autograd.grad(z, self.p.params, HJv, retain_graph=True))

    class EmpiricalFisher(GaussNewton):
        """The same with the terms of the loss as outputs."""

        def roots(self) -> tuple[Tensor, Tensor, Tensor]:
            z = F.cross_entropy(self.p.model(self.X), self.y, reduction="none")
            inner = z.detach().requires_grad_()
            return z, inner, inner / self.y.numel()

    def samples(p: Problem) -> Callable[[], dict[str, Tensor]]:
        trained = [(n, param) for n, param in p.model.named_parameters() if param.requires_grad]
        theta = {name: param.detach() for name, param in trained}
        ((X, y),) = p.data

        def loss(values: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
            z = functional_call(p.model, values, x.unsqueeze(0))
            return F.cross_entropy(z, target.unsqueeze(0), reduction="sum")

        return lambda: vmap(grad(loss), (None, 0, 0))(theta, X, y)

    class Factors:
        """KFAC of linear and convolutional layers, with the bias as a column of the weight."""

        def __init__(self, p: Problem):
            ((self.X, self.y),), self.p = p.data, p
            layers = [m for m in p.model.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
            self.layers = [layer for layer in layers if layer.weight.requires_grad]
            params = [param for layer in self.layers for param in layer.parameters()]
            if {*map(id, params)} != {*map(id, p.params)}:
                raise NotImplementedError("Only linear and convolutional layers by hand.")

        def __call__(self) -> dict[nn.Module, tuple[Tensor, Tensor]]:
            uses = []

            def record(layer: nn.Module, inputs: tuple, output: Tensor) -> None:
                uses.append((layer, inputs[0].detach(), output))

            hooks = [layer.register_forward_hook(record) for layer in self.layers]
            z = self.p.model(self.X).movedim(1, -1).flatten(0, -2)
            for hook in hooks:
                hook.remove()
            y = torch.distributions.Categorical(logits=z.detach()).sample()
            loss = F.cross_entropy(z, y, reduction="sum")
            gradients = torch.autograd.grad(loss, [output for _, _, output in uses])
            pairs = zip(uses, gradients, strict=True)
            return {layer: self.factors(layer, x, g) for (layer, x, _), g in pairs}

        def factors(self, layer: nn.Module, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            if isinstance(layer, nn.Conv2d):
                options = {"padding": layer.padding, "stride": layer.stride}
                x, g = F.unfold(x, layer.kernel_size, **options).mT, g.flatten(2).mT
            x, g = x.flatten(0, -2), g.flatten(0, -2)
            if layer.bias is not None:
                x = F.pad(x, (0, 1), value=1.0)
            return x.T @ x / len(self.X), g.T @ g / len(self.X)

    class Training(Factors):
        """SGD whose gradients are preconditioned."""

        def __call__(self) -> list[Tensor]:
            for _ in range(STEPS):
                self.p.model.zero_grad()
                self.p.loss(self.p.model(self.X), self.y).backward()
                for layer, (A, B) in super().__call__().items():
                    params = list(layer.parameters())
                    gradient = torch.cat([p.grad.reshape(len(p), -1) for p in params], 1)
                    direction = damped_solve(B, A, gradient)
                    parts = direction.split([param[0].numel() for param in params], 1)
                    for param, part in zip(params, parts, strict=True):
                        param.data.sub_(RATE * part.reshape(param.shape))
            return self.p.params

    def scipy_operator(A: GaussNewton) -> LinearOperator:
        A.__enter__()
        device = A.p.params[0].device

        def matvec(v: np.ndarray) -> np.ndarray:
            return A.product(A.kept, torch.from_numpy(v).to(device)).cpu().numpy()

        return LinearOperator((A.dim, A.dim), matvec, dtype=np.float32)

    def cg_solve(A: GaussNewton) -> Tensor:
        A.__enter__()
        return solve(partial(A.product, A.kept), A.dim, A.p.params[0].device)

    def product(kind: type[Hessian], *columns: int) -> Quantity:
        return Quantity(kind, lambda A: A(*columns), lambda A: A)

    def norms(rows: Callable[[], dict[str, Tensor]]) -> Tensor:
        return sum(row.flatten(1).square().sum(1) for row in rows().values()).sqrt()

    return {
        HESSIAN: product(Hessian),
        GGN: product(GaussNewton),
        FISHER: product(EmpiricalFisher),
        HESSIAN_COLUMNS: product(Hessian, 16),
        GGN_COLUMNS: product(GaussNewton, 16),
        KFAC: Quantity(Factors, lambda K: list(K().values()), comparable=False),
        EIGENPAIRS: Quantity(GaussNewton, lambda A: largest(scipy_operator(A))),
        SOLVE: Quantity(GaussNewton, cg_solve),
        TRAINING: Quantity(Training, lambda K: K(), comparable=False),
        GRADIENTS: Quantity(samples, lambda rows: list(rows().values())),
        NORMS: Quantity(samples, norms),
        SCORES: Quantity(samples, lambda rows: scores(list(rows().values()), 32)),
        MANY_SCORES: Quantity(samples, lambda rows: scores(list(rows().values()), 64)),
    }


def incumbent(check_deterministic: bool = True) -> Quantities:
    """Return the quantities of curvlinops-for-pytorch."""
    import curvlinops

    def operator(
        kind: str, check: bool = check_deterministic, **options: Any
    ) -> Callable[[Problem], Any]:
        def build(p: Problem) -> Any:
            arguments = (p.model, p.loss, p.params, p.data)
            more = options | {"num_data": sum(len(X) for X, _ in p.data)}
            if "KFAC" in kind:
                more["num_per_example_loss_terms"] = p.data[0][1][0].numel()
            cls = getattr(curvlinops, f"{kind}LinearOperator")
            return cls(*arguments, **more, check_deterministic=check)

        return build

    def product(kind: str, *columns: int) -> Quantity:
        return Quantity(operator(kind), lambda A: multiply(A, *columns))

    def factors(fisher: str) -> Quantity:
        def ask(K: Any) -> list:
            K.compute_kronecker_factors()
            return []

        return Quantity(operator("KFAC", fisher_type=fisher), ask, comparable=False)

    def from_factors(ask: Callable[[Any], Any]) -> Quantity:
        def build(p: Problem) -> Any:
            K = operator("KFAC")(p)
            K.compute_kronecker_factors()
            return K

        return Quantity(build, ask, comparable=False)

    def inverse(damping: float = DAMPING, **options: bool) -> Quantity:
        kind = curvlinops.KFACInverseLinearOperator
        return from_factors(lambda K: multiply(kind(K, damping=damping, **options)))

    def inverted(p: Problem) -> Any:
        K = operator("KFAC")(p)
        K.compute_kronecker_factors()
        return curvlinops.KFACInverseLinearOperator(K, damping=DAMPING)

    def train(p: Problem) -> list[Tensor]:
        ((X, y),), kind = p.data, curvlinops.KFACInverseLinearOperator
        K = operator("KFAC")(p)
        for _ in range(STEPS):
            p.model.zero_grad()
            p.loss(p.model(X), y).backward()
            K.compute_kronecker_factors()
            inverse = kind(K, damping=SHIFT, use_exact_damping=True)
            directions = inverse @ [param.grad for param in p.params]
            for param, direction in zip(p.params, directions, strict=True):
                param.data.sub_(RATE * direction)
        return p.params

    def cg_solve(G: Any) -> Tensor:
        return solve(lambda v: G @ v, G.shape[0], G.device)

    return {
        HESSIAN: product("Hessian"),
        GGN: product("GGN"),
        FISHER: product("EF"),
        HESSIAN_COLUMNS: product("Hessian", 16),
        GGN_COLUMNS: product("GGN", 16),
        KFAC: factors("mc"),
        KFAC_EMPIRICAL: factors("empirical"),
        KFAC_TYPE2: factors("type-2"),
        KFAC_PRODUCT: from_factors(multiply),
        PLAIN: inverse(),
        HEURISTIC: inverse(use_heuristic_damping=True),
        EXACT: inverse(use_exact_damping=True),
        SMALL: inverse(SMALL_DAMPING),
        INVERSE_PRODUCT: Quantity(inverted, multiply, comparable=False),
        # its check computes the factors, which count here
        EKFAC: Quantity(operator("EKFAC", check=False), multiply, comparable=False),
        EKFAC_PRODUCT: Quantity(operator("EKFAC"), multiply, comparable=False),
        EIGENPAIRS: Quantity(operator("GGN"), lambda G: largest(G.to_scipy())),
        LEADING: Quantity(operator("GGN"), lambda G: largest(G.to_scipy(), 3)),
        SOLVE: Quantity(operator("GGN"), cg_solve),
        TRAINING: Quantity(lambda p: p, train, comparable=False),
        TRACE: Quantity(
            operator("GGN"), lambda G: curvlinops.hutchpp_trace(G, PRODUCTS), comparable=False
        ),
        HUTCHINSON: Quantity(
            operator("GGN"), lambda G: curvlinops.hutchinson_trace(G, MATVECS), comparable=False
        ),
    }


def backpack() -> Quantities:
    """Return the products and extensions of backpack-for-pytorch; it has no columns."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import KFAC as KFACExtension
    from backpack.extensions import KFLR, BatchGrad, BatchL2Grad, DiagGGNExact
    from backpack.hessianfree.ggnvp import ggn_vector_product
    from backpack.hessianfree.hvp import hessian_vector_product

    def product(p: Problem, ggn: bool, v: Tensor | None = None) -> object:
        ((X, y),), params = p.data, p.params
        if v is None:
            v = vectors(dimension(p), dtype=torch.float32, device=X.device)
        parts = v.split([param.numel() for param in params])
        v = [part.view_as(param) for part, param in zip(parts, params, strict=True)]
        output = p.model(X)
        loss = p.loss(output, y)
        if ggn:
            return ggn_vector_product(loss, output, p.model, v)
        return hessian_vector_product(loss, params, v)

    def dimension(p: Problem) -> int:
        return sum(param.numel() for param in p.params)

    def as_vector(parts: list[Tensor]) -> Tensor:
        return torch.cat([part.flatten() for part in parts])

    def ggn_operator(p: Problem) -> LinearOperator:
        def matvec(v: np.ndarray) -> np.ndarray:
            v = torch.from_numpy(v).to(p.params[0].device)
            return as_vector(product(p, True, v)).cpu().numpy()

        return LinearOperator((dimension(p), dimension(p)), matvec, dtype=np.float32)

    def cg_solve(p: Problem) -> Tensor:
        matvec = lambda v: as_vector(product(p, True, v))  # noqa: E731
        return solve(matvec, dimension(p), p.params[0].device)

    def train(built: tuple) -> list[Tensor]:
        for _ in range(STEPS):
            for param, (B, *A) in zip(built[-1], kfac.ask(built), strict=True):
                A = A[0] if A else torch.ones(1, 1, device=B.device)
                gradient = param.grad.reshape(len(param), -1)
                param.data.sub_(RATE * damped_solve(B, A, gradient).view_as(param))
        return built[-1]

    def extension(
        kind: type, name: str, finish: Callable = list, comparable: bool = True
    ) -> Quantity:
        def build(p: Problem) -> tuple:
            plain = all(not list(layer.children()) for layer in p.model.children())
            model = extend(p.model, use_converter=not plain)
            ((X, y),) = p.data
            return model, extend(deepcopy(p.loss)), X, y, p.params

        def ask(built: tuple) -> list:
            model, loss, X, y, params = built
            model.zero_grad()  # else gradients pile up
            with extensions(kind()):
                loss(model(X), y).backward()
            return finish([getattr(param, name) for param in params])

        return Quantity(build, ask, comparable=comparable)

    kfac = extension(KFACExtension, "kfac", comparable=False)
    return {
        HESSIAN: Quantity(lambda p: p, lambda p: product(p, ggn=False)),
        GGN: Quantity(lambda p: p, lambda p: product(p, ggn=True)),
        GRADIENTS: extension(BatchGrad, "grad_batch", comparable=False),  # of the mean
        NORMS: extension(
            BatchL2Grad, "batch_l2", lambda found: sum(found).sqrt(), comparable=False
        ),
        DIAGONAL: extension(DiagGGNExact, "diag_ggn_exact"),
        SCORES: extension(BatchGrad, "grad_batch", lambda g: scores(g, 32), comparable=False),
        EIGENPAIRS: Quantity(ggn_operator, largest),
        SOLVE: Quantity(lambda p: p, cg_solve),
        KFAC: kfac,
        TRAINING: Quantity(kfac.build, train, comparable=False),
        KFAC_TYPE2: extension(KFLR, "kflr", comparable=False),
    }


def opacus() -> Quantities:
    """Return the gradients of samples by opacus, for layers that it knows."""
    from opacus import GradSampleModule

    def ask(built: tuple) -> list[Tensor]:
        model, ((X, y),), params = built
        model.zero_grad()  # else gradients pile up
        F.cross_entropy(model(X), y, reduction="sum").backward()
        return [param.grad_sample for param in params]

    def build(p: Problem) -> tuple:
        for module in p.model.modules():  # gradients of samples exist in train mode only
            module.training = not isinstance(module, nn.BatchNorm2d)
        return GradSampleModule(p.model, loss_reduction="sum"), p.data, p.params

    return {
        GRADIENTS: Quantity(build, ask),
        SCORES: Quantity(build, lambda built: scores(ask(built), 32)),
    }


def nngeometry() -> Quantities:
    """Return exact Fisher matrices by nngeometry."""
    from nngeometry.layercollection import LayerCollection
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatDiag, PMatKFAC
    from torch.utils.data import DataLoader, TensorDataset

    def fisher(kind: type) -> Quantity:
        def build(p: Problem) -> tuple:
            ((X, y),) = p.data
            layers = LayerCollection()
            for module in p.model.modules():
                params = list(module.parameters(recurse=False))
                if params and params[0].requires_grad:
                    layers.add_layer_from_model(p.model, module)
            return p.model, DataLoader(TensorDataset(X, y), batch_size=len(X)), layers

        def ask(built: tuple) -> list:
            model, loader, layers = built
            device = next(model.parameters()).device
            FIM(model, loader, kind, device=device, layer_collection=layers)
            return []

        return Quantity(build, ask, comparable=False)

    return {KFAC_TYPE2: fisher(PMatKFAC), DIAGONAL: fisher(PMatDiag)}


class Package(NamedTuple):
    """Where to find a package, and what it computes. Without a distribution it is always there."""

    quantities: Callable[[], Quantities]
    distribution: str | None = None
    module: str | None = None


#: What the names of packages end with whose check at construction is switched off.
UNCHECKED = " unchecked"
PACKAGES = {
    "ours": Package(ours, module="curvlinops"),
    f"ours{UNCHECKED}": Package(partial(ours, check_deterministic=False)),
    "by hand": Package(by_hand),
    "curvlinops-for-pytorch": Package(incumbent, "curvlinops-for-pytorch", "curvlinops"),
    f"curvlinops-for-pytorch{UNCHECKED}": Package(
        partial(incumbent, check_deterministic=False), "curvlinops-for-pytorch"
    ),
    "backpack": Package(backpack, "backpack-for-pytorch", "backpack.extensions"),
    "opacus": Package(opacus, "opacus", "opacus"),
    "nngeometry": Package(nngeometry, "nngeometry", "nngeometry.metrics"),
}
