"""Models that use their parameters in all ways: per-sample gradients, one sample at a time."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from contract import CASES, matrix
from models import Using
from problems import Problem
from sample_gradients import check, check_factors, compare, loop, rows_in_batches, sequences
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

#: Functions that build a model and inputs, and whether rules cover all parameters.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], list], bool | None]] = {}


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


@model(sequences)
def bare_parameters() -> nn.Module:
    """Used in parts, transposed, and through functions."""

    def function(s: Model, x: Tensor) -> Tensor:
        x = x * s.scale + s.shift[:, : x.shape[1]]
        x = torch.cat([s.token.expand(len(x), -1, -1), x], 1) - torch.exp(s.low).T / 3
        first, second = s.fused.chunk(2)
        h = torch.einsum("ntd,ed->nte", x, first) + x @ second.mT
        h = h @ (s.left @ s.left.T)
        return torch.addmm(h.new_zeros(2), h.reshape(-1, 3), s.left).reshape(len(x), -1)

    return Model(
        function,
        scale=weight(4),
        shift=weight(1, 5, 4),
        fused=weight(6, 4),
        left=weight(3, 2),
        token=weight(1, 1, 4),
        low=weight(4, 1),
    )


@model(vectors)
def steps_of_learned_length() -> nn.Module:
    """Euler's method for a differential equation."""

    def function(s: Model, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + s.step * torch.tanh(s.rate(x))
        return x

    return Model(function, rate=nn.Linear(4, 4), step=torch.tensor(0.3))


# --- complex numbers


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.fft(x)


#: Functions of a batch of vectors and of two vectors; whether rules cover them is said of one.
COMPLEX: dict[str, Callable[[Model, Tensor], Tensor]] = {
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


def with_head(function: Callable[[Model, Tensor], Tensor]) -> nn.Module:
    """Return a function of two vectors, and a linear layer."""
    parts = {"a": torch.rand(4) + 0.5, "b": weight(4), "head": nn.Linear(4, 2)}
    return Model(lambda s, x: s.head(function(s, x)), **parts)


MODELS |= {
    f"complex {name}": (
        lambda function=function: with_head(function),
        vectors,
        True if name == "product" else None,
    )
    for name, function in COMPLEX.items()
}


# --- models of which some gradients take one pass for each sample


def _triangle(s: Model, A: Tensor) -> Tensor:
    A[*torch.tril_indices(3, 3)] = s.p
    return A


def _symmetric(s: Model, A: Tensor) -> Tensor:
    A[*torch.tril_indices(3, 3).flip(0)] = s.p
    return _triangle(s, A)


def _by_rows(s: Model, A: Tensor) -> Tensor:
    A[0] = s.w[0]
    A[1] = 2 * s.w[1]
    A[2, 2] = 1.0
    A[0, 0] = s.p[0] * s.p[1]
    return A


def _overwritten(s: Model, x: Tensor) -> Tensor:
    z = s.first(x).tanh().detach().clone()
    z[:, 0] = s.p[0]
    return z @ s.w


def _written(write: Callable[[Model, Tensor], Tensor]) -> Callable[[Model, Tensor], Tensor]:
    """Multiply with a matrix whose entries are written one after the other."""
    return lambda s, x: s.first(x).tanh() @ write(s, x.new_zeros(3, 3)) + s.w.sum() + s.p.sum()


#: Models that write parameters into tensors.
WRITTEN: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "triangle": _written(_triangle),
    "product": _written(lambda s, A: (L := _triangle(s, A)) @ L.T),
    "symmetric": _written(_symmetric),
    "rows": _written(_by_rows),
    "rows of samples": _overwritten,
}
MODELS |= {
    f"written, {name}": (
        lambda function=function: Model(
            function, p=torch.randn(6), w=torch.randn(3, 3), first=nn.Linear(4, 3)
        ),
        vectors,
        False,
    )
    for name, function in WRITTEN.items()
}


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


@pytest.mark.parametrize("name", COMPLEX)
def test_factors_of_complex_functions(name: str):
    torch.manual_seed(0)
    net, x = with_head(COMPLEX[name]).double(), torch.randn(6, 4).double()
    data = [(x, torch.randn(6, 2).double())]
    rows = loop(net, list(net.parameters()), data, nn.MSELoss(reduction="sum"))
    check_factors(net, data, rows)


# --- sparse and jagged inputs

SPARSE: dict[str, tuple[Callable[[], nn.Module], bool | None]] = {
    "a layer": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)),
        True,
    ),
    "product of weights": (
        lambda: with_head(
            lambda s, x: torch.tanh(F.linear(x, s.head.weight.T @ s.head.weight, s.a))
        ),
        None,
    ),
    "sparse product": (
        lambda: with_head(lambda s, x: torch.tanh(torch.sparse.mm(x, torch.outer(s.a, s.b)))),
        None,
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_inputs(name: str, layout: torch.layout):
    torch.manual_seed(0)
    build, covered = SPARSE[name]
    net, x, y = build().double(), torch.randn(6, 4).double(), torch.randn(6, 2).double()
    x = x * (x > 0.2)
    rows = loop(net, list(net.parameters()), [(x, y)], nn.MSELoss(reduction="sum"))
    data = [(x.to_sparse(layout=layout), y)]
    compare(net, data, rows, covered)
    check_factors(net, data, rows)


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo, torch.sparse_csr])
def test_sparse_adjacency(layout: torch.layout):
    torch.manual_seed(0)
    net = Using(
        lambda s, X: s.head(torch.tanh(X[1] @ s.inner(X[0]))),
        inner=nn.Linear(4, 3),
        head=nn.Linear(3, 2),
    ).double()
    features, y = (torch.randn(6, k).double() for k in (4, 2))
    adjacency = ((torch.rand(6, 6) < 0.4).double() + torch.eye(6)) / 3
    rows = rows_in_batches(net, [((features, adjacency), y)], nn.MSELoss(reduction="sum"))
    if layout is not torch.strided:
        adjacency = adjacency.to_sparse(layout=layout)
    data = [((features, adjacency), y)]
    compare(net, data, rows, covered=None)
    check_factors(net, data, rows)


def summed(jagged: bool) -> nn.Module:
    """Return a sum over sequences of several lengths, of which X has the numbers that count."""

    def function(s: Using, X: tuple[Tensor, Tensor]) -> Tensor:
        x, lengths = X
        valid = torch.arange(x.shape[1]) < lengths[:, None]
        if jagged:
            offsets = F.pad(lengths.cumsum(0), (1, 0))
            nested = torch.nested.nested_tensor_from_jagged(x[valid], offsets)
            return s.head(torch.nested.to_padded_tensor(s.inner(nested).tanh(), 0.0).sum(1))
        return s.head((s.inner(x).tanh() * valid.unsqueeze(-1)).sum(1))

    torch.manual_seed(0)
    return Using(function, inner=nn.Linear(2, 3), head=nn.Linear(3, 2)).double()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("case", ["hessian", "ggn", "fisher", "gradients", "ggn-diagonal"])
def test_jagged_tensors(case: str):
    torch.manual_seed(1)
    X, y = (torch.randn(6, 4, 2).double(), torch.randint(1, 5, (6,))), torch.randn(6, 2).double()
    found, expected = (
        matrix(
            CASES[case].build(Problem(net, nn.MSELoss(), list(net.parameters()), [(X, y)], True))
        )
        for net in (summed(jagged=True), summed(jagged=False))
    )
    torch.testing.assert_close(found, expected)


# --- samples


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


# --- scalars that all samples share


class Scaled(nn.Module):
    """One number scales all samples; its gradient may look like a multiple of any one's."""

    def __init__(self, entries: int):
        super().__init__()
        self.a, self.h = nn.Linear(5, 4), nn.Linear(4, 3)
        self.t = nn.Parameter(torch.full((entries,), 0.7))
        self.register_buffer("scale", torch.full((entries,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.a(x)) * (self.scale * self.t))


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
        net = Scaled(entries).to(dtype)
        data = [(torch.randn(n, 5, dtype=dtype), torch.randint(3, (n,))) for n in sizes]
        rows = loop(net, [net.t], data, loss)
        found = PerSampleGradientLinearOperator(net, loss, [net.t], data).dense()
        assert (found - rows).norm() <= DTYPES[dtype] * rows.norm(), seed


def test_all_quantities_of_shared_parameters():
    loss = nn.CrossEntropyLoss()
    for seed in (3, 17):
        torch.manual_seed(seed)
        net = Scaled(1).double()
        data = [(torch.randn(n, 5).double(), torch.randint(3, (n,))) for n in (5, 2)]
        arguments = (net, loss, [net.t], data)
        ggn = (GGNLinearOperator(*arguments) @ torch.ones(1).double())[0]
        exact = {"fisher_type": "type-2", "fallback": "dense"}
        for found in (
            GGNDiagonalLinearOperator(*arguments).trace(),
            KFACLinearOperator(*arguments, **exact).trace(),
            EKFACLinearOperator(*arguments, **exact).trace(),
        ):
            torch.testing.assert_close(found, ggn, rtol=1e-8, atol=0.0)
        J = JacobianLinearOperator(net, [net.t], data)
        dense = J @ torch.eye(1).double()
        torch.testing.assert_close(J.gram(), dense @ dense.T, rtol=1e-8, atol=1e-12)
