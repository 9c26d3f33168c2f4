"""Changes of Python state that a model, a loss or the data may depend on."""

import functools
import importlib
import types
import warnings
from collections import UserDict
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import num_kept
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


def _set(value: float) -> None:
    global SCALE
    SCALE = value


class Inner:
    scale = 1.0


class Slotted:
    """Has attributes in slots."""

    __slots__ = ("scale",)

    def __init__(self):
        self.scale = 1.0


class Net(nn.Module):
    """Scales its hidden layer by whatever ``get`` returns."""

    def __init__(self, get: Callable, state: object = None):
        super().__init__()
        self.inner, self.head = nn.Linear(3, 4), nn.Linear(4, 2)
        self.get, self.state = get, state

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(x) * self.get(self)))

    @property
    def by_property(self) -> float:
        return SCALE

    @staticmethod
    def by_static() -> float:
        return SCALE

    @classmethod
    def by_class(cls) -> float:
        return SCALE


def _global() -> float:
    return SCALE


def _with_scale(owner: object) -> object:
    owner.scale = 1.0
    return owner


def _default(scale: float = 1.0) -> float:
    return scale


def _closure() -> Callable:
    scale = 1.0

    def read(m: Net, new: float | None = None) -> float:
        nonlocal scale
        scale = scale if new is None else new
        return scale

    return read


def _set_scale(m: Net) -> None:
    m.state.scale = 2.0


#: Functions and decorators by which a model reads a global.
READERS: dict[str, Callable[[Net], object]] = {
    "function": lambda m: _global(),
    "property": lambda m: m.by_property,
    "static method": lambda m: m.by_static(),
    "class method": lambda m: m.by_class(),
    "partial": lambda m: functools.partial(_global)(),
    "torch.no_grad": torch.no_grad()(lambda m: SCALE),
    "torch.compiler.disable": torch.compiler.disable(lambda m: SCALE),
    "functools.wraps": functools.wraps(F.relu)(lambda m: SCALE),
}
#: A model's own state; how it is read, and changed.
STATES: dict[str, tuple[Callable[[], object], Callable, Callable[[Net], object]]] = {
    "module": (
        lambda: _with_scale(types.ModuleType("settings")),
        lambda m: m.state.scale,
        _set_scale,
    ),
    "class": (lambda: Inner, lambda m: m.state.scale, _set_scale),
    "slots": (Slotted, lambda m: m.state.scale, _set_scale),
    "dictionary of one's own": (
        lambda: UserDict(scale=1.0),
        lambda m: m.state["scale"],
        lambda m: m.state.update(scale=2.0),
    ),
    "cached function": (
        lambda: functools.cache(lambda: 1.0),
        lambda m: m.state(),
        lambda m: setattr(m, "state", functools.cache(lambda: 2.0)),
    ),
    "default": (
        lambda: None,
        lambda m: _default(),
        lambda m: setattr(_default, "__defaults__", (2.0,)),
    ),
    "closure": (_closure, lambda m: m.state(m), lambda m: m.state(m, 2.0)),
}
STATES |= {name: (lambda: None, read, lambda m: _set(2.0)) for name, read in READERS.items()}


@pytest.fixture(autouse=True)
def _restore():
    yield
    Inner.scale, _default.__defaults__ = 1.0, (1.0,)
    _set(1.0)


def _agree(operator, kind: type, arguments: tuple) -> bool:
    V = torch.ones(operator.shape[1], 2, dtype=torch.float64)
    fresh = kind(*arguments, cache="none")
    return torch.allclose(operator @ V, fresh @ V, rtol=1e-8, atol=1e-10)


def _data() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(n, 3).double(), torch.randn(n, 2).double()) for n in (4, 3)]


@pytest.mark.parametrize("name", STATES)
def test_state_of_the_model(name: str):
    make, get, change = STATES[name]
    data, model = _data(), Net(get, make()).double()
    arguments = (model, nn.MSELoss(), list(model.parameters()), data)
    operator = GGNLinearOperator(*arguments)
    v = torch.ones(operator.shape[1], dtype=torch.float64)
    before = [operator @ v for _ in range(3)][-1]
    assert num_kept(operator) == 2
    change(model)
    assert _agree(operator, GGNLinearOperator, arguments)
    assert not torch.allclose(operator @ v, before, rtol=1e-6)


def test_global_hooks():
    data, model = _data(), nn.Linear(3, 2).double()
    G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data, cache="graph")
    V = torch.ones(G.shape[1], 2, dtype=torch.float64)
    before = G @ V
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, out: 2 * out)
    try:
        torch.testing.assert_close(G @ V, 4 * before)
    finally:
        handle.remove()
    torch.testing.assert_close(G @ V, before)


class Switch(nn.Module):
    """A loss that can add a penalty on the parameters."""

    reduction = "mean"

    def __init__(self, model: nn.Module):
        super().__init__()
        self.decay, self.find = 0.0, [model].__getitem__

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(output, y)
        if self.decay:
            loss = loss + self.decay * sum(p.pow(4).sum() for p in self.find(0).parameters())
        return loss


@pytest.mark.parametrize("cache", ["none", "graph"])
def test_kind_of_loss(cache: str):
    """Conclusions about a loss are drawn again after it has changed."""
    data, model = _data(), nn.Linear(3, 2).double()
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


@pytest.mark.parametrize("cache", ["none", "graph"])
@pytest.mark.parametrize(
    "change",
    [
        lambda loss: setattr(loss, "reduction", "sum"),
        lambda loss: loss.register_forward_hook(lambda m, i, out: 3 * out),
        lambda loss: setattr(loss, "forward", lambda o, y: (o - y).pow(4).sum() / y.numel()),
    ],
)
def test_options_of_a_loss(change: Callable, cache: str):
    data, model, loss = _data(), nn.Linear(3, 2).double(), nn.MSELoss()
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


@pytest.mark.parametrize("cache", ["none", "graph"])
def test_hidden_parameters_are_noticed_later(cache: str):
    data, model = _data(), Hides().double()
    arguments = model, nn.MSELoss(), list(model.parameters()), data
    H = HessianLinearOperator(*arguments, cache=cache)
    v = torch.ones(H.shape[1]).double()
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


@pytest.mark.parametrize("layer", [nn.GELU(), nn.SiLU()], ids=str)
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


def test_cached_parametrizations():
    data, model = _data(), nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)).double()
    G = GGNLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    v = torch.ones(G.shape[1], dtype=torch.float64)
    expected = G @ v
    with nn.utils.parametrize.cached():
        model(data[0][0])
        torch.testing.assert_close(G @ v, expected)


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
    """A model that construction would refuse is refused by each later product, too."""
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
