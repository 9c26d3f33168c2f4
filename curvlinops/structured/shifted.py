"""A structured matrix plus a multiple of the identity."""

import torch
from torch import Tensor

from curvlinops.core.records import recorded
from curvlinops.core.space import Columns
from curvlinops.structured.base import StructuredLinearOperator


@recorded
class ShiftedLinearOperator(StructuredLinearOperator):
    """The sum ``A + c I``, whose products, trace and norm need no eigendecomposition.

    The rest uses that of A, so that it is computed once for all values of c.

    Args:
        operator: A.
        shift: c.
    """

    def __init__(self, operator: StructuredLinearOperator, shift: float):
        self.operator, self.shift = operator, shift
        super().__init__(operator.domain, operator.self_adjoint)

    def _record(self) -> tuple:
        return self.operator, self.shift

    def _apply(self, columns: Columns) -> Columns:
        return self._add(self.operator._apply(columns), columns)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._add(self.operator._apply_adjoint(columns), columns)

    def _add(self, products: Columns, columns: Columns) -> Columns:
        return {
            name: torch.add(product, columns[name], alpha=self.shift)
            for name, product in products.items()
        }

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.operator.trace() + self.shift * self.domain.dim

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return self.operator._shifted_norm(self.shift).to(self.torch_dtype)

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self.operator.diagonal() + self.shift

    def _eigh(self) -> StructuredLinearOperator:
        return self.operator.eigh()._shifted(self.shift)

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        self._need_symmetry("A determinant")
        return self.eigh()._slogdet()

    def _scaled(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._scaled(scalar), scalar * self.shift)

    def _shifted(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator, self.shift + scalar)

    def _transposed(self) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._transposed(), self.shift)

    def _matrices(self) -> list:
        return self.operator._matrices()

    def _matrices_to_invert(self) -> list:
        return self._matrices()

    def _to(self, device: torch.device, dtype: torch.dtype) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._to(device, dtype), self.shift)
