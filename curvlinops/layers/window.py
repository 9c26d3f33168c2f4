"""The window that a convolution moves over its input."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

Lengths = int | Sequence[int]
Padding = Lengths | Sequence[tuple[int, int]] | str


class Window(NamedTuple):
    """Which patches a convolution looks at.

    At position k in the kernel, position o of the output sees position
    ``o * stride + k * dilation - before`` of the input along each axis, and zero outside of it.

    Args:
        kernel_size: The kernel's lengths.
        stride: Steps between patches.
        pads: Zeros before and behind each axis; negative numbers crop.
        dilation: Steps within a patch.
        size: Number of patches along each axis.
        groups: Number of groups of channels.
    """

    kernel_size: Sequence[int]
    stride: Sequence[int]
    pads: Sequence[tuple[int, int]]
    dilation: Sequence[int]
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
        """Return the window of a convolution of ``x`` with the arguments of PyTorch's.

        Args:
            x: The input, ``[N, C, *I]``.
            kernel_size: The kernel's lengths.
            stride: Steps between patches.
            padding: Zeros on both sides of each axis, or pairs of those before and behind it, or
                "valid" (none), or "same" (the output is as long as the input; where the number is
                odd, one more behind than before).
            dilation: Steps within a patch.
            groups: Number of groups of channels.

        Raises:
            ValueError: If there are no such patches.
        """
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
        if padding == "same" and max(stride) > 1:
            raise ValueError(f"padding='same' needs stride 1, got {stride}. Give numbers.")
        pads = both_sides(padding, kernel, dilation)
        size = tuple(
            (length + sum(pair) - d * (k - 1) - 1) // s + 1
            for length, pair, d, k, s in zip(
                x.shape[2:], pads, dilation, kernel, stride, strict=True
            )
        )
        window = cls(kernel, stride, pads, dilation, size, groups)
        window.check(x)
        return window

    def check(self, x: Tensor) -> None:
        """Raise an error if there are no such patches of ``x``, ``[N, C, *I]``."""
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

    def reach(self, axis: int, count: int) -> int:
        """Return how many positions a number of neighboring patches spans along an axis."""
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
    padding: Padding, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the padding before and behind each axis."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise ValueError(f"Unknown padding {padding!r}: use numbers, pairs, 'same' or 'valid'.")
    each = lengths(padding, len(kernel))
    return [(p, p) if isinstance(p, int) else (p[0], p[1]) for p in each]
