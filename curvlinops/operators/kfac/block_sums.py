"""Sums over the data for blocks whose factors are known, in a further pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, KroneckerShape
from curvlinops.layers.gradients import sum_of, total
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.recorded import stacks_of
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import WEIGHT, Block, Layers, Uses, layers_of
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.structure import Structure
from curvlinops.operators.kfac.sums import FactorSums, selected
from curvlinops.operators.vectors import head_of, mark_last
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.structured.layout import ParameterView

_OTHER_USES = (
    "Layers use parameters in other ways in a further pass over the data than in that for the "
    "factors. Compute them once more, or use KFACLinearOperator with fit='kfac', which needs one "
    "pass."
)


@dataclass(frozen=True)
class BlockSum(ABC):
    """A sum over gradients of a block, or a stack, as matrices ``[G, O, I]``; by kind.

    Groups are the first axis of the tensors of subclasses, and of sums.
    """

    shape: KroneckerShape
    #: Whether the bias is the last column. I counts it.
    has_bias: bool
    #: Whether these are gradients of positions, not of samples.
    by_position = False

    @classmethod
    def of_block(cls, block: Block, *fields: Any) -> Self:
        """Return the sum for a block, or for a stack, given the fields of the subclass."""
        return cls(block.terms[0].shape, len(block.singles[0].views) > 1, *fields)

    @abstractmethod
    def of_matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the sums over matrices ``[P, G, O, I]``."""

    def of_factors(self, gradient: FactoredGradient) -> Iterable[dict[str, Tensor]] | None:
        """Return summands of the same without forming matrices, ``None`` if they are needed."""
        return None

    #: Returns summands of the sums over the gradients of a head's parameter, if it has any.
    of_head: ClassVar[Callable[..., Iterable[dict[str, Tensor]]] | None] = None

    def of_gradients(
        self, gradients: Sequence[FactoredGradient], is_alike: bool = True
    ) -> Iterator[dict[str, Tensor]]:
        """Yield summands over a batch, given a weight's uses, which are of this shape or not."""
        for gradient in gradients if self.by_position else [sum_of(list(gradients))]:
            has_factors = is_alike and isinstance(gradient, FactoredGradient)
            summands = self.of_factors(gradient) if has_factors else None
            if summands is not None:
                yield from summands
                continue
            for some in gradient.slices():
                if has_factors and not self.shape.one_hot_inputs:
                    weight = gradient.values(some).flatten(0, 1)
                else:
                    weight = self.shape.view.of(gradient.rows(some).flatten(0, 1).flatten(1))
                bias = None
                if self.has_bias:
                    bias = total(x.output_gradients()[:, some].sum(2) for x in gradients)
                    bias = bias.flatten(0, 1)
                yield self.of_parameters(weight, bias)

    def of_parameters(self, weight: Tensor, bias: Tensor | None) -> dict[str, Tensor]:
        """Return the sums over gradients ``[P, *]`` of a weight, and perhaps of its bias."""
        size = self.shape.groups, self.shape.outputs
        rows = weight.reshape(len(weight), *size, self.shape.inputs)
        if bias is not None:
            rows = torch.cat([rows, bias.reshape(len(bias), *size, 1)], dim=3)
        return self.of_matrices(rows)

    def positions(self, gradient: FactoredGradient) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield some positions' inputs ``[P, G, I]`` and output gradients ``[V, P, G, O]``."""
        for x, g in gradient.positions():
            x = x.flatten(0, 1)
            yield F.pad(x, (0, 1), value=1.0) if self.has_bias else x, g.flatten(1, 2)

    def part(self, stack: Block, indices: Sequence[int]) -> Self:
        """Return the sum for some blocks of the stack that this one is for."""
        number, some = len(stack.singles), selected(indices)
        if len(indices) == number:
            return self
        shape = stack.singles[indices[0]].terms[0].shape
        tensors = {
            name: x.unflatten(0, (number, -1))[some].flatten(0, 1)
            for name, x in vars(self).items()
            if isinstance(x, Tensor)
        }
        return replace(self, shape=shape._replace(groups=shape.groups * len(indices)), **tensors)


def add_block_sums(
    sums: FactorSums,
    problem: BatchProblem,
    samples: SampleGradients,
    wanted: Mapping[Block, BlockSum],
) -> None:
    """Add a batch, whose uses must be those that were seen before, to the sums of stacks."""
    dtype, options, head = sums.space.dtype, sums.options, None
    if options.fisher_type is FisherType.TYPE2 and all(
        x.of_head is not None for x in wanted.values()
    ):
        head = head_of(problem, samples, options.exact)
    vectors = backpropagated(problem, samples, options, head)
    if head is not None:
        for stack, of_stack in wanted.items():
            for i, (name, *_) in enumerate(block.names for block in stack.singles):
                if name in head.own:
                    _add(sums, stack, [i], of_stack.part(stack, [i]).of_head(head, name, dtype))
        samples = head.before
    for u, last in mark_last(vectors):
        arrived, layers = samples.arrive(u, last), layers_of(samples, options.reduced)
        if not sums.uses.includes(Uses(frozenset(layers), samples.fallbacks)):
            raise ValueError(_OTHER_USES)
        known = "blocks", sums.structure
        stacks = samples.known(known, partial(_stacks, sums.structure, layers))
        stacks = [some for some in stacks if some[0].stack in wanted]
        arrived.keep(use for some in stacks for x in some for use in x.uses)
        unassigned = {x for x, *_ in stacks if not (x.is_assigned or wanted[x.stack].by_position)}
        if unassigned:
            samples.refuse_interaction()
        for some, gradients in arrived.stacks(stacks):
            first, stack, indices = some[0], some[0].stack, [x.index for x in some]
            of_block = wanted[stack].part(stack, indices)
            if first in unassigned:
                views = stack.singles[first.index].views
                pieces = _one_by_one(of_block, views, samples, u, dtype)
            else:
                gradients = [gradient.to(dtype) for gradient in gradients]
                pieces = of_block.of_gradients(gradients, first.is_alike)
            _add(sums, stack, indices, pieces)
    sums.add(WEIGHT, [0], samples.weight.double())


def _add(
    sums: FactorSums, stack: Block, indices: Sequence[int], pieces: Iterable[dict[str, Tensor]]
) -> None:
    for piece in pieces:
        for kind, tensor in piece.items():
            sums.add(stack.key(kind), indices, tensor)


class BlockUses(NamedTuple):
    """The uses in a graph of the weight of a stack's block."""

    stack: Block
    index: int
    uses: tuple[ParameterUse, ...]
    #: Whether these have matrices of the block's shape.
    is_alike: bool
    #: Whether it is known to which samples their rows belong.
    is_assigned: bool


def _stacks(structure: Structure, layers: Layers) -> list[list[BlockUses]]:
    """Return the uses of all blocks that are Kronecker products, together equal ones of a stack."""
    by_view: dict[ParameterView, list[tuple]] = {}
    for use, uses in layers.items():
        by_view.setdefault(use.view, []).append((use, uses))
    summands = []
    for stack in structure.stacks:
        for i, block in enumerate(stack.singles if stack.terms else ()):
            if found := by_view.get(block.views[0]):
                are_alike = all(use.shape == block.terms[0].shape for use, _ in found)
                uses = tuple(chain.from_iterable(uses for _, uses in found))
                are_assigned = all(x.samples is not None for x in uses)
                summands.append(BlockUses(stack, i, uses, are_alike, are_assigned))
    together = {x: x.stack if x.is_alike and x.is_assigned else x for x in summands}
    return stacks_of({x: x.uses for x in summands}, together.__getitem__)


def _one_by_one(
    of_block: BlockSum,
    views: tuple[ParameterView, ...],
    samples: SampleGradients,
    u: Tensor,
    dtype: torch.dtype,
) -> Iterator[dict[str, Tensor]]:
    """Yield the sums over gradients that are computed sample by sample."""
    for _, gradients in samples.one_by_one(u, [view.name for view in views]):
        of_names = {n: x.rows(slice(None)).flatten(0, 1).flatten(1) for n, x in gradients.items()}
        weight, *bias = (
            view.gather(of_names[view.name]).to(dtype) for view in (of_block.shape.view, *views[1:])
        )
        yield of_block.of_parameters(weight, bias[0] if bias else None)
