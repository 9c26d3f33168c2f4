"""The empirical risk on one batch, as a function of the parameters."""

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from math import isfinite
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.autodiff.evaluation import Evaluation, check_graph
from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.risk.checks.coupling import check_gradients
from curvlinops.risk.data import Batch
from curvlinops.risk.model_facts import ModelFacts, Seen, UserFunctions, Watch, needs_graph
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

#: The start of a backward pass: a tensor and its cotangent; ``None`` stands for the number one.
Seed = tuple[Tensor, Tensor | None]


class Recording(NamedTuple):
    """A forward pass that was recorded: the output has a graph, which ends at the leaves."""

    evaluation: Evaluation
    leaves: dict[str, Tensor]
    output: Tensor


class BatchProblem:
    """Model and loss on a batch, which the functions in ``derivatives.py`` differentiate.

    Gradients of layers may be wanted for the parameters of a ``space`` only.
    """

    def __init__(self, risk: Any, batch: Batch, space: ParameterSpace | None = None):
        self.risk, self.batch = risk, batch
        self.space, self.model, self.loss = space or risk.space, risk.model, risk.loss
        self.leaves, self.seen = risk.model.leaves, self.rules(Seen)
        #: The user's own functions in the graph of the last forward pass.
        self.functions = UserFunctions(risk.facts, self.seen)
        self._has_seen_loss = False

    def on(self, batch: Batch, space: ParameterSpace | None = None) -> "BatchProblem":
        """Return the problem on another batch, and for some parameters only if given."""
        return BatchProblem(self.risk, batch, space)

    @property
    def number(self) -> int:
        """The number of the batch among those of all ranks, which seeds what is random on it."""
        return self.risk.ranks.number(self.batch.index)

    @property
    def evident_samples(self) -> int | None:
        """The number of samples in the batch, ``None`` if its tensors do not show it."""
        return self.risk.data.samples.evident(self.batch.X, self.batch.index)

    def samples_of(self, output: Tensor) -> int:
        """Return the number of samples that an output belongs to, see ``Samples``."""
        return self.risk.data.samples.of_output(self.batch.X, self.batch.index, len(output))

    def output_alone(
        self,
        samples: slice,
        num_samples: int,
        of: Callable[[Tensor], Any] = Tensor.detach,
        leaves: dict[str, Tensor] | None = None,
    ) -> Any:
        """Return something of the output for some of the samples, alone, at some parameters.

        It is ``None`` if the model refuses a part of the batch.
        """
        self.learned()  # the first evaluation needs the targets
        alone = self.evaluation(leaves or self.constants(), "once").active()
        with preserved_rng(), alone as evaluation:  # raises inside of another evaluation
            try:
                X = select_samples(self.batch.X, samples, num_samples)
                part = self.on(Batch(self.batch.index, X, None))
                return of(part.output(evaluation))
            except Exception as error:  # a user's model may raise anything on a part of a batch
                if not is_refusal(error):
                    raise
                _LOGGER.info("A part of a batch could not be evaluated: %s", error)
                return None

    # --- facts about the model

    @property
    def is_first(self) -> bool:
        """Whether the model was not evaluated before, so that nothing is known of it."""
        return not self.risk.facts.is_evaluated

    @cached_property
    def _watch(self) -> Watch:
        """Watches the model's first evaluation."""
        return Watch(self.model.replaced)

    def learned(self) -> ModelFacts:
        """Return the facts about the model; evaluate it first if it was not evaluated before."""
        if self.is_first:
            with preserved_rng(), self.recording("once"):
                pass
        return self.risk.facts

    @property
    def loss_needs_graph(self) -> bool:
        """Whether the loss depends on parameters not only through the values of the output."""
        if self.loss is None or self.loss.is_function_of_values:
            return False
        return self.learned().loss_needs_graph

    def rules(self, make: Callable, *args: Hashable) -> Any:
        """Return ``make(*args)``, an object that learns the rules of layers, for all batches."""
        return self.risk.rules(self.batch).get(make, *args)

    @property
    def uncompared(self) -> list[str]:
        """The functions that must be compared; none with ``check_deterministic=False``."""
        return self.functions.uncompared if self.risk.checks else []

    def runs_users_code(self, nodes: Iterable[Any]) -> bool:
        """Return whether a backward pass must be compared that runs hooks, or own functions."""
        return self.risk.checks and bool(self.learned().hooks or custom_functions(nodes))

    # --- evaluations

    def at(self, values: dict[str, Tensor]) -> None:
        """Evaluate the model at other values of the parameters from now on."""
        self.leaves = partial(self.model.leaves, values)

    def constants(self) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, for a pass without derivatives."""
        leaves, facts = self.leaves(), self.learned()
        if facts.differentiates or facts.hooks:  # hooks need a graph
            return leaves
        return {name: leaf.detach() for name, leaf in leaves.items()}

    def evaluation(self, values: dict[str, Tensor], differentiation: str) -> Evaluation:
        """Return the evaluation in which the parameters have the given values."""
        also = () if self.loss is None else self.loss.modules
        return Evaluation(self.model, values, differentiation, also, self.risk.facts.hooks)

    def output(self, evaluation: Evaluation) -> Tensor:
        """Evaluate the model in an active evaluation; the first one is watched."""
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

    @contextmanager
    def recording(self, differentiation: str, is_summed: bool = True) -> Iterator[Recording]:
        """Evaluate the model; the context of its evaluation is active inside.

        Gradients of sharded parameters are added to sums of all processes if it ``is_summed``.
        """
        leaves = self.leaves()
        for name in self.model.shards.params:
            leaves[name].is_summed = is_summed
        self.functions, self._has_seen_loss = UserFunctions(self.risk.facts, self.seen), False
        with self.evaluation(leaves, differentiation).active() as evaluation:
            output = self.output(evaluation)
            self.learn_from(output, leaves)
            yield Recording(evaluation, leaves, output)
        is_built = self.risk.facts.train_flags is not None  # random numbers are refused before
        if self.risk.checks and is_built and self.functions.names:
            check_gradients(self, self.functions.operations)

    def learn_from(
        self,
        output: Tensor,
        leaves: dict[str, Tensor],
        must_depend: bool = True,
        nodes: list[Any] | None = None,
    ) -> None:
        """Learn from an output, and its nodes, inside of its evaluation; most from the first."""
        if is_first := self.is_first:
            self._watch.is_in_loss = True
        with self._watch if is_first else nullcontext():
            self.look_at_loss(output)
        nodes = graph_nodes(output) if nodes is None else nodes
        self.functions.note(nodes, output)
        if is_first:
            self.risk.facts.learn(self._watch, output, nodes)
            with self.formulas():
                self.check_target(output, with_values=True)
        elif self.loss_needs_graph:
            return
        if self.loss_needs_graph:
            nodes = graph_nodes(self.loss_sum(output)[0])
        check_graph(nodes, self.model, leaves, must_depend)

    def look_at_loss(self, output: Tensor) -> None:
        """Find out whether the loss needs the graph of this batch's output.

        A PINN's loss may need it on some batches only, a penalty while its weight is not zero.
        """
        if self._has_seen_loss:
            return
        self._has_seen_loss, is_needed = True, False
        if self.loss is not None and not self.loss.is_function_of_values:
            parameters = set(map(id, self.model.params.values()))
            is_needed = needs_graph(self.loss, output, self.batch.y, parameters, self.functions)
        self.risk.set_loss_needs_graph(is_needed)

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
            self.risk.data.samples.check_rows(self.batch.X, self.batch.y, len(output))
            facts, is_all = self.risk.facts, self.risk.is_all_data(self.batch)
            shows_sum = len(output) > 1 and not is_all
            is_late = facts.is_evaluated and not facts.adds_up and shows_sum
            if with_values or is_late:
                self.loss.check_values(output, self.batch.y, is_all)
                facts.adds_up = facts.adds_up or shows_sum
        except ValueError as error:
            raise ValueError(f"Batch {self.batch.index}: {error}") from error

    def weight(self, output: Tensor) -> Tensor:
        """Return the batch's weight: its share of the normalization, 1/c."""
        loss, risk = self.loss, self.risk
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
            self.functions.note(graph_nodes(value), value)
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
        if self.loss is None or self.loss_needs_graph:
            self.check_numbers(output)
        else:
            self.check_finite(self.loss.sum(output.detach(), self.batch.y).detach())
        return weight

    def check_numbers(self, output: Tensor) -> None:
        """Refuse an output with NaN; masked entries are infinite."""
        if bool(output.isnan().any()):
            index = self.batch.index
            raise ValueError(f"The model's output on batch {index} has NaN. {_BAD_NUMBERS}")

    def check_finite(self, loss: Tensor, gradient: Columns | None = None) -> None:
        """Refuse a loss or a gradient that is not finite, by the name of the parameter."""
        index = self.batch.index
        if not isfinite(value := float(loss)):
            raise ValueError(f"The loss on batch {index} is {value}. {_BAD_NUMBERS}")
        if gradient and (name := not_finite(gradient)) is not None:
            raise ValueError(
                f"The gradient on batch {index} is not finite in parameter '{name}', though the "
                f"loss is: {NO_DERIVATIVE}, or {OVERFLOW}."
            )
