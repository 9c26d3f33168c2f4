"""What a model makes without gradients is constant in every product; forward mode refuses it."""

from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlinops
from curvlinops.core import columns
from curvlinops.core.choice import NoDerivativeError

pytestmark = pytest.mark.extensive

Stop = Callable[[Callable[[], Tensor]], Tensor]


def by_context(f: Callable) -> Tensor:
    with torch.no_grad():
        return f()


def by_decorator(f: Callable) -> Tensor:
    return torch.no_grad()(f)()


def by_call(f: Callable) -> Tensor:
    torch.set_grad_enabled(False)
    out = f()
    torch.set_grad_enabled(True)
    return out


def by_nested(f: Callable) -> Tensor:
    with torch.no_grad():
        with torch.enable_grad(), torch.no_grad():
            f()
        with torch.enable_grad():
            f()
        return f()


def after_an_exception(f: Callable) -> Tensor:
    try:
        with torch.no_grad():
            raise ValueError
    except ValueError:
        return by_context(f)


def by_inference(f: Callable) -> Tensor:
    with torch.inference_mode():
        out = f()
    return out.clone()


def by_data(f: Callable) -> Tensor:
    return f().data


def by_numbers(f: Callable) -> Tensor:
    out = f()
    return torch.tensor(out.tolist(), dtype=out.dtype)


def by_detaching(f: Callable) -> Tensor:
    return f().detach()


STOPS = [
    *(by_context, by_decorator, by_call, by_nested, after_an_exception),
    *(by_inference, by_data, by_numbers, by_detaching),
]


class Replayed:
    """Keeps constants at the first evaluation, and returns them at the next ones."""

    def __init__(self):
        self._kept: list[Tensor] = []
        self._next: Iterator | None = None

    def __call__(self, f: Callable) -> Tensor:
        if self._next is None:
            self._kept.append(f().detach().clone())
            return self._kept[-1]
        return next(self._next)

    def rewind(self) -> None:
        self._next = iter(self._kept)


def weight_norm(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    w = m.first.weight
    return F.linear(x, 3 * w / stop(lambda: w.norm()))


def power_iteration(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    w, u = m.first.weight, torch.ones(5).to(x)
    v = stop(lambda: F.normalize(w.T @ u, dim=0))
    return F.linear(x, w / (u @ w @ v))


def rescaled(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    z = m.first(x)
    return z / (1 + stop(lambda: z.square().mean(1, keepdim=True)))


def gated_by_a_view(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    z = m.first(x)
    return z * stop(lambda: z[:, :1]) + stop(lambda: z.chunk(5, 1)[2])


def shifted_by_a_row(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    return m.first(x) * stop(lambda: next(iter(m.first.weight.T)))


def first_layer_constant(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    return stop(lambda: m.first(x))


MODELS = [
    *(weight_norm, power_iteration, rescaled),
    *(gated_by_a_view, shifted_by_a_row, first_layer_constant),
]


class Model(nn.Module):
    """A layer, a part of which is constant, and another layer."""

    def __init__(self, function: Callable, stop: Stop):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)
        self._function, self.stop = function, stop

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self._function(self, x, self.stop)))


FREE = {"allow_unused": True, "materialize_grads": True}


def flat(tensors) -> Tensor:
    return torch.cat([t.flatten() for t in tensors])


def slope(model: Model, x: Tensor, v: Tensor) -> Tensor:
    """Central difference of the outputs along v, all constants as they are."""
    model = Model(model._function, Replayed()).double()
    x, params = x.double(), list(model.parameters())
    steps = v.double().split([p.numel() for p in params])
    with torch.no_grad():
        model(x)

        def at(t: float) -> Tensor:
            for p, step in zip(params, steps, strict=True):
                p.add_(t * step.view_as(p))
            model.stop.rewind()
            out = model(x).flatten()
            for p, step in zip(params, steps, strict=True):
                p.sub_(t * step.view_as(p))
            return out

        return (at(1e-5) - at(-1e-5)) / 2e-5


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    params = list(model.parameters())
    rows = (torch.autograd.grad(z, params, retain_graph=True, **FREE) for z in model(x).flatten())
    return torch.stack([flat(row) for row in rows])


def check_products(model: nn.Module, x: Tensor, tolerance: float, **options) -> None:
    """Compare first products with the reverse-mode Jacobian."""
    y, params, N = torch.zeros(len(x), 2, dtype=x.dtype), list(model.parameters()), len(x)
    data, loss = [(x[:2], y[:2]), (x[2:], y[2:])], nn.MSELoss(reduction="sum")
    J, z = jacobian(model, x).double(), model(x).detach().double()
    rows = 2 * torch.einsum("nc,ncd->nd", z, J.reshape(N, 2, -1))
    # along the first weight, on whose size constants depend most
    v = flat([params[0].detach(), *(torch.ones_like(p) / 9 for p in params[1:])])
    w = v.double()
    options["check_deterministic"] = False
    op = curvlinops.TransposedJacobianLinearOperator(model, params, data, **options)
    found = {"Jacobian": (op.T @ v, J @ w)}
    for kind, truth in [
        ("PerSampleGradient", rows @ w),
        ("GGN", 2 * J.T @ (J @ w)),
        ("EF", rows.T @ (rows @ w)),
    ]:
        operator = getattr(curvlinops, f"{kind}LinearOperator")
        found[kind] = operator(model, loss, params, data, **options) @ v, truth
    for kind, (product, truth) in found.items():
        assert (product.double() - truth).norm() <= tolerance * truth.norm(), kind


def check_all_products(model: nn.Module, x: Tensor, tolerance: float, monkeypatch) -> None:
    with suppress(NoDerivativeError):  # but never wrong
        check_products(model, x, tolerance, autodiff="forward")
    check_products(model, x, tolerance)
    # as if graphs were large: the tangents come from a pass of their own
    monkeypatch.setitem(columns._BUDGETS, "cpu", 1)
    check_products(model, x, tolerance, cache="none")


@pytest.mark.parametrize("function", MODELS)
@pytest.mark.parametrize("stop", STOPS)
def test_constant_in_all_products(stop, function, monkeypatch):
    # in float32, where the dot-test notices large errors only
    model, x = Model(function, stop), torch.linspace(-1, 1, 9).reshape(3, 3)
    check_all_products(model, x, 1e-5, monkeypatch)


@pytest.mark.parametrize("function", MODELS)
def test_jacobian_is_slope_with_constants_kept(function):
    model, x = Model(function, by_context).double(), torch.linspace(-1, 1, 9).reshape(3, 3).double()
    v = torch.linspace(-1, 2, sum(p.numel() for p in model.parameters())).double()
    expected = slope(model, x, v)
    torch.testing.assert_close(jacobian(model, x) @ v, expected, rtol=1e-7, atol=1e-8)
    op = curvlinops.JacobianLinearOperator(model, list(model.parameters()), [(x, None)])
    torch.testing.assert_close(op @ v, expected, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("function", MODELS)
def test_hessian_with_constants(function):
    model, x = Model(function, by_context).double(), torch.linspace(-1, 1, 9).reshape(3, 3).double()
    params = list(model.parameters())
    gradient = flat(torch.autograd.grad(model(x).square().sum(), params, create_graph=True, **FREE))
    rows = [torch.autograd.grad(g, params, retain_graph=True, **FREE) for g in gradient]
    H = torch.stack([flat(row) for row in rows])
    torch.testing.assert_close(H, H.T)
    loss, data = nn.MSELoss(reduction="sum"), [(x, torch.zeros(3, 2).double())]
    op = curvlinops.HessianLinearOperator(model, loss, params, data)
    torch.testing.assert_close(op @ torch.eye(len(H)).double(), H)


class Enabled(nn.Module):
    """Carries on with gradients inside of a part without."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            size = self.first.weight.norm()
            with torch.enable_grad():
                z = torch.tanh(self.first(x) / size)
        return self.second(z)


class Inner(Enabled):
    """Takes a step with a gradient that is a constant, or with one that is not."""

    def __init__(self, create_graph: bool):
        super().__init__()
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        (g,) = torch.autograd.grad(z.square().square().sum(), z, create_graph=self.create_graph)
        return self.second(torch.tanh(z - 0.3 * g))


class Hooked(Enabled):
    """A hook divides by a norm without gradients."""

    def __init__(self):
        super().__init__()
        self.first.register_forward_hook(
            lambda module, args, out: out / by_context(lambda: module.weight.norm())
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class Cube(torch.autograd.Function):
    """x^3, computed with gradients switched on and off in between."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.save_for_forward(x)
        with torch.enable_grad():
            square = x.detach() * x.detach()
        with torch.no_grad():
            return x * square

    @staticmethod
    def backward(ctx, v):
        (x,) = ctx.saved_tensors
        return 3 * x * x * v

    @staticmethod
    def jvp(ctx, v):
        (x,) = ctx.saved_tensors
        return 3 * x * x * v


class Custom(Enabled):
    """A custom function that switches gradients itself."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(Cube.apply(self.first(x)))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize(
    "build", [Enabled, lambda: Inner(False), lambda: Inner(True), Hooked, Custom]
)
def test_other_ways(build, dtype, tolerance, monkeypatch):
    torch.manual_seed(0)
    model, x = build().to(dtype), torch.linspace(-1, 1, 9).reshape(3, 3).to(dtype)
    check_all_products(model, x, tolerance, monkeypatch)


def test_only_later_batches_have_constants():
    """The mode is chosen on the first one."""

    class Truncated(Enabled):
        def forward(self, x: Tensor) -> Tensor:
            if x[0, 0] > 0:
                z = by_context(lambda: self.first(x))
            else:
                z = self.first(x)
            return self.second(z * self.first(x))

    torch.manual_seed(0)
    model, x = Truncated().double(), torch.tensor([[-1.0, 2, 3], [1, 2, 0.5]]).double()
    params, v = list(model.parameters()), torch.linspace(-1, 2, 32).double()
    J = torch.cat([jacobian(model, x[:1]), jacobian(model, x[1:])])
    data = [(x[:1], None), (x[1:], None)]
    with pytest.raises(NotImplementedError, match="constants of its parameters.*reverse"):
        curvlinops.JacobianLinearOperator(model, params, data) @ v
    op = curvlinops.JacobianLinearOperator(model, params, data, autodiff="reverse")
    torch.testing.assert_close(op @ v, J @ v)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_layers_before_recurrent_ones(kind, dtype, tolerance, monkeypatch):
    """Their tangents travel through the composed cells, with and without a graph."""

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Embedding(5, 3)
            self.cell = getattr(nn, kind)(3, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.cell(self.first(x.long()))[0][:, -1]

    torch.manual_seed(0)
    model, x = Recurrent().to(dtype), torch.randint(5, (3, 4)).to(dtype)
    check_all_products(model, x, tolerance, monkeypatch)
