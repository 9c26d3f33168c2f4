"""Models and situations that are easily got wrong, compared with plain descriptions of the same."""

import copy
import functools
import threading
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from contract import CASES, error, matrix
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call

import curvlinops
from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    FisherMCLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    TransposedJacobianLinearOperator,
)
from curvlinops.losses import wrap_loss

SQUARE = [HessianLinearOperator, GGNLinearOperator, EFLinearOperator]
CE, MSE = nn.CrossEntropyLoss(), nn.MSELoss()


def mlp(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), *layers, nn.Tanh(), nn.Linear(4, 3)).double()


def batches(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 3, generator=generator, dtype=torch.float64),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


def build(kind: type, model: Any, data: list | None = None, loss: Any = CE, **options: Any) -> Any:
    params = options.pop("params", None) or list(model.parameters())
    losses = [] if kind in (JacobianLinearOperator, TransposedJacobianLinearOperator) else [loss]
    return kind(model, *losses, params, batches(4, 2) if data is None else data, **options)


def dense(kind: type, model: Any, *args: Any, **options: Any) -> Tensor:
    return matrix(build(kind, model, *args, **options))


# --- twins: two descriptions of one function

#: The arguments of ``build`` after the kind, by name: a special one, and a plain one.
TWINS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {}


def twins(function: Callable) -> Callable:
    TWINS[function.__name__] = function
    return function


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("name", TWINS, ids=str)
def test_twins(name: str, kind: type):
    """Many columns, and single ones, for which forward mode is tried first."""
    special, plain = TWINS[name]()
    expected = dense(kind, **plain)
    v = torch.arange(len(expected), dtype=torch.float64).cos()
    operator = build(kind, **special)
    with operator.linearized():
        kept = operator @ v
    assert error(kept, expected @ v) <= 1e-12
    assert error(operator @ v, expected @ v) <= 1e-12
    assert error(matrix(operator), expected) <= 1e-12
    assert not (operator @ v).requires_grad


def same(*models: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return {"model": models[0]}, {"model": models[1]}


class Checkpointed(nn.Module):
    def __init__(self, inner: nn.Module, active: bool):
        super().__init__()
        self.stem, self.inner, self.head = nn.Linear(3, 3), inner, nn.Linear(3, 3)
        self.active = active

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.active:
            return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))
        return self.head(self.inner(x))


class Recurrent(nn.Module):
    def __init__(self, kind: type):
        super().__init__()
        self.cell = kind(3, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x.unsqueeze(1))[0][:, 0]


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(4, 3, padding_idx=0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table((x[:, 0] > 0).long())


#: Layers whose calls the package replaces in the forward pass, also when a checkpoint repeats it.
RECOMPUTED = {
    "lstm": lambda _: Recurrent(nn.LSTM),
    "embedding": lambda _: Lookup(),
    "checkpoint": lambda active: Checkpointed(nn.Tanh(), active),
}


def checkpoints(make: Callable) -> tuple[dict, dict]:
    models = []
    for active in (True, False):
        torch.manual_seed(0)
        models.append(Checkpointed(make(active), active).double())
    return same(*models)


TWINS |= {
    f"checkpointed {name}": functools.partial(checkpoints, make)
    for name, make in RECOMPUTED.items()
}


@twins
def kernels_that_are_differentiable_once_only() -> tuple[dict, dict]:
    model, twin = mlp(nn.Hardsigmoid()), mlp(nn.Identity())
    twin[1].forward = lambda x: ((x + 3).clamp(0, 6)) / 6
    return same(model, twin)


@twins
def hooks_on_parameters_of_closures() -> tuple[dict, dict]:
    model = mlp()
    params = list(model.parameters())
    params[0].register_hook(lambda gradient: 7 * gradient)
    return {"model": lambda X: model(X), "params": params}, {"model": mlp()}


@twins
def empty_batches() -> tuple[dict, dict]:
    return {"model": mlp(), "data": batches(4, 0, 2)}, {"model": mlp()}


@twins
def data_made_in_inference_mode() -> tuple[dict, dict]:
    with torch.inference_mode():
        data = batches(4, 2)
    return {"model": mlp(), "data": data}, {"model": mlp()}


@twins
def data_with_a_history() -> tuple[dict, dict]:
    """It may begin at the model's own parameters."""
    model, other = mlp(), nn.Linear(3, 3).double()
    data = [(X, model(X) + 1 + X) for X in (other(X) for X, _ in batches(4, 2))]
    values = [(X.detach(), y.detach()) for X, y in data]
    return {"model": model, "loss": MSE, "data": data}, {
        "model": model,
        "loss": MSE,
        "data": values,
    }


@twins
def closures_with_a_graph_from_outside() -> tuple[dict, dict]:
    weight, head = mlp()[0].weight, mlp()[2].weight
    made = torch.tanh(weight)

    def model(X: Tensor, made: Tensor | None = made) -> Tensor:
        return torch.tanh(X @ (torch.tanh(weight) if made is None else made).T) @ head.T

    params = [weight, head]
    plain = functools.partial(model, made=None)
    return {"model": model, "params": params}, {"model": plain, "params": params}


@twins
def targets_in_other_containers() -> tuple[dict, dict]:
    def loss(z: Tensor, target: UserDict) -> Tensor:
        return F.cross_entropy(z, target["labels"])

    data = [(X, UserDict(labels=y)) for X, y in batches(4, 2)]
    special = {"model": mlp(), "data": data, "loss": loss, "reduction": "mean"}
    return special, {"model": mlp()}


class Tangent(nn.Module):
    """A convolution pushed forward by the user's own ``torch.func.jvp``, or by hand."""

    def __init__(self, by_hand: bool):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.by_hand = nn.Conv1d(1, 3, 3), by_hand

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        if self.by_hand:
            out, tangent = self.conv(x), F.conv1d(x.sin(), self.conv.weight)
        else:
            out, tangent = torch.func.jvp(self.conv, (x,), (x.sin(),))
        return (out.tanh() * tangent)[..., 0]


@twins
def functional_transforms_inside_the_model() -> tuple[dict, dict]:
    return same(Tangent(False).double(), Tangent(True).double())


class Hooked(nn.Module):
    def __init__(self, register: Callable | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.register = nn.Linear(3, 4), nn.Linear(4, 3), register
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        if self.register is not None:
            self.register(x, self.head)
        return self.head(x)


#: Hooks that observe gradients.
OBSERVE: dict[str, Callable[[Tensor, nn.Module], Any]] = {
    "one": lambda x, _: x.register_hook(lambda gradient: None),
    "module": lambda _, m: m.register_full_backward_hook(lambda m, inputs, outputs: None),
}
TWINS |= {
    f"hooks that observe, {name}": lambda hook=hook: same(Hooked(hook), Hooked())
    for name, hook in OBSERVE.items()
}


@twins
def parameters_with_one_gradient_tensor() -> tuple[dict, dict]:
    """Autograd returns the very same tensor for both: scaling it in place would count twice."""
    torch.manual_seed(0)
    params = {name: torch.randn(3, 3, dtype=torch.float64) for name in ("first", "second")}
    return (
        {"model": lambda p, X: X @ (p["first"] + p["second"]), "params": params},
        {"model": lambda p, X: X @ p["first"] + X @ p["second"], "params": params},
    )


# --- forward mode


class Shy(nn.Module):
    """Shows its derivative to reverse mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x if forward_ad.unpack_dual(x).tangent is None else x.detach()


@pytest.mark.parametrize("kind", [*SQUARE, JacobianLinearOperator])
def test_products_do_not_vanish_in_silence(kind: type):
    v = torch.ones(31, dtype=torch.float64)
    assert error(build(kind, nn.Sequential(mlp(), Shy())) @ v, build(kind, mlp()) @ v) <= 1e-12


@pytest.mark.parametrize("kind", SQUARE)
def test_products_that_vanish(kind: type):
    dead = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double()
    nn.init.constant_(dead[0].bias, -100.0)
    assert not (build(kind, dead) @ torch.ones(12).double()).any()


@pytest.mark.parametrize("kind", SQUARE)
def test_autocast_inside_the_model(kind: type):
    class Cast(nn.Module):
        def __init__(self, enabled: bool):
            super().__init__()
            torch.manual_seed(0)
            self.stem, self.conv = nn.Linear(3, 6), nn.Conv1d(2, 3, 3)
            self.enabled = enabled

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, self.enabled):
                return self.conv(self.stem(x).unflatten(1, (2, 3)))[..., 0]

    data = [(X.float(), y) for X, y in batches(4)]
    found, expected = (build(kind, Cast(enabled), data) for enabled in (True, False))
    eye = torch.eye(found.shape[1])
    expected = expected @ eye
    # single columns, for which forward mode is tried first, and all at once
    for columns in (torch.stack([found @ e for e in eye], 1), found @ eye):
        assert error(columns, expected) <= 5e-2  # eight bits of mantissa


# --- modules behind functions


class Trainer:
    """Has more modules than those that it predicts with."""

    def __init__(self, model: nn.Module):
        self.net, self.average = model, nn.BatchNorm1d(4)
        self.optimizer = torch.optim.Adam(model.parameters())

    def predict(self, X: Tensor) -> Tensor:
        return self.net(X)


#: Functions that call a module, which is found behind them.
WRAPPERS: dict[str, Callable[[nn.Module], Callable]] = {
    "partial": lambda model: functools.partial(lambda inner, X: inner(X), model),
    "closure": lambda model: lambda X: model(X),
    "method": lambda model: (lambda trainer: lambda X: trainer.predict(X))(Trainer(model)),
}
COUPLES = r"BatchNorm in train mode couples .*module '\w+'\).*EFLinearOperator.*model.eval"


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
@pytest.mark.parametrize("name", WRAPPERS)
def test_modules_behind_functions_are_found(name: str):
    model, wrap = mlp(nn.BatchNorm1d(4)), WRAPPERS[name]
    params, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    expected = dense(HessianLinearOperator, model)
    assert error(dense(HessianLinearOperator, wrap(model), params=params), expected) <= 1e-12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match=COUPLES):
        build(EFLinearOperator, wrap(model), params=params)
    build(EFLinearOperator, wrap(model.eval()), params=params)  # other modules do not count


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
def test_modules_behind_functions_of_parameters_are_found():
    model = mlp(nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    params = {name: param.detach() for name, param in model.named_parameters()}
    function = lambda values, X: functional_call(model, values, (X,))  # noqa: E731
    dense(GGNLinearOperator, function, params=params)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Unregistered(nn.Module):
    """Uses one of two layers that it keeps in plain lists."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 3, dtype=torch.float64)
        self.used, self.unused = (
            [nn.BatchNorm1d(3, affine=False, dtype=torch.float64)] for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.used[0](self.linear(x))


@pytest.mark.filterwarnings("ignore:.*the result depends on how")
def test_modules_that_are_not_registered_are_found():
    model = Unregistered()
    before = copy.deepcopy(model.used[0].state_dict())
    dense(HessianLinearOperator, model)
    assert all(torch.equal(x, before[name]) for name, x in model.used[0].state_dict().items())
    with pytest.raises(ValueError, match=COUPLES):
        build(EFLinearOperator, model)
    model.used[0].eval()
    build(EFLinearOperator, model)


def test_batch_norm_without_running_statistics():
    """It couples samples in any mode."""
    model = mlp(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.warns(UserWarning, match="BatchNorm without running statistics"):
        build(HessianLinearOperator, model)
    with pytest.raises(ValueError, match="statistics couples.*track_running_stats=True"):
        build(EFLinearOperator, model)


# --- changes after construction


@pytest.mark.parametrize("case", CASES)
def test_replaced_parameters_are_noticed(case: str):
    model, entry = mlp(), CASES[case]
    params = list(model.parameters())
    arguments = (CE, params) if entry.takes_loss else (params,)
    operator = entry.operator(model, *arguments, batches(4), **dict(entry.arguments))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(ValueError, match=r"'0.weight'.*were replaced.*Build a new operator"):
        operator @ torch.ones(operator.shape[1])


def test_losses_that_are_not_known_any_more():
    """A hook makes it another loss, whose labels nobody knows how to sample."""
    loss = nn.CrossEntropyLoss()
    operator = build(FisherMCLinearOperator, mlp(), loss=loss)
    v = torch.ones(operator.shape[1])
    operator @ v
    loss.register_forward_hook(lambda module, inputs, out: 3 * out)
    with pytest.raises(NotImplementedError, match="not known as a negative log-likelihood"):
        operator @ v


# --- threads


@pytest.mark.parametrize("kind", SQUARE)
def test_threads(kind: type):
    operator = build(kind, mlp())
    v = torch.ones(operator.shape[1])
    expected = operator @ v
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: operator @ v, range(20)))
    assert all(torch.equal(result, expected) for result in results)


class Stopping(nn.Linear):
    """Stops once, at most half a second, for another thread to get into its way."""

    def __init__(self):
        super().__init__(3, 3, dtype=torch.float64)
        self.events = SimpleNamespace(armed=False, reached=threading.Event())
        self.done = threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        if self.events.armed and not self.events.reached.is_set():
            self.events.reached.set()
            assert not self.done.wait(0.5)
        return super().forward(x)


def test_threads_change_nothing_inside_of_products():
    model = Stopping()
    operator = build(HessianLinearOperator, model)
    v = torch.arange(operator.shape[1], dtype=torch.float64)
    expected = operator @ v

    def other() -> None:
        model.events.reached.wait()
        operator.gradient_and_loss()
        model.done.set()

    model.events.armed = True
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(other)
        assert torch.equal(operator @ v, expected)
        done.result()
    assert model.done.is_set()


# --- numbers that are not finite


class Sqrt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


def test_jacobian_that_is_not_finite():
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    root = nn.Sequential(model, nn.Threshold(-1, 0), Sqrt())
    J = build(JacobianLinearOperator, root, [(torch.ones(2, 3), None)])
    for operator in (J, J.T):
        with pytest.raises(ValueError, match="JacobianLinearOperator is not finite"):
            operator @ torch.ones(operator.shape[1])


def test_jacobian_of_data_that_are_not_finite():
    """Outputs may be infinite, as those of classes that are masked out are."""
    model, data = mlp(), batches(4, 2)
    data[1][0][0] = torch.nan
    for kind in (JacobianLinearOperator, TransposedJacobianLinearOperator):
        with pytest.raises(ValueError, match="The model's output on batch 1 has NaN"):
            build(kind, model, data)

    def masked(X: Tensor) -> Tensor:
        return model(X).masked_fill(torch.tensor([True, False, False]), -torch.inf)

    J = dense(JacobianLinearOperator, masked, params=list(model.parameters()))
    assert J.isfinite().all()


@pytest.mark.parametrize("scale", [1.0, 15.0])
@pytest.mark.parametrize(
    "loss, y",
    [
        (CE, torch.tensor([0, 1])),
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.tensor([0, 1])),
        (nn.BCEWithLogitsLoss(), torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]])),
    ],
)
def test_closed_forms_of_confident_models(loss: nn.Module, y: Tensor, scale: float):
    """In float32 nothing cancels where probabilities are close to zero and one."""
    z = scale * torch.tensor([[1.0, -0.3, -0.5], [-0.6, 1.0, -0.2]])
    v = torch.tensor([[[0.3, 1.0, -0.5], [1.0, 0.2, 0.4]]])
    known = wrap_loss(loss)
    wide = z.double(), y.double() if y.is_floating_point() else y
    for function in (
        lambda z, y: known.gradient(z, y),
        lambda z, y: known.hessian(z, y)(v.to(z.dtype)),
        lambda z, y: known.hessian_sqrt(z, y),
    ):
        found, expected = function(z, y), function(*wide)
        # entry by entry, relative to the entry
        torch.testing.assert_close(found.double(), expected, rtol=2e-5, atol=1e-30)


# --- losses, functions and hooks that differ from what they seem


def tripled(z: Tensor, y: Tensor) -> Tensor:
    return 3 * F.cross_entropy(z, y)


class Called(nn.CrossEntropyLoss):
    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return tripled(z, y)


def hooked() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda module, inputs, out: 3 * out)
    return loss


def patched() -> nn.Module:
    loss = nn.CrossEntropyLoss()
    loss.forward = tripled
    return loss


@pytest.mark.parametrize("make", [Called, hooked, patched])
def test_losses_that_only_look_known(make: Callable):
    for kind in SQUARE:
        factor = 9 if kind is EFLinearOperator else 3
        expected = factor * dense(kind, mlp())
        assert error(dense(kind, mlp(), loss=make()), expected) <= 1e-12
    for kind in (GGNDiagonalLinearOperator, FisherMCLinearOperator):
        with pytest.raises(NotImplementedError, match="subclasses with a forward method of their"):
            dense(kind, mlp(), loss=make())


def test_products_own_their_memory():
    H = build(HessianLinearOperator, mlp())
    v = torch.ones(H.shape[1], dtype=torch.float64)
    (H**0 @ v).add_(1)
    params, data = {"w": torch.randn(5)}, [(torch.zeros(1, 1), None)]
    J = build(JacobianLinearOperator, lambda p, X: p["w"].view(1, -1), data, params=params)
    u = torch.ones(5)
    (J.T @ u).add_(1), (J @ u).add_(1)
    assert bool((v == 1).all()) and bool((u == 1).all())


def test_deep_copies_of_closures():
    model = mlp()
    H = build(HessianLinearOperator, lambda X: model(X), params=list(model.parameters()))
    v = torch.ones(H.shape[1])
    assert torch.equal(copy.deepcopy(H) @ v, H @ v)


# --- nothing to do


def test_cross_entropy_of_one_class():
    """It is constant: zero curvature, of which the square root has no columns."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.PReLU(4), nn.Flatten(), nn.LayerNorm(16)]
    model = nn.Sequential(*layers, nn.Linear(16, 1))
    data = [(torch.randn(4, 2, 4, 4), torch.zeros(4, dtype=torch.long))]
    for options in ({"fisher_type": "type-2"}, {}):
        diagonal = build(GGNDiagonalLinearOperator, model, data, mc_samples=0 if options else 1)
        assert diagonal.trace() == 0 and not matrix(diagonal).any()
        for kind in (KFACLinearOperator, EKFACLinearOperator):
            found = build(kind, model, data, fallback="diagonal", **options)
            assert not found.structure.diagonal().gt(1e-12).any()
            inverse = found.inverse(0.1, use_exact_damping=True)
            assert error(matrix(inverse), 10 * torch.eye(found.shape[0])) <= 1e-5


class Beside(nn.Module):
    """A model with something that has no entries."""

    def __init__(self, empty: nn.Module):
        super().__init__()
        self.empty, self.own = empty, nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.empty, nn.ParameterList):
            return self.own(x) + self.empty[0].sum()
        return self.own(x) + self.empty(x[:, : self.empty.in_features]).sum(1, keepdim=True)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("sizes", [(), (0, 2)])
@pytest.mark.parametrize(
    "kind, options",
    [(kind, {}) for kind in (*SQUARE, PerSampleGradientLinearOperator, GGNDiagonalLinearOperator)]
    + [
        (kind, {"separate_weight_and_bias": apart, "fisher_type": "type-2"})
        for kind in (KFACLinearOperator, EKFACLinearOperator)
        for apart in (True, False)
    ],
)
def test_parameters_without_elements(kind: type, options: dict, sizes: tuple[int, ...]):
    torch.manual_seed(0)
    empty = nn.Linear(*sizes) if sizes else nn.ParameterList([nn.Parameter(torch.empty(0, 3))])
    model, data = Beside(empty), [(torch.randn(4, 3), torch.randn(4, 2))]
    every = list(model.parameters())
    found, expected = (
        build(kind, model, data, MSE, params=params, **options)
        for params in (every, [p for p in every if p.numel()])
    )
    assert error(matrix(found), matrix(expected)) <= 1e-6
    if kind is PerSampleGradientLinearOperator:
        rows = [row.flatten(1) for row in found.gradients()]
        assert [len(row) for row in rows] == [4] * len(every)
        assert error(torch.cat(rows, 1), matrix(expected)) <= 1e-6
    for damping in [{}, {"use_heuristic_damping": kind is KFACLinearOperator}] if options else []:
        inverses = [A.inverse(0.1, **damping) for A in (found, expected)]
        assert error(*map(matrix, inverses)) <= 1e-5


# --- mistakes of ours


class Solve(nn.Module):
    """Has a parameter without a rule."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.solve(self.weight, x.T).T


def rows(model: nn.Module, **options: Any) -> Tensor:
    return build(PerSampleGradientLinearOperator, model, **options).dense()


def decayed(model: nn.Module) -> Tensor:
    loss = lambda z, y: F.cross_entropy(z, y) + model[0].weight.square().sum()  # noqa: E731
    return rows(model, loss=loss, reduction="mean")


def penalized(z: Tensor, y: Tensor) -> Tensor:
    return z.square().square().sum()


def dead(model: nn.Module) -> Tensor:
    """Rows without a gradient are assigned to samples with other values of the parameters."""
    layer = nn.Linear(3, 2).double()
    nn.init.zeros_(layer.weight), nn.init.constant_(layer.bias, -1.0)
    net = nn.Sequential(layer, nn.ReLU(), nn.Flatten(1), nn.Linear(16, 5)).double()
    data = [(torch.randn(2, 8, 3).double(), torch.tensor([0, 1]))]
    return build(KFACLinearOperator, net, data, fisher_type="type-2", kfac_approx="reduce").trace()


#: Functions that are called where errors of users' code lead to another way, and their callers.
FALLBACKS: dict[str, Callable[[nn.Module], Any]] = {
    "risk.derivatives.vjp_columns": lambda m: dense(HessianLinearOperator, m),
    "risk.derivatives.forward_ad": lambda m: build(GGNLinearOperator, m) @ torch.ones(31),
    "risk.batch_problem.select_samples": lambda m: build(EFLinearOperator, m),
    "autodiff.evaluation.copy_containers": lambda m: dense(GGNLinearOperator, m),
    "layers.samples.RecordedBatch": rows,
    "layers.recorded._perturbed": dead,
    "layers.recorded.graph_nodes": rows,
    "layers.fallback.sample_weights": lambda m: rows(nn.Sequential(Solve().double(), m)),
    "layers.fallback.gradient": decayed,
    "losses.generic.select_samples": lambda m: build(
        HessianLinearOperator, m, loss=penalized, reduction="sum"
    ),
    "losses.generic.vjp": lambda m: (
        build(GGNLinearOperator, m, loss=penalized, reduction="sum") @ torch.ones(31)
    ),
}


@pytest.mark.parametrize("kind", [NameError, AttributeError, AssertionError])
@pytest.mark.parametrize("place", FALLBACKS)
def test_mistakes_of_ours_surface(place: str, kind: type, monkeypatch: pytest.MonkeyPatch):
    FALLBACKS[place](mlp())
    code = "def mistake(*args, **kwargs):\n    raise kind('a mistake of ours')\n"
    namespace = {"kind": kind}
    exec(compile(code, curvlinops.__file__, "exec"), namespace)  # as a function of the package
    if place.endswith("forward_ad"):  # a module
        mistake = SimpleNamespace(dual_level=namespace["mistake"])
    else:
        mistake = namespace["mistake"]
    monkeypatch.setattr(f"curvlinops.{place}", mistake)
    with pytest.raises(kind, match="a mistake of ours"):
        FALLBACKS[place](mlp())
