"""Diagonal matrices."""

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.identity import IdentityLinearOperator
from curvlinops.structured.linalg import power, real
from curvlinops.support.norms import double_norm
from curvlinops.support.records import recorded
from curvlinops.support.torch_modes import in_default_modes


@recorded
class DiagonalLinearOperator(StructuredLinearOperator):
    """A diagonal matrix.

    Args:
        diagonal: The diagonal, ``[D]``.
        space: The space of the vectors, if they are those of parameters. Default: plain vectors.

    Raises:
        TypeError: If the diagonal is no tensor of real floating-point numbers.
        ValueError: If it has NaN or infinite values, or does not fit the space.
    """

    def __init__(self, diagonal: Tensor, space: ParameterSpace | None = None):
        entries = real(diagonal, "The diagonal", ndim=(1,))
        if space is None:
            space = ParameterSpace.flat(len(entries), entries.dtype, entries.device)
        elif space.dim != len(entries):
            raise ValueError(
                f"The diagonal has {len(entries)} entries, the space dimension {space.dim}."
            )
        self._entries = entries.to(space.device, space.dtype)
        super().__init__(space)

    def _record(self) -> tuple:
        return self._entries, self.domain

    def _apply(self, columns: Columns) -> Columns:
        diagonal = self.domain.split(self._entries.unsqueeze(0))
        return {name: column * diagonal[name] for name, column in columns.items()}

    @in_default_modes
    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self._entries.sum()

    @in_default_modes
    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return double_norm(self._entries, 0).to(self.torch_dtype)

    @in_default_modes
    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self._entries.clone()

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> EighDecomposedLinearOperator:
        values = self._entries + shift
        return EighDecomposedLinearOperator(values, IdentityLinearOperator(self.domain))

    def _with(self, entries: Tensor) -> "DiagonalLinearOperator":
        return DiagonalLinearOperator(entries, self.domain)

    def _inverse(self, shift: float, retry_double_precision: bool) -> "DiagonalLinearOperator":
        return self._with(power(self._entries + shift, -1.0))

    def _power(self, exponent: float) -> "DiagonalLinearOperator":
        return self._with(power(self._entries, exponent))

    def _scaled(self, scalar: float) -> "DiagonalLinearOperator":
        return self._with(scalar * self._entries)

    def _shifted(self, scalar: float) -> "DiagonalLinearOperator":
        return self._with(self._entries + scalar)

    def _added(self, other: StructuredLinearOperator) -> "DiagonalLinearOperator | None":
        if not isinstance(other, DiagonalLinearOperator):
            return None
        return self._with_names(other)._with(self._entries + other._entries)

    def _multiplied(self, other: StructuredLinearOperator) -> "DiagonalLinearOperator | None":
        if not isinstance(other, DiagonalLinearOperator):
            return None
        return self._with_names(other)._with(self._entries * other._entries)

    def _with_names(self, other: "DiagonalLinearOperator") -> "DiagonalLinearOperator":
        """Return the one of two that has parameter structure."""
        return other if self.domain.is_flat else self

    def _squared_entries(self) -> "DiagonalLinearOperator":
        return self._with(self._entries**2)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DiagonalLinearOperator":
        space = self.domain.to(device, dtype)
        return DiagonalLinearOperator(self._entries.to(device, dtype), space)
