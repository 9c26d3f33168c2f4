"""Parameters that are added to inputs, multiply them, or enter another elementwise function."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.check import probe, tolerance_of
from curvlinops.layers.rules import OfNode, Use, broadcast, reads
from curvlinops.support.autograd_graph import shape_of_input
from curvlinops.support.torch_internals import (
    input_metadata,
    shape_of_output,
    without_torch_function,
)


@reads("AddBackward0", "SubBackward0")
def add(node: Any, position: int) -> Use | None:
    """``self + alpha other`` or ``self - alpha other``."""
    if input_metadata(node).dtype.is_complex:
        return elementwise(node, position)
    sign = -1.0 if node.name().startswith("Sub") else 1.0
    slope = 1.0 if position == 0 else sign * float(node._saved_alpha)
    return broadcast(shape_of_input(node, position), shape_of_output(node), slope)


@reads("MulBackward0")
def mul(node: Any, position: int) -> Use | None:
    """``self * other``."""
    other = "_saved_other" if position == 0 else "_saved_self"
    if input_metadata(node).dtype.is_complex or getattr(node, other) is None:
        return elementwise(node, position)
    return broadcast(shape_of_input(node, position), shape_of_output(node), other)


@reads("MaskedFillBackward1")
def masked_fill(node: Any, position: int) -> Use | None:
    """The value at the entries of a mask."""
    slope = OfNode(_mask, (position == 1,))
    return broadcast(shape_of_input(node, position), shape_of_output(node), slope)


def _mask(node: Any, is_filled: bool) -> Tensor:
    mask = node._saved_mask
    return (mask if is_filled else ~mask).to(input_metadata(node).dtype)


def elementwise(node: Any, position: int) -> Use | None:
    """Return the use in any elementwise function, ``None`` if the node is not elementwise.

    A node multiplies gradients by the derivative. It returns the gradient of an argument that is
    broadcast before it is summed to the argument's shape.
    """
    if len(node._input_metadata) > 1:  # one for each output
        return None
    output = input_metadata(node)
    shape = tuple(output.shape)

    def derivative(g: Tensor) -> Tensor | None:
        with torch.no_grad(), without_torch_function():
            gradients = node(g)
        return (gradients if isinstance(gradients, tuple) else (gradients,))[position]

    ones = torch.ones(shape, dtype=output.dtype, device=output.device)
    slope, some = derivative(ones), probe(ones)
    if slope is None or slope.numel() != ones.numel():
        return None
    if output.dtype.is_complex:  # the real part of its product with a gradient counts
        slope = torch.complex(slope, -derivative(1j * ones))
    # nodes that write in place return the gradient in the shape of the view that they write to
    full = tuple(slope.shape)
    expected, found = some.reshape(full) * slope, derivative(some)
    expected = expected.real if expected.is_complex() else expected
    tolerance = tolerance_of(output.dtype.to_real())
    # slopes that are all small are compared in their own scale
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    if not torch.allclose(found, expected, tolerance, 1e-3 * tolerance * largest, equal_nan=True):
        return None
    return replace(broadcast(shape_of_input(node, position), full, slope), output_shape=full)


@reads("ExpandBackward0")
def expand(node: Any, position: int) -> Use | None:
    """A parameter for each sample, such as a class token."""
    return broadcast(shape_of_input(node, 0), shape_of_output(node))


@reads("RepeatBackward0")
def repeat(node: Any, position: int) -> Use | None:
    """The same, with copies side by side along any axis."""
    shape, counts = shape_of_input(node, 0), tuple(node._saved_repeats)
    lengths = (1,) * (len(counts) - len(shape)) + tuple(shape)
    # each axis falls into copies and entries
    apart = tuple(length for pair in zip(counts, lengths, strict=True) for length in pair)
    single = [length for entries in lengths for length in (1, entries)]
    return replace(broadcast(single, apart), output_shape=apart)


# --- scale and shift of normalized inputs


def _standardized(node: Any) -> Callable[[], Tensor]:
    x, mean, scale = node._saved_input, node._saved_result1, node._saved_result2
    return lambda: (x - mean) * scale


def _scaled(node: Any) -> Callable[[], Tensor]:
    x, scale = node._saved_input, node._saved_result1
    return lambda: x * scale


def _in_groups(node: Any) -> Callable[[], Tensor]:
    x, mean, scale = node._saved_input, node._saved_result1, node._saved_result2
    sizes = node._saved_N, node._saved_group

    def normalized() -> Tensor:
        values = x.reshape(*sizes, -1) - mean.reshape(*sizes, 1)
        return (values * scale.reshape(*sizes, 1)).reshape(x.shape)

    return normalized


def _by_statistics(node: Any) -> Callable[[], Tensor]:
    x, mean, variance = node._saved_input, node._saved_running_mean, node._saved_running_var
    eps = node._saved_eps if hasattr(node, "_saved_eps") else node._saved_epsilon
    shape = -1, *(1,) * (x.ndim - 2)
    return lambda: (x - mean.reshape(shape)) * (variance.reshape(shape) + eps).rsqrt()


#: What the nodes normalize: the last axes, or channels.
_LAST = {"NativeLayerNormBackward0": _standardized, "FusedRmsNormBackward0": _scaled}
_CHANNELS = {"NativeGroupNormBackward0": _in_groups} | {
    f"{name}BatchNormBackward0": _by_statistics for name in ("Native", "Cudnn", "Miopen")
}


@reads(*_LAST, *_CHANNELS)
def normalization(node: Any, position: int) -> Use | None:
    """The weight (position 1) or bias (2) that follows a normalization.

    Batches are normalized by running statistics; their own would couple the samples.
    """
    name = node.name()
    normalized, output = (_LAST | _CHANNELS)[name], shape_of_output(node)
    if normalized is _by_statistics and getattr(node, "_saved_training", True):
        return None
    slope = OfNode(normalized) if position == 1 else 1.0
    aligned = len(output) - 2 if name in _CHANNELS else 0
    return broadcast(shape_of_input(node, position), output, slope, aligned)
