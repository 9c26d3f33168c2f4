"""What a model makes without gradients is constant in every product, in both modes."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import curvlinops
from curvlinops.autodiff import backward
from curvlinops.autodiff.mode_selection import NoDerivativeError

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


def by_inference(f: Callable) -> Tensor:
    with torch.inference_mode():
        out = f()
    return out.clone()


def by_detaching(f: Callable) -> Tensor:
    return f().detach()


STOPS = [by_context, by_decorator, by_call, by_inference, by_detaching]


def weight_norm(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    w = m.first.weight
    return F.linear(x, 3 * w / stop(lambda: w.norm()))


def rescaled(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    z = m.first(x)
    return z / (1 + stop(lambda: z.square().mean(1, keepdim=True)))


def gated_by_a_view(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    z = m.first(x)
    return z * stop(lambda: z[:, :1]) + stop(lambda: z.chunk(5, 1)[2])


def first_layer_constant(m: "Model", x: Tensor, stop: Stop) -> Tensor:
    return stop(lambda: m.first(x))


#: The last one is a view, which forward mode differentiates: a dot-test notices.
MODELS = [weight_norm, rescaled, first_layer_constant, gated_by_a_view]


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
    for autodiff in ("forward", "auto"):
        check_products(model, x, tolerance, autodiff=autodiff)
    # as if graphs were large: the tangents come from a pass of their own
    monkeypatch.setitem(backward._BUDGETS, "cpu", 1)
    check_products(model, x, tolerance, cache="none")


@pytest.mark.parametrize("function", MODELS)
@pytest.mark.parametrize("stop", STOPS)
def test_constant_in_all_products(stop, function, monkeypatch):
    # in float32, where the dot-test notices large errors only
    model, x = Model(function, stop), torch.linspace(-1, 1, 9).reshape(3, 3)
    if function is gated_by_a_view and stop is not by_detaching:
        with pytest.raises(NoDerivativeError, match="forward mode: fails its dot-test"):
            check_products(model, x, 1e-5, autodiff="forward")
        check_products(model, x, 1e-5)
    else:
        check_all_products(model, x, 1e-5, monkeypatch)


def hessian(model: nn.Module, x: Tensor) -> Tensor:
    params = list(model.parameters())
    gradient = flat(torch.autograd.grad(model(x).square().sum(), params, create_graph=True, **FREE))
    rows = [torch.autograd.grad(g, params, retain_graph=True, **FREE) for g in gradient]
    return torch.stack([flat(row) for row in rows])


@pytest.mark.parametrize("autodiff", ["forward", "reverse"])
@pytest.mark.parametrize("function", MODELS[:-1])
def test_hessian_with_constants(function, autodiff):
    model, x = Model(function, by_context).double(), torch.linspace(-1, 1, 9).reshape(3, 3).double()
    H = hessian(model, x)
    loss, data = nn.MSELoss(reduction="sum"), [(x, torch.zeros(3, 2).double())]
    op = curvlinops.HessianLinearOperator(
        model, loss, list(model.parameters()), data, autodiff=autodiff
    )
    torch.testing.assert_close(op @ torch.eye(len(H)).double(), H)


class SlightlyScaled(nn.Module):
    """Divides by a number that hardly depends on the weight, and has no gradient."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = 1 + 1e-3 * self.first.weight.norm()
        return self.second(torch.tanh(self.first(x) / scale))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_small_effects(dtype, tolerance):
    """A dot-test does not notice these."""
    torch.manual_seed(0)
    model, x = SlightlyScaled().to(dtype), torch.linspace(-1, 1, 60).reshape(3, 20).to(dtype)
    check_products(model, x, tolerance, autodiff="forward")


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
    op = curvlinops.JacobianLinearOperator(model, params, [(x[:1], None), (x[1:], None)])
    torch.testing.assert_close(op @ v, J @ v)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_layers_before_recurrent_ones(kind, dtype, tolerance, monkeypatch):
    """Their tangents travel through the cells, with and without a graph."""

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
