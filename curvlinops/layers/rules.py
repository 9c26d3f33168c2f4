"""Rules: how the output of a node of autograd's graph depends on a parameter.

A node names its operation, and has saved the tensors that its backward pass needs. To add a layer,
write a function that takes a node and the position of an input, and returns the ``Use`` of this
input; register it with ``reads``, and import its file in ``layers/__init__.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError, raise_selective
from curvlinops.layers.gradients import DenseGradient, Entries, PerSampleGradient
from curvlinops.layers.outer import OuterProducts
from curvlinops.support.norms import wide

#: Derivative of the output: a constant, or a function that computes it elementwise.
Slope = Callable[[], Tensor] | float


@dataclass
class Use:
    """The way in which a node's output depends on one of its inputs, the argument.

    Attributes:
        row_shape: Lengths of the axes that number the rows.
        row_axes: The axis of the output that each of these is, ``None`` for one that is no axis of
            the output. The axis that numbers the samples is one of them.
        to_rows: Turns gradients of the output, ``[V, *output]``, into rows
            ``[V, *row_shape, *features]``. Each row belongs to one sample.
        gradient: Returns the gradients of the samples. Its arguments are inputs ``[N, S, *]``
            (``None`` without ``inputs``), rows ``[V, N, S, *features]``, and the entries of the
            parameter in the order of the gradients.
        inputs: Returns the other factor's rows, ``[*row_shape, *]``.
        axes: A shape and an order of axes. The argument's entries are in the order of the gradients
            after it is reshaped to this shape and its axes are permuted. Default: no change.
        is_product: Whether gradients are sums of outer products, a ``FactoredGradient``.
        is_bias: Whether the argument is added to a product with a matrix.
        joins_weight: Whether this bias is added once to each row of the product. It is then the
            weight of one more input, the constant one.
        output_shape: A shape of the output in the same order of memory, to which ``row_axes``
            refer. Default: the shape that it has.
        part: The place along the argument's first axis of the entries that are used. Default: all
            entries are used.
    """

    row_shape: tuple[int, ...]
    row_axes: tuple[int | None, ...]
    to_rows: Callable[[Tensor], Tensor]
    gradient: Callable[[Any, Tensor, Entries], PerSampleGradient]
    inputs: Callable[[], Tensor] | None = None
    axes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    is_product: bool = False
    is_bias: bool = False
    joins_weight: bool = False
    output_shape: tuple[int, ...] | None = None
    part: int | None = None


class RuleError(RuntimeError):
    """An error inside of a rule: a mistake in it, or a node that it does not foresee."""


#: Takes a node and the position of one of its inputs; returns the use of this input, or those of
#: its parts, and ``None`` if it knows none.
Rule = Callable[[Any, int], Use | list[Use] | None]

#: The rules by the names of nodes.
RULES: dict[str, Rule] = {}


def reads(*names: str) -> Callable[[Rule], Rule]:
    """Register a function that knows the uses of the inputs of some nodes.

    Args:
        *names: What ``name()`` of the nodes returns, such as ``"AddmmBackward0"``. That of a
            ``torch.autograd.Function`` ``F`` is ``"FBackward"``.
    """

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, rule))
        return rule

    return register


def uses_of(node: Any, position: int) -> list[Use] | None:
    """Return the uses of an input of a node, ``None`` if no rule knows them.

    Raises:
        RuleError: If there is a mistake in the rule.
    """
    rule = RULES.get(node.name())
    if rule is None:
        return None
    try:
        uses = rule(node, position)
    except NoDerivativeError:
        raise
    except Exception as error:
        raise_selective(error)
        name = getattr(rule, "__qualname__", repr(rule))
        raise RuleError(
            f"The rule {name} for gradients of a layer fails: {error!r}. See above for where; "
            "it may return None for nodes that it does not know."
        ) from error
    return [uses] if isinstance(uses, Use) else uses


def contraction(
    equation: str,
    x: Tensor | Callable[[], Tensor],
    w_shape: Sequence[int],
    to_product: Callable[[Tensor], Tensor] = lambda g: g,
    x_shape: Sequence[int] | None = None,
    output_axes: Sequence[int | None] | None = None,
) -> Use | None:
    """Return the use of ``w`` in ``out = einsum(equation, x, w)``.

    Args:
        equation: A name for each axis of ``x``, ``w`` and ``out``, such as
            ``"... i, o i -> ... o"``. The dots stand for any number of axes of ``x`` and ``out``.
        x: The other factor, or a function that returns it.
        w_shape: The argument's shape, perhaps in other axes than the input.
        to_product: Turns gradients of the node's output, ``[V, *]``, into those of ``out``.
        x_shape: The other factor's shape, if ``x`` is a function.
        output_axes: The axis of the node's output that each axis of ``out`` is, ``None`` for one
            that is none. Default: the same axes.

    Returns:
        The use; ``None`` if a tensor repeats an axis, or if an axis of ``w`` alone is summed.
    """
    x_shape = x.shape if x_shape is None else x_shape
    axes = _Axes.of(equation, len(x_shape))
    if axes is None:
        return None
    lengths = [w_shape[axis] for axis in axes.of_argument]
    num_groups, num_outer = prod(lengths[: axes.num_groups]), prod(lengths[axes.outer])
    num_inner = prod(lengths[axes.outer.stop :])
    num_axes = len(axes.rows)

    def to_rows(g: Tensor) -> Tensor:
        g = to_product(g).permute(0, *axes.of_rows)
        return g.reshape(*g.shape[: 1 + num_axes], num_groups, num_outer)

    def inputs() -> Tensor:
        value = x() if callable(x) else x
        value = value if value.layout is torch.strided else value.to_dense()
        value = value.sum(axes.summed) if axes.summed else value
        value = value.permute(axes.of_inputs)
        return value.reshape(*value.shape[:num_axes], num_groups, num_inner)

    of_rows = [axis - 1 for axis in axes.of_rows[:num_axes]]
    if output_axes is not None:
        of_rows = [output_axes[axis] for axis in of_rows]
    return Use(
        tuple(x_shape[axis] for axis in axes.rows),
        tuple(of_rows),
        to_rows,
        OuterProducts,
        inputs,
        axes=(tuple(w_shape), axes.of_argument),
        is_product=True,
    )


class _Axes(NamedTuple):
    """The roles of the axes of a contraction.

    In ``argument . other = output``, *rows* are the axes of other and output, *groups* those of all
    three, *outer* those of argument and output, and *inner* those that are summed.

    Attributes:
        rows: The axes of the other factor that are rows.
        num_groups: The number of groups.
        outer: The positions of outer in the sequence of groups, outer and inner.
        summed: The axes that only the other factor has.
        of_rows: Axes of the output gradient ``[V, *output]``, in the order rows, groups, outer.
        of_inputs: Axes of the other factor without ``summed``, in the order rows, groups, inner.
        of_argument: Axes of the argument, in the order groups, outer, inner.
    """

    rows: tuple[int, ...]
    num_groups: int
    outer: slice
    summed: tuple[int, ...]
    of_rows: tuple[int, ...]
    of_inputs: tuple[int, ...]
    of_argument: tuple[int, ...]

    @classmethod
    @lru_cache(maxsize=256)  # the same layers come again with each batch
    def of(cls, equation: str, x_ndim: int) -> "_Axes | None":
        """Find the roles; ``None`` if an axis is repeated, or if one of ``w`` alone is summed."""
        factors, _, output = equation.partition("->")
        x, w, out = ([*term.split()] for term in (*factors.split(","), output))
        dots = [f"...{axis}" for axis in range(x_ndim - len(x) + 1)] if "..." in x else []
        x, w, out = (
            tuple(axis for name in term for axis in (dots if name == "..." else [name]))
            for term in (x, w, out)
        )
        if any(len(set(axes)) < len(axes) for axes in (x, w, out)) or {*w} - {*x} - {*out}:
            return None
        groups = tuple(axis for axis in w if axis in x and axis in out)
        inner = tuple(axis for axis in w if axis in x and axis not in out)
        outer = tuple(axis for axis in w if axis not in x)
        rows = tuple(axis for axis in out if axis in x and axis not in w)
        rest = [axis for axis in x if axis in w or axis in out]
        return cls(
            rows=tuple(x.index(axis) for axis in rows),
            num_groups=len(groups),
            outer=slice(len(groups), len(groups) + len(outer)),
            summed=tuple(i for i, axis in enumerate(x) if axis not in w and axis not in out),
            of_rows=tuple(1 + out.index(axis) for axis in (*rows, *groups, *outer)),
            of_inputs=tuple(rest.index(axis) for axis in (*rows, *groups, *inner)),
            of_argument=tuple(w.index(axis) for axis in (*groups, *outer, *inner)),
        )


def broadcast(
    shape: Sequence[int], output: Sequence[int], slope: Slope = 1.0, aligned: int = 0
) -> Use:
    """Return the use of an argument of an elementwise function, broadcast to the output's shape.

    Args:
        shape: The argument's shape.
        output: The output's shape.
        slope: The output's derivative with respect to the broadcast argument.
        aligned: Number of axes of the output behind the argument's last one.
    """
    full = (1,) * (len(output) - len(shape) - aligned) + tuple(shape) + (1,) * aligned
    rows = [axis for axis, length in enumerate(full) if length == 1]
    kept = [axis for axis, length in enumerate(full) if length != 1]

    def to_rows(g: Tensor) -> Tensor:
        g = wide(g)
        if callable(slope) or slope != 1.0:
            g = g * (slope() if callable(slope) else slope)
            g = g.real if g.is_complex() else g
        return g.permute(0, *(1 + axis for axis in (*rows, *kept)))

    def gradient(x: None, g: Tensor, entries: Entries) -> PerSampleGradient:
        return DenseGradient(g.squeeze(2) if g.shape[2] == 1 else g.sum(2), entries)

    return Use(tuple(output[axis] for axis in rows), tuple(rows), to_rows, gradient)


def bias(shape: Sequence[int], output: Sequence[int], scale: float = 1.0, aligned: int = 0) -> Use:
    """Return the use of a bias that is added to a product with a matrix, see ``broadcast``."""
    use = broadcast(shape, output, scale, aligned)
    use.is_bias, use.joins_weight = True, scale == 1.0
    return use
