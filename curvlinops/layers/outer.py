"""Gradients of matrix products and convolutions: sums of outer products."""

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from curvlinops.layers.gradients import Entries, GradientSum, PerSampleGradient, squared_sum
from curvlinops.layers.patches import Patches


class Inputs(Protocol):
    """Inputs ``[N, S, G, I]``: a tensor, or something that makes those of some samples."""

    shape: Sequence[int]

    def __getitem__(self, samples: slice) -> Tensor: ...


class OuterProducts(PerSampleGradient):
    """Sums of outer products over positions: ``sum_s g[v, n, s] x[n, s]^T``, for each group.

    Args:
        x: Inputs ``[N, S, G, I]``.
        g: Output gradients ``[V, N, S, G, O]``.
        entries: The entries of the parameter, as matrices ``[G, O, I]``.
    """

    def __init__(self, x: Inputs, g: Tensor, entries: Entries):
        self.x, self.g, self.entries = x, g, entries
        self.num_vectors, self.num_samples = g.shape[:2]
        self.num_positions = x.shape[1]

    @property
    def kind(self) -> Hashable:
        """Equal for gradients whose entries mean the same, in the same dtype."""
        return self.entries, self.g.dtype, *self.x.shape[2:]

    def values(self, samples: slice) -> Tensor:
        """Return the matrices of some samples, ``[V, n, G, O, I]``."""
        g = self.g[:, samples]
        if self._by_convolution:
            return self.x.filter_gradients(samples, g[0]).unsqueeze(0)
        return self._multiply(samples, g.new_empty(*g.shape[:2], *g.shape[3:], self.x.shape[3]))

    def write(self, samples: slice, out: Tensor) -> None:
        """Write the gradients of some samples, without a copy if possible."""
        groups, inputs = self.x.shape[2:]
        indirect = self._by_convolution or not self.entries.are_all or groups > 1
        if indirect or out.dtype != self.g.dtype:
            super().write(samples, out)
        else:
            self._multiply(samples, out.view(*out.shape[:2], 1, self.g.shape[-1], inputs))

    def _multiply(self, samples: slice, out: Tensor) -> Tensor:
        """Write the matrices of some samples to ``[V, n, G, O, I]``, and return them."""
        g, x = self.g[:, samples], self.x[samples]
        if x.shape[1] == 1:
            return torch.mul(g[:, :, 0].unsqueeze(-1), x[:, 0].unsqueeze(-2), out=out)
        x = x.transpose(1, 2).flatten(0, 1)
        for one, matrices in zip(g, out, strict=True):  # without copying x for each vector
            torch.bmm(one.permute(0, 2, 3, 1).flatten(0, 1), x, out=matrices.flatten(0, 1))
        return out

    def to(self, dtype: torch.dtype) -> "OuterProducts":
        """Return the same gradients, made of inputs and output gradients of another dtype."""
        return OuterProducts(self.x.to(dtype), self.g.to(dtype), self.entries)

    def sum_over_samples(self) -> Tensor:
        """Return the sum over samples, as one matrix product."""
        total: Tensor | float = 0.0
        for part in self.slices(16 * self.num_inputs):  # the product copies both factors
            total = total + torch.einsum("vnsgo,nsgi->vgoi", self.g[:, part], self.x[part])
        return self.entries.spread(total.unsqueeze(1))[:, 0]

    @property
    def _by_convolution(self) -> bool:
        """Whether rows are faster without patches."""
        alone = isinstance(self.x, Patches) and self.num_vectors == 1
        # several vectors share the patches; measured on CPUs only
        return alone and self.g.device.type == "cpu" and self.x.cost_more(self.g.shape[-1])

    @property
    def num_inputs(self) -> int:
        """The number of a sample's inputs."""
        positions, groups, inputs = self.x.shape[1:]
        return positions * groups * inputs

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
        for part in self.slices(self.num_vectors * positions**2 * groups + self.num_inputs):
            x, g = self.x[part], self.g[:, part]
            inner = torch.einsum("nsgi,ntgi->ngst", x, x)
            norms.append((torch.einsum("vnsgo,vntgo->vngst", g, g) * inner).sum((2, 3, 4)))
        return torch.cat(norms, dim=1)

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares, as one matrix product if there is one position."""
        if self.x.shape[1] != 1:
            return super().sum_of_squares()
        g = squared_sum(self.g.flatten(1)).reshape(self.g.shape[1], *self.g.shape[3:])
        squares = torch.einsum("ngo,ngi->goi", g, self.x[:][:, 0].square())
        return self.entries.spread(squares[None, None])[0, 0]

    def prefers_inner_products(self, other: PerSampleGradient) -> bool:
        """Return whether inner products of inputs and of output gradients are cheaper."""
        alike = isinstance(other, OuterProducts) and self.kind == other.kind
        return alike and self._is_cheaper_by_positions(other)

    def inner_products(self, other: "OuterProducts") -> Tensor:
        """Return all inner products, from those of inputs and of output gradients."""
        rows = []
        pairs = self.g[:, 0].numel() // self.g.shape[-1]
        size = pairs * (other.g[:, 0].numel() // other.g.shape[-1])
        columns = list(other.slices(other.num_inputs))
        widest = max(across.stop - across.start for across in columns)
        for part in self.slices(size * widest + self.num_inputs):
            blocks = []
            for across in columns:
                left = torch.einsum("nsgi,mtgi->nsmtg", self.x[part], other.x[across])
                g, h = self.g[:, part], other.g[:, across]
                right = torch.einsum("vnsgo,wmtgo->vnswmtg", g, h)
                blocks.append(torch.einsum("nsmtg,vnswmtg->vnwm", left, right))
            rows.append(torch.cat(blocks, dim=3))
        return torch.cat(rows, dim=1)

    def with_patches(self) -> "OuterProducts":
        """Return the same gradients with all patches in memory, unless convolutions are faster."""
        return self if self._by_convolution else OuterProducts(self.x[:], self.g, self.entries)

    def of_outputs(self, outputs: slice) -> "OuterProducts":
        """Return the gradients with respect to the weights of some outputs, in any order."""
        g = self.g[..., outputs]
        return OuterProducts(self.x, g, Entries.all([*g.shape[3:], self.x.shape[3]]))

    @staticmethod
    def merge(gradients: list["OuterProducts"]) -> "OuterProducts":
        """Return the sum of gradients of one kind: their positions side by side."""
        x = torch.cat([gradient.x[:] for gradient in gradients], dim=1)
        g = torch.cat([gradient.g for gradient in gradients], dim=2)
        return OuterProducts(x, g, gradients[0].entries)

    def slices(self, size: int | None = None):
        """Yield samples in parts whose gradients and inputs fit the memory."""
        if size is None:
            outputs = self.g.shape[-1] * self.x.shape[2] * self.x.shape[3]
            inputs = 0 if self._by_convolution else self.num_inputs
            size = self.num_vectors * outputs + inputs
        return super().slices(size)

    def _is_cheaper_by_positions(self, other: "OuterProducts") -> bool:
        pairs = self.num_samples * other.num_samples
        vectors = self.num_vectors * other.num_vectors
        S, T, groups = self.x.shape[1], other.x.shape[1], self.x.shape[2]
        inputs, outputs = self.x.shape[-1], self.g.shape[-1]
        by_positions = pairs * S * T * groups * (inputs + vectors * (outputs + 1))
        formed = self.num_vectors * self.num_samples * S + other.num_vectors * other.num_samples * T
        return by_positions <= groups * inputs * outputs * (formed + pairs * vectors)


def sum_of(gradients: list[PerSampleGradient]) -> PerSampleGradient:
    """Return the sum of several uses' gradients."""
    if len(gradients) == 1:
        return gradients[0]
    # written down, patches take much memory
    outer = all(isinstance(g, OuterProducts) and not isinstance(g.x, Patches) for g in gradients)
    if outer and len({gradient.kind for gradient in gradients}) == 1:
        return OuterProducts.merge(gradients)
    return GradientSum(gradients)
