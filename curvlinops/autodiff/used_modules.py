"""Finds the modules that a function uses."""

import functools
import inspect
import os
import site
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.support.torch_internals import modules_of

#: Folders of code that is not searched: the standard library and installed packages.
_LIBRARIES = (
    *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *site.getsitepackages(),
    site.getusersitepackages(),
    os.path.dirname(torch.__file__),
)
_CONTAINERS = (list, tuple, set, frozenset, deque)
#: Longer containers are data, such as a vocabulary.
_MOST_ITEMS = 1000
#: Objects without modules.
_PLAIN = (Tensor, str, bytes, int, float, complex, type(None))


def find_modules(function: Any) -> list[list[nn.Module]]:
    """Return the modules that a function, a module or an object uses, as far as that can be seen.

    Each list begins with a module, and has those of its children that no earlier list has. A module
    comes first. Containers of at most 1000 items, closures, and the globals that code names are
    followed. Of other objects, such as a trainer, those attributes count whose names occur in the
    code that is found: a trainer may have modules that the function does not use. Code of installed
    packages is not searched.
    """
    names, size = {"forward", "__call__"}, 0
    while len(names) > size:  # code that was found last may name attributes that were met before
        size = len(names)
        found = _search(function, names)
    return found


def _search(function: Any, names: set[str]) -> list[list[nn.Module]]:
    """Follow attributes of these names; add the names that occur in the code that is found."""
    found: list[list[nn.Module]] = []
    stack, seen = [function], dict[int, Any]()  # objects are kept alive, so that ids are unique
    while stack:
        part = stack.pop()
        if id(part) in seen or isinstance(part, _PLAIN):
            continue
        if isinstance(part, nn.Module):
            found.append([x for x in modules_of([part]) if id(x) not in seen])
            for module in found[-1]:
                seen[id(module)] = module
                stack += _attributes(module, names)
            continue
        seen[id(part)] = part
        if isinstance(part, FunctionType):
            stack += _variables(part, names)
        elif isinstance(part, MethodType):
            stack += [part.__func__, part.__self__]
        elif isinstance(part, functools.partial):
            stack += [part.func, part.args, part.keywords]
        elif isinstance(part, (dict, *_CONTAINERS)):
            if len(part) <= _MOST_ITEMS:
                stack += part.values() if isinstance(part, dict) else part
        elif isinstance(part, ModuleType):
            if not _is_library(getattr(part, "__file__", None)):
                stack += [value for name, value in vars(part).items() if name in names]
        elif not isinstance(part, type):
            stack += [getattr(part, "__wrapped__", None), *_attributes(part, names)]
    return found


def _attributes(part: Any, names: set[str]) -> Iterator[Any]:
    """Yield the members of an object's class, and its attributes, that have these names."""
    for base in type(part).__mro__:
        module = sys.modules.get(base.__module__)
        if base.__module__ == "builtins" or _is_library(getattr(module, "__file__", None)):
            continue
        yield from (member for name, member in vars(base).items() if name in names)
    attributes = getattr(part, "__dict__", {})
    yield from (value for name, value in attributes.items() if name in names)


def _variables(function: FunctionType, names: set[str]) -> list[Any]:
    """Return the closure of a function, and the globals that a user's function names."""
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_assigned(cell)]
    if _is_library(function.__code__.co_filename):  # a decorator may hold the user's function
        return [x for x in cells if isinstance(x, FunctionType | MethodType | nn.Module)]
    own, variables = _names(function.__code__), function.__globals__
    names |= own
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return [*cells, *defaults, *(variables[name] for name in own if name in variables)]


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in code, and in functions inside of it."""
    inner = (_names(part) for part in code.co_consts if inspect.iscode(part))
    return frozenset(code.co_names).union(*inner)


@functools.cache
def _is_library(file: str | None) -> bool:
    return file is not None and file.startswith(_LIBRARIES)


def _is_assigned(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # its variable has no value yet
        return False
