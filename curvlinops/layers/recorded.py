"""One forward pass: all uses of parameters in it, and the gradients that they add up to."""

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cache, partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from curvlinops.autodiff.backward import batched_vjp, edge_vjp, in_chunks, saved
from curvlinops.autodiff.evaluation import check_graph
from curvlinops.layers.check import Comparison, probe
from curvlinops.layers.gradients import (
    DenseGradient,
    Entries,
    PerSampleGradient,
    PulledBackGradient,
    sum_of,
    total,
)
from curvlinops.layers.graph import KnownGraphs
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.plan import Plan, facts_of
from curvlinops.layers.reading import LOOKUPS, PRODUCTS, ParameterUse, Reading, Signature
from curvlinops.layers.rules import OfNode, Use, summed, times
from curvlinops.layers.sample_axis import TABLE, Constant, SampleAxis, reshaped, sample_axes
from curvlinops.layers.views import RESHAPES, ViewOf
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batch
from curvlinops.support.autograd_graph import addresses, least_precise, saved_memory
from curvlinops.support.norms import wide
from curvlinops.support.pytree import leaves, map_leaves, select_samples
from curvlinops.support.refusals import is_refusal
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_internals import input_metadata, shape_of_output

#: The caller knows how many vectors the memory allows.
_ANY_NUMBER = 2**31

#: The number of entries that are copied so that equal uses are computed together.
_COPIED = 2**16

#: Rows all of which belong to one sample.
_ONE_SAMPLE = SampleAxis(0, 1, 1)


class RecordedBatch:
    """One forward pass and the uses of parameters in its graph, which is added to the known ones.

    With ``tracks_inputs``, the graph shows what depends on real numbers in X.
    """

    def __init__(
        self,
        problem: BatchProblem,
        names: list[str],
        graphs: KnownGraphs,
        tracks_inputs: bool = False,
    ):
        self.names, self._tracks_inputs = names, tracks_inputs
        self._problem = problem
        self._leaves = problem.leaves()
        self._evaluation = problem.evaluation(self._leaves, "once")
        with self._evaluation.active():
            output = problem.output(self._evaluation)
            if output.requires_grad and output.is_leaf:  # a parameter itself
                output = output.view_as(output)
        #: The model's output: each sample has the same number of neighboring rows.
        self.output = output
        self.graph, self.nodes = graphs.find(problem.batch.X, output, self._leaves)
        # checkpoints compute again what they have saved, when it is read or differentiated
        self._context, _ = self._evaluation.of_graph(lambda: self.graph.runs_python)
        #: The number of samples, and the batch's weight. Who records the batch sets them.
        self.num_samples, self.weight = 0, output.new_zeros(())
        #: Whether the last backward pass has freed the graph.
        self.plan, self.is_freed = Plan((), ()), False
        #: The uses of ``names``.
        self.uses: list[ParameterUse] = []
        #: The other factor of each use, see ``Use.other``.
        self.others: dict[ParameterUse, Any] = {}
        #: The rules of uses that do not hold in each equal graph.
        self._asked: dict[ParameterUse, Use] = {}
        # a method of this object would keep the graph in memory after its last use
        self._chunks = in_chunks(partial(batched_vjp, {"": self.output}), _ANY_NUMBER)
        others = (self.nodes[number] for number in self.graph.others)
        check_graph(others, problem.model, self._leaves, must_depend=False)

    def teach(self) -> None:
        """Let the problem learn from the output, if it is the model's first."""
        if self._problem.is_first:
            with self._evaluation.active():
                self._problem.learn_from(self.output, self._leaves, False, self.nodes)

    def read(self) -> None:
        """Find uses and the samples of their rows."""
        plans, same = self.graph.plans, (self.num_samples, tuple(self.names))
        plan = plans.get(same)
        if plan is None or not self._holds(plan):
            self.others, self._asked = {}, {}
            plan, is_sure = self._new_plan()
            self._holds(plan)
            plan.find_kinds(self.nodes, self.others)
            if is_sure:  # other threads use it from now on
                plans[same] = plan
        self.plan, self.uses = plan, [*plan.uses]

    def _holds(self, plan: Plan) -> bool:
        """Read what the uses of a plan need; return whether rules find them in this graph, too."""
        with self._context():
            for use in plan.read:
                rule = use.use
                if not rule.is_settled:
                    rule = self._asked.get(use) or use.asked(self.nodes)
                    if rule is None:
                        return False
                    self._asked[use] = rule
                other, node = rule.other, self.nodes[use.node]
                if isinstance(other, str):
                    other = saved(node, other)
                other = other(node) if isinstance(other, OfNode) else other
                if use.kind is not None and use.factor != facts_of(other):
                    return False
                self.others[use] = other
        return True

    def _new_plan(self) -> tuple[Plan, bool]:
        """Return the plan of a new graph, and whether it is that of all equal graphs."""
        self._depends_on_numbers = False
        axes = self._sample_axes() if self.num_samples > 1 else {}
        reading = self._reading(axes)
        if reading.has_open and not self._tracks_inputs:
            self._learn_roles()
            reading = self._reading(axes)
        roles = self.graph.roles
        roles.update((x, known or roles.get(x, False)) for x, known in reading.roles.items())
        for use in reading.uses:
            use.samples = self._samples_of_rows(use, axes)
        has_parts = any(use.use.part is not None for use in reading.uses)
        is_sure = not (self._depends_on_numbers or has_parts or reading.has_open)
        plan = Plan(reading.uses, reading.unread)
        for use in plan.read:
            if not use.use.is_settled:  # a plan keeps no tensors
                self._asked[use], use.use = use.use, use.use.structure
        return plan, is_sure

    def _reading(self, axes: Mapping) -> Reading:
        @cache
        def given() -> set[int]:
            X = self._problem.batch.X
            return {address for x in leaves(X) for address in addresses(x)}

        roles = self.graph.roles

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
            known, names = self.graph.leaves.items(), set(self.names)
            reached = {self.nodes[number]: name for number, name in known if name in names}
            return Reading(self.nodes, reached, shapes, is_function)

    def _learn_roles(self) -> None:
        """Find out by another graph what depends on X; one sample is taken twice."""
        problem, num_samples = self._problem, max(self.num_samples, 2)
        X = problem.batch.X
        X = select_samples(X, [0, 0], 1) if self.num_samples == 1 else X
        try:
            with preserved_rng():
                batch = Batch(problem.batch.index, map_leaves(X, _tracked), None)
                twin = RecordedBatch(problem.on(batch), self.names, KnownGraphs(), True)
        except Exception as error:  # a user's model may raise anything on another batch
            if not is_refusal(error):
                raise
            return
        if len(twin.output) * self.num_samples == len(self.output) * num_samples:
            twin.num_samples, twin.graph.roles = num_samples, self.graph.roles
            twin.read()

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
        node = self.nodes[use.node]
        found = axes.get((node, 0))
        if not isinstance(found, SampleAxis):
            return None
        shape = shape_of_output(node)
        if use.use.output_shape is not None:
            found = reshaped(found, shape, use.use.output_shape)
        if found is None or found.axis not in use.use.row_axes:
            return None
        return found._replace(axis=use.use.row_axes.index(found.axis))

    @property
    def num_bytes(self) -> int:
        """The memory of one gradient at the output of each use."""
        numbers = dict.fromkeys(use.node for use in self.uses)
        outputs = (input_metadata(self.nodes[number]) for number in numbers)
        return sum(prod(output.shape) * output.dtype.itemsize for output in outputs)

    def drop(self, names: Collection[str]) -> None:
        """Forget the uses of some parameters."""
        if not names:
            return
        self.names = [name for name in self.names if name not in names]
        self.uses = [use for use in self.uses if use.name not in names]

    def split(
        self, tied: bool
    ) -> "tuple[dict[str, PerSampleGradient], RecordedBatch, Tensor | None] | None":
        """Return gradients of zero at the output ``x @ matrix``, all before x, and the matrix.

        ``None`` if the output is no such product, or if its parameters are used before, except that
        whole tables are looked up if ``tied``. There is no matrix if nothing before has a gradient.
        """
        node, before = self.output.grad_fn, copy(self)
        while (name := node.name()) in RESHAPES:
            node = node.next_functions[0][0]
        own = {use.name: use for use in self.uses if self.nodes[use.node] is node}
        # if one is both matrix and bias, one of its uses is here
        before.uses = [use for use in self.uses if own.get(use.name) is not use]
        used = {use.name for use in before.uses}
        before.names = [name for name in self.names if name in used]
        right = len(node.next_functions) - 1
        others = [use for use in before.uses if use.name in own]
        entries = [use.entries for use in (*own.values(), *others)]
        if (
            not any(use.position == right for use in own.values())
            or name not in ("MmBackward0", "AddmmBackward0")
            or getattr(node, "_saved_alpha", 1) != 1
            or not all(tied and self.nodes[use.node].name() in LOOKUPS for use in others)
            or not all(x is not None and (x.have_all or not others) for x in entries)
            or any(use.samples is None for use in self.uses)
            or self._problem.learned().hooks  # which might be between
            or self._problem.model.shards.params  # matrices are not kept
        ):
            return None
        with self._context():
            before.output = saved(node, "_saved_self" if right == 1 else "_saved_mat1")
            matrix = saved(node, "_saved_mat2")
        before._chunks = in_chunks(partial(batched_vjp, {"": before.output}), _ANY_NUMBER)
        zeros = Arrived(self, dict.fromkeys(own.values(), _at_output(node, [], 1)), {})
        found = {name: zeros.take(use, by_position=True) for name, use in own.items()}
        return found, before, matrix

    def rule(self, use: ParameterUse) -> Use:
        """Return the way in which a node of this graph depends on a parameter."""
        return self._asked.get(use, use.use)

    # --- backward passes

    def backward(self, u: Tensor, last: bool = False, totals: Collection[str] = ()) -> "Arrived":
        """Backpropagate vectors ``[V, *output]`` to uses, and to the parameters ``totals``.

        The ``last`` call, with a single vector, frees the graph.
        """
        u = u.reshape(len(u), *self.output.shape).to(self.output.dtype)
        numbers = dict.fromkeys(use.node for use in self.uses)
        inputs: dict[Any, Any] = {number: GradientEdge(self.nodes[number], 0) for number in numbers}
        shards = self._problem.model.shards
        together = [name for name in totals if name not in shards.params]
        inputs |= {name: self._leaves[name] for name in together}
        # several vectors may need one pass each; the same graph gives totals that are not computed
        # here, and gradients of parameters of which a function is used
        is_needed = len(together) < len(totals) or any(use.entries is None for use in self.uses)
        is_last = last and len(u) == 1 and not (totals and is_needed)
        retain, chunks = not (is_last and self._problem.model.substitutable), []
        self.is_freed = not retain
        if len(u):
            with self._context():
                chunks = [chunk for _, chunk in self._chunks({"": u}, inputs, retain)]
        arrived = {
            number: _at_output(self.nodes[number], [x.pop(number) for x in chunks], len(u))
            for number in numbers
        }
        found = {
            name: torch.cat([torch.zeros_like(x)[None] if g is None else g for g in pieces])
            for name in (together if chunks else ())
            for x, pieces in [(self._leaves[name], [chunk[name] for chunk in chunks])]
        }
        return Arrived(self, {use: arrived[use.node] for use in self.uses}, found)

    # --- the check of rules

    def check(self, u: Tensor, one: "Arrived", names: Sequence[str]) -> tuple[list[str], set[str]]:
        """Return the parameters with wrong sums, given one pass with totals, and those with zeros.

        Of gradients that are zero, the comparison shows nothing.
        """
        eps = torch.finfo(self.output.dtype).eps
        # the least precise dtype, also within the model
        precision = least_precise(self.nodes, self.output)
        comparison, used = Comparison(precision, eps), dict[str, Sequence[ParameterUse]]()
        self._problem.check_finite(u.new_zeros(()), one.totals)
        sums = partial(self._sums, dict(one.outputs))
        for stack in self._stacks(one, names):
            used |= stack
            again = [x for x, uses in stack.items() if x not in one.totals and len(uses) > 1]
            found = [self._autograd_total(name, uses, u, one) for name, uses in stack.items()]
            truth = found[0].unsqueeze(0) if len(found) == 1 else torch.stack(found)
            self._problem.model.shards.forget()
            comparison.add(stack, sums(stack), truth, partial(sums, absolute=True), again)
        zero = {name for name, size in comparison.sizes.items() if size == 0}
        # nothing arrives at an adapter before its first step: its one use is compared alone
        alone = Comparison(precision, eps)
        for name in () if self.is_freed else zero:
            if len(used[name]) == 1:
                (use,) = used[name]
                g, stack = probe(one.outputs[use]), {name: [use]}
                alone.add(stack, self._sums({use: g}, stack), self._behind(use, g).unsqueeze(0))
        zero -= {name for name, size in alone.sizes.items() if size > 0}
        return [*comparison.wrong(), *alone.wrong()], zero

    def _autograd_total(
        self, name: str, uses: Sequence[ParameterUse], u: Tensor, one: "Arrived"
    ) -> Tensor:
        """Return autograd's gradient of one parameter and its uses, given a pass of one vector."""
        if name in one.totals:
            return one.totals.pop(name)[0]
        if len(uses) == 1:
            truth = self._behind(uses[0], one.outputs[uses[0]])
        else:  # a pass from one use may reach another one
            with self._context():
                truth = edge_vjp(get_gradient_edge(self.output), u, self._leaf(name))[0]
        self._problem.check_finite(u.new_zeros(()), {name: truth})
        return truth

    def _behind(self, use: ParameterUse, g: Tensor) -> Tensor:
        """Return the gradient of a parameter, given one at the output of a use, ``[1, *]``."""
        with self._context():
            return edge_vjp(GradientEdge(self.nodes[use.node], 0), g, self._leaf(use.name))[0]

    def _leaf(self, name: str) -> GradientEdge:
        return get_gradient_edge(self._leaves[name])

    def _sums(
        self,
        outputs: Mapping[ParameterUse, Tensor],
        stack: Mapping[str, Sequence[ParameterUse]],
        absolute: bool = False,
    ) -> Tensor:
        """Return the sums of all rows' gradients of equal parameters, ``[L, *shape]``."""
        mine = {use: outputs[use] for uses in stack.values() for use in uses}
        arrived = Arrived(self, mine, {}, by_sample=False, absolute=absolute)
        columns = zip(*stack.values(), strict=True)
        sums = total(arrived.take(*uses).sum_over_samples()[0] for uses in columns)
        if len(stack) == 1:
            return sums.unsqueeze(0)
        values = zip(stack.values(), sums.view(len(stack), 1, 1, -1), strict=True)
        return torch.cat([uses[0].entries.spread(x)[0] for uses, x in values])

    # --- gradients of samples

    def by_parameter(
        self, arrived: "Arrived", num_vectors: int, together: bool = False
    ) -> Iterator[tuple[str, PerSampleGradient]]:
        """Yield gradients of parameters, or of several as ``parts``; what arrived is freed."""
        for stack in self._stacks(arrived, self.names):
            names, columns = [*stack], list(zip(*stack.values(), strict=True))
            if not columns:
                leaf = self._leaves[names[0]]
                zeros = leaf.new_zeros(()).expand(num_vectors, self.num_samples, *leaf.shape)
                yield names[0], DenseGradient(zeros)
            elif together or len(names) == 1:
                found = sum_of([arrived.take(*uses) for uses in columns])
                if len(names) > 1:
                    found.parts = tuple((name, uses[0].entries) for name, uses in stack.items())
                yield names[0], found
            else:
                each = zip(*(arrived.each(uses) for uses in columns), strict=True)
                yield from zip(names, map(sum_of, map(list, each)), strict=True)

    def _stacks(
        self, arrived: "Arrived", names: Sequence[str]
    ) -> Iterator[dict[str, list[ParameterUse]]]:
        """Yield parameters that are computed together, and their uses."""

        def find() -> list[dict[str, list[ParameterUse]]]:
            uses_of: dict[str, list[ParameterUse]] = {name: [] for name in names}
            for use in self.uses:
                if use.name in uses_of:
                    uses_of[use.name].append(use)
            stacks = stacks_of(uses_of, lambda name: self._leaves[name].shape)
            return [{name: uses_of[name] for name in stack} for stack in stacks]

        for uses_of in self.plan.known((*names, *self.uses), find):
            uses = next(iter(uses_of.values()))
            for some in arrived.in_steps([*uses_of], uses, with_parameters=True):
                yield {name: uses_of[name] for name in some}

    def on_parameter(
        self, use: ParameterUse, make: Callable[[Entries], PerSampleGradient], is_assigned: bool
    ) -> PerSampleGradient:
        """Return gradients of a parameter, given what makes those of some entries of a tensor."""
        if use.entries is not None:
            return make(use.entries)
        source, leaf = GradientEdge(self.nodes[use.source[0]], use.source[1]), self._leaf(use.name)
        gradient, lookup = make(ViewOf.whole("", use.shape).entries(use.use)), use.lookup
        if lookup is None or not (is_assigned and isinstance(gradient, DenseGradient)):
            shape = self._leaves[use.name].shape
            return PulledBackGradient(gradient, _pull_back(source, leaf), shape)
        # all samples read a table at the same indices
        pull_back = _pull_back(source, GradientEdge(self.nodes[lookup.node], 0))
        rows, rule = pull_back(gradient.rows(slice(None))), self.rule(lookup)
        sizes = rows.shape[:2]
        rows = rule.to_rows(rows.flatten(0, 1)).flatten(1, len(rule.row_shape))
        indices = self.others[lookup].flatten().expand(sizes[1], -1)
        make = partial(rule.gradient, indices, wide(rows.unflatten(0, sizes)))
        return self.on_parameter(lookup, make, is_assigned)


Item = TypeVar("Item", bound=Hashable)


class Arrived:
    """Gradients that have arrived at the outputs of uses; makes those of parameters of them.

    Without ``by_sample``, or an axis of samples, all rows are those of one sample, which suffices
    for sums. With ``absolute``, all factors of gradients are replaced by their absolute values.
    Autograd's ``totals`` are those that were asked for; of gathered parameters they would fill the
    memory, and are computed one by one.
    """

    def __init__(
        self,
        batch: RecordedBatch,
        outputs: dict[ParameterUse, Tensor],
        totals: dict[str, Tensor],
        by_sample: bool = True,
        absolute: bool = False,
    ):
        self._batch, self.outputs, self.totals = batch, outputs, totals
        self._by_sample, self._absolute = by_sample, absolute

    def keep(self, uses: Iterable[ParameterUse]) -> None:
        """Free the gradients of all other uses."""
        self.outputs = {use: self.outputs[use] for use in uses}

    def peek(self, use: ParameterUse) -> PerSampleGradient:
        """Return the gradients of a use by position, and keep them."""
        return Arrived(self._batch, {use: self.outputs[use]}, {}).take(use, by_position=True)

    def stacks(
        self, stacks: Iterable[Sequence[Item]]
    ) -> Iterator[tuple[Sequence[Item], list[PerSampleGradient]]]:
        """Yield items of each stack, and the gradients of their ``uses``, which are equal."""
        for items in stacks:
            for some in self.in_steps(items, items[0].uses):
                columns = zip(*(item.uses for item in some), strict=True)
                # memory of gradients that the caller has used is given back at once
                yield some, [self.take(*uses, by_position=True) for uses in columns]

    def in_steps(
        self,
        items: Sequence[Item],
        uses: Sequence[ParameterUse],
        with_parameters: bool = False,
    ) -> Iterator[Sequence[Item]]:
        """Yield some items with such uses at a time, whose factors, or parameters, are copied."""
        step = len(items)
        if step > 1:
            sizes = [self._size(use) for use in uses]
            sizes += [prod(use.shape) for use in uses if with_parameters]
            step = max(_COPIED // max(1, *sizes), 1)
        for start in range(0, len(items), step or 1):
            yield items[start : start + step]

    def _size(self, use: ParameterUse) -> int:
        """Return the number of entries of a use's larger factor."""
        other = self._batch.others[use]
        size = other.numel() if isinstance(other, Tensor) else 0
        return max(size, self.outputs[use].numel())

    def input_key(self, use: ParameterUse) -> Hashable:
        """Return a value that is equal for uses with the same inputs."""
        x, rule = self._batch.others[use], self._batch.rule(use)
        to_inputs = rule.to_inputs or (rule.gradient if rule.is_settled else None)
        if to_inputs is None or not isinstance(x, Tensor) or x.layout is not torch.strided:
            return use
        return to_inputs, use.samples, x.device, x.data_ptr(), x.dtype, x.shape, x.stride()

    def take(
        self, *uses: ParameterUse, by_position: bool = False, elementwise: bool = False
    ) -> PerSampleGradient:
        """Return the gradients of a use, whose memory is freed; of several equal ones side by side.

        With ``by_position``, those of biases become sums over positions, with inputs of one, and
        are not written down; with ``elementwise``, those of all elementwise functions do.
        """
        use, num = uses[0], len(uses)
        rule, (x, g) = self._batch.rule(use), self._factors(uses)
        is_sum = by_position and (rule.is_bias or (elementwise and rule.gradient is summed))
        make = partial(partial(_as_products, num) if is_sum else rule.gradient, x, g)
        if num > 1:
            return make(Entries.all([num * use.entries.view.size]))
        return self._batch.on_parameter(use, make, self._is_assigned(use))

    def each(self, uses: Sequence[ParameterUse]) -> list[PerSampleGradient]:
        """Return the gradients of several equal uses, as parts of the same tensors."""
        gradient, (x, g) = self._batch.rule(uses[0]).gradient, self._factors(uses)
        inputs = [None] * len(uses) if x is None else x.chunk(len(uses), 2)
        factors = zip(uses, inputs, g.chunk(len(uses), 3), strict=True)
        return [gradient(x, g, use.entries) for use, x, g in factors]

    def _is_assigned(self, use: ParameterUse) -> bool:
        return self._by_sample and use.samples is not None

    def _factors(self, uses: Sequence[ParameterUse]) -> tuple[Tensor | None, Tensor]:
        """Return inputs ``[N, S, *]`` and rows ``[V, N, S, *]`` of equal uses, side by side."""
        rule, num, place = self._batch.rule(uses[0]), len(uses), (_ONE_SAMPLE, 1)
        if self._is_assigned(uses[0]):
            place = uses[0].samples, self._batch.num_samples
        order = *place, len(rule.row_shape)
        x = self._rows_of_inputs(uses, order)
        arrived = [self.outputs.pop(use) for use in uses]
        g = rule.to_rows(arrived[0] if num == 1 else torch.cat(arrived))
        g = wide(to_front(g.detach() if g.requires_grad else g, *order))
        if num > 1:
            g = _side_by_side(g.unflatten(0, (num, -1)), 3)
        if self._absolute:
            x, g = x if x is None else x.abs(), g.abs()
        return x, g

    def _rows_of_inputs(
        self, uses: Sequence[ParameterUse], order: tuple[SampleAxis, int, int]
    ) -> Tensor | None:
        """Return the other factors' rows, with samples in front."""
        others = [self._batch.others[use] for use in uses]
        if others[0] is None:
            return None
        others = [x if isinstance(x, Tensor) else x() for x in others]
        others = [(x if x.layout is torch.strided else x.to_dense()).detach() for x in others]
        x = others[0].unsqueeze(0) if len(others) == 1 else torch.stack(others)
        to_inputs = self._batch.rule(uses[0]).to_inputs
        x = wide(to_front(x if to_inputs is None else to_inputs(x), *order))
        return x[0] if len(uses) == 1 else _side_by_side(x, 2)


def stacks_of(
    uses_of: Mapping[Item, Sequence[ParameterUse]],
    treatment: Callable[[Item], Hashable] = lambda item: None,
) -> list[list[Item]]:
    """Return items whose uses are equal, one by one, and are treated alike."""
    stacks: dict[Hashable, list[Item]] = {}
    for item, uses in uses_of.items():
        # those of one parameter must have its entries in one order, to be added up
        is_alike = len(uses) == 1 or len({use.entries for use in uses}) == 1
        key = treatment(item), *(use if use.kind is None else use.kind for use in uses)
        stacks.setdefault(key if is_alike else item, []).append(item)
    return list(stacks.values())


def _side_by_side(x: Tensor, axis: int) -> Tensor:
    """Turn ``[L, *, n, *]`` into ``[*, L n, *]``, with an axis of length n at a place."""
    return x.movedim(0, axis).flatten(axis, axis + 1)


def _as_products(num: int, x: Tensor | None, g: Tensor, entries: Entries) -> OuterProducts:
    """Return elementwise gradients as outer products with inputs of one, see ``Use.gradient``."""
    g = times(x, g)
    ones = g.new_ones(*g.shape[1:3], num, 1)
    return OuterProducts(ones, g.reshape(*g.shape[:3], num, entries.view.size // num), entries)


def to_front(x: Tensor, samples: SampleAxis, num_samples: int, num_axes: int) -> Tensor:
    """Turn ``[n, *rows, *features]``, with so many axes of rows, into ``[n, N, S, *features]``."""
    shape, end = x.shape, 1 + num_axes
    if samples.axis or samples.before > 1:
        axis = 1 + samples.axis
        x = x.unflatten(axis, (samples.before, num_samples, samples.after)).movedim(axis + 1, 1)
    rows = prod(shape[1:end]) // num_samples
    return x.reshape(shape[0], num_samples, rows, *shape[end:])


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
