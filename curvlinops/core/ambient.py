"""PyTorch's ambient modes and other threads, on which no number of this package depends."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from curvlinops.core.torch_internals import in_transform

P = ParamSpec("P")
R = TypeVar("R")

#: Products use the module and the generators of random numbers, of which there is but one.
_LOCK = threading.RLock()


#: The types of devices that have an autocast of their own.
_KINDS = ("cpu", "cuda", "mps", "xpu")


def _autocasting() -> list[str]:
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


@contextmanager
def alone() -> Iterator[None]:
    """Let no other thread of this package evaluate models, and nothing around change numbers.

    Other threads have a turn in ``fetched``.
    """
    with _LOCK, without_modes():
        yield


@contextmanager
def _others_first() -> Iterator[None]:
    """Inside of ``alone``, let other threads of this package go on."""
    _LOCK.release()
    try:
        yield
    finally:
        _LOCK.acquire()


def fetched(data: Iterable) -> Iterator:
    """Yield what a user's iterable yields, which may wait for other threads of this package."""
    with _others_first():
        items = iter(data)
    while True:
        with _others_first():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


def without_modes() -> AbstractContextManager:
    """Return a context without inference mode, whose tensors autograd refuses, and autocast.

    Raises:
        RuntimeError: In a transform of ``torch.func``, where tensors mean something else.
    """
    if in_transform():
        raise RuntimeError(
            "Operators do not work inside of functions that torch.func transforms (vmap, grad, "
            "jvp, jacrev). A @ X multiplies all columns of X at once, and torch.autograd.grad "
            "differentiates products with respect to the vectors."
        )
    kinds = _autocasting()
    return _without(kinds) if kinds else torch.inference_mode(False)


@contextmanager
def _without(kinds: list[str]) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def free_of_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, run as if there were no modes around it.

    Whether gradients are recorded stays; in inference mode they are not.
    """

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        kinds, recording = _autocasting(), torch.is_grad_enabled()
        if not kinds and not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with _without(kinds), torch.set_grad_enabled(recording):
            return function(*args, **kwargs)

    return run


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Return the function, which ``torch.compile`` leaves alone where compiled functions call it.

    It is ``torch.compiler.disable``, but for the import of the compiler, which takes a second.
    """
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return run
