"""Second moments of the patches that a convolution sees, without forming all patches."""

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from curvlinops.core.functions import wide
from curvlinops.layers.patches import pad, patch_sums, view_patches
from curvlinops.layers.shifts import add_by_shifts
from curvlinops.layers.window import Window

#: How many numbers are copied at once. Pieces of this size stay in the caches of a CPU core.
_PIECE = 2**20
#: Of the lengths of patches from which computing only one half of a symmetric product pays.
_SYMMETRIC = 512


def input_covariance(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    size: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the second moments of patches, ``sum_{n,o} a_{no} a_{no}^T``, for each group.

    The arguments after the first are those of a ``Window``.

    Args:
        x: Input ``[N, C, *I]``.
        kernel_size: The kernel's lengths.
        stride: Steps between patches.
        pads: Zeros before and behind each axis; negative numbers crop.
        dilation: Steps within a patch.
        size: Number of patches along each axis.
        groups: Number of groups of channels.

    Returns:
        Sums over samples and positions ``[G, d, d]`` with ``d = C/G * prod(K)``, symmetric, in
        float32 for inputs in half precision.

    Raises:
        ValueError: If there are no such patches.
    """
    window = Window(kernel_size, stride, pads, dilation, size, groups)
    window.check(x)
    channels, kernel = x.shape[1] // groups, prod(kernel_size)
    add = add_by_shifts if shifts_are_cheaper(x.shape, window) else add_by_patches
    # positions in the kernel first: blocks of channels are contiguous
    total = wide(x[:0]).new_zeros(groups, *kernel_size, channels, *kernel_size, channels)
    for piece, part in _pieces(x, window, shifts=add is add_by_shifts):
        add(total, piece, part)
    matrix = total.reshape(groups, kernel * channels, kernel * channels).triu_()
    matrix += matrix.triu(1).mT
    blocks = matrix.reshape(groups, kernel, channels, kernel, channels).permute(0, 2, 1, 4, 3)
    return blocks.reshape(groups, channels * kernel, channels * kernel)


def input_sum(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    pads: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    size: Sequence[int],
    groups: int,
) -> Tensor:
    """Return the sums of patches, ``sum_{n,o} a_{no}``, for each group.

    Args:
        x: Input ``[N, C, *I]``.
        kernel_size: The kernel's lengths. This and what follows are those of a ``Window``.
        stride: Steps between patches.
        pads: Zeros before and behind each axis; negative numbers crop.
        dilation: Steps within a patch.
        size: Number of patches along each axis.
        groups: Number of groups of channels.

    Returns:
        Sums over samples and positions ``[G, C/G * prod(K)]``, in float32 for inputs in half
        precision.

    Raises:
        ValueError: If there are no such patches.
    """
    window = Window(kernel_size, stride, pads, dilation, size, groups)
    return patch_sums(wide(x).sum(0, keepdim=True), window).squeeze(0)


def shifts_are_cheaper(shape: Sequence[int], window: Window) -> bool:
    """Return whether products of shifts take less time than products of patches.

    Args:
        shape: The input's, ``[N, C, *I]``.
        window: Which patches.
    """
    reaches = [d * (k - 1) for d, k in zip(window.dilation, window.kernel_size, strict=True)]
    fits = all(s >= reach for s, reach in zip(window.size, reaches, strict=True))
    return fits and max(window.stride) == 1 and prod(window.kernel_size) > 1


def add_by_patches(total: Tensor, x: Tensor, window: Window) -> None:
    """Add the second moments of patches, blocks ``k <= k'`` at least.

    Args:
        total: ``[G, *K, C/G, *K, C/G]``, is added to.
        x: Input ``[N, C, *I]``, padded.
        window: Which patches.
    """
    dims, groups = len(window.size), window.groups
    channels, kernel = x.shape[1] // groups, prod(window.kernel_size)
    width = kernel * channels
    # [G, K, C, N O]: positions last in memory, for long runs to copy
    view = view_patches(x, window).unflatten(1, (groups, channels))
    view = view.permute(1, *range(3, 3 + dims), 2, 0, *range(3 + dims, 3 + 2 * dims))
    patches = view.reshape(groups, width, x.shape[0] * prod(window.size))
    matrix = total.view(groups, width, width)
    step = -(-width // 4) if width >= _SYMMETRIC else width
    for start in range(0, width, step):
        rows = slice(start, start + step)
        matrix[:, rows, start:] += patches[:, rows] @ patches[:, start:].mT


def _pieces(x: Tensor, window: Window, shifts: bool) -> Iterator[tuple[Tensor, Window]]:
    """Yield some samples at a time, or some positions of one on the first axis, padded."""
    others = window.kernel_size[1:]
    if shifts:
        copies = 1 + prod(2 * k - 1 for k in others)
        least = 4 * window.dilation[0] * (window.kernel_size[0] - 1)
    else:
        copies, least = prod(window.kernel_size), 1
    rows = max(_PIECE // (copies * x.shape[1] * prod(window.size[1:])), least, 1)
    samples = max(rows // window.size[0], 1)
    parts = max(window.size[0] // rows, 1)
    for some in x.split(samples):
        padded = pad(wide(some), window.pads)
        for axis, size in enumerate(window.size):
            padded = padded.narrow(axis + 2, 0, window.reach(axis, size))
        for part in range(parts):
            start, stop = (window.size[0] * i // parts for i in (part, part + 1))
            piece = padded.narrow(2, start * window.stride[0], window.reach(0, stop - start))
            yield piece, window._replace(size=(stop - start, *window.size[1:]))
