"""Precisions: casts inside of models, low precision, and float16, whose range is narrow."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from contract import ALL, EXACT, error, matrix, vectors
from models import Using
from problems import Problem
from sample_gradients import check_rows, loop
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

Cast = Callable[[Tensor], Tensor]


def linear(s: Using, x: Tensor, c: Cast) -> Tensor:
    z = torch.tanh(F.linear(c(x), c(s.first.weight), c(s.first.bias)))
    return F.linear(z, c(s.last.weight.T).T, c(s.last.bias))


def head(s: Using, x: Tensor, c: Cast) -> Tensor:
    return F.linear(c(torch.tanh(s.first(x))), c(s.last.weight))


def used_twice(s: Using, x: Tensor, c: Cast) -> Tensor:
    weight, bias, z = c(s.square.weight), c(s.square.bias), c(x)
    for _ in range(2):
        z = torch.tanh(F.linear(z, weight, bias))
    return F.linear(z, c(s.last.weight), c(s.last.bias))


def parts(s: Using, x: Tensor, c: Cast) -> Tensor:
    left, right = c(s.both.weight).chunk(2)
    z = torch.tanh(F.linear(c(x), left, c(s.both.bias[:4])))
    z = z * F.linear(c(x), right, c(s.both.bias)[4:])
    return F.linear(z, c(s.last.weight.contiguous()), c(s.last.bias.clone()))


def tokens(s: Using, x: Tensor, c: Cast) -> Tensor:
    z = F.embedding((x > 0).long(), c(s.table.weight)).mT
    z = torch.tanh(F.conv1d(z, c(s.conv.weight), c(s.conv.bias), padding=1)).mean(2)
    return F.linear(z, c(s.last.weight), c(s.last.bias))


def normalized(s: Using, x: Tensor, c: Cast) -> Tensor:
    z = F.rms_norm(c(s.first(x)), (4,)) * c(s.norm.weight)
    return c(s.last(z.to(x.dtype)))


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


def casting(use: Callable, own: torch.dtype, cast: torch.dtype) -> nn.Module:
    """Return a model that casts to a dtype, and before the output back."""
    torch.manual_seed(0)
    layers = {name: LAYERS[name]() for name in MODELS[use]}
    if use is head:
        layers["last"].bias = None
    return Using(lambda s, x: use(s, x, lambda t: t.to(cast)).to(own), **layers).to(own)


def operators(kind: type, use: Callable, dtypes: tuple, **options: Any) -> list:
    """Return the operator of a model, and of the same in float64, in which casts do nothing."""
    generator = torch.Generator().manual_seed(1)
    X, y = torch.randn(9, 4, generator=generator).bfloat16(), torch.arange(9) % 3
    model, exact = (casting(use, *both) for both in (dtypes[:2], [torch.float64] * 2))
    exact.load_state_dict(model.state_dict())
    found = []
    for net, dtype in ((model, dtypes[0]), (exact, torch.float64)):
        data = [(X[part].to(dtype), y[part]) for part in (slice(5), slice(5, 9))]
        found.append(kind(net, nn.CrossEntropyLoss(), list(net.parameters()), data, **options))
    return found


@pytest.mark.extensive
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("approx, joint", [("expand", True), ("reduce", False)])
@pytest.mark.parametrize("use", MODELS)
def test_kfac(use: Callable, approx: str, joint: bool, dtypes: tuple):
    options = {"kfac_approx": approx, "separate_weight_and_bias": not joint}
    options["fisher_type"] = "type-2"
    found, expected = operators(KFACLinearOperator, use, dtypes, **options)
    assert found.report() == expected.report()
    for factor in [*found.input_covariances.values(), *found.gradient_covariances.values()]:
        assert factor.dtype == torch.float32
    assert error(matrix(found), matrix(expected)) <= dtypes[2]


@pytest.mark.extensive
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("use", MODELS)
def test_trace_of_ekfac(use: Callable, dtypes: tuple):
    found, expected = operators(EKFACLinearOperator, use, dtypes, fisher_type="type-2")
    assert error(found.trace(), expected.trace()) <= dtypes[2]


@pytest.mark.extensive
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("use", MODELS)
def test_samples(use: Callable, dtypes: tuple):
    found, expected = operators(PerSampleGradientLinearOperator, use, dtypes)
    check_rows(found, expected.dense(), dtypes[2])
    found, expected = operators(GGNDiagonalLinearOperator, use, dtypes)
    assert error(found.diagonal(), expected.diagonal()) <= dtypes[2]


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


@pytest.mark.parametrize("kind", [HessianLinearOperator, KFACLinearOperator])
@pytest.mark.parametrize("named", [False, True])
def test_parameters_are_refused(kind: type, named: bool):
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    model[1].half()
    params = dict(model.named_parameters()) if named else list(model.parameters())
    data = [(torch.randn(7, 4), torch.arange(7) % 3)]
    with pytest.raises(TypeError, match=r"'1.weight' is in float16.*bfloat16.*float32"):
        kind(model, nn.CrossEntropyLoss(), params, data)


def adapter(dim_in: int, dim_out: int) -> nn.Module:
    """Return a frozen layer, and an adapter of low rank, which computes in its own precision."""
    frozen = nn.Linear(dim_in, dim_out).requires_grad_(False)
    down, up = nn.Linear(dim_in, 2, bias=False), nn.Linear(2, dim_out, bias=False)
    return Using(
        lambda s, x: s.frozen(x) + s.up(s.down(x.to(s.up.weight.dtype))).to(x.dtype),
        frozen=frozen, down=down, up=up,
    )  # fmt: skip


def adapted(base: torch.dtype, adapters: torch.dtype) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(adapter(6, 8), nn.Tanh(), adapter(8, 3))
    for layer in (model[0], model[2]):
        layer.to(adapters).frozen.half().to(base)
    return model, [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("case", [*EXACT, "kfac"])
def test_adapters_of_a_frozen_base(case: str):
    X, y = torch.randn(12, 6).half(), torch.arange(12) % 3
    model, params = adapted(torch.float16, torch.float32)
    exact, exact_params = adapted(torch.float64, torch.float64)
    exact.load_state_dict(model.state_dict())
    options = {"fisher_type": "type-2"} if case == "kfac" else {}
    loss, data = nn.CrossEntropyLoss(), [(X, y)]
    A = ALL[case].build(Problem(model, loss, params, data, mc=True), **options)
    data = [(X.double(), y)]
    expected = ALL[case].build(Problem(exact, loss, exact_params, data, mc=True), **options)
    V = vectors(A, 2)
    assert error(A @ V, expected @ V.double()) < 1e-2
    assert error(A @ V[:, 0], (expected @ V.double())[:, 0]) < 1e-2


def within(dtype: torch.dtype) -> nn.Module:
    """Return an activation in half precision."""
    return Using(lambda _, x: x.to(dtype).tanh().to(x.dtype))


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", ["within", "output"])
def test_wide_models_with_a_part_in_half_precision(kind: type, dtype: torch.dtype, place: str):
    torch.manual_seed(0)
    first, second, X = nn.Linear(4, 5), nn.Linear(5, 3), torch.randn(7, 4).double()
    model, exact = (
        nn.Sequential(first, middle, second, *([middle] if place == "output" else [])).double()
        for middle in (within(dtype), nn.Tanh())
    )
    y, loss = torch.randint(3, (7,)), nn.CrossEntropyLoss()
    v = torch.ones(sum(p.numel() for p in model.parameters())).double()
    found, expected = (
        kind(net, loss, list(net.parameters()), [(X, y)]) @ v for net in (model, exact)
    )
    assert error(found, expected) < (0.05 if dtype == torch.bfloat16 else 5e-3)
