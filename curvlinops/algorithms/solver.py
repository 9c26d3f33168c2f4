"""What a solver or an estimator runs in: linearized operators, and one progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from curvlinops.linear_operator.operator import TorchLinearOperator, all_linearized
from curvlinops.support.arguments import with_known_keywords
from curvlinops.support.progress import solver_bar
from curvlinops.support.torch_modes import in_default_modes

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def solver(name: str, *operators: TorchLinearOperator, callback: Any = None) -> Iterator[None]:
    """Linearize operators, and show one bar for all products.

    Args:
        name: The name of the solver.
        *operators: The operators that it multiplies with.
        callback: The user's callback.
    """
    with solver_bar(name), all_linearized(*operators, runs_callback=callback is not None):
        yield


def solves(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs a function as a solver with the operators that it takes.

    It runs uncompiled, in PyTorch's default modes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @with_known_keywords
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = [*args, *kwargs.values()]
            operators = (x for x in given if isinstance(x, TorchLinearOperator))
            with solver(name, *operators, callback=kwargs.get("callback")):
                return function(*args, **kwargs)

        return in_default_modes(run)

    return decorate
