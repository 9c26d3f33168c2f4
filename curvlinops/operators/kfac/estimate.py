"""Adds a batch to the sums from which the blocks of an approximation are computed."""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, gradient_factor, input_factor, moment
from curvlinops.layers.gradients import PerSampleGradient, Piece, sum_of
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.recorded import Arrived
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import (
    GRADIENTS,
    INPUT_COUNT,
    INPUTS,
    MATRIX,
    WEIGHT,
    Block,
    Layers,
    LayerUse,
    Uses,
    layers_of,
)
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.vectors import (
    Head,
    head_of,
    hessian_roots,
    mark_last,
    sampled_gradients,
)
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.warnings import warn

_UNASSIGNED = "it is not known to which samples the rows of its layer belong"


def backpropagated(
    problem: BatchProblem, samples: SampleGradients, options: Options, head: Head | None = None
) -> Iterator[Tensor]:
    """Yield vectors ``[V, *output]`` whose outer products are, or replace, the loss's Hessian.

    With a head, they are at its inputs.
    """
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
    """Add a batch to sums, whose blocks change if it shows new uses.

    Raises:
        ChangedError: If the batch uses a parameter in a way for which other sums are needed than
            those over the batches before.
    """
    options, counts, padding, head = sums.options, list[Tensor](), Padding(problem), None
    if options.fisher_type is FisherType.TYPE2 and not padding.masks:
        head = head_of(problem, samples, options.exact or not options.reduced, tied=True)
    if head is not None and not sums.exact_blocks.keys().isdisjoint(head.names):
        head = None
    vectors = backpropagated(problem, samples, options, head)
    if head is not None:
        _add_head(sums, head)
        samples = head.before
    for chunk, (u, last) in enumerate(mark_last(vectors)):
        arrived = samples.arrive(u, last)
        if chunk == 0:
            layers = layers_of(samples, options.reduced)
            _add_uses(sums, layers, samples)
            exact = sums.exact_blocks
            factored = {
                use: places
                for use, places in layers.items()
                if use.shape is not None
                and use.name not in exact
                and not (use.shape.is_bias and use.shares_gradients)  # with its weight
            }
            # biases have the B of their weights, which may have exact blocks
            shared = [
                use
                for use in layers
                if use.name in exact and use.shares_gradients and not use.shape.is_bias
            ]
        whole = {x: arrived.take(x, by_position=True) for x in samples.uses if x.name in exact}
        for use in shared:
            _add_gradients(sums, [use], [whole[x].to(sums.space.dtype) for x in layers[use]])
        pieces = chain(_exact_block_gradients(whole, samples, u), samples.rest(u))
        # memory of gradients that were added is given back at once
        arrived.keep(chain(*factored.values()))
        taken = {}
        if padding.masks:  # the rows of all uses are noted before some are counted
            taken = {place: arrived.take(place, by_position=True) for place in [*arrived.outputs]}
            padding.note(taken)
        counting = {place: padding.counting(place) for place in taken} if last else {}
        owners = _owners(factored, arrived, counting, options) if last else {}
        treatment = {
            use: (use in owners, use.shape.is_bias, *_treatment(use, options)) for use in factored
        }
        stacks = ([use] for use in factored) if taken else arrived.stacks(factored, treatment.get)
        for stack in stacks:
            columns = [*zip(*(factored[use] for use in stack), strict=True)]
            gradients = [
                taken.pop(places[0]) if taken else arrived.take(*places, by_position=True)
                for places in columns
            ]
            # sums of outer products have no negative eigenvalues beyond the rounding of their dtype
            gradients = [gradient.to(sums.space.dtype) for gradient in gradients]
            if stack[0] in owners:
                masks = [counting.get(places[0]) for places in columns]
                counts.append(_add_inputs(sums, [owners[use] for use in stack], gradients, masks))
            if options.fisher_type is not FisherType.FORWARD_ONLY:
                _add_gradients(sums, stack, gradients)
        if last and not samples.weight and any(counts):
            warn(
                f"Batch {problem.batch.index} has no term of the loss, since all its targets are "
                "ignored, but its inputs count in the averages A of KFAC. Leave it out, or let the "
                "model's attention_masks(X) be zero there."
            )
        _add_exact_blocks(sums, exact, pieces)
    sums.add(WEIGHT, samples.weight.double())


def _add_uses(sums: FactorSums, layers: Layers, samples: SampleGradients) -> None:
    """Change the blocks of sums if a batch shows new uses."""
    unknown = samples.fallbacks | _unassigned(layers, sums.options)
    if not sums.blocks or not sums.uses.includes(layers.keys(), unknown):
        new = sums.with_uses(sums.uses.union(Uses(frozenset(layers), unknown)))
        sums.uses, sums.blocks = new.uses, new.blocks


def _add_head(sums: FactorSums, head: Head) -> None:
    """Add the head's inputs, and the sum of the Hessians for its B."""
    layers, arrived = layers_of(head.own, sums.options.reduced), head.own.zeros()
    dtype = sums.space.dtype
    _add_uses(sums, layers, head.own)
    for use, places in layers.items():
        if not use.shape.is_bias:
            gradients = [arrived.take(x, by_position=True).to(dtype) for x in places]
            _add_inputs(sums, [[use]], gradients, [None] * len(places))
        if not (use.shape.is_bias and use.shares_gradients):
            diagonal = use.shape.outputs > sums.options.max_factor_size
            hessian = head.hessian.along(None).sum(0) if diagonal else head.hessian.sum()
            sums.add((use, GRADIENTS), hessian.to(dtype).unsqueeze(0))


def _treatment(use: LayerUse, options: Options) -> tuple[bool, ...]:
    """Return whether inputs are averaged, get a one, and what is too large for a matrix."""
    limit, shape = options.max_factor_size, use.shape
    is_reduced, has_bias = use.name in options.reduced, use.has_bias_input(options)
    return is_reduced, has_bias, shape.inputs > limit, shape.outputs > limit


class Padding:
    """Finds out which of the layers' rows count as inputs of a batch: those that are no padding.

    Padding does not count, unless it has a gradient: then it predicts a token, or the mask belongs
    to other sequences. Names do not tell these apart: a decoder's attention reads the encoder's.

    Attributes:
        masks: The model's masks.
    """

    def __init__(self, problem: BatchProblem):
        self.masks = _attention_masks(problem)
        self._reached: dict[ParameterUse, Tensor] = {}

    def note(self, gradients: Mapping[ParameterUse, PerSampleGradient]) -> None:
        """Note which rows have a gradient for some of the vectors."""
        for use, gradient in gradients.items():
            if isinstance(gradient, FactoredGradient) and use.samples is not None:
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


def _unassigned(layers: Layers, options: Options) -> dict[str, str]:
    """Return the parameters whose gradients of samples are needed but not known, and why."""
    reasons = {}
    for use, places in layers.items():
        is_reduced = use.name in options.reduced
        if (is_reduced or not use.shape) and any(x.samples is None for x in places):
            reasons[use.name] = _UNASSIGNED
    return reasons


def _owners(
    layers: Layers,
    arrived: Arrived,
    counting: Mapping[ParameterUse, Tensor | None],
    options: Options,
) -> dict[LayerUse, list[LayerUse]]:
    """Return the uses whose inputs are added, each with those that have the same inputs."""
    sharing = dict[Hashable, list[LayerUse]]()
    for use, places in layers.items():
        if use.shape.is_bias:
            continue
        masks = [counting.get(place) for place in places]
        key = (
            _treatment(use, options)[:3],
            *map(arrived.input_key, places),
            *(None if mask is None else mask.cpu().numpy().tobytes() for mask in masks),
        )
        sharing.setdefault(key, []).append(use)
    return {uses[0]: uses for uses in sharing.values()}


def _add_inputs(
    sums: FactorSums,
    stack: Sequence[Sequence[LayerUse]],
    gradients: Sequence[FactoredGradient],
    masks: Sequence[Tensor | None],
) -> Tensor:
    """Add the inputs of products to the sums for A, and return their number.

    Args:
        sums: The sums.
        stack: For each of several equal uses: those that have the same inputs.
        gradients: Their gradients, side by side.
        masks: The inputs that count, see ``input_factor``.
    """
    reduced, bias, diagonal, _ = _treatment(stack[0][0], sums.options)
    moments, count = input_factor(gradients, masks, reduced, bias, diagonal)
    for uses, moment_of in zip(stack, _parts(moments, len(stack)), strict=True):
        key = tuple(uses if len(uses) == 1 else sorted(uses, key=repr))
        sums.add((key, INPUTS), moment_of)
        sums.add((key, INPUT_COUNT), count.double())
    return count


def _add_gradients(
    sums: FactorSums, stack: Sequence[LayerUse], gradients: Sequence[FactoredGradient]
) -> None:
    """Add the output gradients of equal uses, side by side, to the sums for B."""
    reduced, _, _, diagonal = _treatment(stack[0], sums.options)
    moments = gradient_factor(gradients, reduced, diagonal)
    for use, moment_of in zip(stack, _parts(moments, len(stack)), strict=True):
        sums.add((use, GRADIENTS), moment_of)


def _parts(moments: Tensor, num: int) -> Iterable[Tensor]:
    """Return the moments of several uses side by side. Views would keep all in memory."""
    return [moments] if num == 1 else torch.unbind_copy(moments.unflatten(0, (num, -1)))


def _exact_block_gradients(
    whole: Mapping[ParameterUse, PerSampleGradient], samples: SampleGradients, u: Tensor
) -> Iterable[Piece]:
    """Return the gradients of parameters with exact blocks that have rules, given those of uses.

    If the samples of one use's rows are not known, the whole gradient is computed sample by sample.
    """
    summands: dict[str, list[ParameterUse]] = {}
    for place in whole:
        summands.setdefault(place.name, []).append(place)
    unassigned = {
        name for name, places in summands.items() if any(x.samples is None for x in places)
    }
    known = {
        name: sum_of([whole[place] for place in places])
        for name, places in summands.items()
        if name not in unassigned
    }
    one_by_one = samples.one_by_one(u, unassigned.difference(samples.fallbacks))
    return chain([(slice(0, samples.num_samples), known)], one_by_one)


def _add_exact_blocks(sums: FactorSums, blocks: dict[str, Block], pieces: Iterable[Piece]) -> None:
    """Add outer products of samples' gradients, or their squares, to exact blocks."""
    for _, gradients in pieces:
        for name, gradient in gradients.items():
            block = blocks[name]
            for some in gradient.slices():
                rows = gradient.rows(some).to(sums.space.dtype)
                rows = rows.reshape(-1, block.groups, gradient.num_entries // block.groups)
                sums.add((name, MATRIX), moment(rows, diagonal=block.structure == "diagonal"))
