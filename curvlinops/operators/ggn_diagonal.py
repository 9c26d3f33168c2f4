"""The diagonal of the generalized Gauss-Newton matrix."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import fsum

import torch
from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.layers.gradients import Piece
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.space import Columns, add, not_finite
from curvlinops.operators.sample_rows import add_sums
from curvlinops.operators.vectors import (
    check_sampling,
    head_of,
    hessian_roots,
    mark_last,
    sampled_gradients,
)
from curvlinops.operators.with_structure import StructuredDataLinearOperator, of_structure
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.diagonal import DiagonalLinearOperator
from curvlinops.support.rng import DEFAULT_SEED
from curvlinops.support.torch_modes import in_default_modes


@dataclass(eq=False, repr=False, kw_only=True)
class GGNDiagonalLinearOperator(StructuredDataLinearOperator):
    """The diagonal of the generalized Gauss-Newton matrix, as a matrix with structure.

    ``diag(G)`` of shape ``[D, D]``, for the G of ``GGNLinearOperator``. The exact diagonal
    (``mc_samples=0``) backpropagates C vectors if a sample has one term, else C vectors for each
    term (token, pixel) of a sample. They are columns of square roots of the loss Hessians. The
    sampled diagonal backpropagates ``mc_samples`` vectors. Its expectation is the exact diagonal;
    for BCELoss, the exact diagonal averaged over labels of the model. The losses are those of
    ``FisherMCLinearOperator``; the exact diagonal also takes HuberLoss and SmoothL1Loss.

    Products ``D @ v`` follow the model. Inverses, powers, multiples, ``damped(delta)``, and sums
    and products with operators that have structure (``D + prior``) are structured operators of the
    diagonal at the time of the call, and do not follow. Each call passes over the data; inside of
    ``linearized()``, all but ``trace`` share one pass. To compute several, keep ``D.structure``.

    Args:
        mc_samples: Number of samples per term; 0 for the exact diagonal.
        seed: Seeds the samples, together with the index of the batch.

    Raises:
        ValueError: If ``mc_samples`` or ``seed`` is negative, or samples interact in the model.
        NotImplementedError: If the loss has no closed-form square root, or is not known as a
            likelihood.
    """

    mc_samples: int = 0
    seed: int = DEFAULT_SEED

    _per_sample = True

    def _check_options(self) -> None:
        self.mc_samples, self.seed = check_sampling(
            self.risk.loss, self.mc_samples, self.seed, at_least=0
        )
        self.risk.space.check_whole(
            "the whole diagonal of a GGNDiagonalLinearOperator",
            "Estimate it by xdiag or hutchinson_diag of a GGNLinearOperator.",
        )

    def _capture(self, problem: BatchProblem) -> SampleGradients:
        backward = problem.rules(SampleBackward, type(self).__name__)
        return backward.capture(problem)

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        gradients, space = self._capture(problem), self.risk.space
        diagonal = space.views(space.zeros(1))
        add_sums(diagonal, self._pieces(problem, gradients), lambda g: g.sum_of_squares()[None])
        weight = gradients.weight

        def apply(V: Columns, out: Columns) -> Tensor:
            add(out, slice(None), {name: V[name] * diagonal[name] for name in out if name in V})
            return weight

        return Linear(apply, tuple(diagonal.values()))

    inverse = of_structure(StructuredLinearOperator.inverse)

    @property
    @in_default_modes
    def structure(self) -> DiagonalLinearOperator:
        """The diagonal at this moment, as an operator that does not follow the model."""
        ones = self.space.zeros(0).new_ones(1, 1).expand(1, self.space.local_dim)
        return DiagonalLinearOperator(self._apply(ones)[0], self.space)

    @in_default_modes
    def trace(self) -> Tensor:
        """Return the sum of the diagonal, a scalar, without forming the diagonal."""
        trace = weight = 0.0
        with self._together("trace"), self._batches("trace") as batches:
            for problem in batches:
                gradients = self._capture(problem)
                weight = weight + gradients.weight
                for _, pieces in self._pieces(problem, gradients):
                    trace = trace + sum(x.squared_norms().sum() for x in pieces.values())
        sums = self.risk.ranks.gather_objects((float(trace), float(weight)))
        trace, weight = (fsum(numbers) for numbers in zip(*sums, strict=True))
        trace = torch.tensor(trace, dtype=self.torch_dtype, device=self.device)
        trace *= self.risk.scale(weight)
        self._check_finite(not_finite({"": trace}))
        return trace

    def _pieces(self, problem: BatchProblem, gradients: SampleGradients) -> Iterator[Piece]:
        """Yield gradients whose squares are summed, of as many vectors as the memory allows."""
        output = gradients.output
        if len(output) == 0:  # a batch without samples
            return
        if self.mc_samples:
            vectors = sampled_gradients(problem, output, self.mc_samples, self.seed)
            vectors = (vectors / self.mc_samples**0.5).split(gradients.vectors_at_once)
        else:
            head = head_of(problem, gradients)
            vectors = hessian_roots(problem, gradients, head)
            if head is not None:
                yield slice(None), {name: head.gradient(name) for name in head.own}
                gradients = head.before
        for u, last in mark_last(vectors):
            yield from gradients.backward(u, last, together=True)
