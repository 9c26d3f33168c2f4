"""Scale and shift of normalized inputs."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from curvlinops.layers.uses import Use, broadcast, handles


def _affine(
    shape: torch.Size, normalize: Callable[[], Tensor], aligned: int, **arguments: Tensor | None
) -> dict[str, Use]:
    uses = {}
    for name, argument in arguments.items():
        if argument is not None:
            slope = normalize if name == "weight" else 1.0
            uses[name] = broadcast(argument.shape, shape, slope, aligned)
    return uses


@handles(torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> dict[str, Use]:
    """Normalized over the last axes."""
    normalize = partial(torch.layer_norm, input, normalized_shape, None, None, eps)
    return _affine(input.shape, normalize, 0, weight=weight, bias=bias)


@handles(torch.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> dict[str, Use]:
    """Divided by the root mean square over the last axes."""
    normalize = partial(torch.rms_norm, input, normalized_shape, None, eps)
    return _affine(input.shape, normalize, 0, weight=weight)


@handles(torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> dict[str, Use]:
    """Normalized over groups of channels."""
    normalize = partial(torch.group_norm, input, num_groups, None, None, eps)
    return _affine(input.shape, normalize, input.ndim - 2, weight=weight, bias=bias)


@handles(torch.batch_norm)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> dict[str, Use]:
    """Normalized by running statistics; those of the batch would couple the samples."""
    if training:
        return {}
    # a later call may write to the running statistics
    statistics = running_mean.detach().clone(), running_var.detach().clone()
    normalize = partial(
        torch.batch_norm, input, None, None, *statistics, False, momentum, eps, cudnn_enabled
    )
    return _affine(input.shape, normalize, max(input.ndim - 2, 0), weight=weight, bias=bias)


@handles(torch.instance_norm)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> dict[str, Use]:
    """Normalized over space, or by running statistics."""
    # the statistics are the user's: not to be updated once more
    statistics = (
        (None, None)
        if use_input_stats
        else (running_mean.detach().clone(), running_var.detach().clone())
    )
    normalize = partial(
        torch.instance_norm, input, None, None, *statistics, use_input_stats, momentum, eps, True
    )
    return _affine(input.shape, normalize, input.ndim - 2, weight=weight, bias=bias)


@handles(torch.prelu)
def prelu(input: Tensor, weight: Tensor) -> dict[str, Use]:
    """The slope on the negative side, of each channel or of all."""
    aligned = max(input.ndim - 2, 0) if weight.ndim == 1 and input.ndim > 0 else 0
    shape = weight.shape
    return {"weight": broadcast(shape, input.shape, partial(input.clamp, max=0.0), aligned)}
