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
from scipy.sparse.linalg import eigsh
from torch import Tensor, nn

HESSIAN, GGN, FISHER = "Hessian", "GGN", "empirical Fisher"
HESSIAN_COLUMNS, GGN_COLUMNS = "Hessian, 16 columns", "GGN, 16 columns"
KFAC, KFAC_EMPIRICAL, KFAC_TYPE2 = "KFAC mc", "KFAC empirical", "KFAC type-2"
KFAC_PRODUCT, EKFAC = "KFAC product", "EKFAC and product"
#: Damping and product, from factors. Damping is large enough that rounding errors are small.
PLAIN, HEURISTIC, EXACT = (f"KFAC inverse {how}" for how in ("plain", "heuristic", "exact"))
DAMPING = 1e-2
GRADIENTS, NORMS, DIAGONAL = "gradients of samples", "norms of gradients", "GGN diagonal"
#: Inner products of gradients of samples with vectors, which may have matrices of rank 2.
SCORES, MANY_SCORES = "scores, 32 columns", "scores, 64 columns"
LOW_RANK_SCORES = "scores, 64 columns of rank 2"
EIGENPAIRS, TRACE = "GGN, 10 eigenpairs", "GGN, Hutch++ trace"
PAIRS, TOLERANCE, PRODUCTS = 10, 1e-3, 30


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


def ours(check_deterministic: bool = False) -> Quantities:
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

    def inverse(**options: bool) -> Callable[[Any], Any]:
        return lambda K: multiply(K.inverse(DAMPING, **options))

    def solve(G: Any) -> Tensor:
        b = torch.ones(G.shape[0], dtype=G.torch_dtype, device=G.device)
        return curvlinops.CGInverseLinearOperator(G.damped(0.1), rtol=1e-6) @ b

    def of_ggn(ask: Callable[[Any], Any], comparable: bool = True) -> Quantity:
        return Quantity(operator("GGN"), ask, comparable=comparable)

    def eigenvalues(G: Any) -> Tensor:
        return curvlinops.eigsh(G, min(PAIRS, G.shape[0]), "LA", tol=TOLERANCE, seed=0).eigenvalues

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
        EKFAC: Quantity(operator("EKFAC"), multiply, comparable=False),
        GRADIENTS: method(samples, "gradients"),
        NORMS: method(samples, "norms"),
        SCORES: Quantity(operator(samples), lambda A: multiply(A, 32)),
        MANY_SCORES: Quantity(operator(samples), lambda A: multiply(A, 64)),
        LOW_RANK_SCORES: Quantity(low_rank_scores, lambda scores: scores()),
        DIAGONAL: method(diagonal, "diagonal"),
        EIGENPAIRS: of_ggn(eigenvalues),
        TRACE: of_ggn(trace, comparable=False),
        # for comparisons of two versions
        "sampled Fisher": product("FisherMC"),
        "empirical Fisher by sample": product("EF", terms="sample"),
        "Jacobian": product("Jacobian"),
        "transposed Jacobian": product("TransposedJacobian"),
        "gradients, transposed product": Quantity(operator(samples), lambda A: multiply(A.T)),
        "GGN trace": method(diagonal, "trace"),
        "sampled GGN diagonal": method(diagonal, "diagonal", mc_samples=1),
        "GGN, CG": of_ggn(solve),
        "GGN, Hutchinson": of_ggn(lambda G: curvlinops.hutchinson_trace(G, 20, seed=0)),
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
        theta = {name: param.detach() for name, param in p.model.named_parameters()}
        ((X, y),) = p.data

        def loss(values: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
            z = functional_call(p.model, values, x.unsqueeze(0))
            return F.cross_entropy(z, target.unsqueeze(0), reduction="sum")

        return lambda: vmap(grad(loss), (None, 0, 0))(theta, X, y)

    class Factors:
        """KFAC of models of linear layers, with the bias as a column of the weight."""

        def __init__(self, p: Problem):
            ((self.X, _),), self.model = p.data, p.model
            if {type(m) for m in p.model.children()} - {nn.Linear, nn.ReLU, nn.Tanh}:
                raise NotImplementedError("Only linear layers by hand.")

        def __call__(self) -> list[tuple[Tensor, Tensor]]:
            x, uses = self.X, []
            for layer in self.model:
                z = layer(x)
                uses += [(x.detach(), z)] if isinstance(layer, nn.Linear) else []
                x = z
            y = torch.distributions.Categorical(logits=x.detach()).sample()
            loss = F.cross_entropy(x, y, reduction="sum")
            gradients = torch.autograd.grad(loss, [z for _, z in uses])
            inputs = [F.pad(a, (0, 1), value=1.0) for a, _ in uses]
            N = len(y)
            pairs = zip(inputs, gradients, strict=True)
            return [(a.T @ a / N, g.T @ g / N) for a, g in pairs]

    def product(kind: type[Hessian], *columns: int) -> Quantity:
        return Quantity(kind, lambda A: A(*columns), lambda A: A)

    def norms(rows: Callable[[], dict[str, Tensor]]) -> Tensor:
        return sum(row.flatten(1).square().sum(1) for row in rows().values()).sqrt()

    def scores(rows: Callable[[], dict[str, Tensor]], columns: int) -> Tensor:
        flattened = torch.cat([row.flatten(1) for row in rows().values()], 1)
        dim, device = flattened.shape[1], flattened.device
        return flattened @ vectors(dim, columns, dtype=torch.float32, device=device)

    return {
        HESSIAN: product(Hessian),
        GGN: product(GaussNewton),
        FISHER: product(EmpiricalFisher),
        HESSIAN_COLUMNS: product(Hessian, 16),
        GGN_COLUMNS: product(GaussNewton, 16),
        KFAC: Quantity(Factors, lambda K: K(), comparable=False),
        GRADIENTS: Quantity(samples, lambda rows: list(rows().values())),
        NORMS: Quantity(samples, norms),
        SCORES: Quantity(samples, lambda rows: scores(rows, 32)),
        MANY_SCORES: Quantity(samples, lambda rows: scores(rows, 64)),
    }


def incumbent() -> Quantities:
    """Return the quantities of curvlinops-for-pytorch."""
    import curvlinops

    def operator(kind: str, **options: Any) -> Callable[[Problem], Any]:
        def build(p: Problem) -> Any:
            arguments = (p.model, p.loss, p.params, p.data)
            more = options | {"num_data": sum(len(X) for X, _ in p.data)}
            if "KFAC" in kind:
                more["num_per_example_loss_terms"] = p.data[0][1][0].numel()
            cls = getattr(curvlinops, f"{kind}LinearOperator")
            return cls(*arguments, **more, check_deterministic=False)

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

    def inverse(**options: bool) -> Quantity:
        kind = curvlinops.KFACInverseLinearOperator
        return from_factors(lambda K: multiply(kind(K, damping=DAMPING, **options)))

    def eigenvalues(G: Any) -> np.ndarray:
        v0 = np.random.default_rng(0).standard_normal(G.shape[0], dtype=np.float32)
        return eigsh(G.to_scipy(), PAIRS, which="LA", tol=TOLERANCE, v0=v0)[0]

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
        EKFAC: Quantity(operator("EKFAC"), multiply, comparable=False),
        EIGENPAIRS: Quantity(operator("GGN"), eigenvalues),
        TRACE: Quantity(
            operator("GGN"), lambda G: curvlinops.hutchpp_trace(G, PRODUCTS), comparable=False
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

    def product(p: Problem, ggn: bool) -> object:
        ((X, y),), params = p.data, p.params
        dim = sum(param.numel() for param in params)
        v = vectors(dim, dtype=torch.float32, device=X.device)
        parts = v.split([param.numel() for param in params])
        v = [part.view_as(param) for part, param in zip(parts, params, strict=True)]
        output = p.model(X)
        loss = p.loss(output, y)
        if ggn:
            return ggn_vector_product(loss, output, p.model, v)
        return hessian_vector_product(loss, params, v)

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

    return {
        HESSIAN: Quantity(lambda p: p, lambda p: product(p, ggn=False)),
        GGN: Quantity(lambda p: p, lambda p: product(p, ggn=True)),
        GRADIENTS: extension(BatchGrad, "grad_batch", comparable=False),  # of the mean
        NORMS: extension(
            BatchL2Grad, "batch_l2", lambda found: sum(found).sqrt(), comparable=False
        ),
        DIAGONAL: extension(DiagGGNExact, "diag_ggn_exact"),
        KFAC: extension(KFACExtension, "kfac", comparable=False),
        KFAC_TYPE2: extension(KFLR, "kflr", comparable=False),
    }


def opacus() -> Quantities:
    """Return the gradients of samples by opacus, for layers that it knows."""
    from opacus import GradSampleModule

    def ask(built: tuple) -> list[Tensor]:
        model, ((X, y),) = built
        model.zero_grad()  # else gradients pile up
        F.cross_entropy(model(X), y, reduction="sum").backward()
        return [param.grad_sample for param in model.parameters()]

    def build(p: Problem) -> tuple:
        return GradSampleModule(p.model, loss_reduction="sum"), p.data

    return {GRADIENTS: Quantity(build, ask)}


def nngeometry() -> Quantities:
    """Return exact Fisher matrices by nngeometry."""
    from nngeometry.metrics import FIM
    from nngeometry.object import PMatDiag, PMatKFAC
    from torch.utils.data import DataLoader, TensorDataset

    def fisher(kind: type) -> Quantity:
        def build(p: Problem) -> tuple:
            ((X, y),) = p.data
            return p.model, DataLoader(TensorDataset(X, y), batch_size=len(X)), X.device

        def ask(built: tuple) -> list:
            model, loader, device = built
            FIM(model, loader, kind, device=device)
            return []

        return Quantity(build, ask, comparable=False)

    return {KFAC_TYPE2: fisher(PMatKFAC), DIAGONAL: fisher(PMatDiag)}


class Package(NamedTuple):
    """Where to find a package, and what it computes. Without a distribution it is always there."""

    quantities: Callable[[], Quantities]
    distribution: str | None = None
    module: str | None = None


PACKAGES = {
    "ours": Package(ours, module="curvlinops"),
    "checked": Package(partial(ours, check_deterministic=True)),
    "by hand": Package(by_hand),
    "curvlinops-for-pytorch": Package(incumbent, "curvlinops-for-pytorch", "curvlinops"),
    "backpack": Package(backpack, "backpack-for-pytorch", "backpack.extensions"),
    "opacus": Package(opacus, "opacus", "opacus"),
    "nngeometry": Package(nngeometry, "nngeometry", "nngeometry.metrics"),
}
