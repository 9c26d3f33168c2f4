"""Inputs of matrix products: tensors, and the patches that convolutions multiply."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod

import torch
from einops import rearrange, reduce
from torch import Tensor

from curvlinops.layers.covariance import input_covariance
from curvlinops.layers.factors import moment
from curvlinops.layers.gradients import chunks, total
from curvlinops.layers.patches import Window, make_patches, pad, patch_sums

#: Convolutions of so few input channels multiply slowly.
_FEW_CHANNELS = 8


class Inputs(ABC):
    """Inputs ``[N, S, G, I]``, perhaps made for some samples at a time."""

    shape: tuple[int, ...]
    #: Whether they take memory already.
    in_memory = False

    @abstractmethod
    def __getitem__(self, samples: slice) -> Tensor:
        """Return the inputs of some samples, ``[n, S, G, I]``."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "Inputs":
        """Return the same inputs in another dtype."""

    def slices(self) -> Iterator[slice]:
        """Yield slices of samples whose inputs fit the memory."""
        return chunks(self.shape[0], prod(self.shape[1:]))

    def moment(self, diagonal: bool) -> Tensor:
        """Return the sum of outer products, ``[G, I, I]``, or its diagonal, ``[G, I]``."""
        return total(moment(self[some].flatten(0, 1), diagonal) for some in self.slices())

    def by_image(self) -> "Inputs":
        """Return the same inputs; of patches, with a sample for each image."""
        return self

    def sums(self) -> Tensor:
        """Return the sum of each sample's inputs, ``[N, G, I]``."""
        return torch.cat([self[some].sum(1) for some in self.slices()])

    def prefers_convolution(self, g: Tensor) -> bool:
        """Return whether gradients of filters by a convolution are faster than with the inputs."""
        return False


class StoredInputs(Inputs):
    """Inputs ``[N, S, G, I]`` in memory."""

    in_memory = True

    def __init__(self, values: Tensor):
        self._values, self.shape = values, tuple(values.shape)

    def __getitem__(self, samples: slice) -> Tensor:
        """Return the inputs of some samples."""
        return self._values[samples]

    def to(self, dtype: torch.dtype) -> "StoredInputs":
        """Return the same inputs in another dtype."""
        values = self._values.to(dtype)
        return self if values is self._values else StoredInputs(values)


class Patches(Inputs):
    """Patches of the samples' images, ``[N, images * positions, groups, channels * kernel]``.

    They take much more memory than the images ``[N, S, C, *I]``, and are made for some samples at a
    time.
    """

    def __init__(self, images: Tensor, window: Window):
        self.images, self.window = images, window
        width = images.shape[2] // window.groups * prod(window.kernel_size)
        positions = images.shape[1] * prod(window.size)
        self.shape = (len(images), positions, window.groups, width)

    def __getitem__(self, samples: slice) -> Tensor:
        """Make the patches of some samples."""
        images = self.images[samples]
        patches = make_patches(images.flatten(0, 1), self.window)
        return patches.unflatten(0, images.shape[:2]).flatten(1, 2)

    def to(self, dtype: torch.dtype) -> "Patches":
        """Return the same patches in another dtype."""
        return Patches(self.images.to(dtype), self.window)

    def by_image(self) -> "Patches":
        """Return the same patches with a sample for each image."""
        return Patches(self.images.flatten(0, 1).unsqueeze(1), self.window)

    def moment(self, diagonal: bool) -> Tensor:
        """Return the sum of outer products, without all patches."""
        if diagonal:
            return super().moment(diagonal)
        return input_covariance(self.images.flatten(0, 1), self.window)

    def sums(self) -> Tensor:
        """Return the sum of each sample's patches, without patches."""
        sums = patch_sums(self.images.flatten(0, 1), self.window)
        N, S = self.images.shape[:2]
        return reduce(sums, "(n s) g i -> n g i", "sum", n=N, s=S)

    def prefers_convolution(self, g: Tensor) -> bool:
        """Return whether ``filter_gradients`` is faster than products with patches, on a CPU.

        A convolution reorders its filters, which have an entry for each output channel where
        patches have one for each position. Several vectors share patches.
        """
        _, positions, groups, width = self.shape
        num_filters = g.shape[-1]
        channels = width // (size := prod(self.window.kernel_size))
        depthwise = groups > 1 and channels == num_filters == 1
        overlap = size > prod(self.window.stride)
        fewer = num_filters < positions and (channels >= _FEW_CHANNELS or depthwise)
        return len(g) == 1 and g.device.type == "cpu" and overlap and fewer

    def filter_gradients(self, samples: slice, g: Tensor) -> Tensor:
        """Return each sample's gradient of the filters, ``[n, G, O, channels * kernel]``.

        By PyTorch's own batching rule for convolutions, without patches.
        """
        images, window = self.images[samples], self.window
        S, P = images.shape[1], prod(window.size)
        outputs = rearrange(g, "n (s p) g o -> n s (g o) p", s=S, p=P).unflatten(-1, window.size)
        padding = [before for before, _ in window.pads]
        if any(before != behind for before, behind in window.pads):
            images, padding = pad(images, window.pads), [0] * len(padding)
        filters = images.new_empty(
            outputs.shape[2], images.shape[2] // window.groups, *window.kernel_size
        )

        def of_one(x: Tensor, g: Tensor) -> Tensor:
            options = window.stride, padding, window.dilation, False, [0] * len(padding)
            wanted = False, True, False  # of input, filters and bias
            return torch.ops.aten.convolution_backward(
                g, x, filters, None, *options, window.groups, wanted
            )[1]

        gradients = torch.func.vmap(of_one)(images, outputs)
        return gradients.reshape(len(g), window.groups, -1, self.shape[3])
