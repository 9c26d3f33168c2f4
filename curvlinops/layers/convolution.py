"""Convolutions and transposed convolutions in one, two and three dimensions."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from einops import rearrange
from torch import Tensor

from curvlinops.layers import rules
from curvlinops.layers.gradients import Entries, PerSampleGradient
from curvlinops.layers.inputs import Patches
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.patches import Lengths, Padding, Window, lengths, make_patches
from curvlinops.layers.rules import Use, contraction, handles


@handles(torch.conv1d, torch.conv2d, torch.conv3d)
def convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
) -> dict[str, Use]:
    """Matrix products of the filters with patches of the input."""
    batched = input.ndim == weight.ndim
    x = input if batched else input.unsqueeze(0)
    window = Window.of(x, weight.shape[2:], stride, padding, dilation, groups)

    def to_rows(g: Tensor) -> Tensor:
        g = g if batched else g.unsqueeze(1)
        return rearrange(g, "v n (g o) ... -> v n g o (...)", g=groups)

    def gradient(images: Tensor, g: Tensor, entries: Entries) -> PerSampleGradient:
        # images of one sample, and positions in them
        g = rearrange(g, "v n s g o p -> v n (s p) g o")
        return OuterProducts(Patches(images, window), g, entries)

    use = Use((x.shape[0],), to_rows, gradient, inputs=lambda: x, is_product=True)
    return {"weight": use, **_bias(bias, x, window.size, batched)}


@handles(torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
def transposed_convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Lengths = 1,
    padding: Lengths = 0,
    output_padding: Lengths = 0,
    groups: int = 1,
    dilation: Lengths = 1,
) -> dict[str, Use]:
    """Matrix products of the filters with the input, and patches of the output."""
    batched = input.ndim == weight.ndim
    x, dims = input if batched else input.unsqueeze(0), weight.ndim - 2
    options = (lengths(option, dims) for option in (stride, padding, output_padding, dilation))
    window, size = _window_of_output(x.shape[2:], weight.shape[2:], *options, groups)

    def to_product(g: Tensor) -> Tensor:
        g = g if batched else g.unsqueeze(1)
        patches = make_patches(g.flatten(0, 1), window)
        return patches.unflatten(0, g.shape[:2])

    use = contraction(
        "n group in position, group in out -> n position group out",
        rearrange(x, "n (g i) ... -> n g i (...)", g=groups),
        [groups, weight.shape[0] // groups, prod(weight.shape[1:])],
        to_product,
    )
    biases = _bias(bias, x, size, batched)
    # the filters are multiplied at the positions of the input
    biases = {name: replace(of_bias, joins_weight=False) for name, of_bias in biases.items()}
    return {"weight": use, **biases}


def _window_of_output(
    positions: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> tuple[Window, list[int]]:
    """Return the patches that a transposed convolution writes, and its output's size."""
    # the length of an axis that all patches span
    spans = [
        (count - 1) * s + d * (k - 1) + 1
        for count, s, d, k in zip(positions, stride, dilation, kernel, strict=True)
    ]
    size = [
        span - 2 * p + extra for span, p, extra in zip(spans, padding, output_padding, strict=True)
    ]
    # the padding is negative where patches end before the output does
    pads = [(p, span - p - n) for p, span, n in zip(padding, spans, size, strict=True)]
    return Window(kernel, stride, pads, dilation, positions, groups), size


def _bias(bias: Tensor | None, x: Tensor, size: Sequence[int], batched: bool) -> dict[str, Use]:
    if bias is None:
        return {}
    batch = [x.shape[0]] if batched else []
    return {"bias": rules.bias(bias.shape, [*batch, len(bias), *size], aligned=len(size))}
