"""Inverses by iterations: against dense linear algebra on spectra of all kinds, and scipy."""

import contextlib

import matrices
import numpy as np
import problems
import pytest
import scipy.sparse.linalg as sla
import torch
from contract import CASES

from curvlinops import (
    CGInverseLinearOperator,
    ConvergenceError,
    ConvergenceWarning,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NegativeCurvatureError,
    NeumannInverseLinearOperator,
    SubmatrixLinearOperator,
    TorchLinearOperator,
    dottest,
    xtrace,
)

CG, MINRES = CGInverseLinearOperator, MINRESInverseLinearOperator
LSMR, NEUMANN = LSMRInverseLinearOperator, NeumannInverseLinearOperator
POSITIVE = ["clustered", "multiple", "identity", "positive"]
SYSTEMS = [(CG, name) for name in [*POSITIVE, "power", "singular"]]
SYSTEMS += [(MINRES, name) for name in [*POSITIVE, "power", "singular", "indefinite", "negative"]]
RNG = np.random.default_rng(0)
each_system = pytest.mark.parametrize("inverse, name", SYSTEMS)
each_inverse = pytest.mark.parametrize("inverse", [CG, MINRES])


def system(name: str, dtype: type = np.float64, columns: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return a matrix and right-hand sides of different difficulty, one of them zero."""
    A = matrices.large(name, dtype)
    B = np.random.default_rng(0).standard_normal((len(A), columns)).astype(dtype)
    B = A @ B if name == "singular" else B
    B[:, 1] = 0
    B[:, -1] = 1e3 * A[:, 0]
    return A, B


def true_residuals(A: np.ndarray, X: np.ndarray, B: np.ndarray) -> np.ndarray:
    return np.linalg.norm(B.astype(float) - A.astype(float) @ np.asarray(X, float), axis=0)


@pytest.mark.parametrize(
    "dtype, rtol", [(np.float64, 1e-3), (np.float64, 1e-10), (np.float32, 1e-3)]
)
@each_system
def test_true_residuals(inverse: type, name: str, dtype: type, rtol: float):
    A, B = system(name, dtype)
    X, residuals, iterations, converged, _ = inverse(A, rtol=rtol).solve(B)
    exact = true_residuals(A, X, B)
    assert X.dtype == dtype and (exact <= 1.01 * rtol * np.linalg.norm(B, axis=0)).all()
    np.testing.assert_allclose(residuals, exact, rtol=1e-2, atol=1e3 * np.finfo(dtype).eps)
    assert bool(converged.all()) and iterations[1] == 0 and not X[:, 1].any()
    if name not in ("singular", "power"):
        np.testing.assert_allclose(X, np.linalg.solve(A, B), rtol=0, atol=1e5 * rtol)


@pytest.mark.parametrize("scales", [(1e-18, 1.0), (1e18, 1.0), (1.0, 1e-25)])
@each_inverse
def test_squares_that_are_no_numbers_of_single_precision(inverse: type, scales: tuple):
    A, B = system("positive", np.float32)
    expected = np.linalg.solve(A.astype(float), B.astype(float)) * (scales[1] / scales[0])
    found = inverse(np.float32(scales[0]) * A) @ (np.float32(scales[1]) * B)
    np.testing.assert_allclose(found, expected, rtol=0, atol=5e-3 * np.abs(expected).max())


@each_system
def test_no_more_iterations_than_scipy(inverse: type, name: str):
    A, B = system(name)
    b, count = B[:, 0], 0

    def callback(x):
        nonlocal count
        count += 1
        # scipy's minres stops by estimates; what counts is the residual
        if np.linalg.norm(b - A @ x) <= 1e-6 * np.linalg.norm(b):
            raise StopIteration

    theirs = sla.cg if inverse is CG else sla.minres
    with contextlib.suppress(StopIteration):
        theirs(A, b, rtol=1e-14, callback=callback, maxiter=5000)
    _, _, iterations, converged, _ = inverse(A, rtol=1e-6).solve(B)
    assert bool(converged.all()) and iterations[0] <= 1.02 * count + 2


@each_inverse
def test_tolerances_and_start(inverse: type):
    A, B = system("positive")
    assert float(inverse(A, rtol=0.0, atol=1e-3).solve(B).residuals.max()) <= 1e-3
    both = inverse(A, rtol=1e-8, atol=1e6).solve(B)
    assert not both.x.any() and int(both.iterations.max()) == 0
    solved = inverse(A, rtol=1e-8).solve(B)
    again = inverse(A, rtol=1e-8).solve(B, x0=solved.x)
    assert int(again.iterations.max()) == 0 and np.array_equal(again.x, solved.x)
    x0 = np.linalg.solve(A, B[:, 0])
    started = inverse(A, rtol=1e-8, x0=x0).solve(B)
    assert started.iterations[:2].tolist() == [0, 0] and not started.x[:, 1].any()


@each_inverse
def test_rounding_does_not_hide_the_true_residual(inverse: type):
    """Recursions converge to zero, whatever the true residual does."""
    A, B = system("power", np.float32)
    with pytest.warns(ConvergenceWarning, match=r"\|\|b - A x\|\|") as record:
        X, residuals, _, converged, _ = inverse(A, rtol=1e-7).solve(B[:, :1])
    assert record[0].filename == __file__
    # which is itself measured in single precision
    np.testing.assert_allclose(residuals, true_residuals(A, X, B[:, :1]), rtol=0.5)
    assert not bool(converged.any()) and 1e-7 < residuals[0] / np.linalg.norm(B[:, 0]) < 1e-3


@each_inverse
def test_preconditioner(inverse: type):
    eigenvalues = np.logspace(0, 6, 200) * (1 if inverse is CG else np.sign(RNG.random(200) - 0.3))
    A = np.diag(eigenvalues) + 0.1 * matrices.large("multiple")
    P = np.diag(1 / np.abs(eigenvalues))
    b = RNG.standard_normal(200)
    # the scale of the preconditioner does not matter
    for preconditioner in (P, torch.from_numpy(P), 1e-3 * P):
        solved = inverse(A, preconditioner=preconditioner, rtol=1e-9).solve(b)
        assert true_residuals(A, solved.x, b) <= 1e-9 * np.linalg.norm(b)
        assert int(solved.iterations) <= 25
    for wrong, message in [
        (-P, "not positive definite"),
        (matrices.large("indefinite"), "not positive definite"),
        (np.eye(3), "dimension"),
    ]:
        with pytest.raises(ValueError, match=message):
            inverse(A, preconditioner=wrong) @ b


@pytest.mark.parametrize("num_columns", [0, 3, 5])
@pytest.mark.parametrize("kind", [CG, NEUMANN])
def test_functions_as_preconditioners(kind: type, num_columns: int):
    P = torch.linspace(1, 0.1, 5, dtype=torch.float64).diag()
    A = P.inverse() + 0.01 * torch.ones(5, 5, dtype=torch.float64)
    B = torch.from_numpy(np.random.default_rng(0).standard_normal((5, num_columns)))
    expected = kind(A, preconditioner=P) @ B
    for function in (lambda v: P.diagonal() * v, lambda v: v.mul_(P.diagonal())):
        torch.testing.assert_close(kind(A, preconditioner=function) @ B, expected)


def test_series_with_a_function_multiply_without_an_adjoint():
    P = torch.linspace(0.9, 1, 6, dtype=torch.float64)
    A = torch.from_numpy(np.eye(6) + np.random.default_rng(0).uniform(0, 0.1, (6, 6)))
    found = NEUMANN(A, 9, preconditioner=lambda v: P * v)
    step = torch.eye(6).double() - P.diag() @ A
    dense = sum(torch.linalg.matrix_power(step, k) for k in range(10)) @ P.diag()
    torch.testing.assert_close(found.to_dense(), dense)
    row = SubmatrixLinearOperator(found, [1], [0, 2]).to_dense()
    torch.testing.assert_close(row, dense[[1]][:, [0, 2]])
    torch.testing.assert_close((found @ found).to_dense(), dense @ dense)
    torch.testing.assert_close(xtrace(found, 6, seed=0), dense.trace())
    b = dense.sum(1).clone().requires_grad_()
    torch.testing.assert_close((found @ b).detach(), dense @ b.detach())


def test_functions_that_are_no_preconditioners():
    A, b = torch.eye(4), torch.ones(4, 2)
    with pytest.raises(ValueError, match=r"one vector, of shape \[4\]; it returned \[4, 4\]"):
        CG(A, preconditioner=lambda V: torch.ones(4)[:, None] * V) @ b
    with pytest.raises(NotImplementedError, match="function as preconditioner has no adjoint"):
        NEUMANN(A, preconditioner=lambda v: v).T @ b


@each_inverse
def test_damping(inverse: type):
    A, B = matrices.large("singular"), RNG.standard_normal((matrices.LARGE_DIM, 4))
    found = inverse(A, damping=0.1, rtol=1e-12) @ B
    np.testing.assert_allclose(found, np.linalg.solve(A + 0.1 * np.eye(len(A)), B), atol=1e-10)
    solution = inverse(A, damping=0.1).solve(B[:, :0], x0=B[:, 0])
    assert solution.x.shape == (len(A), 0) and solution.converged.shape == (0,)


@each_inverse
@pytest.mark.parametrize("name", ["singular", "zero"])
def test_right_hand_side_out_of_range(inverse: type, name: str):
    A = matrices.large(name)
    b = RNG.standard_normal(len(A))
    with pytest.raises(ConvergenceError, match="1 of 1 systems are not solved"):
        inverse(A, on_failure="raise") @ b
    with pytest.warns(ConvergenceWarning, match="damp"):
        X, residuals, _, converged, _ = inverse(A).solve(b)
    np.testing.assert_allclose(residuals, true_residuals(A, X, b), rtol=1e-6)
    assert not bool(converged) and float(residuals) <= (1 + 1e-12) * np.linalg.norm(b)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("seed", range(3))
def test_right_hand_side_in_the_null_space(seed: int, dtype: type):
    # products are rounding errors, which say neither that the matrix is indefinite nor asymmetric
    factor = np.random.default_rng(seed).standard_normal((6, 2))
    A, b = (factor @ factor.T).astype(dtype), np.linalg.svd(factor)[0][:, 5].astype(dtype)
    for inverse in (CG(A), MINRES(A)):
        with pytest.warns(ConvergenceWarning, match="1 of 1 systems are not solved"):
            assert not bool(inverse.solve(b).converged)
    np.testing.assert_allclose(CG(A, damping=1.0) @ b, b, atol=1e3 * np.finfo(dtype).eps)


@pytest.mark.parametrize("size", [1e-1, 1e-12])
def test_negative_curvature_beyond_rounding_is_found(size: float):
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((30, 30)))[0]
    A = (basis * np.r_[-size, np.linspace(1, 2, 29)]) @ basis.T
    for b in (basis[:, 0], basis.sum(1), basis[:, 0] + 1e-9 * basis[:, 1]):
        with pytest.raises(NegativeCurvatureError):
            CG((A + A.T) / 2, rtol=1e-10).solve(b)
    with pytest.raises(NegativeCurvatureError, match="-1.0e-17.*MINRESInverseLinearOperator"):
        CG(-1e-17 * np.eye(4)) @ np.ones(4)


def steihaug(A: np.ndarray, b: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the direction of negative curvature that textbook CG meets, and the iterate."""
    r = p = b - A @ x
    while p @ A @ p > 0:
        alpha = r @ r / (p @ A @ p)
        x, old, r = x + alpha * p, r, r - alpha * A @ p
        p = r + (r @ r) / (old @ old) * p
    return p / np.linalg.norm(p), x


@pytest.mark.parametrize("start", [False, True])
def test_negative_curvature_has_its_direction_and_the_iterate(start: bool):
    A, x0 = np.diag([3.0, 2.0, 1.0, -0.5, 5.0, 4.0]), 1.0 * start * np.arange(6)
    B = np.random.default_rng(0).standard_normal((6, 3))
    B[3, 1] = x0[3] = 0.0  # the second one does not meet it
    expected = {i: steihaug(A, B[:, i], x0) for i in (0, 2)}
    inverse = CG(A, rtol=1e-12, x0=x0)
    for i, b in ((0, B[:, [0]]), (2, torch.from_numpy(B[:, [2]])), (None, B)):
        with pytest.raises(NegativeCurvatureError) as caught:
            inverse.solve(b)
        directions, solutions = caught.value.direction, caught.value.solution
        assert directions.shape == solutions.shape == b.shape
        met = np.flatnonzero(directions.abs().sum(0))  # those that meet it first
        assert len(met) and 1 not in met
        for column in met:
            direction, solution = expected[column if i is None else i]
            np.testing.assert_allclose(directions[:, column], direction, atol=1e-10)
            np.testing.assert_allclose(solutions[:, column], solution, atol=1e-10)


@each_inverse
def test_too_few_iterations(inverse: type):
    A, B = system("multiple")
    with pytest.warns(ConvergenceWarning, match="3 of 4 systems are not solved after 5 iter"):
        solution = inverse(A, maxiter=5).solve(B)
    assert solution.converged.tolist() == [False, True, False, False]
    with pytest.warns(ConvergenceWarning) as record:
        assert np.array_equal(inverse(A, maxiter=5) @ B, solution.x)
    assert record[0].filename == __file__


# --- operators of the package


@pytest.mark.parametrize("inverse", [CG, MINRES, LSMR])
@pytest.mark.parametrize("case", ["hessian", "ggn", "ggn-diagonal"])
def test_operators_of_the_package(inverse: type, case: str):
    operator = CASES[case].build(problems.make("mlp-ce-all-mean"))
    A = operator.damped(10.0 if case == "hessian" else 0.1)
    tolerance = {"atol": 1e-12, "btol": 1e-12} if inverse is LSMR else {"rtol": 1e-11}
    A_inverse = inverse(A, **tolerance)
    assert isinstance(A_inverse, TorchLinearOperator) and A_inverse.self_adjoint
    B = torch.from_numpy(np.random.default_rng(0).standard_normal((A.shape[0], 2)))
    expected = torch.linalg.solve(A.to_dense(), B)
    named = operator.space.split(B)
    named = torch.cat([value.reshape(-1, 2) for value in (A_inverse @ named).values()])
    for found in (A_inverse @ B, A_inverse.T @ B, torch.from_numpy(A_inverse @ B.numpy()), named):
        torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-8)
    # inverses are operators like others
    torch.testing.assert_close((A @ A_inverse) @ B, B, rtol=1e-7, atol=1e-8)


# --- least squares

RECTANGULAR = {
    "tall": RNG.standard_normal((60, 40)),
    "wide": RNG.standard_normal((40, 60)),
    "low-rank": RNG.standard_normal((60, 10)) @ RNG.standard_normal((10, 40)),
    "square": matrices.large("multiple")[:50, :50],
    "indefinite": matrices.large("indefinite")[:50, :50] + 0.5 * np.eye(50),
    "zero": np.zeros((5, 4)),
}


@pytest.mark.parametrize("damp", [0.0, 0.5])
@pytest.mark.parametrize("name", RECTANGULAR)
def test_least_squares(name: str, damp: float):
    A = RECTANGULAR[name]
    B, C = RNG.standard_normal((len(A), 3)), RNG.standard_normal((A.shape[1], 2))
    B[:, 1] = 0
    dense = np.linalg.pinv(A, rcond=1e-10)
    if damp:
        dense = np.linalg.solve(A.T @ A + damp**2 * np.eye(A.shape[1]), A.T)
    inverse = LSMR(A, damp=damp, atol=1e-13, btol=1e-13)
    assert inverse.shape == A.shape[::-1]
    np.testing.assert_allclose(inverse @ B, dense @ B, atol=1e-8 * (1 + np.abs(dense).max()))
    np.testing.assert_allclose(inverse.T @ C, dense.T @ C, atol=1e-8 * (1 + np.abs(dense).max()))
    assert dottest(inverse, seed=0, rtol=1e-8) >= 0


@pytest.mark.parametrize("damp", [0.0, 0.5])
@pytest.mark.parametrize("name", ["tall", "low-rank", "zero"])
def test_what_is_known_of_least_squares(name: str, damp: float):
    A, b = RECTANGULAR[name], RNG.standard_normal(len(RECTANGULAR[name]))
    _, istop, itn, normr, *_ = sla.lsmr(A, b, damp=damp)
    found = LSMR(A, damp=damp).matvec_with_info(b)
    assert int(found.istop) == istop and int(found.itn) <= itn + 2
    r, normx = b - A @ found.x, np.linalg.norm(found.x)
    norms = [np.hypot(np.linalg.norm(r), damp * normx), np.linalg.norm(A.T @ r - damp**2 * found.x)]
    np.testing.assert_allclose([found.normr[0], found.normar[0]], norms, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose([found.normx[0], found.normr[0]], [normx, normr], 1e-3, 1e-4)


def test_least_squares_without_convergence():
    A, b = np.diag(10.0 ** -np.arange(12)), np.ones(12)
    with pytest.warns(ConvergenceWarning, match="maxiter is reached"):
        found = LSMR(A, atol=1e-12, btol=1e-12, maxiter=3).matvec_with_info(b)
    assert int(found.istop) == 7 and int(found.itn) == 3
    with pytest.raises(ConvergenceError, match="conlim is exceeded"):
        LSMR(A, atol=0, btol=0, conlim=10, on_failure="raise") @ b
    # scipy's estimates do not see the rounding of products
    A = RECTANGULAR["tall"].astype(np.float32)
    products = (lambda x, M=M: (M @ x.astype(np.float32)).astype(float) for M in (A, A.T))
    rounding = LSMR(sla.LinearOperator(A.shape, *products, dtype=float), atol=1e-12, btol=1e-12)
    with pytest.warns(ConvergenceWarning, match="rounding prevents it"):
        found = rounding.matvec_with_info(np.ones(60))
    np.testing.assert_allclose(found.normr[0], np.linalg.norm(1 - A @ found.x), rtol=1e-6)


def test_least_squares_without_tolerances():
    """They are solved as accurately as rounding allows, as by SciPy."""
    A, b = RNG.standard_normal((20, 6)), np.ones(20)
    found = LSMR(A, atol=0, btol=0, conlim=0, on_failure="raise").matvec_with_info(b)
    np.testing.assert_allclose(found.x, np.linalg.lstsq(A, b, rcond=None)[0], rtol=1e-12)
    assert int(found.itn) <= 20


# --- series


@pytest.mark.parametrize("num_terms", [0, 1, 7])
def test_neumann(num_terms: int):
    A, P = RNG.uniform(0, 0.1, (6, 6)) + np.eye(6), np.diag(RNG.uniform(0.9, 1, 6))
    B = RNG.standard_normal((6, 2))
    for operator, preconditioner in ((A, None), (A, P), (torch.from_numpy(A), P)):
        step = np.eye(6) - 0.5 * (A if preconditioner is None else P @ A)
        powers = [np.linalg.matrix_power(step, k) for k in range(num_terms + 1)]
        dense = 0.5 * sum(powers) @ (np.eye(6) if preconditioner is None else P)
        inverse = NEUMANN(operator, num_terms, 0.5, preconditioner=preconditioner, rtol=1)
        np.testing.assert_allclose(inverse @ B, dense @ B)
        np.testing.assert_allclose(inverse.T @ B, dense.T @ B)


def test_neumann_says_that_it_has_not_converged():
    A, b = np.diag(np.logspace(-4, 0, 20)), np.ones(20)
    before = NEUMANN(A, num_terms=99, rtol=1) @ b
    residual = np.linalg.norm(b - A @ before) / np.linalg.norm(b)
    enough = NEUMANN(A, rtol=1.0001 * residual)
    assert not (enough @ (0 * b)).any()
    with pytest.warns(ConvergenceWarning, match="not converged after 100 terms: .* up to 6.1e-01"):
        np.testing.assert_array_equal(NEUMANN(A, rtol=0.9999 * residual) @ b, enough @ b)
    with pytest.raises(ConvergenceError, match="pass rtol=1"):
        NEUMANN(A, on_failure="raise") @ b


@pytest.mark.parametrize("size", [3.0, 1e30, 1e300])
@pytest.mark.parametrize("check_nan", [True, False])
def test_neumann_diverges(size: float, check_nan: bool):
    # products overflow, or what is subtracted from them
    with pytest.raises(ValueError, match="diverges|not finite|infinite"):
        NEUMANN(size * np.eye(3), 100, 1.0, check_nan) @ np.ones(3)
    with pytest.raises(ConvergenceError, match="diverges"):
        NEUMANN(3 * np.eye(3), 5, check_nan=check_nan) @ np.ones(3)


# --- errors, dot-tests


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda A: CG(np.triu(A)) @ A[:, :2], "not symmetric"),
        (lambda A: MINRES(np.triu(A)) @ A[:, :2], "not symmetric"),
        (lambda A: CG(A[:, :3]), "square"),
        (lambda A: CG(A, rtol=-1.0), "rtol"),
        (lambda A: CG(A, rtol=0.0), "rtol and atol"),
        (lambda A: MINRES(A, maxiter=0), "maxiter"),
        (lambda A: CG(A, on_failure="no"), "on_failure"),
        (lambda A: CG(A, damping=float("nan")), "damping must be a finite number"),
        (lambda A: CG(A, damping=float("inf")), "damping must be a finite number"),
        (lambda A: CG(A).solve(A[:, :3], x0=A[:, :2]), "x0 has 2 columns for 3 right-hand sides"),
        (lambda A: CG(A) @ np.ones(3), "shape"),
        (lambda A: CG(A).solve(np.full(len(A), np.nan)), "NaN"),
        (lambda A: CG(A) @ np.full(len(A), 1e-200), "Scale the right-hand sides"),
        (lambda A: LSMR(A, atol=-1.0), "atol"),
        (lambda A: NEUMANN(A, num_terms=-1), "num_terms"),
        (lambda A: NEUMANN(A, scale=0.0), "scale"),
        (lambda A: NEUMANN(A, rtol=-1.0), "rtol"),
        (lambda A: dottest(A, num_tests=0), "num_tests"),
    ],
)
def test_errors(make, message: str):
    with pytest.raises(ValueError, match=message):
        make(matrices.large("positive"))


def test_dottest_finds_a_wrong_adjoint():
    wrong = sla.LinearOperator((3, 3), lambda x: 2 * x, lambda x: x, dtype=float)
    with pytest.raises(ValueError, match="differ by"):
        dottest(wrong, seed=0)
    assert dottest(np.ones((2, 3), dtype=np.float32), seed=0) < 1e-6
