"""Tensors that cannot be written to, and how to tell which memory a call writes to."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from curvlinops.support.torch_internals import (
    leave_uncompiled,
    pytree,
    without_torch_function,
)

MESSAGE = (
    "Tensors that share memory with an operator or its data are read-only. Damp with "
    "inverse(damping=...), or with damped(delta); or write to a clone()."
)


class ReadOnlyTensor(Tensor):
    """A tensor that raises TypeError where it, or a tensor that shares its memory, is written to.

    Views are read-only, too; other results and copies are plain tensors. ``x *= c`` makes a new
    tensor, as for a number: laplace-torch scales factors like that.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to write; run all else on plain tensors."""
        kwargs = kwargs or {}
        if writes(func, kwargs) and any(isinstance(x, cls) for x in written(func, args, kwargs)):
            raise TypeError(MESSAGE)
        with without_torch_function():
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
            return _protected(func(*args, **kwargs), {address_of(x) for x in given})

    def __iadd__(self, other: Any) -> Tensor:  # Python would make a new tensor instead
        raise TypeError(MESSAGE)

    __isub__ = __itruediv__ = __ifloordiv__ = __imod__ = __ipow__ = __iadd__

    def __imul__(self, other: Any) -> Tensor:
        return self * other

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.unbind())

    def __format__(self, spec: str) -> str:
        return format(self.clone(), spec)

    def __deepcopy__(self, memo: dict) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


def read_only(tensor: Tensor) -> Tensor:
    """Return a tensor in the same memory that cannot be written to."""
    leave_uncompiled(ReadOnlyTensor)
    return tensor.detach().as_subclass(ReadOnlyTensor)


def _protected(out: Any, memory: set[int]) -> Any:
    """Return a result that cannot be written to where it lies in some memory."""
    if isinstance(out, np.ndarray):
        out.flags.writeable = False
    if isinstance(out, tuple | list):
        return type(out)([_protected(x, memory) for x in out])
    return read_only(out) if isinstance(out, Tensor) and address_of(out) in memory else out


# --- which memory a call writes to

#: Python's operators that write; PyTorch calls the others by other names, such as ``add_``.
_OPERATORS = {"__set__", "__setitem__", "__iand__", "__ior__", "__ixor__"}
_OPERATORS |= {"__ilshift__", "__irshift__"}

#: Arguments that say where a function writes.
_TARGETS = {"out", "inplace"}


def writes(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call writes to its first argument, or to ``out``."""
    return _is_in_place(func) or bool(kwargs and not _TARGETS.isdisjoint(kwargs))


def written(func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors to which a call writes, if it ``writes``."""
    first = ()
    if _is_in_place(func) or kwargs.get("inplace"):
        first = next(iter((*args, *kwargs.values())), None)
    if isinstance(first, Tensor) and "out" not in kwargs:
        return [first]
    found = pytree.tree_leaves((first, kwargs.get("out")))
    return [x for x in found if isinstance(x, Tensor)]


def _is_in_place(func: Callable) -> bool:
    """Return whether a function writes to its first argument: PyTorch's names of these end so."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name in _OPERATORS or name[-1:] == "_" != name[-2:-1]


def address_of(x: Tensor) -> int | None:
    """Return the address of a tensor's memory, ``None`` if it has none of its own."""
    try:
        return x.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # sparse, or inside of vmap
        return None
