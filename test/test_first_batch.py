"""Later operators use facts about a model that earlier ones found, unless something has changed."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import problems
import pytest
import torch
from contract import ALL, error, matrix, vectors
from problems import Problem
from test_contract import CORE
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive

N = 32


class Net(nn.Module):
    """A net that notes the sizes of the batches on which it is evaluated."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.sizes = SimpleNamespace(seen=[])  # lists would be as before after each product

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.seen = (*self.sizes.seen, len(x))
        return self.layers(x)


def batch(seed: int = 0, size: int = N) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.rand(size, 3).double(), torch.randint(2, (size,))


def build(net: Callable, cls: type, data: list, loss: nn.Module | None = None, **options):
    params, loss = list(net.parameters()), loss or nn.CrossEntropyLoss()
    options = {"check_deterministic": False} | options
    if cls is JacobianLinearOperator:
        return cls(net, params, data, **options)
    return cls(net, loss, params, data, **options)


def product(operator) -> Tensor:
    return operator @ vectors(operator)


#: Quantities, and how often a known net is evaluated for them.
QUANTITIES: dict[str, tuple[type, Callable, int]] = {
    "hessian": (HessianLinearOperator, product, 2),
    "ggn": (GGNLinearOperator, product, 2),
    "kfac": (KFACLinearOperator, lambda op: op.compute_kronecker_factors(), 1),
    "diagonal": (GGNDiagonalLinearOperator, lambda op: op.diagonal(), 1),
    "norms": (PerSampleGradientLinearOperator, lambda op: op.norms(), 2),
    "kernel": (JacobianLinearOperator, lambda op: op.gram(), 2),
}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("name", QUANTITIES)
def test_new_operators_evaluate_no_more_than_known_ones(name: str, normalized: bool):
    cls, compute, passes = QUANTITIES[name]
    net = Net()
    if normalized:  # which counts batches in an integer
        net.layers.append(nn.BatchNorm1d(2).double().eval())
    net.sizes = SimpleNamespace(seen=())
    counts = []
    for seed in range(3):
        with torch.no_grad():  # as an optimizer does
            net.layers[0].weight.mul_(0.9)
        compute(build(net, cls, [batch(seed)]))
        counts.append(len(net.sizes.seen))
        net.sizes.seen = ()
    assert counts[0] > passes, "The first one has to find out."
    assert counts[1:] == [passes, passes]


# --- nothing of it is used where anything differs


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


class Varying(Net):
    """A net that may contain a function that forward mode gets wrong."""

    attribute = False

    def forward(self, X: dict) -> Tensor:
        z = self.layers(X["x"])
        wrong = self.attribute or X.get("wrong") or len(z) > N
        return Wrong.apply(z) if wrong else 2 * z


def _change(net: Varying, data: list, what: str) -> list:
    X, y = data[0]
    if what == "attribute":
        net.attribute = True
    elif what == "hook":
        net.register_forward_hook(lambda module, args, output: Wrong.apply(output) / 2)
    elif what == "value in X":
        return [({**X, "wrong": True}, y)]
    elif what == "more samples":
        return [({"x": torch.cat([X["x"], X["x"]])}, torch.cat([y, y]))]
    return data


CHANGES = ["attribute", "hook", "value in X", "more samples"]


@pytest.mark.parametrize("what", CHANGES)
def test_modes_are_tested_again_after_a_change(what: str):
    net, (x, y) = Varying().eval(), batch()
    data = [({"x": x}, y)]

    def off(data: list) -> float:
        operator = build(net, JacobianLinearOperator, data)
        v = vectors(operator)
        expected = torch.cat([_jacobian(net, X["x"], X) for X, _ in data]) @ v
        return error(operator @ v, expected)

    assert off(data) < 1e-10 and off(data) < 1e-10
    assert off(_change(net, data, what)) < 1e-10


def _jacobian(net: nn.Module, x: Tensor, X: dict) -> Tensor:
    rows = []
    for entry in net(X).flatten():
        grads = torch.autograd.grad(entry, list(net.parameters()), retain_graph=True)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


class Penalized(nn.Module):
    """A loss that may use the parameters itself."""

    def __init__(self, net: nn.Module, weight: float | Tensor):
        super().__init__()
        self.net, self.weight = [net], weight

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(output, target)
        if not self.weight:
            return loss
        return loss + self.weight * sum(p.square().sum() for p in self.net[0].parameters()) / 2


def test_losses_are_looked_at_again():
    net = Net()
    X, y = batch()
    weight, found = torch.zeros(()).double(), []  # a number that the loss reads
    for penalty in (0.0, 0.5, 0.5, weight, weight):
        loss = Penalized(net, penalty)
        found.append(matrix(build(net, HessianLinearOperator, [(X, y)], loss, reduction="mean")))
        if penalty is weight:
            weight.fill_(0.5)
    penalized = found[0] + 0.5 * torch.eye(len(found[0])).double()
    expected = [found[0], penalized, penalized, found[0], penalized]
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


# --- the numbers are those of an operator that is the first one


@pytest.mark.parametrize("name", [*CORE, "lstm-bidirectional", "weight-norm", "pinn"])
def test_later_operators_agree_with_first_ones(name: str):
    """At other parameters, on more data; where a first one is refused, so is a later one."""

    def scaled() -> Problem:
        p = problems.make(name)
        with torch.no_grad():
            for tensor in p.params.values() if isinstance(p.params, dict) else p.params:
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
    with torch.no_grad():
        for tensor in known.params.values() if isinstance(known.params, dict) else known.params:
            tensor.mul_(0.9)
    for case in cases:
        later, first = compute(case, known), compute(case, scaled())
        if isinstance(first, type):
            assert later is first
        else:
            assert error(later, first) < 1e-2 * max(known.tolerance, 1e-8)


# --- what it costs


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


def test_checks_of_repeatability_evaluate_each_batch_twice():
    net = Net()
    build(net, HessianLinearOperator, [batch(0), batch(1)], check_deterministic=True)
    assert net.sizes.seen.count(N) == 4


def test_jacobians_evaluate_each_batch_once_for_all_columns():
    net, data = Net(), [batch(0), batch(1)]
    J = build(net, JacobianLinearOperator, data)
    net.sizes = SimpleNamespace(seen=())
    J @ torch.eye(J.shape[1]).double()
    assert net.sizes.seen.count(N) <= len(data) + 1


def test_batches_get_random_numbers_of_their_own():
    net, masks = Net(), []
    net.layers[1] = nn.Dropout(0.5)
    net.layers[1].register_forward_hook(lambda _, x, y: masks.append((y == 0).detach()))
    product(build(net, HessianLinearOperator, [batch()] * 2))
    masks = [mask for mask in masks if len(mask) == N]
    assert len(masks) == 4 and not torch.equal(masks[1], masks[3])


# --- numbers that models and losses read


class Switched(Net):
    """Does something else where a number says so."""

    def __init__(self, function: Callable):
        super().__init__()
        self.function = function
        self.register_buffer("on", torch.tensor([0.0]))

    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        return self.function(z) if self.on > 0 else 2 * z


def test_modes_do_not_outlive_numbers_that_choose_functions():
    net, data = Switched(Wrong.apply), [batch()]
    product(build(net, JacobianLinearOperator, data))
    net.on.fill_(1)
    later = build(net, JacobianLinearOperator, data)
    expected = _jacobian(net, data[0][0], data[0][0]) @ vectors(later)
    assert error(later @ vectors(later), expected) < 1e-10


@pytest.mark.parametrize("cls", [HessianLinearOperator, KFACLinearOperator])
def test_lost_dependence_is_noticed(cls: type):
    net, data = Switched(Tensor.detach), [batch()]
    product(build(net, cls, data))
    net.on.fill_(1)
    with pytest.raises(ValueError, match="does not depend on any of the parameters"):
        product(build(net, cls, data))


class Unpadded(nn.Module):
    """A layer on the tokens of all sequences, without padding, one after the other."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.head = nn.Linear(3, 4).double(), nn.Linear(4, 2).double()

    def forward(self, X: dict) -> Tensor:
        lengths = X["lengths"].tolist()
        rows = torch.cat([x[:n] for x, n in zip(X["x"], lengths, strict=True)])
        z = self.layer(rows).tanh().split(lengths)
        return self.head(torch.stack([part.square().sum(0) for part in z]))


@pytest.mark.parametrize("cls", [PerSampleGradientLinearOperator, EKFACLinearOperator])
def test_layouts_do_not_outlive_lengths(cls: type):
    net, x, y = Unpadded(), torch.rand(2, 3, 3).double(), torch.tensor([0, 1])

    def compute(net: nn.Module, *lengths: int) -> Tensor:
        data = [({"x": x, "lengths": torch.tensor(lengths)}, y)]
        return build(net, cls, data, batch_size_fn=lambda X: 2) @ torch.eye(26).double()

    compute(net, 2, 2)
    expected = compute(Unpadded(), 3, 1)
    torch.testing.assert_close(compute(net, 3, 1), expected, rtol=1e-10, atol=1e-12)
