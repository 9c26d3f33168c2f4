"""Norms and inner products in float64, where squares of float32 numbers do not overflow."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlinops.support.devices import entries_at_once

#: The number of entries that are converted to float64 at once on the CPU: its cache holds them.
PART = 2**17
#: Inner products copy so many numbers at once on the CPU, for which no new pages are needed.
_COPIED = 2**14


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def double_norm(x: Tensor, dim: int | Sequence[int] | None = None) -> Tensor:
    """Return norms along some axes, or all, in float64, without copying all numbers to float64."""
    axes = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    axes = [axis % x.ndim for axis in axes]
    norms = _in_parts(x, axes)
    return norms.squeeze(axes) if axes else norms


def double_dots(x: Tensor, y: Tensor) -> Tensor:
    """Return inner products along the last axis in float64, in parts to save memory."""
    width = max(entries_at_once(x, _COPIED) * x.shape[-1] // max(x.numel(), 1), 1)
    if x.shape[-1] <= width:
        return torch.linalg.vecdot(x.double(), y.double())
    parts = zip(x.split(width, -1), y.split(width, -1), strict=True)
    return torch.stack([torch.linalg.vecdot(p.double(), q.double()) for p, q in parts]).sum(0)


def double_dot(x: Tensor, y: Tensor) -> Tensor:
    """Return the inner product of all numbers in float64, in parts to save memory."""
    return double_dots(x.reshape(-1), y.reshape(-1))


def _in_parts(x: Tensor, axes: list[int]) -> Tensor:
    """Return the norms; reduced axes have length one."""
    at_once = entries_at_once(x, PART)
    if x.dtype == torch.float64 or x.numel() <= at_once or not axes:
        return torch.linalg.vector_norm(x, dim=axes, keepdim=True, dtype=torch.float64)
    longest = max(range(x.ndim), key=lambda axis: x.shape[axis])
    step = max(x.shape[longest] * at_once // x.numel(), 1)
    norms = torch.cat([_in_parts(part, axes) for part in x.split(step, longest)], longest)
    if longest not in axes:
        return norms
    return torch.linalg.vector_norm(norms, dim=longest, keepdim=True)
