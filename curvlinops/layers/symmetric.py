"""Products of matrices with their own transpose: little more than one half is computed."""

from functools import reduce

import torch
from torch import Tensor

#: From this size on, four products with a quarter of the rows each take a third less time than
#: the whole; if the result is not added to something, only from this number of columns on.
_HALVED, _COLUMNS = 256, 512
#: Of so many rows, a sum is still accurate in float32.
_ROWS = 2**15


def second_moment(rows: Tensor) -> Tensor:
    """Return ``rows^T rows`` of ``[P, d]``, or of each group, ``[G, P, d]``.

    Many rows are added in parts: products of narrow matrices add one number after the other.
    """
    of_part = _halved_moment if rows.ndim == 2 else lambda part: part.mT @ part
    return reduce(Tensor.add_, map(of_part, rows.split(_ROWS, dim=-2)))


def _halved_moment(rows: Tensor) -> Tensor:
    size = rows.shape[1]
    step = symmetric_step(size)
    if step == size or len(rows) < _COLUMNS:
        return rows.T @ rows
    out = rows.new_empty(size, size)
    for start in range(0, size, step):
        stop = start + step
        torch.mm(rows[:, start:stop].T, rows[:, start:], out=out[start:stop, start:])
        out[stop:, start:stop] = out[start:stop, stop:].T
    return out


def add_second_moment(total: Tensor, rows: Tensor) -> None:
    """Add ``rows rows^T`` to ``[G, d, d]``; of large ones little more than the upper half.

    Args:
        total: Is added to; ``mirror`` completes it.
        rows: ``[G, d, P]``.
    """
    size = total.shape[1]
    step = symmetric_step(size)
    for start in range(0, size, step):
        part = slice(start, start + step)
        total[:, part, start:].baddbmm_(rows[:, part], rows[:, start:].mT)


def symmetric_step(size: int) -> int:
    """Return how many rows of a symmetric product of some size are computed at once."""
    return -(-size // 4) if size >= _HALVED else size


def mirror(matrix: Tensor, step: int) -> None:
    """Complete symmetric matrices ``[G, d, d]`` of which blocks of rows are known from there on."""
    for start in range(0, matrix.shape[1], step):
        rows, rest = slice(start, start + step), slice(start + step, None)
        block = matrix[:, rows, rows]
        # products of a matrix with its own transpose are symmetric up to rounding only
        block.copy_(block.triu() + block.triu(1).mT)
        matrix[:, rest, rows] = matrix[:, rows, rest].mT
