"""Tables whose rows are looked up."""

import torch
from torch import Tensor

from curvlinops.core.functions import wide
from curvlinops.layers.forms import BYTES, Form
from curvlinops.layers.uses import Sort, Use, handles


@handles(torch.embedding)
def embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> dict[str, Use]:
    """Rows of ``weight``; uses of the padding row are made constant elsewhere."""

    def form(g: Tensor, sort: Sort) -> Form:
        return Lookup(sort(indices), wide(g), weight.shape[0], padding_idx)

    return {"weight": Use(tuple(indices.shape), lambda g: g, form)}


class Lookup(Form):
    """Sums of output gradients over the positions that looked up a row of a table.

    Args:
        indices: Which row, ``[N, S]``.
        g: Output gradients ``[V, N, S, I]``.
        num_rows: Number of rows of the table.
        padding: The row that is a constant; -1 for none.
    """

    def __init__(self, indices: Tensor, g: Tensor, num_rows: int, padding: int = -1):
        self.indices, self.g, self.padding = indices, g, padding
        self.num_positions = indices.shape[1]
        self.num_vectors, self.num_samples = g.shape[:2]
        self.shape = (num_rows, g.shape[-1])

    def rows(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, mostly zero."""
        g, indices = self.g[:, samples], self.indices[samples]
        rows = g.new_zeros(*g.shape[:2], *self.shape)
        return rows.scatter_add_(2, indices[None, :, :, None].expand_as(g), g)

    def select(self, samples: Tensor) -> "Lookup":
        """Return the gradients of some samples only."""
        return Lookup(self.indices[samples], self.g[:, samples], self.shape[0], self.padding)

    def squared_norms(self) -> Tensor:
        """Return the squared norms; only rows that were looked up count."""
        sums, samples, _ = self._sums()
        norms = sums.new_zeros(self.num_vectors, self.num_samples)
        return norms.index_add_(1, samples, sums.square().sum(-1))

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares, in memory proportional to the table."""
        sums, _, rows = self._sums()
        squares = sums.square().sum(0)
        return squares.new_zeros(self.shape).index_add_(0, rows, squares)

    def inner(self, other: Form) -> Tensor:
        """Return all inner products; only rows that both looked up count."""
        if not isinstance(other, Lookup):
            return super().inner(other)
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

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the non-zero rows of all samples ``[V, P, I]``, and of which sample and row."""
        sample = torch.arange(self.num_samples, device=self.indices.device)
        keys = sample[:, None] * self.shape[0] + self.indices
        unique, where = keys.flatten().unique(return_inverse=True)
        sums = self.g.new_zeros(self.num_vectors, len(unique), self.shape[1])
        sums.index_add_(1, where, self.g.flatten(1, 2))
        return sums, unique // self.shape[0], unique % self.shape[0]
