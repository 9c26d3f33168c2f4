"""Sums over the data for blocks whose factors are known, in a further pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Self, TypeVar

import torch
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, KroneckerShape
from curvlinops.layers.gradients import sum_of, total
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import WEIGHT, group_by_use
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.vectors import mark_last
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.structured.layout import ParameterView
from curvlinops.team.team import Team

_OTHER_USES = (
    "Layers use parameters in other ways in a further pass over the data than in that for the "
    "factors. Compute them once more, or use KFACLinearOperator with fit='kfac', which needs one "
    "pass."
)


class BlockSum(ABC):
    """The sum for a block, a function of its gradients as matrices ``[G, O, I]``.

    Attributes:
        shape: The shape of these matrices.
        has_bias: Whether the bias is the last column. I counts it.
        needs_samples: Whether it must be known to which samples rows belong.
    """

    shape: KroneckerShape
    has_bias: bool
    needs_samples = True

    @abstractmethod
    def of_gradients(self, gradients: Sequence[FactoredGradient]) -> dict[str, Tensor]:
        """Return the sums over a batch, given the gradients of all uses of the block's weight."""

    @abstractmethod
    def of_rows(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the sums over gradients of samples, ``[P, G, O, I]``."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that it is made of."""

    @abstractmethod
    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the same with other tensors, perhaps none."""


Views = tuple[ParameterView, ...]
OfBlock = TypeVar("OfBlock", bound=BlockSum)


def everywhere(
    own: Mapping[Views, OfBlock], ranks: Team, device: torch.device
) -> dict[Views, OfBlock]:
    """Return the results for all blocks in all processes, each of which has some."""
    tensors = ranks.exchange(
        {(views, n): x for views, of_block in own.items() for n, x in of_block.tensors().items()},
        device,
    )
    by_views: dict[Views, dict[str, Tensor]] = {}
    for (views, name), x in tensors.items():
        by_views.setdefault(views, {})[name] = x
    plain = [(views, of_block.with_tensors({})) for views, of_block in own.items()]
    return {
        views: of_block.with_tensors(by_views.get(views, {}))
        for views, of_block in chain.from_iterable(ranks.gather_objects(plain))
    }


def matrices_of(
    gradients: Sequence[FactoredGradient], shape: KroneckerShape, has_bias: bool
) -> Iterator[Tensor]:
    """Yield the gradients of some samples as matrices, ``[P, G, O, I]``.

    Args:
        gradients: Those of all uses of a weight on a batch.
        shape: The shape of the matrices.
        has_bias: Whether the gradient of the bias is the last column.
    """
    whole = sum_of(list(gradients))
    is_alike = KroneckerShape.of(whole, shape.is_bias) == shape
    for some in whole.slices():
        if is_alike:
            weight = whole.matrices(some).flatten(0, 1)
        else:
            weight = shape.view.of(whole.rows(some).flatten(0, 1).flatten(1))
        bias = None
        if has_bias:
            bias = total(x.output_gradients()[:, some].sum(2) for x in gradients).flatten(0, 1)
        yield _with_bias(weight, bias, shape)


def _with_bias(weight: Tensor, bias: Tensor | None, shape: KroneckerShape) -> Tensor:
    """Return gradients ``[P, *]`` of a weight and perhaps of its bias as matrices."""
    size = shape.groups, shape.outputs
    rows = weight.reshape(len(weight), *size, shape.inputs)
    return rows if bias is None else torch.cat([rows, bias.reshape(len(bias), *size, 1)], dim=3)


def add_block_sums(
    sums: FactorSums,
    problem: BatchProblem,
    samples: SampleGradients,
    wanted: Mapping[Views, BlockSum],
) -> None:
    """Add a batch to sums for blocks.

    Args:
        sums: The sums. They know the uses that the data before has shown.
        problem: The risk on the batch.
        samples: The batch's forward pass.
        wanted: The sums, by ``Block.views``.

    Raises:
        ValueError: If the batch shows other uses; if samples interact.
    """
    dtype, reduced = sums.space.dtype, sums.options.reduced
    for u, last in mark_last(backpropagated(problem, samples, sums.options)):
        groups = group_by_use(samples.by_use(u, last), reduced, samples.conclusions)
        if not sums.uses.includes(groups.keys(), samples.fallbacks):
            raise ValueError(_OTHER_USES)
        by_view: dict[ParameterView, list[FactoredGradient]] = {views[0]: [] for views in wanted}
        unassigned: set[ParameterView] = set()
        for use in list(groups):
            contributions = groups.pop(use)
            if use.view in by_view:
                by_view[use.view] += [x.gradient.to(dtype) for x in contributions]
                if any(x.is_unassigned for x in contributions):
                    unassigned.add(use.view)
        unassigned &= {views[0] for views, of_block in wanted.items() if of_block.needs_samples}
        if unassigned:
            samples.refuse_interaction()
        for views, of_block in wanted.items():
            # memory of gradients that were added is given back at once
            gradients = by_view.pop(views[0])
            if views[0] in unassigned:
                pieces = _one_by_one(of_block, views, samples, u, dtype)
            else:
                pieces = [of_block.of_gradients(gradients)] if gradients else []
            for piece in pieces:
                for kind, tensor in piece.items():
                    sums.add((views, kind), tensor)
    sums.add(WEIGHT, samples.weight.double())


def _one_by_one(
    of_block: BlockSum,
    views: Views,
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
        yield of_block.of_rows(_with_bias(weight, bias[0] if bias else None, of_block.shape))
