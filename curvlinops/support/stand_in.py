"""Tensors that have a shape and no memory."""

import torch
from torch import Tensor


def stand_in(like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return zeros that have no memory, by default of the shape of a tensor."""
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return zero.expand(like.shape if shape is None else shape)


def is_stand_in(x: Tensor) -> bool:
    """Return whether a tensor has many entries and the memory of one."""
    return x.numel() > 1 and not any(x.stride())
