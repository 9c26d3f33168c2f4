"""What a solver or an estimator runs in: linearized operators, and one progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from curvlinops.algorithms.as_operator import operators_in
from curvlinops.linear_operator.operator import TorchLinearOperator, all_linearized
from curvlinops.support.progress import solver_bar
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.team.team import largest

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def solver(name: str, *operators: TorchLinearOperator, callback: Any = None) -> Iterator[None]:
    """Linearize operators, and show one bar for all products.

    An error in one of the processes that multiply together is raised in all, unless they have parts
    of vectors: then they communicate between products, too.

    Args:
        name: The name of the solver.
        *operators: The operators that it multiplies with.
        callback: The user's callback.
    """
    are_whole = not any(operator.domain.is_sharded for operator in operators)
    teams = [operator._team for operator in operators if are_whole]
    linearized = all_linearized(*operators, runs_callback=callback is not None)
    with solver_bar(name), largest(teams).raise_on_all_ranks(), linearized:
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
