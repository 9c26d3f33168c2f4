"""Gradients of single samples with respect to a parameter, not necessarily written down.

An object has the V x N gradients of V backpropagated vectors and N samples. Its class knows cheaper
ways to norms, inner products and sums where there are any.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.structured.layout import ParameterView

#: Temporary tensors are kept below this size, where a quantity can be computed in parts.
BYTES = 32 * 2**20

#: Columns B ``[g, O, p]`` and A ``[g, I, q]`` of a product ``B^T G A``; ``None`` for the identity.
Sides = tuple[Tensor | None, Tensor | None]

#: The number of entries that a processor's cache holds.
_CACHED = 2**18


class Entries(NamedTuple):
    """The entries of a parameter of some shape that a layer uses, and their order there."""

    view: ParameterView
    shape: tuple[int, ...]

    @classmethod
    def all(cls, shape: Sequence[int]) -> "Entries":
        """Return all entries of a tensor, in their order."""
        shape = tuple(shape)
        return cls(ParameterView.of_axes("", [(prod(shape), 1)]), shape)

    @property
    def are_all(self) -> bool:
        """Whether these are all entries, in their order."""
        return self.view.is_all(prod(self.shape))

    def spread(self, values: Tensor) -> Tensor:
        """Turn values ``[V, n, *]`` of the entries into tensors ``[V, n, *shape]``."""
        out = self.view.spread(values.flatten(0, 1), prod(self.shape))
        return out.reshape(*values.shape[:2], *self.shape)

    @property
    def have_all(self) -> bool:
        """Whether these are all entries, in any order."""
        return self.view.size == prod(self.shape)

    def read(self, tensors: Tensor) -> Tensor:
        """Return the entries of tensors ``[K, *shape]``, ``[K, *sizes of the view]``, as a view."""
        return self.view.of(tensors.reshape(len(tensors), prod(self.shape)))


class LowRank(NamedTuple):
    """K matrices ``left @ right`` of a parameter's shape, all axes but the first as columns."""

    #: ``[K, out, r]``.
    left: Tensor
    #: ``[K, r, in]``.
    right: Tensor
    shape: tuple[int, ...]

    def dense(self) -> Tensor:
        """Return the products ``left @ right``, ``[K, *shape]``."""
        return (self.left @ self.right).reshape(-1, *self.shape)


def dense(columns: Tensor | LowRank) -> Tensor:
    """Return tensors ``[K, *shape]``."""
    return columns.dense() if isinstance(columns, LowRank) else columns


class PerSampleGradient(ABC):
    """Gradients ``[V, N, *parameter]``, not necessarily written down."""

    num_vectors: int
    num_samples: int
    #: The entries of the parameter of which there are gradients; others are zero.
    entries: Entries
    #: The ``KroneckerShape`` of sums of outer products, ``None`` for others.
    kronecker_shape: tuple | None = None
    #: The parameters of which there are gradients side by side; empty if there is one.
    parts: "tuple[tuple[str, Entries], ...]" = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.entries.shape

    @property
    def num_entries(self) -> int:
        """The number of the parameter's entries."""
        return prod(self.shape)

    @abstractmethod
    def values(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, ``[V, n, *]``, with the order of ``entries``."""

    def rows(self, samples: slice) -> Tensor:
        """Return the gradients of some samples, ``[V, n, *shape]``."""
        return self.entries.spread(self.values(samples))

    def write(self, samples: slice, out: Tensor) -> None:
        """Write the gradients of some samples to ``[V, n, *shape]``."""
        out.copy_(self.rows(samples).reshape(out.shape))

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "PerSampleGradient":
        """Return the same gradients in another dtype."""

    def sum_over_samples(self) -> Tensor:
        """Return the sum over samples, ``[V, *shape]``."""
        sums = (_flat(self.values(samples)).sum(1) for samples in self.slices())
        return self.entries.spread(total(sums).unsqueeze(1))[:, 0]

    def squared_norms(self) -> Tensor:
        """Return the squared norm of each gradient, ``[V, N]``."""
        # norms need no memory for squares
        norms = (
            torch.linalg.vector_norm(_flat(self.values(samples)), dim=2)
            for samples in self.slices()
        )
        return torch.cat(list(norms), dim=1).square()

    def sum_of_squares(self) -> Tensor:
        """Return the sum of all gradients' squared entries, ``[*shape]``."""
        total = sum(
            squared_sum(_flat(self.values(samples)).flatten(0, 1)) for samples in self.slices()
        )
        return self.entries.spread(total[None, None])[0, 0]

    def products(self, columns: "Tensor | LowRank") -> Tensor:
        """Return the inner products with K tensors ``[K, *shape]``, ``[V, N, K]``."""
        columns, form = dense(columns), self.rows
        if not self.entries.have_all:  # else columns, which are often more, keep their order
            columns, form = self.entries.read(columns), self.values
        columns = columns.reshape(len(columns), self.entries.view.size).T
        return torch.cat([_flat(form(some)) @ columns for some in self.slices()], dim=1)

    def prefers_inner_products(self, other: "PerSampleGradient") -> bool:
        """Return whether ``inner_products`` are cheaper than inner products of gradients."""
        return False

    def inner_products(self, other: "PerSampleGradient") -> Tensor:
        """Return all inner products with other gradients, ``[V, N, W, M]``."""
        raise NotImplementedError

    def projected(self, shape: tuple, terms: Sequence[Sides]) -> Tensor:
        """Return sums of products ``B^T G A``, ``[V, N, g, p, q]``, for pairs B and A as ``terms``.

        The matrices G have a ``KroneckerShape``, ``[g, O, I]``: some entries of the parameter.
        """
        groups, num_outputs, num_inputs, view, *_ = shape
        pieces = []
        for some in self.slices():
            rows = _flat(self.rows(some))
            matrices = view.of(rows.flatten(0, 1)).reshape(
                *rows.shape[:2], groups, num_outputs, num_inputs
            )
            pieces.append(total(_between(matrices, *sides) for sides in terms))
        return torch.cat(pieces, dim=1)

    def plus(self, others: Sequence["PerSampleGradient"]) -> "PerSampleGradient | None":
        """Return the sum with other gradients, ``None`` if it has to be written down."""
        return None

    def slices(self, size: int | None = None) -> Iterator[slice]:
        """Yield slices of samples whose gradients, of ``size`` numbers each, fit the memory."""
        size = self.num_vectors * self.num_entries if size is None else size
        return chunks(self.num_samples, size)


class DenseGradient(PerSampleGradient):
    """Gradients of some entries, by default all, that are written down, ``[V, N, *]``."""

    def __init__(self, values: Tensor, entries: Entries | None = None):
        self._values = values
        self.num_vectors, self.num_samples = values.shape[:2]
        self.entries = Entries.all(values.shape[2:]) if entries is None else entries

    def values(self, samples: slice) -> Tensor:
        """Return the gradients of some samples."""
        return self._values[:, samples]

    def to(self, dtype: torch.dtype) -> "DenseGradient":
        """Return the same gradients in another dtype."""
        return DenseGradient(self._values.to(dtype), self.entries)


class GradientSum(PerSampleGradient):
    """The sum of the gradients of several uses of a parameter."""

    def __init__(self, summands: list[PerSampleGradient]):
        self._summands = summands
        self.num_vectors, self.num_samples = summands[0].num_vectors, summands[0].num_samples
        self.entries = Entries.all(summands[0].shape)

    def values(self, samples: slice) -> Tensor:
        """Return the gradients of some samples."""
        return sum(summand.rows(samples) for summand in self._summands)

    def products(self, columns: "Tensor | LowRank") -> Tensor:
        """Return the inner products: the sum of those of the summands."""
        return total(summand.products(columns) for summand in self._summands)

    def projected(self, shape: tuple, terms: Sequence[Sides]) -> Tensor:
        """Return the projected gradients: the sum of those of the summands."""
        return total(summand.projected(shape, terms) for summand in self._summands)

    def to(self, dtype: torch.dtype) -> "GradientSum":
        """Return the same gradients in another dtype."""
        return GradientSum([summand.to(dtype) for summand in self._summands])


class PulledBackGradient(PerSampleGradient):
    """Gradients with respect to a parameter, if a layer uses a function of it.

    A pullback turns those of the function's value, ``[V, n, *value]``, into ``[V, n, *shape]``.
    """

    def __init__(
        self, inner: PerSampleGradient, pullback: Callable[[Tensor], Tensor], shape: Sequence[int]
    ):
        self.inner, self._pullback = inner, pullback
        self.num_vectors, self.num_samples = inner.num_vectors, inner.num_samples
        self.entries = Entries.all(shape)

    def values(self, samples: slice) -> Tensor:
        """Return the gradients of some samples."""
        return self._pullback(self.inner.rows(samples))

    def to(self, dtype: torch.dtype) -> "PulledBackGradient":
        """Return the same gradients in another dtype."""
        return PulledBackGradient(self.inner.to(dtype), self._pullback, self.shape)


def _between(matrices: Tensor, outputs: Tensor | None, inputs: Tensor | None) -> Tensor:
    """Return ``B^T G A``, see ``Sides``."""
    matrices = matrices if outputs is None else outputs.mT @ matrices
    return matrices if inputs is None else matrices @ inputs


def total(tensors: Iterable[Tensor]) -> Tensor:
    """Return a sum of tensors; of one, itself."""
    return reduce(torch.add, tensors)


def sum_of(gradients: list[PerSampleGradient]) -> PerSampleGradient:
    """Return the sum of several uses' gradients."""
    if len(gradients) == 1:
        return gradients[0]
    return gradients[0].plus(gradients[1:]) or GradientSum(gradients)


#: Some of a batch's samples, and their gradients by parameter.
Piece = tuple[slice, dict[str, PerSampleGradient]]


def chunks(num_samples: int, size: int) -> Iterator[slice]:
    """Yield slices of samples that fit the memory, with ``size`` numbers for each sample."""
    step = max(BYTES // max(4 * size, 1), 1)
    for start in range(0, max(num_samples, 1), step):
        yield slice(start, min(start + step, num_samples))


def squared_sum(vectors: Tensor) -> Tensor:
    """Return the sum of squares along the first axis of ``[n, m]``, with little memory."""
    at_once = _CACHED // max(vectors.shape[1], 1)
    if at_once > 8:
        return total(some.square().sum(0) for some in vectors.split(at_once))
    squares = vectors.new_zeros(vectors.shape[1])
    for vector in vectors:
        squares.addcmul_(vector, vector)
    return squares


def _flat(rows: Tensor) -> Tensor:
    return rows.reshape(*rows.shape[:2], prod(rows.shape[2:]))
