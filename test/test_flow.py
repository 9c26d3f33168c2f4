"""Where samples lie in tensors, as the graph alone shows it, against exact derivatives."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from curvlinops import (
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)
from curvlinops.layers.batch import RecordedBatch
from curvlinops.layers.flow import samples_by_edge
from curvlinops.support.autograd_graph import graph_nodes

pytestmark = pytest.mark.extensive

N = 3


def place(function: Callable[[Tensor], Tensor], x: Tensor) -> int | None:
    """Return where samples lie in the input, if that is proven; and compare with derivatives.

    The function's output has them along the first axis.
    """
    x = x.detach().double().requires_grad_()
    inner = x * 1.0
    y = function(inner)
    assert len(y) == N
    weights = torch.rand_like(y) + 0.5
    found = samples_by_edge(y, set(graph_nodes(y)))[inner.grad_fn, 0]
    if found is None:
        return None
    own = torch.arange(x.numel()).reshape(x.shape) // found % N
    for n in range(N):
        (g,) = torch.autograd.grad((y * weights)[n].sum(), x, retain_graph=True)
        assert not bool(g[own != n].any())
        # values of one sample do not depend on others, either
        other = torch.where(own == n, x, torch.rand_like(x))
        torch.testing.assert_close(function(other)[n], y[n])
    return found


def image(*shape: int) -> Tensor:
    return torch.randn(*(shape or (N, 4, 6, 6)))


def const(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.rand(shape, generator=generator, dtype=torch.float64)


NORMS = torch.zeros(4).double(), torch.ones(4).double()

#: Functions of ``[N, 4, 6, 6]``.
PROVEN = {
    "layers": lambda x: F.relu(F.linear(x, const(2, 6), const(2))),
    "no bias": lambda x: F.linear(x.flatten(1), const(2, 144)),
    "sum": lambda x: x.sum((1, 3)),
    "mean": lambda x: x.mean((-1, -2), keepdim=True),
    "max": lambda x: x.max(1).values,
    "amax": lambda x: x.amax((1, 2)),
    "norm": lambda x: F.normalize(x, dim=1) + x.norm(dim=2, keepdim=True),
    "deviation": lambda x: x.std(1) + x.var(1) + torch.std_mean(x, 1)[1] + x.logsumexp(1),
    "product": lambda x: x.prod(1),
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(1),
    "cumulative": lambda x: x.cumsum(1) + x.cumprod(-1) + x.cummax(2).values,
    "sorted": lambda x: x.sort(1).values + x.topk(6, -1).values,
    "ordered": lambda x: x.flip(1) + x.roll(2, 1) + x.roll((1, 1), (2, 3)),
    "parts": lambda x: x[:, 1] + x[:, 2, -1, :, None] + x[:, ::2, 2:4].sum((1, 2))[:, None],
    "split": lambda x: x.split(3, 2)[1] * x.split([1, 2, 1], 1)[1].sum((1, 2), keepdim=True),
    "unbind": lambda x: torch.stack([part.sin() for part in x.unbind(1)][::-1], 2),
    "chunk": lambda x: F.glu(torch.cat(x.chunk(2, 1)[::-1], -1), 1),
    "selected": lambda x: x.index_select(1, torch.tensor([2, 0, 0])),
    "gathered": lambda x: x.gather(1, torch.zeros(N, 2, 6, 6, dtype=torch.int64)),
    "permuted": lambda x: x.permute(2, 0, 3, 1).exp().permute(1, 0, -1, 2).transpose(-1, 1),
    "rows": lambda x: (x.flatten(0, 2) @ const(6, 2)).unflatten(0, (N, -1)),
    "rows, samples inside": lambda x: (
        F.linear(x.movedim(0, 1).flatten(0, 1), const(5, 6, 6).flatten(1)[:, :6])
        .unflatten(0, (4, N))
        .transpose(0, 1)
    ),
    "heads": lambda x: (
        (x.flatten(0, 1) @ x.flatten(0, 1).mT).softmax(-1).bmm(x.flatten(0, 1)).unflatten(0, (N, 4))
    ),
    "attention": lambda x: F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True),
    "masked attention": lambda x: F.scaled_dot_product_attention(
        x, x, x, torch.ones(6, 6, dtype=torch.bool).tril()
    ),
    "added product": lambda x: torch.baddbmm(x[:, 0], x[:, 1], x[:, 2]),
    "transposed products": lambda x: (const(2, 6) @ x.flatten(1)[:, :6].T).T,
    "einsum": lambda x: torch.einsum("ncij,ckj,ncij->nk", x, const(4, 2, 6), x.sin()),
    "bilinear": lambda x: torch.einsum("nci,ndi->ncd", x[..., 0], x[..., 1]),
    "convolution": lambda x: F.conv2d(x, const(2, 4, 3, 3), const(2), padding=1, stride=2),
    "grouped": lambda x: F.conv2d(x, const(4, 1, 3, 3), groups=4, dilation=2),
    "transposed": lambda x: F.conv_transpose2d(x, const(4, 2, 3, 3), stride=2),
    "pools": lambda x: F.max_pool2d(x, 2) + F.avg_pool2d(x, 2) + F.adaptive_avg_pool2d(x, 3),
    "other pools": lambda x: F.adaptive_max_pool2d(x, 3) + F.adaptive_avg_pool2d(x, 1),
    "flat pools": lambda x: F.max_pool1d(x[:, 0], 2) + F.avg_pool1d(x[:, 1], 2),
    "padded": lambda x: F.pad(F.pad(x, (1, 2), value=3.0), (0, 0, 1, 1)) + 1,
    "other paddings": lambda x: (
        F.pad(x, (1, 1, 2, 0), "reflect") + F.pad(x, (1, 1) * 2, "replicate")
    ),
    "resized": lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, 12, mode="bilinear"),
    "shuffled pixels": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "layer norm": lambda x: F.layer_norm(x, (6, 6), const(6, 6), const(6, 6)),
    "mean squares": lambda x: F.rms_norm(x, (6,), const(6)),
    "group norm": lambda x: F.group_norm(x, 2, const(4), const(4)),
    "batch norm": lambda x: F.batch_norm(x, *NORMS, const(4), const(4)),
    "instance norm": lambda x: F.instance_norm(x, weight=const(4)),
    "slopes": lambda x: F.prelu(x, const(4)),
    "elementwise": lambda x: F.gelu(x) * x.sigmoid() / (1 + x.square()) - x.tanh().abs(),
    "where": lambda x: torch.where(x > 0, x, -x).masked_fill(x > 1, 0.0).clamp(-0.5, 0.5),
    "broadcast": lambda x: x + x.sum((1, 2, 3), keepdim=True).expand(-1, 4, 1, 1),
    "repeated": lambda x: (
        x[:, :1].repeat(1, 4, 2, 1)[:, :, 3:9] * x.repeat_interleave(2, 1)[:, 2:6]
    ),
    "patches": lambda x: (
        F.unfold(x, 2).sum(1)[:, None] + F.fold(F.unfold(x, 2), 6, 2).sum((1, 2))[:, None, :1]
    ),
    "spectrum": lambda x: torch.fft.irfft(torch.fft.rfft(x) * const(4), 6),
    "casts": lambda x: x.float().double().contiguous(memory_format=torch.channels_last).clone(),
    "triangles": lambda x: x.tril() + x.triu(1),
    "interleaved": lambda x: x.reshape(4, N, 6, 6).transpose(0, 1),
    "frames": lambda x: (
        x.unfold(2, 3, 1).cos()
        + x.view(N, -1).unfold(1, 2, 9).sum((1, 2))[:, None, None, None, None]
    ),
    "indexed": lambda x: x[:, [2, 0]] + x[:, :, [1, 3]].mean(2, keepdim=True)[:, :2],
    "indexed twice": lambda x: x[:, [2, 0, 1], [1, 1, 5]] + x[:, 0, torch.eye(6) > 0][:, :1, None],
    "one for each": lambda x: x[torch.arange(N), torch.tensor([3, 0, 1])],
    "two indices": lambda x: x[range(N), [3, 0, 1], [0, 0, 2]],
    "pooled": lambda x: F.adaptive_avg_pool2d(x.contiguous(memory_format=torch.channels_last), 1),
    "in place": lambda x: (2 * x).add_(1).mul_(x).relu_(),
}

#: What moves samples, combines them, or is not known.
UNPROVEN = {
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, 0),
    "flat roll": lambda x: x.roll(1),
    "sort": lambda x: x.sort(0).values,
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: x.softmax(0),
    "mean": lambda x: x - x.mean(0),
    "maximum": lambda x: x * x.amax(0, keepdim=True),
    "selected": lambda x: x[torch.tensor([2, 0, 1])],
    "others": lambda x: x[torch.arange(N).flip(0), torch.tensor([3, 0, 1])],
    "apart": lambda x: x[:, [0, 1, 2], :, [3, 2, 1]],
    "apart, in order": lambda x: x[range(N), :, [3, 2, 1]],
    "masked": lambda x: x[torch.ones(N, dtype=torch.bool)],
    "in rows": lambda x: x[torch.arange(N)[:, None], torch.tensor([0, 1])],
    "selected by index": lambda x: x.index_select(0, torch.tensor([2, 0, 1])),
    "gathered": lambda x: x.gather(0, torch.tensor([2, 0, 1])[:, None, None, None].expand(x.shape)),
    "mixed": lambda x: const(N, N) @ x.flatten(1),
    "mixed by einsum": lambda x: torch.einsum("nm,mcij->nci", const(N, N), x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.permute(2, 3, 0, 1)] * 3).permute(
        2, 3, 0, 1
    ),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "layer norm": lambda x: F.layer_norm(x.movedim(0, -1), (N,)).movedim(-1, 0),
    "convolution": lambda x: F.conv1d(
        x[..., 0].permute(1, 2, 0), const(6, 6, 3), padding=1
    ).movedim(2, 0),
    "filters": lambda x: F.conv2d(x.transpose(0, 1), const(N, N, 1, 1)).transpose(0, 1),
    "pool": lambda x: F.avg_pool1d(x[..., 0].permute(1, 2, 0), 3, 1, 1).movedim(2, 0),
    "padded": lambda x: F.pad(x.movedim(0, -1), (1, -1)).movedim(-1, 0),
    "split": lambda x: torch.cat(x.split([1, 2])[::-1]),
    "slices": lambda x: torch.cat([x[1:], x[:1]]),
    "single ones": lambda x: torch.stack([one.sin() for one in x]),
    "two ways": lambda x: x.flatten(1)[:, :N] + x.flatten(1)[:, :N].T,
    "a part of a tensor in place": lambda x: _written(x.clone()),
}


def _written(x: Tensor) -> Tensor:
    x[:, 1].mul_(2.0)
    return x


@pytest.mark.parametrize("name", PROVEN)
def test_proven(name: str):
    torch.manual_seed(0)
    assert place(PROVEN[name], image()) is not None


@pytest.mark.parametrize("name", UNPROVEN)
def test_not_proven(name: str):
    torch.manual_seed(0)
    assert place(UNPROVEN[name], image()) is None


#: Steps that any tensor can take.
STEPS = [
    lambda x, i, j: x.transpose(i % x.ndim, j % x.ndim),
    lambda x, i, j: x.flatten(i % x.ndim, max(i % x.ndim, j % x.ndim)),
    lambda x, i, j: x.unflatten(i % x.ndim, (2, -1) if j % 2 else (-1, 3)),
    lambda x, i, j: x.reshape(*x.shape[1:], x.shape[0]),
    lambda x, i, j: x.unsqueeze(i % x.ndim),
    lambda x, i, j: x.softmax(i % x.ndim),
    lambda x, i, j: x + x.mean(i % x.ndim, keepdim=True),
    lambda x, i, j: x.flip(i % x.ndim),
    lambda x, i, j: torch.cat([x, x.sin()], i % x.ndim),
    lambda x, i, j: x.narrow(i % x.ndim, 0, max(x.shape[i % x.ndim] // 2, 1)),
    lambda x, i, j: torch.stack([x, x.cos()], i % x.ndim),
    lambda x, i, j: x.select(i % x.ndim, j % x.shape[i % x.ndim]),
    lambda x, i, j: F.linear(x, const(2 + j % 3, x.shape[-1]), const(2 + j % 3)),
    lambda x, i, j: x @ x.mT,
    lambda x, i, j: F.layer_norm(x, x.shape[-1 - i % 2 :]),
    lambda x, i, j: F.avg_pool1d(x, 3, 1, 1),
    lambda x, i, j: x.permute(*torch.arange(x.ndim).roll(1 + i).tolist()),
    lambda x, i, j: x.cumsum(i % x.ndim),
    lambda x, i, j: x.sort(i % x.ndim).values,
    lambda x, i, j: x.amax(i % x.ndim, keepdim=j % 2 == 0),
    lambda x, i, j: x.index_select(i % x.ndim, torch.arange(x.shape[i % x.ndim]).flip(0)),
    lambda x, i, j: x[torch.arange(len(x)), torch.arange(len(x)) % x.shape[1]],
    lambda x, i, j: x.expand(N, *x.shape),
    lambda x, i, j: x.unfold(i % x.ndim, 2, 1),
    lambda x, i, j: F.conv1d(x, const(N, x.shape[1], 2), padding=1),
    lambda x, i, j: F.group_norm(x, x.shape[1]),
    lambda x, i, j: F.scaled_dot_product_attention(x, x, x),
    lambda x, i, j: const(x.shape[-2], x.shape[-2]) @ x,
    lambda x, i, j: torch.fft.irfft(torch.fft.rfft(x, dim=i % x.ndim), dim=i % x.ndim),
]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 5), st.integers(0, 5)), max_size=7
    ),
    st.sampled_from([[N, 4, 6], [6, N, 4], [4, 6, N], [N, N, N], [N, 2, N, 2], [9, 2]]),
)
def test_random_functions(steps: list[tuple[int, int, int]], shape: list[int]):
    """What is proven is true."""
    torch.manual_seed(0)

    def function(x: Tensor) -> Tensor:
        for which, i, j in steps:
            try:
                step = STEPS[which](x, i, j)
            except (RuntimeError, IndexError, ValueError):  # not of these shapes
                continue
            if 0 < step.numel() <= 2000 and step.ndim:
                x = step
        # samples may be anywhere
        axis = next((a for a, length in enumerate(x.shape) if length % N == 0), None)
        if axis is None:
            return torch.cat([x.flatten()] * N)[:N]
        return x.unflatten(axis, (N, -1)).movedim(axis, 0)

    place(function, torch.randn(*shape))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(4, 3, 2, bidirectional=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x.transpose(0, 1))[0].mean(0))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.position, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x + self.position)[:, 0])


class Upward(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv1d(5, 4, 3, padding=1, bias=False),
            nn.GroupNorm(2, 4),
            nn.SiLU(),
            nn.ConvTranspose1d(4, 3, 2, stride=2),
            nn.Flatten(),
            nn.Linear(24, 2),
        )


@pytest.mark.parametrize("build", [Recurrent, Attention, Upward])
def test_common_models_need_no_other_passes(build: type, monkeypatch: pytest.MonkeyPatch):
    """Also with batches of other lengths, and without ``check_deterministic=False``."""

    def detect(*args: object) -> None:
        pytest.fail("not proven")

    torch.manual_seed(0)
    monkeypatch.setattr(RecordedBatch, "detect", detect)
    model, loss = build().double(), nn.MSELoss()
    data = [(torch.randn(n, 5, 4).double(), torch.randn(n, 2).double()) for n in (3, 5, 2)]
    params = list(model.parameters())
    rows = PerSampleGradientLinearOperator(model, loss, params, data).dense()
    expected = []
    for X, y in data:
        for n in range(len(X)):
            grads = torch.autograd.grad(loss(model(X[n : n + 1]), y[n : n + 1]), params)
            expected.append(torch.cat([g.flatten() for g in grads]))
    torch.testing.assert_close(rows, torch.stack(expected))
    GGNDiagonalLinearOperator(model, loss, params, data).diagonal()
    KFACLinearOperator(model, loss, params, data, kfac_approx="reduce").trace()


class Positions(nn.Module):
    """A row of the output for each token, and a table of positions that sees no sample."""

    def __init__(self):
        super().__init__()
        self.token, self.position, self.head = nn.Linear(5, 5), nn.Embedding(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.token(x) + self.position(torch.arange(4))).tanh()).flatten(0, 1)


@pytest.mark.parametrize("cut", [[1, 1], [1, 2], [2, 1], [1, 1, 1]])
@pytest.mark.parametrize("fisher_type", ["type-2", "empirical"])
@pytest.mark.parametrize("approx", ["expand", "reduce"])
def test_tokens_of_one_sample_are_no_samples(cut: list[int], fisher_type: str, approx: str):
    torch.manual_seed(0)
    model, num_samples = Positions().double(), sum(cut)
    X, y = torch.randn(num_samples, 4, 5).double(), torch.randint(3, (num_samples, 4))
    whole = [(X, y.flatten())]
    parts = [(x, t.flatten()) for x, t in zip(X.split(cut), y.split(cut), strict=True)]

    def dense(data: list) -> Tensor:
        params, options = list(model.parameters()), {"fisher_type": fisher_type}
        # else signs are drawn for each batch
        options |= {"kfac_approx": approx, "batch_size_fn": len, "exact": fisher_type == "type-2"}
        K = KFACLinearOperator(model, nn.CrossEntropyLoss(), params, data, **options)
        return K @ torch.eye(K.shape[1]).double()

    torch.testing.assert_close(dense(parts), dense(whole))


class Clipped(nn.Module):
    """Clips the gradients of a batch together, if they are large."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).sin()
        if z.requires_grad:
            z.register_hook(lambda g: g * (3 / g.norm()).clamp(max=1.0))
        return self.second(z)


class Nested(nn.Module):
    """A tensor of tensors in the middle."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        parts = [row.reshape(2, 3) for row in self.first(x)]
        nested = torch.nested.as_nested_tensor(parts, layout=torch.strided)
        return self.second(F.gelu(nested).to_padded_tensor(0.0).reshape(len(x), 6))


@pytest.mark.parametrize("build", [Clipped, Nested])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_no_graph_shows(build: type):
    torch.manual_seed(0)
    model, loss = build().double(), nn.MSELoss(reduction="sum")
    X, y = torch.randn(12, 5).double(), torch.randn(12, 2).double()
    params = list(model.parameters())
    op = PerSampleGradientLinearOperator(model, loss, params, [(X, y)])
    rows = op.dense()
    for n in range(12):
        grads = torch.autograd.grad(loss(model(X[n : n + 1]), y[n : n + 1]), params)
        torch.testing.assert_close(rows[n], torch.cat([g.flatten() for g in grads]))
    assert set(op.fallbacks) == ({"first.weight", "first.bias"} if build is Clipped else set())
