"""Eigenpairs: against dense linear algebra, on spectra of all kinds, and against scipy."""

import pickle

import numpy as np
import problems
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import spectra
import torch
from contract import CASES, dense

from curvlinops import ConvergenceError, ConvergenceWarning, Eigenpairs, KFACLinearOperator, eigsh

WHICH = ["LM", "LA", "SA", "BE"]
# the small ends of these are dense, relative to the whole spectrum
HARD = [(name, which) for name in ("power", "exponential") for which in ("SA", "BE")]
HARD += [("negative", "LA"), ("negative", "BE")]
SPECTRA = [(s, w) for s in spectra.EIGENVALUES for w in WHICH if (s, w) not in HARD]
#: How many copies of an eigenvalue are wanted: a search needs a block of that size to find them.
COPIES = {("multiple", w): 4 for w in ("LM", "LA", "BE")}
COPIES |= {("singular", w): 6 for w in ("SA", "BE")}


def wanted(values: np.ndarray, k: int, which: str) -> np.ndarray:
    """Return the wanted ones of ascending eigenvalues."""
    if which == "LM":
        return np.sort(values[np.argsort(-np.abs(values), kind="stable")[:k]])
    low = {"SA": k, "LA": 0, "BE": k // 2}[which]
    return np.r_[values[:low], values[len(values) - (k - low) :]]


def check(A: np.ndarray, pairs: Eigenpairs, k: int, which: str, tolerance: float) -> None:
    """Compare with dense linear algebra in double precision."""
    parts = (*pairs, pairs.residuals)
    values, vectors, residuals = (np.asarray(part, dtype=np.float64) for part in parts)
    true = wanted(np.linalg.eigvalsh(A), k, which)
    scale = max(np.abs(np.linalg.eigvalsh(A)).max(), 1e-30)
    np.testing.assert_allclose(values, true, atol=tolerance * scale)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k), atol=tolerance)
    exact = np.linalg.norm(A @ vectors - vectors * values, axis=0)
    assert exact.max() <= tolerance * scale
    np.testing.assert_allclose(residuals, exact, atol=tolerance / 4 * scale, rtol=0.1)


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-13), (np.float32, 2e-5)])
@pytest.mark.parametrize("name, which", SPECTRA)
def test_equals_dense(name: str, which: str, dtype: type, tolerance: float):
    A = spectra.matrix(name, dtype)
    pairs = eigsh(A, 6, which, block_size=COPIES.get((name, which), 1), seed=0)
    check(A.astype(np.float64), pairs, 6, which, tolerance)


@pytest.mark.parametrize("block_size", [2, 5])
@pytest.mark.parametrize("name, which", SPECTRA)
def test_blocks(name: str, which: str, block_size: int):
    A = spectra.matrix(name)
    block_size = max(block_size, COPIES.get((name, which), 1))
    pairs = eigsh(A, 5, which, block_size=block_size, seed=0)
    check(A, pairs, 5, which, 1e-13)


@pytest.mark.parametrize("tol", [1e-3, 1e-8])
@pytest.mark.parametrize("name, which", [pair for pair in SPECTRA if pair[0] != "zero"])
def test_tolerance_on_true_residuals(name: str, which: str, tol: float):
    A = spectra.matrix(name)
    values, vectors = pairs = eigsh(A, 4, which, tol=tol, seed=0)
    residuals = pairs.residuals
    exact = np.linalg.norm(A @ vectors - vectors * values, axis=0)
    rounding = 1e-13 * np.abs(A).max() * len(A)
    assert (exact <= 2 * tol * np.abs(values) + rounding).all()
    assert (exact <= 2 * residuals + rounding).all()


@pytest.mark.parametrize(
    "zeros, others, which, k, seeds",
    [
        (500, np.arange(1, 30), "SA", 6, [0, 3, 4, 5]),
        (1500, np.r_[np.linspace(0.1, 1, 400), 8:11], "BE", 6, [0, 1]),
    ],
)
def test_tolerance_at_eigenvalues_of_zero(
    zeros: int, others: np.ndarray, which: str, k: int, seeds: list
):
    values = np.r_[np.zeros(zeros), others]
    A = sp.diags_array(values)
    for seed in seeds:
        found, vectors = pairs = eigsh(A, k, which, block_size=k, tol=1e-3, seed=seed)
        np.testing.assert_allclose(found, wanted(np.sort(values), k, which), atol=1e-5)
        exact = np.linalg.norm(A @ vectors - vectors * found, axis=0)
        assert (exact <= 2e-3 * np.abs(found) + 1e-13 * np.abs(values).max()).all()
        assert (exact <= 2 * pairs.residuals + 1e-13 * np.abs(values).max()).all()


@pytest.mark.parametrize("k", [1, 5, 6, 7])
@pytest.mark.parametrize("dim", [7, 8])
def test_small_matrices_and_all_eigenvalues(dim: int, k: int):
    A = spectra.matrix("indefinite")[:dim, :dim]
    for which in WHICH:
        pairs = eigsh(A, k, which, seed=0)
        check(A, pairs, k, which, 1e-13)
        assert pairs.num_products <= dim
    assert eigsh(np.array([[3.0]]), 1, seed=0).eigenvalues == pytest.approx([3.0])


@pytest.mark.parametrize("name, which", SPECTRA)
def test_no_more_products_than_scipy(name: str, which: str):
    if name == "zero":  # scipy refuses it
        return
    A = spectra.Counted(spectra.matrix(name))
    try:
        values, vectors = sla.eigsh(
            sla.LinearOperator(A.matrix.shape, A, dtype=float), 6, which=which, maxiter=500
        )
        accuracy = np.linalg.norm(A.matrix @ vectors - vectors * values, axis=0).max()
    except sla.ArpackNoConvergence:
        accuracy = np.inf
    pairs = eigsh(A.matrix, 6, which, seed=0)
    # equal accuracy: a few units of rounding, relative to the norm, for both
    assert pairs.residuals.max() <= max(accuracy, 1e-14 * np.abs(spectra.EIGENVALUES[name]).max())
    assert pairs.num_products <= A.count


@pytest.mark.parametrize("name, which", HARD)
def test_dense_ends_take_hardly_more_products_than_the_dimension(name: str, which: str):
    pairs = eigsh(spectra.matrix(name), 4, which, seed=0)
    check(spectra.matrix(name), pairs, 4, which, 1e-13)
    assert pairs.num_products <= 1.3 * spectra.DIM


@pytest.mark.parametrize("which, k", [("SA", 1), ("SA", 6), ("BE", 3)])
@pytest.mark.parametrize("dim", [120, 200])
def test_ends_below_rounding(dim: int, which: str, k: int):
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, dim)))[0]
    A = (basis * 0.5 ** np.arange(dim)) @ basis.T
    for seed in range(3):
        pairs = eigsh(A, k, which, block_size=k, seed=seed)
        check((A + A.T) / 2, pairs, k, which, 1e-13)
        assert pairs.num_products <= 2 * dim


def test_basis_grows_where_restarts_do_not_suffice():
    A = sp.diags_array(1 / np.arange(1.0, 1101))
    pairs = eigsh(A, 3, "SA", tol=1e-3, seed=0)
    np.testing.assert_allclose(pairs.eigenvalues, 1 / np.array([1100, 1099, 1098]), atol=1e-6)
    assert pairs.num_products <= 1100


@pytest.mark.parametrize("case", [name for name in CASES if CASES[name].square])
def test_operators_of_the_package(case: str):
    operator = CASES[case].build(problems.make("mlp-ce-all-mean"))
    A = (operator @ torch.eye(operator.shape[0], dtype=torch.float64)).numpy()
    assert CASES[case].dense is None or np.allclose(A, dense(case, "mlp-ce-all-mean"))
    for which in ("LA", "LM"):
        pairs = eigsh(operator, 3, which, seed=0)
        assert isinstance(pairs.eigenvectors, torch.Tensor)
        check((A + A.T) / 2, pairs, 3, which, 1e-12)
        expected = sla.eigsh(operator, 3, which=which, return_eigenvectors=False)
        np.testing.assert_allclose(pairs.eigenvalues.numpy(), np.sort(expected), rtol=1e-9)


@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("case", ["hessian", "ggn"])
def test_no_more_products_than_scipy_on_a_network(case: str, which: str):
    operator = CASES[case].build(problems.make("mlp-ce-all-mean"))
    A = spectra.Counted(operator @ np.eye(operator.shape[0]))
    if case == "ggn" and which in ("SA", "BE"):  # dense around zero
        return
    shell = sla.LinearOperator(operator.shape, A, dtype=float)
    sla.eigsh(shell, 4, which=which)
    pairs = eigsh(operator, 4, which, seed=0)
    assert pairs.num_products <= A.count


@pytest.mark.parametrize("case", ["hessian", "ggn"])
@pytest.mark.parametrize("problem", ["bfloat16-mlp", "bfloat16-cnn"])
def test_half_precision_operator(case: str, problem: str):
    operator = CASES[case].build(problems.make(problem))
    A = (operator @ torch.eye(operator.shape[0])).double().numpy()
    pairs = eigsh(operator, 3, "LA", seed=0)
    values, residuals = pairs.eigenvalues, pairs.residuals
    true = np.linalg.eigvalsh((A + A.T) / 2)
    # products are rounded to eight bits; residuals say so
    np.testing.assert_allclose(values, true[-3:], atol=1e-2 * np.abs(true).max())
    assert 1e-5 * np.abs(true).max() < residuals.max() < 2e-2 * np.abs(true).max()


def test_single_precision_operator():
    operator = CASES["hessian"].build(problems.make("float32-mlp"))
    pairs = eigsh(operator, 3, "LA", seed=0)
    true = torch.linalg.eigvalsh(dense("hessian", "float32-mlp"))[-3:]
    assert pairs.eigenvalues.dtype == torch.float32
    torch.testing.assert_close(pairs.eigenvalues.double(), true, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "convert, kind",
    [
        (torch.from_numpy, torch.Tensor),
        (sla.aslinearoperator, np.ndarray),
        (sp.csr_array, np.ndarray),
    ],
)
def test_kinds_of_matrices(convert, kind: type):
    A = spectra.matrix("multiple")
    pairs = eigsh(convert(A), 3, "LA", block_size=3, seed=0)
    assert all(isinstance(part, kind) for part in (*pairs, pairs.residuals))
    check(A, pairs, 3, "LA", 1e-13)


def test_result_unpacks_like_that_of_scipy():
    A = spectra.matrix("multiple")
    pairs = eigsh(A, 3, "LA", block_size=3, seed=0)
    copied = pickle.loads(pickle.dumps(pairs))
    for found in (pairs, copied):
        values, vectors = found
        assert len(found) == 2 and found[0] is values and found[-1] is vectors
        assert values is found.eigenvalues and vectors is found.eigenvectors
        check(A, found, 3, "LA", 1e-13)
        assert found.num_products == pairs.num_products > 0


def test_low_precision_products_in_double_precision():
    A = spectra.matrix("power", np.float32)
    rounded = sla.LinearOperator(A.shape, lambda x: A @ x.astype(np.float32), dtype=float)
    values, vectors = pairs = eigsh(rounded, 3, seed=0)
    exact = np.linalg.norm(A.astype(float) @ vectors - vectors * values, axis=0)
    assert 1e-9 < pairs.residuals.max() < 1e-6 and exact.max() < 1e-6


def test_start_vectors_and_seeds():
    A = spectra.matrix("indefinite")
    v0 = np.random.default_rng(3).standard_normal((len(A), 2))
    first, second = (eigsh(A, 3, v0=v) for v in (v0, torch.from_numpy(v0)))
    assert np.array_equal(first.eigenvectors, second.eigenvectors)
    assert np.array_equal(eigsh(A, 3, seed=1)[1], eigsh(A, 3, seed=1)[1])
    check(A, eigsh(A, 3, v0=first.eigenvectors[:, 0], seed=0), 3, "LM", 1e-13)
    good = eigsh(A, 3, v0=first.eigenvectors)
    assert good.num_products <= 6
    check(A, eigsh(A, 3, v0=np.zeros(len(A)), seed=0), 3, "LM", 1e-13)


def test_start_vectors_by_parameter():
    A = CASES["hessian"].build(problems.make("mlp-ce-all-mean"))
    v0 = torch.from_numpy(np.random.default_rng(0).standard_normal((A.shape[0], 2)))
    named = {n: c.movedim(0, -1) for n, c in A.space.split(v0.T).items()}
    flat = eigsh(A, 2, v0=v0)
    for v in (named, list(named.values())):
        pairs = eigsh(A, 2, v0=v)
        torch.testing.assert_close(pairs.eigenvectors, flat.eigenvectors)
        assert pairs.num_products == flat.num_products
    with pytest.raises(ValueError, match="names are not those"):
        eigsh(A, 2, v0={"nobody": v0})
    with pytest.raises(ValueError, match="one flat vector"):
        eigsh(v0 @ v0.T, 2, v0=named)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e22, 1e30])
def test_scales_whose_squares_are_no_numbers(scale: float):
    A = spectra.matrix("positive", np.float32)
    plain, pairs = (eigsh(B, 3, "LA", seed=0) for B in (A, A * np.float32(scale)))
    np.testing.assert_allclose(pairs.eigenvalues / scale, plain.eigenvalues, rtol=1e-5)
    assert (pairs.residuals <= 5e-4 * pairs.eigenvalues.max()).all()
    with pytest.warns(ConvergenceWarning, match=f"reach .*e{'-' if scale < 1 else '[+]'}"):
        eigsh(A * np.float32(scale), 3, "LA", seed=0, ncv=5, maxiter=1, tol=1e-5)


@pytest.mark.parametrize("seed", range(10))
def test_blocks_find_multiple_eigenvalues(seed: int):
    A = np.diag(np.r_[5, 5, 5, 4, 3, 2.5, 1 / np.arange(2, 3000)])
    pairs = eigsh(A, 4, "LA", block_size=3, tol=1e-4, seed=seed)
    np.testing.assert_allclose(pairs.eigenvalues, [4, 5, 5, 5], rtol=1e-6)
    # the zeros of a singular matrix, of which a Krylov space of one vector contains one
    A = np.diag(np.r_[np.zeros(500), np.arange(1, 30)])
    np.testing.assert_allclose(eigsh(A, 4, "SA", block_size=4, seed=seed)[0], 0, atol=1e-12)


@pytest.mark.extensive
@pytest.mark.parametrize(
    "copies, gap, which, k", [(2, 1e-3, "SA", 3), (5, 0.01, "SA", 6), (5, 0.01, "BE", 7)]
)
def test_multiple_eigenvalues_close_to_others(copies: int, gap: float, which: str, k: int):
    rest = np.linspace(gap, 1, 200 - copies)
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((200, 200)))[0]
    A = (basis * np.r_[np.zeros(copies), rest]) @ basis.T
    for seed in range(5):
        check(A, eigsh(A, k, which, block_size=copies, seed=seed), k, which, 1e-13)


@pytest.mark.parametrize(("k", "tol", "most"), [(1, 0.0, 180), (1, 1e-3, 60), (3, 0.0, 120)])
def test_opposite_eigenvalues(k: int, tol: float, most: int):
    """Which of two comes first is up to rounding, and nothing to confirm anew."""
    B = torch.randn(100, 100, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    zero = torch.zeros_like(B)
    A = torch.cat([torch.cat([zero, B], 1), torch.cat([B.T, zero], 1)])
    found = eigsh(A, k, tol=tol, seed=0)
    expected = torch.linalg.svdvals(B).repeat_interleave(2)[:k]
    sizes = found.eigenvalues.abs().sort(descending=True).values
    torch.testing.assert_close(sizes, expected, rtol=1e-5, atol=0)
    assert found.num_products <= most


@pytest.mark.parametrize("ncv", [4, 6, 8, 9, 10, 12])
def test_few_basis_vectors_of_a_small_space(ncv: int):
    pairs = eigsh(np.diag(np.arange(1.0, 11)), 2, ncv=ncv, seed=0)
    np.testing.assert_allclose(pairs.eigenvalues, [9, 10], rtol=1e-12)
    assert pairs.num_products <= 100


def test_without_convergence():
    A = spectra.matrix("power")
    with pytest.raises(ConvergenceError, match=r"after \d+ products [1-4] of 4 pairs .* maxiter"):
        eigsh(A, 4, "SA", ncv=12, maxiter=3, on_failure="raise", seed=0)
    with pytest.warns(ConvergenceWarning, match="residuals reach") as record:
        values, vectors = pairs = eigsh(A, 4, "SA", ncv=12, maxiter=3, seed=0)
    assert record[0].filename == __file__
    exact = np.linalg.norm(A @ vectors - vectors * values, axis=0)
    np.testing.assert_allclose(pairs.residuals, exact, rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"k": 0}, "k must be"),
        ({"k": spectra.DIM + 1}, "k must be"),
        ({"which": "SM"}, "which must be"),
        ({"tol": -1.0}, "tol must be"),
        ({"tol": float("nan")}, "tol must be"),
        ({"maxiter": -1}, "maxiter must be"),
        ({"ncv": 7}, "ncv must be"),
        ({"block_size": 0}, "block_size must be"),
        ({"v0": np.ones((spectra.DIM, 2)), "block_size": 3}, "v0 has 2 vectors"),
        ({"v0": np.ones(3)}, "shape"),
        ({"on_failure": "ignore"}, "on_failure"),
    ],
)
def test_errors(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        eigsh(spectra.matrix("power"), **arguments)


def test_matrix_that_is_not_symmetric():
    A = np.random.default_rng(0).standard_normal((50, 50))
    with pytest.raises(ValueError, match="not symmetric"):
        eigsh(A, 3, seed=0)
    with pytest.raises(ValueError, match="square"):
        eigsh(A[:-1], 3)
    with pytest.raises(ValueError, match="from 1 to 0"):
        eigsh(A[:0, :0], 1)


@pytest.mark.parametrize("which", WHICH)
def test_structured_operators_know_their_eigenpairs(which: str):
    problem = problems.make("mlp-ce-all-mean")
    arguments = (problem.model, problem.loss, problem.params, problem.data)
    K = KFACLinearOperator(*arguments, fisher_type="type-2")
    A = (K @ torch.eye(K.shape[0], dtype=torch.float64)).numpy()
    pairs = eigsh(K, 4, which)
    check(A, pairs, 4, which, 1e-12)
    assert pairs.num_products == 4
