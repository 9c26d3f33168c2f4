"""Elementwise functions."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.support.torch_internals import in_transform, wanted_gradients

_aten = torch.ops.aten


def hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Return the hard sigmoid, whose kernel can be differentiated only once."""
    out = F.relu6(input + 3) / 6
    return input.copy_(out) if inplace else out


class Activation(torch.autograd.Function):
    """A smooth function whose second derivative is computed once, in closed form.

    PyTorch composes the double backward of GELU and SiLU of a dozen passes over memory, and repeats
    them for each product with the same graph.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable, backward: Callable, second: Callable
    ) -> Tensor:
        """Apply the function.

        Args:
            ctx: The context.
            x: The argument of the function.
            function: Takes x.
            backward: Takes the output's gradient and x.
            second: Returns the second derivative at x.
        """
        ctx.save_for_backward(x)
        ctx.backward, ctx.second = backward, second
        return function(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient."""
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return ActivationBackward.apply(g, x, ctx.backward, ctx.second), None, None, None
        return ctx.backward(g, x), None, None, None


class ActivationBackward(torch.autograd.Function):
    """The backward pass of such a function."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, backward: Callable, second: Callable) -> Tensor:
        """Return the gradient w.r.t. x."""
        ctx.save_for_backward(g, x, second(x).mul_(g))
        ctx.backward, ctx.second = backward, second
        return backward(g, x)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. output gradient and x."""
        g, x, weighted = ctx.saved_tensors
        if torch.is_grad_enabled():  # for third derivatives, of a model that differentiates
            return ctx.backward(v, x), v * ctx.second(x) * g, None, None
        wants_g, wants_x, *_ = wanted_gradients(ctx)
        return (
            ctx.backward(v, x) if wants_g else None,
            v * weighted if wants_x else None,
            None,
            None,
        )


def _tanh_gelu_second(x: Tensor) -> Tensor:
    """Return the second derivative of ``x (1 + tanh u(x)) / 2``."""
    scale, cubic = math.sqrt(2 / math.pi), 0.044715
    t = torch.tanh(scale * (x + cubic * x**3))
    u1, u2 = scale * (1 + 3 * cubic * x * x), 6 * scale * cubic * x
    return (1 - t * t) * (u1 + 0.5 * x * u2 - x * t * u1 * u1)


def _silu_second(x: Tensor) -> Tensor:
    s = torch.sigmoid(x)
    return s * (1 - s) * (2 + x * (1 - 2 * s))


def _silu_backward(g: Tensor, x: Tensor) -> Tensor:
    if torch.is_grad_enabled() and (g.requires_grad or x.requires_grad):
        s = torch.sigmoid(x)  # PyTorch's kernel cannot be differentiated
        return g * s * (1 + x * (1 - s))
    return _aten.silu_backward(g, x)


def _is_plain(x: Tensor) -> bool:
    """Return whether x is in single or double precision, outside of any transform.

    Half precision is left to PyTorch's kernels, which compute in float32 inside; so are autocast's
    casts and the user's own ``torch.func`` transforms.
    """
    plain = x.dtype in (torch.float32, torch.float64)
    return plain and not torch.is_autocast_enabled(x.device.type) and not in_transform()


def _gelu(input: Tensor, approximate: str = "none") -> Tensor:
    # the exact one, by erf, gains no time this way, and takes more memory
    if approximate != "tanh" or not _is_plain(input):
        return F.gelu(input, approximate=approximate)
    function = partial(F.gelu, approximate=approximate)
    backward = partial(_aten.gelu_backward, approximate=approximate)
    return Activation.apply(input, function, backward, _tanh_gelu_second)


def _silu(input: Tensor, inplace: bool = False) -> Tensor:
    if inplace or not _is_plain(input):
        return F.silu(input, inplace)
    return Activation.apply(input, F.silu, _silu_backward, _silu_second)


ELEMENTWISE: dict[Callable, Callable] = {F.gelu: _gelu, F.silu: _silu}
