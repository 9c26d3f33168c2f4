"""Second moments of the patches that a convolution sees, without forming all patches."""

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from curvlinops.core.functions import wide
from curvlinops.layers.patches import pad, view_patches
from curvlinops.layers.shifts import add_by_shifts
from curvlinops.layers.window import Window

#: How many numbers are copied at once: patches, and shifted inputs.
_UNFOLDED, _SHIFTED = 2**20, 2**22
#: Of how many positions at least, for their products to take longer than adding them up.
_POSITIONS = 1024
#: Of the lengths of patches from which computing only one half of a symmetric product pays.
_SYMMETRIC = 512


def input_covariance(x: Tensor, window: Window) -> Tensor:
    """Return the second moments of patches, ``sum_{n,o} a_{no} a_{no}^T``, for each group.

    By products of patches, or of the input with its own shifts, whichever takes less time.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches.

    Returns:
        Sums over samples and positions ``[G, d, d]`` with ``d = C/G * prod(K)``, symmetric, in
        float32 for inputs in half precision.

    Raises:
        ValueError: If there are no such patches.
    """
    window.check(x)
    x, width = wide(x), x.shape[1] * prod(window.kernel_size)
    if shifts_are_cheaper(x.shape, window):
        shifted = x.shape[1] * (1 + prod(2 * k - 1 for k in window.kernel_size[1:]))
        return covariance_by_shifts(x, window, max(_SHIFTED // shifted, _POSITIONS))
    return covariance_by_patches(x, window, max(_UNFOLDED // width, _POSITIONS))


def shifts_are_cheaper(shape: Sequence[int], window: Window) -> bool:
    """Return whether ``covariance_by_shifts`` takes less time than ``covariance_by_patches``.

    Counted are multiplications, with what takes the time of some: copying a number (64), adding
    to an entry of the result and moving it (100, and 500 with the blocks of all shifts), and
    matrix products of few channels (1.5); with fewer than 8 they are none at all.

    Measured times in ms (Intel Xeon with AVX-512, one thread, float32, padding by half a kernel),
    next to those of ``unfold`` and ``X @ X.T``:

    =================================== ======= ======== =======
    input, kernel                       unfold  patches  shifts
    =================================== ======= ======== =======
    [32, 64, 56, 56], 3 x 3             727     361      187 *
    [32, 128, 28, 28], 3 x 3            585     349      199 *
    [32, 256, 14, 14], 3 x 3            521     325      259 *
    [16, 512, 7, 7], 3 x 3              274     270 *    392
    [32, 8, 32, 32], 3 x 3              10.4    6.3      5.2 *
    [32, 128, 8, 8], 3 x 3              43      32       28 *
    [32, 128, 4, 4], 3 x 3              11.0    10.8 *   18.3
    [8, 32, 28, 28], 5 x 5              66      43       24 *
    [2, 64, 28, 28], 7 x 7              242     199      200 *
    [32, 64, 28, 28], 3 x 3, 4 groups   117     45       49 *
    [4, 96, 56, 56], 7 x 7, 96 groups   354     151 *    175
    =================================== ======= ======== =======

    The star marks what this function chooses.

    Args:
        shape: The input's, ``[N, C, *I]``.
        window: Which patches.
    """
    samples, channels = shape[0], shape[1] // window.groups
    reaches = [window.reach(axis, 1) - 1 for axis in range(len(window.size))]
    enough = all(s >= reach for s, reach in zip(window.size, reaches, strict=True))
    kernel = prod(window.kernel_size)
    if not enough or max(window.stride) > 1 or kernel == 1 or channels < 8:
        return False
    width = channels * kernel
    seen = samples * prod(s + reach for s, reach in zip(window.size, reaches, strict=True))
    offsets = prod(2 * k - 1 for k in window.kernel_size) // 2 + 1
    copies = 1 + prod(2 * k - 1 for k in window.kernel_size[1:])
    by_shifts = seen * channels * (1.5 * offsets * channels + 64 * copies) + 500 * width**2
    share = 0.6 if width >= _SYMMETRIC else 1.0
    by_patches = samples * prod(window.size) * width * (share * width + 64) + 100 * width**2
    return by_shifts < by_patches


def covariance_by_shifts(x: Tensor, window: Window, positions: int) -> Tensor:
    """Return ``input_covariance`` by products of the input with its own shifts.

    Args:
        x: Input ``[N, C, *I]``, of stride 1.
        window: Which patches; at least ``dilation * (K - 1)`` along each axis.
        positions: About how many positions of the output at once.
    """
    groups, kernel = window.groups, window.kernel_size
    channels, places = x.shape[1] // groups, prod(kernel)
    # places in the kernel first: blocks of channels are contiguous
    total = x.new_zeros(groups, *kernel, channels, *kernel, channels)
    # with fewer, all would be borders
    least = 4 * window.dilation[0] * (kernel[0] - 1)
    for piece, part in _pieces(x, window, positions, least):
        add_by_shifts(total, piece, part)
    matrix = total.view(groups, places * channels, places * channels)
    _mirror(matrix, channels)
    blocks = matrix.view(groups, places, channels, places, channels)
    return blocks.permute(0, 2, 1, 4, 3).reshape(matrix.shape)


def covariance_by_patches(x: Tensor, window: Window, positions: int) -> Tensor:
    """Return ``input_covariance`` by products of patches.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches.
        positions: About how many positions of the output at once.
    """
    dims, groups = len(window.size), window.groups
    width = x.shape[1] // groups * prod(window.kernel_size)
    matrix = x.new_zeros(groups, width, width)
    step = -(-width // 4) if width >= _SYMMETRIC else width
    for piece, part in _pieces(x, window, positions, 1):
        # [G, d, N O]: positions last in memory, for long runs to copy
        view = view_patches(piece, part).movedim(0, 1 + dims)
        patches = view.reshape(groups, width, piece.shape[0] * prod(part.size))
        for start in range(0, width, step):
            rows = slice(start, start + step)
            matrix[:, rows, start:].baddbmm_(patches[:, rows], patches[:, start:].mT)
    _mirror(matrix, step)
    return matrix


def _mirror(matrix: Tensor, step: int) -> None:
    """Complete symmetric matrices ``[G, d, d]`` of which blocks of rows are known from there on."""
    for start in range(0, matrix.shape[1], step):
        rows, rest = slice(start, start + step), slice(start + step, None)
        block = matrix[:, rows, rows]
        # products of a matrix with its own transpose are symmetric up to rounding only
        block.copy_(block.triu() + block.triu(1).mT)
        matrix[:, rest, rows] = matrix[:, rows, rest].mT


def _pieces(
    x: Tensor, window: Window, positions: int, least: int
) -> Iterator[tuple[Tensor, Window]]:
    """Yield some samples at a time, or some positions of one on the first axis, padded.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches.
        positions: About how many positions of the output at once.
        least: How many positions on the first axis at least.
    """
    rows = max(positions // prod(window.size[1:]), least, 1)
    samples, parts = max(rows // window.size[0], 1), max(window.size[0] // rows, 1)
    for some in x.split(samples):
        padded = pad(some, window.pads)
        for axis, size in enumerate(window.size):
            padded = padded.narrow(axis + 2, 0, window.reach(axis, size))
        for part in range(parts):
            start, stop = (window.size[0] * i // parts for i in (part, part + 1))
            piece = padded.narrow(2, start * window.stride[0], window.reach(0, stop - start))
            yield piece, window._replace(size=(stop - start, *window.size[1:]))
