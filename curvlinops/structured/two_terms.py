"""Sums of two Kronecker products in a basis in which both are diagonal."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.factor import Factor, decompose, multiply, slogdet
from curvlinops.structured.linalg import (
    eigh_batched,
    power,
    shifted,
    signed_logarithm,
    tolerance,
    without_rounding,
)
from curvlinops.support.records import recorded


@recorded
class DiagonalizedSumLinearOperator(StructuredLinearOperator):
    """A symmetric matrix ``X diag(values) X^T``, where X need not be orthogonal.

    Unlike that of an eigendecomposition, its structure is lost if a multiple of the identity is
    added, and it has no powers except for the inverse.

    Args:
        values: The diagonal, for each of G groups, ``[G, D / G]``.
        basis: X, as the square factors of a Kronecker product.
        dual: ``X^-T``, likewise.
    """

    def __init__(self, values: Tensor, basis: Sequence[Factor], dual: Sequence[Factor]):
        self.values, self.basis, self.dual = values, tuple(basis), tuple(dual)
        super().__init__(ParameterSpace.flat(values.numel(), values.dtype, values.device))

    def _record(self) -> tuple:
        return self.values, self.basis, self.dual

    def _multiply(self, factors: Sequence[Factor], columns: Columns) -> Tensor:
        return multiply(factors, len(self.values), columns[""])

    def _apply(self, columns: Columns) -> Columns:
        adjoint = [factor.transposed() for factor in self.basis]
        product = self._multiply(adjoint, columns) * self.values.flatten()
        return {"": self._multiply(self.basis, {"": product})}

    def _multiply_root(self, columns: Columns) -> Columns:
        """Multiply by a matrix R with ``R R^T`` equal to the operator."""
        scaled = columns[""] * power(self.values, 0.5).flatten()
        return {"": self._multiply(self.basis, {"": scaled})}

    def _root(self) -> "DiagonalizedSumLinearOperator":
        return self

    def _norm(self) -> Tensor:
        gram = [factor.transposed().times(factor).squared() for factor in self.basis]
        values = self.values.flatten()
        product = self._multiply(gram, {"": values.unsqueeze(0)})[0]
        return (values @ product).clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        squares = [factor.squared() for factor in self.basis]
        return self._multiply(squares, {"": self.values.view(1, -1)})[0]

    def _has_eigh(self) -> bool:
        return False

    def _slogdet(self, shift: float) -> tuple[Tensor, Tensor]:
        if shift:
            raise self._lacks("determinant of a sum with the identity")
        sign, logarithm = signed_logarithm(self.values.flatten())
        return sign, logarithm + 2 * slogdet(self.basis, len(self.values))[1]

    def _inverse(
        self, shift: float, retry_double_precision: bool
    ) -> "DiagonalizedSumLinearOperator":
        if shift:
            raise self._lacks("inverse of a sum with the identity")
        return DiagonalizedSumLinearOperator(power(self.values, -1.0), self.dual, self.basis)

    def _scaled(self, scalar: float) -> "DiagonalizedSumLinearOperator":
        return DiagonalizedSumLinearOperator(scalar * self.values, self.basis, self.dual)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DiagonalizedSumLinearOperator":
        basis, dual = ([f.to(device, dtype) for f in some] for some in (self.basis, self.dual))
        return DiagonalizedSumLinearOperator(self.values.to(device, dtype), basis, dual)


def simultaneous_diagonalization(
    first: Sequence[Factor], second: Sequence[Factor], names: Sequence[str]
) -> DiagonalizedSumLinearOperator | None:
    """Return the sum of two Kronecker products of two symmetric factors each.

    With ``P_1 = S S^T`` and ``P_2 = S diag(l) S^T``, likewise ``Q_1 = T T^T`` and
    ``Q_2 = T diag(m) T^T``, the sum ``P_1 (x) Q_1 + P_2 (x) Q_2`` is
    ``(S (x) T) diag(1 + l_i m_j) (S (x) T)^T``.

    Args:
        first: ``P_1`` and ``Q_1``.
        second: ``P_2`` and ``Q_2``.
        names: What the first two are called in messages.

    Returns:
        ``None`` if a factor of the first product is not positive definite.
    """
    decompose(first, names, [True] * 2)
    if not all(bool((factor.eigenvalues() > 0).all()) for factor in first):
        return None
    pairs = zip(first, second, strict=True)
    (S, dual_S, left), (T, dual_T, right) = (_common_basis(*pair) for pair in pairs)
    groups, eps = (
        max(getattr(factor, name) for factor in (*first, *second)) for name in ("groups", "eps")
    )
    values = left.unsqueeze(-1) * right.unsqueeze(-2)
    values = values.expand(groups, *values.shape[1:]).flatten(1)
    values = shifted(values, 1.0, tolerance(max(S.rows, T.rows), eps), 0.0)
    values = values.to(first[0].tensor.dtype)
    return DiagonalizedSumLinearOperator(values, (S, T), (dual_S, dual_T))


def _common_basis(first: Factor, second: Factor) -> tuple[Factor, Factor, Tensor]:
    """Return S, ``S^-T`` and l with ``first = S S^T`` and ``second = S diag(l) S^T``.

    Args:
        first: A positive definite factor, decomposed.
        second: A symmetric factor.
    """
    root = first.eigenvalues().double().sqrt()
    if first.is_diagonal and second.is_diagonal:
        values = second.tensor / first.tensor
        return Factor(root.to(values)), Factor((1 / root).to(values)), values
    Q = first.eigenvectors().dense().double()
    middle = Q.mT @ second.dense().double() @ Q / (root.unsqueeze(-1) * root.unsqueeze(-2))
    [(values, vectors)] = eigh_batched([middle], ["A factor of a sum of Kronecker products"])
    bases = (Q * root.unsqueeze(-2)) @ vectors, (Q / root.unsqueeze(-2)) @ vectors
    S, dual = (Factor(basis.to(second.tensor.dtype), symmetric=False) for basis in bases)
    return S, dual, without_rounding(values, second.eps, second.psd)
