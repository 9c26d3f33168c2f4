"""The factors of Kronecker products, and products with them along one axis."""

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.structured.decompositions import eigh_batched, is_symmetric, symmetrized
from curvlinops.structured.diagonal_factor import Diagonal
from curvlinops.structured.eigenvalues import (
    SLACK,
    Floor,
    is_added,
    powers,
    rounding,
    signed_logarithm,
    singular,
)
from curvlinops.structured.norms import deviation, wide_inner, wide_norm


@recorded
class Dense:
    """One matrix for each of G groups.

    Args:
        tensor: The matrices, ``[G, n, m]``.
        symmetric: Whether they are symmetric, up to rounding. Default: look.
        floor: What no eigenvalue is below; zero for sums of outer products.
        decomposition: Eigenvalues ``[G, n]`` and eigenvectors ``[G, n, n]``, if known.
    """

    def __init__(
        self,
        tensor: Tensor,
        symmetric: bool | None = None,
        floor: Floor | None = None,
        decomposition: tuple[Tensor, Tensor] | None = None,
    ):
        self.tensor, self.floor = tensor, floor or Floor()
        self.groups, self.rows, self.columns = tensor.shape
        self.symmetric = is_symmetric(tensor) if symmetric is None else symmetric
        self.decomposition = decomposition
        self._lifted: Tensor | None = None

    def _record(self) -> tuple:
        return self.tensor, self.symmetric, self.floor, self.decomposition

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
        """Return signs and logarithms of the determinants, ``[G]`` each.

        Those of symmetric matrices that are singular to working precision are zero.
        """
        lu, pivots, _ = torch.linalg.lu_factor_ex(self.tensor)
        diagonal = lu.diagonal(dim1=-2, dim2=-1)
        if self.symmetric and self.tensor.numel():
            sizes = diagonal.abs()
            smallest, largest = sizes.amin(-1), sizes.amax(-1)
            if bool((smallest <= SLACK * torch.finfo(sizes.dtype).eps * largest).any()):
                return self._slogdet_of_eigenvalues()
        places = torch.arange(1, self.rows + 1, device=pivots.device)
        swaps = (pivots != places).sum(-1)
        sign, logarithm = signed_logarithm(diagonal)
        return sign * (1 - 2 * (swaps % 2)), logarithm

    def _slogdet_of_eigenvalues(self) -> tuple[Tensor, Tensor]:
        wide = self.to(self.tensor.device, torch.float64)
        [wide.decomposition] = eigh_batched([wide.tensor], ["A factor"])
        values = wide.eigenvalues()
        zero = values.abs() <= wide.rounding(0.0).maximum(wide.vanishing()).unsqueeze(-1)
        sign, logarithm = signed_logarithm(values.masked_fill(zero, 0))
        return sign.to(self.tensor), logarithm.to(self.tensor)

    def inner(self, other: "Factor") -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        if isinstance(other, Diagonal):
            return other.inner(self)
        return wide_inner(self.tensor, other.tensor)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, ``[G, n]``, lifted to the floor; call ``decompose`` first."""
        if self._lifted is None:
            self._lifted = self.floor.lift(self.decomposition[0])
        return self._lifted

    def noise(self) -> Tensor:
        """Return by how much rounding is known to have moved eigenvalues, ``[G]``."""
        return self.floor.noise(self.decomposition[0])

    def vanishing(self) -> Tensor:
        """Return up to which size eigenvalues are zero, as far as is known, ``[G]``."""
        values, noise, floor = self.decomposition[0], 10 * self.noise(), self.floor
        if values.numel() == 0 or isinstance(floor.value, Tensor) or floor.value != 0:
            return noise
        # those of sums have the rounding errors of these
        return noise.maximum(max(10, self.rows**0.5) * floor.eps * values.abs().amax(-1))

    def rounding(self, slack: float) -> Tensor:
        """Return how far computed eigenvalues may be off, ``[G]``; see ``rounding``."""
        return rounding(self.decomposition[0], slack)

    def eigenvectors(self) -> "Dense":
        """Return the eigenvectors as columns."""
        return Dense(self.decomposition[1], symmetric=False)

    def is_rounded(self) -> bool:
        """Return whether rounding of entries, which are wide by now, may have made it indefinite.

        Only eigenvalues tell.
        """
        return self.floor.eps > torch.finfo(self.tensor.dtype).eps

    def power(self, exponent: float, name: str) -> "Dense":
        """Return a power; if not a positive integer, ``decompose`` must have been called."""
        if self.tensor.numel() == 0:
            return self
        if exponent > 0 and exponent.is_integer():
            product = torch.linalg.matrix_power(self.tensor, int(exponent))
            return Dense(symmetrized(product), symmetric=True)
        values, vectors = self.eigenvalues(), self.decomposition[1]
        lost = values.abs().amin(-1) <= rounding(values)
        if exponent < 0 and bool(lost.any()):
            raise singular(name, values[lost], self.floor.eps)
        if exponent < 0 and bool((values.abs().amin(-1) <= self.rounding(SLACK)).any()):
            wide = self.to(self.tensor.device, torch.float64)
            if wide.tensor.dtype != self.tensor.dtype:
                [wide.decomposition] = eigh_batched([wide.tensor], [name])
                return wide.power(exponent, name).to(self.tensor.device, self.tensor.dtype)
        values = powers(values, exponent, name)
        matrix = symmetrized(vectors * values.unsqueeze(-2) @ vectors.mT)
        # more accurate than its own decomposition
        return Dense(matrix, symmetric=True, decomposition=(values, vectors))

    def is_semidefinite(self) -> bool:
        """Return whether all matrices are positive semidefinite, up to rounding."""
        values = self.eigenvalues()
        return values.numel() == 0 or bool((values.amin(-1) >= -rounding(values)).all())

    def transposed(self) -> "Dense":
        """Return the transposed matrices."""
        return Dense(self.tensor.mT, self.symmetric, self.floor)

    def scaled(self, scalar: float) -> "Dense":
        """Return a multiple."""
        known = self.decomposition and (scalar * self.decomposition[0], self.decomposition[1])
        return Dense(scalar * self.tensor, self.symmetric, self.floor.scaled(scalar), known)

    def shifted(self, shift: float | Tensor) -> "Dense":
        """Return the sum with a multiple of the identity, or with diagonals ``[G, n]``."""
        known, least = None, shift
        if isinstance(shift, Tensor):
            least = shift.amin(-1, keepdim=True)
        elif self.decomposition:
            known = self.decomposition[0] + shift, self.decomposition[1]
        out = Dense(self.tensor.clone(), self.symmetric, self.floor.shifted(least), known)
        out.diagonal().add_(shift)
        return out

    def keeps(self, shift: float | Tensor) -> bool:
        """Return whether what ``shifted`` adds is not lost in the rounding of the diagonal."""
        return is_added(self.diagonal(), shift)

    def plus(self, other: "Factor") -> "Dense":
        """Return the sum with another factor."""
        return Dense(self.tensor + other.dense())

    def squared(self) -> "Dense":
        """Return the squares of the entries."""
        return Dense(self.tensor**2, self.symmetric)

    def times(self, other: "Factor") -> "Dense":
        """Return the product with another factor."""
        if isinstance(other, Diagonal):
            return Dense(self.tensor * other.entries.unsqueeze(-2))
        return Dense(self.tensor @ other.tensor)

    def with_scaled_rows(self, scales: Tensor) -> "Dense":
        """Return the product ``diag(scales) A`` with diagonals ``[G, n]``."""
        return Dense(scales.unsqueeze(-1) * self.tensor)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Dense":
        """Return the factor elsewhere, or in another dtype."""
        known = None
        if self.decomposition and torch.finfo(dtype).eps >= torch.finfo(self.tensor.dtype).eps:
            known = tuple(part.to(device, dtype) for part in self.decomposition)
        tensor = self.tensor.to(device, dtype)
        return Dense(tensor, self.symmetric, self.floor.rounded(dtype), known)


Factor = Dense | Diagonal


def tensor_of(factor: Factor) -> Tensor:
    """Return the numbers of which a factor consists, ``[G, m, n]`` or ``[G, n]``."""
    return factor.tensor if isinstance(factor, Dense) else factor.entries
