"""Tables whose rows, or entries, are looked up."""

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape, PositionGradients, rotated
from curvlinops.layers.gradients import BYTES, Entries, LowRank, PerSampleGradient, dense
from curvlinops.layers.rules import Matrices, Use, reads
from curvlinops.support.autograd_graph import shape_of_input
from curvlinops.support.norms import wide
from curvlinops.support.torch_internals import input_metadata, shape_of_output, signed


@reads("EmbeddingBackward0")
def embedding(node: Any, position: int) -> Use | None:
    """Rows of a table. The gradient of the padding row is zero."""
    if node._saved_scale_grad_by_freq:
        return None
    *rows, width = shape_of_output(node)
    return Use(
        tuple(rows),
        tuple(range(len(rows))),
        to_rows=wide,
        gradient=_Rows(num_rows := shape_of_input(node, 0)[0], signed(node._saved_padding_idx)),
        other="_saved_indices",
        matrices=Matrices(1, width, num_rows, are_lookups=True),
        is_settled=True,
    )


class _Rows(NamedTuple):
    """Returns gradients of a table whose rows are looked up; ``padding`` is -1 for none."""

    num_rows: int
    padding: int

    def __call__(self, indices: Tensor, g: Tensor, entries: Entries) -> PerSampleGradient:
        return EmbeddingGradient(indices, g, entries, self.padding)


#: What other nodes read of a tensor, at indices that they have saved.
_READ: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "IndexBackward0": lambda node, x: x[
        tuple(slice(None) if i is None else i for i in node._saved_indices)
    ],
    "IndexSelectBackward0": lambda node, x: x.index_select(
        signed(node._saved_dim), node._saved_index
    ),
    "GatherBackward0": lambda node, x: x.gather(signed(node._saved_dim), node._saved_index),
    "TakeBackward0": lambda node, x: x.take(node._saved_index),
    "MaskedSelectBackward0": lambda node, x: x.masked_select(node._saved_mask),
}


@reads(*_READ)
def lookup(node: Any, position: int) -> Use | None:
    """Rows, or entries, of a table, such as ``table[indices]``."""
    if position != 0:
        return None
    shape, device = shape_of_input(node, 0), input_metadata(node).device
    # views of two short vectors, in place of a number for each entry of a large table
    num_rows, width = shape[0] if shape else 1, prod(shape[1:])
    numbers = torch.arange(num_rows, device=device).reshape(-1, *(1,) * (len(shape) - 1))
    columns = torch.arange(width, device=device).reshape(shape[1:])
    rows, columns = (
        _READ[node.name()](node, axis.expand(num_rows, *shape[1:]).reshape(shape))
        for axis in (numbers, columns)
    )
    row_shape, indices = tuple(rows.shape), rows * width + columns
    whole = width > 1 and _are_whole(rows, columns, shape)
    if whole:
        row_shape, indices = row_shape[: 1 - len(shape)], rows.reshape(-1, width)[:, 0]
    row_axes = tuple(range(len(row_shape))) or (None,)
    row_shape = row_shape or (1,)
    indices = indices.reshape(row_shape)
    size = width if whole else 1
    return Use(
        row_shape,
        row_axes,
        to_rows=lambda g: g.reshape(len(g), *row_shape, size),
        gradient=EmbeddingGradient,
        other=indices,
        matrices=Matrices(1, size, num_rows * width // max(size, 1), are_lookups=True),
    )


def _are_whole(rows: Tensor, columns: Tensor, shape: Sequence[int]) -> bool:
    """Return whether a table's rows were looked up as a whole."""
    if columns.shape[1 - len(shape) :] != shape[1:]:
        return False
    width = prod(shape[1:])
    rows, columns = rows.reshape(-1, width), columns.reshape(-1, width)
    in_order = columns == torch.arange(width, device=columns.device)
    return bool((in_order & (rows == rows[:, :1])).all())


class EmbeddingGradient(PositionGradients):
    """Sums of output gradients ``[V, N, S, I]`` at the rows of a table, ``indices`` ``[N, S]``.

    As sums of outer products, the inputs are rows of an identity matrix. The row ``padding`` is a
    constant; -1 for none.
    """

    def __init__(self, indices: Tensor, g: Tensor, entries: Entries, padding: int = -1):
        self.indices, self.g, self.padding = indices, g, padding
        self.num_vectors, self.num_samples = g.shape[:2]
        self.entries = entries
        self.num_rows = entries.view.size // max(g.shape[-1], 1)
        # a table may be read by rows or by entries
        self.layout = entries, self.num_rows, padding, g.dtype

    @property
    def kronecker_shape(self) -> KroneckerShape:
        """The shape with an input for each row, and an output for each column."""
        width = self.g.shape[-1]
        view = self.entries.view.undo_permutation((width, self.num_rows), (1, 0))
        return KroneckerShape(1, width, self.num_rows, view, one_hot_inputs=True)

    def inputs(self) -> Tensor:
        """Return rows of an identity matrix, ``[N, S, 1, rows]``, zeros for the padding."""
        return self._one_hot(slice(None))

    def _one_hot(self, samples: slice) -> Tensor:
        is_lookup = self._lookups(None)[samples].to(self.g).unsqueeze(-1)
        rows = torch.nn.functional.one_hot(self.indices[samples], self.num_rows) * is_lookup
        return rearrange(rows, "n s i -> n s 1 i")

    def positions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of an identity matrix, and output gradients, of some samples."""
        g = self.output_gradients()
        for some in self.slices(self.indices.shape[1] * self.num_rows):
            yield self._one_hot(some), g[:, some]

    def positions_in(
        self, outputs: Tensor | None, inputs: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield rows of the columns in place of products with rows of an identity matrix."""
        if inputs is None:
            yield from super().positions_in(outputs, inputs)
            return
        x = inputs[0][self.indices] * self._lookups(None).to(inputs).unsqueeze(-1)
        yield rearrange(x, "n s q -> n s 1 q"), rotated(self.output_gradients(), outputs)

    def output_gradients(self) -> Tensor:
        """Return output gradients, ``[V, N, S, 1, I]``."""
        return rearrange(self.g, "v n s i -> v n s 1 i")

    def _lookups(self, mask: Tensor | None) -> Tensor:
        """Return which lookups count, ``[N, S]``: those in the mask that are no constant."""
        is_lookup = self.indices != self.padding
        return is_lookup if mask is None else is_lookup & mask

    def input_moment(self, diagonal: bool, mask: Tensor | None = None) -> tuple[Tensor, int]:
        """Return how often each row was looked up, on a diagonal, and the number of lookups."""
        indices = self.indices[self._lookups(mask)]
        counts = torch.bincount(indices, minlength=self.num_rows).to(self.g).unsqueeze(0)
        return counts if diagonal else counts.diag_embed(), len(indices)

    def input_sums(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return how often each sample looked up each row, and its number of lookups."""
        is_lookup = self._lookups(mask).to(self.g)
        counts = self.g.new_zeros(self.num_samples, self.num_rows)
        counts.scatter_add_(1, self.indices, is_lookup)
        return rearrange(counts, "n i -> n 1 i"), counts.sum(1)

    def plus(self, others: Sequence[PerSampleGradient]) -> "EmbeddingGradient | None":
        """Return the sum with others of the same layout: lookups side by side."""
        if not self.is_alike(*others):
            return None
        indices = torch.cat([x.indices for x in (self, *others)], dim=1)
        g = torch.cat([x.g for x in (self, *others)], dim=2)
        return EmbeddingGradient(indices, g, self.entries, self.padding)

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

    def products_of_positions(self, columns: Tensor | LowRank) -> Iterator[Tensor]:
        """Yield the contribution of each lookup of some samples, ``[V, n, S, K]``."""
        has_rows = self.entries.are_all and self.num_rows == self.shape[0]
        if isinstance(columns, LowRank) and has_rows:  # without the table
            left, right = columns.left, columns.right  # [K, rows, r], [K, r, I]
            for some in self.slices(2 * self.g[0, 0, :, 0].numel() * len(left) * left.shape[2]):
                g = torch.einsum("vnsi,kri->vnskr", self.g[:, some], right)
                yield torch.einsum("vnskr,knsr->vnsk", g, left[:, self.indices[some]])
            return
        tables = self.entries.read(dense(columns)).reshape(-1, self.num_rows, self.g.shape[-1])
        for some in self.slices(self.g[0, 0].numel() * len(tables)):
            looked_up = tables[:, self.indices[some]]
            yield torch.einsum("vnsi,knsi->vnsk", self.g[:, some], looked_up)

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
        return self.is_alike(other)

    def inner_products(self, other: "EmbeddingGradient") -> Tensor:
        """Return all inner products; only rows that both looked up count."""
        (left, n, rows), (right, m, columns) = self._sums(), other._sums()
        N, M = self.num_samples, other.num_samples
        out = left.new_zeros(self.num_vectors, other.num_vectors, N * M)
        for start in range(0, len(n), step := max(BYTES // (4 * max(len(m), 1)), 1)):
            a, b = (rows[start : start + step, None] == columns).nonzero(as_tuple=True)
            a = a + start
            products = torch.einsum("vpi,wpi->vwp", left[:, a], right[:, b])
            out.index_add_(2, n[a] * M + m[b], products)
        return rearrange(out, "v w (n m) -> v n w m", n=N, m=M)

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
