"""What checks that several processes run together have in common."""

import contextlib
import datetime
import gc
import importlib
import json
import os
import re
import traceback
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contract import error
from problems import Problem
from torch import Tensor, nn

import curvlinops

#: How long a process waits for another one. A busy machine may let one sleep for many seconds.
LIMIT = datetime.timedelta(minutes=3)
#: By the number of processes: what they check together.
Checks = dict[int, dict[str, Callable[[], None]]]


def registry() -> tuple[Checks, Callable]:
    """Return an empty table of checks, and a decorator that adds one for numbers of processes."""
    checks: Checks = defaultdict(dict)

    def check(*sizes: int, name: str = "") -> Callable:
        def register(function: Callable[[], None]) -> Callable[[], None]:
            for size in sizes or (2,):
                checks[size][name or function.__name__] = function
            return function

        return register

    return checks, check


def rank() -> int:
    return dist.get_rank()


def group() -> dist.ProcessGroup:
    return dist.group.WORLD


def part(data: list) -> list:
    """This process's part of some batches: it takes turns with the others."""
    return data[rank() :: dist.get_world_size()]


def vector(operator: Any, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(operator.shape[1], *shape, generator=generator, dtype=operator.torch_dtype)


def everywhere(value: Tensor) -> list[Tensor]:
    """A tensor of each process."""
    found = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(found, value.contiguous())
    return found


def assert_same_everywhere(value: Any) -> None:
    value = torch.as_tensor(value)
    assert all(torch.equal(other, value) for other in everywhere(value))


def assert_alike_everywhere(value: Any) -> None:
    """Compare up to rounding, which depends on how numbers lie in memory."""
    value = torch.as_tensor(value)
    assert all(error(other, value) <= 1e-12 for other in everywhere(value))


@contextlib.contextmanager
def fails(own: type[BaseException], match: str, on: int | None = None) -> Iterator:
    """Expect an error: on one process its own, which the others name; or the same on all."""
    try:
        yield
    except BaseException as raised:
        error = raised
    else:
        raise AssertionError("There is no error.")
    if on is not None and rank() != on:
        own, match = RuntimeError, f"Rank {on}: {own.__name__}: .*{match}"
    assert type(error) is own and re.search(match, str(error), re.DOTALL), repr(error)


def refuses(
    own: type[BaseException],
    match: str,
    use: Callable,
    *args: Any,
    on: int | None = None,
    **options: Any,
) -> None:
    """Call something that fails."""
    with fails(own, match, on):
        use(*args, **options)


def check_callbacks(A: Any, b: Any) -> None:
    """Check that the callback of one process stops all, and that its error is raised in all.

    Args:
        A: A positive definite operator with a norm below two.
        b: A vector.
    """
    seen: list[int] = []

    def watch(state: curvlinops.Iteration) -> bool:
        seen.append(state.iteration)
        return rank() == 1 and state.iteration == 2

    def fail(state: curvlinops.Iteration) -> None:
        if rank() == 1:
            raise KeyError("here")

    for solve in (
        lambda o: curvlinops.CGInverseLinearOperator(A, rtol=1e-12, **o).solve(b).iterations,
        lambda o: curvlinops.NeumannInverseLinearOperator(A, rtol=1, **o) @ b,
        lambda o: curvlinops.eigsh(A, 2, seed=0, **o).num_products,
        lambda o: curvlinops.hutchinson_trace(A, 8, seed=0, chunk_size=1, **o),
    ):
        seen.clear()
        solve({"callback": watch})
        assert seen == [1, 2]
        solve({"callback": watch} if rank() == 1 else {})
        assert rank() == 0 or seen == [1, 2, 1, 2]
        with fails(KeyError, "here", on=1):
            solve({"callback": fail})
    A @ b  # all are in step


# --- what fails on one process, when it is asked to -----------------------------------------------


class Failing(nn.Module):
    """A nonlinearity."""

    fails = False
    error: type[BaseException] = KeyError

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and rank() == 1:
            raise self.error("here")
        return x.tanh()


class FailingLoss(nn.CrossEntropyLoss):
    fails = False

    def forward(self, output: Tensor, y: Tensor) -> Tensor:
        if self.fails and rank() == 1:
            raise KeyError("here")
        return super().forward(output, y)


class FailingData(list):
    fails = False

    def __iter__(self) -> Iterator:
        for number, batch in enumerate(super().__iter__()):
            if self.fails and rank() == 1 and number == 1:
                raise KeyError("here")
            yield batch


# --- problems, and a process ----------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))


def classifier(
    sizes: tuple[int, ...] = (4, 2, 3), make: Callable[[], nn.Module] = mlp, **options: Any
) -> Problem:
    """A small problem, with more batches on the first process."""
    torch.manual_seed(0)
    model = make().double()
    data = [(torch.randn(n, 3).double(), torch.randint(3, (n,))) for n in sizes]
    loss = nn.CrossEntropyLoss(**options)
    return Problem.of(model, loss, data)


def main(names: dict[str, list[str]], rank: int, size: int, folder: str) -> None:
    """Join the other processes, run checks in a folder, and write which failed, and how.

    Args:
        names: The names of the checks, by those of their modules.
        rank: The number of this process.
        size: How many processes there are.
        folder: Where they run.
    """
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/rendezvous", LIMIT, size, rank)
    modules = {name: importlib.import_module(name) for name in names}
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Batch .* has no term of the loss")  # as in pyproject.toml
    gc.freeze()  # as in conftest.py
    found = {}
    for module, name in ((m, name) for m, its in names.items() for name in its):
        try:
            modules[module].CHECKS[size][name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
        Path(f"found.{rank}").write_text(json.dumps(found))
        dist.barrier()  # a process that is elsewhere ends all
    dist.destroy_process_group()
