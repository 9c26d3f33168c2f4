"""Times ways to compute single samples' gradients of convolutions, layer by layer, on the CPU.

Products with patches, and PyTorch's own gradient of the filters under `vmap`. Bold is the one that
the package takes; see `Patches` in `curvlinops/layers/patches.py`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from ways import Row, main

from curvlinops.layers.patches import Patches, Window

#: Samples, input channels, output channels, length of the image; kernel, stride, padding, groups.
LAYERS = [
    (64, 3, 32, 32, 3, 1, 1, 1),
    (64, 32, 64, 16, 3, 1, 1, 1),
    (64, 64, 128, 8, 3, 1, 1, 1),
    (16, 3, 64, 112, 7, 2, 3, 1),
    (16, 64, 64, 56, 3, 1, 1, 1),
    (16, 64, 128, 56, 3, 2, 1, 1),
    (16, 128, 128, 28, 3, 1, 1, 1),
    (16, 256, 256, 14, 3, 1, 1, 1),
    (16, 512, 512, 7, 3, 1, 1, 1),
    (16, 64, 256, 28, 1, 1, 0, 1),
    (16, 96, 96, 28, 7, 1, 3, 96),
    (16, 128, 128, 28, 3, 1, 1, 4),
    (16, 16, 16, 32, 5, 1, 2, 1),
    (32, 3, 96, 32, 4, 4, 0, 1),
]


def row(layer: tuple[int, ...], dtype: torch.dtype) -> Row:
    """Return the ways for a layer, and which one the package takes."""
    samples, inputs, outputs, length, kernel, stride, padding, groups = layer
    x = torch.randn(samples, 1, inputs, length, length, dtype=dtype)
    weight = torch.randn(outputs, inputs // groups, kernel, kernel, dtype=dtype)
    z = F.conv2d(x[:, 0], weight, None, stride, padding, 1, groups)
    window = Window.of(x[:, 0], weight.shape[2:], stride, padding, 1, groups)
    g = torch.randn_like(z).unflatten(1, (groups, -1)).flatten(3).permute(0, 3, 1, 2)

    patches, everything = Patches(x, window), slice(None)

    def by_patches() -> Tensor:
        return torch.einsum("nsgo,nsgi->ngoi", g, patches[everything])

    name = (
        f"{list(x[:, 0].shape)}, {outputs} filters of {kernel} x {kernel}, stride {stride}, "
        f"padding {padding}" + f", {groups} groups" * (groups > 1)
    )
    found = {"patches": by_patches, "vmap": lambda: patches.filter_gradients(everything, g)}
    taken = "vmap" if patches.cost_more(g.shape[-1]) else "patches"
    return name, found, taken


if __name__ == "__main__":
    main(__file__, __doc__, LAYERS, row)
