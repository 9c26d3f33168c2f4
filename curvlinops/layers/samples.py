"""Gradients of single samples, batch by batch."""

import logging
from collections.abc import Callable, Iterable

from torch import Tensor

from curvlinops.autodiff.backward import Problem
from curvlinops.layers.batch import RecordedBatch
from curvlinops.layers.capture import Call, Change
from curvlinops.layers.check import autograd_sums, explained, rounding
from curvlinops.layers.gradients import SampleGradients
from curvlinops.layers.layout import Along, has_parts, samples_in
from curvlinops.layers.parts import Key
from curvlinops.layers.shares import WAYS
from curvlinops.layers.twice import blind, sample_twice
from curvlinops.risk.sample_coupling import check_first_sample
from curvlinops.support.memory import lacks_memory
from curvlinops.support.rng import GeneratorStates
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")


class SampleBackward:
    """Computes gradients of single samples, in one pass where the layers are known.

    Each batch's graph shows which rows of each layer belong to which sample, or, where it does not,
    its gradients do. Whether what the rules say of a parameter agrees with autograd, the first few
    samples show, or the first batch where it cannot be cut or does more. Other parameters get one
    backward pass for each sample.

    Args:
        name: Names the operator in messages.
        trusting: Whether batches are taken to be alike: rows are assigned to samples on the first
            batch only, which saves two backward passes on others whose graph does not show it.
        independent: Whether samples that interact are refused.
        invariant: Whether layers have to be seen in the same way however the data is cut into
            batches and the output shaped: its rows may be parts of the batch's samples, such as
            tokens, if they are not independent; a batch of one sample is tried with two.

    Attributes:
        fallbacks: Why parameters are treated sample by sample.
    """

    def __init__(
        self,
        name: str,
        trusting: bool = False,
        independent: bool = True,
        invariant: bool = False,
    ):
        self.name = name
        self._trusting, self._independent, self._invariant = trusting, independent, invariant
        self._grouped = False
        self.fallbacks: dict[str, str] = {}
        self._layouts: dict[Key, Along] = {}
        self._checked: set[Key] = set()  # on several samples
        self._checked_alone: set[Key] = set()
        self._seeing: set[Key] = set()  # calls that see the sample of a batch of one
        self._changes: dict[Call, Change] = {}
        self._ways = dict.fromkeys(WAYS, False)  # of those without rules

    @property
    def is_complete(self) -> bool:
        """Whether rules are known for all parameters."""
        return not self.fallbacks

    def capture(self, problem: Problem, trusting: bool | None = None) -> SampleGradients:
        """Run the model on a batch; return what computes its samples' gradients.

        Args:
            problem: The model on a batch.
            trusting: Whether the batch is taken to be like earlier ones. Default: as for all.
        """
        trusting = self._trusting if trusting is None else trusting
        learning = not (self._checked or self._checked_alone or self.fallbacks)
        states = GeneratorStates()
        batch = self._record(problem, trusting)
        if learning and not states.are_current():
            # the model is random, and was evaluated several times
            del batch
            states.restore()
            batch = self._record(problem, trusting)
        if self.fallbacks:  # which evaluate the model again
            states.restore()
        return SampleGradients(problem, batch, self.fallbacks, self._ways)

    def _record(self, problem: Problem, trusting: bool) -> RecordedBatch | None:
        """Run the model on a batch; return what the rules know, ``None`` if that is nothing."""
        names = [name for name in problem.space.names if name not in self.fallbacks]
        if not names:
            return None
        # on the first batch while no other graph is in memory
        num_samples = problem.num_samples if self._grouped else None
        began = self._checked or self._checked_alone
        truth = None if began else autograd_sums(problem, num_samples)
        batch = self._run(problem, names, num_samples)
        if batch is not None and self._changes and batch.unrecorded():
            self._changes.clear()  # on this batch they hit other calls
            batch = self._run(problem, names, num_samples)
        if batch is None or batch.num_samples == 0:
            return None
        problem.check(batch.model_output)  # else numbers that are none tell which rows belong where
        before = len(self.fallbacks)
        batch = self._sort(problem, batch, trusting)
        if batch is None:
            return self._record(problem, trusting)
        self._refuse(batch.unrecorded(), "a call that no rule knows uses it")
        # one sample alone says nothing of which rows belong to which
        own = self._checked if batch.num_samples > 1 else self._checked_alone
        fresh = (set(batch.layouts) | batch.unconnected) - batch.guessed - self._checked - own
        if fresh or not began:
            truth = truth or autograd_sums(problem, num_samples)
            self._obeys_rules(batch, lambda: self._check(problem, batch, truth, num_samples))
            own |= fresh - batch.guessed
        if len(self.fallbacks) > before:
            # the calls are numbered anew
            self._layouts.clear()
            self._changes.clear()
        batch.drop(self.fallbacks)
        return batch

    def _check(
        self,
        problem: Problem,
        batch: RecordedBatch,
        truth: dict[str, Tensor],
        num_samples: int | None,
    ) -> None:
        """Leave no parameter to rules that do not agree with autograd's sums."""
        wrong = batch.check(truth)
        if wrong:
            slack = rounding(truth, problem, num_samples, batch.precision)
            right = set(wrong).difference(wrong := batch.check(truth, slack))
            # which a batch with other numbers has to show
            batch.guessed |= {key for key in batch.uses if right.intersection(batch.names_of(key))}
        self._refuse(*explained(wrong, truth, problem, num_samples))

    def _run(
        self, problem: Problem, names: list[str], num_samples: int | None
    ) -> RecordedBatch | None:
        """Run the model and record it, ``None`` if it can only run without."""
        try:
            return self._recorded(problem, names)
        except Exception as error:  # whatever the user's model raises
            if lacks_memory(error):
                raise
            if self._changes:
                self._changes.clear()  # it was possible on an earlier batch
                return self._run(problem, names, num_samples)
            autograd_sums(problem, num_samples)  # raises what the model does without being recorded
            self._refuse(names, f"the model cannot be recorded: {first_line(error)}")
            return None

    def _recorded(self, problem: Problem, names: list[str]) -> RecordedBatch:
        num_samples = problem.num_samples if self._grouped else None
        return RecordedBatch(problem, names, self._changes, num_samples)

    # --- layouts

    def _sort(self, problem: Problem, batch: RecordedBatch, trusting: bool) -> RecordedBatch | None:
        """Find each use's layout, and the parameters for which that is impossible.

        Returns:
            The batch, perhaps another one with changes; ``None`` if it must be recorded again,
            because samples turn out to have several rows of the output each, or a rule fails.
        """
        if trusting and not batch.depends_on_data:
            batch.layouts = {
                key: layout
                for key, layout in self._layouts.items()
                if key in batch.uses and batch.fits(key, layout)
            }
        # whether layers see the only sample at all, no order of its parts shows
        if not (self._invariant and samples_in(problem, batch.model_output) == 1):
            batch.prove()
        missing = [key for key in batch.uses if key not in batch.layouts]
        if not missing:
            self._layouts |= batch.layouts
            return batch
        checking = not (self._checked or self._checked_alone)
        if not self._obeys_rules(batch, lambda: batch.detect(missing, checking)):
            return None
        runs, unseeing = self._tried_with_two(problem, batch)
        known = batch.layouts.keys() - unseeing
        lost = [key for key in missing if key in batch.uses and key not in known]
        if lost and self._invariant and not self._grouped and has_parts(problem, batch.output):
            self._grouped = True
            self._layouts.clear()
            return None
        for change in Change:
            changed = self._retry(runs, batch, lost, change)
            if changed is not None:
                return self._sort(problem, changed, trusting)
            if lost and self._independent and change is Change.ENLARGE:
                check_first_sample(problem, batch.output)
        for key in lost:
            self._refuse(batch.names_of(key), "its gradients could not be assigned to samples")
        self._layouts |= {
            key: layout
            for key, layout in batch.layouts.items()
            if isinstance(layout, Along) and key not in batch.guessed | batch.open
        }
        return batch

    def _tried_with_two(
        self, problem: Problem, batch: RecordedBatch
    ) -> tuple[list[Problem], set[Key]]:
        """Return runs that show how calls see a sample, and the uses whose calls see none.

        If a batch has but one sample, all rows are its own; the first run has it twice.
        """
        if not self._invariant or batch.uses.keys() <= self._seeing:
            return [problem], set()
        if samples_in(problem, batch.model_output) != 1:
            return [problem], set()
        runs, found = [problem], set()
        try:
            double = sample_twice(problem)
            found = blind(batch, self._recorded(double, batch.names))
            runs = [double, problem]
        except Exception as error:  # the input cannot be doubled, or the model refuses two samples
            if lacks_memory(error):
                raise
            _LOGGER.info("%s: a sample twice: %s", self.name, error)
        if not found:
            self._seeing |= batch.uses.keys()
        return runs, found

    def _retry(
        self, runs: list[Problem], batch: RecordedBatch, lost: list[Key], change: Change
    ) -> RecordedBatch | None:
        """Change calls whose rows belong to no sample, if all runs, of the batch last, allow it."""
        calls = dict.fromkeys((key.call, key.index) for key in lost)
        calls = [call for call in calls if self._changes.get(call, 0) < change]
        if not calls or len(self._changes) > len(batch.uses):  # what is changed leads to new calls
            return None
        if change is Change.FOLLOW:  # those behind the first one may then be of parameters alone
            calls = calls[:1]
        before = dict(self._changes)
        if change is Change.FOLLOW:  # calls behind it are numbered anew
            self._changes = {call: old for call, old in before.items() if old is Change.FOLLOW}
        self._changes |= dict.fromkeys(calls, change)
        try:
            for problem in runs:
                changed = self._recorded(problem, batch.names)
                if not set(changed.unrecorded()) <= set(batch.unrecorded()):
                    break
            else:
                return changed
        except Exception as error:
            if lacks_memory(error):
                raise
            _LOGGER.info("%s: no row for each sample: %s", self.name, error)
        self._changes = before
        return None

    def _obeys_rules(self, batch: RecordedBatch, step: Callable[[], None]) -> bool:
        """Return whether a first computation by rules works; else no parameter is left to them."""
        try:
            step()
        except Exception as error:  # of a combination of arguments that nobody thought of
            if lacks_memory(error):
                raise
            reason = f"a rule for layers fails on this model: {first_line(error)}"
            self._refuse(batch.names, reason)
            return False
        return True

    def _refuse(self, names: Iterable[str], reason: str) -> None:
        names = [name for name in names if name not in self.fallbacks]
        self.fallbacks.update(dict.fromkeys(names, reason))
        if names:
            said = ", ".join(f"'{name}'" for name in names[:3])
            _LOGGER.warning(
                "%s: gradients with respect to %s are computed sample by sample: %s.",
                self.name,
                said if len(names) <= 3 else f"{said} and {len(names) - 3} more",
                reason,
            )
