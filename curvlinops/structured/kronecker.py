"""Kronecker products, and block-diagonals of equally large ones."""

from collections.abc import Iterable, Sequence
from functools import reduce
from math import prod

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.diagonal import DiagonalLinearOperator, IdentityLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import (
    Factor,
    identity,
    multiply,
    name_of_factor,
    slogdet,
)
from curvlinops.structured.linalg import power, real, shifted, tolerance
from curvlinops.structured.shifted import ShiftedLinearOperator
from curvlinops.structured.sums import SumOfKroneckersLinearOperator
from curvlinops.support.norms import double_norm
from curvlinops.support.serialization import recorded


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

    def _apply(self, columns: Columns, wanted: Sequence[str]) -> Columns:
        return {"": multiply(self._factors, self._groups, columns[""])}

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
        return slogdet(self._factors, self._groups)

    def _by_group(self, values: list[Tensor]) -> Tensor:
        """Multiply one number of each factor, ``[G]`` or ``[1]``, to ``[G]``."""
        return reduce(torch.mul, values).expand(self._groups)

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
        return not others and first.groups == self._groups and not first.is_decomposed()

    def _power(self, exponent: float) -> StructuredLinearOperator:
        if exponent == 0:
            return IdentityLinearOperator(self.domain)
        return self._of(f.power(exponent, name_of_factor(i)) for i, f in enumerate(self._factors))

    # --- algebra

    def _scaled(self, scalar: float) -> "KroneckerProductLinearOperator":
        # the smallest factor is multiplied; all others keep their decompositions
        sizes = [factor.tensor.numel() for factor in self._factors]
        index = sizes.index(min(sizes))
        factors = [f.scaled(scalar) if i == index else f for i, f in enumerate(self._factors)]
        return self._of(factors)

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
    if isinstance(factor, IdentityLinearOperator):
        like = torch.ones(1, dtype=factor.torch_dtype, device=factor.device)
        unit = identity(factor.domain.dim, like)
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
