"""Pairwise distances."""

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.support.torch_internals import in_transform


def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Return the distances ``[*, P, R]`` of rows ``[*, P, M]`` and ``[*, R, M]``.

    The fused kernel has neither forward mode nor double backward. Without derivatives it is used,
    since it does not need memory for all differences, ``[*, P, R, M]``.
    """
    if not (in_transform() or is_differentiated(x1) or is_differentiated(x2)):
        return torch.cdist(x1, x2, p)
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def is_differentiated(x: Tensor) -> bool:
    """Return whether a tensor requires a gradient, or has a tangent."""
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad.unpack_dual(x).tangent is not None
