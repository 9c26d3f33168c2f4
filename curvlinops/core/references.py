"""What a Python object refers to, as far as that can be seen from outside."""

import enum
import functools
import os
import sys
import sysconfig
import weakref
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.core.hidden import (
    MEMORY,
    UNKNOWN,
    Cached,
    imports_in,
    looks_up,
    names_in,
    of_cached,
    of_memory,
    paths_in,
)

_INSTALLED = tuple(
    str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")
)
#: Folders of packages, also those of another environment that this one is built on.
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
_PLAIN = {
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    # operators of PyTorch, whose kernels are registered elsewhere, and their namespaces
    *(torch._ops.OpOverload, torch._ops.OpOverloadPacket, type(torch.ops.aten), type(torch.ops)),
}
#: Containers whose items are what they refer to.
SEQUENCES = (list, tuple, set, frozenset, deque, KeysView, ValuesView, ItemsView)
#: By which attributes objects hold others, where these are neither in ``__dict__`` nor in slots.
_HOLDERS = {
    functools.partial: ("func", "args", "keywords"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    MethodType: ("__self__", "__func__"),
    BuiltinFunctionType: ("__self__",),
}
#: What Python itself writes into classes and modules.
_METADATA = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__"),
    *("__annotations__", "__annotate__", "__static_attributes__", "__firstlineno__"),
    *("__abstractmethods__", "_abc_impl", "__builtins__", "__loader__", "__spec__", "__cached__"),
}


def references(part: Any) -> Iterable[tuple[Any, Any]]:
    """Return name and value of everything an object refers to; nothing for a plain value.

    Functions are followed into closures, defaults and the globals that their code names, and of
    modules among these into what the code takes of them, unless it passes a module on; modules and
    other objects into their attributes and their classes. Installed code is taken as constant,
    objects that it made are not. A value is ``UNKNOWN`` where anything may be.
    """
    if isinstance(part, nn.Module):  # most objects are
        return _of_object(part)
    if type(part) is dict:
        return part.items()
    if type(part) in (list, tuple):
        return enumerate(part)
    return _of_others(part)


def _of_others(part: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(part, Mapping):
        yield from part.items()
    elif isinstance(part, SEQUENCES):
        yield from enumerate(part)
    elif isinstance(part, weakref.ref):
        yield "referent", part()
    for name in _HOLDERS.get(type(part), ()):
        yield name, getattr(part, name)
    if isinstance(part, MEMORY):
        yield from of_memory(part)
    if isinstance(part, MethodType):
        yield "__dict__", getattr(part.__self__, "__dict__", {})
    elif isinstance(part, FunctionType):
        if not _is_installed(part.__globals__.get("__name__")):
            yield from _of_function(part)
        else:  # torch.no_grad() and others make decorators
            yield from ((n, held) for n, held in _of_cells(part) if _runs(held))
            if hasattr(part, "__wrapped__"):
                yield "__wrapped__", part.__wrapped__
    elif isinstance(part, Cached):
        if not _is_installed(part.__module__):
            yield from of_cached(part)
    elif isinstance(part, GeneratorType):
        frame = part.gi_frame
        if frame is not None:  # it has not ended
            yield "f_lasti", frame.f_lasti
            yield from frame.f_locals.items()
            if not _is_installed(frame.f_globals.get("__name__")):
                yield from _of_code(part.gi_code, frame.f_globals)
    elif isinstance(part, type | ModuleType):
        if not _is_installed(part.__name__ if isinstance(part, ModuleType) else part.__module__):
            # what a user changes on a class or module, such as a method or a constant
            yield from ((n, v) for n, v in list(vars(part).items()) if n not in _METADATA)
            yield "__bases__", getattr(part, "__bases__", ())
    elif type(part) not in _PLAIN_CONTAINERS:
        yield from _of_object(part)


def _of_object(part: Any) -> list[tuple[Any, Any]]:
    kind = type(part)
    own = [] if _is_installed(kind.__module__) else [("__class__", kind)]
    return [*own, *getattr(part, "__dict__", {}).items(), *_slots(part)]


_PLAIN_CONTAINERS = {dict, list, tuple, set, frozenset, deque, MethodType}


def is_plain(part: Any) -> bool:
    """Return whether something is a value that refers to nothing and never changes."""
    return type(part) in _PLAIN or isinstance(part, enum.Enum)


def has_attributes(part: Any) -> bool:
    """Return whether all that an object holds is in attributes, dictionary or slots."""
    return hasattr(part, "__dict__") or bool(_slots(part))


def find_modules(function: Any) -> list[nn.Module]:
    """Return the modules that a function or module uses, as far as that can be seen.

    That is all in containers and callables. Other objects, such as a trainer, may have modules that
    the function does not use, and so may modules without registering them: of their attributes, and
    those of their classes, only those count whose names occur in the code that is found.

    Args:
        function: A function, a bound method, a partial, a module, or an object with attributes. A
            module comes first.
    """
    names, known = {"forward", "__call__", "__class__", "__bases__"}, 0
    while len(names) > known:  # code that was found last may name what was met before
        known, found = len(names), _find_modules(function, names)
    return found


def _find_modules(function: Any, names: set[str]) -> list[nn.Module]:
    """Look once, and add the names that occur in the code that is found."""
    found, queue = [], [function]
    seen: dict[int, Any] = {}  # kept alive, so that no two have one id
    while queue:
        part = queue.pop()
        if id(part) in seen or isinstance(part, Tensor | ModuleType):
            continue
        if isinstance(part, nn.Module):
            found.append(part)
        for each in part.modules() if isinstance(part, nn.Module) else (part,):
            seen[id(each)] = each
            if isinstance(each, FunctionType) and not _is_installed(each.__module__):
                names.update(names_in(each.__code__))
            whole = _holds(each)
            held = (value for name, value in references(each) if whole or name in names)
            queue += [value for value in held if not is_plain(value)]
    return found


def _holds(part: Any) -> bool:
    """Return whether an object is there for the sake of what it refers to."""
    if isinstance(part, nn.Module | type):
        return False
    return isinstance(part, (Mapping, *SEQUENCES)) or type(part) in _HOLDERS or callable(part)


def _slots(part: Any) -> list[tuple[str, Any]]:
    names = _SLOTS.get(type(part))
    if names is None:
        names = _SLOTS[type(part)] = _names_of_slots(type(part))
    return [(name, getattr(part, name)) for name in names if hasattr(part, name)]


#: The names of what objects of a class have in slots.
_SLOTS: weakref.WeakKeyDictionary[type, list[str]] = weakref.WeakKeyDictionary()


def _names_of_slots(kind: type) -> list[str]:
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{base.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _runs(part: Any) -> bool:
    return isinstance(part, FunctionType | nn.Module) or type(part) in _HOLDERS


def _of_cells(function: FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # a variable that is not assigned yet
            continue


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    yield from _of_cells(function)
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    yield "__dict__", function.__dict__
    yield from _of_code(code, function.__globals__)


def _of_code(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    found = {(path, id(value)): (path, value) for path, value in _read(code, scope)}
    yield from found.values()
    names = names_in(code)
    for _, value in found.values():
        if _is_own(value):  # for those who pass over modules
            yield from ((n, vars(value)[n]) for n in names if n in vars(value))
    if not {"environ", "getenv"}.isdisjoint(names):
        yield "environ", os.environ
    if looks_up(code):
        yield "anything", UNKNOWN


def _read(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[tuple, Any]]:
    """Yield what code reads of globals and of modules that it imports itself, and the paths."""
    paths = paths_in(code)
    yield from (_along(path, scope[path[0]]) for path in paths if path[0] in scope)
    for variable, module, name in imports_in(code):
        full = _absolute(module, scope)
        value = sys.modules.get(full)
        if name is None and variable is not None:
            value = sys.modules.get(full.partition(".")[0])
        if not _is_own(value):
            continue
        wanted = (full,) if name is None else (full, name)
        path, value = _along(wanted, value)
        if variable is None or path != wanted or not _is_own(value):
            yield path, value
        else:  # a module: what is taken of it
            uses = (use for use in paths if use[0] == variable)
            yield from ((path + rest[1:], held) for rest, held in (_along(u, value) for u in uses))


def _absolute(module: str, scope: dict[str, Any]) -> str:
    """Return the name of a module that code imports."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    if level == 0:
        return name
    package = (scope.get("__package__") or "").rsplit(".", level - 1)[0]
    return f"{package}.{name}" if name else package


def _along(path: tuple[str, ...], value: Any) -> tuple[tuple[str, ...], Any]:
    """Follow a path that begins with a value through the user's modules, as far as they have it."""
    for i, name in enumerate(path[1:], 1):
        # modules of another type may make attributes up
        if type(value) is not ModuleType or not _is_own(value) or name not in vars(value):
            return path[:i], value
        value = vars(value)[name]
    return path, value


def _is_own(value: Any) -> bool:
    """Return whether something is a module of the user."""
    return isinstance(value, ModuleType) and not _is_installed(value.__name__)


@functools.cache
def _is_installed(module: str | None) -> bool:
    """Return whether a module is installed code or this package, not the user's own."""
    if module is None or module.split(".")[0] == "curvlinops":
        return module is not None
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # built into Python, or typed interactively
        return module in sys.builtin_module_names
    # some installers link to files elsewhere
    paths = (Path(file), Path(file).resolve())
    return str(paths[1]).startswith(_INSTALLED) or any(
        not _INSTALLED_FOLDERS.isdisjoint(path.parts) for path in paths
    )
