"""Batches of one sample give the same blocks as larger batches."""

from collections.abc import Callable
from typing import Any

import kfac_reference
import problems
import pytest
import torch
from contract import error, matrix
from problems import Problem
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
)

pytestmark = pytest.mark.extensive


class Model(nn.Module):
    """A layer that uses a function of a parameter, and a head of which KFAC knows the structure."""

    def __init__(self, layer: Callable, constant: Tensor, width: int, **params: Tensor):
        super().__init__()
        self.layer, self.constant = layer, nn.Buffer(constant)
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer(self, x)))


def masked(m: Model, x: Tensor) -> Tensor:
    return F.linear(x, m.weight * m.constant, m.bias)


def masked_convolution(m: Model, x: Tensor) -> Tensor:
    return F.conv1d(x, m.weight * m.constant).mean(2)


def filter_from_coordinates(m: Model, x: Tensor) -> Tensor:
    hidden = torch.tanh(m.constant @ m.first)
    return F.conv1d(x, (hidden @ m.second).T.unsqueeze(1)).mean(2)


def bias_of_distances(m: Model, x: Tensor) -> Tensor:
    index = torch.arange(x.shape[1])
    bias = F.embedding(index[:, None] - index + len(index) - 1, m.table).squeeze(2)
    return ((x @ x.mT + bias).softmax(2) @ x).sum(1)


def one_by_one(m: Model, x: Tensor) -> Tensor:
    return torch.stack([torch.tanh(F.linear(one, m.weight, m.bias)).mean(0) for one in x])


def masked_one_by_one(m: Model, x: Tensor) -> Tensor:
    weight = m.other * m.constant
    return F.linear(one_by_one(m, x), weight)


R = torch.randn
#: Models, and the shape of an input.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "masked": (
        lambda: Model(masked, torch.tensor([[1.0], [0.0], [1.0]]), 3, weight=R(3, 4), bias=R(3)),
        (4,),
    ),
    "masked-convolution": (
        lambda: Model(masked_convolution, torch.tensor([1.0, 1.0, 0.0]), 3, weight=R(3, 2, 3)),
        (2, 5),
    ),
    "coordinates": (
        lambda: Model(filter_from_coordinates, R(3, 2), 3, first=R(2, 4), second=R(4, 3)), (1, 5),
    ),
    "distances": (lambda: Model(bias_of_distances, R(1), 3, table=R(7, 1)), (4, 3)),
}  # fmt: skip


#: Models that call a layer for each sample.
LOOPS = {
    "loop": (lambda: Model(one_by_one, R(1), 3, weight=R(3, 4), bias=R(3)), (5, 4)),
    "loop-masked": (
        lambda: Model(masked_one_by_one, R(3, 3), 3, weight=R(3, 4), bias=R(3), other=R(3, 3)),
        (5, 4),
    ),
}


def make(name: str, size: int) -> Problem:
    torch.manual_seed(0)
    build, shape = (MODELS | LOOPS)[name]
    model = build().double()
    data = [(R(5, *shape).double(), R(5, 2).double())]
    p = Problem(model, nn.MSELoss(), dict(model.named_parameters()), data, mc=True)
    return problems.rebatched(p, size)


def build(cls: type, p: Problem, **options: Any) -> KFACLinearOperator:
    options = {"fisher_type": "empirical", "fallback": "dense"} | options
    return cls(p.model, p.loss, p.params, p.data, **options)


def structures(operator: KFACLinearOperator) -> list[tuple]:
    return [(b.names, b.structure, b.factors, b.reason) for b in operator.report()]


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_blocks_do_not_depend_on_the_batches(name: str, cls: type):
    """Parameters have their exact block if layers use a function of them."""
    p, corrected = make(name, 1), cls is EKFACLinearOperator
    expected = kfac_reference.kfac(p, "empirical", corrected=corrected)
    for options in ({}, {"kfac_approx": "reduce"}):
        alone, together = build(cls, p, **options), build(cls, make(name, 5), **options)
        assert error(matrix(alone), expected) <= 1e-9
        assert structures(alone) == structures(together)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_loops_over_samples(name: str, cls: type):
    """A layer of a loop sees one sample in each call."""
    alone, together = build(cls, make(name, 1)), build(cls, make(name, 5))
    assert error(matrix(alone), matrix(together)) <= 1e-9
    assert structures(alone) == structures(together)
    kinds = {names[0]: structure for names, structure, *_ in structures(alone)}
    assert kinds["weight"] == "kronecker"
