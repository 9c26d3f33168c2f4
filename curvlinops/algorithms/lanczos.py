"""Lanczos quadrature, and traces of functions of a symmetric matrix."""

from collections.abc import Callable
from typing import NamedTuple, Unpack

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.krylov import orthonormalized, scaled
from curvlinops.algorithms.sampling import (
    Estimate,
    RunningMean,
    Sampler,
    SamplingOptions,
    estimator,
)
from curvlinops.support.arguments import check_count

#: Products for each random vector in ``lanczos_logdet``.
_DEFAULT_NCV = 50


class Quadrature(NamedTuple):
    """Gauss quadrature rules of a symmetric matrix A, one for each of K starting vectors.

    ``x^T f(A) x / x^T x = sum_m weights_m f(nodes_m)``, exact for polynomials f of degree below
    twice the number M of nodes (Golub and Meurant, Matrices, moments and quadrature, 1994).
    All are ``[K, M]``, float64.
    """

    nodes: Tensor  # the Ritz values, ascending
    weights: Tensor  # they add up to one
    residuals: Tensor  # |A y - node y| of the normalized Ritz vectors y


def lanczos(matrix: Matrix, X: Tensor, num_steps: int) -> Quadrature:
    """Run Lanczos' recurrence from the starting vectors ``[D, K]``; return rules of M nodes.

    Each new vector is orthogonalized twice against all earlier ones. The recurrence alone soon
    loses orthogonality, and then finds eigenvalues more than once. If a run ends early, in an
    invariant subspace, its further nodes have weight zero.
    """
    eps = torch.finfo(matrix.dtype).eps
    space = matrix.space
    v = scaled(1 / space.norms(X.T), X.T)
    basis = v.new_empty(len(v), num_steps, v.shape[1])
    diagonal, off_diagonal = v.new_zeros(2, len(v), num_steps, dtype=torch.float64)
    scale = diagonal.new_full((len(v),), torch.finfo(matrix.dtype).tiny)
    alive = torch.ones(len(v), dtype=torch.bool, device=matrix.device)
    for step in range(num_steps):
        if not bool(alive.any()):
            diagonal[:, step:] = diagonal[:, :1]
            break
        basis[:, step] = v
        v, overlaps, norms = orthonormalized(space, (matrix @ v.T).T, basis[:, : step + 1])
        scale = scale.maximum(overlaps.abs().amax(1)).maximum(norms)
        if step and not matrix.operator.self_adjoint:
            # of a symmetric matrix, products are orthogonal to all vectors but the last two
            wrong = overlaps[:, :-1].clone()
            wrong[:, -1] -= off_diagonal[:, step - 1]
            if bool((wrong.abs().amax(1) > eps**0.5 * scale).any()):
                raise ValueError(
                    "Lanczos' method needs a symmetric matrix, and this one is not symmetric. Take "
                    "the symmetric part (A + A.T) / 2."
                )
        # a run that has ended goes on with zero vectors; its nodes of weight zero are its first
        # Rayleigh quotient, at which functions of the spectrum are defined
        diagonal[:, step] = overlaps[:, step].where(alive, diagonal[:, 0])
        alive = alive & (norms > 100 * eps * scale)
        off_diagonal[:, step] = norms.where(alive, 0.0)
        v = scaled(alive, v)
    inner = off_diagonal[:, :-1]
    T = torch.diag_embed(diagonal) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
    nodes, vectors = torch.linalg.eigh(T)
    residuals = off_diagonal[:, -1:] * vectors[:, -1].abs()
    return Quadrature(nodes, vectors[:, 0].square(), residuals)


@estimator
def trace_function(
    A: AnyMatrix,
    f: Callable[[Tensor], Tensor],
    ncv: int,
    num_repeats: int = 10,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the trace of a function of a symmetric matrix, ``tr f(A) = sum_d f(lambda_d)``.

    ``E[x^T f(A) x]``, with the quadratic forms from Lanczos quadrature (Ubaru, Chen and Saad, Fast
    estimation of tr(f(A)) via stochastic Lanczos quadrature, SIMAX 2017). The quadrature is exact
    for polynomials of degree below ``2 ncv``, and for all f if ``A`` has at most ``ncv`` distinct
    eigenvalues.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        f: The function of eigenvalues, from a tensor to a tensor of the same shape, entry by entry.
        ncv: The number of products for each random vector, at most D. For each, ``ncv`` vectors are
            held in memory.
        num_repeats: The number of random vectors; an upper limit if ``rtol`` is given.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        **options: The options of ``hutchinson_trace``. The standard error does not contain the
            error of the quadrature; for that, compare with a larger ``ncv``.

    Returns:
        The estimate, a scalar. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``.

    Raises:
        ValueError: If the matrix is not square, products show that it is not symmetric, f is not
            real and finite at all approximate eigenvalues, or an argument is out of range.
    """
    matrix = Matrix(A, square=True)
    ncv = check_count("ncv", ncv, at_most=matrix.shape[0])
    sampler = Sampler(matrix, distribution, ncv, **options)
    return _mean(sampler, f, ncv, num_repeats)


@estimator
def lanczos_logdet(
    A: AnyMatrix,
    ncv: int | None = None,
    num_repeats: int = 10,
    distribution: str = "rademacher",
    **options: Unpack[SamplingOptions],
) -> Tensor | Estimate:
    """Estimate the log-determinant of a symmetric positive definite matrix.

    ``log det A = tr log A``, by stochastic Lanczos quadrature. Matrices with few large eigenvalues
    above a damping need few products. The arguments are those of ``trace_function``. The default
    ``ncv`` is 50, or D if that is less. For decaying and uniform spectra with smallest eigenvalues
    down to ``1e-5`` of the largest one, a larger ``ncv`` changed the result by less than a tenth of
    the standard error.

    Raises:
        ValueError: If an approximate eigenvalue is not positive, up to rounding.
    """
    matrix = Matrix(A, square=True)
    ncv = min(_DEFAULT_NCV, matrix.shape[0]) if ncv is None else ncv
    ncv = check_count("ncv", ncv, at_most=matrix.shape[0])
    sampler = Sampler(matrix, distribution, ncv, **options)

    def log(nodes: Tensor) -> Tensor:
        smallest, largest = float(nodes.min()), float(nodes.max())
        if smallest <= 10 * torch.finfo(matrix.dtype).eps * max(largest, 0.0):
            raise ValueError(
                f"The matrix is not positive definite to working precision: it has an eigenvalue "
                f"of {smallest:.1e} or less, and one of {largest:.1e}. Add a multiple of the "
                "identity."
            )
        return nodes.log()

    return _mean(sampler, log, ncv, num_repeats)


def _mean(
    sampler: Sampler, f: Callable[[Tensor], Tensor], ncv: int, num_repeats: int
) -> Tensor | Estimate:
    """Average ``x^T f(A) x`` over random vectors; see ``trace_function``."""
    num_repeats = check_count("num_repeats", num_repeats, at_least=1 + sampler.return_error)
    mean = RunningMean()

    def update(X: Tensor) -> tuple[Tensor, Tensor]:
        nodes, weights, _ = lanczos(sampler.matrix, X, ncv)
        forms = (weights * _evaluate(f, nodes)).sum(1)
        return mean.update(forms.to(X) * sampler.matrix.space.sums(X.T.square()))

    return sampler.run(num_repeats, update)


def _evaluate(f: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
    values = f(nodes)
    if not isinstance(values, Tensor) or values.shape != nodes.shape or values.is_complex():
        is_tensor = isinstance(values, Tensor)
        found = (values.dtype, list(values.shape)) if is_tensor else type(values).__name__
        raise ValueError(f"f must return a real tensor of shape {list(nodes.shape)}, got {found}.")
    if not bool(values.isfinite().all()):
        where = float(nodes[~values.isfinite()][0])
        raise ValueError(f"f is not finite at {where:.3e}, an approximate eigenvalue.")
    return values
