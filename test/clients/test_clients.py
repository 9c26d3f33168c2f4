"""Published programs: the names and kinds of arguments that they use, in every calling style."""

import numpy as np
import pytest
import reference
import scipy.linalg
import scipy.sparse.linalg as sla
import torch
from problems import Problem
from scipy.sparse import csr_array
from torch import nn

from curvlinops import (
    CGInverseLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    IdentityLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    SubmatrixLinearOperator,
    TransposedJacobianLinearOperator,
    hutchinson_trace,
    lanczos_approximate_spectrum,
)

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
PARAMS = list(MODEL.parameters())
ONES = [torch.ones(p.shape) for p in PARAMS]
DATA = [(torch.randn(n, 4), torch.randn(n, 2)) for n in (5, 2)]
H = HessianLinearOperator(MODEL, nn.MSELoss(), PARAMS, DATA)
G = GGNLinearOperator(MODEL, nn.MSELoss(), PARAMS, DATA)
J = JacobianLinearOperator(MODEL, PARAMS, DATA)
D, ROWS = H.shape[0], J.shape[0]


PROBLEM = Problem(MODEL, nn.MSELoss(), PARAMS, DATA, mc=True)
h, j = reference.hessian(PROBLEM).numpy(), reference.jacobian(PROBLEM).numpy()
RNG = np.random.default_rng(0)
x, X, a = RNG.standard_normal(D), RNG.standard_normal((D, 3)), RNG.standard_normal((D, D))
A = sla.aslinearoperator(a)
LARGEST = np.sort(sorted(np.linalg.eigvalsh(h), key=abs)[-3:])
M = G + 0.1 * IdentityLinearOperator(G.space)


PRODUCTS = {
    "np.matrix": (lambda: H @ np.matrix(x).T, h @ x[:, None]),
    "rows of numbers": (lambda: H @ list(X), h @ X),
    "call": (lambda: H(x), h @ x),
    "cast": (lambda: H.to_scipy(np.float64) @ x, h @ x),
    "cast adjoint": (lambda: J.to_scipy(dtype=np.float64).T @ np.ones(ROWS), j.T @ np.ones(ROWS)),
    "sparse": (lambda: (sla.aslinearoperator(csr_array(a)) @ H) @ x, a @ h @ x),
    "eigsh": (lambda: sla.eigsh(H, k=3, which="LM")[0], LARGEST),
    "eigs": (lambda: np.sort(sla.eigs(H, k=3)[0].real), LARGEST),
    "svds": (lambda: np.sort(sla.svds(J, k=3)[1]), np.sort(np.linalg.svd(j)[1])[-3:]),
    "lobpcg": (lambda: sla.lobpcg(H, X, tol=1e-5, maxiter=300)[0][0], np.linalg.eigvalsh(h)[-1]),
    "expm_multiply": (
        lambda: sla.expm_multiply(H, x, traceA=np.trace(h)),
        scipy.linalg.expm(h) @ x,
    ),
    "onenormest": (lambda: sla.onenormest(H, t=D), np.abs(h).sum(0).max()),
    "lsqr": (
        lambda: sla.lsqr(J, j @ x, atol=1e-8, btol=1e-8, iter_lim=500)[0],
        np.linalg.pinv(j, rcond=1e-5) @ j @ x,
    ),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass")
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str):
    compute, expected = PRODUCTS[name]
    found = np.asarray(compute())
    assert found.shape == np.shape(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * np.abs(h).max())


@pytest.mark.filterwarnings("ignore:.*called without specifying .atol.")  # before SciPy 1.14
@pytest.mark.parametrize("solver", ["cg", "gmres", "minres", "bicgstab", "lgmres"])
def test_solvers(solver: str):
    matrix = M.to_scipy(np.float64)
    found, info = getattr(sla, solver)(matrix, x, rtol=3e-7, maxiter=2000)
    assert info == 0
    np.testing.assert_allclose(M @ found, x, atol=1e-4)


@pytest.mark.parametrize("columns", [(), (3,), (0,)])
def test_lists_for_outputs(columns: tuple[int, ...]):
    """In lists, a Jacobian's product has the shape of the outputs."""
    j32, flat = torch.from_numpy(j).float(), torch.randn(D, *columns)
    u = torch.randn(ROWS // 2, 2, *columns)
    (found,) = J @ list(J.space.split(flat).values())
    torch.testing.assert_close(found, (j32 @ flat).reshape(u.shape))
    expected = J.space.split(j32.T @ u.reshape(ROWS, *columns))
    for operator in (J.T, TransposedJacobianLinearOperator(MODEL, PARAMS, DATA)):
        torch.testing.assert_close(operator @ [u], list(expected.values()))
        assert "Jacobian.T" in repr(operator)


def test_lists_of_parameters():
    expected = [part.detach() for part in G @ PARAMS]
    for columns in (G @ nn.ParameterList(PARAMS), G.matvec(nn.ParameterList(PARAMS))):
        torch.testing.assert_close([part.detach() for part in columns], expected)
    with torch.no_grad():  # names with dots are none of these dictionaries'
        K = GGNLinearOperator(lambda p, X: X @ p["w"], nn.MSELoss(), {"w": torch.zeros(4, 2)}, DATA)
        found = K @ nn.ParameterDict({"w": torch.ones(4, 2)})
    torch.testing.assert_close(found, K @ {"w": torch.ones(4, 2)})
    (gradient,) = torch.autograd.grad(sum(p.sum() for p in G @ nn.ParameterList(PARAMS)), PARAMS[0])
    torch.testing.assert_close(gradient, (G @ [torch.ones_like(p) for p in PARAMS])[0])


def test_lists_of_plain_vectors():
    part = SubmatrixLinearOperator(H, [2, 0, 5], [1, 3])
    (found,) = part @ [torch.ones(2)]
    torch.testing.assert_close(found, part @ torch.ones(2))
    (found,) = part.T @ [torch.ones(3, 4)]
    torch.testing.assert_close(found, part.T @ torch.ones(3, 4))


def test_counts_are_integers_of_any_library():
    expected = hutchinson_trace(H, 6, "gaussian", seed=0)
    grid, density = lanczos_approximate_spectrum(H, 4, 50, 2, seed=0)
    for integer in (np.int64, torch.tensor):
        found = hutchinson_trace(H, integer(6), distribution="normal", seed=0)
        torch.testing.assert_close(found, expected)
        numbers = [integer(number) for number in (4, 50, 2)]
        found = lanczos_approximate_spectrum(H, *numbers, seed=0)
        torch.testing.assert_close(found, (grid, density))


@pytest.mark.parametrize(
    "kind", [GGNLinearOperator, GGNDiagonalLinearOperator, KFACLinearOperator, EKFACLinearOperator]
)
def test_integers_of_numpy(kind: type):
    shared = (MODEL, nn.MSELoss(), PARAMS, DATA)
    expected = kind(*shared, mc_samples=3, seed=5) @ x
    found = kind(*shared, mc_samples=np.int64(3), seed=np.int32(5)) @ x
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "use, error, match",
    [
        (lambda: np.dot(H, x), TypeError, r"cannot convert .* to an array.* A @ x"),
        (lambda: x.dot(H), TypeError, r"cannot convert .* to an array.* A @ x"),
        (lambda: np.asarray(H), TypeError, r"cannot convert .* to an array.*A.to_dense\(\)"),
        (lambda: np.matmul(H, x), TypeError, "ufunc"),
        (lambda: csr_array(a) @ H, TypeError, "aslinearoperator"),
        (lambda: H @ csr_array(a), TypeError, "aslinearoperator"),
        (lambda: H @ [None, *PARAMS[1:]], TypeError, "'0.weight' is a NoneType, .*pass zeros"),
        (lambda: H @ [*ONES[:3], None], TypeError, "'2.bias' is a NoneType, .*pass zeros"),
        (lambda: H @ [*ONES[:3], 1.0], TypeError, "'2.bias' is a float, expected a tensor"),
        (lambda: H.matvec(MODEL.parameters()), TypeError, "a generator. Pass a numpy array"),
        (lambda: H @ MODEL.parameters(), TypeError, "a generator. Pass a numpy array"),
        (lambda: H + np.eye(D), TypeError, "KroneckerProductLinearOperator"),
        (lambda: np.eye(D) + H, TypeError, "KroneckerProductLinearOperator"),
        (lambda: H - torch.eye(D), TypeError, "KroneckerProductLinearOperator"),
        (lambda: J.T @ [torch.ones(ROWS)], ValueError, r"shape \[14\], expected \[7, 2\]"),
        (lambda: CGInverseLinearOperator(M, max_iter=9), TypeError, "Did you mean 'maxiter'"),
        (lambda: CGInverseLinearOperator(M, rtoll=1), TypeError, "'rtoll'. Did you mean 'rtol'"),
    ],
)
def test_errors(use, error: type[Exception], match: str):
    with pytest.raises(error, match=match):
        use()
