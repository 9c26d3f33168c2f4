"""Warnings and errors of iterations that do not reach their tolerance."""

from torch import Tensor

from curvlinops.support.arguments import check_choice
from curvlinops.support.warnings import warn


class ConvergenceWarning(UserWarning):
    """An iterative algorithm has returned a result that misses the requested accuracy."""


class ConvergenceError(RuntimeError):
    """An iterative algorithm has not reached its tolerance."""


class NegativeCurvatureError(ConvergenceError):
    """A method for positive definite matrices has met a direction of negative curvature.

    Args:
        message: The text.
        direction: For each right-hand side b a direction p of norm one with ``p^T A p < 0``
            (damping included) and ``p^T (b - A x) >= 0``; zero for the others. A tensor ``[D, K]``
            for K right-hand sides of any type, ``[D, 1]`` for a single one.
        solution: The iterates x so far, ``[D, K]``.
    """

    def __init__(self, message: str, direction: Tensor, solution: Tensor):
        super().__init__(message)
        self.direction, self.solution = direction, solution


class DivergenceError(ConvergenceError, ValueError):
    """The terms of a series grow, so that it does not converge."""


def check_on_failure(on_failure: str) -> None:
    """Check the argument ``on_failure``."""
    check_choice("on_failure", on_failure, ("warn", "raise"))


def fail(message: str, on_failure: str) -> None:
    """Warn that an algorithm has not converged, or raise an error.

    Args:
        message: The text.
        on_failure: ``"warn"`` or ``"raise"``.

    Raises:
        ConvergenceError: If ``on_failure`` is ``"raise"``.
    """
    if on_failure == "raise":
        raise ConvergenceError(message)
    warn(message, ConvergenceWarning)
