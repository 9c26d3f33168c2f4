"""Is a pass over data, model and loss repeatable? If it is not: why?"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from curvlinops.autodiff import backward
from curvlinops.linear_operator.space import norm
from curvlinops.risk.empirical_risk import BatchProblem, EmpiricalRisk
from curvlinops.risk.output_checks import check_finite, check_numbers
from curvlinops.risk.sample_coupling import COUPLED, couples_samples
from curvlinops.support.pytree import leaves, strided_tensors
from curvlinops.support.rng import preserved_rng, seed_everything


def check_repeatable(risk: EmpiricalRisk, independent: bool) -> None:
    """Pass twice over the data, with different random seeds, and compare.

    Args:
        risk: Model, loss and data.
        independent: Whether the first few samples of a batch alone must have the same outputs.

    Raises:
        ValueError: If a batch's loss or gradient is not finite, there is no term, or samples
            interact.
        RuntimeError: If data, outputs, loss or gradient differ between the passes.
    """
    coupled: list[bool] = []

    def look(problem: BatchProblem, output: Tensor) -> None:
        if independent and not coupled:  # on the first batch of which there is a verdict
            verdict = couples_samples(problem, output)
            coupled.extend([] if verdict is None else [verdict])

    first, second = _observe(risk, 0, look), _observe(risk, 1, lambda *_: None)
    data = [[observation[0] for observation in run] for run in (first, second)]
    if not agree(data[0], data[1], 1e-6):
        raise RuntimeError(explain_data(risk.data.data, *data))
    for index, ((_, values), (_, again)) in enumerate(zip(first, second, strict=True)):
        tolerance = 1e-8 if risk.space.dtype == torch.float64 else 1e-3
        if not agree([values], [again], tolerance):
            raise RuntimeError(_explain_model(risk, index))
    if any(coupled):  # only now it is known that it is not by chance
        raise ValueError(COUPLED)


def _observe(
    risk: EmpiricalRisk, seed: int, look: Callable[[BatchProblem, Tensor], None]
) -> list[tuple[list[float], list[float]]]:
    """Return, for each batch, numbers that identify the data and what the model makes of it."""
    observations, terms = [], 0.0

    with preserved_rng():
        seed_everything(seed)
        with risk.batches("check_deterministic") as batches:
            for problem in batches:
                if seed == 0:
                    # on all batches, not only on the first
                    risk.values_checked = risk.loss is None
                data = fingerprint((problem.batch.X, problem.batch.y))
                numbers, output, own = _evaluate(risk, problem)
                terms = terms + own
                look(problem, output)
                observations.append((data, numbers))
    if seed == 0 and risk.ranks.size == 1:  # else other data may have terms
        risk.scale(terms)
    return observations


def _evaluate(risk: EmpiricalRisk, problem: BatchProblem) -> tuple[list[float], Tensor, Tensor]:
    """Return numbers that identify what the model makes of a batch, its output, and the terms."""
    if risk.loss is None:
        output = backward.evaluate(problem)
        check_numbers(problem.batch, output)
        return fingerprint(output), output, problem.terms(output)
    outputs = []

    def head(output: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(output.detach())
        return problem.loss_sum(output)

    value, columns, terms = backward.gradient(problem, head)
    check_finite(problem.batch, value, columns)
    return [float(value), norm(columns)], outputs[0], terms


def _explain_model(risk: EmpiricalRisk, index: int) -> str:
    explanation = ""
    with risk.batches("check_deterministic") as batches:
        for problem in batches:
            if problem.batch.index == index:
                evaluate = partial(backward.evaluate, problem)
                explanation = explain_model(risk.model.module, evaluate)
    return f"{explanation} (Noticed on batch {index}.)"


def fingerprint(tree: Any) -> list[float]:
    """Return numbers that change with the values in a nested structure, and with their order."""
    numbers: list[float] = []
    for leaf in (part for tensor in leaves(tree) for part in strided_tensors(tensor)):
        leaf = leaf.detach().resolve_conj()
        leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        flat = leaf.flatten().double()
        ramp = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
        numbers += [float(flat.numel()), float(flat.sum()), float(flat @ ramp.cos_())]
    return numbers


def agree(first: list[list[float]], second: list[list[float]], tolerance: float) -> bool:
    """Return whether the numbers of two passes agree up to a relative tolerance."""
    if [len(values) for values in first] != [len(values) for values in second]:
        return False
    one = torch.tensor([v for values in first for v in values], dtype=torch.float64, device="cpu")
    two = torch.tensor([v for values in second for v in values], dtype=torch.float64, device="cpu")
    return torch.allclose(one, two, rtol=tolerance, atol=1e-12, equal_nan=True)


def explain_data(data: Any, first: list[list[float]], second: list[list[float]]) -> str:
    """Say why two passes saw different batches, given the batches' fingerprints."""
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
    if not reasons:
        same = np.allclose(_totals(first), _totals(second), rtol=1e-6, equal_nan=True)
        reasons.append("data shuffles" if same else "data is drawn or augmented at random")
    return (
        f"Two passes over data yield different batches: {', and '.join(reasons)}. Use a loader "
        "that always yields the same batches in the same order, e.g. shuffle=False."
    )


def _totals(fingerprints: list[list[float]]) -> list[float]:
    # each leaf has its number of entries, its sum, and an order-dependent sum
    return [sum(sum(f[i::3]) for f in fingerprints) for i in (0, 1)]


def explain_model(module: nn.Module | None, evaluate: Callable[[], Any]) -> str:
    """Say which module is random, by evaluating the model twice.

    Args:
        module: The user's module, if there is one.
        evaluate: Evaluates the model on one batch.
    """
    culprit = None if module is None else _find_random_module(module, evaluate)
    if culprit is None:
        return (
            "The model or the loss gives different values for the same batch. Remove what draws "
            "random numbers in it (module.eval() switches Dropout off)."
        )
    name, kind, training = culprit
    remedy = "It is in train mode: call eval() on it. If it draws noise in any mode, pass that in X"
    remedy = remedy if training else "Pass the noise that it draws in X"
    return (
        f"The model is not deterministic: its module '{name}' ({kind}) gives different outputs "
        f"for the same input. {remedy}, or draw it from a generator that forward() seeds."
    )


def _find_random_module(
    module: nn.Module, evaluate: Callable[[], Any]
) -> tuple[str, str, bool] | None:
    names = {child: name for name, child in module.named_modules()}
    runs: list[list[tuple[nn.Module, list[float], list[float]]]] = []

    def record(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        runs[-1].append((child, fingerprint((args, kwargs)), fingerprint(output)))

    handles = [child.register_forward_hook(record, with_kwargs=True) for child in names]
    try:
        for seed in (0, 1):
            runs.append([])
            seed_everything(seed)
            evaluate()
    finally:
        for handle in handles:
            handle.remove()
    # inner modules finish first, so the first one found is the innermost
    for (child, inputs, output), (_, inputs_again, output_again) in zip(*runs, strict=False):
        if inputs == inputs_again and output != output_again:
            return names[child], type(child).__name__, child.training
    return None
