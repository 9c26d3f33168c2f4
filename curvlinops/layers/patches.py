"""Patches: what each position of a convolution's output sees of its input, and their averages.

A patch has ``C/G * prod(K)`` entries, channels first and then positions in the kernel, as the
filters ``weight.flatten(1)`` have.
"""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers.window import Lengths, Padding, Window
from curvlinops.support.norms import wide

#: Axes of images up to this many positions are summed over at once: one product with a matrix
#: that has a column for each position of the kernel is faster than one product for each axis
#: there (7 x 7: 9 times, 14 x 14: 1.3 times), and slower beyond (56 x 56: 3 times).
_FEW_POSITIONS = 256


def extract_patches(
    x: Tensor,
    kernel_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:
    """Return the inputs seen by each output location of a convolution.

    ``patches[n, o, (c, k)] = 1/G sum_g x[n, g C/G + c, o * stride + k * dilation - before]``, and
    zero outside of the input, in 1, 2 and 3 dimensions.

    Args:
        x: Input of the convolution, ``[N, C, *I]``.
        kernel_size: Lengths K of the kernel, a number or one for each axis.
        stride: Steps between patches.
        padding: Zeros on both sides of each axis, pairs of what is before and behind each axis,
            "valid" (none), or "same" (the output is as long as the input; one more behind than
            before where the number is odd).
        dilation: Steps within a patch.
        groups: Number G of groups of channels. Patches are averaged over groups.

    Returns:
        Patches ``[N, prod(O), C/G * prod(K)]``, in float32 for inputs in half precision.

    Raises:
        ValueError: If there are no such patches, or padding is negative: the message says why.
    """
    return make_patches(*_averaged(x, kernel_size, stride, padding, dilation, groups)).squeeze(2)


def extract_averaged_patches(
    x: Tensor,
    kernel_size: Lengths,
    stride: Lengths = 1,
    padding: Padding = 0,
    dilation: Lengths = 1,
    groups: int = 1,
) -> Tensor:
    """Return the average of ``extract_patches`` over output locations, without forming patches.

    Along each axis, position k of the kernel sees the input's positions
    ``{o * stride + k * dilation - before}``, so that the average is a product of ``x`` with one
    0-1 matrix ``[K, I]`` for each axis (Dangel, arXiv:2307.02275, section 2): 2-3 passes over the
    memory of ``x``.

    Args:
        x: Input of the convolution, ``[N, C, *I]``.
        kernel_size: Lengths K of the kernel, a number or one for each axis.
        stride: Steps between patches.
        padding: As that of ``extract_patches``.
        dilation: Steps within a patch.
        groups: Number G of groups of channels. Patches are averaged over groups.

    Returns:
        Averages ``[N, C/G * prod(K)]``, in float32 for inputs in half precision.

    Raises:
        ValueError: If there are no such patches, or padding is negative: the message says why.
    """
    # the average over groups reads the input once, and leaves little to do
    averaged, window = _averaged(x, kernel_size, stride, padding, dilation, groups)
    return patch_sums(averaged, window).squeeze(1) / prod(window.size)


def _averaged(x: Tensor, *options: Any) -> tuple[Tensor, Window]:
    """Return the average over groups, and the window, which PyTorch would not refuse."""
    window = Window.of(x, *options)
    if min(map(min, window.pads)) < 0:
        raise ValueError(f"padding must be at least 0, got {options[2]}. Crop the input instead.")
    return _mean_over_groups(wide(x), window.groups), window._replace(groups=1)


def patch_sums(x: Tensor, window: Window) -> Tensor:
    """Return the sums of patches over output locations for each group, without forming patches.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches.

    Returns:
        Sums ``[N, G, C/G * prod(K)]``, in float32 for inputs in half precision.
    """
    window.check(x)
    x, lengths = wide(x), x.shape[2:]
    samples, channels, kernel = *x.shape[:2], prod(window.kernel_size)
    matrices = [_seen(window, axis, length, x) for axis, length in enumerate(lengths)]
    if prod(lengths) <= _FEW_POSITIONS:
        matrices, lengths = [reduce(torch.kron, matrices)], [prod(lengths)]
    if not x.is_contiguous() and x.movedim(1, -1).is_contiguous():  # as channels last lie
        sums = _contract(x.movedim(1, -1), matrices, lengths)
        sums = sums.reshape(samples, kernel, channels).transpose(1, 2)
    else:
        sums = _contract(x.flatten(0, 1), matrices, lengths)
    return sums.reshape(samples, window.groups, channels // window.groups * kernel)


def make_patches(x: Tensor, window: Window) -> Tensor:
    """Return what each position of the output sees, ``[N, positions, groups, channels * kernel]``.

    Args:
        x: Input ``[N, C, *I]``.
        window: Which patches.
    """
    # positions last in memory: long runs to copy
    width = x.shape[1] // window.groups * prod(window.kernel_size)
    copy = view_patches(pad(x, window.pads), window).reshape(
        x.shape[0], window.groups, width, prod(window.size)
    )
    return copy.permute(0, 3, 1, 2)


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


def _mean_over_groups(x: Tensor, groups: int) -> Tensor:
    if groups == 1:
        return x
    if not x.is_contiguous():
        return x.unflatten(1, (groups, -1)).mean(1)
    # PyTorch's mean over a leading axis takes up to three times as long
    weights = x.new_full((1, groups), 1 / groups)
    mean = weights @ x.reshape(x.shape[0], groups, prod(x.shape[1:]) // groups)
    return mean.reshape(x.shape[0], x.shape[1] // groups, *x.shape[2:])


def _seen(window: Window, axis: int, length: int, like: Tensor) -> Tensor:
    """Return the matrix ``[K, I]`` with ones where a patch sees a position through the kernel's."""
    first = (
        torch.arange(window.kernel_size[axis], device="cpu") * window.dilation[axis]
        - window.pads[axis][0]
    )
    seen = first[:, None] + torch.arange(window.size[axis], device="cpu") * window.stride[axis]
    k, o = torch.nonzero((seen >= 0) & (seen < length), as_tuple=True)
    matrix = torch.zeros(window.kernel_size[axis], length, dtype=like.dtype, device="cpu")
    matrix[k, seen[k, o]] = 1
    return matrix.to(like.device)


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
