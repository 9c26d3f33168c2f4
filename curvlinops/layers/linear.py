"""Products with a matrix."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.layers import rules
from curvlinops.layers.rules import OfNode, Use, contraction, reads
from curvlinops.support.autograd_graph import shape_of_input
from curvlinops.support.torch_internals import shape_of_output


@reads("MmBackward0", "BmmBackward0")
def mm(node: Any, position: int) -> Use | None:
    """``self @ mat2``, perhaps for each entry of a batch."""
    return _factor(node, position == 0, "_saved_mat2" if position == 0 else "_saved_self")


@reads("AddmmBackward0", "SparseAddmmBackward0", "BaddbmmBackward0")
def addmm(node: Any, position: int) -> Use | None:
    """``beta self + alpha mat1 @ mat2``, perhaps for each entry of a batch."""
    is_batch = node.name() == "BaddbmmBackward0"
    if position == 0:
        added = rules.broadcast if is_batch else rules.bias
        return added(shape_of_input(node, 0), shape_of_output(node), float(node._saved_beta))
    other = f"_saved_{'batch' if is_batch else 'mat'}{3 - position}"
    return _factor(node, position == 1, other, node._saved_alpha)


@reads("GroupedMmBackward0")
def grouped_mm(node: Any, position: int) -> Use | list[Use] | None:
    """``self[start:end] @ mat2[i]``, as for routed experts, or a product of batches."""
    x, w_shape, ends = node._saved_self, shape_of_input(node, 1), node._saved_offs
    if ends is None:
        return mm(node, position)
    if position == 0 or x.ndim != 2 or len(w_shape) != 3:
        return None
    ends = ends.tolist()
    spans = enumerate(zip([0, *ends], ends, strict=False))
    uses = [_matrix_of(x, w_shape[1:], i, *span) for i, span in spans if span[0] < span[1]]
    return [use for use in uses if use is not None]


@reads("MvBackward0", "AddmvBackward0")
def mv(node: Any, position: int) -> Use | None:
    """``self @ vec``, or ``beta self + alpha mat @ vec``."""
    if node.name() == "MvBackward0":
        return _matrix_or_vector(node, position, "_saved_self")
    if position == 0:
        shape = shape_of_input(node, 0)
        return rules.bias(shape, shape_of_output(node), float(node._saved_beta))
    return _matrix_or_vector(node, position - 1, "_saved_mat", node._saved_alpha)


@reads("DotBackward0", "VdotBackward0")
def dot(node: Any, position: int) -> Use | None:
    """The inner product of two vectors."""
    other, shape = ("_saved_tensor", "_saved_self")[position], shape_of_input(node, position)
    other = "_saved_other" if getattr(node, other, None) is None else other
    return contraction("i, i -> ", other, shape, x_shape=shape)


@reads("TrilinearBackward0")
def bilinear(node: Any, position: int) -> Use | None:
    """``out_k = input1^T weight_k input2``."""
    first, second = node._saved_i1.shape, node._saved_i3.shape
    axes = [list(node._saved_expand1), list(node._saved_expand2), list(node._saved_expand3)]
    if position != 1 or axes != [[1, 3], [0], [1, 2]]:
        return None
    shape, weight = (*first, second[-1]), shape_of_input(node, 1)
    return contraction("n i j, o i j -> n o", OfNode(_inputs_of_both), weight, x_shape=shape)


def _inputs_of_both(node: Any) -> Callable[[], Tensor]:
    first, second = node._saved_i1, node._saved_i3
    return lambda: first.unsqueeze(-1) * second.unsqueeze(-2)


def _factor(node: Any, left: bool, other: str, scale: float = 1) -> Use | None:
    """Return the use of w in ``w @ x`` or ``x @ w``, times a scale."""
    position = len(node.next_functions) - (2 if left else 1)
    shapes = shape_of_output(node), shape_of_input(node, position)
    return factor(other, *shapes, left, scale)


def _matrix_of(x: Tensor, w_shape: Sequence[int], i: int, start: int, end: int) -> Use | None:
    """Return the use of the matrix i, with which some rows are multiplied."""
    rows = slice(start, end)
    axes = (None, None)  # samples have unequal numbers of these rows
    use = contraction("r i, i o -> r o", x[rows], w_shape, lambda g: g[:, rows], output_axes=axes)
    return use and replace(use, part=i)


class _Product(NamedTuple):
    """Turns gradients of a node's output into those of a product, of which it has a multiple."""

    shape: tuple[int, ...]
    scale: float

    def __call__(self, g: Tensor) -> Tensor:
        g = g.reshape(len(g), *self.shape)
        return g if self.scale == 1 else g * self.scale


@lru_cache(maxsize=256)  # many layers are equal
def factor(
    other: str,
    output: Sequence[int],
    w_shape: Sequence[int],
    left: bool,
    scale: float = 1,
    batch: Sequence[int] | None = None,
) -> Use | None:
    """Return the use of w in ``w @ x`` or ``x @ w``; axes of length one in front are broadcast.

    The node sees the axes of a ``batch``, those of the output in front, as one axis. A scale
    multiplies gradients, which are there for a short time.
    """
    batch, (*_, rows, columns) = tuple(output[:-2] if batch is None else batch), output
    names = [f"b{axis}" for axis in range(len(batch))]
    num_more = len(batch) - (len(w_shape) - 2)
    kept = [num_more + axis for axis, length in enumerate(w_shape[:-2]) if length != 1]
    of_x, of_w = " ".join(names), " ".join(names[axis] for axis in kept)
    if left:
        equation, x_shape = f"{of_x} i rows, {of_w} o i -> {of_x} o rows", (w_shape[-1], columns)
    else:
        equation, x_shape = f"{of_x} rows i, {of_w} i o -> {of_x} rows o", (rows, w_shape[-2])
    product = (*batch, rows, columns)
    shape = [*(batch[axis] for axis in kept), *w_shape[-2:]]
    use = contraction(equation, other, shape, _Product(product, scale), (*batch, *x_shape))
    return use and replace(use, output_shape=product)


def _matrix_or_vector(node: Any, position: int, matrix: str, scale: float = 1) -> Use | None:
    """Return the use of the matrix (position 0) or of the vector in a product."""
    output = shape_of_output(node)
    shape = shape_of_input(node, len(node.next_functions) - 2 + position)
    product = _Product(output, scale)
    if position == 0:
        return contraction("i, o i -> o", "_saved_vec", shape, product, shape[1:])
    return contraction("r i, i -> r", matrix, shape, product, (*output, *shape))
