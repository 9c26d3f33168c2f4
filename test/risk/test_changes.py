"""Products are of the model, the loss and the data as they are at that moment."""

import array
import copy
import functools
import pickle
import types
import warnings
import weakref
from collections import ChainMap
from collections.abc import Callable
from contextvars import ContextVar
from itertools import product
from types import MethodType

import changeable
import pytest
import torch
from changeable import Changeable, World
from contract import ALL, CASES, error, vectors
from models import Using
from small import CE, batches, build, mlp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import vector_to_parameters

from curvlinops import CGInverseLinearOperator, HessianLinearOperator, KFACLinearOperator

DIM, CLASSES = 53, torch.tensor([1.0, 1.5, 1.0])


def _fused_adam(w: World) -> None:
    w.loss(w.model(w.data[0][0]), w.data[0][1]).backward()
    torch.optim.Adam(w.params, lr=1e-2, fused=True).step()


def _own_forward(w: World) -> None:
    w.model.forward = MethodType(lambda self, x: 1.1 * Changeable.forward(self, x), w.model)


def _set_data(x: Tensor) -> None:
    x.data = 2 * x.data.flip(0)


def _hook_on_loss(w: World) -> None:
    w.loss.weight = None
    w.loss.register_forward_hook(lambda m, i, out: 3 * out)


def _own_loss(w: World) -> None:
    w.loss.forward = lambda output, y: (output.pow(4).sum(1) * (y + 1)).mean()


#: What a user changes, and the tensor that is named inside of `linearized()` if it was written to.
EVENTS: dict[str, tuple[Callable[[World], object], str | None]] = {
    "in place": (torch.no_grad()(lambda w: w.params[0].mul_(1.1)), "first.weight"),
    "same numbers": (torch.no_grad()(lambda w: w.params[0].mul_(1)), "first.weight"),
    "foreach": (torch.no_grad()(lambda w: torch._foreach_mul_(w.params[1:], 2)), "first.bias"),
    "fused Adam": (_fused_adam, None),  # PyTorch does not count this write
    "state": (
        lambda w: w.model.load_state_dict({n: 2 * x for n, x in w.model.state_dict().items()}),
        "first.weight",
    ),
    "data": (lambda w: w.params[0].data.add_(0.1), None),
    "data, assigned": (lambda w: _set_data(w.params[0]), "first.weight"),
    "data, assigned twice": (lambda w: [_set_data(w.params[1]) for _ in range(2)], "first.bias"),
    "vector": (lambda w: vector_to_parameters(torch.ones(DIM).double(), w.params), "first.weight"),
    "frozen": (lambda w: w.model.frozen.add_(1), "frozen"),
    "frozen, data": (lambda w: w.model.frozen.data.mul_(1.1), None),
    "frozen, assigned": (
        lambda w: w.model.load_state_dict(
            {"frozen": w.model.frozen * 1.1}, strict=False, assign=True
        ),
        None,
    ),
    "buffer": (lambda w: w.model.norm.running_mean.add_(0.2), "norm.running_mean"),
    "buffer, data": (lambda w: w.model.norm.running_mean.data.add_(0.2), None),
    "buffer, replaced": (
        lambda w: setattr(w.model.norm, "running_var", torch.rand(5).double()),
        None,
    ),
    "plain tensor": (lambda w: w.model.plain.data.mul_(1.1), None),
    "array": (lambda w: w.model.array.__imul__(1.1), None),
    "train": (lambda w: w.model.norm.train(), None),
    "step of training": (lambda w: w.model.train()(w.data[0][0]), "norm.num_batches_tracked"),
    "attribute": (lambda w: setattr(w.model, "gain", 1.1), None),
    "nested": (lambda w: w.model.config["nested"].__setitem__(0, 0.1), None),
    "submodule": (lambda w: setattr(w.model, "act", nn.Sigmoid()), None),
    "hook": (
        lambda w: w.model.act.register_forward_hook(lambda m, i, out: 0.9 * out),
        None,
    ),
    "forward": (_own_forward, None),
    "X": (lambda w: w.data[0][0].data.mul_(1.1), None),
    "X, numpy": (lambda w: w.data[1][0].numpy().__imul__(1.1), None),
    "y": (lambda w: w.data[0][1].data.copy_((w.data[0][1] + 1) % 3), None),
    "batch replaced": (
        lambda w: w.data.__setitem__(0, (w.data[0][0] + 1, w.data[0][1])),
        None,
    ),
    "batch added": (lambda w: w.data.append((w.data[0][0] + 1, w.data[0][1])), None),
    "batch removed": (lambda w: w.data.pop(0), None),
    "class weight": (lambda w: w.loss.weight.mul_(CLASSES), "weight of the loss"),
    "class weight, data": (lambda w: w.loss.weight.data.mul_(CLASSES), None),
    "smoothing": (lambda w: setattr(w.loss, "label_smoothing", 0.3), None),
    "ignore_index": (lambda w: setattr(w.loss, "ignore_index", 1), None),
    "reduction": (lambda w: setattr(w.loss, "reduction", "sum"), None),
    "loss, with a hook": (_hook_on_loss, None),
    "loss, with a forward": (_own_loss, None),
}
SOME = ["in place", "frozen", "X", "batch added", "class weight", "hook"]
IN_TRAIN_MODE = ["train", "step of training"]


@pytest.mark.parametrize("case, event", [*product(["hessian"], EVENTS), *product(["fisher"], SOME)])
@pytest.mark.filterwarnings("ignore:BatchNorm in train mode")  # said as at construction
def test_changes(case: str, event: str):
    w, (change, _) = World(), EVENTS[event]
    assert w.follows(case, lambda: change(w)) > 1e-6 or event == "same numbers"


OPERATORS = {name: case.build for name, case in ALL.items()} | {
    "sum": lambda p: ALL["hessian"].build(p) - 2 * ALL["ggn"].build(p),
    "CG": lambda p: CGInverseLinearOperator(ALL["ggn"].build(p).damped(1.0), rtol=1e-12),
}
WRITES = [event for event, (_, name) in EVENTS.items() if name]
#: Operators made of others, and those without a loss.
OTHERS = ["gradients", "transposed", "sum", "CG"]


@pytest.mark.parametrize(
    "case, event",
    [*product(["hessian"], WRITES), *product(OTHERS, ["foreach", "step of training"])],
)
def test_writes_inside_are_refused_by_name(case: str, event: str):
    w, (change, name) = World(), EVENTS[event]
    A = OPERATORS[case](w.problem)
    v, match = vectors(A), f"'{name}' was overwritten inside of linearized"
    with pytest.raises(RuntimeError, match=match), A.linearized():
        A @ v
        change(w)
        with pytest.raises(RuntimeError, match=match):
            A @ v
        A @ v
    w.model.eval()
    assert error(A @ v, OPERATORS[case](w.problem) @ v) <= 1e-9


# --- numbers that code reads


Access = tuple[Callable[[], float], Callable[[], object]]


def _attribute(owner: object, name: str = "scale") -> Access:
    setattr(owner, name, 1.0)
    return lambda: getattr(owner, name), lambda: setattr(owner, name, 2.0)


def _item(container: object, key: object, read: Callable | None = None) -> Access:
    container[key] = 1
    return read or (lambda: container[key]), lambda: container.__setitem__(key, 2)


def _weak(owner: nn.Module) -> Access:
    reference = weakref.ref(owner)
    return lambda: reference().scale, _attribute(owner)[1]


def _variable() -> Access:
    variable = ContextVar("scale", default=1.0)
    return variable.get, lambda: variable.set(2.0)


class OwnPartial(functools.partial):
    """A user's subclass."""


#: How a number is read, and how it is changed.
STATES: dict[str, Callable[[], Access]] = {
    "global": lambda: (changeable._scale, _attribute(changeable, "SCALE")[1]),
    "module": lambda: _attribute(types.ModuleType("settings")),
    "class": lambda: _attribute(Changeable, "other"),
    "weak reference": lambda: _weak(nn.Module()),
    "bytearray": lambda: _item(bytearray(1), 0),
    "array": lambda: _item(array.array("d", [1.0]), 0),
    "ChainMap": lambda: _item(maps := {}, "scale", lambda: ChainMap({}, maps)["scale"]),
    "subclass of partial": lambda: _item(box := [0], 0, OwnPartial(list.__getitem__, box, 0)),
    "ContextVar": _variable,
}


@pytest.mark.parametrize("name", STATES)
def test_numbers_that_code_reads(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(changeable, "SCALE", 1.0)
    w = World()
    w.model.read, change = STATES[name]()
    assert w.follows("ggn", change) > 1e-3


# --- train mode


@pytest.mark.parametrize("middle", [nn.Dropout(0.5), nn.BatchNorm1d(5)], ids=["dropout", "norm"])
@pytest.mark.parametrize("case", ALL)
def test_train_mode_after_construction(case: str, middle: nn.Module):
    """A model that construction would refuse is refused by each later product, too."""
    w = World()
    w.model = nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3)).double().eval()
    w.params = list(w.model.parameters())
    A = w.build(case)
    v = vectors(A)
    before = A @ v

    def again() -> Tensor:
        getattr(A, "compute_kronecker_factors", lambda: None)()
        return A @ v

    w.model.train()
    for attempt in range(2):
        if isinstance(middle, nn.Dropout):
            with pytest.raises(RuntimeError, match="model.eval.. switches Dropout off"):
                again()
        elif case in ("hessian", "ggn", "mc", "ggn-mc", "jacobian", "transposed"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again()
            assert ["BatchNorm" in str(w.message) for w in caught] == [True][attempt:]
        else:
            with pytest.raises(ValueError, match="BatchNorm in train mode"):
                again()
    w.model.eval()
    torch.testing.assert_close(again(), before)


# --- dictionaries of parameters


def function(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """A nonlinear function of its parameters."""
    return torch.tanh(functional_call(MODULE, params, x)) ** 2


MODULE = nn.Linear(4, 3).double()


def named(model: Callable | None = None) -> World:
    """Return a problem in a dictionary of parameters."""
    w = World()
    w.model = model or function
    w.params = {name: param.detach().clone() for name, param in MODULE.named_parameters()}
    return w


@pytest.mark.parametrize("container", [dict, nn.ParameterDict])
@pytest.mark.parametrize("model", [function, MODULE])
def test_entries_of_a_dictionary(model: Callable, container: type):
    w = named(model)
    w.params = container(w.params)
    for names in (["weight", "bias"], ["bias"]):
        new = {n: nn.Parameter(1.1 * w.params[n].detach()) for n in names}
        assert w.follows("hessian", functools.partial(w.params.update, new)) > 1e-6
    A = w.build("hessian")
    expected = A @ vectors(A)
    del w.params["weight"]  # the last one counts
    assert torch.equal(A @ vectors(A), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_follow_copies(duplicate: Callable):
    w = named()
    A = w.build("ggn")
    v, (twin, own), alone = vectors(A), duplicate((A, w.params)), duplicate(A)
    before = A @ v
    w.params["weight"] = 2 * w.params["weight"]
    assert error(A @ v, w.build("ggn") @ v) <= 1e-12
    assert torch.equal(twin @ v, before) and torch.equal(alone @ v, before)
    own["weight"] = w.params["weight"]
    assert torch.equal(twin @ v, A @ v) and not torch.equal(A @ v, before)


REFUSED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "dtype": (Tensor.float, r"'weight' is now of shape \[3, 4\], torch.float32 on cpu; it was"),
    "device": (lambda p: p.to("meta"), "'weight' is now .* on meta; it was .* on cpu"),
    "kind": (Tensor.tolist, "'weight' in params is now a list"),
}


@pytest.mark.parametrize("change, message", REFUSED.values(), ids=REFUSED)
def test_entries_of_another_kind(change: Callable, message: str):
    w = named()
    A, weight = w.build("ggn"), w.params["weight"]
    expected = A @ vectors(A)
    w.params["weight"] = change(weight)
    for _ in range(2):
        with pytest.raises((ValueError, TypeError), match=message):
            A @ vectors(A)
    w.params["weight"] = weight
    assert torch.equal(A @ vectors(A), expected)


def test_tied_entries_stay_equal():
    layers = nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3)
    model = nn.Sequential(*layers).double()
    model[2].weight = model[0].weight
    w = named(model)
    w.params = {n: p.detach() for n, p in model.named_parameters(remove_duplicate=False)}
    one = w.params["0.weight"] + 0.1
    assert w.follows("ggn", lambda: w.params.update({"0.weight": one, "2.weight": one})) > 1e-6
    with pytest.raises(ValueError, match="one tied parameter"):
        w.follows("ggn", lambda: w.params.update({"2.weight": one + 1.0}))


# --- changes that are refused


@pytest.mark.parametrize("case", CASES)
def test_replaced_parameters_are_noticed(case: str):
    model, entry = mlp(), CASES[case]
    params = list(model.parameters())
    arguments = (CE, params) if entry.takes_loss else (params,)
    operator = entry.operator(model, *arguments, batches(4), **dict(entry.arguments))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(ValueError, match=r"'0.weight'.*were replaced.*Build a new operator"):
        operator @ torch.ones(operator.shape[1])


@pytest.mark.parametrize("kind", [HessianLinearOperator, KFACLinearOperator])
@pytest.mark.parametrize(
    "later, match",
    [
        (lambda s, x: x @ s.hidden[0].T, "by a reference that is not registered"),
        (lambda s, x: s.linear(x).detach(), "does not depend on any of the parameters"),
    ],
    ids=["hidden", "lost"],
)
def test_parameters_that_are_lost_later(later: Callable, match: str, kind: type):
    model = Using(lambda s, x: s.linear(x), linear=nn.Linear(3, 3, dtype=torch.float64))
    model.hidden = [model.linear.weight]
    operator = build(kind, model)
    operator @ torch.ones(12)
    model._function = later
    if kind is KFACLinearOperator:  # a snapshot
        operator = build(kind, model, check_deterministic=False)
    with pytest.raises(ValueError, match=match):
        operator @ torch.ones(12)
