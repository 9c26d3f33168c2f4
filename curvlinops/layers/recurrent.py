"""Recurrent cells and layers, composed of calls that rules know."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

with suppress(ImportError):
    import torch._decomp.decompositions  # registers the Python kernels


def _gates(
    input: Tensor,
    hidden: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return F.linear(input, w_ih, b_ih), F.linear(hidden, w_hh, b_hh)


def _lstm_cell(
    input: Tensor,
    hx: tuple[Tensor, Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ours, theirs = _gates(input, hx[0], w_ih, w_hh, b_ih, b_hh)
    write, forget, new, out = (ours + theirs).chunk(4, -1)
    memory = forget.sigmoid() * hx[1] + write.sigmoid() * new.tanh()
    return out.sigmoid() * memory.tanh(), memory


def _gru_cell(
    input: Tensor,
    hx: Tensor,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Tensor:
    ours, theirs = _gates(input, hx, w_ih, w_hh, b_ih, b_hh)
    (r1, z1, n1), (r2, z2, n2) = ours.chunk(3, -1), theirs.chunk(3, -1)
    update = (z1 + z2).sigmoid()
    new = (n1 + (r1 + r2).sigmoid() * n2).tanh()
    return new + update * (hx - new)


def _rnn_cell(activation: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def cell(
        input: Tensor,
        hx: Tensor,
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Tensor:
        return activation(sum(_gates(input, hx, w_ih, w_hh, b_ih, b_hh)))

    return cell


def _layer(packet: Any) -> Callable:
    """Return PyTorch's own composition of a layer over sequences."""

    def layer(*args: Any) -> tuple[Tensor, ...]:
        # (data, batch_sizes, ...) for packed sequences, (input, hx, ...) else
        packed = isinstance(args[1], Tensor) and args[1].dtype == torch.int64
        overload = packet.data if packed else packet.input
        if not args[0].requires_grad:
            # else the composed LSTM still calls oneDNN's kernel in float32
            args = (args[0].detach().requires_grad_(), *args[1:])
        kernel = overload.py_kernels[torch._C.DispatchKey.CompositeImplicitAutograd]
        return _with_dropout(kernel, args[: 1 + packed], *args[1 + packed :])

    return layer


def _with_dropout(
    kernel: Callable,
    inputs: tuple[Tensor, ...],
    states: Tensor | list[Tensor],
    params: list[Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    *batch_first: bool,
) -> tuple[Tensor, ...]:
    """Call a kernel that forgets dropout; with that, once for each layer.

    Args:
        kernel: Takes all of these arguments.
        inputs: The input, or the data of packed sequences and their batch sizes.
        states: The hidden states, ``[layers * directions, N, H]``; those of an LSTM and its cells'.
        params: The parameters, layer by layer.
        has_biases: Whether there are biases among them.
        num_layers: The number of layers.
        dropout: The probability with which entries between layers become zero.
        train: Whether they do.
        bidirectional: Whether there are two directions.
        *batch_first: Whether the batch axis of ``inputs`` is the first; not for packed sequences.
    """
    options = (train, bidirectional)
    if not train or dropout == 0 or num_layers == 1:
        return kernel(*inputs, states, params, has_biases, num_layers, 0.0, *options, *batch_first)
    x, *rest = inputs
    x = x.transpose(0, 1) if any(batch_first) else x
    directions, size, found = 1 + bidirectional, len(params) // num_layers, []
    for i in range(num_layers):
        x = torch.dropout(x, dropout, True) if i else x
        own = slice(i * directions, (i + 1) * directions)
        before = states[own] if isinstance(states, Tensor) else [part[own] for part in states]
        weights = params[i * size : (i + 1) * size]
        time_first = (False for _ in batch_first)
        x, *after = kernel(x, *rest, before, weights, has_biases, 1, 0.0, *options, *time_first)
        found.append(after)
    x = x.transpose(0, 1) if any(batch_first) else x
    return x, *(torch.cat(parts) for parts in zip(*found, strict=True))


RECURRENT: dict[Callable, Callable] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
    torch.lstm: _layer(torch.ops.aten.lstm),
    torch.gru: _layer(torch.ops.aten.gru),
    torch.rnn_tanh: _layer(torch.ops.aten.rnn_tanh),
    torch.rnn_relu: _layer(torch.ops.aten.rnn_relu),
}
