"""Block-diagonal matrices."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.eigh import EighDecomposedLinearOperator
from curvlinops.structured.factor import Request, decompose
from curvlinops.structured.layout import Layout
from curvlinops.support.norms import double_norm
from curvlinops.support.records import recorded


@recorded
class BlockDiagonalLinearOperator(StructuredLinearOperator):
    """A block-diagonal matrix of structured operators. It iterates over its blocks.

    Args:
        blocks: The blocks, in this order; or a dictionary of them, whose keys appear in messages.
        space: The parameters on which the operator acts. Default: those of the blocks if these
            have names of which none occurs twice; otherwise it acts on plain vectors, the
            concatenation of those of its blocks.
        layouts: Where the entries of each block's plain vectors are in the parameters. Default:
            blocks act on parameters of the space, or one block after the other on all entries.

    Raises:
        TypeError: If a block has no structure.
        ValueError: If there are no blocks, or they are not square, or do not fit the space.
    """

    def __init__(
        self,
        blocks: Sequence[StructuredLinearOperator] | Mapping[Any, StructuredLinearOperator],
        space: ParameterSpace | None = None,
        layouts: Sequence[Layout] | None = None,
    ):
        named = dict(blocks) if isinstance(blocks, Mapping) else dict(enumerate(blocks))
        _check(named)
        dtype = reduce(torch.promote_types, [block.torch_dtype for block in named.values()])
        if space is not None:
            dtype = torch.promote_types(dtype, space.dtype)
        self._blocks = tuple(block._cast(dtype) for block in named.values())
        self.layouts = None if layouts is None else tuple(layouts)
        self._keys = tuple(named) if layouts is None else _keys_of(layouts)
        names = [] if layouts else [name for block in self for name in block.domain.shapes]
        self._is_named = not layouts and "" not in names and len(set(names)) == len(names)
        domain = self._concatenated() if space is None else space
        self._check_space(domain)
        domain = domain.to(self._blocks[0].device, dtype)
        super().__init__(domain, all(block.self_adjoint for block in self))

    def _concatenated(self) -> ParameterSpace:
        """Return the space of all parameters of the blocks, or of plain vectors."""
        spaces = [block.domain for block in self]
        if not self._is_named:
            return ParameterSpace({"": (sum(space.dim for space in spaces),)})
        return ParameterSpace({n: shape for space in spaces for n, shape in space.shapes.items()})

    def _check_space(self, space: ParameterSpace) -> None:
        if self._is_named and space.shapes != self._concatenated().shapes:  # in any order
            raise ValueError(
                f"The blocks act on {self._concatenated().shapes}, which are not the parameters of "
                f"the space: {space.shapes}."
            )
        sizes = [block.domain.dim for block in self]
        if sum(sizes) != space.dim:
            raise ValueError(
                f"Blocks with vectors of {sizes} entries cannot act on the {space.dim} entries of "
                f"the parameters {space.shapes}."
            )
        if self.layouts is None:
            return
        if not all(block.domain.is_flat for block in self):
            raise ValueError("Only blocks on plain vectors can have a layout.")
        if [layout.size for layout in self.layouts] != sizes:
            raise ValueError(
                f"The blocks have vectors of {sizes} entries, their layouts "
                f"{[layout.size for layout in self.layouts]}."
            )

    # --- blocks

    @property
    def blocks(self) -> dict[Any, StructuredLinearOperator]:
        """The blocks by the keys that they were given with, or else by number.

        Blocks with layouts have the names of their parameters as key, a tuple, as those of
        Kronecker-factored approximations; blocks on the same parameters are put together.
        """
        if self.layouts is None:
            return dict(zip(self._keys, self._blocks, strict=True))
        groups: dict[tuple[str, ...], list[tuple]] = {}
        for key, *pair in zip(self._keys, self._blocks, self.layouts, strict=True):
            groups.setdefault(key, []).append(pair)
        return {
            names: BlockDiagonalLinearOperator(blocks, self.domain.restricted(names), layouts)
            for names, pairs in groups.items()
            for blocks, layouts in [zip(*pairs, strict=True)]
        }

    def _description(self) -> list[str]:
        return [f"{len(self)} blocks"]

    def __iter__(self) -> Iterator[StructuredLinearOperator]:
        return iter(self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def _record(self) -> tuple:
        blocks = self._blocks if self.layouts else dict(zip(self._keys, self._blocks, strict=True))
        return blocks, None if self.domain.is_flat else self.domain, self.layouts

    def _with(
        self, blocks: Iterable[Any], space: ParameterSpace | None = None
    ) -> "BlockDiagonalLinearOperator":
        """Return the operator with other blocks on the same parameters, perhaps elsewhere."""
        if space is None and not self.domain.is_flat:
            space = self.domain
        named = blocks if self.layouts else dict(zip(self._keys, blocks, strict=True))
        return BlockDiagonalLinearOperator(named, space, self.layouts)

    def _each(self, function: Callable[[StructuredLinearOperator], Any]) -> list[Any]:
        """Return the results of a function of each block; errors name the block."""
        out = []
        for key, block in zip(self._keys, self._blocks, strict=True):
            # a single block without a key is not worth mentioning
            with about(None if len(self) == 1 and key == 0 else key):
                out.append(function(block))
        return out

    def _map(
        self, function: Callable[[StructuredLinearOperator], StructuredLinearOperator]
    ) -> "BlockDiagonalLinearOperator":
        """Apply a function to each block."""
        return self._with(self._each(function))

    # --- vectors

    def _split(self, columns: Columns) -> Iterator[Columns]:
        """Yield the blocks' vectors."""
        if self._is_named:
            yield from ({name: columns[name] for name in block.domain.names} for block in self)
        elif self.layouts is not None:
            yield from ({"": layout.gather(columns)} for layout in self.layouts)
        else:
            sizes = [block.domain.dim for block in self]
            vectors = self.domain.join(columns).split(sizes, dim=1)
            yield from map(lambda block, own: block.domain.split(own), self, vectors)

    def _join(self, parts: Iterable[Columns]) -> Columns:
        """Return vectors, given those of the blocks one after the other."""
        out: Columns = {}
        if self._is_named:
            for part in parts:
                out |= part
            return {name: out[name] for name in self.domain.names}
        if self.layouts is not None:
            for layout, part in zip(self.layouts, parts, strict=True):
                out = out or self.domain.split(self.domain.empty(len(part[""])))
                layout.write(part[""], out)
            return out
        vectors = [block.domain.join(part) for block, part in zip(self, parts, strict=True)]
        return self.domain.split(torch.cat(vectors, dim=1))

    def _join_vectors(self, vectors: list[Tensor]) -> Tensor:
        """Return the vector ``[D]`` whose parts are the blocks' vectors, ``[D_b]`` each."""
        pairs = zip(self, vectors, strict=True)
        parts = (block.domain.split(vector.unsqueeze(0)) for block, vector in pairs)
        return self.domain.join(self._join(parts))[0].clone()

    def _apply(self, columns: Columns) -> Columns:
        pairs = zip(self, self._split(columns), strict=True)
        return self._join(block._apply(part) for block, part in pairs)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        pairs = zip(self, self._split(columns), strict=True)
        return self._join(block._apply_adjoint(part) for block, part in pairs)

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        blocks = self.blocks.values()
        if len(blocks) == 1 or (self.layouts is None and not self._is_named):
            return super()._apply_restricted(columns, names)
        out = self.domain.restricted(names).zeros(next(iter(columns.values())).shape[0])
        for block in blocks:
            some = {name: columns[name] for name in block.domain.names if name in columns}
            wanted = [name for name in block.domain.names if name in out]
            if some and wanted:
                out |= block._apply_restricted(some, wanted)
        return out

    # --- quantities

    def _trace(self) -> Tensor:
        return torch.stack([block._trace() for block in self]).sum()

    def _norm(self) -> Tensor:
        return double_norm(torch.stack([block._norm().double() for block in self]), 0)

    def _diagonal(self) -> Tensor:
        return self._join_vectors([block._diagonal() for block in self])

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        decompose(self._to_decompose(accurate=True, inverse=True))
        results = self._each(lambda block: block._slogdet())
        signs, logarithms = (torch.stack(parts) for parts in zip(*results, strict=True))
        return signs.prod(), logarithms.sum()

    # --- functions of the operator

    def _to_decompose(self, accurate: bool, inverse: bool = False) -> list[Request]:
        return [
            (factor, f"Block {label(key)}: {name}", matter)
            for key, block in zip(self._keys, self, strict=True)
            for factor, name, matter in block._to_decompose(accurate, inverse)
        ]

    def _eigh(self, accurate: bool = False) -> EighDecomposedLinearOperator:
        decompose(self._to_decompose(accurate))
        blocks = self._each(lambda block: block._eigh(accurate))
        values = self._join_vectors([block.eigenvalues for block in blocks])
        vectors = self._with([block.eigenvectors for block in blocks])
        return EighDecomposedLinearOperator(values, vectors)

    def _has_eigh(self) -> bool:
        return all(block._has_eigh() for block in self)

    def _inverse(self, accurate: bool = True) -> "BlockDiagonalLinearOperator":
        decompose(self._to_decompose(accurate, inverse=True))
        return self._map(lambda block: block._inverse(accurate))

    def _power(self, exponent: float) -> "BlockDiagonalLinearOperator":
        if exponent < 0 or not exponent.is_integer():
            decompose(self._to_decompose(accurate=True))
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
        blocks = [block._to(device, dtype) for block in self]
        return self._with(blocks, None if self.domain.is_flat else self.domain.to(device, dtype))

    def _added(self, other: StructuredLinearOperator) -> "BlockDiagonalLinearOperator | None":
        return self._combined(other, lambda one, two: one._plus(two))

    def _multiplied(self, other: StructuredLinearOperator) -> "BlockDiagonalLinearOperator | None":
        return self._combined(other, lambda one, two: one._times(two))

    def _combined(
        self, other: StructuredLinearOperator, function: Callable
    ) -> "BlockDiagonalLinearOperator | None":
        """Combine pairs of blocks, if these have equal spaces and each result has structure."""
        if not isinstance(other, BlockDiagonalLinearOperator) or not self._has_blocks_of(other):
            return None
        blocks = [function(one, two) for one, two in zip(self, other, strict=True)]
        return None if any(block is None for block in blocks) else self._with(blocks)

    def _has_blocks_of(self, other: "BlockDiagonalLinearOperator") -> bool:
        """Return whether two operators have blocks on the same entries of the same parameters."""
        if self.domain.shapes != other.domain.shapes or self.layouts != other.layouts:
            return False
        one, two = ([list(block.domain.shapes.items()) for block in op] for op in (self, other))
        return one == two


def _keys_of(layouts: Sequence[Layout]) -> tuple[tuple[str, ...], ...]:
    """Return for each layout its parameters, and all with which other layouts connect these."""
    connected: dict[str, tuple[str, ...]] = {}
    for layout in layouts:
        known = [name for view in layout.views for name in connected.get(view.name, (view.name,))]
        names = tuple(dict.fromkeys(known))
        connected |= dict.fromkeys(names, names)
    return tuple(connected[layout.views[0].name] for layout in layouts)


@contextmanager
def about(key: Any) -> Iterator[None]:
    """Name the block in errors, unless the key is ``None``."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if key is None:
            raise
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
    devices = {block.device for block in blocks.values()}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"The blocks live on {names}. Move them with to_device().")
