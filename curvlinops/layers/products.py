"""Products of single samples' gradients with vectors, and how much of them is computed at once."""

from collections.abc import Callable

import torch
from torch import Tensor

#: Temporary tensors are kept below this size, where a quantity can be computed in parts.
BYTES = 32 * 2**20


#: Two functions that are adjoint to each other: from columns ``[K, *shape]`` to their products with
#: the gradients of all samples, for the only vector, ``[K, N]``, and back.
GradientMaps = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def in_parts(function: Callable[[Tensor], Tensor], size: int) -> Callable[[Tensor], Tensor]:
    """Return a function of columns that takes as many at once as fit the memory.

    Args:
        function: Takes and returns columns.
        size: How many bytes it needs for each.
    """
    step = max(BYTES // max(size, 1), 1)

    def apply(columns: Tensor) -> Tensor:
        if len(columns) <= step:
            return function(columns)
        return torch.cat([function(part) for part in columns.split(step)])

    return apply
