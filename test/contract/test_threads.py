"""Products in several threads, and global random number generators."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small import build
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    TorchLinearOperator,
)

LOSS = nn.MSELoss()


def batch() -> tuple[Tensor, Tensor]:
    """A small batch."""
    return torch.randn(4, 3), torch.randn(4, 2)


class Slow(nn.Module):
    """A model in whose forward pass other threads have their turn."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, X: Tensor) -> Tensor:
        X = torch.tanh(self.first(X))
        time.sleep(1e-3)
        return self.second(X)


@pytest.mark.parametrize("kind", [HessianLinearOperator, KFACLinearOperator])
def test_several_threads_use_one_model(kind: type):
    model, pairs = Slow(), [batch(), batch()]
    named = dict(model.named_parameters())
    operators = [
        kind(model, LOSS, {name: scale * p.detach() for name, p in named.items()}, pairs)
        for scale in (1.0, 2.0)
    ]
    v = torch.randn(operators[0].shape[1])

    def multiply(operator: TorchLinearOperator) -> Tensor:
        return operator @ v

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(multiply, 5 * operators))
    torch.testing.assert_close(found, 5 * [multiply(operator) for operator in operators])


def test_the_lock_is_released_after_an_error():
    model, data = nn.Linear(3, 2), [batch()]
    operator = GGNLinearOperator(model, LOSS, list(model.parameters()), data)
    v = torch.ones(8)
    expected, pair = operator @ v, data[0]
    data[0] = (torch.full((4, 3), torch.nan), pair[1])
    with pytest.raises(ValueError, match="NaN"):
        operator @ v
    data[0] = pair
    with ThreadPoolExecutor(1) as pool:
        torch.testing.assert_close(pool.submit(lambda: operator @ v).result(20), expected)


def drawn() -> tuple[float, float, float]:
    """Draw from all global generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seed() -> None:
    """Seed all global generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.mark.parametrize(
    "kind",
    [
        *(HessianLinearOperator, GGNLinearOperator, EFLinearOperator),
        PerSampleGradientLinearOperator,
    ],
)
def test_generators_are_restored_after_models_that_draw(kind: type):
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)).eval()
    arguments = model, LOSS, list(model.parameters()), [batch()]
    operator = kind(*arguments, check_deterministic=False)
    operator @ torch.ones(8)
    model.train()
    seed()
    first = drawn()
    seed()
    for _ in range(3):
        operator @ torch.ones(8)
    assert drawn() == first


def test_generators_are_restored_after_loaders_that_draw():
    model, (X, y) = nn.Linear(3, 2), batch()
    data = DataLoader(TensorDataset(X, y), batch_size=2)
    operator = GGNLinearOperator(model, LOSS, list(model.parameters()), data)
    K = KFACLinearOperator(model, LOSS, list(model.parameters()), [(X, y)])
    seed()
    first = drawn()
    seed()
    operator @ torch.ones(8)
    K.update((X, y))
    assert drawn() == first


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
