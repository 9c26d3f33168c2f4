"""Convolutions whose double backward computes the gradients that are needed, and no others.

PyTorch's own computes all of them; that of the weight is a convolution with a kernel as large as
the image. On the CNN of the benchmark a Gauss-Newton product with a kept graph takes 1.3 to 1.5
times as long with it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlinops.support.torch_internals import in_transform, wanted_gradients

#: stride, padding, dilation, transposed, output_padding, groups
Options = tuple[list[int], list[int], list[int], bool, list[int], int]

_aten = torch.ops.aten


class Convolution(torch.autograd.Function):
    """A (transposed) convolution."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, options: Options) -> Tensor:
        """Convolve ``x`` with ``w`` and add ``b``."""
        ctx.save_for_backward(x, w)
        ctx.bias_shape = None if b is None else list(b.shape)
        ctx.options = options
        return _aten.convolution(x, w, b, *options)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. input, weight and bias."""
        x, w = ctx.saved_tensors
        arguments = (g, x, w, ctx.bias_shape, ctx.options, ctx.needs_input_grad[:3])
        # without a graph call the kernel itself, which has a batching rule
        call = ConvolutionBackward.apply if torch.is_grad_enabled() else _backward
        return (*call(*arguments), None)


class ConvolutionBackward(torch.autograd.Function):
    """The backward pass of a convolution. All of its products are bilinear."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. input, weight and bias, given those of ``_backward``."""
        *tensors, _, ctx.options, _ = arguments
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return _backward(*arguments)

    @staticmethod
    def backward(
        ctx: Any, vx: Tensor | None, vw: Tensor | None, vb: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. output gradient, input and weight."""
        g, x, w = ctx.saved_tensors
        wants_g, wants_x, wants_w, *_ = wanted_gradients(ctx)
        grad_g = grad_x = grad_w = None
        if wants_g:
            parts = []
            if vx is not None:
                parts.append(_aten.convolution(vx, w, None, *ctx.options))
            if vw is not None:
                parts.append(_aten.convolution(x, vw, None, *ctx.options))
            if vb is not None:
                parts.append(vb.reshape(-1, *[1] * (g.ndim - 2)).expand_as(g))
            grad_g = sum(parts[1:], start=parts[0]) if parts else None
        if wants_x and vw is not None:
            grad_x = _backward(g, x, vw, None, ctx.options, (True, False, False))[0]
        if wants_w and vx is not None:
            grad_w = _backward(g, vx, w, None, ctx.options, (False, True, False))[1]
        return grad_g, grad_x, grad_w, None, None, None


def _backward(
    g: Tensor,
    x: Tensor,
    w: Tensor,
    bias_shape: list[int] | None,
    options: Options,
    mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    return _aten.convolution_backward(g, x, w, bias_shape, *options, list(mask))


def _override(function: Callable, transposed: bool) -> Callable:
    """Return the replacement of a function such as ``torch.conv2d``, perhaps a transposed one."""

    def replacement(
        input: Tensor, weight: Tensor, bias: Tensor | None = None, *rest: Any, **kw: Any
    ):
        names = (
            ("stride", "padding", "output_padding", "groups", "dilation")
            if transposed
            else ("stride", "padding", "dilation", "groups")
        )
        options = dict(zip(names, rest, strict=False)) | kw
        # padding by name, inputs without batch axis, autocast's own casts, and the user's own
        # torch.func transforms are left alone
        if (
            isinstance(options.get("padding"), str)
            or input.ndim != weight.ndim
            or torch.is_autocast_enabled(input.device.type)
            or in_transform()
        ):
            return function(input, weight, bias, *rest, **kw)
        return Convolution.apply(
            input, weight, bias, _options(options, weight.ndim - 2, transposed)
        )

    return replacement


def _options(given: dict[str, Any], rank: int, transposed: bool) -> Options:
    """Return all options of a convolution, with a number for each axis."""

    def sizes(name: str, default: int) -> list[int]:
        value = given.get(name, default)
        value = [value] if isinstance(value, int) else list(value)
        return value * rank if len(value) == 1 else value

    steps = sizes("stride", 1), sizes("padding", 0), sizes("dilation", 1)
    return (*steps, transposed, sizes("output_padding", 0), given.get("groups", 1))


CONVOLUTIONS: dict[Callable, Callable] = {
    function: _override(function, transposed)
    for function, transposed in [
        (torch.conv1d, False),
        (torch.conv2d, False),
        (torch.conv3d, False),
        (torch.conv_transpose1d, True),
        (torch.conv_transpose2d, True),
        (torch.conv_transpose3d, True),
    ]
}
