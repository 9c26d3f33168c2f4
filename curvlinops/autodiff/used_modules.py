"""Finds the modules that a function uses."""

from collections.abc import Mapping
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from curvlinops.support.fingerprint import (
    CONTAINERS,
    PLAIN,
    REFERENCES,
    children,
    is_installed,
    names_in,
)


def find_modules(function: Any) -> list[nn.Module]:
    """Return the modules that a function or module uses, as far as that can be seen.

    Containers, closures and the globals that code names are followed. Of other objects, such as a
    trainer, and of modules, those attributes count whose names occur in the code that is found:
    a trainer may have modules that the function does not use.

    Args:
        function: A function, a bound method, a partial, a module, or an object with attributes. A
            module comes first.
    """
    names, size = {"forward", "__call__"}, 0
    while len(names) > size:  # code that was found last may name attributes that were met before
        size = len(names)
        modules = _search(function, names)
    return modules


def _search(function: Any, names: set[str]) -> list[nn.Module]:
    """Follow attributes of these names; add the names that occur in the code that is found."""
    modules, stack = [], [function]
    seen: dict[int, Any] = {}  # keeps objects alive, so that no two have one id
    while stack:
        part = stack.pop()
        if id(part) in seen or isinstance(part, (*PLAIN, Tensor, ModuleType)):
            continue
        if isinstance(part, nn.Module):
            modules.append(part)
        for each in part.modules() if isinstance(part, nn.Module) else (part,):
            seen[id(each)] = each
            if isinstance(each, FunctionType) and not is_installed(each.__module__):
                names.update(names_in(each.__code__))
            stack += _followed(each, names)
    return modules


def _followed(part: Any, names: set[str]) -> list[Any]:
    if isinstance(part, type):
        members = {} if is_installed(part.__module__) else vars(part)
        return [*part.__bases__, *(members[name] for name in names if name in members)]
    is_followed = (
        callable(part) or type(part) in REFERENCES or isinstance(part, (Mapping, *CONTAINERS))
    )
    if is_followed and not isinstance(part, nn.Module):
        return list(children(part))
    attributes = getattr(part, "__dict__", {})
    return [type(part), *(attributes[name] for name in names if name in attributes)]
