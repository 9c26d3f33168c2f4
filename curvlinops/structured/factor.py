"""The factors of Kronecker products: dense or diagonal matrices, one for each of G groups."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from curvlinops.structured.linalg import (
    batches,
    check_finite,
    cholesky_inverse,
    eigh_batched,
    is_symmetric,
    power,
    shifted,
    signed_logarithm,
    symmetrized,
    tolerance,
    without_rounding,
)
from curvlinops.support.norms import double_dot, double_norm
from curvlinops.support.records import recorded


@recorded
class Dense:
    """One dense matrix for each of G groups.

    Args:
        tensor: The matrices, ``[G, n, m]``.
        symmetric: Whether they are symmetric, up to rounding. Default: look.
        psd: Whether they are positive semidefinite, as sums of squares are.
        eps: The rounding error of their entries, if these were computed in a smaller dtype.
        decomposition: Eigenvalues ``[G, n]``, with zeros for rounding errors, and eigenvectors
            ``[G, n, n]``, if known. The eigenvalues may have a larger dtype than the matrices.
    """

    def __init__(
        self,
        tensor: Tensor,
        symmetric: bool | None = None,
        psd: bool = False,
        eps: float = 0.0,
        decomposition: tuple[Tensor, Tensor] | None = None,
    ):
        self.tensor, self.psd = tensor, psd
        self.groups, self.rows, self.columns = tensor.shape
        self.symmetric = is_symmetric(tensor) if symmetric is None else symmetric
        self.eps = max(eps, torch.finfo(tensor.dtype).eps)
        self.decomposition = decomposition

    def _record(self) -> tuple:
        return self.tensor, self.symmetric, self.psd, self.eps, self.decomposition

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
        return double_norm(self.tensor, (-2, -1))

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, ``[G]``; zero and -inf if singular."""
        if self.symmetric:
            _, logarithm, valid = cholesky_inverse(self.tensor, 0.0, self.eps, self.psd)
            if bool(valid.all()):
                return torch.ones_like(logarithm), logarithm
            decompose([self], ["A factor"], [True])
            return tuple(x.to(logarithm) for x in signed_logarithm(self.eigenvalues()))
        lu, pivots, _ = torch.linalg.lu_factor_ex(self.tensor)
        diagonal = lu.diagonal(dim1=-2, dim2=-1)
        if self.rows:
            sizes = diagonal.abs()
            limit = tolerance(self.rows, self.eps) * sizes.amax(-1, keepdim=True)
            diagonal = diagonal.masked_fill(sizes <= limit, 0)
        places = torch.arange(1, self.rows + 1, device=pivots.device)
        swaps = (pivots != places).sum(-1)
        sign, logarithm = signed_logarithm(diagonal)
        return sign * (1 - 2 * (swaps % 2)), logarithm

    def inner(self, other: "Factor") -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        if isinstance(other, Diagonal):
            return other.inner(self)
        pairs = zip(*torch.broadcast_tensors(self.tensor, other.tensor), strict=True)
        return torch.stack([double_dot(one, two) for one, two in pairs])

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, ``[G, n]``; call ``decompose`` first.

        They have zeros for rounding errors, and perhaps a larger dtype than the matrices.
        """
        return self.decomposition[0]

    def eigenvectors(self) -> "Dense":
        """Return the eigenvectors as columns; call ``decompose`` first."""
        return Dense(self.decomposition[1], symmetric=False)

    def inverse(self, shift: float | Tensor, name: str) -> "Dense":
        """Return ``(A + shift I)^-1``; call ``decompose`` first.

        Args:
            shift: A number, or one for each group, ``[G, 1]``.
            name: What the factor is called in messages.
        """
        values = self.eigenvalues()
        limits = (tolerance(self.rows, eps) for eps in (self.eps, torch.finfo(values.dtype).eps))
        values = shifted(values, shift, *limits)
        return self._from_eigenvalues(power(values, -1.0, name, self.tensor.dtype))

    def _from_eigenvalues(self, values: Tensor) -> "Dense":
        """Return the symmetric matrices with the same eigenvectors and other eigenvalues."""
        vectors = self.decomposition[1]
        matrix = symmetrized(vectors * values.to(vectors).unsqueeze(-2) @ vectors.mT)
        return Dense(matrix, symmetric=True, psd=self.psd, decomposition=(values, vectors))

    def power(self, exponent: float, name: str) -> "Dense":
        """Return a power; if not a positive integer, ``decompose`` must have been called."""
        if self.tensor.numel() == 0:
            return self
        if exponent > 0 and exponent.is_integer():
            product = torch.linalg.matrix_power(self.tensor, int(exponent))
            return Dense(symmetrized(product), symmetric=True, psd=self.psd)
        values = power(self.eigenvalues(), exponent, name, self.tensor.dtype)
        return self._from_eigenvalues(values)

    def transposed(self) -> "Dense":
        """Return the transposed matrices."""
        return Dense(self.tensor.mT, self.symmetric, self.psd, self.eps)

    def scaled(self, scalar: float) -> "Dense":
        """Return a multiple."""
        known = self.decomposition and (scalar * self.decomposition[0], self.decomposition[1])
        psd = self.psd and scalar >= 0
        return Dense(scalar * self.tensor, self.symmetric, psd, self.eps, known)

    def shifted(self, shift: float | Tensor) -> "Dense":
        """Return the sum of a decomposed factor and multiples of the identity, ``[G, 1]``."""
        values, vectors = self.decomposition
        out = self.tensor.clone()
        out.diagonal(dim1=-2, dim2=-1).add_(shift)
        return Dense(out, self.symmetric, self.psd, self.eps, (values + shift, vectors))

    def plus(self, other: "Factor") -> "Dense":
        """Return the sum with another factor."""
        psd = self.psd and other.psd
        return Dense(self.tensor + other.dense(), psd=psd, eps=max(self.eps, other.eps))

    def squared(self) -> "Dense":
        """Return the squares of the entries."""
        return Dense(self.tensor**2, self.symmetric)

    def times(self, other: "Factor") -> "Dense":
        """Return the product with another factor."""
        eps = max(self.eps, other.eps)
        if isinstance(other, Diagonal):
            return Dense(self.tensor * other.entries.unsqueeze(-2), eps=eps)
        return Dense(self.tensor @ other.tensor, eps=eps)

    def with_scaled_rows(self, scales: Tensor) -> "Dense":
        """Return the product ``diag(scales) A`` with diagonals ``[G, n]``."""
        return Dense(scales.unsqueeze(-1) * self.tensor, eps=self.eps)

    def to(self, device: torch.device, dtype: torch.dtype) -> "Dense":
        """Return the factor elsewhere, or in another dtype."""
        known = None
        if self.decomposition and torch.finfo(dtype).eps >= torch.finfo(self.tensor.dtype).eps:
            values, vectors = self.decomposition
            known = values.to(device), vectors.to(device, dtype)
        return Dense(self.tensor.to(device, dtype), self.symmetric, self.psd, self.eps, known)


@recorded
class Diagonal:
    """One diagonal matrix for each of G groups. Its eigenvalues are its entries, without error.

    Args:
        entries: The diagonals, ``[G, n]``.
        is_unit: Whether this is the identity.
    """

    symmetric, eps = True, 0.0

    def __init__(self, entries: Tensor, is_unit: bool = False):
        self.entries, self.is_unit = entries, is_unit
        self.groups, self.rows = entries.shape
        self.columns = self.rows

    def _record(self) -> tuple:
        return self.entries, self.is_unit

    @property
    def psd(self) -> bool:
        """Whether no entry is negative."""
        return self.is_unit or not bool((self.entries < 0).any())

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
        return double_norm(self.entries, -1)

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, ``[G]`` each."""
        return signed_logarithm(self.entries)

    def inner(self, other: "Factor") -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        return (self.entries.double() * other.diagonal()).sum(-1)

    def eigenvalues(self) -> Tensor:
        """Return the eigenvalues, ``[G, n]``."""
        return self.entries

    def eigenvectors(self) -> "Diagonal":
        """Return the eigenvectors, the identity."""
        return unit(self.rows, self.entries)

    def power(self, exponent: float, name: str) -> "Diagonal":
        """Return a power."""
        return self if self.is_unit else Diagonal(power(self.entries, exponent, name))

    def transposed(self) -> "Diagonal":
        """Return the factor itself."""
        return self

    def scaled(self, scalar: float) -> "Diagonal":
        """Return a multiple."""
        return Diagonal(scalar * self.entries)

    def shifted(self, shift: float | Tensor) -> "Diagonal":
        """Return the sum with multiples of the identity, ``[G, 1]``."""
        return Diagonal((self.entries + shift).to(self.entries))

    def plus(self, other: "Factor") -> "Factor":
        """Return the sum with another factor."""
        return (
            Diagonal(self.entries + other.entries)
            if isinstance(other, Diagonal)
            else other.plus(self)
        )

    def squared(self) -> "Diagonal":
        """Return the squares of the entries."""
        return self if self.is_unit else Diagonal(self.entries**2)

    def times(self, other: "Factor") -> "Factor":
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


Factor = Dense | Diagonal


def unit(size: int, like: Tensor) -> Diagonal:
    """Return the identity as a factor, without memory of its size."""
    return Diagonal(like.new_ones(1, 1).expand(1, size), is_unit=True)


def tensor_of(factor: Factor) -> Tensor:
    """Return the numbers of which a factor consists, ``[G, m, n]`` or ``[G, n]``."""
    return factor.tensor if isinstance(factor, Dense) else factor.entries


# --- several factors together


def decompose(factors: Sequence[Factor], names: Sequence[str], accurate: Sequence[bool]) -> None:
    """Compute the eigendecompositions that factors do not have yet, equal sizes together.

    Args:
        factors: The factors.
        names: What they are called in messages.
        accurate: For each, whether small eigenvalues matter. They are computed in float64 then.
    """
    for dtype in (None, torch.float64):
        missing = {
            id(factor): (factor, name)
            for factor, name, wide in zip(factors, names, accurate, strict=True)
            if wide == (dtype is not None) and _lacks(factor, dtype)
        }
        dense = [factor for factor, _ in missing.values()]
        labels = [name for _, name in missing.values()]
        results = eigh_batched([factor.tensor for factor in dense], labels, dtype)
        for factor, (values, vectors) in zip(dense, results, strict=True):
            factor.decomposition = without_rounding(values, factor.eps, factor.psd), vectors


def _lacks(factor: Factor, dtype: torch.dtype | None) -> bool:
    if isinstance(factor, Diagonal):
        return False
    known = factor.decomposition
    return known is None or (dtype is not None and known[0].dtype != dtype)


def invert(
    factors: Sequence[Factor],
    shifts: Sequence[float | Tensor],
    names: Sequence[str],
    retry_double_precision: bool = True,
) -> list[Factor]:
    """Return the inverses of ``F + shift I`` for symmetric factors F, equal sizes together.

    Args:
        factors: The factors F.
        shifts: A number for each factor, or one for each of its groups, ``[G, 1]``.
        names: What the factors are called in messages.
        retry_double_precision: Whether float64 is used where float32 does not suffice.

    Raises:
        ValueError: If a factor is singular to working precision, or has NaN or infinite values.
    """
    out: list[Factor] = [None] * len(factors)  # type: ignore[list-item]
    dense: dict[tuple[float, bool], list[int]] = {}
    for i, (factor, shift) in enumerate(zip(factors, shifts, strict=True)):
        if isinstance(factor, Diagonal):
            entries = (factor.entries + shift).to(factor.entries)
            out[i] = Diagonal(power(entries, -1.0, names[i]))
        else:
            dense.setdefault((factor.eps, factor.psd), []).append(i)
    left = []
    for (eps, psd), some in dense.items():
        tensors = [factors[i].tensor for i in some]
        check_finite(tensors, [names[i] for i in some])
        for members, sizes, batch in batches(tensors):
            shift = torch.cat([_of_groups(shifts[some[i]], factors[some[i]]) for i in members])
            inverse, _, valid = cholesky_inverse(batch, shift, eps, psd, retry_double_precision)
            are_valid = [True] * len(sizes)
            if not bool(valid.all()):
                are_valid = [bool(part.all()) for part in valid.split(sizes)]
            for i, part, is_valid in zip(members, inverse.split(sizes), are_valid, strict=True):
                out[some[i]] = Dense(part, symmetric=True, psd=psd)
                left += [] if is_valid else [some[i]]
    accurate = [retry_double_precision] * len(left)
    decompose([factors[i] for i in left], [names[i] for i in left], accurate)
    for i in left:
        out[i] = factors[i].inverse(shifts[i], names[i])
    return out


def _of_groups(shift: float | Tensor, factor: Dense) -> Tensor:
    """Return one number for each group, ``[G]``."""
    shift = torch.as_tensor(shift, dtype=torch.float64, device=factor.tensor.device)
    return shift.flatten().expand(factor.groups)


def multiply(factors: Sequence[Factor], groups: int, X: Tensor) -> Tensor:
    """Multiply vectors by the block-diagonal of G Kronecker products.

    Args:
        factors: The factors.
        groups: G; factors may have one group for all.
        X: Vectors ``[K, G * m_1 * m_2 ...]``.

    Returns:
        Vectors ``[K, G * n_1 * n_2 ...]``.
    """
    K = X.shape[0]
    rows, columns = [f.rows for f in factors], [f.columns for f in factors]
    if groups > 1:
        X = X.reshape(K, groups, prod(columns)).transpose(0, 1)
    # from the last: that of B V A^T is a single matrix product for all columns
    for i in reversed(range(len(factors))):
        left, right = K * prod(columns[:i]), prod(rows[i + 1 :])
        X = factors[i].multiply(X, groups, left, right)
    if groups > 1:
        X = X.reshape(groups, K, prod(rows)).transpose(0, 1)
    return X.reshape(K, groups * prod(rows))
