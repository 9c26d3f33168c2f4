"""Convolutions with filters, and gradients of filters, without patches.

Images are those of ``Patches``, ``[N, S, C, *I]``; filters are matrices ``[G, O, I]``, with I input
channels times positions in the kernel; outputs are ``[N, S * positions, G, O]``.
"""

from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import grad

from curvlinops.layers.patches import pad
from curvlinops.layers.window import Window

_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
_GRADIENTS = (grad.conv1d_weight, grad.conv2d_weight, grad.conv3d_weight)

#: From so many positions for each filter on, patches cost more than they save, if they have as many
#: channels as a processor multiplies at once, or take so many bytes that their memory is always
#: new; see ``docs_src/benchmarks/filters.py``.
_POSITIONS_PER_FILTER, _CHANNELS, _BYTES = 4, 8, 32 * 2**20


def prefers_groups(x: Tensor, window: Window, num_filters: int) -> bool:
    """Return whether ``of_samples`` is faster on a CPU than products with patches.

    Patches have an entry for each position, input channel and position in the kernel; a convolution
    with many groups reorders its filters, which have one for each output channel instead of
    the position, and multiplies several input channels at once, if there are, or has one of each.
    Patches that do not overlap are as small as the input.

    Args:
        x: Images.
        window: The patches.
        num_filters: Number of output channels of a group.
    """
    num_samples, num_images, channels, *_ = x.shape
    positions, size = num_images * prod(window.size), prod(window.kernel_size)
    num_bytes = num_samples * positions * channels * size * x.itemsize
    channels //= window.groups
    depthwise = window.groups > 1 and channels == num_filters == 1
    dear = channels >= _CHANNELS or depthwise or num_bytes > _BYTES
    few = _POSITIONS_PER_FILTER * num_filters <= positions
    return size > prod(window.stride) and dear and few


def of_samples(x: Tensor, g: Tensor, window: Window) -> Tensor:
    """Return each sample's gradient with respect to the filters, ``[N, G, O, I]``.

    With the samples as groups of channels, these are the gradients of one convolution (Rochette et
    al., Efficient per-example gradient computations in convolutional neural networks,
    arXiv:1912.06015, section 3).

    Args:
        x: Images; those of a sample share its gradient.
        g: Gradients of the outputs.
        window: What each position of the output sees.
    """
    num_samples, groups, filters = len(x), window.groups, g.shape[-1]
    # [S, N * C, *I]
    images, outputs = x.transpose(0, 1).flatten(1, 2), _channels(g, x, window).transpose(0, 1)
    count = num_samples * groups
    found = _gradient(images, outputs.flatten(1, 2), window, count * filters, count)
    return found.reshape(num_samples, groups, filters, -1)


def summed(x: Tensor, g: Tensor, window: Window) -> Tensor:
    """Return the sums of all samples' gradients, ``[K, G, O, I]``, for ``[K, *outputs]``."""
    num_vectors, groups, filters = len(g), window.groups, g.shape[-1]
    # [N, S, K, G, O, *positions] -> channels of one image: groups first
    outputs = torch.stack([_channels(one, x, window).flatten(0, 1) for one in g], dim=1)
    outputs = outputs.unflatten(2, (groups, filters)).transpose(1, 2).flatten(1, 3)
    channels = num_vectors * groups * filters
    found = _gradient(x.flatten(0, 1), outputs, window, channels, groups)
    return found.reshape(groups, num_vectors, filters, -1).transpose(0, 1)


def convolve(x: Tensor, matrices: Tensor, window: Window) -> Tensor:
    """Return the outputs for filters ``[K, G, O, I]``, ``[K, *outputs]``."""
    num_vectors, groups, filters, _ = matrices.shape
    weight = matrices.transpose(0, 1).reshape(
        groups * num_vectors * filters, x.shape[2] // groups, *window.kernel_size
    )
    images, padding = _padded(x.flatten(0, 1), window)
    options = {"stride": window.stride, "dilation": window.dilation, "groups": groups}
    convolution = _CONVOLUTIONS[len(window.size) - 1]
    found = convolution(images, weight, None, padding=padding, **options)
    # [N * S, G * K * O, *positions]
    found = found.flatten(2).reshape(*x.shape[:2], groups, num_vectors, filters, -1)
    return found.permute(3, 0, 1, 5, 2, 4).flatten(2, 3)


def _channels(g: Tensor, x: Tensor, window: Window) -> Tensor:
    """Turn outputs into ``[N, S, G * O, *positions]``."""
    images = g.unflatten(1, (x.shape[1], -1)).permute(0, 1, 3, 4, 2).flatten(2, 3)
    return images.unflatten(3, window.size)


def _gradient(
    images: Tensor, outputs: Tensor, window: Window, channels: int, groups: int
) -> Tensor:
    images, padding = _padded(images, window)
    compute = _GRADIENTS[len(window.size) - 1]
    size = (channels, images.shape[1] // groups, *window.kernel_size)
    options = {"stride": tuple(window.stride), "dilation": tuple(window.dilation)}
    return compute(images, size, outputs, padding=padding, groups=groups, **options)


def _padded(images: Tensor, window: Window) -> tuple[Tensor, tuple[int, ...]]:
    """Return images, and by how much they are still to be padded on both sides of each axis."""
    if all(before == behind >= 0 for before, behind in window.pads):
        return images, tuple(before for before, _ in window.pads)
    return pad(images, window.pads), (0,) * len(window.pads)
