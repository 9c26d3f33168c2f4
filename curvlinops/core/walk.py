"""What an object is made of, in an order that is always the same."""

import array
import contextvars
import hashlib
import io
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlinops.core.hidden import MEMORY, UNKNOWN, Marker, bytes_of, text_of
from curvlinops.core.references import SEQUENCES, has_attributes, is_plain, references

#: The state of objects that change, but have no attributes.
_STATES = {
    bytearray: bytes,
    array.array: lambda part: (part.typecode, part.tobytes()),
    random.Random: random.Random.getstate,
    np.random.Generator: lambda part: repr(part.bit_generator.state),
    np.random.RandomState: lambda part: repr(part.get_state(legacy=False)),
    torch.Generator: lambda part: bytes(part.get_state().tolist()),
    contextvars.ContextVar: lambda part: part.get(None),
    io.StringIO: text_of,
    io.BytesIO: text_of,
    **dict.fromkeys(MEMORY, bytes_of),
}
#: An object that refers to more than this, such as a trainer, is not worth a comparison.
_MOST = 100_000


END = Marker()


def walk(root: Any, contents: list | None = None, empty: list | None = None) -> Iterator[Any]:
    """Yield what an object is made of, in an order that is always the same.

    Tensors and arrays as they are, all else as values to be compared. What each object refers to
    is appended to ``contents``, and dictionaries that are left out to ``empty``.
    """
    stack, seen = [root], {}
    while stack:
        part = stack.pop()
        if is_plain(part):
            yield type(part), value_of(part)
            continue
        if id(part) in seen:
            yield seen[id(part)][0]
            continue
        seen[id(part)] = (len(seen), part)  # kept alive, so that no two have one id
        if len(seen) > _MOST:
            yield UNKNOWN
            return
        if isinstance(part, Tensor):
            # of sparse and other tensors without plain memory nothing is known
            yield part if _has_plain_memory(part) else UNKNOWN
            attributes = vars(part)
            if attributes:
                stack.append(attributes)
            elif empty is not None:
                empty.append(attributes)
        elif isinstance(part, np.ndarray) or part is UNKNOWN:
            yield part
        else:
            plain, values = _divided(part, empty)
            if contents is not None:
                contents.append((part, contents_of(part)))
            yield plain
            stack += reversed(values)


_DICTS = (dict, OrderedDict)
#: Plain values that are the same if they are equal.
_EQUAL = {bool, int, str, bytes, type(None)}
_COMMON = (nn.Module, dict, list, tuple, set)


def _divided(part: Any, empty: list | None) -> tuple[list, list]:
    """Return what identifies an object and the plain values of it, and all else it refers to."""
    plain, values, empty = [_identity(part)], [], [] if empty is None else empty
    is_module = isinstance(part, nn.Module)
    for name, value in references(part):
        kind = type(value)
        if is_module and kind in _DICTS and not value:
            # most of a module's attributes are empty dictionaries of hooks
            empty.append(value)
            continue
        plain.append(name)
        if kind in _EQUAL:
            plain += (kind, value)
        elif is_plain(value):
            plain += (kind, value_of(value))
        else:
            values.append(value)
    return plain, values


def contents_of(part: Any) -> tuple:
    """Return everything that an object refers to, and by which names."""
    if type(part) in _DICTS:
        return (*part, *part.values())
    if isinstance(part, nn.Module):
        attributes = vars(part)
        return (type(part), *attributes, *attributes.values())
    if type(part) in (list, tuple, set, frozenset, deque):
        return tuple(part)
    for kind, state in _STATES.items():
        if isinstance(part, kind):
            return (state(part),)
    return tuple(item for pair in references(part) for item in pair)


def _identity(part: Any) -> Any:
    """Return what identifies an object, apart from what it refers to."""
    if isinstance(part, _COMMON):  # abstract classes take longer
        return type(part)
    for kind, state in _STATES.items():
        if isinstance(part, kind):
            return type(part), state(part)
    for kind in (int, float, complex, str, bytes):  # what others derive from them
        if isinstance(part, kind):
            return type(part), kind.__repr__(part)
    if isinstance(part, type | ModuleType):
        return part
    if isinstance(part, BuiltinFunctionType):
        return part.__name__, type(part.__self__)
    # not of any other object: its own __getattr__ may do anything
    if isinstance(part, FunctionType | MethodType):
        return getattr(part, "__code__", type(part))  # methods may be of functions without code
    if isinstance(part, (Mapping, *SEQUENCES, weakref.ref)) or has_attributes(part):
        return type(part)
    return part  # opaque, made by installed code


def value_of(part: Any) -> Any:
    """Return what identifies a plain value: -0.0 is not 0.0, and a NaN equals itself."""
    if isinstance(part, float):
        return part.hex()
    if isinstance(part, complex):
        return part.real.hex(), part.imag.hex()
    return part


def _has_plain_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided
        and tensor.device.type != "meta"
        and not tensor.is_quantized
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


#: Values that refer to nothing else.
_CLOSED = {
    *(bool, int, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
}


class Structure:
    """What objects are made of, except for the numbers in tensors and arrays.

    It keeps none of these objects alive.

    Args:
        parts: What ``walk`` yields of them.
    """

    __hash__ = None

    def __init__(self, parts: list):
        self._others: list[weakref.ref] = []
        self._is_seen = True
        values = [self._value(part) for part in parts]
        self._digest = hashlib.blake2b(repr(values).encode("utf-8", "replace")).digest()

    @classmethod
    def of(cls, root: Any) -> "Structure":
        """Return the structure of whatever an object refers to."""
        return cls(list(walk(root)))

    def __eq__(self, other: Any) -> bool:
        return (
            isinstance(other, Structure)
            and self._is_seen
            and other._is_seen
            and self._digest == other._digest
            and all(
                own() is its() is not None
                for own, its in zip(self._others, other._others, strict=True)
            )
        )

    def _value(self, part: Any) -> Any:
        """Return what shows all of a part that does not refer to something else."""
        kind = type(part)
        if kind in _CLOSED or (kind is type and part.__module__ == "builtins"):
            return part
        if kind in (list, tuple):
            return tuple([x if type(x) in _CLOSED else self._value(x) for x in part])
        if kind is slice:
            return tuple(map(self._value, (part.start, part.stop, part.step)))
        if isinstance(part, Tensor):
            return (
                *(self._value(kind), part.shape, part.dtype, part.device, part.stride()),
                *(part.requires_grad, part.grad_fn is None),
            )
        if isinstance(part, np.ndarray):
            self._is_seen &= part.dtype.kind in "biufcmM"
            return part.shape, part.dtype.str
        if isinstance(part, Enum):
            return self._value(kind), part.name
        try:
            self._others.append(weakref.ref(part))
        except TypeError:  # it may refer to anything
            self._is_seen = False
        self._is_seen &= part is not UNKNOWN
        return "another object"
