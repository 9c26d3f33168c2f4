"""Rules: how the output of a node of autograd's graph depends on a parameter.

A node names its operation, and has saved the tensors that its backward pass needs. To add a layer,
write a function that takes a node and the position of an input, and returns the ``Use`` of this
input; register it with ``reads``, and import its file in ``layers/__init__.py``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError, raise_selective
from curvlinops.layers.factors import KroneckerShape
from curvlinops.layers.gradients import DenseGradient, Entries, PerSampleGradient
from curvlinops.layers.outer import OuterProducts
from curvlinops.structured.layout import ParameterView
from curvlinops.support.norms import wide


class OfNode(NamedTuple):
    """A tensor, or what computes one, as a function of a node and of what it has saved.

    Attributes:
        function: Takes the node and arguments. It is the same object in each call of a rule.
        arguments: Data.
    """

    function: Callable[..., Any]
    arguments: tuple = ()

    def __call__(self, node: Any) -> Any:
        """Return the tensor, or what computes it."""
        try:
            return self.function(node, *self.arguments)
        except RuntimeError as error:
            raise_selective(error)
            raise


#: The other factor of a use: a tensor, a function that returns it, the name of the node's attribute
#: that it is, or a function of the node. With one of the latter two, a use is settled.
Factor = Tensor | Callable[[], Tensor] | str | OfNode


class Matrices(NamedTuple):
    """Sizes of gradients that are sums of outer products, see ``FactoredGradient``: G, O and I."""

    groups: int
    outputs: int
    inputs: int
    #: Whether inputs have a single one among zeros. The entries are those of the transposed matrix
    #: then.
    are_lookups: bool = False

    def shape_of(self, view: ParameterView) -> KroneckerShape | None:
        """Return the shape of Kronecker products for the entries of gradients."""
        if self.are_lookups:
            view = view.undo_permutation((self.outputs, self.inputs), (1, 0))
        return KroneckerShape(*self[:3], view, self.are_lookups)


@dataclass(frozen=True)
class Use:
    """The way in which a node's output depends on one of its inputs, the argument.

    Attributes:
        row_shape: Lengths of the axes that number the rows.
        row_axes: The axis of the output that each of these is, ``None`` for one that is no axis of
            the output. The axis that numbers the samples is one of them.
        to_rows: Turns gradients of the output, ``[V, *output]``, into rows
            ``[V, *row_shape, *features]``. Each row belongs to one sample.
        gradient: Returns the gradients of the samples. Its arguments are inputs ``[N, S, *]``
            (``None`` without ``other``), rows ``[V, N, S, *features]``, and the entries of the
            parameter in the order of the gradients.
        other: The other factor, see ``Factor``.
        to_inputs: Turns several other factors ``[L, *]`` into rows ``[L, *row_shape, *]``. Default:
            they are rows.
        axes: A shape and an order of axes. The argument's entries are in the order of the gradients
            after it is reshaped to this shape and its axes are permuted. Default: no change.
        matrices: The sizes of gradients that are a ``FactoredGradient``; ``None`` for others.
        is_bias: Whether the argument is added to a product with a matrix.
        joins_weight: Whether this bias is added once to each row of the product. It is then the
            weight of one more input, the constant one.
        output_shape: A shape of the output in the same order of memory, to which ``row_axes``
            refer. Default: the shape that it has.
        part: The place along the argument's first axis of the entries that are used. Default: all
            entries are used.
        is_settled: Whether it holds in each equal graph: it has no tensors, and no numbers decide
            about it.
        has_groups: Whether equal ones can be computed together: the first axis of ``features``, and
            that of the other factor's rows, then have the entries of one after the other.
    """

    row_shape: tuple[int, ...]
    row_axes: tuple[int | None, ...]
    to_rows: Callable[[Tensor], Tensor]
    gradient: Callable[[Any, Tensor, Entries], PerSampleGradient]
    other: Factor | None = None
    to_inputs: Callable[[Tensor], Tensor] | None = None
    axes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    matrices: Matrices | None = None
    is_bias: bool = False
    joins_weight: bool = False
    output_shape: tuple[int, ...] | None = None
    part: int | None = None
    is_settled: bool = False
    has_groups: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # equal layers have one use
        return hash((self.row_shape, self.to_rows, self.gradient, self.other, self.axes))

    @property
    def structure(self) -> "Use":
        """All that is no function of tensors."""
        return replace(self, to_rows=None, gradient=None, other=None, to_inputs=None)


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
    """Return the uses of an input of a node, ``None`` if no rule knows them."""
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
    x: Factor,
    w_shape: Sequence[int],
    to_product: Callable[[Tensor], Tensor] | None = None,
    x_shape: Sequence[int] | None = None,
    output_axes: Sequence[int | None] | None = None,
) -> Use | None:
    """Return the use of ``w`` in ``out = einsum(equation, x, w)``.

    Args:
        equation: A name for each axis of ``x``, ``w`` and ``out``, such as
            ``"... i, o i -> ... o"``. The dots stand for any number of axes of ``x`` and ``out``.
        x: The other factor. If it is one of the node, the use holds in each equal graph, and
            ``to_product`` has no tensors.
        w_shape: The argument's shape, perhaps in other axes than the input.
        to_product: Turns gradients of the node's output, ``[V, *]``, into those of ``out``.
            Default: they are the same.
        x_shape: The other factor's shape, if ``x`` is no tensor.
        output_axes: The axis of the node's output that each axis of ``out`` is, ``None`` for one
            that is none. Default: the same axes.

    Returns:
        The use; ``None`` if a tensor repeats an axis, or if an axis of ``w`` alone is summed.
    """
    x_shape = tuple(x.shape if x_shape is None else x_shape)
    axes = _Axes.of(equation, len(x_shape))
    if axes is None:
        return None
    lengths = [w_shape[axis] for axis in axes.of_argument]
    num_groups, num_outer = prod(lengths[: axes.num_groups]), prod(lengths[axes.outer])
    num_inner = prod(lengths[axes.outer.stop :])
    num_axes = len(axes.rows)
    of_rows = [axis - 1 for axis in axes.of_rows[:num_axes]]
    if output_axes is not None:
        of_rows = [output_axes[axis] for axis in of_rows]
    return Use(
        tuple(x_shape[axis] for axis in axes.rows),
        tuple(of_rows),
        _ToRows(axes.of_rows, num_axes, num_groups, num_outer, to_product),
        OuterProducts,
        x,
        _ToInputs(x_shape, axes.summed, axes.of_inputs, num_axes, num_groups, num_inner),
        axes=(tuple(w_shape), axes.of_argument),
        matrices=Matrices(num_groups, num_outer, num_inner),
        is_settled=isinstance(x, str | OfNode),
        has_groups=True,
    )


class _ToRows(NamedTuple):
    """Turns gradients of a node's output into rows of output gradients, ``[V, *rows, G, O]``."""

    order: tuple[int, ...]
    num_axes: int
    num_groups: int
    num_outer: int
    to_product: Callable[[Tensor], Tensor] | None

    def __call__(self, g: Tensor) -> Tensor:
        g = (g if self.to_product is None else self.to_product(g)).permute(0, *self.order)
        return g.reshape(*g.shape[: 1 + self.num_axes], self.num_groups, self.num_outer)


class _ToInputs(NamedTuple):
    """Turns other factors ``[L, *]`` into rows of inputs, ``[L, *rows, G, I]``."""

    shape: tuple[int, ...]
    summed: tuple[int, ...]
    order: tuple[int, ...]
    num_axes: int
    num_groups: int
    num_inner: int

    def __call__(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), *self.shape)
        x = (x.sum(self.summed) if self.summed else x).permute(0, *self.order)
        return x.reshape(*x.shape[: 1 + self.num_axes], self.num_groups, self.num_inner)


class _Axes(NamedTuple):
    """The roles of the axes of a contraction.

    In ``argument . other = output``, *rows* are the axes of other and output, *groups* those of all
    three, *outer* those of argument and output, and *inner* those that are summed. Other factors
    are ``[L, *]``, output gradients ``[V, *output]``.
    """

    rows: tuple[int, ...]
    num_groups: int
    #: The positions of outer in the sequence of groups, outer and inner.
    outer: slice
    #: The axes of other factors that the argument and the output lack.
    summed: tuple[int, ...]
    #: Axes of the output gradient: rows, groups, outer.
    of_rows: tuple[int, ...]
    #: Axes of other factors without ``summed``: rows, groups, inner.
    of_inputs: tuple[int, ...]
    #: Axes of the argument: groups, outer, inner.
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
            summed=tuple(1 + i for i, axis in enumerate(x) if axis not in w and axis not in out),
            of_rows=tuple(1 + out.index(axis) for axis in (*rows, *groups, *outer)),
            of_inputs=tuple(1 + rest.index(axis) for axis in (*rows, *groups, *inner)),
            of_argument=tuple(w.index(axis) for axis in (*groups, *outer, *inner)),
        )


def broadcast(
    shape: Sequence[int], output: Sequence[int], slope: Factor | float = 1.0, aligned: int = 0
) -> Use:
    """Return the use of an argument of an elementwise function, broadcast to the output's shape.

    Args:
        shape: The argument's shape.
        output: The output's shape.
        slope: The output's derivative with respect to the broadcast argument, a number or a factor.
        aligned: Number of axes of the output behind the argument's last one.
    """
    full = (1,) * (len(output) - len(shape) - aligned) + tuple(shape) + (1,) * aligned
    rows = [axis for axis, length in enumerate(full) if length == 1]
    kept = [axis for axis, length in enumerate(full) if length != 1]
    is_number = isinstance(slope, int | float)
    to_rows = _Permuted(tuple(output), (0, *(1 + axis for axis in (*rows, *kept))))
    return Use(
        tuple(output[axis] for axis in rows),
        tuple(rows),
        to_rows._replace(scale=float(slope)) if is_number else to_rows,
        summed,
        None if is_number else slope,
        None if is_number else to_rows,
        is_settled=is_number or isinstance(slope, str | OfNode),
        has_groups=bool(kept),
    )


class _Permuted(NamedTuple):
    """Expands tensors ``[n, *]`` to a shape, moves their axes, and multiplies them by a number."""

    shape: tuple[int, ...]
    order: tuple[int, ...]
    scale: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        x = wide(x)
        if x.numel() == len(x) * prod(self.shape):
            x = x.reshape(len(x), *self.shape)
        else:
            x = x.reshape(len(x), *(1,) * (len(self.order) - x.ndim), *x.shape[1:])
            x = x.expand(-1, *self.shape)
        return (x if self.scale == 1.0 else x * self.scale).permute(self.order)


def summed(x: Tensor | None, g: Tensor, entries: Entries) -> PerSampleGradient:
    """Return sums of rows ``[V, N, S, *]``, times slopes, over positions, see ``Use.gradient``."""
    g = times(x, g)
    return DenseGradient(g.squeeze(2) if g.shape[2] == 1 else g.sum(2), entries)


def times(x: Tensor | None, g: Tensor) -> Tensor:
    """Return gradients of the argument of an elementwise function, given slopes."""
    g = g if x is None else g * x
    return g.real if g.is_complex() else g


@lru_cache(maxsize=256)
def bias(
    shape: tuple[int, ...], output: tuple[int, ...], scale: float = 1.0, aligned: int = 0
) -> Use:
    """Return the use of a bias that is added to a product with a matrix, see ``broadcast``."""
    use = broadcast(shape, output, scale, aligned)
    return replace(use, is_bias=True, joins_weight=scale == 1.0)
