"""Second moments of gradients in the eigenbasis of a Kronecker product."""

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from curvlinops.layers.embedding import EmbeddingGradient
from curvlinops.layers.factors import FactoredGradient, relation, rotated
from curvlinops.layers.gradients import Entries, squared_sum
from curvlinops.layers.outer import OuterProducts
from curvlinops.operators.kfac.block_sums import BlockSum
from curvlinops.operators.kfac.blocks import BASIS_INPUTS, BASIS_OUTPUTS, MOMENT, Block, Stack
from curvlinops.operators.vectors import Head
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.factor import Factor, identity
from curvlinops.structured.kronecker import (
    EighDecomposedLinearOperator,
    KroneckerProductLinearOperator,
)
from curvlinops.structured.layout import ParameterView


@dataclass(frozen=True)
class Basis(BlockSum):
    """An orthogonal basis of a block's matrices ``[G, O, I]``; ``None`` for the standard basis."""

    #: The basis of their columns, ``[G, O, O]``, and of their rows, ``[G, I, I]``.
    outputs: Tensor | None
    inputs: Tensor | None

    def diagonal(self, eigenvalues: Tensor) -> StructuredLinearOperator:
        """Return the matrix with this eigenbasis and some eigenvalues ``[G, O, I]``."""
        axes = [(self.outputs, self.shape.outputs)]
        axes += [] if self.shape.is_bias else [(self.inputs, self.shape.inputs + self.has_bias)]
        factors: list[Factor] = [
            identity(size, eigenvalues, len(eigenvalues))
            if Q is None
            else Factor(Q, symmetric=False)
            for Q, size in axes
        ]
        vectors = KroneckerProductLinearOperator(*factors)
        return EighDecomposedLinearOperator(eigenvalues.flatten(), vectors)

    def of_factors(self, gradient: FactoredGradient) -> list[dict[str, Tensor]] | None:
        """Return the sum of squared gradients in this basis, ``[G, O, I]``, of rotated factors."""
        groups, num_outputs, num_inputs, *_ = gradient.kronecker_shape
        if isinstance(gradient, OuterProducts):
            of_factors = gradient.num_positions * (num_inputs**2 + num_outputs**2)
            if of_factors <= num_inputs * num_outputs * (num_inputs + num_outputs):
                sizes = groups, num_outputs, num_inputs + self.has_bias
                return [{MOMENT: self._of_outer_products(gradient, sizes)}]
        elif isinstance(gradient, EmbeddingGradient) and self.inputs is None and not self.has_bias:
            g = rotated(gradient.output_gradients(), self.outputs).squeeze(3)
            table = Entries.all([num_inputs, num_outputs])
            squares = EmbeddingGradient(gradient.indices, g, table).sum_of_squares()
            return [{MOMENT: rearrange(squares, "rows i -> 1 i rows")}]
        return None

    def _of_outer_products(self, gradient: OuterProducts, sizes: Sequence[int]) -> Tensor:
        g, size = rotated(gradient.g, self.outputs), gradient.num_vectors * prod(sizes)
        # of one position, matrices are not written down
        is_one = gradient.num_positions == 1
        pieces = [slice(None)] if is_one else gradient.slices(size + gradient.num_inputs)
        squares: Tensor | float = 0.0
        for some in pieces:
            # where a sample has fewer positions than others, output gradients are zero
            x = F.pad(gradient.x[some], (0, 1), value=1.0) if self.has_bias else gradient.x[some]
            products = OuterProducts(rotated(x, self.inputs), g[:, some], Entries.all(sizes))
            squares = squares + products.sum_of_squares()
        return squares

    def of_head(self, head: Head, name: str, dtype: torch.dtype) -> Iterable[dict[str, Tensor]]:
        """Return the sum of squares of the gradients of a head's parameter in this basis."""
        gradient = head.gradient(name, None if self.outputs is None else self.outputs[0])
        return replace(self, outputs=None).of_gradients([gradient.to(dtype)])

    def of_matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the sum of squares of ``[P, G, O, I]`` in this basis, ``[G, O, I]``."""
        rows = rotated(rearrange(rows, "p g o i -> p o g i"), self.inputs)
        rows = rotated(rearrange(rows, "p o g i -> p i g o"), self.outputs)
        squares = squared_sum(rows.flatten(1)).reshape(rows.shape[1:])
        return {MOMENT: rearrange(squares, "i g o -> g o i")}


def eigenbases(stack: Block, known: Set[tuple[ParameterView, ...]]) -> dict[Stack, Tensor]:
    """Return the eigenbases of a stack's blocks that are Kronecker products, but for known ones.

    A sum of products gets that of the first one, or the standard basis where others are diagonal.
    """
    bases = {}
    parts = [stack] if known.isdisjoint(block.views for block in stack.singles) else stack.parts
    for block in parts:
        if block.views in known:
            continue
        name = f"A factor of '{', '.join(block.names)}'"
        for kind, factor in zip((BASIS_OUTPUTS, BASIS_INPUTS), _axes(block), strict=True):
            if factor is not None:
                bases[block.key(kind)] = factor.eigh(name=name)[1].tensor
    return bases


def _axes(block: Block) -> tuple[Factor | None, Factor | None]:
    """Return the factors whose eigenvectors are the basis, ``None`` for the standard basis."""
    first, *others = block.terms
    outputs, inputs = (
        None if factor is None or factor.is_diagonal else factor
        for factor in (first.gradients, first.inputs)
    )
    for other in others:
        is_diagonal = other.inputs is not None and other.inputs.is_diagonal
        if is_diagonal and not first.inputs.is_diagonal:
            # those of lookups are the outputs of a head with the same weight
            if relation(first.shape, other.shape) == "transposed":
                outputs = None
            else:
                inputs = None
    return outputs, inputs
