"""Finds the axis of a layer's output that numbers the samples.

Layers see ``[N, T, d]``, ``[N * T, d]``, ``[T, N, d]`` or ``[T * N, d]``. A shape leaves a few
candidates, and two backward passes decide between them: if the loss of sample n is weighted by
r_n, so is the gradient of each row that belongs to it.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.check import NOISE, rounding_of, tolerance_of

#: The number of entries of each row that are compared.
_SKETCHED = 4

#: Operations that may move rows depending on their values.
_MOVING = ("Index", "Gather", "Scatter", "Segment", "Sort", "Topk", "Take")
_MOVING += ("MaskedSelect", "MaskedScatter")

#: Arguments of operations that say which rows of an input are those of an output.
ROW_ARGUMENTS = ("dim", "dims", "dim0", "dim1", "index", "start", "shifts")
ROW_ARGUMENTS += ("split_size", "split_sizes")


#: A function, and the number of its earlier calls with a parameter.
Call = tuple[Callable, int]


class UseKey(NamedTuple):
    """Identifies a use from one batch to the next.

    Attributes:
        call: The call.
        place: The position or the name of the argument.
        names: The parameters of which the argument is a function.
    """

    call: Call
    place: int | str
    names: tuple[str, ...]


class BatchAxis(NamedTuple):
    """The axis that numbers the samples, alone or merged with an axis of positions.

    Attributes:
        axis: The place among the axes that number rows; ``None`` for all of them, merged to one.
        inner: Of an axis that is merged with positions: whether the sample is its faster index.
            ``None`` for an axis of samples alone.
    """

    axis: int | None
    inner: bool | None = None

    def fits(self, row_shape: tuple[int, ...], num_samples: int) -> bool:
        """Return whether the axis exists and can be divided among the samples."""
        if self.axis is not None and self.axis >= len(row_shape):
            return False
        if self.axis is None:
            return prod(row_shape) % num_samples == 0
        length = row_shape[self.axis]
        # one of samples alone may be merged with positions on another batch
        return length == num_samples if self.inner is None else length % num_samples == 0

    def to_front(self, x: Tensor, start: int, num_row_axes: int, num_samples: int) -> Tensor:
        """Turn ``[*, *row_shape, *features]`` into ``[*, N, S, *features]``.

        Args:
            x: Rows, behind ``start`` other axes, along ``num_row_axes`` axes.
            start: Number of other axes.
            num_row_axes: Number of axes that together number the rows.
            num_samples: N.
        """
        end = start + num_row_axes
        if not self.axis and not self.inner:  # samples are in front
            rows = prod(x.shape[start:end]) // num_samples
            return x.reshape(*x.shape[:start], num_samples, rows, *x.shape[end:])
        axis = start + (self.axis or 0)
        rows = x.shape[axis] // num_samples
        sizes = (rows, num_samples) if self.inner else (num_samples, rows)
        sample_axis = axis + 1 if self.inner else axis
        return x.unflatten(axis, sizes).movedim(sample_axis, start).flatten(start + 1, end)


#: All rows belong to one sample, or to neighboring ones in turn.
ALL_ROWS = BatchAxis(None)


@lru_cache(maxsize=1024)
def candidates(row_shape: tuple[int, ...], num_samples: int) -> tuple[BatchAxis, ...]:
    """Return the axes that may number the samples of rows along some axes, likely ones first."""
    if num_samples == 1:
        return (ALL_ROWS,)
    axes = range(len(row_shape))
    alone = [BatchAxis(axis) for axis in axes if row_shape[axis] == num_samples]
    merged = [BatchAxis(axis, inner) for inner in (False, True) for axis in axes]
    merged = [each for each in merged if row_shape[each.axis] != num_samples]
    rows = [ALL_ROWS] if len(row_shape) > 1 else []
    return tuple(each for each in (*alone, *merged, *rows) if each.fits(row_shape, num_samples))


def _samples(axis: BatchAxis, row_shape: tuple[int, ...], num_samples: int) -> tuple[int, ...]:
    """Return the sample of each row."""
    rows = torch.arange(prod(row_shape), device="cpu").reshape(row_shape)
    rows = axis.to_front(rows, 0, len(row_shape), num_samples)
    out = torch.empty(prod(row_shape), dtype=torch.int64, device="cpu")
    out[rows.flatten()] = torch.arange(num_samples, device="cpu").repeat_interleave(rows.shape[1])
    return tuple(out.tolist())


def sketch(rows: Tensor, num_row_axes: int) -> Tensor:
    """Return a short sketch ``[*row_shape, F]`` of each row of ``[*row_shape, *features]``.

    A sketch has random combinations of the features. A row is a multiple of another one if their
    sketches are. In half precision, the combinations might cancel: the sketch is the row itself.
    """
    rows = rows.reshape(*rows.shape[:num_row_axes], prod(rows.shape[num_row_axes:]))
    width = rows.shape[-1]
    if width <= _SKETCHED or rows.dtype.itemsize < 4:
        return rows
    generator = torch.Generator().manual_seed(width)
    mix = torch.randn(width, _SKETCHED, generator=generator, device="cpu") / _SKETCHED**0.5
    return rows @ mix.to(rows)


class Rows(NamedTuple):
    """The gradients of a use's rows in two backward passes.

    Attributes:
        row_shape: Lengths of the axes that number them.
        plain: Sketches of the gradients of the sum of the samples' losses.
        weighted: Sketches of the gradients of the sum weighted by r.
    """

    row_shape: tuple[int, ...]
    plain: Tensor
    weighted: Tensor


def decide(
    rows: Mapping[UseKey, Rows], r: Tensor, dtype: torch.dtype, known: Mapping[UseKey, BatchAxis]
) -> tuple[dict[UseKey, BatchAxis], set[UseKey]]:
    """Find the axis of samples of each use, where there is one.

    Args:
        rows: The gradients.
        r: The samples' weights, ``[N]``.
        dtype: The least precise dtype in which the gradients were computed.
        known: The axes on other batches.

    Returns:
        The axes, and the uses for which others are possible: these differ in rows without a
        gradient.
    """
    largest = max((float(each.plain.double().norm()) for each in rows.values()), default=0.0)
    chosen, ambiguous = {}, set()
    for key, each in rows.items():
        axes = candidates(each.row_shape, len(r))
        found = [axis for axis in axes if _explains(axis, each, r, dtype)]
        if not found:  # the gradients may be rounding errors of larger ones
            noise = NOISE * rounding_of(dtype) * largest
            found = [axis for axis in axes if _explains(axis, each, r, dtype, noise)]
        if not found:
            continue
        chosen[key] = known[key] if known.get(key) in found else found[0]
        is_open = len(found) > 1 and chosen[key] != known.get(key)
        if is_open and len({_samples(axis, each.row_shape, len(r)) for axis in found}) > 1:
            ambiguous.add(key)
    return chosen, ambiguous


def _explains(
    axis: BatchAxis, rows: Rows, r: Tensor, dtype: torch.dtype, noise: float = 0.0
) -> bool:
    """Return whether the weighted gradients are those of samples along an axis."""
    num_axes = len(rows.row_shape)
    plain = axis.to_front(rows.plain.double(), 0, num_axes, len(r))
    weighted = axis.to_front(rows.weighted.double(), 0, num_axes, len(r))
    norms, tolerance = plain.norm(dim=2), tolerance_of(dtype)
    error = (weighted - r.double().reshape(-1, 1, 1) * plain).norm(dim=2)
    # rounding errors are relative to the largest numbers
    noise += 100 * torch.finfo(dtype).eps * float(norms.norm())
    if torch.finfo(dtype).bits == 16:
        noise = 0.2 * tolerance * float(norms.max()) if norms.numel() else 0.0
    return bool((error <= tolerance * norms + noise).all())


def moves_rows(nodes: Iterable[Any], edges: Collection[Any]) -> bool:
    """Return whether an operation behind a layer may move rows depending on their values.

    Args:
        nodes: The nodes of the graph.
        edges: The nodes at which the gradients of layers' outputs pass.
    """
    stack, seen = [node for node in nodes if node not in edges and _may_move(node)], set()
    while stack:
        node = stack.pop()
        if node in edges:
            return True
        if node not in seen:
            seen.add(node)
            stack += [source for source, _ in node.next_functions if source is not None]
    return False


def _may_move(node: Any) -> bool:
    """Return whether an operation may move rows depending on values that no argument shows."""
    name = node.name()
    if name.startswith(("Mm", "Bmm", "Mv", "Addmm", "Baddbmm")):
        return node.next_functions[-2][0] is None  # a constant mixes the rows
    is_custom = not name[-1:].isdigit() and not name.endswith("AccumulateGrad")
    return is_custom or name.startswith(_MOVING)
