"""Complex, sparse, jagged and wrapped tensors, and rules that fail."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sample_gradients import loop
from torch import Tensor, nn

import curvlinops
from curvlinops.layers.rules import RULES, Rule, Use

pytestmark = pytest.mark.extensive

N = 6


class Model(nn.Module):
    """A function of two real parameters, and a linear layer."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Parameter(torch.rand(4) + 0.5), nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)
        self._function = function
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self._function(self, x))


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x)


COMPLEX = {
    "product": lambda m, x: torch.fft.ifft(spectrum(x) * m.a).real,
    "sum": lambda m, x: (spectrum(x) + m.a).abs(),
    "quotient": lambda m, x: (spectrum(x) / m.a).real.tanh(),
    "power": lambda m, x: ((spectrum(x) + 9) ** m.a).abs(),
    "rotation": lambda m, x: (torch.exp(1j * m.b) * spectrum(x) * m.a).real,
    "complex": lambda m, x: (torch.complex(m.a, m.b) * spectrum(x)).imag,
    "in place": lambda m, x: spectrum(x).mul_(m.a).abs(),
    "addcmul": lambda m, x: torch.addcmul(spectrum(x), spectrum(x), m.a.to(x) + 0j).abs(),
    "broadcast": lambda m, x: (spectrum(x).unsqueeze(1) * m.a[:, None]).sum(1).abs(),
}


def check(model: nn.Module, X: Tensor) -> curvlinops.PerSampleGradientLinearOperator:
    torch.manual_seed(1)
    y = torch.randn(N, 2).double()
    loss = nn.MSELoss(reduction="sum")
    rows = loop(model, list(model.parameters()), [(X.to_dense(), y)], loss)
    return check_rows(rows, model, X, y)


def check_rows(
    R: Tensor, model: nn.Module, X: Any, y: Tensor
) -> curvlinops.PerSampleGradientLinearOperator:
    """Compare all that is made of single samples' gradients."""
    params, loss = list(model.parameters()), nn.MSELoss(reduction="sum")
    arguments = model, loss, params, [(X, y)]
    op = curvlinops.PerSampleGradientLinearOperator(*arguments)
    torch.testing.assert_close(op.dense(), R)
    torch.testing.assert_close(op.norms(), R.norm(dim=1))
    torch.testing.assert_close(op.gram(), R @ R.T)
    v = torch.linspace(-1, 1, R.shape[1]).double()
    torch.testing.assert_close(op @ v, R @ v)
    options = {"fisher_type": "empirical", "fallback": "dense"}
    ekfac = curvlinops.EKFACLinearOperator(*arguments, **options)
    torch.testing.assert_close(ekfac.trace(), R.square().sum())
    kfac = curvlinops.KFACLinearOperator(*arguments, **options)
    assert bool(torch.isfinite(kfac.trace()))
    ggn = curvlinops.GGNLinearOperator(*arguments)
    diagonal = (ggn @ torch.eye(len(v)).double()).diagonal()
    found = curvlinops.GGNDiagonalLinearOperator(*arguments).diagonal()
    torch.testing.assert_close(found, diagonal)
    return op


@pytest.mark.parametrize("name", COMPLEX)
def test_real_parameter_in_a_complex_function(name):
    X = torch.linspace(-1, 2, 4 * N).sin().reshape(N, 4).double()
    check(Model(COMPLEX[name]), X)


def test_complex_rules_are_used():
    X = torch.linspace(-1, 2, 4 * N).sin().reshape(N, 4).double()
    assert "a" not in check(Model(COMPLEX["product"]), X).fallbacks


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize(
    "function",
    [
        lambda m, x: torch.tanh(F.linear(x, m.head.weight.T @ m.head.weight, m.a)),
        lambda m, x: torch.tanh(torch.sparse.mm(x, torch.outer(m.a, m.b))),
    ],
)
def test_sparse_inputs(layout, function):
    X = torch.linspace(-1, 2, 4 * N).sin().reshape(N, 4).double()
    X = (X * (X > 0.2)).to_sparse(layout=layout)
    check(Model(function), X)


class FirstLayer(nn.Module):
    """An ordinary model of sparse inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_inputs_need_no_fallback(layout):
    X = torch.eye(N, 4).double()
    assert not check(FirstLayer(), X.to_sparse(layout=layout)).fallbacks


class Graph(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(4, 3).double(), nn.Linear(3, 2).double()

    def forward(self, X: tuple[Tensor, Tensor]) -> Tensor:
        features, adjacency = X
        return self.head(torch.tanh(adjacency @ self.inner(features)))


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_sparse_adjacency(layout):
    model = Graph()
    features, y = (torch.randn(N, k).double() for k in (4, 2))
    adjacency = ((torch.rand(N, N) < 0.4).double() + torch.eye(N)) / 3
    losses = (model((features, adjacency)) - y).square().sum(1)
    rows = [torch.autograd.grad(x, model.parameters(), retain_graph=True) for x in losses]
    R = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    if layout is not torch.strided:
        adjacency = adjacency.to_sparse(layout=layout)
    check_rows(R, model, (features, adjacency), y)


class Sequences(nn.Module):
    """The sum over sequences of several lengths, of which X has the numbers that count."""

    def __init__(self, jagged: bool):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.Linear(2, 3).double(), nn.Linear(3, 2).double()
        self.jagged = jagged

    def forward(self, X: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = X
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        if self.jagged:
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            nested = torch.nested.nested_tensor_from_jagged(x[valid], offsets)
            summed = torch.nested.to_padded_tensor(self.inner(nested).tanh(), 0.0).sum(1)
        else:
            summed = (self.inner(x).tanh() * valid.unsqueeze(-1)).sum(1)
        return self.head(summed)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_jagged_tensors():
    torch.manual_seed(1)
    X, y = (torch.randn(N, 4, 2).double(), torch.randint(1, 5, (N,))), torch.randn(N, 2).double()
    operators = [
        curvlinops.HessianLinearOperator,
        curvlinops.GGNLinearOperator,
        curvlinops.EFLinearOperator,
        curvlinops.PerSampleGradientLinearOperator,
        curvlinops.GGNDiagonalLinearOperator,
    ]
    for operator in operators:
        models = Sequences(True), Sequences(False)
        made = [operator(m, nn.MSELoss(), list(m.parameters()), [(X, y)]) for m in models]
        found, expected = (op @ torch.eye(17).double() for op in made)
        torch.testing.assert_close(found, expected)


def _fails_on_gradients(input, weight, bias=None):
    def fails(*args):
        raise IndexError("on gradients")

    return {"weight": Use((len(input),), fails, fails)}


def test_mistakes_in_rules_surface(monkeypatch):
    monkeypatch.setitem(RULES, F.linear, Rule(_fails_on_gradients))
    with pytest.raises(IndexError, match="on gradients"):
        check(FirstLayer(), torch.eye(N, 4).double())
