"""Scaled dot-product attention in memory that is linear in the length of the sequences.

Each pass computes the attention weights again, a tile of queries at a time. Backward pass, double
backward pass and forward mode have closed forms, so that no tile is kept. Attention with few
weights is left to PyTorch's math kernel, which keeps all of them and is as fast.

In the formulas P are the weights, the softmax of ``S = scale * Q K^T + bias``, and
``J X = P * (X - sum(P * X))`` is the derivative of the softmax. An output gradient G gives
``dS = J (G V^T)``.
"""

from collections.abc import Callable, Iterator, Sequence
from math import inf
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.support.arguments import is_differentiated
from curvlinops.support.devices import entries_at_once
from curvlinops.support.torch_internals import in_transform, wanted_gradients

#: Attention with fewer weights, over all samples and heads, is left to the math kernel.
FEW_WEIGHTS = 2**20
#: The number of weights in a tile on the CPU, and the smallest number of its queries.
_TILE, _MIN_QUERIES = 2**18, 64

#: A formula of a tile. It gets P, tensors of its queries and tensors of its keys, and returns
#: results for its queries, and summands of results for its keys.
Formula = Callable[[Tensor, list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]


class Operands(NamedTuple):
    """Queries ``[N, H, R, d]``, keys ``[N, H, T, d]``, values ``[N, H, T, o]``, and how they meet.

    The mask ``[N, H, R, T]``, boolean or additive, is constant. ``scale`` is the factor of the
    scores; if it ``is_causal``, queries see no later keys.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    scale: float
    is_causal: bool


class Attention(torch.autograd.Function):
    """Attention, a function of ``Operands``."""

    @staticmethod
    def forward(ctx: Any, *operands: Any) -> Tensor:
        """Return the output."""
        tensors, ctx.options = operands[:4], operands[4:]
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)
        of = Operands(*operands)
        (out,) = _in_tiles(lambda P, _, keys: ([P @ keys[1]], []), [of.q], [of.k, of.v], of)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. queries, keys and values."""
        # without a graph the formulas themselves, which vmap can batch
        call = AttentionBackward.apply if torch.is_grad_enabled() else _gradients
        return (*call(g, *ctx.saved_tensors, *ctx.options), None, None, None)

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> Tensor:
        """Return the tangent of the output."""
        *qkv, mask = ctx.saved_tensors
        qkv = [forward_ad.unpack_dual(tensor).primal for tensor in qkv]
        return AttentionTangent.apply(*qkv, mask, *ctx.options, *_filled(qkv, tangents[:3]))


class AttentionBackward(torch.autograd.Function):
    """The backward pass of attention, a function of the output gradient and ``Operands``."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        """Return the gradients w.r.t. queries, keys and values."""
        tensors, ctx.options = operands[:4], operands[4:]
        ctx.save_for_backward(g, *tensors)
        ctx.set_materialize_grads(False)
        return tuple(_gradients(g, *operands))

    @staticmethod
    def backward(ctx: Any, *vectors: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients w.r.t. output gradient, queries, keys and values."""
        g, *tensors = ctx.saved_tensors
        of, filled = Operands(*tensors, *ctx.options), _filled(tensors[:3], vectors)
        if any(wanted_gradients(ctx)[1:]):
            grads = _second_gradients(g, of, *filled)
        else:  # a product with the Jacobian
            grads = [_tangent(of, *filled), None, None, None]
        return (*grads, None, None, None)


class AttentionTangent(torch.autograd.Function):
    """The tangent of attention, a function of ``Operands`` and the tangents of the first three."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """Return the tangent."""
        *tensors, scale, is_causal = of = Operands(*arguments[:6])
        ctx.save_for_backward(*tensors, *arguments[6:])
        ctx.options = scale, is_causal
        return _tangent(of, *arguments[6:])

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients: ``<G, tangent>`` is ``<dQ, x> + <dK, y> + <dV, z>``."""
        tensors, vectors = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
        of = Operands(*tensors, *ctx.options)
        _, *grads = _second_gradients(g, of, *vectors)
        return (*grads, None, None, None, *_gradients(g, *of))


# --- the formulas


def _gradients(g: Tensor, *operands: Any) -> list[Tensor]:
    """Return ``dQ = scale dS K``, ``dK = scale dS^T Q`` and ``dV = P^T G``."""
    of = Operands(*operands)
    scale = of.scale

    def formula(P: Tensor, queries: list[Tensor], keys: list[Tensor]) -> tuple[list, list]:
        (q, g), (k, v) = queries, keys
        dS = _softmax_derivative(P, g @ v.mT)
        return [dS @ k * scale], [dS.mT @ q * scale, P.mT @ g]

    return _in_tiles(formula, [of.q, g], [of.k, of.v], of)


def _tangent(of: Operands, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Return the derivative of the output along ``x, y, z``: ``J (scale (x K^T + Q y^T)) V + P z``.

    It is also the gradient of ``<dQ, x> + <dK, y> + <dV, z>`` with respect to G.
    """

    def formula(P: Tensor, queries: list[Tensor], keys: list[Tensor]) -> tuple[list, list]:
        (q, x), (k, v, y, z) = queries, keys
        A = _softmax_derivative(P, _change_of_scores(q, k, x, y, of.scale))
        return [A @ v + P @ z], []

    return _in_tiles(formula, [of.q, x], [of.k, of.v, y, z], of)[0]


def _second_gradients(g: Tensor, of: Operands, x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
    """Return the gradients of ``<dQ, x> + <dK, y> + <dV, z>`` w.r.t. G, Q, K and V.

    With ``E = scale (x K^T + Q y^T)`` it is ``<dS, E> + <P, G z^T>``.
    """
    scale = of.scale

    def formula(P: Tensor, queries: list[Tensor], keys: list[Tensor]) -> tuple[list, list]:
        (q, g, x), (k, v, y, z) = queries, keys
        E, dP = _change_of_scores(q, k, x, y, scale), g @ v.mT
        A, dS = _softmax_derivative(P, E), _softmax_derivative(P, dP)
        means = [torch.linalg.vecdot(P, M).unsqueeze(-1) for M in (E, dP)]
        # the derivative w.r.t. P, then w.r.t. S
        W = torch.addcmul(g @ z.mT - means[0] * dP, E, dP - means[1])
        W = _softmax_derivative(P, W)
        rows = [A @ v + P @ z, (W @ k + dS @ y) * scale]
        return rows, [(W.mT @ q + dS.mT @ x) * scale, A.mT @ g]

    return _in_tiles(formula, [of.q, g, x], [of.k, of.v, y, z], of)


def _filled(tensors: Sequence[Tensor], vectors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return vectors with zeros for those that are missing."""
    pairs = zip(tensors, vectors, strict=True)
    return [torch.zeros_like(x) if vector is None else vector for x, vector in pairs]


def _change_of_scores(q: Tensor, k: Tensor, x: Tensor, y: Tensor, scale: float) -> Tensor:
    """Return ``scale (x K^T + Q y^T)``."""
    return torch.cat([x, q], -1) * scale @ torch.cat([k, y], -1).mT


def _softmax_derivative(P: Tensor, X: Tensor) -> Tensor:
    """Return ``J X``."""
    return torch.ops.aten._softmax_backward_data(X, P, -1, P.dtype)


# --- tiles


def _in_tiles(
    formula: Formula,
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    of: Operands,
) -> list[Tensor]:
    """Return a formula's results for all queries, and its sums for all keys.

    It gets what queries ``[N, H, R, *]`` and keys ``[N, H, T, *]`` have in a tile.
    """
    (N, H, R, _), T = queries[0].shape, keys[0].shape[2]
    dtype = torch.promote_types(queries[0].dtype, torch.float32)
    tile = entries_at_once(queries[0], _TILE)
    num_rows = min(R, max(_MIN_QUERIES, tile // max(N * H * T, 1)))
    num_heads = min(H, max(1, tile // max(num_rows * T, 1)))
    num_samples = min(N, max(1, tile // max(num_rows * T * num_heads, 1)))

    def of_rows(at: tuple[slice, slice], rows: slice) -> tuple[list, list]:
        stop = min(rows.stop, T) if of.is_causal else T
        of_queries = [x[*at, rows].to(dtype) for x in queries]
        of_keys = [x[*at, :stop].to(dtype) for x in keys]
        bias = None if of.mask is None else of.mask[*at, rows]
        P = _weights(of_queries[0], of_keys[0], bias, of, rows.start)
        return formula(P, of_queries, of_keys)

    def of_heads(at: tuple[slice, slice]) -> list[Tensor]:
        # the last queries first: they see all keys
        pieces, sums = [], list[Tensor]()
        for rows in reversed([*_slices(R, num_rows)]):
            piece, parts = of_rows(at, rows)
            pieces.append(piece)
            sums = sums or parts
            for total, part in zip(sums, parts, strict=True):
                if total is not part:
                    total.narrow(2, 0, part.shape[2]).add_(part)
        return [*(torch.cat(x[::-1], 2) for x in zip(*pieces, strict=True)), *sums]

    with torch.autocast(queries[0].device.type, enabled=False):
        found = [
            [torch.cat(x, 1) for x in zip(*parts, strict=True)]
            for n in _slices(N, num_samples)
            for parts in [[of_heads((n, h)) for h in _slices(H, num_heads)]]
        ]
        return [torch.cat(x).to(queries[0].dtype) for x in zip(*found, strict=True)]


def _slices(length: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, length)) for i in range(0, length, size))


def _weights(q: Tensor, k: Tensor, mask: Tensor | None, of: Operands, first: int) -> Tensor:
    """Return P of a tile whose queries have numbers from ``first`` on."""
    S = q * of.scale @ k.mT
    if of.is_causal and first < S.shape[-1]:
        later = S.new_ones(S.shape[-2], S.shape[-1] - first, dtype=torch.bool).triu(1)
        S[..., first:].masked_fill_(later, -inf)
    if mask is None:
        return S.softmax(-1)
    if mask.dtype is torch.bool:
        mask = torch.zeros_like(mask, dtype=S.dtype).masked_fill(~mask, -inf)
    sees_none = (mask == -inf).all(-1, keepdim=True)  # then the output is zero
    return (S + mask.masked_fill(sees_none, 0.0)).softmax(-1).masked_fill(sees_none, 0.0)


# --- the replacements


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return ``F.scaled_dot_product_attention``, in tiles if there are many weights.

    Dropout, masks with derivatives and the user's own transforms are left to PyTorch.
    """
    q, k, v, mask = _cast(query), _cast(key), _cast(value), _cast(attn_mask)
    if enable_gqa:
        k, v = (_for_all_heads(x, q) for x in (k, v))
    if dropout_p or in_transform() or not _fit(q, k, v, mask, is_causal):
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        options["enable_gqa"] = enable_gqa
        return F.scaled_dot_product_attention(query, key, value, attn_mask, **options)
    if is_causal:  # no query sees later keys
        k, v = k[..., : q.shape[-2], :], v[..., : q.shape[-2], :]
    if mask is not None:
        mask = mask.detach().expand(*q.shape[:-1], k.shape[-2])
        mask = mask if q.ndim == 4 else mask.unsqueeze(0)
    options = q.shape[-1] ** -0.5 if scale is None else scale, is_causal
    if q.ndim == 4:
        return Attention.apply(q, k, v, mask, *options)
    return Attention.apply(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), mask, *options)[0]


def _cast(x: Tensor | None) -> Tensor | None:
    """Return a tensor in the precision to which autocast casts it."""
    if x is None or not torch.is_autocast_enabled(x.device.type):
        return x
    is_cast = x.is_floating_point() and x.dtype is not torch.float64
    return x.to(torch.get_autocast_dtype(x.device.type)) if is_cast else x


def _for_all_heads(x: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for each head of the queries."""
    is_grouped = min(x.ndim, q.ndim) > 2 and 0 < x.shape[-3] < q.shape[-3]
    return x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) if is_grouped else x


def _fit(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Return whether the formulas are for such tensors, and there are many weights."""
    return (
        not (q.is_nested or k.is_nested or v.is_nested)
        and q.ndim in (3, 4)
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and (q.shape[-1], k.shape[-2]) == (k.shape[-1], v.shape[-2])
        and q.is_floating_point()
        and q.dtype == k.dtype == v.dtype
        and (mask is None or (_is_constant_mask(mask, q) and not is_causal))
        and q.shape[:-1].numel() * k.shape[-2] >= FEW_WEIGHTS
    )


def _is_constant_mask(mask: Tensor, q: Tensor) -> bool:
    """Return whether PyTorch takes a mask, and it has no derivative."""
    dtypes = torch.bool, torch.float32, q.dtype
    return mask.dtype in dtypes and mask.ndim <= q.ndim and not is_differentiated(mask)


def _multi_head_attention() -> Callable:
    """Return a copy of PyTorch's function, whose calls no mode sees, that calls ``attention``."""
    function = F.multi_head_attention_forward
    names = {**function.__globals__, "scaled_dot_product_attention": attention}
    copy = FunctionType(function.__code__, names, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


ATTENTION: dict[Callable, Callable] = {
    F.scaled_dot_product_attention: attention,
    F.multi_head_attention_forward: _multi_head_attention(),
}
