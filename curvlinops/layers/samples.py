"""Gradients of single samples, batch by batch."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from torch import Tensor

from curvlinops.layers.batch_axis import UseKey
from curvlinops.layers.capture import RecordedUse
from curvlinops.layers.check import probe, tolerance_of
from curvlinops.layers.fallback import OneByOne, check_layers
from curvlinops.layers.gradients import BYTES, Piece
from curvlinops.layers.recorded import BackwardPass, ProvedKey, RecordedBatch, UseGradient
from curvlinops.layers.rules import RuleError
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import evaluate, transposed_jacobian
from curvlinops.risk.sample_coupling import COUPLED, couples_samples
from curvlinops.support.autograd_graph import custom_functions, graph_nodes
from curvlinops.support.norms import double_norm
from curvlinops.support.refusals import is_refusal
from curvlinops.support.rng import GeneratorStates, preserved_rng
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")

#: How often parameters are perturbed to find the samples of rows without a gradient.
_NUM_PERTURBED = 4

#: The number of graphs of which facts are kept. A recurrent layer has a graph for each length.
MOST_GRAPHS = 256


class SampleGradients:
    """Gradients of the samples of a batch.

    Args:
        problem: The model on the batch.
        batch: The recorded batch, ``None`` if no parameter has a rule.
        rules: Keeps the checks and patterns of earlier batches.
        fallback: Computes gradients without rules.
        states: The states of random number generators before the forward pass.

    Attributes:
        output: The model's output. It fits its target, and its loss is finite.
        weight: The batch's weight: the number, or total weight, of its loss terms.
        num_samples: N.
    """

    def __init__(
        self,
        problem: BatchProblem,
        batch: RecordedBatch | None,
        rules: "SampleBackward",
        fallback: OneByOne,
        states: GeneratorStates,
    ):
        self._problem, self._batch, self._rules = problem, batch, rules
        self._fallback, self._states = fallback, states
        if batch is None or len(batch.names) < len(problem.space.names):
            self.output = self._whole[1]
        else:
            self.output = batch.output.detach()
        if batch is None:
            check = problem.check if len(self.output) else problem.weight
            self.weight = check(self.output)
        else:  # a recorded output was checked before
            self.weight = batch.weight
        self.num_samples = problem.samples_of(self.output)

    @cached_property
    def _whole(self) -> tuple[Callable, Tensor]:
        self._states.restore()
        return transposed_jacobian(self._problem)

    @property
    def fallbacks(self) -> dict[str, str]:
        """Why parameters are treated sample by sample."""
        names = self._problem.space.shapes
        return {name: x for name, x in self._rules.fallbacks.items() if name in names}

    @property
    def vectors_at_once(self) -> int:
        """The number of vectors that should be backpropagated at once."""
        size = self.output.nbytes if self._batch is None else self._batch.num_bytes
        return max(BYTES // max(size, 1), 1)

    def is_output_of(self, use: RecordedUse) -> bool:
        """Return whether the output of a use's call is the model's output itself."""
        return self._batch is not None and use.output.is_tensor(self._batch.output)

    def by_use(
        self, u: Tensor, last: bool = False, elementwise: bool = False
    ) -> Iterator[UseGradient]:
        """Yield the gradients of layers' uses of parameters, one by one.

        Args:
            u: The vectors to backpropagate, ``[V, *output]``.
            last: Whether nothing is backpropagated later: memory is given back on the way.
            elementwise: See ``RecordedBatch.by_use``.
        """
        if self._batch is None:
            return iter(())
        return self._batch.by_use(self._backward(self._batch, u, last), elementwise)

    def uses(self) -> Iterator[UseGradient]:
        """Yield the layers' uses of parameters, with gradients of zero in place of a pass."""
        if self._batch is None:
            return iter(())
        zero = self.output.new_zeros(())
        zeros = {
            use: zero.to(use.output.dtype).expand(1, *use.output.shape) for use in self._batch.uses
        }
        return self._batch.by_use(zeros)

    def backward(self, u: Tensor, last: bool = False) -> Iterator[Piece]:
        """Backpropagate vectors; a sample's gradient is that of its rows of the output.

        Args:
            u: See ``by_use``.
            last: See ``by_use``.

        Returns:
            Some samples, and their gradients by parameter: first those of all samples for the
            parameters with rules, then the others.
        """
        known: list[Piece] = []
        if self._batch is not None:
            outputs = self._backward(self._batch, u, last)
            known.append((slice(0, self.num_samples), self._batch.by_parameter(outputs, len(u))))
        return chain(known, self.rest(u))

    def _backward(self, batch: RecordedBatch, u: Tensor, last: bool) -> dict[RecordedUse, Tensor]:
        """Backpropagate vectors, and check rules that were not checked before."""
        rules, new = self._rules, self._rules.unchecked(batch)
        if new and len(u) != 1:
            one = batch.backward(probe(batch.output)[None], new, copies=new)
            rules.check(self._problem, batch, one, new)
            new = []
        arrived = batch.backward(u, last=last, copies=new)
        if new:
            rules.check(self._problem, batch, arrived, new)
        uses = set(batch.uses)
        return {use: g for use, g in arrived.outputs.items() if use in uses}

    def rest(self, u: Tensor) -> Iterator[Piece]:
        """Backpropagate vectors ``[V, *output]`` to the parameters that have no rule."""
        known = () if self._batch is None else self._batch.names
        return self.one_by_one(u, {*self._problem.space.names}.difference(known))

    def one_by_one(self, u: Tensor, names: Collection[str]) -> Iterator[Piece]:
        """Backpropagate vectors ``[V, *output]`` to some parameters, sample by sample."""
        names = [name for name in self._problem.space.names if name in names]
        if not names:  # nothing keeps the graph in memory
            return iter(())
        if len(self.output):
            check_layers(self._problem, names, self._rules.fallbacks)
        return self._fallback.gradients(self._problem, *self._whole, u, names)


@dataclass(eq=False)
class GraphFacts:
    """What passes have shown of the layers in a graph.

    Attributes:
        patterns: The axes of samples of rows, by what proves that they are the same again.
        checked: Uses whose rules agree with autograd.
        is_compared: Whether the output was compared.
        is_perturbed: Whether rules were checked with other values of the parameters.
    """

    patterns: dict[ProvedKey, str] = field(default_factory=dict)
    checked: set[UseKey] = field(default_factory=set)
    is_compared: bool = False
    is_perturbed: bool = False


class LayerFacts:
    """What passes have shown of a model's layers, for all operators on the model."""

    is_shared = True

    def __init__(self):
        self._graphs: dict[int, GraphFacts] = {}

    def of(self, graph: int) -> GraphFacts:
        """Return the facts about a graph with some hash; those about the latest are kept."""
        facts = self._graphs[graph] = self._graphs.pop(graph, None) or GraphFacts()
        if len(self._graphs) > MOST_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return facts


class SampleBackward:
    """Computes gradients of single samples, in one pass where the layers are known.

    In the first backward pass through a graph, sums of the rules' gradients are compared with
    autograd's gradients, which the same pass yields. Where samples matter, two backward passes show
    which axis of a layer's rows numbers them. These are repeated on each batch, unless the graph
    proves that it is the same axis again. Parameters without a rule, or without such an axis, get
    one backward pass for each sample.

    Args:
        name: Names the operator in messages.
        independent: Whether samples that interact are refused.
        allow_unassigned: Whether rules are kept whose rows have no axis of samples. Their rows can
            only be added up, as in KFAC-expand.

    Attributes:
        fallbacks: Why parameters are treated sample by sample.
    """

    #: What an operator cannot do without a rule on its data does not hold for another's.
    is_shared = False

    def __init__(self, name: str, independent: bool = True, allow_unassigned: bool = False):
        self._name, self._independent = name, independent
        self._allow_unassigned = allow_unassigned
        self.fallbacks: dict[str, str] = {}
        self._facts = LayerFacts()
        self._fallback = OneByOne()

    def capture(
        self,
        problem: BatchProblem,
        need_samples: Callable[[list[RecordedUse]], list[RecordedUse]] = lambda uses: uses,
    ) -> SampleGradients:
        """Run the model on a batch, and return the gradients of its samples, not yet computed.

        Args:
            problem: The model on a batch.
            need_samples: Returns the uses of which the caller needs to know the samples of rows.
                Rows of others may be stored as those of one sample.
        """
        self._facts = problem.rules(LayerFacts)
        states = GeneratorStates()
        batch = self._record(problem, need_samples, states)
        return SampleGradients(problem, batch, self, self._fallback, states)

    def _record(
        self,
        problem: BatchProblem,
        need_samples: Callable[[list[RecordedUse]], list[RecordedUse]],
        states: GeneratorStates,
    ) -> RecordedBatch | None:
        """Run the model on a batch and record it, ``None`` if no parameter has a rule."""
        names = [name for name in problem.space.names if name not in self.fallbacks]
        batch = self._run(problem, names, states) if names else None
        if batch is None:
            return None
        batch.teach()
        batch.num_samples = problem.samples_of(batch.output)
        if batch.num_samples == 0:
            return None
        batch.weight = problem.check(batch.output)  # NaN would be taken for a wrong axis
        if not (batch.uses or batch.unrecorded()):
            with problem.recording("once"):  # raises if the output depends on no parameter
                pass
        if unrecorded := batch.unrecorded():
            custom = sorted(custom_functions(graph_nodes(batch.output)))
            which = f" (perhaps one of {', '.join(custom)})" if custom else ""
            self._use_fallback(unrecorded, f"a call that no rule knows uses it{which}")
        if batch.has_replaced and not self._facts.of(batch.operations).is_compared:
            self._check_compositions(problem, batch, states)
        batch.drop(self.fallbacks)
        uses = need_samples(batch.uses)
        if uses:
            self._assign_samples(problem, batch, uses)
        return batch if batch.names else None

    def _run(
        self, problem: BatchProblem, names: list[str], states: GeneratorStates
    ) -> RecordedBatch | None:
        """Run the model and record it, ``None`` if it can only run without."""
        try:
            return RecordedBatch(problem, names)
        except Exception as error:  # a model that looks at its own graph may raise anything
            if isinstance(error, RuleError) or not is_refusal(error):
                raise
            states.restore()
            evaluate(problem)  # raises what the model raises without being recorded
            self._use_fallback(names, f"the model cannot be recorded: {first_line(error)}")
            return None

    def _check_compositions(
        self, problem: BatchProblem, batch: RecordedBatch, states: GeneratorStates
    ) -> None:
        """Compare the output with one without compositions in the place of calls."""
        with preserved_rng():
            states.restore()
            plain = evaluate(problem).detach()
        error = float(double_norm(plain - batch.output.detach()))
        if error > tolerance_of(batch.precision) * float(double_norm(plain)):
            reason = "a call that was replaced by a composition of others returns other numbers"
            self._use_fallback(batch.names, reason)
        self._facts.of(batch.operations).is_compared = True

    # --- checks of rules

    def unchecked(self, batch: RecordedBatch) -> list[RecordedUse]:
        """Return the uses whose rules were not checked yet in a batch's graph."""
        checked = self._facts.of(batch.operations).checked
        return [use for use in batch.uses if use.key not in checked]

    def check(
        self,
        problem: BatchProblem,
        batch: RecordedBatch,
        one: BackwardPass,
        uses: list[RecordedUse],
    ) -> None:
        """Compare the rules of some uses with autograd; see ``RecordedBatch.check``.

        A gradient of zero shows nothing. Then they are compared once with other values of the
        parameters; and on each batch, as long as it stays zero.
        """
        facts = self._facts.of(batch.operations)
        self._compare(batch, one, uses, facts)
        if not facts.is_perturbed and (open_uses := self.unchecked(batch)):
            facts.is_perturbed = True
            if (other := self._perturbed(problem, batch, seed=0)) is not None:
                keys = {use.key for use in open_uses}
                twins = [use for use in other.uses if use.key in keys]
                one = other.backward(probe(other.output)[None], twins, copies=twins)
                self._compare(other, one, twins, facts)
                batch.drop(self.fallbacks)

    def _compare(
        self,
        batch: RecordedBatch,
        one: BackwardPass,
        uses: list[RecordedUse],
        facts: GraphFacts,
    ) -> None:
        wrong, zero = batch.check(one, uses)
        self._use_fallback(wrong, "its rule does not agree with autograd")
        open_names = zero.union(wrong)
        facts.checked |= {use.key for use in uses if open_names.isdisjoint(use.key.names)}
        batch.drop(self.fallbacks)

    def _perturbed(
        self, problem: BatchProblem, batch: RecordedBatch, seed: int
    ) -> RecordedBatch | None:
        """Record a batch with other parameters, ``None`` if that is not possible.

        Rows may have no gradient because of the values alone: behind a layer that is initialized
        with zeros, or with dead units. What does not depend on values is the same if the graph is
        wired in the same way.
        """
        if not problem.can_substitute or problem.model.sharded:
            return None
        try:
            with preserved_rng():
                other = RecordedBatch(problem, batch.names, noise=seed)
        except Exception as error:  # a user's model may refuse other values
            if not is_refusal(error):
                raise
            return None
        other.num_samples = batch.num_samples
        is_like = other.wiring == batch.wiring and bool(other.output.isfinite().all())
        return other if is_like else None

    # --- samples of rows

    def _assign_samples(
        self, problem: BatchProblem, batch: RecordedBatch, uses: list[RecordedUse]
    ) -> None:
        """Find out which rows of some uses belong to which samples."""
        facts = self._facts.of(batch.wiring)
        batch.recall(facts.patterns, uses)
        if all(use.rows is not None for use in uses):
            return
        new = self.unchecked(batch)
        one = batch.find_rows(uses, new)
        if new:
            self.check(problem, batch, one, new)
        del one
        uses = [use for use in uses if use.origins]
        unassigned = sorted({name for use in uses if use.rows is None for name in use.origins})
        if unassigned and self._independent and couples_samples(problem, batch.output, 1):
            raise ValueError(COUPLED)
        if not self._allow_unassigned:
            self._use_fallback(unassigned, "its gradients could not be assigned to samples")
            batch.drop(self.fallbacks)
        else:
            for seed in range(_NUM_PERTURBED):
                if not (open_uses := [use for use in uses if use.possible]):
                    break
                self._settle(problem, batch, open_uses, seed)
        for use in uses:
            if use.rows is not None and not use.possible and (key := batch.proved(use)):
                facts.patterns[key] = use.rows

    def _settle(
        self, problem: BatchProblem, batch: RecordedBatch, uses: list[RecordedUse], seed: int
    ) -> None:
        """Choose one of several possible patterns, with other values of the parameters."""
        if (other := self._perturbed(problem, batch, seed)) is None:
            return
        by_key = {use.key: use for use in other.uses}
        twins = {use: by_key[use.key] for use in uses if use.key in by_key}
        other.find_rows(list(twins.values()))
        for use, twin in twins.items():
            if twin.rows in use.possible and not twin.possible:
                use.rows, use.possible = twin.rows, ()

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
