"""Influence scores whose order is certain.

With x near ``(G + d I)^-1 q``, the score of a row g is ``g^T x``, up to an error that is at most
``|g|`` times a number that x alone decides. So one pass over the rows bounds the scores of all.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.intervals import Directions, check_damping
from curvlinops.algorithms.iteration import solves
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import check_count


class CertifiedScores(NamedTuple):
    """The leading scores of one query, largest first, with intervals; or of Q queries.

    Attributes:
        rows: The indices of the leading rows, ``[top]`` or ``[top, Q]``.
        estimates: Their scores with the approximate matrix, of the same shape.
        lower: Lower bounds of their scores with the exact matrix, float64.
        upper: Upper bounds, float64.
        is_decided: Whether these are the leading ones of all rows, in this order: each interval is
            above those of all rows that follow. A tensor ``[Q]`` for Q queries. Otherwise there
            were too few products, or they were not accurate enough. Equal rows stay undecided.
        num_products: The number of products with each query. All are multiplied at once.
    """

    rows: Tensor
    estimates: Tensor
    lower: Tensor
    upper: Tensor
    is_decided: bool | Tensor
    num_products: int


@solves
def certified_scores(
    rows: AnyMatrix,
    query: Vectors,
    G: AnyMatrix,
    K: TorchLinearOperator,
    damping: float,
    top: int = 10,
    num_products: int = 100,
) -> CertifiedScores:
    """Rank influence scores, with products until the order of the leading ones is certain.

    The scores are ``rows @ (G + damping I)^-1 @ query``. Conjugate gradients with K's inverse as
    preconditioner approach the solution, and its error bounds the errors of the scores of all rows.
    Rounding is accounted for as in ``quadratic_form``. A pass over the rows computes the scores,
    after the error has fallen to what the order needs, or to a quarter of that in the pass before.

    Args:
        rows: Gradients of samples, ``[N, D]``: ``PerSampleGradientLinearOperator``, or a matrix.
        query: One or several vectors, such as the gradients of queries. For the rows with the
            lowest scores, pass their negatives.
        G: A positive semidefinite matrix, such as ``GGNLinearOperator``.
        K: An approximation of G with an inverse, such as ``EKFACLinearOperator``.
        damping: A positive number.
        top: The number of leading rows.
        num_products: See ``quadratic_form``.

    Returns:
        The leading rows, in the order of the middles of their intervals.

    Raises:
        ValueError: See ``quadratic_form``.
    """
    every, matrix = Matrix(rows), Matrix(G, square=True)
    every.space.check_compatible(matrix.space)
    damping, top = check_damping(damping), min(check_count("top", top), every.shape[0])
    num_products = min(check_count("num_products", num_products, 2), matrix.shape[0])
    inverse, (q, is_single, _) = K.damped(damping).inverse(), every.read(query)
    estimates = every @ inverse._multiply_columns(q).T
    norms = rows.norms() if hasattr(rows, "norms") else every.operator.to_dense().norm(dim=1)
    norms = norms.double()
    directions = Directions(matrix, q, matrix.space.norms(q), damping)
    # of queries of norm one, in all, and the widths of the intervals of rows of norm one
    scores, widths = torch.zeros_like(estimates, dtype=torch.float64), norms.new_zeros(len(q))
    s = directions.s
    s.goal = torch.full_like(s.unit, torch.inf)
    while len(s.index):
        directions.extend(inverse)
        if directions.m == 1 < num_products:
            continue  # the first product may not show the norm of the matrix
        width, rounding = directions.errors()
        is_last, is_stuck = directions.m == num_products, width <= 2 * rounding
        if not is_last and bool((width > s.goal).logical_and(~is_stuck).all()):
            continue
        index = s.index.to(norms.device)
        scores[:, index] = (every @ directions.solutions().T).double()
        widths[index] = width.to(norms)
        enough = _enough(scores[:, index], norms, top).cpu()
        s.goal = enough.clamp(width / 4, width / 2)
        s.keep((width >= enough) & ~is_stuck & (not is_last))
    is_decided, scores = widths < _enough(scores, norms, top), scores * directions.sizes
    leading = scores.argsort(dim=0, descending=True, stable=True)[:top]
    middles, halves = scores.gather(0, leading), norms[leading] * widths * directions.sizes
    found = [leading, estimates.gather(0, leading), middles - halves, middles + halves]
    if is_single:
        found, is_decided = [x[:, 0] for x in found], bool(is_decided)
    return CertifiedScores(*found, is_decided, directions.m)


def _enough(scores: Tensor, norms: Tensor, top: int) -> Tensor:
    """Return the widths below which the order of the leading rows is certain, ``[Q]``.

    The intervals of all rows have the middles ``scores``, ``[N, Q]``.
    """
    order = scores.argsort(dim=0, descending=True, stable=True)
    scores, norms = scores.gather(0, order), norms[order]
    before = (torch.arange(len(scores), device=order.device) - 1).clamp(max=top - 1)[1:]
    gaps = (scores[before] - scores[1:]) / (norms[before] + norms[1:])
    return torch.cat([gaps.nan_to_num(nan=0.0), torch.full_like(scores[:1], torch.inf)]).amin(0)
