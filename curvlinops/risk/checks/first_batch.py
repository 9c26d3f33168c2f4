"""Checks of the first batch, when an operator is built: whether it is the same twice, and more."""

import re
from collections import OrderedDict
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import vjp
from curvlinops.linear_operator.space import Columns
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.coupling import check_interaction, error_and_scale
from curvlinops.risk.empirical_risk import EmpiricalRisk
from curvlinops.support.autograd_graph import graph_nodes
from curvlinops.support.digest import digest, sketch
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import GeneratorStates, seed_everything
from curvlinops.support.torch_internals import version_of, without_torch_function
from curvlinops.team.scattering import stand_in

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


#: The modules of types and functions that compute the same twice, if no random number is drawn.
_KNOWN = re.compile(r"builtins|torch|torch\.nn\..*|torch\._C.*")
_CONTAINERS = {dict, OrderedDict, list, tuple, set}
#: Types of these modules whose objects have nothing in them; they are most frequent.
_PLAIN = {type(None), bool, int, float, str, Tensor, nn.Parameter}


def check_first_batch(risk: EmpiricalRisk) -> Tensor:
    """Draw the first batch, evaluate it with different random seeds, check it; return its output.

    Once is enough where nothing can differ, see ``observe``. The output has no memory.
    """
    first = None
    for seed in (0, 1):
        with risk.batches("check_deterministic") as batches:  # which restores the generators
            seed_everything(seed)
            problem = next(batches)
            seen = observe(problem)
            if first is not None:
                check_same(first, seen)
            if first is not None or seen.repeats:
                check_numbers(problem, seen)
                check_interaction(problem, seen)  # at last: models may keep what they compute in X
                break
        first = seen = seen._replace(output=stand_in(seen.output))
        del problem  # and its batch
    return stand_in(seen.output)


class Observed(NamedTuple):
    """A batch that was evaluated."""

    data: list[tuple]  # the digest of X and y, before
    output: Tensor  # without its graph
    result: Tensor  # the loss, or the output if there is none
    gradient: Columns  # sketches by parameter, if it may differ though losses do not
    runs_users_code: bool  # whether hooks, or own functions, run in the backward pass
    repeats: bool  # whether a second evaluation is known to have the same numbers


def observe(problem: BatchProblem) -> Observed:
    """Evaluate a batch.

    If the loss repeats, so does its gradient, unless the model draws random numbers that cancel in
    the loss, as those of Dropout in a branch that is zero, or the backward pass runs the user's
    code.

    All repeats if all code is PyTorch's own, and neither draws random numbers nor writes to the
    batch.
    """
    batch = leaves((problem.batch.X, problem.batch.y))
    data, states, versions = digest(batch), GeneratorStates(), [*map(version_of, batch)]
    with problem.recording("once", is_summed=False) as (_, params, output):
        result, gradient = output, {}
        if problem.loss is not None:
            with problem.formulas():
                result, _ = problem.loss_sum(output)
        draws, nodes = not states.are_current(), graph_nodes(result)
        runs_users_code = problem.runs_users_code(nodes)
        if problem.loss is not None and (draws or runs_users_code):
            gradient = sketches(result, None, params)
    output, result = output.detach(), result.detach()
    is_written = versions != [*map(version_of, batch)]
    repeats = not (draws or runs_users_code or is_written) and _is_known_risk(problem.risk)
    return Observed(data, output, result, gradient, runs_users_code, repeats)


def check_same(first: Observed, second: Observed) -> None:
    """Refuse batches, or results on them, that differ."""
    if first.data != second.data:
        raise RuntimeError(_OTHER_DATA)
    agree = partial(_agree, 1e-8 if first.result.dtype == torch.float64 else 1e-3)
    results = ([x.result, *x.gradient.values()] for x in (first, second))
    if not all(map(agree, *results)):
        raise RuntimeError(_OTHER_RESULTS)


def check_numbers(problem: BatchProblem, seen: Observed) -> None:
    """Refuse a loss that is not finite, or its gradient, or an output with NaN where that counts.

    Gradients that are not compared are left to the first product.
    """
    if problem.loss is None or problem.risk.per_sample:
        problem.check_numbers(seen.output)
    if problem.loss is not None:
        problem.check_finite(seen.result, seen.gradient)


def _is_known_risk(risk: EmpiricalRisk) -> bool:
    """Return whether the data is a list of batches, and model and loss are PyTorch's own."""
    data, loss = risk.data.data, risk.loss
    has_formula = loss is None or loss.is_function_of_values
    is_listed = type(data) in (list, tuple) and _is_known(data[0])
    return has_formula and is_listed and not risk.model.shards and _is_known(risk.model.source)


def _is_known(part: Any) -> bool:
    """Return whether an object, and all in it, is of Python or PyTorch, whose code repeats."""
    if type(part) in _CONTAINERS:
        inner = part.values() if isinstance(part, dict) else part
        inner = (x for x in inner if type(x) not in _PLAIN)
        return all(_is_known(x) for x in inner if type(x) not in _CONTAINERS or x)
    is_module = isinstance(part, nn.Module)
    # else a function, or an object
    named = type(part) if is_module or not hasattr(part, "__qualname__") else part
    is_known = _KNOWN.fullmatch(named.__module__ or "torch") is not None
    return is_known and (not is_module or _is_known(vars(part)))  # its modules, hooks and functions


def sketches(start: Tensor, cotangent: Tensor | None, leaves: dict[str, Tensor]) -> Columns:
    """Return the sketch of each leaf's gradient, one at a time; the graph of the start is freed."""
    found = {}

    def reduce(name: str, gradient: Tensor | None) -> Tensor | None:
        if gradient is None:  # the user's function has returned none
            return None
        found[name] = sketch(gradient)
        return stand_in(gradient)

    with without_torch_function():  # these are no hooks of the user's
        for name, leaf in leaves.items():
            leaf.register_hook(partial(reduce, name))
    vjp({"": start}, {"": cotangent}, leaves, retain=False)
    return found


def _agree(tolerance: float, first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors agree up to a tolerance, relative to the first one's norm."""
    if first.shape != second.shape or torch.equal(first, second):
        return first.shape == second.shape
    error, scale = error_and_scale(second, first, first)
    return error <= tolerance * scale + 1e-12
