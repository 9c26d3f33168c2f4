"""Weight normalization."""

import torch
from torch import Tensor


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``g v / |v|``, with norms over all axes but ``dim``, or over all if it is -1.

    The fused kernel has no forward mode, and its double backward is off by 1-9 %.
    """
    if dim == -1:  # torch.norm_except_dim's tangent has the wrong shape then
        return v * (g / v.norm())
    return v * (g / torch.norm_except_dim(v, 2, dim))
