"""Compares two passes over data, model and loss, and finds out why they differ."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain
from math import isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from curvlinops.autodiff import backward
from curvlinops.linear_operator.space import norm
from curvlinops.risk.empirical_risk import BatchProblem, EmpiricalRisk
from curvlinops.risk.sample_coupling import COUPLED, couples_samples
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import preserved_rng, seed_everything
from curvlinops.support.torch_internals import strided_tensors


def check_repeatable(risk: EmpiricalRisk, per_sample: bool) -> None:
    """Pass twice over the data, with different random seeds, and compare.

    Args:
        risk: Model, loss and data.
        per_sample: Whether samples must not interact. The first few must then have the same outputs
            without the rest of their batch.

    Raises:
        ValueError: If a batch's loss or gradient is not finite, there is no term, or samples
            interact.
        RuntimeError: If data, outputs, loss or gradient differ between the passes.
    """
    data, results, coupled = _observe(risk, 0, per_sample)
    data_again, results_again, _ = _observe(risk, 1, False)
    if not _agree(data, data_again, 1e-6):
        raise RuntimeError(_explain_data(risk.data.data, data, data_again))
    tolerance = 1e-8 if risk.space.dtype == torch.float64 else 1e-3
    for index, (one, two) in enumerate(zip(results, results_again, strict=True)):
        if not _agree([one], [two], tolerance):
            raise RuntimeError(f"{_explain_model(risk, index)} (Noticed on batch {index}.)")
    if coupled:  # a random model would differ, too
        raise ValueError(COUPLED)


def _observe(
    risk: EmpiricalRisk, seed: int, per_sample: bool
) -> tuple[list[list[float]], list[list[float]], bool]:
    """Return summaries of batches and of their results, and whether samples interact."""
    data, results, cut, coupled, total = [], [], False, False, 0.0
    with preserved_rng(), risk.batches("check_deterministic") as batches:
        seed_everything(seed)
        for problem in batches:
            data.append(_summary((problem.batch.X, problem.batch.y)))
            result, output, terms = _evaluate(problem)
            results.append(result)
            total = total + terms
            if seed == 0 and problem.batch.index:  # the first batch was checked before
                problem.check_target(output, with_values=True)
            # two samples are better, since models may treat one alone differently
            num_first = 2 if len(output) > 3 else 1
            if per_sample and not cut and _can_cut(problem, output, num_first):
                cut, coupled = True, couples_samples(problem, output, num_first)
    if seed == 0 and risk.ranks.size == 1:  # other ranks may have terms
        risk.scale(total)
    return data, results, coupled


def _can_cut(problem: BatchProblem, output: Tensor, num_first: int) -> bool:
    with suppress(ValueError):  # the number of samples is not evident
        return num_first < problem.num_samples == len(output)
    return False


def _evaluate(problem: BatchProblem) -> tuple[list[float], Tensor, Tensor]:
    """Return a summary of a batch's results, the output, and the terms."""
    if problem.loss is None:
        output = backward.evaluate(problem)
        problem.check_numbers(output)
        return _summary(output), output, problem.terms(output)
    outputs = []

    def head(output: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(output.detach())
        return problem.loss_sum(output)

    value, columns, terms = backward.gradient(problem, head)
    problem.check_finite(value, columns)
    return [float(value), norm(columns)], outputs[0], terms


def _summary(tree: Any) -> list[float]:
    """Return, for each tensor in nested containers, its size, its sum, and a weighted sum."""
    numbers: list[float] = []
    for leaf in (part for tensor in leaves(tree) for part in strided_tensors(tensor)):
        leaf = leaf.detach().resolve_conj()
        flat = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).flatten().double()
        ramp = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
        numbers += [flat.numel(), *torch.stack([flat.sum(), flat @ ramp.cos_()]).tolist()]
    return numbers


def _agree(first: list[list[float]], second: list[list[float]], tolerance: float) -> bool:
    """Return whether the summaries of two passes agree up to a relative tolerance."""
    if list(map(len, first)) != list(map(len, second)):
        return False
    pairs = zip(chain(*first), chain(*second), strict=True)
    return all(
        isclose(x, y, rel_tol=tolerance, abs_tol=1e-12) or (isnan(x) and isnan(y)) for x, y in pairs
    )


def _explain_data(data: Any, first: list[list[float]], second: list[list[float]]) -> str:
    """Return why two passes saw different batches, given the batches' summaries."""
    if len(first) != len(second):
        return (
            f"The first pass over data yields {len(first)} batches, the second {len(second)}. "
            "Each iteration must start anew; pass a DataLoader or a list."
        )
    reasons = []
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, RandomSampler):
            reasons.append("the DataLoader shuffles (shuffle=True)")
        if data.drop_last:
            reasons.append("the DataLoader drops the last, incomplete batch (drop_last=True)")
    reasons = reasons or ["data shuffles, or is drawn or augmented at random"]
    return (
        f"Two passes over data yield different batches: {', and '.join(reasons)}. Use a loader "
        "that always yields the same batches in the same order, e.g. shuffle=False."
    )


def _explain_model(risk: EmpiricalRisk, index: int) -> str:
    """Return which module is random, by evaluating the model twice on a batch."""
    culprit = None
    with risk.batches("check_deterministic") as batches:
        for problem in batches:
            if problem.batch.index == index and risk.model.module is not None:
                culprit = _random_module(risk.model.module, partial(backward.evaluate, problem))
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
    runs: list[list[tuple[nn.Module, list[float], list[float]]]] = []

    def record(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        runs[-1].append((child, _summary((args, kwargs)), _summary(output)))

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
