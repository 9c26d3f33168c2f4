"""PyTorch's ambient modes and other threads, on which no number of this package depends."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import wraps
from inspect import isfunction, isgeneratorfunction
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks

from curvlinops.core.functions import in_transform
from curvlinops.core.loans import entered, num_loans, surroundings, undo_loans

#: Products use the module and the generators of random numbers, of which there is but one.
_LOCK = threading.RLock()


def _renew() -> None:
    """Let a process that is forked have a lock of its own, which no other thread holds."""
    global _LOCK
    _LOCK = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)

#: The types of devices that have an autocast of their own.
_KINDS = ("cpu", "cuda", "mps", "xpu")

#: Methods of operators that compute, though they have an underscore.
_OPERATIONS = {
    *("__add__", "__radd__", "__neg__", "__mul__", "__rmul__", "__truediv__", "__pow__", "_rdot"),
    *("__matmul__", "__rmatmul__"),
    "__init__",
}


def _autocasting() -> list[str]:
    return [kind for kind in _KINDS if torch.is_autocast_enabled(kind)]


def _hooked() -> bool:
    """Return whether there are hooks on what graphs save, which may save it in less precision."""
    try:
        with disable_saved_tensors_hooks(""):  # raises if there are some
            return False
    except RuntimeError:
        return True


@contextmanager
def alone() -> Iterator[None]:
    """Let no other thread of this package evaluate models, and nothing around change numbers."""
    with entered() as stack:
        stack.enter_context(_LOCK)
        with surroundings():
            stack.enter_context(without_modes())
            yield


def without_modes() -> AbstractContextManager:
    """Return a context in which graphs are recorded as if there were no modes around it.

    It is without inference mode, whose tensors autograd refuses, without autocast, and without
    hooks on the tensors that graphs save.

    Raises:
        RuntimeError: In a transform of ``torch.func``, where tensors mean something else.
    """
    if in_transform():
        raise RuntimeError(
            "Inside of functions that torch.func transforms, operators only multiply tensors. "
            "Build them, and compute everything else, outside of these functions."
        )
    kinds, hooked = _autocasting(), _hooked()
    return _without(kinds, hooked) if kinds or hooked else torch.inference_mode(False)


@contextmanager
def _without(kinds: list[str], hooked: bool) -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        if hooked:  # only the innermost ones count
            stack.enter_context(saved_tensors_hooks(_unchanged, _unchanged))
        yield


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def free_of_modes(function: Callable) -> Callable:
    """Return the function, run as if there were no modes around it, and never compiled.

    Whether gradients are recorded stays; in inference mode they are not.
    """

    def run(*args: Any, **kwargs: Any) -> Any:
        kinds, count = _autocasting(), num_loans()
        recording, pushing = torch.is_grad_enabled(), forward_ad._is_fwd_grad_enabled()
        try:
            if not kinds and not torch.is_inference_mode_enabled():
                return function(*args, **kwargs)
            with _without(kinds, hooked=False), torch.set_grad_enabled(recording):
                return function(*args, **kwargs)
        except BaseException:
            undo_loans(count)
            torch._C._set_grad_enabled(recording)
            torch._C._set_fwd_grad_enabled(pushing)
            raise

    uncompiled = torch._disable_dynamo(run)

    @wraps(function)
    def enter(*args: Any, **kwargs: Any) -> Any:
        # whoever compiles something has imported it, which takes a second
        return (uncompiled if "torch._dynamo" in sys.modules else run)(*args, **kwargs)

    return enter


def methods_free_of_modes(cls: type) -> None:
    """Replace all public methods and properties of a class, and its arithmetic, in place."""
    for name, member in list(vars(cls).items()):
        if name.startswith("_") and name not in _OPERATIONS:
            continue
        if isfunction(member) and not isgeneratorfunction(member):
            setattr(cls, name, free_of_modes(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(cls, name, member.getter(free_of_modes(member.fget)))
