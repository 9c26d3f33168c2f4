"""Traces, diagonals and Frobenius norms as averages over random vectors."""

from typing import Unpack

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.sampling import (
    Estimate,
    RunningMean,
    Sampler,
    SamplingOptions,
    estimator,
)


@estimator
def hutchinson_trace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the trace of a square matrix.

    ``tr(A) = E[x^T A x]`` (Hutchinson, A stochastic estimator of the trace of the influence matrix,
    Communications in Statistics 1989). Unbiased for every matrix. Exact for diagonal matrices with
    Rademacher vectors, and for multiples of the identity with spherical vectors.

    Args:
        A: A square matrix: an operator, any other scipy LinearOperator, or a matrix.
        num_matvecs: The largest number of products with ``A``. Methods that need several products
            for each random vector round it down. From D on, the result is exact, with D products.
        distribution: Distribution of the random vectors: ``"rademacher"`` (signs), ``"gaussian"``,
            or ``"sphere"``.
        **options: All estimators have these.
            ``rtol``: stop when the standard error, relative to the estimate (in the Euclidean
            norm), is this small; if it does not become so, a ``ConvergenceWarning`` says so.
            ``return_error=False``: whether to return the standard error, too, which needs two
            random vectors.
            ``chunk_size``: number of vectors that are multiplied at once. Default: as many as need
            64 MiB.
            ``seed``: seed of the random vectors.
            ``generator``: generator that draws the random vectors. Default: one seeded by
            PyTorch's global generator.
            ``callback``: a function that is called with an ``Iteration`` after each block of random
            vectors: ``chunk_size`` many, or eight with ``rtol``. ``values`` is the estimate so far.
            If it returns ``True``, that is the result. An exact result is one block.

    Returns:
        The estimate, a scalar tensor on the device of ``A``. With ``return_error`` a named tuple of
        ``estimate`` and ``standard_error``.

    Raises:
        ValueError: If the matrix is not square, or an argument is out of range.
    """
    sampler = Sampler(Matrix(A, square=True), distribution, **options)
    return sampler.mean(num_matvecs, sampler.quadratic_forms)


@estimator
def hutchinson_diag(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the diagonal of a square matrix, ``[D]``.

    ``diag(A) = E[x * (A x)]``, entry by entry (Bekas et al., An estimator for the diagonal of a
    matrix, Applied Numerical Mathematics 2007). Unbiased for every matrix; exact for diagonal
    matrices with Rademacher vectors. The arguments are those of ``hutchinson_trace``.
    """
    sampler = Sampler(Matrix(A, square=True), distribution, **options)
    return sampler.mean(num_matvecs, torch.mul)


@estimator
def hutchinson_squared_fro(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the squared Frobenius norm of a matrix, square or not.

    ``|A|_F^2 = tr(A^T A) = E[|A x|^2]``. Unbiased for every matrix. The arguments are those of
    ``hutchinson_trace``.
    """
    matrix = Matrix(A)

    def squares(X: Tensor, AX: Tensor) -> Tensor:
        # in double precision, which has room for squares
        return matrix.operator.codomain.norms(AX.T).square()

    return Sampler(matrix, distribution, **options).mean(num_matvecs, squares)


@estimator
def hutchpp_trace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the trace of a square matrix with Hutch++.

    ``tr(A) = tr(Q^T A Q) + E[x^T (I - Q Q^T) A (I - Q Q^T) x]``, with Q an orthonormal basis of the
    range of ``A S``, and S random vectors (Algorithm 1 of Meyer et al., Hutch++: optimal stochastic
    trace estimation, SOSA 2021). Unbiased for every matrix, and exact if the rank is at most
    ``num_matvecs / 3``. A third of the products is for Q, a third for the trace in the span of Q,
    and a third for the rest. Q is held in memory. The arguments are those of ``hutchinson_trace``.
    """
    matrix = Matrix(A, square=True)
    sampler, outside = Sampler(matrix, distribution, **options), RunningMean()
    num = sampler.num_vectors(num_matvecs, cost=3)
    if num is None:
        return sampler.exact(sampler.quadratic_forms)
    Q = matrix.space.qr(sampler.multiply(sampler.draw(num)).T)[0].T
    # products with contiguous vectors are fastest
    inside = sampler.quadratic_forms(Q, sampler.multiply(Q.T.contiguous().T)).sum()

    def update(X: Tensor) -> tuple[Tensor, Tensor]:
        X = X - Q @ matrix.space.gram(Q.T, X.T)
        mean, error = outside.update(sampler.quadratic_forms(X, matrix @ X))
        return inside + mean, error

    return sampler.run(num, update)
