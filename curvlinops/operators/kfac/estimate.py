"""What a batch adds to the sums of which the blocks of an approximation are made."""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.factors import gradient_factor, input_factor, moment
from curvlinops.layers.gradients import PerSampleGradient, Piece, PulledBackGradient
from curvlinops.layers.outer import sum_of
from curvlinops.layers.recorded import Part
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.plan import LayerUse, Uses, group_by_use
from curvlinops.operators.kfac.sums import (
    TERMS,
    FactorSums,
    Key,
    Planner,
    has_bias_input,
)
from curvlinops.operators.vectors import (
    hessian_roots,
    mark_last,
    signed_hessian_roots,
    would_be_gradients,
)
from curvlinops.risk.empirical_risk import BatchProblem

#: Why there may be no factors in the reduce setting.
_OPEN = (
    "some of its layer's rows have no gradient, so that it is not known which samples they belong "
    "to, over which kfac_approx='reduce' averages ('expand' does not)"
)
_UNSORTED = "it is not known to which samples the rows of its layer belong"


def backpropagated(
    problem: BatchProblem, samples: SampleGradients, options: Options
) -> Iterator[Tensor]:
    """Yield vectors ``[V, *output]`` whose outer products are, or replace, the loss's Hessian.

    Args:
        problem: The risk on a batch.
        samples: The batch's forward pass, which says how many vectors the memory allows at once.
        options: The options of the approximation.
    """
    for vectors in _all_vectors(problem, samples.output, samples.num_samples, options):
        yield from vectors.split(samples.vectors_at_once)


def _all_vectors(
    problem: BatchProblem, output: Tensor, num_samples: int, options: Options
) -> Iterable[Tensor]:
    if options.fisher_type is FisherType.FORWARD_ONLY:
        return [output.new_zeros(0, *output.shape)]
    if options.fisher_type is FisherType.EMPIRICAL:
        return [problem.loss.gradient(output, problem.batch.y).unsqueeze(0)]
    if options.fisher_type is FisherType.MC:
        draws = would_be_gradients(problem, output, options.mc_samples, options.seed)
        return [draws / options.mc_samples**0.5]
    if options.exact:
        return hessian_roots(problem, output, num_samples)
    return signed_hessian_roots(problem, output, options.mc_samples, options.seed, num_samples)


def add_batch(
    sums: FactorSums, problem: BatchProblem, samples: SampleGradients, planner: Planner
) -> None:
    """Add a batch to sums.

    Args:
        sums: The sums over the batches before.
        problem: The risk on the batch.
        samples: The batch's forward pass.
        planner: Chooses the structure of the blocks.

    Raises:
        ChangedError: If the batch uses a parameter in a way for which other sums are needed than
            those over the batches before.
    """
    options = planner.options
    vectors = backpropagated(problem, samples, options)
    for chunk, (u, last) in enumerate(mark_last(vectors)):
        groups = group_by_use(samples.parts(u, last), options.reduced)
        if chunk == 0:
            unknown = samples.fallbacks | _unassigned(groups, options)
            if not sums.plan.blocks or not sums.plan.uses.includes(groups.keys(), unknown):
                uses = sums.plan.uses.union(Uses(frozenset(groups), unknown))
                sums.plan = planner.extend(sums.plan, uses)
        exact = chain(_exact_forms(sums, groups, samples, u), samples.rest(u))
        for use in list(groups):
            # what was added is not kept in memory
            for key, tensor in _factors(sums, use, groups.pop(use), chunk == 0, planner):
                sums.add(key, tensor)
        _add_exact_blocks(sums, exact, planner)
    sums.add(TERMS, problem.terms(samples.output).double())


def _unassigned(groups: dict[LayerUse, list[Part]], options: Options) -> dict[str, str]:
    """Return the parameters whose gradients should be those of samples but are not, and why."""
    reasons = {}
    for use, parts in groups.items():
        if use.name in options.reduced and use.kind and any(part.open for part in parts):
            reasons[use.name] = _OPEN
        if (use.name in options.reduced or not use.kind) and any(part.unsorted for part in parts):
            reasons[use.name] = _UNSORTED
    return reasons


def _factors(
    sums: FactorSums, use: LayerUse, parts: list[Part], is_first_chunk: bool, planner: Planner
) -> Iterator[tuple[Key, Tensor]]:
    """Yield what the gradients of one use add to Kronecker factors."""
    shapes, options = sums.plan.shapes, planner.options
    of_inputs, of_gradients = shapes.get((use, "A")), shapes.get((use, "B"))
    if of_inputs is None and of_gradients is None:
        return
    # sums of outer products have no negative eigenvalues beyond the rounding of their dtype
    dtype, reduce = planner.space.dtype, use.name in options.reduced
    parts = [on_slice(part, dtype) for part in parts]
    if of_gradients is not None:
        yield (use, "B"), gradient_factor(parts, reduce, diagonal=len(of_gradients) == 2)
    if of_inputs is not None and is_first_chunk:
        bias = 1.0 if has_bias_input(use, options) else None
        total, count = input_factor(parts, reduce, bias, diagonal=len(of_inputs) == 2)
        yield (use, "A"), total
        yield (use, "count"), count.double()


def on_slice(part: Part, dtype: torch.dtype) -> Part:
    """Return gradients with respect to the slice of a parameter that a layer uses."""
    form = part.form
    form = form.form if isinstance(form, PulledBackGradient) else form
    return part._replace(form=form.to(dtype))


def _exact_forms(
    sums: FactorSums, groups: dict[LayerUse, list[Part]], samples: SampleGradients, u: Tensor
) -> Iterable[Piece]:
    """Return the gradients of parameters with exact blocks that layers' rules know."""
    names = {block.names[0] for block in sums.plan.blocks if block.is_exact}
    forms: dict[str, list[PerSampleGradient]] = {}
    unsorted = set()
    for use, parts in groups.items() if names else ():
        if use.name in names:
            forms.setdefault(use.name, []).extend(part.form for part in parts if not part.unsorted)
            unsorted |= {use.name for part in parts if part.unsorted}
    alone = samples.one_by_one(u, unsorted.difference(samples.fallbacks))
    known = {name: sum_of(own) for name, own in forms.items() if own}
    return chain([(slice(0, samples.num_samples), known)], alone)


def _add_exact_blocks(sums: FactorSums, pieces: Iterable[Piece], planner: Planner) -> None:
    """Add outer products of samples' gradients, or their squares, to exact blocks."""
    space = planner.space
    blocks = {block.names[0]: block for block in sums.plan.blocks if block.is_exact}
    for _, gradients in pieces:
        for name, gradient in gradients.items():
            block, size = blocks[name], prod(space.shapes[name])
            for some in gradient.parts():
                rows = gradient.rows(some).reshape(-1, block.groups, size // block.groups)
                is_diagonal = block.structure == "diagonal"
                sums.add((name, "matrix"), moment(rows.to(space.dtype), diagonal=is_diagonal))
