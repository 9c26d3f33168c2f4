"""Kept graphs: the numbers of fresh ones, whatever changes; bounded memory; none left behind."""

import copy
import gc
import logging
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import MethodType

import numpy as np
import problems
import pytest
import torch
from contract import CASES, EXACT, RANDOM, error, num_kept, vectors
from hypothesis import given, settings
from hypothesis import strategies as st
from test_contract import pairs
from test_memory import LiveBytes
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvlinops
from curvlinops.support.fingerprint import Fingerprint

AWKWARD = [
    "mlp-ce-all-mean",
    "classes-ce-ignore-mean",
    "mlp-user-mean",
    "cnn",
    "transformer-tied",
    "lstm-packed",
    "functional",
    "closure",
    "dict-batch-padding-idx",
    "pinn",
    "checkpoint",
    "float32-transformer",
    "bfloat16-float32-norms",
]
SQUARE = [name for name, case in CASES.items() if case.square]


@pytest.mark.extensive
@pytest.mark.parametrize("cache", ["auto", 0])
@pytest.mark.parametrize("case, problem", pairs(EXACT, AWKWARD))
def test_agrees_with_fresh_products(case: str, problem: str, cache):
    p = problems.make(problem)
    fresh, kept = (CASES[case].build(p, cache=c) for c in ("none", cache))
    v, V = vectors(fresh), vectors(fresh, 3)
    for _ in range(3):
        assert error(kept @ v, fresh @ v) <= p.tolerance
        assert error(kept @ V, fresh @ V) <= p.tolerance
    u = vectors(fresh, rows=True)
    for _ in range(3):
        assert error(kept.T @ u, fresh.T @ u) <= p.tolerance
    kinds = 1 if CASES[case].square else 2
    assert num_kept(kept) == (0 if cache == 0 else kinds * len(p.data))
    assert num_kept(fresh) == 0


def test_auto_begins_with_the_second_product():
    p = problems.make("cnn")
    H = CASES["hessian"].build(p)
    v = vectors(H)
    H @ v
    assert num_kept(H) == 0
    H @ v
    assert num_kept(H) == len(p.data)
    H.clear_cache()
    assert num_kept(H) == 0
    for _ in range(3):  # a training loop, with one product per step
        with torch.no_grad():
            p.params[0].mul_(1.01)
        H @ v
        assert num_kept(H) == 0


# --- changes

SCALE = 1.0


def _scaled(x: Tensor) -> Tensor:
    return SCALE * x


@dataclass
class Config:
    """A model's own options."""

    power: float = 1.0
    nested: dict = field(default_factory=lambda: {"shift": [0.0]})


class Changeable(nn.Module):
    """Depends on everything that a module can depend on."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)
        self.frozen = nn.Parameter(torch.rand(5) + 0.5)
        self.act, self.drop = nn.Tanh(), nn.Dropout(0.0)
        self.config, self.gain, self.plain = Config(), 1.0, torch.ones(5)
        self.array = np.ones(1)
        with torch.no_grad():
            self.norm.running_mean.uniform_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.first(x))) * self.frozen * self.plain
        x = self.gain * self.factor * x + self.config.nested["shift"][0]
        x = _scaled(x) * float(self.array[0])
        return self.last(self.drop(x)) * self.config.power


@dataclass
class World:
    """A problem that can be changed in every way."""

    model: nn.Module
    loss: nn.Module
    data: list

    @property
    def params(self) -> list[Tensor]:
        """All parameters except for the frozen one."""
        return [p for n, p in self.model.named_parameters() if n != "frozen"]

    def build(self, case: str, **options) -> curvlinops.TorchLinearOperator:
        """Return an operator, without warnings of BatchNorm in train mode."""
        entry = CASES[case]
        arguments = (self.model, self.loss) if entry.takes_loss else (self.model,)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            options = dict(entry.arguments) | options
            options["check_deterministic"] = False
            return entry.operator(*arguments, self.params, self.data, **options)


def world() -> World:
    """Return a problem that was not changed yet."""
    global SCALE
    SCALE, Changeable.factor = 1.0, 1.0
    torch.manual_seed(0)
    model = Changeable().double().eval()
    model.plain = model.plain.double()
    data = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (4, 2)]
    weight = torch.tensor([1.0, 2.0, 0.5]).double()
    return World(model, nn.CrossEntropyLoss(weight=weight), data)


def _in_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] *= 1.1


def _fused_adam(w: World) -> None:
    optimizer = torch.optim.Adam(w.params, lr=1e-2, fused=True)
    optimizer.zero_grad()
    w.loss(w.model(w.data[0][0]), w.data[0][1]).backward()
    optimizer.step()


def _set_scale(w: World) -> None:
    global SCALE
    SCALE += 0.1


def _own_forward(w: World) -> None:
    def forward(self: Changeable, x: Tensor) -> Tensor:
        return 1.1 * Changeable.forward(self, x)

    w.model.forward = MethodType(forward, w.model)


def _set_factor(w: World) -> None:
    Changeable.factor += 0.1


def _grow_shift(w: World) -> None:
    w.model.config.nested["shift"][0] += 0.1


def _no_grad_copy(w: World) -> None:
    with torch.no_grad():
        w.params[0].copy_(torch.randn_like(w.params[0]))


def _load(w: World) -> None:
    w.model.load_state_dict({n: 1.05 * v for n, v in w.model.state_dict().items()}, strict=True)


def _assign_frozen(w: World) -> None:
    state = {"frozen": w.model.frozen.detach() * 1.1}
    w.model.load_state_dict(state, strict=False, assign=True)


def _permute_data(w: World) -> None:
    w.params[0].data = w.params[0].data.flip(0)


def _abandon_memory(w: World) -> None:
    old = w.params[0].data
    w.params[0].data = old.clone()
    old.zero_()


def _abandon_batch(w: World) -> None:
    X, y = w.data[0]
    w.data[0] = (X.clone(), y.clone())
    X.zero_()


@torch.no_grad()
def _write_the_same(w: World) -> None:
    """Change nothing but the version counters, which autograd compares."""
    w.model.load_state_dict(w.model.state_dict())
    for tensor in (*w.params, w.model.frozen, w.model.plain, *w.data[0], w.loss.weight):
        tensor.mul_(1)


CHANGES: dict[str, Callable[[World], object]] = {
    "in place": _no_grad_copy,
    "data": lambda w: w.params[0].data.add_(0.1),
    "sign": lambda w: w.params[0].data.neg_(),  # the same norm
    "two signs": lambda w: w.params[0].data[0, :2].neg_(),
    "swap": lambda w: w.params[0].data[0, :2].copy_(w.params[0].data[0, :2].flip(0)),
    "permutation": _permute_data,
    "one entry": lambda w: w.params[-1].data[0].mul_(1 + 1e-3),
    "numpy": lambda w: _in_numpy(w.params[0]),
    "foreach": lambda w: torch._foreach_mul_([p.data for p in w.params], 1.1),
    "fused Adam": _fused_adam,
    "state dict": _load,
    "memory": _abandon_memory,
    "same numbers": _write_the_same,
    "frozen": lambda w: w.model.frozen.data.mul_(1.1),
    "frozen, assigned": _assign_frozen,
    "buffer": lambda w: w.model.norm.running_mean.data.add_(0.2),
    "buffer, numpy": lambda w: _in_numpy(w.model.norm.running_var),
    "buffer, replaced": lambda w: setattr(
        w.model.norm, "running_var", w.model.norm.running_var * 1.2
    ),
    "plain tensor": lambda w: w.model.plain.data.mul_(1.1),
    "array": lambda w: w.model.array.__imul__(1.1),
    "train": lambda w: w.model.norm.train(not w.model.norm.training),
    "attribute": lambda w: setattr(w.model, "gain", w.model.gain + 0.1),
    "config": lambda w: setattr(w.model.config, "power", w.model.config.power + 0.1),
    "nested config": _grow_shift,
    "class attribute": _set_factor,
    "global": _set_scale,
    "submodule": lambda w: setattr(w.model, "act", nn.Sigmoid()),
    "hook": lambda w: w.model.act.register_forward_hook(lambda m, i, out: 0.9 * out),
    "forward": _own_forward,
    "eps": lambda w: setattr(w.model.norm, "eps", w.model.norm.eps * 100),
    "X": lambda w: w.data[0][0].data.mul_(1.1),
    "X, permuted": lambda w: w.data[0][0].data.copy_(w.data[0][0].flip(0)),
    "X, numpy": lambda w: _in_numpy(w.data[1][0]),
    "X, memory": _abandon_batch,
    "y": lambda w: w.data[0][1].data.copy_((w.data[0][1] + 1) % 3),
    "batch replaced": lambda w: w.data.__setitem__(
        0, (torch.randn_like(w.data[0][0]), w.data[0][1])
    ),
    "batches reversed": lambda w: w.data.reverse(),
    "batch added": lambda w: w.data.append((w.data[0][0] + 1, w.data[0][1])),
    "batch removed": lambda w: w.data.pop(0) if len(w.data) > 1 else None,
    "class weight": lambda w: w.loss.weight.data.mul_(torch.tensor([1.0, 1.5, 1.0])),
    "smoothing": lambda w: setattr(w.loss, "label_smoothing", 0.3),
    "ignore_index": lambda w: setattr(w.loss, "ignore_index", 1),
}
# the number of outputs is fixed at construction
RESHAPING = {"batch added", "batch removed"}


def _agree(w: World, case: str, operator: curvlinops.TorchLinearOperator) -> bool:
    """Return whether the operator is what it would be if it was built now, without keeping."""
    fresh = w.build(case, cache="none")
    V = vectors(fresh, 2)
    return error(operator @ V, fresh @ V) <= 1e-10


def _can(case: str, change: str) -> bool:
    """Return whether an operator can meet a change at all."""
    if change == "train" and case.startswith(("fisher", "gradients", "ggn-diagonal")):
        return False  # refused at construction
    return CASES[case].square or change not in RESHAPING


#: Operators that keep different things.
KEEPING = ["hessian", "ggn", "mc", "fisher", "gradients", "ggn-diagonal", "jacobian"]


@pytest.mark.parametrize("case, change", [(o, c) for o in KEEPING for c in CHANGES if _can(o, c)])
@pytest.mark.filterwarnings("ignore:BatchNorm in train mode")  # said as at construction
def test_changes_are_noticed(case: str, change: str):
    w = world()
    operator = w.build(case, cache="graph")
    before = operator @ vectors(operator)
    assert num_kept(operator) == 2
    CHANGES[change](w)
    assert _agree(w, case, operator)
    unseen = {"memory", "same numbers", "X, memory"}  # the values are the same
    if CASES[case].square and case not in RANDOM and change not in unseen | {"batches reversed"}:
        assert error(operator @ vectors(operator), before) > 1e-12
    assert _agree(w, case, operator)


@pytest.mark.extensive
@pytest.mark.filterwarnings("ignore:BatchNorm in train mode")  # said as at construction
@settings(max_examples=25, deadline=None)
@given(
    case=st.sampled_from(["hessian", "ggn", "mc", "jacobian"]),
    cache=st.sampled_from(["auto", "graph", 20_000]),
    changes=st.lists(
        st.sampled_from(sorted(set(CHANGES) - RESHAPING) + 4 * ["nothing"]), max_size=8
    ),
)
def test_sequences_of_changes(case: str, cache, changes: list[str]):
    w = world()
    operator = w.build(case, cache=cache)
    for change in changes:
        CHANGES.get(change, lambda w: None)(w)
        assert _agree(w, case, operator)


def test_options_are_noticed():
    w = world()
    operator = w.build("mc", cache="graph")
    v = vectors(operator)
    before = operator @ v
    operator.seed = 1
    assert error(operator @ v, w.build("mc", seed=1) @ v) <= 1e-10
    operator.seed, operator.mc_samples = 2147483647, 7
    assert error(operator @ v, before) > 1e-3


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count evaluations of linear layers, in a place where no model refers to it."""
    calls, forward = [], nn.Linear.forward

    def counted(self: nn.Linear, x: Tensor) -> Tensor:
        calls.append(len(x))
        return forward(self, x)

    monkeypatch.setattr(nn.Linear, "forward", counted)
    return calls


class AnyNumbers(nn.Module):
    """Takes numbers of any kind, in any layout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x.real + x.imag if x.is_complex() else x).double())


def test_loaders_that_make_new_tensors(calls: list):
    model, X, y = AnyNumbers(), torch.randn(6, 4).double(), torch.randint(2, (6,))
    arguments = model, nn.CrossEntropyLoss(), list(model.parameters())
    data = DataLoader(TensorDataset(X, y), batch_size=4)
    kept, fresh = (
        curvlinops.GGNLinearOperator(*arguments, data, cache=cache) for cache in ("graph", "none")
    )
    v = vectors(kept)
    kept @ v
    calls.clear()
    kept @ v
    assert not calls
    X.data.add_(1)
    assert error(kept @ v, fresh @ v) <= 1e-10


class Own:
    """A batch of a user's class."""

    def __init__(self, x: Tensor):
        self.x = x

    def to(self, device: torch.device) -> "Own":
        """Return itself."""
        return self


class Uncopied(Own):
    def __deepcopy__(self, memo: dict):
        raise RuntimeError("not me")


class Slotted:
    __slots__ = ("x",)

    def __init__(self, x: Tensor):
        self.x = x


def attached(x: Tensor) -> Tensor:
    """Return a tensor to which another one is attached."""
    tensor = torch.zeros(len(x))
    tensor.x = x
    return tensor


@pytest.mark.parametrize("make", [Own, Uncopied, Slotted, attached])
def test_batches_of_other_kinds(make: Callable):
    linear, X = nn.Linear(3, 2).double(), make(torch.randn(4, 3).double())

    def model(params: dict, X: Own) -> Tensor:
        return torch.func.functional_call(linear, params, X.x).tanh()

    arguments = model, nn.MSELoss(), dict(linear.named_parameters()), [(X, torch.randn(4, 2))]
    kept, fresh = (
        curvlinops.HessianLinearOperator(*arguments, cache=cache, batch_size_fn=lambda X: 4)
        for cache in ("graph", "none")
    )
    v = vectors(kept)
    before = kept @ v
    assert num_kept(kept) == (make is not Uncopied)
    assert torch.equal(kept @ v, before)
    X.x.data.mul_(2)
    assert error(kept @ v, fresh @ v) <= 1e-10
    assert error(kept @ v, before) > 1e-3


def test_kernels_between_products_keep_nothing():
    w = world()
    kept, fresh = (w.build("jacobian", cache=cache) for cache in ("auto", "none"))
    v = vectors(kept)
    for action in "kppkpcpkcpppckcppk":
        if action == "k":
            kept.gram()
        elif action == "c":
            w.params[0].data.mul_(1.1)
        else:
            assert error(kept @ v, fresh @ v) <= 1e-12
    assert num_kept(kept) == len(w.data)


# --- models that draw random numbers


@pytest.mark.parametrize("cache", ["none", "graph"])
@pytest.mark.parametrize("case", ["hessian", "ggn", "fisher", "mc", "gradients", "jacobian"])
def test_random_models_follow_the_seed(case: str, cache: str):
    """Each product is that of the model with the mask that Dropout draws with this seed."""
    torch.manual_seed(0)
    first, last = nn.Linear(3, 8).double(), nn.Linear(8, 2).double()
    scale = nn.Parameter(torch.ones(6, 8).double(), requires_grad=False)
    X, y = torch.randn(6, 3).double(), torch.randint(2, (6,))
    params = [*first.parameters(), *last.parameters()]

    def build(middle: nn.Module, **options) -> curvlinops.TorchLinearOperator:
        entry, model = CASES[case], nn.Sequential(first, nn.Tanh(), middle, last)
        loss = (nn.CrossEntropyLoss(),) if entry.takes_loss else ()
        options |= dict(entry.arguments) | {"check_deterministic": False}
        return entry.operator(model, *loss, params, [(X, y)], **options)

    operator, masked = build(nn.Dropout(), cache=cache), Masked(scale)
    v = torch.arange(operator.shape[1]).double()
    for seed in (1, 1, 2, 3, 1):
        torch.manual_seed(seed)
        scale.data = nn.functional.dropout(torch.ones_like(scale))
        expected = build(masked, cache="none") @ v
        torch.manual_seed(seed)
        torch.testing.assert_close(operator @ v, expected, rtol=1e-10, atol=1e-12)


class Masked(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, scale: Tensor):
        super().__init__()
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale[: len(x)]


# --- tensors that are parts of something larger


#: Batches cut from a tensor with 12 rows and 5 columns, which has more numbers than the batch.
PARTS: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype]] = {
    "columns": (lambda base: base[:6, 1:], torch.float64),
    "transposed": (lambda base: base.view(4, 15).T[:6], torch.bfloat16),
    "repeated": (lambda base: base[1, :4].expand(6, 4), torch.int64),
    # float32 at addresses where no int64 may be
    "odd address": (lambda base: base.view(-1)[1:25].view(6, 4), torch.float32),
    "flags": (lambda base: base[:6, 1:], torch.bool),
    "conjugate": (lambda base: base[:6, 1:].conj(), torch.complex128),
}


def _other(numbers: Tensor) -> Tensor:
    return ~numbers if numbers.dtype == torch.bool else numbers + 1


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_tensors(name: str, calls: list):
    """Only changes of the part are noticed."""
    torch.manual_seed(0)
    (cut, dtype), model, labels = PARTS[name], AnyNumbers(), torch.randint(2, (12, 2))
    base = 3 * torch.rand(12, 5)
    base = base > 1 if dtype == torch.bool else base.to(dtype)
    arguments = (model, nn.CrossEntropyLoss(), list(model.parameters()))

    class Loader:
        def __iter__(self):
            yield cut(base), labels[::2, 0]

    kept, fresh = (
        curvlinops.GGNLinearOperator(*arguments, Loader(), cache=cache)
        for cache in ("graph", "none")
    )
    v = vectors(kept)
    before = kept @ v
    places = cut(torch.arange(60).view(12, 5)).flatten().tolist()
    outside = torch.tensor(sorted(set(range(60)) - set(places)))
    calls.clear()
    base.view(-1)[outside] = _other(base.view(-1)[outside])
    labels[:, 1] += 1
    assert torch.equal(kept @ v, before)
    assert not calls, "The kept graph was not used."
    for change in (
        lambda: base.view(-1)[places[-1]].copy_(_other(base.view(-1)[places[-1]])),
        lambda: labels[4, 0].copy_(1 - labels[4, 0]),
    ):
        change()
        assert error(kept @ v, fresh @ v) <= 1e-10


def test_parameters_that_are_parts_of_one_tensor():
    flat, linear = torch.randn(9), nn.Linear(3, 2)
    params = {"weight": flat[1:7].view(2, 3), "bias": flat[7:]}

    def model(params: dict, X: Tensor) -> Tensor:
        return torch.func.functional_call(linear, params, X).tanh()

    arguments = model, nn.MSELoss(), params, [(torch.randn(4, 3), torch.randn(4, 2))]
    kept, fresh = (
        curvlinops.HessianLinearOperator(*arguments, cache=cache) for cache in ("graph", "none")
    )
    before = kept @ vectors(kept)
    flat[2] += 1
    assert error(kept @ vectors(kept), fresh @ vectors(kept)) <= 1e-6
    assert error(kept @ vectors(kept), before) > 1e-3


def test_batches_that_are_gone_are_not_kept():
    """Only their copies are, without the rest of their memory."""
    base, seen, model = torch.randn(6, 50).double(), [], nn.Linear(4, 2).double()

    class Loader:
        def __iter__(self):
            seen.append(weakref.ref(table := base.clone()))
            yield table[:, :4], table[:, 4:6]

    arguments = model, nn.MSELoss(), list(model.parameters()), Loader()
    G = curvlinops.GGNLinearOperator(*arguments, cache="graph")
    for _ in range(3):
        G @ vectors(G)
    assert num_kept(G) == 1
    gc.collect()
    assert all(table() is None for table in seen)


# --- memory


def _live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(o), Tensor) for o in gc.get_objects())


@pytest.mark.extensive
@pytest.mark.parametrize("problem", ["mlp-ce-all-mean", "checkpoint"])
@pytest.mark.parametrize("case", CASES)
def test_memory_is_flat(case: str, problem: str):
    operator = CASES[case].build(problems.make(problem), cache="graph")
    v = vectors(operator)
    for _ in range(3):
        operator @ v
    before = _live_tensors()
    for _ in range(50 if problem == "mlp-ce-all-mean" else 10):
        operator @ v
    assert _live_tensors() == before


@pytest.mark.extensive
@pytest.mark.parametrize("problem", ["transformer-tied", "checkpoint"])
@pytest.mark.parametrize("case", [c for c in CASES if c != "ggn-diagonal"])  # it keeps no graph
def test_freed_with_the_operator(case: str, problem: str):
    p = problems.make(problem)
    operator = CASES[case].build(p, cache="graph")
    operator @ vectors(operator)
    products = [entry.built for entry in operator._cache._entries.values()]
    # the transposed Jacobian's comes with the number of its outputs
    kept = [weakref.ref(p[0] if isinstance(p, tuple) else p) for p in products]
    del products
    assert kept
    assert all(reference() is not None for reference in kept)
    gc.collect()
    gc.disable()
    try:
        del operator
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
@pytest.mark.parametrize("case", CASES)
def test_dropped_by_copies(case: str, duplicate: Callable):
    operator = CASES[case].build(problems.make("cnn"), cache="graph")
    v = vectors(operator)
    before = operator @ v
    assert num_kept(operator) == 2
    other = duplicate(operator)
    assert num_kept(other) == 0
    assert torch.equal(other @ v, before)
    assert num_kept(other) == 2


@pytest.mark.parametrize("case", [c for c in SQUARE if c != "ggn-diagonal"])
def test_budget(case: str, caplog):
    p = problems.make("cnn")
    everything = CASES[case].build(p, cache="graph")
    v = vectors(everything)
    expected = everything @ v
    sizes = [entry.num_bytes for entry in everything._cache._entries.values()]
    assert len(sizes) > 1
    caplog.set_level(logging.INFO, "curvlinops")
    some = CASES[case].build(p, cache=sizes[0] + 1000)
    for _ in range(3):
        assert error(some @ v, expected) <= p.tolerance
    assert num_kept(some) == 1
    kept = [record.message for record in caplog.records if "kept" in record.message]
    assert len(kept) == len(sizes)  # each batch is said once
    assert f"{type(some).__name__}: batch 0" in kept[0]
    assert "is not kept" in kept[1]


@pytest.mark.parametrize("case", ["hessian", "ggn"])
def test_footprint_is_what_the_graph_saves(case: str):
    model = nn.Sequential(
        nn.Linear(50, 60), nn.Tanh(), nn.Linear(60, 60), nn.GELU(), nn.Linear(60, 2)
    )
    data = [(torch.randn(300, 50), torch.randn(300, 2))]
    entry = CASES[case]
    arguments = (model, nn.MSELoss()) if entry.takes_loss else (model,)
    operator = entry.operator(*arguments, list(model.parameters()), data, cache="graph")
    v, live = vectors(operator), LiveBytes()
    operator @ v  # the modes are chosen
    operator.clear_cache()
    with live:
        operator @ v
    gc.collect()
    before, (entry,) = live.now, operator._cache._entries.values()
    num_bytes = entry.num_bytes
    del entry
    operator.clear_cache()
    gc.collect()
    truth = before - live.now
    assert 0.9 * truth <= num_bytes <= 1.1 * truth


@pytest.mark.parametrize("thing", [torch.eye(2).to_sparse(), range(20_000)], ids=["sparse", "many"])
def test_nothing_is_kept_if_changes_would_be_missed(thing: object, caplog):
    w = world()
    w.model.thing = thing if isinstance(thing, Tensor) else [object() for _ in thing]
    caplog.set_level(logging.INFO, "curvlinops")
    operator = w.build("ggn", cache="graph")
    for _ in range(3):
        assert _agree(w, "ggn", operator)
        w.model.gain += 1
    assert num_kept(operator) == 0
    (message,) = [r.message for r in caplog.records if "no graph is ever kept" in r.message]
    assert isinstance(thing, Tensor) or "attribute 'thing'" in message


@pytest.mark.parametrize("solve", [lambda A: curvlinops.eigsh(A, 1)[0], lambda A: A.to_dense()])
def test_solvers_compare_model_and_loss_once(solve: Callable, monkeypatch):
    w, compared, has_structure = world(), [], Fingerprint.has_structure

    def counted(self: Fingerprint, watched: Iterable) -> bool:
        compared.append(1)
        return has_structure(self, watched)

    monkeypatch.setattr(Fingerprint, "has_structure", counted)
    kept, fresh = (w.build("ggn", cache=cache) for cache in ("auto", "none"))
    for number in (1, 2):
        before = len(compared)
        found = solve(2 * kept.damped(1.0))
        assert len(compared) - before <= 1
        torch.testing.assert_close(found, solve(2 * fresh.damped(1.0)))
        w.params[0].data.mul_(1 + number)
