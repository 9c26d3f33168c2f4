"""Patches: what each position of a convolution's output sees of its input, and their averages.

A patch has ``C/G * prod(K)`` entries, channels first and then positions in the kernel, as the
filters ``weight.flatten(1)`` have.
"""

from collections.abc import Sequence
from functools import reduce as fold
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einconv.utils import get_conv_output_size, get_conv_paddings
from einops import rearrange
from torch import Tensor

from curvlinops.support.norms import wide

Lengths = int | Sequence[int]
Padding = Lengths | Sequence[tuple[int, int]] | str

#: Axes of images up to this many positions are summed over at once: one product with a matrix
#: that has a column for each position of the kernel is faster than one product for each axis
#: there (7 x 7: 9 times, 14 x 14: 1.3 times), and slower beyond (56 x 56: 3 times).
_FEW_POSITIONS = 256

#: Names of the kernel's axes and of the output's, by their number.
_AXES = {1: ("k", "o"), 2: ("k l", "o p"), 3: ("k l m", "o p q")}


class Window(NamedTuple):
    """The patches that a convolution multiplies with its weight.

    At position k in the kernel, position o of the output sees position ``o * stride + k * dilation
    - before`` of the input along each axis, and zero outside of it.
    """

    kernel_size: Sequence[int]
    stride: Sequence[int]
    #: Zeros before and behind each axis; negative numbers crop.
    pads: Sequence[tuple[int, int]]
    dilation: Sequence[int]
    #: Number of patches along each axis.
    size: Sequence[int]
    groups: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        kernel_size: Lengths,
        stride: Lengths,
        padding: Padding,
        dilation: Lengths,
        groups: int,
    ) -> "Window":
        """Return the window for ``x``, ``[N, C, *I]``, and the arguments of ``extract_patches``."""
        dims = x.ndim - 2
        if dims < 1:
            raise ValueError(
                f"Expected an input [N, C, *I], got shape {list(x.shape)}. Add the axes it lacks."
            )
        kernel, stride = lengths(kernel_size, dims), lengths(stride, dims)
        dilation = lengths(dilation, dims)
        for name, values in (("kernel_size", kernel), ("stride", stride), ("dilation", dilation)):
            if min(values) < 1:
                raise ValueError(f"{name} must be at least 1, got {values}.")
        pads = tuple(both_sides(padding, kernel, stride, dilation))
        size = tuple(
            get_conv_output_size(length + sum(pair), k, s, 0, d)
            for length, pair, k, s, d in zip(
                x.shape[2:], pads, kernel, stride, dilation, strict=True
            )
        )
        window = cls(kernel, stride, pads, dilation, size, groups)
        window._check(x)
        return window

    def _check(self, x: Tensor) -> None:
        if not x.is_floating_point():
            raise ValueError(f"Expected a floating-point input, got {x.dtype}.")
        if self.groups < 1 or x.shape[1] % self.groups or x.shape[1] == 0:
            raise ValueError(
                f"The {x.shape[1]} channels of the input of shape {list(x.shape)} do not fall into "
                f"{self.groups} equal groups."
            )
        for axis, (length, pair) in enumerate(zip(x.shape[2:], self.pads, strict=True)):
            if self.size[axis] < 1 or self.reach(axis, self.size[axis]) > length + sum(pair):
                raise ValueError(
                    f"No {max(self.size[axis], 1)} patches along spatial axis {axis} of the input "
                    f"of shape {list(x.shape)}: one spans {self.reach(axis, 1)} positions, and "
                    f"there are {length + sum(pair)}, padded by {pair}. Pad more, or use a smaller "
                    "kernel."
                )

    @property
    def axes(self) -> tuple[str, str]:
        """The names of the kernel's axes and of the output's in patterns of einops."""
        return _AXES[len(self.size)]

    def reach(self, axis: int, count: int) -> int:
        """Return the number of positions that neighboring patches span along an axis."""
        span = self.dilation[axis] * (self.kernel_size[axis] - 1) + 1
        return (count - 1) * self.stride[axis] + span


def lengths(values: Lengths, dims: int) -> tuple[int, ...]:
    """Return one number (or pair) for each axis."""
    values = (values,) if isinstance(values, int) else tuple(values)
    values = values * dims if len(values) == 1 else values
    if len(values) != dims:
        raise ValueError(f"Expected one number, or {dims} (one for each axis), got {values}.")
    return values


def both_sides(
    padding: Padding, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and behind each axis, or raise a ValueError if there is none."""
    if isinstance(padding, str):
        if padding not in ("same", "valid"):
            raise ValueError(f"Unknown padding {padding!r}: use numbers, pairs, 'same' or 'valid'.")
        if padding == "same" and max(stride) > 1:
            raise ValueError(f"padding='same' needs stride 1, got {stride}. Give numbers.")
        paddings: Sequence[Any] = [padding] * len(kernel)
    else:
        paddings = lengths(padding, len(kernel))
    return [
        get_conv_paddings(k, s, p, d) if isinstance(p, int | str) else (p[0], p[1])
        for p, k, s, d in zip(paddings, kernel, stride, dilation, strict=True)
    ]


def patch_sums(x: Tensor, window: Window) -> Tensor:
    """Return the sums of patches over output locations, ``[N, G, C/G * prod(K)]``."""
    x, lengths = wide(x), x.shape[2:]
    samples, channels, kernel = *x.shape[:2], prod(window.kernel_size)
    matrices = [_seen(window, axis, length, x) for axis, length in enumerate(lengths)]
    if prod(lengths) <= _FEW_POSITIONS:
        matrices, lengths = [fold(torch.kron, matrices)], [prod(lengths)]
    if not x.is_contiguous() and x.movedim(1, -1).is_contiguous():  # channels last
        sums = _contract(x.movedim(1, -1), matrices, lengths)
        sums = rearrange(sums.reshape(samples, kernel, channels), "n k c -> n c k")
    else:
        sums = _contract(x.flatten(0, 1), matrices, lengths)
    return sums.reshape(samples, window.groups, channels // window.groups * kernel)


def make_patches(x: Tensor, window: Window) -> Tensor:
    """Return the patch of each output position, ``[N, positions, groups, channels * kernel]``."""
    kernel, output = window.axes
    view, groups = view_patches(pad(x, window.pads), window), window.groups
    # positions last in memory: long runs to copy
    copy = rearrange(view, f"n (g c) {kernel} {output} -> n g (c {kernel}) ({output})", g=groups)
    return rearrange(copy, "n g i p -> n p g i")


def pad(x: Tensor, pads: Sequence[tuple[int, int]]) -> Tensor:
    """Pad the last axes by zeros, or crop them where the numbers are negative."""
    flat = [length for pair in reversed(pads) for length in pair]
    return F.pad(x, flat) if any(flat) else x


def view_patches(x: Tensor, window: Window) -> Tensor:
    """Return the patches of a padded input ``[N, C, *I]`` as a view ``[N, C, *K, *O]``."""
    x = x.contiguous()
    batch, channels, *steps = x.stride()
    return x.as_strided(
        (*x.shape[:2], *window.kernel_size, *window.size),
        (
            *(batch, channels),
            *(step * d for step, d in zip(steps, window.dilation, strict=True)),
            *(step * s for step, s in zip(steps, window.stride, strict=True)),
        ),
    )


def _seen(window: Window, axis: int, length: int, like: Tensor) -> Tensor:
    """Return a matrix ``[K, I]`` of zeros and ones.

    Entry (k, i) is one if position k of the kernel meets position i of the input in some patch. It
    is the sum over o of einconv's index pattern ``[K, O, I]``, which is dense: a waveform of 16,000
    with K = 10 and stride 5 takes 20 s and 512 MB there, 1.6 ms here.
    """
    size, stride, dilation = window.size[axis], window.stride[axis], window.dilation[axis]
    before, behind = window.pads[axis]
    kernel, padded = window.kernel_size[axis], before + length + behind
    matrix = torch.zeros(kernel, padded, dtype=like.dtype, device="cpu")
    for k, row in enumerate(matrix):
        row[k * dilation : k * dilation + size * stride : stride] = 1
    return F.pad(matrix, (-before, -behind)).to(like.device)


def _contract(x: Tensor, matrices: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
    """Multiply the axes after the first of ``[M, *I, ...]`` with matrices ``[K, I]``."""
    rows, rest = x.shape[0], prod(x.shape[1:])
    for matrix, length in zip(matrices, lengths, strict=True):
        rest = rest // length
        if rest == 1:
            x = x.reshape(rows, length) @ matrix.T
        else:
            x = matrix @ x.reshape(rows, length, rest)
        rows = rows * len(matrix)
    return x
