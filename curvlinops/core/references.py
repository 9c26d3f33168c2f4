"""What a Python object refers to, as far as that can be seen from outside."""

import functools
import inspect
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_INSTALLED = tuple(
    str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")
)


def references(part: Any) -> Iterator[tuple[Any, Any]]:
    """Yield name and value of everything an object refers to; nothing for a plain value.

    Functions are followed into closures, defaults and the globals that their code names,
    modules and other objects into their attributes and their classes. Installed code is taken as
    constant, objects that it made are not.
    """
    if isinstance(part, Mapping):
        yield from part.items()
    elif isinstance(part, list | tuple | set | deque):
        yield from enumerate(part)
    elif isinstance(part, functools.partial):
        yield from (("func", part.func), ("args", part.args), ("keywords", part.keywords))
    elif isinstance(part, MethodType):
        own = part.__self__
        yield from (("__self__", own), ("__func__", part.__func__))
        yield "__dict__", getattr(own, "__dict__", {})
    elif isinstance(part, FunctionType):
        if not _is_installed(part.__module__):
            yield from _of_function(part)
    elif isinstance(part, type):
        if not _is_installed(part.__module__):
            # what a user changes on a class, such as a method or a constant
            yield from ((n, v) for n, v in vars(part).items() if not n.startswith("__"))
            yield "__bases__", part.__bases__
    elif not isinstance(part, ModuleType):
        if not _is_installed(type(part).__module__):
            yield "__class__", type(part)
        yield from getattr(part, "__dict__", {}).items()


def find_modules(function: Any) -> list[nn.Module]:
    """Return the modules that a function refers to, as far as that can be seen.

    Args:
        function: A function, a bound method, a partial, or an object with attributes.
    """
    found, queue = [], [function]
    seen: dict[int, Any] = {}  # kept alive, so that no two have one id
    while queue:
        part = queue.pop()
        is_container = isinstance(part, Mapping | list | tuple)
        if id(part) in seen or not (is_container or callable(part)) or isinstance(part, type):
            continue
        seen[id(part)] = part
        if isinstance(part, nn.Module):
            found.append(part)
        else:
            queue += [value for _, value in references(part)]
    return found


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    yield "__dict__", function.__dict__
    names = _names(code)
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name, value
        if isinstance(value, ModuleType) and not _is_installed(value.__name__):
            yield from ((n, vars(value)[n]) for n in names if n in vars(value))


@functools.cache
def _names(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function's code, and that of functions in it, looks up."""
    inner = [_names(constant) for constant in code.co_consts if inspect.iscode(constant)]
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module is installed code or this package, not the user's own."""
    if module is None or module.split(".")[0] == "curvlinops":
        return module is not None
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # built into Python, or typed into a session
        return module in sys.builtin_module_names
    return str(Path(file).resolve()).startswith(_INSTALLED)
