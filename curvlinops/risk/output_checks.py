"""What a model must return on a batch."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from curvlinops.linear_operator.space import Columns, not_finite
from curvlinops.risk.data import Batch
from curvlinops.support.warnings import warn

#: What makes derivatives infinite where they exist, for messages.
OVERFLOW = "a number overflows (float16 ends at 65504, bfloat16 has the range of float32)"


def report_batch_statistics(roots: Iterable[nn.Module], operator: str | None) -> None:
    """Warn that BatchNorm couples samples; refuse it for an operator made of single ones."""
    found = [
        (name or type(child).__name__, child.running_mean is not None)
        for root in roots
        for name, child in root.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm)
        and (child.training or child.running_mean is None)
    ]
    if not found:
        return
    names = ", ".join(name for name, _ in found)
    if all(has_statistics for _, has_statistics in found):
        what, remedy = "BatchNorm in train mode", "Call model.eval() to use running statistics."
    else:
        what = "BatchNorm without running statistics"
        remedy = "Keep them with track_running_stats=True, and call model.eval()."
    if operator is not None:
        raise ValueError(
            f"{what} couples the samples of a batch ({names}), so that {operator}, which is made "
            f"of single samples' gradients, is not defined. {remedy}"
        )
    warn(f"{what} ({names}): the result depends on how the data is split into batches. {remedy}")


def check_kind(batch: Batch, output: Any) -> None:
    """Raise an error that names the batch if the output is not of the kind that is expected."""
    if isinstance(output, Tensor) and output.is_floating_point() and output.ndim > 0:
        return
    found = type(output).__name__
    if isinstance(output, Tensor):
        found = f"a tensor of shape {list(output.shape)} and {output.dtype}"
    raise TypeError(
        f"The model returned {found} on batch {batch.index}, expected one real tensor with the "
        "batch axis first. Wrap the model, e.g. in a Module whose forward returns "
        "self.inner(**X).logits."
    )


def check_numbers(batch: Batch, output: Tensor) -> None:
    """Raise an error that names the batch if the output has NaN; masked entries are infinite."""
    if bool(output.isnan().any()):
        raise ValueError(
            f"The model's output on batch {batch.index} has NaN. Check the batch for NaN and "
            "infinite values, and the parameters for divergence."
        )


def check_finite(batch: Batch, loss: Tensor, gradient: Columns) -> None:
    """Raise an error that names the batch, or the parameter, if loss or gradient is not finite."""
    if not bool(loss.isfinite()):
        raise ValueError(
            f"The loss on batch {batch.index} is {float(loss)}. Check the batch for NaN and "
            "infinite values, and the parameters for divergence."
        )
    name = not_finite(gradient) if gradient else None
    if name is not None:
        raise ValueError(
            f"The gradient on batch {batch.index} is not finite in parameter '{name}', though "
            "the loss is: its derivative does not exist there (sqrt or norm at zero?), or "
            f"{OVERFLOW}."
        )
