"""Parameters in place of which the user puts other tensors."""

import copy
import pickle
from collections.abc import Callable

import pytest
import reference
import torch
from contract import CASES, error, matrix
from problems import Problem
from torch import Tensor, nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    TorchLinearOperator,
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


def problem(params: dict[str, Tensor], model: Callable = net) -> Problem:
    return Problem(model, LOSS, params, DATA, mc=True)


def check(case: str, operator: TorchLinearOperator, params: dict[str, Tensor]) -> None:
    """Compare with the reference at given parameters."""
    assert error(matrix(operator), CASES[case].dense(problem(dict(params)))) <= 1e-10


def _given(kind: str = "dict") -> dict[str, Tensor]:
    params = {name: param.detach().clone() for name, param in Net().named_parameters()}
    return nn.ParameterDict(params) if kind == "ParameterDict" else params


@pytest.mark.parametrize("container", ["dict", "ParameterDict"])
@pytest.mark.parametrize("cache", ["none", "graph"])
@pytest.mark.parametrize("model", ["module", "function"])
@pytest.mark.parametrize("case", ["hessian", "ggn", "gradients", "jacobian"])
def test_entries_of_a_dictionary(case: str, model: str, cache: str, container: str):
    params = _given(container)
    p = problem(params, Net() if model == "module" else net)
    operator = CASES[case].build(p, cache=cache)
    for step in range(6):
        check(case, operator, params)
        if step % 3 == 2:
            for name in list(params):
                new = params[name].detach() + torch.randn_like(params[name])
                params[name] = nn.Parameter(new) if container == "ParameterDict" else new
    params["b"] = params["b"].detach() + 1.0  # one of both
    check(case, operator, params)
    expected = dict(params.items())
    del params["W"]
    check(case, operator, expected)


def test_gradient_descent():
    params = _given()
    operator = CASES["hessian"].build(problem(params))
    for _ in range(3):
        gradient, loss = operator.gradient_and_loss()
        flat = torch.cat([g.flatten() for g in gradient.values()])
        torch.testing.assert_close(flat, reference.gradient(problem(params)))
        assert float(loss) == pytest.approx(reference.loss_value(problem(params)))
        params.update({name: params[name] - 0.1 * gradient[name] for name in params})


def test_factors_are_those_at_their_computation():
    params = _given()
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
    params = _given()
    operator = CASES["ggn"].build(problem(params))
    twin, own = duplicate((operator, params))
    alone = duplicate(operator)
    before = dict(params)
    params["W"] = params["W"] + 1.0
    own["b"] = own["b"] - 1.0
    check("ggn", operator, params)
    check("ggn", twin, own)
    check("ggn", alone, before)


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
    params = _given()
    operator = CASES["ggn"].build(problem(params))
    before, params["W"] = params["W"], change(params["W"])
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=message):
            operator @ torch.ones(8)
    params["W"] = before
    check("ggn", operator, params)


def test_tied_entries_stay_equal():
    module = Net()
    module.second = module.W
    params = dict(module.named_parameters(remove_duplicate=False))
    operator = GGNLinearOperator(module, LOSS, params, DATA)
    params["second"] = params["W"] = params["W"].detach() + 1.0
    check("ggn", operator, {name: params[name] for name in ("W", "b")})
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
