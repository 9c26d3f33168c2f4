"""What output gradients are multiplied with: inputs that are there, or that can be made."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Inputs(Protocol):
    """Inputs ``[N, S, G, I]``: a tensor, or something that makes those of some samples."""

    shape: Sequence[int]

    def __getitem__(self, samples: slice | Tensor) -> Tensor: ...

    def to(self, dtype: torch.dtype) -> "Inputs":
        """Return the same inputs in another dtype."""


#: Two functions that are adjoint to each other: from matrices ``[K, G, O, I]`` to their products
#: with all inputs, ``[K, N, S, G, O]``, and back.
InputMaps = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


class Shortcut(ABC):
    """Inputs ``[N, S, G, I]`` that need not be made for some purposes."""

    shape: Sequence[int]

    @abstractmethod
    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        """Make the inputs of some samples."""

    @abstractmethod
    def to(self, dtype: torch.dtype) -> "Shortcut":
        """Return the same inputs in another dtype."""

    @abstractmethod
    def select(self, samples: Tensor) -> "Shortcut":
        """Return those of some samples, in the given order."""

    @abstractmethod
    def is_faster(self, num_vectors: int, num_outputs: int) -> bool:
        """Return whether sums of outer products are faster by ``matrices`` than with inputs.

        Args:
            num_vectors: V.
            num_outputs: O, for each group.
        """

    @abstractmethod
    def matrices(self, samples: slice | Tensor, g: Tensor) -> Tensor:
        """Return sums of outer products with ``[1, n, S, G, O]``, ``[1, n, G, O, I]``."""

    @abstractmethod
    def maps(self) -> InputMaps:
        """Return the products with matrices, and their adjoint."""

    @abstractmethod
    def second_moment(self) -> Tensor:
        """Return the sum of all outer products of inputs with themselves, ``[G, I, I]``."""

    @abstractmethod
    def totals(self) -> Tensor:
        """Return the sum of each sample's inputs, ``[N, G, I]``."""


class Selected:
    """Inputs of some samples, in the given order."""

    def __init__(self, inputs: Inputs, samples: Tensor):
        self._inputs, self._samples = inputs, samples
        self.shape = (len(samples), *inputs.shape[1:])

    def to(self, dtype: torch.dtype) -> "Selected":
        """Return the same inputs in another dtype."""
        return Selected(self._inputs.to(dtype), self._samples)

    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        """Make the inputs of some of them."""
        return self._inputs[self._samples[samples]]


class SideBySide(Shortcut):
    """Inputs of the same samples at several uses' positions, one use after the other."""

    def __init__(self, uses: Sequence[Shortcut]):
        self._uses = uses
        self._lengths = [x.shape[1] for x in uses]
        self.shape = (uses[0].shape[0], sum(self._lengths), *uses[0].shape[2:])

    def __getitem__(self, samples: slice | Tensor) -> Tensor:
        """Make the inputs of some samples."""
        return torch.cat([x[samples] for x in self._uses], dim=1)

    def to(self, dtype: torch.dtype) -> "SideBySide":
        """Return the same inputs in another dtype."""
        return SideBySide([x.to(dtype) for x in self._uses])

    def select(self, samples: Tensor) -> "SideBySide":
        """Return those of some samples, in the given order."""
        return SideBySide([x.select(samples) for x in self._uses])

    def is_faster(self, num_vectors: int, num_outputs: int) -> bool:
        """Return whether all uses are faster without inputs."""
        return all(x.is_faster(num_vectors, num_outputs) for x in self._uses)

    def matrices(self, samples: slice | Tensor, g: Tensor) -> Tensor:
        """Return the sums of the uses' outer products."""
        each = zip(self._uses, g.split(self._lengths, dim=2), strict=True)
        return sum(x.matrices(samples, own) for x, own in each)

    def maps(self) -> InputMaps:
        """Return the products with all uses' inputs, and their adjoint."""
        times, sums = zip(*(x.maps() for x in self._uses), strict=True)

        def combine(g: Tensor) -> Tensor:
            each = zip(sums, g.split(self._lengths, dim=2), strict=True)
            return sum(function(own) for function, own in each)

        return lambda matrices: torch.cat([f(matrices) for f in times], dim=2), combine

    def second_moment(self) -> Tensor:
        """Return the sum of the uses' second moments."""
        return sum(x.second_moment() for x in self._uses)

    def totals(self) -> Tensor:
        """Return the sum of each sample's inputs, of all uses."""
        return sum(x.totals() for x in self._uses)


def side_by_side(uses: Sequence[Inputs]) -> Inputs:
    """Return the inputs at several uses' positions; those that need not be made are not."""
    if all(isinstance(x, Shortcut) for x in uses):
        return SideBySide(uses)
    return torch.cat([x[:] for x in uses], dim=1)


def maps_of(x: Tensor) -> InputMaps:
    """Return the products of matrices with inputs that are there, and their adjoint."""
    return (
        lambda matrices: torch.einsum("nsgi,kgoi->knsgo", x, matrices),
        lambda g: torch.einsum("knsgo,nsgi->kgoi", g, x),
    )
