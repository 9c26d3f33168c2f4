"""Forward mode is not used where it is wrong: constants, and functions that hide derivatives."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import CASES, error, matrix
from models import Using
from problems import Problem
from small import SQUARE, batches, build, mlp
from torch import Tensor, nn
from torch.autograd import forward_ad

from curvlinops import JacobianLinearOperator


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


def net(function: Callable[[Using, Tensor], Tensor]) -> nn.Module:
    """A layer, a function of it, and another layer."""
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 5), "second": nn.Linear(5, 2)}
    return Using(lambda m, x: m.second(torch.tanh(function(m, x))), **layers)


#: Functions of the first layer of which a part has no gradient.
FUNCTIONS: dict[str, Callable[[Using, Tensor, Callable], Tensor]] = {
    "weight": lambda m, x, stop: F.linear(x, 3 * m.first.weight / stop(m.first.weight.norm)),
    "activation": lambda m, x, stop: (z := m.first(x)) / (1 + stop(z.square)),
    "view": lambda m, x, stop: (z := m.first(x)) * stop(lambda: z[:, :1]),
    "layer": lambda m, x, stop: stop(lambda: m.first(x)),
    "little": lambda m, x, stop: m.first(x) / (1 + 1e-3 * stop(m.first.weight.norm)),
}


def _enabled(m: Using, x: Tensor) -> Tensor:
    with torch.no_grad():
        size = m.first.weight.norm()
        with torch.enable_grad():
            return torch.tanh(m.first(x) / size)


def _inner_step(m: Using, x: Tensor) -> Tensor:
    z = m.first(x)
    (g,) = torch.autograd.grad(z.square().square().sum(), z, create_graph=True)
    return z - 0.3 * g


#: Models that switch gradients on and off, but have none of these in their outputs.
OTHERS = {"enabled inside": _enabled, "inner step": _inner_step}

STOPS = [by_context, by_inference, by_detaching, by_gradient]
MODELS: dict[str, Callable[[], nn.Module]] = {
    f"{name} {stop.__name__}": lambda f=f, stop=stop: net(lambda m, x: f(m, x, stop))
    for name, f in FUNCTIONS.items()
    for stop in STOPS
    if (name, stop) != ("weight", by_gradient)  # whose gradient is that of a norm, a constant
} | {name: lambda f=f: net(f) for name, f in OTHERS.items()}


def problem(name: str, dtype: torch.dtype = torch.float64) -> Problem:
    model, x = MODELS[name]().to(dtype), torch.linspace(-1, 1, 9).reshape(3, 3).to(dtype)
    y = torch.zeros(3, 2, dtype=dtype)
    data = [(x[:2], y[:2]), (x[2:], y[2:])]
    return Problem.of(model, nn.MSELoss(reduction="sum"), data)


@pytest.mark.extensive
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


@pytest.mark.extensive
@pytest.mark.parametrize("name", ["weight by_context", "layer by_context"])
def test_hessian_with_constants(name: str):
    p = problem(name)
    assert error(matrix(CASES["hessian"].build(p)), CASES["hessian"].dense(p)) <= 1e-10


# --- models of which forward mode knows less


def shy(x: Tensor) -> Tensor:
    """Show the derivative to reverse mode only."""
    return x if forward_ad.unpack_dual(x).tangent is None else x.detach()


@pytest.mark.parametrize("kind", [*SQUARE, JacobianLinearOperator])
def test_products_do_not_vanish_in_silence(kind: type):
    v, model = torch.ones(31, dtype=torch.float64), Using(lambda s, x: shy(s.net(x)), net=mlp())
    assert error(build(kind, model) @ v, build(kind, mlp()) @ v) <= 1e-12


@pytest.mark.parametrize("kind", SQUARE)
def test_products_that_vanish(kind: type):
    dead = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double()
    nn.init.constant_(dead[0].bias, -100.0)
    assert not (build(kind, dead) @ torch.ones(12).double()).any()


@pytest.mark.parametrize("kind", SQUARE)
def test_autocast_inside_the_model(kind: type):
    def model(enabled: bool) -> nn.Module:
        def function(s: Using, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled):
                return s.conv(s.stem(x).unflatten(1, (2, 3)))[..., 0]

        torch.manual_seed(0)
        return Using(function, stem=nn.Linear(3, 6), conv=nn.Conv1d(2, 3, 3))

    data = [(X.float(), y) for X, y in batches(4)]
    found, expected = (build(kind, model(enabled), data) for enabled in (True, False))
    eye = torch.eye(found.shape[1])
    expected = expected @ eye
    # single columns, for which forward mode is tried first, and all at once
    for columns in (torch.stack([found @ e for e in eye], 1), found @ eye):
        assert error(columns, expected) <= 5e-2  # eight bits of mantissa


class Wrong(torch.autograd.Function):
    """Twice its input, with a wrong derivative in forward mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def jvp(ctx, tangent: Tensor) -> Tensor:
        return 3 * tangent

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return 2 * gradient


@pytest.mark.extensive
@pytest.mark.parametrize("is_wrong_at_first", [False, True])
def test_functions_that_forward_mode_gets_wrong(is_wrong_at_first: bool):
    """Each product is checked, also where earlier ones were right."""

    def function(s: Using, X: dict) -> Tensor:
        z = s.layers(X["x"])
        return Wrong.apply(z) if X["is_wrong"] else 2 * z

    data = [({"x": x, "is_wrong": is_wrong_at_first}, y) for x, y in batches(4)]
    p, plain = (
        Problem.of(model, nn.CrossEntropyLoss(), data)
        for f in (function, lambda s, X: 2 * s.layers(X["x"]))
        for model in [Using(f, layers=mlp())]
    )
    options = {"check_deterministic": False, "batch_size_fn": lambda X: len(X["x"])}
    G, v = CASES["ggn"].build(p, **options), torch.arange(31.0).cos().double()
    for is_wrong in (is_wrong_at_first, True):
        data[0][0]["is_wrong"] = is_wrong
        assert error(G @ v, CASES["ggn"].dense(plain) @ v) <= 1e-10
