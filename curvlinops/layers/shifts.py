"""Second moments of patches by products of the input with its own shifts."""

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from curvlinops.layers.window import Window

Offset = tuple[int, ...]


def add_by_shifts(total: Tensor, x: Tensor, window: Window) -> None:
    """Add the second moments of patches with stride 1, blocks ``k <= k'`` only.

    The block of the positions k and k' in the kernel is ``sum_p x[p] x[p + delta]^T`` over
    ``k <= p < k + O`` with ``delta = k' - k`` (times the dilation), which depends on k only by
    where the range begins. Along each axis, the ranges of all k have the core ``K - 1 <= p < O``
    in common. The product over the core is computed once for each delta (13 instead of 45 for a
    kernel of 3 x 3); those over the K - 1 positions in front of it and behind it are computed one
    by one, such that each k's range is a run of K of these 2 K - 1 classes. Nothing is
    subtracted, and nothing cancels.

    Args:
        total: ``[G, *K, C/G, *K, C/G]``, is added to.
        x: Input ``[N, C, *I]``, padded and cropped to what the patches see. There are at least
            ``dilation * (K - 1)`` patches along each axis.
        window: Which patches.
    """
    # the first axis in front of the samples: its ranges need no copy
    x = x.unflatten(1, (window.groups, -1)).movedim(0, 3)
    others = window.kernel_size[1:]
    for core in product(*([True] if k == 1 else [True, False] for k in others)):
        _add_products(total, _shifted(x, window, core), core, window)


def _add_products(total: Tensor, right: Tensor, core: Sequence[bool], window: Window) -> None:
    """Add what some ranges of the axes after the first contribute.

    Args:
        total: ``[G, *K, C/G, *K, C/G]``, is added to.
        right: Input in these ranges and all shifts of them, ``[*classes, G, offsets, C/G, I, P]``:
            the first axis, and positions in samples and other axes.
        core: Whether the ranges on the axes after the first are the core, or the classes around it.
        window: Which patches.
    """
    first, *others = window.kernel_size
    offsets = list(product(*(range(1 - k, k) for k in others)))
    middle, channels = len(offsets) // 2, right.shape[-3]
    left = right[..., middle, :, :, :]
    for by in range(first):
        # the upper half of the symmetric matrix
        start = middle if by == 0 else 0
        sums = _products(left, right[..., start:, :, :, :].flatten(-4, -3), by, window)
        for offset, block in zip(offsets[start:], sums.split(channels, dim=-1), strict=True):
            _add_block(total, block, (by, *offset), core, window)


def _products(left: Tensor, right: Tensor, offset: int, window: Window) -> Tensor:
    """Return products summed over the range of each k on the first axis, ``[K - offset, ...]``."""
    kernel, step, size = window.kernel_size[0], window.dilation[0], window.size[0]
    reach = step * (kernel - 1)

    def classes(start: int, count: int, length: int) -> Tensor:
        a, b = (
            x.narrow(-2, begin, count * length).unflatten(-2, (count, length)).movedim(-3, 0)
            for x, begin in ((left, start), (right, start + step * offset))
        )
        return a.flatten(-2) @ b.flatten(-2).mT

    count = kernel - offset
    sums = classes(reach, 1, size - reach)
    if count > 1:
        sums = sums.repeat(count, *[1] * (sums.ndim - 1))
    for index, product_before in enumerate(classes(0, kernel - 1, step)):
        sums[: index + 1] += product_before
    for index, product_behind in enumerate(classes(size, count - 1, step)):
        sums[index + 1 :] += product_behind
    return sums


def _add_block(
    total: Tensor, sums: Tensor, offset: Offset, core: Sequence[bool], window: Window
) -> None:
    """Add ``[K - offset, *classes, G, C/G, C/G]`` to the blocks ``k' = k + offset``."""
    for axis, is_core in enumerate(core, start=1):
        if not is_core:
            kernel, by = window.kernel_size[axis], offset[axis]
            sums = _runs(sums, axis, kernel - 1, max(0, -by), kernel - abs(by))
    dims = len(offset)
    for axis, by in enumerate(offset):
        total = total.diagonal(by, 1, dims - axis + 2)
    total.permute(*range(3, 3 + dims), 0, 1, 2).add_(sums)


def _runs(x: Tensor, axis: int, length: int, first: int, count: int) -> Tensor:
    """Return the sums of ``count`` runs of neighbors along an axis."""
    total = x.narrow(axis, first, count).clone()
    for start in range(first + 1, first + length):
        total += x.narrow(axis, start, count)
    return total


def _shifted(x: Tensor, window: Window, core: Sequence[bool]) -> Tensor:
    """Return ranges of all axes but the first, with all shifts, of ``[G, C/G, I, N, *others]``.

    Returns:
        ``[*classes, G, offsets, C/G, I, P]``, with positions P in samples and other axes.
    """
    others, axes = window.kernel_size[1:], len(core)
    offsets = list(product(*(range(1 - k, k) for k in others)))
    views = (_selected(x, window, core, offset) for offset in offsets)
    out = None
    for index, view in enumerate(views):
        if out is None:
            shape = (*view.shape[: axes + 1], len(offsets), *view.shape[axes + 1 :])
            out = x.new_empty(shape)
        # several times faster than one copy of a view with overlaps
        out.select(axes + 1, index).copy_(view)
    return out.flatten(axes + 4)


def _selected(x: Tensor, window: Window, core: Sequence[bool], offset: Offset) -> Tensor:
    """Return ``[*classes, G, C/G, I, N, *positions]``, shifted by an offset.

    On axes where ``core`` is false, positions that do not exist are replaced by the nearest ones;
    the run of no k has them.
    """
    axes = len(core)
    for axis in range(axes, 0, -1):
        # counted from behind, as classes pile up in front
        dim, size, step = axis - axes - 1, window.size[axis], window.dilation[axis]
        reach, shift = step * (window.kernel_size[axis] - 1), step * offset[axis - 1]
        if core[axis - 1]:
            x = x.narrow(dim, reach + shift, size - reach).unsqueeze(0)
        else:
            border = torch.arange(reach, device=x.device)
            index = torch.cat([border, border + size]).add_(shift).clamp_(0, size + reach - 1)
            shape = 2 * (window.kernel_size[axis] - 1), step
            x = x.index_select(dim, index).unflatten(dim, shape).movedim(dim - 1, 0)
    return x
