"""What happens when an iteration does not reach its tolerance."""

from curvlinops.core.arguments import check_choice
from curvlinops.core.warn import warn


class ConvergenceWarning(UserWarning):
    """An iterative algorithm has returned a result that is less accurate than it was asked for."""


class ConvergenceError(RuntimeError):
    """An iterative algorithm has not reached its tolerance."""


class NegativeCurvatureError(ConvergenceError):
    """A method for positive definite matrices has met a direction of negative curvature."""


class DivergenceError(ConvergenceError, ValueError):
    """A series does not converge for the options that were chosen: its terms grow."""


def check_on_failure(on_failure: str) -> None:
    """Check the argument that says what happens without convergence."""
    check_choice("on_failure", on_failure, ("warn", "raise"))


def fail(message: str, on_failure: str) -> None:
    """Say that an algorithm has not converged.

    Args:
        message: What was not reached, and what to do.
        on_failure: ``"warn"`` or ``"raise"``.

    Raises:
        ConvergenceError: If ``on_failure`` says so.
    """
    if on_failure == "raise":
        raise ConvergenceError(message)
    warn(message, ConvergenceWarning)
