"""What happens when an iteration does not reach its tolerance."""

from collections.abc import Callable
from typing import Any

from curvlinops.support.arguments import check_choice
from curvlinops.support.warnings import warn


class ConvergenceWarning(UserWarning):
    """An iterative algorithm has returned a result that is less accurate than it was asked for."""


class ConvergenceError(RuntimeError):
    """An iterative algorithm has not reached its tolerance."""


class NegativeCurvatureError(ConvergenceError):
    """A method for positive definite matrices has met a direction of negative curvature.

    Both vectors are of the kind and shape of the right-hand sides, ``[D]``, ``[D, K]`` or a list or
    dictionary of tensors; tensors ``[K, D]`` if the method was part of another operator.

    Args:
        message: What was met, and what to do.
        direction: See below.
        solution: See below.
        owner: Who knows what the vectors mean, while they are others.

    Attributes:
        direction: For each right-hand side b the direction p that it has met, of norm one, with
            ``p^T A p < 0`` (damping included) and ``p^T (b - A x) >= 0``; zero if it has met none.
        solution: The iterates x so far; those of the least of several dampings.
    """

    def __init__(
        self, message: str, direction: Any = None, solution: Any = None, owner: Any = None
    ):
        super().__init__(message)
        self.direction, self.solution, self._owner = direction, solution, owner

    def change(
        self,
        owner: Any,
        direction: Callable[[Any], Any],
        solution: Callable[[Any], Any],
        then: Any = None,
    ) -> None:
        """Replace both vectors by functions of them, and their owner, if these are the owner's.

        A solver meets also the errors of others of which its matrix is made.
        """
        if self._owner is owner:
            self.direction, self.solution = direction(self.direction), solution(self.solution)
            self._owner = then


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
