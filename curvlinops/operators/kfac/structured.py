"""Operators on data whose matrix has a structure that makes more than products cheap."""

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.operator import Multiple, TorchLinearOperator
from curvlinops.linear_operator.space import Columns
from curvlinops.operators.base import DataLinearOperator
from curvlinops.structured.base import StructuredLinearOperator


class StructuredDataLinearOperator(DataLinearOperator):
    """A matrix that is computed from all data once, and has structure.

    Multiples, powers, and sums with multiples of the identity have structure, too.
    """

    __mul__: Multiple[StructuredLinearOperator]
    __rmul__: Multiple[StructuredLinearOperator]

    @property
    @abstractmethod
    def structure(self) -> StructuredLinearOperator:
        """The matrix as a structured operator."""

    _has_structure = True

    def _structured(self) -> StructuredLinearOperator:
        return self.structure

    def _plus(self, other: TorchLinearOperator) -> TorchLinearOperator | None:
        return self.structure._plus(other) if other._has_structure else None

    def _times(self, other: TorchLinearOperator) -> TorchLinearOperator | None:
        return self.structure._times(other) if other._has_structure else None

    def _scaled(self, scalar: float) -> StructuredLinearOperator:
        return self.structure._scaled(scalar)

    def _shifted(self, scalar: float) -> StructuredLinearOperator:
        return self.structure._shifted(scalar)

    def _raised(self, exponent: float) -> StructuredLinearOperator:
        return self.structure.power(exponent)

    def _eigenpairs(self, k: int, which: str) -> tuple[Tensor, Tensor] | None:
        return self.structure._eigenpairs(k, which)

    def _apply(self, columns: Columns) -> Columns:
        return self.structure._apply(columns)

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        return self.structure._apply_restricted(columns, names)

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.structure.trace()

    def det(self) -> Tensor:
        """Return the determinant, a scalar; it over- and underflows easily."""
        return self.structure.det()

    def logdet(self) -> Tensor:
        """Return the logarithm of the determinant, a scalar; minus infinity if that is zero."""
        return self.structure.logdet()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return self.structure.frobenius_norm()

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self.structure.diagonal()

    def eigvalsh(self) -> Tensor:
        """Return all eigenvalues in ascending order, ``[D]``."""
        return self.structure.eigvalsh()

    def eigh(self) -> StructuredLinearOperator:
        """Return the eigendecomposition, an ``EighDecomposedLinearOperator``."""
        return self.structure.eigh()

    def solve(self, b: Any) -> Any:
        """Return the solution x of ``A x = b``, without damping."""
        return self.structure.solve(b)

    def power(self, exponent: float) -> StructuredLinearOperator:
        """Return a power, which has the same structure."""
        return self.structure.power(exponent)

    def sample(
        self,
        generator: torch.Generator | None = None,
        num_samples: int | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """Draw normal vectors with this covariance, ``[D]``, or ``[D, num_samples]``."""
        return self.structure.sample(generator, num_samples, seed)
