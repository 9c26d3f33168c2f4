"""The work that products of one operator share inside of ``linearized()``."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.arguments import as_integer
from curvlinops.support.autograd_graph import Output, footprint
from curvlinops.support.devices import bytes_to_keep
from curvlinops.support.rng import GeneratorStates
from curvlinops.support.torch_internals import strided_tensors, version_of

_LOGGER = logging.getLogger("curvlinops")

#: Builds the work that products with a batch share. The second argument says whether it is kept.
Build = Callable[[BatchProblem, bool], Linear]


#: So many products with the same numbers are those of a solver.
_MANY_PRODUCTS = 20


class FreshProducts:
    """Counts products outside of ``linearized()``, and says once that they could share graphs."""

    was_said = False

    def __init__(self):
        self._versions, self._count = list[int | None](), 0

    def note(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Count a product with an operator, given the tensors that it depends on."""
        if FreshProducts.was_said:
            return
        versions = [version_of(x) for x in tensors]
        self._count = self._count + 1 if versions == self._versions else 1
        self._versions = versions
        if self._count == _MANY_PRODUCTS:
            FreshProducts.was_said = True
            _LOGGER.warning(
                "%s: each of the last %d products has evaluated the model, though no parameter has "
                "changed. Write `with A.linearized():` around loops and SciPy's solvers: products "
                "inside of it share this work. This message appears once.",
                name,
                _MANY_PRODUCTS,
            )


class Linearization:
    """Objects built of batches, such as graphs, which do not depend on the vectors.

    They take ``budget`` bytes at most. No product is right once one of ``tensors`` was written to.
    """

    def __init__(self, name: str, budget: int, tensors: Mapping[str, Tensor]):
        self._name, self._room, self._tensors = name, budget, dict(tensors)
        #: Version and memory of each tensor, and an alias that keeps this memory from being reused.
        self._before = [
            (name, x, version_of(x), part, part.data_ptr(), part.detach())
            for name, x in tensors.items()
            for part in strided_tensors(x)
        ]
        self._states: GeneratorStates | None = None  # before the first pass
        #: The work by task and index; ``None`` if it is not kept, as it is too large or random.
        self._built: dict[str, dict[int, Linear | None]] = {}
        self._complete: set[str] = set()  # the tasks that have passed over all batches

    def close(self) -> None:
        """Free all memory; nothing is kept from now on."""
        self._room = 0
        for kept in (self._built, self._before, self._tensors):
            kept.clear()

    def check(self) -> None:
        """Refuse parameters and buffers that were written to, as far as PyTorch reports writes."""
        for name, tensor, version, part, address, _ in self._before:
            if version_of(tensor) != version or part.data_ptr() != address:
                raise RuntimeError(
                    f"'{name}' was overwritten inside of linearized(), where model, loss and data "
                    "must stay as they are. Leave the context before you change them (training "
                    "steps, and BatchNorm in train mode, do)."
                )

    def has_room(self, size: int) -> bool:
        """Return whether a number of bytes can be kept, too."""
        return size <= self._room

    def all(self, task: str) -> list[Linear] | None:
        """Return what is kept of all batches; ``None`` if that of a batch is missing."""
        built = list(self._built[task].values()) if task in self._complete else [None]
        return None if any(x is None for x in built) else built

    def each(self, task: str, problems: Iterable[BatchProblem], build: Build) -> Iterator[Linear]:
        """Yield the kept work of each batch, or build it, and keep it if there is room.

        Nothing is kept of a model that draws random numbers: it draws the same ones in each pass.
        """
        kept = self._built.setdefault(task, {})
        if self._states is None:
            self._states = GeneratorStates()
        self._states.restore()
        for problem in problems:
            index = problem.batch.index
            if self._room <= 0:
                kept.setdefault(index, None)
            if index not in kept:
                before = GeneratorStates()
                built = build(problem, True)
                is_fit = before.are_current() and self._fits(built.tensors)
                kept[index] = built if is_fit else None
                yield built
            elif kept[index] is None:
                yield build(problem, False)
            else:
                yield kept[index]
        self._complete.add(task)

    def _fits(self, tensors: Iterable[Output]) -> bool:
        """Reserve the memory of tensors and their graphs, if there is so much."""
        size = footprint(tensors, self._tensors.values())
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
    return bytes_to_keep(device) if cache == "auto" else cache
