"""Second moments of gradients in the eigenbasis of a Kronecker product."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.embedding import EmbeddingGradient
from curvlinops.layers.factors import KroneckerShape, relation
from curvlinops.layers.gradients import Entries, PerSampleGradient, squared_sum
from curvlinops.layers.outer import Inputs, OuterProducts, sum_of
from curvlinops.layers.recorded import UseGradient
from curvlinops.operators.kfac.layout import BlockFactors
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import Factor, decompose, identity
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import recorded


@recorded
@dataclass(frozen=True)
class Basis:
    """An orthogonal basis of a block's matrices ``[G, O, I]``.

    Attributes:
        kind: The shape of these matrices.
        outputs: The basis of their columns, ``[G, O, O]``; ``None`` for the standard basis.
        inputs: The basis of their rows, ``[G, I, I]``; ``None`` for the standard basis.
        has_bias: Whether the bias is the last column.
    """

    kind: KroneckerShape
    outputs: Tensor | None
    inputs: Tensor | None
    has_bias: bool

    @property
    def shape(self) -> tuple[int, int, int]:
        """G, O, and I with the bias."""
        return self.kind.groups, self.kind.outputs, self.kind.inputs + self.has_bias

    def map(self, function: Callable[[Tensor], Tensor]) -> "Basis":
        """Apply a function to the bases of columns and of rows."""
        outputs = None if self.outputs is None else function(self.outputs)
        return replace(
            self, outputs=outputs, inputs=None if self.inputs is None else function(self.inputs)
        )

    def diagonal(self, eigenvalues: Tensor) -> StructuredLinearOperator:
        """Return the matrix with this eigenbasis and some eigenvalues ``[G, O, I]``."""
        groups, *sizes = self.shape
        axes = [(self.outputs, sizes[0])]
        axes += [] if self.kind.is_bias else [(self.inputs, sizes[1])]
        factors: list[Factor] = [
            identity(size, eigenvalues, groups) if Q is None else Factor(Q, symmetric=False)
            for Q, size in axes
        ]
        vectors = KroneckerProductLinearOperator(*factors)
        return EighDecomposedLinearOperator(eigenvalues.flatten(), vectors)

    def second_moment(self, parts: Sequence[UseGradient]) -> Tensor:
        """Return the sum over samples of squared gradients in this basis, ``[G, O, I]``.

        Args:
            parts: All uses of the block's weight on a batch.
        """
        gradients = [part.gradient for part in parts]
        whole = sum_of(gradients)
        if isinstance(whole, OuterProducts):
            return self._of_matrices(whole)
        if all(isinstance(g, EmbeddingGradient) for g in gradients) and self.inputs is None:
            indices = torch.cat([gradient.indices for gradient in gradients], dim=1)
            g = torch.cat([gradient.g for gradient in gradients], dim=2).unsqueeze(3)
            g = _rotated(g, self.outputs).squeeze(3)
            table = Entries.all([gradients[0].num_rows, g.shape[-1]])
            return EmbeddingGradient(indices, g, table).sum_of_squares().T.unsqueeze(0)
        return self._of_rows(whole, self.kind.view)

    def _of_matrices(self, gradient: OuterProducts) -> Tensor:
        """Square and add sums of outer products, rotating these or what they are made of."""
        positions, groups, inputs = gradient.x.shape[1:]
        outputs = gradient.g.shape[-1]
        of_factors = positions * (inputs**2 + outputs**2)
        of_rows = inputs * outputs * (inputs + outputs)
        basis = self.inputs if of_factors <= of_rows else None
        x = Rotated(gradient.x, basis, self.has_bias)
        entries = Entries.all([groups, outputs, x.shape[-1]])
        if of_factors <= of_rows:
            return OuterProducts(x, _rotated(gradient.g, self.outputs), entries).sum_of_squares()
        gradient = OuterProducts(x if self.has_bias else gradient.x, gradient.g, entries)
        return self._of_rows(gradient, entries.view)

    def _of_rows(self, gradient: PerSampleGradient, view: ParameterView) -> Tensor:
        """Square and add gradients that are written down and then rotated.

        Args:
            gradient: The gradients.
            view: The matrices ``[G, O, I]``.
        """
        total: Tensor | float = 0.0
        matrix = self.kind.groups, self.kind.outputs
        matrix = (*matrix, view.size // prod(matrix))
        for some in gradient.slices():
            rows = gradient.rows(some).flatten(0, 1).flatten(1)
            total = total + self._squares(view.of(rows).reshape(len(rows), *matrix))
        return total

    def _squares(self, rows: Tensor) -> Tensor:
        """Return the sum of squares of gradients ``[P, G, O, I]``, rotated, ``[G, O, I]``."""
        rows = _rotated(rows.permute(0, 2, 1, 3), self.inputs)
        rows = _rotated(rows.permute(0, 3, 2, 1), self.outputs)
        return squared_sum(rows.flatten(1)).reshape(rows.shape[1:]).permute(1, 2, 0)

    def second_moment_of_rows(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum of squared gradients in this basis, ``[G, O, I]``.

        Args:
            weight: Gradients of the entries that a layer uses, in the order of the matrices.
            bias: Gradients of its bias, ``None`` if the block has none.
        """
        matrix = self.kind.groups, self.kind.outputs
        rows = weight.reshape(len(weight), *matrix, self.kind.inputs)
        if bias is not None:
            rows = torch.cat([rows, bias.reshape(len(bias), *matrix, 1)], 3)
        return self._squares(rows)


class Rotated:
    """Inputs in another basis, possibly with a one as last entry before.

    Args:
        inputs: Inputs ``[N, S, G, I]``.
        basis: The basis, ``None`` for the standard basis.
        has_bias: Whether there is a one for the bias.
    """

    def __init__(self, inputs: Inputs, basis: Tensor | None, has_bias: bool):
        self._inputs, self._basis, self._has_bias = inputs, basis, has_bias
        self.shape = (*inputs.shape[:-1], inputs.shape[-1] + has_bias)

    def __getitem__(self, samples: slice) -> Tensor:
        """Return the rotated inputs of some samples."""
        x = self._inputs[samples]
        if self._has_bias:
            # where a sample has fewer positions than others, output gradients are zero
            x = torch.cat([x, torch.ones_like(x[..., :1])], dim=-1)
        return _rotated(x, self._basis)


def eigenbases(factors: Sequence[BlockFactors]) -> list[Basis]:
    """Return the eigenbases of blocks that are Kronecker products.

    Of a block that is a sum of several, the first one's is taken, except that axes along which
    another one is diagonal keep the standard basis.
    """
    axes = [_axes(each) for each in factors]
    decompose(
        (factor, f"A factor of '{each.block.names[0]}'", False)
        for each, both in zip(factors, axes, strict=True)
        for factor in both
        if factor is not None
    )
    return [
        Basis(each.products[0].kind, *map(_vectors, both), has_bias=len(each.block.names) > 1)
        for each, both in zip(factors, axes, strict=True)
    ]


def _axes(factors: BlockFactors) -> tuple[Factor | None, Factor | None]:
    """Return the factors whose eigenvectors are the basis, ``None`` for the standard basis."""
    first = factors.products[0]
    outputs, inputs = (
        None if factor is None or factor.is_diagonal else factor
        for factor in (first.gradients, first.inputs)
    )
    for other in factors.products[1:]:
        is_diagonal = other.inputs is not None and other.inputs.is_diagonal
        if is_diagonal and not first.inputs.is_diagonal:
            # those of lookups are the outputs of a head with the same weight
            if relation(first.kind, other.kind) == "transposed":
                outputs = None
            else:
                inputs = None
    return outputs, inputs


def _vectors(factor: Factor | None) -> Tensor | None:
    return None if factor is None else factor.eigenvectors().tensor


def _rotated(x: Tensor, basis: Tensor | None) -> Tensor:
    """Multiply ``[*, G, n]`` by the transposed basis of each group."""
    if basis is None:
        return x
    if len(basis) == 1:
        return (x.reshape(-1, x.shape[-1]) @ basis[0]).view(x.shape)
    return torch.einsum("...gi,gij->...gj", x, basis)
