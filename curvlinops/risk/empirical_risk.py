"""The empirical risk: model, loss, parameters and data; sums and terms over all batches."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from curvlinops.autodiff import backward
from curvlinops.autodiff.backward import Recording, Seed
from curvlinops.autodiff.evaluation import Evaluation, check_graph
from curvlinops.autodiff.model import Model, train_flags
from curvlinops.linear_operator.space import Columns, ParameterSpace, add, not_finite
from curvlinops.losses.base import Loss
from curvlinops.risk.data import Batch, Batches
from curvlinops.risk.distributed import Ranks
from curvlinops.risk.first_batch import BatchFacts, Watch, facts_of, learned, needs_graph
from curvlinops.support.progress import shown
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_modes import exclusive, fetched

#: The cause of infinite derivatives of smooth functions, for messages.
OVERFLOW = "a number overflows (float16 ends at 65504, bfloat16 has the range of float32)"

_BAD_NUMBERS = "Check the batch for NaN and infinite values, and the parameters for divergence."


class Pass:
    """One pass over the data.

    Attributes:
        batch: The batch that is in use, ``None`` while one is fetched.
    """

    def __init__(self, stack: ExitStack):
        self._stack, self._preserves_rng = stack, False
        self.batch: Batch | None = None

    def preserve_rng(self) -> None:
        """Restore the random number generators at the end of the pass.

        Called before each evaluation of the model. Passes that only use kept graphs draw nothing.
        """
        if not self._preserves_rng:
            self._stack.enter_context(preserved_rng())
            self._preserves_rng = True


class BatchProblem:
    """The risk's share on one batch, which the modes in ``autodiff/modes.py`` differentiate."""

    def __init__(self, risk: "EmpiricalRisk", batch: Batch, current: Pass):
        self._risk, self.batch, self._pass = risk, batch, current
        self.space, self.model, self.loss = risk.space, risk.model, risk.loss
        self.leaves = risk.model.leaves

    def on(self, batch: Batch) -> "BatchProblem":
        """Return the problem on another batch."""
        return self if batch is self.batch else BatchProblem(self._risk, batch, self._pass)

    @property
    def number(self) -> int:
        """The number of the batch among those of all ranks, which seeds what is random on it."""
        return self._risk.ranks.number(self.batch.index)

    @property
    def num_samples(self) -> int:
        """The number of samples in the batch."""
        return self._risk.data.size(self.batch)

    @property
    def can_substitute(self) -> bool:
        """Whether the model can be evaluated at other tensors than the user's; closures cannot."""
        return self.model.substitutable

    # --- facts about the model

    @property
    def is_first(self) -> bool:
        """Whether the model was not evaluated before, so that nothing is known of it."""
        return self._risk.facts is None

    @property
    def facts(self) -> BatchFacts:
        """The facts that the first evaluation has shown."""
        if self.is_first:
            with preserved_rng(), self.recording("once"):
                pass
        return self._risk.facts

    @property
    def loss_needs_graph(self) -> bool:
        """Whether the loss depends on parameters not only through the values of the output."""
        if self.loss is None or self.loss.is_function_of_values:
            return False
        return self.facts.loss_needs_graph

    def known(self, make: Callable, *args: Hashable) -> Any:
        """Return ``make(*args)``, an object that learns about the model, made for all batches.

        Other operators on the same model share it, as long as all is alike but for numbers.
        """
        learners, key = self._risk.learners, (make, *args)
        if key not in learners:
            shared = self._risk.shared(self).setdefault(key, make(*args))
            learners[key] = shared if shared.is_complete else make(*args)
        return learners[key]

    # --- evaluations

    def constants(self) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, for a pass without derivatives."""
        leaves = self.leaves()
        if self.facts.model_differentiates:
            return leaves
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def evaluation(self, values: dict[str, Tensor], differentiation: str) -> Evaluation:
        """Return the evaluation in which the parameters have the given values."""
        self._pass.preserve_rng()
        return Evaluation(self.model, values, differentiation)

    def output(self, evaluation: Evaluation) -> Tensor:
        """Evaluate the model in an active evaluation.

        Raises:
            TypeError: If the output is not one real tensor with axes.
        """
        output = evaluation.output(self.batch.X)
        kind = type(output).__name__
        if isinstance(output, Tensor):
            if output.is_floating_point() and output.ndim > 0:
                return output
            kind = f"a tensor of shape {list(output.shape)} and {output.dtype}"
        raise TypeError(
            f"The model returned {kind} on batch {self.batch.index}, expected one real tensor with "
            "the batch axis first. Wrap the model, e.g. in a Module whose forward returns "
            "self.inner(**X).logits."
        )

    def check_memory(self, output: Tensor, leaves: dict[str, Tensor]) -> None:
        """Refuse an output that was computed from tensors that an earlier pass has left."""
        check_graph(output, self.model, leaves, must_depend=False)

    @contextmanager
    def recording(self, differentiation: str) -> Iterator[Recording]:
        """Evaluate the model; the context of its evaluation is active inside.

        Raises:
            ValueError: If the graph cannot be differentiated with respect to the parameters.
        """
        leaves = self.leaves()
        evaluation = self.evaluation(leaves, differentiation)
        with evaluation.active():
            if self.is_first:
                output = self._first_output(evaluation, leaves)
            else:
                output = self.output(evaluation)
                self._look_at_loss(output, leaves)
                if not self.loss_needs_graph:
                    check_graph(output, self.model, leaves)
            yield Recording(evaluation, leaves, output)

    def _first_output(self, evaluation: Evaluation, leaves: dict[str, Tensor]) -> Tensor:
        """Evaluate the model for the first time, and learn from its graph."""
        with Watch(self.model.replaced) as watch:
            output = self.output(evaluation)
            facts = facts_of(output, self.loss, self.batch.y, self._parameters(leaves), watch)
        self._risk.learn(facts)
        self.check_target(output, with_values=True)
        value = self.loss_sum(output)[0] if facts.loss_needs_graph else output
        check_graph(value, self.model, leaves)
        return output

    def _look_at_loss(self, output: Tensor, leaves: dict[str, Tensor]) -> None:
        """Find out whether a user's loss needs the graph of the output now.

        A PINN's loss may need it on some batches only, a penalty while its weight is not zero.
        """
        if self.loss is None or self.loss_needs_graph:
            return
        if needs_graph(self.loss, output, self.batch.y, self._parameters(leaves)):
            self._risk.learn(replace(self.facts, loss_needs_graph=True))

    def _parameters(self, leaves: dict[str, Tensor]) -> set[int]:
        """Return the ids of the parameters, and of the tensors that replace them."""
        return {id(x) for x in (*leaves.values(), *self.model.params.values())}

    # --- the loss

    def check_target(self, output: Tensor, with_values: bool = False) -> None:
        """Check that output and target fit, and perhaps that the loss adds up (costly).

        Raises:
            ValueError: If output and target do not fit. The error names the batch.
        """
        if self.loss is None:
            return
        try:
            self.loss.check(output, self.batch.y)
            self._risk.data.check_rows(self.batch, len(output))
            if with_values:
                self.loss.check_values(output, self.batch.y)
        except ValueError as error:
            raise ValueError(f"Batch {self.batch.index}: {error}") from error

    def terms(self, output: Tensor) -> Tensor:
        """Return the batch's share of the normalization.

        Raises:
            ValueError: If output and target do not fit, or not to those of other batches.
        """
        loss, risk = self.loss, self._risk
        if loss is None:
            return torch.zeros((), device=output.device)
        self.check_target(output)
        size = loss.term_size(output)
        risk.term_size = size if risk.term_size is None else risk.term_size
        if size != risk.term_size:
            raise ValueError(
                f"Batch {self.batch.index} has outputs with a last axis of length {size}, others "
                f"{risk.term_size}; their mean is not defined. Use reduction='sum', or batches "
                "that agree."
            )
        return loss.denominator(output, self.batch.y)

    def loss_sum(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum over the batch's terms, and its share of the normalization."""
        terms = self.terms(output)
        return self.loss.sum(output, self.batch.y), terms

    def loss_seed(self, output: Tensor) -> tuple[Seed, Tensor]:
        """Return the seed of the backward pass of ``loss_sum``, differentiable, and the terms."""
        if self.loss_needs_graph:
            value, terms = self.loss_sum(output)
            return (value, None), terms
        terms = self.terms(output)
        return (output, self.loss.differentiable_gradient(output, self.batch.y)), terms

    def check(self, output: Tensor) -> None:
        """Refuse an output that does not fit its target, or a loss that is not finite."""
        self.terms(output)
        if self.loss is None or (self.loss_needs_graph and not output.requires_grad):
            self.check_numbers(output)
        else:
            seen = output if self.loss_needs_graph else output.detach()
            self.check_finite(self.loss.sum(seen, self.batch.y).detach())

    def check_numbers(self, output: Tensor) -> None:
        """Refuse an output with NaN; masked entries are infinite."""
        if bool(output.isnan().any()):
            index = self.batch.index
            raise ValueError(f"The model's output on batch {index} has NaN. {_BAD_NUMBERS}")

    def check_finite(self, loss: Tensor, gradient: Columns | None = None) -> None:
        """Refuse a loss or a gradient that is not finite, by the name of the parameter."""
        index = self.batch.index
        if not bool(loss.isfinite()):
            raise ValueError(f"The loss on batch {index} is {float(loss)}. {_BAD_NUMBERS}")
        if gradient and (name := not_finite(gradient)) is not None:
            raise ValueError(
                f"The gradient on batch {index} is not finite in parameter '{name}', though the "
                "loss is: its derivative does not exist there (sqrt or norm at zero?), or "
                f"{OVERFLOW}."
            )


class EmpiricalRisk:
    """``L = c * sum_t l_t`` over all terms of all batches.

    It is the only place for iteration over data, normalization and progress.

    Args:
        model: The model and its parameters.
        loss: The loss, or ``None`` where only outputs matter.
        batches: The data.
        progressbar: Whether to show a progress bar during passes over the data.
        name: Names the operator in progress bars.
        ranks: The processes that have other data of the same risk.

    Attributes:
        facts: The facts that the first evaluation has shown, ``None`` before it.
        term_size: The length of the outputs' last axis, where it must be equal in all batches.
        learners: Objects that learn about the model, see ``BatchProblem.known``.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss | None,
        batches: Batches,
        progressbar: bool = False,
        name: str = "",
        ranks: Ranks | None = None,
    ):
        self.model, self.data = model, batches
        self.progressbar, self.name, self.ranks = progressbar, name, ranks or Ranks()
        self.space = ParameterSpace.of(model.params)
        self.reconsider(loss)

    def reconsider(self, loss: Loss | None) -> None:
        """Replace the loss, and forget all facts about loss and model."""
        self.loss, self.term_size = loss, None
        self.facts: BatchFacts | None = None
        self.learners: dict[Hashable, Any] = {}
        self._shared: dict[Hashable, Any] | None = None

    def learn(self, facts: BatchFacts) -> None:
        """Store the facts that an evaluation has shown."""
        self.facts = facts
        if self.loss is not None:
            self.loss.needs_graph = facts.loss_needs_graph

    @contextmanager
    def batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        """Pass over the data, in a loop inside of a context. There are no other passes over data.

        Inside the context, no other thread evaluates models, PyTorch has its default modes, and
        the global random number generators are restored at the end.

        Args:
            description: The purpose of the pass, for the progress bar.
            data: Other data than the risk's own.

        Raises:
            Exception: Any error inside, with a note that names the batch.
        """
        data, device = data or self.data, self.space.device
        items = data.data
        if self.progressbar:
            items = shown(items, f"{self.name}.{description} on {device}")
        is_loader = type(data.data) not in (list, tuple)
        items = fetched(items) if is_loader else items
        with exclusive(), ExitStack() as stack:
            current = Pass(stack)
            if is_loader:  # they draw random numbers, too
                current.preserve_rng()

            def problems() -> Iterator[BatchProblem]:
                for current.batch in data.iterate(items, device):
                    yield BatchProblem(self, current.batch, current)
                    current.batch = None

            try:
                yield problems()
            except Exception as error:
                # e.g. numbers that are not finite may have led to wrong conclusions
                for key in self.learners:
                    self._shared.pop(key, None)
                self.learners = {}
                if current.batch is not None:
                    current.batch.name_in(error)
                raise

    def shared(self, problem: BatchProblem) -> dict[Hashable, Any]:
        """Return the facts that operators on this model share, for such batches and such a loss.

        Entries that depend on the model's graph have its signature.

        Args:
            problem: The first batch that is met.
        """
        if self._shared is None:
            flags = train_flags(self.model.roots)
            tensors = [*self.model.params.values(), *leaves((problem.batch.X, problem.batch.y))]
            kinds = tuple((x.shape, x.dtype, x.device) for x in tensors)
            loss = None if self.loss is None else repr(self.loss.description)
            key = (flags, kinds, tuple(self.model.params), loss)
            self._shared = learned(self.model.source, key)
        return self._shared

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

    def gradient_and_loss(self) -> tuple[Columns, Tensor]:
        """Return gradient (one column) and value of ``L`` over all data.

        Raises:
            ValueError: If either is not finite, naming batch or parameter.
        """
        gradient, loss, total = self.space.zeros(1), 0.0, 0.0
        task = "gradient_and_loss"
        with self.ranks.synchronized(self, task), self.batches(task) as batches:
            for problem in batches:
                value, columns, terms = backward.gradient(problem, problem.loss_sum)
                problem.check_finite(value, columns)
                loss, total = loss + value, total + terms
                add(gradient, slice(None), columns)
        self.ranks.add(self.space.join(gradient))
        loss, scale = self.ranks.total(loss).to(loss.dtype), self.scale(self.ranks.total(total))
        return {name: column * scale for name, column in gradient.items()}, loss * scale

    def to(self, device: torch.device | str) -> None:
        """Move model, parameters and loss to another device."""
        self.model.to(device)
        if self.loss is not None:
            self.loss.to(device)
        self.space = ParameterSpace.of(self.model.params)
