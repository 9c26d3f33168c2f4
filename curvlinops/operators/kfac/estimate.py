"""Adds a batch to the sums from which the blocks of an approximation are computed."""

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from itertools import chain, combinations
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient, gradient_factor, input_factor, moment
from curvlinops.layers.gradients import Piece, sum_of
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.recorded import UseGradient
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.blocks import (
    GRADIENTS,
    INPUT_COUNT,
    INPUTS,
    MATRIX,
    WEIGHT,
    Block,
    LayerUse,
    Uses,
    group_by_use,
)
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.vectors import (
    hessian_roots,
    mark_last,
    sampled_gradients,
    signed_hessian_roots,
)
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.torch_internals import shape_of_output
from curvlinops.support.warnings import warn

_UNASSIGNED = "it is not known to which samples the rows of its layer belong"


def backpropagated(
    problem: BatchProblem, samples: SampleGradients, options: Options
) -> Iterator[Tensor]:
    """Yield vectors ``[V, *output]`` whose outer products are, or replace, the loss's Hessian.

    Args:
        problem: The risk on a batch.
        samples: The batch's forward pass, which says how many vectors the memory allows at once.
        options: The options of the approximation.
    """
    output, draws, at_once = samples.output, options.mc_samples, samples.vectors_at_once
    if options.fisher_type is FisherType.FORWARD_ONLY:
        yield output.new_zeros(0, *output.shape)
    elif options.fisher_type is FisherType.EMPIRICAL:
        yield problem.loss.gradient(output, problem.batch.y).unsqueeze(0)
    elif options.fisher_type is FisherType.MC:
        vectors = sampled_gradients(problem, output, draws, options.seed) / draws**0.5
        yield from vectors.split(at_once)
    elif options.exact:
        yield from hessian_roots(problem, output, at_once)
    else:
        yield from signed_hessian_roots(problem, output, at_once, draws, options.seed)


def add_batch(sums: FactorSums, problem: BatchProblem, samples: SampleGradients) -> None:
    """Add a batch to sums.

    Args:
        sums: The sums over the batches before. Their blocks change if the batch shows new uses.
        problem: The risk on the batch.
        samples: The batch's forward pass.

    Raises:
        ChangedError: If the batch uses a parameter in a way for which other sums are needed than
            those over the batches before.
    """
    vectors = backpropagated(problem, samples, sums.options)
    at_output: set[LayerUse] = set()
    padding = Padding(problem, samples, sums.options)
    for chunk, (u, last) in enumerate(mark_last(vectors)):
        groups = group_by_use(samples.by_use(u, last), sums.options.reduced, samples.conclusions)
        if chunk == 0:
            unknown = samples.fallbacks | _unassigned(groups, sums.options)
            if not sums.blocks or not sums.uses.includes(groups.keys(), unknown):
                new = sums.with_uses(sums.uses.union(Uses(frozenset(groups), unknown)))
                sums.uses, sums.blocks = new.uses, new.blocks
            at_output = _at_output(groups, problem, samples, sums.options)
        exact = sums.exact_blocks
        pieces = chain(_exact_block_gradients(exact, groups, samples, u), samples.rest(u))
        padding.note(chain(*groups.values()))
        if last:
            weights = {use: x for use, x in groups.items() if use.name not in exact}
            counts = _add_inputs(sums, weights, padding)
            if not samples.weight and any(counts):
                warn(
                    f"Batch {problem.batch.index} has no term of the loss, since all its targets "
                    "are ignored, but its inputs count in the averages A of KFAC. Leave it out, or "
                    "let the model's attention_masks(X) be zero there."
                )
        for use in list(groups):
            # memory of gradients that were added is given back at once
            contributions = groups.pop(use)
            if use not in at_output:
                _add_gradients(sums, use, contributions)
        _add_exact_blocks(sums, exact, pieces)
    for use in at_output:
        hessian = problem.loss.hessian_sum(samples.output, problem.batch.y)
        sums.add((use, GRADIENTS), hessian.to(sums.space.dtype).unsqueeze(0))
    sums.add(WEIGHT, samples.weight.double())


class Padding:
    """Finds out which of the layers' rows count as inputs of a batch: those that are no padding.

    Padding does not count, unless it has a gradient: then it predicts a token, or the mask belongs
    to other sequences.

    Args:
        problem: The risk on the batch.
        samples: The batch's forward pass.
        options: The options of the approximation.
    """

    def __init__(self, problem: BatchProblem, samples: SampleGradients, options: Options):
        self._masks = _attention_masks(problem)
        self._reached: dict[ParameterUse, Tensor] = {}
        self._weight = samples.weight
        pairs = combinations(self._masks, 2)
        differ = any(a.shape == b.shape and not torch.equal(a, b) for a, b in pairs)
        if differ and options.fisher_type is FisherType.FORWARD_ONLY:
            u = problem.loss.gradient(samples.output, problem.batch.y)
            self.note(samples.by_use(u.unsqueeze(0)))

    def note(self, contributions: Iterable[UseGradient]) -> None:
        """Note which rows have a gradient for some of the vectors."""
        for contribution in contributions if self._masks else ():
            gradient, use = contribution.gradient, contribution.recorded
            if isinstance(gradient, FactoredGradient) and not contribution.is_unassigned:
                reached = gradient.output_gradients().flatten(3).ne(0).any(-1).any(0)
                self._reached[use] = reached | self._reached.get(use, False)

    def counting(self, contribution: UseGradient) -> Tensor | None:
        """Return which rows of a layer's use count, ``[N, S]``; ``None`` if all do.

        Args:
            contribution: The use's gradients.

        Raises:
            NotImplementedError: If masks of the same shape differ, and no row has a gradient.
        """
        reached = self._reached.get(contribution.recorded)
        fitting = [x for x in self._masks if reached is not None and x.shape == reached.shape]
        if not fitting:
            return None
        differ = any(not torch.equal(mask, fitting[0]) for mask in fitting)
        if differ and not reached.any() and self._weight:
            raise NotImplementedError(
                f"Two masks of attention_masks(X) fit the layer of '{contribution.name}', and it "
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


def _unassigned(groups: dict[LayerUse, list[UseGradient]], options: Options) -> dict[str, str]:
    """Return the parameters whose gradients of samples are needed but not known, and why."""
    reasons = {}
    for use, contributions in groups.items():
        is_reduced = use.name in options.reduced
        if (is_reduced or not use.shape) and any(x.is_unassigned for x in contributions):
            reasons[use.name] = _UNASSIGNED
    return reasons


def _at_output(
    groups: dict[LayerUse, list[UseGradient]],
    problem: BatchProblem,
    samples: SampleGradients,
    options: Options,
) -> set[LayerUse]:
    """Return the uses whose factor B is the sum of the loss's Hessians.

    The vectors of type-2 are square roots of the terms' Hessians. They arrive as they are at a call
    whose output is the model's output, and whose rows are the terms. In the reduce setting, those
    of a sample's terms must not be added up.
    """
    if options.fisher_type is not FisherType.TYPE2:
        return set()
    output, loss = samples.output, problem.loss
    numbers = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    numbers = numbers.reshape(1, *output.shape)
    terms = loss.to_terms(numbers)[0]
    are_apart = options.exact or len(terms) == samples.num_samples

    def has_terms_as_rows(recorded: ParameterUse) -> bool:
        use = recorded.use
        rows = use.to_rows(numbers.reshape(1, *shape_of_output(recorded.node)))
        return torch.equal(rows.reshape(prod(use.row_shape), -1), terms)

    return {
        use
        for use, contributions in groups.items()
        if len(contributions) == 1
        and samples.is_output_of(contributions[0].recorded)
        and use.shape is not None
        and (use.shape.groups, use.shape.outputs) == (1, terms.shape[1])
        and use.shape.outputs <= options.max_factor_size
        and not (use.shape.is_bias and use.shares_gradients)
        and (are_apart or use.name not in options.reduced)
        and has_terms_as_rows(contributions[0].recorded)
    }


def _add_inputs(
    sums: FactorSums, groups: Mapping[LayerUse, list[UseGradient]], padding: Padding
) -> list[Tensor]:
    """Add the inputs of all products to the sums for A; those of several layers are added once.

    Args:
        sums: The sums.
        groups: The gradients of each use.
        padding: Tells which inputs count, with the gradients of all vectors.

    Returns:
        The numbers of inputs.
    """
    options, layers = sums.options, dict[Hashable, list[tuple]]()
    for use, contributions in groups.items():
        if use.shape is None or use.shape.is_bias:
            continue
        counting = [padding.counting(x) for x in contributions]
        # whether inputs are averaged, get a one, and are too many for a matrix
        treatment = (
            use.name in options.reduced,
            use.has_bias_input(options),
            use.shape.inputs > options.max_factor_size,
        )
        inputs = tuple(
            (x.gradient.input_key(), None if mask is None else mask.cpu().numpy().tobytes())
            for x, mask in zip(contributions, counting, strict=True)
        )
        layers.setdefault((treatment, inputs), []).append((use, counting))
    counts: list[Tensor] = []
    for (treatment, _), members in layers.items():
        use, counting = members[0]
        # sums of outer products have no negative eigenvalues beyond the rounding of their dtype
        gradients = [x.gradient.to(sums.space.dtype) for x in groups[use]]
        moments, count = input_factor(gradients, counting, *treatment)
        uses = [use for use, _ in members]
        key = tuple(uses if len(uses) == 1 else sorted(uses, key=repr))
        sums.add((key, INPUTS), moments)
        sums.add((key, INPUT_COUNT), count.double())
        counts.append(count)
    return counts


def _add_gradients(sums: FactorSums, use: LayerUse, contributions: list[UseGradient]) -> None:
    """Add the output gradients of one use to the sums for B."""
    shape, options = use.shape, sums.options
    if shape is None or options.fisher_type is FisherType.FORWARD_ONLY:
        return
    if shape.is_bias and use.shares_gradients:  # with its weight
        return
    gradients = [x.gradient.to(sums.space.dtype) for x in contributions]
    diagonal = shape.outputs > options.max_factor_size
    sums.add((use, GRADIENTS), gradient_factor(gradients, use.name in options.reduced, diagonal))


def _exact_block_gradients(
    names: Collection[str],
    groups: dict[LayerUse, list[UseGradient]],
    samples: SampleGradients,
    u: Tensor,
) -> Iterable[Piece]:
    """Return the gradients of parameters with exact blocks that have rules.

    If the samples of one use's rows are not known, the whole gradient is computed sample by sample.
    """
    summands: dict[str, list[UseGradient]] = {}
    for use, contributions in groups.items():
        if use.name in names:
            summands.setdefault(use.name, []).extend(contributions)
    unassigned = {
        name
        for name, contributions in summands.items()
        if any(x.is_unassigned for x in contributions)
    }
    known = {
        name: sum_of([x.gradient for x in contributions])
        for name, contributions in summands.items()
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
