"""Turns sums over the data into structured matrices."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.covariance import mirror
from curvlinops.layers.factors import Kind, relation, total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.layout import unused_views
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.plan import BlockSpec
from curvlinops.operators.kfac.sums import FactorSums, Sources
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator, about
from curvlinops.structured.diagonal import DiagonalLinearOperator
from curvlinops.structured.factor import Factor
from curvlinops.structured.kronecker import (
    KroneckerProductLinearOperator,
    SumOfKroneckersLinearOperator,
)
from curvlinops.structured.layout import Layout, ParameterView
from curvlinops.structured.linalg import batches


class Product(NamedTuple):
    """A Kronecker product of a block.

    Attributes:
        kind: Its shape.
        gradients: B, the second moment of output gradients.
        inputs: A, the second moment of inputs; ``None`` for biases, whose inputs are ones.
    """

    kind: Kind
    gradients: Factor
    inputs: Factor | None = None


class BlockFactors(NamedTuple):
    """What a block consists of.

    Attributes:
        block: The block.
        products: Its Kronecker products, whose sum it is.
        matrix: If it has none: matrices ``[G, D, D]`` of its parts, or their diagonals ``[G, D]``.
    """

    block: BlockSpec
    products: tuple[Product, ...] = ()
    matrix: Tensor | None = None


def normalized(
    sums: FactorSums,
    scale: float,
    space: ParameterSpace,
    options: Options,
    in_eigenbases: bool,
) -> list[BlockFactors]:
    """Turn sums into means.

    Args:
        sums: The sums.
        scale: The risk's normalization c.
        space: All parameters.
        options: The options of the approximation.
        in_eigenbases: Whether blocks that have an eigenbasis get no products. Their entries are in
            the order of the basis then.
    """
    planned = list(zip(sums.plan.blocks, sums.plan.sources, strict=True))
    bases = sums.bases if in_eigenbases else {}
    wanted = [
        (kind, own, kind.inputs + len(block.names) - 1)
        for block, sources in planned
        if block.slices not in bases
        for kind, own in zip(block.kinds, sources, strict=True)
    ]
    inputs = iter(_input_factors(sums, [(own, n) for kind, own, n in wanted if not kind.shift]))
    kinds = {own: kind for kind, own, _ in wanted}
    if options.fisher_type is FisherType.FORWARD_ONLY:
        like = _zeros(0, space)
        gradients = {own: _factor(like.new_ones(k.groups, k.outputs)) for own, k in kinds.items()}
    else:  # biases share the factors of their weights
        totals = [_total(sums, own, "B") for own in kinds]
        gradients = dict(zip(kinds, _factors(totals, scale), strict=True))
    blocks = []
    for block, sources in planned:
        products = [
            Product(kind, gradients[own], None if kind.shift else next(inputs))
            for kind, own in zip(block.kinds, sources, strict=True)
            if block.slices not in bases
        ]
        matrix = sums.tensors.get((block.names[0], "matrix"))
        matrix = None if matrix is None else _mirrored(scale * matrix)
        if block.slices in bases:
            block = replace(block, kinds=(bases[block.slices].kind,))
        blocks.append(BlockFactors(block, tuple(products), matrix))
    return blocks


def _input_factors(sums: FactorSums, wanted: Sequence[tuple[Sources, int]]) -> list[Factor]:
    """Return means of inputs' outer products, given the uses and how many rows there are."""
    if not wanted:
        return []
    counts = torch.stack([_total(sums, own, "count") for own, _ in wanted])
    # no input at all: zeros; with decay, counts are below one, too
    weights = counts.masked_fill(counts == 0, 1.0).reciprocal()
    # the last row is that of the bias, which is left out if the bias has a block of its own
    return _factors([_total(sums, own, "A", size) for own, size in wanted], weights)


def _total(sums: FactorSums, uses: Sources, name: str, size: int | None = None) -> Tensor:
    """Return the sum over uses, or its first rows and columns."""
    tensors = [sums.tensors[use, name] for use in uses]
    if size is not None:
        tensors = [x[..., :size] if x.ndim == 2 else x[:, :size, :size] for x in tensors]
    if len({x.ndim for x in tensors}) > 1:
        tensors = [x if x.ndim < 3 else x.diagonal(dim1=-2, dim2=-1) for x in tensors]
    return total(tensors)


def _factors(sums: Sequence[Tensor], weights: Tensor | float) -> list[Factor]:
    """Return factors of sums.

    Args:
        sums: The sums ``[G, n, n]``, or their diagonals ``[G, n]``.
        weights: By what they are multiplied, one number each, or one for all.
    """
    factors: dict[int, Factor] = {}
    for some, sizes, batch in batches(sums):
        weight = weights
        if isinstance(weights, Tensor):
            groups = torch.tensor(sizes, device=weights.device)
            weight = weights[some].repeat_interleave(groups, output_size=len(batch)).to(batch)
            weight = weight.view(-1, *[1] * (batch.ndim - 1))
        matrices = _mirrored(weight * batch).split(sizes)
        factors |= {i: _factor(matrix) for i, matrix in zip(some, matrices, strict=True)}
    return [factors[i] for i in range(len(sums))]


def _mirrored(matrix: Tensor) -> Tensor:
    """Return what nobody else has without the asymmetry of rounding."""
    if matrix.ndim == 3:
        # it is a sum of outer products, which some processors do not round symmetrically
        mirror(matrix)
    return matrix


def _factor(matrix: Tensor) -> Factor:
    return Factor(matrix, symmetric=True, psd=True)


#: Operators by the names of their parameters.
Blocks = dict[tuple[str, ...], StructuredLinearOperator]

#: Turns what a block consists of into a structured operator on its entries.
Build = Callable[[BlockFactors], StructuredLinearOperator]


def assemble(factors: Sequence[BlockFactors], space: ParameterSpace, build: Build) -> Blocks:
    """Return all blocks, on their parameters.

    Args:
        factors: What the blocks consist of.
        space: All parameters.
        build: Makes one block.
    """
    blocks: Blocks = {}
    for names, own in _by_names(factors):
        own_space = space.restricted(names)
        layouts, unused = _layouts(
            tuple(each.block for each in own), tuple(own_space.shapes.items())
        )
        if unused.views:
            layouts = [*layouts, unused]
            # they have their share of damping
            zeros = _zeros(unused.size, space).unsqueeze(0)
            own = [*own, BlockFactors(BlockSpec(names, "zero"), matrix=zeros)]
        with about(names):
            operators = [build(each) for each in own]
        blocks[names] = BlockDiagonalLinearOperator(operators, own_space, layouts)
    return blocks


def _by_names(factors: Iterable[BlockFactors]) -> Iterator[tuple[tuple, list[BlockFactors]]]:
    groups: dict[tuple[str, ...], list[BlockFactors]] = {}
    for each in factors:
        groups.setdefault(each.block.names, []).append(each)
    return iter(groups.items())


@lru_cache(maxsize=1024)  # the same blocks come again with each inverse
def _layouts(
    blocks: tuple[BlockSpec, ...], shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> tuple[list[Layout], Layout]:
    """Return where the entries of blocks are in their parameters, and the entries of no block."""
    layouts = [_layout(block, dict(shapes)) for block in blocks]
    if sum(layout.size for layout in layouts) == sum(prod(shape) for _, shape in shapes):
        return layouts, Layout(())
    views = [view for layout in layouts for view in layout.views]
    unused: list[ParameterView] = []
    for name, shape in shapes:
        unused += unused_views(name, shape, [view for view in views if view.name == name])
    return layouts, Layout(tuple(unused))


def _layout(block: BlockSpec, shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Return where a block's entries are: of several inputs, the last one is the bias."""

    def all_of(name: str) -> ParameterView:
        return ParameterView.of_axes(name, [(prod(shapes[name]), 1)])

    if not block.kinds:
        [name] = block.names
        return Layout((all_of(name),))
    kind, biases = block.kinds[0], block.slices[1:]
    views = [kind.view, *(all_of(name) if place is None else place for name, place in biases)]
    return Layout(tuple(views), kind.groups * kind.outputs)


def _zeros(size: int, space: ParameterSpace) -> Tensor:
    return torch.zeros(size, dtype=space.dtype, device=space.device)


def operator_of(factors: BlockFactors, space: ParameterSpace) -> StructuredLinearOperator:
    """Return the operator on a block's entries."""
    if factors.products:
        return summed(factors.products)
    if factors.matrix is not None:
        return KroneckerProductLinearOperator(_factor(factors.matrix))
    return DiagonalLinearOperator(_zeros(prod(space.shapes[factors.block.names[0]]), space))


def factors_of(product: Product) -> list[Factor]:
    """Return the one or two factors of a product."""
    return [product.gradients] + ([] if product.inputs is None else [product.inputs])


def summed(products: Sequence[Product]) -> StructuredLinearOperator:
    """Return the sum of Kronecker products, in the order of the first one's entries."""
    terms = []
    for product in products:
        factors = factors_of(product)
        if relation(products[0].kind, product.kind) == "transposed":
            factors.reverse()
        terms.append(KroneckerProductLinearOperator(*factors))
    return terms[0] if len(terms) == 1 else SumOfKroneckersLinearOperator(terms)
