"""Convolutions and transposed convolutions in one, two and three dimensions."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.core.functions import wide
from curvlinops.layers.forms import Form
from curvlinops.layers.outer import Outer
from curvlinops.layers.uses import Sort, Use, contraction, handles, shift

Lengths = int | Sequence[int]


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Lengths = 1,
    padding: Lengths | str = 0,
    dilation: Lengths = 1,
    groups: int = 1,
) -> dict[str, Use]:
    """Matrix products of the filters with patches of the input."""
    dims = weight.ndim - 2
    batched = input.ndim == weight.ndim
    kernel, stride, dilation = weight.shape[2:], _tuple(stride, dims), _tuple(dilation, dims)
    x = input if batched else input.unsqueeze(0)
    pads = _pads(padding, kernel, dilation)
    size = [
        (length + sum(pad) - d * (k - 1) - 1) // s + 1
        for length, pad, d, k, s in zip(x.shape[2:], pads, dilation, kernel, stride, strict=True)
    ]

    def split(g: Tensor) -> Tensor:
        g = g if batched else g.unsqueeze(1)
        return g.unflatten(2, (groups, -1)).flatten(4)

    def form(g: Tensor, sort: Sort) -> Form:
        patches = _Patches(wide(sort(x)), pads, kernel, stride, dilation, size, groups)
        # [V, N, S, G, O, P]: images of one sample, and positions in them
        return Outer(patches, wide(g).movedim(-1, 3).flatten(2, 3), weight.shape)

    return {"weight": Use((x.shape[0],), split, form), **_bias(bias, x, size, batched)}


def _transposed(
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
    dims = weight.ndim - 2
    batched = input.ndim == weight.ndim
    kernel, stride, dilation = weight.shape[2:], _tuple(stride, dims), _tuple(dilation, dims)
    x = input if batched else input.unsqueeze(0)
    padding, extra = _tuple(padding, dims), _tuple(output_padding, dims)
    size = [
        (length - 1) * s - 2 * p + d * (k - 1) + e + 1
        for length, s, p, d, k, e in zip(
            x.shape[2:], stride, padding, dilation, kernel, extra, strict=True
        )
    ]
    # negative where patches end before the output does
    pads = [
        (p, (length - 1) * s + d * (k - 1) + 1 - p - n)
        for p, length, s, d, k, n in zip(
            padding, x.shape[2:], stride, dilation, kernel, size, strict=True
        )
    ]

    def split(g: Tensor) -> Tensor:
        g = g if batched else g.unsqueeze(1)
        patches = _patches(
            _pad(g.flatten(0, 1), pads), kernel, stride, dilation, x.shape[2:], groups
        )
        return patches.unflatten(0, g.shape[:2])

    lead = ["n", "position"]
    use = contraction(
        x.unflatten(1, (groups, -1)).flatten(3),
        ["n", "group", "in", "position"],
        ["group", "in", "out"],
        [*lead, "group", "out"],
        [groups, weight.shape[0] // groups, prod(weight.shape[1:])],
        split,
    )
    biases = _bias(bias, x, size, batched)
    # positions of the filters are those of the input
    return {"weight": use.reshaped(weight.shape)} | {
        name: replace(use, elsewhere=True) for name, use in biases.items()
    }


for _function in (torch.conv1d, torch.conv2d, torch.conv3d):
    handles(_function)(_convolution)
for _function in (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d):
    handles(_function)(_transposed)


def _bias(bias: Tensor | None, x: Tensor, size: Sequence[int], batched: bool) -> dict[str, Use]:
    if bias is None:
        return {}
    batch = [x.shape[0]] if batched else []
    return {"bias": shift(bias.shape, [*batch, len(bias), *size], aligned=len(size))}


def _tuple(lengths: Lengths, dims: int) -> tuple[int, ...]:
    lengths = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    return lengths * dims if len(lengths) == 1 else lengths


def _pads(
    padding: Lengths | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and behind each axis."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in _tuple(padding, len(kernel))]


def _pad(x: Tensor, pads: list[tuple[int, int]]) -> Tensor:
    flat = [length for pad in reversed(pads) for length in pad]
    return F.pad(x, flat) if any(flat) else x


def _patches(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    size: Sequence[int],
    groups: int,
) -> Tensor:
    """Return what each position of the output sees, ``[N, positions, groups, channels * kernel]``.

    Args:
        x: The padded input, ``[N, C, *]``.
        kernel: The kernel's lengths.
        stride: Steps between patches.
        dilation: Steps within a patch.
        size: Number of patches along each axis.
        groups: Number of groups of channels.
    """
    x = x.contiguous()
    batch, channels, *steps = x.stride()
    view = x.as_strided(
        (*x.shape[:2], *kernel, *size),
        (
            *(batch, channels),
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
    )
    # positions last in memory: long runs to copy
    copy = view.reshape(x.shape[0], groups, -1, prod(size))
    return copy.permute(0, 3, 1, 2)


class _Patches:
    """Patches of the samples' images, ``[N, images * positions, groups, channels * kernel]``.

    They take much more memory than the images, and are made for some samples at a time.

    Args:
        x: The images of each sample, ``[N, S, C, *]``.
        pads: Padding before and behind each axis.
        *arguments: Arguments of ``_patches``.
    """

    def __init__(self, x: Tensor, pads: list[tuple[int, int]], *arguments: Any):
        self._x, self._pads, self._arguments = x, pads, arguments
        kernel, _, _, size, groups = arguments
        width = x.shape[2] // groups * prod(kernel)
        self.shape = (x.shape[0], x.shape[1] * prod(size), groups, width)

    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        """Make the patches of some samples."""
        x = self._x[samples]
        patches = _patches(_pad(x.flatten(0, 1), self._pads), *self._arguments)
        return patches.unflatten(0, x.shape[:2]).flatten(1, 2)


del _function
