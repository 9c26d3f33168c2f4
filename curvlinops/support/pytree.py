"""Nested batches: their tensors, and what is done to all of them or to some samples."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from curvlinops.support.torch_internals import pytree

#: Types without tensors, which are most frequent among the arguments of functions.
_PLAIN = {type(None), bool, int, float, str, slice, type(...)}
_PLAIN |= {torch.Size, torch.dtype, torch.device}


def leaves(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers, see ``_open``."""
    tensors: list[Tensor] = []
    _collect(tree if type(tree) in (tuple, list) else (tree,), tensors)
    return tensors


def _collect(parts: Iterable[Any], tensors: list[Tensor]) -> None:
    # PyTorch's function takes five times as long, at each call of a model that is recorded
    for part in parts:
        kind = type(part)
        if kind in _PLAIN:
            continue
        if isinstance(part, Tensor):
            tensors.append(part)
        elif kind is tuple or kind is list:
            _collect(part, tensors)
        elif kind is dict:
            _collect(part.values(), tensors)
        elif (opened := _open(part)) is not None:
            _collect(opened[0], tensors)


def _open(part: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return the contents of a container, and a function that makes such a container of others.

    Containers are those of PyTorch (lists, tuples, dictionaries, and classes that are registered,
    such as the outputs of Hugging Face), other mappings, and dataclasses. Others give ``None``.
    """
    kind = type(part)
    if kind is tuple or kind is list:
        return list(part), kind
    if kind is dict:
        return list(part.values()), lambda new: dict(zip(part, new, strict=True))
    if kind in _PLAIN:
        return None
    if not pytree.tree_is_leaf(part):
        # PyTorch's function keeps what is_leaf refers to until Python's garbage collector runs
        itself = id(part)
        parts, structure = pytree.tree_flatten(part, is_leaf=lambda inner: id(inner) != itself)
        return parts, lambda new: pytree.tree_unflatten(new, structure)
    if isinstance(part, Mapping):
        old = dict(part)
    elif is_dataclass(part) and not isinstance(part, type):
        old = {field.name: getattr(part, field.name) for field in fields(part)}
    else:
        return None
    return list(old.values()), lambda new: _with_values(part, dict(zip(old, new, strict=True)))


def _with_values(part: Any, values: dict[Any, Any]) -> Any:
    """Return a copy of a mapping or dataclass with other values."""
    if isinstance(part, Mapping) and not isinstance(part, dict | UserDict):
        return type(part)(values)
    twin = copy.copy(part)
    for name, value in values.items():
        if isinstance(part, Mapping):
            twin[name] = value
        else:  # also if the dataclass is frozen
            object.__setattr__(twin, name, value)
    return twin


def map_leaves(
    tree: Any, function: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda part: False
) -> Any:
    """Apply a function to everything in nested containers that is no container itself.

    The containers of the result have the same types. A tensor that occurs twice is one tensor in
    the result, too. Packed sequences are leaves, and so is what ``is_leaf`` says.
    """
    return _map(tree, function, is_leaf, {})


def _map(part: Any, function: Callable, is_leaf: Callable, mapped: dict[int, Tensor]) -> Any:
    # no closure that refers to itself: it would keep the batch in memory
    if isinstance(part, Tensor):
        if id(part) not in mapped:
            mapped[id(part)] = function(part)
        return mapped[id(part)]
    opened = None if isinstance(part, PackedSequence) or is_leaf(part) else _open(part)
    if opened is None:
        return function(part)
    parts, made_of = opened
    return made_of([_map(inner, function, is_leaf, mapped) for inner in parts])


def copy_containers(tree: Any) -> Any:
    """Return a batch for one call of a function, which may take things out of its containers."""
    return tree if isinstance(tree, Tensor) else map_leaves(tree, lambda leaf: leaf)


def move(tree: Any, device: torch.device) -> Any:
    """Move all that can be moved in nested containers to a device; refuse the meta device."""
    if type(tree) is tuple and all(x is None or _is_on(x, device) for x in tree):
        return tree

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise ValueError(
                f"The data has a tensor of shape {list(leaf.shape)} on the meta device, which has "
                "no values. Create it on the CPU or a GPU."
            )
        if _has_to(leaf):
            # some containers move in place: not the user's own
            leaf = (leaf if isinstance(leaf, Tensor) else copy.copy(leaf)).to(device)
        # autograd refuses tensors that were made in inference mode
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    return map_leaves(tree, moved, _has_to)


def _is_on(part: Any, device: torch.device) -> bool:
    """Return whether a tensor needs no ``move``."""
    return type(part) is Tensor and part.device == device and not part.is_inference()


def _has_to(part: Any) -> bool:
    """Return whether something moves itself, such as a tensor, or a batch of Hugging Face."""
    return hasattr(type(part), "to")  # attributes of an object may be its items


# --- samples


def has_length(leaf: Any, length: int) -> bool:
    """Return whether something is a tensor or array whose first axis has this length."""
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 and leaf.shape[0] == length


def select_samples(tree: Any, samples: slice | list[int], num_samples: int) -> Any:
    """Return some of the ``num_samples`` samples of X, y, or both.

    Tensors and arrays whose first axis has the batch's length are cut, and lists of as many things
    that are no such tensors; everything else stays.
    """

    def select(part: Any) -> Any:
        if isinstance(part, Tensor) and has_length(part, num_samples):
            # no view: it would keep all samples in memory
            some = part.detach()[samples].clone()
            return some.requires_grad_(part.requires_grad)
        if _lists_samples(part, num_samples):
            some = samples if isinstance(samples, list) else range(num_samples)[samples]
            return type(part)(part[i] for i in some)
        return part[samples] if has_length(part, num_samples) else part

    return map_leaves(tree, select, lambda part: _lists_samples(part, num_samples))


def _lists_samples(part: Any, num_samples: int) -> bool:
    """Return whether a list has one thing for each sample."""
    if not isinstance(part, list | tuple) or hasattr(part, "_fields"):
        return False
    if len(part) != num_samples or any(isinstance(x, Tensor) for x in part):
        return False
    inner = [*leaves(part), *(x for x in part if isinstance(x, np.ndarray))]
    # of as many containers, each may have all samples
    return not inner or not all(has_length(x, num_samples) for x in inner)
