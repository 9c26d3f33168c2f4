"""Calls that are replaced by compositions of calls with rules while a forward pass is recorded."""

import string
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.layers.rules import Use, contraction, handles

with suppress(ImportError):
    import torch._decomp.decompositions  # registers the Python kernels


# --- contractions of any number of tensors, two at a time


def contract(axes: tuple[str, str, str], first: Tensor, second: Tensor) -> Tensor:
    """Contract two tensors.

    Args:
        axes: A letter for each axis of either, and of the output: each occurs once in a tensor,
            has one length, and is in the output or in both tensors.
        first: One tensor.
        second: The other.
    """
    if torch.overrides.has_torch_function((first, second)):
        return torch.overrides.handle_torch_function(contract, (first, second), axes, first, second)
    return torch.einsum(f"{axes[0]},{axes[1]}->{axes[2]}", first, second)


@handles(contract)
def uses_of_contract(
    axes: tuple[str, str, str], first: Tensor, second: Tensor
) -> dict[str, Use | None]:
    """Either may be the parameter."""
    a, b, out = (" ".join(term) for term in axes)
    return {
        "first": contraction(f"{b}, {a} -> {out}", second, first.shape),
        "second": contraction(f"{a}, {b} -> {out}", first, second.shape),
    }


def einsum(*args: Any) -> Tensor:
    """Contract tensors from left to right, each with the next one that shares an axis with it."""
    terms, output, operands = _parse(args)
    lengths: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for axis, length in zip(term, x.shape, strict=True):
            lengths[axis] = length if lengths.get(axis, 1) == 1 else lengths[axis]
    pairs = [_simplify(x, term, lengths) for x, term in zip(operands, terms, strict=True)]
    x, term = _sum_alone(*pairs.pop(0), output, pairs)
    while pairs:
        shared = (i for i, (_, other) in enumerate(pairs) if set(other) & set(term))
        second, axes = _sum_alone(*pairs.pop(next(shared, 0)), output + term, pairs)
        x, term = _sum_alone(x, term, output + axes, pairs)
        kept = set(output).union(*(other for _, other in pairs))
        result = "".join(axis for axis in dict.fromkeys(term + axes) if axis in kept)
        x, term = contract((term, axes, result), x, second), result
    return x.permute([term.index(axis) for axis in output])


def _parse(args: tuple) -> tuple[list[str], str, list[Tensor]]:
    """Return a letter for each axis of each operand, those of the output, and the operands."""
    equation, operands = args[0], args[1:]
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = operands[0]
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow:  # in alphabetical order, axes that occur once
        counts = Counter(inputs.replace(",", "").replace("...", ""))
        output = "..." * ("..." in inputs) + "".join(
            sorted(axis for axis, count in counts.items() if count == 1)
        )
    unused = [letter for letter in string.ascii_letters if letter not in equation]
    hidden = [x.ndim - len(t.replace("...", "")) for t, x in zip(terms, operands, strict=True)]
    hidden = [n if "..." in term else 0 for term, n in zip(terms, hidden, strict=True)]
    dots = unused[: max(hidden)]

    def spell(term: str, number: int) -> str:
        return term.replace("...", "".join(dots[len(dots) - number :]))

    named = [spell(term, number) for term, number in zip(terms, hidden, strict=True)]
    return named, spell(output, len(dots)), list(operands)


def _simplify(x: Tensor, term: str, lengths: dict[str, int]) -> tuple[Tensor, str]:
    """Take the diagonal of repeated axes, and drop axes that are broadcast."""
    for axis, count in Counter(term).items():
        for _ in range(count - 1):
            first, second = (i for i, other in enumerate(term) if other == axis)
            x = x.diagonal(dim1=first, dim2=second)
            term = term.replace(axis, "") + axis
    for i in reversed(range(x.ndim)):
        if x.shape[i] == 1 != lengths[term[i]]:
            x, term = x.squeeze(i), term[:i] + term[i + 1 :]
    return x, term


def _sum_alone(
    x: Tensor, term: str, output: str, others: list[tuple[Tensor, str]]
) -> tuple[Tensor, str]:
    """Sum over axes that occur nowhere else."""
    wanted = set(output).union(*(other for _, other in others))
    alone = [i for i, axis in enumerate(term) if axis not in wanted]
    rest = "".join(axis for axis in term if axis in wanted)
    return (x.sum(alone) if alone else x), rest


# --- recurrent cells and layers


def _gates(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    return F.linear(input, w_ih, b_ih), F.linear(hidden, w_hh, b_hh)


def _lstm_cell(
    input: Tensor, hx: tuple[Tensor, Tensor], *weights: Any, **named: Any
) -> tuple[Tensor, Tensor]:
    ours, theirs = _gates(input, hx[0], *weights, **named)
    write, forget, new, out = (ours + theirs).chunk(4, -1)
    memory = forget.sigmoid() * hx[1] + write.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru_cell(input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
    ours, theirs = _gates(input, hx, *weights, **named)
    (r1, z1, n1), (r2, z2, n2) = ours.chunk(3, -1), theirs.chunk(3, -1)
    update = (z1 + z2).sigmoid()
    new = (n1 + (r1 + r2).sigmoid() * n2).tanh()
    return new + update * (hx - new)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(input: Tensor, hx: Tensor, *weights: Any, **named: Any) -> Tensor:
        return activation(sum(_gates(input, hx, *weights, **named)))

    return cell


def _layer(function: Callable, packet: Any) -> Callable:
    """Return PyTorch's own composition of a layer over sequences."""

    def layer(*args: Any) -> tuple[Tensor, ...]:
        # (data, batch_sizes, ...) for packed sequences, (input, hx, ...) else
        packed = isinstance(args[1], Tensor) and args[1].dtype == torch.int64
        dropout, train = args[5 + packed : 7 + packed]
        if dropout and train:  # the composition forgets it: gradients are computed sample by sample
            return function(*args)
        overload = packet.data if packed else packet.input
        if not args[0].requires_grad:
            # else the composed LSTM still calls oneDNN's kernel in float32
            args = (args[0].detach().requires_grad_(), *args[1:])
        return overload.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd](*args)

    return layer


RECURRENT: dict[Callable, Callable] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
    torch.lstm: _layer(torch.lstm, torch.ops.aten.lstm),
    torch.gru: _layer(torch.gru, torch.ops.aten.gru),
    torch.rnn_tanh: _layer(torch.rnn_tanh, torch.ops.aten.rnn_tanh),
    torch.rnn_relu: _layer(torch.rnn_relu, torch.ops.aten.rnn_relu),
}


# --- other calls


def _baddbmm(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    return input * beta + batch1 @ batch2 * alpha


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
    # a query that may attend to no key gets zeros
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
    """Multiply the rows up to each offset by the next matrix, as for routed experts."""
    if offs is None:
        product = mat_a @ mat_b
    elif mat_a.ndim == 2 and mat_b.ndim == 3:
        ends = offs.tolist()
        rows = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        products = [
            mat_a[group] @ mat_b[i] for i, group in enumerate(rows) if group.start < group.stop
        ]
        rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])
        product = torch.cat([*products, rest])
    else:
        raise NotImplementedError("There is no rule for grouped_mm but for rows and matrices.")
    product = product if bias is None else product + bias
    return product if out_dtype is None else product.to(out_dtype)


COMPOSED: dict[Callable, Callable] = RECURRENT | {
    torch.einsum: einsum,
    torch.baddbmm: _baddbmm,
    Tensor.baddbmm: _baddbmm,
    torch.tensordot: _tensordot,
    F.scaled_dot_product_attention: _attention,
}
if hasattr(torch, "_grouped_mm"):  # what torch.nn.functional.grouped_mm calls
    COMPOSED[torch._grouped_mm] = _grouped_mm
