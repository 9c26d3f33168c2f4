"""What is tried on the first few samples of a batch must hold for all of them."""

from collections import UserDict
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

import curvlinops

pytestmark = pytest.mark.extensive

N = 16


class Model(nn.Module):
    """Two layers and a function of them."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.double()
        self._function, self.box = function, {}

    def forward(self, x: Any) -> Tensor:
        return self.head(self._function(self, x))


def fixed_batch_size(m: Model, x: Tensor) -> Tensor:
    """Refuse any other number of samples."""
    return torch.tanh(m.first(x) * m.second(x).view(N, 4))


def late_expert(m: Model, x: Tensor) -> Tensor:
    """Use a layer for the last samples only."""
    late = x[:, 0] > 0
    out = m.first(x)
    out[late] = m.second(x[late])
    return torch.tanh(out)


def few_another_way(m: Model, x: Tensor) -> Tensor:
    """Call other functions, in another order, for few samples."""
    if len(x) < 8:
        second = torch.einsum("ni,oi->on", x, m.second.weight) + m.second.bias[:, None]
        return torch.tanh(second.T + m.first(x))
    return torch.tanh(F.linear(x, m.first.weight, m.first.bias) * m.second(x))


def late_gradients(m: Model, x: Tensor) -> Tensor:
    """Depend on a layer for the last samples only."""
    return m.first(x) + torch.relu(x[:, :1]) * torch.tanh(m.second(x))


def positions_first(m: Model, x: Tensor) -> Tensor:
    """Take a sequence as long as the batch, positions first."""
    return torch.tanh(m.first(x).cumsum(0) + m.second(x)).mean(0)


def interleaved(m: Model, x: Tensor) -> Tensor:
    """Take every other sample first, which two are in order already."""
    first, second = torch.tanh(m.first(torch.cat([x[0::2], x[1::2]]))).chunk(2)
    return torch.stack([first, second], 1).flatten(0, 1) * torch.tanh(m.second(x))


def dispatched(m: Model, x: Tensor) -> Tensor:
    """Sort samples by a dense permutation matrix, which leaves the first ones in order."""
    order = torch.cat([torch.arange(4), torch.arange(4, N).flip(0)])[: len(x)]
    P = F.one_hot(order, len(x)).to(x)
    return P.T @ torch.tanh(m.first(P @ x)) + m.first(x)


def cached(m: Model, x: Tensor) -> Tensor:
    """Keep what is made for the first batch where nobody restores it."""
    if "scale" not in m.box:
        m.box["scale"] = torch.ones(len(x), 4, dtype=x.dtype)
    return torch.tanh(m.first(x) * m.box["scale"]) * m.second(x)


def inputs(name: str) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    x[:, 0] = x[:, 0].abs() * torch.where(torch.arange(N) < N // 2, -1, 1)
    return torch.stack([x.roll(i, 0) for i in range(N)]) if name == "positions_first" else x


MODELS = {
    f.__name__: f
    for f in (
        *(fixed_batch_size, late_expert, few_another_way, late_gradients, positions_first),
        *(interleaved, dispatched, cached),
    )
}
OPERATORS = {
    "Hessian": curvlinops.HessianLinearOperator,
    "GGN": curvlinops.GGNLinearOperator,
    "EF": curvlinops.EFLinearOperator,
    "Jacobian": curvlinops.JacobianLinearOperator,
    "diagonal": curvlinops.GGNDiagonalLinearOperator,
    "rows": curvlinops.PerSampleGradientLinearOperator,
    "KFAC": curvlinops.KFACLinearOperator,
    "EKFAC": curvlinops.EKFACLinearOperator,
}


def matrix(kind: str, name: str, **options: Any) -> Tensor:
    """Return an operator as a matrix, for the sum of squares."""
    model = Model(MODELS[name])
    x = inputs(name)
    y = torch.zeros(N, 2, dtype=torch.float64)
    if name == "positions_first":
        options["batch_size_fn"] = lambda X: X.shape[1]
    if kind in ("KFAC", "EKFAC"):
        options["fisher_type"] = "type-2"
    loss = [] if kind == "Jacobian" else [nn.MSELoss(reduction="sum")]
    operator = OPERATORS[kind](model, *loss, list(model.parameters()), [(x, y)], **options)
    return operator @ torch.eye(operator.shape[1], dtype=torch.float64)


def rolled(m: Model, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return h + 0.5 * h.roll(2, 0) + m.second(x)


def centered(m: Model, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x) - m.second(x).mean(0))


@pytest.mark.parametrize("function", [rolled, centered])
@pytest.mark.parametrize("kind", ["rows", "EF", "diagonal", "KFAC", "EKFAC"])
@pytest.mark.parametrize("check", [True, False])
def test_samples_that_interact_are_refused(kind: str, function: Callable, check: bool):
    """At construction, or where samples are told apart."""
    if kind == "EF" and not check:
        return  # adds up whatever the gradients of the batch's terms are
    model = Model(function)
    data = [(inputs(""), torch.zeros(N, 2, dtype=torch.float64))]
    arguments = model, nn.MSELoss(), list(model.parameters()), data
    with pytest.raises(ValueError, match="depends on the other samples"):
        operator = OPERATORS[kind](*arguments, check_deterministic=check)
        operator.norms() if kind == "rows" else operator @ torch.ones(operator.shape[1]).double()


def normalized(m: Model, x: Tensor) -> Tensor:
    return F.batch_norm(m.first(x), None, None, training=True) * m.second(x)


def standardized(m: Model, x: Tensor) -> Tensor:
    h = m.first(x)
    return (h - h.mean(0)) / h.std(0) * m.second(x)


def centered_by_constant(m: Model, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x) * m.second(x))
    return h - h.mean(0).detach()


def rescaled(m: Model, x: Tensor) -> Tensor:
    h = m.first(x) * m.second(x)
    return h / h.abs().max().detach()


def divided(m: Model, x: Tensor) -> Tensor:
    return m.first(x) * m.second(x) / len(x)


@pytest.mark.parametrize(
    "function", [normalized, standardized, centered_by_constant, rescaled, divided]
)
@pytest.mark.parametrize("kind", ["rows", "EF", "diagonal", "KFAC", "EKFAC"])
def test_samples_that_interact_without_a_trace_are_refused(kind: str, function: Callable):
    """One sample alone is no number, or gradients have no part in it."""
    model, x = Model(function), inputs("")
    data = [(x, torch.zeros(N, 2, dtype=torch.float64))]
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS[kind](model, nn.MSELoss(), list(model.parameters()), data)
    curvlinops.HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)


class Pairs(Model):
    """Compares each sample with each other, as contrastive models do."""

    def forward(self, x: Any) -> Tensor:
        return torch.tanh(self.first(x["images"])) @ torch.tanh(self.second(x["texts"])).T


@pytest.mark.parametrize("kind", ["rows", "EF", "diagonal", "KFAC", "EKFAC"])
@pytest.mark.parametrize("size", [2, 3, 5])
def test_outputs_for_pairs_of_samples_are_refused(kind: str, size: int):
    model, loss = Pairs(Model), nn.CrossEntropyLoss()
    x = [torch.randn(size, 3).double() for _ in range(2)]
    data = [({"images": x[0], "texts": x[1]}, torch.arange(size))]
    options = {"batch_size_fn": lambda X: len(X["texts"])}
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS[kind](model, loss, list(model.parameters()), data, **options)
    curvlinops.HessianLinearOperator(model, loss, list(model.parameters()), data, **options)


class Trimmed(Model):
    """Drops what is padding in all samples of a batch."""

    def forward(self, x: Any) -> Tensor:
        length = int((x.abs().sum(-1) > 0).sum(1).max())
        return self.head(torch.tanh(self.first(x[:, :length]))).mT


def test_lengths_that_depend_on_the_longest_sample_are_no_interaction():
    model, lengths = Trimmed(Model), [2, 1, 2, 4, 3]
    x, y = torch.randn(5, 4, 3).double(), torch.ones(5, 4).long()
    for n, length in enumerate(lengths):
        x[n, length:], y[n, length:] = 0, -100
    params, loss = [*model.first.parameters(), *model.head.parameters()], nn.CrossEntropyLoss()
    rows = curvlinops.PerSampleGradientLinearOperator(model, loss, params, [(x, y)]).dense()
    loss.reduction = "sum"
    for n, length in enumerate(lengths):
        value = loss(model(x[n : n + 1]), y[n : n + 1, :length])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, params)])
        torch.testing.assert_close(rows[n], expected)


def late(function: Callable) -> Callable:
    """Return a model in which only the last samples meet a function of a layer."""

    def forward(m: Model, x: Tensor) -> Tensor:
        h, chosen = torch.tanh(m.first(x)), x[:, 0] > 0
        if not chosen.any():
            return h
        return torch.cat([h[~chosen], function(m, x[chosen])])

    return forward


def dense(model: Model, x: Tensor) -> Tensor:
    """Return the Gauss-Newton matrix of half the sum of squares."""
    params = list(model.parameters())
    rows = [torch.autograd.grad(z, params, retain_graph=True) for z in model(x).flatten()]
    J = torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])
    return J.T @ J


class Movable(UserDict):
    """A mapping that moves itself to a device, as those of Hugging Face."""

    def to(self, device: torch.device) -> "Movable":
        return self


class Shared(MutableMapping):
    """A mapping whose copies are views."""

    def __init__(self, **items: Tensor):
        self.items_ = items

    def __getitem__(self, key: str) -> Tensor:
        return self.items_[key]

    def __setitem__(self, key: str, value: Tensor) -> None:
        self.items_[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def to(self, device: torch.device) -> "Shared":
        return self
