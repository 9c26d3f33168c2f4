"""Kronecker products, block-diagonals of equally large ones, and sums of them."""

from collections.abc import Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.diagonal import DiagonalLinearOperator, IdentityLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import Factor, decompose, identity, invert, multiply, slogdet
from curvlinops.structured.linalg import real, shifted, tolerance
from curvlinops.structured.shifted import ShiftedLinearOperator
from curvlinops.structured.two_terms import (
    DiagonalizedSumLinearOperator,
    simultaneous_diagonalization,
)
from curvlinops.support.norms import double_norm
from curvlinops.support.records import recorded

#: Sums of Kronecker products with so many rows are always written as a matrix for their inverse: it
#: takes no time, and a matrix can do more.
_SMALL = 512


@recorded
class KroneckerProductLinearOperator(StructuredLinearOperator):
    """A Kronecker product ``F_1 (x) F_2 (x) ...`` that is never formed.

    For two factors it maps the row-major vector of V to that of ``F_1 V F_2^T``. One factor is
    the matrix itself.

    Factors may have an axis of G groups in front. Then the operator is block-diagonal, with the
    Kronecker product of each group's factors as one block. Factors without this axis are shared
    by all groups.

    Args:
        *factors: Matrices ``[n, m]``, or ``[G, n, m]``; or ``DiagonalLinearOperator``,
            ``IdentityLinearOperator`` and other Kronecker products without groups, which are never
            made dense. Inverses, powers and the like need symmetric factors, which
            includes asymmetry by rounding.

    Raises:
        TypeError: If a factor is none of these.
        ValueError: If there are no factors, they do not fit, or have NaN or infinite values.
    """

    def __init__(self, *factors: Tensor | StructuredLinearOperator | Factor):
        if not factors:
            raise ValueError("A Kronecker product needs at least one factor.")
        self._factors = _in_one_dtype(
            [part for i, factor in enumerate(factors) for part in _read(factor, i)]
        )
        groups = {factor.groups for factor in self._factors} - {1}
        if len(groups) > 1:
            raise ValueError(
                "The factors of a Kronecker product have different numbers of groups: "
                f"{[factor.groups for factor in self._factors]}."
            )
        self._groups = groups.pop() if groups else 1
        like = self._factors[0].tensor
        columns, rows = (
            self._groups * prod(getattr(factor, axis) for factor in self._factors)
            for axis in ("columns", "rows")
        )
        domain = ParameterSpace.flat(columns, like.dtype, like.device)
        square = rows == columns
        codomain = domain if square else ParameterSpace.flat(rows, like.dtype, like.device)
        symmetric = all(factor.symmetric for factor in self._factors)
        super().__init__(domain, symmetric, codomain)

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """The factors as dense matrices, ``[n, m]``, or ``[G, n, m]`` if there are groups."""
        return tuple(f.dense() if self._groups > 1 else f.dense()[0] for f in self._factors)

    def _record(self) -> tuple:
        return tuple(self._factors)

    def _apply(self, columns: Columns) -> Columns:
        return {"": multiply(self._factors, self._groups, columns[""])}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        transposed = [factor.transposed() for factor in self._factors]
        return {"": multiply(transposed, self._groups, columns[""])}

    # --- quantities: those of the factors, by group

    def _trace(self) -> Tensor:
        self._need_square_factors("A trace")
        return self._by_group([factor.diagonal().sum(-1) for factor in self._factors]).sum()

    def _norm(self) -> Tensor:
        return double_norm(self._by_group([factor.norm() for factor in self._factors]), 0)

    def _diagonal(self) -> Tensor:
        self._need_square_factors("A diagonal")
        diagonal = self._outer([factor.diagonal() for factor in self._factors]).flatten()
        # a product of several is a new tensor already
        return diagonal.clone() if len(self._factors) == 1 else diagonal

    def _slogdet(self, shift: float) -> tuple[Tensor, Tensor]:
        self._need_square_factors("A determinant")
        if shift:
            self._need_symmetry("A determinant of a sum with the identity")
            return super()._slogdet(shift)
        return slogdet(self._factors, self._groups)

    def _by_group(self, values: list[Tensor]) -> Tensor:
        """Multiply one number of each factor, ``[G]`` or ``[1]``, to ``[G]``."""
        return reduce(torch.mul, values).expand(self._groups)

    def _outer(self, vectors: list[Tensor]) -> Tensor:
        """Multiply vectors of the factors' sizes, ``[G, n]`` each, to ``[G, D / G]``."""
        out = reduce(lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1), vectors)
        return out.expand(self._groups, -1)

    # --- functions of the operator

    def _to_decompose(self, shift: float, accurate: bool) -> list[tuple[Factor, bool]]:
        eps = torch.finfo(self.torch_dtype).eps
        accurate = accurate and abs(shift) <= 1e3 * eps * float(self._norm())
        return [(factor, accurate) for factor in self._factors]

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> EighDecomposedLinearOperator:
        factors, wide = zip(*self._to_decompose(shift, accurate), strict=True)
        decompose(factors, self._names(), wide)
        values = self._outer([factor.eigenvalues() for factor in factors])
        size, entries = max(factor.rows for factor in factors), max(f.eps for f in factors)
        computed = min(torch.finfo(values.dtype).eps, entries)
        values = shifted(values, shift, tolerance(size, entries), tolerance(size, computed))
        values = values.to(self.torch_dtype).flatten()
        vectors = [factor.eigenvectors() for factor in factors]
        if self._groups > 1 and all(vector.groups == 1 for vector in vectors):
            # diagonal factors only: the groups must not get lost
            return EighDecomposedLinearOperator(values, IdentityLinearOperator(self.domain))
        return EighDecomposedLinearOperator(values, KroneckerProductLinearOperator(*vectors))

    def _inverse(self, shift: float, retry_double_precision: bool) -> StructuredLinearOperator:
        if shift and not self._is_matrix():
            return super()._inverse(shift, retry_double_precision)
        shifts = [shift] * len(self._factors)
        inverses = invert(self._factors, shifts, self._names(), retry_double_precision)
        return KroneckerProductLinearOperator(*inverses)

    def _is_matrix(self) -> bool:
        """Return whether the operator is a single dense matrix that is not decomposed yet."""
        first, *others = self._factors
        needs_factorization = not first.is_diagonal and first.decomposition is None
        return not others and first.groups == self._groups and needs_factorization

    def _power(self, exponent: float) -> StructuredLinearOperator:
        if exponent == 0:
            return IdentityLinearOperator(self.domain)
        if exponent < 0 or not exponent.is_integer():
            accurate = [True] * len(self._factors)
            decompose(self._factors, self._names(), accurate)
        factors = zip(self._factors, self._names(), strict=True)
        return KroneckerProductLinearOperator(*(f.power(exponent, name) for f, name in factors))

    # --- algebra

    def _scaled(self, scalar: float) -> "KroneckerProductLinearOperator":
        # the smallest factor is the cheapest; the others keep their decompositions
        sizes = [factor.tensor.numel() for factor in self._factors]
        index = sizes.index(min(sizes))
        factors = [f.scaled(scalar) if i == index else f for i, f in enumerate(self._factors)]
        return KroneckerProductLinearOperator(*factors)

    def _shifted(self, scalar: float) -> ShiftedLinearOperator:
        return ShiftedLinearOperator(self, scalar)

    def _added(self, other: StructuredLinearOperator) -> StructuredLinearOperator | None:
        if not isinstance(other, KroneckerProductLinearOperator) or not self._fits(other):
            return None
        pairs = list(zip(self._factors, other._factors, strict=True))
        different = [i for i, (a, b) in enumerate(pairs) if a.tensor is not b.tensor]
        if len(different) > 1:
            are_square = all(factor.rows == factor.columns for factor in self._factors)
            return SumOfKroneckersLinearOperator([self, other]) if are_square else None
        # a sum of products that have all other factors in common
        index = different[0] if different else 0
        factors = [a.plus(b) if i == index else a for i, (a, b) in enumerate(pairs)]
        return KroneckerProductLinearOperator(*factors)

    def _fits(self, other: "KroneckerProductLinearOperator") -> bool:
        """Return whether another product has as many groups, and factors of the same shapes."""
        own, others = ([(f.rows, f.columns) for f in op._factors] for op in (self, other))
        return self._groups == other._groups and own == others

    def _multiplied(
        self, other: StructuredLinearOperator
    ) -> "KroneckerProductLinearOperator | None":
        if not isinstance(other, KroneckerProductLinearOperator) or self._groups != other._groups:
            return None
        if [f.columns for f in self._factors] != [f.rows for f in other._factors]:
            return None
        pairs = zip(self._factors, other._factors, strict=True)
        return KroneckerProductLinearOperator(*(one.times(two) for one, two in pairs))

    def _transposed(self) -> "KroneckerProductLinearOperator":
        return KroneckerProductLinearOperator(*(factor.transposed() for factor in self._factors))

    def _squared_entries(self) -> "KroneckerProductLinearOperator":
        return KroneckerProductLinearOperator(*(factor.squared() for factor in self._factors))

    def _to(self, device: torch.device, dtype: torch.dtype) -> "KroneckerProductLinearOperator":
        return KroneckerProductLinearOperator(*(f.to(device, dtype) for f in self._factors))

    def _names(self) -> list[str]:
        return [name_of_factor(i) for i in range(len(self._factors))]

    def _need_square_factors(self, what: str) -> None:
        shapes = [(factor.rows, factor.columns) for factor in self._factors]
        if any(rows != columns for rows, columns in shapes):
            raise ValueError(f"{what} needs square factors, got shapes {shapes}.")


@recorded
class SumOfKroneckersLinearOperator(StructuredLinearOperator):
    """A sum of Kronecker products with factors of equal sizes.

    Such as the block of a weight that is used by an embedding and by a head, or the sum of two KFAC
    operators. Products, trace, norm and diagonal take the terms one by one. The inverse and the
    determinant of two terms come from a basis in which both are diagonal, if one of them is
    positive definite. For everything else the sum is written as one matrix.

    Args:
        terms: The Kronecker products.
        max_dense_dim: How large a matrix may be written, as the number of its rows.

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
        self._written: KroneckerProductLinearOperator | None = None
        super().__init__(self._terms[0].domain, all(term.self_adjoint for term in terms))

    def _record(self) -> tuple:
        return self._terms, self.max_dense_dim

    def _apply(self, columns: Columns) -> Columns:
        return {"": reduce(torch.add, [term._apply(columns)[""] for term in self._terms])}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return {"": reduce(torch.add, [term._apply_adjoint(columns)[""] for term in self._terms])}

    def _trace(self) -> Tensor:
        return reduce(torch.add, [term._trace() for term in self._terms])

    def _norm(self) -> Tensor:
        # the root of the sum of the inner products of all pairs of terms
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for one in self._terms:
            for two in self._terms:
                pairs = zip(one._factors, two._factors, strict=True)
                inner = reduce(torch.mul, [a.inner(b) for a, b in pairs])
                total += inner.expand(self._groups).sum()
        return total.clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return reduce(torch.add, [term._diagonal() for term in self._terms])

    # --- functions of the operator

    @property
    def can_be_written(self) -> bool:
        """Whether the sum may be written as a matrix, or is diagonal."""
        size = prod(self._sizes)
        return self._is_diagonal() or self._groups * size**2 <= self.max_dense_dim**2

    def _is_diagonal(self) -> bool:
        return all(factor.is_diagonal for term in self._terms for factor in term._factors)

    def _matrix(self) -> KroneckerProductLinearOperator:
        """Return the sum as one factor."""
        if self._written is None:
            self._written = KroneckerProductLinearOperator(self._write())
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
        dense = reduce(torch.add, [_kron(term._factors) for term in self._terms])
        factors = [factor for term in self._terms for factor in term._factors]
        psd, eps = all(f.psd for f in factors), max(f.eps for f in factors)
        return Factor(dense.expand(self._groups, size, size), psd=psd, eps=eps)

    def _diagonalized(self, shift: float) -> DiagonalizedSumLinearOperator | None:
        """Return the operator in a basis in which its two terms are diagonal, if there is one."""
        are_two_pairs = len(self._terms) == len(self._sizes) == 2
        if (
            shift
            or not are_two_pairs
            or self._is_diagonal()
            or self.domain.dim <= min(_SMALL, self.max_dense_dim)
        ):
            return None
        first, second = (term._factors for term in self._terms)
        names = self._terms[0]._names()
        return simultaneous_diagonalization(first, second, names) or simultaneous_diagonalization(
            second, first, names
        )

    def _slogdet(self, shift: float) -> tuple[Tensor, Tensor]:
        return (self._diagonalized(shift) or self._matrix())._slogdet(shift)

    def _inverse(self, shift: float, retry_double_precision: bool) -> StructuredLinearOperator:
        operator = self._diagonalized(shift) or self._matrix()
        return operator._inverse(shift, retry_double_precision)

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> EighDecomposedLinearOperator:
        return self._matrix()._eigh(shift, accurate)

    def _has_eigh(self) -> bool:
        return super()._has_eigh() and self.can_be_written

    def _power(self, exponent: float) -> StructuredLinearOperator:
        if exponent == -1:
            return self._inverse(0.0, retry_double_precision=True)
        return self._matrix()._power(exponent)

    # --- algebra

    def _with(
        self, terms: Sequence[KroneckerProductLinearOperator]
    ) -> "SumOfKroneckersLinearOperator":
        return SumOfKroneckersLinearOperator(terms, self.max_dense_dim)

    def _scaled(self, scalar: float) -> "SumOfKroneckersLinearOperator":
        return self._with([term._scaled(scalar) for term in self._terms])

    def _shifted(self, scalar: float) -> ShiftedLinearOperator:
        return ShiftedLinearOperator(self, scalar)

    def _added(self, other: StructuredLinearOperator) -> "SumOfKroneckersLinearOperator | None":
        if isinstance(other, KroneckerProductLinearOperator):
            more = [other]
        elif isinstance(other, SumOfKroneckersLinearOperator):
            more = other._terms
        else:
            return None
        if not all(self._terms[0]._fits(term) for term in more):
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


def _read(factor: Tensor | StructuredLinearOperator | Factor, index: int) -> list[Factor]:
    """Return what the Kronecker product computes with."""
    if isinstance(factor, Factor):
        return [factor]
    if isinstance(factor, IdentityLinearOperator):
        one = torch.ones(1, dtype=factor.torch_dtype, device=factor.device)
        unit = identity(factor.domain.dim, one)
        return [unit if factor.scalar == 1 else unit.scaled(factor.scalar)]
    if isinstance(factor, DiagonalLinearOperator):
        return [Factor(factor.diagonal().unsqueeze(0))]
    name = name_of_factor(index)
    if isinstance(factor, KroneckerProductLinearOperator):
        if factor._groups > 1:
            raise ValueError(f"{name} has groups. Pass its factors instead.")
        return factor._factors
    if isinstance(factor, StructuredLinearOperator):
        raise TypeError(f"{name} is a {type(factor).__name__}; pass the matrix .to_dense().")
    tensor = real(factor, name, ndim=(2, 3))
    return [Factor(tensor.unsqueeze(0) if tensor.ndim == 2 else tensor)]


def _in_one_dtype(factors: list[Factor]) -> list[Factor]:
    """Return the factors in their common dtype; refuse several devices."""
    devices = {factor.tensor.device for factor in factors}
    if len(devices) > 1:
        raise ValueError(
            f"The factors of a Kronecker product live on {sorted(map(str, devices))}. Move them to "
            "one device."
        )
    dtype = reduce(torch.promote_types, [factor.tensor.dtype for factor in factors])
    return [f if f.tensor.dtype == dtype else f.to(f.tensor.device, dtype) for f in factors]


def name_of_factor(index: int) -> str:
    """Return how messages call a factor."""
    return f"Factor {index} of the Kronecker product"
