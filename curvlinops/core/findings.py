"""What operators find out about a model, of which others on the same model make use."""

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

Found = TypeVar("Found")

#: Values that refer to nothing else.
_CLOSED = {
    *(bool, int, str, bytes, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
}
#: For how many structures of a model and of its batches something is remembered.
_MOST = 16


class Findings:
    """Objects that find out something about a model, and remember it."""

    def __init__(self) -> None:
        self._found: dict[tuple, Any] = {}

    def get(self, make: Callable[..., Found], *args: Any) -> Found:
        """Return what ``make(*args)`` made the first time."""
        key = (make, *args)
        if key not in self._found:
            self._found[key] = make(*args)
        return self._found[key]


class Structure:
    """What objects are made of, except for the numbers in tensors and arrays.

    It keeps none of these objects alive.

    Args:
        parts: What ``walk`` yields of them.
    """

    def __init__(self, parts: list):
        self._parts = tuple(_weakened(part) for part in parts)

    @classmethod
    def of(cls, root: Any) -> "Structure":
        """Return the structure of whatever an object refers to."""
        return cls(list(walk(root)))

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Structure) and self._parts == other._parts

    __hash__ = None


#: By the id of a module or parameter: this, and what is known about it, the latest first.
_KNOWN: dict[int, tuple[weakref.ref, list[tuple[list[Structure], Findings]]]] = {}


def recall(model: Model, structures: list[Structure]) -> Findings:
    """Return what was found out about a model of the same structure, or a new place for that.

    It is forgotten with the user's module, of which it must keep nothing alive, or tensors.

    Args:
        model: The model.
        structures: Of all that findings depend on.
    """
    users = (*model.roots, *model.params.values())[0]
    _, known = _KNOWN.setdefault(id(users), (weakref.ref(users, _forgetting(id(users))), []))
    found = next((f for s, f in known if s == structures), None) or Findings()
    known[:] = [(structures, found), *((s, f) for s, f in known if f is not found)][:_MOST]
    return found


@contextmanager
def whole(found: Findings | None) -> Iterator[None]:
    """Let nobody else get findings if there is an error while something is found out."""
    try:
        yield
    except BaseException:
        for _, known in list(_KNOWN.values()):
            known[:] = [(s, f) for s, f in known if f is not found]
        raise


def _forgetting(key: int) -> Callable[[weakref.ref], None]:
    return lambda _: _KNOWN.pop(key, None)


class _Weak:
    """Refers to an object as long as that exists, and equals what refers to the same one."""

    __hash__ = None

    def __init__(self, part: Any):
        self._ref = weakref.ref(part)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Weak) and self._ref() is other._ref() is not None


class _Unlike:
    """Equals nothing."""

    __hash__ = None

    def __eq__(self, other: Any) -> bool:
        return False


def _weakened(part: Any) -> Any:
    """Return something to be compared in place of a part that keeps nothing alive."""
    kind = type(part)
    if kind in _CLOSED or (kind is type and part.__module__ == "builtins"):
        return part
    if kind in (list, tuple):
        return tuple(map(_weakened, part))
    if kind is slice:
        return tuple(map(_weakened, (part.start, part.stop, part.step)))
    if isinstance(part, Tensor):
        return (
            *(_Weak(kind), part.shape, part.dtype, part.device, part.stride()),
            *(part.requires_grad, part.grad_fn is None),
        )
    if isinstance(part, np.ndarray):
        return part.shape, part.dtype.str
    if isinstance(part, Enum):
        return _Weak(kind), part.name
    try:
        return _Unlike() if part is UNKNOWN else _Weak(part)
    except TypeError:  # there is no weak reference, and it may refer to anything
        return _Unlike()
