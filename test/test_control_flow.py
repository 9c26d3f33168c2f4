"""Models with PyTorch's control flow for compilers, against the same in Python."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch._dynamo  # as in programs that compile or train
from contract import error, matrix
from torch import Tensor, nn
from torch._higher_order_ops import map as mapped
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)


class Model(nn.Module):
    """A function of layers and an input, in PyTorch's control flow or in Python's."""

    def __init__(self, forward: Callable, special: bool):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self._forward, self.special = forward, special
        self.double()

    def forward(self, X: Tensor) -> Tensor:
        return self.head(self._forward(self, self.first(X)))


def _branch(model: Model, z: Tensor) -> Tensor:
    def true(z: Tensor) -> Tensor:
        return torch.tanh(model.second(z))

    def false(z: Tensor) -> Tensor:
        return nn.functional.layer_norm(z, (3,)) * 2

    is_deep = torch.tensor(z.shape[1] == 5)  # the same for all samples
    if model.special:
        return torch.cond(is_deep, true, false, (z,)).mean(1)
    return (true if is_deep else false)(z).mean(1)


def _by_row(model: Model, z: Tensor) -> Tensor:
    def row(z: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(z @ weight).sum(0)

    weight = model.second.weight
    return mapped(row, z, weight) if model.special else torch.stack([row(x, weight) for x in z])


def _recurrence(model: Model, z: Tensor) -> Tensor:
    def step(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(model.second(state) + x)
        return state, state * 2

    state = torch.zeros(len(z), 3, dtype=z.dtype)
    if model.special:
        last, states = scan(step, state, z, dim=1, reverse=True)
        return last + states.sum(1)
    states = []
    for x in z.unbind(1)[::-1]:
        state, out = step(state, x)
        states.append(out)
    return state + torch.stack(states).sum(0)


def _nested_recurrence(model: Model, z: Tensor) -> Tensor:
    def step(state: tuple, x: dict) -> tuple[tuple, dict]:
        h = torch.tanh(model.second(state[0]) + x["x"])
        return (h, state[1] + h), {"out": h.exp()}

    state = torch.zeros(len(z), 3, dtype=z.dtype), torch.ones(len(z), 3, dtype=z.dtype)
    if model.special:
        (_, total), out = scan(step, state, {"x": z}, dim=1)
        return total + out["out"].sum(1 if out["out"].shape[1] == z.shape[1] else 0)
    outs = []
    for x in z.unbind(1):
        state, out = step(state, {"x": x})
        outs.append(out["out"])
    return state[1] + torch.stack(outs).sum(0)


def _nested_until(model: Model, z: Tensor) -> Tensor:
    def step(i: Tensor, state: dict) -> tuple[Tensor, dict]:
        return i + 1, {"z": torch.tanh(model.second(state["z"]))}

    i, state = torch.tensor(0), {"z": z}
    if model.special:
        return while_loop(lambda i, _: i < 2, step, (i, state))[1]["z"].mean(1)
    for _ in range(2):
        i, state = step(i, state)
    return state["z"].mean(1)


def _until(model: Model, z: Tensor) -> Tensor:
    def step(i: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return i + 1, torch.tanh(model.second(z))

    i = torch.tensor(0)
    if model.special:
        return while_loop(lambda i, z: i < 3, step, (i, z))[1].mean(1)
    for _ in range(3):
        i, z = step(i, z)
    return z.mean(1)


FORWARDS = {
    "cond": _branch,
    "map": _by_row,
    "scan": _recurrence,
    "scan, nested": _nested_recurrence,
    "while_loop": _until,
    "while_loop, nested": _nested_until,
}
OPERATORS = {
    "hessian": (HessianLinearOperator, {}),
    "ggn": (GGNLinearOperator, {}),
    "fisher": (EFLinearOperator, {}),
    "gradients": (PerSampleGradientLinearOperator, {}),
    "jacobian": (JacobianLinearOperator, {}),
    "kfac": (KFACLinearOperator, {"fisher_type": "empirical"}),
    "ekfac": (EKFACLinearOperator, {"fisher_type": "empirical"}),
}


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize("forward", FORWARDS)
def test_control_flow(forward: str, name: str):
    kind, options = OPERATORS[name]
    data = [(torch.randn(n, t, 4).double(), torch.randint(2, (n,))) for n, t in ((3, 5), (2, 4))]
    found, expected = [], []
    for special, matrices in ((True, found), (False, expected)):
        model = Model(FORWARDS[forward], special)
        # parameters that not all branches use
        params = [p for n, p in model.named_parameters() if n != "second.bias"]
        loss = () if name == "jacobian" else (nn.CrossEntropyLoss(),)
        for cache in ("none", "graph"):
            operator = kind(model, *loss, params, data, cache=cache, **options)
            matrices += [matrix(operator), matrix(operator)]
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= 1e-12


FIRST = """
import sys, torch, curvlinops
class Model(torch.nn.Linear):
    def forward(self, X):
        return torch.cond(torch.tensor(True), torch.tanh, torch.sin, (super().forward(X),))
model = Model(3, 2)
assert "torch._dynamo" not in sys.modules
data = [(torch.ones(4, 3), torch.ones(4, 2))]
G = curvlinops.GGNLinearOperator(model, torch.nn.MSELoss(), list(model.parameters()), data)
assert (G @ torch.ones(8)).norm() > 0
"""


def test_control_flow_before_anything_is_compiled():
    subprocess.run([sys.executable, "-c", FIRST], check=True)


def test_exported_branches():
    model = Model(_branch, True)
    X, y = torch.randn(3, 5, 4).double(), torch.randint(2, (3,))
    exported = torch.export.export(model, (X,), strict=True).module()
    matrices = [
        matrix(HessianLinearOperator(m, nn.CrossEntropyLoss(), list(m.parameters()), [(X, y)]))
        for m in (exported, model)
    ]
    assert error(*matrices) <= 1e-12
