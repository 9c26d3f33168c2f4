"""Tensors that share memory with an operator or its data, and cannot be written to."""

from collections.abc import Iterator
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
        kwargs, name = kwargs or {}, func.__name__.partition(".")[0]
        in_place = name in ("__set__", "__setitem__") or name[-1:] == "_" != name[-2:-1]
        written = args[:1] if in_place or kwargs.get("inplace") else ()
        if any(isinstance(x, cls) for x in pytree.tree_leaves((written, kwargs.get("out")))):
            raise TypeError(MESSAGE)
        with without_torch_function():
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, cls)]
            return _protected(func(*args, **kwargs), {_address(x) for x in given})

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
    return read_only(out) if isinstance(out, Tensor) and _address(out) in memory else out


def _address(x: Tensor) -> int | None:
    try:
        return x.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or inside of vmap
        return None
