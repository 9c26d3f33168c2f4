"""Standard deviations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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
