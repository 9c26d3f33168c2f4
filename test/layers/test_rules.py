"""Rules of all layers with all their options, against one sample at a time."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import resnet, unet, vit
from sample_gradients import check, images, loop, rows_in_batches, sequences
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
)
from curvlinops import PerSampleGradientLinearOperator as PerSampleGradients


class Wrapped(nn.Module):
    """A layer's output, flattened to ``[N, *]``."""

    def __init__(self, layer: nn.Module, forward: Callable[[nn.Module, Any], Tensor] | None = None):
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, X: Any) -> Tensor:
        out = self.layer(X) if self._forward is None else self._forward(self.layer, X)
        return torch.tanh(out).flatten(1)


@settings(max_examples=40, deadline=None)
@given(
    dims=st.integers(1, 3),
    transposed=st.booleans(),
    groups=st.sampled_from([1, 2, 4]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    extra=st.integers(0, 1),
    mode=st.sampled_from(["zeros", "circular", "reflect", "replicate"]),
    bias=st.booleans(),
)
def test_convolutions(
    dims, transposed, groups, kernel, stride, padding, dilation, extra, mode, bias
):
    torch.manual_seed(0)
    options = {"stride": stride, "padding": padding, "dilation": dilation, "bias": bias}
    if transposed:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        options["output_padding"] = min(extra, max(stride, dilation) - 1)
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        options["padding_mode"] = mode
    layer = kind(4, 4, kernel, groups=groups, **options)
    length = 4 if dims == 3 else 5
    try:
        empty = 0 in layer(images(dims, 4, length)[0]).shape
    except RuntimeError:  # some kernels refuse outputs of no size
        return
    if empty:
        return
    check(Wrapped(layer), images(dims, 4, length))


class Frames(nn.Module):
    """A convolution of each frame of videos ``[N, T, C, H, W]``."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(0, 1)).unflatten(0, x.shape[:2])


@pytest.mark.parametrize("filters", [2, 60], ids=["groups", "patches"])
def test_images_of_a_sample(filters: int):
    """Few filters and many filters are computed in different ways."""
    torch.manual_seed(0)
    layer = nn.Conv2d(4, filters, 3, stride=2, padding=(1, 0), dilation=(1, 2), groups=2)
    check(Wrapped(Frames(layer)), [torch.randn(n, 3, 4, 9, 9) for n in (2, 3)])


@pytest.mark.parametrize("groups, filters", [(1, 4), (2, 4), (1, 40)])
def test_one_convolution_of_two_images(groups: int, filters: int):
    """The images have different sizes."""
    torch.manual_seed(0)

    def both(layer: nn.Module, X: Tensor) -> Tensor:
        return layer(X).sum((2, 3)) + layer(X[..., ::2, 1:]).tanh().sum((2, 3))

    layer = nn.Conv2d(4, filters, 3, padding=1, groups=groups)
    check(Wrapped(layer, both), [torch.randn(n, 4, 6, 6) for n in (4, 2)])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("kernel, dilation", [(2, 1), (3, 2), (4, 1)])
def test_same_padding(kernel: int, dilation: int):
    layer = nn.Conv2d(2, 3, kernel, padding="same", dilation=dilation)
    check(Wrapped(layer), images(2, 2))


def _first(layer: nn.Module, X: Any) -> Tensor:
    return layer(X)[0]


def _time_first(layer: nn.Module, X: Tensor) -> Tensor:
    return layer(X.transpose(0, 1))[0].transpose(0, 1)


def _self_attention(layer: nn.Module, X: Tensor) -> Tensor:
    return layer(X, X, X)[0]


def _time_first_attention(layer: nn.Module, X: Tensor) -> Tensor:
    X = X.transpose(0, 1)
    return layer(X, X, X)[0].transpose(0, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable | None, Callable[[], list]]] = {
    "linear": (lambda: nn.Linear(4, 3), None, sequences),
    "linear, time first": (
        lambda: nn.Linear(4, 3),
        lambda layer, X: layer(X.transpose(0, 1)).transpose(0, 1),
        sequences,
    ),
    "linear twice": (lambda: nn.Linear(4, 4), lambda f, X: f(torch.tanh(f(X))), sequences),
    "bilinear": (
        lambda: nn.Bilinear(4, 2, 3),
        lambda layer, X: layer(X, X[..., :2]),
        sequences,
    ),
    "layer norm": (lambda: nn.LayerNorm(4), None, sequences),
    "rms norm": (lambda: nn.RMSNorm(4), None, sequences),
    "group norm": (lambda: nn.GroupNorm(2, 4), None, lambda: images(2, 4)),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), None, lambda: images(2, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(4), None, lambda: images(2, 4)),
    "batch norm of vectors": (
        lambda: nn.BatchNorm1d(4),
        None,
        lambda: [torch.randn(3, 4), torch.randn(2, 4)],
    ),
    "PReLU": (lambda: nn.PReLU(), None, lambda: images(2, 4)),
    "PReLU of channels": (lambda: nn.PReLU(4), None, lambda: images(2, 4)),
    "embedding": (
        lambda: nn.Embedding(7, 4, padding_idx=2),
        None,
        lambda: [torch.randint(7, (3, 3)), torch.randint(7, (2, 5))],
    ),
    "embedding bag": (
        lambda: nn.EmbeddingBag(7, 4, mode="mean", padding_idx=1),
        None,
        lambda: [torch.randint(7, (3, 3)), torch.randint(7, (2, 5))],
    ),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True),
        _self_attention,
        sequences,
    ),
    "attention, time first": (
        lambda: nn.MultiheadAttention(4, 2),
        _time_first_attention,
        sequences,
    ),
    "attention with added key and value": (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True),
        _self_attention,
        sequences,
    ),
    "transformer encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        None,
        sequences,
    ),
    "transformer decoder": (
        lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True),
        lambda layer, X: layer(X, X.flip(1)),
        sequences,
    ),
    "RNN cell": (lambda: nn.RNNCell(4, 3), lambda f, X: f(X[:, 0], f(X[:, 1])), sequences),
    "GRU cell": (lambda: nn.GRUCell(4, 3), lambda f, X: f(X[:, 0], f(X[:, 1])), sequences),
    "LSTM cell": (
        lambda: nn.LSTMCell(4, 3),
        lambda layer, X: layer(X[:, 0], layer(X[:, 1]))[0],
        sequences,
    ),
} | {
    f"{kind.__name__}, {layers} layers, bidirectional={both}, batch_first={first}": (
        lambda kind=kind, layers=layers, both=both, first=first: kind(
            4, 3, layers, bidirectional=both, batch_first=first
        ),
        _first if first else _time_first,
        sequences,
    )
    for kind in (nn.RNN, nn.LSTM, nn.GRU)
    for layers, both, first in ((1, False, True), (2, True, False))
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str):
    torch.manual_seed(0)
    build, forward, inputs = LAYERS[name]
    layer = build()
    with torch.no_grad():  # norms begin with ones and zeros
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    check(Wrapped(layer, forward), inputs())


class Call(nn.Module):
    """A function of an input and of parameters.

    Args:
        function: Names its parameters by its arguments.
        *shapes: Their shapes.
    """

    def __init__(self, function: Callable, *shapes: tuple[int, ...]):
        super().__init__()
        self.function = function
        names = list(inspect.signature(function).parameters)[1:]
        for name, shape in zip(names, shapes, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, X: Tensor) -> Tensor:
        out = torch.tanh(self.function(X, *self._parameters.values()))
        return out.flatten(1) if out.ndim > 1 else out.unsqueeze(1)


def vectors() -> list[Tensor]:
    """Two batches of unequal size."""
    return [torch.randn(3, 4), torch.randn(2, 4)]


def indices() -> list[Tensor]:
    """Batches of indices below five."""
    return [torch.randint(5, (3, 4)), torch.randint(5, (2, 6))]


PLACES = torch.tensor([0, 2, 1, 2])


def _assigned(x: Tensor, weight: Tensor) -> Tensor:
    x = x.clone()
    x[..., 1:3] -= weight
    return x


#: Functions of a batch of sequences and of vectors, which are parameters.
ELEMENTWISE: dict[str, Callable] = {
    "torch.mul": lambda x, w: x * w,
    "torch.add": lambda x, w: torch.add(x, w, alpha=2),
    "torch.sub": lambda x, w: torch.sub(w, x, alpha=3),
    "torch.div": lambda x, w: torch.true_divide(x, w),
    "torch.pow": lambda x, w: x.abs() ** w,
    "torch.pow, base": lambda x, w: w.abs() ** x,
    "torch.float_power": lambda x, w: x.abs().float_power(w),
    "torch.maximum": lambda x, w: torch.max(x, w),
    "torch.minimum": lambda x, w: torch.minimum(x, w),
    "torch.fmax": lambda x, w: torch.fmax(x, w),
    "torch.fmin": lambda x, w: x.fmin(w),
    "torch.clamp": lambda x, low, high: x.clamp(low, max=high[:1]),
    "torch.clamp_min": lambda x, low: torch.clamp_min(x, low),
    "torch.clamp_max": lambda x, high: x.clamp_max(high),
    "torch.where": lambda x, yes, no: torch.where(x > 0, yes, no[:1]),
    "torch.masked_fill": lambda x, w: x.masked_fill(x > 0, w[0]),
    "torch.lerp": lambda x, start, w: torch.lerp(torch.lerp(start, x, 0.3), x.flip(1), w),
    "torch.lerp, in place": lambda x, w: x.clone().lerp_(x.exp(), w),
    "torch.addcmul": lambda x, w, f: torch.addcmul(torch.addcmul(w, x, x, value=2), x, f),
    "torch.addcdiv": lambda x, w: torch.addcdiv(x, w, x.exp()),
    "torch.atan2": lambda x, w: torch.atan2(w, x),
    "torch.hypot": lambda x, w: torch.hypot(w, x),
    "torch.xlogy": lambda x, w: torch.xlogy(x, w.abs()),
    "torch.xlog1py": lambda x, w: torch.special.xlog1py(x, w.abs()),
    "torch.logaddexp": lambda x, w: torch.logaddexp(x, w),
    "torch.logaddexp2": lambda x, w: x.logaddexp2(w),
    "torch.remainder": lambda x, w: torch.remainder(x, w),
    "torch.fmod": lambda x, w: torch.fmod(3 * x, w),
    "torch.copysign": lambda x, w: torch.copysign(w, x),
    "torch.ldexp": lambda x, w: torch.ldexp(x, w),
}
#: Functions of sequences, ``[N, T, 4]``, and of parameters of the given shapes.
SEQUENCES: dict[str, tuple] = {
    "torch.sub, into a part": (_assigned, (2,)),
    "torch.cosine_similarity": (
        lambda x, weight: F.cosine_similarity(x[:, :, None], weight, dim=-1),
        (3, 4),
    ),
    "torch.cdist": (lambda x, weight: torch.cdist(x, weight), (3, 4)),
    "Tensor.expand": (lambda x, token: torch.cat([token.expand(len(x), 1, -1), x], 1), (4,)),
    "Tensor.expand_as": (lambda x, shift: x + shift.expand_as(x).exp(), (4,)),
    "Tensor.repeat": (lambda x, token: torch.cat([token.repeat(len(x), 1, 1), x], 1), (2, 4)),
    "torch.tile": (lambda x, token: torch.cat([torch.tile(token, (len(x), 1, 2)), x], 1), (2, 2)),
    "p[i], the same for all": (lambda x, table: x * table[PLACES], (5,)),
    "p[i], by a mask": (lambda x, table: x * table[PLACES > 0][[0, 1, 2, 2]], (4,)),
    "torch.matmul": (lambda x, weight: x @ weight, (4, 3)),
    "torch.matmul, from the left": (lambda x, weight: weight @ x.mT, (3, 4)),
    "torch.matmul, of heads": (lambda x, weight: x[:, None] @ weight, (1, 2, 4, 3)),
    "torch.matmul, of a vector": (lambda x, weight: x @ weight, (4,)),
    "torch.addbmm": (
        lambda x, input, weight: torch.addbmm(
            input, x.movedim(1, 0), weight.expand(x.shape[1], 4, 3), beta=2, alpha=3
        ),
        (3,),
        (4, 3),
    ),
    "torch.inner": (lambda x, weight: torch.inner(x, weight), (3, 4)),
    "torch.tensordot": (
        lambda x, weight: torch.tensordot(weight, x, ([1], [2])).movedim(1, 0),
        (3, 4),
    ),
    "torch.tensordot, of axes in a tensor": (
        lambda x, weight: torch.tensordot(x, weight, torch.tensor([[2, 1], [0, 2]])[:, :1]),
        (4, 3),
    ),
    "F.bilinear": (lambda x, weight: F.bilinear(x, x[..., :2].contiguous(), weight), (3, 4, 2)),
    "torch.einsum": (
        lambda x, first, second: torch.einsum("ntd,dr,er->nte", x, first, second),
        (4, 2),
        (3, 2),
    ),
    "F.scaled_dot_product_attention, causal": (
        lambda x, key: F.scaled_dot_product_attention(x, key, x[:, :2], is_causal=True, scale=0.3),
        (2, 4),
    ),
    "F.scaled_dot_product_attention, with a mask": (
        lambda x, query: F.scaled_dot_product_attention(query, x, x, x[:, None, :, 0] > 0),
        (1, 2, 4),
    ),
    "F.scaled_dot_product_attention, of groups": (
        lambda x, key, value: F.scaled_dot_product_attention(
            x[:, None] * torch.ones(4, 1, 1), key, value, enable_gqa=True
        ),
        (1, 2, 5, 4),
        (1, 2, 5, 3),
    ),
    "F.scaled_dot_product_attention": (
        lambda x, query, value, bias: F.scaled_dot_product_attention(
            query, x, value[: x.shape[1]], bias[:, : x.shape[1]]
        ),
        (1, 2, 4),
        (5, 3),
        (2, 5),
    ),
}
#: The same for batches of vectors, ``[N, 4]``.
VECTORS: dict[str, tuple] = {
    "F.pairwise_distance": (lambda x, weight: F.pairwise_distance(x, weight, keepdim=True), (1, 4)),
    "torch.mv": (lambda x, mat: torch.stack([torch.mv(mat, one) for one in x]), (3, 4)),
    "torch.dot": (lambda x, weight: torch.stack([torch.dot(weight, one) for one in x]), (4,)),
    "torch.addmv": (lambda x, input, vec: torch.addmv(input, x, vec, beta=2, alpha=3), (1,), (4,)),
    "torch.addmm": (
        lambda x, input, mat2: torch.addmm(input, x, mat2, beta=2, alpha=3),
        (3,),
        (4, 3),
    ),
    "torch.outer": (lambda x, weight: torch.stack([torch.outer(one, weight) for one in x]), (3,)),
    "torch.linalg.multi_dot": (
        lambda x, first, second: torch.linalg.multi_dot([x, first, second]),
        (4, 3),
        (3, 2),
    ),
    "F.linear, of vectors": (
        lambda x, weight, bias: torch.stack([F.linear(one, weight, bias) for one in x]),
        (3, 4),
        (3,),
    ),
}
#: The same for batches of indices below five.
INDICES: dict[str, tuple] = {
    "p[i]": (lambda x, table: table[x], (5, 3)),
    "p[i], of negative numbers": (lambda x, table: table[x - 5], (5, 3)),
    "p[i], columns": (lambda x, table: table[:, x].transpose(0, 1), (3, 5)),
    "p[i], entries": (lambda x, table: table[x, x.flip(1)], (5, 5)),
    "p[i], twice": (lambda x, table: table[x] * table[x, :1], (5, 3)),
    "torch.index_select": (
        lambda x, table: table.index_select(1, x.flatten()).T.reshape(*x.shape, 3),
        (3, 5),
    ),
    "torch.gather": (lambda x, table: torch.gather(table.expand(len(x), 5), 1, x), (5,)),
    "torch.take_along_dim": (lambda x, table: torch.take_along_dim(table[None], x, 1), (5,)),
    "torch.take": (lambda x, table: torch.take(table, x), (5,)),
}
#: The same where the shapes of a square batch show no samples.
NOT_SQUARE: dict[str, tuple] = {
    "torch.baddbmm": (
        lambda x, input, batch2: torch.baddbmm(
            input, x, batch2.expand(len(x), 4, 3), beta=2, alpha=3
        ),
        (3,),
        (4, 3),
    ),
}
#: A function that makes inputs, a call, and the shapes of its parameters.
CALLS = {
    name: (sequences, call, *[(4,)] * (len(inspect.signature(call).parameters) - 1))
    for name, call in ELEMENTWISE.items()
}
for _inputs, _calls in (
    (sequences, SEQUENCES),
    (vectors, VECTORS),
    (indices, INDICES),
    (lambda: sequences()[1:], NOT_SQUARE),
):
    CALLS |= {name: (_inputs, *call) for name, call in _calls.items()}
#: Shapes of the parameters around the input, which is ``None``, and sublists.
EINSUMS: dict[str, list[tuple[int, ...] | None]] = {
    "ntd,de->nte": [None, (4, 3)],
    "atd,de": [None, (4, 3)],
    "de,...d->...e": [(4, 3), None],
    "... d, d e -> ... e": [None, (4, 3)],
    "ef,de,ntd->ntf": [(3, 2), (4, 3), None],
    "d,ntd,e->nte": [(4,), None, (3,)],
    "ntd,dd->nt": [None, (4, 4)],
    "ntd,nde->nte": [None, (1, 4, 3)],
}


#: Calls without a rule, and calls whose rows are not along an axis of samples.
UNCOVERED = {
    *("torch.sub, into a part", "torch.cosine_similarity", "F.pairwise_distance"),
    *("torch.inner", "torch.outer", "torch.linalg.multi_dot", "torch.addbmm"),
    *("torch.mv", "torch.dot", "F.linear, of vectors"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str):
    torch.manual_seed(0)
    inputs, function, *shapes = CALLS[name]
    check(Call(function, *shapes), inputs(), covered=name not in UNCOVERED)


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str):
    torch.manual_seed(0)
    shapes = EINSUMS[equation]
    place, given = shapes.index(None), [shape for shape in shapes if shape is not None]

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.einsum(equation, [*weights[:place], x, *weights[place:]])

    one, two = (lambda x, a: call(x, a)), (lambda x, a, b: call(x, a, b))
    check(Call(one if len(given) == 1 else two, *given), sequences())


def test_einsum_with_numbers_of_axes():
    torch.manual_seed(0)
    check(Call(lambda x, w: torch.einsum(x, [..., 3], w, [3, 4], [..., 4]), (4, 3)), sequences())


@pytest.mark.parametrize("build", [resnet, unet, vit])
def test_real_models(build: Callable):
    torch.manual_seed(0)
    model, X, y = build()
    model, X = model.double().eval(), X.double()
    params = list(model.parameters())
    data = [(X[:2], y[:2]), (X[2:], y[2:])] if len(X) > 2 else [(X, y)]
    loss = nn.CrossEntropyLoss(reduction="sum")
    operator = PerSampleGradients(model, loss, params, data)
    rows = loop(model, params, data, loss)
    torch.testing.assert_close(operator.dense(), rows, rtol=1e-7, atol=1e-10)
    torch.testing.assert_close(operator.norms(), rows.norm(dim=1))
    torch.testing.assert_close(operator.gram(), rows @ rows.T)
    assert not operator.fallbacks


class Sums(nn.Module):
    """Sums the states of an LSTM over packed sequences."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 3)

    def forward(self, X: nn.utils.rnn.PackedSequence) -> Tensor:
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(X)[0], batch_first=True)
        return self.head(out.sum(1))


def test_packed_inputs():
    """The number of samples is that of the sequences."""
    torch.manual_seed(0)
    model, loss = Sums().double(), nn.CrossEntropyLoss(reduction="sum")
    data, rows, params = [], [], list(model.parameters())
    for lengths in ([3, 1, 2], [2, 4]):
        X, y = [torch.randn(n, 3).double() for n in lengths], torch.randint(3, (len(lengths),))
        data.append((nn.utils.rnn.pack_sequence(X, enforce_sorted=False), y))
        for x, target in zip(X, y, strict=True):
            value = loss(model(nn.utils.rnn.pack_sequence([x])), target[None])
            grads = torch.autograd.grad(value, params)
            rows.append(torch.cat([grad.flatten() for grad in grads]))
    rows = torch.stack(rows)
    gradients = PerSampleGradients(model, loss, params, data)
    torch.testing.assert_close(gradients.dense(), rows)
    torch.testing.assert_close(gradients.gram(), rows @ rows.T)
    fisher = EFLinearOperator(model, loss, params, data)
    torch.testing.assert_close(fisher @ torch.eye(len(rows.T)).double(), rows.T @ rows)


def test_unused_parameters_have_zero_gradients():
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_parameter("unused", nn.Parameter(torch.randn(2)))
    operator = PerSampleGradients(
        model, nn.MSELoss(), list(model.parameters()), [(torch.randn(4, 3), torch.randn(4, 2))]
    )
    place = operator.domain.slice("unused")
    assert bool((operator.dense()[:, place] == 0).all()) and not operator.fallbacks


# --- batches that are not like the first one


class Changing(nn.Module):
    """Layers ``a``, ``b``, ``c``, used as a function says."""

    def __init__(self, forward: Callable[[Any, Any], Tensor], bias: bool = False):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=bias) for _ in range(3))
        self.table = nn.Embedding(5, 3)
        self._forward = forward

    def forward(self, x: Any) -> Tensor:
        return self._forward(self, x)


def _ragged(s: Changing, X: dict[str, Tensor]) -> Tensor:
    h = torch.tanh(s.a(X["tokens"]))
    return torch.stack([part.mean(0) for part in h.split(X["lengths"].tolist())])


def _shifted_calls(s: Changing, x: Tensor) -> Tensor:
    N, T, d = x.shape
    h = s.a(x.reshape(N * T, d)).view(N, T, d)
    h = torch.tanh(h + torch.igamma(x.abs(), s.a.weight[0].abs()))  # no rule
    h = s.b(h.transpose(0, 1).reshape(N * T, d)).view(T, N, d).transpose(0, 1)
    return s.c(torch.tanh(h).sum(1))


def _positions(s: Changing, x: Tensor) -> Tensor:
    return s.c(torch.tanh(s.a(x) + s.table(torch.arange(x.shape[1])))[:, 0])


def _in_two_ways(s: Changing, x: Tensor) -> Tensor:
    return x[:, 0] @ s.a.weight if x[0, 0, 0] > 0 else s.a(x[:, 0])


def _cells(s: Changing, x: Tensor) -> Tensor:
    """No parameter enters by a call that is known."""
    return torch.logaddexp2(s.a.weight[0], x).sum(1)


def _signed(sign: float, *shape: int) -> Tensor:
    x = torch.randn(*shape).double()
    x[0, 0, 0] = sign * x[0, 0, 0].abs()
    return x


def _lengths(*lengths: int) -> dict[str, Tensor]:
    return {"tokens": torch.randn(sum(lengths), 3).double(), "lengths": torch.tensor(lengths)}


IRREGULAR: dict[str, tuple[Callable, Callable[[], list]]] = {
    "ragged": (_ragged, lambda: [_lengths(3, 3, 3), _lengths(4, 1, 4), _lengths(1, 2, 3)]),
    "calls are numbered anew": (
        _shifted_calls,
        lambda: [_signed(1, 4, 3, 3), _signed(1, 4, 3, 3), _signed(1, 2, 5, 3)],
    ),
    "one position later": (_positions, lambda: [_signed(1, 4, 3, 3), _signed(1, 4, 1, 3)]),
    "two ways": (_in_two_ways, lambda: [_signed(1, 4, 1, 3), _signed(-1, 3, 1, 3)]),
    "nothing known": (_cells, lambda: [_signed(1, 4, 3, 3), _signed(1, 2, 2, 3)]),
}


@pytest.mark.parametrize("name", IRREGULAR)
def test_batches_unlike_the_first(name: str):
    torch.manual_seed(0)
    forward, inputs = IRREGULAR[name]
    model = Changing(forward).double()
    data = [(X, torch.randn_like(model(X)).detach()) for X in inputs()]
    params, loss = list(model.parameters()), nn.MSELoss(reduction="sum")
    # not one by one: the model itself says what a sample is
    rows = rows_in_batches(model, data, loss)
    operator = PerSampleGradients(model, loss, params, data, batch_size_fn=lambda X: 0)
    close = {"rtol": 1e-8, "atol": 1e-10 * float(rows.norm())}
    for _ in range(2):
        torch.testing.assert_close(operator.dense(), rows, **close)
    torch.testing.assert_close(operator.norms(), rows.norm(dim=1), **close)
    torch.testing.assert_close(operator.gram(), rows @ rows.T)
    torch.testing.assert_close(operator.second_moment(), rows.square().mean(0))


def test_samples_of_unequal_size():
    """A small sample's rows are not lost in the norm of a large one."""
    torch.manual_seed(0)
    dtype, gate = torch.float32, 2e-4

    def forward(s: Changing, x: Tensor) -> Tensor:
        N, T, _ = x.shape
        h = s.a(x[..., :3].transpose(0, 1).reshape(N * T, 3)).view(T, N, 3).transpose(0, 1)
        return (h * x[..., 3:]).sum(1)

    model, x = Changing(forward).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    x[..., 3] = gate
    x[0, 0, 3] = 1.0
    params = [model.a.weight]
    data = [(x, torch.randn(2, 3, dtype=dtype))]
    operator = PerSampleGradients(model, nn.MSELoss(reduction="sum"), params, data)
    rows = loop(model, params, data, nn.MSELoss(reduction="sum"))
    for found, expected in zip(operator.dense(), rows, strict=True):
        assert (found - expected).norm() <= 1e-4 * expected.norm()


def test_batch_without_samples():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    params, loss = list(model.parameters()), nn.MSELoss(reduction="sum")
    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (0, 3, 0, 2)]
    operator, rows = PerSampleGradients(model, loss, params, data), loop(model, params, data, loss)
    torch.testing.assert_close(operator.dense(), rows)
    torch.testing.assert_close(operator.norms(), rows.norm(dim=1))
    torch.testing.assert_close(operator.gram(), rows @ rows.T)
    torch.testing.assert_close(operator.second_moment(), rows.square().mean(0))
    with_empty, without = (
        GGNDiagonalLinearOperator(model, loss, params, d) for d in (data, data[1::2])
    )
    torch.testing.assert_close(with_empty.diagonal(), without.diagonal())
    torch.testing.assert_close(with_empty.trace(), without.diagonal().sum())


class Norm(nn.Module):
    """The norm of a multiple of the input, which has no derivative where that is zero."""

    def __init__(self, scale: float):
        super().__init__()
        self.scale, self.unused = nn.Parameter(torch.full((2,), scale)), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.scale).pow(2).sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("quantity", ["diagonal", "trace"])
def test_diagonals_that_are_no_numbers(quantity: str):
    X, y = torch.randn(4, 2), torch.randn(4, 1)

    def compute(scale: float, num_samples: int) -> Tensor:
        model, data = Norm(scale), [(X[:num_samples], y[:num_samples])]
        params = list(model.parameters())
        operator = GGNDiagonalLinearOperator(
            model, nn.MSELoss(reduction="sum"), params, data, check_deterministic=False
        )
        return getattr(operator, quantity)().sum()

    # of the norm of a x, with equal numbers a, the derivatives are x_i^2 / |x|
    expected = 2 * (X**2 / X.norm(dim=1, keepdim=True)).square().sum()
    torch.testing.assert_close(compute(0.5, 4), expected)
    with pytest.raises(ValueError, match="is not finite"):
        compute(0.0, 4)
    with pytest.raises(ValueError, match="The data has no term"):
        compute(0.5, 0)


@pytest.mark.parametrize("indices", [3, "ab", [0.5], [True], [9], [-1], [[0]]])
def test_refused_indices(indices: Any):
    model = nn.Linear(3, 2)
    data = [(torch.randn(4, 3), torch.randn(4, 2))]
    with pytest.raises(ValueError, match="subsampling (must be|has indices)"):
        PerSampleGradients(model, nn.MSELoss(), list(model.parameters()), data, subsampling=indices)


def test_without_checks():
    """Without checks, too, each batch's rows are those of its samples."""
    torch.manual_seed(0)
    model = Wrapped(nn.MultiheadAttention(4, 2), _time_first_attention).double()
    data = [(x.double(), torch.randn(len(x), x[0].numel()).double()) for x in sequences()]
    params, loss = list(model.parameters()), nn.MSELoss(reduction="sum")
    operator = PerSampleGradients(model, loss, params, data, check_deterministic=False)
    rows = loop(model, params, data, loss)
    torch.testing.assert_close(operator.dense(), rows)
    torch.testing.assert_close(operator.norms(), rows.norm(dim=1))


def _pooled(layer: nn.Module, X: dict[str, Tensor]) -> Tensor:
    return X["pooling"] @ torch.tanh(layer(X["x"]))


def _sets(sizes: list[int]) -> dict[str, Tensor]:
    """Return a batch of sets, one after the other, and the matrix that sums over each."""
    pooling = torch.block_diag(*(torch.ones(1, size) for size in sizes))
    return {"x": torch.randn(sum(sizes), 3), "pooling": pooling}


def test_sets_of_other_sizes_in_batches_of_the_same_shapes():
    """Batches of equal shapes may assign rows to samples in different ways."""
    torch.manual_seed(0)
    model, sizes = Wrapped(nn.Linear(3, 2), _pooled), ([4, 4], [3, 5], [2, 2, 2, 2], [1, 3, 1, 3])
    with torch.no_grad():
        data = [(X, torch.randn_like(model(X))) for X in map(_sets, sizes)]
    params, loss = list(model.parameters()), nn.MSELoss(reduction="sum")
    rows = rows_in_batches(model, data, loss)
    options = {"batch_size_fn": lambda X: len(X["pooling"])}
    operator = PerSampleGradients(model, loss, params, data, **options)
    torch.testing.assert_close(operator.dense(), rows)
    assert operator.fallbacks
    options["fisher_type"] = "empirical"
    corrected = EKFACLinearOperator(model, loss, params, data, **options)
    torch.testing.assert_close(corrected.trace(), rows.square().sum())
