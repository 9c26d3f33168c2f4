"""The factors of Kronecker products, and products with them along one axis."""

import torch
from torch import Tensor

from curvlinops.structured.decompositions import eigh_batched, inverse, is_symmetric, symmetrized
from curvlinops.structured.eigenvalues import (
    NO_FLOOR,
    SLACK,
    Floor,
    is_added,
    powers,
    rounding,
    signed_logarithm,
)
from curvlinops.structured.norms import deviation, wide_inner, wide_norm


class Dense:
    """One matrix for each of G groups.

    Args:
        tensor: The matrices, ``[G, n, m]``.
        symmetric: Whether they are symmetric. Default: look.
        floor: What no eigenvalue is below; zero for sums of outer products.
    """

    def __init__(self, tensor: Tensor, symmetric: bool | None = None, floor: Floor = NO_FLOOR):
        self.tensor, self.floor = tensor, floor
        self.groups, self.rows, self.columns = tensor.shape
        self.symmetric = is_symmetric(tensor) if symmetric is None else symmetric
        self.decomposition: tuple[Tensor, Tensor] | None = None

    def multiply(self, X: Tensor, groups: int, left: int, right: int) -> Tensor:
        """Multiply along an axis.

        Args:
            X: Numbers ``[groups, left, m, right]``, in any shape.
            groups: G, or one if all factors have one group.
            left: The extent of the axes before this.
            right: The extent of the axes after this.

        Returns:
            Numbers ``[groups, left, n, right]``, in some shape.
        """
        T = self.tensor
        if groups == 1 and (left == 1 or right == 1):  # faster than a batch of one matrix
            if left == 1:
                return T[0] @ X.reshape(self.columns, right)
            # products with a transposed matrix are slower
            return X.reshape(left, self.columns) @ (T[0] if self.symmetric else T[0].T)
        X = X.reshape(groups, left, self.columns, right)
        if self.rows == self.columns == 1:
            return X * T.unsqueeze(-1)
        if right == 1:
            return X.squeeze(3) @ (T if self.symmetric else T.mT)
        return T @ X.squeeze(1) if left == 1 else T.unsqueeze(1) @ X

    def dense(self) -> Tensor:
        """Return the matrices, ``[G, n, m]``."""
        return self.tensor

    def diagonal(self) -> Tensor:
        """Return the diagonals, ``[G, n]``."""
        return self.tensor.diagonal(dim1=-2, dim2=-1)

    def norm(self) -> Tensor:
        """Return the Frobenius norms, ``[G]``, in float64."""
        return wide_norm(self.tensor, (-2, -1))

    def deviation(self) -> tuple[Tensor, Tensor]:
        """Return the means a of the diagonals, and the norms of ``A - a I``, in float64."""
        return deviation(self.tensor)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, ``[G]`` each."""
        return tuple(torch.linalg.slogdet(self.tensor))

    def inner(self, other: "Dense | Diagonal") -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        if isinstance(other, Diagonal):
            return other.inner(self)
        return wide_inner(self.tensor, other.tensor)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, ``[G, n]``; ``decompose`` must have been called.

        Those that are below the floor by rounding are lifted to it.
        """
        return self.floor.lift(self.decomposition[0])

    def noise(self) -> Tensor:
        """Return by how much rounding is known to have moved eigenvalues, ``[G]``."""
        return self.floor.noise(self.decomposition[0])

    def rounding(self, slack: float) -> Tensor:
        """Return how far computed eigenvalues may be off, ``[G]``; see ``rounding``."""
        return rounding(self.decomposition[0], slack)

    def eigenvectors(self) -> "Dense":
        """Return the eigenvectors as columns."""
        return Dense(self.decomposition[1], symmetric=False)

    def inverse(self, name: str, retry_double_precision: bool) -> "Dense":
        """Return the inverses of symmetric matrices."""
        if self.floor.eps > torch.finfo(self.tensor.dtype).eps:
            # rounding may have made them indefinite, which only eigenvalues tell
            [self.decomposition] = eigh_batched([self.tensor], [name])
            return self.power(-1.0, name)
        return Dense(inverse(self.tensor, name, retry_double_precision), symmetric=True)

    def power(self, exponent: float, name: str) -> "Dense":
        """Return a power; if not a positive integer, ``decompose`` must have been called."""
        if self.tensor.numel() == 0:
            return self
        if exponent > 0 and exponent.is_integer():
            product = torch.linalg.matrix_power(self.tensor, int(exponent))
            return Dense(symmetrized(product), symmetric=True)
        values, vectors = self.eigenvalues(), self.decomposition[1]
        if exponent < 0 and bool((values.abs().amin(-1) <= rounding(values)).any()):
            raise ValueError(
                f"{name} is singular to working precision and has no power {exponent:g}. Add "
                "damping, as in A + damping * IdentityLinearOperator(A.space)."
            )
        if exponent < 0 and bool((values.abs().amin(-1) <= self.rounding(SLACK)).any()):
            wide = self.to(self.tensor.device, torch.float64)
            if wide.tensor.dtype != self.tensor.dtype:
                [wide.decomposition] = eigh_batched([wide.tensor], [name])
                return wide.power(exponent, name).to(self.tensor.device, self.tensor.dtype)
        values = powers(values, exponent, name)
        return Dense(symmetrized(vectors * values.unsqueeze(-2) @ vectors.mT), symmetric=True)

    def is_semidefinite(self) -> bool:
        """Return whether all matrices are positive semidefinite, up to rounding."""
        values = self.eigenvalues()
        return values.numel() == 0 or bool((values.amin(-1) >= -rounding(values)).all())

    def transposed(self) -> "Dense":
        """Return the transposed matrices."""
        return Dense(self.tensor.mT, self.symmetric, self.floor)

    def scaled(self, scalar: float) -> "Dense":
        """Return a multiple."""
        out = Dense(scalar * self.tensor, self.symmetric, self.floor.scaled(scalar))
        if self.decomposition is not None:
            values, vectors = self.decomposition
            out.decomposition = (scalar * values, vectors)
        return out

    def shifted(self, scalar: float) -> "Dense":
        """Return the sum with a multiple of the identity."""
        out = Dense(self.tensor.clone(), self.symmetric, self.floor.shifted(scalar))
        out.diagonal().add_(scalar)
        if self.decomposition is not None:
            values, vectors = self.decomposition
            out.decomposition = (values + scalar, vectors)
        return out

    def keeps(self, scalar: float) -> bool:
        """Return whether a number that is added to the diagonal is not lost in its rounding."""
        return is_added(self.diagonal(), scalar)

    def plus(self, other: "Dense | Diagonal") -> "Dense":
        """Return the sum with another factor."""
        return Dense(self.tensor + other.dense())

    def squared(self) -> "Dense":
        """Return the squares of the entries."""
        return Dense(self.tensor**2, self.symmetric)

    def times(self, other: "Dense | Diagonal") -> "Dense":
        """Return the product with another factor."""
        if isinstance(other, Diagonal):
            return Dense(self.tensor * other.entries.unsqueeze(-2))
        return Dense(self.tensor @ other.tensor)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Dense":
        """Return the factor elsewhere, or in another dtype."""
        return Dense(self.tensor.to(device, dtype), self.symmetric, self.floor.rounded(dtype))


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

    def inner(self, other: "Dense | Diagonal") -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        return (self.entries.double() * other.diagonal()).sum(-1)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, ``[G, n]``."""
        return self.entries

    def noise(self) -> Tensor:
        """Return zeros, ``[G]``: the eigenvalues are the entries."""
        return self.entries.new_zeros(self.groups)

    def rounding(self, slack: float) -> Tensor:
        """Return zeros, ``[G]``: the eigenvalues are the entries."""
        return self.noise()

    def eigenvectors(self) -> "Diagonal":
        """Return the eigenvectors, the identity."""
        return unit(self.rows, self.entries)

    def inverse(self, name: str, retry_double_precision: bool) -> "Diagonal":
        """Return the inverses."""
        return self.power(-1.0, name)

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

    def shifted(self, scalar: float) -> "Diagonal":
        """Return the sum with a multiple of the identity."""
        return Diagonal(self.entries + scalar)

    def keeps(self, scalar: float) -> bool:
        """Return that the sum with a multiple of the identity is accurate, as each entry is."""
        return True

    def plus(self, other: "Dense | Diagonal") -> "Dense | Diagonal":
        """Return the sum with another factor."""
        if isinstance(other, Dense):
            return other.plus(self)
        return Diagonal(self.entries + other.entries)

    def squared(self) -> "Diagonal":
        """Return the squares of the entries."""
        return self if self.is_unit else Diagonal(self.entries**2)

    def times(self, other: "Dense | Diagonal") -> "Dense | Diagonal":
        """Return the product with another factor."""
        if self.is_unit:
            return other
        if isinstance(other, Diagonal):
            return Diagonal(self.entries * other.entries)
        return Dense(self.entries.unsqueeze(-1) * other.tensor)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Diagonal":
        """Return the factor elsewhere, or in another dtype."""
        return Diagonal(self.entries.to(device, dtype), self.is_unit)


Factor = Dense | Diagonal


def unit(size: int, like: Tensor) -> Diagonal:
    """Return the identity as a factor, without memory of its size."""
    return Diagonal(like.new_ones(1, 1).expand(1, size), is_unit=True)
