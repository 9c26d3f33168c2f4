"""Vectors of low rank, and files of scores, for inner products with gradients of samples."""

import json
from collections.abc import Sequence
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from curvlinops.layers.gradients import LowRank
from curvlinops.linear_operator.space import Columns
from curvlinops.operators.identity import Identity, check_same
from curvlinops.support.serialization import replacing

#: The format of a file of scores. It changes when older files cannot be continued any more.
_FORMAT = "scores 1"


class LowRankColumns:
    """K vectors of the parameters, whose matrices were replaced by matrices of low rank.

    The method ``low_rank`` of gradients of samples makes it, and ``scores`` takes it.

    Attributes:
        rank: The largest rank of a matrix.
        relative_error: The norm of what was left out, relative to that of the vector, ``[K]``.
        error_by_parameter: The same for each parameter alone, ``[K]``, by name.
        is_vector: Whether they stand for one vector, without an axis for K.
        num_bytes: The memory that the vectors take.
    """

    def __init__(self, columns: Columns, rank: int, is_vector: bool):
        self.rank, self.is_vector, self.columns = rank, is_vector, dict[str, Tensor | LowRank]()
        self.error_by_parameter: dict[str, Tensor] = {}
        lost, whole, scales = [], [], []
        for name, column in columns.items():
            scale = _scale(column)
            self.columns[name], error = _truncated(column, rank, scale)
            size = _norms(column, scale)
            lost.append(error)
            whole.append(size)
            scales.append(scale)
            self.error_by_parameter[name] = _ratio(error, size).to(column.dtype)
        relative = torch.stack(scales) / torch.stack(scales).amax(0)
        total, sizes = (
            torch.linalg.vector_norm(torch.stack(x) * relative, dim=0) for x in (lost, whole)
        )
        self.relative_error = _ratio(total, sizes).to(next(iter(columns.values())).dtype)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the parameters by name."""
        return {
            name: x.shape if isinstance(x, LowRank) else tuple(x.shape[1:])
            for name, x in self.columns.items()
        }

    @property
    def num_bytes(self) -> int:
        """The memory that the vectors take."""
        parts = (
            (x.left, x.right) if isinstance(x, LowRank) else (x,) for x in self.columns.values()
        )
        return sum(x.nbytes for part in parts for x in part)

    def __len__(self) -> int:
        return len(self.relative_error)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} vectors, rank={self.rank})"


def _ratio(error: Tensor, size: Tensor) -> Tensor:
    """Return the quotient; zero if both are zero."""
    return error / size.where(size > 0, 1.0)


def _scale(column: Tensor) -> Tensor:
    """Return the largest entry of each of K tensors in float64, 1 for zeros; squares may vanish."""
    entries = column.reshape(len(column), prod(column.shape[1:])).abs().double()
    largest = entries.amax(1) if entries.shape[1] else entries.sum(1)
    return largest.where(largest > 0, 1.0)


def _norms(column: Tensor, scale: Tensor) -> Tensor:
    """Return the norms of K tensors, each divided by its scale."""
    entries = column.reshape(len(column), prod(column.shape[1:])).double() / scale[:, None]
    return torch.linalg.vector_norm(entries, dim=1)


def _truncated(column: Tensor, rank: int, scale: Tensor) -> tuple[Tensor | LowRank, Tensor]:
    """Return tensors ``[K, *shape]`` with low rank, and the norms of what is left out, ``[K]``."""
    rows = column.shape[1] if column.ndim > 1 else 1
    matrices = column.reshape(len(column), rows, prod(column.shape[2:]))
    if min(matrices.shape[1:]) <= rank or not len(matrices):
        return column, torch.zeros_like(scale)
    is_wide = matrices.shape[1] < matrices.shape[2]
    tall = matrices.mT if is_wide else matrices
    # the leading right singular vectors are eigenvectors of the smaller Gram matrix, which has
    # digits for small ones in float64 only
    scaled = (M.double() / x for M, x in zip(tall, scale, strict=True))
    bases = [torch.linalg.eigh(M.T @ M).eigenvectors[:, -rank:] for M in scaled]
    vectors = torch.stack(bases).to(tall)
    left, right = tall @ vectors, vectors.mT
    if is_wide:
        left, right = right.mT, left.mT
    kept = LowRank(left.contiguous(), right.contiguous(), tuple(column.shape[1:]))
    return kept, _norms(matrices - left @ right, scale)


class ScoreFile:
    """Scores in a NumPy file, which are written batch by batch.

    What they are scores of, and how many batches are complete, is in a file beside it. That is
    replaced at once after each batch, so that a run that was killed can be continued.

    Args:
        path: The file; its name ends in ``.npy``.
        settings: What the scores depend on, as plain values.

    Attributes:
        num_batches: The number of complete batches.

    Raises:
        ValueError: If the file is of something else, or damaged.
    """

    def __init__(self, path: str | Path, settings: Identity):
        self.path, self._settings = Path(path), settings
        self._state, self.num_batches = self.path.with_name(f"{self.path.name}.json"), 0
        self._map: np.memmap | None = None
        if self.path.suffix != ".npy":
            raise ValueError(f"out must be the path of a .npy file, got {self.path}.")
        if self._state.is_file():
            self._continue()
        elif self.path.exists():
            raise ValueError(
                f"{self.path} exists, and was not written by scores(): there is no "
                f"{self._state.name}. Choose another path, or delete it."
            )

    def _continue(self) -> None:
        try:
            known = json.loads(self._state.read_text())
            is_known = known["format"] == _FORMAT
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{self._state} is damaged: {error!r}. Delete it.") from error
        if not is_known:
            raise ValueError(f"{self._state} is of another version. Delete it.")
        try:
            remedy = " Choose another path, or delete it."
            check_same(f"file {self.path}", known["settings"], self._settings, remedy)
        except ValueError as error:
            raise ValueError(f"{error}") from error
        self.num_batches = known["num_batches"]
        if self.num_batches:
            try:
                self._map = np.lib.format.open_memmap(self.path, "r+")
            except (OSError, ValueError) as error:
                raise ValueError(
                    f"{self.path} is missing or damaged: {error}. Delete {self._state.name}, too."
                ) from error

    def write(self, rows: np.ndarray, scores: Tensor, num_rows: int, batch: int) -> None:
        """Write the scores of a batch.

        Args:
            rows: The rows that they have in the file.
            scores: The scores, ``[n, *]``.
            num_rows: The number of rows of the file.
            batch: The number of the batch. Earlier ones that were not written have no rows.

        Raises:
            ValueError: If they have more positions than those of an earlier batch.
        """
        values = scores.detach().cpu().numpy()
        shape = (num_rows, *values.shape[1:])
        if self._map is None:
            self._save()  # before the file, which then is no foreign one
            self._map = np.lib.format.open_memmap(self.path, "w+", values.dtype, shape)
        check_positions(self._map.shape[1:], shape[1:], batch)
        self._map[rows] = values
        self._map.flush()
        self.num_batches = batch + 1
        self._save()

    def result(self) -> np.memmap:
        """Return all scores, which are read from the file when they are used."""
        return np.load(self.path, mmap_mode="r")

    def _save(self) -> None:
        state = {"format": _FORMAT, "settings": self._settings, "num_batches": self.num_batches}
        with replacing(self._state) as file:
            file.write_text(json.dumps(state, indent=1))


def check_positions(first: Sequence[int], shape: Sequence[int], batch: int) -> None:
    """Refuse scores by position of batches whose sequences have other lengths.

    Raises:
        ValueError: If they have.
    """
    if tuple(first) != tuple(shape):
        raise ValueError(
            f"Batch {batch} has sequences of {shape[0]} positions, earlier ones {first[0]}. For "
            "per_position=True, pad all batches to the same length."
        )
