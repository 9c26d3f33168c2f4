"""Tables whose rows, or entries, are looked up."""

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.gradients import BYTES, Entries, PerSampleGradient
from curvlinops.layers.rules import Sort, Use, handles
from curvlinops.support.norms import wide


@handles(torch.embedding)
def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> dict[str, Use]:
    """Rows of ``weight``. An override makes the padding row constant."""

    def gradient(g: Tensor, sort: Sort, entries: Entries) -> PerSampleGradient:
        return EmbeddingGradient(sort(indices), wide(g), entries, padding_idx)

    return {"weight": Use(tuple(indices.shape), lambda g: g, gradient)}


def _lookup(function: Callable) -> Callable[..., dict[int, Use]]:
    def uses(input: Tensor, *args: Any, **options: Any) -> dict[int, Use]:
        # views of two short vectors, in place of a number for each entry of a large table
        num_rows, width = input.shape[0] if input.ndim else 1, prod(input.shape[1:])
        numbers = torch.arange(num_rows, device=input.device).reshape(-1, *(1,) * (input.ndim - 1))
        columns = torch.arange(width, device=input.device).reshape(input.shape[1:])
        rows, columns = (
            function(axis.expand(num_rows, *input.shape[1:]).reshape_as(input), *args, **options)
            for axis in (numbers, columns)
        )
        row_shape, indices = tuple(rows.shape), rows * width + columns
        whole = width > 1 and _are_whole(rows, columns, input.shape)
        if whole:
            row_shape, indices = row_shape[: 1 - input.ndim], rows.reshape(-1, width)[:, 0]
        row_shape = row_shape or (1,)
        indices = indices.reshape(row_shape)

        def to_rows(g: Tensor) -> Tensor:
            return g.reshape(len(g), *row_shape, width if whole else 1)

        def gradient(g: Tensor, sort: Sort, entries: Entries) -> PerSampleGradient:
            return EmbeddingGradient(sort(indices), wide(g), entries)

        return {0: Use(row_shape, to_rows, gradient)}

    return uses


def _are_whole(rows: Tensor, columns: Tensor, shape: torch.Size) -> bool:
    """Return whether a table's rows were looked up as a whole.

    Args:
        rows: The row of each entry that was looked up.
        columns: The column of each entry.
        shape: The table's shape.
    """
    if columns.shape[1 - len(shape) :] != shape[1:]:
        return False
    width = prod(shape[1:])
    rows, columns = rows.reshape(-1, width), columns.reshape(-1, width)
    in_order = columns == torch.arange(width, device=columns.device)
    return bool((in_order & (rows == rows[:, :1])).all())


#: Ways to read entries of a tensor.
_CALLS = (
    (Tensor.__getitem__,),
    (torch.index_select, Tensor.index_select),
    (torch.gather, Tensor.gather),
    (torch.take, Tensor.take),
    (torch.take_along_dim, Tensor.take_along_dim),
    (torch.masked_select, Tensor.masked_select),
)
for _same in _CALLS:
    handles(*_same)(_lookup(_same[0]))


class EmbeddingGradient(PerSampleGradient):
    """Sums of output gradients over the positions that looked up a row of a table.

    Args:
        indices: The rows that were looked up, ``[N, S]``.
        g: Output gradients ``[V, N, S, I]``.
        entries: The entries of the table, row by row.
        padding: The row that is a constant; -1 for none.
    """

    def __init__(self, indices: Tensor, g: Tensor, entries: Entries, padding: int = -1):
        self.indices, self.g, self.padding = indices, g, padding
        self.num_positions = indices.shape[1]
        self.num_vectors, self.num_samples = g.shape[:2]
        self.entries = entries
        self.num_rows = entries.view.size // max(g.shape[-1], 1)

    def values(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, mostly zero."""
        g, indices = self.g[:, samples], self.indices[samples]
        rows = g.new_zeros(*g.shape[:2], self.num_rows, g.shape[-1])
        rows.scatter_add_(2, indices[None, :, :, None].expand_as(g), g)
        return rows

    def to(self, dtype: torch.dtype) -> "EmbeddingGradient":
        """Return the same gradients in another dtype."""
        return EmbeddingGradient(self.indices, self.g.to(dtype), self.entries, self.padding)

    def sum_over_samples(self) -> Tensor:
        """Return the sum, in memory proportional to the table."""
        return self._table(self.g)

    def squared_norms(self) -> Tensor:
        """Return the squared norms; only rows that were looked up count."""
        sums, samples, _ = self._sums()
        norms = sums.new_zeros(self.num_vectors, self.num_samples)
        return norms.index_add_(1, samples, sums.square().sum(-1))

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares, in memory proportional to the table."""
        sums, _, rows = self._sums()
        squares = sums.square().sum(0)
        out = squares.new_zeros(self.num_rows, squares.shape[-1])
        return self.entries.spread(out.index_add_(0, rows, squares)[None, None])[0, 0]

    def prefers_inner_products(self, other: PerSampleGradient) -> bool:
        """Return whether the other one looks up the same rows."""
        # a table may be read by rows or by entries
        return (
            isinstance(other, EmbeddingGradient)
            and self.entries == other.entries
            and self.num_rows == other.num_rows
        )

    def inner_products(self, other: "EmbeddingGradient") -> Tensor:
        """Return all inner products; only rows that both looked up count."""
        (left, n, rows), (right, m, columns) = self._sums(), other._sums()
        out = left.new_zeros(
            self.num_vectors, self.num_samples, other.num_vectors, other.num_samples
        )
        for row in range(0, len(n), step := max(BYTES // (4 * max(len(m), 1)), 1)):
            chunk = slice(row, row + step)
            a, b = (rows[chunk, None] == columns).nonzero(as_tuple=True)
            a = a + row
            products = torch.einsum("vpi,wpi->vwp", left[:, a], right[:, b])
            flat = out.permute(0, 2, 1, 3).flatten(2)
            flat = flat.index_add(2, n[a] * other.num_samples + m[b], products)
            out = flat.unflatten(2, (self.num_samples, other.num_samples)).permute(0, 2, 1, 3)
        return out

    def _table(self, values: Tensor) -> Tensor:
        """Return sums of values ``[K, N, S, I]`` at their rows, ``[K, *shape]``."""
        out = values.new_zeros(len(values), self.num_rows, values.shape[-1])
        out.index_add_(1, self.indices.flatten(), values.flatten(1, 2))
        return self.entries.spread(out.unsqueeze(1))[:, 0]

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the non-zero rows of all samples ``[V, P, I]``, and of which sample and row."""
        sample = torch.arange(self.num_samples, device=self.indices.device)
        keys = sample[:, None] * self.num_rows + self.indices
        unique, where = keys.flatten().unique(return_inverse=True)
        sums = self.g.new_zeros(self.num_vectors, len(unique), self.g.shape[-1])
        sums.index_add_(1, where, self.g.flatten(1, 2))
        return sums, unique // self.num_rows, unique % self.num_rows
