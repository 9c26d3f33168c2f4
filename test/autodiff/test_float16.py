"""float16, whose range is narrow: refused in ``params``; frozen layers, and parts, in it work."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

KINDS: dict[str, Callable] = {
    "hessian": HessianLinearOperator,
    "ggn": GGNLinearOperator,
    "fisher": EFLinearOperator,
    "jacobian": lambda m, _, p, d, **k: JacobianLinearOperator(m, p, d, **k),
    "transpose": lambda m, _, p, d, **k: JacobianLinearOperator(m, p, d, **k).T,
    "rows": PerSampleGradientLinearOperator,
}


def relative(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


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
    assert relative(A @ V, expected @ V.double()) < 1e-2
    assert relative(A @ V[:, 0], (expected @ V.double())[:, 0]) < 1e-2


def test_kronecker_factors_of_adapters():
    X, y = torch.randn(12, 6).half(), torch.arange(12) % 3
    model, params = adapted(torch.float16, torch.float32)
    exact, exact_params = adapted(torch.float64, torch.float64)
    with torch.no_grad():
        for p, q in zip(params, exact_params, strict=True):
            q.copy_(p)
    loss = nn.CrossEntropyLoss()
    K = KFACLinearOperator(model, loss, params, [(X, y)], fisher_type="type-2")
    expected = KFACLinearOperator(
        exact, loss, exact_params, [(X.double(), y)], fisher_type="type-2"
    )
    v = torch.randn(K.shape[1])
    assert relative(K @ v, expected @ v.double()) < 1e-2


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
    assert relative(found, expected) < (0.05 if dtype == torch.bfloat16 else 5e-3)
