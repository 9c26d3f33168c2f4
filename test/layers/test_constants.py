"""Tensors that a model computes without gradients are constants in all products."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import CASES, error, matrix
from problems import Problem
from torch import Tensor, nn

pytestmark = pytest.mark.extensive


def by_context(f: Callable) -> Tensor:
    with torch.no_grad():
        return f()


def by_inference(f: Callable) -> Tensor:
    with torch.inference_mode():
        out = f()
    return out.clone()


def by_detaching(f: Callable) -> Tensor:
    return f().detach()


def by_gradient(f: Callable) -> Tensor:
    return torch.autograd.grad((y := f()).sin().sum(), y)[0]


class Model(nn.Module):
    """A layer, a function of it, and another layer."""

    def __init__(self, function: Callable):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.function(self, x)))


#: Functions of the first layer of which a part has no gradient.
FUNCTIONS: dict[str, Callable[[Model, Tensor, Callable], Tensor]] = {
    "weight": lambda m, x, stop: F.linear(x, 3 * m.first.weight / stop(m.first.weight.norm)),
    "activation": lambda m, x, stop: (z := m.first(x)) / (1 + stop(z.square)),
    "view": lambda m, x, stop: (z := m.first(x)) * stop(lambda: z[:, :1]),
    "layer": lambda m, x, stop: stop(lambda: m.first(x)),
    "little": lambda m, x, stop: m.first(x) / (1 + 1e-3 * stop(m.first.weight.norm)),
}


def _enabled(m: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.first.weight.norm()
        with torch.enable_grad():
            return torch.tanh(m.first(x) / size)


def _inner_step(m: Model, x: Tensor) -> Tensor:
    z = m.first(x)
    (g,) = torch.autograd.grad(z.square().square().sum(), z, create_graph=True)
    return z - 0.3 * g


#: Models that switch gradients on and off, but have none of these in their outputs.
OTHERS = {"enabled inside": _enabled, "inner step": _inner_step}

STOPS = [by_context, by_inference, by_detaching, by_gradient]
MODELS: dict[str, Callable[[], Model]] = {
    f"{name} {stop.__name__}": lambda f=f, stop=stop: Model(lambda m, x: f(m, x, stop))
    for name, f in FUNCTIONS.items()
    for stop in STOPS
    if (name, stop) != ("weight", by_gradient)  # whose gradient is that of a norm, a constant
} | {name: lambda f=f: Model(f) for name, f in OTHERS.items()}


def problem(name: str, dtype: torch.dtype = torch.float64) -> Problem:
    model, x = MODELS[name]().to(dtype), torch.linspace(-1, 1, 9).reshape(3, 3).to(dtype)
    y = torch.zeros(3, 2, dtype=dtype)
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    return Problem(model, nn.MSELoss(reduction="sum"), list(model.parameters()), data, mc=True)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", MODELS)
def test_first_products(name: str, dtype: torch.dtype, tolerance: float):
    """Forward mode would differentiate what is under ``no_grad``."""
    p = problem(name, dtype)
    # along the first weight, on whose size constants depend most
    first, *others = (param.detach() for param in p.params)
    v = torch.cat([first.flatten(), *(torch.ones(x.numel(), dtype=dtype) / 9 for x in others)])
    for case in ("jacobian", "gradients", "ggn", "fisher-samples"):
        product = CASES[case].build(p, check_deterministic=False) @ v
        assert error(product, CASES[case].dense(p) @ v.double()) <= tolerance, case


@pytest.mark.parametrize("name", ["weight by_context", "layer by_context"])
def test_hessian_with_constants(name: str):
    p = problem(name)
    assert error(matrix(CASES["hessian"].build(p)), CASES["hessian"].dense(p)) <= 1e-10
