"""Influence scores whose order is certain."""

from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.intervals import bilinear_form
from curvlinops.algorithms.iteration import solves
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import check_count


class CertifiedScores(NamedTuple):
    """The leading scores, largest first, with intervals.

    Attributes:
        rows: The indices of the leading rows, ``[top]``.
        estimates: The scores with the approximate matrix, ``[top]``.
        lower: Lower bounds of the scores with the exact matrix, ``[top]``, float64.
        upper: Upper bounds, ``[top]``, float64.
        is_decided: Whether the order among these rows is certain: their intervals are disjoint.
            Otherwise there were too few products, or they were not accurate enough. Equal rows stay
            undecided.
        num_products: The number of products with each vector. There are two vectors for each row,
            which are multiplied at once.
    """

    rows: Tensor
    estimates: Tensor
    lower: Tensor
    upper: Tensor
    is_decided: bool
    num_products: int


@solves
def certified_scores(
    rows: AnyMatrix,
    query: Vectors,
    G: AnyMatrix,
    K: TorchLinearOperator,
    damping: float,
    top: int = 10,
    num_products: int = 50,
) -> CertifiedScores:
    """Rank influence scores, and enclose the leading ones until their order is decided.

    The scores are ``rows @ (G + damping I)^-1 @ query``. Scores with K in place of G choose the
    leading rows. The scores of these rows with G are enclosed by ``bilinear_form``, with K's
    inverse as preconditioner. Rows that do not lead with K are not considered: a larger ``top``
    misses fewer rows.

    Args:
        rows: Gradients of samples, ``[N, D]``: ``PerSampleGradientLinearOperator``, or a matrix.
        query: One vector, such as the gradient of a query. For the rows with the lowest scores,
            pass its negative.
        G: A positive semidefinite matrix, such as ``GGNLinearOperator``.
        K: An approximation of G with an inverse, such as ``EKFACLinearOperator``.
        damping: A positive number.
        top: The number of leading rows.
        num_products: See ``quadratic_form``.

    Returns:
        The leading rows, in the order of the middles of their intervals.

    Raises:
        ValueError: See ``bilinear_form``; or if ``query`` is not a single vector.
    """
    every, approximate = Matrix(rows), K.damped(damping).inverse()
    q, is_single, _ = every.read(query)
    if not is_single:
        raise ValueError("The query must be a single vector. Call the function for each.")
    top = min(check_count("top", top), every.shape[0])
    estimates = (every @ approximate._multiply_columns(q).T)[:, 0]
    leading = estimates.argsort(descending=True, stable=True)[:top]
    units = torch.zeros(top, every.shape[0], dtype=every.dtype, device=every.device)
    units[torch.arange(top, device=every.device), leading] = 1.0
    interval = bilinear_form(
        G,
        every.adjoint_matmul(units.T),
        q[0],
        damping,
        num_products,
        rtol=0.0,
        preconditioner=approximate,
        callback=lambda state: _is_decided(state.values),
    )
    bounds = torch.stack(interval[:2])
    order = bounds.sum(0).argsort(descending=True, stable=True)
    leading, (lower, upper) = leading[order], bounds[:, order]
    is_decided = _is_decided(bounds)
    return CertifiedScores(
        leading, estimates[leading], lower, upper, is_decided, interval.num_products
    )


def _is_decided(bounds: Tensor) -> bool:
    """Return whether no two of several intervals ``[2, top]`` overlap."""
    lower, upper = bounds[:, bounds.sum(0).argsort(descending=True)]
    return bool((lower[:-1] > upper[1:]).all())
