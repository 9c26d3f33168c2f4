"""The checks of the first batch, when an operator is built."""

from torch import Tensor

from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks import coupling
from curvlinops.risk.checks.repeats import Observed, check_same, observe
from curvlinops.risk.empirical_risk import EmpiricalRisk
from curvlinops.support.rng import seed_everything
from curvlinops.team.scattering import stand_in


def _check_numbers(problem: BatchProblem, seen: Observed) -> None:
    """Refuse a loss that is not finite, or its gradient, or an output with NaN where that counts.

    Gradients that are not compared are left to the first product.
    """
    if problem.loss is None or problem.risk.per_sample:
        problem.check_numbers(seen.output)
    if problem.loss is not None:
        problem.check_finite(seen.result, seen.gradient)


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
                _check_numbers(problem, seen)
                coupling.check(problem, seen)  # at last: models may keep what they compute in X
                break
        first = seen = seen._replace(output=stand_in(seen.output))
        del problem  # and its batch
    return stand_in(seen.output)
