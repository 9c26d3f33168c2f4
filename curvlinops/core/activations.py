"""Smooth activation functions whose second derivative is computed once, in closed form.

PyTorch composes the double backward of GELU and SiLU of a dozen passes over memory, and repeats
them for each product with the same graph; here a product takes one pass.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.core.functions import in_transform, wanted

#: Maps x to the first and second derivatives there.
Derivatives = Callable[[Tensor], tuple[Tensor, Tensor]]


class Activation(torch.autograd.Function):
    """An elementwise function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable, derivatives: Derivatives) -> Tensor:
        """Apply the function."""
        ctx.save_for_backward(x)
        ctx.derivatives, ctx.first = derivatives, None
        return function(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            with torch.no_grad():
                ctx.first, second = ctx.derivatives(x)
            out = ActivationBackward.apply(g, x, ctx.first, second, ctx.derivatives)
            return out, None, None
        first = ctx.derivatives(x)[0] if ctx.first is None else ctx.first
        return g * first, None, None


class ActivationBackward(torch.autograd.Function):
    """The backward pass of an elementwise function."""

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        x: Tensor,
        first: Tensor,
        second: Tensor,
        derivatives: Derivatives,
    ) -> Tensor:
        """Return the gradient w.r.t. x, given the derivatives there."""
        ctx.save_for_backward(g, x, first, second.mul_(g))
        ctx.derivatives = derivatives
        return g * first

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. output gradient and x."""
        g, x, first, weighted = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a model that differentiates, too
            first, second = ctx.derivatives(x)
            return v * first, v * second * g, None, None, None
        wants_g, wants_x, *_ = wanted(ctx)
        return v * first if wants_g else None, v * weighted if wants_x else None, None, None, None


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    density = torch.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    first = 0.5 * (1 + torch.erf(x * math.sqrt(0.5))) + x * density
    return first, density * (2 - x * x)


def _tanh_gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    # x (1 + tanh u) / 2
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (x + cubic * x**3))
    u1, u2 = scale * (1 + 3 * cubic * x * x), 6 * scale * cubic * x
    slope = 1 - t * t
    first = 0.5 * (1 + t + x * slope * u1)
    return first, slope * (u1 + 0.5 * x * u2 - x * t * u1 * u1)


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s * (1 + x * (1 - s)), s * (1 - s) * (2 + x * (1 - 2 * s))


def _replacement(function: Callable, select: Callable[..., Derivatives | None]) -> Callable:
    def replaced(input: Tensor, *args: Any, **options: Any) -> Tensor:
        derivatives = select(*args, **options)
        if derivatives is None or not is_plain(input):
            return function(input, *args, **options)
        return Activation.apply(input, lambda x: function(x, *args, **options), derivatives)

    return replaced


def is_plain(*inputs: Tensor | None) -> bool:
    """Return whether tensors are of one dtype, single or double, outside of any transform.

    Half precision is left to PyTorch's kernels, which compute in float32 inside; so are autocast's
    own casts and the user's own ``torch.func`` transforms.
    """
    tensors = [x for x in inputs if x is not None]
    return (
        all(x.dtype == tensors[0].dtype for x in tensors)
        and tensors[0].dtype in (torch.float32, torch.float64)
        and not torch.is_autocast_enabled(tensors[0].device.type)
        and not in_transform()
    )


ACTIVATIONS: dict[Callable, Callable] = {
    F.gelu: _replacement(
        F.gelu, lambda approximate="none": {"none": _gelu, "tanh": _tanh_gelu}.get(approximate)
    ),
    F.silu: _replacement(F.silu, lambda inplace=False: None if inplace else _silu),
}
