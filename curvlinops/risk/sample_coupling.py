"""Does the output for a sample depend on the other samples of its batch?"""

import logging

import torch
from torch import Tensor

from curvlinops.autodiff.backward import evaluate
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
        # models may treat one sample alone differently, so that two are better
        num_samples = problem.num_samples
        few = 2 if num_samples > 3 else 1
        if few < num_samples == len(output):
            return _differs_alone(problem, few, output)
    return None


def check_first_sample(problem: BatchProblem, output: Tensor) -> None:
    """Refuse a model whose output for a sample depends on the other samples of the batch.

    Raises:
        ValueError: If the first sample alone has another output. Nothing is said of inputs that
            cannot be cut.
    """
    try:
        coupled = _differs_alone(problem, 1, output)
    except Exception as error:
        if lacks_memory(error):
            raise
        _LOGGER.info("Whether samples interact could not be checked: %s", error)
        return
    if coupled:
        raise ValueError(COUPLED)


def _differs_alone(problem: BatchProblem, num_first: int, output: Tensor) -> bool:
    """Return whether the first samples of a batch have other outputs without the others."""
    X, index, num_samples = problem.batch.X, problem.batch.index, len(output)
    first = select_samples(X, slice(num_first), num_samples)
    output_alone = evaluate(problem.on(Batch(index, first, None)))
    num_rows = len(output_alone)
    if num_rows >= num_samples:  # as many outputs as before: what was cut are not the samples
        return False
    if output_alone.shape[1:] != output.shape[1:]:
        # perhaps it has a number for each pair of samples: there are as many with copies instead
        copies = tile_samples(X, num_rows, num_samples)
        output_alone = evaluate(problem.on(Batch(index, copies, None)))[:num_rows]
    return differs(output_alone, output[:num_rows], output)


def differs(rows: Tensor, expected: Tensor, output: Tensor) -> bool:
    """Return whether rows of an output differ by more than rounding errors of all of it."""
    if rows.shape != expected.shape:
        return False
    tolerance = _TOLERANCES.get(output.dtype, 1.5e-2)
    error, scale = (x.detach().double().norm() for x in (rows - expected, output))
    return float(error) > tolerance * float(scale)
