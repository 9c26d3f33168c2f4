"""One forward pass with all its uses of parameters, and the gradients that they make up."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Problem, in_chunks, pull_several
from curvlinops.layers.capture import Call, Capture, Change, Recorded
from curvlinops.layers.check import disagreeing, probe, shares
from curvlinops.layers.detection import tolerance_of
from curvlinops.layers.flow import layout_of, samples_by_edge
from curvlinops.layers.forms import BYTES, Direct, Form
from curvlinops.layers.layout import Along, Layout, Scattered, by_samples
from curvlinops.layers.origins import ANY_NUMBER, on_parameter, origins
from curvlinops.layers.outer import Outer, sum_of
from curvlinops.layers.parts import Key, Part
from curvlinops.layers.search import Search
from curvlinops.risk.sample_coupling import differs
from curvlinops.support.autograd_graph import graph_nodes, leaf_variables, least_precise
from curvlinops.support.memory import lacks_memory

_LOGGER = logging.getLogger("curvlinops")

#: Operations of a graph whose rows may be in another order on the next batch.
_DATA_DEPENDENT = ("Index", "Gather", "Scatter", "Sort", "Topk", "Masked", "Take")


class RecordedBatch:
    """One captured forward pass.

    Args:
        problem: The model on a batch.
        names: The parameters.
        changes: What to do about some calls.
        num_samples: How many samples there are, each with as many neighboring rows of the output;
            ``None`` if each row is one.

    Attributes:
        names: The parameters.
        output: The model's output, with samples along the first axis.
        uses: What was recorded.
        layouts: Which rows belong to which sample.
        unconnected: Uses on which the output does not depend.
        guessed: See ``Search``.
        open: See ``Search``.
        blank: Uses of whose rules ``check`` says nothing, as their gradients are zero.
    """

    def __init__(
        self,
        problem: Problem,
        names: list[str],
        changes: Mapping[Call, Change],
        num_samples: int | None,
    ):
        self.names = names
        self._num_samples = num_samples
        self._problem = problem
        self._leaves = problem.leaves()
        self._evaluation = problem.evaluation(self._leaves, "once")
        tracked = {name: self._leaves[name] for name in names}
        # the number of samples is known only afterwards: first without
        self._capture = Capture(tracked)
        self.output = self._run()
        if changes:
            before = self.output.detach()
            self._capture = Capture(tracked, changes, before.shape[0])
            self.output = self._run()
            after = self.output.detach()
            if after.shape != before.shape or differs(after, before, before):
                raise ValueError("The model returns something else then.")
        self.uses: dict[Key, Recorded] = {}
        self.layouts: dict[Key, Layout] = {}
        # no method of this object, which would keep the graph in memory after its last use
        self._chunks = in_chunks(partial(pull_several, {"": self.output}), ANY_NUMBER)
        by_id = {id(leaf): name for name, leaf in tracked.items()}
        self._origins: dict[Key, dict[str, Tensor]] = {}
        self.unconnected: set[Key] = set()
        self.guessed: set[Key] = set()
        self.open: set[Key] = set()
        self.blank: set[Key] = set()
        self._probed: dict[Key, Tensor] | None = None  # what the check needs, if it is small
        self._nodes = set(graph_nodes(self.output))
        reached = (by_id.get(id(variable)) for variable in leaf_variables(self._nodes))
        self._lost = {name for name in reached if name is not None}
        for ((_, index), place), recorded in self._capture.uses.items():
            found, overwritten = origins(recorded.tensor, by_id), recorded.called.overwritten
            key = Key(index, place, recorded.function, tuple(found))
            if recorded.called.edge.node in self._nodes:
                self.uses[key], self._origins[key] = recorded, found
            elif not overwritten:
                self.unconnected.add(key)
            if overwritten:  # perhaps its place in the graph is another one now
                self._lost |= set(found)

    def _run(self) -> Tensor:
        with self._capture, self._evaluation.active():
            return by_samples(self._problem.output(self._evaluation), self._num_samples)

    @property
    def model_output(self) -> Tensor:
        """The output as the model returns it."""
        return self.output if self._num_samples is None else self.output.flatten(0, 1)

    @property
    def num_samples(self) -> int:
        """The length of the output's first axis."""
        return self.output.shape[0]

    @property
    def num_bytes(self) -> int:
        """The memory of one gradient of all recorded outputs."""
        calls = (recorded.called for recorded in self.uses.values())
        return sum(called.shape.numel() * called.dtype.itemsize for called in calls)

    @property
    def depends_on_data(self) -> bool:
        """Whether the order of rows may be another one on the next batch."""
        return any(node.name().startswith(_DATA_DEPENDENT) for node in self._nodes)

    def names_of(self, key: Key) -> list[str]:
        """Return the parameters that enter a use."""
        return list(self._origins[key])

    def unrecorded(self) -> list[str]:
        """Return the parameters that the graph still connects with the output."""
        return sorted(self._lost.intersection(self.names))

    def drop(self, names: Iterable[str]) -> None:
        """Forget the uses of some parameters."""
        names, self._probed = set(names), None
        if not names:
            return
        self.names = [name for name in self.names if name not in names]
        self._origins = {
            key: {name: leaf for name, leaf in found.items() if name not in names}
            for key, found in self._origins.items()
        }
        self.uses = {key: use for key, use in self.uses.items() if self._origins[key]}

    def fits(self, key: Key, layout: Along) -> bool:
        """Return whether a use can have a layout."""
        recorded = self.uses[key]
        return layout.fits(recorded.use.lead, self.num_samples)

    def gradients(self, u: Tensor, last: bool = False) -> dict[Key, Tensor]:
        """Return the gradient at each use's output, ``[V, *output]``.

        Args:
            u: What is backpropagated, ``[V, *output]``.
            last: Whether nothing is backpropagated later: one vector then frees the graph.
        """
        u = u.reshape(len(u), *self.output.shape).to(self.output.dtype)
        calls = {recorded.called: recorded.called.edge for recorded in self.uses.values()}
        # several vectors may turn out to need one pass each
        retain, parts = not (last and len(u) == 1 and self._problem.can_substitute), []
        if len(u):
            with self._evaluation.active():
                parts = [part for _, part in self._chunks({"": u}, {"": u.dtype}, calls, retain)]
        found = {c: c.at_output([part.pop(c) for part in parts], u) for c in calls}
        return {key: found[recorded.called] for key, recorded in self.uses.items()}

    def prove(self) -> None:
        """Find layouts, where they are not known yet, that the graph alone shows."""
        missing = self.uses.keys() - self.layouts.keys()
        # what hooks do to gradients, no graph shows
        if not missing or self.num_samples < 2 or self._capture.has_hooks:
            return
        try:
            steps = samples_by_edge(self.output, self._nodes)
            for key in missing:
                use, called = self.uses[key].use, self.uses[key].called
                step = steps.get((called.edge.node, called.edge.output_nr))
                if step is not None and called.is_whole:
                    layout = layout_of(use, called.shape, step, self.output, self.num_samples)
                    self.layouts |= {} if layout is None else {key: layout}
        except Exception as error:  # nodes and rules of any kind, such as those of nested tensors
            if lacks_memory(error):
                raise
            _LOGGER.info("The graph does not show which rows belong to which sample: %s", error)

    def detect(self, keys: list[Key], checking: bool) -> None:
        """Find layouts of some uses, perhaps before a ``check``."""
        u = probe(self.output.detach())
        gradients = self.gradients(u[None])
        self._probed = dict(gradients) if checking and self.num_bytes <= BYTES else None
        search = Search(
            {key: self.uses[key].use for key in keys}, self.gradients, u, self.precision
        )
        search.run(gradients)
        self.layouts |= search.layouts
        self.guessed, self.open = search.guessed, search.open
        for key in search.idle:
            del self.uses[key]

    @cached_property
    def precision(self) -> torch.dtype:
        """The least precise dtype in which gradients are computed, also within the model."""
        return least_precise(self._nodes, self.output)

    def check(
        self, truth: Mapping[str, Tensor], slack: Mapping[str, float] = MappingProxyType({})
    ) -> list[str]:
        """Return the parameters whose gradients do not add up to ``autograd_sums``.

        Args:
            truth: These.
            slack: See ``disagreeing``.
        """
        found, self._probed = self._probed, None
        if found is None:
            found = self.gradients(probe(self.output.detach())[None])
        self.blank = {key for key, g in found.items() if not bool(g.any())}
        own, summands = self._weighted_sums(dict(found)), self._weighted_sums(found, absolute=True)
        tolerance, eps = tolerance_of(self.precision), torch.finfo(self.output.dtype).eps
        return disagreeing(self._known(own), own, summands, truth, tolerance, eps, slack)

    def _weighted_sums(
        self, gradients: dict[Key, Tensor], absolute: bool = False
    ) -> dict[str, Tensor]:
        """Return sums of samples' gradients with random weights; no use is kept in memory."""
        sums: dict[str, Tensor] = {}
        r = shares(self.num_samples, self.output)
        for part in self.parts(gradients, absolute=absolute):
            share = part.form.weighted_sum(r)[0]
            sums[part.name] = sums[part.name] + share if part.name in sums else share
        return sums

    def _known(self, found: Iterable[str]) -> list[str]:
        """Return the parameters whose uses can be sorted, or that are not used at all."""
        lost = {name for key in self.uses if key not in self.layouts for name in self.names_of(key)}
        lost |= set(self.unrecorded()) - set(found)
        return [name for name in self.names if name not in lost]

    def parts(
        self, gradients: dict[Key, Tensor], by_position: bool = False, absolute: bool = False
    ) -> Iterator[Part]:
        """Yield the gradients of the uses that can be sorted by samples, one by one.

        Args:
            gradients: Those at the uses' outputs, which are freed on the way.
            by_position: Whether gradients of biases are sums over positions, with inputs of one,
                instead of written down.
            absolute: Whether all that they are made of is replaced by absolute values.
        """
        for key, recorded in self.uses.items():
            if key not in self.layouts:
                continue
            use, layout = recorded.use, self.layouts[key]

            def sort(x: Tensor, start: int = 0, use: Any = use, layout: Any = layout) -> Tensor:
                rows = layout.by_sample(x, start, len(use.lead), self.num_samples)
                return rows.abs() if absolute else rows

            g = sort(use.split(gradients.pop(key)), 1)
            if by_position and use.shift is not None:
                ones = sort(g.new_ones(use.lead))
                x = ones.reshape(*ones.shape, 1, 1)
                g = g.reshape(*g.shape[:3], 1, recorded.tensor.numel())
                form = Outer(x, g, recorded.tensor.shape)
            else:
                form = use.form(g, sort)
            rows = layout.valid.sum(1) if isinstance(layout, Scattered) else None
            for name, leaf in self._origins[key].items():
                own = on_parameter(form, recorded.tensor, leaf)
                is_open = key in self.open
                yield Part(key, name, own, rows, is_open, use.shift, use.elsewhere)

    def forms(self, gradients: dict[Key, Tensor], num_vectors: int) -> dict[str, Form]:
        """Return the gradients of all parameters whose uses can be sorted by samples.

        Args:
            gradients: Those at the uses' outputs, of ``num_vectors`` vectors; they are freed.
            num_vectors: How many.
        """
        found: dict[str, list[Form]] = {}
        for part in self.parts(gradients):
            found.setdefault(part.name, []).append(part.form)
        for name in self._known(found):
            if name not in found:  # the gradients are zero
                leaf = self._leaves[name]
                zeros = leaf.new_zeros(num_vectors, self.num_samples, *leaf.shape)
                found[name] = [Direct.of(zeros)]
        return {name: sum_of(found[name]) for name in self._known(found)}
