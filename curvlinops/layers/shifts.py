"""Second moments of patches by products of the input with its own shifts along one axis."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from curvlinops.layers.patches import Window
from curvlinops.layers.symmetric import add_second_moment, mirror, symmetric_step


class ShiftedProducts:
    """Sums of the second moments of patches that have stride 1 along the first axis.

    The kernel's other axes are unfolded, next to the channels: rows a with ``C/G * prod(K[1:])``
    entries. The block of the positions k and k' on the first axis is
    ``sum_p a[p] a[p + delta]^T`` over ``k <= p < k + O`` with ``delta = k' - k`` (times the
    dilation), which depends on k only by where the range begins. The ranges for the same delta
    have a core in common. The product over it is computed once for each delta (3 instead of 6
    for K = 3); those over the few positions in front of it and behind it are computed one by one.
    Nothing is subtracted, and nothing cancels.

    Args:
        x: An input ``[N, C, *I]`` of the dtype and device wanted.
        window: Which patches.
    """

    def __init__(self, x: Tensor, window: Window):
        first, *others = window.kernel_size
        self._channels, self._others = x.shape[1] // window.groups, prod(others)
        self._size = self._channels * self._others
        # for each delta: products over the core, the positions in front of it, and those behind
        shape = window.groups, self._size, self._size
        self._sums = [x.new_zeros(2 * count - 1, *shape) for count in range(first, 0, -1)]

    def add(self, x: Tensor, window: Window) -> None:
        """Add patches.

        Args:
            x: Input ``[N, C, *I]``, padded and cropped to what the patches see.
            window: Which patches; along the first axis at least ``dilation * (K - 1)``.
        """
        rows = _rows(x, window)
        step, length = window.dilation[0], window.size[0]
        for delta, sums in enumerate(self._sums):
            around = len(sums) // 2
            ranges = [(around * step, length - around * step)]
            ranges += [(i * step, step) for i in range(around)]
            ranges += [(length + i * step, step) for i in range(around)]
            for total, (start, count) in zip(sums, ranges, strict=True):
                left = rows.narrow(2, start, count).flatten(2)
                if delta == 0:
                    add_second_moment(total, left)
                else:
                    right = rows.narrow(2, start + delta * step, count).flatten(2)
                    total.baddbmm_(left, right.mT)

    def matrix(self) -> Tensor:
        """Return the sums as symmetric matrices ``[G, d, d]``; may be called once."""
        kernel, groups = len(self._sums), self._sums[0].shape[1]
        sizes = self._channels, kernel, self._others
        out = self._sums[0].new_empty(groups, *sizes, *sizes)
        for delta, sums in enumerate(self._sums):
            around = len(sums) // 2
            core, front, behind = sums[0], sums[1 : 1 + around], sums[1 + around :]
            for i in range(1, around):
                front[-1 - i] += front[-i]
                behind[i] += behind[i - 1]
            for k in range(kernel - delta):
                block = core + front[k] if k < around else core.clone()
                if k > 0:
                    block += behind[k - 1]
                if delta == 0:
                    mirror(block, symmetric_step(self._size))
                blocks = block.view(groups, *sizes[::2], *sizes[::2])
                out[:, :, k, :, :, k + delta] = blocks
                if delta > 0:
                    out[:, :, k + delta, :, :, k] = blocks.permute(0, 3, 4, 1, 2)
        return out.view(groups, kernel * self._size, kernel * self._size)


def _rows(x: Tensor, window: Window) -> Tensor:
    """Unfold all axes but the first: ``[N, C, *I]`` to ``[G, C/G * prod(K[1:]), I, positions]``."""
    x = x.contiguous()
    samples, channels, *steps = x.stride()
    per_group = x.shape[1] // window.groups
    view = x.as_strided(
        (window.groups, per_group, *window.kernel_size[1:], x.shape[2], len(x), *window.size[1:]),
        (
            *(per_group * channels, channels),
            *_times(steps[1:], window.dilation[1:]),
            *(steps[0], samples),
            *_times(steps[1:], window.stride[1:]),
        ),
    )
    width = per_group * prod(window.kernel_size[1:])
    positions = len(x) * prod(window.size[1:])
    return view.reshape(window.groups, width, x.shape[2], positions).contiguous()


def _times(steps: Sequence[int], factors: Sequence[int]) -> list[int]:
    return [step * factor for step, factor in zip(steps, factors, strict=True)]
