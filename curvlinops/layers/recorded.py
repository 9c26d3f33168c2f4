"""One forward pass: all uses of parameters in it, and the gradients that they add up to."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import (
    batched_vjp,
    gradient_behind,
    in_chunks,
    vjp,
    vjp_columns,
)
from curvlinops.autodiff.evaluation import check_graph
from curvlinops.layers.batch_axis import (
    ALL_ROWS,
    ROW_ARGUMENTS,
    Rows,
    UseKey,
    decide,
    fits,
    sketch,
    to_front,
)
from curvlinops.layers.capture import Capture, LookedUp, RecordedUse, ViewOf
from curvlinops.layers.check import Comparison, probe, sample_weights, weighted
from curvlinops.layers.gradients import (
    DenseGradient,
    Entries,
    PerSampleGradient,
    PulledBackGradient,
    sum_of,
)
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.proof import Place, find_places, is_followed
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.autograd_graph import (
    graph_nodes,
    leaf_variables,
    least_precise,
    signature,
)
from curvlinops.support.norms import wide
from curvlinops.support.pytree import leaves

#: The caller knows how many vectors the memory allows.
_ANY_NUMBER = 2**31


#: A use, the axis of samples in its output, and whether positions are in front or behind on it.
ProvedKey = tuple[UseKey, int, bool, bool]


class UseGradient(NamedTuple):
    """The gradients that one use contributes to a parameter.

    Attributes:
        recorded: The use.
        name: The parameter.
        gradient: The gradients.
        is_unassigned: Whether no axis numbers the samples; all rows are stored as one sample,
            which suffices for sums.
    """

    recorded: RecordedUse
    name: str
    gradient: PerSampleGradient
    is_unassigned: bool


class BackwardPass(NamedTuple):
    """The results of a backward pass.

    Attributes:
        outputs: The gradient at each use's output, ``[V, *output]``.
        copies: Autograd's gradient with respect to the copy that each call got, ``[V, *tensor]``;
            empty if not asked for. Those of gathered parameters would fill the memory, and are
            computed one by one.
    """

    outputs: dict[RecordedUse, Tensor]
    copies: dict[RecordedUse, Tensor]


class RecordedBatch:
    """One captured forward pass.

    Args:
        problem: The model on a batch.
        names: The parameters.
        noise: The seed of random numbers that are added to the parameters. Default: none are.

    Attributes:
        names: The parameters.
        output: The model's output, with samples along the first axis.
        num_samples: The number of samples. Each has the same number of neighboring output rows. Who
            records the batch sets it.
        weight: The batch's weight. Who records the batch sets it.
        uses: The recorded uses of parameters.
        has_replaced: Whether a call was replaced by a composition of others.
    """

    def __init__(self, problem: BatchProblem, names: list[str], noise: int | None = None):
        self.names = names
        self._problem = problem
        parameters = problem.leaves()
        self._leaves = parameters if noise is None else _perturbed(parameters, noise)
        self._evaluation = problem.evaluation(self._leaves, "once")
        tracked = {name: self._leaves[name] for name in names}
        shards = problem.model.shards
        capture = Capture(tracked, leaves(problem.batch.X), problem.length_of_samples, shards)
        with capture, self._evaluation.active():
            output = problem.output(self._evaluation)
        with torch.enable_grad():
            self.output = capture.as_data(output)
        self.num_samples, self.weight = 0, output.new_zeros(())
        self.has_replaced = capture.has_replaced
        self.uses: list[RecordedUse] = []
        # a method of this object would keep the graph in memory after its last use
        self._chunks = in_chunks(partial(batched_vjp, {"": self.output}), _ANY_NUMBER)
        by_id = {id(leaf): name for name, leaf in tracked.items()}
        self._nodes = dict.fromkeys(graph_nodes(self.output))
        check_graph(self._nodes, problem.model, self._leaves, must_depend=False)
        reached = (by_id.get(id(variable)) for variable in leaf_variables(self._nodes))
        self._lost = {name for name in reached if name is not None}
        for use in capture.uses:
            use.origins = _origins(use.tensor, by_id)
            if use.output.edge.node in self._nodes:
                self.uses.append(use)
            if use.output.overwritten:  # its place in the graph may have changed
                self._lost |= set(use.origins)

    def teach(self) -> None:
        """Let the problem learn from the output, if it is the model's first."""
        if self._problem.is_first:
            with self._evaluation.active():
                # the calls of layers got copies of the parameters
                self._problem.learn_from(self.output, self._leaves, must_depend=False)

    @property
    def num_bytes(self) -> int:
        """The memory of one gradient at the output of each use."""
        outputs = (use.output for use in self.uses)
        return sum(output.shape.numel() * output.dtype.itemsize for output in outputs)

    @cached_property
    def precision(self) -> torch.dtype:
        """The least precise dtype in which gradients are computed, also within the model."""
        return least_precise(self._nodes, self.output)

    @cached_property
    def operations(self) -> int:
        """A hash of the graph's operations, in the order in which backpropagation finds them."""
        return hash(tuple(node.name() for node in self._nodes))

    @cached_property
    def wiring(self) -> int:
        """A hash of the graph up to sizes."""
        return signature(self._nodes, ROW_ARGUMENTS)

    @cached_property
    def _places(self) -> dict[Any, Place]:
        return find_places(self.output, self.num_samples)

    def proved(self, use: RecordedUse) -> ProvedKey | None:
        """Return what the graph proves of a use's rows, ``None`` if it proves nothing.

        Uses of graphs that are wired alike have one pattern of rows if this is equal.
        """
        node, output_nr = use.output.edge.node, use.output.edge.output_nr
        place = self._places.get(node) if is_followed(node, output_nr) else None
        return place and (use.key, place.axis, place.before > 1, place.after > 1)

    def unrecorded(self) -> list[str]:
        """Return the parameters that the graph still connects with the output."""
        return sorted(self._lost.intersection(self.names))

    def drop(self, names: Collection[str]) -> None:
        """Forget the uses of some parameters."""
        if not names:
            return
        self.names = [name for name in self.names if name not in names]
        for use in self.uses:
            use.origins = {name: x for name, x in use.origins.items() if name not in names}
        self.uses = [use for use in self.uses if use.origins]

    # --- backward passes

    def backward(
        self,
        u: Tensor,
        uses: Iterable[RecordedUse] | None = None,
        last: bool = False,
        copies: Collection[RecordedUse] = (),
    ) -> BackwardPass:
        """Backpropagate vectors to the outputs of the calls that use parameters.

        Args:
            u: The vectors, ``[V, *output]``.
            uses: The uses. Default: all.
            last: Whether this is the last call. A single vector then frees the graph.
            copies: The uses of which autograd's gradients are computed, too.
        """
        uses = list(self.uses if uses is None else uses)
        u = u.reshape(len(u), *self.output.shape).to(self.output.dtype)
        inputs = {use.output: use.output.edge for use in uses}
        together = [use for use in copies if not use.is_gathered]
        inputs |= {use: use.copy for use in together}
        # several vectors may need one pass each, and so do copies that are not computed here
        is_last = last and len(u) == 1 and len(together) == len(copies)
        retain, chunks = not (is_last and self._problem.can_substitute), []
        if len(u):
            with self._evaluation.active():
                chunks = [
                    chunk for _, chunk in self._chunks({"": u}, {"": u.dtype}, inputs, retain)
                ]
        arrived = {
            output: output.at_output([chunk.pop(output) for chunk in chunks], u)
            for output in {use.output: None for use in uses}
        }
        copies = {
            use: torch.cat([_or_zeros(chunk[use], use.copy) for chunk in chunks])
            for use in (together if chunks else ())
        }
        return BackwardPass({use: arrived[use.output] for use in uses}, copies)

    # --- the samples of rows, and the check of rules

    def recall(self, patterns: Mapping[ProvedKey, str], uses: Iterable[RecordedUse]) -> None:
        """Take the patterns that rows of uses had on other batches, where they are proved."""
        for use in uses:
            pattern = ALL_ROWS if self.num_samples == 1 else patterns.get(self.proved(use))
            if pattern is not None and fits(pattern, use.use.row_shape, self.num_samples):
                use.rows = pattern

    def find_rows(
        self, uses: Collection[RecordedUse], unchecked: Collection[RecordedUse] = ()
    ) -> BackwardPass:
        """Find out which rows of some uses belong to which samples, unless that is known.

        Args:
            uses: The uses.
            unchecked: Uses of which the second backward pass has what ``check`` needs.

        Returns:
            The second pass, of a sum of the samples' losses with weights.
        """
        u = probe(self.output.detach())
        r = sample_weights(self.num_samples, u)
        plain = _sketches(self.backward(u[None], uses), uses)
        both = dict.fromkeys([*uses, *unchecked])
        last = self.backward(weighted(u, r)[None], both, copies=unchecked)
        again = _sketches(last, uses)
        rows = {use.key: Rows(use.use.row_shape, plain[use], again[use]) for use in uses}
        decided = decide(rows, r, self.precision)
        for use in uses:
            if use.rows is None and (assignment := decided.get(use.key)) is not None:
                use.rows, use.possible = assignment
        return last

    def check(self, one: BackwardPass, uses: Collection[RecordedUse]) -> tuple[list[str], set[str]]:
        """Compare the sums of gradients of samples with autograd's gradients.

        Args:
            one: A backward pass of one vector, with copies.
            uses: The uses that are compared.

        Returns:
            The parameters for which they differ, and those whose gradients are zero, so that the
            comparison shows nothing.
        """
        comparison = Comparison(self.precision, torch.finfo(self.output.dtype).eps)
        shards = self._problem.model.shards
        for use in uses:
            truths = self._autograd_sums(use, one)
            if shards is not None:
                shards.forget()
            for name, truth in truths.items():
                sums = partial(self._sum, use, name, one.outputs[use])
                comparison.add((name, use), sums(), truth, partial(sums, absolute=True))
        wrong = dict.fromkeys(name for name, _ in comparison.wrong())
        sizes = comparison.sizes.items()
        nonzero = {name for (name, _), size in sizes if size != 0}
        return list(wrong), {name for (name, _), _ in sizes}.difference(nonzero)

    def _autograd_sums(self, use: RecordedUse, one: BackwardPass) -> dict[str, Tensor]:
        """Return autograd's gradients of one use with respect to its parameters."""
        if use in one.copies:
            (gradient,) = one.copies.pop(use)
        else:
            with self._evaluation.active():
                gradient = gradient_behind(use.output.edge, one.outputs[use][0], use.copy)
        if gradient is None:
            return {name: torch.zeros_like(leaf) for name, leaf in use.origins.items()}
        (name, leaf), *_ = use.origins.items()
        if use.tensor is leaf:
            return {name: gradient}
        origins = {name: self._leaves[name] for name in use.origins}
        with self._evaluation.active():  # inputs of closures require gradients only inside
            pulled = vjp({"": use.tensor}, {"": gradient}, origins)
        return {n: torch.zeros_like(origins[n]) if x is None else x for n, x in pulled.items()}

    def _sum(
        self, use: RecordedUse, name: str, outputs: Tensor, absolute: bool = False
    ) -> Tensor | None:
        """Return the sum of one use's gradients over all rows."""
        gradients = self._of_uses({use: outputs}, by_sample=False, absolute=absolute)
        found = (x.gradient.sum_over_samples()[0] for x in gradients if x.name == name)
        return next(found, None)

    # --- gradients of samples

    def by_use(
        self, outputs: dict[RecordedUse, Tensor], elementwise: bool = False
    ) -> Iterator[UseGradient]:
        """Yield the gradients of the uses, one by one.

        Args:
            outputs: The gradients at the uses' outputs, which are freed on the way. Gradients of
                biases become sums over positions, with inputs of one, and are not written down.
            elementwise: Whether those of all elementwise functions become such sums.
        """
        return self._of_uses(outputs, by_position=True, elementwise=elementwise)

    def by_parameter(
        self, outputs: dict[RecordedUse, Tensor], num_vectors: int
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
        outputs: dict[RecordedUse, Tensor],
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
        uses = self.uses if len(outputs) > 1 else list(outputs)
        for recorded in [use for use in uses if use in outputs]:
            use, is_assigned = recorded.use, by_sample and recorded.rows is not None
            pattern, count = (recorded.rows, self.num_samples) if is_assigned else (ALL_ROWS, 1)
            num_axes = len(use.row_shape)
            g = use.to_rows(outputs.pop(recorded))
            g = wide(to_front(g, pattern, count, num_axes, start=1))
            x = use.inputs and use.inputs()
            if x is not None:
                # layers with the same input share what is made of it, while the input exists
                how = (x.device, x.data_ptr(), x.dtype, x.shape, x.stride(), pattern, num_axes)
                given, (_, x) = x, shared.get(how, (None, None))
                if x is None:
                    x = wide(to_front(given, pattern, count, num_axes))
                    if by_position:
                        shared[how] = given, x
            if absolute:
                x, g = x if x is None else x.abs(), g.abs()
            is_sum = use.is_bias or (elementwise and use.inputs is None)
            make = _as_products if by_position and is_sum else use.gradient
            for name, leaf in recorded.origins.items():
                lookup = recorded.lookup if is_assigned else None
                gradient = _on_parameter(partial(make, x, g), recorded, leaf, lookup)
                yield UseGradient(recorded, name, gradient, not is_assigned)


def _or_zeros(gradient: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like).unsqueeze(0) if gradient is None else gradient


def _perturbed(leaves: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Return tensors plus random numbers of about their size."""
    generator, perturbed = torch.Generator().manual_seed(seed), {}
    for name, leaf in leaves.items():
        size = leaf.detach().square().mean().sqrt().nan_to_num() + 0.1
        noise = torch.randn(leaf.shape, generator=generator, device="cpu").to(leaf)
        perturbed[name] = (leaf.detach() + size * noise).requires_grad_()
    return perturbed


def _sketches(one: BackwardPass, uses: Iterable[RecordedUse]) -> dict[RecordedUse, Tensor]:
    return {
        use: sketch(use.use.to_rows(one.outputs[use])[0], len(use.use.row_shape)) for use in uses
    }


def _origins(tensor: Tensor, by_id: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the parameters of which a tensor is a function."""
    if id(tensor) in by_id:
        return {by_id[id(tensor)]: tensor}
    variables = leaf_variables(graph_nodes(tensor))
    return {by_id[id(leaf)]: leaf for leaf in variables if id(leaf) in by_id}


def _as_products(x: None, g: Tensor, entries: Entries) -> OuterProducts:
    """Return gradients of a bias as outer products with inputs of one, see ``Use.gradient``."""
    ones = g.new_ones(*g.shape[1:3], 1, 1)
    return OuterProducts(ones, g.reshape(*g.shape[:3], 1, entries.view.size), entries)


def _on_parameter(
    make: Callable[[Entries], PerSampleGradient],
    source: RecordedUse | LookedUp,
    leaf: Tensor,
    lookup: LookedUp | None = None,
) -> PerSampleGradient:
    """Return gradients with respect to a parameter.

    Args:
        make: Makes the gradients, given the entries of the parameter; see ``Use.gradient``.
        source: The use of a function of the parameter.
        leaf: The parameter.
        lookup: The lookup of which it is a function, row by row.
    """
    if source.entries is not None:
        return make(source.entries)
    tensor = source.tensor
    gradient = make(ViewOf.whole("", tensor.shape).entries(source.use))
    if lookup is not None and isinstance(gradient, DenseGradient):
        return _on_table(gradient, tensor, lookup, leaf)
    return PulledBackGradient(gradient, _pull_back(tensor, leaf), leaf.shape)


def _pull_back(tensor: Tensor, source: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that turns gradients ``[V, n, *tensor]`` into ``[V, n, *source]``."""
    if tensor is source:
        return lambda rows: rows
    chunks = in_chunks(lambda u: vjp_columns({"": tensor}, u, {"": source}), _ANY_NUMBER)

    def pull_back(rows: Tensor) -> Tensor:
        out = rows.new_empty(*rows.shape[:2], *source.shape)
        for columns, chunk in chunks({"": rows.flatten(0, 1)}, {"": tensor.dtype}):
            out.flatten(0, 1)[columns] = chunk[""].to(rows.dtype)
        return out

    return pull_back


def _on_table(
    gradient: DenseGradient, tensor: Tensor, lookup: LookedUp, leaf: Tensor
) -> PerSampleGradient:
    """Return gradients with respect to a table that all samples read at the same indices."""
    rows = _pull_back(tensor, lookup.output)(gradient.rows(slice(None)))
    num_vectors, num_samples = rows.shape[:2]
    rows = lookup.use.to_rows(rows.flatten(0, 1)).flatten(1, len(lookup.use.row_shape))
    g = wide(rows.unflatten(0, (num_vectors, num_samples)))
    indices = lookup.use.inputs().flatten().expand(num_samples, -1)
    return _on_parameter(partial(lookup.use.gradient, indices, g), lookup, leaf)
