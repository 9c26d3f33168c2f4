"""Changes of Python state that a model, a loss or the data may depend on."""

import functools
import importlib
import types
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)
from curvlinops.support.fingerprint import Fingerprint, is_installed

SCALE = 1.0
SETTINGS = types.ModuleType("settings")


def _set(value: float) -> None:
    global SCALE
    SCALE = value


class Inner:
    """Attributes."""

    def __init__(self):
        self.scale = 1.0


SETTINGS.inner = Inner()


class Slotted:
    __slots__ = ("__hidden", "scale")

    def __init__(self):
        self.scale = self.__hidden = 1.0

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__


@dataclass(slots=True)
class Config:
    scale: float = 1.0


class Times:
    def __mul__(self, x: Tensor) -> Tensor:
        return SCALE * x


class Numbers(list):
    scale = 1.0


class Net(nn.Module):
    """Scales its hidden layer by whatever ``get`` returns."""

    def __init__(self, get: Callable, **attributes: object):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.get = get
        vars(self).update(attributes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x) * self.get(self)))


class WithProperties(Net):
    @property
    def by_property(self) -> float:
        return SCALE

    @staticmethod
    def by_static() -> float:
        return SCALE

    @classmethod
    def by_class(cls) -> float:
        return SCALE


def _tensor_with_attribute() -> Tensor:
    tensor = torch.ones(1)
    tensor.scale = 1.0
    return tensor


def _wrapped() -> tuple[Callable, dict]:
    state = {"scale": 1.0}

    @functools.wraps(F.relu)
    def relu(model: nn.Module) -> float:
        return state["scale"]

    return relu, state


_RELU, _STATE = _wrapped()
Change = Callable[[nn.Module], object]


@torch.no_grad()
def _without_gradients() -> float:
    return SCALE


@torch.enable_grad()
def _with_gradients() -> float:
    return SCALE


@torch.compiler.disable
def _not_compiled() -> float:
    return SCALE


@torch.autocast("cpu", enabled=False)
def _autocast() -> float:
    return SCALE


class Number(float):
    """Numbers with attributes."""


class Text(str):
    """Texts with attributes."""


#: How the model finds its scale, with which attributes, and how the scale is changed.
CASES: dict[str, tuple[Callable, Callable[[], dict], Change]] = {
    "property": (lambda m: m.by_property, dict, lambda m: _set(2.0)),
    "static method": (lambda m: m.by_static(), dict, lambda m: _set(2.0)),
    "class method": (lambda m: m.by_class(), dict, lambda m: _set(2.0)),
    "operator": (
        lambda m: m.times * torch.ones(()),
        lambda: {"times": Times()},
        lambda m: _set(2.0),
    ),
    "operator, replaced": (
        lambda m: m.times * torch.ones(()),
        lambda: {"times": Times()},
        lambda m: setattr(Times, "__mul__", lambda self, x: 3.0 * x),
    ),
    "module": (
        lambda m: m.cfg.inner.scale,
        lambda: {"cfg": SETTINGS},
        lambda m: setattr(SETTINGS.inner, "scale", 2.0),
    ),
    "slots": (
        lambda m: m.cfg.scale,
        lambda: {"cfg": Slotted()},
        lambda m: setattr(m.cfg, "scale", 2.0),
    ),
    "dataclass with slots": (
        lambda m: m.cfg.scale,
        lambda: {"cfg": Config()},
        lambda m: setattr(m.cfg, "scale", 2.0),
    ),
    "list with attributes": (
        lambda m: m.numbers.scale,
        lambda: {"numbers": Numbers()},
        lambda m: setattr(m.numbers, "scale", 2.0),
    ),
    "dictionary of one's own": (
        lambda m: m.numbers["scale"],
        lambda: {"numbers": UserDict(scale=1.0)},
        lambda m: m.numbers.update(scale=2.0),
    ),
    "attribute of a tensor": (
        lambda m: m.tensor.scale,
        lambda: {"tensor": _tensor_with_attribute()},
        lambda m: setattr(m.tensor, "scale", 2.0),
    ),
    "new attribute of a tensor": (
        lambda m: getattr(m.tensor, "scale", 1.0),
        lambda: {"tensor": torch.ones(1)},
        lambda m: setattr(m.tensor, "scale", 2.0),
    ),
    "wrapped function": (_RELU, dict, lambda m: _STATE.update(scale=2.0)),
    "cached function": (
        lambda m: m.function(),
        lambda: {"function": functools.cache(lambda: 1.0)},
        lambda m: setattr(m, "function", functools.cache(lambda: 2.0)),
    ),
    "decorated by installed code": (
        lambda m: _without_gradients(),
        dict,
        lambda m: _set(2.0),
    ),
    "function behind another decorator": (
        lambda m: _with_gradients(),
        lambda: {},
        lambda m: _set(2.0),
    ),
    "function that is not compiled": (
        lambda m: _not_compiled(),
        lambda: {},
        lambda m: _set(2.0),
    ),
    "function under autocast": (
        lambda m: _autocast(),
        lambda: {},
        lambda m: _set(2.0),
    ),
    "value of a subclass": (
        lambda m: m.number,
        lambda: {"number": Number(1.0)},
        lambda m: setattr(m, "number", Number(2.0)),
    ),
    "text of a subclass": (
        lambda m: float(m.text),
        lambda: {"text": Text("1.0")},
        lambda m: setattr(m, "text", Text("2.0")),
    ),
}


@pytest.fixture(autouse=True)
def _restore():
    before = Times.__mul__
    yield
    Times.__mul__, SETTINGS.inner.scale, _STATE["scale"] = before, 1.0, 1.0
    _set(1.0)


def _agree(operator, kind: type, arguments: tuple) -> bool:
    V = torch.ones(operator.shape[1], 2, dtype=torch.float64)
    fresh = kind(*arguments, cache="none")
    return torch.allclose(operator @ V, fresh @ V, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("cache", ["auto", "graph"])
@pytest.mark.parametrize("case", CASES)
def test_state_of_the_model(case: str, cache: str):
    get, attributes, change = CASES[case]
    torch.manual_seed(0)
    model = WithProperties(get, **attributes()).double()
    data = [(torch.randn(4, 3).double(), torch.randint(2, (4,)))]
    arguments = (model, nn.CrossEntropyLoss(), list(model.parameters()), data)
    operator = GGNLinearOperator(*arguments, cache=cache)
    v = torch.ones(operator.shape[1], dtype=torch.float64)
    before = [operator @ v for _ in range(3)][-1]
    assert bool(operator._cache._entries) == (case in CASES or cache == "graph")
    change(model)
    assert _agree(operator, GGNLinearOperator, arguments)
    assert not torch.allclose(operator @ v, before, rtol=1e-6)


def test_global_hooks():
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), [(torch.randn(4, 3), torch.randn(4, 2))]
    arguments = (
        model.double(),
        nn.MSELoss(),
        list(model.parameters()),
        [(data[0][0].double(),) * 2],
    )
    arguments = (*arguments[:3], [tuple(x.double() for x in data[0])])
    operator = GGNLinearOperator(*arguments, cache="graph")
    V = torch.ones(operator.shape[1], 2, dtype=torch.float64)
    before = operator @ V
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, out: 2 * out)
    try:
        torch.testing.assert_close(operator @ V, 4 * before)
    finally:
        handle.remove()
    torch.testing.assert_close(operator @ V, before)


class Switch(nn.Module):
    """A loss, or a model's part, that does something else when told to."""

    reduction = "mean"

    def __init__(self, model: nn.Module):
        super().__init__()
        self.decay, self.find = 0.0, [model].__getitem__

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(output, y)
        if self.decay:
            loss = loss + self.decay * sum(p.pow(4).sum() for p in self.find(0).parameters())
        return loss


@pytest.mark.parametrize("cache", ["none", "auto", "graph"])
def test_kind_of_loss(cache: str):
    """What is concluded of a loss once does not outlive a change."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    data = [(torch.randn(4, 3).double(), torch.randn(4, 2).double())]
    loss = Switch(model)
    arguments = (model, loss, list(model.parameters()), data)
    H, G = (kind(*arguments, cache=cache) for kind in (HessianLinearOperator, GGNLinearOperator))
    V = torch.ones(H.shape[1], 2, dtype=torch.float64)
    H @ V, G @ V
    loss.decay = 0.5
    assert _agree(H, HessianLinearOperator, arguments)
    with pytest.raises(ValueError, match="is not a function of the model's output"):
        G @ V
    loss.decay = 0.0
    assert _agree(H, HessianLinearOperator, arguments)
    assert _agree(G, GGNLinearOperator, arguments)


@pytest.mark.parametrize("cache", ["none", "auto", "graph"])
@pytest.mark.parametrize(
    "change",
    [
        lambda loss: setattr(loss, "reduction", "sum"),
        lambda loss: loss.register_forward_hook(lambda m, i, out: 3 * out),
        lambda loss: setattr(loss, "forward", lambda o, y: (o - y).pow(4).sum() / y.numel()),
    ],
)
def test_options_of_a_loss(change: Callable, cache: str):
    torch.manual_seed(0)
    model, loss = nn.Linear(3, 2).double(), nn.MSELoss()
    data = [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (4, 3)]
    arguments = (model, loss, list(model.parameters()), data)
    H = HessianLinearOperator(*arguments, cache=cache)
    V = torch.ones(H.shape[1], 2, dtype=torch.float64)
    before = H @ V
    H.gradient_and_loss()
    change(loss)
    fresh = HessianLinearOperator(*arguments)
    torch.testing.assert_close(H.gradient_and_loss(), fresh.gradient_and_loss())
    assert _agree(H, HessianLinearOperator, arguments)
    assert not torch.allclose(H @ V, before)


class Hides(nn.Module):
    """Uses its weight by a plain list, when told to."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.hidden, self.flag = [self.linear.weight], False

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.hidden[0].T if self.flag else self.linear(x)


@pytest.mark.parametrize("cache", ["none", "auto", "graph"])
def test_hidden_parameters_are_noticed_later(cache: str):
    model = Hides()
    H = HessianLinearOperator(
        model,
        nn.MSELoss(),
        list(model.parameters()),
        [(torch.randn(4, 3), torch.randn(4, 2))],
        cache=cache,
    )
    v = torch.ones(H.shape[1])
    H @ v
    model.flag = True
    with pytest.raises(ValueError, match="by a reference that is not registered"):
        H @ v


def _residual(u: Tensor, y: Tensor | tuple) -> Tensor:
    """Measured values, or points where an equation holds."""
    if y.requires_grad:
        (du,) = torch.autograd.grad(u.sum(), y, create_graph=True)
        return (du.sum(1) - u[:, 0]).square().mean()
    return F.mse_loss(u, y)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_batches_of_two_kinds(order: tuple[int, int]):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    points = torch.randn(3, 2).double().requires_grad_()
    measured = (torch.randn(3, 2).double(), torch.randn(3, 1).double())
    data = [[measured, (points, points)][i] for i in order]
    params = list(model.parameters())
    H = HessianLinearOperator(model, _residual, params, data, reduction="mean")
    loss = sum(_residual(model(x), y) for x, y in data) / 2
    grads = torch.autograd.grad(loss, params, create_graph=True)
    flat = torch.cat([g.flatten() for g in grads])
    v = torch.randn(len(flat)).double()
    truth = torch.cat([g.flatten() for g in torch.autograd.grad(flat @ v, params)])
    torch.testing.assert_close(H @ v, truth)
    with pytest.raises(ValueError, match="is not a function of the model's output"):
        GGNLinearOperator(model, _residual, params, data, reduction="mean") @ v


class Differentiating(nn.Module):
    """Returns the body's output and its slope."""

    def __init__(self, body: nn.Module):
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = self.body(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return torch.cat([u, du], 1)


@pytest.mark.parametrize(
    "layer",
    [nn.GELU(), nn.GELU("tanh"), nn.SiLU()],
    ids=str,
)
def test_third_derivatives(layer: nn.Module):
    """A model that differentiates, differentiated twice."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), layer, nn.Linear(4, 1))
    model = Differentiating(body).double()
    params, X, y = list(model.parameters()), torch.randn(5, 3).double(), torch.randn(5, 4).double()
    H = HessianLinearOperator(model, nn.MSELoss(), params, [(X, y)])
    V = torch.randn(H.shape[1], 2, dtype=torch.float64)
    theta, eps, slope = nn.utils.parameters_to_vector(params).detach(), 1e-5, 0.0
    for step in (eps, -eps):
        nn.utils.vector_to_parameters(theta + step * V[:, 0], params)
        grads = torch.autograd.grad(
            F.mse_loss(model(X), y), params, allow_unused=True, materialize_grads=True
        )
        slope = slope + torch.cat([g.flatten() for g in grads]) / (2 * step)
    nn.utils.vector_to_parameters(theta, params)
    for found in (H @ V[:, 0], (H @ V)[:, 0]):
        assert (found - slope).norm() <= 1e-6 * slope.norm()


@pytest.mark.parametrize(
    "parts",
    [lambda X: X.split(10), lambda X: [X[i::10] for i in range(10)], lambda X: [X.mT[:50].mT]],
    ids=["split", "strided", "columns"],
)
def test_views_are_copied_without_the_rest_of_their_memory(parts: Callable):
    model = nn.Linear(50, 1)
    data = [(x[:, :50], x[:, :1]) for x in parts(torch.randn(100, 60))]
    G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data, cache="graph")
    G @ torch.ones(G.shape[1])
    copies = [x for e in G._cache._entries.values() for x in (e.batch.X, e.batch.y)]
    assert sum(copy.untyped_storage().nbytes() for copy in copies) == 100 * 50 * 4 + 100 * 4


def test_tensor_that_a_transform_has_left_behind():
    """A hook in the model stores a gradient, which is no tensor of its own under vmap."""

    class Stores(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda g: vars(self).update(stored=g))
            return out

    model = Stores(3, 2).double()
    data = [(torch.randn(4, 3).double(), torch.randn(4, 2).double())]
    arguments = (model, nn.MSELoss(), list(model.parameters()), data)
    G = GGNLinearOperator(*arguments)
    V = torch.ones(G.shape[1], 3, dtype=torch.float64)
    for _ in range(3):
        assert _agree(G, GGNLinearOperator, arguments)
        G @ V[:, 0]


def test_cached_parametrizations():
    model = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).double()
    data = [(torch.randn(4, 3).double(), torch.randn(4, 2).double())]
    G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    v = torch.ones(G.shape[1], dtype=torch.float64)
    expected = G @ v
    with nn.utils.parametrize.cached():
        model(data[0][0])
        torch.testing.assert_close(G @ v, expected)


class Batch(dict):
    scale = 1.0


def test_batches_of_ones_own_kind():
    class Model(nn.Linear):
        def forward(self, batch: Batch) -> Tensor:
            return batch.scale * super().forward(batch["x"])

    model, batch = Model(3, 2), Batch(x=torch.randn(4, 3))
    batch.scale = 2.0
    y = torch.randn(4, 2)
    G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), [(batch, y)])
    plain = nn.Linear(3, 2)
    expected = GGNLinearOperator(plain, nn.MSELoss(), list(plain.parameters()), [(batch["x"], y)])
    v = torch.ones(G.shape[1])
    # the bias is scaled as well
    torch.testing.assert_close(G @ v, 4 * (expected @ v))


class Unready:
    """Answers every question about its attributes with an error."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"{name} is not there yet")


def test_objects_that_have_no_answer():
    model = Net(lambda self: 1.0, device=Unready())
    data = [(torch.randn(4, 3), torch.randn(4, 2))]
    arguments = (model, nn.MSELoss(), list(model.parameters()), data)
    assert _agree(GGNLinearOperator(*arguments), GGNLinearOperator, arguments)


@pytest.mark.parametrize(
    "cls",
    [
        *(HessianLinearOperator, GGNLinearOperator, JacobianLinearOperator, EFLinearOperator),
        *(PerSampleGradientLinearOperator, GGNDiagonalLinearOperator),
        *(KFACLinearOperator, EKFACLinearOperator),
    ],
    ids=lambda cls: cls.__name__,
)
@pytest.mark.parametrize("middle", [nn.Dropout(0.5), nn.BatchNorm1d(5)], ids=["dropout", "norm"])
def test_train_mode_after_construction(cls: type, middle: nn.Module):
    """What would have been refused at construction is refused later, each time."""
    torch.manual_seed(0)
    middle.eval()
    model = nn.Sequential(nn.Linear(4, 5), middle, nn.Linear(5, 3)).double().eval()
    loss = () if cls is JacobianLinearOperator else (nn.CrossEntropyLoss(),)
    data = [(torch.randn(n, 4).double(), torch.randint(3, (n,))) for n in (7, 5)]
    options = {"fallback": "diagonal"} if cls in (KFACLinearOperator, EKFACLinearOperator) else {}
    A = cls(model, *loss, list(model.parameters()), data, **options)
    v = torch.ones(A.shape[1]).double()
    before = A @ v

    def again() -> Tensor:
        if options:
            A.compute_kronecker_factors()
        return A @ v

    model.train()
    for attempt in range(2):
        if isinstance(middle, nn.Dropout):
            with pytest.raises(RuntimeError, match="'1' .Dropout.*train mode"):
                again()
        elif cls in (HessianLinearOperator, GGNLinearOperator, JacobianLinearOperator):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again()
            assert ["BatchNorm" in str(w.message) for w in caught] == [True][attempt:]
        else:
            with pytest.raises(ValueError, match="BatchNorm in train mode"):
                again()
    model.eval()
    torch.testing.assert_close(again(), before)


@pytest.mark.parametrize("folder", ["site-packages", "source"])
def test_packages_are_constant_if_they_are_installed(folder: str, tmp_path, monkeypatch):
    """All modules of a package count alike; one in editable mode is the user's."""
    package = tmp_path / folder / f"neighbor_{folder[:4]}"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "part.py").write_text("SCALE = 1.0\ndef f():\n    return SCALE\n")
    monkeypatch.syspath_prepend(package.parent)
    module = importlib.import_module(f"{package.name}.part")
    assert is_installed(module.__name__) == (folder == "site-packages")
    fingerprint = Fingerprint([module.f])
    module.SCALE = 2.0
    assert fingerprint.has_structure([module.f]) == (folder == "site-packages")
