"""Where the entries of a block are in its parameters."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.outer import Arrangement
from curvlinops.layers.place import Place
from curvlinops.structured.layout import ParameterView


def view_of(
    name: str, shape: Sequence[int], place: Place | None, arrangement: Arrangement
) -> ParameterView | None:
    """Return the entries of a Kronecker product in the order of its matrices ``[G, O, I]``.

    Args:
        name: The parameter.
        shape: Its shape.
        place: The part of the parameter that has the entries, ``None`` for all.
        arrangement: Where the entries of the matrices are in that part.

    Returns:
        ``None`` if the entries in this order are no strided view.
    """
    if place is None:
        place = Place(0, (prod(shape),), (1,))
    axes = zip(place.shape, place.stride, strict=True)
    view: ParameterView | None = ParameterView.of_axes(name, axes, place.offset)
    for before, order in reversed(arrangement.stages):
        view = view and view.permuted(before, order)
    return view


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
