"""The products of one call of an iterative solver, and arithmetic on rows."""

from math import frexp, inf

import torch
from torch import Tensor

from curvlinops.algorithms.matrix import Matrix
from curvlinops.support.norms import double_norm

#: Asymmetry, relative to the matrix's norm, that cannot be rounding of single precision.
ASYMMETRY = 1e-3


class Products:
    """Products with a symmetric matrix, damped, and with its preconditioner.

    Args:
        matrix: The matrix A.
        damping: Multiple of the identity that is added to it.
        preconditioner: Approximates the inverse. ``None``: the identity.
        method: Who needs a symmetric matrix.

    Attributes:
        unit: The power of two in units of which products are measured, so that squares neither
            overflow nor vanish: about the norm of the matrix in its first product.
    """

    def __init__(self, matrix: Matrix, damping: float, preconditioner: Matrix | None, method: str):
        self._matrix, self._damping, self._method = matrix, damping, method
        self._preconditioner = preconditioner
        self.unit: float | None = None
        self._preconditioner_unit: float | None = None
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def multiply(self, rows: Tensor) -> Tensor:
        """Multiply rows ``[K, D]`` by ``(A + damping I) / unit``.

        Raises:
            ValueError: If products show that the matrix is not symmetric.
        """
        out = (self._matrix @ rows.T).T.contiguous()
        if self.unit is None:
            self.unit = unit_of(out, rows, abs(self._damping))
        # out of place: what an operator returns may be what it was given
        out = out / self.unit
        if len(rows) and not self._matrix.operator.self_adjoint:
            self._check_symmetric(rows, out)
        return out.add_(rows, alpha=self._damping / self.unit) if self._damping else out

    def _check_symmetric(self, rows: Tensor, products: Tensor) -> None:
        """Check ``<x, A y> = <A x, y>`` for the last two products, which costs none."""
        size = norms(rows)
        largest = (norms(products) / size.where(size > 0, 1.0)).max()
        if self._last is not None:
            old_rows, old_products, before = self._last
            largest = largest.maximum(before)
        if self._last is not None and old_rows.shape == rows.shape:
            difference = dots(old_rows, products) - dots(old_products, rows)
            rounding = ASYMMETRY * largest * norms(old_rows) * size
            tiny = torch.finfo(rows.dtype).tiny  # inner products underflow
            wrong = difference.abs() > rounding.clamp(min=tiny)
            if bool(wrong.any()):
                largest = largest.maximum(self.norms_seen_by(products).max())
                wrong &= difference.abs() > ASYMMETRY * largest * norms(old_rows) * size
            if bool(wrong.any()):
                raise ValueError(
                    f"The matrix is not symmetric, which {self._method} needs. Use "
                    "LSMRInverseLinearOperator, or the symmetric part (A + A.T) / 2 if that is "
                    "meant."
                )
        self._last = rows.clone(), products.clone(), largest

    def norms_seen_by(self, products: Tensor) -> Tensor:
        """Return ``|A q| / |q|`` in units of ``unit`` for products q, zero if they are.

        Products with vectors of a null space are rounding errors, which tell nothing of the norm,
        but do not lie in the null space. Ask before taking something for more than rounding.
        """
        size = norms(products)
        return norms((self._matrix @ products.T).T / self.unit) / size.where(size > 0, 1.0)

    def precondition(self, rows: Tensor) -> Tensor:
        """Multiply rows ``[K, D]`` by a multiple of the preconditioner, which serves as well."""
        if self._preconditioner is None:
            return rows
        out = (self._preconditioner @ rows.T).T.contiguous()
        if self._preconditioner_unit is None:
            self._preconditioner_unit = unit_of(out, rows)
        return (out / self._preconditioner_unit).to(rows)


def unit_of(products: Tensor, rows: Tensor, least: float = 0.0) -> float:
    """Return about the norm of a matrix, as a power of two that numbers can be divided by.

    Args:
        products: The products of rows, ``[K, D]``.
        rows: The rows.
        least: What the norm is at least.
    """
    size = float(rows.abs().max()) if rows.numel() else 0.0
    size = max(float(products.abs().max()) / size if size else 0.0, least)
    if not 0 < size < inf:
        return 1.0
    tiny = torch.finfo(products.dtype).tiny
    # the largest power of two has a reciprocal that is a number, too
    return min(max(2.0 ** (frexp(size)[1] - 1), tiny), 0.25 / tiny)


def norms(rows: Tensor) -> Tensor:
    """Return the norms of rows, ``[K]``, in double precision, which has room for squares."""
    return double_norm(rows, 1)


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


def multiples(rows: Tensor, factors: Tensor) -> Tensor:
    """Multiply each row by its factor, which need not be a number of the rows' type."""
    return (rows.double() * factors.unsqueeze(1)).to(rows.dtype)


def solutions(rows: Tensor, factors: Tensor) -> Tensor:
    """Return multiples of rows, as numbers of their type.

    Args:
        rows: Solutions in some units, ``[K, D]``.
        factors: The units, ``[K]``, float64.

    Raises:
        ValueError: If all digits are lost, or an entry is too large.
    """
    found = multiples(rows, factors)
    lost = (rows.any(dim=1) & ~found.any(dim=1)) | ~found.isfinite().all(dim=1)
    if bool(lost.any()):
        raise ValueError(
            f"Solutions of linear systems are too large or too small for {rows.dtype}. Scale the "
            "matrix or the right-hand sides."
        )
    return found
