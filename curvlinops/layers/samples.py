"""Gradients of single samples, batch by batch."""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import chain

from torch import Tensor

from curvlinops.layers.batch_axis import BatchAxis, UseKey
from curvlinops.layers.check import autograd_sums, reason_of
from curvlinops.layers.fallback import OneByOne
from curvlinops.layers.gradients import BYTES, Piece
from curvlinops.layers.recorded import RecordedBatch, UseGradient, evident_samples
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import transposed_jacobian
from curvlinops.risk.sample_coupling import COUPLED, couples_samples
from curvlinops.support.refusals import is_refusal, lacks_memory
from curvlinops.support.rng import GeneratorStates
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")


class SampleGradients:
    """Gradients of the samples of a batch.

    Args:
        problem: The model on the batch.
        batch: The recorded batch, ``None`` if no parameter has a rule.
        fallbacks: Parameters that are treated sample by sample, each with the reason.
        fallback: Computes their gradients.

    Attributes:
        output: The model's output.
        num_samples: N.
        fallbacks: Why parameters are treated sample by sample.
    """

    def __init__(
        self,
        problem: BatchProblem,
        batch: RecordedBatch | None,
        fallbacks: dict[str, str],
        fallback: OneByOne,
    ):
        self._problem, self._batch, self._fallback = problem, batch, fallback
        self.fallbacks = dict(fallbacks)
        self._known = [] if batch is None else batch.names
        if len(self._known) < len(problem.space.names):
            self.output = self._whole[1]
            if batch is None and len(self.output):  # a recorded output was checked before
                problem.check(self.output)
        else:
            self.output = batch.output.detach()
        self.num_samples = len(self.output) if batch is None else batch.num_samples

    @cached_property
    def _whole(self) -> tuple[Callable, Tensor]:
        return transposed_jacobian(self._problem)

    @property
    def vectors_at_once(self) -> int:
        """The number of vectors that should be backpropagated at once."""
        size = self.output.nbytes if self._batch is None else self._batch.num_bytes
        return max(BYTES // max(size, 1), 1)

    def by_use(self, u: Tensor, last: bool = False) -> Iterator[UseGradient]:
        """Yield the gradients of layers' uses of parameters, one by one.

        Args:
            u: The vectors to backpropagate, ``[V, *output]``.
            last: Whether nothing is backpropagated later: memory is given back on the way.
        """
        if self._batch is None:
            return iter(())
        return self._batch.by_use(self._batch.backward(u, last))

    def backward(self, u: Tensor, last: bool = False) -> Iterator[Piece]:
        """Backpropagate vectors; a sample's gradient is that of its own share of the output.

        Args:
            u: See ``by_use``.
            last: See ``by_use``.

        Returns:
            Some samples, and their gradients by parameter: first those of all samples for the
            parameters with rules, then the others.
        """
        known: list[Piece] = []
        if self._batch is not None:
            gradients = self._batch.by_parameter(self._batch.backward(u, last), len(u))
            known.append((slice(0, self.num_samples), gradients))
        return chain(known, self.rest(u))

    def rest(self, u: Tensor) -> Iterator[Piece]:
        """Backpropagate vectors ``[V, *output]`` to the parameters that have no rule."""
        return self.one_by_one(u, {*self._problem.space.names}.difference(self._known))

    def one_by_one(self, u: Tensor, names: Collection[str]) -> Iterator[Piece]:
        """Backpropagate vectors ``[V, *output]`` to some parameters, sample by sample."""
        names = [name for name in self._problem.space.names if name in names]
        if not names:  # nothing keeps the graph in memory
            return iter(())
        return self._fallback.gradients(self._problem, *self._whole, u, names)


class SampleBackward:
    """Computes gradients of single samples, in one pass where the layers are known.

    On a first batch, each rule is compared with autograd, and two backward passes show which axis
    of each layer's output numbers the samples. They do so again where they left a choice, and on
    batches whose graph is wired in a new way or may move rows by their numbers. Parameters without
    a rule, or without such an axis, get one backward pass for each sample.

    Args:
        name: Names the operator in messages.
        independent: Whether samples that interact are refused.
        sums_rows: Whether the caller can use sums over all rows of a layer where the samples of the
            rows are not known, as KFAC-expand can. If rows of the output are not independent, they
            are then taken for tokens of samples.

    Attributes:
        fallbacks: Why parameters are treated sample by sample.
    """

    def __init__(self, name: str, independent: bool = True, sums_rows: bool = False):
        self._name, self._independent, self._sums_rows = name, independent, sums_rows
        self.fallbacks: dict[str, str] = {}
        self._axes: dict[int, dict[UseKey, BatchAxis]] = {}  # by the wiring of the graph
        self._checked: set[tuple[int, UseKey]] = set()  # with the graph's operations
        self._rows_are_tokens = False
        self._fallback = OneByOne()

    @property
    def is_complete(self) -> bool:
        """Whether rules are known for all parameters."""
        return not self.fallbacks

    def capture(self, problem: BatchProblem, by_sample: bool = True) -> SampleGradients:
        """Run the model on a batch, and return the gradients of its samples, not yet computed.

        Args:
            problem: The model on a batch.
            by_sample: Whether the caller needs to know the sample of each row of a product.
        """
        is_first = not (self._checked or self.fallbacks)
        states = GeneratorStates()
        batch = self._record(problem, by_sample)
        if is_first and not states.are_current():
            # the model is random, and was evaluated several times
            del batch
            states.restore()
            batch = self._record(problem, by_sample)
        if self.fallbacks:  # fallbacks evaluate the model again
            states.restore()
        return SampleGradients(problem, batch, self.fallbacks, self._fallback)

    def _record(self, problem: BatchProblem, by_sample: bool) -> RecordedBatch | None:
        """Run the model on a batch and record it, ``None`` if no parameter has a rule."""
        names = [name for name in problem.space.names if name not in self.fallbacks]
        if not names:
            return None
        # on the first batch while no other graph is in memory
        truth = None if self._checked else autograd_sums(problem)
        batch = self._run(problem, names)
        if batch is None or batch.num_samples == 0:
            return None
        problem.check(batch.output)  # NaN would be taken for a wrong axis
        self._use_fallback(batch.unrecorded(), "a call that no rule knows uses it")
        if self._rows_are_tokens:
            _group_tokens(problem, batch)
        batch.recall(self._axes.get(batch.wiring, {}))
        seen = {(batch.operations, key) for key in batch.uses.keys() | batch.unconnected}
        new = seen - self._checked
        may_move = (by_sample or batch.has_lookups) and batch.moves_rows
        lacks_axes = may_move or any(use.axis is None for use in batch.uses.values())
        self._examine(problem, batch, lacks_axes and batch.num_samples > 1, bool(new), truth)
        self._checked |= new
        batch.drop(self.fallbacks)
        return batch

    def _run(self, problem: BatchProblem, names: list[str]) -> RecordedBatch | None:
        """Run the model and record it, ``None`` if it can only run without."""
        try:
            return RecordedBatch(problem, names)
        except Exception as error:  # a model that looks at its own graph may raise anything
            if not is_refusal(error):
                raise
            autograd_sums(problem)  # raises what the model raises without being recorded
            self._use_fallback(names, f"the model cannot be recorded: {first_line(error)}")
            return None

    def _examine(
        self,
        problem: BatchProblem,
        batch: RecordedBatch,
        lacks_axes: bool,
        is_new: bool,
        truth: dict[str, Tensor] | None,
    ) -> None:
        """Find the axes of a batch's samples, and compare the rules with autograd."""
        if not (lacks_axes or is_new):
            return
        try:
            gradients = batch.examine(self._latest_axes() if lacks_axes else None)
            if is_new:
                truth = truth or autograd_sums(problem, batch.num_samples)
                wrong = batch.check(gradients, truth)
                self._use_fallback(wrong, reason_of(wrong, truth, problem, batch.num_samples))
        except (RuntimeError, TypeError, IndexError, NotImplementedError) as error:
            if lacks_memory(error):
                raise
            # a combination of arguments that the rule does not foresee
            self._use_fallback(
                batch.names, f"a rule for layers fails on this model: {first_line(error)}"
            )
            return
        del gradients
        if lacks_axes:
            self._take_axes(problem, batch)

    def _take_axes(self, problem: BatchProblem, batch: RecordedBatch) -> None:
        """Remember the axes of samples; refuse the parameters for which there are none."""
        batch.drop(self.fallbacks)
        if batch.unsorted() and self._sums_rows and not self._rows_are_tokens:
            num_samples = evident_samples(problem) or batch.num_samples
            if num_samples < batch.num_samples and batch.num_samples % num_samples == 0:
                self._rows_are_tokens = True
                self._axes.clear()
                _group_tokens(problem, batch)
                batch.examine({})
        if batch.unsorted() and self._independent and couples_samples(problem, batch.output, 1):
            raise ValueError(COUPLED)
        if not self._sums_rows:
            self._use_fallback(batch.unsorted(), "its gradients could not be assigned to samples")
        axes = self._axes.setdefault(batch.wiring, {})
        for key, use in batch.uses.items():
            if use.axis is not None and not use.ambiguous:
                axes[key] = use.axis

    def _latest_axes(self) -> dict[UseKey, BatchAxis]:
        """Return the axes that were found last, whatever the wiring."""
        return {key: axis for axes in self._axes.values() for key, axis in axes.items()}

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


def _group_tokens(problem: BatchProblem, batch: RecordedBatch) -> None:
    """Count neighboring rows of the output as the tokens of one sample.

    Raises:
        ValueError: If samples have unequal numbers of rows.
    """
    num_rows, num_samples = len(batch.output), problem.num_samples
    if num_samples == 0 or num_rows % num_samples:
        raise ValueError(
            f"The model's output has {num_rows} rows for {num_samples} samples; those of an "
            "earlier batch had as many rows each. Give samples an axis in front of their rows, "
            "or say with batch_size_fn how many a batch has."
        )
    batch.num_samples = num_samples
