"""The products of one call of an iterative solver, and arithmetic on rows."""

import torch
from torch import Tensor

from curvlinops.algorithms.matrix import Matrix

#: Asymmetry, relative to the matrix's norm, that cannot be rounding of single precision.
_ASYMMETRY = 1e-3


class Products:
    """Products with a symmetric matrix, damped, and with its preconditioner.

    Args:
        matrix: The matrix A.
        damping: Multiple of the identity that is added to it.
        preconditioner: Approximates the inverse. ``None``: the identity.
        method: Who needs a symmetric matrix.
    """

    def __init__(self, matrix: Matrix, damping: float, preconditioner: Matrix | None, method: str):
        self._matrix, self._damping, self._method = matrix, damping, method
        self._preconditioner = preconditioner
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows ``[K, D]`` by ``A + damping I``.

        Raises:
            ValueError: If products show that the matrix is not symmetric.
        """
        out = (self._matrix @ rows.T).T.contiguous()
        if len(rows) and not self._matrix.operator.self_adjoint:
            self._check_symmetric(rows, out)
        return out.add_(rows, alpha=self._damping) if self._damping else out

    def _check_symmetric(self, rows: Tensor, products: Tensor) -> None:
        """Check ``<x, A y> = <A x, y>`` for the last two products, which costs none."""
        size = norms(rows)
        largest = (norms(products) / size.where(size > 0, 1.0)).max()
        if self._last is not None:
            old_rows, old_products, before = self._last
            largest = largest.maximum(before)
        if self._last is not None and old_rows.shape == rows.shape:
            difference = dots(old_rows, products) - dots(old_products, rows)
            rounding = _ASYMMETRY * largest * norms(old_rows) * size
            tiny = torch.finfo(rows.dtype).tiny  # inner products underflow
            if bool((difference.abs() > rounding.clamp(min=tiny)).any()):
                raise ValueError(
                    f"The matrix is not symmetric, which {self._method} needs. Use "
                    "LSMRInverseLinearOperator, or the symmetric part (A + A.T) / 2 if that is "
                    "meant."
                )
        self._last = rows.clone(), products.clone(), largest

    def precondition(self, rows: Tensor) -> Tensor:
        """Multiply rows ``[K, D]`` by the preconditioner."""
        if self._preconditioner is None:
            return rows
        return (self._preconditioner @ rows.T).T.to(rows).contiguous()


def norms(rows: Tensor) -> Tensor:
    """Return the norms of rows, ``[K]``, in double precision, which has room for squares."""
    return torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)


def unit_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows whose inner products neither overflow nor vanish, and their sizes.

    Args:
        rows: Finite rows, ``[K, D]``.

    Returns:
        The rows with entries of at most one, and the powers of two that they are multiples of.
    """
    sizes = rows.abs().amax(dim=1).double()
    sizes = torch.exp2(torch.frexp(sizes).exponent.double()).where(sizes > 0, 1.0)
    # their reciprocals need not be numbers of the rows' type
    return (rows.double() / sizes.unsqueeze(1)).to(rows.dtype), sizes


def dots(first: Tensor, second: Tensor) -> Tensor:
    """Return the inner products of rows, ``[K]``, in double precision."""
    return torch.linalg.vecdot(first, second).double()


def scaled(factors: Tensor, rows: Tensor) -> Tensor:
    """Multiply each row by its factor."""
    return factors.to(rows.dtype).unsqueeze(1) * rows
