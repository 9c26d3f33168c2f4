"""Turns sums over the data into structured matrices on the parameters."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape, relation, total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import BlockSpec, LayerUse
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator, about
from curvlinops.structured.factor import Factor
from curvlinops.structured.kronecker import (
    KroneckerProductLinearOperator,
    SumOfKroneckersLinearOperator,
)
from curvlinops.structured.layout import ParameterView


class Product(NamedTuple):
    """A Kronecker product ``B (x) A``, one of those whose sum is a block.

    Attributes:
        kind: Its shape.
        gradients: B, the second moment of output gradients.
        inputs: A, the second moment of inputs; ``None`` for biases, whose inputs are ones.
    """

    kind: KroneckerShape
    gradients: Factor
    inputs: Factor | None = None

    @property
    def factors(self) -> list[Factor]:
        """B, and A if there is one."""
        return [self.gradients] + ([] if self.inputs is None else [self.inputs])


class BlockFactors(NamedTuple):
    """The matrices of a block.

    Attributes:
        block: The block.
        products: The Kronecker products whose sum it is.
        matrix: If it has none: matrices ``[G, n, n]`` of equal parts of the parameter, or their
            diagonals ``[G, n]``.
    """

    block: BlockSpec
    products: tuple[Product, ...] = ()
    matrix: Tensor | None = None

    def operator(self) -> StructuredLinearOperator:
        """Return the operator on the block's entries, in the order of the first product."""
        if self.matrix is not None:
            return KroneckerProductLinearOperator(_factor(self.matrix))
        terms = []
        for product in self.products:
            factors = product.factors
            if relation(self.products[0].kind, product.kind) == "transposed":
                factors.reverse()
            terms.append(KroneckerProductLinearOperator(*factors))
        return terms[0] if len(terms) == 1 else SumOfKroneckersLinearOperator(terms)


def normalize(
    sums: FactorSums, scale: float, without: Collection[tuple[ParameterView, ...]] = ()
) -> list[BlockFactors]:
    """Turn sums into means.

    Args:
        sums: The sums.
        scale: The risk's normalization c.
        without: The slices of blocks whose Kronecker products are not needed.
    """
    space, blocks = sums.space, []
    uses: dict[ParameterView, list[LayerUse]] = {}
    for use in sums.uses.known:
        uses.setdefault(use.slice, []).append(use)
    gradients: dict[tuple[LayerUse, ...], Factor] = {}  # biases share those of their weights
    for block in sums.blocks:
        products = []
        for kind in block.kinds if block.slices not in without else ():
            own = _sources(block.slices[0], kind, uses)
            if own not in gradients:
                gradients[own] = _gradient_factor(sums, own, kind, scale)
            size = kind.inputs + len(block.names) - 1
            inputs = None if kind.is_bias else _input_factor(sums, own, size)
            products.append(Product(kind, gradients[own], inputs))
        matrix = sums.tensors.get((block.names[0], "matrix"))
        if not block.kinds:
            size = prod(space.shapes[block.names[0]])
            matrix = _zeros(size, space) if matrix is None else scale * matrix
        blocks.append(BlockFactors(block, tuple(products), matrix))
    return blocks


def _sources(
    own: ParameterView, kind: KroneckerShape, uses: Mapping[ParameterView, Iterable[LayerUse]]
) -> tuple[LayerUse, ...]:
    """Return the uses whose sums are added up for the factors of a slice."""
    sources: dict[LayerUse, None] = {}
    for use in uses[own]:
        if use.kind == kind and kind.is_bias and use.shares_gradients:
            weights = [weight for weight in uses[use.partner] if weight.partner == own]
            sources |= dict.fromkeys(weights)
        elif use.kind == kind:
            sources[use] = None
    # in the same order, so with the same rounding, in all processes
    return tuple(sources) if len(sources) == 1 else tuple(sorted(sources, key=repr))


def _gradient_factor(
    sums: FactorSums, uses: tuple[LayerUse, ...], kind: KroneckerShape, scale: float
) -> Factor:
    """Return B; the diagonal of the identity if nothing was backpropagated."""
    if sums.options.fisher_type is FisherType.FORWARD_ONLY:
        space = sums.space
        ones = torch.ones(kind.groups, kind.outputs, dtype=space.dtype, device=space.device)
        return _factor(ones)
    return _factor(scale * total(sums.tensors[use, "B"] for use in uses))


def _input_factor(sums: FactorSums, uses: tuple[LayerUse, ...], size: int) -> Factor:
    """Return A of so many inputs; the last input is that of the bias, which may be left out."""
    tensors = [sums.tensors[use, "A"] for use in uses]
    tensors = [x[:, :size] if x.ndim == 2 else x[:, :size, :size] for x in tensors]
    count = total(sums.tensors[use, "count"] for use in uses)
    # zeros for no input at all; with decay, counts are below one, too
    return _factor(total(tensors) / count.masked_fill(count == 0, 1.0))


def _factor(matrix: Tensor) -> Factor:
    return Factor(matrix, symmetric=True, psd=True)


def _zeros(size: int, space: ParameterSpace) -> Tensor:
    return torch.zeros(1, size, dtype=space.dtype, device=space.device)


def assemble(
    factors: Iterable[BlockFactors],
    space: ParameterSpace,
    build: Callable[[BlockFactors], StructuredLinearOperator],
) -> BlockDiagonalLinearOperator:
    """Return the matrix of all blocks.

    Args:
        factors: The matrices of the blocks.
        space: All parameters.
        build: Makes a structured operator of one block.
    """
    factors = list(factors)
    layouts = [each.block.layout for each in factors]
    if sum(layout.size for layout in layouts) < space.dim:
        # entries that no layer uses get zero blocks, so that inverses damp them, too
        zero = list(_unused_blocks([view for each in layouts for view in each.views], space))
        factors += [BlockFactors(each, matrix=_zeros(each.layout.size, space)) for each in zero]
        layouts += [each.layout for each in zero]
    operators = []
    for each in factors:
        with about(each.block.names):
            operators.append(build(each))
    return BlockDiagonalLinearOperator(operators, space, layouts)


def _unused_blocks(views: Sequence[ParameterView], space: ParameterSpace) -> Iterator[BlockSpec]:
    """Yield blocks of the entries of parameters that are in none of the given views."""
    for name, shape in space.shapes.items():
        free = torch.ones(1, prod(shape), dtype=torch.bool, device="cpu")
        for view in views:
            if view.name == name:
                view.of(free).fill_(False)
        if bool(free.any()):
            boxes = _boxes(free.view(*shape))
            yield BlockSpec(tuple(ParameterView(name, *box) for box in boxes), "zero")


def _boxes(free: Tensor) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Yield sizes, strides and offsets of boxes that make up the true entries of a mask."""
    if free.ndim == 0:
        if bool(free):
            yield (), (), 0
        return
    offset, stride = 0, prod(free.shape[1:])
    slabs, counts = free.unique_consecutive(dim=0, return_counts=True)
    for slab, count in zip(slabs, counts.tolist(), strict=True):
        for sizes, strides, start in _boxes(slab):
            yield (count, *sizes), (stride, *strides), offset + start
        offset += count * stride
