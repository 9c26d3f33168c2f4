"""The empirical risk: model, loss, parameters and data; sums and terms over all batches."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from curvlinops.core import autodiff
from curvlinops.core.autodiff import Evaluation, LossLike, Seed
from curvlinops.core.columns import add
from curvlinops.core.containers import to_double
from curvlinops.core.data import Batch, Batches, first_samples
from curvlinops.core.dependence import own_ids
from curvlinops.core.evaluation import Evaluation as Scope
from curvlinops.core.examination import Examination, Seen
from curvlinops.core.findings import Findings, recall
from curvlinops.core.graph import operations
from curvlinops.core.memory import suppressed
from curvlinops.core.model import Model
from curvlinops.core.outputs import check_finite, check_kind, check_numbers
from curvlinops.core.parallel import Ranks
from curvlinops.core.progress import shown
from curvlinops.core.seeds import preserved_rng
from curvlinops.core.space import Columns, ParameterSpace
from curvlinops.core.torch_modes import exclusive as alone
from curvlinops.core.torch_modes import fetched
from curvlinops.core.walk import Structure

#: Called before a pass; returns a function that says what all steps depend on, data apart, if that
#: is known.
Start = Callable[[], Callable[[], Structure | None] | None]


class BatchRisk:
    """The risk's share on one batch: what the modes (``modes.py``) differentiate."""

    def __init__(self, risk: "EmpiricalRisk", batch: Batch):
        self._risk = risk
        self.batch = batch
        self.number = risk.ranks.number(batch.index)  # seeds what is random on it
        self.space = risk.space
        self.loss = risk.loss
        self.leaves, self.constants = risk.model.leaves, risk.model.constants
        self._offered: Evaluation | None = None

    @property
    def findings(self) -> Findings:
        """What is known of the model."""
        return self._risk.findings

    @property
    def seen(self) -> Seen:
        """What the first batch has shown."""
        return self._risk.examination.seen

    @property
    def owns_graph(self) -> bool:
        """Whether nobody else has a part of the graph; a closure may use what was made before."""
        return self._risk.model.substitutable

    @property
    def num_samples(self) -> int:
        """The number of samples in the batch."""
        return self._risk.batches.size(self.batch)

    def scope(self, values: dict[str, Tensor], purpose: str) -> Scope:
        """Return the scope in which the parameters have the given values."""
        return Scope(self._risk.model, values, purpose)

    def on(self, batch: Batch) -> "BatchRisk":
        """Return the same on another batch."""
        return self if batch is self.batch else BatchRisk(self._risk, batch)

    def first_samples(self, at_least: int = 2) -> "BatchRisk | None":
        """Return the same on the first few samples of a batch that can be cut, else ``None``."""
        with suppressed():  # their number may not be evident, or a tensor have no slices
            if (batch := first_samples(self.batch, self.num_samples, at_least)) is not None:
                # what is found there of losses and values need not hold for the others
                twin = EmpiricalRisk(self._risk.model, self.loss, self._risk.batches)
                twin.examination.seen.dtypes = self.seen.dtypes
                return BatchRisk(twin, batch)
        return None

    def resembles(self, seen: Seen) -> bool:
        """Return whether this has the same operations as a first batch, the loss's included."""
        with preserved_rng() as untouched:
            with self.recording(seen.purpose) as found:
                output = found.output
                value = output if self.loss is None else self.loss.sum(output, self.batch.y)
            if untouched():
                self.offer(found)
        return operations(value) == seen.operations

    def in_double(self, values: dict[str, Tensor]) -> "BatchRisk":
        """Return the same on a copy of the model in float64, at other parameter values."""
        twin = EmpiricalRisk(self._risk.model.in_double(values), self.loss, self._risk.batches)
        X, y = to_double((self.batch.X, self.batch.y))
        return BatchRisk(twin, Batch(self.batch.index, X, y))

    def output(self, scope: Scope) -> Tensor:
        """Evaluate the model in an active scope."""
        output = scope.output(self.batch.X)
        check_kind(self.batch, output)
        return output

    @contextmanager
    def recording(self, purpose: str) -> Iterator[Evaluation]:
        """Evaluate the model for backward passes of some purpose; its scope is active inside."""
        found, self._offered = self._offered, None
        if found is not None and found.scope.purpose == purpose and found.scope.is_current:
            with found.scope.active():
                yield found
            return
        del found
        leaves = self.leaves()
        scope = self.scope(leaves, purpose)
        with scope.active():
            yield Evaluation(scope, leaves, self.output(scope))

    def offer(self, evaluation: Evaluation | None) -> None:
        """Let ``recording`` use an evaluation, once, if another one would find just the same."""
        # other losses may know what the model has kept of its last evaluation
        plain = self.loss is None or self.loss.is_function_of_values
        self._offered = evaluation if plain else None

    def terms(self, output: Tensor) -> Tensor:
        """Return the batch's share of the normalization, after checking that all fits."""
        return self._risk.terms(output, self.batch)

    def loss_sum(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over the batch's terms, and its share of the normalization."""
        terms = self.terms(output)
        return self.loss.sum(output, self.batch.y), terms

    def loss_seed(self, output: Tensor) -> tuple[Seed, Tensor]:
        """Return where the backward pass of ``loss_sum`` starts, differentiable, and the terms."""
        terms = self.terms(output)
        if self.loss.needs_graph:
            return (self.loss.sum(output, self.batch.y), None), terms
        return (output, self.loss.differentiable_gradient(output, self.batch.y)), terms

    def check(self, output: Tensor) -> None:
        """Raise an error that names the batch if it does not fit, or has no finite loss."""
        self.terms(output)
        seen = output if self.loss is not None and self.loss.needs_graph else output.detach()
        if self.loss is None or (self.loss.needs_graph and not output.requires_grad):
            check_numbers(self.batch, output)
        else:
            check_finite(self.batch, self.loss.sum(seen, self.batch.y).detach(), {})


class EmpiricalRisk:
    """``L = c * sum_t l_t`` over all terms of all batches.

    It owns all about the data, so that nothing else does: iteration, normalization, progress.

    Args:
        model: The model and its parameters.
        loss: The loss, or ``None`` where only outputs matter.
        batches: The data.
        progressbar: Whether to show a progress bar during passes over the data.
        name: Names the operator in progress bars.
        ranks: The processes that have other data of the same risk.

    Attributes:
        values_checked: Whether what the loss assumes of its values is known to hold.
        examination: What is known of each batch's graph.
        findings: What is known of the model; that of other risks if all has the same structure.
    """

    def __init__(
        self,
        model: Model,
        loss: LossLike | None,
        batches: Batches,
        progressbar: bool = False,
        name: str = "",
        ranks: Ranks | None = None,
    ):
        self.model, self.loss, self.batches = model, loss, batches
        self.progressbar, self.name, self.ranks = progressbar, name, ranks or Ranks()
        self.space = ParameterSpace.of(model.params)
        self.term_size, self.values_checked = None, loss is None
        self.examination = Examination(model)
        self.findings: Findings | None = None

    def run(
        self,
        step: Callable[[BatchRisk], None],
        description: str,
        start: Start = lambda: None,
        batches: Batches | None = None,
        purpose: str | None = None,
    ) -> None:
        """Call ``start``, then ``step`` on every batch. This is the only loop over data.

        Args:
            step: What is done with a batch.
            description: What it is done for, in the progress bar.
            start: Called first; returns what the steps depend on, if they use findings.
            batches: Other data than the risk's own.
            purpose: For which backward passes a step first evaluates the model, if it does.
        """
        batches, device = batches or self.batches, self.space.device
        label = f"{self.name}.{description} on {device}"

        def wrap(data: Iterable) -> Iterable:
            items = shown(data, label) if self.progressbar else data
            return items if type(data) in (list, tuple) else fetched(items)

        with alone():
            self.model.follow()
            own = own_ids(self.model)
            structure = start()
            with self.examination.preserving(batches.data):
                for bound in (BatchRisk(self, b) for b in batches.iterate(device, wrap, own)):
                    sharing = nullcontext()
                    if structure is not None and self.findings is None:
                        self.findings = self._recall(structure, bound.batch, batches)
                        sharing = self.findings.publishing()
                    try:
                        with sharing, self.examination.around(bound, purpose):
                            step(bound)
                    except Exception as error:  # numbers that are none, say, which show nothing
                        self.findings = None
                        bound.batch.name_in(error)
                        raise

    def _recall(
        self, structure: Callable[[], Structure | None], batch: Batch, batches: Batches
    ) -> Findings:
        """Return what is known of the model; nothing if it cannot be seen on what that depends."""
        try:
            parts = [structure(), Structure.of([batch.X, batch.y, batches.batch_size_fn])]
        except Exception:  # whatever the user's own types raise
            return Findings({})
        return Findings({}) if parts[0] is None else recall(self.model, parts)

    def reconsider(self, loss: LossLike | None) -> None:
        """Use a loss from now on, and check again what model and loss depend on."""
        self.loss, self.values_checked = loss, loss is None
        self.examination.forget()
        self.findings = self.term_size = None

    def look_again(self) -> None:
        """Find out again whether the loss depends on the model, with the same modes."""
        self.loss.needs_graph = False
        self.examination.forget()
        if self.findings is not None:
            self.findings.forget(Seen)

    def terms(self, output: Tensor, batch: Batch) -> Tensor:
        """Return a batch's share of the normalization.

        Raises:
            ValueError: If output and target do not fit, or not to those of other batches.
        """
        if self.loss is None:
            return torch.zeros((), device=output.device)
        try:
            self.loss.check(output, batch.y)
            self.batches.check_rows(batch, len(output))
            if not self.values_checked:
                self.loss.check_values(output, batch.y)
                self.values_checked = True
        except ValueError as error:
            raise ValueError(f"Batch {batch.index}: {error}") from error
        size = self.loss.term_size(output)
        self.term_size = size if self.term_size is None else self.term_size
        if size != self.term_size:
            raise ValueError(
                f"Batch {batch.index} has outputs with a last axis of length {size}, others "
                f"{self.term_size}; their mean is not defined. Use reduction='sum', or batches "
                "that agree."
            )
        return self.loss.denominator(output, batch.y)

    def scale(self, total: Tensor | float) -> float:
        """Return ``c``, given the sum of the batches' terms.

        Raises:
            ValueError: If there is no term.
        """
        if self.loss is None:
            return 1.0
        if float(total) == 0.0:
            raise ValueError(
                "The data has no term: all targets are ignored, or all weights are zero. The "
                "empirical risk is not defined."
            )
        return 1.0 if self.loss.reduction == "sum" else 1.0 / float(total)

    def gradient_and_loss(self, start: Start = lambda: None) -> tuple[Columns, Tensor]:
        """Return gradient (one column) and value of ``L`` over all data.

        Args:
            start: Called first, see ``run``.

        Raises:
            ValueError: If either is not finite, naming batch or parameter.
        """
        gradient, loss, total = self.space.zeros(1), 0.0, 0.0

        def step(bound: BatchRisk) -> None:
            nonlocal loss, total
            value, columns, terms = autodiff.gradient(bound, bound.loss_sum)
            check_finite(bound.batch, value, columns)
            loss, total = loss + value, total + terms
            add(gradient, slice(None), columns)

        with self.ranks.together(self, "gradient_and_loss"):
            self.run(step, "gradient_and_loss", start)
        self.ranks.add(self.space.join(gradient))
        loss, scale = self.ranks.total(loss).to(loss.dtype), self.scale(self.ranks.total(total))
        return {name: column * scale for name, column in gradient.items()}, loss * scale

    def to(self, device: torch.device | str) -> None:
        """Move model, parameters and loss to another device."""
        self.model.to(device)
        if self.loss is not None:
            self.loss.to(device)
        self.space = ParameterSpace.of(self.model.params)
