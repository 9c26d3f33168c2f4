"""Statistics of trained models: what float32 returns, against float64.

Random networks of unit scale have no large features, no rare classes, no dead units. Rounding
errors of float32 then look as if they were relative to the largest number of a matrix.
"""

import copy
import warnings
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tables import core, in_turns
from torch import Tensor, nn
from torch.nn.functional import gelu

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)
from curvlinops.layers.covariance import second_moment

DOUBLE = torch.float64

Problem = tuple[nn.Module, nn.Module, Tensor, Tensor]


class LargeFeature(nn.Module):
    """One feature is large after the normalization, as in language models."""

    def __init__(self, size: float, outputs: int = 4):
        super().__init__()
        self.norm, self.first, self.head = (
            nn.LayerNorm(16),
            nn.Linear(16, 20),
            nn.Linear(20, outputs),
        )
        with torch.no_grad():
            self.norm.bias[3] = size
            self.first.weight[:, 3] /= size

    def forward(self, x: Tensor) -> Tensor:
        return self.head(gelu(self.first(self.norm(x))))


def mlp(inputs: int, outputs: int, activation: type[nn.Module] = nn.Tanh) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, 12), activation(), nn.Linear(12, 12), activation(), nn.Linear(12, outputs)
    )


def classes(number: int, samples: int) -> Tensor:
    return torch.arange(samples) % number


def large_feature(size: float) -> Problem:
    return LargeFeature(size), nn.CrossEntropyLoss(), torch.randn(96, 16), classes(4, 96)


def years_and_money() -> Problem:
    columns = 2000 + 8 * torch.randn(96, 1), 5e4 * torch.randn(96, 1).exp(), torch.randn(96, 2)
    return mlp(4, 2), nn.CrossEntropyLoss(), torch.cat(columns, 1), classes(2, 96)


def prices() -> Problem:
    X = torch.randn(96, 6)
    return mlp(6, 1), nn.MSELoss(), X, 3e5 + 1e5 * (X[:, :1] + torch.randn(96, 1))


def prices_of_large_features() -> Problem:
    return (
        LargeFeature(3000.0, 1),
        nn.MSELoss(),
        torch.randn(96, 16),
        3e5 + 1e5 * torch.randn(96, 1),
    )


def counts() -> Problem:
    X = torch.poisson(torch.rand(96, 6) * torch.tensor([0.3, 1.0, 5.0, 100.0, 1000.0, 3.0]))
    return mlp(6, 3, nn.ReLU), nn.CrossEntropyLoss(), X, classes(3, 96)


def correlated() -> Problem:
    X = 3 * torch.randn(96, 1) + 0.01 * torch.randn(96, 12)
    return mlp(12, 3), nn.CrossEntropyLoss(), X, classes(3, 96)


def confident() -> Problem:
    model = mlp(6, 4)
    with torch.no_grad():
        model[-1].weight *= 50
    return model, nn.CrossEntropyLoss(), torch.randn(48, 6), classes(4, 48)


def dead_units() -> Problem:
    model = mlp(6, 3, nn.ReLU)
    with torch.no_grad():
        model[0].bias[:5] = -100.0
    return model, nn.CrossEntropyLoss(), torch.randn(48, 6), classes(3, 48)


def pixels() -> Problem:
    layers = nn.Conv2d(1, 6, 3), nn.ReLU(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(24, 3)
    X = (128 + 60 * torch.randn(32, 1, 8, 8)).clamp(0, 255)
    return nn.Sequential(*layers), nn.CrossEntropyLoss(), X, classes(3, 32)


def few_rows() -> Problem:
    return mlp(30, 3), nn.CrossEntropyLoss(), torch.randn(10, 30), classes(3, 10)


def small_inputs() -> Problem:
    return mlp(6, 3), nn.CrossEntropyLoss(), 1e-6 * torch.randn(48, 6), classes(3, 48)


PROBLEMS: dict[str, Callable[[], Problem]] = {
    **{f"feature of {x:g}": lambda x=x: large_feature(x) for x in (30.0, 300.0, 3000.0)},
    "years and money": years_and_money,
    "prices": prices,
    "prices of large features": prices_of_large_features,
    "counts": counts,
    "correlated": correlated,
    "confident": confident,
    "dead units": dead_units,
    "pixels": pixels,
    "few rows": few_rows,
    "small inputs": small_inputs,
}
FISHER_TYPES = ["type-2", "empirical"]


def quantities(problem: Problem, fisher_type: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return products, inverses and their kin in a dtype."""
    model, loss, X, y = copy.deepcopy(problem)
    model, X = model.to(dtype), X.to(dtype)
    y = y.to(dtype) if y.is_floating_point() else y
    cut = len(X) // 3
    arguments = (
        model,
        loss,
        dict(model.named_parameters()),
        [(X[:cut], y[:cut]), (X[cut:], y[cut:])],
    )
    H = HessianLinearOperator(*arguments)
    v = torch.randn(H.shape[0], generator=torch.Generator().manual_seed(1), dtype=DOUBLE).to(dtype)
    operators = H, GGNLinearOperator(*arguments), EFLinearOperator(*arguments)
    found = {type(A).__name__: A @ v for A in operators}
    found["norms"] = PerSampleGradientLinearOperator(*arguments).norms()
    K = KFACLinearOperator(*arguments, fisher_type=fisher_type)
    E = EKFACLinearOperator(*arguments, fisher_type=fisher_type)
    found |= {"K": K @ v, "E": E @ v, "trace": K.trace()}
    for d in (0.1, 1e-2, 1e-3):
        exact = K.inverse(d, use_exact_damping=True)
        found |= {
            f"inverse {d}": K.inverse(d) @ v,
            f"heuristic {d}": K.inverse(d, use_heuristic_damping=True) @ v,
            f"exact {d}": exact @ v,
            f"EKFAC {d}": E.inverse(d) @ v,
            f"log-determinants {d}": torch.stack([x.damped(d).logdet() for x in (K, E)]),
            f"variances {d}": exact.diagonal(),
            f"root {d}": E.damped(d).power(-0.5) @ v,
        }
    return {name: x.to(DOUBLE) for name, x in found.items()}


@pytest.mark.parametrize(
    "name, fisher_type",
    core(in_turns(PROBLEMS, FISHER_TYPES), product(PROBLEMS, FISHER_TYPES)),
)
def test_float32_against_float64(name: str, fisher_type: str):
    torch.manual_seed(0)
    problem = PROBLEMS[name]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # all of these dampings decide
        found, expected = (
            quantities(problem, fisher_type, dtype) for dtype in (torch.float32, DOUBLE)
        )
    errors = {k: float((found[k] - x).norm() / x.norm()) for k, x in expected.items()}
    assert {k: e for k, e in errors.items() if not e <= 1e-2} == {}


def test_rare_class():
    """Small eigenvalues of B are lost in the sum of squares: a warning says so."""
    torch.manual_seed(0)
    y = (torch.arange(64) < 2).float().unsqueeze(1)
    problem = mlp(8, 1), nn.BCEWithLogitsLoss(pos_weight=torch.tensor(1e3)), torch.randn(64, 8), y
    K = kfac(problem, torch.float32)
    with pytest.warns(UserWarning, match="below the rounding errors"):
        K.inverse(1e-4)


def kfac(problem: Problem, dtype: torch.dtype, **options: Any) -> KFACLinearOperator:
    model, loss, X, y = copy.deepcopy(problem)
    model, y = model.to(dtype), y.to(dtype) if y.is_floating_point() else y
    options = {"fisher_type": "empirical"} | options
    return KFACLinearOperator(
        model, loss, dict(model.named_parameters()), [(X.to(dtype), y)], **options
    )


def test_converged_model():
    """Where float32's own gradient is the limit: it is as good as plain autograd in float32."""
    torch.manual_seed(0)
    X, model = torch.randn(48, 6), mlp(6, 1)
    y = model(X).detach() + 1e-4 * torch.randn(48, 1)
    grads = {}
    for dtype in (torch.float32, DOUBLE):
        m = copy.deepcopy(model).to(dtype)
        loss = nn.MSELoss()(m(X.to(dtype)), y.to(dtype))
        plain = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(m.parameters()))])
        arguments = m, nn.MSELoss(), dict(m.named_parameters()), [(X.to(dtype), y.to(dtype))]
        rows = PerSampleGradientLinearOperator(*arguments).to_dense()
        grads[dtype] = plain.to(DOUBLE), torch.as_tensor(rows).to(DOUBLE).mean(0)
    limit, expected = (grads[dtype][0] for dtype in (torch.float32, DOUBLE))
    errors = [(grads[torch.float32][1] - expected).norm(), (limit - expected).norm()]
    assert errors[0] <= 3 * errors[1] + 1e-6 * expected.norm()


# --- what a damping does not decide


def lost(dtype: torch.dtype, rows: int = 96, damping: float = 1e-8, **options: Any) -> list[str]:
    """Return the warnings of an inverse for features that are almost equal."""
    torch.manual_seed(0)
    X = torch.randn(rows, 1) + 1e-5 * torch.randn(rows, 6)
    X = X if rows > 6 else torch.randn(rows, 6)
    K = kfac((mlp(6, 3), nn.CrossEntropyLoss(), X, classes(3, rows)), dtype)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        K.inverse(damping, **options)
    return [str(warning.message) for warning in found]


@pytest.mark.parametrize("options", [{}, {"use_exact_damping": True}])
def test_damping_below_rounding_errors_is_said(options: dict):
    (message,) = lost(torch.float32, **options)
    assert "Block '0.weight'" in message and "float64" in message
    least = float(message.split("From ")[1].split(" on")[0])
    assert 1e-8 < least < 1e-5
    assert not lost(torch.float32, damping=2 * least, **options)
    assert not lost(DOUBLE, **options)
    # fewer rows than columns: the factor has a null space
    assert not lost(torch.float32, rows=4, **options)


@pytest.mark.parametrize("rows", [500, 20_000])
@pytest.mark.parametrize("size", [3, 20, 60, 200])
def test_sums_of_squares_have_the_errors_of_few_operations(rows: int, size: int):
    """Narrow products add one row after the other, which loses digits of long sums."""
    torch.manual_seed(0)
    for x in (torch.randn(rows, size) + 1, torch.rand(2, rows, size), torch.rand(size, rows).mT):
        expected = x.to(DOUBLE).mT @ x.to(DOUBLE)
        scales = expected.diagonal(dim1=-1, dim2=-2).sqrt()
        scales = scales.unsqueeze(-1) * scales.unsqueeze(-2)
        error = ((second_moment(x) - expected) / scales).abs().max()
        assert error <= 6 * torch.finfo(torch.float32).eps
