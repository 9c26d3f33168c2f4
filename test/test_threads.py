"""Other threads, and processes that are forked while these compute."""

import multiprocessing
import random
import threading
import warnings
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

FORKS = "fork" in multiprocessing.get_all_start_methods()
needs_forks = pytest.mark.skipif(not FORKS, reason="this system has no fork")
LOSS = nn.MSELoss()


def batch() -> tuple[Tensor, Tensor]:
    """A small batch."""
    return torch.randn(4, 3), torch.randn(4, 2)


def in_a_fork(function: Callable[[], object]) -> int | None:
    """Return the exit code of a forked process that calls a function, ``None`` if it hangs."""
    with warnings.catch_warnings():  # of forks of processes with threads
        warnings.simplefilter("ignore", DeprecationWarning)
        process = multiprocessing.get_context("fork").Process(target=function)
        process.start()
    process.join(20)
    if process.exitcode is None:
        process.kill()
        process.join()
        return None
    return process.exitcode


class Waiting(nn.Module):
    """A model that waits for another thread."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def forward(self, x: Tensor) -> Tensor:
        self.reached.set()
        assert self.go_on.wait(60)
        return self.linear(x)


@needs_forks
def test_forks_while_another_thread_multiplies():
    busy, model = Waiting(), nn.Linear(3, 2)
    other = HessianLinearOperator(busy, LOSS, list(busy.parameters()), [batch()], cache="none")
    operator = GGNLinearOperator(model, LOSS, list(model.parameters()), [batch()])
    v = torch.ones(8)
    expected = operator @ v

    def multiply() -> None:
        assert torch.equal(operator @ v, expected)

    busy.reached.clear()
    busy.go_on.clear()
    thread = threading.Thread(target=lambda: other @ v)
    thread.start()
    assert busy.reached.wait(60)
    try:
        assert in_a_fork(multiply) == 0
    finally:
        busy.go_on.set()
        thread.join()
    assert torch.equal(operator @ v, expected)


class Forking:
    """Data that another thread reads, in a process of its own, as prefetching loaders do."""

    def __init__(self, child: Callable[[], object]):
        self.batch, self.child, self.codes = batch(), child, []

    def __iter__(self) -> Iterator:
        thread = threading.Thread(target=lambda: self.codes.append(in_a_fork(self.child)))
        thread.start()
        thread.join()
        yield self.batch


@needs_forks
def test_forks_of_the_data_inside_of_products():
    model = nn.Linear(3, 2)
    inner = GGNLinearOperator(model, LOSS, list(model.parameters()), [batch()])
    data = Forking(lambda: inner @ torch.ones(8))
    operator = GGNLinearOperator(model, LOSS, list(model.parameters()), data)
    data.codes.clear()
    operator @ torch.ones(8)
    assert data.codes == [0]


def drawn() -> tuple[float, float, float]:
    """Draw from all global generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def seed() -> None:
    """Seed all global generators."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


class Meanwhile(nn.Module):
    """A model, perhaps with Dropout, in the midst of which another thread may draw."""

    def __init__(self, rate: float):
        super().__init__()
        self.rate = rate
        self.linear = nn.Linear(3, 2).double()
        self.register_buffer("armed", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.armed:
            thread = threading.Thread(target=drawn)
            thread.start()
            thread.join()
        return self.linear(nn.functional.dropout(x, self.rate))


KINDS = [
    HessianLinearOperator,
    GGNLinearOperator,
    EFLinearOperator,
    PerSampleGradientLinearOperator,
]


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_what_other_threads_draw_is_not_drawn_again(kind: type, checked: bool):
    model, X = Meanwhile(0.0), [x.double() for x in batch()]
    operator = kind(
        model, LOSS, list(model.parameters()), [tuple(X)], check_deterministic=checked, cache="none"
    )
    v = torch.ones(8, dtype=torch.float64)
    expected = operator @ v
    seed()
    sequence = [drawn() for _ in range(100)]
    seed()
    model.armed.fill_(1)
    torch.testing.assert_close(operator @ v, expected)
    assert drawn() in sequence[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_draws_is_given_back(kind: type):
    model, X = Meanwhile(0.0), [x.double() for x in batch()]
    operator = kind(
        model, LOSS, list(model.parameters()), [tuple(X)], check_deterministic=False, cache="none"
    )
    v = torch.ones(8, dtype=torch.float64)
    operator @ v
    model.rate = 0.5
    seed()
    first = drawn()
    seed()
    for _ in range(3):
        operator @ v
    assert drawn() == first


def test_what_loaders_draw_is_given_back():
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
