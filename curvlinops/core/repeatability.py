"""Two passes over data, model and loss, compared."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvlinops.core import autodiff
from curvlinops.core.columns import norm
from curvlinops.core.determinism import (
    agree,
    check_finite,
    check_numbers,
    explain_data,
    explain_model,
    fingerprint,
)
from curvlinops.core.independence import COUPLED, couples_samples
from curvlinops.core.risk import BatchRisk, EmpiricalRisk
from curvlinops.core.seeds import preserved_rng, seed_everything


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

    def look(bound: BatchRisk, output: Tensor) -> None:
        if independent and not coupled:  # on the first batch of which there is a verdict
            verdict = couples_samples(bound, output)
            coupled.extend([] if verdict is None else [verdict])

    first, second = _observe(risk, 0, look), _observe(risk, 1, lambda *_: None)
    data = [[observation[0] for observation in run] for run in (first, second)]
    if not agree(data[0], data[1], 1e-6):
        raise RuntimeError(explain_data(risk.batches.data, *data))
    for index, ((_, values), (_, again)) in enumerate(zip(first, second, strict=True)):
        tolerance = 1e-8 if risk.space.dtype == torch.float64 else 1e-3
        if not agree([values], [again], tolerance):
            raise RuntimeError(_explain_model(risk, index))
    if any(coupled):  # only now it is known that it is not by chance
        raise ValueError(COUPLED)


def _observe(
    risk: EmpiricalRisk, seed: int, look: Callable[[BatchRisk, Tensor], None]
) -> list[tuple[list[float], list[float]]]:
    """Return, for each batch, numbers that identify the data and what the model makes of it."""
    observations, terms = [], 0.0

    def step(bound: BatchRisk) -> None:
        nonlocal terms
        if seed == 0:
            # on all batches, not only on the first
            risk.values_checked = risk.loss is None
        data = fingerprint((bound.batch.X, bound.batch.y))
        numbers, output, own = _evaluate(risk, bound)
        terms = terms + own
        look(bound, output)
        observations.append((data, numbers))

    with preserved_rng(risk.space.device):
        seed_everything(seed)
        risk.run(step, "check_deterministic", purpose=None if risk.loss is None else "gradient")
    if seed == 0 and risk.ranks.size == 1:  # else other data may have terms
        risk.scale(terms)
    return observations


def _evaluate(risk: EmpiricalRisk, bound: BatchRisk) -> tuple[list[float], Tensor, Tensor]:
    """Return numbers that identify what the model makes of a batch, its output, and the terms."""
    if risk.loss is None:
        output = autodiff.evaluate(bound)
        check_numbers(bound.batch, output)
        return fingerprint(output), output, bound.terms(output)
    outputs = []

    def head(output: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(output.detach())
        return bound.loss_sum(output)

    value, columns, terms = autodiff.gradient(bound, head)
    check_finite(bound.batch, value, columns)
    return [float(value), norm(columns)], outputs[0], terms


def _explain_model(risk: EmpiricalRisk, index: int) -> str:
    explanation = ""

    def step(bound: BatchRisk) -> None:
        nonlocal explanation
        if bound.batch.index == index:
            explanation = explain_model(risk.model.module, lambda: autodiff.evaluate(bound))

    risk.run(step, "check_deterministic")
    return f"{explanation} (Noticed on batch {index}.)"
