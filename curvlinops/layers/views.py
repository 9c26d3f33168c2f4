"""Functions of a parameter that are views of its entries, followed node by node without numbers."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

from curvlinops.layers.gradients import Entries
from curvlinops.layers.rules import Use
from curvlinops.structured.layout import Axis, ParameterView, grouped, with_strides
from curvlinops.support.autograd_graph import is_custom
from curvlinops.support.torch_internals import input_metadata, shape_of_output, signed
from curvlinops.team.scattering import Gather

#: Nodes that return entries in the same order, perhaps in another shape.
RESHAPES = {"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"}
RESHAPES |= {f"SqueezeBackward{i}" for i in range(6)}


def is_view(node: Any) -> bool:
    """Return whether a node only moves or copies entries, each once, whatever the numbers are."""
    name = node.name()
    is_moved = name in VIEWS and name != "ExpandBackward0"
    return is_moved or name in RESHAPES | COPIES or is_custom(node, Gather)


#: Nodes that copy a tensor, perhaps in another dtype or order of memory.
COPIES = {"CloneBackward0", "ToCopyBackward0", "AliasBackward0", "ContiguousBackward0"}


class ViewOf(NamedTuple):
    """A tensor as entries of a parameter of some shape, from an offset on."""

    name: str
    parameter: tuple[int, ...]
    #: For each axis of the tensor: the steps in the parameter that it consists of, as lengths and
    #: strides. A transposed tensor that was reshaped has several in one axis.
    dims: tuple[tuple[Axis, ...], ...]
    offset: int = 0

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...]) -> "ViewOf":
        """Return the view of all entries."""
        return cls(name, tuple(shape), _in_order(shape))

    def after(self, node: Any, number: int) -> "ViewOf | None":
        """Return the view that one of a node's outputs is, ``None`` if it is another function."""
        name = node.name()
        if name in COPIES or is_custom(node, Gather) or _is_times_one(node):
            # the derivative of a cast between real and complex numbers is not one
            return None if input_metadata(node, number).dtype.is_complex else self
        if name in RESHAPES:
            return self.reshape(shape_of_output(node, number))
        return VIEWS[name](node, self, number) if name in VIEWS else None

    def reshape(self, shape: Sequence[int]) -> "ViewOf | None":
        """Return the view in another shape."""
        if 0 in shape:
            return self._replace(dims=_in_order(shape))
        merged = ParameterView.of_axes("", [axis for dim in self.dims for axis in dim])
        dims = grouped(list(zip(merged.sizes, merged.strides, strict=True)), shape)
        return None if dims is None else self._replace(dims=tuple(map(tuple, dims)))

    def permute(self, order: Sequence[int]) -> "ViewOf":
        """Return the view with its axes in another order."""
        return self._replace(dims=tuple(self.dims[axis] for axis in order))

    def transpose(self, first: int, second: int) -> "ViewOf":
        """Return the view with two axes exchanged."""
        order = list(range(len(self.dims)))
        order[first], order[second] = order[second], order[first]
        return self.permute(order)

    def narrow(self, dim: int, start: int, stop: int, step: int = 1) -> "ViewOf | None":
        """Return some entries along an axis."""
        (_, stride), *inner = self.dims[dim] or ((1, 0),)
        size = prod(count for count, _ in inner)  # whole blocks, if the axis has several steps
        if size > 1 and (step > 1 or start % size or stop % size):
            return None
        start, stop = start // size, stop // size
        kept = ((len(range(start, stop, step)), stride * step), *inner)
        dims = (*self.dims[:dim], kept, *self.dims[dim:][1:])
        return self._replace(dims=dims, offset=self.offset + start * stride)

    def select(self, dim: int, index: int) -> "ViewOf | None":
        """Return the entries at one place of an axis."""
        dims = list(self.dims)
        offset, rest = self.offset, index
        for length, stride in reversed(dims.pop(dim)):
            rest, place = divmod(rest, length)
            offset += place * stride
        return self._replace(dims=tuple(dims), offset=offset)

    def expand(self, shape: Sequence[int]) -> "ViewOf":
        """Return the view with copies along axes of length one."""
        dims = ((),) * (len(shape) - len(self.dims)) + self.dims
        lengths = (prod(count for count, _ in dim) for dim in dims)
        dims = tuple(
            dim if old == new else ((new, 0),)
            for dim, old, new in zip(dims, lengths, shape, strict=True)
        )
        return self._replace(dims=dims)

    def length(self, dim: int) -> int:
        """Return the length of an axis."""
        return prod(count for count, _ in self.dims[dim])

    def entries(self, use: Use) -> Entries | None:
        """Return the entries in the order of gradients; ``None`` if that is no strided order."""
        view = self
        if use.axes is not None:
            shape, order = use.axes
            view = self.reshape(shape)
            view = view and view.permute(order)
        if view is None:
            return None
        axes = [axis for dim in view.dims for axis in dim]
        sizes, strides = (tuple(axis[i] for axis in axes) for i in range(2))
        entries = with_strides(view.name, sizes, strides, view.offset)
        return None if entries is None else Entries(entries, view.parameter)


def _is_times_one(node: Any) -> bool:
    """Return whether a node multiplies by the number one, as ``vmap`` does with biases."""
    return node.name() == "MulBackward1" and node._saved_other == 1


def _in_order(shape: Sequence[int]) -> tuple[tuple[Axis, ...], ...]:
    """Return the axes of all entries in row-major order."""
    lengths = [max(length, 1) for length in shape]
    return tuple(((n, prod(lengths[axis + 1 :])),) for axis, n in enumerate(shape))


def _sliced(node: Any, x: ViewOf, number: int) -> ViewOf | None:
    dim = signed(node._saved_dim) % len(x.dims)
    ends = (None if i is None else signed(i) for i in (node._saved_start, node._saved_end))
    start, stop, step = slice(*ends, node._saved_step).indices(x.length(dim))
    return x.narrow(dim, start, stop, step)


def _split(node: Any, x: ViewOf, number: int) -> ViewOf | None:
    dim = signed(node._saved_dim) % len(x.dims)
    start = sum(shape_of_output(node, i)[dim] for i in range(number))
    return x.narrow(dim, start, start + shape_of_output(node, number)[dim])


def _diagonal(node: Any, x: ViewOf, number: int) -> ViewOf | None:
    first, second = (signed(d) % len(x.dims) for d in (node._saved_dim1, node._saved_dim2))
    if len(x.dims[first]) != 1 or len(x.dims[second]) != 1:
        return None
    ((_, down),), ((_, right),) = x.dims[first], x.dims[second]
    shift = signed(node._saved_offset)
    kept = [dim for axis, dim in enumerate(x.dims) if axis not in (first, second)]
    length = shape_of_output(node, number)[-1]
    offset = x.offset + (shift * right if shift > 0 else -shift * down)
    return x._replace(dims=(*kept, ((length, down + right),)), offset=offset)


def _axes(node: Any, x: ViewOf, *names: str) -> list[int]:
    return [signed(getattr(node, f"_saved_{name}")) % max(len(x.dims), 1) for name in names]


#: Views by the names of nodes. All are views whatever the numbers are.
VIEWS: dict[str, Callable[[Any, ViewOf, int], ViewOf | None]] = {
    "TBackward0": lambda node, x, _: x.permute(range(len(x.dims))[::-1]),
    "TransposeBackward0": lambda node, x, _: x.transpose(*_axes(node, x, "dim0", "dim1")),
    "TransposeBackward1": lambda node, x, _: x.transpose(*_axes(node, x, "dim0", "dim1")),
    "PermuteBackward0": lambda node, x, _: x.permute(
        [signed(dim) % len(x.dims) for dim in node._saved_dims]
    ),
    "SelectBackward0": lambda node, x, _: x.select(
        *(axis := _axes(node, x, "dim")), signed(node._saved_index) % x.length(*axis)
    ),
    "SliceBackward0": _sliced,
    "SplitBackward0": _split,
    "SplitWithSizesBackward0": _split,
    "UnbindBackward0": lambda node, x, number: x.select(*_axes(node, x, "dim"), number),
    "DiagonalBackward0": _diagonal,
    "ExpandBackward0": lambda node, x, _: x.expand(shape_of_output(node)),
}
