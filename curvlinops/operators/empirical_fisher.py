"""The empirical Fisher: the uncentered second moment of the gradients."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Apply, evaluate
from curvlinops.autodiff.mode_selection import Mode, NoDerivativeError
from curvlinops.layers.fallback import LossesOneByOne
from curvlinops.layers.gradients import Piece, write_rows
from curvlinops.layers.outer import OuterProducts
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.space import Columns, flat
from curvlinops.losses.base import OutputMatrix, outer
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.empirical_risk import BatchProblem
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
        self._forget()

    def _reconsider(self) -> None:
        super()._reconsider()
        self._forget()

    def _forget(self) -> None:
        self._alone = LossesOneByOne(type(self).__name__)
        self._lacks_derivative = False  # which products by the graph need

    def _prepare(self, problem: BatchProblem, num_products: int) -> Apply:
        if problem.loss_needs_graph:
            return self._keep(problem, self._from_samples_alone, "alone")
        key = ("rows", problem.batch.index)
        size = problem.num_samples * self.space.dim * self.space.dtype.itemsize
        kept = self._cache.wants(key) and self._cache.has_room(key, size)
        if self._lacks_derivative or (kept and self._prefers_rows(problem)):
            return self._keep(problem, self._from_rows, "rows")
        try:
            return super()._prepare(problem, num_products)
        except NoDerivativeError:
            if self.autodiff != "auto" or self._is_finer(problem, evaluate(problem)):
                raise
        self._lacks_derivative = True
        return self._keep(problem, self._from_rows, "rows")

    def _prefers_rows(self, problem: BatchProblem) -> bool:
        """Return whether products with kept gradients are faster than with a kept graph."""
        known, key = self.risk.shared(problem), ("rows", type(self), self.terms)
        signature, prefers_rows = known.get(key, (None, False))
        if signature == problem.facts.signature:
            return prefers_rows
        with preserved_rng():  # the product draws as if there was no choice
            prefers_rows = self._compare_costs(problem)
        known[key] = problem.facts.signature, prefers_rows
        return prefers_rows

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
        found = problem.known(SampleBackward, type(self).__name__, False)
        return found.capture(problem)

    def _gradient(self, problem: BatchProblem, output: Tensor) -> Tensor:
        return problem.loss.gradient(output, problem.batch.y).unsqueeze(0)

    def _from_rows(self, problem: BatchProblem) -> Apply:
        """Prepare products with the samples' gradients."""
        gradients = self._capture(problem)
        if self._is_finer(problem, gradients.output):  # unlike on the first batch
            return self._linearize(problem, self._mode_for(problem, many=True))
        terms = problem.terms(gradients.output)
        pieces = gradients.backward(self._gradient(problem, gradients.output), last=True)
        return self._sum_of_outer_products(pieces, gradients.num_samples, terms)

    def _from_samples_alone(self, problem: BatchProblem) -> Apply:
        """Prepare products for a loss that is no function of the output; each sample is a term."""
        num_samples, pieces = self._alone.gradients(problem)
        terms = torch.tensor(num_samples, device=self.device)
        return self._sum_of_outer_products(pieces, num_samples, terms)

    def _sum_of_outer_products(
        self, pieces: Iterable[Piece], num_samples: int, terms: Tensor
    ) -> Apply:
        """Return products with the sum of the outer products of samples' gradients."""
        written = self.space.lazy_empty(num_samples)
        write_rows(pieces, written)
        rows = {name: flat(x) for name, x in written.items()}

        def apply(V: Columns, out: Columns) -> Tensor:
            inner = sum(flat(v) @ rows[name].T for name, v in V.items())
            for name, product in out.items():
                product += (inner @ rows[name]).reshape(product.shape)
            return terms

        return apply

    def _linearize(self, problem: BatchProblem, mode: Mode) -> Apply:
        def curvature(output: Tensor) -> tuple[OutputMatrix, Tensor]:
            terms = problem.terms(output)
            by = _outer_by_sample if self.terms == "sample" else problem.loss.outer
            return by(self._gradient(problem, output), output), terms

        return mode.gauss_newton(problem, curvature)


def _outer_by_sample(gradient: Tensor, output: Tensor) -> OutputMatrix:
    """Return products with the outer product of all outputs' gradients of each sample."""

    def rows(columns: Tensor) -> Tensor:
        return wide(columns.flatten(2) if output.ndim > 1 else columns.unsqueeze(2))

    multiply = outer(rows(gradient))

    def product(v: Tensor) -> Tensor:
        return multiply(rows(v)).reshape(v.shape).to(output.dtype)

    return product
