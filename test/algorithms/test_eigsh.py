"""Eigenpairs: against dense linear algebra, on spectra of all kinds, and against scipy."""

import warnings
from contextlib import suppress
from itertools import product
from typing import Any

import matrices
import numpy as np
import problems
import pytest
import scipy
import scipy.sparse.linalg as sla
import small
import torch
from contract import ALL, CASES
from tables import core
from torch import nn

from curvlinops import (
    ConvergenceError,
    ConvergenceWarning,
    EFLinearOperator,
    Eigenpairs,
    GGNLinearOperator,
    eigsh,
)

WHICH = ["LM", "LA", "SA", "BE"]
# the small ends of these are dense, relative to the whole spectrum
HARD = [(s, w) for s in ("power", "exponential", "vanishing") for w in ("SA", "BE")]
HARD += [("negative", "LA"), ("negative", "BE")]
SPECTRA = [(s, w) for s in matrices.LARGE_SPECTRA for w in WHICH if (s, w) not in HARD]


def wanted(values: np.ndarray, k: int, which: str) -> np.ndarray:
    """Return the wanted ones of ascending eigenvalues."""
    if which == "LM":
        return np.sort(values[np.argsort(-np.abs(values), kind="stable")[:k]])
    low = {"SA": k, "LA": 0, "BE": k // 2}[which]
    return np.r_[values[:low], values[len(values) - (k - low) :]]


def true_residuals(A, pairs: Eigenpairs) -> np.ndarray:
    values, vectors = (part.double().numpy() for part in pairs)
    return np.linalg.norm(A @ vectors - vectors * values, axis=0)


def check(A: np.ndarray, pairs: Eigenpairs, k: int, which: str, tolerance: float) -> None:
    """Compare with dense linear algebra in double precision."""
    values, vectors = pairs
    eigenvalues = np.linalg.eigvalsh(A)
    scale = max(np.abs(eigenvalues).max(), 1e-30)
    np.testing.assert_allclose(values, wanted(eigenvalues, k, which), atol=tolerance * scale)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(k), atol=tolerance)
    exact = true_residuals(A, pairs)
    assert exact.max() <= tolerance * scale
    np.testing.assert_allclose(pairs.residuals, exact, atol=tolerance / 4 * scale, rtol=0.1)


DTYPES = {np.float64: 1e-13, np.float32: 2e-5}


@pytest.mark.parametrize(
    "spectrum, dtype",
    core(
        [*product(SPECTRA, [np.float64]), *product([("clustered", w) for w in WHICH], DTYPES)],
        product(SPECTRA, DTYPES),
    ),
)
def test_equals_dense(spectrum: tuple[str, str], dtype: type):
    name, which = spectrum
    A = matrices.large(name, dtype)
    pairs = eigsh(A, 6, which, seed=0)
    check(A.astype(np.float64), pairs, 6, which, DTYPES[dtype])


@pytest.mark.parametrize("name, which", SPECTRA)
def test_tolerance_on_true_residuals(name: str, which: str):
    A, tol = matrices.large(name), 1e-3
    pairs = eigsh(A, 4, which, tol=tol, seed=0)
    exact, rounding = true_residuals(A, pairs), 1e-13 * np.abs(A).max() * len(A)
    allowed = np.minimum(tol * np.abs(pairs.eigenvalues.numpy()), pairs.residuals.numpy())
    assert (exact <= 2 * allowed + rounding).all()


def few_values(*values_and_copies: tuple[float, int]) -> np.ndarray:
    """Return a matrix of few different eigenvalues."""
    values = np.concatenate([np.full(copies, float(value)) for value, copies in values_and_copies])
    return matrices.with_spectrum(torch.from_numpy(values), seed=3).numpy()


def random_gram(dim: int, rank: int) -> np.ndarray:
    """Return a positive semidefinite matrix of low rank."""
    factor = np.random.default_rng(rank).standard_normal((dim, rank))
    return factor @ factor.T / dim


#: Krylov spaces of these are smaller than the whole space: other copies are outside.
EXHAUSTED = {
    "identity": np.eye(30),
    "zero": np.zeros((20, 20)),
    "projection": few_values((1, 7), (0, 23)),
    "four fives": few_values((5, 4), (1, 40)),
    "three values": few_values((-2, 5), (1, 6), (3, 4)),
    "ten values": few_values(*((value, 6) for value in range(10))),
    "low rank": random_gram(83, 8),
    "damped low rank": random_gram(83, 8) + 0.1 * np.eye(83),
    "rank one": random_gram(60, 1),
    "graded low rank": few_values((0, 50), *((10.0**-n, 1) for n in range(8))),
    "low rank, indefinite": random_gram(60, 4) - random_gram(60, 5),
    "diagonal": np.diag(np.r_[[5.0] * 4, np.ones(36)]),
}


@pytest.mark.parametrize(
    "name, which, dtype",
    core(
        [
            *product(EXHAUSTED, ["LM", "SA"], [np.float64]),
            *product(EXHAUSTED, ["BE"], [np.float32]),
        ],
        product(EXHAUSTED, WHICH, DTYPES),
    ),
)
def test_all_copies_where_krylov_spaces_end(name: str, which: str, dtype: type):
    A, tolerance = EXHAUSTED[name].astype(dtype), DTYPES[dtype]
    scale = max(np.abs(A).sum(1).max(), 1e-30)
    for k in (1, 3, 8):
        pairs = eigsh(A, k, which, seed=k)
        expected = wanted(np.linalg.eigvalsh(A.astype(float)), k, which)
        found = pairs.eigenvalues.numpy()
        if which == "LM":  # which one of two opposite ones is up to rounding
            found, expected = np.sort(np.abs(found)), np.sort(np.abs(expected))
        np.testing.assert_allclose(found, expected, atol=tolerance * scale)
        assert true_residuals(A.astype(float), pairs).max() <= tolerance * scale


@pytest.mark.parametrize("k", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", [GGNLinearOperator, EFLinearOperator])
def test_zeros_of_a_network_with_few_data(kind: type, k: int):
    """The smallest eigenvalues are zeros; a Krylov space contains one of them."""
    A = small.build(kind, small.mlp(), small.batches(4))
    for seed in range(3):
        pairs = eigsh(A, k, "SA", seed=seed)
        np.testing.assert_allclose(pairs.eigenvalues, 0, atol=1e-14)
        # the rank, one zero, and at most k + 1 random vectors
        assert pairs.num_products <= 9 + k + 1


@pytest.mark.parametrize("ncv", [6, 8, 10, 12, 40])
def test_copies_with_few_basis_vectors(ncv: int):
    A = few_values((-1, 3), (0, 30), *((0.2 * n, 1) for n in range(1, 8)))
    for which, expected in [("SA", [-1] * 3), ("LA", [1, 1.2, 1.4])]:
        pairs = eigsh(A, 3, which, ncv=ncv, seed=0)
        np.testing.assert_allclose(pairs.eigenvalues, expected, atol=1e-13)


def kronecker(values: np.ndarray, copies: int) -> np.ndarray:
    """Return ``A (x) I``, as the GGN of a single layer with squared loss."""
    return np.kron(matrices.with_spectrum(torch.from_numpy(values), seed=4).numpy(), np.eye(copies))


def single_layer() -> np.ndarray:
    """Return the GGN of a layer with squared loss."""
    generator = torch.Generator().manual_seed(0)
    X, y = (torch.rand(200, n, generator=generator, dtype=torch.float64) for n in (9, 5))
    return small.dense(GGNLinearOperator, nn.Linear(9, 5).double(), [(X, y)], small.MSE).numpy()


#: Matrices whose eigenvalues have copies, which one Krylov space does not contain.
WITH_COPIES = {
    "low rank": random_gram(30, 8),
    "damped low rank": random_gram(30, 8) + 0.01 * np.eye(30),
    "low rank of a small space": random_gram(14, 8) + 0.01 * np.eye(14),
    "identity": np.eye(50),
    "A (x) I_5": kronecker(np.linspace(0.2, 2, 10), 5),
    "A (x) I_2": kronecker(np.linspace(0.1, 2, 25), 2),
    "graded A (x) I_5": kronecker(np.logspace(-3, 0, 10), 5),
    "layer": single_layer(),
}
PRECISIONS = {"float64": (np.float64, 1e-8), "float32": (np.float32, 1e-4)}


def start(A: np.ndarray, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(len(A)).astype(A.dtype)


def is_missed(found: np.ndarray, A: np.ndarray, k: int, which: str, tolerance: float) -> bool:
    """Return whether the eigenvalues are not the wanted ones."""
    eigenvalues = np.linalg.eigvalsh(A.astype(float))
    expected = wanted(eigenvalues, k, which)
    if len(found) < k:  # SciPy returns some of them if the others do not converge
        return True
    if which == "LM":  # which one of two opposite ones is up to rounding
        found, expected = np.abs(found), np.abs(expected)
    difference = np.abs(np.sort(found) - np.sort(expected)).max()
    return difference > tolerance * np.abs(eigenvalues).max()


def misses_in_silence(A: np.ndarray, k: int, which: str, tolerance: float, **options: Any) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = eigsh(A, k, which, **options).eigenvalues.numpy()
    return not caught and is_missed(found, A, k, which, tolerance)


@pytest.mark.parametrize(
    "name, precision",
    core(
        [
            # of Kronecker products, the graded one
            *product([name for name in WITH_COPIES if not name.startswith("A")], ["float64"]),
            ("damped low rank", "float32"),
        ],
        product(WITH_COPIES, PRECISIONS),
    ),
)
def test_copies_are_not_missed_in_silence(name: str, precision: str):
    dtype, tolerance = PRECISIONS[precision]
    A = WITH_COPIES[name].astype(dtype)
    few = [(4, "SA", 6), (4, "SA", 9), (2, "BE", 5), (3, "LA", 7)]
    for k, which, ncv in few:
        options = {"ncv": ncv, "maxiter": 50}
        assert not misses_in_silence(A, k, which, tolerance, **options)
        assert not misses_in_silence(A, k, which, tolerance, v0=start(A, 1), **options)
    for which in WHICH:
        assert not misses_in_silence(A, 6, which, tolerance)


@pytest.mark.extensive
@pytest.mark.parametrize("which", WHICH)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", WITH_COPIES)
def test_no_more_misses_than_scipy(name: str, precision: str, which: str):
    dtype, tolerance = PRECISIONS[precision]
    A = WITH_COPIES[name].astype(dtype)
    for k in (2, 6):
        for ncv in (k + 2, None):
            ours = theirs = 0
            for seed in range(4):
                v0 = start(A, seed)
                ours += misses_in_silence(A, k, which, tolerance, ncv=ncv, v0=v0, seed=seed)
                with suppress(sla.ArpackError):
                    found = sla.eigsh(A, k, which=which, ncv=ncv, v0=v0, return_eigenvectors=False)
                    theirs += is_missed(found, A, k, which, tolerance)
            assert ours <= theirs


def test_one_copy_is_enough():
    values = np.linspace(0.2, 2, 10)
    A = kronecker(values, 5)
    pairs = eigsh(A, 3, "LA", verify=False)
    np.testing.assert_allclose(pairs.eigenvalues, values[-3:], atol=1e-13)
    assert pairs.num_products <= 10
    np.testing.assert_allclose(eigsh(A, 3, "LA").eigenvalues, values[-1], atol=1e-13)


def outliers(dim: int, *values: float) -> sla.LinearOperator:
    """Return the identity, with other eigenvalues in the space of as many random vectors."""
    U = np.linalg.qr(np.random.default_rng(0).standard_normal((dim, len(values))))[0]
    scaled = U * (np.array(values) - 1)
    return sla.LinearOperator((dim, dim), lambda x: x + scaled @ (U.T @ x.ravel()), dtype=float)


@pytest.mark.parametrize("values", [(10.0,), (10.0, 10.0, 10.0), (10.0, 9.0, 9.0)], ids=str)
def test_few_large_eigenvalues_of_a_large_space(values: tuple[float, ...]):
    """A random vector has so small a part along them that its residual is below the tolerance."""
    A = outliers(40_000, *values)
    for v0 in (None, np.ones(40_000)):
        found = eigsh(A, len(values), "LA", tol=0.1, v0=v0).eigenvalues
        np.testing.assert_allclose(found, np.sort(values), rtol=0.1)


def test_start_near_an_unwanted_eigenvector():
    A = matrices.large("clustered")
    vectors = np.linalg.eigh(A)[1]
    v0 = vectors[:, 100] + 1e-6 * vectors[:, -1]
    assert float(eigsh(A, 1, v0=v0, tol=1e-2).eigenvalues) > 4.9
    assert float(eigsh(A, 1, v0=v0, tol=1e-2, verify=False).eigenvalues) < 4.9


@pytest.mark.parametrize("which", ["LM", "LA"])
def test_start_vector_that_is_an_eigenvector(which: str):
    A = matrices.large("multiple")
    unwanted = np.linalg.eigh(A)[1][:, 100]
    found = eigsh(A, 2, which, v0=unwanted, seed=0)
    np.testing.assert_allclose(found.eigenvalues, [5, 5], rtol=1e-12)


def test_history():
    A, seen = matrices.large("indefinite"), []
    pairs = eigsh(A, 3, seed=0, callback=seen.append)
    expected = [[state.num_products, float(state.residuals.max())] for state in seen]
    assert pairs.history.tolist() == expected == eigsh(A, 3, seed=0).history.tolist()
    assert pairs.history[-1, 0] == pairs.num_products
    state = seen[len(seen) // 2]
    exact = true_residuals(A, (state.values, state.iterate))
    np.testing.assert_allclose(state.residuals, exact, rtol=1e-6)
    stopped = eigsh(A, 3, seed=0, callback=lambda state: state.num_products >= 10)
    assert stopped.num_products == 10 and len(stopped.eigenvalues) == 3
    np.testing.assert_allclose(stopped.residuals, true_residuals(A, stopped), rtol=1e-6)
    assert stopped.residuals.max() > 1e-3


@pytest.mark.parametrize("k", [1, 5, 7])
@pytest.mark.parametrize("dim", [7, 8])
def test_small_matrices_and_all_eigenvalues(dim: int, k: int):
    A = matrices.large("indefinite")[:dim, :dim]
    for which in WHICH:
        pairs = eigsh(A, k, which, seed=0)
        check(A, pairs, k, which, 1e-13)
        assert pairs.num_products <= dim
    assert eigsh(np.array([[3.0]]), 1, seed=0).eigenvalues == pytest.approx([3.0])


def network(case: str) -> np.ndarray:
    """Return the matrix of an operator on a network's data."""
    return CASES[case].build(problems.make("mlp-ce-all-mean")).to_dense().numpy()


#: All but the zero matrix, which scipy refuses, and a GGN's small end, which is dense.
OF_NETWORKS = [("hessian", w) for w in WHICH] + [("ggn", "LM"), ("ggn", "LA")]


@pytest.mark.parametrize(
    "name, which", core(OF_NETWORKS, (pair for pair in SPECTRA if pair[0] != "zero"))
)
def test_no_more_products_than_scipy(name: str, which: str):
    A = network(name) if name in CASES else matrices.large(name)
    theirs, v0 = matrices.Counting(A), start(A, 0)
    try:
        values, vectors = sla.eigsh(theirs, 6, which=which, maxiter=500, v0=v0)
        accuracy = np.linalg.norm(A @ vectors - vectors * values, axis=0).max()
    except sla.ArpackNoConvergence:
        accuracy = np.inf
    # to verify copies that come from rounding errors takes a few more
    for verify in (False, True) if name != "multiple" else (False,):
        ours = matrices.Counting(A)
        pairs = eigsh(ours, 6, which, v0=v0, verify=verify)
        # equal accuracy: a few units of rounding, relative to the norm, for both
        assert pairs.residuals.max() <= max(accuracy, 1e-14 * np.linalg.norm(A, 2))
        # SciPy 1.12 takes one product less than later versions
        more = scipy.__version__.startswith("1.12.")
        assert pairs.num_products == ours.products <= theirs.products + more


@pytest.mark.parametrize("name, which", HARD)
def test_dense_ends_take_hardly_more_products_than_the_dimension(name: str, which: str):
    A = matrices.large(name)
    # most eigenvalues of this one are below rounding: copies of zero
    most = 2 if name == "vanishing" else 1.3
    pairs = eigsh(A, 4, which, seed=0)
    check(A, pairs, 4, which, 1e-13)
    assert pairs.num_products <= most * matrices.LARGE_DIM


@pytest.mark.parametrize("which", WHICH)
def test_structured_operators_know_their_eigenpairs(which: str):
    K = ALL["kfac"].build(problems.make("mlp-ce-all-mean"), fisher_type="type-2")
    pairs = eigsh(K, 4, which)
    check(K @ np.eye(K.shape[0]), pairs, 4, which, 1e-12)
    assert pairs.num_products == 4 and pairs.history.tolist() == [[4, float(pairs.residuals.max())]]


@pytest.mark.parametrize("case", ["hessian", "ggn"])
@pytest.mark.parametrize("problem", ["bfloat16-mlp", "bfloat16-cnn"])
def test_half_precision_operator(case: str, problem: str):
    operator = CASES[case].build(problems.make(problem))
    A = (operator @ torch.eye(operator.shape[0])).double().numpy()
    pairs, true = eigsh(operator, 3, "LA", seed=0), np.linalg.eigvalsh((A + A.T) / 2)
    # products are rounded to eight bits; residuals say so
    np.testing.assert_allclose(pairs.eigenvalues, true[-3:], atol=1e-2 * np.abs(true).max())
    assert 1e-5 * np.abs(true).max() < pairs.residuals.max() < 2e-2 * np.abs(true).max()


def test_result_unpacks_like_that_of_scipy():
    pairs = eigsh(torch.from_numpy(matrices.large("multiple")), 3, "LA", seed=0)
    values, vectors = pairs
    assert len(pairs) == 2 and pairs[0] is values and pairs[-1] is vectors
    assert values is pairs.eigenvalues and vectors is pairs.eigenvectors


def test_start_vectors_and_seeds():
    A = matrices.large("indefinite")
    assert torch.equal(eigsh(A, 3, seed=1)[1], eigsh(A, 3, seed=1)[1])
    first = eigsh(A, 3, v0=np.random.default_rng(3).standard_normal(len(A)))
    for start in (first.eigenvectors[:, 0], np.zeros(len(A))):
        check(A, eigsh(A, 3, v0=start, seed=0), 3, "LM", 1e-13)


def test_start_vectors_by_parameter():
    A = CASES["hessian"].build(problems.make("mlp-ce-all-mean"))
    v0 = torch.from_numpy(np.random.default_rng(0).standard_normal(A.shape[0]))
    named = A.space.split(v0)
    flat = eigsh(A, 2, v0=v0)
    for v in (named, list(named.values())):
        pairs = eigsh(A, 2, v0=v)
        torch.testing.assert_close(pairs.eigenvectors, flat.eigenvectors)
        assert pairs.num_products == flat.num_products
    with pytest.raises(ValueError, match="names are not those"):
        eigsh(A, 2, v0={"nobody": v0})
    with pytest.raises(ValueError, match="one flat vector"):
        eigsh(v0.outer(v0), 2, v0=named)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_whose_squares_are_no_numbers(scale: float):
    A = matrices.large("positive", np.float32)
    plain, pairs = (eigsh(B, 3, "LA", seed=0) for B in (A, A * np.float32(scale)))
    np.testing.assert_allclose(pairs.eigenvalues / scale, plain.eigenvalues, rtol=1e-5)
    assert (pairs.residuals <= 5e-4 * pairs.eigenvalues.max()).all()


@pytest.mark.parametrize(("k", "tol", "most"), [(1, 0.0, 180), (1, 1e-3, 60), (3, 0.0, 120)])
def test_opposite_eigenvalues(k: int, tol: float, most: int):
    """Which of two comes first is up to rounding."""
    B = np.random.default_rng(0).standard_normal((100, 100))
    found = eigsh(np.block([[0 * B, B], [B.T, 0 * B]]), k, tol=tol, seed=0)
    expected = np.linalg.svd(B)[1].repeat(2)[:k]
    np.testing.assert_allclose(-np.sort(-found.eigenvalues.abs().numpy()), expected, rtol=1e-5)
    assert found.num_products <= most


@pytest.mark.parametrize("ncv", [4, 6, 8, 9, 10, 12])
def test_few_basis_vectors_of_a_small_space(ncv: int):
    pairs = eigsh(np.diag(np.arange(1.0, 11)), 2, ncv=ncv, seed=0)
    np.testing.assert_allclose(pairs.eigenvalues, [9, 10], rtol=1e-12)
    assert pairs.num_products <= 100


def test_without_convergence():
    A = matrices.large("power")
    options = {"ncv": 12, "maxiter": 3, "seed": 0}
    with pytest.raises(ConvergenceError, match=r"after \d+ products [1-4] of 4 pairs .* maxiter"):
        eigsh(A, 4, "SA", on_failure="raise", **options)
    with pytest.warns(ConvergenceWarning, match="residuals reach") as record:
        pairs = eigsh(A, 4, "SA", **options)
    assert record[0].filename == __file__
    np.testing.assert_allclose(pairs.residuals, true_residuals(A, pairs), rtol=1e-6)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"k": 0}, "k must be"),
        ({"k": matrices.LARGE_DIM + 1}, "k must be an integer from 1 to"),
        ({"which": "ZZ"}, "which must be"),
        ({"tol": -1.0}, "tol must be"),
        ({"tol": float("nan")}, "tol must be"),
        ({"maxiter": -1}, "maxiter must be"),
        ({"ncv": 7}, "ncv must be"),
        ({"v0": np.ones((matrices.LARGE_DIM, 2))}, "v0 must be a single vector, got 2"),
        ({"v0": np.ones(3)}, "shape"),
        ({"on_failure": "ignore"}, "on_failure"),
        ({"A": np.random.default_rng(0).standard_normal((50, 50))}, "not symmetric"),
        ({"A": np.eye(3)[:2]}, "square"),
        ({"A": np.eye(0)}, "from 1 to 0"),
    ],
)
def test_errors(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        eigsh(**({"A": matrices.large("power")} | arguments))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ncv", [8, 12, 20])
def test_searches_that_end_early_are_never_wrong_in_silence(ncv: int, seed: int):
    """Without restarts, a matrix of low rank is not searched to the end."""
    values = torch.zeros(60)
    values[:2] = torch.tensor([1.0, 2.0])
    A = matrices.with_spectrum(values, seed=seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = eigsh(A, 4, "LM", ncv=ncv, maxiter=0, seed=seed).eigenvalues
    assert caught or np.allclose(found, [0, 0, 1, 2], atol=1e-10)
