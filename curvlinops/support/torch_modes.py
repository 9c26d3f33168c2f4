"""Keeps results independent of PyTorch's modes, of compilation, and of other threads."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from curvlinops.support.devices import WITH_AUTOCAST
from curvlinops.support.torch_internals import disable_compiler, in_transform

P = ParamSpec("P")
R = TypeVar("R")

#: Held while a model is evaluated: all threads share its modules and the random number generators.
_LOCK = threading.RLock()


class _Held:
    """Whether the lock is held; read and written only by the thread that holds it."""

    is_held = False


@contextmanager
def exclusive() -> Iterator[None]:
    """Hold the package's lock, in default modes with gradients, if the thread has it not yet."""
    with _LOCK:
        if _Held.is_held:
            yield
            return
        with default_modes(), torch.enable_grad():
            _Held.is_held = True
            try:
                yield
            finally:
                _Held.is_held = False


@contextmanager
def default_modes() -> Iterator[None]:
    """Leave inference mode, whose tensors autograd refuses, and autocast; refuse ``torch.func``."""
    if in_transform():
        raise RuntimeError(
            "Operators do not work inside of functions that torch.func transforms (vmap, grad, "
            "jvp, jacrev). A @ X multiplies all columns of X at once, and torch.autograd.grad "
            "differentiates products with respect to the vectors."
        )
    kinds = [kind for kind in WITH_AUTOCAST if torch.is_autocast_enabled(kind)]
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


@contextmanager
def without_compiler() -> Iterator[None]:
    """Enter a context in which compiled functions and modules run uncompiled."""
    if "torch._dynamo" in sys.modules:  # as it is once anything was compiled
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    compiler = torch.compile
    torch.compile = lambda model=None, **_: model or (lambda function: function)
    try:
        yield
    finally:
        torch.compile = compiler


def uncompiled(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that is not compiled, also inside of compiled functions."""
    disabled = disable_compiler(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return run


def in_default_modes(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that computes: it runs uncompiled, in PyTorch's default modes."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with default_modes():
            return function(*args, **kwargs)

    return uncompiled(run)
