"""Second moments of rows, and of the patches that a convolution sees, without forming all patches.

Products of matrices with their own transpose are symmetric: little more than one half is computed.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import prod

from torch import Tensor

from curvlinops.layers.patches import Window, pad, view_patches
from curvlinops.support.norms import wide

#: From this size and this number of rows on, four products with a quarter of the result's rows
#: each take a third less time than one product.
_MIN_SIZE, _MIN_ROWS = 256, 512
#: The largest number of rows whose sum is accurate in float32.
_ROWS = 2**15
#: The largest number of entries that are copied at once: patches, and shifted inputs.
_UNFOLDED, _SHIFTED = 2**20, 2**22
#: The smallest number of positions whose products take longer than their sum.
_POSITIONS = 1024
#: Products of shifts are as many calls for few numbers in patches as for many.
_FEW_NUMBERS = 2**19


def second_moment(rows: Tensor) -> Tensor:
    """Return ``rows^T rows`` of ``[P, d]``, or of each group, ``[G, P, d]``.

    Many rows are added in parts: products of narrow matrices add one number after the other.
    """
    size, parts = rows.shape[-1], rows.split(_ROWS, dim=-2)
    if rows.shape[-2] < _MIN_ROWS or size < _MIN_SIZE:
        return reduce(Tensor.add_, (part.mT @ part for part in parts))
    total = rows.new_zeros(*rows.shape[:-2], size, size)
    groups = total.view(-1, size, size)
    for part in parts:
        add_second_moment(groups, part.mT.expand(len(groups), -1, -1))
    mirror(groups)
    return total


def add_second_moment(total: Tensor, rows: Tensor) -> None:
    """Add ``rows rows^T`` to ``[G, d, d]``; of large ones little more than the upper half.

    Args:
        total: Is added to; ``mirror`` completes it.
        rows: ``[G, d, P]``.
    """
    for part, _ in _quarters(total):
        total[:, part, part.start :].baddbmm_(rows[:, part], rows[:, part.start :].mT)


def mirror(matrix: Tensor) -> None:
    """Complete symmetric matrices ``[G, d, d]`` whose upper half is known."""
    for part, rest in _quarters(matrix):
        block = matrix[:, part, part]
        # products of a matrix with its own transpose are symmetric up to rounding only
        block.copy_(block.triu() + block.triu(1).mT)
        matrix[:, rest, part] = matrix[:, part, rest].mT


def _quarters(matrix: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the rows of ``[G, d, d]`` to compute at once, and of the rows behind them."""
    size = matrix.shape[1]
    step = -(-size // 4) if size >= _MIN_SIZE else max(size, 1)
    for start in range(0, size, step):
        yield slice(start, start + step), slice(start + step, None)


def input_covariance(x: Tensor, window: Window) -> Tensor:
    """Return the second moments of patches, ``sum_{n,o} a_{no} a_{no}^T``, for each group.

    By products of patches, or of the input with its own shifts, whichever takes less time.

    Args:
        x: Input ``[N, C, *I]``.
        window: The patches.

    Returns:
        Sums over samples and positions ``[G, d, d]`` with ``d = C/G * prod(K)``, symmetric, in
        float32 for inputs in half precision.
    """
    cheaper = shifts_are_cheaper(x.shape, window)
    return (covariance_by_shifts if cheaper else covariance_by_patches)(wide(x), window)


def shifts_are_cheaper(shape: Sequence[int], window: Window) -> bool:
    """Return whether ``covariance_by_shifts`` takes less time than ``covariance_by_patches``.

    It does on a CPU where shifts have most positions in common, and patches are
    many. Both take the input piece by piece: memory does not count.

    Args:
        shape: The input's, ``[N, C, *I]``.
        window: The patches.
    """
    kernel, farthest = window.kernel_size[0], window.reach(0, 1) - 1
    numbers = prod(shape[:2]) * prod(window.size) * prod(window.kernel_size)
    overlap = kernel > 1 and window.stride[0] == 1 and window.size[0] >= 4 * farthest
    return overlap and numbers >= _FEW_NUMBERS


def covariance_by_shifts(x: Tensor, window: Window, positions: int | None = None) -> Tensor:
    """Return ``input_covariance`` by products of the input with its shifts along the first axis.

    The kernel's other axes are unfolded, next to the channels: rows a with ``C/G * prod(K[1:])``
    entries. The block of the positions k and k' on the first axis is
    ``sum_p a[p] a[p + delta]^T`` over ``k <= p < k + O`` with ``delta = k' - k`` (times the
    dilation), which depends on k only by where the range begins. The ranges for the same delta
    have a core in common. The product over it is computed once for each delta (3 instead of 6
    for K = 3); those over the few positions in front of it and behind it are computed one by one.
    Nothing is subtracted, and nothing cancels.

    Args:
        x: Input ``[N, C, *I]``.
        window: The patches; along the first axis of stride 1, at least ``dilation * (K - 1)``.
        positions: About how many positions of the output at once. Default: a fast number.
    """
    kernel, *others = window.kernel_size
    channels, groups, step = x.shape[1] // window.groups, window.groups, window.dilation[0]
    size = channels * prod(others)
    if positions is None:
        positions = max(_SHIFTED // (size * groups), _POSITIONS)
    # for each delta: products over the core, the positions in front of it, and those behind
    sums = [x.new_zeros(2 * n - 1, groups, size, size) for n in range(kernel, 0, -1)]
    # with fewer positions, all would be borders
    for piece, part in _pieces(x, window, positions, 4 * step * (kernel - 1)):
        rows, length = _rows(piece, part), part.size[0]
        for delta, products in enumerate(sums):
            around = kernel - 1 - delta
            ranges = [(around * step, length - around * step)]
            ranges += [(i * step, step) for i in range(around)]
            ranges += [(length + i * step, step) for i in range(around)]
            for total, (start, count) in zip(products, ranges, strict=True):
                left = rows.narrow(2, start, count).flatten(2)
                if delta == 0:
                    add_second_moment(total, left)
                else:
                    right = rows.narrow(2, start + delta * step, count).flatten(2)
                    total.baddbmm_(left, right.mT)
    shape = channels, kernel, prod(others)
    out = x.new_empty(groups, *shape, *shape)
    for delta, products in enumerate(sums):
        around = kernel - 1 - delta
        core, front, behind = products[0], products[1 : 1 + around], products[1 + around :]
        for i in range(1, around):
            front[-1 - i] += front[-i]
            behind[i] += behind[i - 1]
        for k in range(kernel - delta):
            block = core + front[k] if k < around else core.clone()
            if k > 0:
                block += behind[k - 1]
            if delta == 0:
                mirror(block)
            block = block.view(groups, channels, prod(others), channels, prod(others))
            out[:, :, k, :, :, k + delta] = block
            out[:, :, k + delta, :, :, k] = block.permute(0, 3, 4, 1, 2)
    return out.view(groups, kernel * size, kernel * size)


def covariance_by_patches(x: Tensor, window: Window, positions: int | None = None) -> Tensor:
    """Return ``input_covariance`` by products of patches.

    Args:
        x: Input ``[N, C, *I]``.
        window: The patches.
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
        patches = view.reshape(groups, width, len(piece) * prod(part.size))
        add_second_moment(matrix, patches)
    mirror(matrix)
    return matrix


def _pieces(
    x: Tensor, window: Window, positions: int, least: int
) -> Iterator[tuple[Tensor, Window]]:
    """Yield some samples at a time, or some positions of one on the first axis, padded.

    Args:
        x: Input ``[N, C, *I]``.
        window: The patches.
        positions: About how many positions of the output at once.
        least: The smallest number of positions on the first axis.
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


def _rows(x: Tensor, window: Window) -> Tensor:
    """Unfold all axes but the first: ``[N, C, *I]`` to ``[G, C/G * prod(K[1:]), I, positions]``."""
    whole = window._replace(
        kernel_size=(1, *window.kernel_size[1:]), size=(x.shape[2], *window.size[1:])
    )
    view = view_patches(x, whole).squeeze(2)  # [N, C, *K[1:], I, *O[1:]]
    dims = len(window.size)
    rows = view.movedim(0, 1 + dims).unflatten(0, (window.groups, -1))
    width = x.shape[1] // window.groups * prod(window.kernel_size[1:])
    return rows.reshape(window.groups, width, x.shape[2], -1).contiguous()
