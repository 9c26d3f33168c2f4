"""Layers of the references that write down how samples use parameters."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Use:
    """One use of a weight by one sample, with S positions and G groups.

    Attributes:
        weight: The parameter.
        entries: Where the matrices' entries are in the flat parameter, `[G, O, I]`.
        a: Inputs `[S, G, I]`.
        output: What is differentiated with respect to.
        rows: Turns its gradient into `[S, G, O]`.
        bias: The parameter, and where its entries are, `[G * O]`; its positions may be others.
        bias_rows: Turns the gradient into `[S, O]`.
        joint: Whether the bias can be the weight's last column.
        lookup: Whether only the diagonal of the input factor is kept.
    """

    weight: Tensor | None
    entries: Tensor | None
    a: Tensor | None
    output: Tensor
    rows: Callable[[Tensor], Tensor] | None
    bias: Tensor | None = None
    bias_entries: Tensor | None = None
    bias_rows: Callable[[Tensor], Tensor] | None = None
    joint: bool = True
    lookup: bool = False


_TAPE: list[Use] | None = None


@contextmanager
def recording() -> Iterator[list[Use]]:
    global _TAPE
    _TAPE, before = [], _TAPE
    try:
        yield _TAPE
    finally:
        _TAPE = before


def record(use: Callable[[], Use]) -> None:
    """Write a use down, if anybody listens."""
    if _TAPE is not None:
        _TAPE.append(use())


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    bias_rows: slice = slice(None),
    transposed: bool = False,
) -> Tensor:
    """`x @ weight.T + bias[rows]`, recorded; the first axes number positions."""
    out = x @ (weight if transposed else weight.T)
    out = out if bias is None else out + bias[bias_rows]
    if x.numel():
        record(lambda: of_rows(weight, bias, x, out, transposed, bias_rows))
    return out + 0


def lookup(index: Tensor, weight: Tensor, padding: int | None = None) -> Tensor:
    """`weight[index]`, recorded; uses of the row `padding` are constants."""
    out = weight[index]
    if padding is not None:
        out = torch.where((index == padding).unsqueeze(-1), out.detach(), out)
    record(lambda: of_lookup(weight, padding, index, out))
    return out + 0


def of_lookup(weight: Tensor, padding: int | None, x: Tensor, out: Tensor) -> Use:
    V, E = weight.shape
    index = x.flatten()
    kept = index != (-1 if padding is None else padding)
    return Use(
        weight,
        torch.arange(V * E).reshape(1, V, E).mT,
        torch.eye(V, dtype=out.dtype)[index[kept]].unsqueeze(1),
        out,
        lambda g: g.reshape(-1, 1, E)[kept],
        lookup=True,
    )


def of_rows(
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    out: Tensor,
    transposed: bool = False,
    bias_rows: slice = slice(None),
) -> Use:
    index = torch.arange(weight.numel()).reshape(weight.shape)
    index, outs = index.T if transposed else index, out.shape[-1]
    return Use(
        weight,
        index.reshape(1, outs, -1),
        x.detach().reshape(-1, 1, x.shape[-1]),
        out,
        lambda g: g.reshape(-1, 1, outs),
        bias,
        None if bias is None else torch.arange(len(bias))[bias_rows],
        lambda g: g.reshape(-1, outs),
    )
