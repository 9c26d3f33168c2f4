"""Kronecker products, their eigendecompositions, and sums of them, with the identity, too.

They are in one file, as each makes some of the others: a product its eigendecomposition and sums,
an eigendecomposition of a matrix a product of one factor, a sum of small products one product.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, reduce
from math import prod

import torch
from einops import einsum, rearrange
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.factor import Factor, name_of_factor
from curvlinops.structured.linalg import (
    eigenpairs,
    power,
    real,
    rounding_errors,
    shifted,
    signed_logarithm,
    tolerance,
    without_rounding,
)
from curvlinops.support.files import recorded
from curvlinops.support.norms import double_norm
from curvlinops.support.torch_modes import in_default_modes

#: Sums with at most so many rows are written as a matrix for their inverse. That takes no time, and
#: a matrix can do more.
_SMALL = 512


class KnownEigenvalues(StructuredLinearOperator):
    """A symmetric matrix with known eigenvalues. Functions of it are functions of these.

    A subclass sets ``eigenvalues``, a tensor ``[D]`` without rounding errors.
    """

    eigenvalues: Tensor

    @abstractmethod
    def with_eigenvalues(self, eigenvalues: Tensor) -> "KnownEigenvalues":
        """Return the operator with the same eigenvectors and other eigenvalues, ``[D]``."""

    @abstractmethod
    def _has_eigenvectors_of(self, other: StructuredLinearOperator) -> bool:
        """Return whether another operator is of this class and has the same eigenvectors."""

    def _trace(self) -> Tensor:
        return self.eigenvalues.sum()

    def _norm(self) -> Tensor:
        return double_norm(self.eigenvalues, 0)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return signed_logarithm(self.eigenvalues)

    def _inverse(self, accurate: bool = True) -> "KnownEigenvalues":
        return self._power(-1.0)

    def _power(self, exponent: float) -> "KnownEigenvalues":
        return self.with_eigenvalues(power(self.eigenvalues, exponent))

    def _scaled(self, scalar: float) -> "KnownEigenvalues":
        return self.with_eigenvalues(scalar * self.eigenvalues)

    def _shifted(self, scalar: float) -> "KnownEigenvalues":
        return self.with_eigenvalues(self.eigenvalues + scalar)

    def _added(self, other: StructuredLinearOperator) -> "KnownEigenvalues | None":
        if not self._has_eigenvectors_of(other):
            return None
        return self.with_eigenvalues(self.eigenvalues + other.eigenvalues)

    def _multiplied(self, other: StructuredLinearOperator) -> "KnownEigenvalues | None":
        if not self._has_eigenvectors_of(other):
            return None
        named = other if self.domain.is_flat else self
        return named.with_eigenvalues(self.eigenvalues * other.eigenvalues)


@recorded
class EighDecomposedLinearOperator(KnownEigenvalues):
    """A symmetric matrix ``Q diag(eigenvalues) Q^T``.

    Args:
        eigenvalues: The eigenvalues, ``[D]``, in the order of the columns of Q. They are cast to
            the dtype of Q.
        eigenvectors: Q, orthogonal: a matrix ``[D, D]`` with the eigenvectors as columns, or an
            operator such as a Kronecker product of orthogonal matrices. Orthogonality is not
            checked.

    Raises:
        TypeError: If eigenvalues or eigenvectors are no tensors of real floating-point numbers.
        ValueError: If they have NaN or infinite values, or do not fit each other.
    """

    def __init__(self, eigenvalues: Tensor, eigenvectors: Tensor | StructuredLinearOperator):
        values = real(eigenvalues, "The vector of eigenvalues", ndim=(1,))
        if not isinstance(eigenvectors, StructuredLinearOperator):
            matrix = real(eigenvectors, "The matrix of eigenvectors", ndim=(2,))
            eigenvectors = KroneckerProductLinearOperator(matrix)
        if eigenvectors.shape != (len(values), len(values)):
            raise ValueError(
                f"{len(values)} eigenvalues need eigenvectors of shape "
                f"{[len(values)] * 2}, got {list(eigenvectors.shape)}."
            )
        space = eigenvectors.domain
        self.eigenvalues = values.to(space.device, space.dtype)
        self.eigenvectors = eigenvectors
        super().__init__(space)

    def _record(self) -> tuple:
        return self.eigenvalues, self.eigenvectors

    def _make_parts(self, number: int) -> "list[EighDecomposedLinearOperator]":
        values, vectors = self.eigenvalues.tensor_split(number), self.eigenvectors._parts(number)
        return list(map(EighDecomposedLinearOperator, values, vectors))

    def _apply(self, columns: Tensor) -> Tensor:
        # columns get a new value at each step, so that the memory of the old one is free
        columns = self._transposed_eigenvectors._apply(columns)
        columns = columns * self.eigenvalues
        return self.eigenvectors._apply(columns)

    @cached_property
    def _transposed_eigenvectors(self) -> StructuredLinearOperator:
        return self.eigenvectors._adjoint()

    def _multiply_root(self, columns: Tensor) -> Tensor:
        return self.eigenvectors._apply(columns * power(self.eigenvalues, 0.5))

    def _diagonal(self) -> Tensor:
        squares = self.eigenvectors._squared_entries()
        return squares._apply(self.eigenvalues.unsqueeze(0))[0].clone()

    @in_default_modes
    def eigh(self) -> "EighDecomposedLinearOperator":
        """Return the operator itself."""
        return self

    def _eigh(self, accurate: bool = False) -> "EighDecomposedLinearOperator":
        return self

    @in_default_modes
    def with_eigenvalues(self, eigenvalues: Tensor) -> "EighDecomposedLinearOperator":
        """Return the operator with the same eigenvectors and other eigenvalues, ``[D]``."""
        return EighDecomposedLinearOperator(eigenvalues, self.eigenvectors)

    def _has_eigenvectors_of(self, other: StructuredLinearOperator) -> bool:
        same = isinstance(other, EighDecomposedLinearOperator)
        return same and other.eigenvectors is self.eigenvectors

    def _to(self, device: torch.device, dtype: torch.dtype) -> "EighDecomposedLinearOperator":
        vectors = self.eigenvectors._to(device, dtype)
        return EighDecomposedLinearOperator(self.eigenvalues.to(device, dtype), vectors)


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
            made dense. Inverses, powers and the like need symmetric factors, up to rounding.

    Raises:
        TypeError: If a factor is none of these.
        ValueError: If there are no factors, they do not fit, or have NaN or infinite values.
    """

    def __init__(self, *factors: Tensor | StructuredLinearOperator | Factor):
        if not factors:
            raise ValueError("A Kronecker product needs at least one factor.")
        self._factors = _in_one_dtype(
            [factor for i, given in enumerate(factors) for factor in _read(given, i)]
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

    def _of(self, factors: Iterable[Factor]) -> "KroneckerProductLinearOperator":
        """Return the Kronecker product of other factors."""
        return KroneckerProductLinearOperator(*factors)

    def _make_parts(self, number: int) -> "list[KroneckerProductLinearOperator]":
        factors = zip(*(factor.parts(number) for factor in self._factors), strict=True)
        return [self._of(some) for some in factors]

    def _apply(self, columns: Tensor) -> Tensor:
        X, K, groups, factors = columns, len(columns), self._groups, self._factors
        heights, widths = [f.rows for f in factors], [f.columns for f in factors]
        if groups > 1:
            X = X.reshape(K, groups, prod(widths)).transpose(0, 1)
        # from the last: that of B V A^T is a single matrix product for all columns
        for i in reversed(range(len(factors))):
            left, right = K * prod(widths[:i]), prod(heights[i + 1 :])
            X = factors[i].multiply(X, groups, left, right)
        if groups > 1:
            X = X.reshape(groups, K, prod(heights)).transpose(0, 1)
        return X.reshape(K, groups * prod(heights))

    # --- quantities: those of the factors, by group

    def _trace(self) -> Tensor:
        self._need_square_factors("A trace")
        return self._by_group([factor.diagonal().sum(-1) for factor in self._factors]).sum()

    def _norm(self) -> Tensor:
        return double_norm(self._norms(), 0)

    def _norms(self) -> Tensor:
        """Return the Frobenius norms of the groups, ``[G]``, in float64."""
        return self._by_group([factor.norm for factor in self._factors])

    def _diagonal(self) -> Tensor:
        self._need_square_factors("A diagonal")
        diagonal = self._outer([factor.diagonal() for factor in self._factors]).flatten()
        # a product of several is a new tensor already
        return diagonal.clone() if len(self._factors) == 1 else diagonal

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        self._need_square_factors("A determinant")
        total, signs, logarithms = prod(f.rows for f in self._factors), [], []
        for factor in self._factors:
            sign, logarithm = factor.slogdet()
            # each eigenvalue of a factor is in so many eigenvalues of the product
            times = total // factor.rows if factor.rows else 0
            signs.append(sign**times)
            # the determinant of an empty matrix is one, whatever the other factors are
            logarithms.append(times * logarithm if times else torch.zeros_like(logarithm))
        return self._by_group(signs).prod(), self._by_group(logarithms, torch.add).sum()

    def _by_group(self, values: list[Tensor], combine: Callable = torch.mul) -> Tensor:
        """Multiply one number of each factor, ``[G]`` or ``[1]``, to ``[G]``."""
        return reduce(combine, values).expand(self._groups)

    def _outer(self, vectors: list[Tensor]) -> Tensor:
        """Multiply vectors of the factors' sizes, ``[G, n]`` each, to ``[G, D / G]``."""
        out = reduce(lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1), vectors)
        return out.expand(self._groups, -1)

    # --- functions of the operator

    def _as_product(self) -> "KroneckerProductLinearOperator":
        """Return the operator as one Kronecker product; see ``ShiftedLinearOperator``."""
        return self

    def _eigh(
        self, accurate: bool = False, shift: float = 0.0, exponent: float = 1.0
    ) -> EighDecomposedLinearOperator:
        """Return the eigendecomposition of a power of the sum with a multiple of the identity."""
        pairs = [f.eigh(accurate, name_of_factor(i)) for i, f in enumerate(self._factors)]
        values = self._outer([values for values, _ in pairs])
        size, entries = (max(getattr(f, name) for f in self._factors) for name in ("rows", "eps"))
        computed = min(torch.finfo(values.dtype).eps, entries)
        values = shifted(values, shift, tolerance(size, entries), tolerance(size, computed))
        values = values.to(self.torch_dtype).flatten()
        if exponent != 1:
            values = power(values, exponent)
        vectors = self._of(vectors for _, vectors in pairs)
        return EighDecomposedLinearOperator(values, vectors)

    def _inverse(
        self, accurate: bool = True, shift: float = 0.0
    ) -> "KroneckerProductLinearOperator":
        """Return the Kronecker product of ``(F + shift I)^-1`` for all factors F."""
        factors = enumerate(self._factors)
        return self._of(f.inverse(shift, name_of_factor(i), accurate) for i, f in factors)

    def _is_matrix(self) -> bool:
        """Return whether the operator is a single dense matrix that is not decomposed yet."""
        first, *others = self._factors
        if others or first.is_diagonal or first.groups != self._groups:
            return False
        return first.decomposition is None or bool(first.is_open().any())

    def _power(self, exponent: float) -> StructuredLinearOperator:
        return self._of(f.power(exponent, name_of_factor(i)) for i, f in enumerate(self._factors))

    # --- algebra

    def _scaled(self, scalar: float) -> "KroneckerProductLinearOperator":
        # the smallest factor is multiplied; all others keep their decompositions
        sizes = [factor.tensor.numel() for factor in self._factors]
        index = sizes.index(min(sizes))
        factors = [f.scaled(scalar) if i == index else f for i, f in enumerate(self._factors)]
        return self._of(factors)

    def _shifted(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self, scalar)

    def _added(self, other: StructuredLinearOperator) -> StructuredLinearOperator | None:
        if not isinstance(other, KroneckerProductLinearOperator) or not self._fits(other):
            return None
        pairs = list(zip(self._factors, other._factors, strict=True))
        different = [i for i, (a, b) in enumerate(pairs) if a.tensor is not b.tensor]
        if len(different) > 1:
            are_square = all(factor.rows == factor.columns for factor in self._factors)
            return SumOfKroneckersLinearOperator([self, other]) if are_square else None
        # the products have all other factors in common: add these two
        index = different[0] if different else 0
        factors = [a.plus(b) if i == index else a for i, (a, b) in enumerate(pairs)]
        return self._of(factors)

    def _fits(self, other: "KroneckerProductLinearOperator") -> bool:
        """Return whether another product has as many groups, and factors of the same shapes."""
        shapes, others = ([(f.rows, f.columns) for f in op._factors] for op in (self, other))
        return self._groups == other._groups and shapes == others

    def _multiplied(
        self, other: StructuredLinearOperator
    ) -> "KroneckerProductLinearOperator | None":
        if not isinstance(other, KroneckerProductLinearOperator) or self._groups != other._groups:
            return None
        if [f.columns for f in self._factors] != [f.rows for f in other._factors]:
            return None
        pairs = zip(self._factors, other._factors, strict=True)
        return self._of(left.times(right) for left, right in pairs)

    def _transposed(self) -> "KroneckerProductLinearOperator":
        return self._of(factor.transposed() for factor in self._factors)

    def _as_factors(self) -> list[Factor]:
        return self._factors

    def _squared_entries(self) -> "KroneckerProductLinearOperator":
        return self._of(factor.squared() for factor in self._factors)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "KroneckerProductLinearOperator":
        return self._of(factor.to(device, dtype) for factor in self._factors)

    def _need_square_factors(self, what: str) -> None:
        shapes = [(factor.rows, factor.columns) for factor in self._factors]
        if any(rows != columns for rows, columns in shapes):
            raise ValueError(f"{what} needs square factors, got shapes {shapes}.")


def _read(factor: Tensor | StructuredLinearOperator | Factor, index: int) -> list[Factor]:
    """Return an argument of a Kronecker product as factors."""
    if isinstance(factor, Factor):
        return [factor]
    name = name_of_factor(index)
    if isinstance(factor, StructuredLinearOperator):
        factors = factor._as_factors()
        if factors is None:
            raise TypeError(f"{name} is a {type(factor).__name__}; pass the matrix .to_dense().")
        if max(factor.groups for factor in factors) > 1:
            raise ValueError(f"{name} has groups. Pass its factors instead.")
        return factors
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


@recorded
class ShiftedLinearOperator(StructuredLinearOperator):
    """The sum ``A + c I``, where A is a Kronecker product, or a sum of several.

    The number c is not added to entries of A, so that it is not lost in their rounding errors. The
    inverse and the determinant come from the eigendecomposition of A, which is computed once for
    all values of c.

    Args:
        operator: A.
        shift: c.
    """

    def __init__(self, operator: StructuredLinearOperator, shift: float):
        self.operator, self.shift = operator, shift
        super().__init__(operator.domain, operator.self_adjoint)

    def _record(self) -> tuple:
        return self.operator, self.shift

    def _formula(self) -> str:
        return f"{self.operator._formula()} + {self.shift:g} * Identity"

    def _make_parts(self, number: int) -> "list[ShiftedLinearOperator]":
        return [ShiftedLinearOperator(part, self.shift) for part in self.operator._parts(number)]

    def _apply(self, columns: Tensor) -> Tensor:
        return torch.add(self.operator._apply(columns), columns, alpha=self.shift)

    def _trace(self) -> Tensor:
        return self.operator._trace() + self.shift * self.domain.dim

    def _norm(self) -> Tensor:
        norm, trace = self.operator._norm().double(), self.operator._trace().double()
        square = norm**2 + 2 * self.shift * trace + self.shift**2 * self.domain.dim
        return square.clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return self.operator._diagonal() + self.shift

    # --- functions of the operator

    @cached_property
    def _needs_double(self) -> bool:
        """Whether the shift is so small that small eigenvalues of A matter."""
        eps = torch.finfo(self.torch_dtype).eps
        norms = self.operator._norms()
        return norms.numel() > 0 and abs(self.shift) <= 1e3 * eps * float(norms.max())

    def _eigh(self, accurate: bool = False) -> StructuredLinearOperator:
        product = self.operator._as_product()
        return product._eigh(accurate and self._needs_double, self.shift)

    def _has_eigh(self) -> bool:
        return self.operator._has_eigh()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        self._need_symmetry("A determinant")
        return super()._slogdet()

    def _inverse(self, accurate: bool = True) -> StructuredLinearOperator:
        product = self.operator._as_product()
        if product._is_matrix():  # a Cholesky decomposition is faster
            return product._inverse(accurate, self.shift)
        return product._eigh(accurate and self._needs_double, self.shift, exponent=-1.0)

    # --- algebra

    def _scaled(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._scaled(scalar), scalar * self.shift)

    def _shifted(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator, self.shift + scalar)

    def _transposed(self) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._transposed(), self.shift)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._to(device, dtype), self.shift)


@recorded
class SumOfKroneckersLinearOperator(StructuredLinearOperator):
    """A sum of Kronecker products with factors of equal sizes.

    Examples are the sum of two KFAC operators, and KFAC's block of a weight that is used by an
    embedding and by a head. Products, trace, norm and diagonal take the terms one by one. The
    inverse and the determinant of two terms come from a basis in which both are diagonal, if one of
    them is positive definite. For everything else the sum is written as one matrix.

    Args:
        terms: The terms.
        max_dense_dim: The largest number of rows of a matrix that may be written.

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

    def _apply(self, columns: Tensor) -> Tensor:
        return reduce(torch.add, [term._apply(columns) for term in self._terms])

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

    def _as_product(self) -> KroneckerProductLinearOperator:
        """Return the sum as a Kronecker product of one factor."""
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

    def _with(
        self, terms: Sequence[KroneckerProductLinearOperator]
    ) -> "SumOfKroneckersLinearOperator":
        return SumOfKroneckersLinearOperator(terms, self.max_dense_dim)

    def _scaled(self, scalar: float) -> "SumOfKroneckersLinearOperator":
        return self._with([term._scaled(scalar) for term in self._terms])

    def _shifted(self, scalar: float) -> ShiftedLinearOperator:
        return ShiftedLinearOperator(self, scalar)

    def _added(self, other: StructuredLinearOperator) -> "SumOfKroneckersLinearOperator | None":
        if isinstance(other, SumOfKroneckersLinearOperator):
            more = other._terms
        elif isinstance(other, KroneckerProductLinearOperator):
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
    and no power but the inverse. The basis X, and its dual ``X^-T``, are Kronecker products.
    """

    def __init__(
        self,
        values: Tensor,
        basis: KroneckerProductLinearOperator,
        dual: KroneckerProductLinearOperator,
    ):
        self.values, self.basis, self.dual = values, basis, dual
        super().__init__(basis.domain)

    def _record(self) -> tuple:
        return self.values, self.basis, self.dual

    def _apply(self, columns: Tensor) -> Tensor:
        return self.basis._apply(self._transposed_basis._apply(columns) * self.values)

    @cached_property
    def _transposed_basis(self) -> StructuredLinearOperator:
        return self.basis._adjoint()

    def _multiply_root(self, columns: Tensor) -> Tensor:
        return self.basis._apply(columns * power(self.values, 0.5))

    def _norm(self) -> Tensor:
        gram = self._transposed_basis._multiplied(self.basis)._squared_entries()
        product = gram._apply(self.values.unsqueeze(0))[0]
        return (self.values @ product).clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return self.basis._squared_entries()._apply(self.values.unsqueeze(0))[0]

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
    first: KroneckerProductLinearOperator, second: KroneckerProductLinearOperator
) -> DiagonalizedSumLinearOperator | None:
    """Return ``P_1 (x) Q_1 + P_2 (x) Q_2`` if ``P_1`` and ``Q_1`` are positive definite.

    With ``P_1 = S S^T`` and ``P_2 = S diag(l) S^T``, likewise ``Q_1 = T T^T`` and
    ``Q_2 = T diag(m) T^T``, it is ``(S (x) T) diag(1 + l_i m_j) (S (x) T)^T``.
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
    values = shifted(values, 1.0, tolerance(max(S.rows, T.rows), eps))
    values = values.to(first.torch_dtype).flatten()
    basis, dual = (KroneckerProductLinearOperator(*pair) for pair in ((S, T), (dual_S, dual_T)))
    return DiagonalizedSumLinearOperator(values, basis, dual)


def _common_basis(first: Factor, second: Factor) -> tuple[Factor, Factor, Tensor]:
    """Return S, ``S^-T`` and l with ``first = S S^T``, positive, and ``second = S diag(l) S^T``."""
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
