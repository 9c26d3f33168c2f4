"""Second moments of rows, and of the patches that a convolution sees, without forming all patches.

Products of matrices with their own transpose are symmetric: little more than one half is computed.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from math import prod

from einops import rearrange
from torch import Tensor

from curvlinops.layers.patches import Window, pad, view_patches
from curvlinops.support.norms import wide

#: From this size and this number of rows on, four products with a quarter of the result's rows
#: each take a third less time than one product.
_MIN_SIZE, _MIN_ROWS = 256, 512
#: Up to this size, products add one row after the other. They take no more time in float64 if they
#: have at most so many entries, nor in blocks of so many rows if they have more.
_NARROW, _FEW_ENTRIES, _BLOCK = 32, 2**14, 64
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

    Products of narrow matrices add one row after the other, so that rounding errors grow with the
    number of rows. They are computed in float64 if rows are few, else block by block.
    """
    num_rows, size = rows.shape[-2:]
    if size <= _NARROW and rows.numel() <= _FEW_ENTRIES:
        exact = rows.double()
        return (exact.mT @ exact).to(rows)
    if _NARROW < size and num_rows < _MIN_ROWS:
        return rows.mT @ rows
    if _NARROW < size < _MIN_SIZE:
        return reduce(Tensor.add_, (x.mT @ x for x in rows.split(_ROWS // 8, dim=-2)))
    total = rows.new_zeros(*rows.shape[:-2], size, size)
    groups = total.view(-1, size, size)
    for piece in rows.split(_ROWS, dim=-2):
        add_second_moment(groups, piece.mT.expand(len(groups), -1, -1))
    mirror(groups)
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add ``left right^T`` of ``[G, d, P]`` to ``[G, d, d]``; narrow ones block by block."""
    length = left.shape[2] // _BLOCK * _BLOCK if left.shape[1] <= _NARROW else 0
    if length:
        some, others = (x[..., :length].unflatten(2, (-1, _BLOCK)) for x in (left, right))
        total += (some.transpose(1, 2) @ others.permute(0, 2, 3, 1)).sum(1)
    if length < left.shape[2]:
        total.baddbmm_(left[..., length:], right[..., length:].mT)


def add_second_moment(total: Tensor, rows: Tensor) -> None:
    """Add ``rows rows^T`` of ``[G, d, P]``; ``mirror`` completes sums of large ones."""
    for some, _ in _quarters(total):
        _add_product(total[:, some, some.start :], rows[:, some], rows[:, some.start :])


def mirror(matrix: Tensor) -> None:
    """Complete symmetric matrices ``[G, d, d]`` whose upper half is known."""
    for some, behind in _quarters(matrix):
        block = matrix[:, some, some]
        # products of a matrix with its own transpose are symmetric up to rounding only
        block.copy_(block.triu() + block.triu(1).mT)
        matrix[:, behind, some] = matrix[:, some, behind].mT


def _quarters(matrix: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield slices of the rows of ``[G, d, d]`` to compute at once, and of the rows behind them."""
    size = matrix.shape[1]
    step = -(-size // 4) if size >= _MIN_SIZE else max(size, 1)
    for start in range(0, size, step):
        yield slice(start, start + step), slice(start + step, None)


def input_covariance(x: Tensor, window: Window) -> Tensor:
    """Return the second moments of patches, ``sum_{n,o} a_{no} a_{no}^T``, for each group.

    The input is ``[N, C, *I]``, the result ``[G, d, d]`` with ``d = C/G * prod(K)``, in float32 for
    half precision. By products of patches, or of the input with its own shifts, whichever takes
    less time.
    """
    cheaper = shifts_are_cheaper(x.shape, window)
    return (covariance_by_shifts if cheaper else covariance_by_patches)(wide(x), window)


def shifts_are_cheaper(shape: Sequence[int], window: Window) -> bool:
    """Return whether shifts take less time: they have most positions in common, of many patches."""
    kernel, farthest = window.kernel_size[0], window.reach(0, 1) - 1
    numbers = prod(shape[:2]) * prod(window.size) * prod(window.kernel_size)
    overlap = kernel > 1 and window.stride[0] == 1 and window.size[0] >= 4 * farthest
    return overlap and numbers >= _FEW_NUMBERS


def covariance_by_shifts(x: Tensor, window: Window, positions: int | None = None) -> Tensor:
    """Return ``input_covariance`` by products of the input with its shifts along the first axis.

    The kernel's other axes are unfolded, next to the channels: rows a with ``C/G * prod(K[1:])``
    entries. The block of the positions k and k' on the first axis is
    ``sum_p a[p] a[p + delta]^T`` over ``k <= p < k + O`` with ``delta = k' - k`` (times the
    dilation). It depends on k only by where the range begins. For K = 3 and delta = 0::

        p      0   1   2    ...    O-1  O   O+1
        k=0    f0  f1  ===============
        k=1        f1  ===============  b0
        k=2            ===============  b0  b1
               front        core        behind

    The product over the core is computed once for each delta (3 instead of 6 for K = 3), those
    over the few positions in front of it and behind it one by one: ``f0``, ``f1``, ``b0``, ``b1``.
    Nothing is subtracted, and nothing cancels. Along the first axis, the window has stride 1 and at
    least ``dilation * (K - 1)`` positions.
    """
    kernel, *others = window.kernel_size
    channels, groups, step = x.shape[1] // window.groups, window.groups, window.dilation[0]
    size = channels * prod(others)
    if positions is None:
        positions = max(_SHIFTED // (size * groups), _POSITIONS)
    # for each delta: products over the core, the positions in front of it, and those behind
    sums = [x.new_zeros(2 * n - 1, groups, size, size) for n in range(kernel, 0, -1)]
    # with fewer positions, all would be borders
    for piece, patches in _pieces(x, window, positions, 4 * step * (kernel - 1)):
        rows, length = _rows(piece, patches), patches.size[0]
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
                    _add_product(total, left, right)
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
            block = rearrange(block, "g (c i) (d j) -> g c i d j", c=channels, d=channels)
            out[:, :, k, :, :, k + delta] = block
            out[:, :, k + delta, :, :, k] = rearrange(block, "g c i d j -> g d j c i")
    return rearrange(out, "g c k i d l j -> g (c k i) (d l j)")


def covariance_by_patches(x: Tensor, window: Window, positions: int | None = None) -> Tensor:
    """Return ``input_covariance`` by products of patches."""
    if positions is None:
        positions = max(_UNFOLDED // (x.shape[1] * prod(window.kernel_size)), _POSITIONS)
    (kernel, output), groups = window.axes, window.groups
    width = x.shape[1] // groups * prod(window.kernel_size)
    matrix = x.new_zeros(groups, width, width)
    for piece, patches in _pieces(x, window, positions, 1):
        # positions last in memory: long runs to copy
        pattern = f"n (g c) {kernel} {output} -> g (c {kernel}) (n {output})"
        add_second_moment(matrix, rearrange(view_patches(piece, patches), pattern, g=groups))
    mirror(matrix)
    return matrix


def _pieces(
    x: Tensor, window: Window, positions: int, least: int
) -> Iterator[tuple[Tensor, Window]]:
    """Yield some samples at a time, or some positions of one on the first axis, padded."""
    rows = max(positions // prod(window.size[1:]), least, 1)
    samples, pieces = max(rows // window.size[0], 1), max(window.size[0] // rows, 1)
    for some in x.split(samples):
        padded = pad(some, window.pads)
        for axis, size in enumerate(window.size):
            padded = padded.narrow(axis + 2, 0, window.reach(axis, size))
        for i in range(pieces):
            start, stop = window.size[0] * i // pieces, window.size[0] * (i + 1) // pieces
            piece = padded.narrow(2, start * window.stride[0], window.reach(0, stop - start))
            yield piece, window._replace(size=(stop - start, *window.size[1:]))


def _rows(x: Tensor, window: Window) -> Tensor:
    """Unfold all axes but the first: ``[N, C, *I]`` to ``[G, C/G * prod(K[1:]), I, positions]``."""
    first = window._replace(
        kernel_size=(1, *window.kernel_size[1:]), size=(x.shape[2], *window.size[1:])
    )
    kernel, output = first.axes
    position, _, others = output.partition(" ")
    pattern = f"n (g c) {kernel} {output} -> g (c {kernel}) {position} (n {others})"
    return rearrange(view_patches(x, first), pattern, g=window.groups).contiguous()
