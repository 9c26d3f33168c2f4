"""Known graphs: what decides how a graph uses parameters, node by node.

Two graphs are the same if all of this is equal: operations and how they are connected, the shapes
and dtypes of their outputs, saved arguments that are no tensors, which saved tensors hooks have
replaced, and which leaves are which parameters. One walk from the output compares a graph with a
known one, and stops at the first difference.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor

from curvlinops.support.autograd_graph import graph_nodes, is_custom, runs_python
from curvlinops.support.pytree import leaves as tensors_in
from curvlinops.support.torch_internals import function_of, node_facts

#: The number of known graphs that are compared with one: those of a model that drops layers at
#: random are many, and all begin alike.
_ALIKE = 8
#: The number of graphs that are known. One takes about 1 kB for each of its nodes.
NUM_KNOWN = 64


class Graph:
    """What decides about a graph, given all nodes, inputs first, and what replaces parameters."""

    def __init__(self, output: Tensor, nodes: Sequence[Any], parameters: Mapping[str, Tensor]):
        names = {id(x): name for name, x in parameters.items()}
        numbers = {None: -1} | {node: number for number, node in enumerate(nodes)}
        found = {numbers[x]: names.get(id(x.variable)) for x in nodes if _is_leaf(x)}
        self._output = output.output_nr
        records = [(i, *_record(x, numbers, found.get(i))) for i, x in enumerate(nodes)]
        self._records = records[::-1]  # what uses a node comes before it
        #: The numbers of the leaves that are parameters, and their names; of all others.
        self.leaves = {number: name for number, name in found.items() if name is not None}
        self.others = [number for number, name in found.items() if name is None]
        #: Whether backward passes run the user's code.
        self.runs_python = runs_python(nodes)
        #: A hash of the operations.
        self.operations = hash(tuple(node.name() for node in nodes))
        #: The uses in such graphs, by the number of samples and the parameters.
        self.plans: dict[Hashable, Any] = {}
        #: The parameters whose rules were compared with autograd, in graphs with these operations,
        #: and whether that has shown that they agree. Gradients of zero show nothing.
        self.checked: dict[str, bool] = {}
        #: Whether nodes of such graphs return functions of parameters alone, see ``Reading``.
        self.roles: dict[Hashable, bool] = {}

    def match(self, output: Tensor, parameters: Mapping[str, Tensor]) -> list[Any] | None:
        """Return the nodes of the graph of an output if it is the same, else ``None``."""
        if output.output_nr != self._output or output.grad_fn is None:
            return None
        nodes = [*[...] * (len(self._records) - 1), output.grad_fn, None]  # at -1 for no node
        try:
            for number, kind, sources, read, facts in self._records:
                node = nodes[number]
                edges = node.next_functions
                if len(edges) != len(sources) or (type(node) is not kind and _kind(node) != kind):
                    return None
                for (source, index), (place, expected) in zip(edges, sources, strict=True):
                    if nodes[place] is ...:
                        nodes[place] = source
                    if nodes[place] is not source or index != expected:
                        return None
                if sources and read(node) != facts:
                    return None
                if not sources and facts is not None and node.variable is not parameters[facts]:
                    return None
            others = {id(nodes[number].variable) for number in self.others}
        except (AttributeError, KeyError, RuntimeError):  # of another kind, or freed
            return None
        is_same = others.isdisjoint(map(id, parameters.values())) and len(set(nodes)) == len(nodes)
        return nodes[:-1] if is_same else None


class KnownGraphs(dict[Graph, Hashable]):
    """The known graphs of a model, for all operators on it, and the shapes for which they are."""

    is_shared = True

    def __reduce__(self) -> tuple:
        return KnownGraphs, ()  # hashes and types of nodes are those of this process

    def find(
        self, X: Any, output: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[Graph, list[Any]]:
        """Return an output's graph, a known one or a new one, and its nodes, inputs first."""
        key = output.shape, *(x.shape for x in tensors_in(X) if not x.is_nested)
        alike = [graph for graph, other in self.items() if other == key]
        for graph in reversed(alike):
            if (nodes := graph.match(output, parameters)) is not None:
                return graph, nodes
        nodes = graph_nodes(output)
        graph = Graph(output, nodes, parameters)
        for known in self:
            if known.operations == graph.operations:
                graph.checked, graph.roles = known.checked, known.roles
        self[graph] = key
        if len(alike) == _ALIKE or len(self) > NUM_KNOWN:
            del self[alike[0] if len(alike) == _ALIKE else next(iter(self))]
        return graph, nodes


def _is_leaf(node: Any) -> bool:
    return not node.next_functions and isinstance(getattr(node, "variable", None), Tensor)


def _record(node: Any, numbers: Mapping[Any, int], name: str | None) -> tuple:
    sources = [(numbers[source], index) for source, index in node.next_functions]
    read = node_facts(type(node)) if sources else None
    return _kind(node), sources, read, name if read is None else read(node)


def _kind(node: Any) -> type | str:
    """Return what operation a node is of. Types of PyTorch's are compared fastest."""
    if is_custom(node):
        function = function_of(node)
        return f"{function.__module__}.{function.__qualname__}"
    name = node.name().rpartition("::")[2]
    return type(node) if type(node).__name__ == name else name
