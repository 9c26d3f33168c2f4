"""Keeps results independent of PyTorch's modes, of compilation, and of other threads."""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from curvlinops.support.torch_internals import disable_compiler, in_transform

P = ParamSpec("P")
R = TypeVar("R")

#: Held while a model is evaluated: all threads share its modules and the random number generators.
_LOCK = threading.Lock()


class _Thread(threading.local):
    """Whether the current thread holds the lock."""

    holds_lock = False


_THREAD = _Thread()

#: The types of devices that have an autocast of their own.
_KINDS = ("cpu", "cuda", "mps", "xpu")


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the package's lock, in PyTorch's default modes; nothing changes if that is held.

    The lock is released while ``fetched`` waits for data.
    """
    if _THREAD.holds_lock:
        yield
        return
    with _LOCK, default_modes(), torch.enable_grad():
        _THREAD.holds_lock = True
        try:
            yield
        finally:
            _THREAD.holds_lock = False


@contextmanager
def _unlocked() -> Iterator[None]:
    _THREAD.holds_lock = False
    _LOCK.release()
    try:
        yield
    finally:
        _LOCK.acquire()
        _THREAD.holds_lock = True


def fetched(data: Iterable) -> Iterator:
    """Yield the items of a user's iterable; other threads may multiply while it fetches them."""
    with _unlocked():
        items = iter(data)
    while True:
        with _unlocked():
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


@contextmanager
def default_modes() -> Iterator[None]:
    """Leave inference mode, whose tensors autograd refuses, and autocast.

    Whether gradients are recorded stays; in inference mode they are not.

    Raises:
        RuntimeError: In a transform of ``torch.func``, which would differentiate wrongly.
    """
    if in_transform():
        raise RuntimeError(
            "Operators do not work inside of functions that torch.func transforms (vmap, grad, "
            "jvp, jacrev). A @ X multiplies all columns of X at once, and torch.autograd.grad "
            "differentiates products with respect to the vectors."
        )
    kinds = [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]
    if not kinds and not torch.is_inference_mode_enabled():
        yield
        return
    recording = torch.is_grad_enabled()
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(torch.set_grad_enabled(recording))
        yield


#: Decorates functions that compute: they run in PyTorch's default modes.
in_default_modes = default_modes()


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is not compiled, also inside of compiled functions."""
    disabled = disable_compiler(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return run
