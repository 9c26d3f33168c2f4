"""The empirical risk on one batch, as a function of the parameters."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from curvlinops.autodiff.evaluation import Evaluation, check_graph
from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.risk.data import Batch
from curvlinops.risk.model_facts import ModelFacts, UserFunctions, Watch, needs_graph
from curvlinops.support.autograd_graph import custom_functions, graph_nodes
from curvlinops.support.pytree import select_samples
from curvlinops.support.refusals import is_refusal
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_internals import without_torch_function

_LOGGER = logging.getLogger("curvlinops")

#: The cause of infinite derivatives of smooth functions, for messages.
OVERFLOW = "a number overflows (float16 ends at 65504, bfloat16 has the range of float32)"

#: The remedy for derivatives that do not exist, for messages.
NO_DERIVATIVE = (
    "its derivative does not exist there (norm, sqrt or std at zero? Write x.square().sum() in "
    "place of x.norm() ** 2, or add an eps below the root)"
)

_BAD_NUMBERS = "Check the batch for NaN and infinite values, and the parameters for divergence."

_SAY_ROWS = (
    "Give samples an axis in front of their rows, or say with batch_size_fn how many a batch has"
)

#: The start of a backward pass: a tensor and its cotangent; ``None`` stands for the number one.
Seed = tuple[Tensor, Tensor | None]


class Recording(NamedTuple):
    """A forward pass that was recorded.

    Attributes:
        evaluation: The evaluation of forward and backward passes.
        leaves: The tensors that replaced the parameters. They require gradients.
        output: The output, with its graph.
    """

    evaluation: Evaluation
    leaves: dict[str, Tensor]
    output: Tensor


class BatchProblem:
    """Model and loss on a batch, which the functions in ``derivatives.py`` differentiate.

    Gradients of layers may be wanted for the parameters of a ``space`` only.
    """

    def __init__(self, risk: Any, batch: Batch, space: ParameterSpace | None = None):
        self._risk, self.batch = risk, batch
        self.space, self.model, self.loss = space or risk.space, risk.model, risk.loss
        self.leaves = risk.model.leaves
        #: The user's own functions in the graph of the last forward pass.
        self.functions = UserFunctions(risk.facts)
        self._has_seen_loss = False

    def on(self, batch: Batch, space: ParameterSpace | None = None) -> "BatchProblem":
        """Return the problem on another batch, and for some parameters only if given."""
        return BatchProblem(self._risk, batch, space)

    @property
    def number(self) -> int:
        """The number of the batch among those of all ranks, which seeds what is random on it."""
        return self._risk.ranks.number(self.batch.index)

    @property
    def num_samples(self) -> int:
        """The number of samples in the batch."""
        return self._risk.data.size(self.batch)

    @property
    def evident_samples(self) -> int | None:
        """The number of samples in the batch, ``None`` if its tensors do not show it."""
        try:
            return self.num_samples
        except ValueError:
            return None

    def samples_of(self, output: Tensor) -> int:
        """Return the number of samples that an output belongs to.

        It is the batch's number of samples, if all have equally many neighboring rows of the
        output, such as tokens. Otherwise each row is a sample.

        Raises:
            ValueError: If samples had equally many rows on another batch, but do not on this one.
        """
        num_rows, num_samples = len(output), self.evident_samples
        if not num_samples or num_rows <= num_samples:
            return num_rows
        facts = self._risk.facts
        if facts.groups_rows is None and (num_samples > 1 or facts.groups_rows_alone is None):
            groups_rows = num_rows % num_samples == 0 and self._groups_rows(num_rows)
            if num_samples == 1:
                facts.groups_rows_alone = groups_rows
            elif facts.groups_rows_alone not in (None, groups_rows):
                raise ValueError(
                    f"The model's output has {num_rows} rows for {num_samples} samples, and had "
                    "several rows for the one sample of an earlier batch. Only one of both batches "
                    f"seems to have equally many rows for each sample. {_SAY_ROWS}; or put a "
                    "batch of several samples first, which then decides."
                )
            else:
                facts.groups_rows = groups_rows
        # a single sample shows only that it has several rows, not whether others have as many
        groups_rows = facts.groups_rows_alone if facts.groups_rows is None else facts.groups_rows
        if groups_rows and num_rows % num_samples:
            raise ValueError(
                f"The model's output has {num_rows} rows for {num_samples} samples; those of an "
                f"earlier batch had equally many rows each. {_SAY_ROWS}."
            )
        return num_samples if groups_rows else num_rows

    def _groups_rows(self, num_rows: int) -> bool:
        """Return whether a number of rows are equally many neighboring ones for each sample.

        The caller has said so by ``batch_size_fn``; otherwise the first and the last sample alone
        must have as many, and one sample twice as many if it is taken twice.
        """
        if isinstance(self.batch.X, PackedSequence):  # rows are ordered by time
            return False
        if self._risk.data.batch_size_fn is not None:
            return True
        num_samples = self.num_samples
        if num_samples == 1:
            parts: list[tuple[slice | list[int], int]] = [([0, 0], 2)]
        else:
            parts = [(slice(1), 1), (slice(num_samples - 1, num_samples), 1)]
        outputs = [(self.output_alone(part, num_samples), number) for part, number in parts]
        return all(
            output is not None and len(output) * num_samples == number * num_rows
            for output, number in outputs
        )

    def output_alone(
        self,
        samples: slice | list[int],
        num_samples: int,
        of: Callable[[Tensor], Any] = Tensor.detach,
        leaves: dict[str, Tensor] | None = None,
    ) -> Any:
        """Return the model's output for some samples of the batch alone.

        Args:
            samples: The samples.
            num_samples: The number of samples of the batch.
            of: Returns something of the output.
            leaves: Tensors in place of the parameters.

        Returns:
            The output without its graph; ``None`` if the model refuses a part of the batch.
        """
        _ = self.facts  # the first evaluation needs the targets
        evaluation = self.evaluation(leaves or self.constants(), "once")
        with preserved_rng(), evaluation.active():  # raises inside of another evaluation
            try:
                X = select_samples(self.batch.X, samples, num_samples)
                part = self.on(Batch(self.batch.index, X, None))
                return of(part.output(evaluation))
            except Exception as error:  # a user's model may raise anything on a part of a batch
                if not is_refusal(error):
                    raise
                _LOGGER.info("A part of a batch could not be evaluated: %s", error)
                return None

    @property
    def can_substitute(self) -> bool:
        """Whether the model can be evaluated at other tensors than the user's; closures cannot."""
        return self.model.substitutable

    # --- facts about the model

    @property
    def is_first(self) -> bool:
        """Whether the model was not evaluated before, so that nothing is known of it."""
        return not self._risk.facts.is_evaluated

    @cached_property
    def _watch(self) -> Watch:
        """Watches the model's first evaluation."""
        return Watch(self.model.replaced, self.model.shards.is_gathered)

    @property
    def facts(self) -> ModelFacts:
        """The facts about the model, which its first evaluation shows."""
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

    def rules(self, make: Callable, *args: Hashable) -> Any:
        """Return ``make(*args)``, an object that learns the rules of layers, for all batches."""
        return self._risk.rules(self.batch).get(make, *args)

    @property
    def uncompared(self) -> list[str]:
        """The functions that must be compared; none with ``check_deterministic=False``."""
        return self.functions.uncompared if self._risk.checks else []

    def keeping_graph(self, output: Tensor) -> AbstractContextManager:
        """Watch a backward pass from an output, see ``UserFunctions``."""
        return self.functions.keeping_graph(output) if self._risk.checks else nullcontext(False)

    def runs_users_code(self, nodes: Iterable[Any]) -> bool:
        """Return whether a backward pass must be compared that runs hooks, or own functions."""
        return self._risk.checks and bool(self.facts.hooks or custom_functions(nodes))

    # --- evaluations

    def at(self, values: dict[str, Tensor]) -> None:
        """Evaluate the model at other values of the parameters from now on."""
        self.leaves = partial(self.model.leaves, values)

    def constants(self) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, for a pass without derivatives."""
        leaves = self.leaves()
        if self.facts.differentiates or self.facts.hooks:  # hooks need a graph
            return leaves
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def evaluation(self, values: dict[str, Tensor], differentiation: str) -> Evaluation:
        """Return the evaluation in which the parameters have the given values."""
        also = () if self.loss is None else self.loss.roots
        return Evaluation(self.model, values, differentiation, also)

    def output(self, evaluation: Evaluation) -> Tensor:
        """Evaluate the model in an active evaluation; the first one is watched.

        Raises:
            TypeError: If the output is not one real tensor with axes.
        """
        with self._watch if self.is_first else nullcontext():
            output = evaluation.output(self.batch.X)
        kind = type(output).__name__
        if isinstance(output, Tensor):
            if output.is_floating_point() and output.ndim > 0:
                return output
            kind = f"a tensor of shape {list(output.shape)} and {output.dtype}"
        raise TypeError(
            f"The model returned {kind} on batch {self.batch.index}, expected one real tensor with "
            "the batch axis first. Wrap the model in a Module whose forward returns the one "
            "tensor, e.g. self.inner(X)[0]. For models of Hugging Face with logits, construct the "
            "operator from *curvlinops.integrations.transformers.problem(model, loader)."
        )

    def check_memory(self, output: Tensor, leaves: dict[str, Tensor]) -> None:
        """Refuse an output that was computed from tensors that an earlier pass has left."""
        check_graph(graph_nodes(output), self.model, leaves, must_depend=False)

    @contextmanager
    def recording(self, differentiation: str, is_summed: bool = True) -> Iterator[Recording]:
        """Evaluate the model; the context of its evaluation is active inside.

        Gradients of sharded parameters are added to sums of all processes if it ``is_summed``.
        """
        leaves = self.leaves()
        for name in self.model.shards.params:
            leaves[name].is_summed = is_summed
        evaluation = self.evaluation(leaves, differentiation)
        self.functions, self._has_seen_loss = UserFunctions(self._risk.facts), False
        with evaluation.active():
            output = self.output(evaluation)
            if self.is_first:
                self.learn_from(output, leaves)
            else:
                self.look_at_loss(output)
                if not self.loss_needs_graph:
                    nodes = list(graph_nodes(output))
                    check_graph(nodes, self.model, leaves)
                    self.functions.note(nodes, output)
            yield Recording(evaluation, leaves, output)

    def learn_from(
        self, output: Tensor, leaves: dict[str, Tensor], must_depend: bool = True
    ) -> None:
        """Learn from the model's first output; inside of its evaluation."""
        with self._watch as watch:
            watch.is_in_loss = True
            loss_needs_graph = self._needs_graph(output)
        self._risk.facts.learn(watch, output)
        self._risk.set_loss_needs_graph(loss_needs_graph)
        with self.formulas():
            self.check_target(output, with_values=True)
        value = self.loss_sum(output)[0] if loss_needs_graph else output
        nodes = list(graph_nodes(value))
        check_graph(nodes, self.model, leaves, must_depend)
        if not loss_needs_graph:
            self.functions.note(nodes, output)

    def look_at_loss(self, output: Tensor) -> None:
        """Find out whether the loss needs the graph of this batch's output.

        A PINN's loss may need it on some batches only, a penalty while its weight is not zero.
        """
        if not self._has_seen_loss:
            self._risk.set_loss_needs_graph(self._needs_graph(output))

    def _needs_graph(self, output: Tensor) -> bool:
        self._has_seen_loss = True
        if self.loss is None or self.loss.is_function_of_values:
            return False
        parameters = set(map(id, self.model.params.values()))
        return needs_graph(self.loss, output, self.batch.y, parameters, self.functions)

    # --- the loss

    def formulas(self) -> AbstractContextManager:
        """Return the context for formulas of the loss inside of an evaluation.

        An evaluation watches the calls of the model and of the user's own losses, not those of
        losses in closed form, whose code is the package's.
        """
        is_known = self.loss is None or self.loss.is_function_of_values
        return without_torch_function() if is_known else nullcontext()

    def check_target(self, output: Tensor, with_values: bool = False) -> None:
        """Check that output and target fit, and perhaps that the loss adds up (costly).

        That need not be so where one batch is all data, until there is a second one. A single row
        does not show it.
        """
        if self.loss is None:
            return
        try:
            self.loss.check(output, self.batch.y)
            self._risk.data.check_rows(self.batch, len(output))
            facts, is_all = self._risk.facts, self._risk.is_all_data(self.batch)
            shows_sum = len(output) > 1 and not is_all
            is_late = facts.is_evaluated and not facts.adds_up and shows_sum
            if with_values or is_late:
                self.loss.check_values(output, self.batch.y, is_all)
                facts.adds_up = facts.adds_up or shows_sum
        except ValueError as error:
            raise ValueError(f"Batch {self.batch.index}: {error}") from error

    def weight(self, output: Tensor) -> Tensor:
        """Return the batch's weight: its share of the normalization, 1/c."""
        loss, risk = self.loss, self._risk
        if loss is None:
            return output.new_zeros(())
        self.look_at_loss(output)
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
        """Return the sum over the batch's terms, and the batch's weight."""
        weight = self.weight(output)
        return self.loss.sum(output, self.batch.y), weight

    def loss_seed(self, output: Tensor) -> tuple[Seed, Tensor]:
        """Return the seed of the backward pass of ``loss_sum``, differentiable, and the weight."""
        if self.loss_needs_graph:
            value, weight = self.loss_sum(output)
            self.functions.note(list(graph_nodes(value)), value)
            return (value, None), weight
        weight = self.weight(output)
        return (output, self.loss.differentiable_gradient(output, self.batch.y)), weight

    def curvature_seed(self, output: Tensor) -> tuple[Seed, Tensor]:
        """Return the seed of a backward pass whose derivative is the GGN, and the weight."""
        weight = self.weight(output)
        return (self.loss.curvature_sum(output, self.batch.y), None), weight

    def check(self, output: Tensor) -> Tensor:
        """Return the batch's weight; refuse an unfit output, or a loss that is not finite."""
        weight = self.weight(output)
        if self.loss is None or (self.loss_needs_graph and not output.requires_grad):
            self.check_numbers(output)
        else:
            seen = output if self.loss_needs_graph else output.detach()
            self.check_finite(self.loss.sum(seen, self.batch.y).detach())
        return weight

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
                f"loss is: {NO_DERIVATIVE}, or {OVERFLOW}."
            )
