"""Is a pass over the data repeatable? If it is not: why?"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler

from curvlinops.core.columns import not_finite
from curvlinops.core.containers import leaves, strided_parts
from curvlinops.core.data import Batch
from curvlinops.core.seeds import seed_everything
from curvlinops.core.space import Columns
from curvlinops.core.warn import warn


def fingerprint(tree: Any) -> list[float]:
    """Return numbers that change with the values in a nested structure, and with their order."""
    numbers: list[float] = []
    for leaf in (part for tensor in leaves(tree) for part in strided_parts(tensor)):
        leaf = leaf.detach().resolve_conj()
        leaf = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        flat = leaf.flatten().double()
        ramp = torch.arange(flat.numel(), device=flat.device, dtype=torch.float64)
        numbers += [float(flat.numel()), float(flat.sum()), float(flat @ ramp.cos_())]
    return numbers


def agree(first: list[list[float]], second: list[list[float]], tolerance: float) -> bool:
    """Return whether the numbers of two passes agree up to a relative tolerance."""
    if [len(values) for values in first] != [len(values) for values in second]:
        return False
    one = torch.tensor([v for values in first for v in values], dtype=torch.float64, device="cpu")
    two = torch.tensor([v for values in second for v in values], dtype=torch.float64, device="cpu")
    return torch.allclose(one, two, rtol=tolerance, atol=1e-12, equal_nan=True)


def explain_data(data: Any, first: list[list[float]], second: list[list[float]]) -> str:
    """Say why two passes saw different batches, given the batches' fingerprints."""
    if len(first) != len(second):
        return (
            f"The first pass over data yields {len(first)} batches, the second {len(second)}. "
            "Each iteration must start anew; pass a DataLoader or a list."
        )
    reasons = []
    if isinstance(data, DataLoader):
        if isinstance(data.sampler, RandomSampler):
            reasons.append("the DataLoader shuffles (shuffle=True)")
        if data.drop_last:
            reasons.append("the DataLoader drops the last, incomplete batch (drop_last=True)")
    if not reasons:
        same = np.allclose(_totals(first), _totals(second), rtol=1e-6, equal_nan=True)
        reasons.append("data shuffles" if same else "data is drawn or augmented at random")
    return (
        f"Two passes over data yield different batches: {', and '.join(reasons)}. Use a loader "
        "that always yields the same batches in the same order, e.g. shuffle=False."
    )


def _totals(fingerprints: list[list[float]]) -> list[float]:
    # each leaf has its number of entries, its sum, and an order-dependent sum
    return [sum(sum(f[i::3]) for f in fingerprints) for i in (0, 1)]


def explain_model(module: nn.Module | None, evaluate: Callable[[], Any]) -> str:
    """Say which module is random, by evaluating the model twice.

    Args:
        module: The user's module, if there is one.
        evaluate: Evaluates the model on one batch.
    """
    culprit = None if module is None else _find_random_module(module, evaluate)
    if culprit is None:
        return (
            "The model or the loss gives different values for the same batch. Remove what draws "
            "random numbers in it (module.eval() switches Dropout off)."
        )
    name, kind, training = culprit
    remedy = "It is in train mode: call eval() on it." if training else "Make it deterministic."
    return (
        f"The model is not deterministic: its module '{name}' ({kind}) gives different outputs "
        f"for the same input. {remedy}"
    )


def _find_random_module(
    module: nn.Module, evaluate: Callable[[], Any]
) -> tuple[str, str, bool] | None:
    names = {child: name for name, child in module.named_modules()}
    runs: list[list[tuple[nn.Module, list[float], list[float]]]] = []

    def record(child: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        runs[-1].append((child, fingerprint((args, kwargs)), fingerprint(output)))

    handles = [child.register_forward_hook(record, with_kwargs=True) for child in names]
    try:
        for seed in (0, 1):
            runs.append([])
            seed_everything(seed)
            evaluate()
    finally:
        for handle in handles:
            handle.remove()
    # inner modules finish first, so the first one found is the innermost
    for (child, inputs, output), (_, inputs_again, output_again) in zip(*runs, strict=False):
        if inputs == inputs_again and output != output_again:
            return names[child], type(child).__name__, child.training
    return None


def report_batch_statistics(names: list[str], operator: str | None) -> None:
    """Warn that BatchNorm couples samples; refuse it for an operator made of single ones."""
    if operator is not None:
        raise ValueError(
            f"BatchNorm in train mode couples the samples of a batch ({', '.join(names)}), so that "
            f"{operator}, which is made of single samples' gradients, is not defined. Call "
            "model.eval()."
        )
    warn(
        f"BatchNorm in train mode ({', '.join(names)}): the result depends on how the data is "
        "split into batches. Call model.eval() to use running statistics."
    )


def uses_batch_statistics(roots: Iterable[nn.Module]) -> list[str]:
    """Return the names of batch normalizations that couple the samples of a batch."""
    return [
        name or type(child).__name__
        for root in roots
        for name, child in root.named_modules()
        if isinstance(child, nn.modules.batchnorm._BatchNorm)
        and (child.training or child.running_mean is None)
    ]


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
            "the loss is: its derivative does not exist there (sqrt or norm at zero?)."
        )
