"""Symmetric matrices that are a multiple of the identity, but for a low rank.

Such is a factor of a layer that is wider than the batch, with and without damping. A few products
with tall matrices find its eigenvalues, several times as fast as a full decomposition. They also
give its inverse, where the matrix's own rounding errors, which are of full rank, are corrected for:
they count relative to the shift.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.core.norms import PART
from curvlinops.structured.norms import wide_product

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
        residual: ``A Q - Q diag(values)`` for the matrix A that it approximates, ``[n, r]``.
    """

    values: Tensor
    vectors: Tensor
    shift: float
    residual: Tensor

    def eigh(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return eigenvalues in ascending order, ``[n]``, and eigenvectors, ``[n, n]``."""
        size, rank = self.vectors.shape
        below, others = int((self.values < self.shift).sum()), size - rank
        values = torch.full((size,), self.shift, dtype=dtype, device=self.values.device)
        vectors = values.new_empty(size, size)
        for out, some in ((values, self.values), (vectors, self.vectors)):
            out[..., :below] = some[..., :below]
            out[..., below + others :] = some[..., below:]
        self._complement(vectors[:, below : below + others])
        return values, vectors

    def _complement(self, out: Tensor) -> None:
        """Write an orthonormal basis of what is orthogonal to the columns of Q, ``[n, n - r]``.

        It consists of the last columns of a reflection that maps Q to a matrix whose other rows are
        zero (Schreiber and Parlett, Block reflectors: theory and computation, SIAM Journal on
        Numerical Analysis 25, 1988).
        """
        rank = len(self.values)
        left, _, right = torch.linalg.svd(self.vectors[:rank])
        normal = self.vectors.clone()
        normal[:rank] += left @ right
        weights = torch.linalg.solve(normal.T @ normal, normal[rank:].T).mul_(-2)
        torch.mm(normal.to(out), weights.to(out), out=out)
        out.diagonal(-rank).add_(1)

    def solve(self, matrix: Tensor, x: Tensor) -> Tensor:
        """Multiply ``[n, k]`` with the inverse of the matrix A that it approximates, in float64.

        With C for its own inverse, A has the inverse ``2 C - C A C`` up to squares of
        ``C A - I``.
        """
        y = self._divide(x)
        return 2 * y - self._divide(wide_product(matrix, y))

    def _divide(self, x: Tensor) -> Tensor:
        scales = (1 / self.values - 1 / self.shift).unsqueeze(-1)
        return self.vectors @ (scales * (self.vectors.T @ x.double())) + x / self.shift

    def inverse(self, matrix: Tensor) -> Tensor:
        """Return the inverse of A, ``[n, n]``, as accurate as ``solve``."""
        Q, shift = self.vectors, self.shift
        D = 1 / self.values - 1 / shift
        RD = self.residual * D / shift
        left = torch.cat([Q * (D + (self.values - shift) / shift**2) - RD, Q], dim=1)
        right = torch.cat([Q, -RD], dim=1).T
        out, step = torch.empty_like(matrix), max(PART // len(matrix), 1)
        for start in range(0, len(matrix), step):
            rows, others = slice(start, start + step), slice(start, None)
            part = matrix[rows, others].to(torch.double, copy=True)
            part.addmm_(left[rows], right[:, others], beta=-1 / shift**2)
            square = part[:, : len(part)]
            square.copy_((square + square.T) / 2)
            out[rows, others], out[others, rows] = part, part.T
        out.diagonal().add_(2 / shift)
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
    AQ = wide_product(matrix, Q)
    values, turn = torch.linalg.eigh(Q.T @ AQ)
    rest = matrix.diagonal().sum(dtype=torch.double) - values.sum()
    vectors = Q @ turn
    residual = AQ @ turn - vectors * values
    found = LowRank(values, vectors, float(rest) / (size - len(values)), residual)
    x = torch.randn(size, 1, **like)
    error = (wide_product(matrix, x) - found.multiply(x)).norm()
    bound = _TOLERANCE * size**0.5 * eps * max(float(values.abs().max()), abs(found.shift))
    return found if float(error) <= bound else None  # none for NaN, too
