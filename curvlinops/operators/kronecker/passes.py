"""Passes over data that add up what Kronecker-factored approximations are made of."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

from torch import Tensor

from curvlinops.layers.gradients import SampleGradients
from curvlinops.layers.samples import SampleBackward
from curvlinops.operators.kronecker.estimate import Estimator
from curvlinops.operators.kronecker.options import FisherType, Options
from curvlinops.operators.kronecker.plan import Block
from curvlinops.operators.kronecker.sums import NO_USES, ChangedError, Sums
from curvlinops.operators.kronecker.usage import Uses
from curvlinops.operators.vectors import hessian_roots, signed_hessian_roots, would_be_gradients
from curvlinops.risk.data import Batch, Batches
from curvlinops.risk.empirical_risk import BatchProblem, EmpiricalRisk

#: Passes over the operator's data, or over other data: see ``EmpiricalRisk.batches``.
Pass = Callable[[str, Batches | None], AbstractContextManager[Iterable[BatchProblem]]]


class Passes:
    """Runs the model, backpropagates, and adds up.

    Args:
        name: Names the operator in messages.
        risk: Model, loss and data.
        options: The options of the approximation.
        terms_per_sample: How many terms each sample has to have; ``None`` for any number.
    """

    def __init__(
        self,
        name: str,
        risk: EmpiricalRisk,
        options: Options,
        terms_per_sample: int | None,
    ):
        self._name, self._risk, self._options = name, risk, options
        self._terms_per_sample = terms_per_sample
        self._estimator = Estimator(risk.space, options)

    def plan(self, uses: Uses) -> list[Block]:
        """Choose the structure of all blocks."""
        return self._estimator.plan(uses)

    def sum_over_all(self, batches_of: Pass) -> Sums:
        """Return the sums over all data."""
        with self.synchronized("factors"):
            sums = self._sum_over_own(batches_of, Sums())
        sums = self._joined(sums, lambda start: self._sum_over_own(batches_of, start))
        if sums.uses == NO_USES:
            raise ValueError("The data has no sample.")
        return sums

    def sum_over_more(self, batches_of: Pass, sums: Sums, batches: Batches) -> Sums:
        """Return the sums over other batches than those of given sums."""
        more = Sums(sums.uses, sums.blocks, num_batches=sums.num_batches)
        with self.synchronized("update"):
            self._add(batches_of, more, batches)
        more = self._joined(more)
        more.num_batches -= sums.num_batches
        return more

    def synchronized(self, task: str) -> AbstractContextManager[Any]:
        """Return a context in which all ranks pass over their data, see ``Ranks``."""
        # ranks never draw the same numbers, whatever the seed
        options = vars(self._options) | {"reduced": sorted(self._options.reduced), "seed": None}
        return self._risk.ranks.synchronized(self._risk, task, options=options)

    def _joined(self, sums: Sums, again: Callable[[Sums], Sums] | None = None) -> Sums:
        """Return the sums over the data of all ranks.

        Args:
            sums: Those over this one's data.
            again: Computes these with the structure of other sums, if that may be necessary.
        """
        ranks = self._risk.ranks
        if ranks.size == 1:
            return sums
        uses = reduce(Uses.union, ranks.gather_objects(sums.uses))
        with ranks.raise_on_all_ranks():
            blocks = self.plan(uses)
            try:
                sums.adopt(uses, blocks)
            except ChangedError:
                if again is None:
                    raise
                sums = again(Sums(uses, blocks))
        return sums.over(ranks, self._risk.space.device)

    def _sum_over_own(self, batches_of: Pass, sums: Sums) -> Sums:
        """Add all data of this rank to sums."""
        while True:
            try:
                self._add(batches_of, sums, None)
            except ChangedError as error:  # once more, with other structure
                sums = Sums()
                sums.adopt(error.uses, self.plan(error.uses))
            else:
                return sums

    def _add(self, batches_of: Pass, sums: Sums, batches: Batches | None) -> None:
        """Add batches, by default those of all data, to sums."""

        def use(problem: BatchProblem, samples: SampleGradients) -> None:
            vectors = self.vectors(problem, samples)
            self._estimator.add(sums, samples, vectors)
            sums.terms = sums.terms + problem.terms(samples.output)

        def by_sample() -> bool:
            # factors that sum over all rows need no samples; exact blocks do
            return bool(self._options.reduced or sums.matrices or sums.blocks is None)

        sums.num_batches = self.visit(
            batches_of, "factors", use, batches, sums.num_batches, by_sample
        )

    def visit(
        self,
        batches_of: Pass,
        description: str,
        use: Callable[[BatchProblem, SampleGradients], Any],
        data: Batches | None = None,
        first: int = 0,
        by_sample: Callable[[], bool] = lambda: True,
    ) -> int:
        """Call a function on each batch; number these from ``first``, and return the next."""
        number = first
        with batches_of(description, data) as batches:
            for number, problem in enumerate(batches, first + 1):
                own = problem.on(Batch(number - 1, problem.batch.X, problem.batch.y))
                found = own.known(SampleBackward, self._name, True, True)
                samples = found.capture(own, by_sample())
                self._check_terms(own, samples)
                if samples.num_samples:
                    use(own, samples)
        return number

    def vectors(self, problem: BatchProblem, samples: SampleGradients) -> Iterator[Tensor]:
        """Yield what is backpropagated, ``[V, *output]``, as many at once as the memory allows."""
        for vectors in _backpropagated(problem, samples.output, samples.num_samples, self._options):
            yield from vectors.split(samples.vectors_at_once)

    def _check_terms(self, problem: BatchProblem, samples: SampleGradients) -> None:
        expected = self._terms_per_sample
        if expected is None:
            return
        found = problem.loss.to_terms(samples.output.unsqueeze(0)).shape[1]
        if found != expected * samples.num_samples:
            raise ValueError(
                f"num_per_example_loss_terms is {expected}, but batch {problem.batch.index} has "
                f"{found} terms for {samples.num_samples} samples."
            )


def _backpropagated(
    problem: BatchProblem, output: Tensor, num_samples: int, options: Options
) -> Iterable[Tensor]:
    """Yield vectors ``[V, *output]`` whose outer products are, or replace, the loss's Hessian.

    Args:
        problem: The risk on a batch.
        output: The model's output.
        num_samples: How many samples it has, with as many neighboring rows each.
        options: The options of the approximation.
    """
    if options.fisher_type is FisherType.FORWARD_ONLY:
        return [output.new_zeros(0, *output.shape)]
    if options.fisher_type is FisherType.EMPIRICAL:
        return [problem.loss.gradient(output, problem.batch.y).unsqueeze(0)]
    if options.fisher_type is FisherType.MC:
        draws = would_be_gradients(problem, output, options.mc_samples, options.seed)
        return [draws / options.mc_samples**0.5]
    if options.exact:
        return hessian_roots(problem, output, num_samples)
    return signed_hessian_roots(problem, output, options.mc_samples, options.seed, num_samples)
