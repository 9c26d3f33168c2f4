"""Refuses calls that write to the user's parameters."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.support.torch_internals import pytree, tensor_tables

#: Methods with the name of one that writes, which leave the values as they are.
_HARMLESS = {"requires_grad_", "detach_"}


class Protected:
    """The parameters of model and loss, frozen ones too, to which calls must not write.

    A model computes with tensors that share the memory of the user's parameters, so that writing to
    one, or to a view of it, would change the user's model. It is refused before it happens.
    Parameters need not be registered; ``source_of`` returns that of which a tensor was gathered.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        params: Mapping[str, Tensor] | None = None,
        source_of: Callable[[Tensor], Tensor | None] | None = None,
    ):
        self._modules, self._params, self._source_of = modules, params or {}, source_of
        # what modules have now: they may have other tensors once they are called
        plain = [x for x in modules if not isinstance(x, torch.jit.ScriptModule)]
        tables = [(module, tensor_tables(module)[0]) for module in plain]
        self._tables = [(module, dict(dict.items(table))) for module, table in tables if table]

    def check(self, func: Callable, args: tuple, kwargs: Mapping[str, Any]) -> None:
        """Refuse a call that writes to a parameter; only for calls of functions that write."""
        if func.__name__ in _HARMLESS or (func.__name__ == "__set__" and _is_given(*args)):
            return
        for tensor in written(func, args, kwargs):
            # where autograd records, it refuses to write to parameters and their views itself
            if tensor.grad_fn is not None and torch.is_grad_enabled():
                continue
            if (name := self._name_of(func, tensor)) is not None:
                raise ValueError(
                    f"The model, or its loss, writes to parameter '{name}' (by {_spelt(func)}), "
                    "which would change your model. Use a new tensor in its place, such as w = "
                    "F.normalize(self.weight) or w = self.weight.clamp(-1, 1), which counts in "
                    "derivatives; or move the update into the training loop, such as that of a "
                    "moving average. If only a first call writes, as in data-dependent "
                    "initialization, call the model once before, in the same mode."
                )

    def _name_of(self, func: Callable, tensor: Tensor) -> str | None:
        """Return the name of the parameter that a call changes by writing to a tensor."""
        own, by_address = self._names
        if func.__name__ == "__set__":  # gives new memory to this very tensor
            return own.get(id(tensor)) if func.__self__.__name__ == "data" else None
        if self._source_of is not None and (source := self._source_of(tensor)) is not None:
            return own[id(source)]
        return by_address.get(address_of(tensor))

    @cached_property
    def _names(self) -> tuple[dict[int, str], dict[int | None, str]]:
        """The names of the user's own tensors, by id and by address."""
        prefixes: dict[nn.Module, str] = {}
        for module in self._modules:
            if module not in prefixes:  # a root: modules follow the one that has them
                prefixes |= {child: name for name, child in module.named_modules()}
        found = {
            f"{prefixes.get(module, '')}.{name}".lstrip("."): x
            for module, table in self._tables
            for name, x in table.items()
            if x is not None
        }
        found |= self._params
        by_address = {address_of(x): name for name, x in found.items()}
        by_address.pop(None, None)
        return {id(x): name for name, x in found.items()}, by_address


def _is_given(tensor: Tensor, value: Any) -> bool:
    """Return whether a tensor is given the very memory that it has, as by ``module.to(dtype)``."""
    if not isinstance(value, Tensor) or None in (address := [*map(address_of, (tensor, value))]):
        return False
    same = [(x.dtype, x.shape, x.stride(), x.storage_offset()) for x in (tensor, value)]
    return address[0] == address[1] and same[0] == same[1]


def _spelt(func: Callable) -> str:
    """Return how a user writes a function."""
    return ".data = ..." if func.__name__ == "__set__" else func.__name__


# --- which memory a call writes to

#: Python's operators that write; PyTorch calls the others by other names, such as ``add_``.
_OPERATORS = {"__set__", "__setitem__", "__iand__", "__ior__", "__ixor__"}
_OPERATORS |= {"__ilshift__", "__irshift__"}


def writes(func: Callable, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call writes to its first argument, or to ``out``."""
    return _is_in_place(func) or bool(kwargs and ("out" in kwargs or kwargs.get("inplace")))


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
    return _names_write(getattr(func, "__name__", ""))


@cache
def _names_write(name: str) -> bool:
    """Return whether a function writes to its first argument: PyTorch's names of these end so."""
    name = name.partition(".")[0]
    return name in _OPERATORS or name[-1:] == "_" != name[-2:-1]


def address_of(x: Tensor) -> int | None:
    """Return the address of a tensor's memory, ``None`` if it has none of its own."""
    try:
        return x.untyped_storage().data_ptr() or None
    except (NotImplementedError, RuntimeError):  # sparse, or inside of vmap
        return None
