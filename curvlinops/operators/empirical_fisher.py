"""The empirical Fisher: the uncentered second moment of the gradients."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError
from curvlinops.layers.fallback import LossesOneByOne
from curvlinops.layers.gradients import Piece, write_rows
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.space import Columns, flat
from curvlinops.losses.base import DependentLossError, OutputMatrix, outer
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import Apply, gauss_newton
from curvlinops.risk.linearization import linearization_of
from curvlinops.support.arguments import check_choice
from curvlinops.support.norms import wide
from curvlinops.support.rng import preserved_rng


@dataclass(eq=False, repr=False, kw_only=True)
class EFLinearOperator(DataLinearOperator):
    """The empirical Fisher of the empirical risk.

    ``E = c * sum_t  g_t g_t^T``, of shape ``[D, D]``, with g_t the gradient of l_t (Kunstner et
    al., Limitations of the empirical Fisher approximation, NeurIPS 2019).

    Each term has its own outer product. Terms may be tokens or pixels: ``terms="sample"`` adds up
    those of a sample first. Use it for MSELoss and BCEWithLogitsLoss if outputs have more than two
    axes, because there terms depend on which axis is last.

    Args:
        terms: ``"term"``, or ``"sample"`` to add up the terms of a sample before the outer
            product. With one gradient per sample, gradients may be kept instead of a graph (see
            ``cache``), if that makes products faster or the model can be differentiated only once.

    Raises:
        ValueError: If ``terms`` is unknown, or samples interact in the model.
    """

    terms: str = "term"

    _per_sample = True

    def __post_init__(self) -> None:
        """Check the option, too."""
        check_choice("terms", self.terms, ("term", "sample"))
        super().__post_init__()

    def _linearize(self, problem: BatchProblem, single: bool) -> Apply:
        if problem.loss_needs_graph:
            return self._from_samples_alone(problem)
        if problem.facts.lacks_derivative or (not single and self._prefers_rows(problem)):
            return self._from_rows(problem)
        return self._from_graph(problem, single)

    def _prefers_rows(self, problem: BatchProblem) -> bool:
        """Return whether products with kept gradients are faster than with a kept graph."""
        size = problem.num_samples * self.space.dim * self.space.dtype.itemsize
        shared = linearization_of(self)
        if shared is None or not shared.has_room(size):
            return False
        if problem.facts.prefers_rows is None:
            with preserved_rng():  # the product draws as if there was no choice
                problem.learn(prefers_rows=self._compare_costs(problem))
        return problem.facts.prefers_rows

    def _compare_costs(self, problem: BatchProblem) -> bool:
        """Compare the operations of both for one sample.

        The gradients' D numbers are read twice, which takes about as long as eight operations with
        each of them in a matrix product. A graph takes four for each position of a weight.
        """
        gradients = self._capture(problem)
        if gradients.fallbacks or self._is_finer(problem, gradients.output):
            return False
        operations = 0
        for part in gradients.by_use(self._gradient(problem, gradients.output), last=True):
            gradient = part.gradient.of_value
            if isinstance(gradient, OuterProducts):  # others are as cheap as biases
                operations += 4 * gradient.num_positions * gradient.entries.view.size
        return operations > 16 * self.space.dim

    def _is_finer(self, problem: BatchProblem, output: Tensor) -> bool:
        """Return whether there is more than one gradient for each sample."""
        num_terms = problem.loss.to_terms(output.unsqueeze(0)).shape[1]
        return self.terms == "term" and num_terms != len(output)

    def _capture(self, problem: BatchProblem) -> SampleGradients:
        found = problem.rules(SampleBackward, type(self).__name__, False)
        return found.capture(problem)

    def _gradient(self, problem: BatchProblem, output: Tensor) -> Tensor:
        return problem.loss.gradient(output, problem.batch.y).unsqueeze(0)

    def _from_rows(self, problem: BatchProblem) -> Apply:
        """Prepare products with the samples' gradients."""
        gradients = self._capture(problem)
        if problem.loss_needs_graph:
            return self._from_samples_alone(problem)
        if self._is_finer(problem, gradients.output):
            return self._from_graph(problem, single=False)
        weight = problem.weight(gradients.output)
        pieces = gradients.backward(self._gradient(problem, gradients.output), last=True)
        return self._sum_of_outer_products(pieces, gradients.num_samples, weight)

    def _from_graph(self, problem: BatchProblem, single: bool) -> Apply:
        """Prepare products with the graph; without second derivatives, with the gradients."""

        def otherwise() -> Apply:
            if problem.loss_needs_graph:  # as it did not on earlier batches
                return self._from_samples_alone(problem)
            if problem.facts.lacks_derivative:  # and there are several terms for each sample
                raise
            problem.learn(lacks_derivative=True)
            return self._from_rows(problem)

        try:
            multiply = self._gauss_newton(problem, single)
        except (NoDerivativeError, DependentLossError):
            return otherwise()

        def apply(V: Columns, out: Columns) -> Tensor:
            nonlocal multiply
            try:
                return multiply(V, out)
            except (NoDerivativeError, DependentLossError):
                multiply = otherwise()
            return multiply(V, out)

        return apply

    def _gauss_newton(self, problem: BatchProblem, single: bool) -> Apply:
        def curvature(output: Tensor) -> tuple[OutputMatrix, Tensor]:
            weight = problem.weight(output)
            by = _outer_by_sample if self.terms == "sample" else problem.loss.outer
            return by(self._gradient(problem, output), output), weight

        return gauss_newton(problem, curvature, self.chunk_size, single)

    def _from_samples_alone(self, problem: BatchProblem) -> Apply:
        """Prepare products for a loss that is no function of the output; each sample is a term."""
        alone = problem.rules(LossesOneByOne, type(self).__name__)
        num_samples, pieces = alone.gradients(problem)
        weight = torch.tensor(num_samples, device=self.device)
        return self._sum_of_outer_products(pieces, num_samples, weight)

    def _sum_of_outer_products(
        self, pieces: Iterable[Piece], num_samples: int, weight: Tensor
    ) -> Apply:
        """Return products with the sum of the outer products of samples' gradients."""
        written = self.space.lazy_empty(num_samples)
        write_rows(pieces, written)
        rows = {name: flat(x) for name, x in written.items()}

        def apply(V: Columns, out: Columns) -> Tensor:
            inner = sum(flat(v) @ rows[name].T for name, v in V.items())
            for name, product in out.items():
                product += (inner @ rows[name]).reshape(product.shape)
            return weight

        return apply


def _outer_by_sample(gradient: Tensor, output: Tensor) -> OutputMatrix:
    """Return products with the outer product of all outputs' gradients of each sample."""

    def rows(columns: Tensor) -> Tensor:
        return wide(columns.flatten(2) if output.ndim > 1 else columns.unsqueeze(2))

    multiply = outer(rows(gradient))

    def product(v: Tensor) -> Tensor:
        return multiply(rows(v)).reshape(v.shape).to(output.dtype)

    return product
