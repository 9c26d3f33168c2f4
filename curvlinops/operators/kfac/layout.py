"""Turns sums over the data into structured matrices on the parameters."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.factors import Kind, relation, total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import BlockSpec, LayerUse, Shapes
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator, about
from curvlinops.structured.factor import Factor
from curvlinops.structured.kronecker import (
    KroneckerProductLinearOperator,
    SumOfKroneckersLinearOperator,
)
from curvlinops.structured.layout import Layout, ParameterView


class Product(NamedTuple):
    """A Kronecker product ``B (x) A``, one of those whose sum is a block.

    Attributes:
        kind: Its shape.
        gradients: B, the second moment of output gradients.
        inputs: A, the second moment of inputs; ``None`` for biases, whose inputs are ones.
    """

    kind: Kind
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
            inputs = None if kind.shift else _input_factor(sums, own, size)
            products.append(Product(kind, gradients[own], inputs))
        matrix = sums.tensors.get((block.names[0], "matrix"))
        if not block.kinds:
            size = prod(space.shapes[block.names[0]])
            matrix = _zeros(size, space) if matrix is None else scale * matrix
        blocks.append(BlockFactors(block, tuple(products), matrix))
    return blocks


def _sources(
    own: ParameterView, kind: Kind, uses: Mapping[ParameterView, Iterable[LayerUse]]
) -> tuple[LayerUse, ...]:
    """Return the uses whose sums are added up for the factors of a slice."""
    sources: dict[LayerUse, None] = {}
    for use in uses[own]:
        if use.kind == kind and kind.shift and use.shares_gradients:
            weights = [weight for weight in uses[use.partner] if weight.partner == own]
            sources |= dict.fromkeys(weights)
        elif use.kind == kind:
            sources[use] = None
    # in the same order, so with the same rounding, in all processes
    return tuple(sources) if len(sources) == 1 else tuple(sorted(sources, key=repr))


def _gradient_factor(
    sums: FactorSums, uses: tuple[LayerUse, ...], kind: Kind, scale: float
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


#: Operators by the names of their parameters.
Blocks = dict[tuple[str, ...], StructuredLinearOperator]


def assemble(
    factors: Iterable[BlockFactors],
    space: ParameterSpace,
    build: Callable[[BlockFactors], StructuredLinearOperator],
) -> Blocks:
    """Return all blocks as operators on their parameters.

    Args:
        factors: The matrices of the blocks.
        space: All parameters.
        build: Makes a structured operator on the entries of one block.
    """
    by_names: dict[tuple[str, ...], list[BlockFactors]] = {}
    for each in factors:
        by_names.setdefault(each.block.names, []).append(each)
    blocks: Blocks = {}
    for names, own in by_names.items():
        own_space = space.restricted(names)
        specs = tuple(each.block for each in own)
        layouts, unused = _layouts(specs, tuple(own_space.shapes.items()))
        if unused.views:  # these entries have their share of damping
            layouts = [*layouts, unused]
            zero = BlockSpec(unused.views, "zero")
            own = [*own, BlockFactors(zero, matrix=_zeros(unused.size, space))]
        with about(names):
            operators = [build(each) for each in own]
        blocks[names] = BlockDiagonalLinearOperator(operators, own_space, layouts)
    return blocks


@lru_cache(maxsize=1024)  # the same blocks come again with each inverse
def _layouts(blocks: tuple[BlockSpec, ...], shapes: Shapes) -> tuple[list[Layout], Layout]:
    """Return where the entries of blocks are in their parameters, and the entries of no block."""
    layouts = [
        Layout(each.views, each.kinds[0].groups * each.kinds[0].outputs if each.kinds else 1)
        for each in blocks
    ]
    if sum(layout.size for layout in layouts) == sum(prod(shape) for _, shape in shapes):
        return layouts, Layout(())
    views = [view for layout in layouts for view in layout.views]
    unused: list[ParameterView] = []
    for name, shape in shapes:
        unused += _unused_views(name, shape, [view for view in views if view.name == name])
    return layouts, Layout(tuple(unused))


def _unused_views(
    name: str, shape: Sequence[int], views: Iterable[ParameterView]
) -> Iterator[ParameterView]:
    """Yield views of all entries of a parameter that are in none of the given views."""
    free = torch.ones(1, prod(shape), dtype=torch.bool, device="cpu")
    for view in views:
        view.of(free).fill_(False)
    for box in _boxes(free.view(*shape)):
        yield ParameterView(name, *box)


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
