"""The same products by several libraries: ours, PyTorch by hand, and peers where installed.

Each function takes a problem and a number of columns and returns quantities: functions without
arguments that compute one of them. A process imports one library only, because several share the
import name `curvlinops`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from problems import Problem
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

Quantities = dict[str, Callable[[], object]]

HESSIAN, GGN, JACOBIAN = "Hessian-vector", "GGN-vector", "Jacobian-vector"
HESSIAN_COLUMNS, GGN_COLUMNS = "Hessian, {} columns", "GGN, {} columns"


def gradient(problem: Problem) -> Callable[[], object]:
    """Return the unit of all times: one gradient of the mean loss."""
    model, X, y = problem
    params = list(model.parameters())
    return lambda: torch.autograd.grad(F.cross_entropy(model(X), y), params)


def _vectors(problem: Problem, columns: int) -> tuple[Tensor, Tensor]:
    device, dim = problem[1].device, sum(p.numel() for p in problem[0].parameters())
    return torch.randn(dim, device=device), torch.randn(dim, columns, device=device)


def ours(problem: Problem, columns: int, cache: str) -> Quantities:
    """Return this package's products, with kept or with fresh graphs."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator, JacobianLinearOperator

    model, X, y = problem
    options = {"check_deterministic": False, "cache": cache}
    arguments = (list(model.parameters()), [(X, y)])
    H = HessianLinearOperator(model, nn.CrossEntropyLoss(), *arguments, **options)
    G = GGNLinearOperator(model, nn.CrossEntropyLoss(), *arguments, **options)
    J = JacobianLinearOperator(model, *arguments, **options)
    v, V = _vectors(problem, columns)
    return {
        HESSIAN: lambda: H @ v,
        GGN: lambda: G @ v,
        JACOBIAN: lambda: J @ v,
        HESSIAN_COLUMNS: lambda: H @ V,
        GGN_COLUMNS: lambda: G @ V,
    }


def first(problem: Problem, columns: int) -> Quantities:
    """Return products of which each builds its graph."""
    return ours(problem, columns, "none")


def repeated(problem: Problem, columns: int) -> Quantities:
    """Return products whose graphs are kept from the warm-up."""
    return ours(problem, columns, "graph")


def by_hand(problem: Problem, columns: int) -> Quantities:
    """Return products written with torch.func; several columns by vmap, four at a time."""
    from torch.func import functional_call, grad, jvp, vjp, vmap

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

    def for_columns(product: Callable) -> Callable:
        return vmap(product, in_dims=1, out_dims=-1, chunk_size=4)

    return {
        HESSIAN: lambda: hessian(v),
        GGN: lambda: ggn(v),
        JACOBIAN: lambda: jacobian(v),
        HESSIAN_COLUMNS: lambda: for_columns(hessian)(V),
        GGN_COLUMNS: lambda: for_columns(ggn)(V),
    }


def incumbent(problem: Problem, columns: int) -> Quantities:
    """Return the products of curvlinops-for-pytorch."""
    from curvlinops import GGNLinearOperator, HessianLinearOperator, JacobianLinearOperator

    model, X, y = problem
    params = list(model.parameters())
    v, V = _vectors(problem, columns)

    def of(build: Callable, x: Tensor) -> Callable[[], object]:
        A = build()

        def run() -> object:
            with sdpa_kernel(SDPBackend.MATH):
                return A @ x

        return run

    def hessian() -> object:
        options = {"check_deterministic": False}
        return HessianLinearOperator(model, nn.CrossEntropyLoss(), params, [(X, y)], **options)

    def ggn() -> object:
        options = {"check_deterministic": False}
        return GGNLinearOperator(model, nn.CrossEntropyLoss(), params, [(X, y)], **options)

    def jacobian() -> object:
        return JacobianLinearOperator(model, params, [(X, y)], check_deterministic=False)

    return {
        HESSIAN: of(hessian, v),
        GGN: of(ggn, v),
        JACOBIAN: of(jacobian, v),
        HESSIAN_COLUMNS: of(hessian, V),
        GGN_COLUMNS: of(ggn, V),
    }


def backpack(problem: Problem, columns: int) -> Quantities:
    """Return the matrix-free products of backpack-for-pytorch; it has no columns."""
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

    return {HESSIAN: hessian, GGN: ggn}


#: Name in the table -> how to build it. The first three run in this environment.
CONTENDERS: dict[str, Callable[[Problem, int], Quantities]] = {
    "first": first,
    "repeated": repeated,
    "torch.func": by_hand,
    "curvlinops-for-pytorch": incumbent,
    "backpack": backpack,
}
PEERS = {"curvlinops-for-pytorch": "curvlinops-for-pytorch", "backpack": "backpack-for-pytorch"}
