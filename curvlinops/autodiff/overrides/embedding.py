"""Lookups in tables, differentiable in both modes and as often as wanted."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def check_options(name: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse options of lookups that change parameters or gradients."""
    if max_norm is not None:
        raise ValueError(
            f"{name} with max_norm rescales its weight in the forward pass, which would change "
            "the parameters. Normalize the weight beforehand and set max_norm=None."
        )
    if scale_grad_by_freq:
        raise ValueError(
            f"{name} with scale_grad_by_freq=True returns something other than the gradient. "
            "Set scale_grad_by_freq=False."
        )


def _rows(input: Tensor, weight: Tensor, padding_idx: int | None = None) -> Tensor:
    """Look up rows; the backward pass of F.embedding for no rows cannot be differentiated."""
    return F.embedding(input, weight, padding_idx) if input.numel() else weight[input.long()]


def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows, of which the padding row is a constant.

    PyTorch's forward mode ignores ``padding_idx``, and sparse gradients cannot be differentiated.
    """
    check_options("Embedding", max_norm, scale_grad_by_freq)
    out = _rows(input, weight, padding_idx)
    if padding_idx is None:
        return out
    padding = input == padding_idx % weight.shape[0]
    return torch.where(padding.unsqueeze(-1), out.detach(), out)


def torch_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows like ``embedding``, with the arguments of ``torch.embedding``."""
    padding = None if padding_idx < 0 else padding_idx
    return embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


def embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Reduce rows by bags; the fused kernel has no forward mode and no double backward."""
    check_options("EmbeddingBag", max_norm, scale_grad_by_freq)
    if input.ndim == 2:
        num_bags, size = input.shape
        bag = torch.arange(num_bags, device=input.device).repeat_interleave(size)
    else:
        starts = offsets[:-1] if include_last_offset else offsets
        num_bags = starts.shape[0]
        position = torch.arange(input.shape[0], device=input.device)
        bag = torch.searchsorted(starts.contiguous(), position, right=True) - 1
    rows = _rows(input.reshape(-1), weight)
    kept = torch.ones_like(bag, dtype=weight.dtype)
    if padding_idx is not None:
        kept = (input.reshape(-1) != padding_idx % weight.shape[0]).to(weight.dtype)
    count = weight.new_zeros(num_bags).index_add(0, bag, kept).unsqueeze(-1)
    if mode == "max":
        return _largest(rows, bag, kept > 0, count > 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    total = weight.new_zeros(num_bags, weight.shape[1])
    total = total.index_add(0, bag, rows * kept.unsqueeze(-1))
    return total if mode == "sum" else total / count.clamp(min=1)


def _largest(rows: Tensor, bag: Tensor, is_kept: Tensor, is_filled: Tensor) -> Tensor:
    """Return the largest entry of each bag and column; of equal ones, it is the first, as usual.

    Of rows ``[n, D]`` in bags ``[n]``, those that are padding are left out. Bags without others
    ``[bags, 1]`` give zero.
    """
    with_zero = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
    numbers = torch.arange(len(rows), device=rows.device)
    starts = torch.searchsorted(bag, torch.arange(len(is_filled), device=rows.device))
    candidates = with_zero.detach().masked_fill(
        ~F.pad(is_kept, (0, 1), value=True)[:, None], -math.inf
    )
    maximum = 2  # the number of the mode
    positions = torch.embedding_bag(candidates, numbers, starts, False, maximum)[3].long()
    return with_zero.gather(0, torch.where(is_filled, positions, len(rows)))
