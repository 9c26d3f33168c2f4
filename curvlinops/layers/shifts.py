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
    kernel = window.kernel_size
    # the first axis in front of the samples: its ranges need no copy
    x = x.unflatten(1, (window.groups, -1)).movedim(0, 3)
    offsets = list(product(*(range(1 - k, k) for k in kernel[1:])))
    for core in product(*([True] if k == 1 else [True, False] for k in kernel[1:])):
        others = len(core)
        left = _select(x, window, core, (0,) * others).flatten(others + 3)
        # in the core all at once: one large matrix product
        for some in [offsets] if all(core) else [[offset] for offset in offsets]:
            right = torch.stack([_select(x, window, core, o) for o in some], dim=others + 1)
            right = right.flatten(others + 1, others + 2).flatten(others + 3)
            _add_products(total, left, right, some, core, window)


def _add_products(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    offsets: Sequence[Offset],
    core: Sequence[bool],
    window: Window,
) -> None:
    """Add what some ranges of the axes after the first contribute.

    Args:
        total: ``[G, *K, C/G, *K, C/G]``, is added to.
        left: Input in the ranges, ``[*classes, G, C/G, I, P]``: the first axis, and positions in
            samples and other axes.
        right: The same, shifted by each of the offsets, ``[*classes, G, offsets * C/G, I, P]``.
        offsets: ``k' - k`` on the axes after the first, ascending.
        core: Whether the ranges on these axes are the core, or the classes around it.
        window: Which patches.
    """
    channels = left.shape[-3]
    for first in range(window.kernel_size[0]):
        zero = (0,) * (1 + len(core))
        kept = [(first, *offset) for offset in offsets if (first, *offset) >= zero]
        if not kept:
            continue
        sums = _products(left, right[..., -len(kept) * channels :, :, :], first, window)
        for offset, block in zip(kept, sums.split(channels, dim=-1), strict=True):
            _add_block(total, block, offset, core, window)


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

    parts = [
        classes(0, kernel - 1, step),
        classes(reach, 1, size - reach),
        classes(size, kernel - 1 - offset, step),
    ]
    return _runs(torch.cat(parts), 0, kernel, 0, kernel - offset)


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


def _select(x: Tensor, window: Window, core: Sequence[bool], offset: Offset) -> Tensor:
    """Return ``[*classes, G, C/G, I, N, *positions]``, shifted, of ``[G, C/G, I, N, *others]``.

    On axes where ``core`` is false, positions that do not exist are replaced by the nearest ones;
    the run of no k has them.
    """
    dims = len(window.size)
    for axis in range(dims - 1, 0, -1):
        # counted from behind, as classes pile up in front
        dim, size, step = axis - dims, window.size[axis], window.dilation[axis]
        reach, shift = step * (window.kernel_size[axis] - 1), step * offset[axis - 1]
        if core[axis - 1]:
            x = x.narrow(dim, reach + shift, size - reach).unsqueeze(0)
        else:
            border = torch.arange(reach, device=x.device)
            index = torch.cat([border, border + size]).add_(shift).clamp_(0, size + reach - 1)
            shape = 2 * (window.kernel_size[axis] - 1), step
            x = x.index_select(dim, index).unflatten(dim, shape).movedim(dim - 1, 0)
    return x
