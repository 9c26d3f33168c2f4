"""Inner products of the gradients of samples with vectors: batch by batch, and in files."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from curvlinops.influence.low_rank import LowRankColumns
from curvlinops.influence.row_files import RowFiles
from curvlinops.layers.gradients import LowRank
from curvlinops.linear_operator.vectors import check_finite, is_followed, read, read_tensors
from curvlinops.operators.sample_rows import products, products_by_position, shape_of
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.arguments import LISTS, MAPPINGS
from curvlinops.support.keys import Key, of_tensors

NOT_DIFFERENTIABLE = "are not differentiable with respect to the vectors: detach these."

#: Vectors by parameter, ``[K, *shape]``.
Vectors = Mapping[str, Tensor | LowRank]


class ScoredVectors(NamedTuple):
    """Vectors that a user passes: one of them without an axis for K, or vectors of low rank."""

    columns: Vectors
    is_single: bool
    has_low_rank: bool

    @property
    def is_followed(self) -> bool:
        """Whether autograd follows the vectors."""
        return not self.has_low_rank and any(map(is_followed, self.columns.values()))


def vectors_of(rows: Any, P: Any) -> ScoredVectors:
    """Read vectors of any kind."""
    if isinstance(P, LowRankColumns):
        if P.shapes != dict(rows.domain.shapes):
            raise ValueError("The vectors of low rank are of other parameters than the rows.")
        return ScoredVectors(P.columns, P.is_vector, True)
    if not isinstance(P, (LISTS, MAPPINGS)):
        given = read(P, rows.domain)
        return ScoredVectors(rows.domain.views(given.columns), given.is_single, False)
    tensors, shapes = read_tensors(P, rows.domain), rows.domain.local_shapes
    is_single = all(len(shapes[name]) == x.ndim for name, x in tensors.items())
    columns = {n: x.unsqueeze(0) if is_single else x.movedim(-1, 0) for n, x in tensors.items()}
    check_finite(columns, rows.domain)
    return ScoredVectors(columns, is_single, False)


def sharing(rows: Any, given: ScoredVectors) -> AbstractContextManager:
    """Return a context in which processes with sharded parameters share vectors."""
    return rows.risk.adding.sharing({} if given.has_low_rank else given.columns)


def scoring(
    rows: Any, given: ScoredVectors, per_position: bool = False
) -> Callable[[BatchProblem], Tensor]:
    """Return a function that computes the scores of all rows of a batch."""
    if per_position and rows.terms == "term":
        raise ValueError("per_position=True is for rows of samples: omit terms='term'.")
    shards, columns = rows.risk.model.shards, given.columns
    # those of sharded parameters are gathered one by one
    columns = columns if given.has_low_rank else shards.whole(columns)
    together = not (given.has_low_rank or shards.params)

    def of(problem: BatchProblem) -> Tensor:
        if per_position:
            scores = products_by_position(problem, columns, type(rows).__name__)
        else:
            scores = products(rows._rows_of(problem, together), columns)
        return scores[..., 0] if given.is_single else scores

    return of


def all_scores(rows: Any, P: Any, out: str | Path | None, per_position: bool) -> Tensor:
    """Return the scores of all rows, see ``PerSampleGradientLinearOperator.scores``."""
    if out is not None and Path(out).suffix == ".npy":
        raise ValueError(
            f"out={str(out)!r} should be a directory, to which scores are written in parts. To "
            "write one file of NumPy, call np.save(path, rows.scores(P))."
        )
    given = vectors_of(rows, P)
    num_columns, like = shape_of(given.columns)
    if not given.has_low_rank:
        rows._check_number(num_columns)
    of = scoring(rows, given, per_position)
    if given.is_followed:
        if per_position or out is not None:
            raise ValueError(f"Scores by position or in a file {NOT_DIFFERENTIABLE}")
        scores = rows._multiply(read(P, rows.domain).columns).T
        return scores[:, 0] if given.is_single else scores

    def found(done: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
        return _equally_long(rows._by_batch("scores", of, done))

    files = None
    if out is not None:
        options = {"per_position": per_position, "one vector": given.is_single}
        key = rows._key(options | _numbers_of(given.columns))
        files = RowFiles(Path(out), rows.shape[0], key)
    scores = like.new_zeros(0, *[0] * per_position, *[num_columns] * (not given.is_single))
    with sharing(rows, given):
        if files is not None:
            files.fill(found)
        for places, some in found() if files is None else _equally_long(files):
            if not len(scores):
                scores = like.new_zeros(rows.shape[0], *some.shape[1:])
            scores[places.to(like.device)] = some.to(like)
    return scores.cpu().numpy() if isinstance(P, np.ndarray) else scores


def _equally_long(found: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield scores of some rows; refuse sequences of other lengths than the first ones."""
    first = None
    for places, scores in found:
        first = scores if first is None else first
        if scores.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"There are batches with sequences of {first.shape[1]} and of {scores.shape[1]} "
                "positions. For per_position=True, pad all batches to the same length."
            )
        yield places, scores


def _numbers_of(columns: Vectors) -> Key:
    """Return numbers of vectors by the parameter; some vectors may have a low rank."""
    tensors = {}
    for name, x in columns.items():
        for part, tensor in enumerate((x.left, x.right) if isinstance(x, LowRank) else (x,)):
            tensors[f"the vectors for {name}" + ", second factor" * part] = tensor
    return of_tensors(tensors)
