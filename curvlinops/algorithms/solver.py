"""The context of a solver or an estimator."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

from curvlinops.algorithms.as_operator import operators_in
from curvlinops.linear_operator.operator import (
    TorchLinearOperator,
    all_linearized,
    raised_in_all,
)
from curvlinops.support.torch_modes import in_default_modes

P = ParamSpec("P")
R = TypeVar("R")


@contextmanager
def solver(*operators: TorchLinearOperator) -> Iterator[None]:
    """Linearize operators.

    An error in one of the processes that multiply together is raised in all, see ``raised_in_all``.

    Args:
        *operators: The operators that it multiplies with.
    """
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
