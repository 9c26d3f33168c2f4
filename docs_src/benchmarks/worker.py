"""Runs one package in a process of its own, as told by lines on the standard input.

    worker.py PACKAGE DEVICE FILE

Prints the path of the package if it is ours, else null, or why it cannot be imported. Then
`row PROBLEM | QUANTITY | STATE` makes a problem, and later lines are about it: `time` answers with
the CPU and wall seconds of some calls, `memory` with the peak of all tensors and NumPy
arrays in bytes beyond those of model and data, from construction to the second result; `numbers`
writes the numbers of a first result and of one in the state to the file. A failure is answered by
its message. All answers are JSON.
"""

import gc
import json
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import torch
from numpy_bytes import ArrayBytes
from packages import PACKAGES, Quantity, gradient
from problems import make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

#: The states in which a quantity is measured.
NEW, SEEN, STEP, KEPT = "new model", "seen model", "after a step", "linearized"
#: Neither construction nor the first result of an operator counts; or only the first result does.
LATER, FIRST = "later", "first"
#: Short calls are repeated until so many seconds are over, at most so many times.
SECONDS, CALLS = 0.05, 10
#: The largest number of entries of a tensor that are compared.
MOST = 4 * 10**6
#: Arrays of modules that are imported while memory is measured live as long as the process.
ARRAYS = ArrayBytes()


class Row:
    """A quantity of a problem in a state."""

    def __init__(self, problem: str, quantity: Quantity, state: str, device: str):
        self._make, self._state = (lambda: make(problem, device)), state
        self._build, self._ask, self._keep, _ = quantity
        self._problem, self._operator, self._scope = self._make(), None, ExitStack()

    def call(self) -> Callable[[], object]:
        """Bring everything into the state, and return what counts."""
        if self._state == NEW:
            fresh = self._make()
            return lambda: self._ask(self._build(fresh))
        if self._state == SEEN:
            return lambda: self._ask(self._build(self._problem))
        if self._state == FIRST:
            operator = self._build(self._problem)
            return lambda: self._ask(operator)
        if self._operator is None:
            self._operator = self._build(self._problem)
            if self._state == KEPT and self._keep is not None:
                self._scope.enter_context(self._keep(self._operator))
            self._ask(self._operator)
        if self._state == STEP:
            self._problem.step()
        return lambda: self._ask(self._operator)

    def peak(self) -> Callable[[], object]:
        """Return what memory is measured of."""

        def run() -> None:
            with ExitStack() as scope:
                operator = self._build(self._problem)
                if self._state == KEPT and self._keep is not None:
                    scope.enter_context(self._keep(operator))
                self._ask(operator)
                if self._state not in (NEW, SEEN, FIRST):
                    self._ask(operator)

        self.close()
        self._problem = self._make()
        return run

    def close(self) -> None:
        """Free the operator."""
        self._scope.close()
        self._operator = None


def timed(row: Row, device: str) -> list[list[float]]:
    """Return the CPU seconds and the wall seconds of some calls."""
    seconds: list[list[float]] = []
    while len(seconds) < CALLS and sum(wall for _, wall in seconds) < SECONDS:
        result = None  # freed first: fresh memory takes time
        call = row.call()
        _synchronize(device)
        cpu, wall = time.process_time(), time.perf_counter()
        result = call()
        _synchronize(device)
        seconds.append([time.process_time() - cpu, time.perf_counter() - wall])
    del result
    return seconds


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of new tensors, as the allocator of a GPU does, and of new NumPy arrays.

    The memory of the process is no measure: it also depends on imports, and on the memory that the
    C library returns to the system.
    """

    def __init__(self, arrays: ArrayBytes):
        super().__init__()
        self.now = self.peak = 0
        self._arrays = arrays
        self._before = [x.untyped_storage() for x in _strided(gc.get_objects())]
        self._seen = weakref.WeakSet(self._before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count its new tensors."""
        self.look()
        out = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in _strided(tree_leaves((args, kwargs, out)))}:
            if storage.resizable() and storage not in self._seen:  # NumPy's are not resizable
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.look()
        return out

    def look(self) -> None:
        """Add the largest memory of arrays since the last call to that of the tensors."""
        self.peak = max(self.peak, self.now + self._arrays.peak)
        self._arrays.peak = self._arrays.now

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _strided(objects: Iterable[object]) -> list[torch.Tensor]:
    tensors = [x for x in objects if issubclass(type(x), torch.Tensor)]
    return [x for x in tensors if x.layout is torch.strided and not x.is_meta]


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Return the peak of memory of a call."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with ARRAYS.counting(), LiveBytes(ARRAYS) as live:
        run()
    live.look()
    return live.peak


def numbers(result: object) -> dict[str, torch.Tensor]:
    """Return the tensors of a result by their paths, and some entries of large ones."""
    found = {}
    for path, leaf in tree_flatten_with_path(result)[0]:
        flat = torch.as_tensor(leaf).detach().cpu().flatten()
        if len(flat) > MOST:
            generator = torch.Generator().manual_seed(0)
            flat = flat[torch.randint(len(flat), (MOST,), generator=generator)]
        found[keystr(path)] = flat.clone()
    return found


def refusal(error: Exception) -> dict[str, str]:
    """Return the answer that says why there is no result."""
    return {"refused": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    package, device, path = sys.argv[1:]
    torch.set_num_threads(1)  # so that CPU seconds tell packages apart
    try:
        quantities = {"gradient": gradient(), **PACKAGES[package].quantities()}
    except Exception as error:  # of a dependency, say
        print(json.dumps(refusal(error)), flush=True)
        return
    print(json.dumps(getattr(sys.modules.get("curvlinops"), "__file__", None)), flush=True)
    row: Row | None = None
    for line in sys.stdin:
        command, _, about = line.strip().partition(" ")
        try:
            if command == "names":
                answer = {name: quantity.comparable for name, quantity in quantities.items()}
            elif command == "row":
                if row is not None:
                    row.close()
                problem, name, state = about.split(" | ")
                row = None
                row = Row(problem, quantities[name], state, device)
                answer = None
            elif command == "time":
                answer = timed(row, device)
            elif command == "memory":
                answer = peak_memory(row.peak(), device)
            else:
                torch.save(numbers(row.call()()), Path(path))
                answer = None
        except Exception as error:
            answer = refusal(error)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
