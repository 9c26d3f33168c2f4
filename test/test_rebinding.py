"""Parameters in place of which the user puts other tensors."""

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

X, Y = torch.randn(6, 3, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
DATA, LOSS = [(X[:4], Y[:4]), (X[4:], Y[4:])], nn.MSELoss()


class Net(nn.Module):
    """A nonlinear function of its parameters."""

    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))
        self.b = nn.Parameter(torch.randn(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return net({"W": self.W, "b": self.b}, x)


def net(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The same as a function of parameters."""
    return torch.tanh(x @ params["W"].T) ** 2 + params["b"]


def _outputs(params: dict[str, Tensor]) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """Return all outputs as a function of the flat parameters, and where these are."""
    W, b = params["W"].detach(), params["b"].detach()

    def outputs(flat: Tensor) -> Tensor:
        return net({"W": flat[: W.numel()].view_as(W), "b": flat[W.numel() :]}, X)

    return outputs, torch.cat([W.flatten(), b.flatten()])


def dense_hessian(params: dict[str, Tensor]) -> Tensor:
    """The Hessian of the mean squared error of all samples."""
    outputs, flat = _outputs(params)
    return hessian(lambda w: ((outputs(w) - Y) ** 2).mean(), flat)


def dense_jacobian(params: dict[str, Tensor]) -> Tensor:
    """The Jacobian of all outputs."""
    outputs, flat = _outputs(params)
    return jacobian(outputs, flat).reshape(-1, len(flat))


def dense_ggn(params: dict[str, Tensor]) -> Tensor:
    """The Gauss-Newton matrix of the mean squared error."""
    J = dense_jacobian(params)
    return 2 / len(J) * J.T @ J


def dense_rows(params: dict[str, Tensor]) -> Tensor:
    """The gradients of the samples' losses."""
    outputs, flat = _outputs(params)
    return jacobian(lambda w: ((outputs(w) - Y) ** 2).mean(1), flat)


REFERENCES = {
    HessianLinearOperator: dense_hessian,
    GGNLinearOperator: dense_ggn,
    PerSampleGradientLinearOperator: dense_rows,
    JacobianLinearOperator: dense_jacobian,
}


def build(kind: type, model: Callable, params: dict | list, **options: object):
    """Build an operator of the small problem."""
    loss = () if kind is JacobianLinearOperator else (LOSS,)
    return kind(model, *loss, params, DATA, **options)


def check(operator, params: dict[str, Tensor]) -> None:
    """Compare with the reference at given parameters."""
    found = operator @ torch.eye(operator.shape[1], dtype=torch.float64)
    torch.testing.assert_close(found, REFERENCES[type(operator)](params))


def _given(kind: str, module: Net) -> dict[str, Tensor]:
    params = {name: param.detach().clone() for name, param in module.named_parameters()}
    return nn.ParameterDict(params) if kind == "ParameterDict" else params


@pytest.mark.parametrize("container", ["dict", "ParameterDict"])
@pytest.mark.parametrize("cache", ["none", "graph"])
@pytest.mark.parametrize("model", ["module", "function"])
@pytest.mark.parametrize("kind", REFERENCES)
def test_entries_of_a_dictionary(kind: type, model: str, cache: str, container: str):
    module = Net()
    params = _given(container, module)
    operator = build(kind, module if model == "module" else net, params, cache=cache)
    for step in range(6):
        check(operator, params)
        if step % 3 == 2:
            for name in list(params):
                new = params[name].detach() + torch.randn_like(params[name])
                params[name] = nn.Parameter(new) if container == "ParameterDict" else new
    params["b"] = params["b"].detach() + 1.0  # one of both
    check(operator, params)
    expected = dict(params.items())
    del params["W"]
    check(operator, expected)


def test_gradient_descent():
    params = _given("dict", Net())
    operator = build(HessianLinearOperator, net, params)
    for _ in range(3):
        gradient, loss = operator.gradient_and_loss()
        outputs, flat = _outputs(params)
        wanted = torch.func.grad(lambda w: ((outputs(w) - Y) ** 2).mean())(flat)  # noqa: B023
        torch.testing.assert_close(torch.cat([g.flatten() for g in gradient.values()]), wanted)
        torch.testing.assert_close(loss, ((outputs(flat) - Y) ** 2).mean())
        params.update({name: params[name] - 0.1 * gradient[name] for name in params})


def test_factors_are_those_at_their_computation():
    params = _given("dict", Net())
    linear = nn.Linear(3, 2).double()
    params = {"weight": params["W"], "bias": params["b"]}
    K = KFACLinearOperator(linear, LOSS, params, DATA, fisher_type="empirical")
    eye = torch.eye(K.shape[1], dtype=torch.float64)
    before = K @ eye
    params["weight"] = params["weight"] + 1.0
    assert torch.equal(K @ eye, before)
    K.compute_kronecker_factors()
    linear.load_state_dict(params)
    fresh = KFACLinearOperator(
        linear, LOSS, dict(linear.named_parameters()), DATA, fisher_type="empirical"
    )
    torch.testing.assert_close(K @ eye, fresh @ eye)
    assert not torch.allclose(K @ eye, before)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_follow_copies(duplicate: Callable):
    params = _given("dict", Net())
    operator = build(GGNLinearOperator, net, params)
    twin, own = duplicate((operator, params))
    alone = duplicate(operator)
    before = dict(params)
    params["W"] = params["W"] + 1.0
    own["b"] = own["b"] - 1.0
    check(operator, params)
    check(twin, own)
    check(alone, before)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda p: p.float(), r"'W' is now of shape \[2, 3\], torch.float32 on cpu; it was"),
        (lambda p: p.T, r"'W' is now of shape \[3, 2\]"),
        (lambda p: p.to("meta"), "'W' is now .* on meta; it was .* on cpu"),
        (lambda p: p.tolist(), "'W' in params is now a list"),
    ],
    ids=["dtype", "shape", "device", "kind"],
)
def test_entries_of_another_kind(change: Callable, message: str):
    params = _given("dict", Net())
    operator = build(GGNLinearOperator, net, params)
    before, params["W"] = params["W"], change(params["W"])
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=message):
            operator @ torch.ones(8)
    params["W"] = before
    check(operator, params)


def test_tied_entries_stay_equal():
    module = Net()
    module.second = module.W
    params = dict(module.named_parameters(remove_duplicate=False))
    operator = build(GGNLinearOperator, module, params)
    params["second"] = params["W"] = params["W"].detach() + 1.0
    check(operator, params)
    params["second"] = params["W"] + 1.0
    with pytest.raises(ValueError, match="one tied parameter"):
        operator @ torch.ones(8)


def test_tensors_that_only_some_batches_use():
    """Experts: what one batch does not use, another one may."""
    experts = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    function = lambda x: x @ experts[int(x[0, 0] > 0)].T + x @ experts[2].T  # noqa: E731
    data = [(X.abs(), Y)]
    for chosen in (experts, experts[1:]):  # the other one is no parameter
        operator = HessianLinearOperator(function, LOSS, chosen, data, check_deterministic=False)
        V = torch.eye(operator.shape[1], dtype=torch.float64)
        for s in (1.0, -1.0, 1.0):
            data[:] = [(s * X.abs(), Y)]
            fresh = HessianLinearOperator(function, LOSS, chosen, data)
            torch.testing.assert_close(operator @ V, fresh @ V)
