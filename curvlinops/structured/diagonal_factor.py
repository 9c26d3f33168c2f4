"""Diagonal factors of Kronecker products."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.structured.eigenvalues import powers, rounding, signed_logarithm
from curvlinops.structured.norms import wide_norm


@recorded
class Diagonal:
    """One diagonal matrix for each of G groups.

    Args:
        entries: The diagonals, ``[G, n]``.
        is_unit: Whether this is the identity.
    """

    symmetric = True

    def __init__(self, entries: Tensor, is_unit: bool = False):
        self.entries, self.is_unit = entries, is_unit
        self.groups, self.rows = entries.shape
        self.columns = self.rows

    def _record(self) -> tuple:
        return self.entries, self.is_unit

    def multiply(self, X: Tensor, groups: int, left: int, right: int) -> Tensor:
        """Multiply along an axis, see ``Dense.multiply``."""
        if self.is_unit:
            return X
        return X.reshape(groups, left, self.rows, right) * self.entries[:, None, :, None]

    def dense(self) -> Tensor:
        """Return the matrices, ``[G, n, n]``."""
        return self.entries.diag_embed()

    def diagonal(self) -> Tensor:
        """Return the diagonals, ``[G, n]``."""
        return self.entries

    def norm(self) -> Tensor:
        """Return the Frobenius norms, ``[G]``, in float64."""
        return wide_norm(self.entries, -1)

    def deviation(self) -> tuple[Tensor, Tensor]:
        """Return the means a of the entries, and the norms of the differences, in float64."""
        mean = self.entries.double().mean(-1)
        return mean, wide_norm(self.entries - mean.unsqueeze(-1), -1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, ``[G]`` each."""
        return signed_logarithm(self.entries)

    def inner(self, other: Any) -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        return (self.entries.double() * other.diagonal()).sum(-1)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, ``[G, n]``."""
        return self.entries

    def noise(self) -> Tensor:
        """Return zeros, ``[G]``: the eigenvalues are the entries."""
        return self.entries.new_zeros(self.groups)

    def vanishing(self) -> Tensor:
        """Return zeros, ``[G]``: the eigenvalues are the entries."""
        return self.noise()

    def rounding(self, slack: float) -> Tensor:
        """Return zeros, ``[G]``: the eigenvalues are the entries."""
        return self.noise()

    def eigenvectors(self) -> "Diagonal":
        """Return the eigenvectors, the identity."""
        return unit(self.rows, self.entries)

    def power(self, exponent: float, name: str) -> "Diagonal":
        """Return a power."""
        return self if self.is_unit else Diagonal(powers(self.entries, exponent, name))

    def is_semidefinite(self) -> bool:
        """Return whether all entries are non-negative, up to rounding."""
        return self.rows == 0 or bool((self.entries.amin(-1) >= -rounding(self.entries)).all())

    def transposed(self) -> "Diagonal":
        """Return the factor itself."""
        return self

    def scaled(self, scalar: float) -> "Diagonal":
        """Return a multiple."""
        return Diagonal(scalar * self.entries)

    def shifted(self, shift: float | Tensor) -> "Diagonal":
        """Return the sum with a multiple of the identity, or with diagonals ``[G, n]``."""
        return Diagonal((self.entries + shift).to(self.entries))

    def keeps(self, shift: float | Tensor) -> bool:
        """Return that such a sum is accurate, as each entry is."""
        return True

    def plus(self, other: Any) -> Any:
        """Return the sum with another factor."""
        if isinstance(other, Diagonal):
            return Diagonal(self.entries + other.entries)
        return other.plus(self)

    def squared(self) -> "Diagonal":
        """Return the squares of the entries."""
        return self if self.is_unit else Diagonal(self.entries**2)

    def times(self, other: Any) -> Any:
        """Return the product with another factor."""
        if self.is_unit:
            return other
        if isinstance(other, Diagonal):
            return Diagonal(self.entries * other.entries)
        return other.with_scaled_rows(self.entries)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Diagonal":
        """Return the factor elsewhere, or in another dtype."""
        if self.is_unit:
            return unit(self.rows, self.entries[:, :1].to(device, dtype))
        return Diagonal(self.entries.to(device, dtype))


def unit(size: int, like: Tensor) -> Diagonal:
    """Return the identity as a factor, without memory of its size."""
    return Diagonal(like.new_ones(1, 1).expand(1, size), is_unit=True)
