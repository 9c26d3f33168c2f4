"""The tensors of several vectors."""

from math import prod

from torch import Tensor

#: Views of K vectors ``[K, dim]``, by parameter, ``{name: [K, *shape]}``: what autograd takes.
Columns = dict[str, Tensor]


def flat(column: Tensor) -> Tensor:
    """Return ``[K, *shape]`` as ``[K, entries]``; a scalar has one."""
    if column.ndim == 2:
        return column
    return column.reshape(column.shape[0], prod(column.shape[1:]))
