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
from curvlinops.layers.rules import Matrices, Use, contraction, reads
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
    weight, groups = shape_of_input(node, 1), node._saved_groups
    options = node._saved_stride, node._saved_padding, node._saved_dilation
    if node._saved_transposed:
        x = tuple(node._saved_input.shape)
        stride, padding, dilation = options
        # additional entries of the output, which no patch reaches, are padded less, or cropped
        pairs = zip(padding, node._saved_output_padding, strict=True)
        pads = tuple((p, p - more) for p, more in pairs)
        window = Window(weight[2:], tuple(stride), pads, tuple(dilation), x[2:], groups)
        return _written("_saved_input", x, weight, window)
    return Use(
        (output[0],),
        (0,),
        _InGroups(groups),
        _Filters(weight[2:], weight[1], options),
        "_saved_input",
        matrices=Matrices(groups, weight[0] // groups, prod(weight[1:])),
        is_settled=True,
        has_groups=True,
    )


@reads("ConvolutionBackwardBackward0")
def convolution_backward(node: Any, position: int) -> Use | None:
    """The gradient of a convolution's input, as in models that differentiate their output."""
    if position != 2 or node._saved_transposed:
        return None
    weight, groups = shape_of_input(node, 2), node._saved_groups
    options = node._saved_stride, node._saved_padding, node._saved_dilation, groups
    window = Window.of(node._saved_input, weight[2:], *options)
    shape = tuple(node._saved_grad_output.shape)
    return _written("_saved_grad_output", shape, weight, window)


class _InGroups(NamedTuple):
    """Turns gradients of an output's images into rows, ``[V, n, groups, out, positions]``."""

    number: int

    def __call__(self, g: Tensor) -> Tensor:
        return rearrange(g, "v n (g o) ... -> v n g o (...)", g=self.number)


class _Filters(NamedTuple):
    """Returns gradients of filters, with the channels of a group, as products with patches."""

    kernel: tuple[int, ...]
    channels: int
    #: Stride, padding and dilation.
    options: tuple[Any, ...]

    def __call__(self, images: Tensor, g: Tensor, entries: Entries) -> PerSampleGradient:
        groups = images.shape[2] // self.channels
        window = Window.of(images[0], self.kernel, *self.options, groups)
        # images of one sample, and positions in them
        g = rearrange(g, "v n s g o p -> v n (s p) g o")
        return OuterProducts(Patches(images, window), g, entries)


def _written(
    name: str, shape: tuple[int, ...], weight: Sequence[int], window: Window
) -> Use | None:
    """Return matrix products of filters with pixels of a saved tensor; each writes a patch."""
    samples, channels, *axes = shape
    in_groups = samples, window.groups, channels // window.groups, prod(axes)
    return contraction(
        "n group in position, group in out -> n position group out",
        name,
        [window.groups, weight[0] // window.groups, prod(weight[1:])],
        _PatchesOf(window),
        in_groups,
        output_axes=(0, None, None, None),
    )


class _PatchesOf(NamedTuple):
    """Returns the patches of gradients of an output's images."""

    window: Window

    def __call__(self, g: Tensor) -> Tensor:
        return make_patches(g.flatten(0, 1), self.window).unflatten(0, g.shape[:2])
