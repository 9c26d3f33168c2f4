"""What is not needed is neither computed, nor copied, nor kept: evaluations and numbers counted."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import error, matrix, vectors
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    JacobianLinearOperator,
    PerSampleGradientLinearOperator,
)
from curvlinops.layers.patches import Patches


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


#: Weight, shape, and data; and what is kept: gradients, or a graph.
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
    assert {kind for kind, _ in kept._cache._entries} == {expected}


# --- what operators compare with


def _net() -> tuple[nn.Module, nn.Module, list[Tensor], list]:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (3, 2)]
    return net, nn.MSELoss(), list(net.parameters()), data


@pytest.mark.parametrize("cache", ["auto", "graph"])
def test_products_between_quantities_that_keep_nothing(cache: str):
    net, _, params, data = _net()
    kept, fresh = (JacobianLinearOperator(net, params, data, cache=c) for c in (cache, "none"))
    v = vectors(kept)
    for action in "kppkpcpkcpppckcppk":
        if action == "k":
            kept.gram()
        elif action == "c":
            params[0].data.mul_(1.1)
        else:
            assert error(kept @ v, fresh @ v) <= 1e-12
    assert len(kept._cache._entries) == len(data)


# --- evaluations


# --- patches of convolutions


class Twice(nn.Module):
    """One convolution on two images, of different sizes."""

    def __init__(self, groups: int, filters: int):
        super().__init__()
        self.layer = nn.Conv2d(16, filters, 3, padding=1, groups=groups).double()

    def forward(self, X: Tensor) -> Tensor:
        return self.layer(X).sin().sum((2, 3)) + self.layer(X[..., ::2, 1:]).tanh().sum((2, 3))


QUANTITIES: dict[str, Callable] = {
    "rows": lambda P: P.dense(),
    "norms": lambda P: P.norms(),
    "gram": lambda P: P.gram(),
    "moment": lambda P: P.second_moment(),
}


@pytest.mark.parametrize("groups, filters, made", [(1, 4, 0), (2, 4, 0), (1, 64, 2)])
@pytest.mark.parametrize("quantity", QUANTITIES)
def test_patches_of_a_convolution_that_is_used_twice(
    quantity: str, groups: int, filters: int, made: int, monkeypatch
):
    net = Twice(groups, filters)
    X, y = torch.randn(6, 16, 8, 8).double(), torch.randn(6, filters).double()
    loss, params = nn.MSELoss(), list(net.parameters())
    alone = []
    for n in (4, 1, 5, 2, 0):
        grads = torch.autograd.grad(loss(net(X[n : n + 1]), y[n : n + 1]), params)
        alone.append(torch.cat([g.flatten() for g in grads]))
    rows = torch.stack(alone)
    expected = {
        "rows": rows,
        "norms": rows.norm(dim=1),
        "gram": rows @ rows.T,
        "moment": rows.square().mean(0),
    }
    P = PerSampleGradientLinearOperator(net, loss, params, [(X, y)], subsampling=[4, 1, 5, 2, 0])
    P.norms()  # what is checked on the first batch makes patches, too
    sizes, make = [], Patches.__getitem__

    def counted(self: Patches, samples: slice | Tensor) -> Tensor:
        sizes.append(len(out := make(self, samples)))
        return out

    monkeypatch.setattr(Patches, "__getitem__", counted)
    assert error(QUANTITIES[quantity](P), expected[quantity]) <= 1e-12
    assert len(sizes) <= made
