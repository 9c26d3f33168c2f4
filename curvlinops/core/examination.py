"""What there is to find out about model and loss before the first step on each batch."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from curvlinops.core.autodiff import Evaluation
from curvlinops.core.dependence import Watch, check_graph, needs_graph
from curvlinops.core.graph import custom_functions, footprint, graph_nodes, operations, precisions
from curvlinops.core.memory import suppressed
from curvlinops.core.model import Model
from curvlinops.core.seeds import preserved_rng


@dataclass
class Seen:
    """What the first batch has shown.

    Attributes:
        graph_bytes: The memory of its graph, in bytes.
        operations: The names of its operations, the loss's included.
        has_custom_functions: Whether some of them are the user's own.
        dtypes: The real ones in which gradients pass it.
        purpose: What its graph was made for, see ``Scope``.
        differentiates: See ``Model``.
        needs_graph: See ``Loss``.
        is_complete: Whether that is all that is to be seen.
    """

    graph_bytes: int = 0
    operations: frozenset[str] = frozenset()
    has_custom_functions: bool = False
    dtypes: frozenset[torch.dtype] = frozenset()
    purpose: str = "gradient"
    differentiates: bool = False
    needs_graph: bool = False
    is_complete: bool = False


class Examination:
    """Looks at one forward pass of each batch, and at its graph.

    Args:
        model: The model.

    Attributes:
        seen: What the first batch has shown.
        loss_reads: Whether the loss reads numbers, by which it may depend on other things.
    """

    def __init__(self, model: Model):
        self._model, self.loss_reads = model, False
        self.forget()

    def forget(self) -> None:
        """Look at all batches again."""
        self.seen = Seen()
        self._done: set[int] = set()
        self._draws: bool | None = None  # until a pass over the data has shown it

    @contextmanager
    def preserving(self, data: Iterable) -> Iterator[None]:
        """Preserve the generators of random numbers in a pass, unless nothing draws from them.

        Other threads may; what they drew would be drawn again.

        Args:
            data: What the pass is over. Lists draw nothing, loaders do.
        """
        if self._draws is False and type(data) in (list, tuple):
            yield
            return
        with preserved_rng() as untouched:
            yield
            if self._draws is None:
                self._draws = not untouched()

    @contextmanager
    def around(self, bound: Any, purpose: str | None) -> Iterator[None]:
        """Look at a batch before the first step on it.

        Args:
            bound: A ``BatchRisk``.
            purpose: For which backward passes the step evaluates the model, if it does: the pass
                that was looked at is the one that it gets.

        Raises:
            ValueError: If output or loss cannot be differentiated with respect to the parameters.
        """
        if bound.batch.index not in self._done and self._is_known(bound):
            self._done.add(bound.batch.index)
        if bound.batch.index in self._done:
            yield
            return
        with preserved_rng() as untouched:
            found = self._look(bound, purpose or "gradient")
            if purpose is not None and untouched():
                bound.offer(found)
        leaves = found.leaves.values() if self._model.substitutable else ()
        kept = [weakref.ref(leaf) for leaf in leaves]
        del found, leaves
        if purpose is None:
            self._look_again(bound, kept)
        try:
            yield
        except Exception:  # which this may explain
            self._finish(bound, purpose, kept)
            raise
        self._finish(bound, purpose, kept)
        self._done.add(bound.batch.index)
        self.seen.is_complete = True

    def _is_known(self, bound: Any) -> bool:
        """Return whether the first batch is like one at which others have looked."""
        if self._done or bound.findings is None:
            return False
        self.seen = bound.findings.get(Seen)
        if self.seen.is_complete:
            self._model.differentiates |= self.seen.differentiates
            if bound.loss is not None:
                bound.loss.needs_graph |= self.seen.needs_graph
        return self.seen.is_complete

    def _finish(self, bound: Any, purpose: str | None, kept: list[weakref.ref]) -> None:
        bound.offer(None)
        if purpose is not None:
            self._look_again(bound, kept)

    def _look(self, bound: Any, purpose: str) -> Evaluation:
        leaves, loss, y = bound.leaves(), bound.loss, bound.batch.y
        scope = bound.scope(leaves, purpose)
        with Watch(self._model, leaves) as watch, scope.active():
            value = output = bound.output(scope)
            reads, watch.reads = watch.reads, False
            if not self._done:
                with suppressed():  # products have better messages
                    total = output if loss is None else loss.sum(output, y)
                    self.seen.operations, self.seen.purpose = operations(total), purpose
                    nodes = list(graph_nodes(total))
                    self.seen.has_custom_functions = bool(custom_functions(nodes))
                    self.seen.dtypes |= precisions(nodes, output)
            else:  # which may be others where the model decides so by its input
                self.seen.dtypes |= precisions(graph_nodes(output), output)
            unknown = loss is not None and not loss.is_function_of_values
            depends = unknown and needs_graph(loss, output, y, leaves, self._model.params)
            self.loss_reads |= unknown and watch.reads
            if depends:
                loss.needs_graph = self.seen.needs_graph = True
                value = bound.loss_sum(output)[0]
        if bound.findings is not None and (reads or self.loss_reads):
            bound.findings.withdraw()  # other numbers may show something else
        self._model.differentiates |= watch.differentiates
        self.seen.differentiates = self._model.differentiates
        check_graph(value, self._model, leaves)
        if not self._done:
            self.seen.graph_bytes = footprint(value)
        return Evaluation(scope, leaves, output)

    def _look_again(self, bound: Any, kept: list[weakref.ref]) -> None:
        """Check another evaluation if someone keeps the graph of one: perhaps to use it again."""
        if any(ref() is not None for ref in kept):
            with preserved_rng():
                self._look(bound, "gradient")
