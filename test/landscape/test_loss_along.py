"""The loss along directions: against losses of models whose parameters were moved in place."""

import copy

import matplotlib.pyplot as plt
import numpy as np
import problems
import pytest
import reference
import torch
from contract import CASES
from tables import core
from torch import Tensor, nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    LossAlong,
    PerSampleGradientLinearOperator,
    loss_along,
    plot_loss,
)

PROBLEMS = ["classes-ce-all-mean", "transformer-tied", "pinn", "functional", "other-values"]
PROBLEMS += ["bfloat16-mlp"]
STEPS = [-0.3, 0.0, 0.7]


def directions(p: problems.Problem, K: int) -> Tensor:
    size = sum(param.numel() for param in p.named_params().values())
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, K, generator=generator, dtype=torch.float64)


def moved_loss(p: problems.Problem, change: Tensor) -> float:
    """Return the loss, one sample at a time, at parameters that are moved in place."""
    params = list(p.named_params().values())
    before = [param.detach().clone() for param in params]
    parts = change.split([param.numel() for param in params])
    try:
        with torch.no_grad():
            for param, part in zip(params, parts, strict=True):
                param += part.reshape(param.shape).to(param)
        return reference.loss_value(p)
    finally:
        with torch.no_grad():
            for param, values in zip(params, before, strict=True):
                param.copy_(values)


@pytest.mark.parametrize("name", core((n for n in PROBLEMS if "former" not in n), PROBLEMS))
def test_along_one_direction(name: str):
    p = problems.make(name)
    (v,) = directions(p, 1).T
    is_low = "low-precision" in p.tags
    found = loss_along(CASES["hessian"].build(p), v, STEPS)
    truth = [moved_loss(p, step * v) for step in STEPS]
    assert found.losses.dtype == torch.float64 and found.steps.tolist() == STEPS
    rtol = 1e-2 if is_low else 1e-6 if name == "pinn" else 1e-10
    np.testing.assert_allclose(found.losses, truth, rtol=rtol)
    g, H = reference.gradient(p), reference.hessian(p)
    quadratic = [truth[1] + t * float(v @ g) + t**2 / 2 * float(v @ H @ v) for t in STEPS]
    np.testing.assert_allclose(found.quadratic, quadratic, rtol=1e-2 if is_low else 1e-7)


def test_along_two_directions():
    p = problems.make("mlp-ce-mean")
    V = directions(p, 2)
    found = loss_along(CASES["ggn"].build(p), V, np.array(STEPS))
    g, G, loss = reference.gradient(p), reference.ggn(p), reference.loss_value(p)
    for i, s in enumerate(STEPS):
        for j, t in enumerate(STEPS):
            d = s * V[:, 0] + t * V[:, 1]
            assert abs(found.losses[i, j] - moved_loss(p, d)) <= 1e-12
            assert abs(found.quadratic[i, j] - (loss + g @ d + d @ G @ d / 2)) <= 1e-10


def test_kinds_of_directions():
    p = problems.make("mlp-ce-mean")
    H, V = CASES["hessian"].build(p), directions(p, 2)
    for some in (V[:, 0], V):
        truth = loss_along(H, some, STEPS)
        named = H.space.split(some)
        for same in (some.numpy(), named, list(named.values())):
            for x, y in zip(loss_along(H, same, torch.tensor(STEPS)), truth, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-6, atol=0)
    # such as the parameters themselves, which require gradients
    to_zero = loss_along(H, p.params, torch.tensor([-1.0, 0.5], requires_grad=True))
    theta = torch.cat([param.detach().flatten() for param in p.params])
    assert abs(to_zero.losses[0] - moved_loss(p, -theta)) <= 1e-12
    assert not any(x.requires_grad for x in to_zero)
    K = p.build(KFACLinearOperator)
    assert torch.equal(loss_along(K, p.params, [0.5]).losses, to_zero.losses[1:])
    one = loss_along(H, V[:, :1], STEPS)
    assert one.losses.shape == (3,)
    torch.testing.assert_close(one.losses, loss_along(H, V[:, 0], STEPS).losses)


@pytest.mark.parametrize("inference", [False, True])
def test_all_is_left_as_found(inference: bool):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    data = [(torch.randn(6, 3), torch.randint(2, (6,))) for _ in range(2)]
    params = list(model.parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    before, versions = copy.deepcopy(model.state_dict()), [p._version for p in params]
    with pytest.warns(UserWarning, match="BatchNorm in train mode"):
        H = HessianLinearOperator(model, nn.CrossEntropyLoss(), params, data)
    state = torch.get_rng_state()
    with torch.inference_mode(inference), H.linearized():
        found = loss_along(H, torch.ones(H.shape[1]), [0.0, 1.0])
    assert torch.equal(torch.get_rng_state(), state)
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert [param._version for param in params] == versions
    assert all(param.requires_grad and bool((param.grad == 1).all()) for param in params)
    with torch.no_grad():
        for param in params:
            param += 1
    loss = sum(nn.functional.cross_entropy(model(X), y) for X, y in data) / 2
    torch.testing.assert_close(found.losses[1].float(), loss.detach())


def test_losses_that_depend_on_parameters_and_inputs():
    """A penalty on the parameters, and one on the derivative with respect to the input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)

    def loss(u: Tensor, x: Tensor) -> Tensor:
        (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return du.square().sum() + sum(p.square().sum() for p in model.parameters())

    params = list(model.parameters())
    H = HessianLinearOperator(model, loss, params, [(x, x)], reduction="sum")
    found = loss_along(H, torch.ones(H.shape[1]), [0.0, 0.5]).losses
    for step, value in zip([0.0, 0.5], found, strict=True):
        with torch.no_grad():
            for param in params:
                param += step
        assert abs(loss(model(x), x) - value) <= 1e-12


def test_values_that_are_not_finite_are_returned():
    model = nn.Linear(1, 1).double()
    data = [(torch.ones(2, 1, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64))]
    H = HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    assert loss_along(H, [torch.ones(1, 1), torch.ones(1)], [1e200, 0.0]).losses[0] == np.inf


def test_errors():
    model, loss = nn.Linear(3, 2), nn.MSELoss()
    params, data = list(model.parameters()), [(torch.randn(5, 3), torch.randn(5, 2))]
    G, v = GGNLinearOperator(model, loss, params, data), torch.ones(8)
    J = JacobianLinearOperator(model, params, data)
    rows = PerSampleGradientLinearOperator(model, loss, params, data)
    w = torch.randn(3, 2, requires_grad=True)
    closure = HessianLinearOperator(lambda X: X @ w, loss, [w], data)
    for A, d, steps, kind, message in [
        (G, torch.ones(8, 3), [0], ValueError, "one or two vectors, got 3"),
        (G, torch.ones(7), [0], ValueError, r"expected \[8\]"),
        (G, v, [], ValueError, r"finite numbers, at least one, got shape \[0\]"),
        (G, v, torch.ones(2, 2), ValueError, r"got shape \[2, 2\]"),
        (G, v, [0, float("nan")], ValueError, "with NaN"),
        (torch.eye(8), v, [0], TypeError, "with model, loss and data.*got Tensor"),
        (2 * G, v, [0], TypeError, "got ScaledLinearOperator"),
        (J, v, [0], ValueError, "square operator with a loss"),
        (rows, v, [0], ValueError, "square operator with a loss"),
        (closure, torch.ones(6), [0], ValueError, "uses the very tensors in params.*dictionary"),
    ]:
        with pytest.raises(kind, match=message):
            loss_along(A, d, steps)


# --- plots


def test_plot():
    steps = torch.linspace(-1, 1, 5)
    curve = LossAlong(steps, steps**2 + steps**4, steps**2)
    ax = plot_loss(*curve, label="trained")
    loss, parabola = ax.get_lines()
    assert np.allclose(loss.get_ydata(), curve.losses)
    assert np.allclose(parabola.get_ydata(), curve.quadratic)
    assert [line.get_label() for line in (loss, parabola)] == [
        "trained",
        "trained, quadratic approximation",
    ]
    assert plot_loss(steps, curve.losses.numpy(), ax=ax) is ax and len(ax.get_lines()) == 3
    plt.close("all")


def test_plot_of_a_plane():
    steps = torch.linspace(-1, 1, 9)
    plane = (steps[:, None] + 0 * steps) ** 2  # depends on the first direction only
    ax = plot_loss(steps, plane, plane, levels=[0.25])
    lines = [path.vertices for drawn in ax.collections for path in drawn.get_paths()]
    assert lines and all(np.allclose(np.abs(vertices[:, 0]), 0.5) for vertices in lines)
    assert "first" in ax.get_xlabel()
    plt.close("all")
