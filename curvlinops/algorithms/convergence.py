"""What happens when an iteration does not reach its tolerance."""

import sys
import warnings
from pathlib import Path

import scipy

#: Where warnings are not attributed to.
_LIBRARIES = (str(Path(__file__).parent.parent), str(Path(scipy.__file__).parent))


class ConvergenceWarning(UserWarning):
    """An iterative algorithm has returned a result that is less accurate than it was asked for."""


class ConvergenceError(RuntimeError):
    """An iterative algorithm has not reached its tolerance."""


class NegativeCurvatureError(ConvergenceError):
    """A method for positive definite matrices has met a direction of negative curvature."""


def check_on_failure(on_failure: str) -> None:
    """Check the argument that says what happens without convergence."""
    if on_failure not in ("warn", "raise"):
        raise ValueError(f"on_failure must be 'warn' or 'raise', got {on_failure!r}.")


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
    frame, level = sys._getframe(1), 2
    # products are called from many places in the package and in scipy: find the user's line
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ConvergenceWarning, stacklevel=level)
