"""Calls that are replaced, while parameters are watched, by compositions of calls rules know."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers.einsum import einsum
from curvlinops.layers.recurrent import RECURRENT
from curvlinops.support.torch_internals import base_of


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return input * beta + batch1 @ batch2 * alpha


def _addbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return input * beta + (batch1 @ batch2).sum(0) * alpha


def _outer(input: Tensor, vec2: Tensor) -> Tensor:
    return input.unsqueeze(-1) * vec2


def _inner(input: Tensor, other: Tensor) -> Tensor:
    if input.ndim == 0 or other.ndim == 0:
        return input * other
    return _tensordot(input, other, ([-1], [-1]))


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: None = None) -> Tensor:
    if isinstance(dims, Tensor):
        dims = dims.tolist()
    if isinstance(dims, int):
        dims = list(range(a.ndim - dims, a.ndim)), list(range(dims))
    first, second = ([axis] if isinstance(axis, int) else axis for axis in dims)
    axes = list(range(a.ndim + b.ndim))
    left, right = axes[: a.ndim], axes[a.ndim :]
    for i, j in zip(first, second, strict=True):
        right[j] = left[i]
    output = [axis for axis in (*left, *right) if (axis in left) != (axis in right)]
    return torch.einsum(a, left, b, right, output)


def _multi_dot(tensors: list[Tensor], *, out: None = None) -> Tensor:
    product = tensors[0]
    for factor in tensors[1:]:
        product = product @ factor
    return product


def _cosine_similarity(x1: Tensor, x2: Tensor, dim: int = 1, eps: float = 1e-8) -> Tensor:
    norms = (x.norm(dim=dim).clamp(min=eps) for x in (x1, x2))
    first, second = norms
    return (x1 * x2).sum(dim) / (first * second)


def _pairwise_distance(
    x1: Tensor, x2: Tensor, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False
) -> Tensor:
    return (x1 - x2 + eps).norm(p, dim=-1, keepdim=keepdim)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of learned queries, keys, values, or biases."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    # what may see nothing sees zeros
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return F.dropout(weights, dropout_p) @ value


def _grouped_mm(
    mat_a: Tensor,
    mat_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Multiply the rows up to each offset by a matrix of their own, as experts do."""
    if offs is None:
        product = mat_a @ mat_b
    elif mat_a.ndim == 2 and mat_b.ndim == 3:
        ends = offs.tolist()
        rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        parts = [mat_a[own] @ mat_b[i] for i, own in enumerate(rows) if own.start < own.stop]
        rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])
        product = torch.cat([*parts, rest])
    else:
        raise NotImplementedError("There is no rule for grouped_mm but for rows and matrices.")
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


def _written(
    watch: Any, input: Tensor, key: Any, part: Callable[[], Tensor], value: Any, write: Callable
) -> Any:
    """Write a value into a part of a tensor, by a call that a rule knows if samples see it."""
    without_data, shape = watch.without_data(input, key, value), part().shape
    if watch.follows(value) and value.shape != shape:
        with watch:
            repeated = torch.broadcast_to(value, shape)
        value = watch.as_data(repeated)
        without_data = without_data and value is repeated
    base = base_of(input)
    follows_base = without_data and base is not None and watch.without_data(base)
    out = write(value)
    for target in [input] * without_data + [base] * follows_base:
        watch.written(target)
    return out


def _setitem(watch: Any, input: Tensor, key: Any, value: Any) -> None:
    def write(x: Any) -> None:
        input[key] = x

    return _written(watch, input, key, lambda: input[key], value, write)


def _copy(watch: Any, input: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    return _written(watch, input, None, lambda: input, src, input.copy_)


#: Calls that write: what they are replaced by gets the watching mode, which is off, before them.
WRITING: dict[Callable, Callable] = {Tensor.__setitem__: _setitem, Tensor.copy_: _copy}


COMPOSED: dict[Callable, Callable] = RECURRENT | {
    torch.einsum: einsum,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.addbmm: _addbmm,
    Tensor.addbmm: _addbmm,
    torch.outer: _outer,
    Tensor.outer: _outer,
    torch.ger: _outer,
    Tensor.ger: _outer,
    torch.inner: _inner,
    Tensor.inner: _inner,
    torch.tensordot: _tensordot,
    torch.linalg.multi_dot: _multi_dot,
    torch.cosine_similarity: _cosine_similarity,
    torch.pairwise_distance: _pairwise_distance,
    F.scaled_dot_product_attention: _attention,
}
if hasattr(torch, "_grouped_mm"):  # what torch.nn.functional.grouped_mm calls
    COMPOSED[torch._grouped_mm] = _grouped_mm
