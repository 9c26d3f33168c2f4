"""Matrices given by their eigenvalues and eigenvectors."""

import torch
from torch import Tensor

from curvlinops.core.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.checks import real
from curvlinops.structured.eigenvalues import powers, signed_logarithm


class EighDecomposedLinearOperator(StructuredLinearOperator):
    """A symmetric matrix ``Q diag(eigenvalues) Q^T``.

    Args:
        eigenvalues: The eigenvalues, ``[D]``, in the order of the columns of Q. They are cast to
            the dtype of Q.
        eigenvectors: Q, orthogonal: a matrix ``[D, D]`` with the eigenvectors as columns, or an
            operator such as a Kronecker product of orthogonal matrices. Orthogonality is not
            checked.
    """

    def __init__(self, eigenvalues: Tensor, eigenvectors: Tensor | StructuredLinearOperator):
        values = real(eigenvalues, "The vector of eigenvalues", ndim=(1,))
        if not isinstance(eigenvectors, StructuredLinearOperator):
            eigenvectors = OrthogonalMatrix(eigenvectors)
        if eigenvectors.shape != (len(values), len(values)):
            raise ValueError(
                f"{len(values)} eigenvalues need eigenvectors of shape "
                f"{[len(values)] * 2}, got {list(eigenvectors.shape)}."
            )
        space = eigenvectors.domain
        self.eigenvalues = values.to(space.device, space.dtype)
        self.eigenvectors = eigenvectors
        super().__init__(space)

    def _apply(self, columns: Columns) -> Columns:
        return self._multiply(columns, self.eigenvalues)

    def _multiply(self, columns: Columns, values: Tensor) -> Columns:
        """Multiply by the matrix with the same eigenvectors and other eigenvalues."""
        return self._to_eigenbasis(self.eigenvectors._apply_adjoint(columns), values)

    def _multiply_root(self, columns: Columns) -> Columns:
        """Multiply by a matrix R with ``R R^T`` equal to the operator."""
        return self._to_eigenbasis(columns, powers(self.eigenvalues, 0.5))

    def _to_eigenbasis(self, columns: Columns, values: Tensor) -> Columns:
        scale = self.domain.split(values.unsqueeze(0))
        scaled = {name: column * scale[name] for name, column in columns.items()}
        return self.eigenvectors._apply(scaled)

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.eigenvalues.sum()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return torch.linalg.vector_norm(self.eigenvalues)

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        values = self.domain.split(self.eigenvalues.unsqueeze(0))
        return self.domain.join(self.eigenvectors._squared_entries()._apply(values))[0].clone()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return signed_logarithm(self.eigenvalues)

    def _eigh(self) -> "EighDecomposedLinearOperator":
        return self

    def eigh(self) -> "EighDecomposedLinearOperator":
        """Return the operator itself."""
        return self

    def with_eigenvalues(self, eigenvalues: Tensor) -> "EighDecomposedLinearOperator":
        """Return the operator with the same eigenvectors and other eigenvalues, ``[D]``."""
        return EighDecomposedLinearOperator(eigenvalues, self.eigenvectors)

    def _inverse(self, retry_double_precision: bool) -> "EighDecomposedLinearOperator":
        return self._power(-1.0)

    def _power(self, exponent: float) -> "EighDecomposedLinearOperator":
        return self.with_eigenvalues(powers(self.eigenvalues, exponent))

    def _scaled(self, scalar: float) -> "EighDecomposedLinearOperator":
        return self.with_eigenvalues(scalar * self.eigenvalues)

    def _shifted(self, scalar: float) -> "EighDecomposedLinearOperator":
        return self.with_eigenvalues(self.eigenvalues + scalar)

    def _shares_eigenvectors(self, other: StructuredLinearOperator) -> bool:
        same = isinstance(other, EighDecomposedLinearOperator)
        return same and other.eigenvectors is self.eigenvectors

    def _added(self, other: StructuredLinearOperator) -> "EighDecomposedLinearOperator | None":
        if not self._shares_eigenvectors(other):
            return None
        return self.with_eigenvalues(self.eigenvalues + other.eigenvalues)

    def _multiplied(self, other: StructuredLinearOperator) -> "EighDecomposedLinearOperator | None":
        if not self._shares_eigenvectors(other):
            return None
        return self.with_eigenvalues(self.eigenvalues * other.eigenvalues)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "EighDecomposedLinearOperator":
        vectors = self.eigenvectors._to(device, dtype)
        return EighDecomposedLinearOperator(self.eigenvalues.to(device, dtype), vectors)


class OrthogonalMatrix(StructuredLinearOperator):
    """Eigenvectors as a dense matrix: products only.

    Args:
        matrix: The matrix, ``[D, D]``.
    """

    def __init__(self, matrix: Tensor):
        self.matrix = real(matrix, "The matrix of eigenvectors", ndim=(2,))
        space = ParameterSpace.flat(matrix.shape[0], self.matrix.dtype, matrix.device)
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"Eigenvectors must be square, got shape {list(matrix.shape)}.")
        super().__init__(space, self_adjoint=False)

    def _apply(self, columns: Columns) -> Columns:
        return {"": columns[""] @ self.matrix.T}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return {"": columns[""] @ self.matrix}

    def _transposed(self) -> "OrthogonalMatrix":
        return OrthogonalMatrix(self.matrix.T)

    def _squared_entries(self) -> "OrthogonalMatrix":
        return OrthogonalMatrix(self.matrix**2)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "OrthogonalMatrix":
        return OrthogonalMatrix(self.matrix.to(device, dtype))
