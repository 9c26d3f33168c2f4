"""Losses that depend on the parameters not only through the output's values."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Using
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = [pytest.mark.extensive, pytest.mark.usefixtures("double")]

Data = list[tuple[Tensor, Tensor]]


class Scaled(nn.Linear):
    """A layer with a scalar factor."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.factor = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def net() -> nn.Module:
    """A small smooth network."""
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3), nn.Tanh(), Scaled(3, 1))


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


def flat_gradient(value: Tensor, model: nn.Module, **options: bool) -> Tensor:
    """Return the gradient of a number; zeros where it does not depend on a parameter."""
    options |= {"allow_unused": True, "materialize_grads": True}
    return torch.cat(
        [g.flatten() for g in torch.autograd.grad(value, list(model.parameters()), **options)]
    )


def risk(model: nn.Module, loss: Callable, data: Data) -> Tensor:
    """Return the mean over all samples."""
    return sum(loss(model(x), y) * len(x) for x, y in data) / sum(len(x) for x, _ in data)


def product(model: nn.Module, loss: Callable, data: Data, v: Tensor) -> Tensor:
    """Return the product of the risk's Hessian with a vector, by plain autograd."""
    gradient = flat_gradient(risk(model, loss, data), model, create_graph=True)
    return flat_gradient(gradient @ v, model)


def test_points_with_a_history():
    """Such points are constants of the model, and the loss still differentiates by them."""
    model, points = net(), [x for x, _ in collocation()]
    moved = [2 * x for x in points]
    leaves = [(2 * x.detach()).requires_grad_() for x in points]
    params, v = list(model.parameters()), torch.randn(sum(p.numel() for p in model.parameters()))
    found, expected = (
        HessianLinearOperator(model, poisson, params, [(x, x) for x in xs], reduction="mean") @ v
        for xs in (moved, leaves)
    )
    assert torch.equal(found, expected)


def regularized(model: nn.Module):
    """Return a loss with weight decay that finds the parameters in the model."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(output, y) + 0.1 * sum(p.pow(4).sum() for p in model.parameters())

    return loss


def penalized(model: nn.Module):
    """Return a loss with a penalty on its gradient with respect to the model's parameters."""

    def loss(output: Tensor, y: Tensor) -> Tensor:
        error = F.mse_loss(output, y)
        slopes = torch.autograd.grad(error, list(model.parameters()), create_graph=True)
        return error + 0.1 * sum(slope.square().sum() for slope in slopes)

    return loss


def supervised() -> Data:
    """Two batches."""
    return [(torch.randn(n, 2), torch.randn(n, 1)) for n in (4, 3)]


def unused(u: Tensor, x: Tensor) -> Tensor:
    """Squared gradient of u, by a call that takes constants for functions of x."""
    options = {"create_graph": True, "allow_unused": True, "materialize_grads": True}
    (du,) = torch.autograd.grad((u + 0 * x[:, :1]).sum(), x, **options)
    return (du.square().sum(1) + u[:, 0].square()).mean()


KINDS: dict[str, tuple[Callable, Callable]] = {
    "differential equation": (lambda model: poisson, collocation),
    "gradient without complaints": (lambda model: unused, collocation),
    "weight decay": (regularized, supervised),
}
#: No sum over samples.
COUPLED = {"gradient penalty": (penalized, supervised)}


@pytest.mark.parametrize("kind", KINDS | COUPLED)
def test_hessian(kind: str):
    model, (build, points) = net(), (KINDS | COUPLED)[kind]
    loss, data, params = build(model), points(), list(model.parameters())
    H = HessianLinearOperator(model, loss, params, data, reduction="mean")
    V = torch.randn(H.shape[1], 2)
    for _ in range(3):
        truth = product(model, loss, data, V[:, 0])
        torch.testing.assert_close(H @ V[:, 0], truth)
        with H.linearized():
            for _ in range(2):
                torch.testing.assert_close((H @ V)[:, 0], truth)
        with torch.no_grad():
            params[0].mul_(1.1)
    found, value = H.gradient_and_loss()
    truth = risk(model, loss, data)
    torch.testing.assert_close(value, truth.detach())
    truth = flat_gradient(truth, model)
    torch.testing.assert_close(torch.cat([g.flatten() for g in found]), truth)
    assert all(x.grad is None for x, _ in data) and all(p.grad is None for p in params)


CURVATURES = {
    "GGN": (GGNLinearOperator, {}),
    "diagonal": (GGNDiagonalLinearOperator, {}),
    "KFAC": (KFACLinearOperator, {"fisher_type": "empirical"}),
    "KFAC, type-2": (KFACLinearOperator, {"fisher_type": "type-2"}),
    "EKFAC": (EKFACLinearOperator, {"fisher_type": "empirical"}),
}


@pytest.mark.parametrize("kind", KINDS | COUPLED)
@pytest.mark.parametrize("curvature", CURVATURES)
def test_no_derivative_with_respect_to_the_output(curvature: str, kind: str):
    model, (operator, options) = net(), CURVATURES[curvature]
    build, points = (KINDS | COUPLED)[kind]
    args = model, build(model), list(model.parameters()), points()
    for check in (False, True):
        with pytest.raises(ValueError, match="is not a function of the model's output"):
            A = operator(*args, reduction="mean", check_deterministic=check, **options)
            A @ torch.ones(A.shape[1])


def test_factors_without_derivatives_of_the_loss():
    model, (build, points) = net(), KINDS["differential equation"]
    data, params = points(), [param for param in model.parameters() if param.ndim]
    options = {"reduction": "mean", "fisher_type": "forward-only"}
    found = KFACLinearOperator(model, build(model), params, data, **options)
    inputs, expected = torch.cat([x for x, _ in data]).detach(), []
    for layer in model:
        if isinstance(layer, nn.Linear):
            identity = torch.eye(layer.out_features)
            expected += [torch.kron(identity, inputs.T @ inputs / len(inputs)), identity]
        inputs = layer(inputs).detach()
    torch.testing.assert_close(found.to_dense(), torch.block_diag(*expected))


def alone(model: nn.Module, loss: Callable, data: Data) -> Tensor:
    """Return the gradients of the samples' losses, one sample at a time."""
    rows = []
    for X, y in data:
        for n in range(len(X)):
            x = X[n : n + 1].detach().requires_grad_(X.requires_grad)
            rows.append(flat_gradient(loss(model(x), x if y is X else y[n : n + 1]), model))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("terms", ["sample", "term"])
def test_gradients_of_samples(kind: str, terms: str, caplog):
    model, (build, points) = net(), KINDS[kind]
    loss, data = build(model), points()
    rows = alone(model, loss, data)
    args = model, loss, list(model.parameters()), data
    A = PerSampleGradientLinearOperator(*args, reduction="mean", terms=terms)
    options = {"reduction": "mean", "terms": terms, "subsampling": [5, 1, 5]}
    few = PerSampleGradientLinearOperator(*args, **options)
    V, U = torch.randn(A.shape[1], 2), torch.randn(A.shape[0], 2)
    for _ in range(3):
        torch.testing.assert_close(A.dense(), rows)
        torch.testing.assert_close(few.dense(), rows[[5, 1, 5]])
        torch.testing.assert_close(A @ V, rows @ V)
        torch.testing.assert_close(A.T @ U, rows.T @ U)
        with torch.no_grad():
            model[0].weight.mul_(1.1)
        rows = alone(model, loss, data)
    torch.testing.assert_close(A.norms(), rows.norm(dim=1))
    torch.testing.assert_close(A.gram(), rows @ rows.T)
    torch.testing.assert_close(A.second_moment(), rows.square().mean(0))
    torch.testing.assert_close(A.variance(), rows.var(0, correction=0))
    assert set(A.fallbacks) == set(A.domain.names)
    said = [r for r in caplog.records if "sample by sample" in r.message]
    assert len(said) == 2  # one for each operator
    assert all(x.grad is None for x, _ in data)


@pytest.mark.parametrize("kind", KINDS)
def test_empirical_fisher(kind: str):
    model, (build, points) = net(), KINDS[kind]
    loss, data, params = build(model), points(), list(model.parameters())
    for terms in ("sample", "term"):
        E = EFLinearOperator(model, loss, params, data, reduction="mean", terms=terms)
        V = torch.randn(E.shape[1], 2)
        for _ in range(3):
            rows = alone(model, loss, data)
            with E.linearized():
                for _ in range(2):
                    torch.testing.assert_close(E @ V, rows.T @ (rows @ V) / len(rows))
            with torch.no_grad():
                params[0].mul_(1.1)


def heat(u: Tensor, X: dict[str, Tensor]) -> Tensor:
    """Residual of ``u_t = u_xx``."""
    ut, ux = torch.autograd.grad(u.sum(), [X["t"], X["x"]], create_graph=True)
    (uxx,) = torch.autograd.grad(ux.sum(), X["x"], create_graph=True)
    return (ut - uxx).square().sum()


def test_nested_points():
    def field(s: Using, X: dict[str, Tensor]) -> Tensor:
        return s.net(torch.stack([X["x"], X["t"]], 1)) * X["constants"].sum()

    model, constants = Using(field, net=net()), torch.tensor([1.0, 0.5, 2.0])
    X = {name: torch.randn(4, requires_grad=True) for name in ("x", "t")}
    data = [({**X, "constants": constants},) * 2]
    options = {"reduction": "sum", "batch_size_fn": lambda X: len(X["x"])}
    rows = PerSampleGradientLinearOperator(model, heat, list(model.parameters()), data, **options)
    for n, row in enumerate(rows.dense()):
        one = {name: x[n : n + 1].detach().requires_grad_() for name, x in X.items()}
        one["constants"] = constants
        torch.testing.assert_close(row, flat_gradient(heat(model(one), one), model))


def test_samples_without_a_share():
    """A loss that is no sum over samples has no gradients of single samples."""
    model = net()
    params = list(model.parameters())

    def coupled(u: Tensor, x: Tensor) -> Tensor:
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du.square().sum(1).mean() + u.mean().square()

    def decayed(u: Tensor, x: Tensor) -> Tensor:
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du.square().sum() + sum(p.square().sum() for p in model.parameters())

    for loss, reduction in ((coupled, "mean"), (decayed, "sum")):
        A = PerSampleGradientLinearOperator(model, loss, params, collocation(), reduction=reduction)
        with pytest.raises(ValueError, match="gradients of single samples are not defined"):
            A.dense()


def test_batches_that_cannot_be_cut():
    model = net()
    points = torch.randn(3, 2, requires_grad=True)

    def everywhere(u: Tensor, x: Tensor) -> Tensor:
        return torch.autograd.grad(u.sum(), points, create_graph=True)[0].square().mean()

    params = list(model.parameters())
    data = [(points, points)]
    A = PerSampleGradientLinearOperator(model, everywhere, params, data, reduction="mean")
    with pytest.raises(ValueError, match="fails for sample 0 of batch 0: .*used in the graph"):
        A.dense()


@pytest.mark.parametrize("options", [{}, None])
def test_captured_parameters_are_refused(options: dict | None):
    """A captured parameter cannot be replaced, so its share of the derivative would be lost."""
    model = net()
    params = list(model.parameters())

    def loss(output: Tensor, y: Tensor) -> Tensor:
        error, parts = F.mse_loss(output, y), params
        if options is not None:  # a penalty on the gradient
            parts = torch.autograd.grad(error, params, create_graph=True, **options)
        return error + sum(p.square().sum() for p in parts)

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
    torch.testing.assert_close(H @ v, product(model, Temperature(), data, v))
    G @ v


#: What is asked of gradients of samples, which such a loss has, and what it is for these rows.
QUESTIONS: dict[str, tuple[type, Callable, Callable]] = {
    "EF": (EFLinearOperator, lambda E: E @ ones(E), lambda J: squared(J) @ ones(J)),
    "EF, columns": (EFLinearOperator, lambda E: E @ ones(E, 2), lambda J: squared(J) @ ones(J, 2)),
    "EF, linearized": (EFLinearOperator, lambda E: E.to_dense(), lambda J: squared(J)),
    "rows": (PerSampleGradientLinearOperator, lambda R: R.dense(), lambda J: J),
    "rows @ v": (PerSampleGradientLinearOperator, lambda R: R @ ones(R), lambda J: J @ ones(J)),
    "rows.T @ u": (PerSampleGradientLinearOperator, lambda R: R.T @ ones(R.T), lambda J: J.sum(0)),
    "norms": (PerSampleGradientLinearOperator, lambda R: R.norms(), lambda J: J.norm(dim=1)),
    "gram": (PerSampleGradientLinearOperator, lambda R: R.gram(), lambda J: J @ J.T),
}


def ones(matrix: Any, *columns: int) -> Tensor:
    return torch.ones(matrix.shape[1], *columns)


def squared(J: Tensor) -> Tensor:
    return J.T @ J / len(J)


@pytest.mark.parametrize("begins", ["later", "with the second batch"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_penalties_that_begin(begins: str, question: str):
    """Operators that were built, or have passed a batch, before the loss used the parameters."""
    model, data, (kind, ask, truth) = net(), supervised(), QUESTIONS[question]
    strength = [0.0 if begins == "later" else 0.1]
    if begins != "later":
        data[1][1].add_(9.0)

    def strength_for(y: Tensor) -> float:
        return strength[0] if begins == "later" or bool((y > 5).all()) else 0.0

    def loss(output: Tensor, y: Tensor) -> Tensor:
        total = F.mse_loss(output, y)
        if not strength_for(y):
            return total
        return total + strength_for(y) * sum(p.square().sum() for p in model.parameters())

    A = kind(model, loss, list(model.parameters()), data, reduction="mean")
    before = ask(A)
    strength[0] = 0.1
    expected = truth(alone(model, loss, data))
    torch.testing.assert_close(ask(A), expected, rtol=1e-9, atol=1e-12)
    assert begins != "later" or not torch.allclose(before, expected, rtol=1e-3)


@pytest.mark.parametrize("number", [float, torch.tensor], ids=["float", "tensor"])
def test_penalties_that_begin_and_end(number: Callable):
    """Of the operators themselves and of later ones."""
    model, strength = net(), [number(0.0)]

    def loss(output: Tensor, y: Tensor) -> Tensor:
        used = sum(p.square().sum() for p in model.parameters()) if strength[0] else 0.0
        return F.mse_loss(output, y) + strength[0] * used / 2

    def build(kind: type) -> HessianLinearOperator | GGNLinearOperator:
        return kind(model, loss, list(model.parameters()), data, reduction="mean")

    data = supervised()
    H, G = build(HessianLinearOperator), build(GGNLinearOperator)
    plain, ggn = H.to_dense(), G.to_dense()
    for penalty in (0.0, 0.5, 0.5, 0.0):
        if number is float:
            strength[0] = penalty
        else:
            strength[0].fill_(penalty)
        for operator in (H, build(HessianLinearOperator)):
            torch.testing.assert_close(operator.to_dense(), plain + penalty * torch.eye(len(plain)))
        for operator in (G, build(GGNLinearOperator)):
            for v in (torch.eye(len(ggn)), torch.ones(len(ggn))):
                if penalty:
                    with pytest.raises(ValueError, match="not a function of the model's output"):
                        operator @ v
                else:
                    torch.testing.assert_close(operator @ v, ggn @ v)


def _residual(u: Tensor, y: Tensor) -> Tensor:
    """Measured values, or points where an equation holds."""
    if y.requires_grad:
        (du,) = torch.autograd.grad(u.sum(), y, create_graph=True)
        return (du.sum(1) - u[:, 0]).square().mean()
    return nn.functional.mse_loss(u, y)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_losses_that_need_the_graph_on_some_batches(order: tuple[int, int]):
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    points, measured = torch.randn(3, 2).requires_grad_(), (torch.randn(3, 2), torch.randn(3, 1))
    data = [[measured, (points, points)][i] for i in order]
    options = {"reduction": "mean", "check_deterministic": False}
    H = HessianLinearOperator(model, _residual, list(model.parameters()), data, **options)
    v = torch.ones(H.shape[1])
    torch.testing.assert_close(H @ v, product(model, _residual, data, v))
    with pytest.raises(ValueError, match="is not a function of the model's output"):
        GGNLinearOperator(model, _residual, list(model.parameters()), data, **options) @ v
