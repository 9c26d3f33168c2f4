"""The inverse of a symmetric matrix, indefinite or singular, by minimal residuals."""

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops.algorithms.inverse import KrylovInverseLinearOperator, Systems, check_positive
from curvlinops.algorithms.products import Products, dots, norms, scaled
from curvlinops.support.progress import show_residuals

#: What may turn out to be no curvature at all, relative to the matrix's norm.
_LITTLE = 1e-3


class MINRESInverseLinearOperator(KrylovInverseLinearOperator):
    """The inverse of a symmetric matrix by minimal residuals.

    ``(A + damping I)^-1`` for a matrix that may be indefinite, such as a Hessian, for all
    right-hand sides at once (Paige and Saunders, Solution of sparse indefinite systems of linear
    equations, SIAM J. Numer. Anal. 1975). A singular matrix is fine if the right-hand side lies in
    its range; the solution then is one of many. If it does not, the system is reported as
    unsolved, and the residual near the least one only as far as nonzero eigenvalues are above a
    thousandth of the largest: shares of smaller ones may stay, in float32 about twice the least.

    For arguments see ``KrylovInverseLinearOperator``: they end with the true residual.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        **options: ``preconditioner`` (positive definite), ``rtol=1e-5``, ``atol=0``, ``maxiter``,
            ``damping=0`` (may be negative), ``x0``, ``on_failure="warn"``.

    Raises:
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
    """

    def _correct(self, A: Products, R: Tensor, goal: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        X, count = torch.zeros_like(R), torch.zeros(len(R), dtype=torch.int64, device=R.device)
        z = A.precondition(R)
        state = _start(R, z, check_positive(_inner(R, z), R).sqrt(), goal)
        retreat, unsolved = _Retreat(X), torch.ones_like(goal, dtype=torch.bool)
        for _ in range(budget):
            v, alpha = _lanczos(A, state)
            tau, curvature, ended = _rotate(state, v, alpha)
            retreat.offer(state.place, curvature)
            X.index_add_(0, state.place, scaled(tau, state.w))
            count[state.place] += 1
            sizes = norms(state.R)
            show_residuals((sizes, state.goal))
            unsolved[state.place] = sizes > state.goal
            going = unsolved[state.place] & ~ended
            if not bool(going.any()):
                break
            state.keep(going)
        return _better(A, X, retreat, R, unsolved), count


class _Retreat:
    """The iterates before the first step of little curvature, in case that later ones are lost.

    Those of singular systems without a solution grow where the matrix has no range.

    Args:
        X: The iterates at the start, ``[K, D]``.
    """

    def __init__(self, X: Tensor):
        self.X: Tensor | None = None
        self._all, self._fixed = X, torch.zeros(len(X), dtype=torch.bool, device=X.device)

    def offer(self, place: Tensor, curvature: Tensor) -> None:
        """Keep the iterates at ``place`` that are about to take a step of little curvature.

        Args:
            place: Which of them take a step.
            curvature: Its curvature, relative to the norm of the matrix.
        """
        rows = place[(curvature <= _LITTLE) & ~self._fixed[place]]
        if len(rows):
            self.X = torch.zeros_like(self._all) if self.X is None else self.X
            self.X[rows], self._fixed[rows] = self._all[rows], True


@dataclass
class _State(Systems):
    """The three-term recurrence, and the QR decomposition of its tridiagonal matrix."""

    R: Tensor  # residuals
    goal: Tensor
    y: Tensor  # v = M y / beta
    y_old: Tensor
    z: Tensor  # M y
    beta: Tensor
    beta_old: Tensor
    phi: Tensor  # the residual's norm in the preconditioner's norm
    scale: Tensor  # of the matrix
    cos: Tensor  # the last rotation
    sin: Tensor
    below: Tensor  # what it has left for the next column
    above: Tensor
    w: Tensor  # directions
    w_old: Tensor


def _better(A: Products, X: Tensor, retreat: _Retreat, R: Tensor, unsolved: Tensor) -> Tensor:
    """Return the solutions of ``A X = R`` with the smaller true residuals, where unsolved."""
    rows = unsolved.nonzero().squeeze(1)
    if retreat.X is not None and len(rows):
        both = torch.cat([X[rows], retreat.X[rows]])
        residuals = norms(R[rows].repeat(2, 1) - A.multiply(both)).nan_to_num(torch.inf)
        found, before = residuals.unflatten(0, (2, -1))
        worse = rows[before < found]
        X[worse] = retreat.X[worse]
    return X


def _lanczos(A: Products, s: _State) -> tuple[Tensor, Tensor]:
    """Extend the Krylov space; return its last vector, and the matrix's value there."""
    v = scaled(1 / s.beta, s.z)
    u = A.multiply(v) - scaled(s.beta / s.beta_old, s.y_old)
    alpha = dots(v, u)
    u = u - scaled(alpha / s.beta, s.y)
    s.y, s.y_old, s.z = u, s.y, A.precondition(u)
    product = _inner(s.y, s.z)
    # rounding may make it negative where the space ends
    slack = 100 * torch.finfo(v.dtype).eps * norms(s.y) * norms(s.z)
    check_positive((product + slack).where(product < 0, 1.0), s.y)
    s.beta, s.beta_old = product.clamp(min=0.0).sqrt(), s.beta
    return v, alpha


def _inner(y: Tensor, z: Tensor) -> Tensor:
    """Return inner products of rows of the matrix's size, whose squares may be no numbers."""
    size = norms(y)
    size = size.where(size > 0, 1.0)
    return dots(scaled(1 / size, y), z) * size


def _start(R: Tensor, z: Tensor, beta: Tensor, goal: Tensor) -> _State:
    zero, one, rows = torch.zeros_like(beta), torch.ones_like(beta), torch.zeros_like(R)
    return _State(
        place=torch.arange(len(R), device=R.device),
        R=R,
        goal=goal,
        y=R,
        y_old=rows,
        z=z,
        beta=beta,
        beta_old=one,
        phi=beta,
        scale=zero,
        cos=-one,
        sin=zero,
        below=zero,
        above=zero,
        w=rows,
        w_old=rows,
    )


def _rotate(s: _State, v: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Update the directions and residuals.

    Returns:
        The step's length; ``||A r|| / ||r||`` before it, relative to the norm of A; and which
        spaces end.
    """
    s.scale = s.scale.maximum(torch.hypot(alpha, s.beta))
    tiny = 10 * torch.finfo(v.dtype).eps * s.scale
    delta, gamma_bar = s.cos * s.below + s.sin * alpha, s.sin * s.below - s.cos * alpha
    above, s.above, s.below = s.above, s.sin * s.beta, -s.cos * s.beta
    gamma = torch.hypot(gamma_bar, s.beta)
    # what is left of the residual is out of the matrix's range
    curvature = torch.hypot(gamma_bar, s.below)
    outside = (curvature <= tiny) | (gamma <= tiny)
    gamma = gamma.where(~outside, 1.0)
    s.cos, s.sin = gamma_bar / gamma, s.beta / gamma
    w = v - scaled(above, s.w_old) - scaled(delta, s.w)
    s.w, s.w_old = scaled(1 / gamma, w), s.w
    tau, s.phi = (s.cos * s.phi).where(~outside, 0.0), s.sin * s.phi
    ended = outside | (s.beta <= tiny)
    fresh = (s.phi * s.cos / s.beta).where(~ended, 0.0)
    s.R = scaled(s.sin**2, s.R) - scaled(fresh, s.y)
    return tau, curvature / s.scale, ended
