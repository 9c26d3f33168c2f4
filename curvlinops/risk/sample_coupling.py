"""Does the output for a sample depend on the other samples of its batch?"""

import logging
from typing import Any

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Problem, evaluate
from curvlinops.risk.data import Batch
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.memory import lacks_memory, suppressed
from curvlinops.support.pytree import select_samples, tile_samples

_LOGGER = logging.getLogger("curvlinops")

#: Relative difference of outputs that rounding may explain.
_TOLERANCES = {torch.float64: 1e-7, torch.float32: 1e-4, torch.float16: 2e-3}

COUPLED = (
    "The model's output for a sample depends on the other samples of its batch, so that gradients "
    "of single samples are not defined. Let the model treat samples one by one; if rows of its "
    "output are parts of samples, such as tokens, give samples an axis in front of them. If only "
    "a sample's place in the batch matters, as for noise that the model draws with a seed of its "
    "own, or if a tensor in X that all samples share has as many entries as the batch has samples, "
    "pass check_deterministic=False."
)


def couples_samples(problem: BatchProblem, output: Tensor) -> bool | None:
    """Return whether the first few samples of a batch alone have other outputs.

    Nothing is said, ``None``, of batches of one sample or that cannot be cut, and of models that
    refuse a part of a batch.
    """
    with suppressed():
        # one sample alone may take ways of its own, so that two are better
        X, num_samples = problem.batch.X, problem.num_samples
        at_least = 2 if num_samples > 3 else 1
        if at_least < num_samples == len(output):
            few = _on(problem, select_samples(X, slice(at_least), num_samples))
            return _differs_alone(problem, few, output)
    return None


def check_first_sample(problem: BatchProblem, output: Tensor) -> None:
    """Refuse a model whose output for a sample depends on the other samples of the batch.

    Raises:
        ValueError: If the first sample alone has another output. Nothing is said of inputs that
            cannot be cut.
    """
    try:
        X = select_samples(problem.batch.X, slice(1), len(output))
        coupled = _differs_alone(problem, _on(problem, X), output)
    except Exception as error:
        if lacks_memory(error):
            raise
        _LOGGER.info("Whether samples interact could not be checked: %s", error)
        return
    if coupled:
        raise ValueError(COUPLED)


def _differs_alone(problem: Problem, part: Problem, output: Tensor) -> bool:
    """Return whether the first samples of a batch have other outputs without the rest."""
    found = evaluate(part)
    few, num_samples = len(found), len(output)
    if few >= num_samples:  # as many outputs as before: what was cut are not the samples
        return False
    if found.shape[1:] != output.shape[1:]:
        # perhaps it has a number for each pair of samples: there are as many with copies instead
        found = evaluate(_on(problem, tile_samples(problem.batch.X, few, num_samples)))[:few]
    return differs(found, output[:few], output)


def _on(problem: Problem, X: Any) -> Problem:
    return problem.on(Batch(problem.batch.index, X, None))


def differs(found: Tensor, expected: Tensor, output: Tensor) -> bool:
    """Return whether a part of an output differs by more than rounding errors of all of it."""
    if found.shape != expected.shape:
        return False
    tolerance = _TOLERANCES.get(output.dtype, 1.5e-2)
    error, scale = ((x.detach().double()).norm() for x in (found - expected, output))
    return float(error) > tolerance * float(scale)
