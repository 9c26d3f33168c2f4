"""Traces, diagonals and Frobenius norms: unbiased, with honest errors, exact, at any scale."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import log10

import matrices
import numpy as np
import pytest
import torch
from matrices import Counting
from tables import core, in_turns
from torch import Tensor

from curvlinops import (
    ConvergenceWarning,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    xdiag,
    xnystrace,
    xtrace,
)


@dataclass(frozen=True)
class Estimator:
    """An estimator, what it estimates, and for which matrices.

    Attributes:
        truth: What it estimates.
        parts: The number of products that each random vector takes.
        semidefinite: Whether it takes positive semi-definite matrices only.
        signs: Whether it takes no distribution: its vectors are signs.
        calibration: Smallest and largest ratio of its standard error and the true one.
        degree: The power of the matrix's scale with which the result grows.
    """

    call: Callable
    truth: Callable[[Tensor], Tensor]
    parts: int = 1
    semidefinite: bool = False
    signs: bool = False
    calibration: tuple[float, float] = (0.85, 1.15)
    degree: int = 1

    def __call__(self, A, num: int, distribution: str = "rademacher", **options):
        """Estimate with a number of products."""
        options |= {} if self.signs else {"distribution": distribution}
        return self.call(A, num, **options)

    @property
    def distributions(self) -> list[str]:
        """All distributions that it takes."""
        return DISTRIBUTIONS[:1] if self.signs else DISTRIBUTIONS


# the errors of the last three rest on approximations, see the docstring of xtrace.py
ESTIMATORS = {
    "trace": Estimator(hutchinson_trace, torch.trace),
    "diag": Estimator(hutchinson_diag, torch.diag),
    "fro": Estimator(hutchinson_squared_fro, lambda A: A.square().sum(), degree=2),
    "hutchpp": Estimator(hutchpp_trace, torch.trace, parts=3),
    "xtrace": Estimator(xtrace, torch.trace, parts=2, calibration=(0.7, 1.7)),
    "xdiag": Estimator(xdiag, torch.diag, parts=2, signs=True, calibration=(0.7, 1.7)),
    "xnystrace": Estimator(xnystrace, torch.trace, semidefinite=True, calibration=(0.7, 1.7)),
}
X_FAMILY = ["xtrace", "xdiag", "xnystrace"]
MATRICES = {name: matrices.symmetric(name) for name in matrices.SPECTRA} | {
    "nonsymmetric": matrices.nonsymmetric()
}
DISTRIBUTIONS = ["rademacher", "gaussian", "sphere"]


def repeat(
    name: str, A: Tensor, distribution: str, seeds: int = 200, num: int = 12
) -> tuple[Tensor, Tensor]:
    """Return estimates and standard errors for many seeds, ``[seeds, ...]`` each."""
    e = ESTIMATORS[name]
    pairs = [e(A, num, distribution, return_error=True, seed=s) for s in range(seeds)]
    return tuple(torch.stack(values) for values in zip(*pairs, strict=True))


ALL = [
    (name, A, distribution)
    for name, e in ESTIMATORS.items()
    for A in (matrices.SEMIDEFINITE if e.semidefinite else MATRICES)
    for distribution in e.distributions
]


@pytest.mark.extensive
@pytest.mark.parametrize("name, A, distribution", ALL)
def test_unbiased_with_honest_errors(name: str, A: str, distribution: str):
    estimates, errors = repeat(name, MATRICES[A], distribution)
    truth = ESTIMATORS[name].truth(MATRICES[A])
    spread = estimates.std(0)
    rounding = 1e-12 * truth.norm()
    # of several entries the largest deviation, hence four and a half
    assert ((estimates.mean(0) - truth).abs() <= 4.5 * spread / len(errors) ** 0.5 + rounding).all()
    if spread.norm() > rounding:
        ratio = float(errors.square().mean(0).sum().sqrt() / spread.norm())
        low, high = ESTIMATORS[name].calibration
        assert low <= ratio <= high


@pytest.mark.parametrize(
    "dim, kind",
    core(in_turns([4, 7, 12], ["spd", "diagonal"]), product([4, 7, 12], ["spd", "diagonal"])),
)
def test_signs_in_few_dimensions(dim: int, kind: str):
    """Of four vectors of signs in as many dimensions, more than half depend on each other."""
    B = torch.randn(dim, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    A = B @ B.T if kind == "spd" else B.diagonal().abs().diag()
    for num in {max(dim // 2, 3), dim - 1, dim}:
        estimates, errors = repeat("xnystrace", A, "rademacher", num=num)
        wrong, rounding = (estimates - A.trace()).abs(), 1e-6 * A.trace()
        bias = abs(estimates.mean() - A.trace())
        assert bias <= 4 * estimates.std() / len(errors) ** 0.5 + rounding
        # an error from three vectors is itself uncertain
        assert (wrong <= 1000 * errors + rounding).all()
        if num < dim:
            assert errors.square().mean().sqrt() >= 0.6 * estimates.std()


def _projection(B: Tensor) -> Tensor:
    Q = torch.linalg.qr(B).Q
    return Q @ Q.T


def _rest(x: Tensor, others: Tensor, distribution: str) -> Tensor:
    """Return what is orthogonal to others, of its expected length if directions are uniform."""
    rest = x - _projection(others) @ x
    if distribution == "rademacher":
        return rest
    return rest / rest.norm() * (len(x) - others.shape[1]) ** 0.5


def _leave_out(name: str, A: Tensor, X: Tensor, i: int, distribution: str) -> Tensor:
    """Return the estimate that leaves out vector i, as the paper defines it."""
    x, others = X[:, i], torch.cat([X[:, :i], X[:, i + 1 :]], dim=1)
    if name == "xnystrace":
        Y = A @ others
        nystrom = Y @ torch.linalg.solve(others.T @ Y, Y.T)
        rest = x if distribution == "rademacher" else _rest(x, others, distribution)
        return nystrom.trace() + rest @ (A - nystrom) @ rest
    P = _projection(A @ others)
    if name == "xdiag":
        return (P @ A).diagonal() + x * (A @ x - P @ A @ x)
    rest = _rest(x, A @ others, distribution)
    return (P @ A @ P).trace() + rest @ A @ rest


@pytest.mark.parametrize(
    "name, A, distribution", [row for row in ALL if row[0] in X_FAMILY and row[1] != "singular"]
)
def test_definition(name: str, A: str, distribution: str):
    matrix = MATRICES[A] + (1e-3 * torch.eye(matrices.DIM) if A == "decaying" else 0)
    e, drawn = ESTIMATORS[name], []

    class Recording(matrices.Counting):
        def _matmat(self, X: np.ndarray) -> np.ndarray:
            drawn.append(torch.tensor(X))
            return super()._matmat(X)

    found, error = e(Recording(matrix), 6 * e.parts, distribution, seed=0, return_error=True)
    X = drawn[0]
    parts = torch.stack([_leave_out(name, matrix, X, i, distribution) for i in range(6)], dim=-1)
    expected = (2 * matrices.DIM / (matrices.DIM - 5)) ** 0.5 * parts.std(-1) / 6**0.5
    assert np.allclose(found, parts.mean(-1), rtol=1e-9)
    assert np.allclose(error, expected, rtol=1e-6)


EXACT = {
    "Hutch++, rank four": ("hutchpp", "singular", 12, DISTRIBUTIONS),
    "XTrace, rank four": ("xtrace", "singular", 10, DISTRIBUTIONS),
    "XDiag, rank four": ("xdiag", "singular", 10, ["rademacher"]),
    "XNysTrace, rank four": ("xnystrace", "singular", 5, ["gaussian", "sphere"]),
    "Hutch++, not symmetric": ("hutchpp", "rank-four", 12, DISTRIBUTIONS),
    "XTrace, not symmetric": ("xtrace", "rank-four", 18, DISTRIBUTIONS),
    "XDiag, not symmetric": ("xdiag", "rank-four", 18, ["rademacher"]),
    "signs, trace of a diagonal": ("trace", "diagonal", 1, ["rademacher"]),
    "signs, diagonal of a diagonal": ("diag", "diagonal", 1, ["rademacher"]),
    "signs, norm of a diagonal": ("fro", "diagonal", 1, ["rademacher"]),
    "sphere, trace of the identity": ("trace", "identity", 4, ["sphere"]),
    "sphere, XTrace of the identity": ("xtrace", "identity", 4, ["sphere"]),
    "sphere, XNysTrace of the identity": ("xnystrace", "identity", 4, ["sphere"]),
}
SPECIAL = {
    "singular": MATRICES["singular"],
    "rank-four": matrices.nonsymmetric(4),
    "diagonal": torch.arange(40.0, dtype=torch.float64).diag(),
    "identity": 3 * torch.eye(40, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("row", EXACT)
def test_exact(row: str, dtype: torch.dtype):
    name, matrix, num, distributions = EXACT[row]
    e, A = ESTIMATORS[name], SPECIAL[matrix].to(dtype)
    truth, tolerance = e.truth(A.double()), 1e3 * torch.finfo(dtype).eps
    for distribution in distributions:
        found = e(A, num, distribution, seed=1)
        assert found.dtype == dtype
        assert (found.double() - truth).norm() <= tolerance * truth.norm()


def test_variance_of_hutchinson():
    # Rademacher: 2 (|A|^2 - sum of squared diagonal entries); Gaussian: 2 |A|^2, for symmetric A
    A = MATRICES["indefinite"]
    fro, diagonal = A.square().sum(), A.diagonal().square().sum()
    for distribution, variance in [("rademacher", 2 * (fro - diagonal)), ("gaussian", 2 * fro)]:
        _, errors = repeat("trace", A, distribution, seeds=600, num=39)
        assert float(errors.square().mean() * 39 / variance) == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize("dim, num", [(1, 1), (2, 2), (5, 5), (40, 40), (40, 1000)])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_exact_from_the_dimension_on(name: str, dim: int, num: int):
    e, A = ESTIMATORS[name], MATRICES["indefinite"][:dim, :dim]
    for options in ({}, {"chunk_size": 7}, {"rtol": 0.2}):
        counting = Counting(A)
        found, error = e(counting, num, return_error=True, **options)
        assert counting.products == dim
        torch.testing.assert_close(found, e.truth(A), rtol=1e-12, atol=1e-12)
        assert error.shape == found.shape and not error.any()


@pytest.mark.parametrize("num", [12, 13, 14])
@pytest.mark.parametrize("name", ["hutchpp", "xtrace", "xdiag"])
def test_numbers_of_products_are_rounded_down(name: str, num: int):
    e, counting = ESTIMATORS[name], Counting(MATRICES["indefinite"])
    found, used = e(counting, num, seed=0), num // e.parts * e.parts
    assert counting.products == used
    torch.testing.assert_close(found, e(MATRICES["indefinite"], used, seed=0))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_stops_at_the_wanted_error(name: str):
    e, A = ESTIMATORS[name], matrices.with_spectrum(torch.linspace(1, 2, 120))
    counting, truth = Counting(A), e.truth(A)
    found, error = e(counting, 114, rtol=0.2, return_error=True, seed=0)
    assert counting.products < 114
    assert error.norm() <= 0.2 * found.norm()
    assert (found - truth).norm() <= 0.6 * truth.norm()
    counting = Counting(A)
    with pytest.warns(ConvergenceWarning, match=r"of the estimate, more than rtol=1e-09"):
        e(counting, 114, rtol=1e-9, seed=0)
    assert counting.products == 114


@pytest.mark.parametrize("rank", [10, 13])
@pytest.mark.parametrize("num_rows", [13, 40])
@pytest.mark.parametrize("name", X_FAMILY)
def test_growing_beyond_the_rank(name: str, num_rows: int, rank: int):
    # the first steps have fewer vectors than the rank, the last ones more than the nonzero rows
    spectrum = torch.cat([torch.linspace(1, 2, rank), torch.zeros(num_rows - rank)])
    zeros = torch.zeros(80 - num_rows, 80 - num_rows)
    A = torch.block_diag(matrices.with_spectrum(spectrum), zeros)
    found = ESTIMATORS[name](A, 66, rtol=1e-9, seed=0)
    truth = ESTIMATORS[name].truth(A)
    assert (found - truth).norm() <= 1e-11 * truth.norm()


@pytest.mark.filterwarnings("ignore:The standard error is:curvlinops.ConvergenceWarning")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_seeds_and_chunks(name: str, distribution: str):
    e, A = ESTIMATORS[name], MATRICES["clustered"]
    expected = e(A, 24, distribution, seed=3)
    assert expected.dtype == torch.float64
    assert not torch.equal(expected, e(A, 24, distribution, seed=4))
    torch.testing.assert_close(e(A.numpy(), 24, distribution, seed=3), expected)
    for change in [{"chunk_size": size} for size in (1, 2, 5)] + [{"rtol": 1e-9}]:
        torch.testing.assert_close(e(A, 24, distribution, seed=3, **change), expected)
    for arguments in ({}, {"generator": torch.default_generator}):
        torch.manual_seed(5)
        first, second = (e(A, 12, distribution, **arguments) for _ in range(2))
        torch.manual_seed(5)
        assert torch.equal(first, e(A, 12, distribution, **arguments))
        assert not torch.equal(first, second)


def test_norm_of_a_matrix_that_is_not_square():
    A = MATRICES["clustered"][:7]
    found, error = hutchinson_squared_fro(A, 35, seed=0, return_error=True)
    assert 0 < error and abs(found - A.square().sum()) <= 4 * error


# --- matrices with very large or small entries

SCALES = {
    torch.float64: [1e-200, 1e-30, 1.0, 1e30, 1e200],
    torch.float32: [1e-30, 1.0, 1e30],
}
#: Positive definite; no estimator is exact, or sensitive to rounding.
PLAIN = matrices.with_spectrum(torch.linspace(1, 2, matrices.DIM))
#: Estimators, precisions and scales whose results are numbers.
ROWS = [
    (name, dtype, scale)
    for name, e in ESTIMATORS.items()
    for dtype, scales in SCALES.items()
    for scale in scales
    if abs(e.degree * log10(scale)) < -log10(torch.finfo(dtype).tiny)
]
DOUBLE_ROWS = [(name, scale) for name, dtype, scale in ROWS if dtype == torch.float64]


@pytest.mark.parametrize(
    "name, dtype, scale, distribution",
    [
        (*row, distribution)
        for row in ROWS
        for distribution in ESTIMATORS[row[0]].distributions
        # other numbers are drawn in single precision, but the same signs
        if row[1] == torch.float64 or distribution == "rademacher"
    ],
)
def test_estimates_and_errors_scale(name: str, dtype: torch.dtype, scale: float, distribution: str):
    e = ESTIMATORS[name]
    for num in (12, matrices.DIM):
        found = e((scale * PLAIN).to(dtype), num, distribution, seed=0, return_error=True)
        assert all(value.dtype == dtype for value in found)
        found = [value.double() / scale**e.degree for value in found]
        expected = e(PLAIN, num, distribution, seed=0, return_error=True)
        assert expected[1].min() > 1e-3 or (num == matrices.DIM and not found[1].any())
        for value, other, factor in zip(found, expected, (100, 1000), strict=True):
            tolerance = factor * torch.finfo(dtype).eps
            torch.testing.assert_close(value, other, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:The standard error is:curvlinops.ConvergenceWarning")
@pytest.mark.parametrize("name, scale", DOUBLE_ROWS)
def test_stops_at_the_same_vector(name: str, scale: float):
    large, numbers = matrices.with_spectrum(torch.linspace(1, 2, 120)), []
    for rtol in (0.2, 0.06, 0.005, 0.004):
        counting, expected = Counting(scale * large), Counting(large)
        for matrix in (counting, expected):
            ESTIMATORS[name](matrix, 114, seed=0, rtol=rtol)
        assert counting.products == expected.products
        numbers.append(expected.products)
    assert numbers[0] < numbers[-1]


LARGE = [(torch.float64, 1.5e307), (torch.float32, 1.5e37)]


@pytest.mark.parametrize("num", [12, matrices.DIM])
@pytest.mark.parametrize("dtype, entry", LARGE)
@pytest.mark.parametrize("name", ["xtrace", "xnystrace"])
def test_estimates_that_are_too_large(name: str, dtype: torch.dtype, entry: float, num: int):
    matrix = entry * torch.eye(matrices.DIM, dtype=dtype)
    with pytest.raises(ValueError, match=f"the estimate, or .* is too large for {dtype}"):
        ESTIMATORS[name](matrix, num, seed=0)


TINY = [(torch.float64, 1e-310), (torch.float32, 1e-40)]


@pytest.mark.parametrize("dtype, entry", TINY)
@pytest.mark.parametrize("name", X_FAMILY)
def test_numbers_below_the_smallest_normal_one(name: str, dtype: torch.dtype, entry: float):
    found = ESTIMATORS[name](entry * PLAIN.to(dtype), 20, seed=0).double() / entry
    # they have few digits
    torch.testing.assert_close(found, ESTIMATORS[name](PLAIN, 20, seed=0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num", [12, matrices.DIM])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_products_that_are_not_finite(name: str, num: int, bad: float):
    matrix = PLAIN.clone()
    matrix[3, 4] = bad
    for refused in (matrix, matrix.float(), Counting(matrix)):
        with (
            np.errstate(invalid="ignore"),
            pytest.raises(ValueError, match="product with the matrix is not finite"),
        ):
            ESTIMATORS[name](refused, num, seed=0)


@pytest.mark.parametrize("dtype", SCALES)
@pytest.mark.parametrize("dim", [9, matrices.DIM])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_zero(name: str, dim: int, dtype: torch.dtype):
    matrix = torch.zeros(dim, dim, dtype=dtype)
    for options in ({}, {"rtol": 0.1}):  # no warning: zero is certain
        found, error = ESTIMATORS[name](matrix, 8, seed=0, return_error=True, **options)
        assert not found.any() and not error.any()
        assert found.dtype == error.dtype == dtype


@pytest.mark.parametrize("scale", SCALES[torch.float64])
def test_matrices_that_are_not_semidefinite(scale: float):
    """All attempts at a Cholesky factor fail, and their number is bounded."""
    with pytest.raises(ValueError, match="not positive semi-definite"):
        xnystrace(-scale * PLAIN, 12, seed=0)
    with pytest.raises(ValueError, match="not symmetric"):
        xnystrace(scale * matrices.nonsymmetric(), 12, seed=0)


# --- errors

_A = MATRICES["clustered"]
_BAD: list[tuple[str, dict, type[Exception], str]] = [
    *((name, {"num_matvecs": 0}, ValueError, "num_matvecs must be an integer >= ")
      for name in ESTIMATORS),
    *(("trace", {"num_matvecs": num}, ValueError, "num_matvecs must be an integer")
      for num in (2.0, True, "2", None)),
    *((name, {"num_matvecs": num}, ValueError, f">= {num + 1}, got {num}")
      for name, num in [("hutchpp", 2), ("xtrace", 1), ("xdiag", 1)]),
    ("trace", {"num_matvecs": 1, "return_error": True}, ValueError, ">= 2, got 1"),
    ("hutchpp", {"num_matvecs": 3, "return_error": True}, ValueError, ">= 6, got 3"),
    *((name, {"num_matvecs": 4, "return_error": True}, ValueError, ">= 6, got 4")
      for name in ("xtrace", "xdiag")),
    ("xnystrace", {"num_matvecs": 2, "return_error": True}, ValueError, ">= 3, got 2"),
    ("trace", {"distribution": "cauchy"}, ValueError, "distribution must be one of"),
    *(("xdiag", {"rtol": rtol}, ValueError, "rtol must lie between 0 and 1")
      for rtol in (0, -1.0, 1.0)),
    ("trace", {"sed": 1}, TypeError, "unexpected keyword argument 'sed'"),
    ("trace", {"chunk_size": 0}, ValueError, "chunk_size must be an integer >= 1"),
    ("trace", {"seed": 1, "generator": torch.Generator()}, ValueError, "either seed or generator"),
]  # fmt: skip


@pytest.mark.parametrize("name, changes, kind, message", _BAD)
def test_errors(name: str, changes: dict, kind: type[Exception], message: str):
    arguments = {"A": _A, "num_matvecs": 12, "seed": None} | changes
    before = torch.get_rng_state()
    with pytest.raises(kind, match=message):
        ESTIMATORS[name].call(**arguments)
    assert torch.equal(torch.get_rng_state(), before)  # it draws nothing
