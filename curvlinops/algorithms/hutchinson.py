"""Traces, diagonals and Frobenius norms as averages over random vectors."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.probes import (
    Estimate,
    Goal,
    Probes,
    Sample,
    average,
    number_estimator,
    quadratic_forms,
    split,
    sum_over_unit_vectors,
    vector_estimator,
)
from curvlinops.support.norms import double_norm
from curvlinops.support.progress import solves


@number_estimator
@solves("hutchinson_trace")
def hutchinson_trace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the trace of a square matrix.

    ``tr(A) = E[x^T A x]`` (Hutchinson, A stochastic estimator of the trace of the influence matrix,
    Communications in Statistics 1989). Unbiased for every matrix.

    Args:
        A: An operator, any other scipy LinearOperator, or a matrix.
        num_matvecs: The largest number of products with ``A``. From D on, the result is exact,
            with D products and no error; with ``rtol``, random vectors come first, as many as the
            products beyond D allow.
        distribution: That of the random vectors x, all with ``E[x x^T] = I``: ``"rademacher"``
            (signs; exact for diagonal matrices), ``"gaussian"``, or ``"sphere"`` (exact for
            multiples of the identity).
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too. It needs two products at least.
        chunk_size: How many vectors are multiplied at once. Default: as many as need 64 MiB.
        seed: Seeds the random vectors.
        generator: Draws the random vectors. Default: one seeded by PyTorch's global generator.

    Returns:
        The estimate, a scalar tensor (a numpy number if ``A`` is not of PyTorch). With
        ``return_error`` a named tuple of ``estimate`` and ``standard_error``.

    Raises:
        ValueError: If the matrix is not square, or an argument is not among its choices.
    """
    matrix = Matrix(A, square=True)
    probes = Probes(matrix, distribution, chunk_size, seed, generator)
    goal = Goal(rtol, return_error)
    return _average_products(probes, num_matvecs, goal, quadratic_forms)


@vector_estimator
@solves("hutchinson_diag")
def hutchinson_diag(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the diagonal of a square matrix.

    ``diag(A) = E[x * (A x)]``, entry by entry (Bekas et al., An estimator for the diagonal of a
    matrix, Applied Numerical Mathematics 2007). Unbiased for every matrix; with Rademacher vectors
    exact for diagonal ones.

    Args:
        A: See ``hutchinson_trace``, also for the other arguments.
        num_matvecs: The largest number of products with ``A``; from D on, the result is exact.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the norm of the standard errors is this small, relative to that of the
            estimate.
        return_error: Whether to return the standard errors, too.
        chunk_size: How many vectors are multiplied at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        The estimate ``[D]``. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``, both ``[D]``.

    Raises:
        ValueError: If the matrix is not square, or an argument is not among its choices.
    """
    matrix = Matrix(A, square=True)
    probes = Probes(matrix, distribution, chunk_size, seed, generator)
    return _average_products(probes, num_matvecs, Goal(rtol, return_error), torch.mul)


@number_estimator
@solves("hutchinson_squared_fro")
def hutchinson_squared_fro(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the squared Frobenius norm of a matrix, square or not.

    ``|A|_F^2 = tr(A^T A) = E[|A x|^2]``. Unbiased for every matrix.

    Args:
        A: See ``hutchinson_trace``, also for the other arguments.
        num_matvecs: The largest number of products with ``A``; from D on, the result is exact.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too.
        chunk_size: How many vectors are multiplied at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        The estimate, a scalar. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``.

    Raises:
        ValueError: If an argument is not among its choices.
    """
    probes = Probes(Matrix(A), distribution, chunk_size, seed, generator)
    goal = Goal(rtol, return_error)

    def sample(X: Tensor, AX: Tensor) -> Tensor:
        # squares may not be numbers of the matrix's type
        return double_norm(AX, 0).square()

    return _average_products(probes, num_matvecs, goal, sample)


@number_estimator
@solves("hutchpp_trace")
def hutchpp_trace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the trace of a square matrix: exactly in a subspace, at random in the rest.

    ``tr(A) = tr(Q^T A Q) + E[x^T (I - Q Q^T) A (I - Q Q^T) x]``, with Q an orthonormal basis of the
    range of ``A S``, S random vectors (Algorithm 1 of Meyer et al., Hutch++: optimal stochastic
    trace estimation, SOSA 2021). Unbiased for every matrix, and exact if the rank is at most
    ``num_matvecs / 3``.

    Args:
        A: See ``hutchinson_trace``, also for the other arguments.
        num_matvecs: The largest number of products with ``A``, at least three. A third each goes
            into Q, its part of the trace, and the rest. From D on, the result is exact.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate. The first two
            thirds of the products are spent in any case.
        return_error: Whether to return the standard error, too: that of the random part.
        chunk_size: How many vectors are multiplied at once. Q is held in memory in any case.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        The estimate, a scalar. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``.

    Raises:
        ValueError: If the matrix is not square, ``num_matvecs`` is too small, or another argument
            is not among its choices.
    """
    matrix = Matrix(A, square=True)
    probes = Probes(matrix, distribution, chunk_size, seed, generator)
    goal = Goal(rtol, return_error)
    num, may_be_exact = split(num_matvecs, 3, probes.dim, 1 + goal.return_error, goal)
    if num == 0:
        return goal.report_exact(matrix, sum_over_unit_vectors(probes, quadratic_forms))
    Q = torch.linalg.qr(probes.multiply(probes.draw(num))).Q
    # contiguous vectors multiply fastest
    inside = (Q * probes.multiply(Q.T.contiguous().T)).sum()

    def sample(X: Tensor) -> Tensor:
        outside = X - Q @ (Q.T @ X)
        return quadratic_forms(outside, matrix @ outside)

    return average(probes, num, goal, sample, inside, quadratic_forms if may_be_exact else None)


def _average_products(probes: Probes, num_matvecs: int, goal: Goal, sample: Sample) -> Any:
    """Average a function of random vectors X and of ``A X``."""
    num, may_be_exact = split(num_matvecs, 1, probes.dim, 1 + goal.return_error, goal)
    exact = sample if may_be_exact else None
    return average(probes, num, goal, lambda X: sample(X, probes.matrix @ X), exact=exact)
