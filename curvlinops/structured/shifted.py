"""Sums of Kronecker products and multiples of the identity."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.support.serialization import recorded


@recorded
class ShiftedLinearOperator(StructuredLinearOperator):
    """The sum ``A + c I``, where A is a Kronecker product, or a sum of several.

    The number c is not added to entries of A, so that it is not lost in their rounding errors. The
    inverse and the determinant come from the eigendecomposition of A, which is computed once for
    all values of c.

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

    def _make_parts(self, number: int) -> "list[ShiftedLinearOperator]":
        return [ShiftedLinearOperator(part, self.shift) for part in self.operator._parts(number)]

    def _apply(self, columns: Columns, wanted: Sequence[str]) -> Columns:
        products = self.operator._apply(columns, wanted)
        return {"": torch.add(products[""], columns[""], alpha=self.shift)}

    def _trace(self) -> Tensor:
        return self.operator._trace() + self.shift * self.domain.dim

    def _norm(self) -> Tensor:
        norm, trace = self.operator._norm().double(), self.operator._trace().double()
        square = norm**2 + 2 * self.shift * trace + self.shift**2 * self.domain.dim
        return square.clamp(min=0).sqrt()

    def _diagonal(self) -> Tensor:
        return self.operator._diagonal() + self.shift

    # --- functions of the operator

    @cached_property
    def _needs_double(self) -> bool:
        """Whether the shift is so small that small eigenvalues of A matter."""
        eps = torch.finfo(self.torch_dtype).eps
        norms = self.operator._norms()
        return norms.numel() > 0 and abs(self.shift) <= 1e3 * eps * float(norms.max())

    def _eigh(self, accurate: bool = False) -> StructuredLinearOperator:
        product = self.operator._as_product()
        return product._eigh(accurate and self._needs_double, self.shift)

    def _has_eigh(self) -> bool:
        return self.operator._has_eigh()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        self._need_symmetry("A determinant")
        return super()._slogdet()

    def _inverse(self, accurate: bool = True) -> StructuredLinearOperator:
        product = self.operator._as_product()
        if product._is_matrix():  # a Cholesky decomposition is faster
            return product._inverse(accurate, self.shift)
        return product._eigh(accurate and self._needs_double, self.shift, exponent=-1.0)

    # --- algebra

    def _scaled(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._scaled(scalar), scalar * self.shift)

    def _shifted(self, scalar: float) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator, self.shift + scalar)

    def _transposed(self) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._transposed(), self.shift)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "ShiftedLinearOperator":
        return ShiftedLinearOperator(self.operator._to(device, dtype), self.shift)
