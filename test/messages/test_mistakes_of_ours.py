"""Errors in the package's own code are not taken for errors of the user's code."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Using
from small import build, dense, mlp
from torch import Tensor, nn

import curvlinops
from curvlinops import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)


def solve() -> nn.Module:
    """A parameter without a rule."""
    function = lambda s, x: torch.linalg.solve(s.weight, x.T).T  # noqa: E731
    return Using(function, weight=torch.eye(3, dtype=torch.float64))


def rows(model: nn.Module, **options: Any) -> Tensor:
    return build(PerSampleGradientLinearOperator, model, **options).dense()


def decayed(model: nn.Module) -> Tensor:
    loss = lambda z, y: F.cross_entropy(z, y) + model[0].weight.square().sum()  # noqa: E731
    return rows(model, loss=loss, reduction="mean")


def penalized(z: Tensor, y: Tensor) -> Tensor:
    return z.square().square().sum()


def dead(model: nn.Module) -> Tensor:
    """Rows without a gradient are assigned to samples with other values of the parameters."""
    layer = nn.Linear(3, 2).double()
    nn.init.zeros_(layer.weight), nn.init.constant_(layer.bias, -1.0)
    net = nn.Sequential(layer, nn.ReLU(), nn.Flatten(1), nn.Linear(16, 5)).double()
    data = [(torch.randn(2, 8, 3).double(), torch.tensor([0, 1]))]
    return build(KFACLinearOperator, net, data, fisher_type="type-2", kfac_approx="reduce").trace()


#: Functions that are called where errors of users' code lead to another way, and their callers.
FALLBACKS: dict[str, Callable[[nn.Module], Any]] = {
    "risk.derivatives.vjp_columns": lambda m: dense(HessianLinearOperator, m),
    "risk.derivatives.forward_ad": lambda m: build(GGNLinearOperator, m) @ torch.ones(31),
    "risk.batch_problem.select_samples": lambda m: build(EFLinearOperator, m),
    "autodiff.evaluation.copy_containers": lambda m: dense(GGNLinearOperator, m),
    "layers.samples.RecordedBatch": rows,
    "layers.graph.graph_nodes": rows,
    "layers.fallback._check_gradients": lambda m: rows(nn.Sequential(solve(), m)),
    "operators.loss_rows.gradient": decayed,
    "losses.generic.select_samples": lambda m: build(
        HessianLinearOperator, m, loss=penalized, reduction="sum"
    ),
    "losses.generic.vjp": lambda m: (
        build(GGNLinearOperator, m, loss=penalized, reduction="sum") @ torch.ones(31)
    ),
}


@pytest.mark.parametrize("kind", [NameError, AttributeError, AssertionError])
@pytest.mark.parametrize("place", FALLBACKS)
def test_mistakes_of_ours_surface(place: str, kind: type, monkeypatch: pytest.MonkeyPatch):
    FALLBACKS[place](mlp())
    code = "def mistake(*args, **kwargs):\n    raise kind('a mistake of ours')\n"
    namespace = {"kind": kind}
    exec(compile(code, curvlinops.__file__, "exec"), namespace)  # as a function of the package
    if place.endswith("forward_ad"):  # a module
        mistake = SimpleNamespace(dual_level=namespace["mistake"])
    else:
        mistake = namespace["mistake"]
    monkeypatch.setattr(f"curvlinops.{place}", mistake)
    with pytest.raises(kind, match="a mistake of ours"):
        FALLBACKS[place](mlp())
