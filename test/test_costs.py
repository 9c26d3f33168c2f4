"""What is not needed is neither computed, nor copied, nor kept: evaluations and numbers counted."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import error, matrix
from torch import Tensor, nn

from curvlinops import EFLinearOperator


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Weight(nn.Module):
    """One weight, which a function uses."""

    def __init__(self, forward: Callable, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(*shape, dtype=torch.float64))
        self._forward = forward

    def forward(self, X: Tensor) -> Tensor:
        return self._forward(self.weight, X)


def _rows() -> Tensor:
    return torch.randn(4, 32, 6, dtype=torch.float64)


def _tokens() -> Tensor:
    return torch.randint(40, (4, 32))


def _parts(w: Tensor, X: Tensor) -> Tensor:
    first, second, third = (F.linear(X, part) for part in w.chunk(3))
    return (first * second + third).sum(1)


#: Weight, shape, and data; and what the empirical Fisher keeps: gradients, or what they are made of.
FISHERS: dict[str, tuple[Callable, tuple[int, ...], Callable, str]] = {
    "few positions": (lambda w, X: F.linear(X[:, :2], w).sum(1), (4, 6), _rows, ""),
    "many positions": (lambda w, X: F.linear(X, w).sin().sum(1), (4, 6), _rows, "rows"),
    "a table": (lambda w, X: F.embedding(X, w).sin().sum(1), (40, 6), _tokens, ""),
    "parts": (_parts, (12, 6), _rows, "rows"),
    "a function": (lambda w, X: F.linear(X, w / w.norm()).sin().sum(1), (4, 6), _rows, "rows"),
    "tied": (
        lambda w, X: F.linear(F.embedding(X, w).sin(), w).sin().sum(1),
        (40, 6),
        _tokens,
        "rows",
    ),
}


@pytest.mark.parametrize("name", FISHERS)
def test_what_empirical_fishers_keep(name: str):
    function, shape, inputs, expected = FISHERS[name]
    model = Weight(function, *shape)
    data = [(inputs(), torch.randint(4, (4,)))]
    params, loss = list(model.parameters()), nn.CrossEntropyLoss()
    kept, fresh = (EFLinearOperator(model, loss, params, data, cache=c) for c in ("graph", "none"))
    assert error(matrix(kept), matrix(fresh)) <= 1e-12
    assert {kind for kind, _ in kept._kept._entries} == {expected}
