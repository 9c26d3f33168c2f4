"""What a model must return on a batch; errors name the batch."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from curvlinops.linear_operator.space import Columns, not_finite
from curvlinops.risk.data import Batch
from curvlinops.support.warnings import warn

#: What makes derivatives infinite where they exist, for messages.
OVERFLOW = "a number overflows (float16 ends at 65504, bfloat16 has the range of float32)"

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_BAD_NUMBERS = "Check the batch for NaN and infinite values, and the parameters for divergence."


def report_batch_statistics(roots: Iterable[nn.Module], operator: str | None) -> None:
    """Warn that BatchNorm couples samples; refuse it for an operator made of single ones."""
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


def check_kind(batch: Batch, output: Any) -> None:
    """Refuse an output that is not one real tensor with axes."""
    if isinstance(output, Tensor):
        if output.is_floating_point() and output.ndim > 0:
            return
        kind = f"a tensor of shape {list(output.shape)} and {output.dtype}"
    else:
        kind = type(output).__name__
    raise TypeError(
        f"The model returned {kind} on batch {batch.index}, expected one real tensor with the "
        "batch axis first. Wrap the model, e.g. in a Module whose forward returns "
        "self.inner(**X).logits."
    )


def check_numbers(batch: Batch, output: Tensor) -> None:
    """Refuse an output with NaN; masked entries are infinite."""
    if bool(output.isnan().any()):
        raise ValueError(f"The model's output on batch {batch.index} has NaN. {_BAD_NUMBERS}")


def check_finite(batch: Batch, loss: Tensor, gradient: Columns) -> None:
    """Refuse a loss or a gradient that is not finite, by the name of the parameter."""
    if not bool(loss.isfinite()):
        raise ValueError(f"The loss on batch {batch.index} is {float(loss)}. {_BAD_NUMBERS}")
    if gradient and (name := not_finite(gradient)) is not None:
        raise ValueError(
            f"The gradient on batch {batch.index} is not finite in parameter '{name}', though "
            "the loss is: its derivative does not exist there (sqrt or norm at zero?), or "
            f"{OVERFLOW}."
        )
