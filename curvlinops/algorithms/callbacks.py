"""Callbacks of solvers and estimators, and the state that is passed to them."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from curvlinops.support.torch_internals import pytree
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

    Args:
        callback: The user's callback.
        team: The processes that iterate together.
        state: Returns the state that is passed to the callback.

    Raises:
        RuntimeError: If there is an error in the callback of another process.
    """

    def answer() -> bool:
        return callback is not None and bool(callback(_copied(state())))

    return team.any(answer)


def _copied(state: Iteration) -> Iteration:
    """Return a state with tensors in memory of their own."""
    return Iteration(**pytree.tree_map_only(Tensor, Tensor.clone, vars(state)))
