"""What products of one operator share inside of ``linearized()``."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.arguments import as_integer
from curvlinops.support.autograd_graph import footprint
from curvlinops.support.rng import GeneratorStates
from curvlinops.support.torch_internals import version_of

_LOGGER = logging.getLogger("curvlinops")

#: The budget of ``cache="auto"`` on the CPU, in bytes.
_CPU_BUDGET = 2 * 2**30

#: Stands for what is not kept, as it is too large or random.
_REJECTED = object()

#: Builds what products with a batch share; returns it, and the tensors that it keeps in memory,
#: with their graphs, see ``Linear``. The second argument says whether it is kept.
Build = Callable[[BatchProblem, bool], tuple[Any, Iterable[Tensor]]]


class Linearization:
    """Objects built of batches, such as graphs, which do not depend on the vectors.

    Args:
        name: Names the operator in messages.
        budget: The largest total size of what is kept, in bytes.
        tensors: The parameters and buffers by name, which must not be written to.

    Attributes:
        is_open: Whether the context was not left.
        is_synchronized: Whether parameters and buffers were compared between processes.
    """

    def __init__(self, name: str, budget: int, tensors: Mapping[str, Tensor]):
        self._name, self._room = name, budget
        self._versions = [(name, x, version_of(x)) for name, x in tensors.items()]
        self._states: GeneratorStates | None = None  # before the first pass
        #: What was built of each batch, or ``_REJECTED``, by task and by index.
        self._built: dict[str, dict[int, Any]] = {}
        self._complete: set[str] = set()  # the tasks that have passed over all batches
        self.is_open, self.is_synchronized = True, False

    def close(self) -> None:
        """Free all memory; nothing is kept from now on."""
        self.is_open, self._room = False, 0
        self._built.clear()

    def check(self) -> None:
        """Refuse parameters and buffers that were written to.

        Raises:
            RuntimeError: If there are any; the message names the first.
        """
        for name, tensor, version in self._versions:
            if version_of(tensor) != version:
                raise RuntimeError(
                    f"'{name}' was overwritten inside of linearized(), where model, loss and data "
                    "must stay as they are. Leave the context before you change them (training "
                    "steps, and BatchNorm in train mode, do)."
                )

    def has_room(self, size: int) -> bool:
        """Return whether a number of bytes can be kept, too."""
        return size <= self._room

    def all(self, task: str) -> list[Any] | None:
        """Return what is kept of all batches; ``None`` if that of a batch is missing."""
        built = list(self._built[task].values()) if task in self._complete else [_REJECTED]
        return None if any(x is _REJECTED for x in built) else built

    def each(self, task: str, problems: Iterable[BatchProblem], build: Build) -> Iterator[Any]:
        """Yield what is kept of each batch, or build it, and keep it if there is room.

        Nothing is kept of a model that draws random numbers: it draws the same ones in each pass.

        Args:
            task: Identifies what is built.
            problems: The batches.
            build: Builds it.
        """
        kept = self._built.setdefault(task, {})
        if self._states is None:
            self._states = GeneratorStates()
        self._states.restore()
        for problem in problems:
            index = problem.batch.index
            if self._room <= 0:
                kept.setdefault(index, _REJECTED)
            if index not in kept:
                before = GeneratorStates()
                built, tensors = build(problem, True)
                kept[index] = built if before.are_current() and self._fits(tensors) else _REJECTED
                yield built
            elif kept[index] is _REJECTED:
                yield build(problem, False)[0]
            else:
                yield kept[index]
        self._complete.add(task)

    def _fits(self, tensors: Iterable[Tensor]) -> bool:
        """Reserve the memory of tensors and their graphs, if there is so much."""
        size = footprint(tensors, (x for _, x, _ in self._versions))
        if fits := self.has_room(size):
            self._room -= size
        _LOGGER.info(
            "%s: a batch takes %.1f MiB and is %s; %.1f MiB are left",
            self._name,
            size / 2**20,
            "kept" if fits else "not kept",
            self._room / 2**20,
        )
        return fits


#: The linearizations of the current thread, by operator.
_ACTIVE: ContextVar[Mapping[Any, Linearization]] = ContextVar("linearizations")


def linearization_of(operator: Any) -> Linearization | None:
    """Return the operator's linearization, ``None`` outside of ``linearized()``."""
    found = _ACTIVE.get({}).get(operator)
    return found if found is not None and found.is_open else None


@contextmanager
def linearizing(operator: Any, linearization: Linearization) -> Iterator[None]:
    """Let an operator have a linearization in this thread; free its memory at the end."""
    _ACTIVE.set({**_ACTIVE.get({}), operator: linearization})
    try:
        yield
    finally:
        linearization.close()  # tasks that were started inside may have a copy of the variable
        _ACTIVE.set({key: x for key, x in _ACTIVE.get().items() if key is not operator})


def check_cache(cache: Any) -> str | int:
    """Return ``cache`` if it is one of the choices."""
    num_bytes = as_integer(cache)
    if num_bytes is not None and num_bytes >= 0:
        return num_bytes
    if not isinstance(cache, str) or cache not in ("auto", "none"):
        raise ValueError(f"cache must be 'auto', 'none', or a number of bytes, got {cache!r}.")
    return cache


def budget_of(cache: str | int, device: torch.device) -> int:
    """Return the number of bytes that ``cache`` stands for on a device."""
    if cache == "none":
        return 0
    if cache != "auto":
        return cache
    if device.type != "cuda":
        return _CPU_BUDGET
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return (torch.cuda.mem_get_info(device)[0] + reserved) // 4
