"""The check at construction: the first batch, its outputs and losses repeat; gradients do, too."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import ALL
from models import Using
from problems import Problem
from torch import Tensor, nn

from curvlinops.autodiff import backward

N = 8
CE = nn.CrossEntropyLoss()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(N, 3, dtype=torch.float64, generator=generator)
    return X, torch.randint(2, (N,), generator=generator)


def operator(case: str, model: nn.Module, data: Any = None, **options: Any) -> Any:
    data = [batch()] if data is None else data
    return ALL[case].build(Problem.of(model, CE, data), **options)


# --- what it costs


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Get an entry for each backward pass."""
    found, run = list[Any](), backward.run_backward

    def counted(starts: Any, *args: Any, **options: Any) -> Any:
        found.append(starts)
        return run(starts, *args, **options)

    monkeypatch.setattr(backward, "run_backward", counted)
    return found


class Counting(nn.Module):
    """Notes the sizes of the batches on which it is evaluated."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda x: x):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.function = function
        self.seen = SimpleNamespace(sizes=())  # lists would be as before

    def forward(self, x: Tensor) -> Tensor:
        self.seen.sizes = (*self.seen.sizes, len(x))
        return self.layers(self.function(x))


class Loader:
    """Counts the batches that it yields."""

    def __init__(self, num_batches: int):
        self.num_batches, self.yielded = num_batches, []

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(self.num_batches):
            self.yielded.append(index)
            yield batch(index)


@pytest.mark.parametrize("num_batches", [1, 3])
@pytest.mark.parametrize("case", ALL)
def test_construction_evaluates_the_first_batch_twice(
    case: str, num_batches: int, passes: list[Any]
):
    """There is no backward pass. Rows of later batches are counted, and samples seen alone."""
    net, data = Counting(), Loader(num_batches)
    operator(case, net, data)
    counted = [] if ALL[case].square else list(range(num_batches))
    assert data.yielded == [0, 0, *counted]
    assert net.seen.sizes.count(N) == 2 + len(counted[1:])
    assert net.seen.sizes.count(2) == len(net.seen.sizes) - net.seen.sizes.count(N) <= 2
    assert not passes


class Shaky:
    """A function that draws random numbers from a generator of its own."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *args: Any) -> Tensor:
        x = args[-1]
        return x + torch.rand(x.shape, generator=self.generator, dtype=x.dtype)


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2))
    model.register_forward_hook(Shaky())
    return model


def with_forward() -> nn.Module:
    model = nn.Linear(3, 2)
    forward, shaky = model.forward, Shaky()
    model.forward = lambda x: shaky(forward(x))
    return model


def with_activation() -> nn.Module:
    layer = nn.TransformerEncoderLayer(3, 1, 4, 0.0, activation=Shaky(), batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 3)), layer, nn.Flatten())


#: Modules of PyTorch that do not compute the same twice.
CHANGING = {
    "hook": with_hook,
    "forward": with_forward,
    "activation": with_activation,
    "dropout": lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout()),
    "written": lambda: nn.Sequential(nn.ELU(inplace=True), nn.Linear(3, 2)),
}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("case", ["hessian", "ggn", "gradients"])
def test_modules_of_pytorch_that_change_are_noticed(case: str, name: str):
    """Of these, the first batch may be evaluated once, where a second time would be the same."""
    X, y = batch()
    with pytest.raises(RuntimeError, match="different batches|gives different values"):
        operator(case, CHANGING[name]().double(), [(X - 0.5, y)])


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # of older versions
@pytest.mark.parametrize("case", ALL)
def test_modules_of_pytorch_are_evaluated_once(case: str):
    """Data is a list of tensors: nothing can differ the second time."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.profiler.profile() as profile:
        operator(case, net)
    calls = {event.key: event.count for event in profile.key_averages()}
    assert calls["aten::tanh"] <= 3  # with the first and the last samples alone


def seeded(x: Tensor) -> Tensor:
    """Add noise that is the same each time, by the global generator."""
    torch.manual_seed(0)
    return x + torch.randn_like(x)


def test_gradients_are_compared_where_random_numbers_are_drawn(passes: list[Any]):
    net = Counting(seeded)
    operator("hessian", net)
    assert len(passes) == 2


# --- random gradients of a loss that repeats


class NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g + torch.randn_like(g)


def noisy_hook(z: Tensor) -> Tensor:
    z = z.clone()
    if z.requires_grad:
        z.register_hook(lambda g: g * torch.rand_like(g))
    return z


def noisy_estimator(z: Tensor) -> Tensor:
    noisy = z * torch.rand_like(z)
    return z.detach() + noisy - noisy.detach()


NOISY = {"function": NoisyBackward.apply, "hook": noisy_hook, "straight-through": noisy_estimator}


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize("case", [name for name, case in ALL.items() if case.takes_loss])
def test_random_gradients_are_refused(case: str, name: str):
    layer = nn.Linear(3, 2).double()
    model = Using(lambda s, x: NOISY[name](s.layer(x)), layer=layer)
    with pytest.raises(RuntimeError, match="not deterministic|gives different values"):
        operator(case, model)


# --- infinite gradients of a finite loss


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("case", [name for name, case in ALL.items() if case.takes_loss])
def test_infinite_gradients_are_refused(case: str, check: bool):
    """By the first product, or by what is computed first."""
    scale = torch.zeros(2, dtype=torch.float64)
    model = Using(lambda s, x: s.layer(x) + s.scale.sqrt(), layer=nn.Linear(3, 2), scale=scale)
    A = operator(case, model.double(), check_deterministic=check)
    with pytest.raises(ValueError, match="not finite|NaN or infinite"):
        A @ torch.ones(A.shape[1], dtype=torch.float64)
