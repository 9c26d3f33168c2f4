"""Structured matrices on parameters whose entries are in another order."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.support.records import recorded
from curvlinops.support.torch_modes import in_default_modes


class Placement(Protocol):
    """A bijection between the entries of parameters and those of a plain vector.

    It must be picklable, ``recorded``, and compare equal to others that do the same.
    """

    def gather(self, columns: Columns) -> Tensor:
        """Turn vectors ``{name: [K, *shape]}`` into ``[K, n]``."""

    def scatter(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, n]`` into ``{name: [K, *shape]}``; the inverse of ``gather``."""


@recorded
@dataclass(frozen=True)
class Transposes:
    """Reads a plain vector of the entries of matrices as those of their transposes.

    Attributes:
        shape: The matrices before, ``(G, rows, columns)``.
    """

    shape: tuple[int, int, int]

    def gather(self, columns: Columns) -> Tensor:
        """Turn the entries ``{"": [K, n]}`` of the matrices into those of their transposes."""
        return columns[""].unflatten(1, self.shape).mT.flatten(1)

    def scatter(self, flat: Tensor) -> Columns:
        """Turn the entries ``[K, n]`` of the transposes into those of the matrices."""
        groups, rows, columns = self.shape
        return {"": flat.unflatten(1, (groups, columns, rows)).mT.flatten(1)}


@recorded
@dataclass(frozen=True)
class InOrder:
    """Reads a plain vector as the entries of parameters, one after the other.

    Attributes:
        shapes: Names and shapes of the parameters.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, space: ParameterSpace) -> "InOrder":
        """Return the placement for the parameters of a space."""
        return cls(tuple(space.shapes.items()))

    def gather(self, columns: Columns) -> Tensor:
        """Turn vectors ``{name: [K, *shape]}`` into ``[K, n]``."""
        return ParameterSpace(dict(self.shapes)).join(columns)

    def scatter(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, n]`` into ``{name: [K, *shape]}``."""
        return ParameterSpace(dict(self.shapes)).split(flat)


@recorded
class RearrangedLinearOperator(StructuredLinearOperator):
    """A structured operator on plain vectors, applied to parameters: ``P^T A P``.

    Args:
        operator: A.
        space: The names and shapes of the parameters. Dtype and device are those of A.
        placement: P, which permutes the entries of the parameters.
    """

    def __init__(
        self, operator: StructuredLinearOperator, space: ParameterSpace, placement: Placement
    ):
        if operator.shape != (space.dim, space.dim):
            raise ValueError(
                f"An operator of shape {operator.shape} cannot act on {space.dim} parameters."
            )
        self.operator, self.placement = operator, placement
        domain = space.to(operator.device, operator.torch_dtype)
        super().__init__(domain, operator.self_adjoint)

    def _record(self) -> tuple:
        return self.operator, self.domain, self.placement

    def _apply(self, columns: Columns) -> Columns:
        return self._conjugate(self.operator._apply, columns)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._conjugate(self.operator._apply_adjoint, columns)

    def _conjugate(self, product: Callable[[Columns], Columns], columns: Columns) -> Columns:
        flat = self.operator.domain.split(self.placement.gather(columns))
        return self.placement.scatter(self.operator.codomain.join(product(flat)))

    def _vector(self, flat: Tensor) -> Tensor:
        """Arrange a vector ``[D]`` as the parameters."""
        return self.domain.join(self.placement.scatter(flat.unsqueeze(0)))[0].clone()

    @in_default_modes
    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.operator.trace()

    @in_default_modes
    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return self.operator.frobenius_norm()

    @in_default_modes
    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self._vector(self.operator.diagonal())

    def _slogdet(self, shift: float) -> tuple[Tensor, Tensor]:
        return self.operator._slogdet(shift)

    def _with(self, operator: StructuredLinearOperator) -> "RearrangedLinearOperator":
        return RearrangedLinearOperator(operator, self.domain, self.placement)

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> EighDecomposedLinearOperator:
        inner = self.operator._eigh(shift, accurate)
        values, vectors = self._vector(inner.eigenvalues), self._with(inner.eigenvectors)
        return EighDecomposedLinearOperator(values, vectors)

    def _to_decompose(self, shift: float, accurate: bool) -> list:
        return self.operator._to_decompose(shift, accurate)

    def _inverse(self, shift: float, retry_double_precision: bool) -> "RearrangedLinearOperator":
        return self._with(self.operator._inverse(shift, retry_double_precision))

    def _power(self, exponent: float) -> "RearrangedLinearOperator":
        return self._with(self.operator._power(exponent))

    def _scaled(self, scalar: float) -> "RearrangedLinearOperator":
        return self._with(self.operator._scaled(scalar))

    def _shifted(self, scalar: float) -> "RearrangedLinearOperator":
        return self._with(self.operator._shifted(scalar))

    def _transposed(self) -> "RearrangedLinearOperator":
        return self._with(self.operator._adjoint())

    def _squared_entries(self) -> "RearrangedLinearOperator":
        return self._with(self.operator._squared_entries())

    def _added(self, other: StructuredLinearOperator) -> "RearrangedLinearOperator | None":
        total = self.operator._plus(other.operator) if self._is_like(other) else None
        return None if total is None else self._with(total)

    def _multiplied(self, other: StructuredLinearOperator) -> "RearrangedLinearOperator | None":
        product = self.operator._times(other.operator) if self._is_like(other) else None
        return None if product is None else self._with(product)

    def _is_like(self, other: StructuredLinearOperator) -> bool:
        if not isinstance(other, RearrangedLinearOperator):
            return False
        return self.domain.shapes == other.domain.shapes and self.placement == other.placement

    def _to(self, device: torch.device, dtype: torch.dtype) -> "RearrangedLinearOperator":
        space = self.domain.to(device, dtype)
        return RearrangedLinearOperator(self.operator._to(device, dtype), space, self.placement)
