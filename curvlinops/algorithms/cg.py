"""The inverse of a positive definite matrix by conjugate gradients."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, TypedDict, Unpack, overload

import torch
from torch import Tensor

from curvlinops.algorithms.convergence import NegativeCurvatureError
from curvlinops.algorithms.inverse import (
    KrylovInverseLinearOperator,
    Solution,
    Systems,
    check_positive,
)
from curvlinops.algorithms.matrix import AnyMatrix, Preconditioner, read_preconditioner
from curvlinops.algorithms.products import Products, dots, norms, scaled, solutions, unit_rows
from curvlinops.linear_operator.vectors import Array, Vectors, to_columns
from curvlinops.support.arguments import without_graph
from curvlinops.support.progress import show_residuals, solver
from curvlinops.support.torch_modes import default_modes

#: How other libraries call the options.
_NAMES = {
    "M": "preconditioner",
    "tol": "rtol",
    "tolerance": "rtol",
    "max_iter": "maxiter",
    "initial_guess": "x0",
}


class _Aliases(TypedDict, total=False):
    M: Preconditioner
    tol: float
    tolerance: float
    max_iter: int | None
    initial_guess: Vectors | None
    eps: float
    max_tridiag_iter: int


class _Options(_Aliases, total=False):
    preconditioner: Preconditioner
    rtol: float
    atol: float | None


class CGInverseLinearOperator(KrylovInverseLinearOperator):
    """The inverse of a symmetric positive definite matrix by conjugate gradients.

    ``(A + damping I)^-1`` (Hestenes and Stiefel, 1952), for all right-hand sides at once; those
    that are solved drop out. A singular matrix is fine if the right-hand side lies in its range.

    For arguments see ``KrylovInverseLinearOperator``: they end with the true residual.

    Truncated Newton methods (Steihaug, 1983) go on where it meets negative curvature: after
    ``except NegativeCurvatureError as error``, along ``error.direction`` from ``error.solution``.

    Args:
        A: A symmetric positive definite operator or matrix of any kind, ``[D, D]``.
        preconditioner: See ``KrylovInverseLinearOperator``, as for all that follow.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        maxiter: Largest number of iterations.
        damping: Multiple of the identity that is added.
        x0: Start of the iteration.
        on_failure: ``"warn"`` or ``"raise"``.
        **aliases: The same under the names of SciPy (``M``, ``tol``) and of GPyTorch
            (``tolerance``, ``max_iter``, ``initial_guess``), whose ``eps`` must be zero, and whose
            ``max_tridiag_iter`` says nothing here.

    Raises:
        NegativeCurvatureError: If the iteration meets a direction of negative curvature.
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
        TypeError: If an option is unknown, or given under two names.
    """

    def __init__(
        self,
        A: AnyMatrix,
        *,
        preconditioner: Preconditioner = None,
        rtol: float = 1e-5,
        atol: float = 0.0,
        maxiter: int | None = None,
        damping: float = 0.0,
        x0: Vectors | None = None,
        on_failure: str = "warn",
        **aliases: Unpack[_Aliases],
    ):
        options = {
            "preconditioner": preconditioner,
            "rtol": rtol,
            "atol": atol,
            "maxiter": maxiter,
            "damping": damping,
            "x0": x0,
            "on_failure": on_failure,
        }
        renamed = _renamed(aliases)
        _check_known(renamed, options)
        given = signature(CGInverseLinearOperator).parameters
        if twice := [name for name in renamed if options[name] is not given[name].default]:
            raise TypeError(f"{twice} are given twice, also by {sorted(aliases)}.")
        super().__init__(A, **options | renamed)

    def set_cg_hyperparameters(
        self,
        x0: Vectors | None = None,
        maxiter: int | None = None,
        **options: Unpack[_Options],
    ) -> None:
        """Set options after construction; those that are not given have their defaults.

        Args:
            x0: Start of the iteration.
            maxiter: Largest number of iterations.
            **options: ``preconditioner``, ``rtol`` and ``atol``, under any name of theirs, and
                other names of ``maxiter``.
        """
        found = {"preconditioner": None, "rtol": 1e-5, "atol": None, "maxiter": None}
        if maxiter is not None:
            options["maxiter"] = maxiter
        given = _renamed(options)
        _check_known(given, found)
        found |= given
        preconditioner = read_preconditioner(found["preconditioner"], self._matrix)
        atol = 0.0 if found["atol"] is None else found["atol"]
        self._set(found["rtol"], atol, found["maxiter"], x0)
        self._preconditioner = preconditioner

    def _correct(self, A: Products, R: Tensor, goal: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        X, count = torch.zeros_like(R), torch.zeros(len(R), dtype=torch.int64, device=R.device)
        P = A.precondition(R)
        rho, place = check_positive(dots(R, P), R), torch.arange(len(R), device=R.device)
        s = _State(place=place, R=R, goal=goal, P=P, rho=rho, scale=torch.zeros_like(goal))
        for _ in range(budget):
            Q = A.multiply(s.P)
            curvature = _curvature(A, s, Q, lambda: X, A)
            # a direction without curvature is of no use: the matrix is singular
            alpha = (s.rho / curvature).where(curvature > 0, 0.0)
            X.index_add_(0, s.place, scaled(alpha, s.P))
            count[s.place] += 1
            s.R = s.R - scaled(alpha, Q)
            sizes = norms(s.R)
            show_residuals((sizes, s.goal))
            going = (sizes > s.goal) & (curvature > 0)
            if not bool(going.any()):
                break
            s.keep(going)
            Z = A.precondition(s.R)
            s.rho, before = check_positive(dots(s.R, Z), s.R), s.rho
            s.P = Z + scaled(s.rho / before, s.P)
        return X, count

    @overload
    def solve_shifted(self, B: Array, dampings: Sequence[float]) -> list[Solution[Array]]: ...
    @overload
    def solve_shifted(
        self, B: Sequence[Tensor], dampings: Sequence[float]
    ) -> list[Solution[list[Tensor]]]: ...
    @overload
    def solve_shifted(
        self, B: Mapping[str, Tensor], dampings: Sequence[float]
    ) -> list[Solution[dict[str, Tensor]]]: ...
    def solve_shifted(self, B: Vectors, dampings: Sequence[float]) -> list[Solution]:
        """Solve for several values of the damping, with the products of one.

        Multi-shift conjugate gradients (van den Eshof and Sleijpen, Accurate conjugate gradient
        methods for families of shifted systems, 2004): the Krylov spaces of all are the same.

        Args:
            B: Right-hand sides: a vector or several, of any kind that operators take.
            dampings: The values, which replace ``damping``.

        Returns:
            A solution for each of the values, in their order. ``iterations`` counts those shared.

        Raises:
            ValueError: If there is a preconditioner, for which the spaces differ.
        """
        if self._preconditioner is not None:
            raise ValueError("Several dampings at once work without a preconditioner only.")
        values = [float(without_graph(damping, "A damping")) for damping in dampings]
        shifts = torch.tensor(values, dtype=torch.float64, device="cpu")
        if not len(shifts) or not bool(shifts.isfinite().all()):
            raise ValueError(f"dampings must be finite numbers, got {dampings}.")
        found, least = [], shifts.min()
        without_graph(B, "The right-hand side")
        with solver(type(self).__name__, self), default_modes(), self._vectors_like(B):
            columns, write = to_columns(B, self.domain)
            rows, family = self.domain.join(columns), self._products(float(least))
            starts, shared = self._solve_family(family, rows, (shifts - least).to(rows.device))
            for damping, start in zip(shifts.tolist(), starts.unbind(1), strict=True):
                X, *info = self._solve(self._products(damping), rows, start, shared)
                found.append(Solution(write(self.codomain.split(X), self.codomain), *info))
        return found

    def _solve_family(self, A: Products, B: Tensor, shifts: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``[K, S, D]``, solutions as the recursion sees them, and the iterations."""
        B, sizes = unit_rows(B)
        goal = 0.9 * (self.rtol * norms(B)).maximum(self.atol / sizes)
        X = torch.zeros(len(B), len(shifts), B.shape[1], dtype=B.dtype, device=B.device)
        count = torch.zeros(len(B), dtype=torch.int64, device=B.device)
        s, least = _start_family(B, goal, len(shifts)), int(shifts.argmin())
        s.keep(norms(B) > goal)
        for _ in range(self.maxiter if len(s.place) else 0):
            Q = A.multiply(s.P)
            curvature = _curvature(A, s, Q, lambda: solutions(X[:, least], sizes / A.unit), self)
            alpha = (s.rho / curvature).where(curvature > 0, 0.0)
            going = s.zeta.abs() * s.rho.sqrt()[:, None] > s.goal[:, None]
            ratio = _ratio(s, alpha, shifts / A.unit).where(going, 0.0)
            X.index_add_(0, s.place, (alpha[:, None] * ratio)[..., None].to(B) * s.shifted)
            count[s.place] += 1
            s.R = s.R - scaled(alpha, Q)
            rho = dots(s.R, s.R)
            s.beta, s.rho, s.alpha = rho / s.rho, rho, alpha
            s.zeta, s.zeta_old = (s.zeta * ratio).where(going, s.zeta), s.zeta
            s.shifted = s.zeta[..., None].to(B) * s.R[:, None] + (
                (s.beta[:, None] * ratio**2)[..., None].to(B) * s.shifted
            )
            s.P = s.R + scaled(s.beta, s.P)
            left = s.zeta.abs() * s.rho.sqrt()[:, None]
            show_residuals((left, s.goal[:, None]))
            going &= left > s.goal[:, None]
            going = going.any(dim=1) & (curvature > 0)
            if not bool(going.any()):
                break
            s.keep(going)
        factors = (sizes / (A.unit or 1.0)).repeat_interleave(len(shifts))
        return solutions(X.flatten(0, 1), factors).view_as(X), count


@dataclass
class _State(Systems):
    """Conjugate gradients: residuals, directions, and their sizes."""

    R: Tensor
    goal: Tensor
    P: Tensor
    rho: Tensor  # <r, M r>
    scale: Tensor  # of the matrix


@dataclass
class _Family(_State):
    """S shifted systems for each right-hand side: their residuals are multiples of one."""

    shifted: Tensor  # directions [K, S, D]
    zeta: Tensor  # the multiples [K, S]
    zeta_old: Tensor
    alpha: Tensor  # of the step before
    beta: Tensor


def _curvature(
    A: Products, s: _State, Q: Tensor, found: Callable[[], Tensor], owner: Any
) -> Tensor:
    """Return ``<p, A p>``, unless it is negative beyond rounding.

    Args:
        A: The matrix.
        s: The state.
        Q: Its directions, multiplied.
        found: Returns the solutions so far, for the error.
        owner: Who knows what these mean.
    """
    curvature, size = dots(s.P, Q), dots(s.P, s.P)
    s.scale = s.scale.maximum(norms(Q) / size.sqrt())
    rounding = 100 * torch.finfo(Q.dtype).eps * size
    if bool((curvature < -rounding * s.scale).any()):
        s.scale = s.scale.maximum(A.norms_seen_by(Q))
    negative = curvature < -rounding * s.scale
    if bool(negative.any()):
        lowest = A.unit * float((curvature / size)[negative].min())
        norm = A.unit * float(s.scale.max())
        direction = torch.zeros_like(solution := found())
        direction[s.place[negative]] = scaled(1 / norms(s.P), s.P)[negative]
        raise NegativeCurvatureError(
            f"The matrix is not positive definite: conjugate gradients met a direction of "
            f"curvature {lowest:.1e} (the norm is at least {norm:.1e}). Use "
            "MINRESInverseLinearOperator, a Gauss-Newton matrix, or a damping of more than "
            f"{-lowest:.1e}.",
            direction,
            solution,
            owner,
        )
    return curvature


def _start_family(B: Tensor, goal: Tensor, num_shifts: int) -> _Family:
    place, one = torch.arange(len(B), device=B.device), torch.ones_like(goal)
    shifted = B[:, None].expand(-1, num_shifts, -1)
    zeta = one[:, None].expand(-1, num_shifts)
    zero = torch.zeros_like(goal)
    single = {"place": place, "R": B, "goal": goal, "P": B, "rho": dots(B, B), "scale": zero}
    return _Family(**single, shifted=shifted, zeta=zeta, zeta_old=zeta, alpha=one, beta=zero)


def _ratio(s: _Family, alpha: Tensor, shifts: Tensor) -> Tensor:
    """Return the next zeta in units of this one, ``[K, S]``."""
    alpha, before, beta = alpha[:, None], s.alpha[:, None], s.beta[:, None]
    numerator = before * s.zeta_old
    return numerator / (numerator * (1 + alpha * shifts) + alpha * beta * (s.zeta_old - s.zeta))


def _check_known(given: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    if unknown := sorted(given.keys() - options.keys()):
        raise TypeError(f"There are no options {unknown}; there are {sorted(options)}.")


def _renamed(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options under their names in this package."""
    options = dict(options)
    # which iterations record their tridiagonal matrix: none does here
    options.pop("max_tridiag_iter", None)
    if options.pop("eps", 0) != 0:
        raise ValueError("Nothing is added to the matrix but damping: omit eps, or choose eps=0.")
    renamed = {_NAMES.get(name, name): value for name, value in options.items()}
    if len(renamed) < len(options):
        raise TypeError(f"Options {sorted(options)} name the same twice: {sorted(renamed)}.")
    return renamed
