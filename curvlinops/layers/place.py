"""Parts of a parameter."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.support.records import recorded


@recorded
class Place(NamedTuple):
    """Which of a parameter's entries, in the order of the flat vector, a part of it has.

    Attributes:
        offset: The first one.
        shape: The part's shape.
        stride: Steps along its axes.
    """

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor, leaf: Tensor) -> "Place | None":
        """Return which part of a parameter a tensor is, ``None`` if it is none."""
        storages = (x.untyped_storage().data_ptr() for x in (tensor, leaf))
        if not leaf.is_contiguous() or tensor.dtype != leaf.dtype or len(set(storages)) > 1:
            return None
        offset = tensor.storage_offset() - leaf.storage_offset()
        place = cls(offset, tuple(tensor.shape), tensor.stride())
        return place if place.is_distinct else None

    @property
    def is_distinct(self) -> bool:
        """Whether no entry occurs twice."""
        reach = 0
        for step, length in sorted(zip(self.stride, self.shape, strict=True)):
            if length > 1 and step <= reach:
                # nested axes never meet, others may
                return step > 0 and _are_distinct([self])
            reach += step * (length - 1)
        return True

    def is_whole(self, size: int) -> bool:
        """Return whether it has all of as many entries, in whatever order."""
        return self.offset == 0 and prod(self.shape) == size == self.last + 1

    @property
    def last(self) -> int:
        """The last entry."""
        axes = zip(self.shape, self.stride, strict=True)
        return self.offset + sum(step * (length - 1) for length, step in axes)

    def entries(self, device: torch.device) -> Tensor:
        """Return the entries' indices."""
        index = torch.full((), self.offset, device=device)
        for axis, (length, step) in enumerate(zip(self.shape, self.stride, strict=True)):
            along = step * torch.arange(length, device=device)
            index = index.unsqueeze(axis) + along
        return index.flatten()


def are_disjoint(places: Sequence[Place]) -> bool:
    """Return whether parts of a parameter have no entries in common."""
    ordered = sorted(places)
    if all(one.last < other.offset for one, other in pairwise(ordered)):
        return True
    return _are_distinct(ordered)


def _are_distinct(places: Sequence[Place]) -> bool:
    entries = torch.cat([place.entries(torch.device("cpu")) for place in places])
    return len(entries.unique()) == len(entries)
