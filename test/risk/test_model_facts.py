"""What is known of a model: learned of the first batch, and not used where it is wrong."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import problems
import pytest
import small
import torch
from contract import ALL, CORE, error, matrix, vectors
from models import Using
from problems import Problem
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

N = 8


class Net(nn.Module):
    """A net that notes the sizes of the batches on which it is evaluated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.sizes = SimpleNamespace(seen=())  # lists would be as before after each product

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.seen = (*self.sizes.seen, len(x))
        return self.layers(x)


def batch(seed: int = 0, size: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.rand(size, 3).double(), torch.randint(2, (size,))


def build(cls: type, net: nn.Module, data: list, *loss: nn.Module, **options: Any) -> Any:
    return small.build(cls, net, data, *loss, check_deterministic=False, **options)


def product(operator) -> Tensor:
    return operator @ vectors(operator)


# --- what is learned


@pytest.mark.parametrize("cls", [HessianLinearOperator, KFACLinearOperator])
def test_the_first_use_evaluates_each_batch_once(cls: type):
    """Facts about the model come from the pass that is needed anyway."""
    net = Net()
    product(build(cls, net, [batch(0), batch(1)]))
    assert net.sizes.seen == (N, N)


@pytest.mark.parametrize("number", [0, 1])
def test_tensors_that_only_some_batches_use(number: int, double: None):
    """Experts: what one batch does not use, another one may. With ``number=1``, one is constant."""
    experts = [torch.randn(2, 3, requires_grad=True) for _ in range(3)]
    function = lambda x: x @ experts[int(x[0, 0] > 0)].T + x @ experts[2].T  # noqa: E731
    X, y = torch.rand(6, 3), torch.rand(6, 2)
    data, arguments = [(X, y)], (nn.MSELoss(), experts[number:])
    H = HessianLinearOperator(function, *arguments, data, check_deterministic=False)
    for sign in (1.0, -1.0, 1.0):
        data[:] = [(sign * X, y)]
        fresh = HessianLinearOperator(function, *arguments, data)
        torch.testing.assert_close(matrix(H), matrix(fresh))


@pytest.mark.parametrize("name", [*CORE, "lstm-bidirectional", "weight-norm", "pinn"])
def test_later_operators_agree_with_first_ones(name: str):
    """At other parameters, on more data; where a first one is refused, so is a later one."""

    def scaled(p: Problem) -> Problem:
        with torch.no_grad():
            for tensor in p.named_params().values():
                tensor.mul_(0.9)
        return p

    def compute(case: str, p: Problem) -> Tensor | type:
        try:
            operator = ALL[case].build(p, check_deterministic=False)
            if case == "gradients":
                return torch.cat([operator.dense(), operator.gram()], 1)
            if case == "jacobian":
                return operator.gram()
            return operator @ vectors(operator, 2)
        except Exception as refused:
            return type(refused)

    known = problems.make(name)
    cases = ("hessian", "ggn", "gradients", "jacobian", "ggn-diagonal", "kfac", "ekfac")
    for case in cases:
        compute(case, replace(known, data=known.data[:1]))
    scaled(known)
    for case in cases:
        later, first = compute(case, known), compute(case, scaled(problems.make(name)))
        if isinstance(first, type):
            assert later is first
        else:
            assert error(later, first) < 1e-2 * max(known.tolerance, 1e-8)


# --- what it keeps


def _described(net: nn.Module, kind: str) -> tuple[Callable, list[Tensor] | dict[str, Tensor]]:
    """Return a net and its parameters as a user may describe them."""
    if kind == "function":
        copies = {name: param.detach().clone() for name, param in net.named_parameters()}
        return lambda params, X: torch.func.functional_call(net, params, X), copies
    return net if kind == "module" else lambda X: net(X), list(net.parameters())


@pytest.mark.parametrize("kind", ["module", "function", "closure"])
def test_nothing_is_kept_alive(kind: str):
    net, (X, y) = Net(), batch()
    model, params = _described(net, kind)
    for cls in (HessianLinearOperator, KFACLinearOperator, PerSampleGradientLinearOperator):
        product(cls(model, nn.CrossEntropyLoss(), params, [(X, y)]))
    gone = [weakref.ref(part) for part in (net, X, y, net.layers[0].weight)]
    del net, model, params, X, y
    gc.collect()
    assert [part() for part in gone] == [None] * 4


def test_batches_get_random_numbers_of_their_own():
    net = Net()
    net.layers[1] = nn.Dropout(0.5)
    loss, products = nn.CrossEntropyLoss(reduction="sum"), []
    for number in (1, 2):
        H = build(HessianLinearOperator, net, [batch()] * number, loss)
        torch.manual_seed(0)
        products.append(product(H))
    assert error(products[1], 2 * products[0]) > 1e-3


class Centered(torch.autograd.Function):
    """Lets samples interact in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g - g.mean(0, keepdim=True)


def test_functions_of_other_parameters():
    """What holds for one tensor says nothing of another one, which a function also calls "0"."""
    v, w = (torch.rand(3, requires_grad=True) for _ in range(2))
    function = lambda X: torch.tanh(Centered.apply(X * v)) * w  # noqa: E731
    data = [(torch.rand(6, 3), torch.rand(6, 3)) for _ in range(2)]
    EFLinearOperator(function, nn.MSELoss(), [w], data) @ torch.eye(3)
    with pytest.raises(ValueError, match="depends on the other samples"):
        EFLinearOperator(function, nn.MSELoss(), [v], data) @ torch.eye(3)


class WithoutAttributes:
    __slots__ = ()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return (output - target).square().sum()


def test_losses_without_attributes():
    net, data = nn.Linear(2, 1), [(torch.rand(3, 2), torch.rand(3, 1))] * 2
    arguments = net, WithoutAttributes(), list(net.parameters()), data
    for checked in (True, False):
        H = HessianLinearOperator(*arguments, reduction="sum", check_deterministic=checked)
        expected = HessianLinearOperator(net, nn.MSELoss(reduction="sum"), *arguments[2:])
        torch.testing.assert_close(matrix(H), matrix(expected))


# --- numbers that models and losses read


def unpadded() -> nn.Module:
    """A layer on the tokens of all sequences, without padding, one after the other."""

    def function(s: Using, X: dict) -> Tensor:
        lengths = X["lengths"].tolist()
        rows = torch.cat([x[:n] for x, n in zip(X["x"], lengths, strict=True)])
        z = s.layer(rows).tanh().split(lengths)
        return s.head(torch.stack([part.square().sum(0) for part in z]))

    torch.manual_seed(0)
    return Using(function, layer=nn.Linear(3, 4), head=nn.Linear(4, 2)).double()


@pytest.mark.parametrize("cls", [PerSampleGradientLinearOperator, EKFACLinearOperator])
def test_layouts_do_not_outlive_lengths(cls: type):
    net, x, y = unpadded(), torch.rand(2, 3, 3).double(), torch.tensor([0, 1])

    def compute(net: nn.Module, *lengths: int) -> Tensor:
        data = [({"x": x, "lengths": torch.tensor(lengths)}, y)]
        return build(cls, net, data, batch_size_fn=lambda X: 2) @ torch.eye(26).double()

    compute(net, 2, 2)
    expected = compute(unpadded(), 3, 1)
    torch.testing.assert_close(compute(net, 3, 1), expected, rtol=1e-10, atol=1e-12)
