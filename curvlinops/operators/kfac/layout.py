"""Turns sums over the data into structured matrices on the parameters."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape
from curvlinops.layers.gradients import total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import (
    FIT_INPUTS,
    FIT_OUTPUTS,
    GRADIENTS,
    INPUT_COUNT,
    MATRIX,
    MOMENT,
    Block,
    Key,
    LayerUse,
    Term,
    moment_factor,
)
from curvlinops.operators.kfac.options import FisherType, FitType
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import (
    BlockDiagonalLinearOperator,
    RemoteLinearOperator,
    about,
)
from curvlinops.structured.factor import Factor
from curvlinops.structured.layout import ParameterView


def with_matrices(sums: FactorSums, needed: Iterable[Block] | None = None) -> list[Block]:
    """Return some blocks, or all, with their matrices, which share memory with the means."""
    space, blocks = sums.space, []
    uses: dict[ParameterView, list[LayerUse]] = {}
    for use in sums.uses.known:
        uses.setdefault(use.view, []).append(use)
    by_use = sums.keys_of_inputs()
    gradients: dict[tuple[LayerUse, ...], Factor] = {}  # biases share the factors of their weights
    inputs: dict[tuple, Factor] = {}  # so do layers with the same inputs
    for block in sums.blocks if needed is None else needed:
        if not sums.is_here(block.names[0]):
            blocks.append(replace(block, is_here=False))
            continue
        if not block.terms:
            matrix = sums.tensors.get((block.names[0], MATRIX))
            size = prod(space.shapes[block.names[0]])
            blocks.append(replace(block, matrix=_zeros(size, space) if matrix is None else matrix))
            continue
        terms = []
        for shape, *_ in block.terms:
            sources = _sources(block.views[0], shape, uses)
            if sources not in gradients:
                gradients[sources] = _gradient_factor(sums, sources, shape)
            A = None
            if not shape.is_bias:
                size = shape.inputs + len(block.names) - 1
                keys = tuple(key for use in sources for key in by_use[use])
                if (A := inputs.get((keys, size))) is None:
                    A = inputs[keys, size] = _input_factor(sums, keys, size)
            terms.append(_fitted(sums, block, Term(shape, gradients[sources], A)))
        matrix = sums.tensors.get((block.views, MOMENT))
        basis = None if matrix is None else sums.bases[block.views]
        blocks.append(replace(block, terms=tuple(terms), matrix=matrix, basis=basis))
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


def _gradient_factor(sums: FactorSums, uses: tuple[LayerUse, ...], shape: KroneckerShape) -> Factor:
    """Return B; the diagonal of the identity if nothing was backpropagated."""
    if sums.options.fisher_type is FisherType.FORWARD_ONLY:
        space = sums.space
        ones = torch.ones(shape.groups, shape.outputs, dtype=space.dtype, device=space.device)
        return moment_factor(ones)
    return moment_factor(total(sums.tensors[use, GRADIENTS] for use in uses))


def _input_factor(sums: FactorSums, keys: tuple[Key, ...], size: int) -> Factor:
    """Return A of so many inputs; the last input is that of the bias, which may be left out."""
    tensors = [sums.tensors[key] for key in keys]
    counts = [sums.tensors[group, INPUT_COUNT] for group, _ in keys]
    ranks = total(counts).expand(len(tensors[0]))
    if len(keys) > 1:
        number = total(counts)
        number = number.masked_fill(number == 0, 1.0)
        tensors = [count / number * x for count, x in zip(counts, tensors, strict=True)]
    if any(x.shape[1] > size for x in tensors):
        tensors = [x[:, :size] if x.ndim == 2 else x[:, :size, :size] for x in tensors]
    return moment_factor(total(tensors), ranks)


def _fitted(sums: FactorSums, block: Block, term: Term) -> Term:
    """Return a block's term with the factors of another fit than KFAC's, if there are any."""
    B, A = (sums.tensors.get((block.views, kind)) for kind in (FIT_OUTPUTS, FIT_INPUTS))
    if A is not None and sums.options.fit is FitType.SHAMPOO:
        trace = A.sum(-1) if A.ndim == 2 else A.diagonal(dim1=1, dim2=2).sum(-1)
        trace = trace.masked_fill(trace == 0, 1.0)
        A = A / trace.reshape(-1, *(1,) * (A.ndim - 1))
    return term._replace(
        gradients=term.gradients if B is None else moment_factor(B),
        inputs=term.inputs if A is None else moment_factor(A),
    )


def _zeros(size: int, space: ParameterSpace) -> Tensor:
    return torch.zeros(1, size, dtype=space.dtype, device=space.device)


def assemble(
    blocks: Iterable[Block],
    sums: FactorSums,
    build: Callable[[Block], StructuredLinearOperator] = Block.operator,
) -> BlockDiagonalLinearOperator:
    """Return the matrix of all blocks, each turned into a structured operator by ``build``."""
    blocks, space = list(blocks), sums.space
    ranks = sums.owning_ranks
    if sum(block.layout.size for block in blocks) < space.dim:
        # entries that no layer uses get zero blocks, so that inverses damp them, too
        views = [view for block in blocks for view in block.layout.views]
        blocks += [
            replace(block, is_here=ranks.rank == 0) for block in _unused_blocks(views, space)
        ]
    operators: list[StructuredLinearOperator] = []
    with ranks.raise_on_all_ranks():
        for block in blocks:
            if block.is_here:
                operators.append(_built(block, build))
            else:
                size = block.layout.size
                operators.append(RemoteLinearOperator(size, space.dtype, space.device))
    layouts = [block.layout for block in blocks]
    return BlockDiagonalLinearOperator(operators, space, layouts, ranks)


def _built(
    block: Block, build: Callable[[Block], StructuredLinearOperator]
) -> StructuredLinearOperator:
    """Return the operator of a block; errors name it, or one of the blocks that it stacks."""
    if not block.members:
        with about(block.names):
            return build(block)
    try:
        return build(block)
    except (ValueError, RuntimeError):
        for member in block.members:
            _built(member, build)
        raise


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
