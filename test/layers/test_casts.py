"""Parameters that models cast to another precision before they use them."""

import logging
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from contract import error, matrix
from torch import Tensor, nn
from torch.nn import functional as F

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

Cast = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def quiet(caplog):
    caplog.set_level(logging.ERROR, "curvlinops")


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


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("use", MODELS)
def test_trace_of_ekfac(use: Callable, dtypes: tuple):
    found, expected = (
        build(EKFACLinearOperator, model, fisher_type="type-2").trace()
        for model in models(use, *dtypes[:2])
    )
    assert error(found, expected) <= dtypes[2]


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
