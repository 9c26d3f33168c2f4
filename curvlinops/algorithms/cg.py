"""The inverse of a positive definite matrix by conjugate gradients."""

import torch
from torch import Tensor

from curvlinops.algorithms.iteration import NegativeCurvatureError
from curvlinops.algorithms.krylov import (
    DampedMatrix,
    IterationLog,
    KrylovInverseLinearOperator,
    Systems,
    add_scaled,
    check_positive,
    scaled,
)


class CGInverseLinearOperator(KrylovInverseLinearOperator):
    """The inverse of a symmetric positive definite matrix by conjugate gradients.

    ``(A + damping I)^-1`` (Hestenes and Stiefel, 1952), for all right-hand sides at once. A
    right-hand side that is solved drops out. A singular matrix is fine if the right-hand side lies
    in its range.

    Where CG meets negative curvature, truncated Newton methods (Steihaug, 1983) catch the
    ``NegativeCurvatureError``, and move from its ``solution`` along its ``direction``.

    Args:
        A: A symmetric positive definite operator or matrix of any kind, ``[D, D]``.
        **options: See ``curvlinops.algorithms.krylov.KrylovInverseLinearOperator``.

    Raises:
        NegativeCurvatureError: If the iteration meets a direction of negative curvature.
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
    """

    def _improve(
        self, A: DampedMatrix, X: Tensor, log: IterationLog, s: Systems, budget: int
    ) -> None:
        dots, norms = A.space.dots, A.space.norms
        s.P = A.precondition(s.R)
        s.rho = check_positive(dots(s.R, s.P))
        for _ in range(budget):
            Q = A.multiply(s.P)
            curvature = dots(s.P, Q)
            if bool((curvature < 0).any()):
                _check_curvature(A, X, s, Q, curvature)
            # the matrix is singular along a direction of zero curvature: no step
            alpha = (s.rho / curvature).where(curvature > 0, 0.0)
            X.index_add_(0, s.index, scaled(alpha, s.P))
            s.R = add_scaled(s.R, -alpha, Q)
            del Q  # not beside the next product
            s.sizes = norms(s.R)
            going = (s.sizes > s.goal) & (curvature > 0)
            if log.add(X, s, s.sizes) or not bool(going.any()):
                break
            s.keep(going)
            Z = A.precondition(s.R)
            squares = s.sizes.square() if Z is s.R else dots(s.R, Z)
            s.rho, before = check_positive(squares), s.rho
            s.P = add_scaled(Z, s.rho / before, s.P)
            del Z


def _check_curvature(A: DampedMatrix, X: Tensor, s: Systems, Q: Tensor, curvature: Tensor) -> None:
    """Check that negative curvature ``<p, A p>``, ``[K]``, of products ``Q = A p`` is rounding."""
    norms = A.space.norms
    lengths, sizes = norms(s.P), norms(Q)
    # products with vectors of a null space are rounding errors and do not show the norm of A
    norm = (sizes / lengths).maximum((norms(A.multiply(Q)) / sizes).nan_to_num())
    curvature = curvature / lengths**2
    negative = curvature < -100 * torch.finfo(Q.dtype).eps * norm
    if bool(negative.any()):
        lowest = float(curvature[negative].min())
        direction = torch.zeros_like(X)
        direction[s.index[negative]] = scaled(1 / lengths, s.P)[negative]
        raise NegativeCurvatureError(
            f"The matrix is not positive definite: conjugate gradients met a direction of "
            f"curvature {lowest:.1e} (the norm is at least {float(norm.max()):.1e}). Use "
            "MINRESInverseLinearOperator, a Gauss-Newton matrix, or a damping of more than "
            f"{-lowest:.1e}.",
            A.space.vectors(direction.T),
            A.space.vectors(X.T),
        )
