"""How often models are evaluated, and models that remember their evaluations."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from contract import CASES, matrix
from problems import Problem
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    TransposedJacobianLinearOperator,
)

pytestmark = pytest.mark.extensive

N, SIZES = 32, (32, 32)


class Net(nn.Module):
    """A net that counts its passes over whole batches."""

    def __init__(self, middle: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 2))
        self.passes = SimpleNamespace(count=0)  # lists would be as before after each product

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == N:
            self.passes.count += 1
        return self.layers(x)


def setting(middle: Callable[[], nn.Module]) -> tuple[Net, list[Tensor], list]:
    torch.manual_seed(0)
    net = Net(middle()).double()
    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in SIZES]
    return net, list(net.parameters()), data


def test_checks_of_repeatability_evaluate_once():
    net, params, data = setting(nn.Tanh)
    HessianLinearOperator(net, nn.MSELoss(), params, data)
    assert net.passes.count == 2 * len(data)


@pytest.mark.parametrize("cls", [JacobianLinearOperator, TransposedJacobianLinearOperator])
def test_many_products_of_jacobians(cls: type):
    net, params, data = setting(nn.Tanh)
    operator = cls(net, params, data, check_deterministic=False)
    net.passes.count = 0
    found = operator @ torch.eye(operator.shape[1]).double()
    assert net.passes.count <= len(data) + 1
    torch.testing.assert_close(found, matrix(operator), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
def test_factors_of_a_known_model(cls: type):
    """A new operator evaluates a model that is known once on each batch, in each of its passes."""
    net, params, data = setting(nn.Tanh)
    for known in (False, True):
        net.passes.count = 0
        cls(net, nn.MSELoss(), params, data, check_deterministic=False).trace()
        num_passes = 1 if cls is KFACLinearOperator else 2
        assert not known or net.passes.count == num_passes * len(data)


class Scratch(nn.Module):
    """Writes to memory of its own, as autograd sees it or not."""

    def __init__(self, seen: bool):
        super().__init__()
        self.seen, self.memory = seen, [torch.zeros(N, 4).double()]

    def forward(self, x: Tensor) -> Tensor:
        scale = self.memory[0][-len(x) :]
        with torch.no_grad():
            (scale if self.seen else scale.data).copy_(1 + x.detach().abs())
        return (scale * x).tanh()


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("kind", ["hessian", "ggn", "fisher", "gradients"])
def test_models_with_memory(kind: str, seen: bool):
    """What the first few samples write there is not what the whole batch had."""
    net, params, data = setting(lambda: Scratch(seen))
    case, problem = CASES[kind], Problem(net, nn.MSELoss(), params, data, mc=True)
    operator = case.operator(net, nn.MSELoss(), params, data, check_deterministic=False)
    expected = case.dense(problem)
    v = torch.randn(len(expected.T)).double()
    torch.testing.assert_close(operator @ v, expected @ v, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(matrix(operator), expected, rtol=1e-10, atol=1e-12)


def test_batches_get_random_numbers_of_their_own():
    net, params, data = setting(nn.Dropout)
    masks = []
    net.layers[1].register_forward_hook(lambda _, x, y: masks.append((y == 0).detach()))
    operator = HessianLinearOperator(
        net, nn.MSELoss(), params, [data[0]] * 2, check_deterministic=False
    )
    operator @ torch.ones(operator.shape[1]).double()
    masks = [mask for mask in masks if len(mask) == N]
    assert len(masks) == 4 and not torch.equal(masks[1], masks[3])
