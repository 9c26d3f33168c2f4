"""Memory for large results."""

from math import prod

import numpy as np
import torch
from torch import Tensor

#: NumPy asks for huge pages from here on.
_LARGE = 4 * 2**20


#: NumPy's name of each dtype.
_NAMES = {torch.float32: "f4", torch.float64: "f8"}


def empty(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor with arbitrary entries, in huge pages where the system lends them.

    Linux hands out memory page by page when it is first written to, which takes two to three times
    as long as the writing itself with pages of 4 KiB. PyTorch takes what comes; NumPy asks for
    larger ones.

    Args:
        *shape: The shape.
        dtype: Their type.
        device: Where it lives.
    """
    small = prod(shape) * dtype.itemsize < _LARGE
    if small or device.type != "cpu" or dtype not in _NAMES:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.empty(shape, _NAMES[dtype]))
