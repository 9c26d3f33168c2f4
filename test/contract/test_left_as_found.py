"""The user's model and all global state are as found, after success and after an exception."""

import copy
import pickle
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
import small
import torch
from contract import ALL, CASES, matrix
from models import Using
from problems import Problem
from small import CE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from curvlinops import TorchLinearOperator

PER_SAMPLE = {"fisher", "fisher-samples", "gradients", "ggn-diagonal"}


class Counting(nn.Module):
    """Counts its calls, keeps its inputs in all kinds of places, and updates a buffer."""

    def __init__(self):
        super().__init__()
        self.calls, self.last = 0, None
        self.inputs, self.recent, self.by_size = [], deque(["nothing"], maxlen=2), {"largest": 0}
        self.sizes = {0}
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = x
        self.inputs.append(x)
        self.recent.append(x)
        self.sizes.add(len(x))
        self.by_size[len(x)] = x
        self.by_size["largest"] = max(self.sizes)
        self.seen += 1
        return x


def last_state(s: Using, x: Tensor) -> Tensor:
    return s.cell(x.unsqueeze(1))[0][:, 0]


def weight_normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(3, 3))


def model() -> nn.Module:
    """Everything that a forward pass may change."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Linear(3, 3),
        nn.BatchNorm1d(3).eval(),
        nn.ReLU(inplace=True),
        Counting(),
        Using(last_state, cell=nn.LSTM(3, 3, batch_first=True)),
        weight_normed(),
        nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3)).eval(),
        nn.Linear(3, 3),
    )
    net(torch.randn(2, 3))
    net[0].weight.requires_grad_(False)
    net[7].bias.grad = torch.ones(3)
    net.register_forward_hook(lambda *_: None)
    net[0].register_full_backward_hook(lambda *_: pytest.fail("not the user's backward pass"))
    return net


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(X.float(), y) for X, y in small.batches(3, 2)]


def problem(net: Callable, data: Any = None, params: Any = None, loss: Any = CE) -> Problem:
    params = list(net.parameters()) if params is None else params
    data = batches() if data is None else data
    reduction = None if loss is CE else "mean"
    return Problem(net, loss, params, data, mc=True, reduction=reduction)


def state(net: nn.Module) -> list:
    """Return everything that must stay, tensors by identity and by value."""
    found: list = []
    for name, module in net.named_modules():
        attributes = {k: v for k, v in vars(module).items() if not isinstance(v, dict)}
        found.append((name, module.training, {k: id(v) for k, v in attributes.items()}))
        containers = [x for x in vars(module).values() if isinstance(x, dict | list | set | deque)]
        found.append([list(x.values() if isinstance(x, dict) else x) for x in containers])
        for tensors in (module._parameters, module._buffers):
            for key, tensor in tensors.items():
                if tensor is not None:
                    grad = None if tensor.grad is None else (id(tensor.grad), tensor.grad.tolist())
                    values = (id(tensor), tensor.tolist(), tensor.requires_grad, grad)
                    found.append((key, type(tensor), values))
    return found


def surroundings() -> list:
    """Return global state that a product must not change."""
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        repr(np.random.get_state(legacy=False)),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cuda.mem_efficient_sdp_enabled(),
        torch.backends.cuda.math_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.overrides._get_current_function_mode_stack(),
        torch.autograd.forward_ad._current_level,
        torch.autograd.forward_ad._is_fwd_grad_enabled(),
        torch.nn.utils.parametrize._cache_enabled,
    ]


def multiplication(case: str, net: nn.Module, data) -> Callable[[], None]:
    """Build an operator; return a function that multiplies with it, also inside ``linearized``."""
    p = problem(net, data, [p for p in net.parameters() if p.ndim > 0])
    operator = ALL[case].build(p)

    def multiply() -> None:
        operator @ torch.ones(operator.shape[1], 2)
        with operator.linearized():
            for _ in range(2):
                operator @ torch.ones(operator.shape[1], 2)
        if case == "kfac":
            operator.update(batches()[0])

    return multiply


class Failing(nn.Module):
    """Batches and a model that raise an error, once they are armed."""

    def __init__(self, net: nn.Module, data: BaseException | None, model: BaseException | None):
        super().__init__()
        self.net, self.errors, self.armed = net, {"data": data, "model": model}, False

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, second = batches()
        yield first
        random.random(), np.random.randn(), torch.rand(1)  # loaders draw numbers
        if self.armed and self.errors["data"]:
            raise self.errors["data"]
        yield second

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        if self.armed and self.errors["model"] and len(x) == 2:  # in the second batch
            raise self.errors["model"]
        return out


#: Errors in the data and in the model.
SITUATIONS = {
    "success": (None, None),
    "error in the data": (RuntimeError("on purpose"), None),
    "interrupt in the data": (KeyboardInterrupt("on purpose"), None),
    "error in the model": (None, RuntimeError("on purpose")),
    "interrupt in the model": (None, KeyboardInterrupt("on purpose")),
}


@pytest.mark.parametrize(
    "case, situation",
    [
        *product(ALL, ["success", "error in the data", "error in the model"]),
        *product(["hessian", "gradients", "kfac"], [n for n in SITUATIONS if "interrupt" in n]),
    ],
)
def test_all_is_as_found(case: str, situation: str):
    net = model()
    errors = SITUATIONS[situation]
    failing = Failing(net, *errors)
    before, around = state(net), surroundings()
    multiply = multiplication(case, failing, failing)
    assert surroundings() == around
    if any(errors):
        failing.armed = True
        with pytest.raises(type(errors[0] or errors[1]), match="on purpose"):
            multiply()
    else:
        multiply()
    assert state(net) == before
    assert surroundings() == around
    copy.deepcopy(net[4]), pickle.dumps(net[4])


def test_generators_of_all_devices_in_use(monkeypatch: pytest.MonkeyPatch):
    others = tuple(torch.Generator().manual_seed(seed) for seed in (3, 4))
    monkeypatch.setattr(torch.xpu, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.xpu, "default_generators", others)
    before = [generator.get_state() for generator in others]

    class Drawing(list):
        """Batches that are augmented on another device, in the end by nothing."""

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for X, y in super().__iter__():
                yield X + 0 * torch.rand((), generator=others[1]), y

    multiplication("ggn", model(), Drawing(batches()))()
    assert all(map(torch.equal, before, [generator.get_state() for generator in others]))


def test_a_normal_number_that_waits_to_be_drawn():
    class Drawing(list):
        """Batches that are augmented by NumPy, in the end by nothing."""

        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            noise = np.random.randn()
            return ((X + 0 * noise, y) for X, y in super().__iter__())

    operator = ALL["hessian"].build(problem(model(), Drawing(batches())))
    np.random.seed(0), np.random.randn()  # draws two; the second is not among the words
    waiting = np.random.get_state()
    for _ in range(2):
        around = surroundings()
        operator @ torch.ones(operator.shape[1])
        assert surroundings() == around
        np.random.randn()
        operator @ torch.ones(operator.shape[1])  # with the same words, and none that waits
        np.random.set_state(waiting)


@pytest.mark.parametrize("case", ALL)
def test_closures(case: str):
    """Tensors that do not require gradients do so only inside."""
    weight, bias = torch.randn(3, 3), torch.randn(3, requires_grad=True)
    bias.grad = torch.ones(3)

    def closure(X: Tensor) -> Tensor:
        return X @ weight.T + bias

    operator = ALL[case].build(problem(closure, params=[weight, bias]))
    operator @ torch.ones(operator.shape[1])
    assert not weight.requires_grad and bias.requires_grad
    assert weight.grad is None and torch.equal(bias.grad, torch.ones(3))


@pytest.mark.parametrize("case", [c for c in CASES if c not in PER_SAMPLE])
def test_batch_norm_in_train_mode(case: str):
    """Running statistics stay, though its double backward would update them."""
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    before = state(net)
    with pytest.warns(UserWarning, match=r"BatchNorm in train mode \(module '1'\)"):
        multiply = multiplication(case, net, batches())
    multiply()
    assert state(net) == before


class Balanced(nn.Module):
    """Divides by a moving average of its own values, which each evaluation moves."""

    reduction = "mean"

    def __init__(self, change: str):
        super().__init__()
        self.change, self.calls, self.armed = change, 0, False
        self.register_buffer("average", torch.tensor(2.0))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        value = nn.functional.cross_entropy(output, target)
        average = self.average.clone()
        self.calls += 1
        if self.change == "in place":
            self.average.mul_(0.9).add_(0.1 * value.detach())
        elif self.change == "assigned":
            self.average = 0.9 * self.average + 0.1 * value.detach()
        if self.armed:
            raise RuntimeError("failed on purpose")
        return value / average


#: Operators that need no square root of the loss's Hessian.
ADDITIVE = [name for name, case in CASES.items() if case.takes_loss and not case.needs_root]


@pytest.mark.parametrize("change, wrapped", [("in place", False), ("assigned", True)])
@pytest.mark.parametrize("case", [*ADDITIVE, "kfac"])
def test_loss(case: str, change: str, wrapped: bool):
    """Each evaluation starts from the buffers as found, after which they are as found."""

    def multiply(loss: Balanced) -> Callable[[], Tensor]:
        net = nn.Linear(3, 3)
        nn.init.ones_(net.weight), nn.init.zeros_(net.bias)
        function = (lambda output, y: loss(output, y)) if wrapped else loss
        options = {"fisher_type": "empirical"} if case == "kfac" else {}
        operator = ALL[case].build(problem(net, loss=function), **options)
        return lambda: operator @ torch.ones(operator.shape[1])

    loss = Balanced(change)
    before, apply = state(loss), multiply(loss)
    torch.testing.assert_close(apply(), multiply(Balanced("none"))())
    assert state(loss) == before
    if case == "kfac":  # a snapshot
        return
    loss.armed = True
    with pytest.raises(RuntimeError, match="failed on purpose"):
        apply()
    loss.armed = False
    assert state(loss) == before


def test_loss_of_tensors_that_the_model_keeps():
    """Tensors that the model keeps have derivatives in the loss of the same pass only."""
    net = Keeping()

    def loss(output: Tensor, _: None) -> Tensor:
        return output.sum(1).mean() + net.size + sum(net.cubes)

    operator = ALL["hessian"].build(problem(net, [(torch.ones(2, 3), None)], loss=loss))
    for _ in range(3):
        torch.testing.assert_close(operator @ torch.eye(3), 8 * torch.eye(3))
    assert not net.cubes


class Masked(nn.Module):
    """A layer that is computed again in the backward pass, with what the forward pass has left."""

    def __init__(self, again: bool):
        super().__init__()
        self.first, self.second, self.again = nn.Linear(3, 3), nn.Linear(3, 3), again
        self.mask, self.masks, self.by_name = None, [], {}
        self.register_buffer("stored", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mask = (x[:, :1] > 0).to(x) + 1
        self.masks.append(self.mask + 1)
        self.by_name["mask"] = self.mask + 2
        self.stored = self.mask + 3
        h = self.first(x)
        return checkpoint(self.last, h, use_reentrant=False) if self.again else self.last(h)

    def last(self, h: Tensor) -> Tensor:
        left = self.mask * self.masks[-1] * self.by_name["mask"] * self.stored
        return self.second(torch.tanh(h) * left)


@pytest.mark.extensive
@pytest.mark.parametrize("case", ["hessian", "ggn", "gradients", "kfac"])
def test_checkpoints_that_read_what_the_pass_has_left(case: str):
    found = []
    for again in (True, False):
        torch.manual_seed(0)
        net = Masked(again).double()
        net(torch.randn(3, 3).double())  # what is left of another batch must not be used
        before = state(net)
        operator = ALL[case].build(problem(net, small.batches(3, 2)))
        v = torch.randn(operator.shape[1], generator=torch.Generator().manual_seed(0)).double()
        found.append([operator @ v for _ in range(3)])
        assert state(net) == before
    for again, plain in zip(*found, strict=True):
        torch.testing.assert_close(again, plain)


class Keeping(nn.Module):
    """Keeps sums of powers of its weights in a buffer and in a list."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("size", torch.zeros(()))
        self.cubes = []

    def forward(self, x: Tensor) -> Tensor:
        self.size = self.weight.square().sum()
        self.cubes.append(self.weight.pow(3).sum())
        return x * self.weight


class Halved(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2.0


class Attached(nn.Linear):
    """The same by what is kept at the parameters, as Opacus and muP do."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.weight.width, self.weight.count = 2.0, 0
        self.bias.label = "bias"
        self.sizes = nn.Buffer(torch.tensor(sizes))
        self.sizes.label = "buffer"

    def forward(self, x: Tensor) -> Tensor:
        self.weight.count += 1
        assert (self.bias.label, self.sizes.label) == ("bias", "buffer")
        assert self.get_parameter("weight") is self.weight and isinstance(self.sizes, nn.Buffer)
        return super().forward(x) / self.weight.width


@pytest.mark.parametrize("case", ["hessian", "gradients", "jacobian", "kfac"])
@pytest.mark.parametrize("kind", ["list", "copies", "some"])
def test_attributes_of_parameters_and_buffers(kind: str, case: str):
    """Tensors that replace parameters have them; what is written there is lost."""

    def build(layer: type) -> tuple[nn.Module, TorchLinearOperator]:
        torch.manual_seed(0)
        net = nn.Sequential(layer(3, 4), nn.Tanh(), layer(4, 2)).double()
        params = list(net.parameters())[: 3 if kind == "some" else 4]
        if kind == "copies":
            params = {name: param.detach().clone() for name, param in net.named_parameters()}
        data = [(torch.rand(n, 3).double(), torch.randint(2, (n,))) for n in (4, 3)]
        return net, ALL[case].build(problem(net, data, params))

    (net, operator), (_, expected) = build(Attached), build(Halved)
    with operator.linearized():
        for _ in range(2):
            torch.testing.assert_close(matrix(operator), matrix(expected), rtol=1e-10, atol=1e-12)
    assert net[0].weight.count == 0


@pytest.mark.parametrize("case", ["hessian", "ggn", "fisher", "gradients"])
def test_generators_are_restored_after_models_and_loaders_that_draw(case: str):
    net = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval()
    data = DataLoader(TensorDataset(*batches()[0]), batch_size=2)
    operator = ALL[case].build(problem(net, data), check_deterministic=False)
    operator @ torch.ones(12)
    net.train()
    around = surroundings()
    for _ in range(3):
        operator @ torch.ones(12)
        assert surroundings() == around


# --- parameters that the model writes to


class Scaled(nn.Module):
    """Has a weight that it overwrites, and a frozen one; how and which are arguments."""

    def __init__(self, write: Callable[[Tensor], Any], name: str):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 9).reshape(3, 3))
        self.frozen = nn.Parameter(torch.linspace(1, 2, 9).reshape(3, 3), requires_grad=False)
        self.write, self.name = write, name

    def forward(self, x: Tensor) -> Tensor:
        self.write(getattr(self, self.name))
        return x @ self.weight @ self.frozen


@torch.no_grad()
def without_gradients(w: Tensor) -> None:
    w.copy_(nn.functional.normalize(w, dim=1))


@torch.no_grad()
def at_indices(w: Tensor) -> None:
    w[0] = 0.0


@torch.no_grad()
def by_operator(w: Tensor) -> None:
    w *= 0.5


@torch.no_grad()
def of_many(w: Tensor) -> None:
    torch._foreach_mul_([w], 0.5)


@torch.no_grad()
def by_optimizer(w: Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.1).step()


@torch.no_grad()
def view_with_history(w: Tensor) -> None:
    with torch.enable_grad():
        row = w[0]
    row.zero_()


#: How models of others write: clipping, maximal norms, momentum encoders, codebooks, decay.
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "no_grad": without_gradients,
    "data": lambda w: w.data.clamp_(-0.1, 0.1),
    "detach": lambda w: w.detach().mul_(0.99),
    "view": lambda w: w.data.T[1].zero_(),
    "view with a history": view_with_history,
    "flat view": lambda w: w.detach().view(-1)[2:].div_(2),
    "indices": at_indices,
    "mask": lambda w: w.data.masked_fill_(w.data > 0, 0.0),
    "operator": by_operator,
    "out": lambda w: torch.renorm(w.detach(), 2, 0, 0.1, out=w.data),
    "inplace": lambda w: nn.functional.relu(w.data, inplace=True),
    "initialization": lambda w: nn.init.zeros_(w),
    "overload": lambda w: torch.ops.aten.mul_.Scalar(w.data, 0.5),
    "foreach": of_many,
    "optimizer": by_optimizer,
    "the same values": lambda w: w.data.copy_(w.data.clone()),
}


def as_function(net: Scaled, X: Tensor) -> Tensor:
    net.write(getattr(net, net.name))
    return X @ net.weight @ net.frozen


#: Models that compute the same, and their parameters.
KINDS_OF_MODELS: dict[str, Callable[[Scaled], tuple[Callable, Any]]] = {
    "module": lambda net: (net, [net.weight]),
    "module, other values": lambda net: (net, {"weight": net.weight.detach().clone()}),
    "closure": lambda net: (lambda X: as_function(net, X), [net.weight]),
    "function": lambda net: (
        lambda params, X: torch.func.functional_call(net, params, (X,)),
        {"weight": net.weight},
    ),
}


@pytest.mark.parametrize(
    "write, kind, name",
    [
        *product(WRITES, ["module"], ["weight"]),
        *product(["no_grad", "data", "optimizer"], KINDS_OF_MODELS, ["weight", "frozen"]),
    ],
)
def test_models_that_write_to_parameters(write: str, kind: str, name: str):
    """It is refused before anything is written, by the constructor or by the first product."""
    net = Scaled(WRITES[write], name)
    function, params = KINDS_OF_MODELS[kind](net)
    before = state(net)
    tensors = [*params.values()] if isinstance(params, dict) else params
    given = [x.tolist() for x in tensors]
    p = problem(function, params=params)
    for check in (True, False):
        with pytest.raises(ValueError, match=f"writes to parameter '(0|{name})'.*training loop"):
            operator = ALL["hessian"].build(p, check_deterministic=check)
            operator @ torch.ones(9)
    assert [x.tolist() for x in tensors] == given
    net.weight.grad = net.frozen.grad = None  # which a step of an optimizer needs
    assert state(net) == before


@pytest.mark.parametrize("case", ALL)
def test_writes_after_a_change_of_mode(case: str):
    """A model that rescales its weights once in eval mode, as RWKV does, after training."""

    def rescale(w: Tensor) -> None:
        if not net.training and not net.is_rescaled:
            w.data.mul_(0.5)
            net.is_rescaled = True

    net = Scaled(rescale, "frozen")
    net.is_rescaled = False
    net.eval()
    net(torch.ones(1, 3))
    operator = ALL[case].build(problem(net, params=[net.weight]))
    net.frozen.data.mul_(2)  # as its training steps do
    net.is_rescaled = False
    before = state(net)
    with pytest.raises(ValueError, match="writes to parameter 'frozen'"):
        if case == "kfac":
            operator.update(batches()[0])
        else:
            operator @ torch.ones(operator.shape[1])
    assert state(net) == before


#: What a model assigns to the ``data`` of a parameter, and whether that is other memory.
ASSIGNED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "other numbers": (lambda x: torch.renorm(x, 2, 0, 0.5), True),
    "a copy": (lambda x: x.clone(), True),
    "another dtype": (lambda x: x.half(), True),
    "another order": (lambda x: x.T, True),
    "a part of it, repeated": (lambda x: x[:1].expand(3, 3), True),
    "its own": (lambda x: x, False),
    "its own dtype": (lambda x: x.to(x.dtype), False),  # as layer.to(dtype) does
    "its own, in another shape and back": (lambda x: x.flatten().view(3, 3), False),
}


@pytest.mark.parametrize(
    "kind, name", [*product(["module", "closure"], ASSIGNED), ("function", "a copy")]
)
def test_parameters_that_get_other_memory(kind: str, name: str):
    """Assigning to ``data`` replaces what stands for a parameter; a closure has the user's own."""
    change, is_write = ASSIGNED[name]

    def assign(w: Tensor) -> None:
        w.data = change(w.data)

    net = Scaled(assign, "weight")
    function, params = KINDS_OF_MODELS[kind](net)
    before, p = state(net), problem(function, params=params)
    if kind == "closure" and is_write:
        with pytest.raises(ValueError, match=r"writes to parameter '0' \(by .data = ...\)"):
            ALL["hessian"].build(p)
    elif name != "another dtype":
        other = Scaled(lambda w: None, "weight")
        other.weight.data = change(net.weight.data)
        expected = ALL["hessian"].build(problem(other, params=[other.weight]))
        torch.testing.assert_close(matrix(ALL["hessian"].build(p)), matrix(expected))
    assert state(net) == before


class Centers(nn.Module):
    """A loss with parameters of its own, which it moves."""

    reduction = "mean"

    def __init__(self):
        super().__init__()
        self.centers = nn.Parameter(torch.ones(3, 3), requires_grad=False)

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centers.mul_(0.9)
        return (output - self.centers[target]).square().sum(1).mean()


def test_losses_that_write_to_their_parameters():
    loss, net = Centers(), nn.Linear(3, 3)
    before = state(loss)
    with pytest.raises(ValueError, match="or its loss, writes to parameter 'centers'"):
        ALL["hessian"].build(problem(net, loss=loss))
    assert state(loss) == before


def test_writes_to_other_tensors():
    """To copies, buffers, activations, and what the pass has computed of parameters."""

    def forward(s: Using, x: Tensor) -> Tensor:
        copy_of_weight, scale = s.first.weight.detach().clone(), s.first.bias * 1
        copy_of_weight.mul_(2)
        with torch.no_grad():
            s.norm.running_mean.mul_(0.5)
            s.first.bias.detach().clone().zero_()
        scale += s.first.bias
        h = s.norm(s.first(x)).sigmoid()
        h = h.clone()
        h[:, 0] = 1.0
        return h.mul_(scale) @ copy_of_weight

    torch.manual_seed(0)
    net = Using(forward, first=nn.Linear(3, 3), norm=nn.BatchNorm1d(3).eval())
    before = state(net)
    ALL["hessian"].build(problem(net)) @ torch.ones(18)
    assert state(net) == before
