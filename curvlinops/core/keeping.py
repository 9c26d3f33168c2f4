"""Keeping what products with a batch need, from one product to the next."""

import copy
import logging
from collections.abc import Callable, Iterable
from math import inf
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.modules import module as hooks

from curvlinops.core.arguments import as_integer
from curvlinops.core.data import Batch
from curvlinops.core.graph import footprint
from curvlinops.core.pytree import leaves
from curvlinops.core.references import is_plain
from curvlinops.core.seeds import GeneratorStates
from curvlinops.core.snapshot import Change, Snapshot
from curvlinops.core.torch_internals import current_dispatch_modes, current_function_modes
from curvlinops.core.walk import Structure, value_of

_LOGGER = logging.getLogger("curvlinops")


class Keeper:
    """Keeps prepared products while nothing changes that they depend on, within a budget.

    A product begins with ``start``, and asks ``prepare`` for each batch. Model, parameters, loss
    and options are compared with a copy at the start, the data batch by batch. Numbers are copied
    only for products that ask whether something is kept.

    Args:
        cache: ``"none"``; ``"graph"`` for all batches; a number of bytes; or ``"auto"``, which
            begins at the second product in a row without a change, and keeps at most a quarter of
            the free memory (on the CPU not more than 4 GiB).
        name: Names the operator in log messages.

    Attributes:
        keeps: Whether anything is ever kept, so that changes have to be noticed.
        active: Whether this product keeps what it prepares, and may find something kept.
    """

    def __init__(self, cache: str | int, name: str):
        self.cache, self.name = cache, name
        self.keeps = cache not in ("none", 0)
        self.clear()

    def clear(self) -> None:
        """Forget everything, and free its memory."""
        self._snapshot: Snapshot | None = None
        self._outline: list | None = None
        self._entries: dict[Any, _Entry] = {}
        self._too_large: set[Any] = set()
        self._device, self._free = torch.device("cpu"), None
        self._used = 0
        self.active = False

    @property
    def _most(self) -> int:
        """The most that is kept by default, measured where it is asked for, once."""
        if self._free is None:
            self._free = _automatic_budget(self._device)
        return self._free

    @property
    def _budget(self) -> float:
        """How much may be kept: infinity for all batches."""
        if self.cache == "auto":
            return self._most
        return {"graph": inf, "none": 0}.get(self.cache, self.cache)

    def start(self, root: Any, device: torch.device, numbers_matter: bool = False) -> bool:
        """Begin a product: forget all if anything changed, or if that cannot be found out.

        Args:
            root: All that prepared products depend on, except for the batches.
            device: Where they are kept.
            numbers_matter: Whether conclusions about the model depend on numbers in tensors.

        Returns:
            Whether more may have changed than numbers, unless these matter, so that the conclusions
            must be drawn again.
        """
        try:
            return self._compare([root, _surroundings(device)], device, numbers_matter)
        except Exception as error:  # whatever the user's objects raise when they are looked at
            _LOGGER.info("%s: nothing is kept, as it may have changed: %s", self.name, error)
            self.clear()
            return True

    def _compare(self, root: Any, device: torch.device, numbers_matter: bool) -> bool:
        known = self._snapshot
        change = Change.STRUCTURE if known is None else known.compare(root)
        # while no numbers are compared, nothing is kept
        unchanged = change is Change.NOTHING and known.has_numbers
        if change is not Change.NOTHING:
            self.clear()
            self._snapshot = Snapshot(root, numbers=False)
        if not unchanged:
            self._device, self._free = device, None
        self.active = self.keeps and (unchanged or self.cache != "auto")
        return change is Change.STRUCTURE or (numbers_matter and not unchanged)

    def start_without(self, modules: Iterable[nn.Module]) -> bool:
        """Begin a product that keeps nothing; return whether modules have changed.

        Their types and plain attributes, and what they have registered, by name, are compared: such
        as train flags, options and the numbers of hooks.
        """
        before, self._outline = self._outline, _outline(modules)
        return self._outline != before

    @property
    def structure(self) -> Structure | None:
        """What the product that began last depends on, numbers aside, if that is known."""
        return None if self._snapshot is None else self._snapshot.structure

    def wants(self, key: Any) -> bool:
        """Return whether a product is kept, or would be unless it turns out to be too large."""
        try:
            if self._snapshot is not None:
                self._snapshot.copy_numbers()  # with which the next product compares
        except Exception as error:  # there may be no memory for it
            _LOGGER.info("%s: nothing is kept, for want of a copy: %s", self.name, error)
            self.clear()
        return self.active and key not in self._too_large

    def has_room(self, key: Any, num_bytes: int) -> bool:
        """Return whether something is kept, or is known to fit."""
        if key in self._entries:
            return True
        limit = self._most if self._budget == inf else self._budget
        return self._used + num_bytes <= limit

    def prepare(self, key: Any, batch: Batch, build: Callable[[Batch], Callable]) -> Callable:
        """Return a prepared product, kept or newly built.

        Args:
            key: Identifies the product and the batch.
            batch: The batch.
            build: Prepares the product for a batch.
        """
        if not self.wants(key):
            return build(batch)
        entry = self._entries.get(key)
        if entry is not None:
            if _matches(entry.snapshot, batch):
                return entry.product
            del self._entries[key], entry  # before the new one needs memory
            self._used = sum(kept.num_bytes for kept in self._entries.values())
        try:
            # the batch's memory is the user's, and may change
            own = _copied(batch)
            snapshot = Snapshot([own.X, own.y], copy_of=[batch.X, batch.y])
        except Exception as error:  # whatever the user's own types raise
            _LOGGER.info("%s: batch %d cannot be kept: %s", self.name, batch.index, error)
            self._too_large.add(key)
            return build(batch)
        states = GeneratorStates()
        product = build(own)
        if not states.are_current():
            _LOGGER.info("%s: batch %d is not kept: the model is random", self.name, batch.index)
            return product
        num_bytes = footprint(product)
        fits = self._used + num_bytes <= self._budget
        if fits:
            self._entries[key] = _Entry(product, snapshot, num_bytes)
            self._used += num_bytes
        else:
            self._too_large.add(key)
        _LOGGER.info(
            "%s: batch %d takes %.1f MiB and is %s; %d batches with %.1f MiB are kept%s",
            self.name,
            batch.index,
            num_bytes / 2**20,
            "kept" if fits else "not kept",
            len(self._entries),
            self._used / 2**20,
            "" if self._budget == inf else f" of at most {self._budget / 2**20:.1f} MiB",
        )
        return product

    def __getstate__(self) -> dict:
        """Copies and pickles start empty: graphs cannot be copied."""
        return {"cache": self.cache, "name": self.name}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)


def check_cache(cache: Any, autodiff: str) -> str | int:
    """Return ``cache`` if it is one of the choices, and ``autodiff`` can serve it."""
    num_bytes = as_integer(cache)
    if num_bytes is not None and num_bytes >= 0:
        return num_bytes
    if not isinstance(cache, str) or cache not in ("auto", "graph", "none"):
        raise ValueError(
            f"cache must be 'auto', 'graph', 'none', or a number of bytes, got {cache!r}."
        )
    if cache == "graph" and autodiff == "forward":
        raise ValueError(
            "cache='graph' needs autodiff='auto' or 'reverse': forward mode has no graph."
        )
    return cache


def _copied(batch: Batch) -> Batch:
    """Return a copy that shares no memory; one of a view is as small as the view."""
    if any(leaf.grad_fn is not None for leaf in leaves((batch.X, batch.y))):
        raise ValueError("its tensors were computed from each other.")
    tensors = {
        id(leaf): leaf.detach().clone().requires_grad_(leaf.requires_grad)
        for leaf in leaves((batch.X, batch.y))
    }
    own = copy.deepcopy(batch, tensors)
    for leaf in leaves((batch.X, batch.y)):
        vars(tensors[id(leaf)]).update(copy.deepcopy(vars(leaf), tensors))
    return own


def _matches(snapshot: Snapshot, batch: Batch) -> bool:
    try:
        return snapshot.matches([batch.X, batch.y])
    except Exception:  # whatever the user's own types raise
        return False


def _outline(modules: Iterable[nn.Module]) -> list:
    return [
        (type(module), [(name, _sketch(value)) for name, value in vars(module).items()])
        for root in modules
        for module in root.modules()
    ]


def _sketch(value: Any) -> Any:
    if is_plain(value):
        return type(value), value_of(value)
    if isinstance(value, dict):
        return [value_of(key) if is_plain(key) else type(key) for key in list(value)]
    return type(value)


class _Entry:
    def __init__(self, product: Callable, snapshot: Snapshot, num_bytes: int):
        self.product, self.snapshot, self.num_bytes = product, snapshot, num_bytes


_GLOBAL_HOOKS = {
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called"),
    *("_global_forward_hooks_with_kwargs", "_global_buffer_registration_hooks"),
    *("_global_parameter_registration_hooks", "_global_module_registration_hooks"),
}


def _surroundings(device: torch.device) -> list:
    """Return PyTorch's own settings that a forward pass depends on."""
    kind = device.type
    return [
        [dict(value) for name, value in vars(hooks).items() if name in _GLOBAL_HOOKS],
        current_function_modes(),
        # not what they hold: counters and profilers change all the time
        [(type(mode), id(mode)) for mode in current_dispatch_modes()],
        torch.get_autocast_dtype(kind),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    ]


def _automatic_budget(device: torch.device) -> int:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + reserved) // 4
    # a container may have less than the machine
    return min(psutil.virtual_memory().available // 4, 4 * 2**30)
