"""Other threads, and processes that are forked while these compute."""

import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from curvlinops import GGNLinearOperator, HessianLinearOperator

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
