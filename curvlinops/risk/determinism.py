"""Compares two draws of the first batch, and what model and loss make of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from curvlinops.autodiff.backward import vjp
from curvlinops.autodiff.scattering import stand_in
from curvlinops.linear_operator.space import Columns
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import Head, evaluate, gradient
from curvlinops.risk.empirical_risk import EmpiricalRisk
from curvlinops.risk.sample_coupling import COUPLED, couples_samples
from curvlinops.support.digest import digest
from curvlinops.support.norms import double_norm
from curvlinops.support.rng import seed_everything


def check_repeatable(risk: EmpiricalRisk, per_sample: bool) -> None:
    """Draw the first batch twice and evaluate it twice, with different random seeds, and compare.

    Args:
        risk: Model, loss and data.
        per_sample: Whether samples must not interact. The first and the last ones must then have
            the same outputs without the rest of their batch.

    Raises:
        ValueError: If the loss or its gradient is not finite, or samples interact.
        RuntimeError: If data, outputs, loss or gradient differ.
    """
    first, second = _observe(risk, 0, per_sample), _observe(risk, 1, False)
    if first.data != second.data:
        raise RuntimeError(_explain_data(risk.data.data))
    tolerance = 1e-8 if risk.space.dtype == torch.float64 else 1e-3
    if not all(map(partial(_agree, tolerance), first.results, second.results)):
        raise RuntimeError(_explain_model(risk))
    if first.is_coupled:  # a random model would differ, too
        raise ValueError(COUPLED)


class _Observed(NamedTuple):
    """The digest of a batch, tensors that were computed of it, and whether samples interact."""

    data: list[tuple]
    results: list[Tensor]
    is_coupled: bool


def _observe(risk: EmpiricalRisk, seed: int, per_sample: bool) -> _Observed:
    """Draw the first batch and evaluate it."""
    with risk.batches("check_deterministic") as batches:  # which restores the generators
        seed_everything(seed)
        problem = next(batches)
        data = digest((problem.batch.X, problem.batch.y))
        output, results = _evaluate(problem)
        # two samples are better, since models may treat one alone differently
        num_first = 2 if problem.samples_of(output) > 3 else 1
        is_coupled = per_sample and _can_cut(problem, output, num_first)
        return _Observed(data, results, is_coupled and couples_samples(problem, output, num_first))


def _can_cut(problem: BatchProblem, output: Tensor, num_first: int) -> bool:
    return num_first < problem.samples_of(output) == problem.evident_samples


def _evaluate(problem: BatchProblem) -> tuple[Tensor, list[Tensor]]:
    """Return the output, and what must repeat: the output, or loss and gradient."""
    if problem.loss is None:
        output = evaluate(problem)
        problem.check_numbers(output)
        return output, [output]
    outputs = []

    def head(output: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(output.detach())
        return problem.loss_sum(output)

    if problem.model.sharded:
        value, columns = _sketches(problem, head)
    else:
        value, columns, _ = gradient(problem, head)
    problem.check_finite(value, columns)
    return outputs[0], [value, *columns.values()]


def _sketches(problem: BatchProblem, head: Head) -> tuple[Tensor, Columns]:
    """Return a scalar function of the output, and two numbers ``[2]`` of each tensor's gradient.

    One gradient is in memory at a time.
    """
    sketches = {}

    def reduce(name: str, gradient: Tensor) -> Tensor:
        mean = gradient.sum(dtype=torch.float64) / max(gradient.numel(), 1) ** 0.5
        sketches[name] = torch.stack([double_norm(gradient), mean])
        return stand_in(gradient)

    with problem.recording("once", is_summed=False) as (_, leaves, output):
        for name, leaf in leaves.items():
            leaf.register_hook(partial(reduce, name))
        with problem.formulas():
            loss, _ = head(output)
        vjp({"": loss}, {"": None}, leaves, retain=False)
    return loss.detach(), sketches


def _agree(tolerance: float, first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors agree up to a tolerance, relative to the first one's norm."""
    if first.shape != second.shape or torch.equal(first, second):
        return first.shape == second.shape
    equal = (first == second) | (first.isnan() & second.isnan())
    error = torch.where(equal, 0.0, first - second)  # infinities may be equal
    return bool(double_norm(error) <= tolerance * double_norm(first) + 1e-12)


def _explain_data(data: Any) -> str:
    """Return why two draws of the first batch differ."""
    reason = "data shuffles, or is drawn, masked or augmented at random"
    loader = getattr(data, "loader", data)  # pairs of a loader's batches
    shuffles = isinstance(loader, DataLoader) and isinstance(loader.sampler, RandomSampler)
    fixed = "list(data)"
    if isinstance(loader, DataLoader):
        fixed = "list(loader), if its batches fit into memory"
    if shuffles:
        reason = "the DataLoader shuffles (shuffle=True)"
        fixed += ", or a DataLoader with shuffle=False"
    return (
        f"Two passes over data yield different batches: {reason}. Pass data that yield the same "
        f"batches in the same order each time: {fixed}."
    )


def _explain_model(risk: EmpiricalRisk) -> str:
    """Return which module is random, by evaluating the model twice on the first batch."""
    culprit = None
    if risk.model.module is not None:
        with risk.batches("check_deterministic") as batches:
            culprit = _random_module(risk.model.module, partial(evaluate, next(batches)))
    if culprit is None:
        return (
            "The model or the loss gives different values for the same batch. Remove what draws "
            "random numbers in it (module.eval() switches Dropout off)."
        )
    name, module = culprit
    remedy = "Pass the noise that it draws in X"
    if module.training:
        remedy = (
            "It is in train mode: call eval() on it. If it draws noise in any mode, pass that in X"
        )
    return (
        f"The model is not deterministic: its module '{name}' ({type(module).__name__}) gives "
        f"different outputs for the same input. {remedy}, or draw it from a generator that "
        "forward() seeds."
    )


def _random_module(module: nn.Module, evaluate: Callable[[], Any]) -> tuple[str, nn.Module] | None:
    """Return the innermost module with other outputs for the same inputs, and its name."""
    names = {child: name for name, child in module.named_modules()}
    runs: list[list[tuple[nn.Module, list[tuple], list[tuple]]]] = []

    def record(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        runs[-1].append((child, digest((args, kwargs)), digest(output)))

    handles = [child.register_forward_hook(record, with_kwargs=True) for child in names]
    try:
        for seed in (0, 1):
            runs.append([])
            seed_everything(seed)
            evaluate()
    finally:
        for handle in handles:
            handle.remove()
    # inner modules finish first
    for (child, inputs, output), (_, inputs_again, output_again) in zip(*runs, strict=False):
        if inputs == inputs_again and output != output_again:
            return names[child], child
    return None
