"""Second moments of gradients in the eigenbasis of a Kronecker product."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from curvlinops.layers.factors import (
    FactoredGradient,
    KroneckerShape,
    relation,
    squares_of_rows,
    total,
)
from curvlinops.layers.gradients import sum_of
from curvlinops.operators.kfac.blocks import Block
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import Factor, identity
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import recorded


@recorded
@dataclass(frozen=True)
class Basis:
    """An orthogonal basis of a block's matrices ``[G, O, I]``.

    Attributes:
        shape: The shape of these matrices.
        outputs: The basis of their columns, ``[G, O, O]``; ``None`` for the standard basis.
        inputs: The basis of their rows, ``[G, I, I]``; ``None`` for the standard basis.
        has_bias: Whether the bias is the last column.
    """

    shape: KroneckerShape
    outputs: Tensor | None
    inputs: Tensor | None
    has_bias: bool

    def map(self, function: Callable[[Tensor], Tensor]) -> "Basis":
        """Apply a function to the bases of columns and of rows."""
        outputs = None if self.outputs is None else function(self.outputs)
        return replace(
            self, outputs=outputs, inputs=None if self.inputs is None else function(self.inputs)
        )

    def diagonal(self, eigenvalues: Tensor) -> StructuredLinearOperator:
        """Return the matrix with this eigenbasis and some eigenvalues ``[G, O, I]``.

        The basis may be that of several blocks, with all of their groups.
        """
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

    def second_moment(self, gradients: Sequence[FactoredGradient]) -> Tensor:
        """Return the sum over samples of squared gradients in this basis, ``[G, O, I]``.

        Args:
            gradients: Those of all uses of the block's weight on a batch.
        """
        whole = sum_of(list(gradients))
        if KroneckerShape.of(whole, self.shape.is_bias) == self.shape:
            return whole.squares_in_basis(self.outputs, self.inputs, self.has_bias)
        squares: Tensor | float = 0.0
        for some in whole.slices():
            weight, bias = self.shape.view.of(whole.rows(some).flatten(0, 1).flatten(1)), None
            if self.has_bias:
                bias = total(x.output_gradients()[:, some].sum(2) for x in gradients).flatten(0, 1)
            squares = squares + self.second_moment_of_rows(weight, bias)
        return squares

    def second_moment_of_rows(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the sum of squared gradients in this basis, ``[G, O, I]``.

        Args:
            weight: Gradients of the entries that a layer uses, ``[P, *]``, in the order of the
                matrices.
            bias: Gradients of its bias, ``[P, *]``; ``None`` if the block has none.
        """
        matrix = self.shape.groups, self.shape.outputs
        rows = weight.reshape(len(weight), *matrix, self.shape.inputs)
        if bias is not None:
            rows = torch.cat([rows, bias.reshape(len(bias), *matrix, 1)], dim=3)
        return squares_of_rows(rows, self.outputs, self.inputs)


def eigenbases(blocks: Iterable[Block]) -> dict[tuple[ParameterView, ...], Basis]:
    """Return the eigenbases of blocks that are Kronecker products, by their views.

    A block that is a sum of Kronecker products gets the eigenbasis of the first one. Axes along
    which another one is diagonal keep the standard basis.

    Args:
        blocks: Single blocks, and stacks.
    """
    bases = {}
    for stack in blocks:
        members, name = stack.members or (stack,), f"A factor of '{', '.join(stack.names)}'"
        pairs = zip(
            *(
                [None] * len(members)
                if factor is None
                else factor.eigh(name=name)[1].tensor.tensor_split(len(members))
                for factor in _axes(stack)
            ),
            strict=True,
        )
        for block, pair in zip(members, pairs, strict=True):
            bases[block.views] = Basis(block.terms[0].shape, *pair, len(block.views) > 1)
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
