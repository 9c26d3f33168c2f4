"""Second moments of gradients in the eigenbasis of a Kronecker product."""

from collections.abc import Iterable, Set
from dataclasses import dataclass, replace

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, KroneckerShape, relation, rotated
from curvlinops.layers.gradients import squared_sum
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

    shape: KroneckerShape
    #: The basis of their columns, ``[G, O, O]``, and of their rows, ``[G, I, I]``.
    outputs: Tensor | None
    inputs: Tensor | None
    has_bias: bool

    @classmethod
    def of_block(cls, block: Block, outputs: Tensor | None, inputs: Tensor | None) -> "Basis":
        """Return the basis of a block, or of a stack of several."""
        return cls(block.terms[0].shape, outputs, inputs, len(block.singles[0].views) > 1)

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
        squares = gradient.squares_in_basis(self.outputs, self.inputs, self.has_bias)
        return None if squares is None else [{MOMENT: squares}]

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
