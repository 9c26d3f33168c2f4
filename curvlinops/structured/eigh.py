"""Matrices given by their eigenvalues and eigenvectors."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.core.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.checks import real
from curvlinops.structured.eigenvalues import SLACK, powers, signed_logarithm, singular
from curvlinops.structured.norms import wide_norm


@recorded
class EighDecomposedLinearOperator(StructuredLinearOperator):
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
        self._origin: Origin | None = None
        super().__init__(space)

    @classmethod
    def of(
        cls,
        operator: StructuredLinearOperator,
        eigenvalues: Tensor,
        eigenvectors: Tensor | StructuredLinearOperator,
    ) -> "EighDecomposedLinearOperator":
        """Return the decomposition that was computed of an operator.

        Eigenvalues that may be rounding errors are not inverted, but computed anew in float64.
        """
        return cls._restored(eigenvalues, eigenvectors, Origin(operator))

    def _record(self) -> tuple:
        return self.eigenvalues, self.eigenvectors, self._origin

    @classmethod
    def _restored(
        cls, values: Tensor, vectors: StructuredLinearOperator, origin: "Origin | None"
    ) -> "EighDecomposedLinearOperator":
        found = cls(values, vectors)
        found._origin = origin
        return found

    def _apply(self, columns: Columns) -> Columns:
        return self._multiply(columns, self.eigenvalues)

    def _multiply(self, columns: Columns, values: Tensor) -> Columns:
        """Multiply by the matrix with the same eigenvectors and other eigenvalues."""
        return self._from_eigenbasis(self.eigenvectors._apply_adjoint(columns), values)

    def _multiply_root(self, columns: Columns) -> Columns:
        """Multiply by a matrix R with ``R R^T`` equal to the operator."""
        return self._from_eigenbasis(columns, powers(self.eigenvalues, 0.5))

    def _from_eigenbasis(self, columns: Columns, values: Tensor) -> Columns:
        scale = self.domain.split(values.unsqueeze(0))
        scaled = {name: column * scale[name] for name, column in columns.items()}
        return self.eigenvectors._apply(scaled)

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.eigenvalues.sum()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return wide_norm(self.eigenvalues, 0).to(self.torch_dtype)

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        values = self.domain.split(self.eigenvalues.unsqueeze(0))
        return self.domain.join(self.eigenvectors._squared_entries()._apply(values))[0].clone()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        if self._origin is None:
            return signed_logarithm(self.eigenvalues)
        found = self._accurate(retry_double_precision=True)
        if self._origin.shift == 0:
            lost = found._lost() | found._within(lambda factor: factor.vanishing())
        else:
            lost = found._lost() | found._within(lambda factor: 10 * factor.noise())
        if self._origin.shift != 0 and bool(lost.any()):
            raise ValueError(
                "The determinant is not known to working precision: what was added to the diagonal "
                f"({self._origin.shift:.2e}) is less than the rounding errors of eigenvalues up to "
                f"{float(found.eigenvalues.abs().max()):.2e}. Add more, or compute in float64."
            )
        sign, logarithm = signed_logarithm(found.eigenvalues.masked_fill(lost, 0))
        return sign.to(self.torch_dtype), logarithm.to(self.torch_dtype)

    def _accurate(self, retry_double_precision: bool) -> "EighDecomposedLinearOperator":
        """Return the operator, in float64 if small eigenvalues have lost digits in float32."""
        single = self.torch_dtype != torch.float64
        if retry_double_precision and single and bool(self._lost(SLACK).any()):
            return self._wide_eigh()
        return self

    def _lost(self, slack: float = 0.0) -> Tensor:
        """Return which eigenvalues may be rounding errors, ``[D]``."""
        return self._within(lambda factor: factor.rounding(slack))

    def _within(self, of_factor: Callable) -> Tensor:
        """Return which eigenvalues are not above their errors, ``[D]``, also NaN."""
        sizes = self.eigenvalues.abs()
        # one number tells of most operators that there are none
        if sizes.numel() == 0 or bool(sizes.amin() > self._largest_error(of_factor)):
            return torch.zeros_like(sizes, dtype=torch.bool)
        return ~(sizes > self._errors(of_factor))

    def _largest_error(self, of_factor: Callable) -> Tensor:
        if self._origin is None:
            return self.eigenvalues.new_tensor(-1.0)
        largest = self._origin.operator._largest_error(of_factor)
        return abs(self._origin.scale) * largest.to(self.eigenvalues)

    def _errors(self, of_factor: Callable) -> Tensor:
        if self._origin is None:
            return torch.full_like(self.eigenvalues, -1.0)
        errors = self._origin.operator._errors(of_factor)
        return abs(self._origin.scale) * errors.to(self.eigenvalues)

    def _wide_eigh(self) -> "EighDecomposedLinearOperator":
        if self._origin is None:
            return self._to(self.device, torch.float64)
        return self._origin.wide()

    def eigh(self) -> "EighDecomposedLinearOperator":
        """Return the operator itself."""
        return self

    def with_eigenvalues(self, eigenvalues: Tensor) -> "EighDecomposedLinearOperator":
        """Return the operator with the same eigenvectors and other eigenvalues, ``[D]``."""
        return EighDecomposedLinearOperator(eigenvalues, self.eigenvectors)

    def _inverse(self, retry_double_precision: bool) -> "EighDecomposedLinearOperator":
        return self._power(-1.0, retry_double_precision)

    def _power(
        self, exponent: float, retry_double_precision: bool = True
    ) -> "EighDecomposedLinearOperator":
        if exponent >= 0 or self._origin is None:
            return self.with_eigenvalues(powers(self.eigenvalues, exponent))
        found = self._accurate(retry_double_precision)
        values = found.eigenvalues
        if bool(found._lost().any()):
            raise singular("The operator", values, torch.finfo(self.torch_dtype).eps)
        inverse = found.with_eigenvalues(powers(values, exponent))
        return inverse if found is self else inverse._to(self.device, self.torch_dtype)

    def _scaled(self, scalar: float) -> "EighDecomposedLinearOperator":
        return self._changed(scalar, 0.0)

    def _shifted(self, scalar: float) -> "EighDecomposedLinearOperator":
        return self._changed(1.0, scalar)

    def _changed(self, scale: float, shift: float) -> "EighDecomposedLinearOperator":
        out = self.with_eigenvalues(scale * self.eigenvalues + shift)
        if self._origin is not None:
            out._origin = self._origin.changed(scale, shift)
        return out

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
        out = EighDecomposedLinearOperator(self.eigenvalues.to(device, dtype), vectors)
        if self._origin is not None:
            out._origin = self._origin.to(device)
        return out


@recorded
@dataclass(frozen=True)
class Origin:
    """Where eigenvalues come from: they are ``scale`` times those of an operator, plus ``shift``.

    Attributes:
        operator: The operator.
        scale: What its eigenvalues are multiplied by.
        shift: What is added then.
    """

    operator: StructuredLinearOperator
    scale: float = 1.0
    shift: float = 0.0

    def changed(self, scale: float, shift: float) -> "Origin":
        """Return the origin of eigenvalues that are multiplied and shifted once more."""
        return Origin(self.operator, scale * self.scale, scale * self.shift + shift)

    def to(self, device: torch.device) -> "Origin":
        """Return the origin on another device, in the precision that it has."""
        if device == self.operator.device:
            return self
        moved = self.operator._to(device, self.operator.torch_dtype)
        return Origin(moved, self.scale, self.shift)

    def wide(self) -> EighDecomposedLinearOperator:
        """Return the decomposition in float64. The entries in float32 are exact."""
        return self.operator._wide_eigh()._changed(self.scale, self.shift)


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

    def _apply(self, columns: Columns) -> Columns:
        return {"": columns[""] @ self.matrix.T}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return {"": columns[""] @ self.matrix}

    def _transposed(self) -> "DenseMatrix":
        return DenseMatrix(self.matrix.T)

    def _squared_entries(self) -> "DenseMatrix":
        return DenseMatrix(self.matrix**2)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DenseMatrix":
        return DenseMatrix(self.matrix.to(device, dtype))
