"""A directory of projected gradients of samples, for influence scores without the training data."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.influence.per_sample import PerSampleGradientLinearOperator
from curvlinops.influence.projection import (
    Projection,
    Projections,
    preconditioned_projections,
    project,
    random_projections,
)
from curvlinops.influence.row_files import RowFiles, Rows
from curvlinops.influence.scores import check_gradients
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.key import check_model
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.support.arguments import check_count, check_number
from curvlinops.support.digest import checksum
from curvlinops.support.files import Saved, read_parts, recorded, write_part
from curvlinops.support.keys import Key, numbers, tolerance_of
from curvlinops.support.torch_modes import in_default_modes

#: The beginning of the name of the file that is read before others.
_FIRST = "-"


@recorded
class StoredProjections(NamedTuple):
    """The projections of all gradients in a directory."""

    projections: Projections
    relative_damping: float | None  # None if the projections have a basis's damped inverse


class GradientStore:
    """Projected gradients of the N training samples, in a directory that ``write`` has filled.

    Scores need neither the training data nor the curvature: they are inner products of projections.

    Args:
        directory: The directory.

    Raises:
        ValueError: If it has no projections, or files of something else.

    Attributes:
        projections: The projections of all blocks.
        num_rows: N.
    """

    def __init__(self, directory: str | Path):
        self._directory = Path(directory)
        found = _projections_in(self._directory)
        if found is None:
            raise ValueError(
                f"{directory} has no projections of gradients. Choose another directory, or write "
                "them there by GradientStore.write."
            )
        (self.projections, self._damping), self._key, _ = found
        self.num_rows = self._key["number of rows"]
        self._files = RowFiles(self._directory, self.num_rows, self._key)

    @classmethod
    @in_default_modes
    def write(
        cls,
        rows: PerSampleGradientLinearOperator,
        directory: str | Path,
        rank: int = 32,
        basis: KroneckerFactoredLinearOperator | BlockDiagonalLinearOperator | None = None,
        relative_damping: float = 0.1,
        seed: int = 0,
    ) -> "GradientStore":
        """Project the gradients of samples, and write them to a directory.

        A layer's gradient, ``sum_s g_s x_s^T`` with inputs x and output gradients g, becomes
        ``sum_s (P_B^T g_s) (P_A^T x_s)^T``, with at most ``rank ** 2`` numbers, and is not formed.
        With a basis it is first multiplied by an approximate root of the damped inverse: a sum of
        eight Kronecker products. The mean of scores over the seeds is that of this sum.
        All parameters take part. Those of normalization layers, and biases that have a block of
        their own, keep at most ``rank ** 2`` numbers, too. It takes one pass over the data. If a
        run is killed, the same call continues it: what is there is not computed again.

        Args:
            rows: The gradients of the training samples.
            directory: The directory, which may not exist yet. What is there must be of the same
                options, model, loss and first batch, which are compared by numbers.
            rank: The number of columns of P_B and P_A. Smaller layers are kept whole.
            basis: KFAC or EKFAC, or what ``write_factors`` and ``load`` return, on the same
                parameters. Default: the mean of the projected gradients' outer products, for each
                parameter alone.
            relative_damping: The damping of scores, relative to the mean eigenvalue.
            seed: Seeds the random columns.

        Returns:
            The store.

        Raises:
            ValueError: If the directory has something else or damaged files; if parameters of
                ``basis`` are others, or a block of it has no eigenvectors that are a Kronecker
                product; if parameters are sharded.
            OSError: If files cannot be written.
        """
        check_gradients(rows)
        rank, seed = check_count("rank", rank), check_count("seed", seed, at_least=0)
        relative = check_number("relative_damping", relative_damping, at_least=0.0)
        structure, path = _structure(rows, basis), Path(directory)
        options = {"rank": rank, "relative_damping": relative, "seed": seed}
        key = rows._key(options | _numbers_of(structure))
        if _projections_in(path, key) is None:
            if structure is None:
                found, later = random_projections(rows.domain, rank, seed), relative
            else:
                damping = relative * float(structure.trace()) / structure.shape[0]
                found, later = preconditioned_projections(structure, rank, damping, seed), None
            sums = [0 if x is None else checksum(x) for p in found for x in p.columns]
            key |= {"the projections": sums}
            write_part(path, StoredProjections(found, later), key, _FIRST)
        store = cls(path)
        projections, like = store._projections_on(rows), rows.domain.empty(0)[:0]
        store._files.fill(lambda done: _projected(rows, projections, like, done))
        return store

    # --- queries

    @in_default_modes
    def scores(self, queries: PerSampleGradientLinearOperator) -> Tensor:
        """Return the influence scores of all samples, ``[N, K]``.

        They are inner products of the projections of samples and queries. Without a basis, there is
        ``(C + d I)^-1`` between these, with the mean C of the projected gradients' outer products,
        for each parameter alone; this takes a second pass over the directory.

        Args:
            queries: The gradients of K queries, on the same model and parameters. Their loss may be
                another one.

        Raises:
            ValueError: If the queries have another model or other parameters; if C is singular
                without damping; if gradients are missing.
        """
        check_model(f"directory {self._directory}", self._key, queries)
        projections, like = self._projections_on(queries), queries.domain.empty(0)[:0]
        out = like.new_zeros(self.num_rows, queries.shape[0])
        vectors = like.new_zeros(queries.shape[0], sum(x.size for x in projections))
        for chosen, found in _projected(queries, projections, like):
            vectors[chosen] = found
        if self._damping is not None and self.num_rows:
            vectors = self._preconditioned(vectors, self._damping)
        for places, gradients in self._gradients():
            out[places.to(out.device)] = gradients.to(vectors) @ vectors.T
        return out

    def _preconditioned(self, vectors: Tensor, relative_damping: float) -> Tensor:
        """Multiply projected gradients of queries by the damped inverse of C."""
        sizes, moments = [x.size for x in self.projections], None
        for _, gradients in self._gradients():
            pieces = gradients.to(vectors).split(sizes, dim=1)
            squares = [x.T @ x / self.num_rows for x in pieces]
            moments = squares if moments is None else [*map(torch.add, moments, squares)]
        damping = relative_damping * sum(float(C.trace()) for C in moments) / sum(sizes)
        out = []
        for C, some in zip(moments, vectors.split(sizes, dim=1), strict=True):
            C = C.double()
            C.diagonal().add_(damping)
            root, failed = torch.linalg.cholesky_ex(C)
            if bool(failed):
                raise ValueError(
                    "The mean of the projected gradients' outer products is singular: write "
                    "another store with a larger relative_damping, such as 0.1."
                )
            out.append(torch.cholesky_solve(some.double().T, root).T.to(vectors))
        return torch.cat(out, dim=1)

    def _gradients(self) -> Iterator[Rows]:
        """Yield the gradients in all files, which must be those of all rows."""
        found = 0
        for part in self._files:
            found += len(part.places)
            yield part
        if found < self.num_rows:
            raise ValueError(
                f"{self._directory} has the gradients of {found} of {self.num_rows} samples. "
                "Continue with the call of GradientStore.write that has begun it."
            )

    def _projections_on(self, rows: PerSampleGradientLinearOperator) -> Projections:
        """Return the projections on the device of an operator, in its dtype."""
        like = rows.domain.empty(0)
        return tuple(
            Projection(p.views, p.shape, *(None if x is None else x.to(like) for x in p.columns))
            for p in self.projections
        )


def _projections_in(directory: Path, key: Key | None = None) -> Saved | None:
    """Return the projections in a directory, ``None`` if there are none."""
    classes = StoredProjections, Rows
    parts = read_parts(directory, classes, torch.device("cpu"), key)
    return next((part for part in parts if isinstance(part.value, StoredProjections)), None)


def _projected(
    rows: PerSampleGradientLinearOperator,
    projections: Projections,
    like: Tensor,
    done: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield which rows those of each batch are, and their projections, see ``project``."""

    def of(problem: BatchProblem) -> Tensor:
        return project(rows._rows_of(problem), projections, like)

    return rows._by_batch("projections", of, done)


def _structure(rows: PerSampleGradientLinearOperator, basis: Any) -> Any:
    """Return the block-diagonal matrix of a basis, ``None`` for a random one."""
    if basis is None:
        return None
    structure = getattr(basis, "structure", basis)
    if not isinstance(structure, BlockDiagonalLinearOperator) or structure.ranks.size > 1:
        raise ValueError(
            "basis must be a KFACLinearOperator or an EKFACLinearOperator with all factors in this "
            f"process, or what load returns of their directory, got {type(basis).__name__}."
        )
    if dict(structure.domain.shapes) != dict(rows.domain.shapes):
        raise ValueError("basis has other parameters than the rows.")
    return structure


def _numbers_of(structure: BlockDiagonalLinearOperator | None) -> dict[str, Any]:
    """Return what tells bases apart; eigenvectors have signs that are not always the same."""
    if structure is None:
        return {"basis": "none"}
    of_basis = [float(structure.frobenius_norm()), float(structure.trace())]
    return {"basis": numbers(of_basis, tolerance_of(structure.torch_dtype))}
