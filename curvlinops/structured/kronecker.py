"""Kronecker products, and block-diagonals of equally large ones."""

from collections.abc import Callable
from functools import reduce
from math import inf, log2, prod

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.core.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.checks import real
from curvlinops.structured.diagonal import DiagonalLinearOperator
from curvlinops.structured.diagonal_factor import Diagonal, unit
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factors import Dense, Factor, tensor_of
from curvlinops.structured.identity import IdentityLinearOperator
from curvlinops.structured.norms import wide_norm
from curvlinops.structured.shifted import ShiftedLinearOperator
from curvlinops.structured.together import decompose, invert, multiply

#: By which power of two the sizes of factors may differ from their mean.
_FAR = 30


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
        self._factors = _in_one_place(
            [part for i, factor in enumerate(factors) for part in _read(factor, i)]
        )
        groups = {factor.groups for factor in self._factors} - {1}
        if len(groups) > 1:
            raise ValueError(
                "The factors of a Kronecker product have different numbers of groups: "
                f"{[factor.groups for factor in self._factors]}."
            )
        self._groups = groups.pop() if groups else 1
        like = tensor_of(self._factors[0])
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

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        self._need_square_factors("A trace")
        return self._by_group([factor.diagonal().sum(-1) for factor in self._factors]).sum()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        norms = self._by_group([factor.norm() for factor in self._factors])
        return wide_norm(norms, 0).to(self.torch_dtype)

    def _shifted_norm(self, shift: float) -> Tensor:
        """Return the Frobenius norm of the sum with a multiple of the identity, in float64.

        With ``A_i = a_i I + R_i``, where the trace of ``R_i`` is zero, the products of these are
        orthogonal, so that nothing cancels but ``prod a_i + shift``.
        """
        self._need_square_factors("A sum with the identity")
        like = tensor_of(self._factors[0])
        means = like.new_ones(self._groups, dtype=torch.float64)
        rest = torch.zeros_like(means)
        if self.domain.dim == 0:
            return rest.sum()
        for factor in self._factors:
            mean, deviation = factor.deviation()
            own = factor.rows**0.5 * mean
            rest = torch.hypot(rest * torch.hypot(own, deviation), means * deviation)
            means = means * own
        dim = prod(factor.rows for factor in self._factors)
        return wide_norm(torch.stack([means + shift * dim**0.5, rest]), (0, 1))

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        self._need_square_factors("A diagonal")
        diagonal = self._outer([factor.diagonal() for factor in self._factors])
        # a product of several is a new tensor already
        return diagonal.clone() if len(self._factors) == 1 else diagonal

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        self._need_square_factors("A determinant")
        total = prod(factor.rows for factor in self._factors)
        signs, logarithms = [], []
        for factor in self._factors:
            sign, logarithm = factor.slogdet()
            # each eigenvalue occurs in as many products
            times = total // factor.rows if factor.rows else 0
            signs.append(sign**times)
            # an empty product has determinant one, also of singular factors
            logarithms.append(times * logarithm if times else torch.zeros_like(logarithm))
        logarithm = reduce(torch.add, logarithms).expand(self._groups).sum()
        return self._by_group(signs).prod(), logarithm

    def _by_group(self, values: list[Tensor]) -> Tensor:
        """Multiply one number of each factor, ``[G]`` or ``[1]``, to ``[G]``."""
        return reduce(torch.mul, values).expand(self._groups)

    def _outer(self, vectors: list[Tensor]) -> Tensor:
        """Multiply vectors of the factors' sizes, ``[G, n]`` each, to one of length D."""
        out = reduce(lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1), vectors)
        return out.expand(self._groups, -1).flatten()

    # --- functions of the operator

    def _matrices(self) -> list[Factor]:
        return self._factors

    def _eigh(self) -> EighDecomposedLinearOperator:
        decompose(self._factors, self._names())
        values = self._outer([factor.eigenvalues() for factor in self._factors])
        vectors = [factor.eigenvectors() for factor in self._factors]
        if self._groups > 1 and all(vector.groups == 1 for vector in vectors):
            # diagonal factors only: the groups must not get lost
            return EighDecomposedLinearOperator(values, IdentityLinearOperator(self.domain))
        vectors = KroneckerProductLinearOperator(*vectors)
        if all(isinstance(factor, Diagonal) for factor in self._factors):
            return EighDecomposedLinearOperator(values, vectors)
        # another operator: this one keeps its decomposition, which must not keep it in turn
        origin = KroneckerProductLinearOperator(*self._factors)
        return EighDecomposedLinearOperator.of(origin, values, vectors)

    def _errors(self, of_factor: Callable[[Factor], Tensor]) -> Tensor:
        values = [factor.eigenvalues().abs() for factor in self._factors]
        errors = [of_factor(factor).unsqueeze(-1) for factor in self._factors]
        wrong = self._outer([one + error for one, error in zip(values, errors, strict=True)])
        return wrong - self._outer(values)

    def _largest_error(self, of_factor: Callable[[Factor], Tensor]) -> Tensor:
        sizes = [factor.eigenvalues().abs().amax(-1) for factor in self._factors]
        errors = [of_factor(factor) for factor in self._factors]
        wrong = self._by_group([one + error for one, error in zip(sizes, errors, strict=True)])
        return (wrong - self._by_group(sizes)).amax()

    def _inverse(self, retry_double_precision: bool) -> "KroneckerProductLinearOperator":
        inverses = invert(self._factors, self._names(), retry_double_precision)
        return KroneckerProductLinearOperator(*inverses)

    def _power(self, exponent: float) -> StructuredLinearOperator:
        if exponent < 0 or not exponent.is_integer():
            decompose(self._factors, self._names())
        if not exponent.is_integer() and not all(f.is_semidefinite() for f in self._factors):
            # a product of negative definite factors is positive definite
            return self.eigh()._power(exponent)
        if exponent == 0:
            return IdentityLinearOperator(self.domain)
        factors = zip(self._balanced(), self._names(), strict=True)
        return KroneckerProductLinearOperator(*(f.power(exponent, name) for f, name in factors))

    def _balanced(self) -> list[Factor]:
        """Return factors of like sizes, whose powers overflow, or vanish, only if the product's do.

        Powers of two change them, exactly.
        """
        sizes = [float(factor.norm().sum()) for factor in self._factors]
        if not all(0.0 < size < inf for size in sizes):
            return self._factors
        mean = sum(map(log2, sizes)) / len(sizes)
        shifts = [round(mean - log2(size)) for size in sizes[:-1]]
        shifts.append(-sum(shifts))
        if max(map(abs, shifts)) < _FAR:
            return self._factors
        return [f.scaled(2.0**shift) for f, shift in zip(self._factors, shifts, strict=True)]

    # --- algebra

    def _scaled(self, scalar: float) -> "KroneckerProductLinearOperator":
        # the smallest factor is the cheapest; the others keep their decompositions
        sizes = [tensor_of(factor).numel() for factor in self._factors]
        index = sizes.index(min(sizes))
        factors = [f.scaled(scalar) if i == index else f for i, f in enumerate(self._factors)]
        return KroneckerProductLinearOperator(*factors)

    def _shifted(self, scalar: float) -> StructuredLinearOperator:
        first, *others = self._factors
        if not others and first.groups == self._groups and first.keeps(scalar):
            return KroneckerProductLinearOperator(first.shifted(scalar))
        return ShiftedLinearOperator(self, scalar)

    def _added(self, other: StructuredLinearOperator) -> "KroneckerProductLinearOperator | None":
        if not isinstance(other, KroneckerProductLinearOperator) or self._groups != other._groups:
            return None
        if not len(self._factors) == len(other._factors) == 1:
            return None  # the sum has another structure; see SumOfKroneckersLinearOperator
        return KroneckerProductLinearOperator(self._factors[0].plus(other._factors[0]))

    def _multiplied(
        self, other: StructuredLinearOperator
    ) -> "KroneckerProductLinearOperator | None":
        if not isinstance(other, KroneckerProductLinearOperator) or self._groups != other._groups:
            return None
        if [f.columns for f in self._factors] != [f.rows for f in other._factors]:
            return None
        pairs = zip(self._balanced(), other._balanced(), strict=True)
        return KroneckerProductLinearOperator(*(one.times(two) for one, two in pairs))

    def _transposed(self) -> "KroneckerProductLinearOperator":
        return KroneckerProductLinearOperator(*(factor.transposed() for factor in self._factors))

    def _squared_entries(self) -> "KroneckerProductLinearOperator":
        return KroneckerProductLinearOperator(*(factor.squared() for factor in self._balanced()))

    def _to(self, device: torch.device, dtype: torch.dtype) -> "KroneckerProductLinearOperator":
        return KroneckerProductLinearOperator(*(f.to(device, dtype) for f in self._factors))

    def _names(self) -> list[str]:
        return [name_of_factor(i) for i in range(len(self._factors))]

    def _need_square_factors(self, what: str) -> None:
        shapes = [(factor.rows, factor.columns) for factor in self._factors]
        if any(rows != columns for rows, columns in shapes):
            raise ValueError(f"{what} needs square factors, got shapes {shapes}.")


def _read(factor: Tensor | StructuredLinearOperator | Factor, index: int) -> list[Factor]:
    """Return what the Kronecker product computes with."""
    if isinstance(factor, Dense | Diagonal):
        return [factor]
    if isinstance(factor, IdentityLinearOperator):
        one = torch.ones(1, dtype=factor.torch_dtype, device=factor.device)
        identity = unit(factor.domain.dim, one)
        return [identity if factor.scalar == 1 else identity.scaled(factor.scalar)]
    if isinstance(factor, DiagonalLinearOperator):
        return [Diagonal(factor.diagonal().unsqueeze(0))]
    name = name_of_factor(index)
    if isinstance(factor, KroneckerProductLinearOperator):
        if factor._groups > 1:
            raise ValueError(f"{name} has groups. Pass its factors instead.")
        return factor._factors
    if isinstance(factor, StructuredLinearOperator):
        raise TypeError(f"{name} is a {type(factor).__name__}; pass the matrix .to_dense().")
    tensor = real(factor, name, ndim=(2, 3))
    return [Dense(tensor.unsqueeze(0) if tensor.ndim == 2 else tensor)]


def _in_one_place(factors: list[Factor]) -> list[Factor]:
    """Return the factors in their common dtype, all on one device."""
    tensors = [tensor_of(factor) for factor in factors]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(
            f"The factors of a Kronecker product live on {sorted(map(str, devices))}. Move them to "
            "one device."
        )
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    return [
        factor if tensor.dtype == dtype else factor.to(tensor.device, dtype)
        for factor, tensor in zip(factors, tensors, strict=True)
    ]


def name_of_factor(index: int) -> str:
    """Return how messages call a factor."""
    return f"Factor {index} of the Kronecker product"
