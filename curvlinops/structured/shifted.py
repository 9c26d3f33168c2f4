"""A structured matrix plus a multiple of the identity."""

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.support.records import recorded


@recorded
class ShiftedLinearOperator(StructuredLinearOperator):
    """The sum ``A + c I``.

    Its inverse, determinant and eigendecomposition are those that A has for the shift c, so that
    eigendecompositions are computed once for all values of c.

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

    def _apply(self, columns: Columns) -> Columns:
        return self._plus_multiple(self.operator._apply(columns), columns)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._plus_multiple(self.operator._apply_adjoint(columns), columns)

    def _plus_multiple(self, products: Columns, columns: Columns) -> Columns:
        return {
            name: torch.add(product, columns[name], alpha=self.shift)
            for name, product in products.items()
        }

    def _trace(self) -> Tensor:
        return self.operator._trace() + self.shift * self.domain.dim

    def _norm(self) -> Tensor:
        norm, trace = self.operator._norm().double(), self.operator._trace().double()
        square = norm**2 + 2 * self.shift * trace + self.shift**2 * self.domain.dim
        return square.clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return self.operator._diagonal() + self.shift

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> StructuredLinearOperator:
        return self.operator._eigh(self.shift + shift, accurate)

    def _has_eigh(self) -> bool:
        return self.operator._has_eigh()

    def _to_decompose(self, shift: float, accurate: bool) -> list:
        return self.operator._to_decompose(self.shift + shift, accurate)

    def _slogdet(self, shift: float) -> tuple[Tensor, Tensor]:
        self._need_symmetry("A determinant")
        return self.operator._slogdet(self.shift + shift)

    def _inverse(self, shift: float, retry_double_precision: bool) -> StructuredLinearOperator:
        return self.operator._inverse(self.shift + shift, retry_double_precision)

    def _scaled(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._scaled(scalar), scalar * self.shift)

    def _shifted(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator, self.shift + scalar)

    def _transposed(self) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._transposed(), self.shift)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._to(device, dtype), self.shift)
