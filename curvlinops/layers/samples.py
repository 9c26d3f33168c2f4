"""Gradients of single samples, batch by batch."""

import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import chain

from torch import Tensor

from curvlinops.layers.check import probe
from curvlinops.layers.fallback import OneByOne, check_layers
from curvlinops.layers.gradients import BYTES, PerSampleGradient, Piece
from curvlinops.layers.graph import KnownGraphs
from curvlinops.layers.plan import Fact
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.recorded import Arrived, RecordedBatch
from curvlinops.layers.rules import RuleError
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.coupling import (
    COUPLED,
    check_gradients,
    couples_gradients,
    couples_samples,
)
from curvlinops.risk.derivatives import evaluate, transposed_jacobian
from curvlinops.support.autograd_graph import custom_functions, graph_nodes
from curvlinops.support.pytree import select_samples
from curvlinops.support.refusals import is_refusal
from curvlinops.support.rng import GeneratorStates
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")


class SampleGradients:
    """Gradients of the N samples of a batch.

    Its ``output`` fits its target, and its loss is finite. Its ``weight`` is the number, or total
    weight, of its loss terms.
    """

    def __init__(
        self,
        problem: BatchProblem,
        batch: RecordedBatch | None,
        rules: "SampleBackward",
        states: GeneratorStates,
    ):
        self._problem, self._batch, self._rules, self._states = problem, batch, rules, states
        if batch is None or len(batch.names) < len(problem.space.names):
            self.output = self._whole[1]
        else:
            self.output = batch.output.detach()
        if batch is None:
            check = problem.check if len(self.output) else problem.weight
            self.weight = check(self.output)
        else:  # a recorded output was checked before
            self.weight = batch.weight
        self.num_samples = rules.samples_of(problem, self.output)

    @cached_property
    def _whole(self) -> tuple[Callable, Tensor]:
        self._states.restore()
        return transposed_jacobian(self._problem)

    @property
    def fallbacks(self) -> dict[str, str]:
        """Why parameters are treated sample by sample; complete once rules were checked."""
        names = self._problem.space.shapes
        return {name: x for name, x in self._rules.fallbacks.items() if name in names}

    @property
    def uses(self) -> Sequence[ParameterUse]:
        """The layers' uses of parameters."""
        return () if self._batch is None else self._batch.uses

    def without_axis(self) -> frozenset[ParameterUse]:
        """Return the uses whose rows have no axis of samples if the only sample is there twice."""
        batch = self._problem.batch
        X, y = select_samples((batch.X, batch.y), [0, 0], 1)
        twice = self._rules.capture(self._problem.on(replace(batch, X=X, y=y)))
        pairs = zip(self.uses, twice.uses, strict=True)
        return frozenset(use for use, same in pairs if same.samples is None)

    def known(self, key: Hashable, find: Callable[[], Fact]) -> Fact:
        """Return what another class found out about the uses in this graph, or in equal ones."""
        batch = self._batch
        return find() if batch is None else batch.plan.known((key, *batch.uses), find)

    def check(self) -> None:
        """Check rules that were not checked before, by a backward pass of its own."""
        batch = self._batch
        if batch is not None and (new := self._rules.unchecked(batch)):
            u = probe(batch.output)[None]
            self._rules.check(batch, u, batch.backward(u, totals=new), new)

    @property
    def vectors_at_once(self) -> int:
        """The number of vectors that should be backpropagated at once."""
        size = self.output.nbytes if self._batch is None else self._batch.num_bytes
        return max(BYTES // max(size, 1), 1)

    def split(
        self, tied: bool
    ) -> "tuple[dict[str, PerSampleGradient], SampleGradients, Tensor | None] | None":
        """Return what is at the output, all before, and a matrix, see ``RecordedBatch.split``."""
        self.check()
        batch, problem, before = self._batch, self._problem, copy(self)
        if batch is None or self.fallbacks or self._rules.unchecked(batch):
            return None
        if (parts := batch.split(tied)) is None:
            return None
        own, before._batch, matrix = parts
        before.output, names = before._batch.output.detach(), before._batch.names
        before._problem = problem.on(problem.batch, problem.space.restricted(names))
        return own, before, matrix

    def arrive(self, u: Tensor, last: bool = False) -> Arrived:
        """Backpropagate vectors to uses, and check rules; ``last`` gives memory back on the way."""
        batch = self._batch
        if batch is None:
            return Arrived(batch, {}, {})
        # of a known graph, gradients of zero have shown nothing: then nodes are compared alone
        if len(u) != 1 or batch.graph.checked:
            self.check()
        new = self._rules.unchecked(batch)
        arrived = batch.backward(u, last=last, totals=new)
        if new:
            self._rules.check(batch, u, arrived, new)
            arrived.keep(batch.uses)
        return arrived

    def backward(self, u: Tensor, last: bool = False, together: bool = False) -> Iterator[Piece]:
        """Backpropagate vectors; yield one parameter with rules after the other, then the others.

        See ``arrive`` and ``RecordedBatch.by_parameter``.
        """
        known: Iterable[tuple[str, PerSampleGradient]] = ()
        without_rule = {*self._problem.space.names}
        if self._batch is not None:
            known = self._batch.by_parameter(self.arrive(u, last), len(u), together)
            without_rule.difference_update(self._batch.names)
        everyone = slice(0, self.num_samples)
        pieces = ((everyone, {name: x}) for name, x in known)
        return chain(pieces, self.one_by_one(u, without_rule))

    def refuse_interaction(self) -> None:
        """Raise a ValueError if samples interact, before gradients are computed ``one_by_one``."""
        self._rules.refuse_interaction(self._problem, self.output)

    def one_by_one(self, u: Tensor, names: Collection[str]) -> Iterator[Piece]:
        """Backpropagate vectors ``[V, *output]`` to some parameters, sample by sample."""
        names = [name for name in self._problem.space.names if name in names]
        if not names:  # nothing keeps the graph in memory
            return iter(())
        if len(self.output):
            check_layers(self._problem, names, self._rules.fallbacks)
        one_by_one = self._rules.one_by_one
        return one_by_one.gradients(self._problem, *self._whole, self.num_samples, u, names)


class SampleBackward:
    """Computes gradients of single samples, in one pass where the layers are known.

    In the first backward pass through a graph, sums of the rules' gradients are compared with
    autograd's gradients, which the same pass yields. The graph of each batch shows which axis of a
    layer's rows numbers the samples. Parameters without a rule, or without such an axis, get one
    backward pass for each sample.

    With ``independent``, samples that interact are refused. With ``allow_unassigned``, rules are
    kept whose rows have no axis of samples: these can only be added up, as in KFAC-expand.
    """

    #: What an operator cannot do without a rule on its data does not hold for another's.
    is_shared = False

    def __init__(self, name: str, independent: bool = True, allow_unassigned: bool = False):
        self._name, self._independent = name, independent
        self._allow_unassigned = allow_unassigned
        #: Why parameters are treated sample by sample.
        self.fallbacks: dict[str, str] = {}
        self.one_by_one = OneByOne(independent)

    def capture(self, problem: BatchProblem) -> SampleGradients:
        """Run the model on a batch, and return the gradients of its samples, not yet computed."""
        states = GeneratorStates()
        return SampleGradients(problem, self._record(problem, states), self, states)

    def _record(self, problem: BatchProblem, states: GeneratorStates) -> RecordedBatch | None:
        """Run the model on a batch and record it, ``None`` if no parameter has a rule."""
        names = [name for name in problem.space.names if name not in self.fallbacks]
        batch = self._run(problem, names, states) if names else None
        if batch is None:
            return None
        batch.teach()
        batch.num_samples = self.samples_of(problem, batch.output)
        if batch.num_samples == 0:
            return None
        batch.weight = problem.check(batch.output)  # NaN would be taken for a wrong rule
        if set(names).isdisjoint(batch.graph.leaves.values()):
            with problem.recording("once"):  # raises if the output depends on no parameter
                pass
        batch.read()
        if batch.plan.unread:
            custom = sorted(custom_functions(graph_nodes(batch.output)))
            which = f" (perhaps one of {', '.join(custom)})" if custom else ""
            self._use_fallback(batch.plan.unread, f"an operation that no rule knows uses it{which}")
        batch.drop(self.fallbacks)
        self._check_interaction(problem, batch)
        if not self._allow_unassigned:
            self._check_samples(problem, batch)
        return batch if batch.names else None

    def _run(
        self, problem: BatchProblem, names: list[str], states: GeneratorStates
    ) -> RecordedBatch | None:
        """Run the model and keep its graph, ``None`` if it can only run without."""
        try:
            return RecordedBatch(problem, names, problem.rules(KnownGraphs))
        except Exception as error:  # a model that looks at its own graph may raise anything
            if isinstance(error, RuleError) or not is_refusal(error):
                raise
            states.restore()
            evaluate(problem)  # raises what the model raises without its graph being read
            self._use_fallback(names, f"its graph cannot be read: {first_line(error)}")
            return None

    # --- checks of rules

    def unchecked(self, batch: RecordedBatch) -> list[str]:
        """Return the parameters whose rules are not known to be right in a batch's graph."""
        checked, used = batch.graph.checked, {use.name for use in batch.uses}
        return [name for name in batch.names if name in used and not checked.get(name)]

    def check(self, batch: RecordedBatch, u: Tensor, one: Arrived, names: list[str]) -> None:
        """Compare the rules with autograd; see ``RecordedBatch.check``."""
        wrong, zero = batch.check(u, one, names)
        self._use_fallback(wrong, "its rule does not agree with autograd")
        batch.graph.checked.update((name, name not in zero) for name in {*names}.difference(wrong))
        batch.drop(self.fallbacks)

    # --- samples of rows

    def samples_of(self, problem: BatchProblem, output: Tensor) -> int:
        """Return the number of samples; one where that does not matter and is not known."""
        try:
            return problem.samples_of(output)
        except ValueError:
            if self._independent:
                raise
            return 1

    def _check_samples(self, problem: BatchProblem, batch: RecordedBatch) -> None:
        """Use the fallback where it is not known which rows belong to which samples."""
        unassigned = {use.name for use in batch.uses if use.samples is None}
        if unassigned:
            self.refuse_interaction(problem, batch.output)
            self._use_fallback(sorted(unassigned), "its gradients could not be assigned to samples")
            batch.drop(self.fallbacks)

    def _check_interaction(self, problem: BatchProblem, batch: RecordedBatch) -> None:
        """Compare samples alone, where nodes do not show what hooks and functions of users do."""
        if not problem.runs_users_code(batch.nodes if batch.graph.runs_python else ()):
            return
        check_gradients(problem, batch.graph.operations)
        if problem.risk.is_all_data(problem.batch) and couples_gradients(problem)[0]:
            self.one_by_one.is_whole = True
            self._use_fallback(batch.names, "hooks, or custom functions, let samples interact")
            batch.drop(self.fallbacks)

    def refuse_interaction(self, problem: BatchProblem, output: Tensor) -> None:
        """Raise a ValueError if the output of one sample alone is another one than in the batch."""
        if self._independent and couples_samples(problem, output):
            raise ValueError(COUPLED)

    def _use_fallback(self, names: Iterable[str], reason: str) -> None:
        names = [name for name in names if name not in self.fallbacks]
        self.fallbacks.update(dict.fromkeys(names, reason))
        if names:
            said = ", ".join(f"'{name}'" for name in names[:3])
            _LOGGER.warning(
                "%s: gradients with respect to %s are computed sample by sample: %s.",
                self._name,
                said if len(names) <= 3 else f"{said} and {len(names) - 3} more",
                reason,
            )
