"""What is done with several factors of Kronecker products together."""

from collections.abc import Sequence
from math import prod

from torch import Tensor

from curvlinops.structured.decompositions import eigh_batched
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
