"""Batches: what they may look like, how many samples they have, how they reach the device."""

import copy
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Batch:
    """One batch of the data.

    Attributes:
        index: Its place in the pass over the data, from 0.
        X: The model's one argument, any nesting of tensors.
        y: The loss's second argument, any nesting of tensors, or ``None``.
    """

    index: int
    X: Any
    y: Any


class Batches:
    """The user's data, re-iterable, on the model's device.

    Args:
        data: An iterable over pairs ``(X, y)`` that starts anew at each ``iter``.
        batch_size_fn: Number of samples of an ``X``. Default: the length of the first axis,
            on which all tensors in ``X`` must agree.
        num_data: Number of samples, checked in each pass if given.

    Raises:
        ValueError: If ``data`` can be iterated only once.
        TypeError: If ``data`` is not iterable, or ``batch_size_fn`` not callable.
    """

    def __init__(
        self,
        data: Iterable,
        batch_size_fn: Callable[[Any], int] | None = None,
        num_data: int | None = None,
    ):
        if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
            raise TypeError(
                f"data must be an iterable over pairs (X, y), got {type(data).__name__}. For one "
                "batch, pass [(X, y)]."
            )
        if isinstance(data, Iterator):
            raise ValueError(
                f"data is a one-shot iterator ({type(data).__name__}), exhausted after one pass "
                "over it; products need many. Pass a DataLoader or a list of batches."
            )
        if batch_size_fn is not None and not callable(batch_size_fn):
            raise TypeError(
                "batch_size_fn must be a function from X to the number of samples, got "
                f"{type(batch_size_fn).__name__}."
            )
        self.data = data
        self.batch_size_fn = batch_size_fn
        self.num_data = num_data

    def __len__(self) -> int:
        return len(self.data)

    def iterate(self, device: torch.device, wrap: Callable[[Iterable], Iterable]) -> Iterator:
        """Yield one ``Batch`` after the other.

        Args:
            device: Where its tensors shall be.
            wrap: Applied to the data (a progress bar).

        Yields:
            The batches, their tensors moved to ``device``.

        Raises:
            ValueError: If a batch is not a pair, if there is none, or if the number of samples is
                not the one given.
        """
        index, num_data = -1, 0
        for index, pair in enumerate(wrap(self.data)):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                kind = type(pair).__name__
                size = f" of length {len(pair)}" if isinstance(pair, tuple | list) else ""
                raise ValueError(
                    f"Batch {index} of the data is a {kind}{size}, expected a pair (X, y). Let "
                    "the data yield pairs, e.g. [(batch, batch['labels']) for batch in ...]; "
                    "y may be None."
                )
            batch = Batch(index, *move(tuple(pair), device))
            num_data += self.size(batch) if self.num_data is not None else 0
            yield batch
        if index == -1:
            raise ValueError("data is empty: it did not yield a single batch.")
        if self.num_data is not None and num_data != self.num_data:
            raise ValueError(f"num_data is {self.num_data}, but data has {num_data} samples.")

    def size(self, batch: Batch) -> int:
        """Return the number of samples in a batch.

        Raises:
            ValueError: If it is not evident and ``batch_size_fn`` is not given.
        """
        if self.batch_size_fn is not None:
            return int(self.batch_size_fn(batch.X))
        if isinstance(batch.X, PackedSequence):
            return int(batch.X.batch_sizes[0])
        sizes = {int(leaf.shape[0]) for leaf in leaves(batch.X) if leaf.ndim > 0}
        if len(sizes) != 1:
            found = f"tensors with first axes of lengths {sorted(sizes)}" if sizes else "no tensor"
            raise ValueError(
                f"The number of samples in batch {batch.index} is not evident: its X has {found}. "
                "Pass batch_size_fn, a function from X to the number of samples."
            )
        return sizes.pop()


def map_leaves(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to everything in nested dicts, lists and tuples that is none of these.

    A container that can move itself to a device (a PackedSequence, a Hugging Face batch)
    counts as a leaf. A tensor that occurs twice is one tensor in the result, too.
    """
    return _descend(tree, function, {})


def _descend(part: Any, function: Callable[[Any], Any], mapped: dict[int, Any]) -> Any:
    # no function inside of the other one: it would refer to itself, and keep batches in memory
    if isinstance(part, Tensor):
        if id(part) not in mapped:
            mapped[id(part)] = function(part)
        return mapped[id(part)]
    if hasattr(part, "to"):
        return function(part)
    if isinstance(part, dict):
        # the copy of a defaultdict, or of a user's own kind, is one
        twin = copy.copy(part)
        twin.update({key: _descend(value, function, mapped) for key, value in part.items()})
        return twin
    if isinstance(part, list | tuple):
        values = [_descend(value, function, mapped) for value in part]
        return type(part)(*values) if hasattr(part, "_fields") else type(part)(values)
    return function(part)


def first_samples(batch: Batch, num_samples: int, at_least: int = 2) -> Batch | None:
    """Return a batch of the first few samples, on which whatever a model does is cheap to try.

    Args:
        batch: A batch.
        num_samples: How many samples it has: the tensors whose first axis has this length are cut.
        at_least: How many are few.

    Returns:
        The batch; ``None`` if there are few anyway, or it is not evident how to cut it.
    """
    if num_samples < 2 * at_least:
        return None
    few = max(at_least, num_samples // 8)

    def cut(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            if not _has_length(leaf, num_samples):
                return leaf
            # no view: it would keep all samples in memory
            return leaf.detach()[:few].clone().requires_grad_(leaf.requires_grad)
        if isinstance(leaf, UserDict):  # a batch of Hugging Face, whose copies are independent
            twin = copy.copy(leaf)
            twin.update({key: map_leaves(value, cut) for key, value in leaf.items()})
            return twin
        return leaf

    inputs, targets = (
        [leaf for leaf in leaves(tree) if leaf.ndim > 0] for tree in (batch.X, batch.y)
    )
    rest = [leaf for leaf in inputs if not _has_length(leaf, num_samples)]
    # integers that stay may count samples that are gone
    if len(rest) == len(inputs) or not all(leaf.is_floating_point() for leaf in rest):
        return None
    if not all(_has_length(leaf, num_samples) for leaf in targets):
        return None
    return Batch(batch.index, *map_leaves((batch.X, batch.y), cut))


def _has_length(leaf: Tensor, length: int) -> bool:
    return leaf.ndim > 0 and len(leaf) == length


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
        if hasattr(leaf, "to"):
            # some containers move in place: not the user's own
            leaf = (leaf if isinstance(leaf, Tensor) else copy.copy(leaf)).to(device)
        # autograd refuses tensors that were made in inference mode
        return leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf

    return map_leaves(tree, moved)


def to_double(tree: Any) -> Any:
    """Turn all floating-point tensors of a nested structure into float64."""

    def double(leaf: Any) -> Any:
        is_float = isinstance(leaf, Tensor) and leaf.is_floating_point()
        return leaf.double() if is_float else leaf

    return map_leaves(tree, double)


def leaves(tree: Any) -> list[Tensor]:
    """Return all tensors in nested mappings, lists and tuples."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [leaf for value in tree.values() for leaf in leaves(value)]
    if isinstance(tree, list | tuple):
        return [leaf for value in tree for leaf in leaves(value)]
    return []


def strided_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse tensor consists of; a tensor with numbers is its own."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [] if tensor._is_zerotensor() else [tensor]
