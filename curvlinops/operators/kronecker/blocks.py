"""Turns sums over the data into structured matrices."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.covariance import mirror
from curvlinops.layers.factors import Kind, relation
from curvlinops.layers.outer import IN_ORDER
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kronecker.layout import unused_views, view_of
from curvlinops.operators.kronecker.options import FisherType, Options
from curvlinops.operators.kronecker.plan import Block
from curvlinops.operators.kronecker.sums import Sums
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
    inputs: Factor | None


class BlockFactors(NamedTuple):
    """What a block consists of.

    Attributes:
        block: The block.
        products: Its Kronecker products, whose sum it is.
        matrix: If it has none: matrices ``[G, D, D]`` of its parts, or their diagonals ``[G, D]``.
    """

    block: Block
    products: tuple[Product, ...] = ()
    matrix: Tensor | None = None


def normalized(
    sums: Sums, scale: float, options: Options, without: Collection[int] = ()
) -> list[BlockFactors]:
    """Turn sums into means.

    Args:
        sums: The sums.
        scale: The risk's normalization c.
        options: The options of the approximation.
        without: The numbers of blocks whose products nobody needs.
    """
    wanted = {key: own for key, own in sums.products.items() if key[0] not in without}
    if options.fisher_type is FisherType.FORWARD_ONLY:
        gradients = {
            key: Factor(own.inputs.new_ones(key[1].groups, key[1].outputs), psd=True)
            for key, own in wanted.items()
        }
    else:
        known = {k: own.gradients for k, own in wanted.items() if own.gradients is not None}
        gradients = _factors(known, lambda batch, keys, sizes: scale * batch)

    def mean(batch: Tensor, keys: list[tuple[int, Kind]], sizes: list[int]) -> Tensor:
        counts = [sums.products[key].count.expand(n) for key, n in zip(keys, sizes, strict=True)]
        # no input at all: zeros; with decay, counts are below one, too
        count = torch.cat(counts)
        count = count.masked_fill(count == 0, 1.0).to(batch)
        return batch / count.view(-1, *[1] * (batch.ndim - 1))

    weights = {key: own.inputs for key, own in wanted.items() if not key[1].shift}
    inputs = _factors(weights, mean)
    found = []
    for number, block in enumerate(sums.blocks):
        twin, products = block.twin, []
        for kind in () if number in without else block.kinds:
            own = (number, kind) if twin is None else (twin, sums.blocks[twin].kinds[0])
            products.append(Product(kind, gradients[own], inputs.get((number, kind))))
        matrix = sums.matrices.get(number)
        matrix = None if matrix is None else _mirrored(scale * matrix)
        found.append(BlockFactors(block, tuple(products), matrix))
    return found


def _factors(
    sums: dict[tuple[int, Kind], Tensor],
    change: Callable[[Tensor, list[tuple[int, Kind]], list[int]], Tensor],
) -> dict[tuple[int, Kind], Factor]:
    """Return factors of sums.

    Args:
        sums: The sums ``[G, n, n]``, or their diagonals ``[G, n]``.
        change: Returns a new tensor for a batch of these, given their keys and sizes G.
    """
    keys, found = list(sums), {}
    for some, sizes, batch in batches(list(sums.values())):
        own = [keys[i] for i in some]
        new = _mirrored(change(batch, own, sizes))
        found |= {key: _factor(x) for key, x in zip(own, new.split(sizes), strict=True)}
    return found


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
            own = [*own, BlockFactors(Block(names, "zero"), matrix=zeros)]
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
    blocks: tuple[Block, ...], shapes: tuple[tuple[str, tuple[int, ...]], ...]
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


def _layout(block: Block, shapes: Mapping[str, Sequence[int]]) -> Layout:
    """Return where a block's entries are: of several inputs, the last one is the bias."""
    if not block.kinds:
        [name] = block.names
        return Layout((view_of(name, shapes[name], None, IN_ORDER),))
    kind = block.kinds[0]
    arrangements = kind.arrangement, IN_ORDER
    views = [
        view_of(name, shapes[name], place, arrangement)
        for name, place, arrangement in zip(block.names, block.places, arrangements, strict=False)
    ]
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
