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
    """Sample gradients w.r.t. the output, ``[num_samples, *output]``, the same in each pass."""
    problem.check(output)  # sampling from NaN is an obscure error, on GPUs a fatal one
    generator = seeded(output.device, seed, problem.number)
    return problem.loss.sample(output, problem.batch.y, num_samples, generator)


def hessian_roots(problem: BatchProblem, output: Tensor) -> Iterator[Tensor]:
    """Yield square roots of the loss's Hessian, ``[V, *output]``, one position at a time.

    Gradients of terms of the same sample are never added up, so that the outer products are
    exact, whether terms interact in the model or not.

    Args:
        problem: The risk on a batch.
        output: The model's output.
    """
    roots = _roots(problem, output)
    for position in range(roots.shape[2]):
        alone = torch.zeros_like(roots)
        alone[:, :, position] = roots[:, :, position]
        yield problem.loss.from_terms(alone.flatten(1, 2), output)


def signed_hessian_roots(
    problem: BatchProblem, output: Tensor, num_draws: int, seed: int
) -> Iterator[Tensor]:
    """Yield square roots of the loss's Hessian, ``[V, *output]``, all positions at once.

    Terms of the same sample get random signs, so that the products of different terms vanish in
    expectation. With one term per sample nothing is random, and a single draw is exact.
    """
    roots = _roots(problem, output)
    if roots.shape[2] <= 1:
        yield problem.loss.from_terms(roots.flatten(1, 2), output)
        return
    generator = seeded(output.device, seed, problem.number)
    for _ in range(num_draws):
        draw = torch.randint(2, roots.shape[1:3], generator=generator, device=roots.device)
        signs = (2 * draw - 1).to(roots).unsqueeze(-1) / num_draws**0.5
        yield problem.loss.from_terms((roots * signs).flatten(1, 2), output)


def _roots(problem: BatchProblem, output: Tensor) -> Tensor:
    """Return the square roots of terms' Hessians, ``[V, N, positions, C]``."""
    problem.check(output)
    roots = problem.loss.to_terms(problem.loss.hessian_sqrt(output, problem.batch.y, minimal=True))
    return roots.unflatten(1, (problem.samples_of(output), -1))


def mark_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item, and whether it is the last one."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True
