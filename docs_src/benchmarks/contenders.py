"""The same products by several libraries: ours, PyTorch by hand, and peers where installed.

Each function takes a problem and a number of columns and returns quantities: functions without
arguments that compute one of them. A process imports one library only, because several share the
import name `curvlinops`.
"""

from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F
from estimates import EIGENPAIRS_SCIPY, eigenpairs, eigenpairs_by_scipy, estimates
from problems import Problem
from scipy.sparse.linalg import LinearOperator
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Quantities = dict[str, Callable[[], object]]

#: Samples of neural tangent kernels: the Jacobians that `torch.func` forms must fit into memory.
_NTK_SAMPLES = 32

HESSIAN, GGN, JACOBIAN = "Hessian-vector", "GGN-vector", "Jacobian-vector"
FISHER = "Empirical-Fisher-vector"
DIAGONAL, TRACE = "GGN diagonal", "GGN trace, exact"
ROWS, MATRIX = "Gradients of samples", "Gradients of samples, one matrix"
NORMS, GRAM = "Norms of gradients", "Gram matrix of gradients"
NTK = f"Neural tangent kernel, {_NTK_SAMPLES} samples"
HESSIAN_COLUMNS, GGN_COLUMNS = "Hessian, {} columns", "GGN, {} columns"
KFAC, KFAC_REDUCE = "KFAC factors, sampled", "KFAC factors, sampled, reduce"
KFAC_TYPE2, EKFAC = "KFAC factors, exact loss Hessian", "EKFAC, first product"
KFAC_VECTOR, KFAC_INVERSE = "KFAC-vector", "KFAC inverse"
#: Construction and one product.
HESSIAN_NEW, GGN_NEW = "Hessian-vector, new operator", "GGN-vector, new operator"
KFAC_NEW = "KFAC factors, sampled, new operator"


def gradient(problem: Problem) -> Callable[[], object]:
    """Return the unit of all times: one gradient of the mean loss."""
    model, X, y = problem
    params = list(model.parameters())
    return lambda: torch.autograd.grad(F.cross_entropy(model(X), y), params)


def _vectors(problem: Problem, columns: int) -> tuple[Tensor, Tensor]:
    device, dim = problem[1].device, sum(p.numel() for p in problem[0].parameters())
    return torch.randn(dim, device=device), torch.randn(dim, columns, device=device)


#: The context in which operators keep graphs.
_SCOPE = ExitStack()


def ours(problem: Problem, columns: int, keeps: bool) -> Quantities:
    """Return this package's products, inside or outside of `linearized()`."""
    import curvlinops

    model, X, y = problem
    options = {"check_deterministic": False, "cache": 64 * 2**30 if keeps else "none"}
    arguments = (list(model.parameters()), [(X, y)])
    with_loss = (model, nn.CrossEntropyLoss(), *arguments)
    H = curvlinops.HessianLinearOperator(*with_loss, **options)
    G = curvlinops.GGNLinearOperator(*with_loss, **options)
    E = curvlinops.EFLinearOperator(*with_loss, terms="sample", **options)
    J = curvlinops.JacobianLinearOperator(model, *arguments, **options)
    rows = curvlinops.PerSampleGradientLinearOperator(*with_loss, **options)
    v, V = _vectors(problem, columns)
    quantities = {
        HESSIAN: lambda: H @ v,
        GGN: lambda: G @ v,
        JACOBIAN: lambda: J @ v,
        FISHER: lambda: E @ v,
        HESSIAN_COLUMNS: lambda: H @ V,
        GGN_COLUMNS: lambda: G @ V,
    }
    if not keeps:
        quantities |= {
            EIGENPAIRS_SCIPY.format("GGN"): eigenpairs_by_scipy(G),
            ROWS: rows.gradients,
            MATRIX: rows.dense,
            NORMS: rows.norms,
            GRAM: rows.gram,
            HESSIAN_NEW: lambda: curvlinops.HessianLinearOperator(*with_loss, **options) @ v,
            GGN_NEW: lambda: curvlinops.GGNLinearOperator(*with_loss, **options) @ v,
        }
        if y.ndim == 1:
            D = curvlinops.GGNDiagonalLinearOperator(*with_loss, **options)
            few = [(X[:_NTK_SAMPLES], y[:_NTK_SAMPLES])]
            J = curvlinops.JacobianLinearOperator(model, arguments[0], few, **options)
            quantities |= {DIAGONAL: D.diagonal, TRACE: D.trace, NTK: J.gram}
        return quantities | _factored(curvlinops, with_loss, options, v)
    # solvers begin without graphs
    solved = {
        "GGN": curvlinops.GGNLinearOperator(*with_loss, **options),
        "Hessian": curvlinops.HessianLinearOperator(*with_loss, **options),
    }
    for name, A in solved.items():
        quantities |= eigenpairs(curvlinops, name, A)
    _SCOPE.close()
    for A in (H, G, E, J):
        _SCOPE.enter_context(A.linearized())
    return quantities | estimates(curvlinops, solved["GGN"], problem)


def _factored(curvlinops: ModuleType, arguments: tuple, options: dict, v: Tensor) -> Quantities:
    """Return the quantities of KFAC and EKFAC, by curvlinops or by curvlinops-for-pytorch."""

    def factors(**kwargs: str) -> Callable[[], object]:
        K = curvlinops.KFACLinearOperator(*arguments, **kwargs, **options)
        return K.compute_kronecker_factors

    K = curvlinops.KFACLinearOperator(*arguments, **options)
    damped = {"damping": 1e-3}
    quantities = {
        KFAC: factors(),
        KFAC_REDUCE: factors(kfac_approx="reduce"),
        KFAC_VECTOR: lambda: K @ v,
        KFAC_INVERSE: lambda: curvlinops.KFACInverseLinearOperator(K, **damped) @ v,
        KFAC_NEW: lambda: factors()(),
    }
    if arguments[3][0][1].ndim == 1:  # one term for each sample
        quantities |= {
            KFAC_TYPE2: factors(fisher_type="type-2"),
            EKFAC: lambda: curvlinops.EKFACLinearOperator(*arguments, **options) @ v,
        }
    return quantities


def first(problem: Problem, columns: int) -> Quantities:
    """Return products outside of `linearized()`, which build their graphs."""
    return ours(problem, columns, keeps=False)


def repeated(problem: Problem, columns: int) -> Quantities:
    """Return products inside of `linearized()`, which use the graphs of the warm-up."""
    return ours(problem, columns, keeps=True)


def by_hand(problem: Problem, columns: int) -> Quantities:
    """Return products written with torch.func; several columns by vmap, four at a time."""
    from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

    model, X, y = problem
    theta = {name: param.detach() for name, param in model.named_parameters()}
    v, V = _vectors(problem, columns)
    sizes = [value.numel() for value in theta.values()]

    def split(flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(sizes)
        return {n: part.view_as(theta[n]) for n, part in zip(theta, parts, strict=True)}

    def output(values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, X)

    def loss(z: Tensor) -> Tensor:
        return F.cross_entropy(z, y)

    def hessian(flat: Tensor) -> dict[str, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(grad(lambda values: loss(output(values))), (theta,), (split(flat),))[1]

    def jacobian(flat: Tensor) -> tuple[Tensor, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            return jvp(output, (theta,), (split(flat),))

    def ggn(flat: Tensor) -> dict[str, Tensor]:
        z, Jv = jacobian(flat)
        HJv = jvp(grad(loss), (z,), (Jv,))[1]
        with sdpa_kernel(SDPBackend.MATH):
            return vjp(output, theta)[1](HJv)[0]

    def losses(values: dict[str, Tensor]) -> Tensor:
        terms = F.cross_entropy(output(values), y, reduction="none")
        return terms.flatten(1).sum(1) if terms.ndim > 1 else terms

    def fisher(flat: Tensor) -> dict[str, Tensor]:
        with sdpa_kernel(SDPBackend.MATH):
            inner = jvp(losses, (theta,), (split(flat),))[1]
            return vjp(losses, theta)[1](inner)[0]

    def loss_of_one(values: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
        z = functional_call(model, values, x.unsqueeze(0))
        return F.cross_entropy(z, target.unsqueeze(0), reduction="sum")

    def rows() -> dict[str, Tensor]:
        return vmap(grad(loss_of_one), (None, 0, 0))(theta, X, y)

    def matrix() -> Tensor:
        return torch.cat([row.flatten(1) for row in rows().values()], dim=1)

    def norms() -> Tensor:
        return sum(row.flatten(1).square().sum(1) for row in rows().values()).sqrt()

    def gram() -> Tensor:
        return sum(row.flatten(1) @ row.flatten(1).T for row in rows().values())

    def output_of_one(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, x.unsqueeze(0)).squeeze(0)

    def ntk() -> Tensor:
        J = vmap(jacrev(output_of_one), (None, 0))(theta, X[:_NTK_SAMPLES])
        flat = [part.flatten(0, 1).flatten(1) for part in J.values()]
        return sum(part @ part.T for part in flat)

    def for_columns(product: Callable) -> Callable:
        return vmap(product, in_dims=1, out_dims=-1, chunk_size=4)

    quantities = {} if y.ndim > 1 else {NTK: ntk}
    return quantities | {
        HESSIAN: lambda: hessian(v),
        GGN: lambda: ggn(v),
        JACOBIAN: lambda: jacobian(v),
        FISHER: lambda: fisher(v),
        ROWS: rows,
        MATRIX: matrix,
        NORMS: norms,
        GRAM: gram,
        HESSIAN_COLUMNS: lambda: for_columns(hessian)(V),
        GGN_COLUMNS: lambda: for_columns(ggn)(V),
    }


def incumbent(problem: Problem, columns: int) -> Quantities:
    """Return the products of curvlinops-for-pytorch."""
    import curvlinops
    from curvlinops import GGNLinearOperator, HessianLinearOperator, JacobianLinearOperator

    model, X, y = problem
    params = list(model.parameters())
    v, V = _vectors(problem, columns)

    def with_derivatives(run: Callable[[], object]) -> Callable[[], object]:
        def inside() -> object:
            with sdpa_kernel(SDPBackend.MATH):
                return run()

        return inside

    def of(build: Callable, x: Tensor) -> Callable[[], object]:
        A = build()
        return with_derivatives(lambda: A @ x)

    def hessian() -> object:
        options = {"check_deterministic": False}
        return HessianLinearOperator(model, nn.CrossEntropyLoss(), params, [(X, y)], **options)

    def ggn() -> object:
        options = {"check_deterministic": False}
        return GGNLinearOperator(model, nn.CrossEntropyLoss(), params, [(X, y)], **options)

    def jacobian() -> object:
        return JacobianLinearOperator(model, params, [(X, y)], check_deterministic=False)

    quantities = {
        HESSIAN: of(hessian, v),
        GGN: of(ggn, v),
        HESSIAN_NEW: lambda: of(hessian, v)(),
        GGN_NEW: lambda: of(ggn, v)(),
        JACOBIAN: of(jacobian, v),
        HESSIAN_COLUMNS: of(hessian, V),
        GGN_COLUMNS: of(ggn, V),
    }
    for name, build in {"GGN": ggn, "Hessian": hessian}.items():
        A = build().to_scipy()

        def multiply(x: np.ndarray, A: LinearOperator = A) -> np.ndarray:
            with sdpa_kernel(SDPBackend.MATH):
                return A @ x

        differentiable = LinearOperator(A.shape, multiply, dtype=A.dtype)
        quantities[EIGENPAIRS_SCIPY.format(name)] = eigenpairs_by_scipy(differentiable)
    found = estimates(curvlinops, ggn(), problem)
    quantities |= {row: with_derivatives(run) for row, run in found.items()}
    if not isinstance(model, nn.Sequential):  # other layers are not supported
        return quantities
    terms = 1 if y.ndim == 1 else y[0].numel()
    options = {
        "check_deterministic": False,
        "num_data": len(X),
        "num_per_example_loss_terms": terms,
    }
    arguments = (model, nn.CrossEntropyLoss(), params, [(X, y)])
    return quantities | _factored(curvlinops, arguments, options, v)


def backpack(problem: Problem, columns: int) -> Quantities:
    """Return the products and extensions of backpack-for-pytorch; it has no columns."""
    from backpack import backpack as extensions
    from backpack import extend
    from backpack.extensions import BatchGrad, BatchL2Grad, DiagGGNExact
    from backpack.hessianfree.ggnvp import ggn_vector_product
    from backpack.hessianfree.hvp import hessian_vector_product

    model, X, y = problem
    params = list(model.parameters())
    v = [torch.randn_like(p) for p in params]

    def hessian() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            return hessian_vector_product(F.cross_entropy(model(X), y), params, v)

    def ggn() -> object:
        with sdpa_kernel(SDPBackend.MATH):
            output = model(X)
            return ggn_vector_product(F.cross_entropy(output, y), output, model, v)

    quantities = {HESSIAN: hessian, GGN: ggn}
    if isinstance(model, nn.Sequential):
        extended, loss = extend(deepcopy(model)), extend(nn.CrossEntropyLoss())

        def run(extension: object) -> None:
            with extensions(extension):
                loss(extended(X), y).backward()

        quantities |= {
            ROWS: lambda: run(BatchGrad()),
            NORMS: lambda: run(BatchL2Grad()),
            DIAGONAL: lambda: run(DiagGGNExact()),
        }
    return quantities


def opacus(problem: Problem, columns: int) -> Quantities:
    """Return the gradients of samples by opacus, for layers that it knows."""
    from opacus import GradSampleModule

    model, X, y = problem
    if not isinstance(model, nn.Sequential):  # parameters outside of layers are not supported
        return {}
    wrapped = GradSampleModule(deepcopy(model), loss_reduction="sum")

    def rows() -> None:
        wrapped.zero_grad()  # else gradients pile up
        F.cross_entropy(wrapped(X), y, reduction="sum").backward()

    return {ROWS: rows}


#: Name in the table -> how to build it. Those that are not ``PEERS`` run in this environment.
CONTENDERS: dict[str, Callable[[Problem, int], Quantities]] = {
    "first": first,
    "repeated": repeated,
    "torch.func": by_hand,
    "curvlinops-for-pytorch": incumbent,
    "backpack": backpack,
    "opacus": opacus,
}
PEERS = {
    "curvlinops-for-pytorch": "curvlinops-for-pytorch",
    "backpack": "backpack-for-pytorch",
    "opacus": "opacus",
}
