"""Gradients of matrix products and convolutions: sums of outer products."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape, PositionGradients
from curvlinops.layers.gradients import (
    Entries,
    LowRank,
    PerSampleGradient,
    chunks,
    dense,
    squared_sum,
    total,
)
from curvlinops.layers.inputs import Inputs, StoredInputs

#: How much longer it takes to copy a number than to multiply it in a matrix product.
_COPY = 16


class OuterProducts(PositionGradients):
    """Sums over positions ``sum_s g[v, n, s] x[n, s]^T``: matrices ``[G, O, I]`` of some entries.

    Of inputs ``[N, S, G, I]`` and output gradients ``[V, N, S, G, O]``.
    """

    def __init__(self, x: Tensor | Inputs, g: Tensor, entries: Entries):
        self.x = StoredInputs(x) if isinstance(x, Tensor) else x
        self.g, self.entries = g, entries
        self.num_vectors, self.num_samples = g.shape[:2]
        self.num_positions = x.shape[1]
        self.num_inputs = prod(x.shape[1:])  # of a sample, in numbers
        self.layout = entries, g.dtype, *x.shape[2:]

    @property
    def kronecker_shape(self) -> KroneckerShape:
        """G, O and I, and the entries of the parameter."""
        groups, inputs = self.x.shape[2:]
        return KroneckerShape(groups, self.g.shape[-1], inputs, self.entries.view)

    def inputs(self) -> Tensor:
        """Return x, ``[N, S, G, I]``."""
        return self.x[:]

    def output_gradients(self) -> Tensor:
        """Return g, ``[V, N, S, G, O]``."""
        return self.g

    def positions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield inputs and output gradients of some samples, whose patches fit the memory."""
        for some in self.x.slices():
            yield self.x[some], self.g[:, some]

    def input_moment(self, diagonal: bool, mask: Tensor | None = None) -> tuple[Tensor, int]:
        """Return the sum of the inputs' outer products, and the number of inputs."""
        if mask is not None:
            return super().input_moment(diagonal, mask)
        return self.x.moment(diagonal), self.num_samples * self.num_positions

    def input_sums(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of each sample's inputs, and their number."""
        if mask is not None:
            return super().input_sums(mask)
        count = torch.tensor(self.num_positions, device=self.g.device)
        return self.x.sums(), count.expand(self.num_samples)

    def values(self, samples: slice) -> Tensor:
        """Return the matrices of some samples, ``[V, n, G, O, I]``."""
        g = self.g[:, samples]
        if self.x.prefers_convolution(self.g):
            return self.x.filter_gradients(samples, g[0]).unsqueeze(0)
        return self._multiply(samples, g.new_empty(*g.shape[:2], *g.shape[3:], self.x.shape[3]))

    @property
    def _is_transposed(self) -> bool:
        """Whether the parameter is the transposed matrix, ``[I, O]``, and in this order."""
        sizes = self.x.shape[3], self.g.shape[-1]
        turned = self.entries.view.undo_permutation(sizes, (1, 0))
        return self.x.shape[2] == 1 and turned is not None and turned.is_all(prod(self.shape))

    def rows(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, also of transposed weights without a copy."""
        if not self._is_transposed or self.x.prefers_convolution(self.g):
            return super().rows(samples)
        num_vectors, num_samples = self.g[:, samples].shape[:2]
        sizes = num_vectors, num_samples, 1, self.x.shape[3], self.g.shape[-1]
        rows = self.g.new_empty(sizes)
        self._multiply(samples, rows.mT)
        return rows.view(num_vectors, num_samples, *self.shape)

    def write(self, samples: slice, out: Tensor) -> None:
        """Write the gradients of some samples, without a copy if possible."""
        groups, inputs = self.x.shape[2:]
        indirect = self.x.prefers_convolution(self.g) or not self.entries.are_all or groups > 1
        if indirect or out.dtype != self.g.dtype:
            super().write(samples, out)
        else:
            self._multiply(samples, out.view(*out.shape[:2], 1, self.g.shape[-1], inputs))

    def _multiply(self, samples: slice, out: Tensor) -> Tensor:
        """Write the matrices of some samples to ``[V, n, G, O, I]``, and return them."""
        g, x = self.g[:, samples], self.x[samples]
        if x.shape[1] == 1:
            return torch.mul(g[:, :, 0].unsqueeze(-1), x[:, 0].unsqueeze(-2), out=out)
        # in this inner loop, einops' patterns would take longer than the axes' moves
        x = x.transpose(1, 2).flatten(0, 1)
        for vector, matrices in zip(g, out, strict=True):  # without copying x for each vector
            torch.bmm(vector.permute(0, 2, 3, 1).flatten(0, 1), x, out=matrices.flatten(0, 1))
        return out

    def to(self, dtype: torch.dtype) -> "OuterProducts":
        """Return the same gradients, made of inputs and output gradients of another dtype."""
        x, g = self.x.to(dtype), self.g.to(dtype)
        is_same = x is self.x and g is self.g
        return self if is_same else OuterProducts(x, g, self.entries)

    def sum_over_samples(self) -> Tensor:
        """Return the sum over samples, as one convolution or matrix product."""
        if self.x.prefers_convolution(self.g):
            return super().sum_over_samples()
        x = self.x.by_image()  # whose patches fit the memory
        g = self.g.reshape(len(self.g), *x.shape[:2], *self.g.shape[3:])
        sums = (
            torch.einsum("vnsgo,nsgi->vgoi", g[:, some], x[some])
            for some in chunks(len(g[0]), 16 * prod(x.shape[1:]))  # both factors are copied
        )
        return self.entries.spread(total(sums).unsqueeze(1))[:, 0]

    def prefers_positions(self, columns: Tensor | LowRank) -> bool:
        """Return whether inner products without forming gradients are cheaper."""
        N, S = self.num_samples, self.num_positions
        K = len(columns.left if isinstance(columns, LowRank) else columns)
        if (factors := self._factors(columns)) is not None:
            rank, outputs, inputs = factors[0].shape[2], self.g.shape[-1], self.x.shape[3]
            formed = (N * (S + K) + K * rank) * outputs * inputs
            by_position = N * S * K * rank * (outputs + inputs) <= formed
        else:
            # products with all entries, and copies: of columns for a batch, or of gradients
            by_position = N * S * K + _COPY * K <= N * (S + K) + _COPY * N
        return by_position and not self.x.prefers_convolution(self.g)

    def products_of_positions(self, columns: Tensor | LowRank) -> Iterator[Tensor]:
        """Yield the contribution of each position of some samples, ``[V, n, S, K]``."""
        factors = self._factors(columns)
        if factors is not None:
            left, right = factors  # [K, O, r], [K, r, I]
            K, _, rank = left.shape
            size = self.num_positions * K * rank * (1 + self.num_vectors)
            for some in self.slices(size + self.num_inputs):
                g = _times(self.g[:, some].squeeze(3), rearrange(left, "k o r -> o (k r)"))
                x = _times(self.x[some].squeeze(2), rearrange(right, "k r i -> i (k r)"))
                yield (g * x).unflatten(-1, (K, rank)).sum(-1)
            return
        groups, inputs = self.x.shape[2:]
        outputs = self.g.shape[-1]
        matrices = self.entries.read(dense(columns)).reshape(-1, groups, outputs, inputs)
        size = self.num_positions * len(matrices) * groups * max(inputs, outputs)
        for some in self.slices(size * self.num_vectors + self.num_inputs):
            yield _products_of_matrices(self.g[:, some], self.x[some], matrices)

    def _factors(self, columns: Tensor | LowRank) -> tuple[Tensor, Tensor] | None:
        """Return factors of low rank of matrices ``[O, I]``; ``None`` if there are none."""
        if not isinstance(columns, LowRank) or self.x.shape[2] != 1:
            return None
        outputs, inputs = self.g.shape[-1], self.x.shape[3]
        size, view, (left, right, _) = prod(self.shape), self.entries.view, columns
        if view.is_all(size) and left.shape[1] == outputs:
            return left, right
        if self._is_transposed and left.shape[1] == inputs:
            return right.mT, left.mT
        return None

    def squared_norms(self) -> Tensor:
        """Return the squared norms, from Gram matrices of positions if those are smaller."""
        positions, groups, inputs = self.x.shape[1:]
        outputs = self.g.shape[-1]
        if positions == 1:
            # norms need no memory for squares
            x, g = (torch.linalg.vector_norm(z, dim=-1) for z in (self.x[:][:, 0], self.g[:, :, 0]))
            return (g * x).square().sum(-1)
        if positions * (inputs + self.num_vectors * outputs) >= self.num_vectors * inputs * outputs:
            return super().squared_norms()
        norms = []
        for some in self.slices(self.num_vectors * positions**2 * groups + self.num_inputs):
            x, g = self.x[some], self.g[:, some]
            inner = torch.einsum("nsgi,ntgi->ngst", x, x)
            norms.append((torch.einsum("vnsgo,vntgo->vngst", g, g) * inner).sum((2, 3, 4)))
        return torch.cat(norms, dim=1)

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares, as one matrix product if there is one position."""
        if self.x.shape[1] != 1:
            return super().sum_of_squares()
        g = squared_sum(self.g.flatten(1)).reshape(self.g.shape[1], *self.g.shape[3:])
        squares = g.permute(1, 2, 0) @ self.x[:][:, 0].square().transpose(0, 1)
        return self.entries.spread(squares[None, None])[0, 0]

    def prefers_inner_products(self, other: PerSampleGradient) -> bool:
        """Return whether inner products of inputs and of output gradients are cheaper."""
        if not self.is_alike(other):
            return False
        pairs = self.num_samples * other.num_samples
        vectors = self.num_vectors * other.num_vectors
        S, T, groups = self.x.shape[1], other.x.shape[1], self.x.shape[2]
        inputs, outputs = self.x.shape[-1], self.g.shape[-1]
        by_positions = pairs * S * T * groups * (inputs + vectors * (outputs + 1))
        formed = self.num_vectors * self.num_samples * S + other.num_vectors * other.num_samples * T
        return by_positions <= groups * inputs * outputs * (formed + pairs * vectors)

    def inner_products(self, other: "OuterProducts") -> Tensor:
        """Return all inner products, from those of inputs and of output gradients."""
        rows = []
        pairs = self.g[:, 0].numel() // self.g.shape[-1]
        size = pairs * (other.g[:, 0].numel() // other.g.shape[-1])
        columns = list(other.slices(other.num_inputs))
        widest = max(across.stop - across.start for across in columns)
        for some in self.slices(size * widest + self.num_inputs):
            blocks = []
            for across in columns:
                left = torch.einsum("nsgi,mtgi->nsmtg", self.x[some], other.x[across])
                g, h = self.g[:, some], other.g[:, across]
                right = torch.einsum("vnsgo,wmtgo->vnswmtg", g, h)
                blocks.append(torch.einsum("nsmtg,vnswmtg->vnwm", left, right))
            rows.append(torch.cat(blocks, dim=3))
        return torch.cat(rows, dim=1)

    def with_patches(self) -> "OuterProducts":
        """Return the same gradients with all patches in memory, unless convolutions are faster."""
        if self.x.in_memory or self.x.prefers_convolution(self.g):
            return self
        return OuterProducts(self.x[:], self.g, self.entries)

    def of_outputs(self, outputs: slice) -> "OuterProducts":
        """Return the gradients with respect to the weights of some outputs, in any order."""
        g = self.g[..., outputs]
        return OuterProducts(self.x, g, Entries.all([*g.shape[3:], self.x.shape[3]]))

    def plus(self, others: Sequence[PerSampleGradient]) -> "OuterProducts | None":
        """Return the sum with others of the same layout: positions side by side."""
        gradients = [self, *others]
        # written down, patches take much memory
        if not (self.is_alike(*others) and all(gradient.x.in_memory for gradient in gradients)):
            return None
        x = torch.cat([gradient.x[:] for gradient in gradients], dim=1)
        g = torch.cat([gradient.g for gradient in gradients], dim=2)
        return OuterProducts(x, g, self.entries)

    def slices(self, size: int | None = None) -> Iterator[slice]:
        """Yield samples in parts whose gradients and inputs fit the memory."""
        if size is None:
            outputs = self.g.shape[-1] * self.x.shape[2] * self.x.shape[3]
            inputs = 0 if self.x.prefers_convolution(self.g) else self.num_inputs
            size = self.num_vectors * outputs + inputs
        return super().slices(size)


def _products_of_matrices(g: Tensor, x: Tensor, matrices: Tensor) -> Tensor:
    """Return ``g^T P x`` for K matrices P, ``[V, n, S, K]``, without a copy of them.

    The order of their axes in memory decides with which factor they are multiplied first.
    """
    if matrices.shape[1] > 1:
        products = torch.einsum("nsgi,kgoi->nskgo", x, matrices)
        return torch.einsum("nskgo,vnsgo->vnsk", products, g)
    first, second, P = x.squeeze(2).unsqueeze(0), g.squeeze(3), matrices.squeeze(1)
    columns_last = len(P) > 1 and P.stride(0) < min(P.stride(1), P.stride(2))
    if (P.stride(1) > P.stride(2)) == columns_last:
        first, second, P = second, first, P.mT
    # P is [K, b, a], and the first factor has the axis a
    if columns_last:
        P = P.permute(2, 1, 0)
        products = _times(first, P.flatten(1)).unflatten(-1, P.shape[1:])
        return (second.unsqueeze(-2) @ products).squeeze(-2)
    rows = first.flatten(0, 2).expand(len(P), -1, -1)  # a product with a stack would copy P
    products = torch.bmm(rows, P.mT).unflatten(1, first.shape[:3])
    return (products * second).sum(-1).movedim(0, -1)


def _times(x: Tensor, matrix: Tensor) -> Tensor:
    """Return ``x @ matrix`` as one product of matrices.

    Where some of one vector's samples are taken, an axis of length one has the stride of all
    samples. ``torch.matmul`` would then multiply sample by sample.
    """
    return (x.reshape(-1, x.shape[-1]) @ matrix).view(*x.shape[:-1], matrix.shape[1])
