"""Eigendecompositions and inverses of dense symmetric matrices, checked and rescued."""

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from curvlinops.core.columns import not_finite
from curvlinops.structured.batches import batches
from curvlinops.structured.eigenvalues import SLACK, rounding, singular
from curvlinops.structured.low_rank import low_rank
from curvlinops.structured.norms import wide_norm, wide_product

#: What a decomposition may be off, relative to the matrix and in units of ``sqrt(n)`` times the
#: rounding error. Those of LAPACK stay below 10.
_TOLERANCE = 100.0
#: Of blocks of this size, which fit a processor's cache, a matrix is compared with its transpose.
_COMPARED = 256


def eigh_batched(matrices: Sequence[Tensor], names: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
    """Return the eigendecompositions of symmetric matrices.

    Matrices of equal size, dtype and device are decomposed together. What does not converge or is
    inaccurate is decomposed again in float64.

    Args:
        matrices: Symmetric matrices, ``[..., n, n]``.
        names: What they are called in messages.

    Returns:
        Eigenvalues in ascending order, ``[..., n]``, and eigenvectors ``[..., n, n]`` as columns,
        of each.

    Raises:
        ValueError: If a matrix has NaN or infinite values.
        RuntimeError: If a matrix cannot be decomposed in float64.
    """
    _check_finite(matrices, names)
    flat = [
        matrix.detach().reshape(prod(matrix.shape[:-2]), *matrix.shape[-2:]) for matrix in matrices
    ]
    out: list[tuple[Tensor, Tensor]] = [None] * len(matrices)  # type: ignore[list-item]
    for members, sizes, batch in batches(flat):
        values, vectors = _eigh(batch, ", ".join(names[i] for i in members))
        for i, w, Q in zip(members, values.split(sizes), vectors.split(sizes), strict=True):
            shape = matrices[i].shape
            out[i] = (w.reshape(shape[:-1]), Q.reshape(shape))
    return out


def _eigh(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Decompose matrices ``[G, n, n]``; in float64 those that fail in their dtype."""
    if matrix.numel() == 0:
        return matrix.new_zeros(matrix.shape[:-1]), matrix
    matrix = symmetrized(matrix)  # LAPACK reads one half, which rounding may tell from the other
    found = [low_rank(one) for one in matrix]
    if found.count(None) == len(found):
        return _full_eigh(matrix, name)
    each = [
        _full_eigh(one[None], name) if low is None else [part[None] for part in low.eigh(one.dtype)]
        for one, low in zip(matrix, found, strict=True)
    ]
    values, vectors = zip(*each, strict=True)
    return (values[0], vectors[0]) if len(each) == 1 else (torch.cat(values), torch.cat(vectors))


def _full_eigh(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Decompose matrices of any kind."""
    try:
        values, vectors = torch.linalg.eigh(matrix)
        failed = ~_is_accurate(matrix, values, vectors)
        if not bool(failed.any()):
            return values, vectors
    except torch.linalg.LinAlgError:
        values, vectors = matrix.new_zeros(matrix.shape[:-1]), torch.zeros_like(matrix)
        failed = torch.ones(len(matrix), dtype=torch.bool, device=matrix.device)
    wide = matrix[failed].double()
    try:
        rescued = torch.linalg.eigh(wide)
    except torch.linalg.LinAlgError as error:
        raise RuntimeError(f"The eigendecomposition of {name} did not converge.") from error
    if not bool(_is_accurate(wide, *rescued, dtype=matrix.dtype).all()):
        raise RuntimeError(f"The eigendecomposition of {name} is inaccurate, even in float64.")
    values[failed], vectors[failed] = (part.to(matrix.dtype) for part in rescued)
    return values, vectors


def _is_accurate(
    matrix: Tensor, values: Tensor, vectors: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Return which of several decompositions reproduce ``A x`` and ``x`` for one vector x."""
    x = _probe(matrix)
    turned = vectors.mT @ x
    scale = values.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(matrix.dtype).tiny)
    residual = (matrix @ x - vectors @ (values.unsqueeze(-1) * turned)).squeeze(-1) / scale
    drift = (x - vectors @ turned).squeeze(-1)
    error = torch.maximum(residual.norm(dim=-1), drift.norm(dim=-1))
    bound = _TOLERANCE * matrix.shape[-1] ** 0.5 * torch.finfo(dtype or matrix.dtype).eps
    return error <= bound * x.flatten(1).norm(dim=1)  # false for NaN


def inverse_batched(
    matrices: Sequence[Tensor], names: Sequence[str], retry_double_precision: bool = True
) -> list[Tensor]:
    """Return the inverses of symmetric matrices, by Cholesky decompositions.

    Matrices of equal size are inverted together. Those that are not positive definite are inverted
    by their eigendecompositions, if they are clearly nonsingular.

    Args:
        matrices: Symmetric matrices, ``[G, n, n]`` each.
        names: What they are called in messages.
        retry_double_precision: Whether to try again in float64 where the decomposition fails or the
            inverse is inaccurate: for two vectors, with a relative error above 3.5e-4 in float32.

    Raises:
        ValueError: If a matrix is singular to working precision, or has NaN or infinite values.
    """
    out: list[Tensor] = [None] * len(matrices)  # type: ignore[list-item]
    for members, sizes, batch in batches(matrices):
        labels = [names[i] for i, size in zip(members, sizes, strict=True) for _ in range(size)]
        inverses = _inverse(batch, labels, retry_double_precision)
        for i, own in zip(members, inverses.split(sizes), strict=True):
            out[i] = own
    return out


def _inverse(matrix: Tensor, names: Sequence[str], retry_double_precision: bool) -> Tensor:
    """Invert matrices ``[G, n, n]``."""
    if matrix.numel() == 0:
        return matrix.clone()
    found = [_low_rank_inverse(one) for one in matrix]
    if found.count(None) == len(found):
        return _full_inverse(matrix, names, retry_double_precision)
    each = [
        _full_inverse(one[None], [name], retry_double_precision) if low is None else low
        for one, name, low in zip(matrix, names, found, strict=True)
    ]
    return each[0] if len(each) == 1 else torch.cat(each)


def _low_rank_inverse(matrix: Tensor) -> Tensor | None:
    """Return the inverse ``[1, n, n]`` of a matrix of a special kind, if that is accurate."""
    found = low_rank(matrix)
    if found is None or found.shift == 0 or bool((found.values == 0).any()):
        return None
    accurate = _solves(matrix[None], lambda x: found.solve(matrix, x[0])[None])
    return found.inverse(matrix)[None] if bool(accurate) else None


def _full_inverse(matrix: Tensor, names: Sequence[str], retry_double_precision: bool) -> Tensor:
    """Invert matrices of any kind."""
    factor, done = _cholesky(matrix)
    if retry_double_precision:
        done &= _solves(matrix, lambda x: torch.cholesky_solve(x, factor))
    if not retry_double_precision or bool(done.any()):
        out = torch.cholesky_inverse(factor, out=factor)
        done &= out.sum((1, 2)).isfinite()
    else:
        out = factor
    if not bool(done.all()) and retry_double_precision:
        double = (matrix if not bool(done.any()) else matrix[~done]).double()
        wide, success = _cholesky(double)
        wide = torch.cholesky_inverse(wide, out=wide)
        out[~done] = wide.to(matrix.dtype)
        # rounding may turn a zero eigenvalue into a positive one
        done[~done] = success & _is_regular(double, wide)
    for i in (~done).nonzero().flatten().tolist():
        out[i] = _indefinite_inverse(matrix[i], names[i], retry_double_precision)
    return out


def _cholesky(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return Cholesky factors, and of which matrices they are; the others' are identities."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    done = info == 0
    if not bool(done.all()):
        factor[~done] = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    return factor, done


def _solves(matrix: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    """Return for which matrices a function solves linear systems accurately.

    The solutions for two vectors, a product with the matrix among them, are refined, in float64 up
    to the residual. How far they move is their relative error.
    """
    x = _probe(matrix)
    B = torch.cat([x, matrix @ x], dim=-1)
    solution = solve(B)
    correction = solve((B.double() - wide_product(matrix, solution)).to(B))
    tolerance = torch.finfo(matrix.dtype).eps ** 0.5
    good = wide_norm(correction, 1) <= tolerance * wide_norm(solution, 1)  # false for NaN
    return good.all(dim=-1)


def _probe(matrix: Tensor) -> Tensor:
    """Return a vector ``[n, 1]`` that is deterministic and without a pattern, one per matrix."""
    x = torch.arange(1, matrix.shape[-1] + 1, dtype=matrix.dtype, device=matrix.device)
    return (x * x).cos().unsqueeze(-1).expand(*matrix.shape[:-1], 1)


def _is_regular(matrix: Tensor, inverse: Tensor) -> Tensor:
    """Return which matrices are far from singular ones, judged by their condition numbers."""
    condition = torch.linalg.matrix_norm(matrix) * torch.linalg.matrix_norm(inverse)
    return matrix.shape[-1] * torch.finfo(matrix.dtype).eps * condition < 1


def _check_finite(matrices: Sequence[Tensor], names: Sequence[str]) -> None:
    """Refuse NaN and infinite values, which are looked for one by one only if there are any."""
    number = not_finite({str(i): matrix for i, matrix in enumerate(matrices)}) if matrices else None
    if number is not None:
        raise ValueError(f"{names[int(number)]} contains NaN or infinite values.")


def _indefinite_inverse(matrix: Tensor, name: str, retry_double_precision: bool) -> Tensor:
    [(values, vectors)] = eigh_batched([matrix], [name])
    lowest = values.abs().amin(-1)
    lost = lowest <= rounding(values)
    if bool(lost.any()):
        raise singular(name, values[lost])
    retry = retry_double_precision and matrix.dtype != torch.float64
    if retry and bool((lowest <= rounding(values, SLACK)).any()):
        return _indefinite_inverse(matrix.double(), name, False).to(matrix.dtype)
    return symmetrized(vectors / values.unsqueeze(-2) @ vectors.mT)


def symmetrized(matrix: Tensor) -> Tensor:
    """Return a matrix without the asymmetry of rounding, ``(A + A^T) / 2``; or as it is."""
    pieces = range(0, matrix.shape[-1], _COMPARED)
    places = ((slice(i, i + _COMPARED), slice(j, j + _COMPARED)) for i in pieces for j in pieces)
    upper = ((rows, columns) for rows, columns in places if rows.start <= columns.start)
    if all(torch.equal(matrix[..., i, j], matrix[..., j, i].mT) for i, j in upper):
        return matrix  # without new memory, which takes most of the time
    half = matrix / 2  # sums of large numbers might overflow
    return half + half.mT


def is_symmetric(matrix: Tensor) -> bool:
    """Return whether matrices ``[..., n, m]`` are symmetric up to rounding."""
    if matrix.shape[-1] != matrix.shape[-2]:
        return False
    if matrix.numel() == 0:
        return True
    difference = matrix - matrix.mT
    scale, error = (x.norm(dim=(-2, -1)) for x in (matrix, difference))
    if not bool(((scale > 1e-10) & (scale < 1e15)).all()):
        # squares may be no numbers of this precision; only then, as it takes longer
        scale, error = (wide_norm(x, (-2, -1)) for x in (matrix, difference))
    return bool((error <= 100 * torch.finfo(matrix.dtype).eps * scale).all())
