"""Products as a part of autograd's graphs: derivatives with respect to the vectors."""

from collections.abc import Callable

import numpy as np
import problems
import pytest
import scipy.sparse.linalg as sla
import torch
from contract import ALL, matrix, vectors
from contract import error as distance
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_leaves, tree_map

import curvlinops as C
from curvlinops import TorchLinearOperator

pytestmark = pytest.mark.extensive

PROBLEM = "mlp-ce-all-mean"


def error(found: Tensor, expected: Tensor) -> float:
    """Return the relative error of numbers that may have a graph."""
    return distance(found.detach(), expected.detach())


def built(case: str, **options) -> TorchLinearOperator:
    """Return one of the operators on data."""
    return ALL[case].build(problems.make(PROBLEM), check_deterministic=False, **options)


def _ggn() -> TorchLinearOperator:
    G = built("ggn")
    return G + C.IdentityLinearOperator(G.space)


def _submatrix() -> TorchLinearOperator:
    J = built("jacobian")
    return C.SubmatrixLinearOperator(J, [4, 1, 2], [J.space.names[0]])


def _kronecker() -> TorchLinearOperator:
    return C.KroneckerProductLinearOperator(torch.randn(2, 2).double(), torch.randn(3, 3).double())


SHARP = {"rtol": 1e-13}
OTHERS: dict[str, Callable[[], TorchLinearOperator]] = {
    "sum": lambda: built("hessian") + 2 * built("ggn"),
    "product": lambda: built("jacobian") @ built("hessian"),
    "power": lambda: built("hessian") ** 2,
    "adjoint": lambda: built("gradients").T,
    "submatrix": _submatrix,
    "kfac inverse": lambda: built("kfac").inverse(damping=1e-2),
    "ekfac inverse": lambda: built("ekfac").inverse(damping=1e-2),
    "cg": lambda: C.CGInverseLinearOperator(_ggn(), **SHARP),
    "minres": lambda: C.MINRESInverseLinearOperator(_ggn(), **SHARP),
    "lsmr": lambda: C.LSMRInverseLinearOperator(_ggn(), atol=1e-13, btol=1e-13),
    "neumann": lambda: C.NeumannInverseLinearOperator(_ggn(), num_terms=5, scale=0.1, rtol=1),
    "identity": lambda: 2.0 * C.IdentityLinearOperator(built("ggn").space),
    "diagonal": lambda: C.DiagonalLinearOperator(torch.arange(5.0).double()),
    "kronecker": _kronecker,
    "kronecker adjoint": lambda: _kronecker().T,
    "eigh": lambda: C.EighDecomposedLinearOperator(
        torch.arange(3.0).double(), torch.linalg.qr(torch.randn(3, 3).double())[0]
    ),
    "blocks": lambda: built("kfac").structure,
}
MAKERS = {case: lambda case=case: built(case) for case in ALL} | OTHERS


@pytest.mark.parametrize("adjoint", [False, True])
@pytest.mark.parametrize("kind", MAKERS)
def test_first_and_second_derivatives(kind: str, adjoint: bool):
    A = MAKERS[kind]()
    x, M = vectors(A, 2, rows=adjoint).requires_grad_(), matrix(A)
    M = M.T if adjoint else M
    for out in (A.T @ x, (x.T @ A).T, A.rmatmat(x)) if adjoint else (A @ x,):
        assert error(out, M @ x) <= 1e-9
        (gradient,) = torch.autograd.grad(out.pow(3).sum(), x, create_graph=True)
        expected = 3 * M.T @ (M @ x).square()
        assert error(gradient, expected) <= 1e-9
        (second,) = torch.autograd.grad(gradient.square().sum(), x)
        (truth,) = torch.autograd.grad(expected.square().sum(), x)
        assert error(second, truth) <= 1e-8


@pytest.mark.parametrize("columns", [(), (2,)])
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("kind", ["hessian", "kfac", "jacobian", "gradients", "kfac inverse", "cg"])
def test_of_parameter_shaped_vectors(kind: str, named: bool, columns: tuple[int, ...]):
    A = MAKERS[kind]()
    M, x = matrix(A), vectors(A, *columns)
    values = {n: v.clone().requires_grad_() for n, v in A.space.split(x).items()}
    given = values if named else list(values.values())
    out = A @ given
    torch.testing.assert_close(out, A @ tree_map(Tensor.detach, given))  # of the same kind
    loss = sum(part.pow(3).sum() for part in tree_leaves(out))
    found = dict(zip(values, torch.autograd.grad(loss, values.values()), strict=True))
    assert error(A.space.join(found), 3 * M.T @ (M @ x).square()) <= 1e-9


def test_quadratic_penalty_of_the_parameters():
    p = problems.make(PROBLEM)
    K = built("ekfac")
    flat = torch.cat([param.flatten() for param in p.params])
    d = flat - flat.detach() - torch.randn(len(flat)).double()
    found = torch.autograd.grad(d @ (K @ d) / 2, p.params)
    assert error(torch.cat([part.flatten() for part in found]), matrix(K) @ d) <= 1e-10


def test_dtypes_of_vectors_are_kept():
    A = _kronecker()
    x = torch.randn(6, requires_grad=True)
    (gradient,) = torch.autograd.grad((A @ x).sum(), x)
    assert gradient.dtype == torch.float32
    assert error(gradient, matrix(A).sum(0)) <= 1e-6


def test_results_may_be_changed_in_place():
    K = built("kfac")
    x = vectors(K).requires_grad_()
    out = K @ x
    out.mul_(2.0)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    assert error(gradient, 2 * matrix(K).sum(0)) <= 1e-10


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["hessian", "ggn", "jacobian", "kfac"])
def test_on_gpu(case: str):
    """Backward passes run in threads of their own there; vectors may lie on the CPU."""
    A = built(case).to_device("cuda")
    M, x = matrix(A).cpu(), vectors(A, 2).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        out = A @ x
        (gradient,) = torch.autograd.grad(out.pow(3).sum(), x)
    assert out.device.type == "cuda" and gradient.device.type == "cpu"
    assert error(gradient, 3 * M.T @ (M @ x).square()) <= 1e-8


def test_without_an_adjoint():
    A = sla.LinearOperator((3, 3), matvec=lambda x: 2.0 * x, dtype=np.float64)
    S = C.SubmatrixLinearOperator(A, [0, 1], [0, 1])
    x = torch.ones(2, dtype=torch.float64, requires_grad=True)
    out = S @ x
    with pytest.raises(NotImplementedError, match="product with the adjoint"):
        out.sum().backward()


# --- what else requires gradients


def _given(p: Tensor) -> dict[str, Callable]:
    K, A, one = built("kfac"), torch.diag(torch.tensor([1.0, 2.0, 0.5])), torch.ones(3)
    return {
        "factor": lambda: p * K,
        "divisor": lambda: K / p,
        "multiple of the identity": lambda: K + p * C.IdentityLinearOperator(K.space),
        "identity": lambda: C.IdentityLinearOperator(3, p),
        "structured damping": lambda: K.structure.inverse(damping=p),
        "diagonal": lambda: C.DiagonalLinearOperator(p * one),
        "kronecker": lambda: C.KroneckerProductLinearOperator(p * torch.eye(2), torch.eye(3)),
        "eigenvectors": lambda: C.EighDecomposedLinearOperator(one, p * torch.eye(3)),
        "cg damping": lambda: C.CGInverseLinearOperator(A, damping=p),
        "solve": lambda: C.CGInverseLinearOperator(A).solve(p * one),
        "lsmr damping": lambda: C.LSMRInverseLinearOperator(A, damp=p),
        "neumann scale": lambda: C.NeumannInverseLinearOperator(A, scale=p),
        "matrix": lambda: C.eigsh(p * A, k=1),
    }


@pytest.mark.parametrize("kind", _given(torch.tensor(1.0)))
def test_other_arguments_have_no_graph(kind: str):
    p = torch.tensor(0.1, requires_grad=True)
    with pytest.raises(ValueError, match=r"requires gradients, .*detach"):
        _given(p)[kind]()
    with torch.no_grad():
        _given(p)[kind]()


@pytest.mark.parametrize("kind", ["hessian", "kfac", "cg"])
def test_transforms_are_refused(kind: str):
    A = MAKERS[kind]()
    x, array = vectors(A), vectors(A).numpy()

    def energy(v: Tensor) -> Tensor:
        return (A @ v).square().sum()

    for use in (
        lambda: torch.func.vmap(lambda v: A @ v)(x[None]),
        lambda: torch.func.vmap(lambda v: A @ array)(x[None]),
        lambda: torch.func.grad(energy)(x),
        lambda: torch.func.jvp(energy, (x,), (x,)),
        lambda: torch.func.jvp(lambda v: v @ C.CGInverseLinearOperator(A).solve(x).x, (x,), (x,)),
    ):
        with pytest.raises(RuntimeError, match="inside of functions that torch.func transforms"):
            use()


def test_forward_mode_is_refused():
    A = built("hessian")
    x = vectors(A)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        A @ forward_ad.make_dual(x, x)
