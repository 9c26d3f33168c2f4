"""How an argument of a call enters its output, and which calls are known.

To add a layer, write a file with one function that takes the arguments of PyTorch's function and
returns a ``Use`` for each argument that may be a parameter, and register it with ``handles``.
"""

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from torch import Tensor

from curvlinops.core.functions import wide
from curvlinops.layers.forms import Direct, Form
from curvlinops.layers.outer import Arrangement, Outer

#: Sorts rows ``[*lead, *features]`` by samples, to ``[N, S, *features]``.
Sort = Callable[[Tensor], Tensor]

#: A derivative, the same everywhere, or a function that returns it in the output's shape.
Slope = Callable[[], Tensor] | float


@dataclass
class Use:
    """How one argument enters a call's output.

    Attributes:
        lead: Lengths of the axes that number the rows of ``split``.
        split: Turns gradients of the output, ``[V, *output]``, into rows ``[V, *lead, *features]``:
            each row belongs to one sample.
        form: Takes the rows sorted by samples, ``[V, N, S, *features]``, and a function that
            sorts others in the same way, and returns the gradients with respect to the argument.
        shift: For a bias that is added to a product with a matrix: by what it is multiplied before.
        elsewhere: Whether its positions are others than those of the product.
    """

    lead: tuple[int, ...]
    split: Callable[[Tensor], Tensor]
    form: Callable[[Tensor, Sort], Form]
    shift: float | None = None
    elsewhere: bool = False

    def reshaped(self, shape: Sequence[int]) -> "Use":
        """Return the same for an argument with the same entries in another shape."""

        def form(g: Tensor, sort: Sort) -> Form:
            return self.form(g, sort).reshaped(shape)

        return Use(self.lead, self.split, form)


class Rule:
    """Knows the uses of a function's arguments.

    Args:
        uses: Takes the function's arguments, returns uses by name or position of an argument.
    """

    def __init__(self, uses: Callable[..., Mapping[str | int, Use | None]]):
        self._uses = uses
        self._signature = inspect.signature(uses)

    def __call__(self, args: tuple, kwargs: dict) -> dict[int | str, Use]:
        """Return the uses by position, or name if passed by name; none if the call is unknown."""
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError:
            return {}
        uses = self._uses(*bound.args, **bound.kwargs)
        order = list(self._signature.parameters)
        return {
            name if isinstance(name, int) or name in kwargs else order.index(name): use
            for name, use in uses.items()
            if use is not None
        }


RULES: dict[Callable, Rule] = {}


def handles(*functions: Callable) -> Callable[[Callable], Callable]:
    """Register a function that knows the uses of the arguments of some PyTorch functions."""

    def register(uses: Callable) -> Callable:
        RULES.update(dict.fromkeys(functions, Rule(uses)))
        return uses

    return register


def contraction(
    x: Tensor | Callable[[], Tensor],
    x_labels: Sequence[Hashable],
    w_labels: Sequence[Hashable],
    out_labels: Sequence[Hashable],
    w_shape: Sequence[int],
    split: Callable[[Tensor], Tensor] = lambda g: g,
    x_shape: Sequence[int] | None = None,
) -> Use | None:
    """Return the use of ``w`` in ``out = einsum(x, w)``.

    Args:
        x: The other factor, or a function that returns it.
        x_labels: A label for each of its axes.
        w_labels: A label for each of the argument's axes.
        out_labels: A label for each of the output's axes.
        w_shape: The argument's shape.
        split: Turns gradients of the call's output, ``[V, *]``, into gradients of ``out``.
        x_shape: The other factor's shape, if ``x`` is a function.

    Returns:
        The use, or ``None`` if an axis is repeated, or ``w`` is summed on its own.
    """
    X, W, out = set(x_labels), set(w_labels), set(out_labels)
    if any(len(set(axes)) < len(axes) for axes in (x_labels, w_labels, out_labels)):
        return None
    if W - X - out:
        return None
    groups = [axis for axis in w_labels if axis in X and axis in out]
    inner = [axis for axis in w_labels if axis in X and axis not in out]
    outer = [axis for axis in w_labels if axis not in X]
    lead = [axis for axis in out_labels if axis in X and axis not in W]
    lengths = dict(zip(w_labels, w_shape, strict=True))
    order = [*groups, *outer, *inner]
    # without an axis that numbers them, there is one row, of one sample
    only = () if lead else (1,)

    def rows(g: Tensor) -> Tensor:
        places = [1 + list(out_labels).index(axis) for axis in (*lead, *groups, *outer)]
        g = split(g).permute(0, *places)
        shape = *g.shape[: 1 + len(lead)], *only
        return g.reshape(*shape, _length(groups, lengths), _length(outer, lengths))

    def inputs() -> Tensor:
        value = x() if callable(x) else x
        alone = [i for i, axis in enumerate(x_labels) if axis not in W | out]
        value = value.sum(alone) if alone else value
        rest = [axis for axis in x_labels if axis in W | out]
        value = value.permute([rest.index(axis) for axis in (*lead, *groups, *inner)])
        shape = *value.shape[: len(lead)], *only
        return value.reshape(*shape, _length(groups, lengths), _length(inner, lengths))

    arrangement = Arrangement.of(
        [lengths[axis] for axis in order], [order.index(axis) for axis in w_labels]
    )

    def form(g: Tensor, sort: Sort) -> Form:
        return Outer(wide(sort(inputs())), wide(g), w_shape, arrangement)

    extent = dict(zip(x_labels, x.shape if x_shape is None else x_shape, strict=True))
    return Use((*(extent[axis] for axis in lead), *only), rows, form)


def broadcast(
    shape: Sequence[int], output: Sequence[int], slope: Slope = 1.0, aligned: int = 0
) -> Use:
    """Return the use of an argument that is broadcast, in a function without other mixing of axes.

    Args:
        shape: The argument's shape.
        output: The output's shape.
        slope: The output's derivative with respect to the broadcast argument.
        aligned: Number of axes of the output behind the argument's last one.
    """
    full = (1,) * (len(output) - len(shape) - aligned) + tuple(shape) + (1,) * aligned
    lead = [axis for axis, length in enumerate(full) if length == 1]
    kept = [axis for axis, length in enumerate(full) if length != 1]

    def split(g: Tensor) -> Tensor:
        g = wide(g)
        if callable(slope) or slope != 1.0:
            g = g * (slope() if callable(slope) else slope)
        g = g.permute(0, *(1 + axis for axis in (*lead, *kept)))
        return g if lead else g.unsqueeze(1)

    def form(g: Tensor, sort: Sort) -> Form:
        total = g.sum(2)
        return Direct.of(total.reshape(*total.shape[:2], *shape))

    return Use(tuple(output[axis] for axis in lead) or (1,), split, form)


def shift(shape: Sequence[int], output: Sequence[int], scale: float = 1.0, aligned: int = 0) -> Use:
    """Return the use of a bias that is added to a product with a matrix, see ``broadcast``."""
    return replace(broadcast(shape, output, scale, aligned), shift=scale)


def _length(axes: Sequence[Hashable], lengths: dict[Hashable, int]) -> int:
    return prod(lengths[axis] for axis in axes)
