"""Finds models whose output for a sample depends on the other samples of its batch."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.pytree import has_length, leaves
from curvlinops.support.warnings import warn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
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


def report_batch_statistics(roots: Iterable[nn.Module], operator: str | None) -> None:
    """Warn that BatchNorm couples samples; refuse it for operators made of samples' gradients."""
    coupling = {
        name or type(module).__name__: module.running_mean is not None
        for root in roots
        for name, module in root.named_modules()
        if isinstance(module, _BATCH_NORMS) and (module.training or module.running_mean is None)
    }
    if not coupling:
        return
    names = ", ".join(map(repr, coupling))
    if all(coupling.values()):
        what, remedy = "BatchNorm in train mode", "Call model.eval() to use running statistics."
    else:
        what = "BatchNorm without running statistics"
        remedy = "Keep them with track_running_stats=True, and call model.eval()."
    if operator is not None:
        raise ValueError(
            f"{what} couples the samples of a batch (module {names}), but {operator} needs "
            f"gradients of single samples. {remedy}"
        )
    warn(
        f"{what} (module {names}): the result depends on how the data is split into batches. "
        f"{remedy}"
    )


def couples_samples(problem: BatchProblem, output: Tensor, num_alone: int) -> bool:
    """Return whether samples have other outputs alone than in their batch.

    Args:
        problem: The model on the batch.
        output: Its output for the whole batch, with equally many rows for each sample.
        num_alone: The numbers of samples that are compared, the first ones and the last ones: of a
            recurrence over samples only later ones depend on others.

    Returns:
        ``False``, too, where the batch cannot be cut, or the model refuses a part of it.
    """
    num_samples = problem.samples_of(output)
    num_rows = num_alone * (len(output) // num_samples)
    # of a tensor that cannot be cut, the last sample may get the entries of all samples behind it,
    # as the last bag of an EmbeddingBag with offsets does: then one more sample is taken
    tensors = [x for x in leaves(problem.batch.X) if x.ndim]
    is_cut = all(has_length(x, num_samples) for x in tensors)
    num_taken = num_alone if is_cut else min(num_alone + 1, num_samples - 1)
    rows = problem.output_alone(slice(num_taken), num_samples)
    if rows is None:
        return False
    if list(rows.shape[1:]) != list(output.shape[1:]):  # a number for each pair of samples?
        axes = [num_taken if size == num_samples else size for size in output.shape[1:]]
        return len(rows) == num_taken and list(rows.shape[1:]) == axes
    if len(rows) >= len(output):  # something else than samples was cut
        return False
    if differs(rows[:num_rows], output[: len(rows[:num_rows])], output):
        return True
    last = problem.output_alone(slice(num_samples - num_alone, num_samples), num_samples)
    return is_cut and last is not None and differs(last, output[-num_rows:], output)


def differs(rows: Tensor, expected: Tensor, output: Tensor) -> bool:
    """Return whether rows of an output differ by more than rounding errors of all of it."""
    if rows.shape != expected.shape:
        return False
    tolerance = _TOLERANCES.get(output.dtype, 1.5e-2)
    error, scale = (x.detach().double().norm() for x in (rows - expected, output))
    return float(error) > tolerance * float(scale)
