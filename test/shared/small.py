"""A small net, batches for it, and operators of it, for tests in which these do not matter."""

from typing import Any

import torch
from contract import matrix
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    TransposedJacobianLinearOperator,
)

SQUARE = [HessianLinearOperator, GGNLinearOperator, EFLinearOperator]


CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def mlp(*layers: nn.Module) -> nn.Module:
    """Return two layers, and others before the activation between them."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 3)).double()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Return batches of three numbers and a class for each sample."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


def build(kind: type, model: Any, data: list | None = None, loss: Any = CE, **options: Any) -> Any:
    """Return an operator, by default on batches of four and two samples."""
    params = options.pop("params", None) or list(model.parameters())
    losses = [] if kind in (JacobianLinearOperator, TransposedJacobianLinearOperator) else [loss]
    return kind(model, *losses, params, batches(4, 2) if data is None else data, **options)


def dense(kind: type, model: Any, *args: Any, **options: Any) -> Tensor:
    """Return the same operator's matrix."""
    return matrix(build(kind, model, *args, **options))
