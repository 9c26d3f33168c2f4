"""Takes models and losses as constant while a solver runs."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any


@contextmanager
def frozen(*operators: Any) -> Iterator[None]:
    """Take models and losses as constant: they are compared once, not at each product.

    Solvers and estimators multiply many times in this context. Batches are still compared.

    Args:
        *operators: Operators, with all the operators that they are made of. Other things are
            ignored.
    """
    with ExitStack() as stack:
        for part in _freezable(operators):
            part.freeze()
            stack.callback(part.unfreeze)
        yield


def _freezable(operators: tuple) -> list[Any]:
    """Return the objects with ``freeze`` and ``unfreeze`` that attributes of operators lead to."""
    freezable, stack, seen = [], list(operators), set()
    package = __name__.partition(".")[0]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, list | tuple):
            stack += part
        elif type(part).__module__.partition(".")[0] == package:
            if hasattr(part, "freeze"):
                freezable.append(part)
            else:
                stack += getattr(part, "__dict__", {}).values()
    return freezable
