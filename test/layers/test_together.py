"""Equal uses of parameters, which are computed together."""

from collections.abc import Callable

import pytest
import torch
from contract import error
from models import Using
from sample_gradients import check_rows, loop
from torch import Tensor, nn

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.layers import recorded

LOSS, SIZE = nn.MSELoss(reduction="sum"), 4


def residual(s: Using, x: Tensor) -> Tensor:
    """Layers whose inputs are different tensors."""
    for layer in s.layers:
        x = x + torch.tanh(layer(x))
    return x.flatten(1)


def parallel(s: Using, x: Tensor) -> Tensor:
    """Layers with one input."""
    return sum(torch.tanh(layer(x)) for layer in s.layers).flatten(1)


def twice(s: Using, x: Tensor) -> Tensor:
    """Layers that are used twice."""
    return residual(s, residual(s, x).view_as(x))


def both_ways(s: Using, x: Tensor) -> Tensor:
    """Weights that are used twice, once transposed."""
    for layer in s.layers:
        x = torch.tanh(layer(x)) @ layer.weight
    return x.flatten(1)


def halves(s: Using, x: Tensor) -> Tensor:
    """Weights of which parts are used, other ones of each."""
    for i, layer in enumerate(s.layers):
        x = x + torch.tanh(x @ layer.weight[i % 2 :: 2].repeat(2, 1))
    return x.flatten(1)


def precisions(s: Using, x: Tensor) -> Tensor:
    """Inputs of layers in several dtypes."""
    for i, layer in enumerate(s.layers):
        dtype = torch.float64 if i % 2 else torch.float32
        x = x + torch.tanh(nn.functional.linear(x.to(dtype), layer.weight.to(dtype))).double()
    return x.flatten(1)


#: A function of an input, and of several layers.
FUNCTIONS: dict[str, Callable[[Using, Tensor], Tensor]] = {
    f.__name__: f for f in (residual, parallel, twice, both_ways, halves, precisions)
}
LINEAR = [(name, (SIZE,), nn.Linear) for name in FUNCTIONS]
LINEAR += [(name, (3, SIZE), nn.Linear) for name in ("parallel", "twice")]
IMAGES = [
    (name, (SIZE, 3, 3), lambda c, d, k=groups: nn.Conv2d(c, d, 3, padding=1, groups=k))
    for name, groups in [("residual", 1), ("parallel", 2)]
]


@pytest.mark.parametrize("at_once", [2**6, 2**20])
@pytest.mark.parametrize(("name", "shape", "layer"), [*LINEAR, *IMAGES])
def test_together(
    name: str,
    shape: tuple[int, ...],
    layer: Callable[[int, int], nn.Module],
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
):
    """The blocks of a layer do not depend on other layers."""
    torch.manual_seed(0)
    monkeypatch.setattr(recorded, "_COPIED", at_once)
    layers = nn.ModuleList(layer(SIZE, SIZE) for _ in range(3))
    model = Using(FUNCTIONS[name], layers=layers).double()
    X = torch.randn(7, *shape).double()
    y = torch.randn_like(model(X))
    data = [(X[:5], y[:5]), (X[5:], y[5:])]
    tolerance = 1e-6 if name == "precisions" else 1e-10
    rows = loop(model, list(model.parameters()), data, LOSS)
    arguments = model, LOSS, list(model.parameters()), data
    check_rows(PerSampleGradientLinearOperator(*arguments), rows, tolerance)
    options = {"fisher_type": "empirical", "fallback": "dense", "check_deterministic": False}
    for joint, approx in [(True, "expand"), (False, "reduce")]:
        options |= {"separate_weight_and_bias": not joint, "kfac_approx": approx}
        found = KFACLinearOperator(*arguments, **options).to_dense()
        blocks = [
            KFACLinearOperator(model, LOSS, list(one.parameters()), data, **options).to_dense()
            for one in layers
        ]
        assert error(found, torch.block_diag(*blocks)) <= tolerance
