"""Control flow of PyTorch that is made for compilers, as loops and branches of Python.

Then whoever watches calls sees those inside, and all derivatives are those of these calls: PyTorch
differentiates ``scan`` twice wrongly, and ``map`` not at all.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten


def _cond(pred: Any, true_fn: Callable, false_fn: Callable, operands: Sequence) -> Any:
    return (true_fn if bool(pred) else false_fn)(*operands)


def _map(function: Callable, xs: Sequence[Tensor], others: Sequence) -> Any:
    rows = [function(*row, *others) for row in zip(*xs, strict=True)]
    return tree_map(lambda *parts: torch.stack(parts), *rows)


def _scan(
    combine: Callable, init: Sequence[Tensor], xs: Sequence[Tensor], others: Sequence = ()
) -> Any:
    carry, outputs, structure = list(init), [], None
    for row in zip(*xs, strict=True):
        # flat only for compilers; whoever calls expects the same structure as here
        found, structure = tree_flatten(combine(*carry, *row, *others))
        carry = found[: len(init)]
        outputs.append(found[len(init) :])
    stacked = (torch.stack(parts) for parts in zip(*outputs, strict=True))
    return tree_unflatten([*carry, *stacked], structure)


def _while_loop(cond: Callable, body: Callable, carry: Sequence, others: Sequence) -> Any:
    found: Any = tuple(carry)
    while bool(cond(*carry, *others)):
        found = body(*carry, *others)
        carry = tree_leaves(found)
    return found


CONTROL_FLOW: dict[Callable, Callable] = {
    torch.ops.higher_order.cond: _cond,
    torch.ops.higher_order.map_impl: _map,
    torch.ops.higher_order.scan: _scan,
    torch.ops.higher_order.while_loop: _while_loop,
}
