"""The empirical Fisher: the uncentered second moment of the gradients."""

from dataclasses import dataclass

from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.layers.gradients import PulledBackGradient
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.samples import SampleBackward
from curvlinops.linear_operator.space import Columns
from curvlinops.losses.base import outer
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.sample_rows import (
    add_transposed,
    by_sample,
    finite_by_rows,
    graph_or_rows,
    multiply,
    num_rows,
    rows_of,
)
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import gauss_newton
from curvlinops.support.arguments import check_choice
from curvlinops.support.norms import wide
from curvlinops.support.rng import preserved_rng


@dataclass(eq=False, repr=False, kw_only=True)
class EFLinearOperator(DataLinearOperator):
    """The empirical Fisher of the empirical risk.

    ``E = c * sum_t  g_t g_t^T``, of shape ``[D, D]``, with g_t the gradient of l_t (Kunstner et
    al., Limitations of the empirical Fisher approximation, NeurIPS 2019).

    Each term has its own outer product. Terms may be tokens or pixels: ``terms="sample"`` first
    adds up the gradients of a sample. Use it for MSELoss and BCEWithLogitsLoss if outputs have more
    than two axes, because there terms depend on which axis is last.

    Args:
        terms: ``"term"``, or ``"sample"`` to add up the terms of a sample before the outer
            product. With one gradient per sample, gradients may be kept instead of a graph (see
            ``cache``), if that makes products faster or the model can be differentiated only once.

    Raises:
        ValueError: If ``terms`` is unknown, or samples interact in the model.
    """

    terms: str = "term"

    _per_sample = True

    def _check_options(self) -> None:
        check_choice("terms", self.terms, ("term", "sample"))

    _apply = finite_by_rows(DataLinearOperator._apply)

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        def from_graph() -> Linear:
            if not single and self._prefers_rows(problem):
                return self._from_rows(problem)
            return self._from_graph(problem, single)

        return graph_or_rows(problem, from_graph, lambda: self._from_rows(problem))

    def _from_rows(self, problem: BatchProblem) -> Linear:
        """Prepare products with ``J^T J``, J the gradients of the samples."""
        if problem.space.in_parts:
            raise NotImplementedError(
                "The model, or its loss, can be differentiated only once, so that products need "
                "the gradients of all samples, which no process has of sharded parameters. Leave "
                "them out of params."
            )
        batch_rows = rows_of(problem, self.terms, type(self).__name__, independent=False)
        # gradients of all terms are too many to keep
        if batch_rows.num_rows != batch_rows.num_samples:
            return self._from_graph(problem, single=False)
        rows, weight = batch_rows.written(self.risk.space), batch_rows.weight

        def apply(V: Columns, out: Columns) -> Tensor:
            add_transposed(rows, multiply(rows, V), out)
            return weight

        return Linear(apply, tuple(rows.values()))

    def _from_graph(self, problem: BatchProblem, single: bool) -> Linear:
        def curvature(output: Tensor) -> tuple[Linear, Tensor]:
            weight, gradient = problem.weight(output), self._gradient(problem, output)
            if self.terms == "term":
                return problem.loss.outer(gradient, output), weight
            split = by_sample(problem, output)
            times, dtype = outer(wide(split(gradient))), output.dtype

            def product(v: Tensor) -> Tensor:
                return times(wide(split(v))).reshape(v.shape).to(dtype)

            return Linear(product, times.tensors), weight

        return gauss_newton(problem, curvature, self.chunk_size, single)

    def _gradient(self, problem: BatchProblem, output: Tensor) -> Tensor:
        return problem.loss.gradient(output, problem.batch.y).unsqueeze(0)

    # --- the choice between rows and graph

    def _prefers_rows(self, problem: BatchProblem) -> bool:
        """Return whether products with kept gradients are faster than with a kept graph."""
        shared, num_samples = self._shared, problem.evident_samples
        if shared is None or num_samples is None or problem.space.in_parts:
            return False
        if not shared.has_room(num_samples * self.risk.space.dim * self.risk.space.dtype.itemsize):
            return False
        known = problem.seen.prefers_rows
        if self.terms not in known:
            with preserved_rng():  # the product draws as if there was no choice
                known[self.terms] = self._compare_costs(problem)
        return known[self.terms]

    def _compare_costs(self, problem: BatchProblem) -> bool:
        """Compare the operations of both for one sample.

        Reading the D numbers of a gradient twice takes as long as 16 D operations of a graph.
        """
        samples = problem.rules(SampleBackward, type(self).__name__, False).capture(problem)
        output = samples.output
        if samples.fallbacks or num_rows(problem, output, self.terms) != samples.num_samples:
            return False
        operations = 0
        arrived = samples.arrive(self._gradient(problem, output), last=True)
        for use in samples.uses:
            gradient = arrived.take(use, by_position=True)
            if isinstance(gradient, PulledBackGradient):
                gradient = gradient.inner
            if isinstance(gradient, OuterProducts):  # others are as cheap as biases
                operations += 4 * gradient.num_positions * gradient.entries.view.size
        return operations > 16 * self.risk.space.dim
