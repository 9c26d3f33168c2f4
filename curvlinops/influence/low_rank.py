"""Vectors of low rank, for inner products with gradients of samples."""

from collections.abc import Iterable, Sequence
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.gradients import LowRank
from curvlinops.linear_operator.space import Columns


class LowRankColumns:
    """K vectors of the parameters, whose matrices were replaced by matrices of low rank.

    ``PerSampleGradientLinearOperator.low_rank`` returns them, and ``scores`` takes them.

    Attributes:
        rank: The largest rank of a matrix.
        relative_error: The norm of what was left out, relative to that of the vector, ``[K]``.
        error_by_parameter: The same for each parameter alone, ``[K]``, by name.
        is_vector: Whether they represent one vector, without an axis for K.
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

    @classmethod
    def joined(cls, parts: Sequence["LowRankColumns"], order: Tensor) -> "LowRankColumns":
        """Return the vectors of all parts, of one rank, in the order of their indices."""
        new, first = cls.__new__(cls), parts[0]

        def cat(tensors: Iterable[Tensor]) -> Tensor:
            return torch.cat(list(tensors))[order]

        new.rank, new.is_vector, new.columns, new.error_by_parameter = first.rank, False, {}, {}
        for name, column in first.columns.items():
            every = [part.columns[name] for part in parts]
            new.columns[name] = (
                LowRank(cat(x.left for x in every), cat(x.right for x in every), column.shape)
                if isinstance(column, LowRank)
                else cat(every)
            )
            new.error_by_parameter[name] = cat(x.error_by_parameter[name] for x in parts)
        new.relative_error = cat(x.relative_error for x in parts)
        return new

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
