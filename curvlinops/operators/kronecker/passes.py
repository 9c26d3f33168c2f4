"""Passes over data that add up what Kronecker-factored approximations are made of."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from curvlinops.core.data import Batch, Batches
from curvlinops.core.risk import BatchRisk
from curvlinops.core.space import ParameterSpace
from curvlinops.layers.gradients import SampleGradients
from curvlinops.layers.samples import SampleBackward
from curvlinops.operators.kronecker.estimate import Estimator
from curvlinops.operators.kronecker.options import Options
from curvlinops.operators.kronecker.plan import Block
from curvlinops.operators.kronecker.sums import ChangedError, Sums
from curvlinops.operators.kronecker.usage import Uses
from curvlinops.operators.kronecker.vectors import backpropagated

#: Calls a function on each batch of the operator's data, or of others.
Run = Callable[[Callable[[BatchRisk], None], Batches | None], None]


class Passes:
    """Runs the model, backpropagates, and adds up.

    Args:
        name: Names the operator in messages.
        space: The parameters.
        options: The options of the approximation.
        terms_per_sample: How many terms each sample has to have; ``None`` for any number.
        trusting: See ``SampleBackward``.
    """

    def __init__(
        self,
        name: str,
        space: ParameterSpace,
        options: Options,
        terms_per_sample: int | None,
        trusting: bool,
    ):
        self._name, self._options = name, options
        self._terms_per_sample, self._trusting = terms_per_sample, trusting
        self._estimator = Estimator(space, options)

    def plan(self, uses: Uses) -> list[Block]:
        """Choose the structure of all blocks."""
        return self._estimator.plan(uses)

    def sum_over_all(self, run: Run) -> Sums:
        """Return the sums over all data."""
        sums = Sums()
        while True:
            try:
                self.add(run, sums, None)
            except ChangedError as error:  # once more, with other structure
                sums = Sums()
                sums.adopt(error.uses, self.plan(error.uses))
                continue
            if sums.blocks is None:
                raise ValueError("The data has no sample.")
            return sums

    def add(self, run: Run, sums: Sums, batches: Batches | None) -> None:
        """Add batches, by default those of all data, to sums."""

        def use(bound: BatchRisk, samples: SampleGradients) -> None:
            vectors = self.vectors(bound, samples)
            self._estimator.add(sums, samples, vectors)
            sums.terms = sums.terms + bound.terms(samples.output)

        sums.num_batches = self.visit(run, use, batches, sums.num_batches)

    def visit(
        self,
        run: Run,
        use: Callable[[BatchRisk, SampleGradients], Any],
        batches: Batches | None = None,
        first: int = 0,
    ) -> int:
        """Call a function on each batch; number these from ``first``, and return the next."""
        number = first

        def step(bound: BatchRisk) -> None:
            nonlocal number
            own = bound.on(Batch(number, bound.batch.X, bound.batch.y))
            found = own.findings.get(SampleBackward, self._name, self._trusting, True, True)
            samples = found.capture(own)
            self._check_terms(own, samples)
            if samples.num_samples:
                use(own, samples)
            number += 1

        run(step, batches)
        return number

    def vectors(self, bound: BatchRisk, samples: SampleGradients) -> Iterator[Tensor]:
        """Yield what is backpropagated, ``[V, *output]``, as many at once as the memory allows."""
        for vectors in backpropagated(bound, samples.output, samples.num_samples, self._options):
            yield from vectors.split(samples.vectors_at_once)

    def _check_terms(self, bound: BatchRisk, samples: SampleGradients) -> None:
        expected = self._terms_per_sample
        if expected is None:
            return
        found = bound.loss.to_terms(samples.output.unsqueeze(0)).shape[1]
        if found != expected * samples.num_samples:
            raise ValueError(
                f"num_per_example_loss_terms is {expected}, but batch {bound.batch.index} has "
                f"{found} terms for {samples.num_samples} samples."
            )
