"""Vectors whose backpropagated outer products add up to a curvature matrix."""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from curvlinops.losses import Loss
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.arguments import check_count
from curvlinops.support.rng import seeded

Item = TypeVar("Item")


def check_sampling(loss: Loss, mc_samples: int, seed: int, at_least: int) -> tuple[int, int]:
    """Check the arguments of an operator that samples; return ``mc_samples`` and ``seed``.

    Args:
        loss: The loss.
        mc_samples: The number of samples.
        seed: Seeds them.
        at_least: The smallest number allowed.
    """
    seed = check_count("seed", seed, at_least=0)
    mc_samples = check_count("mc_samples", mc_samples, at_least)
    if mc_samples:
        loss.check_can_sample()
    return mc_samples, seed


def sampled_gradients(problem: BatchProblem, output: Tensor, num_samples: int, seed: int) -> Tensor:
    """Sample gradients w.r.t. the output, ``[num_samples, *output]``, the same in each pass.

    The output was checked: sampling from NaN is an obscure error, on GPUs a fatal one.
    """
    generator = seeded(output.device, seed, problem.number)
    return problem.loss.sample(output, problem.batch.y, num_samples, generator)


def hessian_roots(problem: BatchProblem, output: Tensor, at_once: int) -> Iterator[Tensor]:
    """Yield square roots of the loss's Hessian, ``[V, *output]``, one position at a time.

    Gradients of terms of the same sample are never added up, so that the outer products are
    exact, whether terms interact in the model or not.

    Args:
        problem: The risk on a batch.
        output: The model's output.
        at_once: The largest V.
    """
    for roots in _roots(problem, output, at_once):
        if roots.shape[2] <= 1:
            yield problem.loss.from_terms(roots.flatten(1, 2), output)
            continue
        for position in range(roots.shape[2]):
            alone = torch.zeros_like(roots)
            alone[:, :, position] = roots[:, :, position]
            yield problem.loss.from_terms(alone.flatten(1, 2), output)


def signed_hessian_roots(
    problem: BatchProblem, output: Tensor, at_once: int, num_draws: int, seed: int
) -> Iterator[Tensor]:
    """Yield square roots of the loss's Hessian, ``[V, *output]``, all positions at once.

    Terms of the same sample get random signs, so that the products of different terms vanish in
    expectation. With one term per sample nothing is random, and a single draw is exact.
    """
    generator = seeded(output.device, seed, problem.number)
    signs: list[Tensor] = []
    for roots in _roots(problem, output, at_once):
        if roots.shape[2] <= 1:
            yield problem.loss.from_terms(roots.flatten(1, 2), output)
            continue
        if not signs:
            options = {"generator": generator, "device": roots.device}
            draws = (torch.randint(2, roots.shape[1:3], **options) for _ in range(num_draws))
            signs = [(2 * draw - 1).to(roots).unsqueeze(-1) / num_draws**0.5 for draw in draws]
        for sign in signs:
            yield problem.loss.from_terms((roots * sign).flatten(1, 2), output)


def _roots(problem: BatchProblem, output: Tensor, at_once: int) -> Iterator[Tensor]:
    """Yield some square roots of terms' Hessians at a time, ``[V, N, positions, C]``."""
    loss, num_samples = problem.loss, problem.samples_of(output)
    num_columns = loss.to_terms(output.unsqueeze(0)).shape[2]
    for first in range(0, max(num_columns, 1), at_once):
        columns = slice(first, first + at_once)
        roots = loss.hessian_sqrt(output, problem.batch.y, minimal=True, columns=columns)
        yield loss.to_terms(roots).unflatten(1, (num_samples, -1))


def mark_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item, and whether it is the last one."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True
