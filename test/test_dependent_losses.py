"""Losses that depend on the parameters not only through the output's values."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops import EFLinearOperator, GGNLinearOperator, HessianLinearOperator

Data = list[tuple[Tensor, Tensor]]


def net() -> nn.Module:
    """A small smooth network."""
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def poisson(u: Tensor, x: Tensor) -> Tensor:
    """Residual of ``-Laplace u = sin(x_1) + sin(x_2)``, and u at the points where x_1 > 0."""
    (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    laplacian = sum(
        torch.autograd.grad(du[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(2)
    )
    inside = (laplacian + x.sin().sum(1)).square()
    return (inside + (x[:, 0] > 0) * u[:, 0].square()).mean()


def collocation() -> Data:
    """Two batches of points, which are input and target."""
    return [(x, x) for x in (torch.randn(n, 2, requires_grad=True) for n in (4, 3))]


def gradient(model: nn.Module, loss, data: Data) -> Tensor:
    """Return the gradient of the mean over all samples."""
    total = sum(loss(model(x), y) * len(x) for x, y in data) / sum(len(x) for x, _ in data)
    params = list(model.parameters())
    grads = torch.autograd.grad(total, params, allow_unused=True)
    return torch.cat(
        [
            torch.zeros_like(p).flatten() if g is None else g.flatten()
            for g, p in zip(grads, params, strict=True)
        ]
    )


def difference(model: nn.Module, loss, data: Data, v: Tensor) -> Tensor:
    """Return the gradient's central difference along v."""
    theta, eps, slope = nn.utils.parameters_to_vector(model.parameters()).detach(), 1e-5, 0.0
    for step in (eps, -eps):
        nn.utils.vector_to_parameters(theta + step * v, model.parameters())
        slope = slope + gradient(model, loss, data) / (2 * step)
    nn.utils.vector_to_parameters(theta, model.parameters())
    return slope


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def regularized(model: nn.Module):
    """Return a loss with weight decay that finds the parameters in the model."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) + 0.1 * sum(p.pow(4).sum() for p in model.parameters())

    return loss


def supervised() -> Data:
    """Two batches."""
    return [(torch.randn(n, 2), torch.randn(n, 1)) for n in (4, 3)]


@pytest.mark.parametrize("cache", ["none", "auto", "graph"])
@pytest.mark.parametrize("kind", ["differential equation", "weight decay"])
@pytest.mark.parametrize("as_closure", [False, True])
def test_hessian(kind: str, cache: str, as_closure: bool):
    model = net()
    loss, data = (
        (poisson, collocation())
        if kind == "differential equation"
        else (regularized(model), supervised())
    )
    params = list(model.parameters())
    H = HessianLinearOperator(
        (lambda x: model(x)) if as_closure else model,
        loss,
        params,
        data,
        reduction="mean",
        cache=cache,
    )
    V = torch.randn(H.shape[1], 2)
    for _ in range(3):
        truth = difference(model, loss, data, V[:, 0])
        torch.testing.assert_close(H @ V[:, 0], truth, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close((H @ V)[:, 0], truth, rtol=1e-6, atol=1e-8)
        with torch.no_grad():
            params[0].mul_(1.1)
    found, value = H.gradient_and_loss()
    truth = gradient(model, loss, data)
    torch.testing.assert_close(torch.cat([g.flatten() for g in found]), truth)
    total = sum(loss(model(x), y) * len(x) for x, y in data) / 7
    torch.testing.assert_close(value, total.detach())
    assert all(x.grad is None for x, _ in data) and all(p.grad is None for p in params)


@pytest.mark.parametrize("kind", [GGNLinearOperator, EFLinearOperator])
@pytest.mark.parametrize("check", [False, True])
def test_no_derivative_with_respect_to_the_output(kind: type, check: bool):
    model = net()
    for loss, data in ((poisson, collocation()), (regularized(model), supervised())):
        with pytest.raises(ValueError, match="is not a function of the model's output"):
            A = kind(
                model,
                loss,
                list(model.parameters()),
                data,
                reduction="mean",
                check_deterministic=check,
            )
            A @ torch.ones(A.shape[1])


def test_captured_parameters_are_refused():
    """They cannot be replaced, and their share of the derivative would be lost."""
    model = net()
    params = list(model.parameters())

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) + sum(p.square().sum() for p in params)

    with pytest.raises(ValueError, match="by a reference that is not registered"):
        HessianLinearOperator(model, loss, params, supervised(), reduction="mean")


class Temperature(nn.Module):
    """Has a parameter of its own, that is not the model's."""

    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output / self.scale, y)


def test_parameters_of_the_loss_are_constants():
    model, data = net(), supervised()
    H, G = (
        kind(model, Temperature(), list(model.parameters()), data)
        for kind in (HessianLinearOperator, GGNLinearOperator)
    )
    v = torch.randn(H.shape[1])
    truth = difference(model, Temperature(), data, v)
    torch.testing.assert_close(H @ v, truth, rtol=1e-6, atol=1e-8)
    G @ v


def test_inputs_that_require_gradients_change_nothing():
    model, data = net(), supervised()
    tracked = [(x.clone().requires_grad_(), y.clone().requires_grad_()) for x, y in data]
    for kind in (HessianLinearOperator, GGNLinearOperator, EFLinearOperator):
        A, B = (
            kind(model, F.mse_loss, list(model.parameters()), d, reduction="mean")
            for d in (data, tracked)
        )
        v = torch.randn(A.shape[1])
        torch.testing.assert_close(A @ v, B @ v)
