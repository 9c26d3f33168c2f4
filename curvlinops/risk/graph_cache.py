"""Keeps graphs of batches from one product to the next, as long as nothing changes."""

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from curvlinops.risk.data import Batch
from curvlinops.support.arguments import as_integer
from curvlinops.support.autograd_graph import footprint
from curvlinops.support.fingerprint import (
    PLAIN,
    Fingerprint,
    array_differs,
    children,
    same_numbers,
)
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import GeneratorStates
from curvlinops.support.torch_internals import global_hooks

_LOGGER = logging.getLogger("curvlinops")


@dataclass
class _Entry:
    """An object built for a batch, the copy of the batch that it refers to, and their size."""

    built: Any
    batch: Batch
    num_bytes: int


class GraphCache:
    """Keeps what products build for each batch, within a budget.

    Args:
        cache: ``"none"``; ``"graph"`` for all batches; a number of bytes; or ``"auto"``, which
            begins at the second product in a row without a change, or inside ``frozen``, and keeps
            at most a quarter of the free memory (on the CPU not more than 4 GiB).
        name: Names the operator in log messages.

    Attributes:
        keeps: Whether anything is ever kept, so that changes have to be noticed.
        active: Whether the current product keeps what it builds.
    """

    def __init__(self, cache: str | int, name: str):
        self.cache, self.name = cache, name
        self.keeps = cache not in ("none", 0)
        self._num_freezes, self._is_checked = 0, False
        self.clear()

    def clear(self) -> None:
        """Free all memory, and forget the state of model and loss."""
        self._fingerprint: Fingerprint | None = None
        self._entries: dict[Any, _Entry] = {}
        self._rejected: set[Any] = set()  # what is too large, or cannot be kept
        self._used, self._limit = 0, None
        self.active = self._is_checked = False

    def check(self, watched: Iterable[Any], device: torch.device) -> bool | None:
        """Begin a product: free the memory if anything has changed since the last one.

        Args:
            watched: All that products depend on, except for the data.
            device: The device of the products.

        Returns:
            Whether anything but numbers in tensors has changed; ``None`` if there is no earlier
            product to compare with.
        """
        if self._num_freezes and self._is_checked:
            self.active = self.keeps
            return False
        watched, previous = (*watched, *_settings(device)), self._fingerprint
        restructured = None if previous is None else not _holds(previous.has_structure, watched)
        unchanged = restructured is False and _holds(previous.has_numbers)
        if not unchanged:
            self.clear()
            try:
                self._fingerprint = Fingerprint(watched)
            except Exception as error:  # users' objects may raise anything
                _LOGGER.info("%s: no graph is ever kept, %s", self.name, error)
                self.keeps = False
        self._device, self._is_checked = device, True
        early = self.cache != "auto" or self._num_freezes > 0
        self.active = self.keeps and (unchanged or early)
        return restructured

    def freeze(self) -> None:
        """Take model and loss as constant until ``unfreeze``, after one more comparison."""
        self._is_checked = self._is_checked and self._num_freezes > 0
        self._num_freezes += 1

    def unfreeze(self) -> None:
        """Compare model and loss at each product again."""
        self._num_freezes -= 1

    def wants(self, key: Any) -> bool:
        """Return whether an object is kept, or would be unless it turns out to be too large."""
        return self.active and key not in self._rejected

    def has_room(self, key: Any, num_bytes: int) -> bool:
        """Return whether an object is kept, or is known to fit."""
        limit = self._automatic_limit() if self.cache == "graph" else self._budget()
        return key in self._entries or self._used + num_bytes <= limit

    def get(self, key: Any, batch: Batch) -> Any:
        """Return the object kept for the same batch, ``None`` if there is none."""
        entry = self._entries.get(key) if self.active else None
        if entry is None:
            return None
        if _same_batch(batch, entry.batch):
            return entry.built
        self._used -= entry.num_bytes
        del self._entries[key]  # before the new one needs memory
        return None

    def get_or_build(self, key: Any, batch: Batch, build: Callable[[Batch], Any]) -> Any:
        """Return the object kept for the same batch, or a new one.

        Args:
            key: Identifies the batch and what is built.
            batch: The batch.
            build: Called with the batch or with a copy. Nothing is kept of a model that draws
                random numbers.
        """
        if not self.wants(key):
            return build(batch)
        if (kept := self.get(key, batch)) is not None:
            return kept
        try:
            copied = _copied(batch)  # the batch's memory is the user's, and may change
            if not self._entries:
                self._used = self._fingerprint.keep_numbers()
        except Exception as error:  # users' objects may raise anything
            _LOGGER.info("%s: batch %d cannot be kept: %s", self.name, batch.index, error)
            self._rejected.add(key)
            return build(batch)
        states = GeneratorStates()
        built = build(copied)
        if not states.are_current():
            _LOGGER.info("%s: batch %d is not kept: the model is random", self.name, batch.index)
            return built
        num_bytes = footprint(built)
        fits = self._used + num_bytes <= self._budget()
        if fits:
            self._entries[key] = _Entry(built, copied, num_bytes)
            self._used += num_bytes
        else:
            self._rejected.add(key)
        _LOGGER.info(
            "%s: batch %d takes %.1f MiB and is %s; %d batches with %.1f MiB are kept%s",
            self.name,
            batch.index,
            num_bytes / 2**20,
            "kept" if fits else "not kept",
            len(self._entries),
            self._used / 2**20,
            "" if self.cache == "graph" else f" of at most {self._budget() / 2**20:.1f} MiB",
        )
        return built

    def _budget(self) -> float:
        if self.cache == "auto":
            return self._automatic_limit()
        return inf if self.cache == "graph" else self.cache

    def _automatic_limit(self) -> int:
        if self._limit is None:  # measured once, while nothing is kept
            self._limit = _quarter_of_free_memory(self._device)
        return self._limit

    def __getstate__(self) -> dict:
        """Return the state of an empty cache: graphs cannot be copied or pickled."""
        return {"cache": self.cache, "name": self.name}

    def __setstate__(self, state: dict) -> None:
        self.__init__(**state)


def _holds(condition: Callable[..., bool], *args: Any) -> bool:
    try:
        return condition(*args)
    except Exception:  # users' objects may raise anything when they are compared
        return False


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
    """Return a copy of a batch without shared memory; of a view it copies no more than the view."""
    tensors = leaves((batch.X, batch.y))
    if any(tensor.grad_fn is not None for tensor in tensors):
        raise ValueError("its tensors were computed from each other.")
    copies = {id(x): x.detach().clone().requires_grad_(x.requires_grad) for x in tensors}
    copied = copy.deepcopy(batch, copies)
    for tensor in tensors:  # what users attach to tensors
        vars(copies[id(tensor)]).update(copy.deepcopy(vars(tensor), copies))
    return copied


def _same_batch(batch: Batch, copied: Batch) -> bool:
    pairs: list[tuple[Tensor, Tensor]] = []
    try:
        same = _same_structure((batch.X, batch.y), (copied.X, copied.y), pairs)
        return same and same_numbers(pairs)
    except Exception:  # users' objects may raise anything
        return False


def _same_structure(now: Any, before: Any, pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether two batches agree apart from the numbers in tensors, which are gathered."""
    if isinstance(now, type):
        return now is before
    if type(now) is not type(before):
        return False
    if isinstance(now, Tensor):
        pairs.append((now, before))
        return _same_structure(vars(now), vars(before), pairs)
    if isinstance(now, PLAIN):
        return now == before
    if isinstance(now, np.ndarray):
        return not array_differs(now, before)
    is_container = isinstance(now, Mapping | list | tuple)
    if not is_container and (callable(now) or not hasattr(now, "__dict__")):
        return False
    old_parts, new_parts = children(before), children(now)
    return len(old_parts) == len(new_parts) and all(
        _same_structure(x, y, pairs) for x, y in zip(new_parts, old_parts, strict=True)
    )


def _settings(device: torch.device) -> list:
    """Return PyTorch's own settings that a forward pass depends on."""
    return [
        *global_hooks(),
        torch.get_autocast_dtype(device.type),
        torch.get_default_dtype(),
        torch.get_float32_matmul_precision(),
    ]


def _quarter_of_free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return (torch.cuda.mem_get_info(device)[0] + reserved) // 4
    # a container may have less than the machine
    return min(psutil.virtual_memory().available // 4, 4 * 2**30)
