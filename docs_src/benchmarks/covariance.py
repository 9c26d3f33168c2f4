"""Times ways to compute second moments of the patches of convolutions, layer by layer, on the CPU.

PyTorch's `unfold`, products of patches, and of the input with its own shifts. Bold is the one that
the package takes; see `curvlinops/layers/covariance.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from ways import Row, main

from curvlinops.layers.covariance import (
    covariance_by_patches,
    covariance_by_shifts,
    shifts_are_cheaper,
)
from curvlinops.layers.patches import Window

#: Samples, channels, length of the image; kernel, groups; padded by half a kernel.
LAYERS = [
    (32, 64, 56, 3, 1),
    (32, 128, 28, 3, 1),
    (32, 256, 14, 3, 1),
    (16, 512, 7, 3, 1),
    (64, 3, 32, 3, 1),
    (32, 128, 8, 3, 1),
    (32, 128, 4, 3, 1),
    (8, 32, 28, 5, 1),
    (2, 64, 28, 7, 1),
    (32, 64, 28, 3, 4),
    (4, 96, 56, 7, 96),
]


def row(layer: tuple[int, ...], dtype: torch.dtype) -> Row:
    """Return the ways for a layer, and which one the package takes."""
    samples, channels, length, kernel, groups = layer
    x = torch.randn(samples, channels, length, length, dtype=dtype)
    window = Window.of(x, kernel, 1, kernel // 2, 1, groups)

    def by_unfold() -> Tensor:
        patches = F.unfold(x, kernel, padding=kernel // 2).unflatten(1, (groups, -1))
        patches = patches.permute(1, 2, 0, 3).flatten(2)
        return patches @ patches.mT

    name = f"{list(x.shape)}, {kernel} x {kernel}" + f", {groups} groups" * (groups > 1)
    found = {
        "unfold": by_unfold,
        "patches": lambda: covariance_by_patches(x, window),
        "shifts": lambda: covariance_by_shifts(x, window),
    }
    return name, found, "shifts" if shifts_are_cheaper(x.shape, window) else "patches"


if __name__ == "__main__":
    main(__file__, __doc__, LAYERS, row)
