"""Where the entries of a block's vectors are in the parameters."""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd, prod

import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.support.files import recorded

#: Length and stride of an axis.
Axis = tuple[int, int]


@recorded
@dataclass(frozen=True)
class ParameterView:
    """Some entries of a parameter, as a strided view of its row-major vector."""

    name: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # views are keys of sums, which each batch looks up many times
        return hash((self.name, self.sizes, self.strides, self.offset))

    def __reduce__(self) -> tuple:  # other processes have other hashes
        return ParameterView, (self.name, self.sizes, self.strides, self.offset)

    @cached_property
    def size(self) -> int:
        """The number of entries."""
        return prod(self.sizes)

    @cached_property
    def last(self) -> int:
        """The last entry."""
        axes = zip(self.sizes, self.strides, strict=True)
        return self.offset + sum((size - 1) * stride for size, stride in axes)

    @cached_property
    def in_order(self) -> "ParameterView":
        """The view of the same entries in the parameter's order."""
        axes = sorted(zip(self.sizes, self.strides, strict=True), key=lambda axis: -axis[1])
        return ParameterView.of_axes(self.name, axes, self.offset)

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The axes in row-major order if the view has all entries up to the last, else ``None``."""
        axes = sorted(range(len(self.sizes)), key=lambda axis: -self.strides[axis])
        steps = [prod(self.sizes[axis] for axis in axes[i + 1 :]) for i in range(len(axes))]
        in_order = steps == [self.strides[axis] for axis in axes] and self.offset == 0
        return tuple(axes) if in_order else None

    def is_all(self, size: int) -> bool:
        """Return whether the view has all entries of a parameter of some size, in order."""
        return self.size == size and self.order in ((), (0,))

    def undo_permutation(
        self, shape: Sequence[int], order: Sequence[int]
    ) -> "ParameterView | None":
        """Return the view v for which ``v.reshape(shape).permute(order)`` is this one, if any."""
        axes = list(zip(self.sizes, self.strides, strict=True))
        groups = grouped(axes, [shape[i] for i in order])
        if groups is None:
            return None
        axes = [axis for i in range(len(order)) for axis in groups[order.index(i)]]
        return ParameterView.of_axes(self.name, axes, self.offset)

    @classmethod
    def whole(cls, name: str, shape: Sequence[int]) -> "ParameterView":
        """Return the view of all entries of a parameter, in order."""
        return cls.of_axes(name, [(prod(shape), 1)])

    @classmethod
    def of_axes(cls, name: str, axes: Iterable[Axis], offset: int = 0) -> "ParameterView":
        """Return the view with given axes, as few as possible."""
        merged: list[Axis] = []
        for size, stride in axes:
            if size == 1:
                continue
            if merged and merged[-1][1] == size * stride:
                size *= merged.pop()[0]
            merged.append((size, stride))
        sizes, strides = (tuple(axis[i] for axis in merged) for i in range(2))
        return cls(name, sizes, strides, offset)

    def of(self, vectors: Tensor) -> Tensor:
        """Return the view ``[K, *sizes]`` of vectors of the parameter, ``[K, entries]``."""
        if self.strides == (1,):
            return vectors.narrow(1, self.offset, self.sizes[0])
        step = vectors.stride(1)
        strides = vectors.stride(0), *(step * stride for stride in self.strides)
        offset = vectors.storage_offset() + step * self.offset
        return vectors.as_strided((len(vectors), *self.sizes), strides, offset)

    def spread(self, values: Tensor, size: int) -> Tensor:
        """Return vectors ``[K, size]`` of the parameter that have the entries ``[K, *]``.

        All others are zero. The result may share memory with the entries.
        """
        if self.is_all(size):
            return values.reshape(len(values), size)
        values = values.reshape(len(values), *self.sizes)
        if self.size == size and self.order is not None:
            return values.permute(0, *(1 + axis for axis in self.order)).flatten(1)
        out = values.new_zeros(len(values), size)
        self.of(out).copy_(values)
        return out

    def gather(self, vectors: Tensor) -> Tensor:
        """Return the entries as vectors, ``[K, n]``, given those of the parameter."""
        return self.of(vectors).reshape(len(vectors), self.size)


def with_strides(
    name: str, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
) -> ParameterView | None:
    """Return the view with given axes, ``None`` if an entry may occur twice."""
    axes, reach = list(zip(shape, strides, strict=True)), 0
    for stride, size in sorted((stride, size) for size, stride in axes):
        if size > 1 and stride <= reach:
            return None
        reach += stride * (size - 1)
    return ParameterView.of_axes(name, axes, offset)


def are_disjoint(views: Sequence[ParameterView]) -> bool:
    """Return whether views of one parameter have no entries in common."""
    ordered = sorted(views, key=lambda view: view.offset)
    if all(view.last < following.offset for view, following in pairwise(ordered)):
        return True
    count = torch.zeros(1, max(view.last for view in views) + 1, device="cpu")
    for view in views:
        view.of(count).add_(1)
    return bool((count <= 1).all())


def _evenly_spaced(views: Sequence[ParameterView]) -> ParameterView | None:
    """Return the view of the entries of several views, ``None`` if there is none."""
    first, steps = views[0], {b.offset - a.offset for a, b in pairwise(views)}
    shapes = {(view.sizes, view.strides) for view in views}
    if len(views) == 1:
        return first
    if len(steps) > 1 or len(shapes) > 1 or not (step := min(steps)) > 0:
        return None
    axes = [(len(views), step), *zip(first.sizes, first.strides, strict=True)]
    return ParameterView.of_axes(first.name, axes, first.offset)


def grouped(axes: list[Axis], sizes: Sequence[int]) -> list[list[Axis]] | None:
    """Split axes so that consecutive ones have the entries of axes of other sizes, if possible."""
    groups, axes = [], list(axes)
    for size in reversed(sizes):
        group: list[Axis] = []
        while size > 1:
            length, stride = axes.pop()
            inner = gcd(length, size)
            if inner not in (length, size):
                return None
            group.insert(0, (inner, stride))
            if inner < length:
                axes.append((length // inner, stride * inner))
            size //= inner
        groups.insert(0, group)
    return groups


@recorded
@dataclass(frozen=True)
class Layout:
    """The entries of a block, which are those of a matrix, row by row.

    The entries of several equal blocks are those of their matrices, one after the other.
    """

    #: The sides of each matrix, such as weight and bias, from left to right. Each is row-major.
    views: tuple[ParameterView, ...]
    rows: int = 1  # of a matrix
    number: int = 1  # of matrices

    @classmethod
    def of_several(cls, layouts: Sequence["Layout"]) -> "Layout":
        """Return the layout of equal blocks, each of one matrix, one after the other."""
        views = tuple(view for layout in layouts for view in layout.views)
        return cls(views, layouts[0].rows, len(layouts))

    @cached_property
    def parts(self) -> "tuple[Layout, ...]":
        """The layouts of the single matrices."""
        if self.number == 1:
            return (self,)
        sides = len(self.views) // self.number
        return tuple(
            Layout(self.views[i : i + sides], self.rows) for i in range(0, len(self.views), sides)
        )

    @cached_property
    def size(self) -> int:
        """The number of entries."""
        return sum(view.size for view in self.views)

    @cached_property
    def names(self) -> frozenset[str]:
        """The parameters."""
        return frozenset(view.name for view in self.views)

    def gather(self, columns: Tensor) -> Tensor:
        """Turn columns of a space into those of the block, ``[K, n]``; see ``in_whole``."""
        if self.number > 1:
            return torch.cat([part.gather(columns) for part in self.parts], dim=1)
        sides = [view.gather(columns) for view in self.views]
        if len(sides) == 1:
            return sides[0]
        # einops.pack and unpack would say this, but double the time, for each block of a product
        matrices = [x.reshape(len(x), self.rows, x.shape[1] // self.rows) for x in sides]
        return torch.cat(matrices, dim=2).flatten(1)

    def write(self, vectors: Tensor, columns: Tensor) -> None:
        """Write columns of the block, ``[K, n]``, into those of a space: undo ``gather``."""
        if self.number > 1:
            pieces = vectors.tensor_split(self.number, dim=1)
            for part, piece in zip(self.parts, pieces, strict=True):
                part.write(piece, columns)
            return
        sides = (vectors,)
        if len(self.views) > 1:
            matrix = vectors.reshape(len(vectors), self.rows, self.size // self.rows)
            sides = matrix.split([view.size // self.rows for view in self.views], dim=2)
        for view, side in zip(self.views, sides, strict=True):
            out = view.of(columns)
            out.copy_(side.reshape(out.shape))


@lru_cache(maxsize=1024)  # each inverse has the same layouts
def in_whole(layout: Layout, space: ParameterSpace) -> Layout:
    """Return where the entries of a layout are in columns of a space, ``[K, dim]``.

    Sides of equal matrices that are evenly spaced become one view.
    """
    views = [
        replace(view, name="", offset=space.slice(view.name).start + view.offset)
        for view in layout.views
    ]
    sides = len(views) // layout.number
    spaced = [_evenly_spaced(views[side::sides]) for side in range(sides)]
    if None in spaced:
        return Layout(tuple(views), layout.rows, layout.number)
    return Layout(tuple(spaced), layout.rows * layout.number)


def connected(sets: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """Return the indices of sets in groups, where sets of different groups share no element."""
    parents: dict[Hashable, Hashable] = {}

    def root(x: Hashable) -> Hashable:
        while (parent := parents.setdefault(x, x)) is not x:
            parents[x] = x = parents[parent]
        return x

    firsts = []
    for elements in sets:
        first, *others = elements
        firsts.append(first)
        for x in others:
            parents[root(x)] = root(first)
    groups: dict[Hashable, list[int]] = {}
    for i, first in enumerate(firsts):
        groups.setdefault(root(first), []).append(i)
    return list(groups.values())
