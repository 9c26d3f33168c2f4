"""Gradients of single samples of models that use their parameters in unusual ways."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from models import Using
from sample_gradients import check, loop, rows_in_batches, sequences
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator

pytestmark = pytest.mark.extensive

#: Functions that build a model and inputs, and whether rules cover all parameters.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list], bool]] = {}


class Model(Using):
    """With bounded outputs, flattened to ``[N, *]``."""

    def forward(self, x: Any) -> Tensor:
        return torch.tanh(super().forward(x)).flatten(1)


def model(inputs: Callable[[], list], covered: bool = True) -> Callable:
    """Register a function that builds a model."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        MODELS[build.__name__] = build, inputs, covered
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
        tokens[:, 0] = 1.0
        tokens[:, 1:] = z
        return tokens

    return Model(
        function,
        a=nn.Linear(4, 3),
        shift=weight(3),
        scale=weight(3),
        b=nn.Linear(3, 3),
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


# --- models of which some gradients take one pass for each sample


@model(vectors, covered=False)
def transformed() -> nn.Module:
    def function(s: Model, x: Tensor) -> Tensor:
        return torch.func.vmap(s.a)(x) @ s.w[:2]

    return Model(function, a=nn.Linear(4, 2), w=weight(4, 2))


@torch.enable_grad()
def _inner_steps(s: Model, x: Tensor) -> Tensor:
    out = []
    for one in x:
        energy = (s.a(one) @ s.w[:2]).square().sum()
        step = torch.autograd.grad(energy, (s.a.weight, s.w), create_graph=True)
        out.append(F.linear(one, s.a.weight - step[0], s.a.bias) @ (s.w - step[1])[2:])
    return torch.stack(out)


@model(vectors, covered=False)
def inner_steps() -> nn.Module:
    return Model(_inner_steps, a=nn.Linear(4, 2), w=weight(4, 2))


def _state_space(s: Model, x: Tensor) -> Tensor:
    """Long convolutions by Fourier transforms of what parameters decay like."""
    x, T = s.read(x).mT, x.shape[1]
    for decay, scale in zip(s.decay, s.scale, strict=True):
        times = torch.arange(T, dtype=x.dtype)
        kernel = (scale[..., None] * torch.exp(-F.softplus(decay)[..., None] * times)).sum(1)
        spectrum = torch.fft.rfft(x, 2 * T) * torch.fft.rfft(kernel, 2 * T)
        x = x + torch.fft.irfft(spectrum, 2 * T)[..., :T].tanh()
    return s.head(x.mean(-1))


@model(lambda: [torch.randn(n, 6, 1) for n in (3, 5)], covered=False)
def state_space() -> nn.Module:
    parts = {"decay": weight(2, 4, 3), "scale": weight(2, 4, 3)}
    return Model(_state_space, read=nn.Linear(1, 4), head=nn.Linear(4, 3), **parts)


@model(lambda: [{"x": torch.randn(n, 6, 1), "mask": torch.ones(n, 1)} for n in (3, 5)], False)
def state_space_of_dictionaries() -> nn.Module:
    inner = state_space()
    return Model(lambda s, X: s.inner(X["x"]) * X["mask"], inner=inner)


@torch.enable_grad()
def _forces(s: Model, x: Tensor) -> Tensor:
    """An energy and its derivatives."""
    x = x.detach().requires_grad_()
    energy = s.energy(x)
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    return torch.cat([energy, -slope], 1)


@model(vectors, covered=False)
def forces() -> nn.Module:
    return Model(_forces, energy=nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)))


class Fourth(torch.autograd.Function):
    """Multiplies by the fourth power of a weight; has no ``vmap``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.pow(4)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g * weight.pow(4), 4 * weight.pow(3) * (g * x).sum(0)


@model(vectors, covered=False)
def custom_function() -> nn.Module:
    return Model(lambda s, x: Fourth.apply(x, s.w), w=weight(4))


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str):
    torch.manual_seed(0)
    build, inputs, covered = MODELS[name]
    check(build(), inputs(), covered)


def test_some_samples_without_rules():
    torch.manual_seed(0)
    net = state_space().double()
    data = [(torch.randn(n, 6, 1).double(), torch.randn(n, 3).double()) for n in (3, 5)]
    arguments = net, nn.MSELoss(), list(net.parameters()), data
    rows = PerSampleGradientLinearOperator(*arguments).dense()
    some = PerSampleGradientLinearOperator(*arguments, subsampling=[6, 1, 4])
    torch.testing.assert_close(some.dense(), rows[[6, 1, 4]])


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


class Inverse(nn.Module):
    """Solves equations, which has no rule; what samples share is as long as some batches."""

    sizes: ClassVar[list[int]] = []  # of all calls

    def __init__(self):
        super().__init__()
        self.weight = weight(3, 3)

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        x = X["x"]
        Inverse.sizes.append(len(x))
        shared = X["shared"].sum() / 4
        return torch.linalg.solve(self.weight + 3 * torch.eye(3), x.T).T * shared


def test_batches_that_cannot_be_cut(caplog: pytest.LogCaptureFixture):
    """Samples of other batches are still evaluated alone."""
    torch.manual_seed(0)
    net = Inverse().double()
    data = []
    for n in (3, 4, 3):
        X = {"x": torch.randn(n, 3).double(), "shared": torch.arange(4.0).double()}
        data.append((X, torch.randn(n, 3).double()))
    params, loss = list(net.parameters()), nn.MSELoss(reduction="sum")
    rows = rows_in_batches(net, data, loss)
    options = {"batch_size_fn": lambda X: len(X["x"]), "check_deterministic": False}
    operator = PerSampleGradientLinearOperator(net, loss, params, data, **options)
    for _ in range(2):
        Inverse.sizes.clear()
        torch.testing.assert_close(operator.dense(), rows)
        torch.testing.assert_close(operator.norms(), rows.norm(dim=1))
    assert Inverse.sizes.count(1) >= 2
    [warning] = [r.message for r in caplog.records if "quadratic" in r.message]
    assert "The samples of batch 1 cannot be evaluated alone (" in warning
