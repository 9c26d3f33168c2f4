"""Models that use their parameters in all ways: per-sample gradients, one sample at a time."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import problems
import pytest
import torch
import torch.nn.functional as F
from contract import CASES, matrix
from models import Using
from problems import Problem
from sample_gradients import (
    bounded,
    check,
    check_factors,
    compare,
    loop,
    rows_in_batches,
    sequences,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from curvlinops import (
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

LOSS = nn.MSELoss(reduction="sum")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def linear(*sizes: int) -> Callable[[], nn.Module]:
    return partial(nn.Linear, *sizes)


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


def series() -> list[dict[str, Tensor]]:
    """Two batches of unequal size."""
    return [{"x": torch.randn(n, 6, 1), "mask": torch.ones(n, 1)} for n in (3, 5)]


#: A function of parts and of an input, the parts, inputs, and whether rules cover all parameters.
MODELS: dict[str, tuple[Callable, dict[str, Any], Callable[[], list], bool]] = {}


def model(inputs: Callable[[], list], covered: bool = True, **parts: Any) -> Callable:
    """Register a function of parts, each of which is built, or a weight of some shape."""

    def register(function: Callable) -> Callable:
        MODELS[function.__name__] = function, parts, inputs, covered
        return function

    return register


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str):
    function, parts, inputs, covered = MODELS[name]
    built = {n: weight(*part) if isinstance(part, tuple) else part() for n, part in parts.items()}
    check(Using(function, **built), inputs(), covered)


@model(tasks, weight=(2, 4, 3), bias=(2, 3))
def weights_of_tasks(s: Using, X: dict[str, Tensor]) -> Tensor:
    return torch.einsum("nd,nde->ne", X["x"], s.weight[X["task"]]) + s.bias[X["task"]]


def indices() -> list[Tensor]:
    """Batches with two indices or with one for each sample."""
    return [torch.tensor([[0, 1], [2, 1], [3, 3]]), torch.tensor([[1], [2]])]


@model(indices, table=(4, 4))
def rows_or_columns_of_a_table(s: Using, ids: Tensor) -> Tensor:
    """One batch looks up rows, the other one columns."""
    return F.embedding(ids, s.table if ids.shape[1] == 2 else s.table.T).sum(1)


@model(
    images,
    first=lambda: spectral_norm(nn.Conv2d(2, 3, 3)),
    second=linear(27, 4),
    third=lambda: orthogonal(nn.Linear(4, 3)),
)
def parametrizations(s: Using, x: Tensor) -> Tensor:
    return s.third(s.second(torch.tanh(s.first(x)).flatten(1)))


@model(sequences, weight=(3, 4), left=(3, 2), right=(2, 4), size=(3, 1))
def low_rank_update_with_magnitudes(s: Using, x: Tensor) -> Tensor:
    full = s.weight + s.left @ s.right
    return F.linear(x, s.size * full / full.norm(dim=1, keepdim=True))


@model(sequences, a=linear(4, 3), shift=(3,), scale=(3,), b=linear(3, 3))
def written_in_place(s: Using, x: Tensor) -> Tensor:
    """PyTorch's linear layer returns a view here, whose node leaves the graph."""
    y = s.a(x)
    y += s.shift
    y.mul_(s.scale)
    z = F.relu(s.b(y), inplace=True)
    tokens = z.new_zeros(len(z), z.shape[1] + 1, 3)
    tokens[:, 0] = 1.0
    tokens[:, 1:] = z
    return tokens


@model(
    sequences,
    embed=linear(4, 3),
    bias=lambda: nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 1, bias=False)),
    head=linear(3, 2),
)
def position_bias(s: Using, x: Tensor) -> Tensor:
    """A network of constants, indexed by distances."""
    h = s.embed(x)
    places = torch.arange(x.shape[1])
    distances = torch.linspace(-1.0, 1.0, 2 * x.shape[1] - 1).to(x)
    bias = s.bias(torch.stack([distances, distances.abs()], 1)).view(-1)
    scores = h @ h.mT + bias[places[:, None] - places + x.shape[1] - 1]
    return s.head(scores.softmax(-1) @ h)


@model(sequences, keys=linear(4, 3), values=linear(4, 3), first=(3,))
def weighted_averages(s: Using, x: Tensor) -> Tensor:
    """The first average does not depend on its weight: the gradient is rounding."""
    keys, values = s.keys(x), s.values(x)
    above = below = torch.zeros_like(keys[:, 0])
    out = []
    for key, value in zip(keys.unbind(1), values.unbind(1), strict=True):
        now = (s.first + key).exp()
        out.append((above + now * value) / (below + now))
        above, below = above + key.exp() * value, below + key.exp()
    return torch.stack(out, 1)


@model(
    sequences, scale=(4,), shift=(1, 5, 4), fused=(6, 4), left=(3, 2), token=(1, 1, 4), low=(4, 1)
)
def bare_parameters(s: Using, x: Tensor) -> Tensor:
    """Used in parts, transposed, and through functions."""
    x = x * s.scale + s.shift[:, : x.shape[1]]
    x = torch.cat([s.token.expand(len(x), -1, -1), x], 1) - torch.exp(s.low).T / 3
    first, second = s.fused.chunk(2)
    h = torch.einsum("ntd,ed->nte", x, first) + x @ second.mT
    h = h @ (s.left @ s.left.T)
    return torch.addmm(h.new_zeros(2), h.reshape(-1, 3), s.left).reshape(len(x), -1)


# --- models of which some gradients take one pass for each sample


def _triangle(s: Using, A: Tensor) -> Tensor:
    A[*torch.tril_indices(3, 3)] = s.p
    return A


def _symmetric(s: Using, A: Tensor) -> Tensor:
    A[*torch.tril_indices(3, 3).flip(0)] = s.p
    return _triangle(s, A)


def _by_rows(s: Using, A: Tensor) -> Tensor:
    A[0] = s.w[0]
    A[1] = 2 * s.w[1]
    A[2, 2] = 1.0
    A[0, 0] = s.p[0] * s.p[1]
    return A


def _overwritten(s: Using, x: Tensor) -> Tensor:
    z = s.first(x).tanh().detach().clone()
    z[:, 0] = s.p[0]
    return z @ s.w


def _written(write: Callable[[Using, Tensor], Tensor]) -> Callable[[Using, Tensor], Tensor]:
    """Multiply with a matrix whose entries are written one after the other."""
    return lambda s, x: s.first(x).tanh() @ write(s, x.new_zeros(3, 3)) + s.w.sum() + s.p.sum()


#: Models that write parameters into tensors.
WRITTEN: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "triangle": _written(_triangle),
    "product": _written(lambda s, A: (L := _triangle(s, A)) @ L.T),
    "symmetric": _written(_symmetric),
    "rows": _written(_by_rows),
    "rows of samples": _overwritten,
}
_PARTS = {"p": (6,), "w": (3, 3), "first": linear(4, 3)}
MODELS |= {
    f"written, {name}": (f, _PARTS, vectors, name != "rows of samples")
    for name, f in WRITTEN.items()
}


@model(vectors, a=linear(4, 2), w=(2, 2))
def transformed(s: Using, x: Tensor) -> Tensor:
    return torch.func.vmap(s.a)(x) @ s.w


@model(series, False, read=linear(1, 4), head=linear(4, 3), decay=(2, 4, 3), scale=(2, 4, 3))
def state_space(s: Using, X: dict[str, Tensor]) -> Tensor:
    """Long convolutions by Fourier transforms of what parameters decay like."""
    x, T = s.read(X["x"]).mT, X["x"].shape[1]
    for decay, scale in zip(s.decay, s.scale, strict=True):
        times = torch.arange(T, dtype=x.dtype)
        kernel = (scale[..., None] * torch.exp(-F.softplus(decay)[..., None] * times)).sum(1)
        spectrum = torch.fft.rfft(x, 2 * T) * torch.fft.rfft(kernel, 2 * T)
        x = x + torch.fft.irfft(spectrum, 2 * T)[..., :T].tanh()
    return s.head(x.mean(-1)) * X["mask"]


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


@model(vectors, covered=False, w=(4,))
def custom_function(s: Using, x: Tensor) -> Tensor:
    return Fourth.apply(x, s.w)


class Stopping(torch.autograd.Function):
    """Returns its input; no gradient passes, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> None:
        return None


@model(vectors, covered=False, first=linear(4, 3), second=linear(4, 3))
def gradients_that_end(s: Using, x: Tensor) -> Tensor:
    return Stopping.apply(s.first(x)) * s.second(x)


# --- complex numbers, sparse and jagged inputs


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x)


#: Functions of a batch of vectors, of two vectors, and of the layer that follows.
COMPLEX: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "product": lambda s, x: torch.fft.ifft(spectrum(x) * s.a).real,
    "sum": lambda s, x: (spectrum(x) + s.a).abs(),
    "quotient": lambda s, x: (spectrum(x) / s.a).real.tanh(),
    "power": lambda s, x: ((spectrum(x) + 9) ** s.a).abs(),
    "rotation": lambda s, x: (torch.exp(1j * s.b) * spectrum(x) * s.a).real,
    "complex": lambda s, x: (torch.complex(s.a, s.b) * spectrum(x)).imag,
    "in place": lambda s, x: spectrum(x).mul_(s.a).abs(),
    "addcmul": lambda s, x: torch.addcmul(spectrum(x), spectrum(x), s.a.to(x) + 0j).abs(),
    "broadcast": lambda s, x: (spectrum(x).unsqueeze(1) * s.a[:, None]).sum(1).abs(),
}
SPARSE: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "a layer": lambda s, x: x,
    "product of weights": lambda s, x: F.linear(x, s.head.weight.T @ s.head.weight, s.a).tanh(),
    "sparse product": lambda s, x: torch.tanh(torch.sparse.mm(x, torch.outer(s.a, s.b))),
}
#: Names of which rules cover all; of others this is not said.
COVERED = {"product", "a layer"}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize(
    "name, layout",
    [
        *product(COMPLEX, [torch.strided]),
        *product(SPARSE, [torch.sparse_coo, torch.sparse_csr]),
    ],
)
def test_complex_and_sparse_numbers(name: str, layout: torch.layout):
    function = (COMPLEX | SPARSE)[name]
    parts = {"a": torch.rand(4) + 0.5, "b": weight(4), "head": nn.Linear(4, 2)}
    net = Using(lambda s, x: bounded(s.head(function(s, x))), **parts).double()
    data = [(x.double(), torch.randn(len(x), 2).double()) for x in vectors()]
    if layout is not torch.strided:
        data = [(x * (x > 0.2), y) for x, y in data]
    rows = loop(net, list(net.parameters()), data, LOSS)
    if layout is not torch.strided:
        data = [(x.to_sparse(layout=layout), y) for x, y in data]
    compare(net, data, rows, True if name in COVERED else None)
    check_factors(net, data, rows)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_sparse_adjacency(layout: torch.layout):
    net = Using(
        lambda s, X: s.head(torch.tanh(X[1] @ s.inner(X[0]))),
        inner=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    ).double()
    features, y = (torch.randn(6, k).double() for k in (4, 2))
    adjacency = ((torch.rand(6, 6) < 0.4).double() + torch.eye(6)) / 3
    rows = rows_in_batches(net, [((features, adjacency), y)], LOSS)
    if layout is not torch.strided:
        adjacency = adjacency.to_sparse(layout=layout)
    data = [((features, adjacency), y)]
    compare(net, data, rows, covered=None)
    check_factors(net, data, rows)


def summed(jagged: bool, attends: bool) -> nn.Module:
    """Return a sum over sequences of several lengths, of which X has the numbers that count."""

    def attention(x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = x.unsqueeze(2).transpose(1, 2)
        return F.scaled_dot_product_attention(x, x, x, mask).transpose(1, 2).squeeze(2)

    def function(s: Using, X: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = X
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        if jagged:
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            nested = s.inner(torch.nested.nested_tensor_from_jagged(x[valid], offsets))
            nested = attention(nested) if attends else nested.tanh()
            return s.head(torch.nested.to_padded_tensor(nested, 0.0).sum(1))
        x = s.inner(x)
        x = attention(x, valid[:, None, None]) if attends else x.tanh()
        return s.head((x * valid.unsqueeze(-1)).sum(1))

    torch.manual_seed(0)
    return Using(function, inner=nn.Linear(2, 3), head=nn.Linear(3, 2)).double()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize(
    "case, attends",
    [
        *product(["hessian", "ggn", "fisher", "gradients", "ggn-diagonal"], [False]),
        *product(["gradients", "fisher", "ggn-diagonal"], [True]),  # others lack derivatives
    ],
)
def test_jagged_tensors(case: str, attends: bool):
    torch.manual_seed(1)
    X, y = (torch.randn(6, 4, 2).double(), torch.randint(1, 5, (6,))), torch.randn(6, 2).double()
    nets = summed(True, attends), summed(False, attends)
    p, plain = (Problem(net, nn.MSELoss(), list(net.parameters()), [(X, y)], True) for net in nets)
    found, expected = matrix(CASES[case].build(p)), CASES[case].dense(plain)
    torch.testing.assert_close(found, expected)


# --- samples


def test_models_that_loop_over_samples(caplog: pytest.LogCaptureFixture):
    p = problems.make("inner-steps")
    gradients = CASES["gradients"].build(p)
    gradients.norms(), gradients.norms()
    reason = "its gradients could not be assigned to samples"
    known = dict.fromkeys(gradients.domain.names, reason)
    assert gradients.fallbacks == known
    assert len(caplog.records) == 1
    assert all(f"'{name}'" in caplog.text for name in gradients.domain.names)
    gradients.gradient_and_loss()
    assert gradients.fallbacks == known
    with pytest.raises(NotImplementedError, match="not known to which samples"):
        KFACLinearOperator(p.model, p.loss, p.params, p.data).trace()


def test_batches_that_cannot_be_cut(caplog: pytest.LogCaptureFixture):
    """Samples of other batches are still evaluated alone."""
    sizes: list[int] = []

    def solve(s: Using, X: dict[str, Tensor]) -> Tensor:
        """Solve equations, which has no rule; what samples share is as long as some batches."""
        sizes.append(len(X["x"]))
        shared = X["shared"].sum() / 4
        return torch.linalg.solve(s.weight + 3 * torch.eye(3), X["x"].T).T * shared

    net, data = Using(solve, weight=weight(3, 3)).double(), []
    for n in (3, 4, 3):
        X = {"x": torch.randn(n, 3).double(), "shared": torch.arange(4.0).double()}
        data.append((X, torch.randn(n, 3).double()))
    rows = rows_in_batches(net, data, LOSS)
    options = {"batch_size_fn": lambda X: len(X["x"]), "check_deterministic": False}
    arguments = net, LOSS, list(net.parameters()), data
    operator = PerSampleGradientLinearOperator(*arguments, **options)
    for _ in range(2):
        sizes.clear()
        torch.testing.assert_close(operator.dense(), rows)
        torch.testing.assert_close(operator.norms(), rows.norm(dim=1))
    assert sizes.count(1) >= 2
    [warning] = [r.message for r in caplog.records if "quadratic" in r.message]
    assert "The samples of batch 1 cannot be evaluated alone (" in warning


# --- scalars that all samples share


def scaled(entries: int) -> nn.Module:
    """One number scales all samples; its gradient may look like a multiple of any one's."""
    parts = {"a": nn.Linear(5, 4), "h": nn.Linear(4, 3), "t": torch.full((entries,), 0.7)}
    scale = nn.Buffer(torch.full((entries,), 1.5))
    return Using(lambda s, x: s.h(torch.tanh(s.a(x)) * (s.scale * s.t)), scale=scale, **parts)


DTYPES = {torch.float64: 1e-8, torch.float32: 1e-3}


@pytest.mark.parametrize("entries", [1, 4])
@pytest.mark.parametrize("sizes", [(5, 2), (1, 4, 1, 3), (16, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixtures_of_samples_are_not_taken_for_one(
    dtype: torch.dtype, sizes: tuple[int, ...], entries: int
):
    """By chance, some of these nets make a mixture that is near one sample's weight."""
    loss = nn.CrossEntropyLoss()
    for seed in range(8):
        torch.manual_seed(seed)
        net = scaled(entries).to(dtype)
        data = [(torch.randn(n, 5, dtype=dtype), torch.randint(3, (n,))) for n in sizes]
        rows = loop(net, [net.t], data, loss)
        found = PerSampleGradientLinearOperator(net, loss, [net.t], data).dense()
        assert (found - rows).norm() <= DTYPES[dtype] * rows.norm(), seed
