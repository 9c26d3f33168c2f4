"""Factors of Kronecker products: a dense or diagonal matrix for each of G groups."""

from collections.abc import Mapping, Sequence
from functools import cached_property, reduce
from operator import mul
from typing import Any

import torch
from torch import Tensor

from curvlinops.structured.linalg import (
    are_large,
    cholesky_inverse,
    eigenpairs,
    has_scales,
    is_symmetric,
    power,
    rounding_errors,
    shifted,
    signed_logarithm,
    symmetrized,
    tolerance,
    without_rounding,
)
from curvlinops.support.files import recorded
from curvlinops.support.norms import double_dot, double_norm

#: Eigenvalues are known if they are so many times larger than their rounding errors.
_GAP = 10


@recorded
class Factor:
    """A matrix for each of G groups. All are dense, or all are diagonal.

    The eigendecomposition of symmetric matrices is computed at its first use, and kept. Eigenvalues
    ``[G, n]`` that are rounding errors are zero; their dtype may be larger. They are NaN for
    matrices that are not decomposed.
    """

    def __init__(
        self,
        tensor: Tensor,  # dense matrices [G, n, m], or the diagonals [G, n] of diagonal matrices
        symmetric: bool | None = None,  # up to rounding; by default, look
        psd: bool = False,  # positive semidefinite, as sums of squares are
        eps: float = 0.0,  # the rounding error of entries that were computed in a smaller dtype
        decomposition: tuple[Tensor, Tensor] | None = None,  # eigenvectors are [G, n, n]
        is_identity: bool = False,
        ranks: Tensor | None = None,  # [G], how large they can be: how many squares were summed
    ):
        self.tensor, self.psd, self.is_identity, self.ranks = tensor, psd, is_identity, ranks
        self.decomposition = decomposition
        self._parts: list[Factor] | None = None
        self.groups, self.rows, self.columns = *tensor.shape[:2], tensor.shape[-1]
        self.is_diagonal = tensor.ndim == 2
        if symmetric is None:
            symmetric = self.is_diagonal or is_symmetric(tensor)
        self.symmetric = symmetric
        self.eps = 0.0 if self.is_diagonal else max(eps, torch.finfo(tensor.dtype).eps)

    def _record(self) -> tuple:
        known = self.decomposition and self._eigenpairs(False, "A factor")  # of all
        return self.tensor, self.symmetric, self.psd, self.eps, known, self.is_identity

    def multiply(self, X: Tensor, groups: int, left: int, right: int) -> Tensor:
        """Multiply ``[groups, left, m, right]`` to ``[groups, left, n, right]``, in any shapes.

        There are G groups, or one if all factors have one group.
        """
        if self.is_identity:
            return X
        T = self.tensor
        if self.is_diagonal:
            return X.reshape(groups, left, self.rows, right) * T[:, None, :, None]
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

    def parts(self, number: int) -> "list[Factor]":
        """Return so many factors with equal shares of the groups; of one group, all the same."""
        if self.groups == 1:
            return [self] * number
        if self._parts is None:  # operators that share a factor share its parts
            tensors = self.tensor, *(self.decomposition or ())
            chunks = zip(*(x.tensor_split(number) for x in tensors), strict=True)
            options = self.symmetric, self.psd, self.eps
            self._parts = [
                Factor(x, *options, tuple(known) or None, self.is_identity) for x, *known in chunks
            ]
        return self._parts

    # --- quantities

    def dense(self) -> Tensor:
        """Return the matrices, ``[G, n, m]``."""
        return self.tensor.diag_embed() if self.is_diagonal else self.tensor

    def diagonal(self) -> Tensor:
        """Return the diagonals, ``[G, n]``."""
        return self.tensor if self.is_diagonal else self.tensor.diagonal(dim1=-2, dim2=-1)

    def scales(self, vectors: Tensor | None) -> Tensor:
        """Return the scales of the entries along eigenvectors v, ``v^T D v``, ``[G, n]``.

        D is the diagonal. Vectors that were computed in float32 know its largest entry only. By
        default they are those of the standard basis.
        """
        sizes = self.diagonal().abs()
        if vectors is None:
            return sizes
        if not self.is_diagonal and not self._has_scales:
            return sizes.amax(-1, keepdim=True).expand_as(sizes)
        return (sizes.unsqueeze(-2) @ vectors.square()).squeeze(-2)

    @cached_property
    def _has_scales(self) -> bool:
        return has_scales(self.tensor)

    @cached_property
    def norm(self) -> Tensor:
        """The Frobenius norms, ``[G]``, in float64."""
        return double_norm(self.tensor, range(1, self.tensor.ndim))

    def slogdet(self) -> tuple[Tensor, Tensor]:
        """Return signs and logarithms of the determinants, ``[G]``; zero and -inf if singular."""
        if self.is_diagonal:
            return signed_logarithm(self.tensor)
        if not self.symmetric:
            return self._slogdet_by_lu()
        _, roots, left = cholesky_inverse(self.tensor, 0.0, self.eps)
        logarithm = 2 * roots.log().sum(-1)
        sign = torch.ones_like(logarithm)
        if bool(left.any()):
            values, _ = self._eigenpairs(True, "A factor", left)
            sign[left], logarithm[left] = (x.to(sign) for x in signed_logarithm(values))
        return sign, logarithm

    def _slogdet_by_lu(self) -> tuple[Tensor, Tensor]:
        matrix, scales = self.tensor, []
        for axis in (-1, -2) if self.rows else ():  # pivots are compared in the scales of rows
            sizes = matrix.abs().amax(axis, keepdim=True)
            sizes = sizes.masked_fill(sizes == 0, 1.0)
            matrix = matrix / sizes
            scales.append(sizes.flatten(1).log().sum(-1))
        lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)
        diagonal = lu.diagonal(dim1=-2, dim2=-1)
        diagonal = diagonal.masked_fill(diagonal.abs() <= tolerance(self.rows, self.eps), 0)
        swaps = (pivots != torch.arange(1, self.rows + 1, device=pivots.device)).sum(-1)
        sign, logarithm = signed_logarithm(diagonal)
        return sign * (1 - 2 * (swaps % 2)), sum(scales, logarithm)

    def inner(self, other: "Factor") -> Tensor:
        """Return the sums of products of entries with another factor's, ``[G]``, in float64."""
        if self.is_diagonal or other.is_diagonal:
            return (self.diagonal().double() * other.diagonal()).sum(-1)
        pairs = zip(*torch.broadcast_tensors(self.tensor, other.tensor), strict=True)
        return torch.stack([double_dot(left, right) for left, right in pairs])

    # --- functions of symmetric matrices

    def is_open(self, in_float64: bool = False) -> Tensor | bool:
        """Return which dense matrices ``eigh`` has to decompose, ``[G]``, or whether it has to."""
        known = self.decomposition
        if known is None or (in_float64 and known[0].dtype != torch.float64):
            return True
        return known[0].isnan().any(-1)

    def eigh(self, in_float64: bool = False, name: str = "A factor") -> tuple[Tensor, "Factor"]:
        """Return the eigenvalues, ``[G, n]``, and the eigenvectors as columns.

        Eigenvalues that are rounding errors are zero. Those of diagonal matrices are their entries.
        If small ones matter, they are computed ``in_float64``.
        """
        if self.is_diagonal:
            return self.tensor, identity(self.rows, self.tensor, self.groups)
        values, vectors = self._eigenpairs(in_float64, name)
        return values, Factor(vectors, symmetric=False)

    def _eigenpairs(
        self, in_float64: bool, name: str, which: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return eigenvalues and eigenvectors of all matrices, or of those in a mask, ``[G]``."""
        in_float64 = in_float64 or self.tensor.dtype == torch.float64 or self._has_scales
        left, found = self.is_open(in_float64), self.decomposition
        if left is True:  # none is known
            left, found = which, None
        elif which is not None:
            left = left & which
        if found is None or bool(left.any()):
            matrices = self.tensor if left is None or bool(left.all()) else self.tensor[left]
            dtype = torch.float64 if in_float64 else matrices.dtype
            values, vectors = eigenpairs(matrices, name, found[0].dtype if found else dtype)
            if not are_large(values, self.eps, self.psd):
                errors = rounding_errors(matrices, vectors, self.eps, self.psd)
                values = without_rounding(values, errors, self.psd)
            self.decomposition = found = _with_open((values, vectors), left, found)
        values, vectors = found
        return (values, vectors) if which is None else (values[which], vectors[which])

    def inverse(self, shift: float | Tensor, name: str, accurate: bool = True) -> "Factor":
        """Return ``(A + shift I)^-1`` of symmetric matrices, with a shift for each, ``[G, 1]``.

        If it is to be ``accurate``, float64 is used where float32 does not suffice.
        """
        if self.is_diagonal:
            return self.shifted(shift).power(-1.0, name)
        shifts = shift.flatten() if isinstance(shift, Tensor) else shift
        inverses, _, left = cholesky_inverse(self.tensor, shifts, self.eps, accurate, self.ranks)
        if not bool(left.any()):
            return Factor(inverses, symmetric=True, psd=self.psd)
        if is_whole := bool(left.all()):
            del inverses  # the decomposition takes its memory
        values, vectors = self._eigenpairs(accurate, name, left)
        limits = (tolerance(self.rows, eps) for eps in (self.eps, torch.finfo(values.dtype).eps))
        if isinstance(shift, Tensor):
            shift = shift.expand(self.groups, 1)[left]
        values = power(shifted(values, shift, *limits), -1.0, name, self.tensor.dtype)
        some = self._from_eigenpairs(values, vectors)
        if is_whole:
            return some
        inverses[left] = some.tensor
        pairs = _with_open((values, vectors), left, None)
        return Factor(inverses, symmetric=True, psd=some.psd, decomposition=pairs)

    def undecided(self, shift: float | Tensor, others: "Sequence[Factor]" = ()) -> Tensor | None:
        """Return from which shift on the factor decides ``(A (x) others + shift I)^-1``, ``[G]``.

        Zero where it does already, ``None`` if all do. Smaller shifts are below rounding errors, so
        that eigenvalues decide that are lost in these, or hardly known. That is no error if A has a
        null space. It has one if it has fewer rows than columns, see ``ranks``. If their number is
        not known, a gap above the rounding errors tells.
        """
        if self.decomposition is None or self.decomposition[0].dtype != torch.float64:
            return None
        largest = reduce(mul, (other.norm for other in others), self.norm).unsqueeze(-1)
        if bool((tolerance(self.rows, self.eps) * largest <= shift).all()):
            return None
        values, vectors = self.decomposition
        errors = rounding_errors(self.tensor, vectors, self.eps, self.psd)
        is_small = values.abs() < _GAP * errors
        if self.ranks is None:
            is_full = (is_small & (values != 0)).any(-1)
        else:
            is_full = self.ranks >= self.rows
        scales = (other.eigh()[0].amax(-1, keepdim=True) for other in others)
        errors = reduce(mul, scales, errors)
        is_lost = is_small & (errors > shift) & is_full.unsqueeze(-1)
        return errors.masked_fill(~is_lost, 0.0).amax(-1)

    def _from_eigenpairs(self, values: Tensor, vectors: Tensor) -> "Factor":
        """Return the matrices with given eigenvalues and orthogonal eigenvectors."""
        matrix = symmetrized(vectors * values.to(vectors).unsqueeze(-2) @ vectors.mT)
        psd = self.psd and not bool((values < 0).any())
        return Factor(matrix, symmetric=True, psd=psd, decomposition=(values, vectors))

    def power(self, exponent: float, name: str) -> "Factor":
        """Return a power; errors call the factor by its name."""
        if self.is_identity or self.tensor.numel() == 0:
            return self
        if exponent == 0:
            return identity(self.rows, self.tensor, self.groups)
        if self.is_diagonal:
            return Factor(power(self.tensor, exponent, name), psd=self.psd)
        if exponent > 0 and exponent.is_integer():
            product = torch.linalg.matrix_power(self.tensor, int(exponent))
            return Factor(symmetrized(product), symmetric=True, psd=self.psd)
        values, vectors = self.eigh(in_float64=True, name=name)
        values = power(values, exponent, name, self.tensor.dtype)
        return self._from_eigenpairs(values, vectors.tensor)

    # --- algebra

    def transposed(self) -> "Factor":
        """Return the transposed matrices."""
        if self.symmetric:
            return self
        return Factor(self.tensor.mT, symmetric=False, eps=self.eps)

    def scaled(self, scalar: float) -> "Factor":
        """Return a multiple."""
        known = self.decomposition and (scalar * self.decomposition[0], self.decomposition[1])
        psd = self.psd and scalar >= 0
        return Factor(scalar * self.tensor, self.symmetric, psd, self.eps, known)

    def shifted(
        self, shift: float | Tensor, name: str = "A factor", in_float64: bool = True
    ) -> "Factor":
        """Return the sum with non-negative multiples of the identity, ``[G, 1]``.

        Dense matrices are decomposed, see ``eigh``. The eigenvalues of the sum keep a shift that is
        lost in the rounding errors of its entries.
        """
        if self.is_diagonal:
            return Factor((self.tensor + shift).to(self.tensor), psd=self.psd)
        values, vectors = self.eigh(in_float64, name)
        out = self.tensor.clone()
        out.diagonal(dim1=-2, dim2=-1).add_(shift)
        return Factor(out, self.symmetric, self.psd, self.eps, (values + shift, vectors.tensor))

    def plus(self, other: "Factor") -> "Factor":
        """Return the sum with another factor."""
        psd = self.psd and other.psd
        if self.is_diagonal and other.is_diagonal:
            return Factor(self.tensor + other.tensor, psd=psd)
        return Factor(self.dense() + other.dense(), psd=psd, eps=max(self.eps, other.eps))

    def squared(self) -> "Factor":
        """Return the squares of the entries."""
        return self if self.is_identity else Factor(self.tensor**2, self.symmetric)

    def times(self, other: "Factor") -> "Factor":
        """Return the product with another factor."""
        if self.is_identity and self.groups <= other.groups:
            return other
        if other.is_identity and other.groups <= self.groups:
            return self
        left, right = self.tensor, other.tensor
        if self.is_diagonal and not other.is_diagonal:
            left = left.unsqueeze(-1)
        if other.is_diagonal and not self.is_diagonal:
            right = right.unsqueeze(-2)
        is_dense = not (self.is_diagonal or other.is_diagonal)
        return Factor(left @ right if is_dense else left * right, eps=max(self.eps, other.eps))

    def to(self, device: torch.device, dtype: torch.dtype) -> "Factor":
        """Return the factor on another device, or in another dtype."""
        if self.is_identity:
            return identity(self.rows, self.tensor[:1, :1].to(device, dtype), self.groups)
        known = None
        if self.decomposition and torch.finfo(dtype).eps >= torch.finfo(self.tensor.dtype).eps:
            values, vectors = self.decomposition
            known = values.to(device), vectors.to(device, dtype)
        return Factor(self.tensor.to(device, dtype), self.symmetric, self.psd, self.eps, known)


def small_inverses(
    shifted: Mapping[Any, tuple[Factor, float | Tensor]], accurate: bool
) -> dict[Any, Factor]:
    """Return ``Factor.inverse`` of some pairs, of small dense factors that need no ``eigh``.

    Factors of similar sizes are padded by the identity, and decomposed together. All have the same
    ``eps``.
    """
    out: dict[Any, Factor] = {}
    for low, high in ((0, 32), (32, 64)):  # padded, a matrix takes eight times as long at most
        some = {
            key: pair
            for key, pair in shifted.items()
            if not pair[0].is_diagonal and low < pair[0].rows <= high
        }
        if len(some) < 2:
            continue
        factors, shifts = zip(*some.values(), strict=True)
        sizes, shift = [factor.groups for factor in factors], shifts[0]
        like, size = factors[0].tensor, max(factor.rows for factor in factors)
        batch = like.new_zeros(sum(sizes), size, size)
        batch.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        for factor, rows in zip(factors, batch.split(sizes), strict=True):
            rows[:, : factor.rows, : factor.rows] = factor.tensor
        if isinstance(shift, Tensor) or set(shifts) != {shift}:
            each = (torch.as_tensor(x, dtype=torch.float64, device=batch.device) for x in shifts)
            shift = torch.cat([x.flatten().expand(n) for x, n in zip(each, sizes, strict=True)])
        inverses, _, left = cholesky_inverse(batch, shift, factors[0].eps, accurate)
        failed, stop = left.tolist(), 0
        for key, factor, inverse in zip(some, factors, inverses.split(sizes), strict=True):
            start, stop = stop, stop + factor.groups
            if not any(failed[start:stop]):
                inverse = inverse[:, : factor.rows, : factor.rows]
                out[key] = Factor(inverse, symmetric=True, psd=factor.psd)
    return out


def _with_open(
    pairs: tuple[Tensor, Tensor], which: Tensor | None, known: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return eigenpairs of matrices in a mask ``[G]`` beside known ones; others are NaN."""
    if which is None or bool(which.all()):
        return pairs
    index = which.nonzero().squeeze(1)
    known = known or tuple(x.new_full((len(which), *x.shape[1:]), torch.nan) for x in pairs)
    values, vectors = (old.index_copy(0, index, x) for old, x in zip(known, pairs, strict=True))
    return values, vectors


def identity(size: int, like: Tensor, groups: int = 1) -> Factor:
    """Return the identity as a factor, without memory of its size."""
    return Factor(like.new_ones(1, 1).expand(groups, size), psd=True, is_identity=True)


def name_of_factor(index: int) -> str:
    """Return how messages call a factor."""
    return f"Factor {index} of the Kronecker product"
