"""Diagonal matrices, and multiples of the identity."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.sharded_space import space_of
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.structured.factor import Factor, identity
from curvlinops.structured.kronecker import EighDecomposedLinearOperator, KnownEigenvalues
from curvlinops.structured.linalg import power, real
from curvlinops.support.arguments import LISTS, MAPPINGS, as_device, as_integer, without_graph
from curvlinops.support.files import recorded


@recorded
class DiagonalLinearOperator(KnownEigenvalues):
    """A diagonal matrix.

    Args:
        diagonal: The diagonal, ``[D]``; or a list or dictionary of tensors of the parameters'
            shapes, with D numbers in total.
        space: The space of the vectors, if they are those of parameters. Default: plain vectors
            for one tensor, else vectors of the tensors' names and shapes.

    Raises:
        TypeError: If a tensor of the diagonal has no real floating-point dtype.
        ValueError: If it has NaN or infinite values, or does not fit the space.
    """

    def __init__(
        self,
        diagonal: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
        space: ParameterSpace | None = None,
    ):
        if isinstance(diagonal, (LISTS, MAPPINGS)):
            diagonal, space = _flattened(diagonal, space)
        if space is not None:
            space.check_whole("a whole diagonal")
        entries = real(diagonal, "The diagonal", ndim=(1,))
        if space is None:
            space = ParameterSpace.flat(len(entries), entries.dtype, entries.device)
        elif space.dim != len(entries):
            raise ValueError(
                f"The diagonal has {len(entries)} entries, the space dimension {space.dim}."
            )
        self.eigenvalues = entries.to(space.device, space.dtype)
        super().__init__(space)

    def _record(self) -> tuple:
        return self.eigenvalues, self.domain

    def with_eigenvalues(self, eigenvalues: Tensor) -> "DiagonalLinearOperator":
        """Return the operator with another diagonal, ``[D]``."""
        return DiagonalLinearOperator(eigenvalues, self.domain)

    def _has_eigenvectors_of(self, other: StructuredLinearOperator) -> bool:
        return isinstance(other, DiagonalLinearOperator)

    def _shifted_by(self, numbers: Mapping[str, Any]) -> StructuredLinearOperator:
        if self.domain.is_flat:
            return super()._shifted_by(numbers)
        parts = self.domain.split(self.eigenvalues)
        return self.with_eigenvalues(self.domain.join({n: parts[n] + numbers[n] for n in parts}))

    def _apply(self, columns: Tensor) -> Tensor:
        return columns * self.eigenvalues

    def _diagonal(self) -> Tensor:
        return self.eigenvalues.clone()

    def _eigh(self, accurate: bool = False) -> EighDecomposedLinearOperator:
        eigenvectors = IdentityLinearOperator(self.domain)
        return EighDecomposedLinearOperator(self.eigenvalues, eigenvectors)

    def _as_factors(self) -> list[Factor]:
        return [Factor(self._diagonal().unsqueeze(0))]

    def _squared_entries(self) -> "DiagonalLinearOperator":
        return self.with_eigenvalues(self.eigenvalues**2)

    def _to(self, device: torch.device, dtype: torch.dtype) -> "DiagonalLinearOperator":
        space = self.domain.to(device, dtype)
        return DiagonalLinearOperator(self.eigenvalues.to(device, dtype), space)


def _flattened(
    diagonal: Sequence[Tensor] | Mapping[str, Tensor], space: ParameterSpace | None
) -> tuple[Tensor, ParameterSpace]:
    """Return tensors of the parameters' shapes as one vector ``[D]``, and its space."""
    pairs = diagonal.items() if isinstance(diagonal, MAPPINGS) else enumerate(diagonal)
    tensors = {str(name): real(x, f"The diagonal's tensor {name!r}") for name, x in pairs}
    if not tensors:
        raise ValueError("The diagonal has no tensors.")
    own = space_of(tensors)
    own.check_whole("a whole diagonal")
    if space is not None:
        space.check_compatible(own)
    return torch.cat([x.flatten() for x in tensors.values()]), own if space is None else space


@recorded
class IdentityLinearOperator(StructuredLinearOperator):
    """The identity, or a multiple of it. ``A.damped(delta)`` adds one to an operator.

    Args:
        space: The space; every operator of this package has one as ``space``. Or the dimension of
            plain vectors, or the shapes of several tensors, on the CPU: these are float32 unless
            the identity is added to, or multiplied with, an operator of higher precision.
        scalar: The number by which vectors are multiplied. If the device is passed in its place, as
            in ``IdentityLinearOperator(shapes, device, dtype)``, the number is one.
        dtype: The type of the vectors, if not the space's.
        device: The device of the vectors, if not the space's.

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

    def _make_parts(self, number: int) -> "list[IdentityLinearOperator]":
        size, space = self.domain.dim // number, self.domain
        part = ParameterSpace.flat(size, space.dtype, space.device)
        return [IdentityLinearOperator(part, self.scalar)] * number

    def _apply(self, columns: Tensor) -> Tensor:
        return self.scalar * columns

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=self.torch_dtype, device=self.device)

    def _trace(self) -> Tensor:
        return self._number(self.scalar * self.domain.dim)

    def _norm(self) -> Tensor:
        return self._number(abs(self.scalar) * self.domain.dim**0.5)

    def _diagonal(self) -> Tensor:
        return self._number(self.scalar).repeat(self.domain.dim)

    def _eigh(self, accurate: bool = False) -> EighDecomposedLinearOperator:
        return EighDecomposedLinearOperator(self._diagonal(), IdentityLinearOperator(self.domain))

    def _inverse(self, accurate: bool = True) -> "IdentityLinearOperator":
        return self._power(-1.0)

    def _power(self, exponent: float) -> "IdentityLinearOperator":
        if self.domain.dim == 0:
            return self
        value = torch.tensor([self.scalar], dtype=torch.float64, device="cpu")
        return IdentityLinearOperator(self.domain, float(power(value, exponent)))

    def _scaled(self, scalar: float) -> "IdentityLinearOperator":
        return IdentityLinearOperator(self.domain, scalar * self.scalar)

    def _shifted(self, scalar: float) -> "IdentityLinearOperator":
        return IdentityLinearOperator(self.domain, self.scalar + scalar)

    def _added(self, other: StructuredLinearOperator) -> StructuredLinearOperator:
        if isinstance(other, IdentityLinearOperator):
            return self._shifted(other.scalar)
        if other.domain.is_flat and not self.domain.is_flat:
            other = BlockDiagonalLinearOperator([other], self.domain)
        return other._shifted(self.scalar)

    def _multiplied(self, other: StructuredLinearOperator) -> StructuredLinearOperator:
        return other._scaled(self.scalar)

    def _as_factors(self) -> list[Factor]:
        unit = identity(self.domain.dim, self._number(1.0))
        return [unit if self.scalar == 1 else unit.scaled(self.scalar)]

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
