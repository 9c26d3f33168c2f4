"""Models and situations that are easily got wrong, each against the same thing done plainly."""

import copy
import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.utils.checkpoint
from contract import CASES, error, matrix
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import register_multi_grad_hook
from torch.func import functional_call

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
CE = nn.CrossEntropyLoss()


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


def dense(kind: type, model, params, data, loss=CE, **options) -> Tensor:
    return matrix(kind(model, loss, params, data, **options))


# --- what a model may do


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


class Image(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.unsqueeze(1))[:, 0].sigmoid()


REWRITTEN = {
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
    "embedding": Lookup,
    "convolution": Image,
}


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("name", REWRITTEN)
def test_checkpoints_recompute_what_was_computed(name: str, kind: type):
    """The recomputation in the backward pass is rewritten as the forward pass was."""
    results = []
    for active in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(REWRITTEN[name](), active).double()
        results.append(dense(kind, model, list(model.parameters()), batches(4, 2)))
    assert error(results[1], results[0]) <= 1e-12


@pytest.mark.parametrize("kind", [*SQUARE, JacobianLinearOperator])
def test_checkpoints_in_checkpoints(kind: type):
    """Single products, for which forward mode is tried first."""
    results = []
    for active in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(Checkpointed(nn.Tanh(), active), active).double()
        arguments = [list(model.parameters()), batches(4, 2)]
        arguments[:0] = [] if kind is JacobianLinearOperator else [CE]
        operator = kind(model, *arguments, cache="none")
        generator = torch.Generator().manual_seed(2)
        v = torch.randn(operator.shape[1], generator=generator, dtype=torch.float64)
        results.append(operator @ v)
    assert error(results[1], results[0]) <= 1e-12


class Shy(nn.Module):
    """Shows its derivative to reverse mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x if forward_ad.unpack_dual(x).tangent is None else x.detach()


@pytest.mark.parametrize("kind", [*SQUARE, JacobianLinearOperator])
def test_products_do_not_vanish_in_silence(kind: type):
    model, twin = nn.Sequential(mlp(), Shy()), mlp()
    loss = [] if kind is JacobianLinearOperator else [CE]
    v = torch.ones(31, dtype=torch.float64)
    expected = kind(twin, *loss, list(twin.parameters()), batches(4)) @ v
    arguments = model, *loss, list(model.parameters()), batches(4)
    assert error(kind(*arguments) @ v, expected) <= 1e-12
    with pytest.raises(RuntimeError, match=r"forward mode: fails its dot-test.*autodiff=.auto"):
        kind(*arguments, autodiff="forward") @ v


@pytest.mark.parametrize("kind", SQUARE)
@pytest.mark.parametrize("autodiff", ["auto", "forward", "reverse"])
def test_products_that_vanish(kind: type, autodiff: str):
    dead = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double()
    nn.init.constant_(dead[0].bias, -100.0)
    data, v = batches(4, 2), torch.ones(12, dtype=torch.float64)
    assert (kind(dead, CE, list(dead.parameters()), data, autodiff=autodiff) @ v == 0).all()
    if kind is not EFLinearOperator:
        linear, weights = nn.Linear(3, 3).double(), torch.arange(3.0, dtype=torch.float64)

        def loss(z: Tensor, y: Tensor) -> Tensor:
            return (z @ weights).sum()

        arguments = linear, loss, list(linear.parameters()), data
        assert (kind(*arguments, reduction="sum", autodiff=autodiff) @ v == 0).all()


@pytest.mark.parametrize("kind", SQUARE)
def test_mode_whose_derivative_is_not_a_number(kind: type):
    """Reverse mode through ``cumprod`` of a zero is NaN where forward mode is not."""

    class Product(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.logcumsumexp(1).cumprod(1)

    model = mlp(Product())
    params, data = list(model.parameters()), batches(4)
    operator = kind(model, CE, params, data)
    assert (operator @ torch.eye(operator.shape[1])).isfinite().all()


@pytest.mark.parametrize("kind", SQUARE)
def test_autocast_inside_the_model(kind: type):
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.conv = nn.Linear(3, 6), nn.Conv1d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.conv(self.stem(x).unflatten(1, (2, 3)))[..., 0]

    torch.manual_seed(0)
    model = Cast()
    data = [(X.float(), y) for X, y in batches(4)]
    params = list(model.parameters())
    results = [dense(kind, model, params, data, autodiff=a) for a in ("auto", "reverse")]
    # eight bits of mantissa
    assert error(results[1], results[0]) <= 5e-2


def test_kernels_that_are_differentiable_once_only():
    model, twin = mlp(nn.Hardsigmoid()), mlp(nn.Identity())
    twin[1].forward = lambda x: ((x + 3).clamp(0, 6)) / 6
    data = batches(5)
    for kind in SQUARE:
        found, expected = (dense(kind, m, list(m.parameters()), data) for m in (model, twin))
        assert error(found, expected) <= 1e-12


# --- closures and functions


@pytest.mark.parametrize("kind", SQUARE)
def test_hooks_of_tensors_do_not_change_products(kind: type):
    model = mlp()
    params = list(model.parameters())
    expected = dense(kind, model, params, batches(4))
    params[0].register_hook(lambda gradient: 7 * gradient)
    assert error(dense(kind, lambda X: model(X), params, batches(4)), expected) <= 1e-12
    model(batches(2)[0][0]).sum().backward()
    assert params[0]._backward_hooks  # and they are still there


def by_method(model: nn.Module):
    return model.forward


def by_partial(model: nn.Module):
    return functools.partial(lambda inner, X: inner(X), model)


def by_closure(model: nn.Module):
    return lambda X: model(X)


class Trainer:
    """Has more modules than those that it predicts with."""

    def __init__(self, model: nn.Module):
        self.net, self.average = model, nn.BatchNorm1d(4)
        self.optimizer = torch.optim.Adam(model.parameters())

    def predict(self, X: Tensor) -> Tensor:
        return self.net(X)

    @property
    def current(self) -> nn.Module:
        return self.net


def by_object(model: nn.Module):
    trainer = Trainer(model)
    return lambda X: trainer.net(X)


def by_method_of_an_object(model: nn.Module):
    trainer = Trainer(model)
    return lambda X: trainer.predict(X)


def by_property(model: nn.Module):
    trainer = Trainer(model)
    return lambda X: trainer.current(X)


def by_namespaces(model: nn.Module):
    outer = SimpleNamespace(inner=SimpleNamespace(layers={"all": [model]}))
    return lambda X: outer.inner.layers["all"][0](X)


WRAPS = [by_method, by_partial, by_closure, by_object, by_method_of_an_object, by_property]
WRAPS += [by_namespaces]


@pytest.mark.parametrize("wrap", WRAPS)
def test_modules_behind_closures_are_protected(wrap):
    model = mlp(nn.BatchNorm1d(4))
    params, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="the result depends on how"):
        found = dense(HessianLinearOperator, wrap(model), params, batches(4))
    with pytest.warns(UserWarning, match="the result depends on how"):
        expected = dense(HessianLinearOperator, model, params, batches(4))
    assert error(found, expected) <= 1e-12
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="BatchNorm in train mode couples"):
        EFLinearOperator(wrap(model), CE, params, batches(4))


@pytest.mark.parametrize("owner", [None, Trainer])
def test_modules_behind_functions_are_protected(owner: type | None):
    model = mlp(nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    params = {name: param.detach() for name, param in model.named_parameters()}
    trainer = owner and owner(model)
    functions = {
        None: lambda values, X: functional_call(model, values, (X,)),
        Trainer: lambda values, X: functional_call(trainer.net, values, (X,)),
    }
    with pytest.warns(UserWarning, match="the result depends on how"):
        dense(GGNLinearOperator, functions[owner], params, batches(4))
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
        return self.normalize(self.linear(x))

    def normalize(self, x: Tensor) -> Tensor:
        return self.used[0](x)


def test_modules_that_are_not_registered_are_protected():
    model = Unregistered()
    before = copy.deepcopy(model.used[0].state_dict())
    params = list(model.parameters())
    with pytest.warns(UserWarning, match="the result depends on how"):
        H = HessianLinearOperator(model, CE, params, batches(4))
    H @ torch.ones(H.shape[1], 3, dtype=torch.float64)
    assert all(torch.equal(x, before[name]) for name, x in model.used[0].state_dict().items())
    with pytest.raises(ValueError, match="BatchNorm in train mode couples"):
        EFLinearOperator(model, CE, params, batches(4))
    model.used[0].eval()
    EFLinearOperator(model, CE, params, batches(4))  # what is not used does not matter


def test_batch_norm_without_running_statistics():
    """It couples samples in any mode."""
    model = mlp(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    arguments = model, CE, list(model.parameters()), batches(4)
    with pytest.warns(UserWarning, match="BatchNorm without running statistics"):
        HessianLinearOperator(*arguments)
    with pytest.raises(ValueError, match="statistics couples.*track_running_stats=True"):
        EFLinearOperator(*arguments)


@pytest.mark.parametrize("wrap", [by_object, by_method_of_an_object, by_property])
def test_modules_that_are_not_used_do_not_count(wrap):
    model = mlp(nn.BatchNorm1d(4)).eval()
    arguments = CE, list(model.parameters()), batches(4)
    found, expected = (dense(EFLinearOperator, own, *arguments[1:]) for own in (wrap(model), model))
    assert error(found, expected) <= 1e-12


# --- changes after construction


@pytest.mark.parametrize("as_dict", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_replaced_parameters_are_noticed(case: str, as_dict: bool):
    model, entry = mlp(), CASES[case]
    params = dict(model.named_parameters()) if as_dict else list(model.parameters())
    arguments = (CE, params) if entry.takes_loss else (params,)
    operator = entry.operator(model, *arguments, batches(4), **dict(entry.arguments))
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    with pytest.raises(ValueError, match=r"'0.weight'.*were replaced.*Build a new operator"):
        operator @ torch.ones(operator.shape[1])


@pytest.mark.parametrize("cache", ["none", "graph"])
@pytest.mark.parametrize("kind", SQUARE)
def test_threads(kind: type, cache: str):
    model = mlp()
    operator = kind(model, CE, list(model.parameters()), batches(4, 3), cache=cache)
    v = torch.ones(operator.shape[1])
    expected = operator @ v
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: operator @ v, range(20)))
    assert all(torch.equal(result, expected) for result in results)


class Waiting(torch.autograd.Function):
    """A product whose backward pass lets another thread have a go."""

    other: tuple[Callable, ...] = ()

    @staticmethod
    def forward(ctx, X, weight):
        ctx.save_for_backward(X, weight)
        return X @ weight

    @staticmethod
    def backward(ctx, g):
        X, weight = ctx.saved_tensors
        if threading.current_thread() is threading.main_thread():
            for other in Waiting.other:
                other().join(0.05)
        return g @ weight.mT, X.mT @ g


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3, dtype=torch.float64))

    def forward(self, X: Tensor) -> Tensor:
        return Waiting.apply(X, self.weight)


@pytest.mark.parametrize("kind", [PerSampleGradientLinearOperator, JacobianLinearOperator])
def test_threads_and_gradients_that_are_computed_late(kind: type, monkeypatch: pytest.MonkeyPatch):
    """Values of the parameters are substituted while it lasts."""
    model = Linear()
    params, data = list(model.parameters()), batches(4, 3)
    rows = kind(model, *(() if kind is JacobianLinearOperator else (CE,)), params, data)
    ggn = GGNLinearOperator(model, CE, params, data, autodiff="reverse", cache="none")
    v = torch.ones(9, dtype=torch.float64)
    gram, product, found, threads = rows.gram(), ggn @ v, [], []

    def start() -> threading.Thread:
        threads.append(threading.Thread(target=lambda: found.append(ggn @ v)))
        threads[-1].start()
        return threads[-1]

    monkeypatch.setattr(Waiting, "other", (start,))
    assert torch.equal(rows.gram(), gram)
    for thread in threads:
        thread.join()
    assert len(found) == len(threads) > 0
    assert all(torch.equal(one, product) for one in found)


class Meeting:
    """One thread stops at a point, at most half a second, for another to get into its way."""

    def __init__(self):
        self.reached, self.other = threading.Event(), threading.Event()
        self.expected = self.met = False

    def stop(self) -> None:
        if self.expected and not self.reached.is_set():
            self.reached.set()
            self.met = self.other.wait(0.5)


class Stopping(nn.Linear):
    def __init__(self, meeting: Meeting):
        super().__init__(3, 3, dtype=torch.float64)
        self.meeting = meeting

    def forward(self, x: Tensor) -> Tensor:
        self.meeting.stop()
        return super().forward(x)


class Watched:
    """A loss that tells when it is looked at while a product has stopped."""

    def __init__(self, meeting: Meeting):
        self.meeting = meeting

    @property
    def reduction(self) -> str:
        if self.meeting.reached.is_set():
            self.meeting.other.set()
        return "mean"

    def __call__(self, z: Tensor, y: Tensor) -> Tensor:
        return CE(z, y)


@pytest.mark.parametrize("method", ["gradient_and_loss", "clear_cache"])
def test_threads_change_nothing_inside_of_products(method: str):
    meeting = Meeting()
    model = Stopping(meeting)
    operator = HessianLinearOperator(
        model, Watched(meeting), list(model.parameters()), batches(4), cache="none"
    )
    v = torch.arange(operator.shape[1], dtype=torch.float64)
    expected = operator @ v

    def other() -> None:
        meeting.reached.wait()
        getattr(operator, method)()
        meeting.other.set()

    meeting.expected = True
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(other)
        assert torch.equal(operator @ v, expected)
        done.result()
    assert meeting.other.is_set() and not meeting.met


# --- data


@pytest.mark.parametrize("loss", [CE, nn.MSELoss(), nn.L1Loss(), nn.BCEWithLogitsLoss()])
@pytest.mark.parametrize("kind", SQUARE)
def test_empty_batches(kind: type, loss: nn.Module):
    model = mlp()
    data = batches(4, 0, 2)
    if loss is not CE:
        data = [(X, X.sigmoid()) for X, _ in data]
    params = list(model.parameters())
    full = [batch for batch in data if len(batch[0])]
    found, expected = (dense(kind, model, params, d, loss=loss) for d in (data, full))
    assert error(found, expected) <= 1e-12


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("kind", SQUARE)
def test_no_lookups_in_a_batch(kind: type, layer: type):
    """Whose gradient PyTorch cannot differentiate."""
    model = nn.Sequential(layer(5, 3, padding_idx=1), nn.Flatten(), nn.LazyLinear(2)).double()
    index = torch.randint(5, (4, 3))
    model(index)
    params, data = list(model.parameters()), [(index, torch.randint(2, (4,)))]
    found = dense(kind, model, params, [*data, (index[:0], data[0][1][:0])], loss=CE)
    assert error(found, dense(kind, model, params, data, loss=CE)) <= 1e-12


@pytest.mark.parametrize("kind", SQUARE)
def test_data_made_in_inference_mode(kind: type):
    with torch.inference_mode():
        data = batches(4, 2)
    model = mlp()
    params = list(model.parameters())
    found, expected = (dense(kind, model, params, d) for d in (data, batches(4, 2)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.SmoothL1Loss()])
@pytest.mark.parametrize("kind", [*SQUARE, PerSampleGradientLinearOperator])
def test_data_with_a_history(kind: type, loss: nn.Module):
    """Also with one that begins at the model's own parameters."""

    model, other = mlp(), nn.Linear(3, 3).double()
    params = list(model.parameters())
    inputs = [other(X) for X, _ in batches(4, 2)]
    data = [(X, model(X) + 1 + X) for X in inputs]
    values = [(X.detach(), y.detach()) for X, y in data]
    for own in (model, model.forward):  # the latter's parameters are not replaced
        found, expected = (dense(kind, own, params, d, loss=loss) for d in (data, values))
        assert not found.requires_grad
        # some processors round the two differently
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-15)


def test_jacobian_that_is_not_finite():
    model = nn.Linear(3, 3)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    data = [(torch.ones(2, 3), None)]
    root = nn.Sequential(model, nn.Threshold(-1, 0), Sqrt())
    J = JacobianLinearOperator(root, list(root.parameters()), data)
    for operator in (J, J.T):
        with pytest.raises(ValueError, match="JacobianLinearOperator is not finite"):
            operator @ torch.ones(operator.shape[1])


def test_jacobian_of_data_that_are_not_finite():
    """Outputs may be infinite, as those of classes that are masked out are."""
    model = mlp()
    params, data = list(model.parameters()), batches(4, 2)
    data[1][0][0] = torch.nan
    for kind in (JacobianLinearOperator, TransposedJacobianLinearOperator):
        with pytest.raises(ValueError, match="The model's output on batch 1 has NaN"):
            kind(model, params, data)

    def masked(X: Tensor) -> Tensor:
        return model(X).masked_fill(torch.tensor([True, False, False]), -torch.inf)

    assert matrix(JacobianLinearOperator(masked, params, batches(4))).isfinite().all()


class Sqrt(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sqrt()


# --- accuracy


@pytest.mark.parametrize("scale", [1.0, 10.0, 15.0])
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


# --- what is not what it seems


def tripled(z: Tensor, y: Tensor) -> Tensor:
    return 3 * nn.functional.cross_entropy(z, y)


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
@pytest.mark.parametrize("kind", SQUARE)
def test_losses_that_only_look_known(kind: type, make):
    model, data = mlp(), batches(4, 2)
    params = list(model.parameters())
    factor = 9 if kind is EFLinearOperator else 3
    expected = factor * dense(kind, model, params, data)
    assert error(dense(kind, model, params, data, loss=make()), expected) <= 1e-12


def test_losses_that_are_not_known_any_more():
    """A hook makes it another loss, whose labels nobody knows how to sample."""
    model, loss = mlp(), nn.CrossEntropyLoss()
    operator = FisherMCLinearOperator(model, loss, list(model.parameters()), batches(4))
    v = torch.ones(operator.shape[1])
    operator @ v
    loss.register_forward_hook(lambda module, inputs, out: 3 * out)
    with pytest.raises(NotImplementedError, match="not known as a negative log-likelihood"):
        operator @ v


@pytest.mark.parametrize("make", [Called, hooked, patched])
@pytest.mark.parametrize("kind", [GGNDiagonalLinearOperator, FisherMCLinearOperator])
def test_messages_of_losses_that_only_look_known(kind: type, make):
    model = mlp()
    with pytest.raises(
        NotImplementedError, match="not subclasses with a forward method of their own"
    ):
        dense(kind, model, list(model.parameters()), batches(4), loss=make())


class Detached(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.x = x.detach()
        return x.sin()

    @staticmethod
    def backward(ctx, g: Tensor) -> Tensor:
        return g * ctx.x.cos()


@pytest.mark.parametrize("kind", [*SQUARE, PerSampleGradientLinearOperator])
def test_closures_with_a_graph_from_outside(kind: type):
    """It is the user's, and stays."""
    weight, head = mlp()[0].weight, mlp()[2].weight
    made = torch.tanh(weight)
    loss, data = nn.MSELoss(), [(X, torch.ones(len(X), 3).double()) for X, _ in batches(4, 2)]

    def model(X: Tensor, made: Tensor | None = made) -> Tensor:
        return torch.tanh(X @ (torch.tanh(weight) if made is None else made).T) @ head.T

    found = kind(model, loss, [weight, head], data)
    expected = kind(functools.partial(model, made=None), loss, [weight, head], data)
    v = torch.ones(found.shape[1], dtype=torch.float64)
    for _ in range(3):
        torch.testing.assert_close(found @ v, expected @ v)
    torch.testing.assert_close(found.gradient_and_loss(), expected.gradient_and_loss())
    made.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_custom_functions_in_functional_models(dtype: torch.dtype):
    torch.manual_seed(0)
    data = [(torch.randn(4, 3).to(dtype), torch.randn(4, 2).to(dtype))]
    params = {"weight": torch.randn(3, 2).to(dtype)}

    def model(p: dict[str, Tensor], X: Tensor) -> Tensor:
        return Detached.apply(X @ p["weight"])

    H = HessianLinearOperator(model, nn.MSELoss(), params, data)
    with pytest.raises(RuntimeError, match="is not differentiable.*Detached"):
        H @ torch.ones(6)


class Stateful(nn.Linear):
    """Begins with a state that it makes."""

    def forward(self, X: Tensor) -> Tensor:
        state = torch.zeros(3, 3)
        return Detached.apply(super().forward(X) + X @ state)


def test_custom_functions_beside_tensors_that_the_model_makes():
    """They are in float32 in a copy of the model in float64, too."""
    torch.manual_seed(0)
    model, data = Stateful(3, 3), [(torch.randn(4, 3), torch.randn(4, 3))]
    with pytest.raises(RuntimeError, match="is not differentiable.*Detached"):
        dense(HessianLinearOperator, model, list(model.parameters()), data, loss=nn.MSELoss())
    assert torch.get_default_dtype() == torch.float32


def test_custom_functions_in_losses_and_closures():
    model = mlp()
    params = list(model.parameters())

    def loss(z: Tensor, y: Tensor) -> Tensor:
        return Detached.apply(z).square().sum()

    with pytest.raises(RuntimeError, match="is not differentiable.*Detached"):
        dense(HessianLinearOperator, model, params, batches(4), loss=loss, reduction="sum")
    with pytest.warns(UserWarning, match="Detached.*cannot be checked"):
        dense(HessianLinearOperator, lambda X: Detached.apply(model(X)), params, batches(4))


class Equilibrium(nn.Module):
    """The solution of ``z = tanh(W z + x)``, whose gradient is a hook's unless it is unrolled."""

    def __init__(self, unrolled: bool):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.stem, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.unrolled = unrolled
        nn.init.orthogonal_(self.inner.weight, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        u = self.stem(x)

        def step(z: Tensor) -> Tensor:
            return torch.tanh(self.inner(z) + u)

        z = torch.zeros_like(u)
        with torch.set_grad_enabled(self.unrolled):
            for _ in range(40):
                z = step(z)
        if self.unrolled:
            return self.head(z)
        z = step(z)
        start = z.detach().requires_grad_()
        end = step(start)

        def solve(g: Tensor) -> Tensor:
            solution = g
            for _ in range(40):
                solution = torch.autograd.grad(end, start, solution, retain_graph=True)[0] + g
            return solution

        if z.requires_grad:
            z.register_hook(solve)
        return self.head(z)


def test_equilibria_whose_gradient_is_a_hook():
    model, twin = Equilibrium(False).double(), Equilibrium(True).double()
    params, data = list(model.parameters()), batches(4, 2)
    for autodiff in ("auto", "forward"):
        with pytest.raises(RuntimeError):  # refused, whichever check meets it first
            dense(HessianLinearOperator, model, params, data, autodiff=autodiff)
    with pytest.raises(RuntimeError, match="each hook that changes gradients"):
        dense(GGNLinearOperator, model, params, data)
    rows = (
        PerSampleGradientLinearOperator(m, CE, list(m.parameters()), data).dense()
        for m in (model, twin)
    )
    assert error(*rows) <= 1e-10


def observe(x: Tensor, module: nn.Module) -> None:
    x.register_hook(lambda gradient: None)


def observe_several(x: Tensor, module: nn.Module) -> None:
    register_multi_grad_hook([x], lambda gradients: None)


def observe_module(x: Tensor, module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, inputs, outputs: None)


def scale(x: Tensor, module: nn.Module) -> None:
    x.register_hook(hook=lambda gradient: gradient * x.detach())


def scale_module(x: Tensor, module: nn.Module) -> None:
    module.register_full_backward_hook(lambda module, inputs, _: (inputs[0] * x.detach(),))


class Hooked(nn.Module):
    def __init__(self, register):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.register = nn.Linear(3, 4), nn.Linear(4, 3), register

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).tanh()
        if self.register is not None:
            self.register(x, self.head)
        return self.head(x)


@pytest.mark.parametrize("register", [observe, observe_several, observe_module])
def test_hooks_that_observe(register):
    model, twin = Hooked(register).double(), Hooked(None).double()
    results = [
        dense(HessianLinearOperator, m, list(m.parameters()), batches(4)) for m in (model, twin)
    ]
    assert error(*results) <= 1e-12
    assert not model.head._backward_hooks


@pytest.mark.parametrize("register, name", [(scale, "scale"), (scale_module, "BackwardHook")])
def test_hooks_that_change_gradients(register, name: str):
    model = Hooked(register).double()
    with pytest.raises(RuntimeError, match=f"a hook that changes gradients.*{name}"):
        dense(HessianLinearOperator, model, list(model.parameters()), batches(4))


@pytest.mark.parametrize("kind", SQUARE)
def test_padding_of_the_raw_embedding(kind: type):
    """The first batch has no padding, so that a dot-test on it would not notice."""

    class Raw(nn.Module):
        def __init__(self, function):
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(5, 4)), nn.Linear(4, 3)
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.function(self.weight, x).sum(1).tanh())

    ids = torch.tensor([[1, 2], [3, 4]])
    data = [(ids, torch.tensor([0, 1])), (ids * (ids != 4), torch.tensor([2, 1]))]
    results = []
    for function in (
        lambda w, x: torch.embedding(w, x, 0),
        lambda w, x: nn.functional.embedding(x, w, padding_idx=0),
    ):
        torch.manual_seed(0)
        model = Raw(function).double()
        operator = kind(model, CE, list(model.parameters()), data)
        v = torch.ones(operator.shape[1])
        results += [operator @ v, (operator @ torch.stack([v, v], 1))[:, 0]]
    assert all(error(result, results[-1]) <= 1e-12 for result in results)


def test_products_own_their_memory():
    model = mlp()
    H = HessianLinearOperator(model, CE, list(model.parameters()), batches(4))
    v = torch.ones(H.shape[1], dtype=torch.float64)
    (H**0 @ v).add_(1)
    params = {"w": torch.randn(5)}
    J = JacobianLinearOperator(
        lambda values, X: values["w"].view(1, -1), params, [(torch.zeros(1, 1), None)]
    )
    u = torch.ones(5)
    (J.T @ u).add_(1), (J @ u).add_(1)
    assert bool((v == 1).all()) and bool((u == 1).all())


def test_deep_copies_of_closures():
    model = mlp()
    params = list(model.parameters())
    H = HessianLinearOperator(lambda X: model(X), CE, params, batches(4))
    v = torch.ones(H.shape[1])
    assert torch.equal(copy.deepcopy(H) @ v, H @ v)


@pytest.mark.parametrize("kind", SQUARE)
def test_functional_transforms_inside_the_model(kind: type):
    """A convolution pushed forward by the user's own ``torch.func.jvp``."""

    class Tangent(nn.Module):
        def __init__(self, by_hand: bool):
            super().__init__()
            self.conv, self.by_hand = nn.Conv1d(1, 3, 3), by_hand

        def forward(self, x: Tensor) -> Tensor:
            x = x.unsqueeze(1)
            if self.by_hand:
                out = self.conv(x)
                tangent = nn.functional.conv1d(x.sin(), self.conv.weight)
            else:
                out, tangent = torch.func.jvp(self.conv, (x,), (x.sin(),))
            return (out.tanh() * tangent)[..., 0]

    results = []
    for by_hand in (True, False):
        torch.manual_seed(0)
        model = Tangent(by_hand).double()
        results.append(dense(kind, model, list(model.parameters()), batches(4)))
    assert error(results[1], results[0]) <= 1e-12


def test_targets_in_other_containers():
    from collections import UserDict

    model = mlp().float()
    params = list(model.parameters())
    data = [(X.float(), UserDict(labels=y)) for X, y in batches(4, 2)]

    def loss(z: Tensor, target: UserDict) -> Tensor:
        return nn.functional.cross_entropy(z, target["labels"])

    found = dense(GGNLinearOperator, model, params, data, loss=loss, reduction="mean")
    plain = [(X, target["labels"]) for X, target in data]
    assert error(found, dense(GGNLinearOperator, model, params, plain)) <= 1e-5


@pytest.mark.parametrize("kind", SQUARE)
def test_parameters_with_one_gradient_tensor(kind: type):
    """Autograd returns the very same tensor for both: scaling it in place would count twice."""
    weights = {name: torch.randn(3, 3, dtype=torch.float64) for name in ("first", "second")}

    def sum_of_both(values: dict[str, Tensor], X: Tensor) -> Tensor:
        return X @ (values["first"] + values["second"])

    def one(values: dict[str, Tensor], X: Tensor) -> Tensor:
        return X @ values["both"]

    data = batches(4, 2)
    found = dense(kind, sum_of_both, weights, data)
    block = dense(kind, one, {"both": weights["first"] + weights["second"]}, data)
    assert error(found, block.repeat(2, 2)) <= 1e-12
    # not constant: a shift of all logits would be in the null space
    v = torch.arange(18, dtype=torch.float64).cos()
    single = kind(sum_of_both, CE, weights, data) @ v
    assert error(single, block.repeat(2, 2) @ v) <= 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", SQUARE)
def test_parameters_with_the_negative_bit(kind: type, dtype: torch.dtype):
    values = {"weight": torch.randn(3, 3, dtype=dtype)}
    lazy = {"weight": (-values["weight"])._neg_view()}
    assert lazy["weight"].is_neg()
    data = [(X.to(dtype), y) for X, y in batches(4, 2)]

    def model(params: dict[str, Tensor], X: Tensor) -> Tensor:
        return X @ params["weight"]

    operator = kind(model, CE, lazy, data)
    assert error(matrix(operator), dense(kind, model, values, data)) <= 1e-6
    lazy["weight"].mul_(2)
    values["weight"].mul_(2)
    assert error(matrix(operator), dense(kind, model, values, data)) <= 1e-6


# --- nothing to do


class Sequences(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.cell, self.head = nn.Embedding(5, 3), nn.LSTM(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.table(x.T))[0].sum(0))


def one_logit(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model with one logit, whose layers have all forms of gradients, and its input."""
    generator = torch.Generator().manual_seed(0)
    if name == "sequences":
        return Sequences(), torch.randint(5, (4, 3), generator=generator)
    if name == "vectors":
        layers = [nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 1)]
        return nn.Sequential(*layers), torch.randn(4, 3, generator=generator)
    layers = [nn.Conv2d(2, 4, 3, groups=2), nn.PReLU(4), nn.Flatten(), nn.Linear(16, 1)]
    return nn.Sequential(*layers), torch.randn(4, 2, 4, 4, generator=generator)


@pytest.mark.parametrize("options", [{"fisher_type": "type-2"}, {}])
@pytest.mark.parametrize("name", ["vectors", "images", "sequences"])
def test_cross_entropy_of_one_class(name: str, options: dict):
    """It is constant: zero curvature, of which the square root has no columns."""
    model, X = one_logit(name)
    arguments = model, CE, list(model.parameters()), [(X, torch.zeros(4, dtype=torch.long))]
    diagonal = GGNDiagonalLinearOperator(*arguments, mc_samples=0 if options else 1)
    assert diagonal.trace() == 0 and not matrix(diagonal).any()
    for kind in (KFACLinearOperator, EKFACLinearOperator):
        found = kind(*arguments, **options)
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
@pytest.mark.parametrize("sizes", [(), (0, 2), (3, 0)])
@pytest.mark.parametrize(
    "kind, options",
    [(kind, {}) for kind in (*SQUARE, PerSampleGradientLinearOperator, GGNDiagonalLinearOperator)]
    + [
        (kind, {"separate_weight_and_bias": apart, "fisher_type": fisher})
        for kind in (KFACLinearOperator, EKFACLinearOperator)
        for apart in (True, False)
        for fisher in ("mc", "type-2")
    ],
)
def test_parameters_without_elements(kind: type, options: dict, sizes: tuple[int, ...]):
    torch.manual_seed(0)
    empty = nn.Linear(*sizes) if sizes else nn.ParameterList([nn.Parameter(torch.empty(0, 3))])
    model, data = Beside(empty), [(torch.randn(4, 3), torch.randn(4, 2))]
    every = list(model.parameters())
    found, expected = (
        kind(model, nn.MSELoss(), params, data, **options)
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
