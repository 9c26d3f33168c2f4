"""Turns sums over the data into structured matrices on the parameters."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape
from curvlinops.layers.gradients import total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import Block, LayerUse, Term, moment_factor
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator, about
from curvlinops.structured.factor import Factor
from curvlinops.structured.layout import ParameterView


def normalize(
    sums: FactorSums, scale: float, without: Collection[tuple[ParameterView, ...]] = ()
) -> list[Block]:
    """Turn sums into means.

    Args:
        sums: The sums.
        scale: The risk's normalization c.
        without: The views of blocks whose Kronecker products are not needed.
    """
    space, blocks = sums.space, []
    uses: dict[ParameterView, list[LayerUse]] = {}
    for use in sums.uses.known:
        uses.setdefault(use.view, []).append(use)
    gradients: dict[tuple[LayerUse, ...], Factor] = {}  # biases share those of their weights
    for block in sums.blocks:
        if not block.terms:
            matrix = sums.tensors.get((block.names[0], "matrix"))
            size = prod(space.shapes[block.names[0]])
            matrix = _zeros(size, space) if matrix is None else scale * matrix
            blocks.append(replace(block, matrix=matrix))
            continue
        terms = []
        for shape, *_ in block.terms if block.views not in without else ():
            sources = _sources(block.views[0], shape, uses)
            if sources not in gradients:
                gradients[sources] = _gradient_factor(sums, sources, shape, scale)
            size = shape.inputs + len(block.names) - 1
            inputs = None if shape.is_bias else _input_factor(sums, sources, size)
            terms.append(Term(shape, gradients[sources], inputs))
        blocks.append(replace(block, terms=tuple(terms) or block.terms))
    return blocks


def _sources(
    view: ParameterView, shape: KroneckerShape, uses: Mapping[ParameterView, Iterable[LayerUse]]
) -> tuple[LayerUse, ...]:
    """Return the uses whose sums are added up for the factors of a view."""
    sources: dict[LayerUse, None] = {}
    for use in uses[view]:
        if use.shape == shape and shape.is_bias and use.shares_gradients:
            weights = [weight for weight in uses[use.partner] if weight.partner == view]
            sources |= dict.fromkeys(weights)
        elif use.shape == shape:
            sources[use] = None
    # in the same order, so with the same rounding, in all processes
    return tuple(sources) if len(sources) == 1 else tuple(sorted(sources, key=repr))


def _gradient_factor(
    sums: FactorSums, uses: tuple[LayerUse, ...], shape: KroneckerShape, scale: float
) -> Factor:
    """Return B; the diagonal of the identity if nothing was backpropagated."""
    if sums.options.fisher_type is FisherType.FORWARD_ONLY:
        space = sums.space
        ones = torch.ones(shape.groups, shape.outputs, dtype=space.dtype, device=space.device)
        return moment_factor(ones)
    return moment_factor(scale * total(sums.tensors[use, "B"] for use in uses))


def _input_factor(sums: FactorSums, uses: tuple[LayerUse, ...], size: int) -> Factor:
    """Return A of so many inputs; the last input is that of the bias, which may be left out."""
    tensors = [sums.tensors[use, "A"] for use in uses]
    tensors = [x[:, :size] if x.ndim == 2 else x[:, :size, :size] for x in tensors]
    count = total(sums.tensors[use, "count"] for use in uses)
    # zeros for no input at all; with decay, counts are below one, too
    return moment_factor(total(tensors) / count.masked_fill(count == 0, 1.0))


def _zeros(size: int, space: ParameterSpace) -> Tensor:
    return torch.zeros(1, size, dtype=space.dtype, device=space.device)


def assemble(
    blocks: Iterable[Block],
    space: ParameterSpace,
    build: Callable[[Block], StructuredLinearOperator],
) -> BlockDiagonalLinearOperator:
    """Return the matrix of all blocks.

    Args:
        blocks: The blocks, with their matrices.
        space: All parameters.
        build: Makes a structured operator of one block.
    """
    blocks = list(blocks)
    if sum(block.layout.size for block in blocks) < space.dim:
        # entries that no layer uses get zero blocks, so that inverses damp them, too
        blocks += list(_unused_blocks([v for block in blocks for v in block.layout.views], space))
    operators = []
    for block in blocks:
        with about(block.names):
            operators.append(build(block))
    layouts = [block.layout for block in blocks]
    return BlockDiagonalLinearOperator(operators, space, layouts)


def _unused_blocks(views: Sequence[ParameterView], space: ParameterSpace) -> Iterator[Block]:
    """Yield blocks of the entries of parameters that are in none of the given views."""
    for name, shape in space.shapes.items():
        free = torch.ones(1, prod(shape), dtype=torch.bool, device="cpu")
        for view in views:
            if view.name == name:
                view.of(free).fill_(False)
        if bool(free.any()):
            unused = tuple(ParameterView(name, *box) for box in _boxes(free.view(*shape)))
            size = sum(view.size for view in unused)
            yield Block(unused, "zero", matrix=_zeros(size, space))


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
