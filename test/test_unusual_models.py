"""Gradients of single samples of models that use their parameters in unusual ways."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_layers import check, loop, sequences
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator

pytestmark = pytest.mark.extensive

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list]]] = {}


class Model(nn.Module):
    """A function of an input, and of modules and parameters by name."""

    def __init__(self, function: Callable, **parts: nn.Module | nn.Parameter):
        super().__init__()
        self._function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Tensor:
        return torch.tanh(self._function(self, x)).flatten(1)


def model(inputs: Callable[[], list]) -> Callable:
    """Register a function that builds a model."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODELS[build.__name__] = build, inputs
        return build

    return register


def weight(*shape: int) -> nn.Parameter:
    """Return a random parameter."""
    return nn.Parameter(torch.randn(shape) / 2)


def vectors() -> list[Tensor]:
    """Two batches of unequal size."""
    return [torch.randn(4, 4), torch.randn(3, 4)]


def images() -> list[Tensor]:
    """Two batches of unequal size."""
    return [torch.randn(3, 2, 5, 5), torch.randn(2, 2, 5, 5)]


def tasks() -> list[dict[str, Tensor]]:
    """Two batches with a task for each sample."""
    return [{"x": torch.randn(n, 4), "task": torch.arange(n) % 2} for n in (3, 2)]


def _distances(x: Tensor) -> Tensor:
    place = torch.arange(x.shape[1])
    return place[:, None] - place


def _attend(s: Model, x: Tensor, bias: Callable[[Tensor], Tensor]) -> Tensor:
    q, k, v = s.qkv(x).unflatten(2, (3, 2, 2)).permute(2, 0, 3, 1, 4)
    return (q @ k.mT + bias(_distances(x))).softmax(-1) @ v


@model(sequences)
def bias_from_a_table() -> nn.Module:
    def function(s: Model, x: Tensor) -> Tensor:
        return _attend(s, x, lambda d: s.table[d.flatten() + 5].view(*d.shape, 2).permute(2, 0, 1))

    return Model(function, qkv=nn.Linear(4, 12), table=weight(11, 2))


@model(tasks)
def weights_of_tasks() -> nn.Module:
    def function(s: Model, X: dict[str, Tensor]) -> Tensor:
        return torch.einsum("nd,nde->ne", X["x"], s.weight[X["task"]]) + s.bias[X["task"]]

    return Model(function, weight=weight(2, 4, 3), bias=weight(2, 3))


@model(images)
def parametrizations() -> nn.Module:
    convolution = spectral_norm(nn.Conv2d(2, 3, 3))
    return nn.Sequential(
        convolution, nn.Tanh(), nn.Flatten(), nn.Linear(27, 4), orthogonal(nn.Linear(4, 3))
    )


@model(sequences)
def low_rank_update_with_magnitudes() -> nn.Module:
    def function(s: Model, x: Tensor) -> Tensor:
        full = s.weight + s.left @ s.right
        return F.linear(x, s.size * full / full.norm(dim=1, keepdim=True))

    return Model(
        function, weight=weight(3, 4), left=weight(3, 2), right=weight(2, 4), size=weight(3, 1)
    )


@model(sequences)
def written_in_place() -> nn.Module:
    """PyTorch's linear layer returns a view here, whose node leaves the graph."""

    def function(s: Model, x: Tensor) -> Tensor:
        y = s.a(x)
        y += s.shift
        y.mul_(s.scale)
        z = F.relu(s.b(y), inplace=True)
        tokens = z.new_zeros(len(z), z.shape[1] + 1, 3)
        tokens[:, 0] = s.token
        tokens[:, 1:] = z
        return tokens

    return Model(
        function,
        a=nn.Linear(4, 3),
        shift=weight(3),
        scale=weight(3),
        b=nn.Linear(3, 3),
        token=weight(3),
    )


@model(vectors)
def prototypes() -> nn.Module:
    def function(s: Model, x: Tensor) -> Tensor:
        return s.head(torch.exp(-torch.cdist(x, s.centers).square() * s.width.exp()))

    return Model(function, centers=weight(5, 4), width=weight(5), head=nn.Linear(5, 2))


@model(lambda: [torch.randint(3, (n, 4)) for n in (3, 2)])
def random_field() -> nn.Module:
    def function(s: Model, tags: Tensor) -> Tensor:
        scores = s.emissions(tags)
        total = scores[:, 0] + s.start
        for step in range(1, tags.shape[1]):
            total = torch.logsumexp(total[:, :, None] + s.moves, 1) + scores[:, step]
        path = s.start[tags[:, 0]] + s.moves[tags[:, :-1], tags[:, 1:]].sum(1)
        path = path + scores.gather(2, tags.unsqueeze(2)).sum((1, 2))
        return (total.logsumexp(1) - path).unsqueeze(1)

    return Model(function, emissions=nn.Embedding(3, 3), moves=weight(3, 3), start=weight(3))


@model(sequences)
def position_bias() -> nn.Module:
    """A network of constants, indexed by distances."""

    def function(s: Model, x: Tensor) -> Tensor:
        h = s.embed(x)
        places = torch.arange(x.shape[1])
        distances = torch.linspace(-1.0, 1.0, 2 * x.shape[1] - 1).to(x)
        bias = s.bias(torch.stack([distances, distances.abs()], 1)).view(-1)
        scores = h @ h.mT + bias[places[:, None] - places + x.shape[1] - 1]
        return s.head(scores.softmax(-1) @ h)

    bias = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1, bias=False))
    return Model(function, embed=nn.Linear(4, 3), bias=bias, head=nn.Linear(3, 2))


@model(sequences)
def weighted_averages() -> nn.Module:
    """The first average does not depend on its weight: the gradient is rounding."""

    def function(s: Model, x: Tensor) -> Tensor:
        keys, values = s.keys(x), s.values(x)
        above = below = torch.zeros_like(keys[:, 0])
        out = []
        for key, value in zip(keys.unbind(1), values.unbind(1), strict=True):
            now = (s.first + key).exp()
            out.append((above + now * value) / (below + now))
            above, below = above + key.exp() * value, below + key.exp()
        return torch.stack(out, 1)

    return Model(function, keys=nn.Linear(4, 3), values=nn.Linear(4, 3), first=weight(3))


@pytest.mark.parametrize("name", MODELS)
def test_covered(name: str):
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    check(build(), inputs())


def _vmapped(s: Model, x: Tensor) -> Tensor:
    return torch.func.vmap(s.a)(x) @ s.w[:2]


@torch.enable_grad()
def _inner_steps(s: Model, x: Tensor) -> Tensor:
    out = []
    for one in x:
        energy = (s.a(one) @ s.w[:2]).square().sum()
        step = torch.autograd.grad(energy, (s.a.weight, s.w), create_graph=True)
        out.append(F.linear(one, s.a.weight - step[0], s.a.bias) @ (s.w - step[1])[2:])
    return torch.stack(out)


FALLBACKS: dict[str, Callable] = {"vmap": _vmapped, "inner steps": _inner_steps}


@pytest.mark.parametrize("name", FALLBACKS)
def test_sample_by_sample(name: str):
    torch.manual_seed(0)
    check(Model(FALLBACKS[name], a=nn.Linear(4, 2), w=weight(4, 2)), vectors(), covered=False)


def test_models_that_cannot_be_recorded(caplog: pytest.LogCaptureFixture):
    net = Model(_inner_steps, a=nn.Linear(4, 2), w=weight(4, 2))
    data = [(x, torch.zeros(len(x), 2)) for x in vectors()]
    arguments = net, nn.MSELoss(), list(net.parameters()), data
    gradients = PerSampleGradientLinearOperator(*arguments)
    gradients.norms(), gradients.norms()
    reason = "the model cannot be recorded: it computes gradients itself"
    known = dict.fromkeys(gradients.domain.names, reason)
    assert gradients.fallbacks == known
    assert len(caplog.records) == 1
    assert all(f"'{name}'" in caplog.text for name in gradients.domain.names)
    gradients.gradient_and_loss()
    assert gradients.fallbacks == known
    with pytest.raises(NotImplementedError, match=reason):
        KFACLinearOperator(*arguments).trace()


def _key_bias(s: Model, x: Tensor) -> Tensor:
    return (s.q(x) @ s.k(x).mT).softmax(-1) @ x


def _bias_before_norm(s: Model, x: Tensor) -> Tensor:
    return F.layer_norm(s.q(x) + s.k.bias.sum(), (4,))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("kind", ["key bias", "bias before norm", "attention"])
def test_low_precision(kind: str, dtype: torch.dtype, tolerance: float):
    """Gradients that add up to zero, and rows in an unusual order, are known as such."""
    torch.manual_seed(0)
    if kind == "attention":
        net = Model(
            lambda s, x: s.layer(x, x, x)[0], layer=nn.MultiheadAttention(4, 2, batch_first=True)
        )
    else:
        function = _key_bias if kind == "key bias" else _bias_before_norm
        net = Model(function, q=nn.Linear(4, 4), k=nn.Linear(4, 4))
    net.to(dtype)
    exact = copy.deepcopy(net).double()
    inputs = [x.to(dtype) for x in (torch.randn(3, 5, 4), torch.randn(2, 5, 4))]
    data = [(x, torch.randn(len(x), 20).to(dtype)) for x in inputs]
    loss = nn.MSELoss(reduction="sum")
    operator = PerSampleGradientLinearOperator(net, loss, list(net.parameters()), data)
    double = [(x.double(), y.double()) for x, y in data]
    rows = loop(exact, list(exact.parameters()), double, loss)
    assert float((operator.dense() - rows).norm()) <= tolerance * float(rows.norm())
    assert not operator.fallbacks
