"""Traces, diagonals and Frobenius norms as averages over random vectors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.probes import (
    Average,
    Probes,
    StoppingRule,
    estimator,
    quadratic_forms,
)
from curvlinops.support.norms import double_norm


@estimator("hutchinson_trace", np.floating)
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
) -> Any:
    """Estimate the trace of a square matrix.

    ``tr(A) = E[x^T A x]`` (Hutchinson, A stochastic estimator of the trace of the influence matrix,
    Communications in Statistics 1989). Unbiased for every matrix; with Rademacher vectors exact for
    diagonal ones, with spherical vectors for multiples of the identity.

    Args:
        A: An operator, any other scipy LinearOperator, or a matrix.
        num_matvecs: The largest number of products with ``A``. From D on, the result is exact, with
            D products; with ``rtol``, random vectors come first, as many as the products beyond D
            allow.
        distribution: Of the random vectors: ``"rademacher"`` (signs), ``"gaussian"``, or
            ``"sphere"``.
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
    probes = Probes(Matrix(A, square=True), distribution, chunk_size, seed, generator)
    return _average(probes, num_matvecs, StoppingRule(rtol, return_error), quadratic_forms)


@estimator("hutchinson_diag", np.ndarray)
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
) -> Any:
    """Estimate the diagonal of a square matrix.

    ``diag(A) = E[x * (A x)]``, entry by entry (Bekas et al., An estimator for the diagonal of a
    matrix, Applied Numerical Mathematics 2007). Unbiased for every matrix; with Rademacher vectors
    exact for diagonal ones.

    Args:
        A: A square matrix. The other arguments are those of ``hutchinson_trace``.
        num_matvecs: The largest number of products with ``A``.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate, in norm.
        return_error: Whether to return the standard error, too.
        chunk_size: How many vectors are multiplied at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        A vector ``[D]``, or with ``return_error`` a named tuple of two such vectors.
    """
    probes = Probes(Matrix(A, square=True), distribution, chunk_size, seed, generator)
    return _average(probes, num_matvecs, StoppingRule(rtol, return_error), torch.mul)


@estimator("hutchinson_squared_fro", np.floating)
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
) -> Any:
    """Estimate the squared Frobenius norm of a matrix, square or not.

    ``|A|_F^2 = tr(A^T A) = E[|A x|^2]``. Unbiased for every matrix.

    Args:
        A: Any matrix. The other arguments are those of ``hutchinson_trace``.
        num_matvecs: The largest number of products with ``A``.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too.
        chunk_size: How many vectors are multiplied at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        A scalar, or with ``return_error`` a named tuple of ``estimate`` and ``standard_error``.
    """
    probes = Probes(Matrix(A), distribution, chunk_size, seed, generator)

    def sample(X: Tensor, AX: Tensor) -> Tensor:
        # squares may not be numbers of the matrix's type
        return double_norm(AX, 0).square()

    return _average(probes, num_matvecs, StoppingRule(rtol, return_error), sample)


@estimator("hutchpp_trace", np.floating)
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
) -> Any:
    """Estimate the trace of a square matrix: exactly in a subspace, at random outside of it.

    ``tr(A) = tr(Q^T A Q) + E[x^T (I - Q Q^T) A (I - Q Q^T) x]``, with Q an orthonormal basis of the
    range of ``A S``, S random vectors (Algorithm 1 of Meyer et al., Hutch++: optimal stochastic
    trace estimation, SOSA 2021). Unbiased for every matrix, and exact if the rank is at most
    ``num_matvecs / 3``.

    Args:
        A: A square matrix. The other arguments are those of ``hutchinson_trace``.
        num_matvecs: The largest number of products with ``A``, at least three. A third each goes
            into Q, the trace in its span, and the trace outside.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too.
        chunk_size: How many vectors are multiplied at once. Q is held in memory in any case.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        A scalar, or with ``return_error`` a named tuple of ``estimate`` and ``standard_error``.
    """
    matrix = Matrix(A, square=True)
    probes = Probes(matrix, distribution, chunk_size, seed, generator)
    rule, average = StoppingRule(rtol, return_error), Average()
    num, may_be_exact = rule.split(num_matvecs, probes.dim, cost=3, error_needs=2)
    Q = torch.linalg.qr(probes.multiply(probes.draw(num))).Q
    # contiguous vectors multiply fastest
    inside = (Q * probes.multiply(Q.T.contiguous().T)).sum()

    def update(X: Tensor) -> tuple[Tensor, Tensor]:
        X = X - Q @ (Q.T @ X)
        outside, error = average.update(quadratic_forms(X, matrix @ X))
        return inside + outside, error

    sizes, exact = rule.chunks(num, probes.chunk_size), quadratic_forms if may_be_exact else None
    return rule.run(probes, sizes, update, exact)


def _average(
    probes: Probes,
    num_matvecs: int,
    rule: StoppingRule,
    sample: Callable[[Tensor, Tensor], Tensor],
) -> Any:
    """Average a function of random vectors X and of ``A X``, with samples along the last axis."""
    num, may_be_exact = rule.split(num_matvecs, probes.dim, cost=1, error_needs=2)
    average = Average()
    return rule.run(
        probes,
        rule.chunks(num, probes.chunk_size),
        lambda X: average.update(sample(X, probes.matrix @ X)),
        sample if may_be_exact else None,
    )
