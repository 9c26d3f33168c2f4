"""Second moments of the patches that a convolution sees, without forming all patches."""

from collections.abc import Iterator, Sequence
from math import prod

from torch import Tensor

from curvlinops.layers.patches import Window, pad, view_patches
from curvlinops.layers.shifts import ShiftedProducts
from curvlinops.layers.symmetric import add_second_moment, mirror, symmetric_step
from curvlinops.support.norms import wide

#: How many numbers are copied at once: patches, and shifted inputs.
_UNFOLDED, _SHIFTED = 2**20, 2**22
#: Of how many positions at least, for their products to take longer than adding them up.
_POSITIONS = 1024


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
    cheaper = shifts_are_cheaper(x.shape, window)
    return (covariance_by_shifts if cheaper else covariance_by_patches)(wide(x), window)


def shifts_are_cheaper(shape: Sequence[int], window: Window) -> bool:
    """Return whether ``covariance_by_shifts`` takes less time than ``covariance_by_patches``.

    Counted are multiplications, with what takes the time of some: copying a number (64), moving
    an entry of the result (100, and 300 with the products around the core), and all calls.

    It is fitted to times on a CPU (``docs_src/benchmarks/covariance.py``). Memory does not count:
    both take the input piece by piece.

    Args:
        shape: The input's, ``[N, C, *I]``.
        window: Which patches.
    """
    kernel, reach = window.kernel_size[0], window.reach(0, 1) - 1
    if kernel == 1 or window.stride[0] > 1 or window.size[0] < reach:
        return False
    rows = shape[1] // window.groups * prod(window.kernel_size[1:])
    width, positions = rows * kernel, shape[0] * prod(window.size)
    seen = positions // window.size[0] * (window.size[0] + reach)
    by_shifts = seen * rows * (kernel * rows + 64) + 300 * width**2
    share = 0.6 if symmetric_step(width) < width else 1.0
    by_patches = positions * width * (share * width + 64) + 100 * width**2
    return window.groups * by_shifts + 10**6 * kernel**2 < window.groups * by_patches


def covariance_by_shifts(x: Tensor, window: Window, positions: int | None = None) -> Tensor:
    """Return ``input_covariance`` by products of the input with its shifts along the first axis.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches; along the first axis of stride 1, at least ``dilation * (K - 1)``.
        positions: About how many positions of the output at once. Default: a fast number.
    """
    if positions is None:
        unfolded = x.shape[1] * prod(window.kernel_size[1:])
        positions = max(_SHIFTED // unfolded, _POSITIONS)
    sums = ShiftedProducts(x, window)
    # with fewer, all would be borders
    least = 4 * window.dilation[0] * (window.kernel_size[0] - 1)
    for piece, part in _pieces(x, window, positions, least):
        sums.add(piece, part)
    return sums.matrix()


def covariance_by_patches(x: Tensor, window: Window, positions: int | None = None) -> Tensor:
    """Return ``input_covariance`` by products of patches.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches.
        positions: About how many positions of the output at once. Default: a fast number.
    """
    if positions is None:
        positions = max(_UNFOLDED // (x.shape[1] * prod(window.kernel_size)), _POSITIONS)
    dims, groups = len(window.size), window.groups
    width = x.shape[1] // groups * prod(window.kernel_size)
    matrix = x.new_zeros(groups, width, width)
    for piece, part in _pieces(x, window, positions, 1):
        # [G, d, N O]: positions last in memory, for long runs to copy
        view = view_patches(piece, part).movedim(0, 1 + dims)
        patches = view.reshape(groups, width, piece.shape[0] * prod(part.size))
        add_second_moment(matrix, patches)
    mirror(matrix, symmetric_step(width))
    return matrix


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
