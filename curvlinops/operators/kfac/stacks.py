"""Stacks of equal blocks, which are computed together."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from curvlinops.operators.kfac.blocks import Block, Term, moment_factor
from curvlinops.operators.kfac.eigenbasis import Basis
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.factor import Factor
from curvlinops.structured.layout import connected

#: The largest number of entries of a stack's matrix. Larger ones gain nothing.
_LARGEST = 2**20


def stacked(sums: FactorSums, blocks: Sequence[Block]) -> list[Block]:
    """Return blocks with equal ones as stacks.

    Blocks that share factors are stacked with those that share equal ones, so that stacks share
    factors, too. The matrices of single blocks, and the means, become parts of those of stacks.

    Args:
        sums: The means.
        blocks: The blocks, with their matrices.
    """
    groups = connected(_connections(block) for block in blocks)
    equal: dict[Any, list[list[Block]]] = {}
    for unit in ([blocks[i] for i in group] for group in groups):
        equal.setdefault(_structure(unit), []).append(unit)
    out, join = list[Block](), _Join(sums)
    for units in equal.values():
        step = max(_LARGEST // max(map(_largest, units[0])), 1)
        for i in range(0, len(units), step):
            for members in zip(*units[i : i + step], strict=True):
                out.append(members[0] if len(members) == 1 else join.blocks(members))
    return out


def single(stacks: Iterable[Block]) -> list[Block]:
    """Return the blocks of stacks."""
    return list(chain.from_iterable(block.members or [block] for block in stacks))


def _connections(block: Block) -> list[Any]:
    """Return what blocks may share: factors, and the weight to which a bias belongs."""
    weight = [] if block.weight is None else [block.weight]
    return [block.views[0], *weight, *_factors(block)]


def _factors(block: Block) -> list[Factor]:
    return [factor for term in block.terms for factor in term.factors]


def _tensors(block: Block) -> list[Tensor]:
    """Return the tensors that a stack of a block needs."""
    if block.basis is not None:
        bases = block.basis.outputs, block.basis.inputs
        return [block.matrix, *(Q for Q in bases if Q is not None)]
    return [factor.tensor for factor in _factors(block)] if block.terms else [block.matrix]


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor is no part of larger matrices, which would stay in memory."""
    return tensor.is_contiguous() or tensor.mT.is_contiguous()


def _largest(block: Block) -> int:
    return max(1, block.layout.size, *(x.numel() for x in _tensors(block) if block.is_here))


def _structure(unit: Sequence[Block]) -> Any:
    """Return a key that is equal for blocks that can be stacked; the blocks if they cannot."""
    places: dict[Any, int] = {}
    parts = []
    for block in unit:
        single = len(block.terms) == 1 or (not block.terms and len(block.views) == 1)
        if not (single and block.is_here and all(map(_is_dense, _tensors(block)))):
            return tuple(unit)
        shapes = [term.shape for term in block.terms]
        kinds = ()
        if block.basis is not None:
            shapes.append(block.basis.shape)
            kinds = block.basis.outputs is None, block.basis.inputs is None, block.basis.has_bias
        parts.append(
            (
                len(block.views),
                *(shape._replace(view=None) for shape in shapes),
                *(x.shape for x in _tensors(block)),
                *kinds,
                *(places.setdefault(x, len(places)) for x in _connections(block)),
            )
        )
    return tuple(parts)


class _Join:
    """Makes stacks of blocks. Tensors of single blocks, and the means, become views of them."""

    def __init__(self, sums: FactorSums):
        self._sums = sums
        self._keys = {id(x): key for key, x in sums.tensors.items()}
        self._tensors: dict[tuple[int, ...], tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._factors: dict[tuple[Factor, ...], Factor] = {}

    def blocks(self, members: Sequence[Block]) -> Block:
        """Return a stack of equal blocks."""
        first, terms, basis, matrix = members[0], (), None, None
        if first.basis is not None:
            terms, basis = (Term(first.terms[0].shape),), self._bases(members)
        elif first.terms:
            columns = zip(*map(_factors, members), strict=True)
            terms = (Term(first.terms[0].shape, *map(self._joined_factors, columns)),)
        if first.matrix is not None:
            matrix, parts = self._joined([member.matrix for member in members])
            for member, part in zip(members, parts, strict=True):
                member.matrix = part
        views = tuple(view for member in members for view in member.views)
        return replace(
            first, views=views, terms=terms, matrix=matrix, basis=basis, members=tuple(members)
        )

    def _bases(self, members: Sequence[Block]) -> Basis:
        bases, of_stack = [member.basis for member in members], {}
        for axis in ("outputs", "inputs"):
            if getattr(bases[0], axis) is None:
                continue
            of_stack[axis], parts = self._joined([getattr(basis, axis) for basis in bases])
            bases = [replace(b, **{axis: Q}) for b, Q in zip(bases, parts, strict=True)]
            for member, basis in zip(members, bases, strict=True):
                member.basis = self._sums.bases[member.views] = basis
        return replace(bases[0], **of_stack)

    def _joined_factors(self, factors: tuple[Factor, ...]) -> Factor:
        if factors not in self._factors:
            tensor, parts = self._joined([factor.tensor for factor in factors])
            for factor, part in zip(factors, parts, strict=True):
                factor.tensor = part
            ranks = [factor.ranks for factor in factors]
            ranks = None if any(x is None for x in ranks) else torch.cat(ranks)
            self._factors[factors] = moment_factor(tensor, ranks)
        return self._factors[factors]

    def _joined(self, tensors: Sequence[Tensor]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return tensors one after the other, and the parts that take their places."""
        if (whole := _whole(tensors)) is not None:
            return whole, tuple(tensors)
        key = tuple(tensor.data_ptr() for tensor in tensors)
        if key not in self._tensors:
            whole = torch.cat(list(tensors))
            self._tensors[key] = whole, whole.split(len(tensors[0]))
        whole, parts = self._tensors[key]
        for tensor, part in zip(tensors, parts, strict=True):
            if (name := self._keys.pop(id(tensor), None)) is not None:
                self._sums.tensors[name] = part
        return whole, parts


def _whole(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose parts lie in memory one after the other, if they do."""
    first, memory = tensors[0], tensors[0].untyped_storage().data_ptr()
    start, strides = first.storage_offset(), first.stride()
    if strides[0] * len(first) != first.numel():
        return None
    for i, x in enumerate(tensors):
        place = x.untyped_storage().data_ptr(), x.storage_offset(), x.stride()
        if place != (memory, start + i * first.numel(), strides):
            return None
    return first.as_strided((len(tensors) * len(first), *first.shape[1:]), strides)
