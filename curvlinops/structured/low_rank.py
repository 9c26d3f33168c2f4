"""Symmetric matrices that are a multiple of the identity, but for a low rank.

Such is a factor of a layer that is wider than the batch, with and without damping. A few products
with tall matrices find its eigenvalues, several times as fast as a full decomposition. They also
give its inverse, which is accurate where the shift is not too small: the matrix's own rounding
errors, which are of full rank, count relative to it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

#: Smaller matrices are decomposed as fast.
_SMALLEST = 512
#: One row and column in so many are decomposed to estimate the rank.
_SPARSITY = 4
#: How many columns more than the rank are multiplied.
_EXCESS = 16
#: What a decomposition may be off, relative to the largest eigenvalue and in units of ``sqrt(n)``
#: times the rounding error.
_TOLERANCE = 4.0


class LowRank(NamedTuple):
    """A matrix ``Q diag(values) Q^T + shift (I - Q Q^T)``, in float64.

    Attributes:
        values: Eigenvalues, ``[r]``.
        vectors: Q, with orthonormal columns, ``[n, r]``.
        shift: All other eigenvalues.
    """

    values: Tensor
    vectors: Tensor
    shift: float

    def eigh(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return eigenvalues in ascending order, ``[n]``, and eigenvectors, ``[n, n]``."""
        size, rank = self.vectors.shape
        below, others = int((self.values < self.shift).sum()), size - rank
        values = torch.full((size,), self.shift, dtype=dtype, device=self.values.device)
        vectors = values.new_empty(size, size)
        for out, some in ((values, self.values), (vectors, self.vectors)):
            out[..., :below] = some[..., :below]
            out[..., below + others :] = some[..., below:]
        vectors[:, below : below + others] = self._complement(dtype)
        return values, vectors

    def _complement(self, dtype: torch.dtype) -> Tensor:
        """Return an orthonormal basis of what is orthogonal to the columns of Q, ``[n, n - r]``.

        It consists of the last columns of a reflection that maps Q to a matrix whose other rows are
        zero (Schreiber and Parlett, Block reflectors: theory and computation, SIAM Journal on
        Numerical Analysis 25, 1988).
        """
        rank = len(self.values)
        left, _, right = torch.linalg.svd(self.vectors[:rank])
        normal = self.vectors.clone()
        normal[:rank] += left @ right
        weights = torch.linalg.solve(normal.T @ normal, normal[rank:].T).mul_(-2)
        out = normal.to(dtype) @ weights.to(dtype)
        out.diagonal(-rank).add_(1)
        return out

    def inverse(self, dtype: torch.dtype) -> Tensor:
        """Return the inverse, ``[n, n]``."""
        scaled = self.vectors * (1 / self.values - 1 / self.shift)
        out = scaled.to(dtype) @ self.vectors.T.to(dtype)
        out.diagonal().add_(1 / self.shift)
        return out

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply ``[n, k]``, in float64."""
        scales = (self.values - self.shift).unsqueeze(-1)
        return self.vectors @ (scales * (self.vectors.T @ x)) + self.shift * x


def low_rank(matrix: Tensor) -> LowRank | None:
    """Return the decomposition of a symmetric matrix, ``[n, n]``, ``None`` if it has none."""
    if len(matrix) < _SMALLEST:
        return None
    try:
        return _low_rank(matrix)
    except torch.linalg.LinAlgError:  # such as for NaN
        return None


def _low_rank(matrix: Tensor) -> LowRank | None:
    size, eps = len(matrix), torch.finfo(matrix.dtype).eps
    some = torch.linalg.eigvalsh(matrix[::_SPARSITY, ::_SPARSITY])
    shift = float(some[: len(some) // 4].mean())
    rank = int(((some - shift).abs() > len(some) * eps * some.abs().max()).sum())
    if rank > len(some) // 2:
        return None
    generator = torch.Generator(matrix.device).manual_seed(0)
    like = {"generator": generator, "dtype": torch.double, "device": matrix.device}
    Q = torch.randn(size, rank + _EXCESS, **like)
    # in float64, and twice: what else there is by rounding must not be mixed in
    for _ in range(2):
        Q, _ = torch.linalg.qr(wide_product(matrix, Q) - shift * Q)
    values, vectors = torch.linalg.eigh(Q.T @ wide_product(matrix, Q))
    rest = matrix.diagonal().sum(dtype=torch.double) - values.sum()
    found = LowRank(values, Q @ vectors, float(rest) / (size - len(values)))
    x = torch.randn(size, 1, **like)
    error = (wide_product(matrix, x) - found.multiply(x)).norm()
    bound = _TOLERANCE * size**0.5 * eps * max(float(values.abs().max()), abs(found.shift))
    return found if float(error) <= bound else None  # none for NaN, too


def wide_product(matrix: Tensor, x: Tensor) -> Tensor:
    """Return ``matrix @ x`` in float64, without a copy of the matrix in it.

    Args:
        matrix: ``[..., n, m]``.
        x: ``[..., m, k]``.
    """
    step = max(2**17 * matrix.shape[-2] // matrix.numel(), 1)
    return torch.cat([rows.double() @ x.double() for rows in matrix.split(step, dim=-2)], dim=-2)
