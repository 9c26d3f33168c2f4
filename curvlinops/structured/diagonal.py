"""Diagonal matrices, and multiples of the identity."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.linalg import power, real
from curvlinops.support.arguments import as_device, as_integer, without_graph
from curvlinops.support.norms import double_norm
from curvlinops.support.records import recorded


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

    def _norm(self) -> Tensor:
        return double_norm(self._entries, 0)

    def _diagonal(self) -> Tensor:
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
        return DiagonalLinearOperator(self._entries + other._entries, self._named_space(other))

    def _multiplied(self, other: StructuredLinearOperator) -> "DiagonalLinearOperator | None":
        if not isinstance(other, DiagonalLinearOperator):
            return None
        return DiagonalLinearOperator(self._entries * other._entries, self._named_space(other))

    def _named_space(self, other: StructuredLinearOperator) -> ParameterSpace:
        """Return the space of the one of two operators that acts on parameters."""
        return other.domain if self.domain.is_flat else self.domain

    def _squared_entries(self) -> "DiagonalLinearOperator":
        return self._with(self._entries**2)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DiagonalLinearOperator":
        space = self.domain.to(device, dtype)
        return DiagonalLinearOperator(self._entries.to(device, dtype), space)


@recorded
class IdentityLinearOperator(StructuredLinearOperator):
    """The identity, or a multiple of it. ``A.damped(delta)`` adds one to an operator.

    Args:
        space: The space; every operator of this package has one as ``space``. Or the dimension of
            plain vectors, or the shapes of several tensors, on the CPU: these are float32 unless
            the identity is added to, or multiplied with, an operator of higher precision.
        scalar: The number by which vectors are multiplied; one, if the device is in its place, as
            in ``IdentityLinearOperator(shapes, device, dtype)``.
        dtype: The type of the vectors, if not the space's.
        device: Where they live, if not where the space's do.

    Raises:
        TypeError: If the dtype is not a real floating-point type.
        ValueError: If a dimension is negative, or the number not finite in the space's precision.
    """

    def __init__(
        self,
        space: ParameterSpace | int | Sequence[Sequence[int]],
        scalar: float | torch.device | str = 1.0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ):
        if isinstance(scalar, torch.device | str):
            scalar, device = 1.0, scalar
        space = space if isinstance(space, ParameterSpace) else _space(space)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"dtype must be a real floating-point type of PyTorch, got {dtype}.")
        space = space.to(as_device(device or space.device), dtype)
        super().__init__(space)
        self.scalar = self._multiple = float(without_graph(scalar, "The scalar"))
        if not abs(self.scalar) <= torch.finfo(space.dtype).max:
            raise ValueError(
                f"A multiple of the identity in {space.dtype} cannot be {self.scalar:.3g}: that is "
                "no finite number."
            )

    def _record(self) -> tuple:
        return self.domain, self.scalar

    def _formula(self) -> str:
        return "Identity" if self.scalar == 1 else f"{self.scalar:g} * Identity"

    def _arguments(self) -> dict[str, Any]:
        return {}  # the formula has them

    def _apply(self, columns: Columns) -> Columns:
        return {name: self.scalar * column for name, column in columns.items()}

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        num_columns = next(iter(columns.values())).shape[0]
        some = {name: columns[name] for name in names if name in columns}
        return self.domain.restricted(names).zeros(num_columns) | self._apply(some)

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.torch_dtype, device=self.device)

    def _trace(self) -> Tensor:
        return self._number(self.scalar * self.domain.dim)

    def _norm(self) -> Tensor:
        return self._number(abs(self.scalar) * self.domain.dim**0.5)

    def _diagonal(self) -> Tensor:
        return self._number(self.scalar).repeat(self.domain.dim)

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> EighDecomposedLinearOperator:
        values = self._shifted(shift)._diagonal()
        return EighDecomposedLinearOperator(values, IdentityLinearOperator(self.domain))

    def _inverse(self, shift: float, retry_double_precision: bool) -> "IdentityLinearOperator":
        return self._shifted(shift)._power(-1.0)

    def _power(self, exponent: float) -> "IdentityLinearOperator":
        if self.domain.dim == 0:
            return self
        value = torch.tensor([self.scalar], dtype=torch.float64, device="cpu")
        return IdentityLinearOperator(self.domain, float(power(value, exponent)))

    def _scaled(self, scalar: float) -> "IdentityLinearOperator":
        return IdentityLinearOperator(self.domain, scalar * self.scalar)

    def _shifted(self, scalar: float) -> "IdentityLinearOperator":
        return IdentityLinearOperator(self.domain, self.scalar + scalar)

    def _with_names(self, other: StructuredLinearOperator) -> StructuredLinearOperator:
        """Return another operator on the parameters of this one if it acts on plain vectors."""
        if self.domain.is_flat or not other.domain.is_flat:
            return other
        return BlockDiagonalLinearOperator([other], self.domain)

    def _squared_entries(self) -> "IdentityLinearOperator":
        return IdentityLinearOperator(self.domain, self.scalar**2)

    def _widened(self, dtype: torch.dtype) -> "IdentityLinearOperator":
        return self._to(self.device, dtype)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "IdentityLinearOperator":
        return IdentityLinearOperator(self.domain.to(device, dtype), self.scalar)


def _space(size: int | Sequence[Sequence[int]]) -> ParameterSpace:
    if isinstance(size, Sequence):
        if not all(isinstance(shape, Sequence) and _are_lengths(shape) for shape in size):
            raise ValueError(f"Shapes must be a list of lists of lengths, got {size}.")
        return ParameterSpace({str(i): shape for i, shape in enumerate(size)})
    if index(size) < 0:
        raise ValueError(f"The dimension must not be negative, got {size}.")
    return ParameterSpace.flat(index(size), torch.float32, torch.device("cpu"))


def _are_lengths(shape: Sequence[int]) -> bool:
    lengths = [as_integer(length) for length in shape]
    return None not in lengths and min(lengths, default=0) >= 0
