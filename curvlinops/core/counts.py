"""Arguments that are numbers of something, or one of a few choices."""

from collections.abc import Iterable
from operator import index
from typing import Any


def check_count(name: str, value: Any, at_least: int = 1) -> int:
    """Return a number that must be an integer: Python's, NumPy's, or a tensor with one.

    Args:
        name: Of the argument.
        value: The number.
        at_least: The smallest that is allowed.

    Raises:
        ValueError: If it is no integer, or too small.
    """
    try:
        # True is an integer to Python
        number = None if isinstance(value, bool) else index(value)
    except TypeError:
        number = None
    if number is None or number < at_least:
        raise ValueError(f"{name} must be an integer >= {at_least}, got {value!r}.")
    return number


def check_choice(name: str, value: Any, choices: Iterable[str]) -> None:
    """Check that an argument is one of some strings.

    Raises:
        ValueError: If it is not.
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {choices}, got {value!r}.")
