"""Nested containers of tensors: parts of batches, and what is done to all of them."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


def map_leaves(
    tree: Any, function: Callable[[Any], Any], whole: Callable[[Any], bool] = lambda part: False
) -> Any:
    """Apply a function to everything in nested containers that is none of these.

    Containers are mappings, lists, tuples and dataclasses; those of the result are of the same
    types. A tensor that occurs twice is one tensor in the result, too.

    Args:
        tree: Nested containers.
        function: Applied to what they contain.
        whole: Says of which containers the function takes care as a whole.
    """
    return _descend(tree, function, whole, {})


def _descend(part: Any, function: Callable, whole: Callable, mapped: dict[int, Any]) -> Any:
    # no function inside of the other one: it would refer to itself, and keep batches in memory
    if isinstance(part, Tensor):
        if id(part) not in mapped:
            mapped[id(part)] = function(part)
        return mapped[id(part)]
    if isinstance(part, PackedSequence) or whole(part):
        return function(part)
    if isinstance(part, Mapping):
        items = {key: _descend(x, function, whole, mapped) for key, x in part.items()}
        return _mapping_with(part, items)
    if isinstance(part, list | tuple):
        values = [_descend(value, function, whole, mapped) for value in part]
        return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
    if _is_dataclass(part):
        twin = copy.copy(part)
        for name, value in _fields(part).items():
            # it may be frozen
            object.__setattr__(twin, name, _descend(value, function, whole, mapped))
        return twin
    return function(part)


def _mapping_with(part: Mapping, items: dict) -> Mapping:
    """Return a mapping of the same type with other values."""
    if isinstance(part, dict | UserDict):
        # the copy of a defaultdict, or of a user's own kind, is one
        twin = copy.copy(part)
        for key, value in items.items():
            twin[key] = value
        return twin
    # copies of others may share memory
    if all(part[key] is value for key, value in items.items()):
        return part
    try:
        return type(part)(items)
    except TypeError:
        return items


def _is_dataclass(part: Any) -> bool:
    return is_dataclass(part) and not isinstance(part, type)


def _fields(part: Any) -> dict[str, Any]:
    names = [field.name for field in fields(part)]
    return {name: getattr(part, name) for name in names if hasattr(part, name)}


def take(tree: Any, samples: slice, num_samples: int, whole: Tensor | None = None) -> Any:
    """Return some samples of a batch.

    Tensors and arrays whose first axis has the batch's length are cut, and lists of as many things
    that are no such tensors; everything else stays.

    Args:
        tree: X, y, or both.
        samples: Which samples.
        num_samples: How many the batch has.
        whole: A tensor that stays, too.
    """

    def cut(part: Any) -> Any:
        # no view: it would keep all samples in memory
        return part[samples].clone() if isinstance(part, Tensor) else part[samples]

    return _map_samples(tree, cut, num_samples, whole)


def perhaps_shared(tree: Any, num_samples: int) -> list[Tensor]:
    """Return the tensors of which one may belong to all samples, see ``take``."""
    found = {id(leaf): leaf for leaf in leaves(tree) if has_length(leaf, num_samples)}
    return list(found.values()) if len(found) > 1 else []


def twice(tree: Any) -> Any:
    """Return a batch of one sample with this sample twice, see ``take``."""

    def repeat(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return part + part
        return torch.cat([part] * 2) if isinstance(part, Tensor) else np.concatenate([part] * 2)

    return _map_samples(tree, repeat, 1)


def lent(tree: Any) -> Any:
    """Return a batch for one call of a function, which may take things out of its containers."""
    if type(tree) in (list, tuple):
        return type(tree)(lent(part) for part in tree)
    if not isinstance(tree, dict | UserDict):
        return tree
    twin = copy.copy(tree)
    for key, part in tree.items():
        if isinstance(part, dict | UserDict | list | tuple):
            twin[key] = lent(part)
    return twin


def tile(tree: Any, few: int, num_samples: int) -> Any:
    """Return a batch of as many samples, which are copies of the first few, see ``take``."""
    indices = [i % few for i in range(num_samples)]

    def copies(part: Any) -> Any:
        if isinstance(part, list | tuple):
            return type(part)(part[i] for i in indices)
        return part[indices]

    return _map_samples(tree, copies, num_samples)


def _map_samples(
    tree: Any, function: Callable[[Any], Any], num_samples: int, whole: Tensor | None = None
) -> Any:
    """Apply a function to all that has one entry for each sample, but not to ``whole``."""

    def lists_samples(part: Any) -> bool:
        return isinstance(part, list | tuple) and _lists_samples(part, num_samples)

    def applied(part: Any) -> Any:
        if part is whole:
            return part
        if isinstance(part, Tensor) and has_length(part, num_samples):
            return function(part.detach()).requires_grad_(part.requires_grad)
        return function(part) if lists_samples(part) or has_length(part, num_samples) else part

    return map_leaves(tree, applied, lists_samples)


def _lists_samples(part: list | tuple, num_samples: int) -> bool:
    """Return whether a list has one thing for each sample."""
    named = hasattr(part, "_fields")
    if named or len(part) != num_samples or any(isinstance(x, Tensor) for x in part):
        return False
    inner = [*leaves(part), *(x for x in part if isinstance(x, np.ndarray))]
    # of as many containers, each may have all samples
    return not inner or not all(has_length(x, num_samples) for x in inner)


def has_length(leaf: Any, length: int) -> bool:
    """Return whether something is a tensor or array whose first axis has this length."""
    return isinstance(leaf, Tensor | np.ndarray) and leaf.ndim > 0 and leaf.shape[0] == length


def move(tree: Any, device: torch.device) -> Any:
    """Move all that can be moved in a nested structure to a device.

    Raises:
        ValueError: If a tensor has no values.
    """

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_meta:
            raise ValueError(
                f"The data has a tensor of shape {list(leaf.shape)} on the meta device, which has "
                "no values. Create it on the CPU or a GPU."
            )
        if _moves_itself(leaf):
            # some containers move in place: not the user's own
            leaf = (leaf if isinstance(leaf, Tensor) else copy.copy(leaf)).to(device)
        # autograd refuses tensors that were made in inference mode
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    return map_leaves(tree, moved, _moves_itself)


def _moves_itself(part: Any) -> bool:
    """Return whether a container has a method for that, such as a batch of Hugging Face."""
    # attributes of a dictionary may be its items
    return hasattr(type(part) if isinstance(part, Mapping) else part, "to")


def to_double(tree: Any) -> Any:
    """Turn all floating-point tensors of a nested structure into float64."""

    def double(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    return map_leaves(tree, double)


#: Types of most of what has no tensors.
_LEAFLESS = {type(None), bool, int, float, str, torch.dtype, torch.device}


def leaves(tree: Any) -> list[Tensor]:
    """Return all tensors in nested mappings, lists, tuples and dataclasses."""
    found: list[Tensor] = []
    _collect(tree if type(tree) in (tuple, list) else (tree,), found)
    return found


def _collect(trees: Iterable[Any], found: list[Tensor]) -> None:
    for tree in trees:
        kind = type(tree)
        if kind in _LEAFLESS:  # abstract classes take longer
            continue
        if isinstance(tree, Tensor):
            found.append(tree)
        elif kind is dict:
            if tree:
                _collect(tree.values(), found)
        elif kind is tuple or isinstance(tree, list | tuple):
            _collect(tree, found)
        elif isinstance(tree, Mapping):
            _collect(tree.values(), found)
        elif _is_dataclass(tree):
            _collect((_fields(tree),), found)


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse or jagged one consists of; one with numbers is its own."""
    if hasattr(tensor, "__tensor_flatten__"):  # a subclass that wraps others
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in strided_parts(getattr(tensor, name))]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [] if tensor._is_zerotensor() else [tensor]
