"""Notices changes of models and losses: of tensors, bit by bit, and of plain Python state."""

import functools
import inspect
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import is_, ne
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlinops.support.torch_internals import version_of

#: Values that are the same if they are equal.
PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range, torch.device, torch.Size)
_DICTS = (dict, OrderedDict)
CONTAINERS = (list, tuple, set, frozenset, deque)
#: The attributes by which some objects refer to others.
REFERENCES = {
    functools.partial: ("func", "args", "keywords"),
    MethodType: ("__self__", "__func__"),
    property: ("fget", "fset"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools._lru_cache_wrapper: ("__wrapped__",),
}
#: The types of PyTorch's operators.
_OPERATORS = (type(torch.ops.aten.add), type(torch.ops.aten.add.Tensor))
#: Objects that refer to more than this, such as a trainer with its data set, are not watched.
_MOST_OBJECTS = 10_000
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TooManyObjectsError(Exception):
    """The watched objects refer to too many others."""


class Fingerprint:
    """The state of models, losses and options, to be compared with their state later.

    Watched are tensors and arrays; containers; attributes of objects; closures, defaults and
    classes of the user's code, and the globals that this code names. Code of the standard library
    and of installed packages (see ``is_installed``) is taken as constant. State that is not a
    Python attribute is not seen: files, iterators, the contents of caches, objects of C; nor is
    what functions import when they run.

    Args:
        roots: The watched objects.

    Attributes:
        tensors: All tensors to which they refer.

    Raises:
        TooManyObjectsError: If they refer to more than 10,000 objects.
    """

    def __init__(self, roots: Iterable[Any]):
        self._roots = tuple(roots)
        # each object with all objects to which it refers directly; these are visited, too, so that
        # nothing has changed if each object still refers to the same ones
        self._parts: list[tuple[Any, tuple]] = []
        self._empty: list[Any] = []  # containers that were empty
        self.tensors: list[Tensor] = []
        self._arrays: list[np.ndarray] = []
        self._visit()
        self._places = [_place(tensor) for tensor in self.tensors]
        self._copies: list[Tensor] | None = None

    def _visit(self) -> None:
        stack, seen = list(reversed(self._roots)), set()
        while stack:
            part = stack.pop()
            if isinstance(part, PLAIN) or id(part) in seen:
                continue
            seen.add(id(part))  # it is kept alive by its owner's children, so that ids are unique
            if len(seen) > _MOST_OBJECTS:
                raise TooManyObjectsError(self._explain_size())
            if isinstance(part, Tensor):
                self.tensors.append(part)
                stack.append(vars(part))
            elif isinstance(part, np.ndarray):
                self._arrays.append(part)
            elif type(part) in (*_DICTS, *CONTAINERS) and not part:
                self._empty.append(part)
            else:
                held = children(part)
                if held:
                    self._parts.append((part, held))
                    stack += reversed(held)

    def _explain_size(self) -> str:
        largest, held = max(self._parts, key=lambda item: len(item[1]))
        owners = (part for part, _ in self._parts if hasattr(part, "__dict__"))
        items = (item for part in owners for item in vars(part).items())
        name = next((f"attribute '{n}'" for n, value in items if value is largest), "an object")
        return (
            f"as model and loss refer to more than {_MOST_OBJECTS:,} objects: {name}, of type "
            f"{type(largest).__name__}, refers to {len(held):,}"
        )

    def keep_numbers(self) -> int:
        """Copy all numbers, which are compared from now on; return their size in bytes."""
        if self._copies is None:
            self._copies = [_bits(tensor).clone() for tensor in self.tensors]
            self._array_copies = [array.copy() for array in self._arrays]
        return sum(copy.nbytes for copy in (*self._copies, *self._array_copies))

    def has_structure(self, roots: Iterable[Any]) -> bool:
        """Return whether all is the same but for numbers in tensors and arrays."""
        return (
            not any(self._empty)
            and _are_same(tuple(roots), self._roots)
            and all(_are_same(children(part), before) for part, before in self._parts)
        )

    def has_numbers(self) -> bool:
        """Return whether tensors and arrays are the same: bit by bit once numbers are kept.

        Until then, the place and the version counter of each tensor decide.
        """
        if any(map(ne, map(_place, self.tensors), self._places)):
            return False
        if self._copies is None:
            return True
        if any(map(array_differs, self._arrays, self._array_copies)):
            return False
        return _equal(zip(map(_bits, self.tensors), self._copies, strict=True))


def same_numbers(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether pairs of tensors are equal, bit by bit: NaN equals NaN, -0.0 is not 0.0."""
    pairs = list(pairs)
    if any(_kind(first) != _kind(second) for first, second in pairs):
        return False
    return _equal((_bits(first), _bits(second)) for first, second in pairs)


def _equal(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether all pairs of tensors are equal, with one synchronization of a GPU."""
    pending = []
    for tensor, copy in pairs:
        if tensor.device.type != "cpu":
            pending.append((tensor != copy).any())
        elif not torch.equal(tensor, copy):
            return False
    return not pending or not bool(torch.stack(pending).any())


def _kind(tensor: Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad


def _place(tensor: Tensor) -> tuple:
    """Return kind and memory of a tensor, and how often it was written to.

    Autograd refuses graphs of tensors that were overwritten, even by the same numbers.
    """
    if tensor.layout is not torch.strided:
        raise TypeError(f"tensors of layout {tensor.layout} are not watched")
    return tensor.data_ptr(), version_of(tensor), tensor.stride(), *_kind(tensor)


def _bits(tensor: Tensor) -> Tensor:
    """Return the bits of a tensor as integers."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.resolve_neg().view(_INTEGERS[tensor.element_size()])


def array_differs(array: np.ndarray, copy: np.ndarray) -> bool:
    """Return whether two arrays have other numbers, bit by bit, or are of another kind."""
    if array.dtype.hasobject:
        raise TypeError("arrays of objects are not watched")
    return (array.dtype, array.shape, array.tobytes()) != (copy.dtype, copy.shape, copy.tobytes())


def _are_same(now: tuple, before: tuple) -> bool:
    """Return whether two tuples have the same objects, or equal plain values."""
    if len(now) != len(before):
        return False
    if all(map(is_, now, before)):
        return True
    others = [(x, y) for x, y in zip(now, before, strict=True) if x is not y]
    return all(type(x) is type(y) and isinstance(x, PLAIN) and x == y for x, y in others)


def children(part: Any) -> tuple:
    """Return everything that an object refers to directly, with the names of attributes."""
    return _reader(type(part))(part)


@functools.cache
def _reader(kind: type) -> Callable[[Any], tuple]:
    """Return ``children`` of the objects of one type, so that types are looked at once."""
    if kind in _DICTS:
        return lambda part: (*part, *part.values())
    if kind in CONTAINERS:
        return tuple
    if kind in REFERENCES:
        return lambda part: tuple(getattr(part, name) for name in REFERENCES[kind])
    if kind is FunctionType:
        return _of_function
    if issubclass(kind, type):
        return _of_class
    if issubclass(kind, ModuleType):
        return _of_module
    if issubclass(kind, _OPERATORS) or _package(kind.__module__) == "curvlinops":
        return lambda part: ()
    members = () if is_installed(kind.__module__) else (kind,)
    is_mapping, is_container = issubclass(kind, Mapping), issubclass(kind, CONTAINERS)
    slots = _slots(kind)

    def of_object(part: Any) -> tuple:
        attributes = getattr(part, "__dict__", {})
        held = (*members, *attributes, *attributes.values())
        if is_mapping:
            held += (*part, *part.values())
        elif is_container:
            held += tuple(part)
        return held + tuple(getattr(part, name, None) for name in slots) if slots else held

    return of_object


def _of_module(module: ModuleType) -> tuple:
    if is_installed(module.__name__):
        return ()
    return tuple(value for name, value in vars(module).items() if not name.startswith("__"))


def _of_class(part: type) -> tuple:
    if is_installed(part.__module__):
        return ()
    return (*part.__bases__, *vars(part), *vars(part).values())


def _of_function(function: FunctionType) -> tuple:
    cells = [cell.cell_contents for cell in function.__closure__ or () if _is_assigned(cell)]
    if is_installed(function.__globals__.get("__name__")):
        # decorators of libraries, such as torch.no_grad(), hold the user's function
        kinds = (FunctionType, nn.Module, *REFERENCES)
        return tuple(cell for cell in cells if isinstance(cell, kinds))
    defaults = (function.__defaults__, function.__kwdefaults__)
    used = used_globals(function)
    return (function.__code__, *cells, *defaults, *vars(function).values(), *used)


def used_globals(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a function names; of a user's module the attributes that it names."""
    names, variables = names_in(function.__code__), function.__globals__
    values, seen = [variables[name] for name in names if name in variables], set[int]()
    while values:
        value = values.pop()
        if id(value) in seen:  # modules may refer to each other
            continue
        seen.add(id(value))
        if not isinstance(value, ModuleType):
            yield value
        elif not is_installed(value.__name__):
            yield id(value)
            values += [vars(value)[name] for name in names if name in vars(value)]


@functools.cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in a function's code, and in functions in it."""
    inner = (names_in(part) for part in code.co_consts if inspect.iscode(part))
    return tuple(dict.fromkeys([*code.co_names, *(name for names in inner for name in names)]))


def _is_assigned(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # its variable has no value yet
        return False


def _slots(kind: type) -> tuple[str, ...]:
    names = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def is_installed(module: str | None) -> bool:
    """Return whether a module is not the user's code, told by its top-level package.

    Installed are the standard library, this package, and packages in a folder ``site-packages``.
    A package that is installed in editable mode, with its source elsewhere, is the user's code.

    Args:
        module: The module's full name.
    """
    return _is_installed(_package(module))


@functools.cache
def _is_installed(package: str) -> bool:
    if package in sys.stdlib_module_names or package == "curvlinops":
        return package != "__main__"
    module = sys.modules.get(package)
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    parts = {part for place in places if place is not None for part in Path(place).parts}
    return not parts.isdisjoint({"site-packages", "dist-packages"})
