"""Adds a batch to the sums from which the blocks of an approximation are computed."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, moment
from curvlinops.layers.gradients import PerSampleGradient, sum_of
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.recorded import Arrived, stacks_of
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import (
    GRADIENTS,
    INPUTS,
    MATRIX,
    WEIGHT,
    Layers,
    LayerUse,
    Uses,
    layers_of,
)
from curvlinops.operators.kfac.moments import gradient_factor, input_factor
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.structure import Place
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.vectors import Head, head_of, hessian_roots, mark_last, sampled_gradients
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.warnings import warn

_UNASSIGNED = "it is not known to which samples the rows of its layer belong"


def backpropagated(
    problem: BatchProblem, samples: SampleGradients, options: Options, head: Head | None = None
) -> Iterator[Tensor]:
    """Yield vectors, at a head's inputs if any, for the loss's Hessian or what replaces it."""
    output, draws = samples.output, options.mc_samples
    if options.fisher_type is FisherType.FORWARD_ONLY:
        yield output.new_zeros(0, *output.shape)
    elif options.fisher_type is FisherType.EMPIRICAL:
        yield problem.loss.gradient(output, problem.batch.y).unsqueeze(0)
    elif options.fisher_type is FisherType.MC:
        vectors = sampled_gradients(problem, output, draws, options.seed) / draws**0.5
        yield from vectors.split(samples.vectors_at_once)
    else:
        draws = 0 if options.exact else draws
        yield from hessian_roots(problem, samples, head, draws, options.seed)


def add_batch(sums: FactorSums, problem: BatchProblem, samples: SampleGradients) -> None:
    """Add a batch to sums, whose structure changes if it shows new uses."""
    options, padding, head = sums.options, Padding(problem, samples), None
    counts: list[int | Tensor] = []
    if options.fisher_type is FisherType.TYPE2 and not padding.masks:
        head = head_of(problem, samples, options.exact or not options.reduced, tied=True)
    if head is not None and not sums.structure.exact.keys().isdisjoint(head.own):
        head = None
    vectors = backpropagated(problem, samples, options, head)
    if head is not None:
        _add_head(sums, samples, head)
        samples = head.before
    for chunk, (u, last) in enumerate(mark_last(vectors)):
        arrived = samples.arrive(u, last)
        if chunk == 0:
            layers = layers_of(samples, options.reduced)
            sharing = () if padding.masks else _sharing(layers, arrived, {}, options)
            uses = _learned(sums, samples, layers, sharing)
        exact = [use for use in samples.uses if use.name in sums.structure.exact]
        # biases may have their B of a weight with an exact block
        whole = {use: arrived.peek(use) for use in exact}
        counting: dict[ParameterUse, Tensor | None] = {}
        if padding.masks:  # the rows of all uses are noted before some are counted
            places = [*chain(*_factored(sums, layers).values())]
            padding.note(arrived, places)
            counting = {place: padding.counting(place) for place in places} if last else {}
            sharing = _sharing(layers, arrived, counting, options) if last else ()
            uses = _learned(sums, samples, layers, sharing)
        if chunk == 0 or padding.masks:
            known = "summands", sums.structure, sharing, bool(padding.masks)
            find = partial(_stacks, sums, layers, uses.inputs, is_masked=bool(padding.masks))
            stacks = samples.known(known, find)
        arrived.keep(use for stack in stacks for x in stack for use in x.uses)
        for stack, gradients in arrived.stacks(stacks):
            # sums of outer products have no negative eigenvalues beyond the rounding of their dtype
            gradients = [gradient.to(sums.space.dtype) for gradient in gradients]
            if stack[0].inputs is not None and last:
                masks = [counting.get(use) for use in stack[0].uses]
                counts.append(_add_inputs(sums, stack, gradients, masks))
            if stack[0].gradients is not None:
                _add_gradients(sums, stack, gradients)
        if last and not samples.weight and any(counts):
            warn(
                f"Batch {problem.batch.index} has no term of the loss, since all its targets are "
                "ignored, but its inputs count in the averages A of KFAC. Leave it out, or let the "
                "model's attention_masks(X) be zero there."
            )
        _add_exact_blocks(sums, samples, whole, u)
    sums.add(WEIGHT, [0], samples.weight.double())


class Summand(NamedTuple):
    """What a batch adds for a use: moments of its inputs, and of its output gradients."""

    use: LayerUse
    #: Where it is in the graph.
    uses: tuple[ParameterUse, ...]
    #: The places of the sums for A and B; ``None`` if nothing, or another use's, is added.
    inputs: Place | None
    gradients: Place | None


def _factored(sums: FactorSums, layers: Layers) -> Layers:
    """Return the uses whose output gradients make up factors. Biases may have those of weights."""
    return {use: x for use, x in layers.items() if sums.structure.place(GRADIENTS, use)}


def _summands(
    sums: FactorSums, layers: Layers, inputs: Iterable[tuple[LayerUse, ...]]
) -> list[Summand]:
    """Return what is added for the uses of a graph, in the order of the stacks of sums."""
    place, places, factored = sums.structure.place, {}, _factored(sums, layers)
    for together in inputs:
        first = next((use for use in together if use in factored), None)
        places[first] = place(INPUTS, together)
    summands = [Summand(x, u, places.get(x), place(GRADIENTS, x)) for x, u in factored.items()]
    summands.sort(key=lambda x: x.gradients.index)
    if sums.options.fisher_type is FisherType.FORWARD_ONLY:
        return [x._replace(gradients=None) for x in summands if x.inputs is not None]
    return summands


def _stacks(
    sums: FactorSums, layers: Layers, inputs: Iterable[tuple[LayerUse, ...]], is_masked: bool
) -> list[list[Summand]]:
    """Return summands, together those that are equal and have their sums in the same stacks."""
    summands = _summands(sums, layers, inputs)
    if is_masked:  # whose rows count depends on the layer
        return [[x] for x in summands]
    stacks = ((x.inputs and x.inputs.stack, x.gradients and x.gradients.stack) for x in summands)
    treatments = dict(zip(summands, stacks, strict=True))
    return stacks_of({x: x.uses for x in summands}, treatments.__getitem__)


def _add_head(sums: FactorSums, samples: SampleGradients, head: Head) -> None:
    """Add the head's inputs, and the sum of the Hessians for its B."""
    every, before = layers_of(samples, sums.options.reduced).items(), head.before.uses
    layers = {use: x for use, x in every if use.name in head.own and x[0] not in before}
    dtype = sums.space.dtype
    sharing = [None if use.shape.is_bias else i for i, use in enumerate(layers)]
    uses = _learned(sums, samples, layers, tuple(sharing))
    for x in _summands(sums, layers, uses.inputs):
        if x.inputs is not None:
            _add_inputs(sums, [x], [head.own[x.use.name].to(dtype)], [None])
        diagonal = _treatment(x.use, sums.options)[3]
        hessian = head.hessian.along(None).sum(0) if diagonal else head.hessian.sum()
        sums.add(x.gradients.stack, [x.gradients.index], hessian.to(dtype).unsqueeze(0))


def _treatment(use: LayerUse, options: Options) -> tuple[bool, ...]:
    """Return whether inputs are averaged, get a one, and what is too large for a matrix."""
    is_reduced, has_bias = use.name in options.reduced, use.has_bias_input(options)
    return is_reduced, has_bias, *reversed(use.shape.diagonal(options.max_factor_size))


class Padding:
    """Finds out which of the layers' rows count as inputs of a batch: those that are no padding.

    Padding does not count, unless it has a gradient: then it predicts a token, or the mask belongs
    to other sequences. Names do not tell these apart: a decoder's attention reads the encoder's.
    """

    def __init__(self, problem: BatchProblem, samples: SampleGradients):
        self.masks = _attention_masks(problem)
        self._reached: dict[ParameterUse, Tensor] = {}
        # of one sample, the rows of a routed expert may be as many as the positions of the mask
        is_one = samples.num_samples == 1 and any(not bool(mask.all()) for mask in self.masks)
        self._routed = samples.known("routed", samples.without_axis) if is_one else frozenset()

    def note(self, arrived: Arrived, uses: Iterable[ParameterUse]) -> None:
        """Note which rows have a gradient for some of the vectors."""
        for use in uses:
            gradient = arrived.peek(use)
            is_on_axis = use.samples is not None and use not in self._routed
            if isinstance(gradient, FactoredGradient) and is_on_axis:
                reached = gradient.output_gradients().flatten(3).ne(0).any(-1).any(0)
                self._reached[use] = reached | self._reached.get(use, False)

    def counting(self, use: ParameterUse) -> Tensor | None:
        """Return which rows of a layer's use count, ``[N, S]``; ``None`` if all do."""
        reached = self._reached.get(use)
        fitting = [x for x in self.masks if reached is not None and x.shape == reached.shape]
        if not fitting:
            return None
        if not reached.any() and any(not torch.equal(mask, fitting[0]) for mask in fitting):
            raise NotImplementedError(
                f"Two masks of attention_masks(X) fit the layer of '{use.name}', and it "
                "has no gradient that tells them apart. Pad the sequences to different lengths, "
                "let the method return the mask of this layer only, or leave the parameter out."
            )
        conflicts = [int((reached & ~mask).sum()) for mask in fitting]
        agreeing = [x for x, n in zip(fitting, conflicts, strict=True) if n == min(conflicts)]
        return torch.stack(agreeing).all(0) | reached


def _attention_masks(problem: BatchProblem) -> list[Tensor]:
    """Return the masks ``[N, T]`` of sequences, ``False`` at padding, if the model has them."""
    model = problem.model
    masks_of = getattr(model.module or model.source, "attention_masks", None)
    masks = [] if masks_of is None else masks_of(problem.batch.X)
    is_list = isinstance(masks, list | tuple)
    if not is_list or not all(isinstance(x, Tensor) and x.ndim == 2 for x in masks):
        raise TypeError(
            "attention_masks(X) of the model must return a list of masks [N, T], got "
            f"{'other entries in it' if is_list else f'a {type(masks).__name__}'}. For one "
            "mask, return [mask]; for none, []."
        )
    return [mask.bool() for mask in masks]


def _sharing(
    layers: Layers,
    arrived: Arrived,
    counting: Mapping[ParameterUse, Tensor | None],
    options: Options,
) -> tuple[int | None, ...]:
    """Return for each use of a weight the number of the first one that has the same inputs."""
    firsts, sharing = dict[Hashable, int](), list[int | None]()
    for i, (use, places) in enumerate(layers.items()):
        if use.shape is None or use.shape.is_bias:
            sharing.append(None)
            continue
        masks = [counting.get(place) for place in places]
        key = (
            _treatment(use, options)[:3],
            *map(arrived.input_key, places),
            *(None if mask is None else mask.cpu().numpy().tobytes() for mask in masks),
        )
        sharing.append(firsts.setdefault(key, i))
    return tuple(sharing)


def _learned(
    sums: FactorSums, samples: SampleGradients, layers: Layers, sharing: tuple[int | None, ...]
) -> Uses:
    """Change the structure of sums if a batch shows new uses, and return its uses."""
    reduced = sums.options.reduced
    uses = samples.known(("uses", reduced, sharing), partial(_uses, layers, sharing, reduced))
    sums.learn(uses._replace(unknown=samples.fallbacks | uses.unknown))
    return uses


def _uses(layers: Layers, sharing: Iterable[int | None], reduced: frozenset[str]) -> Uses:
    """Return the uses in a graph. Unknown are those whose samples are needed, but not known."""
    unknown, together = dict[str, str](), dict[int, list[LayerUse]]()
    for use, places in layers.items():
        if (use.name in reduced or not use.shape) and any(x.samples is None for x in places):
            unknown[use.name] = _UNASSIGNED
    for use, first in zip(layers, sharing, strict=False):  # nothing is known of inputs at first
        if first is not None:
            together.setdefault(first, []).append(use)
    inputs = (x if len(x) == 1 else sorted(x, key=repr) for x in together.values())
    return Uses(frozenset(layers), unknown, frozenset(map(tuple, inputs)))


def _add_inputs(
    sums: FactorSums,
    stack: Sequence[Summand],
    gradients: Sequence[FactoredGradient],
    masks: Sequence[Tensor | None],
) -> int | Tensor:
    """Add the inputs of equal uses, side by side, to the sums for A; return their number."""
    reduced, bias, diagonal, _ = _treatment(stack[0].use, sums.options)
    moments, count = input_factor(gradients, masks, reduced, bias, diagonal)
    of, indices = stack[0].inputs.stack, [x.inputs.index for x in stack]
    sums.add(of, indices, moments)
    sums.add(of.counts, indices, moments.new_zeros(len(stack), dtype=torch.float64) + count)
    return count


def _add_gradients(
    sums: FactorSums, stack: Sequence[Summand], gradients: Sequence[FactoredGradient]
) -> None:
    """Add the output gradients of equal uses, side by side, to the sums for B."""
    reduced, _, _, diagonal = _treatment(stack[0].use, sums.options)
    moments = gradient_factor(gradients, reduced, diagonal)
    sums.add(stack[0].gradients.stack, [x.gradients.index for x in stack], moments)


def _add_exact_blocks(
    sums: FactorSums,
    samples: SampleGradients,
    whole: Mapping[ParameterUse, PerSampleGradient],
    u: Tensor,
) -> None:
    """Add outer products of samples' gradients, or their squares, given the gradients of uses.

    Without a rule, or if the samples of one use are not known, they are computed sample by sample.
    """
    unassigned, summands = {use.name for use in whole if use.samples is None}, {}
    for use, gradient in whole.items():
        if use.name not in unassigned:
            summands.setdefault(use.name, []).append(gradient)
    known = {name: sum_of(gradients) for name, gradients in summands.items()}
    one_by_one = samples.one_by_one(u, unassigned | samples.fallbacks.keys())
    for _, gradients in chain([(slice(0, samples.num_samples), known)], one_by_one):
        for name, gradient in gradients.items():
            block, place = sums.structure.exact[name], sums.structure.place(MATRIX, name)
            for some in gradient.slices():
                rows = gradient.rows(some).to(sums.space.dtype)
                rows = rows.reshape(-1, block.groups, gradient.num_entries // block.groups)
                moments = moment(rows, diagonal=block.structure == "diagonal")
                sums.add(place.stack, [place.index], moments)
