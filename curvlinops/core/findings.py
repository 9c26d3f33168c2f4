"""What operators find out about a model, of which others on the same model make use."""

import copy
import hashlib
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from curvlinops.core.hidden import UNKNOWN
from curvlinops.core.model import Model
from curvlinops.core.walk import walk

#: Something that has ``is_complete``: whether others can make use of a copy.
Found = TypeVar("Found")

#: Values that refer to nothing else.
_CLOSED = {
    *(bool, int, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
}
#: For how many structures of a model and of its batches something is remembered.
_MOST = 16


class Findings:
    """Objects that find out something about a model, and remember it.

    They remember it in attributes: values that never change, and containers of such values.

    Args:
        known: What others have found out, of which this gets copies.
    """

    def __init__(self, known: dict[tuple, Any]):
        self._known, self._own = known, {}

    def get(self, make: Callable[..., Found], *args: Any) -> Found:
        """Return what ``make(*args)`` made the first time, here or elsewhere."""
        key = (make, *args)
        if key not in self._own:
            self._own[key] = _copied(self._known[key]) if key in self._known else make(*args)
        return self._own[key]

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Let others have what is found out meanwhile, unless there is an error."""
        before = set(self._own)
        yield
        for key in self._own.keys() - before - self._known.keys():
            if self._own[key].is_complete:
                self._known[key] = _copied(self._own[key])

    def withdraw(self) -> None:
        """Let nobody else have anything."""
        self._known.clear()
        self._known = {}


def _copied(found: Found) -> Found:
    """Return a copy with containers of its own."""
    twin = copy.copy(found)
    containers = {n: x for n, x in vars(twin).items() if isinstance(x, dict | set | list)}
    vars(twin).update({name: copy.copy(x) for name, x in containers.items()})
    return twin


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


#: By the id of a module or parameter: this, and what is known about it, the latest first.
_KNOWN: dict[int, tuple[weakref.ref, list[tuple[list[Structure], dict[tuple, Any]]]]] = {}


def recall(model: Model, structures: list[Structure]) -> Findings:
    """Return what was found out about a model of the same structure, or a new place for that.

    It is forgotten with the user's module, of which it must keep nothing alive, or tensors.

    Args:
        model: The model.
        structures: Of all that findings depend on.
    """
    users = (*model.roots, *model.params.values())[0]
    _, known = _KNOWN.setdefault(id(users), (weakref.ref(users, _forgetting(id(users))), []))
    found = next((f for s, f in known if s == structures), {})
    known[:] = [(structures, found), *((s, f) for s, f in known if f is not found)][:_MOST]
    return Findings(found)


def _forgetting(key: int) -> Callable[[weakref.ref], None]:
    return lambda _: _KNOWN.pop(key, None)
