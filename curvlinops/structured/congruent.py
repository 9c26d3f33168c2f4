"""Matrices that are diagonal up to a congruence, as sums of two Kronecker products are."""

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.core.space import Columns
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.decompositions import eigh_batched
from curvlinops.structured.diagonal_factor import Diagonal
from curvlinops.structured.eigenvalues import powers, signed_logarithm
from curvlinops.structured.factors import Dense, Factor
from curvlinops.structured.kronecker import KroneckerProductLinearOperator


@recorded
class CongruentLinearOperator(StructuredLinearOperator):
    """A symmetric matrix ``X diag(values) X^T``, where X need not be orthogonal.

    Unlike that of an eigendecomposition, its structure is lost if a multiple of the identity is
    added, and it has no powers except for the inverse.

    Args:
        values: The diagonal, ``[D]``.
        basis: X, a Kronecker product of square, nonsingular factors.
    """

    def __init__(self, values: Tensor, basis: KroneckerProductLinearOperator):
        self.values, self.basis = values, basis
        super().__init__(basis.domain)

    def _record(self) -> tuple:
        return self.values, self.basis

    def _apply(self, columns: Columns) -> Columns:
        found = self.basis._apply_adjoint(columns)[""] * self.values
        return self.basis._apply({"": found})

    def _multiply_root(self, columns: Columns) -> Columns:
        """Multiply by a matrix R with ``R R^T`` equal to the operator."""
        return self.basis._apply({"": columns[""] * powers(self.values, 0.5)})

    def _root(self) -> "CongruentLinearOperator":
        return self

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.diagonal().sum()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        gram = KroneckerProductLinearOperator(
            *(
                factor.transposed().times(factor).to(self.device, torch.float64).squared()
                for factor in self.basis._factors
            )
        )
        values = self.values.double()
        product = gram._apply({"": values.unsqueeze(0)})[""][0]
        return (values @ product).clamp(min=0).sqrt().to(self.torch_dtype)

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self.basis._squared_entries()._apply({"": self.values.unsqueeze(0)})[""][0]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        sign, logarithm = signed_logarithm(self.values)
        return sign, logarithm + 2 * self.basis._slogdet()[1]

    def _inverse(self, retry_double_precision: bool) -> "CongruentLinearOperator":
        inverses = (_transposed_inverse(factor) for factor in self.basis._factors)
        return CongruentLinearOperator(
            powers(self.values, -1.0), KroneckerProductLinearOperator(*inverses)
        )

    def _scaled(self, scalar: float) -> "CongruentLinearOperator":
        return CongruentLinearOperator(scalar * self.values, self.basis)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "CongruentLinearOperator":
        return CongruentLinearOperator(self.values.to(device, dtype), self.basis._to(device, dtype))


def diagonalize(
    first: KroneckerProductLinearOperator, second: KroneckerProductLinearOperator
) -> CongruentLinearOperator:
    """Return the sum of two Kronecker products of two symmetric factors each.

    With ``P_1 = S S^T`` and ``P_2 = S diag(l) S^T``, likewise ``Q_1 = T T^T`` and
    ``Q_2 = T diag(m) T^T``, the sum ``P_1 (x) Q_1 + P_2 (x) Q_2`` is
    ``(S (x) T) diag(1 + l_i m_j) (S (x) T)^T``.

    Raises:
        ValueError: If a factor of the first one is not positive definite.
    """
    pairs = zip(first._factors, second._factors, strict=True)
    (S, left), (T, right) = (_simultaneous(*pair, f"Factor {i}") for i, pair in enumerate(pairs))
    values = 1 + left.unsqueeze(-1) * right.unsqueeze(-2)
    groups = max(first._groups, second._groups)
    values = values.expand(groups, *values.shape[1:]).flatten()
    return CongruentLinearOperator(values, KroneckerProductLinearOperator(S, T))


def _simultaneous(first: Factor, second: Factor, name: str) -> tuple[Factor, Tensor]:
    """Return S and l with ``first = S S^T`` and ``second = S diag(l) S^T``."""
    if isinstance(first, Diagonal):
        if bool((first.entries <= 0).any()):
            raise _not_definite(name)
        root = first.entries.sqrt()
        if isinstance(second, Diagonal):
            return Diagonal(root), second.entries / first.entries
        middle = second.tensor / (root.unsqueeze(-1) * root.unsqueeze(-2))
        ((values, vectors),) = eigh_batched([middle], [name])
        return Dense(root.unsqueeze(-1) * vectors, symmetric=False), values
    L, failed = torch.linalg.cholesky_ex(first.tensor.double())
    if bool(failed.any()):
        raise _not_definite(name)
    half = torch.linalg.solve_triangular(L, second.dense().double(), upper=False)
    middle = torch.linalg.solve_triangular(L, half.mT, upper=False)
    ((values, vectors),) = eigh_batched([middle], [name])
    like = first.tensor
    return Dense((L @ vectors).to(like), symmetric=False), values.to(like)


def _not_definite(name: str) -> ValueError:
    return ValueError(
        f"{name} of the first term is not positive definite, so that the sum of Kronecker products "
        "cannot be diagonalized. Add damping to the factors."
    )


def _transposed_inverse(factor: Factor) -> Factor:
    if isinstance(factor, Diagonal):
        return Diagonal(1 / factor.entries)
    inverse = torch.linalg.inv(factor.tensor.double()).mT
    return Dense(inverse.to(factor.tensor), symmetric=False)
