"""Control flow of PyTorch that is made for compilers, as loops and branches of Python.

Then whoever watches calls sees those inside, and all derivatives are those of these calls: PyTorch
differentiates ``scan`` twice wrongly, and ``map`` not at all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


def _cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Sequence) -> Any:
    return (true_fn if bool(pred) else false_fn)(*operands)


def _map(function: Callable, xs: Sequence[Tensor], others: Sequence) -> Any:
    rows = [function(*row, *others) for row in zip(*xs, strict=True)]
    return tree_map(lambda *parts: torch.stack(parts), *rows)


def _scan(
    combine: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence = ()
) -> tuple[Tensor, ...]:
    carry, outputs = tuple(init), []
    for row in zip(*xs, strict=True):
        found = combine(*carry, *row, *others)
        carry = tuple(found[: len(init)])
        outputs.append(found[len(init) :])
    return *carry, *(torch.stack(parts) for parts in zip(*outputs, strict=True))


def _while_loop(cond: Callable, body: Callable, carry: Sequence, others: Sequence) -> Any:
    while bool(cond(*carry, *others)):
        carry = body(*carry, *others)
    return tuple(carry)


CONTROL_FLOW: dict[Callable, Callable] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.scan: _scan,
    torch.ops.higher_order.while_loop: _while_loop,
}
