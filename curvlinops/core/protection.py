"""The user's modules, lent out and given back as found."""

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def protected(roots: Iterable[nn.Module], state: dict) -> Iterator[None]:
    """Undo all that happens to modules inside the context.

    Buffers are replaced by copies, which are made once per ``state``: a checkpoint that is
    recomputed in the backward pass meets the forward pass's copies (with what that wrote to them).

    Args:
        roots: The modules; their children are included.
        state: Kept by the caller from one entry to the next, empty at the first.
    """
    modules = list(dict.fromkeys(child for root in roots for child in root.modules()))
    if not state:
        buffers = (b for module in modules for b in module._buffers.values() if b is not None)
        state.update({id(buffer): buffer.detach().clone() for buffer in buffers})
    found = []
    try:
        for module in modules:
            # attributes, too: recurrent layers and weight norm cache tensors in them
            parts = [vars(module), module._parameters, module._buffers]
            found += [(part, dict(part)) for part in parts]
            # backward hooks observe the user's own backward passes, and are no part of the model
            vars(module).update(_backward_hooks={}, _backward_pre_hooks={})
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = state.get(id(buffer), buffer)
        yield
    finally:
        for part, original in found:
            part.clear()
            part.update(original)


def find_modules(function: Any) -> list[nn.Module]:
    """Return the modules that a function refers to, as far as that can be seen.

    Args:
        function: A function, a bound method, a partial, or an object with attributes. Functions
            that it refers to are followed, except for those of libraries.
    """
    found, queue = [], [function]
    seen: dict[int, Any] = {}  # kept alive, so that no two have one id
    while queue:
        part = queue.pop()
        is_container = isinstance(part, Mapping | list | tuple)
        if id(part) in seen or not (is_container or callable(part)) or isinstance(part, type):
            continue
        seen[id(part)] = part
        if is_container:
            queue += part.values() if isinstance(part, Mapping) else part
            continue
        if isinstance(part, nn.Module):
            found.append(part)
        elif not (inspect.isfunction(part) and _is_library(part)):
            queue += _references(part)
    return found


def _is_library(function: Any) -> bool:
    return (function.__module__ or "").startswith(("torch.", "numpy."))


def _references(function: Any) -> list[Any]:
    if isinstance(function, functools.partial):
        return [function.func, *function.args, *function.keywords.values()]
    if inspect.ismethod(function):
        return [function.__self__, *getattr(function.__self__, "__dict__", {}).values()]
    if inspect.isfunction(function):
        try:
            names = inspect.getclosurevars(function)
        except ValueError:  # a variable that is not assigned yet
            return []
        return [*names.nonlocals.values(), *names.globals.values()]
    return list(getattr(function, "__dict__", {}).values())
