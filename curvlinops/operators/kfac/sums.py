"""Sums over data of which the blocks of an approximation are made."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.factors import Kind
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.plan import (
    BlockSpec,
    LayerUse,
    Slice,
    Uses,
    plan_blocks,
)
from curvlinops.risk.distributed import Ranks

#: What is summed, and of what: a ``LayerUse`` and ``"A"`` (inputs), ``"B"`` (output gradients) or
#: ``"count"`` (the number of inputs); a parameter's name and ``"matrix"`` (its exact block); the
#: ``slice`` of a block and ``"moment"`` (in the eigenbasis of EKFAC); or ``TERMS``.
Key = tuple[Any, str]

#: The data's share of the normalization.
TERMS: Key = (None, "terms")


class ChangedError(RuntimeError):
    """Data uses parameters in ways that need other sums than those that were added up.

    Args:
        names: The parameters.
        uses: What all data shows, that before included.
    """

    def __init__(self, names: Collection[str], uses: Uses):
        super().__init__(
            f"Layers use {', '.join(names)} in other ways than the data before showed, so that its "
            "block has another structure, and sums cannot be added. Compute the factors from all "
            "data."
        )
        self.uses = uses


#: The uses whose sums are added up for a factor.
Sources = tuple[LayerUse, ...]


class Plan(NamedTuple):
    """What is made of some data.

    Attributes:
        uses: What the data shows of the parameters.
        blocks: The blocks.
        sources: For each block, those of its kinds' factors.
        shapes: The sums that are needed, and their shapes.
    """

    uses: Uses = Uses()
    blocks: Sequence[BlockSpec] = ()
    sources: Sequence[tuple[Sources, ...]] = ()
    shapes: Mapping[Key, tuple[int, ...]] = {}


class Planner:
    """Plans for data, given what it shows.

    Args:
        space: The parameters.
        options: The options of the approximation.
    """

    def __init__(self, space: ParameterSpace, options: Options):
        self.space, self.options = space, options
        self._latest = Plan()

    def plan(self, uses: Uses) -> Plan:
        """Choose the structure of all blocks; the next pass over the data mostly asks the same."""
        if self._latest.uses != uses or not self._latest.blocks:
            blocks = plan_blocks(uses, self.space, self.options)
            self._latest = Plan(uses, blocks, _sources(uses, blocks), self._shapes(uses, blocks))
        return self._latest

    def extend(self, plan: Plan, uses: Uses) -> Plan:
        """Return the plan for more data.

        Args:
            plan: The plan for the data before.
            uses: What all data shows.

        Raises:
            ChangedError: If the sums over the data before are not those that the new blocks need.
        """
        if plan.uses == uses and plan.blocks:
            return plan
        after = self.plan(uses)
        needed = self._shapes(plan.uses, after.blocks)
        changed = {
            getattr(key[0], "name", key[0])
            for key, shape in needed.items()
            if plan.blocks and plan.shapes.get(key) != shape
        }
        if changed:
            raise ChangedError(sorted(changed), uses)
        return after

    def _shapes(self, uses: Uses, blocks: Collection[BlockSpec]) -> dict[Key, tuple[int, ...]]:
        """Return the sums that blocks need of data, which may show less than what they are for."""
        options, limit = self.options, self.options.max_factor_size
        shapes: dict[Key, tuple[int, ...]] = {TERMS: ()}
        kronecker = {block.slice for block in blocks if block.structure == "kronecker"}

        def factor(groups: int, size: int, is_dense: bool = True) -> tuple[int, ...]:
            return (groups, size, size) if is_dense and size <= limit else (groups, size)

        for use in uses.known:
            kind, has_block = use.kind, (use.name, use.place) in kronecker
            if kind is None:
                continue
            if has_block and not kind.shift:
                inputs = kind.inputs + has_bias_input(use, options)
                shapes[use, "A"] = factor(kind.groups, inputs, not kind.lookup)
                shapes[use, "count"] = ()
            needs_gradients = has_block
            if use.shares_gradients:
                needs_gradients = not kind.shift and (has_block or use.partner in kronecker)
            if needs_gradients and options.fisher_type is not FisherType.FORWARD_ONLY:
                shapes[use, "B"] = factor(kind.groups, kind.outputs)
        used = uses.names
        for block in blocks:
            name = block.names[0]
            if block.is_exact and name in used:
                width = prod(self.space.shapes[name]) // block.groups
                is_dense = block.structure == "dense"
                shapes[name, "matrix"] = (block.groups, width, *([width] if is_dense else []))
        return shapes


def _sources(uses: Uses, blocks: Iterable[BlockSpec]) -> list[tuple[Sources, ...]]:
    """Return for each kind of each block the uses whose sums make its factors."""
    by_slice: dict[Slice, list[LayerUse]] = {}
    for use in uses.known:
        by_slice.setdefault((use.name, use.place), []).append(use)
    return [tuple(_of_kind(block.slice, k, by_slice) for k in block.kinds) for block in blocks]


def _of_kind(own: Slice, kind: Kind, by_slice: Mapping[Slice, list[LayerUse]]) -> Sources:
    sources: dict[LayerUse, None] = {}
    for use in by_slice[own]:
        if use.kind == kind and kind.shift and use.shares_gradients:
            weights = [weight for weight in by_slice[use.partner] if weight.partner == own]
            sources |= dict.fromkeys(weights)
        elif use.kind == kind:
            sources[use] = None
    # for the same rounding in all processes
    return tuple(sources) if len(sources) == 1 else tuple(sorted(sources, key=repr))


def has_bias_input(use: LayerUse, options: Options) -> bool:
    """Return whether the inputs of a use have a one as last entry, for the bias."""
    return options.joint and use.partner is not None and not use.kind.shift


@dataclass
class FactorSums:
    """Sums over some data.

    Attributes:
        plan: What is made of them.
        tensors: The sums. Those of an operator never change; new ones take their place.
        bases: The eigenbases of EKFAC's blocks, by ``BlockSpec.slices``.
        num_batches: How many batches there were, of the rank that had most.
    """

    plan: Plan = field(default_factory=Plan)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    bases: dict[tuple[Slice, ...], Any] = field(default_factory=dict)
    num_batches: int = 0

    @property
    def terms(self) -> Tensor | float:
        """The data's share of the normalization."""
        return self.tensors.get(TERMS, 0.0)

    def emptied(self) -> "FactorSums":
        """Return sums to which the batches that come next can be added."""
        return replace(self, tensors={})

    def restarted(self, plan: Plan) -> "FactorSums":
        """Return sums for a new pass over all data, with another plan; forget these."""
        self.tensors.clear()
        return FactorSums(plan)

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add to one of the sums, in place."""
        if key in self.tensors:
            self.tensors[key] += tensor
        else:
            self.tensors[key] = tensor

    def plus(
        self, other: "FactorSums", plan: Plan, decay: float = 1.0, overwrite: bool = False
    ) -> "FactorSums":
        """Return the sums over this and other data.

        Args:
            other: The sums over the other data.
            plan: The plan for both.
            decay: By what these sums are multiplied first.
            overwrite: Whether the result takes the memory of the other sums.
        """
        tensors = {}
        for key in self.tensors | other.tensors:
            old, new = self.tensors.get(key), other.tensors.get(key)
            if new is None:
                tensors[key] = old if decay == 1.0 else decay * old
            elif old is None:
                tensors[key] = new
            else:
                out = new if overwrite else None
                tensors[key] = torch.add(new, old, alpha=decay, out=out)
        num_batches = self.num_batches + other.num_batches
        return FactorSums(plan, tensors, other.bases | self.bases, num_batches)

    def over(self, ranks: Ranks, device: torch.device) -> "FactorSums":
        """Return the sums over the data of all ranks, which have the same plan.

        Args:
            ranks: The ranks, whose batches have numbers up to the largest of theirs.
            device: Where the sums are.
        """
        tensors = ranks.add_all(self.tensors, device)
        return replace(self, tensors=tensors, num_batches=ranks.largest(self.num_batches))

    def to(self, device: torch.device) -> "FactorSums":
        """Return the sums on another device."""
        tensors = {key: tensor.to(device) for key, tensor in self.tensors.items()}
        bases = {key: basis.map(lambda x: x.to(device)) for key, basis in self.bases.items()}
        return replace(self, tensors=tensors, bases=bases)
