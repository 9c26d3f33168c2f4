"""Rules of all layers with all their options, against one sample at a time."""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from models import Using, resnet, unet, vit
from sample_gradients import check, check_rows, images, loop, rows_in_batches, sequences
from tables import core
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from curvlinops import EFLinearOperator
from curvlinops import PerSampleGradientLinearOperator as PerSampleGradients
from curvlinops.layers.gradients import PerSampleGradient
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.recorded import Arrived

LOSS = nn.MSELoss(reduction="sum")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _said_shapes(monkeypatch: pytest.MonkeyPatch):
    """Gradients have the shapes that rules say without them."""
    take = Arrived.take

    def checked(self: Arrived, *uses: ParameterUse, **options: bool) -> PerSampleGradient:
        gradient = take(self, *uses, **options)
        if len(uses) == 1 and self._by_sample and not uses[0].use.is_bias:
            assert gradient.kronecker_shape == uses[0].kronecker_shape
        return gradient

    monkeypatch.setattr(Arrived, "take", checked)


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
    check(layer, images(dims, 4, length))


def _first(layer: nn.Module, X: Any) -> Tensor:
    return layer(X)[0]


def _time_first(layer: nn.Module, X: Tensor) -> Tensor:
    return layer(X.transpose(0, 1))[0].transpose(0, 1)


def _self_attention(layer: nn.Module, X: Tensor) -> Tensor:
    return layer(X, X, X)[0]


def _time_first_attention(layer: nn.Module, X: Tensor) -> Tensor:
    return _self_attention(layer, X.transpose(0, 1)).transpose(0, 1)


def _frames(layer: nn.Module, X: Tensor) -> Tensor:
    """Apply a convolution to each frame of videos ``[N, T, C, H, W]``."""
    return layer(X.flatten(0, 1)).unflatten(0, X.shape[:2])


def _two_images(layer: nn.Module, X: Tensor) -> Tensor:
    """Apply a convolution to images of different sizes."""
    return layer(X).sum((2, 3)) + layer(X[..., ::2, 1:]).tanh().sum((2, 3))


def vectors() -> list[Tensor]:
    """Two batches of unequal size."""
    return [torch.randn(3, 4), torch.randn(2, 4)]


def indices() -> list[Tensor]:
    """Batches of indices below five."""
    return [torch.randint(5, (3, 3)), torch.randint(5, (2, 5))]


def maps() -> list[Tensor]:
    """Batches of images with four channels."""
    return images(2, 4)


#: A layer, inputs, and how the layer is applied to them, if it is not simply called.
LAYERS: dict[str, tuple] = {
    "linear": (lambda: nn.Linear(4, 3), sequences),
    "linear, time first": (
        lambda: nn.Linear(4, 3), sequences,
        lambda layer, X: layer(X.transpose(0, 1)).transpose(0, 1),
    ),
    "linear twice": (lambda: nn.Linear(4, 4), sequences, lambda f, X: f(torch.tanh(f(X)))),
    "linear, others unused": (
        lambda: nn.ModuleList([nn.Linear(4, 3), nn.Linear(2, 2)]), sequences,
        lambda layers, X: layers[0](X),
    ),
    "bilinear": (lambda: nn.Bilinear(4, 2, 3), sequences, lambda f, X: f(X, X[..., :2])),
    "layer norm": (lambda: nn.LayerNorm(4), sequences),
    "rms norm": (lambda: nn.RMSNorm(4), sequences),
    "group norm": (lambda: nn.GroupNorm(2, 4), maps),
    "instance norm": (lambda: nn.InstanceNorm2d(4, affine=True), maps),
    "batch norm": (lambda: nn.BatchNorm2d(4), maps),
    "batch norm of vectors": (lambda: nn.BatchNorm1d(4), vectors),
    "PReLU": (lambda: nn.PReLU(), maps),
    "PReLU of channels": (lambda: nn.PReLU(4), maps),
    "embedding": (lambda: nn.Embedding(5, 4, padding_idx=2), indices),
    "embedding bag": (lambda: nn.EmbeddingBag(5, 4, mode="mean", padding_idx=1), indices),
    "embedding bag, maximum": (lambda: nn.EmbeddingBag(5, 4, mode="max", padding_idx=1), indices),
    "attention": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True), sequences, _self_attention
    ),
    "attention, time first": (
        lambda: nn.MultiheadAttention(4, 2), sequences, _time_first_attention
    ),
    "attention with added key and value": (
        lambda: nn.MultiheadAttention(4, 2, add_bias_kv=True, batch_first=True), sequences,
        _self_attention,
    ),
    "transformer encoder": (
        lambda: nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), sequences
    ),
    "transformer decoder": (
        lambda: nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True), sequences,
        lambda layer, X: layer(X, X.flip(1)),
    ),
    "RNN cell": (lambda: nn.RNNCell(4, 3), sequences, lambda f, X: f(X[:, 0], f(X[:, 1]))),
    "GRU cell": (lambda: nn.GRUCell(4, 3), sequences, lambda f, X: f(X[:, 0], f(X[:, 1]))),
    "LSTM cell": (lambda: nn.LSTMCell(4, 3), sequences, lambda f, X: f(X[:, 0], f(X[:, 1]))[0]),
}  # fmt: skip
for _kind, (_layers, _both, _first_axis) in product(
    (nn.RNN, nn.LSTM, nn.GRU), ((1, False, True), (2, True, False))
):
    _build = partial(_kind, 4, 3, _layers, bidirectional=_both, batch_first=_first_axis)
    _name = f"{_kind.__name__}, {_layers} layers, bidirectional={_both}, batch_first={_first_axis}"
    LAYERS[_name] = _build, sequences, _first if _first_axis else _time_first
# few filters and many filters are computed in different ways
for _filters in (2, 60):
    _build = partial(nn.Conv2d, 4, _filters, 3, stride=2, padding=(1, 0), dilation=(1, 2), groups=2)
    _videos = lambda: [torch.randn(n, 3, 4, 9, 9) for n in (2, 3)]  # noqa: E731
    LAYERS[f"frames, {_filters} filters"] = _build, _videos, _frames
for _groups, _filters in [(1, 4), (2, 4), (1, 40)]:
    _build = partial(nn.Conv2d, 4, _filters, 3, padding=1, groups=_groups)
    LAYERS[f"two images, {_groups} groups, {_filters} filters"] = _build, maps, _two_images
for _kernel, _dilation in [(2, 1), (3, 2), (4, 1)]:
    _build = partial(nn.Conv2d, 4, 3, _kernel, padding="same", dilation=_dilation)
    LAYERS[f"same padding, kernel {_kernel}, dilation {_dilation}"] = _build, maps


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize(
    "name", core((n for n in LAYERS if not n.startswith(("RNN, 2", "GRU, 2"))), LAYERS)
)
def test_layers(name: str):
    build, inputs, *forward = LAYERS[name]
    layer = build()
    with torch.no_grad():  # norms begin with ones and zeros
        for p in layer.parameters():
            p.add_(0.3 * torch.randn_like(p))
    check(Using(lambda s, X: forward[0](s.layer, X), layer=layer) if forward else layer, inputs())


def calling(function: Callable, *shapes: tuple[int, ...]) -> nn.Module:
    """Return a function of an input and of parameters of some shapes."""
    parts = {f"p{i}": torch.randn(shape) for i, shape in enumerate(shapes)}
    return Using(lambda s, x: function(x, *s.parameters()), **parts)


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
attend = F.scaled_dot_product_attention
#: Functions of sequences, ``[N, T, 4]``, and of parameters of the given shapes.
SEQUENCES: dict[str, tuple] = {
    "torch.sub, into a part": (_assigned, (2,)),
    "torch.cosine_similarity": (
        lambda x, w: F.cosine_similarity(x[:, :, None], w, dim=-1), (3, 4)
    ),
    "torch.cdist": (lambda x, w: torch.cdist(x, w), (3, 4)),
    "Tensor.expand": (lambda x, token: torch.cat([token.expand(len(x), 1, -1), x], 1), (4,)),
    "Tensor.expand_as": (lambda x, shift: x + shift.expand_as(x).exp(), (4,)),
    "Tensor.repeat": (lambda x, token: torch.cat([token.repeat(len(x), 1, 1), x], 1), (2, 4)),
    "torch.tile": (lambda x, token: torch.cat([torch.tile(token, (len(x), 1, 2)), x], 1), (2, 2)),
    "p[i], the same for all": (lambda x, table: x * table[PLACES], (5,)),
    "p[i], by a mask": (lambda x, table: x * table[PLACES > 0][[0, 1, 2, 2]], (4,)),
    "torch.matmul": (lambda x, w: x @ w, (4, 3)),
    "torch.matmul, from the left": (lambda x, w: w @ x.mT, (3, 4)),
    "torch.matmul, of heads": (lambda x, w: x[:, None] @ w, (1, 2, 4, 3)),
    "torch.matmul, of a vector": (lambda x, w: x @ w, (4,)),
    "torch.addbmm": (
        lambda x, b, w: torch.addbmm(
            b, x.movedim(1, 0), w.expand(x.shape[1], 4, 3), beta=2, alpha=3
        ),
        (3,), (4, 3),
    ),
    "torch.inner": (lambda x, w: torch.inner(x, w), (3, 4)),
    "torch.tensordot": (lambda x, w: torch.tensordot(w, x, ([1], [2])).movedim(1, 0), (3, 4)),
    "torch.tensordot, of axes in a tensor": (
        lambda x, w: torch.tensordot(x, w, torch.tensor([[2, 1], [0, 2]])[:, :1]), (4, 3)
    ),
    "F.bilinear": (lambda x, w: F.bilinear(x, x[..., :2].contiguous(), w), (3, 4, 2)),
    "torch.einsum": (lambda x, v, w: torch.einsum("ntd,dr,er->nte", x, v, w), (4, 2), (3, 2)),
    "torch.einsum, of numbered axes": (
        lambda x, w: torch.einsum(x, [..., 3], w, [3, 4], [..., 4]), (4, 3)
    ),
    "attention, causal": (
        lambda x, key: attend(x, key, x[:, :2], is_causal=True, scale=0.3), (2, 4)
    ),
    "attention, with a mask": (
        lambda x, query: attend(query, x, x, x[:, None, :, 0] > 0), (1, 2, 4)
    ),
    "attention, of groups": (
        lambda x, key, value: attend(x[:, None] * torch.ones(4, 1, 1), key, value, enable_gqa=True),
        (1, 2, 5, 4), (1, 2, 5, 3),
    ),
    "attention, with a bias": (
        lambda x, query, value, b: attend(query, x, value[: x.shape[1]], b[:, : x.shape[1]]),
        (1, 2, 4), (5, 3), (2, 5),
    ),
}  # fmt: skip
#: The same for batches of vectors, ``[N, 4]``.
VECTORS: dict[str, tuple] = {
    "F.pairwise_distance": (lambda x, w: F.pairwise_distance(x, w, keepdim=True), (1, 4)),
    "torch.mv": (lambda x, w: torch.stack([torch.mv(w, one) for one in x]), (3, 4)),
    "torch.dot": (lambda x, w: torch.stack([torch.dot(w, one) for one in x]), (4,)),
    "torch.addmv": (lambda x, b, w: torch.addmv(b, x, w, beta=2, alpha=3), (1,), (4,)),
    "torch.addmm": (lambda x, b, w: torch.addmm(b, x, w, beta=2, alpha=3), (3,), (4, 3)),
    "torch.outer": (lambda x, w: torch.stack([torch.outer(one, w) for one in x]), (3,)),
    "torch.linalg.multi_dot": (
        lambda x, v, w: torch.linalg.multi_dot([x, v, w]), (4, 3), (3, 2)
    ),
    "F.linear, of vectors": (
        lambda x, w, b: torch.stack([F.linear(one, w, b) for one in x]), (3, 4), (3,)
    ),
}  # fmt: skip
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
#: A function that makes inputs, a call, and the shapes of its parameters.
CALLS = {
    name: (sequences, call, *[(4,)] * (len(inspect.signature(call).parameters) - 1))
    for name, call in ELEMENTWISE.items()
}
for _inputs, _calls in ((sequences, SEQUENCES), (vectors, VECTORS), (indices, INDICES)):
    CALLS |= {name: (_inputs, *call) for name, call in _calls.items()}
CALLS["torch.baddbmm"] = (
    lambda: sequences()[1:],  # the shapes of a square batch show no samples
    lambda x, input, w: torch.baddbmm(input, x, w.expand(len(x), 4, 3), beta=2, alpha=3),
    (3,), (4, 3),
)  # fmt: skip
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


#: Calls without a rule, and loops over samples, whose rows are not along an axis of samples.
UNCOVERED = {
    *("torch.sub, into a part", "torch.outer", "torch.addbmm"),
    *("torch.mv", "torch.dot", "F.linear, of vectors"),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str):
    inputs, function, *shapes = CALLS[name]
    check(calling(function, *shapes), inputs(), covered=name not in UNCOVERED)


@pytest.mark.parametrize("equation", EINSUMS)
def test_einsum(equation: str):
    shapes = EINSUMS[equation]
    place = shapes.index(None)

    def call(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.einsum(equation, [*weights[:place], x, *weights[place:]])

    check(calling(call, *filter(None, shapes)), sequences())


@pytest.mark.parametrize("build", [resnet, unet, vit])
def test_real_models(build: Callable):
    model, X, y = build()
    model, X, params = model.double().eval(), X.double(), list(model.parameters())
    data = [(X[:2], y[:2]), (X[2:], y[2:])] if len(X) > 2 else [(X, y)]
    loss = nn.CrossEntropyLoss(reduction="sum")
    rows = loop(model, params, data, loss)
    check_rows(PerSampleGradients(model, loss, params, data), rows, covered=True)


def test_without_checks():
    """Without checks, too, each batch's rows are those of its samples."""
    layer = nn.MultiheadAttention(4, 2)
    model = Using(lambda s, X: _time_first_attention(s.layer, X), layer=layer)
    check(model, sequences(), check_deterministic=False)


# --- samples that cannot be cut, and batches that are not like the first one


def _ragged(s: Using, X: dict[str, Tensor]) -> Tensor:
    h = torch.tanh(s.a(X["tokens"]))
    return torch.stack([part.mean(0) for part in h.split(X["lengths"].tolist())])


def _shifted_calls(s: Using, x: Tensor) -> Tensor:
    N, T, d = x.shape
    h = s.a(x.reshape(N * T, d)).view(N, T, d)
    h = torch.tanh(h + torch.igamma(x.abs(), s.a.weight[0].abs()))  # no rule
    h = s.b(h.transpose(0, 1).reshape(N * T, d)).view(T, N, d).transpose(0, 1)
    return s.c(torch.tanh(h).sum(1))


def _positions(s: Using, x: Tensor) -> Tensor:
    return s.c(torch.tanh(s.a(x) + s.table(torch.arange(x.shape[1])))[:, 0])


def _in_two_ways(s: Using, x: Tensor) -> Tensor:
    return x[:, 0] @ s.a.weight if x[0, 0, 0] > 0 else s.a(x[:, 0])


def _cells(s: Using, x: Tensor) -> Tensor:
    """No parameter enters by a call that is known."""
    return torch.logaddexp2(s.a.weight[0], x).sum(1)


def _packed(s: Using, X: PackedSequence) -> Tensor:
    """The number of samples is that of the sequences."""
    out, _ = pad_packed_sequence(s.lstm(X)[0], batch_first=True)
    return s.c(out.sum(1))


def _bags(s: Using, X: tuple[Tensor, Tensor]) -> Tensor:
    return s.c(s.bag(*X))


def _signed(sign: float, *shape: int) -> Tensor:
    x = torch.randn(*shape).double()
    x[0, 0, 0] = sign * x[0, 0, 0].abs()
    return x


def _lengths(*lengths: int) -> dict[str, Tensor]:
    return {"tokens": torch.randn(sum(lengths), 3).double(), "lengths": torch.tensor(lengths)}


def _sequences(*lengths: int) -> PackedSequence:
    return pack_sequence([torch.randn(n, 3).double() for n in lengths], enforce_sorted=False)


def _offsets(*starts: int) -> tuple[Tensor, Tensor]:
    return torch.randint(5, (10,)), torch.tensor(starts)


#: A function of layers, batches, and an option of the operator.
IRREGULAR: dict[str, tuple[Callable, Callable[[], list], Callable | None]] = {
    "ragged": (
        _ragged, lambda: [_lengths(3, 3, 3), _lengths(4, 1, 4), _lengths(1, 2, 3)], lambda X: 0
    ),
    "calls are numbered anew": (
        _shifted_calls, lambda: [_signed(1, n, t, 3) for n, t in ((4, 3), (4, 3), (2, 5))],
        lambda X: 0,
    ),
    "one position later": (
        _positions, lambda: [_signed(1, 4, 3, 3), _signed(1, 4, 1, 3)], lambda X: 0
    ),
    "two ways": (
        _in_two_ways, lambda: [_signed(1, 4, 1, 3), _signed(-1, 3, 1, 3)], lambda X: 0
    ),
    "nothing known": (_cells, lambda: [_signed(1, 4, 3, 3), _signed(1, 2, 2, 3)], lambda X: 0),
    "packed sequences": (_packed, lambda: [_sequences(3, 1, 2), _sequences(2, 4)], None),
    "bags with offsets": (
        _bags, lambda: [_offsets(0, 3, 4, 8), _offsets(0, 2)], lambda X: len(X[1])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IRREGULAR)
def test_irregular_batches(name: str):
    forward, inputs, size = IRREGULAR[name]
    layers = {name: nn.Linear(3, 3, bias=False) for name in "abc"}
    layers |= {"table": nn.Embedding(5, 3), "bag": nn.EmbeddingBag(5, 3)}
    model = Using(forward, lstm=nn.LSTM(3, 3, batch_first=True), **layers).double()
    data = [(X, torch.randn_like(model(X)).detach()) for X in inputs()]
    # not one by one: the model itself says what a sample is
    rows = rows_in_batches(model, data, LOSS)
    arguments = model, LOSS, list(model.parameters()), data
    check_rows(PerSampleGradients(*arguments, batch_size_fn=size), rows)
    fisher = EFLinearOperator(*arguments, terms="sample", batch_size_fn=size).to_dense()
    torch.testing.assert_close(fisher, rows.T @ rows)


def test_rows_of_packed_sequences_are_refused():
    """They are ordered by time: neighboring rows are of different sequences."""
    model = Using(lambda s, X: torch.tanh(s.a(X.data)), a=nn.Linear(3, 3)).double()
    X = _sequences(4, 3, 2)
    data = [(X, torch.randn_like(model(X)).detach())]
    for cls, options in ((PerSampleGradients, {}), (EFLinearOperator, {"terms": "sample"})):
        with pytest.raises(ValueError, match="not known which rows are whose"):
            cls(model, LOSS, list(model.parameters()), data, **options).to_dense()


def test_samples_of_unequal_size():
    """A small sample's rows are not lost in the norm of a large one."""

    def forward(s: Using, x: Tensor) -> Tensor:
        N, T, _ = x.shape
        h = s.a(x[..., :3].transpose(0, 1).reshape(N * T, 3)).view(T, N, 3).transpose(0, 1)
        return (h * x[..., 3:]).sum(1)

    model, x = Using(forward, a=nn.Linear(3, 3, bias=False)), torch.randn(2, 3, 4)
    x[..., 3], x[0, 0, 3] = 2e-4, 1.0
    arguments = model, LOSS, [model.a.weight], [(x, torch.randn(2, 3))]
    found, rows = PerSampleGradients(*arguments).dense(), loop(model, *arguments[2:], LOSS)
    assert bool(((found - rows).norm(dim=1) <= 1e-4 * rows.norm(dim=1)).all())
