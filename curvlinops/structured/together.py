"""What is done with several factors of Kronecker products together."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from curvlinops.structured.decompositions import eigh_batched, inverse_batched
from curvlinops.structured.eigenvalues import is_added
from curvlinops.structured.factors import Dense, Factor


def decompose(factors: Sequence[Factor], names: Sequence[str]) -> None:
    """Compute the eigendecompositions of factors that have none yet, equal sizes together."""
    missing = {
        id(factor): (factor, name)
        for factor, name in zip(factors, names, strict=True)
        if isinstance(factor, Dense) and factor.decomposition is None
    }
    dense = [factor for factor, _ in missing.values()]
    results = eigh_batched([factor.tensor for factor in dense], [n for _, n in missing.values()])
    for factor, result in zip(dense, results, strict=True):
        factor.decomposition = result


def invert(
    factors: Sequence[Factor], names: Sequence[str], retry_double_precision: bool
) -> list[Factor]:
    """Return the inverses of symmetric factors, equal sizes together; see ``inverse_batched``."""
    plain, others = [], []
    for i, factor in enumerate(factors):
        (plain if isinstance(factor, Dense) and not factor.is_rounded() else others).append(i)
    tensors, own = [factors[i].tensor for i in plain], [names[i] for i in plain]
    inverses = inverse_batched(tensors, own, retry_double_precision)
    found: dict[int, Factor] = {
        i: Dense(inverse, symmetric=True) for i, inverse in zip(plain, inverses, strict=True)
    }
    decompose([factors[i] for i in others], [names[i] for i in others])
    found |= {i: factors[i].power(-1.0, names[i]) for i in others}
    return [found[i] for i in range(len(factors))]


def shift(factors: Sequence[Factor], shifts: Sequence[float | Tensor], widen: bool) -> list[Factor]:
    """Return the sums of factors and multiples of the identity.

    Args:
        factors: The factors, of one dtype.
        shifts: A number for each, or diagonals ``[G, n]``.
        widen: Whether a factor becomes float64 if the sum would get lost in rounding.
    """
    if widen and not _are_kept(factors, shifts):
        factors = [
            factor if factor.keeps(own) else factor.to(factor.diagonal().device, torch.float64)
            for factor, own in zip(factors, shifts, strict=True)
        ]
    return [factor.shifted(own) for factor, own in zip(factors, shifts, strict=True)]


def _are_kept(factors: Sequence[Factor], shifts: Sequence[float | Tensor]) -> bool:
    """Return whether all factors keep what is added to them, see ``Dense.keeps``."""
    diagonals, added = [], []
    for factor, own in zip(factors, shifts, strict=True):
        if isinstance(factor, Dense):
            diagonals.append(factor.diagonal().flatten())
            wide = torch.as_tensor(own, dtype=torch.float64, device=diagonals[-1].device)
            added.append(wide.flatten().expand(len(diagonals[-1])))
    return not diagonals or is_added(torch.cat(diagonals), torch.cat(added))


def multiply(factors: Sequence[Factor], groups: int, X: Tensor) -> Tensor:
    """Multiply vectors by the block-diagonal of G Kronecker products.

    Args:
        factors: The factors.
        groups: G; factors may have one group for all.
        X: Vectors ``[K, G * m_1 * m_2 ...]``.

    Returns:
        Vectors ``[K, G * n_1 * n_2 ...]``.
    """
    K = X.shape[0]
    rows, columns = [f.rows for f in factors], [f.columns for f in factors]
    if groups > 1:
        X = X.reshape(K, groups, prod(columns)).transpose(0, 1)
    # from the last: that of B V A^T is a single matrix product for all columns
    for i in reversed(range(len(factors))):
        left, right = K * prod(columns[:i]), prod(rows[i + 1 :])
        X = factors[i].multiply(X, groups, left, right)
    if groups > 1:
        X = X.reshape(groups, K, prod(rows)).transpose(0, 1)
    return X.reshape(K, groups * prod(rows))
