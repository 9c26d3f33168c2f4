"""Norms: pairwise distances, normalized weights, and standard deviations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlinops.support.arguments import is_differentiated
from curvlinops.support.torch_internals import in_transform


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Return the distances ``[*, P, R]`` of rows ``[*, P, M]`` and ``[*, R, M]``.

    The fused kernel has neither forward mode nor double backward. Without derivatives it is used,
    since it does not need memory for all differences, ``[*, P, R, M]``.
    """
    if not (in_transform() or is_differentiated(x1) or is_differentiated(x2)):
        return torch.cdist(x1, x2, p)
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``g v / |v|``, with norms over all axes but ``dim``, or over all if it is -1.

    The fused kernel has no forward mode, and its double backward is off by 1-9 %.
    """
    if dim == -1:  # torch.norm_except_dim's tangent has the wrong shape then
        return v * (g / v.norm())
    return v * (g / torch.norm_except_dim(v, 2, dim))


class Root(torch.autograd.Function):
    """The square root of a variance; at zero, its derivative is zero and has no derivative.

    PyTorch sets the derivative of a standard deviation of zero to zero, and also the second
    derivative of its square, which is not zero. Here that is not finite, so that it is refused.
    """

    @staticmethod
    def forward(ctx: Any, variance: Tensor) -> Tensor:
        """Return the root."""
        ctx.save_for_backward(variance)
        return variance.sqrt()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """Return the gradient."""
        (variance,) = ctx.saved_tensors
        is_zero = variance == 0
        slope = 0.5 / torch.where(is_zero, 1.0, variance).sqrt()
        return g * torch.where(is_zero, variance.sqrt(), slope)


def _std(*args: Any, **kwargs: Any) -> Tensor:
    return Root.apply(torch.var(*args, **kwargs))


def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(*args, **kwargs)
    return Root.apply(variance), mean


DEVIATIONS: dict[Callable, Callable] = {
    torch.std: _std,
    Tensor.std: _std,
    torch.std_mean: _std_mean,
}
