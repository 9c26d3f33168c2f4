"""Matrices with known eigenvalues: eigendecompositions."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.linalg import power, real, signed_logarithm
from curvlinops.support.norms import double_norm
from curvlinops.support.serialization import recorded
from curvlinops.support.torch_modes import in_default_modes


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
            eigenvectors = DenseMatrix(eigenvectors)
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

    def _apply(self, columns: Columns, wanted: Sequence[str]) -> Columns:
        # columns get a new value at each step, so that the memory of the old one is free
        columns = self._transposed_eigenvectors._apply(columns, self.domain.names)
        columns = self._scale(columns, self.eigenvalues)
        return self.eigenvectors._apply(columns, wanted)

    @cached_property
    def _transposed_eigenvectors(self) -> StructuredLinearOperator:
        return self.eigenvectors._adjoint()

    def _multiply_root(self, columns: Columns) -> Columns:
        columns = self._scale(columns, power(self.eigenvalues, 0.5))
        return self.eigenvectors._apply(columns, self.domain.names)

    def _scale(self, columns: Columns, diagonal: Tensor) -> Columns:
        """Multiply columns by a diagonal matrix."""
        scales = self.domain.split_rows(diagonal.unsqueeze(0))
        return {name: column * scales[name] for name, column in columns.items()}

    def _diagonal(self) -> Tensor:
        squares = self.eigenvectors._squared_entries()
        return squares._apply_rows(self.eigenvalues.unsqueeze(0))[0].clone()

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
class DenseMatrix(StructuredLinearOperator):
    """Eigenvectors, or the squares of their entries, as a dense matrix: products only.

    Args:
        matrix: The matrix, ``[D, D]``.
    """

    def __init__(self, matrix: Tensor):
        self.matrix = real(matrix, "The matrix of eigenvectors", ndim=(2,))
        space = ParameterSpace.flat(matrix.shape[0], self.matrix.dtype, matrix.device)
        if matrix.shape[0] != matrix.shape[1]:
            raise ValueError(f"Eigenvectors must be square, got shape {list(matrix.shape)}.")
        super().__init__(space, self_adjoint=False)

    def _record(self) -> tuple:
        return (self.matrix,)

    def _apply(self, columns: Columns, wanted: Sequence[str]) -> Columns:
        return {"": columns[""] @ self.matrix.T}

    def _transposed(self) -> "DenseMatrix":
        return DenseMatrix(self.matrix.T)

    def _squared_entries(self) -> "DenseMatrix":
        return DenseMatrix(self.matrix**2)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DenseMatrix":
        return DenseMatrix(self.matrix.to(device, dtype))
