"""Gradients that are sums of outer products: those of all matrix products and convolutions."""

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from curvlinops.layers.forms import Form, Total


class Outer(Form):
    """Sums of outer products over positions: ``sum_s g[v, n, s] x[n, s]^T``, for each group.

    Args:
        x: Inputs ``[N, S, G, I]``.
        g: Output gradients ``[V, N, S, G, O]``.
        arrange: Turns ``[V, n, G, O, I]`` into ``[V, n, *shape]``, a permutation of the entries.
        shape: The parameter's shape.
        kind: Equal for forms whose ``arrange`` is the same.
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        arrange: Callable[[Tensor], Tensor],
        shape: Sequence[int],
        kind: Hashable,
    ):
        self.x, self.g, self._arrange, self.kind = x, g, arrange, kind
        self.num_vectors, self.num_samples, self.shape = g.shape[0], g.shape[1], tuple(shape)

    def rows(self, samples: slice) -> Tensor:
        """Return the gradients of some samples."""
        return self._arrange(self._matrices(samples))

    def select(self, samples: Tensor) -> "Outer":
        """Return the gradients of some samples only."""
        return Outer(self.x[samples], self.g[:, samples], self._arrange, self.shape, self.kind)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the weighted sum, as one matrix product."""
        x = self.x * weights.to(self.x).reshape(-1, 1, 1, 1)
        return self._arrange(torch.einsum("vnsgo,nsgi->vgoi", self.g, x).unsqueeze(1))[:, 0]

    def squared_norms(self) -> Tensor:
        """Return the squared norms, from Gram matrices of positions if those are smaller."""
        positions, _, inputs = self.x.shape[1:]
        outputs = self.g.shape[-1]
        if positions == 1:
            x = self.x[:, 0].square().sum(-1)
            return (self.g[:, :, 0].square().sum(-1) * x).sum(-1)
        if positions * (inputs + outputs) >= inputs * outputs:
            return super().squared_norms()
        norms = []
        for part in self.parts(self.num_vectors * positions**2 * self.x.shape[2]):
            x, g = self.x[part], self.g[:, part]
            inner = torch.einsum("nsgi,ntgi->nstg", x, x)
            norms.append(torch.einsum("nstg,vnsgo,vntgo->vn", inner, g, g))
        return torch.cat(norms, dim=1)

    def sum_of_squares(self) -> Tensor:
        """Return the sum of squares, as one matrix product if there is one position."""
        if self.x.shape[1] > 1:
            return super().sum_of_squares()
        squares = torch.einsum("vngo,ngi->goi", self.g[:, :, 0].square(), self.x[:, 0].square())
        return self._arrange(squares[None, None])[0, 0]

    def inner(self, other: Form) -> Tensor:
        """Return all inner products, from those of inputs and of output gradients if cheaper."""
        if not isinstance(other, Outer) or not self._is_cheaper_by_positions(other):
            return super().inner(other)
        blocks = []
        size = self.g[:, 0].numel() // self.g.shape[-1] * other.g.numel() // other.g.shape[-1]
        for part in self.parts(size):
            left = torch.einsum("nsgi,mtgi->nsmtg", self.x[part], other.x)
            right = torch.einsum("vnsgo,wmtgo->vnswmtg", self.g[:, part], other.g)
            blocks.append(torch.einsum("nsmtg,vnswmtg->vnwm", left, right))
        return torch.cat(blocks, dim=1)

    def arranged(
        self, again: Callable[[Tensor], Tensor], shape: Sequence[int], kind: Hashable
    ) -> "Outer":
        """Return the same gradients with their entries permuted by a function of ``kind``."""
        return Outer(self.x, self.g, lambda m: again(self._arrange(m)), shape, (self.kind, kind))

    @staticmethod
    def merge(forms: list["Outer"]) -> "Outer":
        """Return the sum of forms of one kind: their positions side by side."""
        x = torch.cat([form.x for form in forms], dim=1)
        g = torch.cat([form.g for form in forms], dim=2)
        return Outer(x, g, forms[0]._arrange, forms[0].shape, forms[0].kind)

    def _is_cheaper_by_positions(self, other: "Outer") -> bool:
        pairs = self.num_samples * other.num_samples
        vectors = self.num_vectors * other.num_vectors
        S, T, groups = self.x.shape[1], other.x.shape[1], self.x.shape[2]
        inputs, outputs = self.x.shape[-1], self.g.shape[-1]
        by_positions = pairs * S * T * groups * (inputs + vectors * (outputs + 1))
        formed = self.num_vectors * self.num_samples * S + other.num_vectors * other.num_samples * T
        return by_positions <= groups * inputs * outputs * (formed + pairs * vectors)

    def _matrices(self, samples: slice) -> Tensor:
        x, g = self.x[samples], self.g[:, samples]
        if x.shape[1] == 1:
            return g[:, :, 0].unsqueeze(-1) * x[:, 0].unsqueeze(-2)
        return torch.einsum("vnsgo,nsgi->vngoi", g, x)


def add(forms: list[Form]) -> Form:
    """Return the sum of several uses' gradients."""
    if len(forms) == 1:
        return forms[0]
    if all(isinstance(form, Outer) for form in forms) and len({f.kind for f in forms}) == 1:
        return Outer.merge(forms)
    return Total(forms)
