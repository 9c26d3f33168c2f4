"""Sums of Kronecker products, and the inverses of sums of two."""

from collections.abc import Sequence
from functools import cached_property, reduce
from math import prod

import torch
from einops import einsum, rearrange
from torch import Tensor

from curvlinops.linear_operator.space import Columns
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import Factor, name_of_factor
from curvlinops.structured.linalg import (
    eigenpairs,
    power,
    rounding_errors,
    shifted,
    signed_logarithm,
    tolerance,
    without_rounding,
)
from curvlinops.structured.shifted import ShiftedLinearOperator
from curvlinops.support.norms import double_norm
from curvlinops.support.serialization import recorded

# Terms are Kronecker products; their class is in kronecker.py, which imports this file.

#: Sums with at most so many rows are written as a matrix for their inverse. That takes no time, and
#: a matrix can do more.
_SMALL = 512


@recorded
class SumOfKroneckersLinearOperator(StructuredLinearOperator):
    """A sum of Kronecker products with factors of equal sizes.

    Examples are the sum of two KFAC operators, and KFAC's block of a weight that is used by an
    embedding and by a head. Products, trace, norm and diagonal take the terms one by one. The
    inverse and the determinant of two terms come from a basis in which both are diagonal, if one of
    them is positive definite. For everything else the sum is written as one matrix.

    Args:
        terms: The terms, each a ``KroneckerProductLinearOperator``.
        max_dense_dim: The largest number of rows of a matrix that may be written.

    Raises:
        ValueError: If there are no terms, or factors are not square or differ in size.
    """

    def __init__(self, terms: Sequence[StructuredLinearOperator], max_dense_dim: int = 8192):
        if not terms:
            raise ValueError("A sum of Kronecker products needs at least one term.")
        sizes = [[(f.rows, f.columns) for f in term._factors] for term in terms]
        square = all(rows == columns for rows, columns in sizes[0])
        if not square or any(size != sizes[0] for size in sizes):
            raise ValueError(f"The terms need square factors of equal sizes, got {sizes}.")
        if len({term._groups for term in terms}) > 1:
            raise ValueError(
                f"The terms have different numbers of groups: {[term._groups for term in terms]}."
            )
        if len({term.device for term in terms}) > 1:
            raise ValueError("The terms live on different devices. Move them with to_device().")
        dtype = reduce(torch.promote_types, [term.torch_dtype for term in terms])
        self._terms = [term._cast(dtype) for term in terms]
        self._groups, self._sizes = terms[0]._groups, [rows for rows, _ in sizes[0]]
        self.max_dense_dim = max_dense_dim
        self._written: StructuredLinearOperator | None = None
        super().__init__(self._terms[0].domain, all(term.self_adjoint for term in terms))

    def _record(self) -> tuple:
        return self._terms, self.max_dense_dim

    def _apply(self, columns: Columns, wanted: Sequence[str]) -> Columns:
        return {"": reduce(torch.add, [term._apply(columns, wanted)[""] for term in self._terms])}

    def _trace(self) -> Tensor:
        return reduce(torch.add, [term._trace() for term in self._terms])

    def _norm(self) -> Tensor:
        norm = double_norm(self._norms(), 0)
        # of terms that cancel, inner products leave the root of a rounding error
        largest = max(float(term._norm()) for term in self._terms)
        return self._as_product()._norm() if norm < 1e-4 * largest and self.can_be_written else norm

    def _norms(self) -> Tensor:
        """Return the Frobenius norms of the groups, ``[G]``, in float64."""
        # the root of the sum of the inner products of all pairs of terms
        total = torch.zeros(self._groups, dtype=torch.float64, device=self.device)
        for left in self._terms:
            for right in self._terms:
                pairs = zip(left._factors, right._factors, strict=True)
                inner = reduce(torch.mul, [a.inner(b) for a, b in pairs])
                total += inner
        return total.clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return reduce(torch.add, [term._diagonal() for term in self._terms])

    # --- the sum as one matrix

    @property
    def can_be_written(self) -> bool:
        """Whether the sum may be written as a matrix, or is diagonal."""
        size = prod(self._sizes)
        return self._is_diagonal() or self._groups * size**2 <= self.max_dense_dim**2

    def _is_diagonal(self) -> bool:
        return all(factor.is_diagonal for term in self._terms for factor in term._factors)

    def _as_product(self) -> StructuredLinearOperator:
        """Return the sum as a Kronecker product of one factor."""
        if self._written is None:
            self._written = self._terms[0]._of([self._write()])
        return self._written

    def _write(self) -> Factor:
        size = prod(self._sizes)
        if not self.can_be_written:
            raise ValueError(
                f"This needs the sum of Kronecker products as {self._groups} x {size} x {size} "
                f"numbers; max_dense_dim={self.max_dense_dim} allows {self.max_dense_dim**2:.1e}. "
                "Raise it, make all factors diagonal (in KFAC by a smaller max_factor_size), keep "
                "only one term, or solve iteratively with products of this operator."
            )
        if self._is_diagonal():
            return Factor(self._diagonal().view(-1, size))
        factors = [factor for term in self._terms for factor in term._factors]
        groups = max(factor.groups for factor in factors)
        dense = torch.zeros(groups, size, size, dtype=self.torch_dtype, device=self.device)
        for term in self._terms:
            _add_kron(term._factors, dense)
        psd, eps = all(f.psd for f in factors), max(f.eps for f in factors)
        symmetric = True if all(f.symmetric for f in factors) else None
        return Factor(dense.expand(self._groups, size, size), symmetric, psd, eps)

    # --- functions of the operator

    def _easy_to_invert(self) -> StructuredLinearOperator:
        """Return the sum in a basis in which two terms are diagonal, or else as one matrix."""
        are_two_pairs = len(self._terms) == len(self._sizes) == 2
        is_small = self.domain.dim <= min(_SMALL, self.max_dense_dim)
        if are_two_pairs and not is_small and not self._is_diagonal():
            for first, second in (self._terms, self._terms[::-1]):
                diagonalized = simultaneous_diagonalization(first, second)
                if diagonalized is not None:
                    return diagonalized
        return self._as_product()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self._easy_to_invert()._slogdet()

    def _inverse(self, accurate: bool = True) -> StructuredLinearOperator:
        return self._easy_to_invert()._inverse(accurate)

    def _eigh(self, accurate: bool = False) -> EighDecomposedLinearOperator:
        return self._as_product()._eigh(accurate)

    def _has_eigh(self) -> bool:
        return super()._has_eigh() and self.can_be_written

    def _power(self, exponent: float) -> StructuredLinearOperator:
        return self._inverse() if exponent == -1 else self._as_product()._power(exponent)

    # --- algebra

    def _with(self, terms: Sequence[StructuredLinearOperator]) -> "SumOfKroneckersLinearOperator":
        return SumOfKroneckersLinearOperator(terms, self.max_dense_dim)

    def _scaled(self, scalar: float) -> "SumOfKroneckersLinearOperator":
        return self._with([term._scaled(scalar) for term in self._terms])

    def _shifted(self, scalar: float) -> ShiftedLinearOperator:
        return ShiftedLinearOperator(self, scalar)

    def _added(self, other: StructuredLinearOperator) -> "SumOfKroneckersLinearOperator | None":
        if isinstance(other, SumOfKroneckersLinearOperator):
            more = other._terms
        elif isinstance(other, type(self._terms[0])):
            more = [other]
        else:
            return None
        if not all(self._terms[0]._fits(term) for term in more):
            return None
        return self._with([*self._terms, *more])

    def _transposed(self) -> "SumOfKroneckersLinearOperator":
        return self._with([term._adjoint() for term in self._terms])

    def _to(self, device: torch.device, dtype: torch.dtype) -> "SumOfKroneckersLinearOperator":
        return self._with([term._to(device, dtype) for term in self._terms])


def _add_kron(factors: Sequence[Factor], out: Tensor) -> None:
    """Add Kronecker products to matrices, ``[G, n, n]``, without writing these products down."""

    def kron(a: Tensor, b: Tensor) -> Tensor:
        product = einsum(a, b, "g i j, g k l -> g i k j l")
        return rearrange(product, "g i k j l -> g (i k) (j l)")

    first, *others = [factor.dense() for factor in factors]
    if not others:
        out += first
        return
    last = others.pop()
    first = reduce(kron, others, first)
    axes = rearrange(out, "g (i k) (j l) -> g i k j l", i=first.shape[1], j=first.shape[2])
    axes.addcmul_(rearrange(first, "g i j -> g i 1 j 1"), rearrange(last, "g k l -> g 1 k 1 l"))


@recorded
class DiagonalizedSumLinearOperator(StructuredLinearOperator):
    """A symmetric matrix ``X diag(values) X^T``, where X need not be orthogonal.

    It is a sum of two Kronecker products, or the inverse of one. It has no sum with the identity,
    and no power but the inverse.

    Args:
        values: The diagonal, ``[D]``.
        basis: X, a Kronecker product of square factors.
        dual: ``X^-T``, likewise.
    """

    def __init__(
        self,
        values: Tensor,
        basis: StructuredLinearOperator,
        dual: StructuredLinearOperator,
    ):
        self.values, self.basis, self.dual = values, basis, dual
        super().__init__(basis.domain)

    def _record(self) -> tuple:
        return self.values, self.basis, self.dual

    def _apply(self, columns: Columns, wanted: Sequence[str]) -> Columns:
        products = self._transposed_basis._apply(columns, wanted)[""]
        return self.basis._apply({"": products * self.values}, wanted)

    @cached_property
    def _transposed_basis(self) -> StructuredLinearOperator:
        return self.basis._adjoint()

    def _multiply_root(self, columns: Columns) -> Columns:
        return self.basis._apply({"": columns[""] * power(self.values, 0.5)}, [""])

    def _norm(self) -> Tensor:
        gram = self._transposed_basis._multiplied(self.basis)._squared_entries()
        product = gram._apply_rows(self.values.unsqueeze(0))[0]
        return (self.values @ product).clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return self.basis._squared_entries()._apply_rows(self.values.unsqueeze(0))[0]

    def _has_eigh(self) -> bool:
        return False

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = signed_logarithm(self.values)
        return sign, logarithm + 2 * self.basis._slogdet()[1]

    def _inverse(self, accurate: bool = True) -> "DiagonalizedSumLinearOperator":
        return DiagonalizedSumLinearOperator(power(self.values, -1.0), self.dual, self.basis)

    def _scaled(self, scalar: float) -> "DiagonalizedSumLinearOperator":
        return DiagonalizedSumLinearOperator(scalar * self.values, self.basis, self.dual)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DiagonalizedSumLinearOperator":
        basis, dual = (product._to(device, dtype) for product in (self.basis, self.dual))
        return DiagonalizedSumLinearOperator(self.values.to(device, dtype), basis, dual)


def simultaneous_diagonalization(
    first: StructuredLinearOperator, second: StructuredLinearOperator
) -> DiagonalizedSumLinearOperator | None:
    """Return the sum of two Kronecker products of two symmetric factors each.

    With ``P_1 = S S^T`` and ``P_2 = S diag(l) S^T``, likewise ``Q_1 = T T^T`` and
    ``Q_2 = T diag(m) T^T``, the sum ``P_1 (x) Q_1 + P_2 (x) Q_2`` is
    ``(S (x) T) diag(1 + l_i m_j) (S (x) T)^T``.

    Args:
        first: ``P_1 (x) Q_1``.
        second: ``P_2 (x) Q_2``.

    Returns:
        ``None`` if a factor of the first product is not positive definite.
    """
    for i, factor in enumerate(first._factors):
        values, _ = factor.eigh(in_float64=True, name=name_of_factor(i))
        if not bool((values > 0).all()):
            return None
    pairs = list(zip(first._factors, second._factors, strict=True))
    (S, dual_S, left), (T, dual_T, right) = (_common_basis(*pair) for pair in pairs)
    eps = max(factor.eps for pair in pairs for factor in pair)
    values = left.unsqueeze(-1) * right.unsqueeze(-2)
    values = values.expand(first._groups, *values.shape[1:]).flatten(1)
    values = shifted(values, 1.0, tolerance(max(S.rows, T.rows), eps), 0.0)
    values = values.to(first.torch_dtype).flatten()
    return DiagonalizedSumLinearOperator(values, first._of([S, T]), first._of([dual_S, dual_T]))


def _common_basis(first: Factor, second: Factor) -> tuple[Factor, Factor, Tensor]:
    """Return S, ``S^-T`` and l with ``first = S S^T`` and ``second = S diag(l) S^T``.

    Args:
        first: A positive definite factor.
        second: A symmetric factor.
    """
    values, vectors = first.eigh(in_float64=True)
    root = values.double().sqrt()
    if first.is_diagonal and second.is_diagonal:
        values = second.tensor / first.tensor
        root = root.expand_as(values)
        return Factor(root.to(values)), Factor((1 / root).to(values)), values
    Q = vectors.dense().double()
    middle = Q.mT @ second.dense().double() @ Q / (root.unsqueeze(-1) * root.unsqueeze(-2))
    values, vectors = eigenpairs(middle, "A factor of a sum of Kronecker products")
    bases = (Q * root.unsqueeze(-2)) @ vectors, (Q / root.unsqueeze(-2)) @ vectors
    S, dual = (Factor(basis.to(second.tensor.dtype), symmetric=False) for basis in bases)
    errors = rounding_errors(second.dense().double(), bases[1], second.eps, second.psd)
    return S, dual, without_rounding(values, errors, second.psd)
