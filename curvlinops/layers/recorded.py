"""One forward pass: all uses of parameters in it, and the gradients that they add up to."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvlinops.autodiff.backward import batched_vjp, edge_vjp, in_chunks
from curvlinops.autodiff.evaluation import check_graph
from curvlinops.layers.check import Comparison, probe
from curvlinops.layers.gradients import (
    DenseGradient,
    Entries,
    PerSampleGradient,
    PulledBackGradient,
    sum_of,
)
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.plan import Plan, identity
from curvlinops.layers.reading import (
    LOOKUPS,
    PRODUCTS,
    LookedUp,
    ParameterUse,
    Reading,
    Signature,
)
from curvlinops.layers.rules import Use
from curvlinops.layers.sample_axis import TABLE, Constant, SampleAxis, reshaped, sample_axes
from curvlinops.layers.views import RESHAPES, ViewOf
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batch
from curvlinops.support.autograd_graph import addresses, inputs_first, least_precise, saved_memory
from curvlinops.support.norms import wide
from curvlinops.support.pytree import leaves, map_leaves, select_samples
from curvlinops.support.refusals import is_refusal
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_internals import input_metadata, shape_of_output

#: The caller knows how many vectors the memory allows.
_ANY_NUMBER = 2**31

#: Rows all of which belong to one sample.
_ONE_SAMPLE = SampleAxis(0, 1, 1)


@dataclass(eq=False, slots=True)
class UseGradient:
    """The gradients that one use contributes to a parameter.

    Attributes:
        recorded: The use.
        name: The parameter.
        is_unassigned: Whether no axis numbers the samples; all rows are stored as one sample,
            which suffices for sums.
    """

    recorded: ParameterUse
    name: str
    is_unassigned: bool
    _make: Callable[[], PerSampleGradient] | None
    _gradient: PerSampleGradient | None = None

    @property
    def gradient(self) -> PerSampleGradient:
        """The gradients, which are made when they are first read."""
        if self._gradient is None:
            # the memory of inputs and gradients is given back
            self._gradient, self._make = self._make(), None
        return self._gradient


class BackwardPass(NamedTuple):
    """The results of a backward pass.

    Attributes:
        outputs: The gradient at each use's output, ``[V, *output]``.
        totals: Autograd's gradients of parameters, ``[V, *shape]``; empty if not asked for. Those
            of gathered parameters would fill the memory, and are computed one by one.
    """

    outputs: dict[ParameterUse, Tensor]
    totals: dict[str, Tensor]


class RecordedBatch:
    """One forward pass and the uses of parameters in its graph.

    Args:
        problem: The model on a batch.
        names: The parameters.
        tracks_inputs: Whether the graph shows what depends on real numbers in X.

    Attributes:
        names: The parameters.
        output: The model's output, with samples along the first axis.
        num_samples: The number of samples. Each has the same number of neighboring output rows.
        weight: The batch's weight. Who records the batch sets it.
        nodes: All nodes of the graph, inputs before what uses them.
        uses: The uses of parameters, see ``read``.
        unread: The parameters that meet data at a node whose rule is not known.
        conclusions: Conclusions of other classes from the uses in this graph and in equal ones, by
            their own keys.
        is_freed: Whether the last backward pass has freed the graph.
    """

    def __init__(self, problem: BatchProblem, names: list[str], tracks_inputs: bool = False):
        self.names, self._tracks_inputs = names, tracks_inputs
        self._problem = problem
        self._leaves = problem.leaves()
        self._evaluation = problem.evaluation(self._leaves, "once")
        with self._evaluation.active():
            output = problem.output(self._evaluation)
            if output.requires_grad and output.is_leaf:  # a parameter itself
                output = output.view_as(output)
        self.output = output
        # checkpoints compute again what they have saved, when it is read or differentiated
        self._context, _ = self._evaluation.of_graph([output])
        self.num_samples, self.weight = 0, output.new_zeros(())
        self.uses: list[ParameterUse] = []
        self.conclusions: dict[Any, Any] = {}
        self.is_freed = False
        self.unread: set[str] = set()
        # a method of this object would keep the graph in memory after its last use
        self._chunks = in_chunks(partial(batched_vjp, {"": self.output}), _ANY_NUMBER)
        self.nodes = inputs_first(self.output)
        check_graph(self.nodes, problem.model, self._leaves, must_depend=False)

    def teach(self) -> None:
        """Let the problem learn from the output, if it is the model's first."""
        if self._problem.is_first:
            with self._evaluation.active():
                self._problem.learn_from(self.output, self._leaves, must_depend=False)

    def read(self, roles: dict[Signature, bool], plans: dict[Any, Plan]) -> None:
        """Find the uses of parameters in the graph, and the samples of their rows.

        Args:
            roles: What graphs of this model have shown of nodes, see ``Reading``. What this one
                shows is added.
            plans: The plans of earlier graphs. If none is of this graph, that of this one is added.
        """
        same = self.num_samples, identity(self.nodes, self._reached)
        if (plan := plans.get(same)) is not None:
            with self._context():
                uses = plan.uses(self.nodes)
            if uses is not None:
                self.uses, self.unread, self.conclusions = uses, {*plan.unread}, plan.conclusions
                return
        self._depends_on_numbers, before = False, dict(roles)
        axes = self._sample_axes() if self.num_samples > 1 else {}
        reading = self._reading(axes, roles)
        if reading.has_open and not self._tracks_inputs:
            self._learn_roles(roles)
            reading = self._reading(axes, roles)
        for signature, is_function in reading.roles.items():
            roles[signature] = is_function or roles.get(signature, False)
        if any(known and not before.get(signature) for signature, known in roles.items()):
            plans.clear()  # some may have taken it for a use
        self.uses, self.unread = reading.uses, reading.unread
        for use in self.uses:
            use.samples = self._samples_of_rows(use, axes)
        has_parts = any(use.use.part is not None for use in self.uses)
        if not (self._depends_on_numbers or has_parts or reading.has_open):
            plan = plans[same] = Plan(self.nodes, self.uses, self.unread)
            self.conclusions = plan.conclusions

    def _reading(self, axes: Mapping, roles: Mapping[Signature, bool]) -> Reading:
        @cache
        def given() -> set[int]:
            X = self._problem.batch.X
            return {address for x in leaves(X) for address in addresses(x)}

        def is_function(node: Any, signature: Signature) -> bool | None:
            if self.num_samples == 1:  # does not show which axes of length one number samples
                return roles.get(signature)
            place = axes.get((node, 0))
            if not isinstance(place, Constant):
                return False
            # a constant times a parameter; or rows of samples, of which each sample reads its own
            if node.name() in PRODUCTS and not self._tracks_inputs:
                return roles.get(signature)
            if node.name() in LOOKUPS and place is TABLE:
                self._depends_on_numbers = True
                return given().isdisjoint(saved_memory(node))
            return True

        shapes = {name: tuple(self._leaves[name].shape) for name in self.names}
        with self._context():
            return Reading(self.nodes, self._reached, shapes, is_function)

    def _learn_roles(self, roles: dict[Signature, bool]) -> None:
        """Find out what is data, by a graph that shows what depends on real numbers in X.

        A single sample is taken twice.
        """
        problem, num_samples = self._problem, max(self.num_samples, 2)
        X = problem.batch.X
        X = select_samples(X, [0, 0], 1) if self.num_samples == 1 else X
        try:
            with preserved_rng():
                batch = Batch(problem.batch.index, map_leaves(X, _tracked), None)
                twin = RecordedBatch(problem.on(batch), self.names, tracks_inputs=True)
        except Exception as error:  # a user's model may raise anything on another batch
            if not is_refusal(error):
                raise
            return
        if len(twin.output) * self.num_samples == len(self.output) * num_samples:
            twin.num_samples = num_samples
            twin.read(roles, {})

    def _sample_axes(self) -> dict[tuple[Any, int], Any]:
        edge = get_gradient_edge(self.output)
        asked: list[Any] = []
        with self._context():
            axes = sample_axes(edge, self.output.shape, self.num_samples, self.nodes, asked)
        self._depends_on_numbers = bool(asked)
        return axes

    def _samples_of_rows(self, use: ParameterUse, axes: Mapping) -> SampleAxis | None:
        """Return the axis of a use's rows that numbers the samples, ``None`` if not known."""
        if self.num_samples == 1:
            return _ONE_SAMPLE
        found = axes.get((use.node, 0))
        if not isinstance(found, SampleAxis):
            return None
        shape = shape_of_output(use.node)
        if use.use.output_shape is not None:
            found = reshaped(found, shape, use.use.output_shape)
        if found is None or found.axis not in use.use.row_axes:
            return None
        return found._replace(axis=use.use.row_axes.index(found.axis))

    @property
    def num_bytes(self) -> int:
        """The memory of one gradient at the output of each use."""
        outputs = (input_metadata(node) for node in {use.node: None for use in self.uses})
        return sum(prod(output.shape) * output.dtype.itemsize for output in outputs)

    @cached_property
    def precision(self) -> torch.dtype:
        """The least precise dtype in which gradients are computed, also within the model."""
        return least_precise(self.nodes, self.output)

    @cached_property
    def operations(self) -> int:
        """A hash of the graph's operations, inputs before what uses them."""
        return hash(tuple(node.name() for node in self.nodes))

    @cached_property
    def _reached(self) -> dict[Any, str]:
        """The leaves of the graph that are parameters, and their names."""
        by_id = {id(self._leaves[name]): name for name in self.names}
        leaves = ((node, getattr(node, "variable", None)) for node in self.nodes)
        return {node: by_id[id(x)] for node, x in leaves if id(x) in by_id}

    @property
    def is_constant(self) -> bool:
        """Whether the graph connects no parameter with the output."""
        return not self._reached

    @property
    def used(self) -> list[str]:
        """The parameters that have uses."""
        used = {name for use in self.uses for name in use.names}
        return [name for name in self.names if name in used]

    def drop(self, names: Collection[str]) -> None:
        """Forget the uses of some parameters."""
        if not names:
            return
        self.names = [name for name in self.names if name not in names]
        for use in self.uses:
            use.names = tuple(name for name in use.names if name not in names)
        self.uses = [use for use in self.uses if use.names]

    def is_output_of(self, use: ParameterUse) -> bool:
        """Return whether the gradient of the output arrives at a use as it is."""
        node = self.output.grad_fn
        while node is not use.node:
            if node.name() not in RESHAPES:
                return False
            node = node.next_functions[0][0]
        return True

    # --- backward passes

    def zeros(self) -> dict[ParameterUse, Tensor]:
        """Return gradients of zero at each use's output, ``[1, *output]``, without memory."""
        return {use: _at_output(use.node, [], 1) for use in self.uses}

    def backward(
        self,
        u: Tensor,
        uses: Iterable[ParameterUse] | None = None,
        last: bool = False,
        totals: Collection[str] = (),
    ) -> BackwardPass:
        """Backpropagate vectors to the nodes that use parameters.

        Args:
            u: The vectors, ``[V, *output]``.
            uses: The uses. Default: all.
            last: Whether this is the last call. A single vector then frees the graph.
            totals: The parameters whose gradients autograd computes, too.
        """
        uses = list(self.uses if uses is None else uses)
        u = u.reshape(len(u), *self.output.shape).to(self.output.dtype)
        inputs: dict[Any, Any] = {use.node: use.edge for use in uses}
        shards = self._problem.model.shards
        together = [name for name in totals if name not in shards.params]
        inputs |= {name: self._leaves[name] for name in together}
        # several vectors may need one pass each; the same graph gives totals that are not computed
        # here, and gradients of parameters of which a function is used
        is_needed = len(together) < len(totals) or any(use.entries is None for use in uses)
        is_last = last and len(u) == 1 and not (totals and is_needed)
        retain, chunks = not (is_last and self._problem.can_substitute), []
        self.is_freed = not retain
        if len(u):
            with self._context():
                chunks = [chunk for _, chunk in self._chunks({"": u}, inputs, retain)]
        arrived = {
            node: _at_output(node, [chunk.pop(node) for chunk in chunks], len(u))
            for node in {use.node: None for use in uses}
        }
        found = {
            name: torch.cat([_or_zeros(chunk[name], self._leaves[name]) for chunk in chunks])
            for name in (together if chunks else ())
        }
        return BackwardPass({use: arrived[use.node] for use in uses}, found)

    # --- the check of rules

    def check(
        self, u: Tensor, one: BackwardPass, names: Collection[str]
    ) -> tuple[list[str], set[str]]:
        """Compare the sums of gradients of samples with autograd's gradients.

        Args:
            u: A vector, ``[1, *output]``.
            one: Its backward pass, with totals.
            names: The parameters to compare.

        Returns:
            The parameters for which they differ, and those whose gradients are zero, so that the
            comparison shows nothing.
        """
        shards, eps = self._problem.model.shards, torch.finfo(self.output.dtype).eps
        comparison = Comparison(self.precision, eps)
        uses_of: dict[str, list[ParameterUse]] = {}
        for use in self.uses:
            for name in use.names:
                uses_of.setdefault(name, []).append(use)
        for name in names:
            truth = self._autograd_total(name, uses_of.get(name, []), u, one)
            self._problem.check_finite(u.new_zeros(()), {name: truth})
            shards.forget()
            outputs = {use: one.outputs[use] for use in uses_of.get(name, [])}
            sums = partial(self._sum, name, outputs)
            comparison.add(name, sums(), truth, partial(sums, absolute=True))
        zero = {name for name, size in comparison.sizes.items() if size == 0}
        # nothing arrives at an adapter before its first step: its one use is compared alone
        alone = Comparison(self.precision, eps)
        for name in () if self.is_freed else zero:
            if len(uses_of[name]) == 1:
                (use,) = uses_of[name]
                g = probe(one.outputs[use])
                truth = self._behind(use.edge, g, name)
                alone.add(name, self._sum(name, {use: g}), truth, lambda: None)
        zero -= {name for name, size in alone.sizes.items() if size > 0}
        return [*comparison.wrong(), *alone.wrong()], zero

    def _autograd_total(
        self, name: str, uses: Sequence[ParameterUse], u: Tensor, one: BackwardPass
    ) -> Tensor:
        """Return autograd's gradient of one parameter and its uses, given a pass of one vector."""
        if name in one.totals:
            return one.totals.pop(name)[0]
        if len(uses) == 1:
            return self._behind(uses[0].edge, one.outputs[uses[0]], name)
        # a pass from one use may reach another one
        return self._behind(get_gradient_edge(self.output), u, name)

    def _behind(self, edge: GradientEdge, g: Tensor, name: str) -> Tensor:
        """Return the gradient of a parameter, given one that passes an edge, ``[1, *]``."""
        with self._context():
            return edge_vjp(edge, g, get_gradient_edge(self._leaves[name]))[0]

    def _sum(
        self, name: str, outputs: Mapping[ParameterUse, Tensor], absolute: bool = False
    ) -> Tensor | None:
        """Return the sum of one parameter's gradients over all rows of its uses."""
        gradients = self._of_uses(dict(outputs), by_sample=False, absolute=absolute)
        found = [x.gradient.sum_over_samples()[0] for x in gradients if x.name == name]
        return sum(found) if found else None

    # --- gradients of samples

    def by_use(
        self, outputs: dict[ParameterUse, Tensor], elementwise: bool = False
    ) -> Iterator[UseGradient]:
        """Yield the gradients of the uses, one by one.

        Args:
            outputs: The gradients at the uses' outputs, which are freed on the way. Gradients of
                biases become sums over positions, with inputs of one, and are not written down.
            elementwise: Whether those of all elementwise functions become such sums.
        """
        return self._of_uses(outputs, by_position=True, elementwise=elementwise)

    def by_parameter(
        self, outputs: dict[ParameterUse, Tensor], num_vectors: int
    ) -> dict[str, PerSampleGradient]:
        """Return the gradients of all parameters.

        Args:
            outputs: The gradients at the uses' outputs, which are freed on the way.
            num_vectors: The number of vectors that were backpropagated.
        """
        gradients: dict[str, list[PerSampleGradient]] = {}
        for contribution in self._of_uses(outputs):
            gradients.setdefault(contribution.name, []).append(contribution.gradient)
        for name in self.names:
            if name not in gradients:  # they are zero
                leaf = self._leaves[name]
                zeros = leaf.new_zeros(()).expand(num_vectors, self.num_samples, *leaf.shape)
                gradients[name] = [DenseGradient(zeros)]
        return {name: sum_of(gradients[name]) for name in self.names}

    def _of_uses(
        self,
        outputs: dict[ParameterUse, Tensor],
        by_sample: bool = True,
        by_position: bool = False,
        elementwise: bool = False,
        absolute: bool = False,
    ) -> Iterator[UseGradient]:
        """Yield the gradients of the uses. Without a pattern, all rows are those of one sample.

        Args:
            outputs: See ``by_use``.
            by_sample: Whether rows belong to samples. Else all are those of one sample.
            by_position: Whether gradients of biases are not written down.
            elementwise: See ``by_use``.
            absolute: Whether all factors of the gradients are replaced by their absolute values.
        """
        shared: dict[tuple, tuple[Tensor, Tensor]] = {}
        for recorded in list(outputs):
            use, is_assigned = recorded.use, by_sample and recorded.samples is not None
            axis, count = (recorded.samples, self.num_samples) if is_assigned else (_ONE_SAMPLE, 1)
            num_axes, arrived = len(use.row_shape), outputs.pop(recorded)
            x = use.inputs and use.inputs().detach()
            if x is not None:
                # layers with the same input share results of it, while the input exists
                order = axis, count, num_axes
                how = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride(), *order)
                given, (_, x) = x, shared.get(how, (None, None))
                if x is None:
                    x = wide(to_front(given, axis, count, num_axes))
                    if by_position:
                        shared[how] = given, x
            is_sum = use.is_bias or (elementwise and use.inputs is None)
            make = _as_products if by_position and is_sum else use.gradient
            make = partial(_of_use, make, use, x, arrived, (axis, count, num_axes), absolute)
            lookup = recorded.lookup if is_assigned else None
            for name in recorded.names:
                gradient = partial(_on_parameter, make, recorded, self._leaves[name], lookup)
                yield UseGradient(recorded, name, not is_assigned, gradient)


def _of_use(
    make: Callable[..., PerSampleGradient],
    use: Use,
    x: Tensor | None,
    arrived: Tensor,
    order: tuple[SampleAxis, int, int],
    absolute: bool,
    entries: Entries,
) -> PerSampleGradient:
    """Return gradients with respect to a use's argument, given those at the node's output.

    Args:
        make: Makes the gradients of inputs and of gradients of rows; see ``Use.gradient``.
        use: The use.
        x: The inputs, with samples in front.
        arrived: The gradients at the output, ``[V, *output]``.
        order: The axis of samples, their number, and the number of axes of the rows.
        absolute: See ``_of_uses``.
        entries: The entries of a parameter that the argument is.
    """
    g = use.to_rows(arrived)
    g = wide(to_front(g.detach() if g.requires_grad else g, *order, start=1))
    if absolute:
        x, g = x if x is None else x.abs(), g.abs()
    return make(x, g, entries)


def to_front(
    x: Tensor, samples: SampleAxis, num_samples: int, num_axes: int, start: int = 0
) -> Tensor:
    """Turn ``[*, *row_shape, *features]`` into ``[*, N, S, *features]``.

    Args:
        x: Rows. The first ``start`` axes do not number them, the next ``num_axes`` do.
        samples: The axis of the rows that numbers the samples.
        num_samples: N.
        num_axes: Number of axes that together number the rows.
        start: Number of axes in front of these.
    """
    shape, end = x.shape, start + num_axes
    if samples.axis or samples.before > 1:
        axis = start + samples.axis
        x = x.unflatten(axis, (samples.before, num_samples, samples.after))
        x = x.movedim(axis + 1, start)
    rows = prod(shape[start:end]) // num_samples
    return x.reshape(*shape[:start], num_samples, rows, *shape[end:])


def _at_output(node: Any, gradients: list[Tensor | None], num_vectors: int) -> Tensor:
    """Return gradients at a node's output, ``[V, *output]``, given those of some vectors each."""
    if not gradients or gradients[0] is None:
        output = input_metadata(node)
        shape = num_vectors, *output.shape
        return torch.zeros((), dtype=output.dtype, device=output.device).expand(shape)
    return gradients[0] if len(gradients) == 1 else torch.cat(gradients)


def _tracked(x: Any) -> Any:
    """Return a tensor of real numbers as a leaf of graphs, any other one unchanged."""
    is_real = isinstance(x, Tensor) and x.is_floating_point()
    return x.detach().requires_grad_() if is_real else x


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).unsqueeze(0) if gradient is None else gradient


def _as_products(x: None, g: Tensor, entries: Entries) -> OuterProducts:
    """Return gradients of a bias as outer products with inputs of one, see ``Use.gradient``."""
    ones = g.new_ones(*g.shape[1:3], 1, 1)
    return OuterProducts(ones, g.reshape(*g.shape[:3], 1, entries.view.size), entries)


def _on_parameter(
    make: Callable[[Entries], PerSampleGradient],
    use: ParameterUse | LookedUp,
    leaf: Tensor,
    lookup: LookedUp | None = None,
) -> PerSampleGradient:
    """Return gradients with respect to a parameter.

    Args:
        make: Makes the gradients, given the entries of the parameter; see ``Use.gradient``.
        use: The use of a function of the parameter.
        leaf: The parameter.
        lookup: The lookup of which it is a function, row by row.
    """
    if use.entries is not None:
        return make(use.entries)
    source = use.source
    shape = shape_of_output(*source[:2])
    gradient = make(ViewOf.whole("", shape).entries(use.use))
    if lookup is not None and isinstance(gradient, DenseGradient):
        return _on_table(gradient, source, lookup, leaf)
    pull_back = _pull_back(source, get_gradient_edge(leaf))
    return PulledBackGradient(gradient, pull_back, leaf.shape)


def _pull_back(source: GradientEdge, target: GradientEdge) -> Callable[[Tensor], Tensor]:
    """Return a function that turns gradients ``[V, n, *source]`` into ``[V, n, *target]``."""
    if source[:2] == target[:2]:
        return lambda rows: rows
    dtype, shape = input_metadata(*source[:2]).dtype, shape_of_output(*target[:2])
    chunks = in_chunks(lambda u: {"": edge_vjp(source, u[""].to(dtype), target)}, _ANY_NUMBER)

    def pull_back(rows: Tensor) -> Tensor:
        out = rows.new_empty(*rows.shape[:2], *shape)
        for columns, chunk in chunks({"": rows.flatten(0, 1)}):
            out.flatten(0, 1)[columns] = chunk[""].to(rows.dtype)
        return out

    return pull_back


def _on_table(
    gradient: DenseGradient, source: GradientEdge, lookup: LookedUp, leaf: Tensor
) -> PerSampleGradient:
    """Return gradients with respect to a table that all samples read at the same indices."""
    rows = _pull_back(source, lookup.output)(gradient.rows(slice(None)))
    num_vectors, num_samples = rows.shape[:2]
    rows = lookup.use.to_rows(rows.flatten(0, 1)).flatten(1, len(lookup.use.row_shape))
    g = wide(rows.unflatten(0, (num_vectors, num_samples)))
    indices = lookup.use.inputs().flatten().expand(num_samples, -1)
    return _on_parameter(partial(lookup.use.gradient, indices, g), lookup, leaf)
