"""Estimators of matrices with very large or small entries: scaled results, or a clear error."""

import signal
import threading
from collections.abc import Callable, Iterator
from math import log10
from types import FrameType

import matrices
import numpy as np
import pytest
import torch
from matrices import Counting
from torch import Tensor

from curvlinops import (
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    xdiag,
    xnystrace,
    xtrace,
)

#: Each estimator, and the power of the scale with which its result grows.
ESTIMATORS: dict[Callable, int] = {
    hutchinson_trace: 1,
    hutchinson_diag: 1,
    hutchinson_squared_fro: 2,
    hutchpp_trace: 1,
    xtrace: 1,
    xdiag: 1,
    xnystrace: 1,
}
X_FAMILY = [xtrace, xdiag, xnystrace]
SCALES = {
    torch.float64: [1e-200, 1e-30, 1.0, 1e30, 1e200],
    torch.float32: [1e-30, 1.0, 1e30],
}
#: No test takes longer.
SECONDS = 20
#: Positive definite; no estimator is exact, or sensitive to rounding.
A = matrices.with_spectrum(torch.linspace(1, 2, matrices.DIM))


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """Stop a test that does not end."""
    if not hasattr(signal, "SIGALRM") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"The test did not end in {SECONDS} seconds.")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def label(value: object) -> str:
    return getattr(value, "__name__", str(value))


def representable(estimator: Callable, scale: float, dtype: torch.dtype = torch.float64) -> bool:
    """Return whether the result is a number."""
    return abs(ESTIMATORS[estimator] * log10(scale)) < -log10(torch.finfo(dtype).tiny)


ROWS = [
    (estimator, dtype, scale)
    for estimator in ESTIMATORS
    for dtype, scales in SCALES.items()
    for scale in scales
    if representable(estimator, scale, dtype)
]


def scaled_pair(estimator: Callable, dtype: torch.dtype, scale: float) -> list[Tensor]:
    """Return the estimate and its standard error, divided by the scale, in float64."""
    pair = estimator((scale * A).to(dtype), 12, seed=0, return_error=True)
    assert all(value.dtype == dtype for value in pair)
    return [value.double() / scale ** ESTIMATORS[estimator] for value in pair]


@pytest.mark.parametrize("estimator, dtype, scale", ROWS, ids=label)
def test_estimates_scale(estimator: Callable, dtype: torch.dtype, scale: float):
    found = scaled_pair(estimator, dtype, scale)[0]
    expected = estimator(A, 12, seed=0)
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("estimator, dtype, scale", ROWS, ids=label)
def test_standard_errors_scale(estimator: Callable, dtype: torch.dtype, scale: float):
    found = scaled_pair(estimator, dtype, scale)[1]
    expected = estimator(A, 12, seed=0, return_error=True)[1]
    assert expected.min() > 1e-3
    tolerance = 1000 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("distribution", ["gaussian", "sphere"])
@pytest.mark.parametrize("scale", SCALES[torch.float64])
@pytest.mark.parametrize("estimator", [xtrace, xnystrace], ids=label)
def test_distributions_scale(estimator: Callable, scale: float, distribution: str):
    pair = estimator(scale * A, 12, distribution, seed=0, return_error=True)
    expected = estimator(A, 12, distribution, seed=0, return_error=True)
    for value, other in zip(pair, expected, strict=True):
        torch.testing.assert_close(value / scale, other, rtol=1e-12, atol=1e-12)


DOUBLE_ROWS = [(estimator, scale) for estimator, dtype, scale in ROWS if dtype == torch.float64]


@pytest.mark.filterwarnings("ignore:The standard error is:curvlinops.ConvergenceWarning")
@pytest.mark.parametrize("estimator, scale", DOUBLE_ROWS, ids=label)
def test_stops_at_the_same_vector(estimator: Callable, scale: float):
    large, numbers = matrices.with_spectrum(torch.linspace(1, 2, 120)), []
    for rtol in (0.2, 0.06, 0.005, 0.004):
        counting, expected = Counting(scale * large), Counting(large)
        for matrix in (counting, expected):
            estimator(matrix, 114, seed=0, rtol=rtol)
        assert counting.products == expected.products
        numbers.append(expected.products)
    assert numbers[0] < numbers[-1]


@pytest.mark.parametrize("estimator, scale", DOUBLE_ROWS, ids=label)
def test_exact_results_scale(estimator: Callable, scale: float):
    found, error = estimator(scale * A, matrices.DIM, return_error=True)
    expected = estimator(A, matrices.DIM)
    torch.testing.assert_close(found / scale ** ESTIMATORS[estimator], expected)
    assert not error.any()


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**600])
@pytest.mark.parametrize("estimator", [xtrace, xdiag], ids=label)
def test_first_products_are_zero(estimator: Callable, scale: float):
    """For some seeds all random vectors are in the null space, but not the basis of the range."""
    row = torch.zeros(40, dtype=torch.float64)
    row[:2] = torch.tensor([1.0, -1.0])
    matrix, is_zero = torch.outer(row, row), []
    for seed in range(50):
        expected = estimator(matrix, 6, seed=seed, return_error=True)
        found = estimator(scale * matrix, 6, seed=seed, return_error=True)
        for value, other in zip(found, expected, strict=True):
            torch.testing.assert_close(value / scale, other, rtol=1e-12, atol=1e-12)
        is_zero.append(not hutchinson_diag(matrix, 3, seed=seed).any())
    assert any(is_zero) and not all(is_zero)


@pytest.mark.parametrize("num", [12, matrices.DIM])
@pytest.mark.parametrize("dtype, entry", [(torch.float64, 1.5e307), (torch.float32, 1.5e37)])
@pytest.mark.parametrize("estimator", [xtrace, xnystrace], ids=label)
def test_estimates_that_are_too_large(
    estimator: Callable, dtype: torch.dtype, entry: float, num: int
):
    matrix = entry * torch.eye(matrices.DIM, dtype=dtype)
    with pytest.raises(ValueError, match=f"the estimate, or .* is too large for {dtype}"):
        estimator(matrix, num, seed=0)


@pytest.mark.parametrize("dtype, entry", [(torch.float64, 1.5e307), (torch.float32, 1.5e37)])
def test_diagonals_near_the_largest_number(dtype: torch.dtype, entry: float):
    matrix = entry * A.to(dtype)
    found = xdiag(matrix, 20, seed=0).double() / entry
    tolerance = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, xdiag(A, 20, seed=0), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype, entry", [(torch.float64, 1e-310), (torch.float32, 1e-40)])
@pytest.mark.parametrize("estimator", X_FAMILY, ids=label)
def test_numbers_below_the_smallest_normal_one(
    estimator: Callable, dtype: torch.dtype, entry: float
):
    found = estimator(entry * A.to(dtype), 20, seed=0).double() / entry
    # such numbers have few digits
    torch.testing.assert_close(found, estimator(A, 20, seed=0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("num", [12, matrices.DIM])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=label)
def test_products_that_are_not_finite(estimator: Callable, num: int, bad: float):
    matrix = A.clone()
    matrix[3, 4] = bad
    for refused in (matrix, matrix.float(), Counting(matrix)):
        with (
            np.errstate(invalid="ignore"),
            pytest.raises(ValueError, match="product with the matrix is not finite"),
        ):
            estimator(refused, num, seed=0)


@pytest.mark.parametrize("dtype", SCALES, ids=label)
@pytest.mark.parametrize("dim", [9, matrices.DIM])
@pytest.mark.parametrize("estimator", ESTIMATORS, ids=label)
def test_zero(estimator: Callable, dim: int, dtype: torch.dtype):
    matrix = torch.zeros(dim, dim, dtype=dtype)
    for options in ({}, {"rtol": 0.1}):  # no warning: zero is certain
        found, error = estimator(matrix, 8, seed=0, return_error=True, **options)
        assert not found.any() and not error.any()
        assert found.dtype == error.dtype == dtype


@pytest.mark.parametrize("scale", SCALES[torch.float64])
def test_matrices_that_are_not_semidefinite(scale: float):
    """All attempts at a Cholesky factor fail, and their number is bounded."""
    with pytest.raises(ValueError, match="not positive semi-definite"):
        xnystrace(-scale * A, 12, seed=0)
    with pytest.raises(ValueError, match="not symmetric"):
        xnystrace(scale * matrices.nonsymmetric(), 12, seed=0)
