"""Norms and inner products in float64, without copies of whole matrices in it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from curvlinops.core.norms import PART, double_norm

#: Outside of these, squares may be no float64 numbers.
_SMALLEST, _LARGEST = 1e-140, 1e140


def wide_norm(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    """Return Euclidean norms along axes, in float64, for numbers of any size.

    Args:
        x: Numbers.
        dim: The axes, which the norms do not have.
    """
    norm = double_norm(x, dim)
    # squares of float32 numbers are float64 numbers
    rescaled = x.dtype == torch.float64 and x.numel() > 0
    if rescaled and bool(((norm < _SMALLEST) | (norm > _LARGEST)).any()):
        peak = x.abs().amax(dim, keepdim=True)
        scaled = x / torch.where(peak > 0, peak, 1.0)
        norm = torch.linalg.vector_norm(scaled, dim=dim) * peak.reshape(norm.shape)
    return norm


def wide_inner(x: Tensor, y: Tensor) -> Tensor:
    """Return the sums of products of the entries of matrices, ``[...]``, in float64.

    Args:
        x: Matrices ``[..., n, m]``.
        y: Matrices ``[..., n, m]``; leading axes may be expanded.
    """
    step = max(PART * x.shape[-2] // max(x.numel(), 1), 1)
    parts = zip(x.split(step, dim=-2), y.split(step, dim=-2), strict=True)
    return torch.stack([(a.double() * b).sum((-2, -1)) for a, b in parts]).sum(0)


def wide_product(matrix: Tensor, x: Tensor) -> Tensor:
    """Return ``matrix @ x`` in float64, without a copy of the matrix in it.

    Args:
        matrix: ``[..., n, m]``.
        x: ``[..., m, k]``.
    """
    step = max(PART * matrix.shape[-2] // matrix.numel(), 1)
    return torch.cat([rows.double() @ x.double() for rows in matrix.split(step, dim=-2)], dim=-2)


def deviation(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the means a of the diagonals, and the norms of ``A - a I``, ``[...]`` in float64.

    Args:
        matrix: A, ``[..., n, n]``.
    """
    diagonal = matrix.diagonal(dim1=-2, dim2=-1).double()
    mean, dim = diagonal.mean(-1), matrix.shape[-1]
    norms = [wide_norm(diagonal - mean.unsqueeze(-1), -1)]
    step = max(PART * dim // max(matrix.numel(), 1), 1)
    for start in range(0, dim, step):
        rest = matrix[..., start : start + step, :].clone()
        rest.diagonal(start, -2, -1).zero_()
        norms.append(wide_norm(rest, (-2, -1)))
    return mean, wide_norm(torch.stack(norms), 0)


def norm_of_sum(terms: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the norms of sums of outer products of vectors, ``[G]``, also if they cancel.

    Each factor's vectors are written in an orthonormal basis of few vectors, where the sum is
    formed; the error is relative to the terms, and not to their squares.

    Args:
        terms: For each term, its vectors ``[G, n]``, as many in each term.
    """
    total: Tensor | None = None
    for vectors in zip(*terms, strict=True):
        stack = torch.stack([vector.double() for vector in vectors], dim=-1)
        small = torch.linalg.qr(stack, mode="r").R
        total = small if total is None else (total.unsqueeze(2) * small.unsqueeze(1)).flatten(1, 2)
    return torch.linalg.vector_norm(total.sum(-1), dim=-1)
