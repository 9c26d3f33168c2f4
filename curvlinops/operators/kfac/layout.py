"""Where the entries of a block are in its parameters."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from curvlinops.structured.layout import ParameterView


def unused_views(
    name: str, shape: Sequence[int], views: Iterable[ParameterView]
) -> list[ParameterView]:
    """Return views of all entries of a parameter that are in none of the given views."""
    free = torch.ones(1, prod(shape), dtype=torch.bool, device="cpu")
    for view in views:
        view.of(free).fill_(False)
    return [ParameterView(name, *box) for box in _boxes(free.view(*shape))]


def _boxes(free: Tensor) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Return sizes, strides and offsets of boxes that make up the true entries of a mask."""
    if free.ndim == 0:
        return [((), (), 0)] if bool(free) else []
    boxes, offset, stride = [], 0, prod(free.shape[1:])
    slabs, counts = free.unique_consecutive(dim=0, return_counts=True)
    for slab, count in zip(slabs, counts.tolist(), strict=True):
        boxes += [
            ((count, *sizes), (stride, *strides), offset + start)
            for sizes, strides, start in _boxes(slab)
        ]
        offset += count * stride
    return boxes
