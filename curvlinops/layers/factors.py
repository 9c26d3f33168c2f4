"""Sums of outer products of output gradients and inputs, which have Kronecker factors."""

from abc import abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.covariance import second_moment
from curvlinops.layers.gradients import LowRank, PerSampleGradient, Sides, total
from curvlinops.structured.layout import ParameterView
from curvlinops.support.files import recorded


@recorded
class KroneckerShape(NamedTuple):
    """G blocks ``[O, I]`` of a parameter's entries, whose Kronecker products have G blocks, too."""

    #: G, O and I.
    groups: int
    outputs: int
    inputs: int
    #: The entries ``[G, O, I]``.
    view: ParameterView
    #: Whether inputs have a single one among zeros.
    one_hot_inputs: bool = False
    #: Whether inputs are ones, as those of biases are.
    is_bias: bool = False

    def diagonal(self, limit: int) -> tuple[bool, bool]:
        """Return whether only the diagonals of B and of A are computed: lookups, larger factors."""
        return self.outputs > limit, self.one_hot_inputs or self.inputs > limit

    def factor_sizes(self, limit: int) -> list[int]:
        """Return the numbers of entries of B, and of A if inputs are not ones, see ``diagonal``."""
        widths = (self.outputs,) if self.is_bias else (self.outputs, self.inputs)
        pairs = zip(widths, self.diagonal(limit), strict=False)
        return [self.groups * (n if is_diagonal else n**2) for n, is_diagonal in pairs]


def relation(shape: KroneckerShape, other: KroneckerShape) -> str | None:
    """Return how entries of two products for one parameter are related, ``None`` if they are not.

    ``"same"``, or ``"transposed"``, where the outputs of one are the inputs of the other.
    """
    if (shape.groups, shape.is_bias) != (other.groups, other.is_bias):
        return None
    groups, outputs, inputs = shape.groups, shape.outputs, shape.inputs
    if (outputs, inputs, shape.view) == (other.outputs, other.inputs, other.view):
        return "same"
    transposed = other.view.undo_permutation((groups, outputs, inputs), (0, 2, 1))
    is_transposed = (outputs, inputs) == (other.inputs, other.outputs) and shape.view == transposed
    return "transposed" if is_transposed else None


class FactoredGradient(PerSampleGradient):
    """Sums of outer products of output gradients and inputs, ``sum_s g[v, n, s] x[n, s]^T``.

    There is one such matrix for each of G groups. KFAC and EKFAC know gradients by these methods
    only: a class that has inputs and output gradients has Kronecker factors. Subclasses override
    the other methods where there are cheaper ways.
    """

    @property
    @abstractmethod
    def kronecker_shape(self) -> KroneckerShape:
        """G, O and I, and the entries of the parameter that the matrices ``[G, O, I]`` have."""

    @abstractmethod
    def inputs(self) -> Tensor:
        """Return x, ``[N, S, G, I]``."""

    @abstractmethod
    def output_gradients(self) -> Tensor:
        """Return g, ``[V, N, S, G, O]``."""

    def positions(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x, ``[n, S, G, I]``, and g, ``[V, n, S, G, O]``, of some samples."""
        yield self.inputs(), self.output_gradients()

    def positions_in(
        self, outputs: Tensor | None, inputs: Tensor | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield x and g of some samples, multiplied by columns, see ``projected``."""
        return ((rotated(x, inputs), rotated(g, outputs)) for x, g in self.positions())

    def input_moment(self, diagonal: bool, mask: Tensor | None = None) -> tuple[Tensor, int]:
        """Return the sum of the inputs' outer products, ``[G, I, I]``, and their number.

        Only the ``diagonal``, ``[G, I]``, if wanted; of inputs in the mask ``[N, S]``, or of all.
        """
        x = self.inputs()
        x = x.flatten(0, 1) if mask is None else x[mask]
        return moment(x, diagonal), len(x)

    def input_sums(self, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return the sum of each sample's inputs, ``[N, G, I]``, and their number, ``[N]``."""
        x = self.inputs()
        if mask is None:
            return x.sum(1), torch.tensor(x.shape[1], device=x.device).expand(len(x))
        return (x * rearrange(mask, "n s -> n s 1 1")).sum(1), mask.sum(1)

    def projected(self, shape: tuple, terms: Sequence[Sides]) -> Tensor:
        """Return the products of matrices with columns, of projected factors if it has these."""
        related = relation(self.kronecker_shape, shape)
        if related is None:
            return super().projected(shape, terms)

        def product(sides: Sides) -> Tensor:
            pairs = self.positions_in(*(sides if related == "same" else sides[::-1]))
            return torch.cat([torch.einsum("vnsgp,nsgq->vngpq", g, x) for x, g in pairs], dim=1)

        out = total(map(product, terms))
        return out if related == "same" else out.mT


class PositionGradients(FactoredGradient):
    """Gradients that know the contribution of each position, as those of products and lookups."""

    #: Equal for gradients whose entries mean the same, in the same dtype.
    layout: Hashable

    def is_alike(self, *others: PerSampleGradient) -> bool:
        """Return whether all have the same layout."""
        return all(type(x) is type(self) and x.layout == self.layout for x in others)

    @abstractmethod
    def products_of_positions(self, columns: Tensor | LowRank) -> Iterator[Tensor]:
        """Yield the contribution of each position of some samples, ``[V, n, S, K]``."""

    def products_by_position(self, columns: Tensor | LowRank) -> Tensor:
        """Return the contribution of each position to the inner products, ``[V, N, S, K]``."""
        return torch.cat(list(self.products_of_positions(columns)), dim=1)

    def prefers_positions(self, columns: Tensor | LowRank) -> bool:
        """Return whether inner products are cheaper position by position."""
        return True

    def products(self, columns: Tensor | LowRank) -> Tensor:
        """Return the inner products, position by position if that is cheaper."""
        if not self.prefers_positions(columns):
            return super().products(columns)
        parts = self.products_of_positions(columns)
        return torch.cat([products.sum(2) for products in parts], dim=1)


def rotated(x: Tensor, basis: Tensor | None) -> Tensor:
    """Multiply ``[*, G, n]`` by the transposed basis of each group, ``[G, n, m]``."""
    if basis is None:
        return x
    if len(basis) == 1:
        return (x.reshape(-1, x.shape[-1]) @ basis[0]).view(*x.shape[:-1], basis.shape[2])
    return torch.einsum("...gi,gij->...gj", x, basis)


def moment(rows: Tensor, diagonal: bool) -> Tensor:
    """Return the sum of outer products of ``[P, G, I]``, or its diagonal."""
    if diagonal:
        return rows.square().sum(0)
    if rows.shape[1] == 1:
        return second_moment(rows[:, 0]).unsqueeze(0)
    return second_moment(rearrange(rows, "p g i -> g p i"))
