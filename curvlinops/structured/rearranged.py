"""Structured matrices on parameters whose entries are in another order."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from curvlinops.core.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator


class Arrangement(Protocol):
    """A bijection between the entries of parameters and those of a plain vector.

    It must be picklable, and compare equal to others that do the same.
    """

    def gather(self, columns: Columns) -> Tensor:
        """Turn vectors ``{name: [K, *shape]}`` into ``[K, n]``."""

    def scatter(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, n]`` into ``{name: [K, *shape]}``; the inverse of ``gather``."""


class JoinedMatrices:
    """Writes parameters side by side, as the columns of one matrix ``[*lead, columns]``.

    A weight ``[out, in]`` and a bias ``[out]`` become ``[out, in + 1]`` with
    ``JoinedMatrices({"weight": (out, in), "bias": (out,)}, lead=1)``. Axes are first
    divided and permuted where necessary: ``views={"weight": (G, in, out)}`` and
    ``orders={"weight": (0, 2, 1)}`` make ``[G, out, in]`` of a weight ``[G * in, out]``.

    Args:
        shapes: Name and shape of each parameter.
        lead: How many axes, counted after the permutation, the parameters share; the other axes are
            flattened to columns. A parameter without other axes is one column.
        views: Shapes into which to reshape parameters first. Default: their own.
        orders: The order into which to permute the axes. Default: as they are.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        lead: int,
        views: Mapping[str, Sequence[int]] | None = None,
        orders: Mapping[str, Sequence[int]] | None = None,
    ):
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        views, orders = views or {}, orders or {}
        self.views = {n: tuple(views.get(n, shape)) for n, shape in self.shapes.items()}
        self.orders = {n: tuple(orders.get(n, range(len(v)))) for n, v in self.views.items()}
        permuted = {n: [view[i] for i in self.orders[n]] for n, view in self.views.items()}
        leads = {tuple(shape[:lead]) for shape in permuted.values()}
        if len(leads) != 1:
            raise ValueError(f"The parameters share no {lead} leading axes: {permuted}.")
        self.lead = leads.pop()
        self.widths = {name: prod(shape[lead:]) for name, shape in permuted.items()}

    def gather(self, columns: Columns) -> Tensor:
        """Turn vectors ``{name: [K, *shape]}`` into ``[K, n]`` (a view where possible)."""
        parts = []
        for name, view in self.views.items():
            column = columns[name]
            order = (0, *(i + 1 for i in self.orders[name]))
            part = column.reshape(len(column), *view).permute(order)
            parts.append(part.reshape(len(column), *self.lead, self.widths[name]))
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
        return joined.reshape(len(joined), prod(self.lead) * sum(self.widths.values()))

    def scatter(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, n]`` into ``{name: [K, *shape]}`` (views where possible)."""
        matrix = flat.reshape(len(flat), *self.lead, sum(self.widths.values()))
        out = {}
        parts = matrix.split(list(self.widths.values()), dim=-1)
        for (name, view), part in zip(self.views.items(), parts, strict=True):
            order = self.orders[name]
            part = part.reshape(len(flat), *(view[i] for i in order))
            back = (0, *(order.index(i) + 1 for i in range(len(order))))
            out[name] = part.permute(back).reshape(len(flat), *self.shapes[name])
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JoinedMatrices) and vars(self) == vars(other)

    __hash__ = None


class RearrangedLinearOperator(StructuredLinearOperator):
    """A structured operator on plain vectors, applied to parameters: ``P^T A P``.

    Args:
        operator: A.
        space: The names and shapes of the parameters. Dtype and device are those of A.
        arrangement: P, which permutes the entries of the parameters.
    """

    def __init__(
        self, operator: StructuredLinearOperator, space: ParameterSpace, arrangement: Arrangement
    ):
        if operator.shape != (space.dim, space.dim):
            raise ValueError(
                f"An operator of shape {operator.shape} cannot act on {space.dim} parameters."
            )
        self.operator, self.arrangement = operator, arrangement
        domain = ParameterSpace(space.shapes, operator.torch_dtype, operator.device)
        super().__init__(domain, operator.self_adjoint)

    def _apply(self, columns: Columns) -> Columns:
        return self._conjugate(self.operator._apply, columns)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._conjugate(self.operator._apply_adjoint, columns)

    def _conjugate(self, product: Callable[[Columns], Columns], columns: Columns) -> Columns:
        flat = self.operator.domain.split(self.arrangement.gather(columns))
        return self.arrangement.scatter(self.operator.codomain.join(product(flat)))

    def _vector(self, flat: Tensor) -> Tensor:
        """Arrange a vector ``[D]`` as the parameters."""
        return self.domain.join(self.arrangement.scatter(flat.unsqueeze(0)))[0].clone()

    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self.operator.trace()

    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        return self.operator.frobenius_norm()

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self._vector(self.operator.diagonal())

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self.operator._slogdet()

    def _with(self, operator: StructuredLinearOperator) -> "RearrangedLinearOperator":
        return RearrangedLinearOperator(operator, self.domain, self.arrangement)

    def _eigh(self) -> EighDecomposedLinearOperator:
        inner = self.operator.eigh()
        values, vectors = self._vector(inner.eigenvalues), self._with(inner.eigenvectors)
        return EighDecomposedLinearOperator.of(self._with(inner), values, vectors)

    def _errors(self, of_factor: Callable) -> Tensor:
        return self._vector(self.operator._errors(of_factor))

    def _largest_error(self, of_factor: Callable) -> Tensor:
        return self.operator._largest_error(of_factor)

    def _wide_eigh(self) -> EighDecomposedLinearOperator:
        return self._with(self.operator._wide_eigh())._eigh()

    def _matrices(self) -> list:
        return self.operator._matrices()

    def _matrices_to_invert(self) -> list:
        return self.operator._matrices_to_invert()

    def _inverse(self, retry_double_precision: bool) -> "RearrangedLinearOperator":
        return self._with(self.operator._inverse(retry_double_precision))

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
        return self.domain.shapes == other.domain.shapes and self.arrangement == other.arrangement

    def _to(self, device: torch.device, dtype: torch.dtype) -> "RearrangedLinearOperator":
        space = ParameterSpace(self.domain.shapes, dtype, device)
        return RearrangedLinearOperator(self.operator._to(device, dtype), space, self.arrangement)
