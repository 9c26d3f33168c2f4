"""Runs one contender in a process of its own, as told by lines on the standard input.

    worker.py CONTENDER PROBLEM COLUMNS DEVICE

Prints the names of its quantities, then for each line that names one (or `gradient`) the seconds
that it took; for `accuracy NAME` the products of an algorithm (mean over the calls so far) and its
error (root mean square), or null; for `memory NAME` its peak memory in bytes above what was
allocated before (that of first calls in a process that did nothing else); for `flops NAME` its
number of floating-point operations in matrix products and convolutions. All answers are JSON.
"""

import gc
import json
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable
from math import hypot

import torch
from contenders import CONTENDERS, gradient
from estimates import Found
from problems import make
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


def timed(run: Callable[[], object], device: str) -> tuple[float, object]:
    """Return the seconds that one call takes, on a GPU by its own clock, and its result."""
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        result = run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3, result
    before = time.perf_counter()
    result = run()
    return time.perf_counter() - before, result


def twice(run: Callable[[], object]) -> None:
    """Call twice, so that the kept graph is used; algorithms use it in one call."""
    if not isinstance(run(), Found):
        run()


def accuracy(found: list[tuple[int | None, float | None]]) -> dict | None:
    """Summarize the products and errors of several calls."""
    if not found:
        return None
    products, errors = zip(*found, strict=True)
    known = None not in errors
    return {
        "products": sum(products) / len(products) if None not in products else None,
        "error": hypot(*errors) / len(errors) ** 0.5 if known else None,
    }


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of new tensors, as the allocator of a GPU does.

    The memory of the process is no measure: it also depends on imports, and on the memory that the
    C library returns to the system.
    """

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._before = [x.untyped_storage() for x in _strided(gc.get_objects())]
        self._seen = weakref.WeakSet(self._before)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count its new tensors, also inputs that NumPy made."""
        out = func(*args, **(kwargs or {}))
        for storage in {x.untyped_storage() for x in _strided(tree_leaves((args, kwargs, out)))}:
            if storage not in self._seen:
                self._seen.add(storage)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def _free(self, num_bytes: int) -> None:
        self.now -= num_bytes


def _strided(objects: Iterable[object]) -> list[torch.Tensor]:
    tensors = [x for x in objects if issubclass(type(x), torch.Tensor)]
    return [x for x in tensors if x.layout is torch.strided and not x.is_meta]


def peak_memory(run: Callable[[], object], device: str) -> int:
    """Return the peak of memory of two calls, or of one call of an algorithm."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        twice(run)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with LiveBytes() as live:
        twice(run)
    return live.peak


class Counter(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and convolutions.

    PyTorch's own mode hooks all modules, which would be a part of the model.
    """

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count its own."""
        out = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
        return out


def flops(run: Callable[[], object]) -> int:
    """Count floating-point operations of a call with kept graphs."""
    with Counter() as counter:
        if isinstance(run(), Found):  # earlier calls have kept the graphs
            return counter.total
        before = counter.total
        run()
    return counter.total - before


def main() -> None:
    """Answer line by line."""
    warnings.simplefilter("ignore")
    contender, problem_name, columns, device = sys.argv[1:]
    problem = make(problem_name, device)
    quantities = {"gradient": gradient(problem), **CONTENDERS[contender](problem, int(columns))}
    found: dict[str, list] = {}
    result: object = None
    print(json.dumps(list(quantities)[1:]), flush=True)
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        if command == "memory":
            # imports at the first call do not count
            CONTENDERS[contender](make("tiny", device), int(columns))[argument]()
            answer = peak_memory(quantities[argument], device)
        elif command == "flops":
            answer = flops(quantities[argument])
        elif command == "accuracy":
            answer = accuracy(found.get(argument, []))
        else:
            name = line.strip()
            # free the last result first: some contenders keep theirs until the next call, and
            # fresh memory takes time
            result = None
            answer, result = timed(quantities[name], device)
            if isinstance(result, Found):
                found.setdefault(name, []).append((result.products, result.error()))
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
