"""Batches: their kinds, their numbers of samples, and their way to the device."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.risk.samples import Samples
from curvlinops.support.pytree import leaves, map_leaves, move

_FROM_TUPLES = (
    "Pass a list or a loader of pairs, e.g. [(X, y) for X, y, _ in loader]; y may be None."
)
_OF_HUGGING_FACE = (
    "For models of Hugging Face, construct the operator from "
    "*curvlinops.integrations.transformers.problem(model, loader)."
)
_FROM_DICTIONARIES = (
    f"{_OF_HUGGING_FACE} For others, pass a list or a loader of pairs, e.g. [(batch, "
    "batch['labels']) for batch in loader]; y may be None. Labels of a causal language model must "
    "be shifted by one position."
)


@dataclass(frozen=True)
class Batch:
    """One batch, and its place in the pass over the data; X and y are any nesting of tensors."""

    index: int
    X: Any
    y: Any

    def name_in(self, error: Exception, params: Iterable[Tensor]) -> None:
        """Add the batch in which an error was raised to the error, as a note."""
        tensors = [f"shape {list(x.shape)}, {x.dtype}" for x in leaves(self.X)]
        tensors[8:] = [f"and {len(tensors) - 8} more"] if len(tensors) > 8 else []
        about = " of ".join([type(self.X).__name__, *filter(None, ["; ".join(tensors)])])
        note = f"(in batch {self.index} of the data; the model gets X, {about}, as one argument)"
        if isinstance(self.X, Mapping):
            note += f" {_OF_HUGGING_FACE}"
        dtypes = {x.dtype for x in params}
        is_other = any(x.is_floating_point() and x.dtype not in dtypes for x in leaves(self.X))
        if isinstance(error, TypeError) and isinstance(self.X, np.ndarray | list):
            note += " Where the model takes tensors, pass X as torch.as_tensor(X)."
        elif is_other and "type" in str(error):
            note += f" Parameters are of {' and '.join(map(str, dtypes))}: pass X.to(dtype)."
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)


class Batches:
    """The user's data, re-iterable, on the model's device.

    ``num_data``, the number of samples, is compared in each pass if it is given; the first batch
    has the index ``first``.
    """

    def __init__(
        self,
        data: Iterable,
        batch_size_fn: Callable[[Any], int] | None = None,
        num_data: int | None = None,
        first: int = 0,
    ):
        if isinstance(data, Tensor | Mapping | str) or not isinstance(data, Iterable):
            raise TypeError(
                f"data must be an iterable over pairs (X, y), got {type(data).__name__}. For one "
                "batch, pass [(X, y)]; for a Dataset, DataLoader(dataset, batch_size)."
            )
        if isinstance(data, Iterator):
            raise ValueError(
                f"data is a one-shot iterator ({type(data).__name__}), exhausted after one pass "
                "over it; products need many. Pass a DataLoader or a list of batches."
            )
        # a class of the user's may draw random numbers when it is read
        is_plain = type(data) in (tuple, list) and is_pair(data)
        if is_plain and any(x is None or isinstance(x, Tensor | np.ndarray) for x in data):
            raise ValueError(
                "data is a pair (X, y), expected an iterable over pairs. For one batch, pass "
                "[(X, y)]."
            )
        self.data, self.samples = data, Samples(batch_size_fn)
        self.num_data = num_data
        self.first = first
        self._had_batches = False
        self._counts: tuple[int, float] | None = None  # of batches and samples in the last pass

    def iterate(self, items: Iterable, device: torch.device) -> Iterator[Batch]:
        """Yield the items of the data as batches on a device, whose tensors have no history."""
        index, num_data = self.first - 1, 0.0
        must_count = self.num_data is not None or self.samples.batch_size_fn is not None
        for index, pair in enumerate(items, self.first):
            if not is_pair(pair):
                kind = type(pair).__name__
                size = f" of length {len(pair)}" if isinstance(pair, tuple | list) else ""
                remedy = _FROM_DICTIONARIES if isinstance(pair, Mapping) else _FROM_TUPLES
                raise ValueError(
                    f"Batch {index} of the data is a {kind}{size}, expected a pair (X, y). {remedy}"
                )
            batch = Batch(index, *map_leaves(move(tuple(pair), device), _without_history))
            try:
                num_data += self.samples.count(batch.X, index)
            except ValueError:  # it is not evident
                if must_count:
                    raise
                num_data = nan
            self._had_batches = True
            yield batch
        if index < self.first:
            kind = type(self.data).__name__
            raise ValueError(
                f"data ({kind}) yields no batch any more, though it did before, as streams do that "
                "are exhausted after one pass. Each iteration must start anew."
                if self._had_batches
                else "data is empty: it did not yield a single batch."
            )
        if self.num_data is not None and num_data != self.num_data:
            raise ValueError(
                f"num_data is {self.num_data}, but data has {num_data:.0f} samples. Of several "
                "processes, each counts its own samples."
            )
        self._counts = index + 1, num_data

    @property
    def length(self) -> int | None:
        """The number of batches, ``None`` if only a pass over the data shows it."""
        with suppress(TypeError, NotImplementedError):
            return len(self.data)
        return None

    @property
    def num_samples(self) -> int | None:
        """The number of samples, ``None`` if only a pass over the data shows it."""
        if isinstance(self.data, list | tuple):
            with suppress(ValueError, TypeError):
                return sum(self.samples.count(X, i) for i, (X, _) in enumerate(self.data))
        counted = self._counts and isfinite(self._counts[1])
        return int(self._counts[1]) if counted else self.num_data

    def describe(self) -> str:
        """Return the numbers of samples and batches in the last pass, for ``repr``."""
        if self._counts is None:
            return "data not read yet" if self.length is None else _batches(self.length)
        batches, samples = self._counts
        number = f"{samples:.0f}" if isfinite(samples) else "unknown number of"
        return f"{number} samples in {_batches(batches)}"


def is_pair(x: Any) -> bool:
    """Return whether an object is a pair ``(X, y)``."""
    return isinstance(x, tuple | list) and len(x) == 2


def _without_history(leaf: Any) -> Any:
    """Detach a computed tensor; a model or a loss may still differentiate with respect to it."""
    if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
        return leaf.detach().requires_grad_()
    return leaf


def _batches(number: int) -> str:
    return f"{number} batch{'' if number == 1 else 'es'}"
