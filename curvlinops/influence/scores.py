"""Preconditioned gradients of queries, and scores of training samples with them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from curvlinops.influence.low_rank import LowRankColumns
from curvlinops.influence.per_sample import PerSampleGradientLinearOperator
from curvlinops.influence.scoring import ScoredVectors, scoring, sharing, vectors_of
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.operators.jacobian import JacobianLinearOperator
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.support.arguments import check_count, check_number
from curvlinops.support.torch_modes import in_default_modes


@in_default_modes
def preconditioned(
    queries: PerSampleGradientLinearOperator,
    K: TorchLinearOperator,
    relative_damping: float = 0.1,
    rank: int | None = None,
) -> dict[str, Tensor] | LowRankColumns:
    """Return the queries' gradients g times the damped inverse, ``(K + d I)^-1 g``.

    The damping d is ``relative_damping`` times the mean eigenvalue of K. Inner products with the
    gradients of training samples are influence scores: a positive one means that more weight on the
    sample lowers the loss of the query.

    Args:
        queries: The gradients of queries, on the same parameters as K.
        K: The curvature, such as ``EKFACLinearOperator``, or what ``load`` returns of a file.
        relative_damping: See above. Grosse et al., 2023, arXiv:2308.03296, take 0.1.
        rank: Keeps matrices of this rank, see ``PerSampleGradientLinearOperator.low_rank``. Then
            whole vectors are in memory for one batch of queries at a time. Each batch reads all of
            K once.

    Returns:
        A tensor ``[*shape, Q]`` for each parameter by name, for Q queries: also for operators that
        have the parameters in another order. With ``rank``, what ``low_rank`` returns.

    Raises:
        ValueError: If K has other parameters, or is singular without damping; if parameters are
            sharded.
    """
    inverse = _damped_inverse(queries, K, relative_damping)
    if rank is None or not queries.shape[0]:
        P = queries.domain.split(inverse @ queries.dense().T)
        return P if rank is None else queries.low_rank(P, rank)
    parts, order = [], []
    for places, gradients in _dense(queries):
        parts.append(queries.low_rank(inverse @ gradients.T, rank))
        order.append(places)
    return LowRankColumns.joined(parts, torch.cat(order).argsort())


@in_default_modes
def self_scores(
    rows: PerSampleGradientLinearOperator, K: TorchLinearOperator, relative_damping: float = 0.1
) -> Tensor:
    """Return the influence of each sample on its own loss, ``g_n^T (K + d I)^-1 g_n``, ``[N]``.

    The gradients of one batch are in memory at a time, as whole vectors. For the arguments see
    ``preconditioned``.
    """
    inverse, out = _damped_inverse(rows, K, relative_damping), rows.codomain.zeros(1)[0]
    for places, gradients in _dense(rows):
        out[places] = _forms(gradients.unsqueeze(1), inverse)[:, 0, 0].to(out)
    return out


@in_default_modes
def functional_variance(J: JacobianLinearOperator, covariance: TorchLinearOperator) -> Tensor:
    """Return the covariance of each sample's outputs, ``J_n covariance J_n^T``, ``[N, C, C]``.

    These are diagonal blocks of ``J @ covariance @ J.T``. For a batch of n samples, about
    ``3 n C D`` numbers are in memory at a time.

    Args:
        J: The Jacobian of the outputs.
        covariance: That of the parameters, such as ``K.damped(tau).inverse()``.

    Raises:
        ValueError: If the covariance is of other parameters, or batches differ in C.
        TypeError: If an argument is no such operator, or parameters are sharded.
    """
    if not (isinstance(J, JacobianLinearOperator) and isinstance(covariance, TorchLinearOperator)):
        names = type(J).__name__, type(covariance).__name__
        raise TypeError(f"J must be a JacobianLinearOperator, covariance an operator, got {names}.")
    J.domain.check_whole("functional variances")
    J.domain.check_compatible(covariance.domain)
    forms = [_forms(rows, covariance) for rows in J._by_sample("variances")]
    if len({x.shape[1:] for x in forms}) > 1:
        raise ValueError(f"Batches differ in outputs for a sample: {[x.shape[1] for x in forms]}.")
    return torch.cat(forms)


def _forms(rows: Tensor, matrix: TorchLinearOperator) -> Tensor:
    """Return the products of the rows of each sample, ``[n, C, D]``, with a matrix in between."""
    products = (matrix @ rows.flatten(0, 1).T).T.view_as(rows)
    return rows.to(products) @ products.mT


def score_batches(
    rows: PerSampleGradientLinearOperator, P: Any, per_position: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``rows.scores(P)`` batch by batch, so that N K numbers are never in memory.

    A batch is read and computed when it is asked for. Between batches, model and random number
    generators are as the caller leaves them: a model that draws random numbers draws other ones
    than in ``rows.scores``.

    Args:
        rows: The gradients of the training samples.
        P: K vectors that ``rows.scores`` takes, such as ``preconditioned`` returns.
        per_position: See ``rows.scores``. Each batch may have another T.

    Yields:
        The numbers of some rows, ``[n]``, and their scores, ``[n, K]`` or ``[n, T, K]``.

    Raises:
        ValueError: See ``rows.scores``; if P requires gradients, or parameters are sharded.
    """
    check_gradients(rows)
    given = _vectors_of(rows, P)
    return rows._by_batch("scores", scoring(rows, given, per_position), is_apart=True)


@in_default_modes
def top_scores(
    rows: PerSampleGradientLinearOperator, P: Any, k: int, largest: bool = True
) -> torch.return_types.topk:
    """Return ``rows.scores(P).topk(k, 0, largest)``: ``values`` and ``indices``, ``[k, K]``.

    Only these and the scores of one batch are in memory. Of equal scores, any may be returned. If
    parameters are sharded, each process has the leading ones of its own rows.

    Args:
        rows: The gradients of the training samples.
        P: K vectors, see ``score_batches``.
        k: The number of rows for each vector.
        largest: Whether to return the largest or the smallest ones.

    Raises:
        ValueError: If there are fewer than k rows; see ``score_batches``.
    """
    check_rows(rows)
    with rows.risk.peers.raise_once():
        given, best = _vectors_of(rows, P), None
        if check_count("k", k) > rows.shape[0]:
            raise ValueError(f"k is {k}, but there are {rows.shape[0]} rows.")
        with sharing(rows, given):
            for some, scores in rows._by_batch("leading scores", scoring(rows, given)):
                numbers = some.reshape(-1, *[1] * (scores.ndim - 1)).expand_as(scores)
                if best is not None:
                    scores, numbers = torch.cat([best[0], scores]), torch.cat([best[1], numbers])
                scores, order = scores.topk(min(k, len(scores)), 0, largest)
                best = scores, numbers.gather(0, order)
    return torch.return_types.topk(best)


def _vectors_of(rows: PerSampleGradientLinearOperator, P: Any) -> ScoredVectors:
    """Read vectors of any kind, which autograd must not follow."""
    given = vectors_of(rows, P)
    if given.is_followed:
        raise ValueError("Scores of batches are not differentiable: detach the vectors.")
    return given


def check_rows(rows: Any) -> None:
    """Refuse anything but gradients of samples."""
    if not isinstance(rows, PerSampleGradientLinearOperator):
        raise TypeError(
            "Gradients of samples must be a PerSampleGradientLinearOperator, got "
            f"{type(rows).__name__}."
        )


def check_gradients(rows: Any) -> None:
    """Refuse anything but gradients of samples with whole parameters."""
    check_rows(rows)
    if rows.risk.model.shards:
        raise ValueError(
            "Gradients of sharded parameters are not supported here. Gather the parameters, or "
            "call rows.scores(K.inverse(damping) @ gradient)."
        )


def _damped_inverse(rows: Any, K: Any, relative_damping: float) -> StructuredLinearOperator:
    """Return K's damped inverse, for gradients of samples."""
    check_gradients(rows)
    relative = check_number("relative_damping", relative_damping, at_least=0.0)
    if not getattr(K, "_has_structure", False):
        raise TypeError(
            "K must be a KFACLinearOperator, an EKFACLinearOperator, or another matrix with an "
            f"inverse, got {type(K).__name__}."
        )
    if list(K.domain.shapes.items()) != list(rows.domain.shapes.items()):
        raise ValueError("K has other parameters than the gradients.")
    return K.damped(relative * float(K.trace()) / K.shape[0]).inverse()


def _dense(rows: PerSampleGradientLinearOperator) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the numbers of the rows of each batch, and the rows as whole vectors ``[n, D]``."""

    def of(problem: BatchProblem) -> Tensor:
        return torch.cat(list(rows._rows_of(problem).written(rows.domain).values()), 1)

    return rows._by_batch("gradients", of)
