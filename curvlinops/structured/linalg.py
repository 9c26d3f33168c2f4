"""Decompositions, inverses and determinants of batches of symmetric matrices.

One rule tells which eigenvalues are only rounding errors: those whose absolute value is at most
``max(5, sqrt(n) / 2) eps v^T D v``, where v is the eigenvector, D the diagonal of the ``n x n``
matrix, and ``eps`` the rounding error of its entries. They are zero. A matrix with such an
eigenvalue is singular: it has no inverse, and its log-determinant is minus infinity.
"""

from math import isfinite

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from curvlinops.linear_operator.space import not_finite
from curvlinops.support.arguments import without_graph

#: From this ratio of diagonal entries on, matrices in float32 are decomposed in float64. Then
#: float32 would leave three digits of the small eigenvalues' eigenvectors.
_SCALES = 1e4

# --- eigenvalues


def tolerance(size: int, eps: float) -> float:
    """Return how large the rounding errors of eigenvalues are, in the scale of the entries.

    In tests, second moments of random numbers had errors of up to 3 eps with a null space of one
    dimension, and of ``sqrt(n) / 4`` eps with one of n / 2.
    """
    return max(5.0, size**0.5 / 2) * eps


def rounding_errors(matrices: Tensor, vectors: Tensor, eps: float, psd: bool) -> Tensor:
    """Return how large ``v^T A v`` may be by rounding errors of entries alone, ``[G, m]``.

    An entry of a sum of squares is wrong by at most ``eps sqrt(A_ii A_jj)``. So the quadratic form
    of a vector that avoids the rows with large entries is known well, however large these are. The
    vectors are the columns of ``[G, n, m]``.
    """
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    sizes = diagonal.abs() if psd else torch.linalg.vector_norm(matrices, dim=-1)
    forms = torch.bmm(sizes.to(vectors).unsqueeze(1), vectors.square()).squeeze(1)
    return tolerance(matrices.shape[-1], eps) * forms


def without_rounding(values: Tensor, errors: Tensor, psd: bool) -> Tensor:
    """Return eigenvalues ``[..., n]``, with zeros for ``rounding_errors`` of their matrices.

    Negative eigenvalues of positive semidefinite matrices show how large these are at least.
    """
    if values.numel() == 0:
        return values
    # what the decomposition itself adds
    computed = torch.finfo(values.dtype).eps
    sizes = values.abs()
    largest = sizes.amax(-1, keepdim=True)
    errors = errors.to(values).maximum(tolerance(values.shape[-1], computed) * largest)
    if psd:
        excess = (-3 * values / errors).amax(-1, keepdim=True).nan_to_num(0.0)
        errors = errors * excess.clamp(min=1)
    return values.masked_fill(sizes <= errors, 0)


def are_large(values: Tensor, eps: float, psd: bool) -> bool:
    """Return whether no eigenvalue ``[G, n]`` can be a rounding error.

    With orthonormal eigenvectors, ``rounding_errors`` are relative to the largest one at most.
    """
    if values.numel() == 0:
        return True
    smallest, largest = (values if psd else values.abs()).aminmax(dim=-1)
    eps = max(eps, torch.finfo(values.dtype).eps)
    return bool((smallest > tolerance(values.shape[-1], eps) * largest).all())


def shifted(values: Tensor, shift: float | Tensor, entries: float, computed: float = 0.0) -> Tensor:
    """Return the eigenvalues ``[..., n]`` of ``A + shift I``, with zeros for rounding errors.

    So are those of A. ``entries`` is the relative tolerance for errors of the entries of A,
    ``computed`` that for the decomposition's, which are in the scale of the largest eigenvalue.
    """
    if values.numel() == 0 or (not isinstance(shift, Tensor) and shift == 0):
        return values
    sums = values + shift
    size, sizes = values.abs().amax(-1, keepdim=True), sums.abs()
    if not bool((sizes <= max(entries, computed) * size).any()):
        return sums
    # a sum with a zero eigenvalue is the shift, which the decomposition may lose
    lost = (values == 0) & (sizes <= computed * size)
    # a shift that cancels an eigenvalue leaves the rounding errors of the entries
    lost |= (values * shift < 0) & (sizes <= entries * size)
    return sums.masked_fill(lost, 0)


def power(
    values: Tensor, exponent: float, subject: str = "The operator", dtype: torch.dtype | None = None
) -> Tensor:
    """Raise eigenvalues, with zeros for rounding errors, to a power; refuse what is not defined.

    Messages name the subject, and its dtype if the eigenvalues have more precision.
    """
    if values.numel() == 0:
        return values.clone()
    if not float(exponent).is_integer() and bool((values < 0).any()):
        raise ValueError(
            f"{subject} is not positive semidefinite (lowest eigenvalue {float(values.min()):.2e}),"
            f" so that its power {exponent:g} is not defined. Add damping."
        )
    if exponent < 0 and not bool(values.all()):
        raise _singular(subject, dtype or values.dtype)
    return 1 / values if exponent == -1 else values**exponent


def _singular(subject: str, dtype: torch.dtype) -> ValueError:
    return ValueError(
        f"{subject} is singular to working precision: its damping is zero, or less than the "
        "rounding errors of its eigenvalues. Add more, by inverse(damping) or A.damped(damping)"
        f"{'' if dtype == torch.float64 else ', or compute in float64'}."
    )


def signed_logarithm(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign of the last axis' product, and the logarithm of its absolute value."""
    return values.sign().prod(-1), values.abs().log().sum(-1)


# --- decompositions


def eigenpairs(
    matrices: Tensor, name: str, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Return eigenvalues in ascending order ``[G, n]``, and eigenvectors ``[G, n, n]`` as columns.

    Eigenvalues are in the dtype of the computation, by default that of the matrices, as
    eigenvectors are. Decompositions that do not converge are repeated in float64. Messages name
    the matrices.
    """
    check_finite(matrices, name)
    matrices, dtype = matrices.detach(), dtype or matrices.dtype
    if matrices.numel() == 0:
        return matrices.new_zeros(matrices.shape[:-1], dtype=dtype), matrices
    try:
        values, vectors = torch.linalg.eigh(matrices.to(dtype))
    except torch.linalg.LinAlgError:  # there is no result for any of the matrices
        values = matrices.new_full(matrices.shape[:-1], torch.nan, dtype=dtype)
        vectors = torch.empty_like(matrices, dtype=dtype)
    if not isfinite(float(values.sum())):
        failed = ~values.isfinite().all(-1)
        try:
            repeated = torch.linalg.eigh(matrices[failed].double())
        except torch.linalg.LinAlgError as error:
            raise RuntimeError(f"The eigendecomposition of {name} did not converge.") from error
        values[failed], vectors[failed] = (x.to(dtype) for x in repeated)
    # products with subnormal numbers take 30 times as long
    vectors = hardshrink(vectors, torch.finfo(matrices.dtype).tiny ** 0.5)
    return values, vectors.to(matrices.dtype)


def has_scales(matrices: Tensor) -> bool:
    """Return whether entries ``[G, n, n]`` know small eigenvalues that float32 would lose.

    The errors of a decomposition are ``eps`` times the largest eigenvalue. Those of the entries are
    as much smaller as the scales of rows are, see ``rounding_errors``.
    """
    if matrices.numel() == 0:
        return False
    diagonal = matrices.diagonal(dim1=-2, dim2=-1)
    smallest, largest = diagonal.aminmax(dim=-1)
    if bool((largest <= _SCALES * smallest).all()):
        return False
    sizes = diagonal.abs()
    smallest = sizes.masked_fill(sizes == 0, torch.inf).amin(-1, keepdim=True)
    return bool((sizes > _SCALES * smallest).any())


def cholesky_inverse(
    matrix: Tensor,
    shift: Tensor | float,
    eps: float,
    accurate: bool = True,
    ranks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Invert matrices ``A + shift I`` by Cholesky decompositions, where three digits are right.

    The result is the inverses ``[G, n, n]``, the diagonals of the Cholesky factors, ``[G, n]``, and
    a mask ``[G]`` of the matrices that have neither: they are not positive definite, or rounding
    errors ``eps`` of entries may decide their inverses. The matrices are decomposed in their dtype,
    and, if that is to be ``accurate``, those that are too ill-conditioned for it in float64. The
    largest ``ranks`` of A that are possible, ``[G]``, may show that beforehand.
    """
    if matrix.numel() == 0:
        roots = matrix.new_zeros(matrix.shape[:2])
        return matrix.clone(), roots, roots.isnan().any(-1)
    if isinstance(shift, Tensor):
        shift = shift.to(matrix.device, torch.float64).expand(len(matrix))
    least = _least_errors(matrix, shift, eps, ranks)
    *results, errors = _invert(matrix, shift, matrix.dtype, eps, least, limit=1e-3)
    left = ~(errors < 1e-3)  # also NaN
    if accurate and matrix.dtype != torch.float64 and bool(left.any()):
        is_whole = bool(left.all())
        others = matrix if is_whole else matrix[left]
        shifts = shift[left] if isinstance(shift, Tensor) else shift
        *repeated, errors = _invert(others, shifts, torch.float64, eps, least[left], limit=1e-2)
        repeated = [values.to(matrix.dtype) for values in repeated]
        if is_whole:
            results = repeated
        else:
            for out, values in zip(results, repeated, strict=True):
                out[left] = values
        # without the rounding errors of the computation, those of the entries are smaller
        left = left.masked_scatter(left, ~(errors < 1e-2))
    return *results, left


def _least_errors(A: Tensor, shift: Tensor | float, eps: float, ranks: Tensor | None) -> Tensor:
    """Return what the errors of ``_invert`` are at least, ``[G]``, by null spaces of A alone.

    With the projection P to one of dimension m, ``D^(1/2) (A + shift I)^-1 D^(1/2)`` is at least
    ``D^(1/2) P D^(1/2) / shift``. Its trace, at least the sum of the m smallest entries of D over
    the shift, is at most ``sqrt(m)`` times its Frobenius norm.
    """
    ranks = A.new_tensor([A.shape[-1]]) if ranks is None else ranks.to(A.device)
    sizes = (A.shape[-1] - ranks.double()).clamp(min=0).floor().expand(len(A))
    if not bool(sizes.any()):
        return sizes
    sums = A.diagonal(dim1=-2, dim2=-1).double().sort().values.cumsum(-1)
    sums = sums.gather(-1, (sizes.long().unsqueeze(-1) - 1).clamp(min=0)).squeeze(-1)
    return (eps * sums / (sizes.sqrt() * shift)).masked_fill((sizes == 0) | (shift == 0), 0.0)


def _invert(
    matrix: Tensor,
    shift: Tensor | float,
    dtype: torch.dtype,
    eps: float,
    least: Tensor,
    limit: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``(A + shift I)^-1``, the diagonals of Cholesky factors, and relative errors, ``[G]``.

    Errors are infinite where matrices are not positive definite. Else they are those that rounding
    errors ``eps sqrt(A_ii A_jj)`` of the entries cause: with the diagonal D, ``eps`` times the
    Frobenius norm of ``D^(1/2) (A + shift I)^-1 D^(1/2)``. Like the decomposition itself, they do
    not depend on the scales of rows (Demmel, On floating point errors in Cholesky, 1989). If all
    are above the limit for certain, as the ``least`` ones that are known may be, there are no
    inverses.
    """
    # one copy, column by column as in LAPACK: decomposition and inverse take its memory. Rows of
    # symmetric matrices are their columns
    A = matrix.to(dtype, copy=True, memory_format=torch.contiguous_format).mT
    diagonal = A.diagonal(dim1=-2, dim2=-1)
    sizes = diagonal.abs()
    diagonal.add_(shift.unsqueeze(-1).to(dtype) if isinstance(shift, Tensor) else shift)
    sizes = sizes.maximum(diagonal)
    if bool((least >= limit).all()):
        return A, diagonal.clone(), least
    info = torch.empty(len(A), dtype=torch.int32, device=A.device)
    torch.linalg.cholesky_ex(A, out=(A, info))
    if bool(info.any()):
        # a failed decomposition may have no inverse: it becomes the identity
        failed = (info != 0).unsqueeze(-1)
        A.masked_fill_(failed.unsqueeze(-1), 0.0)
        diagonal.masked_fill_(failed, 1.0)
        sizes.masked_fill_(failed, torch.inf)
    roots = diagonal.clone()
    # the diagonal of the inverse is at least 1 / L_ii^2
    least = eps * torch.linalg.vector_norm(sizes / roots.square(), dim=-1)
    if bool((least >= limit).all()):
        return A, roots, least
    inverse = torch.cholesky_inverse(A, out=A)
    # the trace is never smaller than the norm
    errors = eps * (sizes * inverse.diagonal(dim1=-2, dim2=-1)).sum(-1)
    if bool((errors < limit).all()):
        return inverse, roots, errors
    column, squares = sizes.unsqueeze(-1), torch.zeros(len(A), 1, 1, dtype=dtype, device=A.device)
    for rows, size in zip(inverse.split(256, -2), column.split(256, -2), strict=True):
        squares += size.mT @ (rows.square() @ column)
    return inverse, roots, eps * squares.sqrt().flatten()


def symmetrized(matrix: Tensor) -> Tensor:
    """Return matrices ``[..., n, n]`` without the asymmetry of rounding, ``(A + A^T) / 2``."""
    half = matrix / 2  # sums of large numbers might overflow
    return half + half.mT


def is_symmetric(matrix: Tensor) -> bool:
    """Return whether matrices ``[..., n, m]`` are symmetric up to rounding."""
    if matrix.shape[-1] != matrix.shape[-2]:
        return False
    if matrix.numel() == 0:
        return True
    # a large entry says nothing about the rows of others
    roots = matrix.abs().amax(-1).maximum(matrix.abs().amax(-2)).sqrt()
    sizes = roots.unsqueeze(-1) * roots.unsqueeze(-2)
    return bool(((matrix - matrix.mT).abs() <= 100 * torch.finfo(matrix.dtype).eps * sizes).all())


# --- checks of tensors that become part of an operator


def check_finite(tensor: Tensor, name: str) -> None:
    """Refuse NaN and infinite values."""
    if not_finite({name: tensor}) is not None:
        raise ValueError(f"{name} contains NaN or infinite values.")


def real(tensor: Tensor, name: str, ndim: tuple[int, ...] | None = None) -> Tensor:
    """Return a finite tensor of real numbers without its graph, in float32 or float64.

    Messages name it. It may have some numbers of axes, by default any.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be of a real floating-point dtype, got {tensor.dtype}.")
    if ndim is not None and tensor.ndim not in ndim:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, ndim))} axes, got shape {list(tensor.shape)}."
        )
    check_finite(tensor, name)
    tensor = without_graph(tensor, name).detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()
