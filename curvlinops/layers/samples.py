"""Gradients of single samples, batch by batch."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain

from torch import Tensor

from curvlinops.layers.batch_axis import UseKey
from curvlinops.layers.capture import RecordedUse
from curvlinops.layers.check import probe, tolerance_of
from curvlinops.layers.fallback import OneByOne, check_layers
from curvlinops.layers.gradients import BYTES, Piece
from curvlinops.layers.recorded import BackwardPass, RecordedBatch, UseGradient
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
        is_new = self._rules.lacks_check(batch)
        if is_new and len(u) != 1:
            self._rules.check(batch, batch.backward(probe(batch.output)[None], with_copies=True))
            is_new = False
        arrived = batch.backward(u, last=last, with_copies=is_new)
        if is_new:
            self._rules.check(batch, arrived)
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


class LayerFacts:
    """What passes have shown of a model's layers, for all operators on the model.

    Attributes:
        patterns: The axes of samples of uses' rows, by the wiring of the graph.
        checked: Uses whose rules agree with autograd, with the graph's operations.
        compared: Operations of graphs whose output was compared.
    """

    is_shared = True

    def __init__(self):
        self.patterns: dict[int, dict[UseKey, str]] = {}
        self.checked: set[tuple[int, UseKey]] = set()
        self.compared: set[int] = set()

    def latest_patterns(self) -> dict[UseKey, str]:
        """Return the patterns that were found last, whatever the wiring."""
        return {key: rows for patterns in self.patterns.values() for key, rows in patterns.items()}


class SampleBackward:
    """Computes gradients of single samples, in one pass where the layers are known.

    In the first backward pass through a graph, sums of the rules' gradients are compared with
    autograd's gradients, which the same pass yields. Where samples matter, two backward passes show
    which axis of a layer's rows numbers them. These are repeated if several axes were possible, if
    the graph is wired in a new way, or if it may move rows depending on their values. Parameters
    without a rule, or without such an axis, get one backward pass for each sample.

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
        if batch.has_replaced and batch.operations not in self._facts.compared:
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
        self._facts.compared.add(batch.operations)

    # --- checks of rules

    def _unchecked(self, batch: RecordedBatch) -> set[tuple[int, UseKey]]:
        return {(batch.operations, use.key) for use in batch.uses} - self._facts.checked

    def lacks_check(self, batch: RecordedBatch) -> bool:
        """Return whether the rules of a batch's graph were not checked yet."""
        return bool(self._unchecked(batch))

    def check(self, batch: RecordedBatch, one: BackwardPass) -> None:
        """Compare the rules with autograd; see ``RecordedBatch.check``."""
        wrong, zero = batch.check(one)
        self._use_fallback(wrong, "its rule does not agree with autograd")
        open_names = zero.union(wrong)
        new = self._unchecked(batch)
        self._facts.checked |= {one for one in new if open_names.isdisjoint(one[1].names)}
        batch.drop(self.fallbacks)

    # --- samples of rows

    def _assign_samples(
        self, problem: BatchProblem, batch: RecordedBatch, uses: list[RecordedUse]
    ) -> None:
        """Find out which rows of some uses belong to which samples."""
        batch.recall(self._facts.patterns.get(batch.wiring, {}), uses)
        if batch.num_samples == 1:
            return
        if all(use.rows is not None for use in uses) and not batch.moves_rows:
            return
        is_new = self.lacks_check(batch)
        one = batch.find_rows(self._facts.latest_patterns(), uses, with_copies=is_new)
        if is_new:
            self.check(batch, one)
        del one
        uses = [use for use in uses if use.origins]
        unassigned = sorted({name for use in uses if use.rows is None for name in use.origins})
        if unassigned and self._independent and couples_samples(problem, batch.output, 1):
            raise ValueError(COUPLED)
        if not self._allow_unassigned:
            self._use_fallback(unassigned, "its gradients could not be assigned to samples")
            batch.drop(self.fallbacks)
        elif problem.can_substitute and not problem.model.sharded:
            for seed in range(_NUM_PERTURBED):
                if not (open_uses := [use for use in uses if use.possible]):
                    break
                self._settle(problem, batch, open_uses, seed)
        patterns = self._facts.patterns.setdefault(batch.wiring, {})
        patterns |= {use.key: use.rows for use in uses if use.rows and not use.possible}

    def _settle(
        self, problem: BatchProblem, batch: RecordedBatch, uses: list[RecordedUse], seed: int
    ) -> None:
        """Choose one of several possible patterns, with other values of the parameters.

        Rows may have no gradient because of the values alone: behind a layer that is initialized
        with zeros, or with dead units. Which samples they belong to does not depend on values if
        the graph is wired in the same way.
        """
        try:
            with preserved_rng():
                other = RecordedBatch(problem, batch.names, noise=seed)
        except Exception as error:  # a user's model may refuse other values
            if not is_refusal(error):
                raise
            return
        other.num_samples = batch.num_samples
        if other.wiring != batch.wiring or not bool(other.output.isfinite().all()):
            return
        by_key = {use.key: use for use in other.uses}
        twins = {use: by_key[use.key] for use in uses if use.key in by_key}
        other.find_rows({}, list(twins.values()), with_copies=False)
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
