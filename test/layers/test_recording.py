"""What recording a forward pass keeps, follows and refuses."""

import gc
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import error
from models import Using
from sample_gradients import check_rows, loop, rows_in_batches
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.checkpoint import checkpoint

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.layers import samples
from curvlinops.layers.recorded import RecordedBatch
from curvlinops.layers.rules import RULES, Rule, Use, contraction

LOSS = nn.MSELoss(reduction="sum")
SCALE = 1.0
NUM_CALLS = 0


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def data(*shape: int) -> list[tuple[Tensor, Tensor]]:
    """Return one batch, by default of five vectors of four numbers."""
    return [(torch.randn(*(shape or (5, 4))).double(), torch.randn(5, 3).double())]


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """A function with PyTorch's protocol that reads a global number."""
    if has_torch_function((x, w)):
        return handle_torch_function(scaled, (x, w), x, w)
    return F.linear(x, w) * SCALE


def spelled_out(x: Tensor, w: Tensor) -> Tensor:
    """The same, with another spelling of the question."""
    if torch.overrides.has_torch_function((x, w)):
        return torch.overrides.handle_torch_function(spelled_out, (x, w), x, w)
    return F.linear(x, w) * SCALE


def counting(x: Tensor, w: Tensor) -> Tensor:
    """The same, and it assigns to a global name."""
    global NUM_CALLS
    if has_torch_function((x, w)):
        return handle_torch_function(counting, (x, w), x, w)
    NUM_CALLS += 1
    return F.linear(x, w) * SCALE


@pytest.mark.parametrize("function", [scaled, spelled_out, counting])
def test_functions_that_ask_for_the_protocol_read_present_globals(function, monkeypatch):
    model = Using(lambda s, x: function(x, s.weight), weight=torch.randn(3, 4).double())
    arguments = model, LOSS, [model.weight], data()
    J = PerSampleGradientLinearOperator(*arguments)
    for scale in (1.0, 3.0):
        monkeypatch.setattr(f"{__name__}.SCALE", scale)
        before = NUM_CALLS
        expected = loop(model, *arguments[2:], LOSS).norm(dim=1)
        calls = NUM_CALLS - before
        assert error(J.norms(), expected) <= 1e-12
        assert error(PerSampleGradientLinearOperator(*arguments).norms(), expected) <= 1e-12
        assert NUM_CALLS > before + calls or function is not counting
    assert bool(J.fallbacks) == (function is not scaled)
    assert all("a call that no rule knows" in reason for reason in J.fallbacks.values())


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


def fused(x: Tensor, w: Tensor) -> Tensor:
    if has_torch_function((x, w)):
        return handle_torch_function(fused, (x, w), x, w)
    return x @ w


def misspelt(x: Tensor, w: Tensor) -> dict[str, Use | None]:
    return {"w": contraction("... i, i o -> ... o", x, w.shapes)}


def unforeseen(x: Tensor, w: Tensor) -> dict[str, Use | None]:
    raise NotImplementedError("Two axes only.")


def two_layers() -> tuple:
    parts = {"a": torch.randn(4, 4), "w": torch.randn(4, 3)}
    model = Using(lambda s, X: fused(torch.tanh(X @ s.a), s.w), **parts).double()
    return model, LOSS, list(model.parameters()), data()


def fails_on_gradients(x: Tensor, w: Tensor) -> dict[str, Use | None]:
    def fails(*args):
        raise IndexError("on gradients")

    return {"w": Use((len(x),), fails, fails)}


def test_mistakes_in_gradients_of_rules_surface(monkeypatch):
    monkeypatch.setitem(RULES, fused, Rule(fails_on_gradients))
    with pytest.raises(IndexError, match="on gradients"):
        PerSampleGradientLinearOperator(*two_layers()).norms()


def test_mistakes_in_rules_surface(monkeypatch):
    monkeypatch.setitem(RULES, fused, Rule(misspelt))
    J = PerSampleGradientLinearOperator(*two_layers())
    with pytest.raises(RuntimeError, match="The rule misspelt .* no attribute 'shapes'") as info:
        J.norms()
    assert isinstance(info.value.__cause__, AttributeError)


def test_calls_that_a_rule_does_not_know_have_a_fallback(monkeypatch, caplog):
    monkeypatch.setitem(RULES, fused, Rule(unforeseen))
    arguments = two_layers()
    J = PerSampleGradientLinearOperator(*arguments)
    with caplog.at_level(logging.WARNING, "curvlinops"):
        norms = J.norms()
    assert list(J.fallbacks) == ["w"]
    model, _, params, batches = arguments
    assert error(norms, loop(model, params, batches, LOSS).norm(dim=1)) <= 1e-12


# --- gradients that are zero


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The parameters whose rules are compared with autograd, comparison by comparison."""
    found: list[list[str]] = []
    check = RecordedBatch.check

    def counting(self: RecordedBatch, one: Any, uses: list) -> Any:
        found.append(sorted(name for use in uses for name in use.origins))
        return check(self, one, uses)

    monkeypatch.setattr(RecordedBatch, "check", counting)
    return found


def with_zeros(switched_off: bool) -> nn.Module:
    """The layers of the adapter have no gradient because of parameters, or because of data."""

    def function(s: Using, x: Tensor) -> Tensor:
        adapted = s.up(fused(x, s.down))
        return s.head(torch.tanh(x) + (adapted * (x[:, :1] > 9) if switched_off else adapted))

    parts = {"up": nn.Linear(3, 4, bias=False), "head": nn.Linear(4, 3), "down": torch.randn(4, 3)}
    model = Using(function, **parts).double()
    if not switched_off:
        nn.init.zeros_(model.up.weight)
    return model


@pytest.mark.parametrize("kind", ["rows", "empirical", "type-2", "forward-only"])
def test_rules_behind_zeros_are_checked_with_other_parameters(
    kind: str, compared: list, monkeypatch: pytest.MonkeyPatch
):
    """They are checked once, and not again on each batch."""
    monkeypatch.setitem(RULES, fused, Rule(lambda x, w: {"w": product_with(x, w)}))
    model = with_zeros(switched_off=False)
    arguments = model, LOSS, list(model.parameters()), data() + data()
    for _ in range(2):
        if kind == "rows":
            PerSampleGradientLinearOperator(*arguments).norms()
        else:
            KFACLinearOperator(*arguments, fisher_type=kind).trace()
    names = sorted(name for name, _ in model.named_parameters())
    assert compared == [names, ["down"]]


def product_with(x: Tensor, w: Tensor, factor: float = 1.0) -> Use:
    return contraction("... i, i o -> ... o", factor * x, w.shape)


def test_wrong_rules_behind_zeros_are_found(monkeypatch: pytest.MonkeyPatch, caplog):
    """By an operator that sees the first step, and by the next one."""
    monkeypatch.setitem(RULES, fused, Rule(lambda x, w: {"w": product_with(x, w, 2.0)}))
    model, batches = with_zeros(switched_off=False), data()
    arguments = model, LOSS, list(model.parameters()), batches
    first = PerSampleGradientLinearOperator(*arguments)
    first.norms()
    nn.init.normal_(model.up.weight)
    for J in (first, PerSampleGradientLinearOperator(*arguments)):
        with caplog.at_level(logging.ERROR, "curvlinops"):
            assert error(J.dense(), loop(model, *arguments[2:], LOSS)) <= 1e-12
        assert list(J.fallbacks) == ["down"]


def test_zeros_that_are_in_the_data(compared: list, monkeypatch: pytest.MonkeyPatch):
    """Rules of the layers in question are compared until a batch has a gradient."""
    monkeypatch.setitem(RULES, fused, Rule(lambda x, w: {"w": product_with(x, w)}))
    model, (*zeros, (X, y)) = with_zeros(switched_off=True), data() + data() + data()
    X[0, 0] = 10.0
    J = PerSampleGradientLinearOperator(model, LOSS, list(model.parameters()), [*zeros, (X, y)])
    rows = loop(model, list(model.parameters()), [*zeros, (X, y)], LOSS)
    assert error(J.dense(), rows) <= 1e-12
    adapter = ["down", "up.weight"]
    names = sorted(name for name, _ in model.named_parameters())
    # of the first batch: also with other parameters, and with the vectors that were asked for
    assert compared == [names, adapter, adapter, adapter, adapter]
    assert error(J.dense(), rows) <= 1e-12
    assert len(compared) == 5


def test_facts_of_many_graphs_have_a_bound(monkeypatch: pytest.MonkeyPatch):
    """A model whose layers depend on the data has a graph for each choice."""

    def function(s: Using, x: Tensor) -> Tensor:
        for bit, layer in enumerate(s.layers):
            x = torch.tanh(layer(x)) if int(x[0, 0].detach() * 64) >> bit & 1 else x.sin()
        return s.head(x)

    monkeypatch.setattr(samples, "MOST_GRAPHS", 16)
    gc.collect()
    num_facts = sum(isinstance(x, samples.GraphFacts) for x in gc.get_objects())
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(6)])
    model = Using(function, layers=layers, head=nn.Linear(4, 3)).double()
    batches = [(torch.rand(5, 4).double(), y) for _ in range(100) for _, y in data()]
    arguments = model, LOSS, list(model.parameters()), batches
    J = PerSampleGradientLinearOperator(*arguments, check_deterministic=False)
    assert error(J.norms(), rows_in_batches(model, batches, LOSS).norm(dim=1)) <= 1e-12
    gc.collect()
    facts = [x for x in gc.get_objects() if isinstance(x, samples.GraphFacts)]
    assert len(facts) - num_facts <= 16


def test_random_models_have_rules():
    """A pass draws its masks once: rules are compared with autograd's gradients of that pass."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
    params, batches = list(model.parameters()), data()
    J = PerSampleGradientLinearOperator(model, LOSS, params, batches, check_deterministic=False)
    torch.manual_seed(1)
    expected = rows_in_batches(model, batches, LOSS)
    torch.manual_seed(1)
    assert error(J.dense(), expected) <= 1e-12
    assert not J.fallbacks


@pytest.mark.parametrize("inside", [False, True])
def test_checkpoints_and_compositions(inside: bool):
    """A recurrent call in a checkpoint is not replaced by a composition; others are."""

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
    check_rows(J, loop(model, *arguments[2:], LOSS))
    assert all(name.startswith("rnn") for name in J.fallbacks) and bool(J.fallbacks) == inside


def branching(s: Using, x: Tensor) -> Tensor:
    """Has no rule on some data."""
    return torch.vmap(s.layer)(x) if x[0, 0] > 0 else s.layer(x)


def test_fallbacks_of_one_operator_are_not_those_of_another():
    model, [(X, y)] = Using(branching, layer=nn.Linear(4, 3)).double(), data()
    X[0, 0] = 1.0
    arguments = model, LOSS, list(model.parameters())
    K = KFACLinearOperator(*arguments, [(-X, y)])
    trace = K.trace()
    with pytest.raises(NotImplementedError, match="a call that no rule knows"):
        KFACLinearOperator(*arguments, [(X, y)]).trace()
    K.compute_kronecker_factors()
    assert K.trace() == trace
