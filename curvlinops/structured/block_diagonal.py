"""Block-diagonal matrices."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, reduce
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.operator import PartLinearOperator, TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.kronecker import EighDecomposedLinearOperator
from curvlinops.structured.layout import Layout, ParameterView, connected, in_whole
from curvlinops.support.columns import flat
from curvlinops.support.files import recorded
from curvlinops.support.norms import double_norm
from curvlinops.team.team import ALONE, Team, largest


@recorded
class BlockDiagonalLinearOperator(StructuredLinearOperator):
    """A block-diagonal matrix of structured operators. It iterates over its blocks.

    Args:
        blocks: The blocks, in this order; or a dictionary of them, whose keys appear in messages.
        space: The parameters on which the operator acts. Default: the parameters of the blocks, if
            these have names and none occurs twice; otherwise it acts on plain vectors, the
            concatenated vectors of its blocks.
        layouts: Where the entries of each block's plain vectors are in the parameters. Default:
            blocks act on parameters of the space, or one block after the other on all entries.
            An operator with the layout of several matrices stands for as many equally large blocks,
            which are computed together.
        ranks: The processes over which the blocks are distributed, which call all methods together.
            Each has a ``RemoteLinearOperator`` in place of the others' blocks. KFAC with
            ``factor_placement="partition"`` sets it. Default: all blocks are here.

    Raises:
        TypeError: If a block has no structure.
        ValueError: If there are no blocks, or they are not square, or do not fit the space.
    """

    def __init__(
        self,
        blocks: Sequence[StructuredLinearOperator] | Mapping[Any, StructuredLinearOperator],
        space: ParameterSpace | None = None,
        layouts: Sequence[Layout] | None = None,
        ranks: Team = ALONE,
    ):
        self.ranks = ranks
        named = dict(blocks) if isinstance(blocks, Mapping) else dict(enumerate(blocks))
        _check_blocks(named)
        dtype = reduce(torch.promote_types, [block.torch_dtype for block in named.values()])
        if space is not None:
            dtype = torch.promote_types(dtype, space.dtype)
        self._stacks = tuple(block._cast(dtype) for block in named.values())
        self._has_layouts = layouts is not None
        if layouts is None:
            space, layouts = _default_layouts(self._stacks, space)
        self._names, self._layouts = tuple(named), tuple(layouts)
        self._check_layouts(space)
        space = space.to(self._stacks[0].device, dtype)
        super().__init__(space, all(block.self_adjoint for block in self._stacks))

    def _check_layouts(self, space: ParameterSpace) -> None:
        sizes = [block.domain.dim for block in self._stacks]
        if sum(sizes) != space.dim:
            raise ValueError(
                f"Blocks with vectors of {sizes} entries cannot act on the {space.dim} entries of "
                f"the parameters {space.shapes}."
            )
        if self._has_layouts and not all(block.domain.is_flat for block in self._stacks):
            raise ValueError("Only blocks on plain vectors can have a layout.")
        if [layout.size for layout in self._layouts] != sizes:
            raise ValueError(
                f"The blocks have vectors of {sizes} entries, their layouts "
                f"{[layout.size for layout in self._layouts]}."
            )

    # --- blocks

    @cached_property
    def _pairs(self) -> list[tuple[StructuredLinearOperator, Layout]]:
        """All blocks, one by one, and their layouts."""
        pairs = [
            pair
            for block, layout in zip(self._stacks, self._layouts, strict=True)
            for pair in zip(block._parts(layout.number), layout.parts, strict=True)
        ]
        if len(pairs) > len(self._stacks):  # in the order of the parameters
            order = {name: i for i, name in enumerate(self.domain.names)}
            pairs.sort(key=lambda pair: order[pair[1].views[0].name])
        return pairs

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """Where the entries of each block are in the parameters."""
        return tuple(layout for _, layout in self._pairs)

    @cached_property
    def _keys(self) -> tuple[Any, ...]:
        return _connected_names(self.layouts) if self._has_layouts else self._names

    @property
    def blocks(self) -> dict[Any, StructuredLinearOperator]:
        """The blocks by the keys that they were given with, or else by number.

        The key of a block with a layout, as in Kronecker-factored approximations, is the tuple of
        its parameters' names. Blocks on the same parameters are put together.
        """
        if not self._has_layouts:
            return dict(zip(self._keys, self, strict=True))
        groups: dict[tuple[str, ...], list[tuple]] = {}
        for key, pair in zip(self._keys, self._pairs, strict=True):
            groups.setdefault(key, []).append(pair)
        return {
            names: BlockDiagonalLinearOperator(
                blocks, self.domain.restricted(names), layouts, self.ranks
            )
            for names, pairs in groups.items()
            for blocks, layouts in [zip(*pairs, strict=True)]
        }

    def _description(self) -> list[str]:
        return [f"{len(self)} blocks"]

    def __iter__(self) -> Iterator[StructuredLinearOperator]:
        return (block for block, _ in self._pairs)

    def __len__(self) -> int:
        return sum(layout.number for layout in self._layouts)

    def _record(self) -> tuple:
        if self.ranks.size > 1:
            raise NotImplementedError(
                "An operator with blocks on several processes cannot be saved in one file. The "
                "factors of KFAC can be kept in a directory, which curvlinops.load reads."
            )
        return self._arguments_with(self._stacks, self.domain)[:3]

    def _arguments_with(self, stacks: Iterable[Any], space: ParameterSpace) -> tuple:
        """Return the arguments of an operator with other blocks on the same parameters."""
        space = None if space.is_flat else space
        if self._has_layouts:
            return tuple(stacks), space, self._layouts, self.ranks
        return dict(zip(self._names, stacks, strict=True)), space, None, self.ranks

    def _with(self, blocks: Sequence[Any]) -> "BlockDiagonalLinearOperator":
        """Return the operator with other blocks, or stacks of them, on the same parameters."""
        if len(blocks) == len(self._stacks):
            return BlockDiagonalLinearOperator(*self._arguments_with(blocks, self.domain))
        return BlockDiagonalLinearOperator(blocks, self.domain, self.layouts, self.ranks)

    def _each(self, function: Callable[[StructuredLinearOperator], Any]) -> list[Any]:
        """Return the results of a function of all blocks, of equal ones together.

        Errors name the block.
        """
        out = []
        with self.ranks.raise_on_all_ranks():
            for i, (stack, layout) in enumerate(zip(self._stacks, self._layouts, strict=True)):
                try:
                    out.append(function(stack))
                except (ValueError, RuntimeError):
                    if layout.number > 1:
                        self._one_by_one(function, layout)
                        raise
                    with about(self._key_of(i, layout)):
                        raise
        return out

    def _one_by_one(self, function: Callable, layout: Layout) -> None:
        """Raise the error of one of several equal blocks."""
        for block, part in self._pairs:
            if part in layout.parts:
                with about(self._key_of(0, part)):
                    function(block)

    def _key_of(self, index: int, layout: Layout) -> Any:
        if self._has_layouts:
            return self._keys[self.layouts.index(layout)]
        # a single block without a key is not worth mentioning
        return None if self._names == (0,) else self._names[index]

    # --- blocks on several processes

    @property
    def _team(self) -> Team:
        return largest([super()._team, self.ranks.in_step])

    def _map(
        self, function: Callable[[StructuredLinearOperator], StructuredLinearOperator]
    ) -> "BlockDiagonalLinearOperator":
        """Apply a function to each block."""
        return self._with(self._each(function))

    # --- vectors

    @cached_property
    def _in_rows(self) -> list[tuple[ParameterSpace, Layout]]:
        """Where the entries of each block are in columns ``[K, dim]`` of a space.

        It is the space of all parameters; if processes have parts of these, that of the block's,
        which are gathered.
        """
        space = self.domain
        spaces = [
            space.restricted([name for name in space.names if name in layout.names])
            if space.in_parts
            else space
            for layout in self._layouts
        ]
        pairs = zip(self._layouts, spaces, strict=True)
        return [(some, in_whole(layout, some.whole)) for layout, some in pairs]

    def _apply(self, columns: Tensor) -> Tensor:
        if not self.domain.in_parts:
            self.ranks.check_same(columns)
        return self._joined(
            block._apply(layout.gather(self._gathered(columns, space)))
            for block, (space, layout) in zip(self._stacks, self._in_rows, strict=True)
        )

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        if not self._has_layouts:
            return super()._part(rows, columns)
        wanted = {*rows.names, *columns.names}
        some = [
            (names, *pair)
            for names, pair in zip(self._keys, self._pairs, strict=True)
            if not wanted.isdisjoint(names)
        ]
        keys, blocks, layouts = zip(*some, strict=True)
        together = set().union(*keys)
        space = self.domain.restricted([name for name in self.domain.names if name in together])
        few = BlockDiagonalLinearOperator(blocks, space, layouts, self.ranks)
        return PartLinearOperator(few, rows, columns)

    def _gathered(self, columns: Tensor, space: ParameterSpace) -> Tensor:
        """Return columns of whole parameters of a block, ``[K, space.dim]``."""
        if not self.domain.in_parts:
            return columns
        parts = self.domain.views(columns)
        return torch.cat([flat(self.domain.gather(n, parts[n])) for n in space.names], 1)

    def _joined(self, vectors: Iterable[Tensor]) -> Tensor:
        """Return columns, given those of the blocks, ``[K, D_b]`` each."""
        out, in_parts = None, self.domain.in_parts
        for (space, layout), some in zip(self._in_rows, vectors, strict=True):
            if out is None:
                out = self.domain.zeros(len(some)) if in_parts else self.domain.empty(len(some))
            if not in_parts:
                layout.write(some, out)
                continue
            whole = some.new_zeros(len(some), space.dim)
            layout.write(self.ranks.add(some), whole)
            for name, x in space.whole.views(whole).items():  # other blocks may have other entries
                out[:, self.domain.slice(name)] += flat(self.domain.part(name, x))
        return out if in_parts else self.ranks.add(out)

    # --- quantities

    def _trace(self) -> Tensor:
        return self.ranks.add(torch.stack([block._trace() for block in self._stacks])).sum()

    def _norm(self) -> Tensor:
        norms = self.ranks.add(torch.stack([block._norm().double() for block in self._stacks]))
        return double_norm(norms, 0)

    def _diagonal(self) -> Tensor:
        return self._joined(block._diagonal().unsqueeze(0) for block in self._stacks)[0]

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        results = self._each(lambda block: block._slogdet())
        signs, logarithms = (self.ranks.add(torch.stack(x)) for x in zip(*results, strict=True))
        return signs.prod(), logarithms.sum()

    # --- functions of the operator

    def _eigh(self, accurate: bool = False) -> EighDecomposedLinearOperator:
        self.domain.check_whole("all eigenvalues")
        blocks = self._each(lambda block: block._eigh(accurate))
        values = self._joined(block.eigenvalues.unsqueeze(0) for block in blocks)[0]
        vectors = self._with([block.eigenvectors for block in blocks])
        return EighDecomposedLinearOperator(values, vectors)

    def _has_eigh(self) -> bool:
        is_cheap = all(block._has_eigh() for block in self._stacks)
        return all(self.ranks.gather_objects(is_cheap))

    def _inverse(self, accurate: bool = True) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._inverse(accurate))

    def _power(self, exponent: float) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._power(exponent))

    # --- algebra

    def _scaled(self, scalar: float) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._scaled(scalar))

    def _shifted(self, scalar: float) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._shifted(scalar))

    def _shifted_by(self, numbers: Mapping[str, Any]) -> StructuredLinearOperator:
        if self.domain.is_flat or len(set(numbers.values())) == 1:
            return super()._shifted_by(numbers)
        own = ({x.name: numbers[x.name] for x in layout.views} for layout in self.layouts)
        return self._with([b._shifted_by(some) for b, some in zip(self, own, strict=True)])

    def _transposed(self) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._adjoint())

    def _squared_entries(self) -> "BlockDiagonalLinearOperator":
        return self._map(lambda block: block._squared_entries())

    def _to(self, device: torch.device, dtype: torch.dtype) -> "BlockDiagonalLinearOperator":
        blocks = [block._to(device, dtype) for block in self._stacks]
        space = self.domain.to(device, dtype)
        return BlockDiagonalLinearOperator(*self._arguments_with(blocks, space))

    def _added(self, other: StructuredLinearOperator) -> "BlockDiagonalLinearOperator | None":
        return self._combined(other, lambda left, right: left._plus(right))

    def _multiplied(self, other: StructuredLinearOperator) -> "BlockDiagonalLinearOperator | None":
        return self._combined(other, lambda left, right: left._times(right))

    def _combined(
        self, other: StructuredLinearOperator, function: Callable
    ) -> "BlockDiagonalLinearOperator | None":
        """Combine pairs of blocks on the same entries, if each result has structure."""
        if not isinstance(other, BlockDiagonalLinearOperator):
            return None
        if max(self.ranks.size, other.ranks.size) > 1:
            return None
        if self.domain.shapes != other.domain.shapes or self.layouts != other.layouts:
            return None
        # one by one: sums of stacks would have the limits of large matrices
        blocks = [function(*pair) for pair in zip(self, other, strict=True)]
        return None if any(block is None for block in blocks) else self._with(blocks)


class RemoteLinearOperator(StructuredLinearOperator):
    """A block that another process has. Its numbers are zero here, and are added up there.

    Functions of it, such as its inverse, are the same.
    """

    def __init__(self, dim: int, dtype: torch.dtype, device: torch.device):
        super().__init__(ParameterSpace.flat(dim, dtype, device))

    def _apply(self, columns: Tensor) -> Tensor:
        return torch.zeros_like(columns)

    def _diagonal(self) -> Tensor:
        return self.domain.zeros(1)[0]

    def _norm(self) -> Tensor:
        return self._trace()

    def _slogdet(self) -> tuple[Tensor, Tensor]:
        return self._trace(), self._trace()

    def _same(self, *arguments: Any) -> "RemoteLinearOperator":
        return self

    _scaled = _shifted = _inverse = _power = _transposed = _squared_entries = _same

    def _eigh(self, accurate: bool = False) -> EighDecomposedLinearOperator:
        return EighDecomposedLinearOperator(self._diagonal(), self)

    def _make_parts(self, number: int) -> "list[RemoteLinearOperator]":
        dim = self.domain.dim // number
        return [RemoteLinearOperator(dim, self.torch_dtype, self.device) for _ in range(number)]

    def _to(self, device: torch.device, dtype: torch.dtype) -> "RemoteLinearOperator":
        return RemoteLinearOperator(self.domain.dim, dtype, device)


# --- where blocks act


def _default_layouts(
    blocks: Sequence[StructuredLinearOperator], space: ParameterSpace | None
) -> tuple[ParameterSpace, list[Layout]]:
    """Return the space on which blocks act, and their layouts, if none are given."""
    spaces = [block.domain for block in blocks]
    names = [name for block_space in spaces for name in block_space.names]
    if "" in names or len(set(names)) < len(names):
        if space is None:
            space = ParameterSpace({"": (sum(block_space.dim for block_space in spaces),)})
        return space, list(_one_after_the_other([block_space.dim for block_space in spaces], space))
    shapes = {name: shape for block_space in spaces for name, shape in block_space.shapes.items()}
    if space is None:
        space = ParameterSpace(shapes)
    elif space.shapes != shapes:  # in any order
        raise ValueError(
            f"The blocks act on {shapes}, which are not the parameters of the space: "
            f"{space.shapes}."
        )
    return space, [
        Layout(
            tuple(ParameterView.whole(name, shape) for name, shape in block_space.shapes.items())
        )
        for block_space in spaces
    ]


def _one_after_the_other(sizes: Iterable[int], space: ParameterSpace) -> Iterator[Layout]:
    """Yield layouts of blocks that share out the entries of all parameters, in order."""
    start = 0
    for size in sizes:
        views = [] if size else [ParameterView(space.names[0], (0,), (1,))]
        for name, shape in space.shapes.items():
            first = space.slice(name).start
            begin, end = max(start, first), min(start + size, first + prod(shape))
            if begin < end:
                views.append(ParameterView.of_axes(name, [(end - begin, 1)], begin - first))
        yield Layout(tuple(views))
        start += size


def _connected_names(layouts: Sequence[Layout]) -> tuple[tuple[str, ...], ...]:
    """Return for each layout its parameters, and all with which other layouts connect these."""
    keys: dict[int, tuple[str, ...]] = {}
    for group in connected(layout.names for layout in layouts):
        names = dict.fromkeys(view.name for i in group for view in layouts[i].views)
        keys |= dict.fromkeys(group, tuple(names))
    return tuple(keys[i] for i in range(len(layouts)))


# --- checks and messages


def _check_blocks(blocks: dict) -> None:
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
