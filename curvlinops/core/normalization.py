"""Normalizations whose double backward is made of the kernels of the ordinary backward pass.

PyTorch composes the double backward of LayerNorm and BatchNorm of some forty passes over memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.core.activations import is_plain
from curvlinops.core.functions import wanted

_aten = torch.ops.aten


class LayerNorm(torch.autograd.Function):
    """Normalizes rows ``x [M, n]``, then scales by ``w [n]`` and shifts by ``b [n]``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float) -> Tensor:
        """Normalize."""
        y, mean, rstd = _aten.native_layer_norm(x, x.shape[1:], w, b, eps)
        ctx.save_for_backward(x, mean, rstd, w, b)
        ctx.eps = eps
        return y

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. x, w and b."""
        arguments = (g, *ctx.saved_tensors, ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():
            return (*LayerNormBackward.apply(*arguments, ctx.eps), None)
        return (*_backward(*arguments), None)


class LayerNormBackward(torch.autograd.Function):
    """The backward pass of LayerNorm.

    With ``h = (x - mean) rstd`` and the symmetric ``P u = u - mean(u) - h mean(u h)`` it returns
    ``rstd P(w g)``, and the sums over rows of ``g h`` and ``g``. The derivative of h is
    ``rstd P``, too, and that of rstd is ``-rstd^2 h / n``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        g: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        w: Tensor | None,
        b: Tensor | None,
        mask: tuple[bool, ...],
        eps: float,
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. x, w and b, where asked for."""
        ctx.save_for_backward(g, x, mean, rstd, w)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return _backward(g, x, mean, rstd, w, b, mask)

    @staticmethod
    def backward(
        ctx: Any, vx: Tensor | None, vw: Tensor | None, vb: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. output gradient, x and w."""
        g, x, mean, rstd, w = ctx.saved_tensors
        if torch.is_grad_enabled():  # of a model that differentiates, too
            grad_g, grad_x, grad_w = _composed(g, x, w, ctx.eps, (vx, vw, vb))
            return grad_g, grad_x, None, None, grad_w, None, None, None
        wants = wanted(ctx)
        wants_g, wants_x, wants_w = wants[0], wants[1], w is not None and wants[4]
        h = (x - mean).mul_(rstd)
        pushed = None if vx is None else _project(vx, x, mean, rstd)
        grad_g = grad_x = grad_w = None
        if wants_g:
            grad_g = None if vb is None else vb.expand_as(g)
            if vw is not None:
                grad_g = _add_product(grad_g, h, vw)
            if vx is not None:
                grad_g = _add_product(grad_g, pushed, w)
        if wants_w and vx is not None:
            grad_w = (g * pushed).sum(0)
        if wants_x and (vx is not None or vw is not None):
            inner = None if vw is None else g * vw  # becomes the gradient w.r.t. h, over rstd
            if vx is not None:
                scaled = g if w is None else g * w
                a = (vx * h).mean(1, keepdim=True).mul_(-rstd)
                c = (scaled * h).mean(1, keepdim=True).mul_(-rstd)
                inner = _add_product(_add_product(inner, vx, c), scaled, a)
            grad_x = _project(inner, x, mean, rstd)
            if vx is not None:  # through rstd
                along = (pushed * scaled).mean(1, keepdim=True).mul_(-rstd)
                grad_x = _add_product(grad_x, h, along)
        return grad_g, grad_x, None, None, grad_w, None, None, None


def _composed(
    g: Tensor, x: Tensor, w: Tensor | None, eps: float, cotangents: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    """Pull back through the backward pass, in operations that can be differentiated again."""
    # views, so that g, x and w count as independent
    g, x = g.view_as(g), x.view_as(x)
    w = None if w is None else w.view_as(w)
    centered = x - x.mean(1, keepdim=True)
    rstd = (centered.square().mean(1, keepdim=True) + eps).rsqrt()
    h = centered * rstd
    u = g if w is None else g * w
    grad_x = rstd * (u - u.mean(1, keepdim=True) - h * (u * h).mean(1, keepdim=True))
    pairs = zip((grad_x, (g * h).sum(0), g.sum(0)), cotangents, strict=True)
    outputs, weights = zip(*((z, v) for z, v in pairs if v is not None), strict=True)
    inputs = [g, x] if w is None else [g, x, w]
    grads = torch.autograd.grad(
        outputs, inputs, weights, create_graph=True, allow_unused=True, materialize_grads=True
    )
    return grads if w is not None else (*grads, None)


def _add_product(total: Tensor | None, one: Tensor, two: Tensor | None) -> Tensor:
    """Return ``total + one * two``, where a sum or a factor that is ``None`` is left out."""
    if two is None:
        return one if total is None else total + one
    return one * two if total is None else torch.addcmul(total, one, two)


def _backward(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    w: Tensor | None,
    b: Tensor | None,
    mask: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    return _aten.native_layer_norm_backward(g, x, x.shape[1:], mean, rstd, w, b, list(mask))


def _project(u: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Return ``rstd P u``, which is LayerNorm's own backward pass without a scale."""
    return _backward(u, x, mean, rstd, None, None, (True, False, False))[0]


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *rest: Any,
    **options: Any,
) -> Tensor:
    if not is_plain(input, weight, bias) or input.numel() == 0:
        return torch.layer_norm(input, list(normalized_shape), weight, bias, eps)
    size = torch.Size(normalized_shape).numel()
    flat = [None if p is None else p.reshape(-1) for p in (weight, bias)]
    return LayerNorm.apply(input.reshape(-1, size), *flat, eps).view_as(input)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """In eval mode it scales and shifts channels."""
    options = (weight, bias, training, momentum, eps)
    if (
        training
        or running_mean is None
        or not is_plain(input, running_mean, running_var, *options[:2])
    ):
        return F.batch_norm(input, running_mean, running_var, *options)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = [-1, *[1] * (input.ndim - 2)]
    return input * scale.view(shape) + shift.view(shape)


NORMALIZATIONS: dict[Callable, Callable] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.batch_norm: _batch_norm,
}
