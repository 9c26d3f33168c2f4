"""Lookups in tables, differentiable in both modes and as often as wanted."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


def check_lookup(name: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse options of lookups that change parameters or gradients.

    Raises:
        ValueError: If there are such.
    """
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
    """Look up rows; the gradient of no lookups cannot be differentiated as such."""
    return F.embedding(input, weight, padding_idx) if input.numel() else weight[input.long()]


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows; uses of the padding row are constant in every derivative.

    Forward mode ignores ``padding_idx``, and sparse gradients cannot be differentiated.
    """
    check_lookup("Embedding", max_norm, scale_grad_by_freq)
    out = _rows(input, weight, padding_idx)
    if padding_idx is None:
        return out
    padding = input == padding_idx % weight.shape[0]
    return torch.where(padding.unsqueeze(-1), out.detach(), out)


def _raw_embedding(
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look rows up like ``_embedding``, with the signature of ``torch.embedding``."""
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq)


def _embedding_bag(
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
    """Sum or average rows by bags; the fused kernel can only be differentiated once."""
    check_lookup("EmbeddingBag", max_norm, scale_grad_by_freq)
    if input.dtype not in (torch.int32, torch.int64) and weight.dtype in (torch.int32, torch.int64):
        input, weight = weight, input  # the order of arguments before PyTorch 0.4.1
    if mode == "max":
        raise NotImplementedError(
            "EmbeddingBag with mode='max' cannot be differentiated twice. Use "
            "Embedding followed by a maximum over the bag."
        )
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
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.reshape(-1, 1)
    total = weight.new_zeros(num_bags, weight.shape[1])
    total = total.index_add(0, bag, rows * kept.unsqueeze(-1))
    if mode == "sum":
        return total
    count = weight.new_zeros(num_bags).index_add(0, bag, kept)
    return total / count.clamp(min=1).unsqueeze(-1)


def _renormalized(weight: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> None:
    check_lookup("Embedding", max_norm, False)


LOOKUPS: dict[Callable, Callable] = {
    F.embedding: _embedding,
    torch.embedding: _raw_embedding,
    F.embedding_bag: _embedding_bag,
    torch.embedding_renorm_: _renormalized,
    torch.ops.aten.embedding_renorm_.default: _renormalized,  # of exported programs
}
