"""Gradients of single samples with respect to a convolution's filters, without patches.

With the samples as groups of channels, they are the gradients of one convolution of one image
(Rochette et al., Efficient per-example gradient computations in convolutional neural networks,
arXiv:1912.06015).
"""

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor
from torch.nn import grad

from curvlinops.layers.patches import pad
from curvlinops.layers.window import Window

_WEIGHT_GRADIENTS = (grad.conv1d_weight, grad.conv2d_weight, grad.conv3d_weight)

#: From this many positions for each filter of a group on, patches cost more than they save. See
#: ``docs_src/benchmarks/filters.py``.
_POSITIONS_PER_FILTER = 4


def prefers_groups(window: Window, num_images: int, num_filters: int, device: torch.device) -> bool:
    """Return whether groups are faster than products with patches, for a single vector.

    Patches have an entry for each position, input channel and position in the kernel, filters one
    for each output channel instead of the position; a convolution with groups reorders the
    filters, and PyTorch's matrix products need the patches. Where patches do not overlap they are
    as small as the input. Several vectors share the patches.

    Args:
        window: The patches.
        num_images: Number of images of a sample.
        num_filters: Number of output channels.
        device: Where; the rule is for CPUs.
    """
    overlap = prod(window.kernel_size) > prod(window.stride)
    positions = num_images * prod(window.size)
    few = _POSITIONS_PER_FILTER * num_filters <= positions * window.groups
    return device.type == "cpu" and overlap and few


class FilterGradients:
    """Gradients of a convolution's filters, ``[1, n, G, O, I]``, for some of the samples.

    Args:
        x: Images ``[N, S, C, *I]``; those of a sample share its gradient.
        g: Gradients of the outputs, ``[1, N, S, G, O, positions]``.
        window: What each position of the output sees.
    """

    def __init__(self, x: Tensor, g: Tensor, window: Window):
        self._x, self._g, self._window = x, g, window

    def __call__(self, samples: slice | Tensor) -> Tensor:
        """Compute those of some samples."""
        x, g, window = self._x[samples], self._g[0, samples], self._window
        groups, filters = g.shape[2:4]
        size = (len(x) * groups * filters, x.shape[2] // groups, *window.kernel_size)
        # images [S, N * C, *I]: samples are groups of channels
        images = x.transpose(0, 1).flatten(1, 2)
        padding = tuple(before for before, _ in window.pads)
        if any(before != behind or before < 0 for before, behind in window.pads):
            images, padding = pad(images, window.pads), (0,) * len(padding)
        outputs = g.transpose(0, 1).flatten(1, 3).unflatten(2, window.size)
        compute: Callable = _WEIGHT_GRADIENTS[len(window.size) - 1]
        found = compute(
            images,
            size,
            outputs,
            stride=tuple(window.stride),
            padding=padding,
            dilation=tuple(window.dilation),
            groups=len(x) * groups,
        )
        return found.reshape(1, len(x), groups, filters, prod(size[1:]))
