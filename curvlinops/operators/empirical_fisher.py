"""The empirical Fisher: the uncentered second moment of the gradients."""

from typing import Any

from torch import Tensor

from curvlinops.core.autodiff import Apply
from curvlinops.core.choice import Mode
from curvlinops.core.risk import BatchRisk
from curvlinops.losses.base import OutputMatrix, outer, wide
from curvlinops.operators.base import DataLinearOperator


class EFLinearOperator(DataLinearOperator):
    """The empirical Fisher of the empirical risk.

    ``E = c * sum_t  g_t g_t^T``, of shape ``[D, D]``, with g_t the gradient of l_t (Kunstner et
    al., Limitations of the empirical Fisher approximation, NeurIPS 2019).

    A term need not be a sample: each token or pixel has its own outer product, unless
    ``terms="sample"``. For MSELoss and BCEWithLogitsLoss with outputs of more than two axes, what
    a term is depends on which axis is last; there ``terms="sample"`` is recommended.

    Args:
        *args: Shared arguments, see ``DataLinearOperator``.
        terms: ``"term"``, or ``"sample"`` to add up the terms of a sample before the outer
            product.
        **kwargs: Shared arguments, see ``DataLinearOperator``.
    """

    _per_sample = True

    def __init__(self, *args: Any, terms: str = "term", **kwargs: Any):
        if terms not in ("term", "sample"):
            raise ValueError(f"terms must be 'term' or 'sample', got {terms!r}.")
        self.terms = terms
        super().__init__(*args, **kwargs)

    def _linearize(self, bound: BatchRisk, mode: Mode) -> Apply:
        def curvature(output: Tensor) -> tuple[OutputMatrix, Tensor]:
            terms = bound.terms(output)
            gradient = bound.loss.gradient(output, bound.batch.y).unsqueeze(0)
            by = _outer_by_sample if self.terms == "sample" else bound.loss.outer
            return by(gradient, output), terms

        return mode.gauss_newton(bound, curvature)


def _outer_by_sample(gradient: Tensor, output: Tensor) -> OutputMatrix:
    """Return products with the outer product of all outputs' gradients of each sample."""

    def rows(columns: Tensor) -> Tensor:
        return wide(columns.flatten(2) if output.ndim > 1 else columns.unsqueeze(2))

    multiply = outer(rows(gradient))

    def product(v: Tensor) -> Tensor:
        return multiply(rows(v)).reshape(v.shape).to(output.dtype)

    return product
