"""Vectors whose backpropagated outer products add up to a curvature matrix."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers.factors import FactoredGradient
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.samples import SampleGradients
from curvlinops.losses import Loss
from curvlinops.losses.factored import FactoredHessian
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.arguments import check_count
from curvlinops.support.rng import seeded

#: Up to so many outputs, closed forms for a model's head are not faster.
FEW_OUTPUTS = 100

Item = TypeVar("Item")


def check_sampling(loss: Loss, mc_samples: int, seed: int, at_least: int) -> tuple[int, int]:
    """Check the arguments of an operator that samples; return ``mc_samples`` and ``seed``."""
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


class Head(NamedTuple):
    """The product ``x @ matrix`` that is a model's output, with the terms of the loss as rows."""

    own: Mapping[str, FactoredGradient]  # zeros, by parameter, with the inputs x there
    before: SampleGradients  # those of all others, with vectors at x, [T, I]
    matrix: Tensor | None  # [I, C]; None if there are no others
    hessian: FactoredHessian  # of the terms

    def gradient(self, name: str, Q: Tensor | None = None) -> OuterProducts:
        """Return gradients ``q x^T`` of each term, whose squares are the sums of all vectors'.

        Their outputs are the columns q of ``[C, K]``: along q, squares add up to ``q^T H q``.
        """
        x = rearrange(self.own[name].inputs(), "n s g i -> (n s) 1 g i")
        g = rearrange(self.hessian.along(Q).sqrt(), "t k -> 1 t 1 1 k")
        return OuterProducts(x, g.to(x), self.own[name].entries)


def head_of(
    problem: BatchProblem, samples: SampleGradients, apart: bool = True, tied: bool = False
) -> Head | None:
    """Return the head of a model with many outputs, for which sums have closed forms.

    ``apart`` says that gradients of different terms of a sample are never added up, ``tied`` that
    those of a table that is the head's weight are not, either.
    """
    loss, output = problem.loss, samples.output
    numbers = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    terms = loss.to_terms(numbers.reshape(1, *output.shape))[0]
    if terms.shape[1] <= FEW_OUTPUTS or not torch.equal(numbers, terms.flatten()):
        return None
    if not apart and len(terms) != samples.num_samples:
        return None
    hessian, parts = loss.factored_hessian(output, problem.batch.y), samples.split(tied)
    if hessian is None or parts is None or len(parts[1].output) != len(terms):
        return None
    return Head(*parts, hessian)


def hessian_roots(
    problem: BatchProblem,
    samples: SampleGradients,
    head: Head | None = None,
    num_draws: int = 0,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Yield square roots of the loss's Hessian, ``[V, *output]``, or, with a head, at its x.

    Without draws, terms of a sample come one by one, so that the outer products are exact, also if
    these interact in the model. With draws, they get random signs, so that the products of
    different terms vanish in expectation. With one term per sample nothing is random.
    """
    loss, output, signs = problem.loss, samples.output, list[Tensor]()
    for rows in _roots(problem, samples, head):
        roots = rows.unflatten(1, (samples.num_samples, -1))
        if roots.shape[2] <= 1:
            several = [roots]
        elif num_draws:
            if not signs:
                generator = seeded(output.device, seed, problem.number)
                options = {"generator": generator, "device": roots.device}
                draws = (torch.randint(2, roots.shape[1:3], **options) for _ in range(num_draws))
                signs = [(2 * x - 1).to(roots).unsqueeze(-1) / num_draws**0.5 for x in draws]
            several = (roots * sign for sign in signs)
        else:
            several = _one_by_one(roots)
        for some in several:
            rows = some.flatten(1, 2)
            yield rows if head is not None else loss.from_terms(rows, output)


def _roots(problem: BatchProblem, samples: SampleGradients, head: Head | None) -> Iterator[Tensor]:
    """Yield some square roots of terms' Hessians at a time, ``[V, T, C]``, or ``[V, T, I]``."""
    if head is not None:
        if head.matrix is not None:
            yield from head.hessian.times(head.matrix.detach().T, head.before.vectors_at_once)
        return
    loss, output, at_once = problem.loss, samples.output, samples.vectors_at_once
    num_columns = loss.to_terms(output.unsqueeze(0)).shape[2]
    for first in range(0, max(num_columns, 1), at_once):
        columns = slice(first, first + at_once)
        yield loss.to_terms(loss.hessian_sqrt(output, problem.batch.y, True, columns))


def _one_by_one(roots: Tensor) -> Iterator[Tensor]:
    """Yield roots ``[V, N, positions, C]`` with zeros at all positions but one."""
    for position in range(roots.shape[2]):
        alone = torch.zeros_like(roots)
        alone[:, :, position] = roots[:, :, position]
        yield alone


def mark_last(items: Iterable[Item]) -> Iterator[tuple[Item, bool]]:
    """Yield each item, and whether it is the last one."""
    items = iter(items)
    for item in items:
        for following in items:
            yield item, False
            item = following
        yield item, True
