"""What a Python object refers to, as far as that can be seen from outside."""

import enum
import functools
import weakref
from collections import deque
from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from types import (
    BuiltinFunctionType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.core.bytecode import is_installed, names_in, read_by
from curvlinops.core.hidden import MEMORY, Cached, of_cached, of_memory

_PLAIN = {
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    # operators of PyTorch, whose kernels are registered elsewhere, and their namespaces
    *(type(torch.ops.aten.add.Tensor), type(torch.ops.aten.add)),
    *(type(torch.ops.aten), type(torch.ops)),
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
        if not is_installed(part.__globals__.get("__name__")):
            yield from _of_function(part)
        else:  # torch.no_grad() and others make decorators
            yield from ((n, held) for n, held in _of_cells(part) if _runs(held) or _registers(held))
            if hasattr(part, "__wrapped__"):
                yield "__wrapped__", part.__wrapped__
    elif isinstance(part, Cached):
        if not is_installed(part.__module__):
            yield from of_cached(part)
    elif isinstance(part, GeneratorType):
        frame = part.gi_frame
        if frame is not None:  # it has not ended
            yield "f_lasti", frame.f_lasti
            yield from frame.f_locals.items()
            if not is_installed(frame.f_globals.get("__name__")):
                yield from read_by(part.gi_code, frame.f_globals)
    elif isinstance(part, type | ModuleType):
        if not is_installed(part.__name__ if isinstance(part, ModuleType) else part.__module__):
            # what a user changes on a class or module, such as a method or a constant
            yield from ((n, v) for n, v in list(vars(part).items()) if n not in _METADATA)
            if isinstance(part, type):
                yield "__bases__", part.__bases__
            if not is_installed(type(part).__module__):
                yield "__class__", type(part)
    elif type(part) not in _PLAIN_CONTAINERS:
        yield from _of_object(part)


def _of_object(part: Any) -> list[tuple[Any, Any]]:
    kind = type(part)
    own = [] if is_installed(kind.__module__) else [("__class__", kind)]
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
            if isinstance(each, FunctionType) and not is_installed(each.__module__):
                names.update(names_in(each.__code__))
            whole = _holds(each)
            try:
                held = [value for name, value in references(each) if whole or name in names]
            except Exception:  # whatever the user's objects raise when they are listed
                continue
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


def _registers(part: Any) -> bool:
    """Return whether this is a dictionary of functions, as that of functools.singledispatch."""
    return type(part) is dict and any(isinstance(value, FunctionType) for value in part.values())


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
    yield from read_by(code, function.__globals__)
