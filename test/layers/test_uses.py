"""Models that use their parameters in all ways: what is computed of gradients of samples.

A model is a row of `MODELS`. All that operators compute is compared with one sample at a time.
"""

from collections.abc import Callable
from itertools import product
from typing import Any

import problems
import pytest
import tables
import torch
import torch.nn.functional as F
from contract import CASES, error, matrix
from models import Using
from problems import Problem
from sample_gradients import (
    Row,
    batches,
    bounded,
    check_blocks,
    check_rows,
    compare,
    core,
    linear,
    loop,
    rows_in_batches,
    sequences,
    weight,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, spectral_norm

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.layers import recorded
from curvlinops.structured.layout import with_strides

L, LOSS = nn.Linear, nn.MSELoss(reduction="sum")
FUNCTION = "a layer uses a function of it"


@pytest.fixture(autouse=True)
def _seed(double):
    torch.manual_seed(0)


vectors, images = batches(4), batches(2, 5, 5, sizes=(3, 2))


MODELS: dict[str, Row] = {}


def model(inputs: Callable[[], list], covered: bool = True, **parts: Any) -> Callable:
    """Register a function of parts."""

    def register(function: Callable) -> Callable:
        MODELS[function.__name__] = Row(function, parts, inputs, covered)
        return function

    return register


def tasks() -> list[dict[str, Tensor]]:
    """Two batches with a task for each sample."""
    return [{"x": torch.randn(n, 4), "task": torch.arange(n) % 2} for n in (3, 2)]


def series() -> list[dict[str, Tensor]]:
    """Two batches of unequal size."""
    return [{"x": torch.randn(n, 6, 1), "mask": torch.ones(n, 1)} for n in (3, 5)]


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
for _name, _call in WRITTEN.items():
    MODELS[f"written, {_name}"] = Row(_call, _PARTS, vectors, _name != "rows of samples")


@model(vectors, first=(2, 4, 2), second=(2, 2, 4), third=(6, 4))
def equal_matrices_of_unlike_parameters(s: Using, x: Tensor) -> Tensor:
    """Weights of attention's heads before and after it, and a part of a larger one."""
    x = F.linear(x, s.first.permute(0, 2, 1).reshape(4, 4)).tanh()
    return F.linear(F.linear(x, s.second.reshape(4, 4)).tanh(), s.third[:4])


@model(vectors, a=linear(4, 2), w=(2, 2))
def transformed(s: Using, x: Tensor) -> Tensor:
    return torch.func.vmap(s.a)(x) @ s.w


@model(
    series, covered=False, read=linear(1, 4), head=linear(4, 3), decay=(2, 4, 3), scale=(2, 4, 3)
)
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


# --- layouts: a layer sees samples in any order

Layer = Callable[[Tensor], Tensor]


def time_first(f: Layer, x: Tensor) -> Tensor:
    return f(x.transpose(0, 1)).transpose(0, 1)


def flattened(f: Layer, x: Tensor) -> Tensor:
    return f(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def time_first_flattened(f: Layer, x: Tensor) -> Tensor:
    h = f(x.transpose(0, 1).reshape(-1, x.shape[2]))
    return h.reshape(x.shape[1], len(x), -1).transpose(0, 1)


def sorted_by_value(f: Layer, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return f(x[order])[order.argsort()]


def either_way(f: Layer, x: Tensor) -> Tensor:
    return time_first_flattened(f, x) if x[0, 0, 0] > 0 else flattened(f, x)


#: How a layer may see batches ``[N, T, d]``, and whether the rows follow an axis.
ORDERS: dict[str, tuple[Callable[[Layer, Tensor], Tensor], bool | None]] = {
    "samples first": (lambda f, x: f(x), True),
    "time first": (time_first, True),
    "flattened": (flattened, True),
    "time first, flattened": (time_first_flattened, True),
    "both ways, tied": (lambda f, x: f(x) + 2 * time_first(f, x).sin(), True),
    "either way": (either_way, True),
    "dead samples": (lambda f, x: time_first(f, x) * (x[:, :1, :1] > 0), True),
    "reversed": (lambda f, x: f(x.flip(0)).flip(0), None),
    "sorted by value": (sorted_by_value, None),
}
SHAPES = [
    *([(3, 3), (2, 4), (3, 3)], [(1, 5), (4, 4), (4, 4)], [(16, 2), (16, 2), (5, 2)]),
    [(4, 1), (4, 3)],
]
for (_name, (_call, _covered)), _shapes in product(ORDERS.items(), SHAPES):
    MODELS[f"{_name}, {_shapes}"] = Row(
        lambda s, x, order=_call: s.head(torch.tanh(order(s.layer, x)).mean(1)),
        {"layer": linear(3, 3), "head": linear(3, 2)},
        lambda shapes=_shapes: [torch.randn(*shape, 3) for shape in shapes],
        _covered,
        core=_shapes is SHAPES[0] and _name in ("time first", "either way", "sorted by value"),
    )


# --- constants that multiply parameters, and rows of samples that look like such


def on_a_constant_table(s: Using, x: Tensor) -> Tensor:
    """A layer on a constant table with a leading axis of length one, as in SwinV2."""
    return torch.tanh(s.first(x) + s.table(s.places).softmax(-1)).mean(1)


#: Functions of a weight, and of constants.
CONSTANT: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "product": lambda s, x: x @ (s.constant @ s.w),
    "product with data, too": lambda s, x: (x @ s.w) @ (s.constant @ s.w),
    "mask": lambda s, x: x @ (s.w * (s.constant > 0)),
    "rows": lambda s, x: x @ s.w[[2, 0, 1, 3]],
    "standardized": lambda s, x: x @ ((s.w - s.w.mean(0)) / s.w.std(0)),
}
for _sizes in ((3, 1), (1, 3), (1, 1, 1, 1), (2, 2)):
    _places = lambda: nn.Buffer(torch.randn(1, 3, 2))  # noqa: E731
    _parts = {"first": linear(4, 5), "table": linear(2, 5), "places": _places}
    MODELS[f"constant table, {_sizes}"] = Row(
        on_a_constant_table, _parts, batches(3, 4, sizes=_sizes), core=True
    )
for (_name, _call), _sizes in product(CONSTANT.items(), ((5,), (1, 4), (1, 1))):
    MODELS[f"constant, {_name}, {_sizes}"] = Row(
        _call,
        {"w": (4, 4), "constant": lambda: nn.Buffer(torch.randn(4, 4))},
        batches(4, sizes=_sizes),
        None if "too" in _name else True,
        FUNCTION,
        core=_sizes != (1, 1),
    )


# --- parts of parameters: views, and copies of views

#: Parts of a parameter ``[2, 3, 4]``, given a copy somewhere on the way.
PARTS: dict[str, Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = {
    "all": lambda w, copy: copy(w),
    "first": lambda w, copy: copy(w[:1]),
    "transposed": lambda w, copy: copy(w.mT),
    "transposed after": lambda w, copy: copy(w).transpose(-1, -2),
    "in another order of memory": lambda w, copy: copy(w.mT).contiguous(),
    "permuted": lambda w, copy: copy(w).permute(-1, 0, 1),
    "without the last": lambda w, copy: copy(w)[:, :-1],
    "steps": lambda w, copy: copy(w[:, 1::2, ::3]),
    "narrowed": lambda w, copy: copy(copy(w)[1]).narrow(-1, 1, 2),
    "last": lambda w, copy: copy(w)[:, -1],
    "chunk": lambda w, copy: copy(w.chunk(2, -1)[1]),
    "split": lambda w, copy: copy(w).split([1, 2], -2)[1],
    "unbound": lambda w, copy: copy(w).unbind(-3)[1],
    "selected by a tensor": lambda w, copy: copy(w)[torch.tensor(1)],
    "one more axis": lambda w, copy: copy(w)[None].mT,
    "squeezed": lambda w, copy: copy(w[:1]).squeeze(0).t(),
    "without some axes of length one": lambda w, copy: copy(w[:1, :, :1]).squeeze((0, -1)),
    "flat": lambda w, copy: copy(w.flatten(1)),
    "in another shape": lambda w, copy: copy(w).reshape(-1)[4:10].view(2, 3),
    "in another order and shape": lambda w, copy: copy(w).mT.reshape(2, 12),
    "diagonal": lambda w, copy: copy(w).diagonal(0, 1, 2),
    "an entry": lambda w, copy: copy(w)[1, 1:2, 2:3],
}
#: Functions that are no views, or have entries twice.
NO_PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "twice": lambda w: 2 * w.float(),
    "sine": lambda w: w.float().sin().double(),
    "written to": lambda w: w.clone().mul_(2),
    "triangle": lambda w: w.clone().tril(),
    "index": lambda w: w.clone()[[1, 0]],
    "side by side": lambda w: torch.cat([w, w]).float(),
    "expanded": lambda w: w.float()[:, :1].expand(2, 3, 4),
    "expanded to two": lambda w: w.float()[:1].expand(2, 3, 4),
    "windows": lambda w: w.flatten()[:7].unfold(0, 4, 1),
    "windows side by side": lambda w: w.flatten().unfold(0, 6, 6),
    "complex": lambda w: w.to(torch.complex64).mT.real,
}


def times(part: Callable[[Tensor], Tensor]) -> Callable[[Using, Tensor], Tensor]:
    """Return the product with a part of a weight."""

    def function(s: Using, X: Tensor) -> Tensor:
        w = part(s.w)
        w = w.flatten(1) if w.ndim > 1 else w
        return (X[:, : len(w)].to(w.dtype) @ w).double()

    return function


for _number, (_name, _part) in enumerate(PARTS.items()):
    for _kind, _copy, _tolerance in (("none", lambda x: x, 1e-10), ("cast", Tensor.float, 1e-5)):
        _call = times(lambda w, part=_part, copy=_copy: part(w, copy))
        _row = Row(_call, {"w": (2, 3, 4)}, vectors, True, "kronecker", _tolerance)
        MODELS[f"part, {_name}, {_kind}"] = _row._replace(core=_number % 4 == 2 * (_kind == "cast"))
for _name, _part in NO_PARTS.items():
    MODELS[f"no part, {_name}"] = Row(
        times(_part), {"w": (2, 3, 4)}, vectors, True, FUNCTION, 1e-5, _name in ("index", "windows")
    )


@pytest.mark.parametrize("part", [lambda w: w.T, lambda w: w[:, 1:3].T, lambda w: w[::2, ::3]])
def test_parts_in_the_order_of_the_parameter(part: Callable[[Tensor], Tensor]):
    w = torch.arange(24.0).reshape(4, 6)
    view = part(w)
    found = with_strides("w", tuple(view.shape), view.stride(), view.storage_offset())
    assert found is not None
    assert torch.equal(found.in_order.of(w.reshape(1, -1)).flatten(), view.flatten().sort().values)


# --- equal uses, which are computed together


def residual(s: Using, x: Tensor) -> Tensor:
    """Layers whose inputs are different tensors."""
    for layer in s.layers:
        x = x + torch.tanh(layer(x))
    return x


def parallel(s: Using, x: Tensor) -> Tensor:
    """Layers with one input."""
    return sum(torch.tanh(layer(x)) for layer in s.layers)


def twice(s: Using, x: Tensor) -> Tensor:
    """Layers that are used twice."""
    return residual(s, residual(s, x).view_as(x))


def both_ways(s: Using, x: Tensor) -> Tensor:
    """Weights that are used twice, once transposed."""
    for layer in s.layers:
        x = torch.tanh(layer(x)) @ layer.weight
    return x


def halves(s: Using, x: Tensor) -> Tensor:
    """Weights of which parts are used, other ones of each."""
    for i, layer in enumerate(s.layers):
        x = x + torch.tanh(x @ layer.weight[i % 2 :: 2].repeat(2, 1))
    return x


def precisions(s: Using, x: Tensor) -> Tensor:
    """Inputs of layers in several dtypes."""
    for i, layer in enumerate(s.layers):
        dtype = torch.float64 if i % 2 else torch.float32
        x = x + torch.tanh(F.linear(x.to(dtype), layer.weight.to(dtype))).double()
    return x


def layers(make: Callable[..., nn.Module], **options: Any) -> dict[str, Callable[[], nn.Module]]:
    return {"layers": lambda: nn.ModuleList(make(4, 4, **options) for _ in range(3))}


_IMAGES, _FILTERS = batches(4, 3, 3), {"kernel_size": 3, "padding": 1}
EQUAL = {
    "residual": Row(residual, layers(nn.Linear), vectors),
    "parallel": Row(parallel, layers(nn.Linear), vectors),
    "twice": Row(twice, layers(nn.Linear), vectors),
    "both ways": Row(both_ways, layers(nn.Linear), vectors),
    "halves": Row(halves, layers(nn.Linear), vectors),
    "precisions": Row(precisions, layers(nn.Linear), vectors, tolerance=1e-5),
    "parallel, tokens": Row(parallel, layers(nn.Linear), batches(3, 4)),
    "twice, tokens": Row(twice, layers(nn.Linear), batches(3, 4)),
    "residual, images": Row(residual, layers(nn.Conv2d, **_FILTERS), _IMAGES),
    "parallel, groups": Row(parallel, layers(nn.Conv2d, groups=2, **_FILTERS), _IMAGES),
}
MODELS |= {f"equal layers, {name}": row for name, row in EQUAL.items()}


@pytest.mark.parametrize(
    "name, at_once",
    tables.core(tables.in_turns(EQUAL, [2**6, 2**20]), product(EQUAL, [2**6, 2**20])),
)
def test_blocks_do_not_depend_on_other_layers(
    name: str, at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(recorded, "_COPIED", at_once)
    row = EQUAL[name]
    model, tolerance = row.build(), row.tolerance
    data = [(X, torch.randn_like(model(X))) for X in row.inputs()]
    rows, params = loop(model, list(model.parameters()), data, LOSS), list(model.parameters())
    check_rows(PerSampleGradientLinearOperator(model, LOSS, params, data), rows, tolerance)
    options = {"fisher_type": "empirical", "fallback": "dense", "check_deterministic": False}
    for joint, approx in [(True, "expand"), (False, "reduce")]:
        options |= {"separate_weight_and_bias": not joint, "kfac_approx": approx}
        whole, *blocks = (
            KFACLinearOperator(model, LOSS, list(one.parameters()), data, **options).to_dense()
            for one in (model, *model.layers)
        )
        assert error(whole, torch.block_diag(*blocks)) <= tolerance


# --- complex numbers


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
for _name, _call in COMPLEX.items():
    MODELS[f"complex, {_name}"] = Row(
        lambda s, x, call=_call: s.head(call(s, x)),
        {"a": lambda: weight(4).abs() + 0.5, "b": (4,), "head": linear(4, 2)},
        vectors,
        True if _name == "product" else None,
    )


# --- tests


@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")
@pytest.mark.parametrize("name", core(MODELS))
def test_models(name: str):
    MODELS[name].check()


# --- sparse and jagged inputs

SPARSE: dict[str, Callable[[Using, Tensor], Tensor]] = {
    "a layer": lambda s, x: x,
    "product of weights": lambda s, x: F.linear(x, s.head.weight.T @ s.head.weight, s.a).tanh(),
    "sparse product": lambda s, x: torch.tanh(torch.sparse.mm(x, torch.outer(s.a, s.b))),
}


@pytest.mark.extensive
@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_numbers(name: str, layout: torch.layout):
    parts = {"a": torch.rand(4) + 0.5, "b": weight(4), "head": nn.Linear(4, 2)}
    net = Using(lambda s, x: bounded(s.head(SPARSE[name](s, x))), **parts)
    data = [(x * (x > 0.2), torch.randn(len(x), 2)) for x in vectors()]
    rows = loop(net, list(net.parameters()), data, LOSS)
    data = [(x.to_sparse(layout=layout), y) for x, y in data]
    compare(net, data, rows, True if name == "a layer" else None)
    check_blocks(net, data, rows, "", 1e-9, approximations=())


@pytest.mark.extensive
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
    check_blocks(net, data, rows, "", 1e-9, approximations=())


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


@pytest.mark.extensive
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
    p, plain = (Problem.of(net, nn.MSELoss(), [(X, y)]) for net in nets)
    found, expected = matrix(CASES[case].build(p)), CASES[case].dense(plain)
    torch.testing.assert_close(found, expected)


# --- samples


@pytest.mark.extensive
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
        p.build(KFACLinearOperator).trace()


@pytest.mark.extensive
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


@pytest.mark.extensive
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
