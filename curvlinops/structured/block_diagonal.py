"""Block-diagonal matrices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import decompose
from curvlinops.support.norms import double_norm
from curvlinops.support.records import recorded
from curvlinops.support.torch_modes import in_default_modes


@recorded
class BlockDiagonalLinearOperator(StructuredLinearOperator):
    """A block-diagonal matrix of structured operators.

    If all blocks act on named parameters, and no name occurs twice, so does the operator.
    Otherwise it acts on plain vectors, the concatenation of those of its blocks. It iterates over
    its blocks.

    Args:
        blocks: The blocks, in this order; or a dictionary of them, whose keys appear in messages.
        space: The space of the vectors, if its parameters have another order than in the blocks.

    Raises:
        TypeError: If a block has no structure.
        ValueError: If there are no blocks, or they are not square, or do not fit the space.
    """

    def __init__(
        self,
        blocks: Sequence[StructuredLinearOperator] | Mapping[Any, StructuredLinearOperator],
        space: ParameterSpace | None = None,
    ):
        named = dict(blocks) if isinstance(blocks, Mapping) else dict(enumerate(blocks))
        _check(named)
        dtype = reduce(torch.promote_types, [block.torch_dtype for block in named.values()])
        self._blocks = {name: block._cast(dtype) for name, block in named.items()}
        domains = [block.domain for block in named.values()]
        names = [name for domain in domains for name in domain.names]
        self._is_named = "" not in names and len(set(names)) == len(names)
        domain = self._join_spaces(domains, dtype)
        if space is not None:
            self._check_space(domain, space)
            domain = space.to(dtype=torch.promote_types(space.dtype, dtype))
        super().__init__(domain, all(block.self_adjoint for block in self))

    def _join_spaces(self, domains: list[ParameterSpace], dtype: torch.dtype) -> ParameterSpace:
        if self._is_named:
            shapes = {name: shape for space in domains for name, shape in space.shapes.items()}
            return ParameterSpace(shapes, dtype, domains[0].device)
        return ParameterSpace.flat(sum(space.dim for space in domains), dtype, domains[0].device)

    def _check_space(self, domain: ParameterSpace, space: ParameterSpace) -> None:
        if space.shapes != domain.shapes:  # in any order
            raise ValueError(
                f"The blocks act on {domain.shapes}, which are not the parameters of the space: "
                f"{space.shapes}."
            )

    # --- blocks

    @property
    def blocks(self) -> dict[Any, StructuredLinearOperator]:
        """The blocks by the keys that they were given with, or else by number.

        Those of Kronecker-factored approximations have the names of their parameters, a tuple.
        """
        return dict(self._blocks)

    def _description(self) -> list[str]:
        return [f"{len(self)} blocks"]

    def __iter__(self) -> Iterator[StructuredLinearOperator]:
        return iter(self._blocks.values())

    def __len__(self) -> int:
        return len(self._blocks)

    def _map(
        self, function: Callable[[StructuredLinearOperator], StructuredLinearOperator]
    ) -> "BlockDiagonalLinearOperator":
        """Apply a function to each block."""
        blocks = {}
        for name, block in self._blocks.items():
            with about(name):
                blocks[name] = function(block)
        return self._with(blocks)

    def _with(self, blocks: dict) -> "BlockDiagonalLinearOperator":
        space = self.domain if self._is_named else None
        return BlockDiagonalLinearOperator(blocks, space)

    def _stack(self, quantity: Callable[[StructuredLinearOperator], Tensor]) -> Tensor:
        """Compute a scalar of each block, ``[B]``."""
        return torch.stack([quantity(block) for block in self])

    # --- vectors

    def _parts(self, columns: Columns) -> Iterator[tuple[StructuredLinearOperator, Columns]]:
        """Yield each block with its part of vectors."""
        if self._is_named:
            for block in self:
                yield block, {name: columns[name] for name in block.domain.names}
        else:
            flat = self.domain.join(columns)
            sizes = [block.domain.dim for block in self]
            for block, part in zip(self, flat.split(sizes, dim=1), strict=True):
                yield block, block.domain.split(part)

    def _whole(self, parts: list[Columns]) -> Columns:
        """Put the blocks' parts of vectors together."""
        if self._is_named:
            merged = {name: column for part in parts for name, column in part.items()}
            return {name: merged[name] for name in self.domain.names}
        flat = [block.domain.join(part) for block, part in zip(self, parts, strict=True)]
        return self.domain.split(torch.cat(flat, dim=1))

    def _whole_vector(self, vectors: list[Tensor]) -> Tensor:
        """Put the blocks' plain vectors, ``[D_b]`` each, together."""
        parts = [
            block.domain.split(vector.unsqueeze(0))
            for block, vector in zip(self, vectors, strict=True)
        ]
        return self.domain.join(self._whole(parts))[0].clone()

    def _record(self) -> tuple:
        return self._blocks, self.domain if self._is_named else None

    def _apply(self, columns: Columns) -> Columns:
        return self._whole([block._apply(part) for block, part in self._parts(columns)])

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        if not self._is_named:
            return super()._apply_restricted(columns, names)
        out = self.domain.restricted(names).zeros(next(iter(columns.values())).shape[0])
        for block in self:
            some = {name: columns[name] for name in block.domain.names if name in columns}
            wanted = [name for name in block.domain.names if name in out]
            if some and wanted:
                out |= block._apply_restricted(some, wanted)
        return out

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._whole([block._apply_adjoint(part) for block, part in self._parts(columns)])

    # --- quantities

    @in_default_modes
    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar."""
        return self._stack(lambda block: block.trace()).sum()

    @in_default_modes
    def frobenius_norm(self) -> Tensor:
        """Return the root of the sum of all squared entries, a scalar."""
        norms = self._stack(lambda block: block.frobenius_norm())
        return double_norm(norms, 0).to(self.torch_dtype)

    @in_default_modes
    def diagonal(self) -> Tensor:
        """Return the diagonal, ``[D]``."""
        return self._whole_vector([block.diagonal() for block in self])

    def _slogdet(self, shift: float) -> tuple[Tensor, Tensor]:
        results = []
        for name, block in self._blocks.items():
            with about(name):
                results.append(block._slogdet(shift))
        signs, logarithms = (torch.stack(part) for part in zip(*results, strict=True))
        return signs.prod(), logarithms.sum()

    # --- functions of the operator

    def _to_decompose(self, shift: float, accurate: bool) -> list:
        return [each for block in self for each in block._to_decompose(shift, accurate)]

    def _decompose(self, shift: float, accurate: bool) -> None:
        """Compute the decompositions that all blocks need together, which batches equal sizes."""
        needed = [
            (factor, f"A factor of block {label(name)}", wide)
            for name, block in self._blocks.items()
            for factor, wide in block._to_decompose(shift, accurate)
        ]
        if needed:
            decompose(*zip(*needed, strict=True))

    def _eigh(self, shift: float = 0.0, accurate: bool = False) -> EighDecomposedLinearOperator:
        self._decompose(shift, accurate)
        blocks = self._map(lambda block: block._eigh(shift, accurate))
        values = self._whole_vector([block.eigenvalues for block in blocks])
        vectors = {name: block.eigenvectors for name, block in blocks.blocks.items()}
        return EighDecomposedLinearOperator(values, self._with(vectors))

    def _inverse(self, shift: float, retry_double_precision: bool) -> "BlockDiagonalLinearOperator":
        if shift:
            self._decompose(shift, retry_double_precision)
        return self._map(lambda block: block._inverse(shift, retry_double_precision))

    def _power(self, exponent: float) -> "BlockDiagonalLinearOperator":
        if exponent < 0 or not exponent.is_integer():
            self._decompose(0.0, accurate=True)
        return self._map(lambda block: block._power(exponent))

    # --- algebra

    def _scaled(self, scalar: float) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._scaled(scalar))

    def _shifted(self, scalar: float) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._shifted(scalar))

    def _transposed(self) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._adjoint())

    def _squared_entries(self) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._squared_entries())

    def _to(self, device: torch.device, dtype: torch.dtype) -> "BlockDiagonalLinearOperator":
        blocks = {name: block._to(device, dtype) for name, block in self._blocks.items()}
        space = self.domain.to(device, dtype) if self._is_named else None
        return BlockDiagonalLinearOperator(blocks, space)

    def _added(self, other: StructuredLinearOperator) -> "BlockDiagonalLinearOperator | None":
        return self._combined(other, lambda one, two: one._plus(two))

    def _multiplied(self, other: StructuredLinearOperator) -> "BlockDiagonalLinearOperator | None":
        return self._combined(other, lambda one, two: one._times(two))

    def _combined(
        self, other: StructuredLinearOperator, function: Callable
    ) -> "BlockDiagonalLinearOperator | None":
        """Combine pairs of blocks, if these have equal spaces and each result has structure."""
        if not isinstance(other, BlockDiagonalLinearOperator) or not _same(self, other):
            return None
        pairs = zip(self._blocks, self, other, strict=True)
        blocks = {name: function(one, two) for name, one, two in pairs}
        return None if any(block is None for block in blocks.values()) else self._with(blocks)


def _same(first: BlockDiagonalLinearOperator, second: BlockDiagonalLinearOperator) -> bool:
    """Return whether two operators have blocks of the same parameters."""
    shapes = [[list(b.domain.shapes.items()) for b in operator] for operator in (first, second)]
    return shapes[0] == shapes[1]


@contextmanager
def about(key: Any) -> Iterator[None]:
    """Say of which block an error speaks."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        raise type(error)(f"Block {label(key)}: {error}") from error


def label(key: Any) -> str:
    """Return how messages name a block: its key, or the names of its parameters."""
    return repr(", ".join(map(str, key)) if isinstance(key, tuple) else key)


def _check(blocks: dict) -> None:
    if not blocks:
        raise ValueError("A block-diagonal operator needs at least one block.")
    for name, block in blocks.items():
        if not isinstance(block, StructuredLinearOperator):
            raise TypeError(
                f"Block {label(name)} is a {type(block).__name__}, no structured operator."
            )
        if block.shape[0] != block.shape[1]:
            raise ValueError(f"Block {name!r} is not square, but of shape {block.shape}.")
    devices = {str(block.device) for block in blocks.values()}
    if len(devices) > 1:
        raise ValueError(f"The blocks live on {sorted(devices)}. Move them with to_device().")
