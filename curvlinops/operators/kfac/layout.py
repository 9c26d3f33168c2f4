"""Turns sums over the data into structured matrices on the parameters."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.gradients import total
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import (
    BASES,
    FIT_INPUTS,
    FIT_OUTPUTS,
    MATRIX,
    MOMENT,
    Block,
    Term,
    moment_factor,
)
from curvlinops.operators.kfac.eigenbasis import Basis
from curvlinops.operators.kfac.options import FisherType, FitType
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import RemoteLinearOperator, about
from curvlinops.structured.factor import Factor
from curvlinops.structured.layout import ParameterView


def matrices(sums: FactorSums) -> list[Block]:
    """Return all stacks of blocks with their matrices, which share memory with the means."""
    # biases share the factors of their weights, and layers those of the same inputs
    factors: dict[Hashable, Factor] = {}
    return [_with_matrices(stack, sums, factors) for stack in sums.structure.stacks]


def _with_matrices(stack: Block, sums: FactorSums, factors: dict[Hashable, Factor]) -> Block:
    space, singles = sums.space, stack.singles
    if not sums.placement.is_here(stack.names[:1]):
        return stack
    if not stack.terms:
        matrix = sums.tensors.get(sums.structure.place(MATRIX, stack.names[0]).stack)
        if matrix is None:
            matrix = _zeros(prod(space.shapes[stack.names[0]]), space, len(singles))
        return replace(stack, matrix=matrix)
    terms = []
    for term in stack.terms:
        of_gradients, of_inputs = term.of_gradients, term.of_inputs
        size = term.shape.inputs + len(singles[0].views) - 1
        if of_gradients not in factors:
            factors[of_gradients] = _gradient_factor(sums, term)
        if of_inputs and (of_inputs, size) not in factors:
            factors[of_inputs, size] = _input_factor(sums, term, size)
        A = factors[of_inputs, size] if of_inputs else None
        terms.append(_fitted(sums, stack, term._replace(gradients=factors[of_gradients], inputs=A)))
    matrix, basis = sums.tensors.get(stack.key(MOMENT)), None
    if matrix is not None:
        basis = Basis.of_block(stack, *(sums.tensors.get(stack.key(kind)) for kind in BASES))
    return replace(stack, terms=tuple(terms), matrix=matrix, basis=basis)


def _gradient_factor(sums: FactorSums, term: Term) -> Factor:
    """Return B; the diagonal of the identity if nothing was backpropagated."""
    if sums.options.fisher_type is FisherType.FORWARD_ONLY:
        sizes, space = (term.shape.groups, term.shape.outputs), sums.space
        return moment_factor(torch.ones(sizes, dtype=space.dtype, device=space.device))
    found = [sums.tensors[stack] for stack in term.of_gradients if stack in sums.tensors]
    return moment_factor(
        total(found) if found else _zeros(term.shape.outputs, sums.space, term.shape.groups)
    )


def _input_factor(sums: FactorSums, term: Term, size: int) -> Factor:
    """Return A of so many inputs; the last input is that of the bias, which may be left out."""
    stacks = [stack for stack in term.of_inputs if stack in sums.tensors]
    if not stacks:  # batches of an update may not use all layers
        return moment_factor(_zeros(size, sums.space, term.shape.groups))
    tensors = [sums.tensors[stack] for stack in stacks]
    counts = [sums.tensors[stack.counts] for stack in stacks]
    ranks = total(counts).repeat_interleave(len(tensors[0]) // len(counts[0]))
    if len(stacks) > 1:
        number = total(counts)
        number = number.masked_fill(number == 0, 1.0)
        pairs = zip(counts, tensors, strict=True)
        tensors = [(count / number).to(x) * x for count, x in pairs]
    if any(x.shape[1] > size for x in tensors):
        tensors = [x[:, :size] if x.ndim == 2 else x[:, :size, :size] for x in tensors]
    return moment_factor(total(tensors), ranks)


def _fitted(sums: FactorSums, block: Block, term: Term) -> Term:
    """Return a block's term with the factors of another fit than KFAC's, if there are any."""
    B, A = (sums.tensors.get(block.key(kind)) for kind in (FIT_OUTPUTS, FIT_INPUTS))
    if A is not None and sums.options.fit is FitType.SHAMPOO:
        trace = A.sum(-1) if A.ndim == 2 else A.diagonal(dim1=1, dim2=2).sum(-1)
        trace = trace.masked_fill(trace == 0, 1.0)
        A = A / trace.reshape(-1, *(1,) * (A.ndim - 1))
    return term._replace(
        gradients=term.gradients if B is None else moment_factor(B),
        inputs=term.inputs if A is None else moment_factor(A),
    )


def _zeros(size: int, space: ParameterSpace, number: int = 1) -> Tensor:
    return torch.zeros(number, size, dtype=space.dtype, device=space.device)


def assemble(
    blocks: Iterable[Block],
    sums: FactorSums,
    build: Callable[[Block], StructuredLinearOperator] = Block.operator,
) -> tuple:
    """Return the arguments of the matrix of all blocks, which ``build`` makes operators of."""
    blocks, space = list(blocks), sums.space
    ranks = sums.placement.team
    if sum(block.layout.size for block in blocks) < space.dim:
        # entries that no layer uses get zero blocks, so that inverses damp them, too
        views = [view for block in blocks for view in block.layout.views]
        unused = _unused_blocks(views, space)
        blocks += unused if ranks.rank == 0 else (replace(x, matrix=None) for x in unused)
    operators: list[StructuredLinearOperator] = []
    with ranks.raise_on_all_ranks():
        for block in blocks:
            if block.is_here:
                operators.append(_built(block, build))
            else:
                size = block.layout.size
                operators.append(RemoteLinearOperator(size, space.dtype, space.device))
    return operators, space, [block.layout for block in blocks], ranks


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
        for part in block.parts:
            _built(part, build)
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
