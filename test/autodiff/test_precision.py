"""Precisions: casts inside of models, low precision, and float16, whose range is narrow."""

import functools
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from contract import error, matrix
from models import Using
from sample_gradients import loop
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

Cast = Callable[[Tensor], Tensor]


class Casting(nn.Module):
    """A model that casts to a dtype, and before the output back."""

    def __init__(self, use: Callable, layers: dict[str, nn.Module], dtype: torch.dtype):
        super().__init__()
        self.layers, self.use, self.dtype = nn.ModuleDict(layers), use, dtype

    def forward(self, x: Tensor) -> Tensor:
        out = self.use(self.layers, x, lambda tensor: tensor.to(self.dtype))
        return out.to(next(self.parameters()).dtype)


def linear(layers: nn.ModuleDict, x: Tensor, c: Cast) -> Tensor:
    first, last = layers["first"], layers["last"]
    z = torch.tanh(F.linear(c(x), c(first.weight), c(first.bias)))
    return F.linear(z, c(last.weight.T).T, c(last.bias))


def head(layers: nn.ModuleDict, x: Tensor, c: Cast) -> Tensor:
    z = torch.tanh(layers["first"](x))
    return F.linear(c(z), c(layers["last"].weight))


def used_twice(layers: nn.ModuleDict, x: Tensor, c: Cast) -> Tensor:
    square, last = layers["square"], layers["last"]
    weight, bias, z = c(square.weight), c(square.bias), c(x)
    for _ in range(2):
        z = torch.tanh(F.linear(z, weight, bias))
    return F.linear(z, c(last.weight), c(last.bias))


def parts(layers: nn.ModuleDict, x: Tensor, c: Cast) -> Tensor:
    both, last = layers["both"], layers["last"]
    left, right = c(both.weight).chunk(2)
    z = torch.tanh(F.linear(c(x), left, c(both.bias[:4])))
    z = z * F.linear(c(x), right, c(both.bias)[4:])
    return F.linear(z, c(last.weight.contiguous()), c(last.bias.clone()))


def tokens(layers: nn.ModuleDict, x: Tensor, c: Cast) -> Tensor:
    table, conv, last = layers["table"], layers["conv"], layers["last"]
    z = F.embedding((x > 0).long(), c(table.weight)).mT
    z = torch.tanh(F.conv1d(z, c(conv.weight), c(conv.bias), padding=1)).mean(2)
    return F.linear(z, c(last.weight), c(last.bias))


def normalized(layers: nn.ModuleDict, x: Tensor, c: Cast) -> Tensor:
    z = F.rms_norm(c(layers["first"](x)), (4,)) * c(layers["norm"].weight)
    return c(layers["last"](z.to(x.dtype)))


LAYERS = {
    "first": lambda: nn.Linear(4, 4),
    "square": lambda: nn.Linear(4, 4),
    "both": lambda: nn.Linear(4, 8),
    "table": lambda: nn.Embedding(2, 3),
    "conv": lambda: nn.Conv1d(3, 4, 3, padding=1),
    "norm": lambda: nn.RMSNorm(4),
    "last": lambda: nn.Linear(4, 3),
}
MODELS = {
    linear: ["first", "last"],
    head: ["first", "last"],
    used_twice: ["square", "last"],
    parts: ["both", "last"],
    tokens: ["table", "conv", "last"],
    normalized: ["first", "norm", "last"],
}
#: Precisions of parameters and of casts, and the tolerance.
DTYPES = [
    (torch.float32, torch.float64, 1e-5),
    (torch.float32, torch.bfloat16, 5e-2),
    (torch.bfloat16, torch.float32, 5e-2),
]


def models(use: Callable, own: torch.dtype, cast: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """The model, and the same in float64, in which casts do nothing."""
    torch.manual_seed(0)
    layers = {name: LAYERS[name]() for name in MODELS[use]}
    model = Casting(use, layers, cast).to(own)
    if use is head:
        model.layers["last"].bias = None
    double = deepcopy(model).double()
    double.dtype = torch.float64
    return model, double


def build(kind: type, model: nn.Module, **options):
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    X, y = torch.randn(9, 4, generator=generator).bfloat16(), torch.arange(9) % 3
    data = [(X[part].to(dtype), y[part]) for part in (slice(5), slice(5, 9))]
    return kind(model, nn.CrossEntropyLoss(), list(model.parameters()), data, **options)


@pytest.mark.extensive
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("approx, joint", [("expand", True), ("reduce", False)])
@pytest.mark.parametrize("use", MODELS)
def test_kfac(use: Callable, approx: str, joint: bool, dtypes: tuple):
    options = {"kfac_approx": approx, "separate_weight_and_bias": not joint}
    options["fisher_type"] = "type-2"
    found, expected = (
        build(KFACLinearOperator, model, **options) for model in models(use, *dtypes[:2])
    )
    assert found.report() == expected.report()
    for factor in [*found.input_covariances.values(), *found.gradient_covariances.values()]:
        assert factor.dtype == torch.float32
    assert error(matrix(found), matrix(expected)) <= dtypes[2]


@pytest.mark.extensive
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("use", MODELS)
def test_trace_of_ekfac(use: Callable, dtypes: tuple):
    found, expected = (
        build(EKFACLinearOperator, model, fisher_type="type-2").trace()
        for model in models(use, *dtypes[:2])
    )
    assert error(found, expected) <= dtypes[2]


@pytest.mark.extensive
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("use", MODELS)
def test_samples(use: Callable, dtypes: tuple):
    own, double = models(use, *dtypes[:2])
    tolerance = dtypes[2]
    found, expected = (build(PerSampleGradientLinearOperator, model) for model in (own, double))
    assert error(matrix(found), matrix(expected)) <= tolerance
    assert error(matrix(found.T), matrix(expected.T)) <= tolerance
    assert error(found.norms(), expected.norms()) <= tolerance
    assert error(found.gram(), expected.gram()) <= tolerance
    found, expected = (build(GGNDiagonalLinearOperator, model) for model in (own, double))
    assert error(found.diagonal(), expected.diagonal()) <= tolerance


# --- low precision


def _key_bias(s: Using, x: Tensor) -> Tensor:
    return (s.q(x) @ s.k(x).mT).softmax(-1) @ x


def _bias_before_norm(s: Using, x: Tensor) -> Tensor:
    return F.layer_norm(s.q(x) + s.k.bias.sum(), (4,))


def _attention(s: Using, x: Tensor) -> Tensor:
    return s.attention(x, x, x)[0]


@pytest.mark.extensive
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize("function", [_key_bias, _bias_before_norm, _attention])
def test_low_precision(function: Callable, dtype: torch.dtype, tolerance: float):
    """Gradients that add up to zero, and rows in an unusual order, are known as such."""
    torch.manual_seed(0)
    if function is _attention:
        parts = {"attention": nn.MultiheadAttention(4, 2, batch_first=True)}
    else:
        parts = {"q": nn.Linear(4, 4), "k": nn.Linear(4, 4)}
    net = Using(lambda s, x: torch.tanh(function(s, x)).flatten(1), **parts).to(dtype)
    exact = deepcopy(net).double()
    inputs = [x.to(dtype) for x in (torch.randn(3, 5, 4), torch.randn(2, 5, 4))]
    data = [(x, torch.randn(len(x), 20).to(dtype)) for x in inputs]
    loss = nn.MSELoss(reduction="sum")
    operator = PerSampleGradientLinearOperator(net, loss, list(net.parameters()), data)
    double = [(x.double(), y.double()) for x, y in data]
    rows = loop(exact, list(exact.parameters()), double, loss)
    assert error(operator.dense(), rows) <= tolerance
    assert not operator.fallbacks


# --- float16: refused in params; frozen layers, and parts, in it work


KINDS: dict[str, Callable] = {
    "hessian": HessianLinearOperator,
    "ggn": GGNLinearOperator,
    "fisher": EFLinearOperator,
    "jacobian": lambda m, _, p, d, **k: JacobianLinearOperator(m, p, d, **k),
    "transpose": lambda m, _, p, d, **k: JacobianLinearOperator(m, p, d, **k).T,
    "rows": PerSampleGradientLinearOperator,
    "kfac": functools.partial(KFACLinearOperator, fisher_type="type-2"),
}


@pytest.mark.parametrize("kind", [HessianLinearOperator, KFACLinearOperator])
@pytest.mark.parametrize("named", [False, True])
def test_parameters_are_refused(kind: type, named: bool):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[1].half()
    params = dict(model.named_parameters()) if named else list(model.parameters())
    data = [(torch.randn(7, 4), torch.arange(7) % 3)]
    with pytest.raises(TypeError, match=r"'1.weight' is in float16.*bfloat16.*float32"):
        kind(model, nn.CrossEntropyLoss(), params, data)


class Adapted(nn.Module):
    """A frozen layer, and an adapter of low rank, which computes in its own precision."""

    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.frozen = nn.Linear(dim_in, dim_out).requires_grad_(False)
        self.down, self.up = nn.Linear(dim_in, 2, bias=False), nn.Linear(2, dim_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x.to(self.up.weight.dtype))).to(x.dtype)


def adapted(base: torch.dtype, adapters: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(Adapted(6, 8), nn.Tanh(), Adapted(8, 3))
    for layer in (model[0], model[2]):
        layer.to(adapters).frozen.half().to(base)
    return model, [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_a_frozen_base(kind: str):
    X, y = torch.randn(12, 6).half(), torch.arange(12) % 3
    model, params = adapted(torch.float16, torch.float32)
    exact, exact_params = adapted(torch.float64, torch.float64)
    with torch.no_grad():
        for p, q in zip(params, exact_params, strict=True):
            q.copy_(p)
    loss = nn.CrossEntropyLoss()
    A = KINDS[kind](model, loss, params, [(X, y)])
    expected = KINDS[kind](exact, loss, exact_params, [(X.double(), y)])
    V = torch.randn(A.shape[1], 2)
    assert error(A @ V, expected @ V.double()) < 1e-2
    assert error(A @ V[:, 0], (expected @ V.double())[:, 0]) < 1e-2


class Within(nn.Module):
    """An activation in half precision."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).tanh().to(x.dtype)


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["within", "output"])
def test_wide_models_with_a_part_in_half_precision(kind: type, dtype: torch.dtype, place: str):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 5), Within(dtype), nn.Linear(5, 3)]
    layers = [*layers, Within(dtype)] if place == "output" else layers
    model, X = nn.Sequential(*layers).double(), torch.randn(7, 4).double()
    exact = deepcopy(nn.Sequential(*(nn.Tanh() if isinstance(m, Within) else m for m in layers)))
    y, loss = torch.randint(3, (7,)), nn.CrossEntropyLoss()
    v = torch.ones(sum(p.numel() for p in model.parameters())).double()
    found = kind(model, loss, list(model.parameters()), [(X, y)]) @ v
    expected = kind(exact, loss, list(exact.parameters()), [(X, y)]) @ v
    assert error(found, expected) < (0.05 if dtype == torch.bfloat16 else 5e-3)
