"""Checks of the first batch: that it repeats, and that model and loss define a risk on it."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import vjp
from curvlinops.linear_operator.space import Columns
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.empirical_risk import EmpiricalRisk
from curvlinops.risk.sample_coupling import (
    COUPLED,
    COUPLED_BATCHES,
    SeenAlone,
    couples_gradients,
    couples_samples,
)
from curvlinops.support.autograd_graph import custom_functions, graph_nodes
from curvlinops.support.digest import digest
from curvlinops.support.norms import double_norm
from curvlinops.support.rng import GeneratorStates, seed_everything
from curvlinops.support.sketch import sketch
from curvlinops.support.stand_in import stand_in

_OTHER_DATA = (
    "Two passes over data yield different batches: data shuffles, or is drawn, masked or augmented "
    "at random. Pass data that yield the same batches in the same order each time: a list of "
    "batches such as list(loader), or a DataLoader with shuffle=False."
)
_OTHER_RESULTS = (
    "The model or the loss gives different values for the same batch. Remove what draws random "
    "numbers in it: model.eval() switches Dropout off. Pass noise in X, or draw it from a "
    "generator that forward() seeds."
)


def check_repeatable(risk: EmpiricalRisk, may_couple: bool) -> Tensor:
    """Draw the first batch twice and evaluate it twice, with different random seeds, and compare.

    Gradients are compared only where they may differ though losses do not. Those that are not
    finite are left to the first product.

    Unless one batch is all data, samples must not interact: the first and the last ones must have
    the same outputs without the rest of their batch. If they ``may_couple``, the user was told. For
    quantities of single samples, they never may.

    Returns:
        A tensor like the output, without memory.
    """
    # parts of the batch last: models may keep what they compute in X
    first, second = _observe(risk, 0), _observe(risk, 1, may_couple)
    if first.data != second.data:
        raise RuntimeError(_OTHER_DATA)
    tolerance = 1e-8 if risk.space.dtype == torch.float64 else 1e-3
    if not all(map(partial(_agree, tolerance), first.results, second.results)):
        raise RuntimeError(_OTHER_RESULTS)
    if second.fault is not None:  # a random model would have it, too
        raise ValueError(second.fault)
    return first.output


class _Observed(NamedTuple):
    """The digest of a batch, the results of it, and why it is refused.

    Of the output, only its shape is kept, in a tensor without memory.
    """

    data: list[tuple]
    output: Tensor
    results: list[Tensor]
    fault: str | None


def _observe(risk: EmpiricalRisk, seed: int, may_couple: bool | None = None) -> _Observed:
    """Draw the first batch and evaluate it; look for faults if it is given what is none."""
    with risk.batches("check_deterministic") as batches:  # which restores the generators
        seed_everything(seed)
        problem = next(batches)
        data = digest((problem.batch.X, problem.batch.y))
        output, results, graph, runs_users_code = _evaluate(problem)
        if risk.per_sample:
            problem.check_numbers(output)
        fault = None
        if may_couple is not None:
            if not may_couple and not risk.is_all_data(problem.batch):
                seen = problem.rules(SeenAlone)
                if not seen.knows(problem.model, graph):
                    fault = _fault_of_samples(risk, problem, output, runs_users_code)
                    if fault is None:
                        seen.note()
        return _Observed(data, stand_in(output), results, fault)


def _fault_of_samples(
    risk: EmpiricalRisk, problem: BatchProblem, output: Tensor, runs_users_code: bool
) -> str | None:
    """Return an error if samples have other outputs or gradients alone, if the batch shows them."""
    num_samples = problem.samples_of(output)
    # two samples are better, since models may treat one alone differently
    num_alone = 2 if num_samples > 3 else 1
    is_evident = num_alone < num_samples == problem.evident_samples
    if not is_evident or not (
        couples_samples(problem, output, num_alone)
        or (runs_users_code and couples_gradients(problem, output))
    ):
        return None
    return COUPLED if risk.per_sample else COUPLED_BATCHES


def _evaluate(problem: BatchProblem) -> tuple[Tensor, list[Tensor], int, bool]:
    """Return the output, the tensors that must repeat, and two facts about the graph.

    These are a hash of its operations, and whether its backward pass runs the user's code.

    The output must repeat, or the loss and perhaps its gradient. If the loss repeats, so does
    its gradient, unless the model draws random numbers that cancel in the loss, or the backward
    pass runs the user's code.
    """
    states, found = GeneratorStates(), dict[str, Tensor]()
    with problem.recording("once", is_summed=False) as (_, leaves, output):
        if problem.loss is None:
            result = output
            problem.check_numbers(output)
        else:
            with problem.formulas():
                result, _ = problem.loss_sum(output)
            problem.check_finite(result.detach())
        nodes = list(graph_nodes(result))
        is_proved = states.are_current() and not problem.facts.hooks
        if problem.loss is not None and (not is_proved or custom_functions(nodes)):
            found = sketches(result, None, leaves)
            problem.check_finite(result.detach(), found)
    operations = hash(tuple(node.name() for node in nodes))
    runs_users_code = problem.runs_users_code(nodes)
    return output.detach(), [result.detach(), *found.values()], operations, runs_users_code


def sketches(start: Tensor, cotangent: Tensor | None, leaves: dict[str, Tensor]) -> Columns:
    """Return the sketch of each tensor's gradient; one gradient is in memory at a time.

    Args:
        start: Where the backward pass begins. Its graph is freed.
        cotangent: The vector that is propagated back; ``None`` for one.
        leaves: The tensors.
    """
    found = {}

    def reduce(name: str, gradient: Tensor) -> Tensor:
        found[name] = sketch(gradient)
        return stand_in(gradient)

    for name, leaf in leaves.items():
        leaf.register_hook(partial(reduce, name))
    vjp({"": start}, {"": cotangent}, leaves, retain=False)
    return found


def _agree(tolerance: float, first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors agree up to a tolerance, relative to the first one's norm."""
    if first.shape != second.shape or torch.equal(first, second):
        return first.shape == second.shape
    equal = (first == second) | (first.isnan() & second.isnan())
    error = torch.where(equal, 0.0, first - second)  # infinities may be equal
    return bool(double_norm(error) <= tolerance * double_norm(first) + 1e-12)
