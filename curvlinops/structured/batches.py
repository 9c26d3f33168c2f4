"""Tensors of equal shape as one: many small ones take as little time as a few."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: So many numbers are copied into one batch. Larger tensors gain nothing from company.
_NUMBERS = 2**20


def batches(tensors: Sequence[Tensor]) -> Iterator[tuple[list[int], list[int], Tensor]]:
    """Yield tensors ``[G, *shape]`` of equal shape, dtype and device, one after the other.

    Yields:
        Their numbers, the sizes G, and the batch along the first axis; it is no copy of a tensor
        that is alone.
    """
    groups: dict[tuple, list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.shape[1:], tensor.dtype, tensor.device), []).append(i)
    for members in groups.values():
        step = max(_NUMBERS // max(tensors[members[0]].numel(), 1), 1)
        for start in range(0, len(members), step):
            some = members[start : start + step]
            parts = [tensors[i] for i in some]
            batch = parts[0] if len(parts) == 1 else torch.cat(parts)
            yield some, [len(part) for part in parts], batch


def portions(sizes: Sequence[int]) -> Iterator[slice]:
    """Yield ranges of tensors, given their numbers of entries, that are worth being a batch."""
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > _NUMBERS:
            yield slice(start, i)
            start, total = i, 0
        total += size
    if start < len(sizes):
        yield slice(start, len(sizes))
