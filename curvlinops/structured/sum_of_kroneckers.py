"""Sums of several Kronecker products."""

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.core.space import Columns
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.congruent import CongruentLinearOperator, diagonalize
from curvlinops.structured.diagonal_factor import Diagonal, unit
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factors import Dense, Factor
from curvlinops.structured.kronecker import KroneckerProductLinearOperator
from curvlinops.structured.norms import norm_of_sum, wide_norm
from curvlinops.structured.rearranged import RearrangedLinearOperator, Transposes


@recorded
class SumOfKroneckersLinearOperator(StructuredLinearOperator):
    """A sum of Kronecker products with factors of equal sizes.

    The block of a weight that is used in several roles, e.g. by an embedding, which has a diagonal
    factor, and by a head. Products, trace, norm and diagonal take the terms one by one. For
    inverses, determinants and eigendecompositions the sum is written as one matrix; or, if one of
    two factors is diagonal in all terms, as one small matrix for each of its entries; or as a
    diagonal, if all factors are. Where that is too large, inverse and determinant of two terms come
    from diagonalizing both at once.

    Args:
        terms: The Kronecker products.
        max_dense_dim: How large a matrix may be written, in all ``max_dense_dim**2`` numbers.

    Raises:
        ValueError: If there are no terms, or factors are not square or differ in size.
    """

    def __init__(self, terms: Sequence[KroneckerProductLinearOperator], max_dense_dim: int = 8192):
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
        self._diagonalized: CongruentLinearOperator | None = None
        super().__init__(self._terms[0].domain, all(term.self_adjoint for term in terms))

    def _record(self) -> tuple:
        return self._terms, self.max_dense_dim

    def _apply(self, columns: Columns) -> Columns:
        return {"": reduce(torch.add, [term._apply(columns)[""] for term in self._terms])}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return {"": reduce(torch.add, [term._apply_adjoint(columns)[""] for term in self._terms])}

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return reduce(torch.add, [term.trace() for term in self._terms])

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar.

        It is the root of the sum of the inner products of all pairs of terms, unless these cancel.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        size = total.clone()
        for i, one in enumerate(self._terms):
            for j, two in enumerate(self._terms[: i + 1]):
                pairs = zip(one._factors, two._factors, strict=True)
                inner = reduce(torch.mul, [a.inner(b) for a, b in pairs]).expand(self._groups)
                total += (1 if i == j else 2) * inner.sum()
                size += inner.abs().sum()
        if bool(total < 1e-8 * size):
            return wide_norm(norm_of_sum(self._vectors()), 0).to(self.torch_dtype)
        return total.sqrt().to(self.torch_dtype)

    def _vectors(self) -> list[list[Tensor]]:
        """Return the factors of all terms as vectors, ``[G, n]``."""
        factors = [term._factors for term in self._terms]
        diagonal = [
            all(isinstance(f, Diagonal) for f in axis) for axis in zip(*factors, strict=True)
        ]
        return [
            [
                (f.diagonal() if short else f.dense().flatten(1)).expand(self._groups, -1)
                for f, short in zip(term, diagonal, strict=True)
            ]
            for term in factors
        ]

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return reduce(torch.add, [term.diagonal() for term in self._terms])

    # --- what needs the matrix

    @property
    def can_be_written(self) -> bool:
        """Whether the sum may be written as a matrix."""
        return self._num_entries() <= self.max_dense_dim**2

    def _num_entries(self) -> int:
        """Return how many entries the sum has, apart from those that are zero in all terms."""
        dense = [size for i, size in enumerate(self._sizes) if i not in self._diagonal_axes()]
        return self._groups * prod(self._sizes) * prod(dense)

    def _diagonal_axes(self) -> list[int]:
        """Return which factors are diagonal in all terms; of more than two, all or none."""
        axes = enumerate(zip(*(term._factors for term in self._terms), strict=True))
        found = [i for i, axis in axes if all(isinstance(f, Diagonal) for f in axis)]
        return found if len(self._sizes) <= 2 or len(found) == len(self._sizes) else []

    def _matrix(self) -> StructuredLinearOperator:
        """Return the sum as matrices: one for each entry of a diagonal factor, or one."""
        if self._written is None:
            self._written = self._write()
        return self._written

    def _write(self) -> StructuredLinearOperator:
        if not self.can_be_written:
            raise ValueError(
                "This needs the sum of Kronecker products as a matrix, which has "
                f"{self._num_entries():.1e} entries; max_dense_dim={self.max_dense_dim} allows "
                f"{self.max_dense_dim**2:.1e}. Raise it, make a factor diagonal in all terms (in "
                "KFAC by a smaller max_factor_size), keep only one term, or solve iteratively with "
                "products of this operator."
            )
        axes, size = self._diagonal_axes(), prod(self._sizes)
        if len(axes) == len(self._sizes):
            return KroneckerProductLinearOperator(Diagonal(self.diagonal().view(-1, size)))
        if axes:
            return self._write_by_rows(*axes)
        dense = reduce(torch.add, [_kron(term._factors) for term in self._terms])
        return KroneckerProductLinearOperator(Dense(dense.expand(self._groups, size, size)))

    def _write_by_rows(self, axis: int) -> StructuredLinearOperator:
        """Write one matrix for each entry of the factor ``axis``, diagonal in all terms."""
        rows, size = self._sizes[axis], self._sizes[1 - axis]
        blocks = reduce(
            torch.add,
            [
                term._factors[axis].entries[:, :, None, None]
                * term._factors[1 - axis].dense().unsqueeze(1)
                for term in self._terms
            ],
        )
        blocks = blocks.expand(self._groups, rows, size, size).flatten(0, 1)
        matrix = KroneckerProductLinearOperator(Dense(blocks))
        if axis == 0:
            return matrix
        placement = Transposes((self._groups, *self._sizes))
        return RearrangedLinearOperator(matrix, self.domain, placement)

    def _solvable(self) -> StructuredLinearOperator:
        """Return the sum in a form that has an inverse and a determinant."""
        if len(self._terms) != 2 or len(self._sizes) != 2 or self.can_be_written:
            return self._matrix()
        if self._diagonalized is None:
            self._diagonalized = diagonalize(*self._terms)
        return self._diagonalized

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self._solvable()._slogdet()

    def _eigh(self) -> EighDecomposedLinearOperator:
        return self._matrix().eigh()

    def _inverse(self, retry_double_precision: bool) -> StructuredLinearOperator:
        return self._solvable()._inverse(retry_double_precision)

    def _power(self, exponent: float) -> StructuredLinearOperator:
        return self._matrix()._power(exponent)

    # --- algebra

    def _with(
        self, terms: Sequence[KroneckerProductLinearOperator]
    ) -> "SumOfKroneckersLinearOperator":
        return SumOfKroneckersLinearOperator(terms, self.max_dense_dim)

    def _scaled(self, scalar: float) -> "SumOfKroneckersLinearOperator":
        return self._with([term._scaled(scalar) for term in self._terms])

    def _shifted(self, scalar: float) -> "SumOfKroneckersLinearOperator":
        like = torch.ones(1, dtype=self.torch_dtype, device=self.device)
        factors: list[Factor] = [unit(size, like) for size in self._sizes]
        # all groups, also if the other terms were to get lost
        first = like.new_full((self._groups, self._sizes[0]), scalar)
        identity = KroneckerProductLinearOperator(Diagonal(first), *factors[1:])
        return self._with([*self._terms, identity])

    def _added(self, other: StructuredLinearOperator) -> "SumOfKroneckersLinearOperator | None":
        if isinstance(other, KroneckerProductLinearOperator):
            more = [other]
        elif isinstance(other, SumOfKroneckersLinearOperator):
            more = other._terms
        else:
            return None
        mine = [len(self._sizes), self._groups, *self._sizes]
        if any([len(t._factors), t._groups, *(f.rows for f in t._factors)] != mine for t in more):
            return None
        return self._with([*self._terms, *more])

    def _transposed(self) -> "SumOfKroneckersLinearOperator":
        return self._with([term._adjoint() for term in self._terms])

    def _to(self, device: torch.device, dtype: torch.dtype) -> "SumOfKroneckersLinearOperator":
        return self._with([term._to(device, dtype) for term in self._terms])


def _kron(factors: Sequence[Factor]) -> Tensor:
    """Return Kronecker products as matrices, ``[G, n, n]``."""

    def two(a: Tensor, b: Tensor) -> Tensor:
        product = a[:, :, None, :, None] * b[:, None, :, None, :]
        return product.flatten(3).flatten(1, 2)

    return reduce(two, [factor.dense() for factor in factors])
