"""Plans: what a graph has shown of uses and of samples, for later graphs that are the same.

Two graphs are the same if all is equal that decides how parameters are used: operations and how
they are connected, the shapes and dtypes of their outputs, and saved arguments that are no tensors.
The rules of the uses' nodes are asked anew for each graph, since they read its tensors. Graphs
whose uses depend on the numbers in tensors have no plan.
"""

import marshal
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import GradientEdge

from curvlinops.layers.reading import LookedUp, ParameterUse, uses_at
from curvlinops.layers.rules import Use
from curvlinops.layers.sample_axis import SampleAxis
from curvlinops.layers.views import ViewOf
from curvlinops.support.autograd_graph import is_custom
from curvlinops.support.torch_internals import function_of, outputs_of, plain_values

#: The number of a node in a sequence, and the number of one of its outputs.
_Edge = tuple[int, int]


class _PlannedUse(NamedTuple):
    """A ``ParameterUse`` without the tensors of its graph; nodes are numbers."""

    call: int
    node: int
    position: int
    expanded: int | None
    structure: tuple
    is_bias: bool
    joins_weight: bool
    source: _Edge
    view_of: ViewOf | None
    lookup: tuple[_Edge, ViewOf | None] | None
    names: tuple[str, ...]
    samples: SampleAxis | None


class Plan:
    """The uses of parameters in a graph.

    Args:
        nodes: All nodes of the graph.
        uses: The uses.
        unread: The parameters that meet data at a node whose rule is not known.

    Attributes:
        unread: See above.
        conclusions: Conclusions of other classes from the uses, by their own keys.
    """

    def __init__(self, nodes: Sequence[Any], uses: Iterable[ParameterUse], unread: Iterable[str]):
        numbers = {node: number for number, node in enumerate(nodes)}
        self._uses = [_planned(use, numbers) for use in uses]
        self.unread = frozenset(unread)
        self.conclusions: dict[Any, Any] = {}

    def uses(self, nodes: Sequence[Any]) -> list[ParameterUse] | None:
        """Return the uses in an equal graph; ``None`` if a rule finds other ones there."""
        found = []
        for planned in self._uses:
            expanded = None if planned.expanded is None else nodes[planned.expanded]
            uses, _ = uses_at(nodes[planned.node], planned.position, expanded)
            if uses is None or len(uses) != 1 or _structure(uses[0]) != planned.structure:
                return None
            (use,), lookup = uses, planned.lookup
            use.is_bias, use.joins_weight = planned.is_bias, planned.joins_weight
            if lookup is not None:
                lookup = LookedUp.at(_edge(lookup[0], nodes), lookup[1])
            found.append(
                ParameterUse(
                    planned.call,
                    nodes[planned.node],
                    planned.position,
                    use,
                    _edge(planned.source, nodes),
                    planned.view_of,
                    lookup,
                    planned.names,
                    expanded,
                    planned.samples,
                )
            )
        return found


def _planned(use: ParameterUse, numbers: Mapping[Any, int]) -> _PlannedUse:
    lookup = None
    if use.lookup is not None:
        lookup = (numbers[use.lookup.output.node], use.lookup.output[1]), use.lookup.view_of
    return _PlannedUse(
        use.call,
        numbers[use.node],
        use.position,
        None if use.expanded is None else numbers[use.expanded],
        _structure(use.use),
        use.use.is_bias,
        use.use.joins_weight,
        (numbers[use.source.node], use.source[1]),
        use.view_of,
        lookup,
        use.names,
        use.samples,
    )


def _structure(use: Use) -> tuple:
    """Return all of a use that is no function of tensors."""
    return use.row_shape, use.row_axes, use.axes, use.is_product, use.output_shape, use.part


def _edge(edge: _Edge, nodes: Sequence[Any]) -> GradientEdge:
    return GradientEdge(nodes[edge[0]], edge[1])


def identity(nodes: Iterable[Any], names: Mapping[Any, str]) -> bytes:
    """Return a key that is equal for graphs that are the same.

    Args:
        nodes: The nodes of a graph, inputs before what uses them.
        names: The leaves that are parameters, and their names.
    """
    numbers = {None: -1}
    parts = []
    for number, node in enumerate(nodes):
        numbers[node] = number
        function = function_of(node) if is_custom(node) else None
        parts.append(
            (
                node.name(),
                names.get(node),
                function and f"{function.__module__}.{function.__qualname__}",
                [(numbers[source], output) for source, output in node.next_functions],
                [(tuple(x.shape), _name_of(x.dtype)) for x in outputs_of(node)],
                plain_values(node),
            )
        )
    try:
        return marshal.dumps(parts, 2)  # later versions also tell which objects occur twice
    except ValueError:  # an argument that is no plain number
        return repr(parts).encode()


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype)
