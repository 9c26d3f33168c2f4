"""One forward pass: all uses of parameters in it, and the gradients that they add up to."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import batched_vjp, in_chunks, vjp_columns
from curvlinops.layers.batch_axis import (
    ALL_ROWS,
    ROW_ARGUMENTS,
    BatchAxis,
    Call,
    Rows,
    UseKey,
    decide,
    moves_rows,
    sketch,
)
from curvlinops.layers.capture import Capture, LookedUp, RecordedUse, ViewOf
from curvlinops.layers.check import disagreeing, probe, sample_weights, weighted
from curvlinops.layers.gradients import (
    DenseGradient,
    Entries,
    PerSampleGradient,
    PulledBackGradient,
)
from curvlinops.layers.outer import OuterProducts, sum_of
from curvlinops.layers.rules import Sort, Use
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.autograd_graph import graph_nodes, leaf_variables, least_precise, signature
from curvlinops.support.pytree import leaves

#: The caller knows how many vectors the memory allows.
_ANY_NUMBER = 2**31


class UseGradient(NamedTuple):
    """The gradients that one use contributes to a parameter.

    Attributes:
        call: The call.
        use: The use of one of its arguments.
        name: The parameter.
        gradient: The gradients.
        ambiguous: Whether some rows have no gradient. The samples of these rows are not known.
        unsorted: Whether the sample of no row is known. The gradients are then those of one sample
            that has all rows of the batch.
    """

    call: Call
    use: Use
    name: str
    gradient: PerSampleGradient
    ambiguous: bool
    unsorted: bool


@dataclass
class BatchUse:
    """A recorded use, and what is known of its rows.

    Attributes:
        recorded: The use.
        origins: The parameters of which the argument is a function, by name.
        axis: The axis that numbers the samples, ``None`` if no axis does, or none is known yet.
        ambiguous: Whether other axes are possible. They differ in rows without a gradient.
    """

    recorded: RecordedUse
    origins: dict[str, Tensor]
    axis: BatchAxis | None = None
    ambiguous: bool = False

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Lengths of the axes that number the rows."""
        return self.recorded.use.row_shape


class RecordedBatch:
    """One captured forward pass.

    Args:
        problem: The model on a batch.
        names: The parameters.

    Attributes:
        names: The parameters.
        output: The model's output, with samples along the first axis.
        num_samples: The number of samples. Each has the same number of neighboring output rows.
        uses: The recorded uses of parameters.
        unconnected: Uses on which the output does not depend.
    """

    def __init__(self, problem: BatchProblem, names: list[str]):
        self.names = names
        self._problem = problem
        self._leaves = problem.leaves()
        self._evaluation = problem.evaluation(self._leaves, "once")
        tracked = {name: self._leaves[name] for name in names}
        capture = Capture(tracked, leaves(problem.batch.X), evident_samples(problem))
        with capture, self._evaluation.active():
            output = problem.output(self._evaluation)
        problem.check_memory(output, self._leaves)
        with torch.enable_grad():
            self.output = capture.as_data(output)
        self.num_samples = len(self.output)
        self.uses: dict[UseKey, BatchUse] = {}
        self.unconnected: set[UseKey] = set()
        # a method of this object would keep the graph in memory after its last use
        self._chunks = in_chunks(partial(batched_vjp, {"": self.output}), _ANY_NUMBER)
        by_id = {id(leaf): name for name, leaf in tracked.items()}
        self._nodes = dict.fromkeys(graph_nodes(self.output))
        reached = (by_id.get(id(variable)) for variable in leaf_variables(self._nodes))
        self._lost = {name for name in reached if name is not None}
        for (call, place), recorded in capture.uses.items():
            found, overwritten = _origins(recorded.tensor, by_id), recorded.output.overwritten
            key = UseKey(call, place, tuple(found))
            if recorded.output.edge.node in self._nodes:
                self.uses[key] = BatchUse(recorded, found)
            elif not overwritten:
                self.unconnected.add(key)
            if overwritten:  # its place in the graph may have changed
                self._lost |= set(found)

    @property
    def num_bytes(self) -> int:
        """The memory of one gradient of all recorded outputs."""
        outputs = (use.recorded.output for use in self.uses.values())
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
        """A hash of the number of samples, and of the graph up to sizes."""
        return hash((self.num_samples, signature(self._nodes, ROW_ARGUMENTS)))

    @cached_property
    def moves_rows(self) -> bool:
        """Whether an operation may move rows of layers depending on their values."""
        return moves_rows(
            self._nodes, {use.recorded.output.edge.node for use in self.uses.values()}
        )

    @property
    def has_lookups(self) -> bool:
        """Whether a table is read at the same indices for all samples."""
        return any(use.recorded.lookup is not None for use in self.uses.values())

    def unrecorded(self) -> list[str]:
        """Return the parameters that the graph still connects with the output."""
        return sorted(self._lost.intersection(self.names))

    def unsorted(self) -> list[str]:
        """Return the parameters with uses whose rows have no axis of samples."""
        without = (use for use in self.uses.values() if use.axis is None)
        return sorted({name for use in without for name in use.origins})

    def drop(self, names: Iterable[str]) -> None:
        """Forget the uses of some parameters."""
        names = set(names)
        self.names = [name for name in self.names if name not in names]
        for use in self.uses.values():
            use.origins = {name: x for name, x in use.origins.items() if name not in names}
        self.uses = {key: use for key, use in self.uses.items() if use.origins}

    # --- backward passes

    def backward(self, u: Tensor, last: bool = False) -> dict[UseKey, Tensor]:
        """Return the gradient at each use's output, ``[V, *output]``.

        Args:
            u: The vectors to backpropagate, ``[V, *output]``.
            last: Whether this is the last call. A single vector then frees the graph.
        """
        u = u.reshape(len(u), *self.output.shape).to(self.output.dtype)
        outputs = {key: use.recorded.output for key, use in self.uses.items()}
        calls = {output: output.edge for output in outputs.values()}
        # several vectors may need one pass each
        retain, parts = not (last and len(u) == 1 and self._problem.can_substitute), []
        if len(u):
            with self._evaluation.active():
                parts = [part for _, part in self._chunks({"": u}, {"": u.dtype}, calls, retain)]
        found = {c: c.at_output([part.pop(c) for part in parts], u) for c in calls}
        return {key: found[output] for key, output in outputs.items()}

    # --- the axis of samples, and the check of rules

    def recall(self, axes: Mapping[UseKey, BatchAxis]) -> None:
        """Take the axes that uses had on other batches, where they fit."""
        for key, use in self.uses.items():
            axis = ALL_ROWS if self.num_samples == 1 else axes.get(key)
            if axis is not None and axis.fits(use.row_shape, self.num_samples):
                use.axis = axis

    def examine(self, axes: Mapping[UseKey, BatchAxis] | None) -> dict[UseKey, Tensor]:
        """Find the axis of samples of each use.

        Args:
            axes: The axes on other batches; ``None`` if the axes of this batch are known.

        Returns:
            The gradients at the uses' outputs of a sum of the samples' losses with weights.
        """
        u = probe(self.output.detach())
        r = sample_weights(self.num_samples, u)
        plain = {} if axes is None else self._sketches(self.backward(u[None]))
        gradients = self.backward(weighted(u, r)[None])
        if axes is not None:
            found = self._sketches(gradients)
            rows = {
                key: Rows(use.row_shape, plain[key], found[key]) for key, use in self.uses.items()
            }
            chosen, ambiguous = decide(rows, r, self.precision, axes)
            for key, use in self.uses.items():
                use.axis, use.ambiguous = chosen.get(key), key in ambiguous
        return gradients

    def _sketches(self, gradients: Mapping[UseKey, Tensor]) -> dict[UseKey, Tensor]:
        return {
            key: sketch(use.recorded.use.to_rows(gradients[key])[0], len(use.row_shape))
            for key, use in self.uses.items()
        }

    def check(self, gradients: Mapping[UseKey, Tensor], truth: Mapping[str, Tensor]) -> list[str]:
        """Return the parameters whose gradients do not add up to ``autograd_sums``.

        Args:
            gradients: The result of ``examine``.
            truth: The result of ``autograd_sums``.
        """
        names = [name for name in self.names if name not in self.unrecorded()]
        own, eps = self._sums(gradients), torch.finfo(self.output.dtype).eps
        wrong = disagreeing(names, own, {}, truth, self.precision, eps)
        summands = self._sums(gradients, absolute=True) if wrong else {}
        return disagreeing(wrong, own, summands, truth, self.precision, eps)

    def _sums(
        self, gradients: Mapping[UseKey, Tensor], absolute: bool = False
    ) -> dict[str, Tensor]:
        """Return the sums of gradients over all rows; no use is kept in memory."""
        sums: dict[str, Tensor] = {}
        for part in self._parts(dict(gradients), by_sample=False, absolute=absolute):
            total = part.gradient.sum_over_samples()[0]
            sums[part.name] = sums[part.name] + total if part.name in sums else total
        return sums

    # --- gradients of samples

    def by_use(self, gradients: dict[UseKey, Tensor]) -> Iterator[UseGradient]:
        """Yield the gradients of the uses, one by one.

        Args:
            gradients: The gradients at the uses' outputs, which are freed on the way. Gradients of
                biases become sums over positions, with inputs of one, and are not written down.
        """
        return self._parts(gradients, by_position=True)

    def by_parameter(
        self, gradients: dict[UseKey, Tensor], num_vectors: int
    ) -> dict[str, PerSampleGradient]:
        """Return the gradients of all parameters.

        Args:
            gradients: The gradients at the uses' outputs, which are freed on the way.
            num_vectors: The number of vectors that were backpropagated.
        """
        found: dict[str, list[PerSampleGradient]] = {}
        for part in self._parts(gradients):
            found.setdefault(part.name, []).append(part.gradient)
        for name in self.names:
            if name not in found:  # the gradients are zero
                leaf = self._leaves[name]
                zeros = leaf.new_zeros(()).expand(num_vectors, self.num_samples, *leaf.shape)
                found[name] = [DenseGradient(zeros)]
        return {name: sum_of(found[name]) for name in self.names}

    def _parts(
        self,
        gradients: dict[UseKey, Tensor],
        by_sample: bool = True,
        by_position: bool = False,
        absolute: bool = False,
    ) -> Iterator[UseGradient]:
        """Yield the gradients of the uses. Without an axis, all rows are those of one sample.

        Args:
            gradients: See ``by_use``.
            by_sample: Whether rows belong to samples. Else all are those of one sample.
            by_position: Whether gradients of biases are not written down.
            absolute: Whether all factors of the gradients are replaced by their absolute values.
        """
        for key, found in self.uses.items():
            recorded, use = found.recorded, found.recorded.use
            is_sorted = by_sample and found.axis is not None
            axis, count = (found.axis, self.num_samples) if is_sorted else (ALL_ROWS, 1)

            def sort(
                x: Tensor, start: int = 0, use: Any = use, axis: Any = axis, count: int = count
            ) -> Tensor:
                rows = axis.to_front(x, start, len(use.row_shape), count)
                return rows.abs() if absolute else rows

            g = sort(use.to_rows(gradients.pop(key)), 1)
            if by_position and use.is_bias:
                use = replace(use, gradient=_as_products)
            for name, leaf in found.origins.items():
                lookup = recorded.lookup if is_sorted else None
                own = _on_parameter(use, g, sort, recorded, leaf, lookup)
                yield UseGradient(key.call, use, name, own, found.ambiguous, not is_sorted)


def evident_samples(problem: BatchProblem) -> int | None:
    """Return the number of samples in a batch, ``None`` if its tensors do not show it."""
    try:
        return problem.num_samples
    except ValueError:
        return None


def _origins(tensor: Tensor, by_id: Mapping[int, str]) -> dict[str, Tensor]:
    """Return the parameters of which a tensor is a function."""
    if id(tensor) in by_id:
        return {by_id[id(tensor)]: tensor}
    found = leaf_variables(graph_nodes(tensor))
    return {by_id[id(leaf)]: leaf for leaf in found if id(leaf) in by_id}


def _as_products(g: Tensor, sort: Sort, entries: Entries) -> OuterProducts:
    """Return gradients of a bias as outer products with inputs of one, see ``Use.gradient``."""
    ones = g.new_ones(*g.shape[1:3], 1, 1)
    return OuterProducts(ones, g.reshape(*g.shape[:3], 1, entries.view.size), entries)


def _on_parameter(
    use: Use,
    g: Tensor,
    sort: Sort,
    source: RecordedUse | LookedUp,
    leaf: Tensor,
    lookup: LookedUp | None = None,
) -> PerSampleGradient:
    """Return gradients with respect to a parameter.

    Args:
        use: The use of a function of the parameter.
        g: Rows sorted by samples, see ``Use.gradient``.
        sort: Sorts others in the same way.
        source: Has the function's value, and says which entries of the parameter it has.
        leaf: The parameter.
        lookup: The lookup of which it is a function, row by row.
    """
    tensor = source.tensor
    entries = source.view_of and source.view_of.entries(use.layout, leaf.shape)
    if entries is not None:
        return use.gradient(g, sort, entries)
    whole = ViewOf.whole("", tensor.shape)
    gradient = use.gradient(g, sort, whole.entries(use.layout, tensor.shape))
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
        for places, part in chunks({"": rows.flatten(0, 1)}, {"": tensor.dtype}):
            out.flatten(0, 1)[places] = part[""].to(rows.dtype)
        return out

    return pull_back


def _on_table(
    gradient: DenseGradient, tensor: Tensor, lookup: LookedUp, leaf: Tensor
) -> PerSampleGradient:
    """Return gradients with respect to a table that all samples read at the same indices."""
    rows = _pull_back(tensor, lookup.output)(gradient.rows(slice(None)))
    num_vectors, num_samples = rows.shape[:2]
    num_axes = len(lookup.use.row_shape)
    rows = lookup.use.to_rows(rows.flatten(0, 1)).flatten(1, num_axes)

    def of_each_sample(x: Tensor) -> Tensor:
        return x.flatten(0, num_axes - 1).expand(num_samples, *[-1] * (x.ndim - num_axes + 1))

    g = rows.unflatten(0, (num_vectors, num_samples))
    return _on_parameter(lookup.use, g, of_each_sample, lookup, leaf)
