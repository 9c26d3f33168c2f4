"""Products in several threads, and global random number generators."""

import random
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from curvlinops import (
    EFLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

LOSS = nn.MSELoss()


def batch() -> tuple[Tensor, Tensor]:
    """A small batch."""
    return torch.randn(4, 3), torch.randn(4, 2)


class Joining:
    """Data that is there when another thread has multiplied, as with loaders that prefetch."""

    def __init__(self, multiply: Callable[[], object]):
        self.batch, self.multiply, self.found = batch(), multiply, []

    def __iter__(self) -> Iterator:
        thread = threading.Thread(target=lambda: self.found.append(self.multiply()), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        yield self.batch


@pytest.mark.parametrize("kind", [GGNLinearOperator, KFACLinearOperator])
def test_loaders_that_wait_for_another_thread(kind: type):
    inner, outer, v = nn.Linear(3, 2), nn.Linear(3, 2), torch.ones(8)
    other = kind(inner, LOSS, list(inner.parameters()), [batch()])
    data = Joining(lambda: other @ v)
    arguments = outer, LOSS, list(outer.parameters())
    found, expected = kind(*arguments, data) @ v, kind(*arguments, [data.batch]) @ v
    torch.testing.assert_close(found, expected)
    assert data.found
    torch.testing.assert_close(data.found, len(data.found) * [other @ v])


def test_interleaved_passes_of_one_operator():
    """A second product with an operator begins and ends while the first one fetches a batch."""
    model, meanwhile = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), []
    pairs, v = [batch(), batch()], torch.ones(8)

    class Data:
        def __iter__(self) -> Iterator:
            for pair in pairs:
                yield pair
                if threading.current_thread() is threading.main_thread():
                    other = threading.Thread(target=lambda: meanwhile.append(operator @ v))
                    other.start()
                    other.join(20)

    arguments = model, LOSS, list(model.parameters())
    operator = HessianLinearOperator(*arguments, Data(), check_deterministic=False)
    expected = HessianLinearOperator(*arguments, pairs) @ v
    torch.testing.assert_close(operator @ v, expected)
    torch.testing.assert_close(meanwhile, len(pairs) * [expected])


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
    operator = kind(*arguments, check_deterministic=False, cache="none")
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
