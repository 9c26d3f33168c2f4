"""A directory of projected gradients of samples, for influence scores without the training data."""

import json
from collections.abc import Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.influence.projection import (
    Projection,
    Projections,
    preconditioned_projections,
    project,
    random_projections,
)
from curvlinops.influence.scores import check_gradients
from curvlinops.operators import scores as score_files
from curvlinops.operators.identity import Identity, check_model, check_same, computed_numbers
from curvlinops.operators.kfac.kfac import KroneckerFactoredLinearOperator
from curvlinops.operators.per_sample import PerSampleGradientLinearOperator
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.structured.block_diagonal import BlockDiagonalLinearOperator
from curvlinops.support.arguments import check_count, check_number
from curvlinops.support.digest import checksum
from curvlinops.support.serialization import (
    from_state,
    read_parts,
    recorded,
    source_of,
    to_state,
    write_part,
)
from curvlinops.support.torch_modes import in_default_modes

#: The format of files. It changes when older ones cannot be read any more.
_FORMAT = "gradients 2"
#: A file is written when gradients of this many bytes wait for it.
_BYTES = 2**28
#: The beginning of the name of the file that is read before others.
_FIRST = "-"
_REMEDY = " Choose another directory, or move the file away."


@recorded
class StoredProjections(NamedTuple):
    """The projections of all gradients in a directory.

    Attributes:
        identity: What they belong to, as JSON.
        projections: The projections.
        relative_damping: The damping, ``None`` if the projections have a basis's damped inverse.
    """

    identity: str
    projections: Projections
    relative_damping: float | None


@recorded
class StoredGradients(NamedTuple):
    """Projected gradients of some rows.

    Attributes:
        identity: What they belong to, as JSON, and the checksum of the projections.
        rows: Which of all rows they are, ``[n]``.
        gradients: The projected gradients, ``[n, R]``.
    """

    identity: str
    rows: Tensor
    gradients: Tensor


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
        self._stored = _projections_in(self._directory, None)
        if self._stored is None:
            raise ValueError(
                f"{directory} has no projections of gradients. Choose another directory, or write "
                "them there by GradientStore.write."
            )
        self.projections = self._stored.projections
        self._identity = json.loads(self._stored.identity)
        self.num_rows = self._identity["number of rows"]

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
        identity = rows._identity(options | _numbers_of(structure))
        stored = _projections_in(path, identity)
        if stored is None:
            if structure is None:
                found, later = random_projections(rows.domain, rank, seed), relative
            else:
                damping = relative * float(structure.trace()) / structure.shape[0]
                found, later = preconditioned_projections(structure, rank, damping, seed), None
            stored = StoredProjections(json.dumps(identity), found, later)
            write_part(to_state(stored, _FORMAT), path, _FIRST)
        store = cls(path)
        store._fill(rows)
        return store

    def _fill(self, rows: PerSampleGradientLinearOperator) -> None:
        """Write the projected gradients of the rows that have none yet."""
        identity, projections = self._identity_of_parts, self._projections_on(rows)
        done = torch.zeros(self.num_rows, dtype=torch.bool, device=rows.device)
        for part in self._parts():
            done[part.rows.to(done.device)] = True
        if bool(done.all()):
            return
        like, new, written = rows.domain.empty(0)[:0], list[tuple[Tensor, Tensor]](), monotonic()

        def write() -> None:
            if new:
                places, found = (torch.cat(x) for x in zip(*new, strict=True))
                part = StoredGradients(json.dumps(identity), places, found)
                write_part(to_state(part, _FORMAT), self._directory)
                new.clear()

        try:
            for chosen, found in _projected(rows, projections, like, done):
                new.append((chosen.cpu(), found.cpu()))
                is_large = sum(x.nbytes for _, x in new) >= _BYTES
                if is_large or monotonic() - written >= score_files.SECONDS:
                    write()
                    written = monotonic()
        finally:
            write()  # also after Ctrl-C

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
        check_model(f"directory {self._directory}", self._identity, queries)
        projections, like = self._projections_on(queries), queries.domain.empty(0)[:0]
        out = like.new_zeros(self.num_rows, queries.shape[0])
        vectors = like.new_zeros(queries.shape[0], sum(x.size for x in projections))
        for chosen, found in _projected(queries, projections, like):
            vectors[chosen] = found
        if self._stored.relative_damping is not None and self.num_rows:
            vectors = self._preconditioned(vectors, self._stored.relative_damping)
        for part in self._all_parts():
            out[part.rows.to(out.device)] = part.gradients.to(vectors) @ vectors.T
        return out

    def _preconditioned(self, vectors: Tensor, relative_damping: float) -> Tensor:
        """Multiply projected gradients of queries by the damped inverse of C."""
        sizes, moments = [x.size for x in self.projections], None
        for part in self._all_parts():
            pieces = part.gradients.to(vectors).split(sizes, dim=1)
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

    # --- files

    @property
    def _identity_of_parts(self) -> Identity:
        """Return what gradients in files belong to: the rows, and the projections."""
        sums = [0 if x is None else checksum(x) for p in self.projections for x in p.columns]
        return self._identity | {"the projections": sums}

    def _parts(self) -> Iterator[StoredGradients]:
        """Yield the gradients in all files, those of each row once."""
        identity = self._identity_of_parts
        done = torch.zeros(self.num_rows, dtype=torch.bool, device="cpu")
        for source, part in _read(self._directory):
            check_same(source, json.loads(part.identity), self._identity, _REMEDY)
            if isinstance(part, StoredGradients):
                check_same(source, json.loads(part.identity), identity, _REMEDY)
                new = ~done[part.rows]
                done[part.rows] = True
                if not new.all():
                    part = part._replace(rows=part.rows[new], gradients=part.gradients[new])
                yield part

    def _all_parts(self) -> Iterator[StoredGradients]:
        """Yield the gradients in all files.

        Raises:
            ValueError: At the end, if rows are missing.
        """
        found = 0
        for part in self._parts():
            found += len(part.rows)
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


def _read(directory: Path) -> Iterator[tuple[str, Any]]:
    """Yield what is in the files of a directory, and their names for messages."""
    for state in read_parts(directory):
        yield source_of(state), from_state(state, _FORMAT, tuple, torch.device("cpu"))


def _projections_in(directory: Path, identity: Identity | None) -> StoredProjections | None:
    """Return the projections in a directory, ``None`` if there are none.

    Raises:
        ValueError: If there is something of another identity before.
    """
    for source, part in _read(directory):
        if identity is not None:
            check_same(source, json.loads(part.identity), identity, _REMEDY)
        if isinstance(part, StoredProjections):
            return part
    return None


def _projected(
    rows: PerSampleGradientLinearOperator,
    projections: Projections,
    like: Tensor,
    done: Tensor | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield which rows those of each batch are, and their projections, see ``project``."""

    def of(problem: BatchProblem) -> Tensor:
        return project(rows._rows_of(problem), projections, like)

    return ((chosen, found) for _, chosen, found in rows._by_batch("projections", of, done))


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
    numbers = [float(structure.frobenius_norm()), float(structure.trace())]
    return {"basis": computed_numbers(numbers, structure.torch_dtype)}
