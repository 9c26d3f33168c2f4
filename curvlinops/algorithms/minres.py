"""The inverse of a symmetric matrix, indefinite or singular, by minimal residuals."""

import torch
from torch import Tensor

from curvlinops.algorithms.krylov import (
    DampedMatrix,
    IterationLog,
    KrylovInverseLinearOperator,
    Systems,
    add_scaled,
    check_positive,
    scaled,
)


class MINRESInverseLinearOperator(KrylovInverseLinearOperator):
    """The inverse of a symmetric matrix by minimal residuals.

    ``(A + damping I)^-1`` for a matrix that may be indefinite, such as a Hessian, for all
    right-hand sides at once (Paige and Saunders, Solution of sparse indefinite systems of linear
    equations, SIAM J. Numer. Anal. 1975). A singular matrix is fine if the right-hand side lies in
    its range; there are then many solutions, and one of them is returned. Otherwise the system is
    reported as unsolved; ``LSMRInverseLinearOperator`` solves it in the sense of least squares.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        **options: See ``curvlinops.algorithms.krylov.KrylovInverseLinearOperator``. The damping may
            be negative.

    Raises:
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
    """

    def _improve(
        self, A: DampedMatrix, X: Tensor, log: IterationLog, systems: Systems, budget: int
    ) -> None:
        s = _start(A, systems, A.precondition(systems.R))
        for _ in range(budget):
            v, alpha = _lanczos(A, s)
            tau, ended = _rotate(s, v, alpha)
            X.index_add_(0, s.index, scaled(tau, s.w))
            sizes = A.space.norms(s.R)
            going = (sizes > s.goal) & ~ended
            if log.add(X, s, sizes) or not bool(going.any()):
                break
            s.keep(going)


def _start(A: DampedMatrix, systems: Systems, z: Tensor) -> Systems:
    """Return the state before the first iteration.

    The state holds the Lanczos recurrence ``A v_k = beta_k v_(k-1) + alpha_k v_k + beta_(k+1)
    v_(k+1)`` in the inner product of the preconditioner M, and the QR decomposition of its
    tridiagonal matrix by Givens rotations. Preconditioned residuals are z.
    """
    beta = check_positive(A.space.dots(systems.R, z)).sqrt()
    zero, one, zeros = torch.zeros_like(beta), torch.ones_like(beta), torch.zeros_like(z)
    return Systems(
        **vars(systems),
        y=systems.R,  # the next vector is v = M y / beta
        y_old=zeros,
        z=z,  # M y
        beta=beta,  # <y, M y>^(1/2)
        beta_old=one,
        norm=zero,  # a lower bound on the norm of the matrix
        phi=beta,  # the residual's norm in the norm of M
        cos=-one,  # the last rotation
        sin=zero,
        below=zero,  # entry of the next rotated column, one above the diagonal
        above=zero,  # and two above the diagonal
        w=zeros,  # directions
        w_old=zeros,
    )


def _lanczos(A: DampedMatrix, s: Systems) -> tuple[Tensor, Tensor]:
    """Extend the Krylov space; return the last vector v, and ``<v, A v>``."""
    v = scaled(1 / s.beta, s.z)
    u = add_scaled(A.multiply(v), -s.beta / s.beta_old, s.y_old)
    alpha = A.space.dots(v, u)
    u = add_scaled(u, -alpha / s.beta, s.y)
    s.y, s.y_old, s.z = u, s.y, A.precondition(u)
    squares = A.space.dots(s.y, s.z)
    # at the end of the Krylov space rounding may make a square negative
    slack = 100 * torch.finfo(v.dtype).eps * A.space.norms(s.y) * A.space.norms(s.z)
    check_positive((squares + slack).where(squares < 0, 1.0))
    s.beta, s.beta_old = squares.clamp(min=0.0).sqrt(), s.beta
    return v, alpha


def _rotate(s: Systems, v: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """Update directions and residuals; return the step's length, and which systems end."""
    s.norm = s.norm.maximum(torch.hypot(alpha, s.beta))
    tiny = 10 * torch.finfo(v.dtype).eps * s.norm
    delta, gamma_bar = s.cos * s.below + s.sin * alpha, s.sin * s.below - s.cos * alpha
    above, s.above, s.below = s.above, s.sin * s.beta, -s.cos * s.beta
    gamma = torch.hypot(gamma_bar, s.beta)
    # ||A r|| / ||r|| is tiny: the residual is orthogonal to the matrix's range
    outside = (torch.hypot(gamma_bar, s.below) <= tiny) | (gamma <= tiny)
    gamma = gamma.where(~outside, 1.0)
    s.cos, s.sin = gamma_bar / gamma, s.beta / gamma
    w = add_scaled(add_scaled(v, -above, s.w_old), -delta, s.w)
    s.w, s.w_old = scaled(1 / gamma, w), s.w
    tau, s.phi = (s.cos * s.phi).where(~outside, 0.0), s.sin * s.phi
    ended = outside | (s.beta <= tiny)
    s.R = add_scaled(scaled(s.sin**2, s.R), -(s.phi * s.cos / s.beta).where(~ended, 0.0), s.y)
    return tau, ended
