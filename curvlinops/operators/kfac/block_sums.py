"""Sums over the data for blocks whose factors are known, in a further pass."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, KroneckerShape
from curvlinops.layers.gradients import sum_of, total
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import WEIGHT, layers_of
from curvlinops.operators.kfac.estimate import backpropagated
from curvlinops.operators.kfac.options import FisherType
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.vectors import Head, head_of, mark_last
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.structured.layout import ParameterView
from curvlinops.team.team import Team

_OTHER_USES = (
    "Layers use parameters in other ways in a further pass over the data than in that for the "
    "factors. Compute them once more, or use KFACLinearOperator with fit='kfac', which needs one "
    "pass."
)


class BlockSum(ABC):
    """A sum over a block's gradients as matrices ``[G, O, I]``, by kind, see ``Key``.

    Subclasses are dataclasses.

    Attributes:
        shape: The shape of these matrices.
        has_bias: Whether the bias is the last column. I counts it.
        by_position: Whether they are gradients of positions, not of samples.
    """

    shape: KroneckerShape
    has_bias: bool
    by_position = False

    @abstractmethod
    def of_matrices(self, rows: Tensor) -> dict[str, Tensor]:
        """Return the sums over matrices ``[P, G, O, I]``."""

    def of_factors(self, gradient: FactoredGradient) -> Iterable[dict[str, Tensor]] | None:
        """Return summands of the same without forming matrices, ``None`` if they are needed."""
        return None

    #: Whether there is a closed form for a head.
    has_head = False

    def of_head(self, head: Head, name: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the sums over the gradients of a head's parameter."""
        raise NotImplementedError

    def of_gradients(self, gradients: Sequence[FactoredGradient]) -> Iterator[dict[str, Tensor]]:
        """Yield summands of the sums over a batch, given the gradients of a weight's uses."""
        for gradient in gradients if self.by_position else [sum_of(list(gradients))]:
            is_alike = KroneckerShape.of(gradient, self.shape.is_bias) == self.shape
            summands = self.of_factors(gradient) if is_alike else None
            if summands is not None:
                yield from summands
                continue
            for some in gradient.slices():
                if is_alike:
                    weight = gradient.matrices(some).flatten(0, 1)
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

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that it is made of."""
        return {name: x for name, x in vars(self).items() if isinstance(x, Tensor)}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """Return the same with other tensors, perhaps none."""
        return replace(self, **(dict.fromkeys(self.tensors()) | dict(tensors)))


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


def add_block_sums(
    sums: FactorSums,
    problem: BatchProblem,
    samples: SampleGradients,
    wanted: Mapping[Views, BlockSum],
) -> None:
    """Add a batch, whose uses must be those that were seen before, to the sums of blocks."""
    dtype, options, head = sums.space.dtype, sums.options, None
    if options.fisher_type is FisherType.TYPE2 and all(x.has_head for x in wanted.values()):
        head = head_of(problem, samples, options.exact)
    vectors = backpropagated(problem, samples, options, head)
    if head is not None:
        for views in [views for views in wanted if views[0].name in head.names]:
            for kind, tensor in wanted[views].of_head(head, views[0].name, dtype).items():
                sums.add((views, kind), tensor)
        samples = head.before
    for u, last in mark_last(vectors):
        arrived, layers = samples.arrive(u, last), layers_of(samples, options.reduced)
        if not sums.uses.includes(layers.keys(), samples.fallbacks):
            raise ValueError(_OTHER_USES)
        by_view: dict[ParameterView, list[ParameterUse]] = {views[0]: [] for views in wanted}
        for use, places in layers.items():
            by_view.get(use.view, []).extend(places)
        arrived.keep(chain(*by_view.values()))
        unassigned = {
            view for view, places in by_view.items() if any(x.samples is None for x in places)
        }
        unassigned -= {views[0] for views, of_block in wanted.items() if of_block.by_position}
        if unassigned:
            samples.refuse_interaction()
        for views, of_block in wanted.items():
            # memory of gradients that were added is given back at once
            gradients = [
                arrived.take(place, by_position=True).to(dtype) for place in by_view[views[0]]
            ]
            if views[0] in unassigned:
                pieces = _one_by_one(of_block, views, samples, u, dtype)
            else:
                pieces = of_block.of_gradients(gradients) if gradients else ()
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
        yield of_block.of_parameters(weight, bias[0] if bias else None)
