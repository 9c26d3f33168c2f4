"""What reading a graph keeps, follows and refuses."""

import gc
import logging
from typing import Any

import pytest
import torch
from contract import error
from models import Using
from sample_gradients import check_rows, loop, rows_in_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.layers import graph
from curvlinops.layers.rules import RULES, Use, contraction

LOSS = nn.MSELoss(reduction="sum")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def data(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Return one batch, by default of five vectors of four numbers."""
    return [(torch.randn(*(shape or (5, 4))).double(), torch.randn(5, 3).double())]


def overwriting(s: Using, x: Tensor) -> Tensor:
    """Overwrite the input of an addition, which needs no input for its gradient."""
    z = s.layer(x)
    out = z + s.shift
    z.mul_(2.0)
    return s.head(torch.tanh(out))


def test_overwritten_inputs_that_no_rule_needs():
    layers = {"layer": nn.Linear(4, 4), "head": nn.Linear(4, 3)}
    model = Using(overwriting, shift=torch.randn(4), **layers).double()
    arguments = model, LOSS, list(model.parameters()), data()
    rows = loop(model, *arguments[2:], LOSS)
    check_rows(PerSampleGradientLinearOperator(*arguments), rows, 1e-12, covered=True)


def test_recording_keeps_no_activations_that_no_rule_needs():
    """Additions of a bias need neither their input nor their output."""
    alive: list[int] = []

    def shift_often(s: Using, x: Tensor) -> Tensor:
        for shift in s.shifts:
            x = x + shift
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is Tensor and t.shape == x.shape]
        alive.append(len({t.data_ptr() for t in tensors}))
        return x

    model = Using(shift_often, shifts=nn.ParameterList(torch.randn(64) for _ in range(20)))
    X, params = torch.randn(7, 64), list(model.parameters())
    KFACLinearOperator(model, LOSS, params, [(X, torch.zeros_like(X))]).trace()
    assert max(alive) <= 4


class Fused(torch.autograd.Function):
    """A product with a matrix."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w.T, x.flatten(0, -2).T @ g.flatten(0, -2)


def right(node: Any, position: int) -> Use | None:
    x, w = node.saved_tensors
    return contraction("... i, i o -> ... o", x, w.shape) if position == 1 else None


def misspelt(node: Any, position: int) -> Use | None:
    x, w = node.saved_tensors
    return contraction("... i, i o -> ... o", x, w.shapes)


def transposed(node: Any, position: int) -> Use | None:
    x, w = node.saved_tensors
    return contraction("... i, i o -> ... o", x.flip(0), w.shape)


def unforeseen(node: Any, position: int) -> Use | None:
    return None


def fails_on_gradients(node: Any, position: int) -> Use | None:
    def fails(*args):
        raise IndexError("on gradients")

    return Use((len(node.saved_tensors[0]),), (0,), fails, fails)


def two_layers(*shape: int) -> tuple:
    def function(s: Using, X: Tensor) -> Tensor:
        return Fused.apply(torch.tanh(X @ s.a), s.w).reshape(len(X), -1, 3).sum(1)

    model = Using(function, a=torch.randn(4, 4), w=torch.randn(4, 3)).double()
    return model, LOSS, list(model.parameters()), data(*shape)


@pytest.mark.parametrize("shape", [(5, 4), (5, 2, 4), (5, 3, 2, 4)], ids=str)
def test_rules_of_autograd_functions(shape: tuple[int, ...], monkeypatch):
    """The dots of an equation stand for any number of axes."""
    monkeypatch.setitem(RULES, "FusedBackward", right)
    model, _, params, batches = arguments = two_layers(*shape)
    J = PerSampleGradientLinearOperator(*arguments)
    check_rows(J, loop(model, params, batches, LOSS), 1e-12, covered=True)
    K = KFACLinearOperator(*arguments)
    assert [block.structure for block in K.report()] == ["kronecker"] * 2


def test_mistakes_in_gradients_of_rules_surface(monkeypatch):
    monkeypatch.setitem(RULES, "FusedBackward", fails_on_gradients)
    with pytest.raises(IndexError, match="on gradients"):
        PerSampleGradientLinearOperator(*two_layers()).norms()


def test_mistakes_in_rules_surface(monkeypatch):
    monkeypatch.setitem(RULES, "FusedBackward", misspelt)
    J = PerSampleGradientLinearOperator(*two_layers())
    with pytest.raises(RuntimeError, match="The rule misspelt .* no attribute 'shapes'") as info:
        J.norms()
    assert isinstance(info.value.__cause__, AttributeError)


@pytest.mark.parametrize("rule", [unforeseen, transposed])
def test_functions_without_a_right_rule_have_a_fallback(rule, monkeypatch, caplog):
    monkeypatch.setitem(RULES, "FusedBackward", rule)
    arguments = two_layers()
    J = PerSampleGradientLinearOperator(*arguments)
    with caplog.at_level(logging.WARNING, "curvlinops"):
        norms = J.norms()
    assert list(J.fallbacks) == ["w"]
    assert ("does not agree with autograd" in J.fallbacks["w"]) == (rule is transposed)
    model, _, params, batches = arguments
    assert error(norms, loop(model, params, batches, LOSS).norm(dim=1)) <= 1e-12


# --- gradients that are zero


def test_wrong_rules_behind_zeros_are_found(monkeypatch: pytest.MonkeyPatch, caplog):
    """As in an adapter before its first step: no gradient arrives at the layer."""
    monkeypatch.setitem(RULES, "FusedBackward", transposed)
    parts = {"up": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 3), "w": torch.randn(4, 3)}
    model = Using(lambda s, x: s.head(torch.tanh(x) + s.up(Fused.apply(x, s.w))), **parts).double()
    nn.init.zeros_(model.up.weight)
    arguments = model, LOSS, list(model.parameters()), data()
    J = PerSampleGradientLinearOperator(*arguments)
    J.norms()
    for _ in range(2):
        with caplog.at_level(logging.ERROR, "curvlinops"):
            assert error(J.dense(), loop(model, *arguments[2:], LOSS)) <= 1e-12
        assert list(J.fallbacks) == ["w"]
        nn.init.normal_(model.up.weight)


def test_wrong_rules_beside_large_gradients_are_found(monkeypatch: pytest.MonkeyPatch):
    """Each parameter is compared in its own scale."""
    monkeypatch.setitem(RULES, "FusedBackward", transposed)
    parts = {"head": nn.Linear(4, 3), "w": torch.randn(4, 3)}
    model = Using(lambda s, x: 1e8 * s.head(x) + Fused.apply(x, s.w), **parts).float()
    batches = [(X.float(), y) for X, y in data()]
    J = PerSampleGradientLinearOperator(model, LOSS, list(model.parameters()), batches)
    J.norms()
    assert list(J.fallbacks) == ["w"]


def test_facts_of_many_graphs_have_a_bound(monkeypatch: pytest.MonkeyPatch):
    """A model whose layers depend on the data has a graph for each choice."""

    def function(s: Using, x: Tensor) -> Tensor:
        for bit, layer in enumerate(s.layers):
            x = torch.tanh(layer(x)) if int(x[0, 0].detach() * 64) >> bit & 1 else x.sin()
        return s.head(x)

    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
    model = Using(function, layers=layers, head=nn.Linear(4, 3)).double()
    batches = [(torch.rand(5, 4).double(), y) for _ in range(50) for _, y in data()]
    arguments = model, LOSS, list(model.parameters()), batches
    monkeypatch.setattr(graph, "NUM_KNOWN", 8)
    J = PerSampleGradientLinearOperator(*arguments, check_deterministic=False)
    assert error(J.norms(), rows_in_batches(model, batches, LOSS).norm(dim=1)) <= 1e-12
    assert max(len(x) for x in gc.get_objects() if isinstance(x, graph.KnownGraphs)) <= 8


@pytest.mark.parametrize("covered", [True, False])
def test_random_models(covered: bool):
    """A pass draws its masks once, for parameters with rules and for those without."""
    layers = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    parts = {} if covered else {"w": torch.randn(3, 3)}
    last = (lambda s, z: z) if covered else (lambda s, z: torch.linalg.solve(s.w, z.T).T)
    model = Using(lambda s, x: last(s, s.layers(x)), layers=layers, **parts).double()
    params, batches = list(model.parameters()), data()
    J = PerSampleGradientLinearOperator(model, LOSS, params, batches, check_deterministic=False)
    torch.manual_seed(1)
    expected = rows_in_batches(model, batches, LOSS)
    torch.manual_seed(1)
    assert error(J.dense(), expected) <= 1e-12
    assert [*J.fallbacks] == [*parts]


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints(inside: bool):
    """What a checkpoint saves is computed again when the graph is read."""

    def function(s: Using, x: Tensor) -> Tensor:
        if inside:
            h = checkpoint(lambda x: s.rnn(x)[0], x, use_reentrant=False)
        else:
            h = checkpoint(s.block, s.rnn(x)[0], use_reentrant=False)
        return s.head(torch.tanh(h).mean(1))

    layers = {"block": nn.Linear(5, 5), "head": nn.Linear(5, 3)}
    model = Using(function, rnn=nn.LSTM(4, 5, batch_first=True), **layers).double()
    arguments = model, LOSS, list(model.parameters()), data(5, 6, 4)
    J = PerSampleGradientLinearOperator(*arguments)
    check_rows(J, loop(model, *arguments[2:], LOSS), covered=True)


def test_checkpoints_with_frozen_parameters():
    """Also where the graph is read by calls of nodes, the forward pass is computed as it was."""

    def function(s: Using, x: Tensor) -> Tensor:
        def block(x: Tensor) -> Tensor:
            return torch.hypot(s.block(x).unfold(1, 3, 1).logsumexp(-1), x[:, :3])

        return s.head(checkpoint(block, x, use_reentrant=False))

    model = Using(function, block=nn.Linear(4, 5), head=nn.Linear(3, 3)).double()
    arguments = model, LOSS, list(model.parameters()), data()
    expected = loop(model, *arguments[2:], LOSS)
    model.block.requires_grad_(False)
    check_rows(PerSampleGradientLinearOperator(*arguments), expected, covered=True)


def branching(s: Using, x: Tensor) -> Tensor:
    """Has no rule on some data."""
    return Fused.apply(x, s.w) if x[0, 0] > 0 else x @ s.w


def test_fallbacks_of_one_operator_are_not_those_of_another():
    model, [(X, y)] = Using(branching, w=torch.randn(4, 3)).double(), data()
    X[0, 0] = 1.0
    arguments = model, LOSS, list(model.parameters())
    K = KFACLinearOperator(*arguments, [(-X, y)])
    trace = K.trace()
    with pytest.raises(NotImplementedError, match="an operation that no rule knows"):
        KFACLinearOperator(*arguments, [(X, y)]).trace()
    K.compute_kronecker_factors()
    assert K.trace() == trace
