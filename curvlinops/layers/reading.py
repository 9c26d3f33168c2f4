"""Reads off autograd's graph how a forward pass has used parameters.

Each node of the graph names its operation, and has saved the tensors that its backward pass needs.
A *use* is a node at which a parameter, or a function of parameters alone, meets data.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from torch.autograd.graph import GradientEdge

from curvlinops.layers.elementwise import elementwise
from curvlinops.layers.factors import KroneckerShape
from curvlinops.layers.gradients import Entries
from curvlinops.layers.linear import factor
from curvlinops.layers.rules import RULES, Use, uses_of
from curvlinops.layers.sample_axis import SampleAxis
from curvlinops.layers.views import COPIES, RESHAPES, ViewOf, is_view
from curvlinops.structured.layout import ParameterView
from curvlinops.support.autograd_graph import has_plain_shape, is_custom, shape_of_input
from curvlinops.support.torch_internals import input_metadata, shape_of_output

#: Products of two or three factors.
PRODUCTS = {f"{name}Backward0" for name in ["Mm", "Addmm", "Bmm", "Baddbmm", "Mv", "Addmv", "Dot"]}
PRODUCTS |= {"SparseAddmmBackward0", "TrilinearBackward0", "ConvolutionBackward0"}

#: Nodes that read entries of a tensor at indices.
LOOKUPS = {f"{name}Backward0" for name in ["Embedding", "Index", "IndexSelect", "Gather", "Take"]}

#: Products to which a bias is added after they are reshaped.
_WITH_BIAS = {"MmBackward0", "AddmmBackward0", "BmmBackward0", "TrilinearBackward0"}

# --- what is read


@dataclass(eq=False)
class ParameterUse:
    """A node at which a parameter, or a function of parameters, meets data.

    It has no tensors and no nodes, but their numbers: it is the same in all equal graphs.
    """

    #: The number of the product, the same for a product with a weight and its bias.
    call: int
    #: The number of the node, and the argument's position among its inputs.
    node: int
    position: int
    #: How the output depends on the argument; its ``structure``, if it is not settled.
    use: Use
    #: The argument, a function of parameters: the number of a node, and of its output.
    source: tuple[int, int]
    shape: tuple[int, ...]
    #: Its entries of a parameter, ``None`` if it is another function.
    view_of: ViewOf | None
    #: The lookup in a table at constant indices, such as those of positions, whose rows the
    #: argument is a function of, row by row; ``None`` without.
    lookup: "ParameterUse | None"
    #: The parameter, and its shape. The argument may depend on others, too.
    name: str
    whole: tuple[int, ...]
    #: The axis of the rows that numbers the samples; ``None`` if it is not known.
    samples: SampleAxis | None = None
    #: Equal for uses of parameters that can be computed together; ``None`` for others.
    kind: int | None = None
    #: What the kind knows of the other factor, see ``facts_of``.
    factor: Hashable = None

    @cached_property
    def entries(self) -> Entries | None:
        """The entries of a parameter that the argument is, in the order of gradients."""
        return self.view_of and self.view_of.entries(self.use)

    @property
    def view(self) -> ParameterView:
        """The entries of the parameter that are used, in its order."""
        view = ParameterView.whole(self.name, self.whole)
        return view if self.entries is None else self.entries.view.in_order

    @property
    def is_product(self) -> bool:
        """Whether the argument, or what it is added to, is a matrix of a product."""
        use, shape = self.use, self.kronecker_shape
        return use.is_bias or use.matrices is not None or shape is not None

    @property
    def kronecker_shape(self) -> KroneckerShape | None:
        """The shape of gradients by position, ``None`` if they have no Kronecker factors."""
        use = self.use
        if self.entries is None:
            is_lookup = use.matrices is None and not use.is_bias and self.samples is not None
            return self.lookup.kronecker_shape if self.lookup and is_lookup else None
        view = self.entries.view
        if use.is_bias:
            return KroneckerShape(1, view.size, 1, view, is_bias=True)
        return use.matrices and use.matrices.shape_of(view)

    def asked(self, nodes: Sequence[Any]) -> Use | None:
        """Return a use that is not settled in an equal graph, ``None`` if it is another one."""
        uses, _ = uses_at(nodes[self.node], self.position)
        is_same = uses is not None and [use.structure for use in uses] == [self.use]
        return uses[0] if is_same else None


# --- reading


def uses_at(
    node: Any, position: int, expanded: Any = None
) -> tuple[list[Use] | None, GradientEdge]:
    """Return the uses of an input, perhaps an expanded one, and what they are uses of."""
    if expanded is not None:
        left = position == len(node.next_functions) - 2
        source = GradientEdge(*expanded.next_functions[0])
        shapes = shape_of_output(node), shape_of_output(*source[:2])
        batch = shape_of_output(expanded)[:-2]
        use = factor("_saved_mat2" if left else "_saved_self", *shapes, left, batch=batch)
        return use and [use], source
    source = GradientEdge(*node.next_functions[position])
    if input_metadata(*source[:2]).dtype.is_complex or not has_plain_shape(node):
        return None, source
    if node.name() in RULES or is_custom(node):
        return uses_of(node, position), source
    use = elementwise(node, position)
    return use and [use], source


#: Identifies a node by the way in which it depends on parameters.
Signature = int

#: Returns whether a node, whose inputs with gradients are functions of parameters, is a function
#: of parameters as well; ``None`` if that is not known.
IsFunction = Callable[[Any, Signature], bool | None]


class Reading:
    """The uses of parameters in a graph, given its nodes, and what tells functions from uses."""

    def __init__(
        self,
        order: Sequence[Any],
        leaves: Mapping[Any, str],
        shapes: Mapping[str, tuple[int, ...]],
        is_function: IsFunction,
    ):
        self._order, self._asked = order, is_function
        self._numbers = {node: number for number, node in enumerate(order)}
        self._leaves, self._shapes = leaves, shapes
        #: The functions of parameters, and the parameters that they depend on.
        self._names: dict[Any, tuple[str, ...]] = {node: (name,) for node, name in leaves.items()}
        self._signatures: dict[Any, Signature] = {x: hash(name) for x, name in leaves.items()}
        self._views: dict[tuple[Any, int], ViewOf | None] = {}
        self._products: dict[Any, int] = {}
        self._consumers: dict[Any, list[tuple[Any, int]]] | None = None
        self._expanded: dict[Any, Any] = {}
        self.uses: list[ParameterUse] = []
        #: The parameters that meet data at a node whose rule is not known.
        self.unread: set[str] = set()
        #: Whether nodes with functions of parameters among their inputs return such functions, or
        #: some of those that depend on parameters in the same way.
        self.roles: dict[Signature, bool] = {}
        #: Whether ``is_function`` did not know one of them, which is a use here.
        self.has_open = False
        for number, node in enumerate(order):
            edges = node.next_functions
            own = [i for i, (source, _) in enumerate(edges) if source in self._names]
            if own:
                self._read(number, node, own)

    def _read(self, number: int, node: Any, own: list[int]) -> None:
        """Find out whether a node is a function of parameters, or uses one."""
        edges = node.next_functions
        sources = [edges[i] for i in own]
        functions = tuple((self._signatures[source], number) for source, number in sources)
        signature = hash((node.name(), functions))
        is_alone = len(own) == sum(source is not None for source, _ in edges)
        is_function = is_alone and self._is_function(node, signature)
        self.roles[signature] = is_function or self.roles.get(signature, False)
        if is_function:
            self._signatures[node] = signature
            names = dict.fromkeys(name for source, _ in sources for name in self._names[source])
            self._names[node] = tuple(names)
            return
        numbers = self._numbers
        for position in reversed(own):  # a bias comes in front of the factors
            source = GradientEdge(*edges[position])
            names = self._names[source.node]
            expanded = self._expanded.get(source.node)
            uses, source = uses_at(node, position, expanded)
            shape, argument = shape_of_output(*source[:2]), (numbers[source[0]], source[1])
            view = self.view_of(*source[:2])
            if uses is None or (view is None and any(use.part is not None for use in uses)):
                self.unread.update(names)
                continue
            call = self._products.setdefault(node, number)
            product = self._product(node, position)
            lookups = {name: None if view else self._lookup(*source[:2], name) for name in names}
            for use in uses:
                if product is not None:
                    call, use = product, replace(use, is_bias=True, joins_weight=True)
                part = view if use.part is None else view.select(0, use.part)
                place = call, number, position, use, argument, shape, part
                self.uses += [
                    ParameterUse(*place, lookup, name, self._shapes[name])
                    for name, lookup in lookups.items()
                ]

    def _is_function(self, node: Any, signature: Signature) -> bool:
        """Return whether a node whose inputs with gradients are functions of parameters is one."""
        if self._is_expanded(node) or is_view(node):
            return True
        known = self._asked(node, signature)
        self.has_open |= known is None
        return bool(known)

    def _is_expanded(self, node: Any) -> bool:
        """Return whether a node expands a matrix for a product of batches, as matmul does."""
        name = node.name()
        source = node.next_functions[0][0]
        if name == "ExpandBackward0" and len(shape_of_output(node)) > 2:
            inner = node
        elif source in self._expanded and name in RESHAPES | COPIES:
            inner = self._expanded[source]
        else:
            return False
        if not self._ends_in_product(node, shape_of_output(inner)):
            return False
        self._expanded[node] = inner
        return True

    def _ends_in_product(self, node: Any, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor is only copied and reshaped to a factor of one product."""
        if self._consumers is None:
            self._consumers = {}
            for user in self._order:
                for position, (source, _) in enumerate(user.next_functions):
                    self._consumers.setdefault(source, []).append((user, position))
        while len(users := self._consumers.get(node, [])) == 1:
            ((node, _),) = users
            if node.name() == "BmmBackward0":
                return True
            if node.name() in COPIES:
                continue
            merged = (prod(shape[:-2]), *shape[-2:])
            if node.name() not in RESHAPES or shape_of_output(node) not in (shape, merged):
                return False
        return False

    def _product(self, node: Any, position: int) -> int | None:
        """Return the number of the product to which ``F.linear``, ``F.bilinear`` add a bias."""
        shape = shape_of_input(node, position)
        is_sum = node.name() == "AddBackward0" and (position == 0 or node._saved_alpha == 1)
        other = node.next_functions[1 - position][0] if is_sum else None
        if other is None or other.name() not in RESHAPES or shape != shape_of_output(node)[-1:]:
            return None
        product = other.next_functions[0][0]
        if product.name() not in _WITH_BIAS or shape_of_output(product)[-1:] != shape:
            return None
        return self._products.get(product)

    def view_of(self, node: Any, number: int) -> ViewOf | None:
        """Return the entries of a parameter that a function of parameters is."""
        key = node, number
        if key not in self._views:
            view = None
            if node in self._leaves:
                name = self._leaves[node]
                view = ViewOf.whole(name, self._shapes[name])
            elif len(sources := [x for x in node.next_functions if x[0] is not None]) == 1:
                before = self.view_of(*sources[0])
                view = before and before.after(node, number)
            self._views[key] = view
        return self._views[key]

    def _lookup(self, node: Any, number: int, name: str) -> ParameterUse | None:
        """Return the lookup in a table, if a tensor is a function of its rows."""
        shape = shape_of_output(node, number)
        while node not in self._leaves and shape_of_output(node, number) == shape:
            if node.name() == "EmbeddingBackward0":
                (use,), place = uses_of(node, 0) or (None,), self._numbers[node]
                table, output = node.next_functions[0]
                argument = (self._numbers[table], output), shape_of_output(table, output)
                view = self.view_of(table, output)
                of_table = *argument, view, None, name, self._shapes[name]
                return use and ParameterUse(place, place, 0, use, *of_table)
            sources = [x for x in node.next_functions if x[0] is not None]
            if len(sources) != 1:
                return None
            node, number = sources[0]
        return None
