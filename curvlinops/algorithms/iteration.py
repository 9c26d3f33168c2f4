"""What iterations share: their context, callbacks, and what happens where they do not converge."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import ParamSpec, TypeVar

from torch import Tensor

from curvlinops.algorithms.as_operator import operators_in
from curvlinops.linear_operator.operator import TorchLinearOperator, all_linearized, raised_in_all
from curvlinops.support.arguments import check_choice
from curvlinops.support.torch_internals import pytree
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.support.warnings import warn
from curvlinops.team.team import Team


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """The state of a solver or an estimator after an iteration.

    Tensors are on the device of the matrix. They are copies, which a callback may keep and change.

    Attributes:
        iteration: The number of iterations so far, from one.
        num_products: The number of products with the matrix so far, counted in vectors.
        residuals: Residual norms of all K columns as the recursion computes them, ``[K]``, float64.
        iterate: The solutions so far, ``[D, K]``.
        values: Ritz values, or the estimate so far.
    """

    iteration: int
    num_products: int
    residuals: Tensor | None = None
    iterate: Tensor | None = None
    values: Tensor | None = None


#: A function that is called after each iteration; it stops the iteration if it returns ``True``. If
#: several processes multiply together, it then stops in all of them.
Callback = Callable[[Iteration], bool | None] | None


def check_callback(callback: Callback) -> Callback:
    """Return a callback, or raise a TypeError if it is not callable."""
    if callback is not None and not callable(callback):
        raise TypeError(
            f"callback must be a function of an Iteration, got {callback!r}. None: no callback."
        )
    return callback


def stops(callback: Callback, team: Team, state: Callable[[], Iteration]) -> bool:
    """Call a callback after an iteration; return whether the iteration stops.

    If several processes multiply together, all of them call this function. Each may have a callback
    or none. The iteration stops in all processes if the callback of any returns ``True``.
    """

    def answer() -> bool:
        if callback is None:
            return False
        copies = pytree.tree_map_only(Tensor, Tensor.clone, vars(state()))
        return bool(callback(Iteration(**copies)))

    return team.any(answer)


# --- failures


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
    """Warn that an algorithm has not converged, or raise a ConvergenceError."""
    if on_failure == "raise":
        raise ConvergenceError(message)
    warn(message, ConvergenceWarning)


# --- the context


P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def solver(*operators: TorchLinearOperator) -> Iterator[None]:
    """Linearize operators; raise an error in all processes that multiply together."""
    with raised_in_all(*operators), all_linearized(*operators):
        yield


def solves(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is a solver with the operators that it takes.

    It runs uncompiled, in PyTorch's default modes.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        given = [*args, *kwargs.values()]
        operators = (operator for x in given for operator in operators_in(x))
        with solver(*operators):
            return function(*args, **kwargs)

    return in_default_modes(run)
