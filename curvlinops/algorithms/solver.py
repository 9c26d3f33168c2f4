"""The context of a solver or an estimator: linearized operators, and one progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from curvlinops.algorithms.as_operator import operators_in
from curvlinops.linear_operator.operator import (
    TorchLinearOperator,
    all_linearized,
    raised_in_all,
)
from curvlinops.support.progress import solver_bar
from curvlinops.support.torch_modes import in_default_modes

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def solver(name: str, *operators: TorchLinearOperator, callback: Any = None) -> Iterator[None]:
    """Linearize operators, and show one bar for all products.

    An error in one of the processes that multiply together is raised in all, see ``raised_in_all``.

    Args:
        name: The name of the solver.
        *operators: The operators that it multiplies with.
        callback: The user's callback.
    """
    linearized = all_linearized(*operators, runs_callback=callback is not None)
    with solver_bar(name), raised_in_all(*operators), linearized:
        yield


def solves(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that runs a function as a solver with the operators that it takes.

    It runs uncompiled, in PyTorch's default modes.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            given = [*args, *kwargs.values()]
            operators = (operator for x in given for operator in operators_in(x))
            with solver(name, *operators, callback=kwargs.get("callback")):
                return function(*args, **kwargs)

        return in_default_modes(run)

    return decorate
