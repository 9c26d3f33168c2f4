"""Convolutions and transposed convolutions in one, two and three dimensions."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from einops import rearrange
from torch import Tensor

from curvlinops.layers import rules
from curvlinops.layers.gradients import Entries, PerSampleGradient
from curvlinops.layers.inputs import Patches
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.patches import Window, make_patches
from curvlinops.layers.rules import Use, contraction, reads
from curvlinops.support.autograd_graph import shape_of_input
from curvlinops.support.torch_internals import shape_of_output


@reads("ConvolutionBackward0")
def convolution(node: Any, position: int) -> Use | None:
    """A convolution, transposed or not, in one, two or three dimensions."""
    output = shape_of_output(node)
    if position == 2:
        use = rules.bias(shape_of_input(node, 2), output, aligned=len(output) - 2)
        # filters of transposed convolutions are multiplied at the positions of the input
        return replace(use, joins_weight=not node._saved_transposed)
    if position == 0:
        return None
    if node._saved_transposed:
        return _transposed(node, node._saved_input, shape_of_input(node, 1))
    weight, options = shape_of_input(node, 1), (node._saved_stride, node._saved_padding)
    filters = _Filters(weight[2:], weight[1], (*options, node._saved_dilation))
    samples, to_rows = (output[0],), _InGroups(node._saved_groups)
    use = Use(samples, (0,), to_rows, filters, "_saved_input", is_product=True)
    return replace(use, is_settled=True)


@reads("ConvolutionBackwardBackward0")
def convolution_backward(node: Any, position: int) -> Use | None:
    """The gradient of a convolution's input, as in models that differentiate their output."""
    if position != 2 or node._saved_transposed:
        return None
    weight, groups = shape_of_input(node, 2), node._saved_groups
    options = node._saved_stride, node._saved_padding, node._saved_dilation, groups
    window = Window.of(node._saved_input, weight[2:], *options)
    return _written(node._saved_grad_output, weight, window)


class _InGroups(NamedTuple):
    """Turns gradients of an output's images into rows, ``[V, n, groups, out, positions]``."""

    number: int

    def __call__(self, g: Tensor) -> Tensor:
        return rearrange(g, "v n (g o) ... -> v n g o (...)", g=self.number)


class _Filters(NamedTuple):
    """Returns gradients of filters as matrix products with patches of the input.

    Attributes:
        kernel: The kernel's lengths.
        channels: The number of channels in a group.
        options: Stride, padding and dilation.
    """

    kernel: tuple[int, ...]
    channels: int
    options: tuple[Any, ...]

    def __call__(self, images: Tensor, g: Tensor, entries: Entries) -> PerSampleGradient:
        groups = images.shape[2] // self.channels
        window = Window.of(images[0], self.kernel, *self.options, groups)
        # images of one sample, and positions in them
        g = rearrange(g, "v n s g o p -> v n (s p) g o")
        return OuterProducts(Patches(images, window), g, entries)


def _transposed(node: Any, x: Tensor, weight: Sequence[int]) -> Use | None:
    """Return matrix products of the filters with the input, and patches of the output."""
    options = (node._saved_stride, node._saved_padding, node._saved_output_padding)
    options, groups = (*options, node._saved_dilation), node._saved_groups
    window, _ = _window_of_output(x.shape[2:], weight[2:], *options, groups)
    return _written(x, weight, window)


def _written(x: Tensor, weight: Sequence[int], window: Window) -> Use | None:
    """Return matrix products of filters with pixels; each pixel writes a patch."""

    def to_product(g: Tensor) -> Tensor:
        patches = make_patches(g.flatten(0, 1), window)
        return patches.unflatten(0, g.shape[:2])

    return contraction(
        "n group in position, group in out -> n position group out",
        rearrange(x, "n (g i) ... -> n g i (...)", g=window.groups),
        [window.groups, weight[0] // window.groups, prod(weight[1:])],
        to_product,
        output_axes=(0, None, None, None),
    )


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
