"""What a model computes without gradients is constant in every product, in both modes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlinops
from curvlinops.autodiff.mode_selection import NoDerivativeError

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
CASES: dict[str, Callable[[], Model]] = {
    f"{name} {stop.__name__}": lambda f=f, stop=stop: Model(lambda m, x: f(m, x, stop))
    for name, f in FUNCTIONS.items()
    for stop in STOPS
    if (name, stop) != ("weight", by_gradient)  # whose gradient is that of a norm, a constant
} | {name: lambda f=f: Model(f) for name, f in OTHERS.items()}


def flat(tensors) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    params, options = list(model.parameters()), {"allow_unused": True, "materialize_grads": True}
    return torch.stack(
        [
            flat(torch.autograd.grad(z, params, retain_graph=True, **options))
            for z in model(x).flatten()
        ]
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", CASES)
def test_first_products(name: str, dtype: torch.dtype, tolerance: float):
    """Also where a dot-test in float32 would notice large errors only."""
    model = CASES[name]().to(dtype)
    x, params = torch.linspace(-1, 1, 9).reshape(3, 3).to(dtype), list(model.parameters())
    J, z = jacobian(model, x).double(), model(x).detach().double()
    rows = 2 * torch.einsum("nc,ncd->nd", z, J.reshape(3, 2, -1))
    # along the first weight, on whose size constants depend most
    v = flat([params[0].detach(), *(torch.ones_like(p) / 9 for p in params[1:])])
    w = v.double()
    y, loss = torch.zeros(3, 2, dtype=dtype), nn.MSELoss(reduction="sum")
    arguments = params, [(x[:2], y[:2]), (x[2:], y[2:])]
    truths = {
        "Jacobian": J @ w,
        "PerSampleGradient": rows @ w,
        "GGN": 2 * J.T @ (J @ w),
        "EF": rows.T @ (rows @ w),
    }
    for kind, truth in truths.items():
        losses = [] if kind == "Jacobian" else [loss]
        operator = getattr(curvlinops, f"{kind}LinearOperator")(
            model, *losses, *arguments, check_deterministic=False
        )
        assert (operator @ v - truth).norm() <= tolerance * truth.norm(), kind


@pytest.mark.parametrize("name", ["weight by_context", "activation by_gradient"])
def test_forward_mode_is_refused(name: str):
    model = CASES[name]()
    arguments = model, list(model.parameters()), [(torch.ones(2, 3), None)]
    J = curvlinops.JacobianLinearOperator(*arguments, autodiff="forward")
    with pytest.raises(NoDerivativeError, match="forward mode: .* under no_grad"):
        J @ torch.ones(J.shape[1])


@pytest.mark.parametrize("name", ["weight", "layer"])
def test_hessian_with_constants(name: str):
    model = CASES[f"{name} by_context"]().double()
    x, params = torch.linspace(-1, 1, 9).reshape(3, 3).double(), list(model.parameters())
    options = {"allow_unused": True, "materialize_grads": True}
    value = model(x).square().sum()
    gradient = flat(torch.autograd.grad(value, params, create_graph=True, **options))
    rows = [flat(torch.autograd.grad(g, params, retain_graph=True, **options)) for g in gradient]
    data, loss = [(x, torch.zeros(3, 2).double())], nn.MSELoss(reduction="sum")
    H = curvlinops.HessianLinearOperator(model, loss, params, data)
    torch.testing.assert_close(H @ torch.eye(len(rows)).double(), torch.stack(rows))
