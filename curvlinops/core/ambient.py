"""PyTorch's ambient modes, on which no number of this package depends."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from inspect import isfunction, isgeneratorfunction
from typing import Any

import torch

#: The types of devices that have an autocast of their own.
_KINDS = ("cpu", "cuda", "mps", "xpu")

#: Methods of operators that compute, though they have an underscore.
_OPERATIONS = {
    *("__add__", "__radd__", "__neg__", "__mul__", "__rmul__", "__truediv__", "__pow__", "_rdot"),
}


def _autocasting() -> list[str]:
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


def without_modes() -> AbstractContextManager:
    """Return a context without inference mode, whose tensors autograd refuses, and autocast."""
    kinds = _autocasting()
    return _without(kinds) if kinds else torch.inference_mode(False)


@contextmanager
def _without(kinds: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def without_autocast(function: Callable) -> Callable:
    """Return the function, run as if there were no autocast around it."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        kinds = _autocasting()
        if not kinds:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            return function(*args, **kwargs)

    return run


def methods_without_autocast(cls: type) -> None:
    """Replace all public methods and properties of a class, and its arithmetic, in place."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in _OPERATIONS:
            continue
        if isfunction(member) and not isgeneratorfunction(member):
            setattr(cls, name, without_autocast(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, member.getter(without_autocast(member.fget)))
