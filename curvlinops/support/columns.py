"""Several vectors at once, as columns."""

from math import prod

from torch import Tensor

#: K vectors at once, as ``{name: [K, *shape]}``: the form in which products are computed.
Columns = dict[str, Tensor]


def flat(column: Tensor) -> Tensor:
    """Return ``[K, *shape]`` as ``[K, entries]``; a scalar has one."""
    if column.ndim == 2:
        return column
    return column.reshape(column.shape[0], prod(column.shape[1:]))
