"""Recurrent cells, composed of calls that rules know.

Layers over whole sequences arrive composed already, see ``core/recurrent.py``.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


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


CELLS: dict[Callable, Callable] = {
    torch.lstm_cell: _lstm_cell,
    torch.gru_cell: _gru_cell,
    torch.rnn_tanh_cell: _rnn_cell(torch.tanh),
    torch.rnn_relu_cell: _rnn_cell(torch.relu),
}
