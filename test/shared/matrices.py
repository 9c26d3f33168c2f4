"""Symmetric matrices with known spectra, and an operator that counts its products."""

from functools import cache

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

# --- 40 x 40, tensors, for estimators

DIM = 40

SPECTRA = {
    "decaying": torch.logspace(0, -8, DIM, dtype=torch.float64),
    "clustered": torch.tensor([5.0] * 3 + [1.0] * 17 + [0.1] * 20, dtype=torch.float64),
    "indefinite": torch.linspace(-1, 3, DIM, dtype=torch.float64),
    "singular": torch.tensor([4.0, 3.0, 2.0, 1.0] + [0.0] * (DIM - 4), dtype=torch.float64),
}
SEMIDEFINITE = ["decaying", "clustered", "singular"]


def with_spectrum(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    """Return a symmetric matrix with random eigenvectors, float64."""
    generator = torch.Generator().manual_seed(seed)
    dim = len(eigenvalues)
    normal = torch.randn(dim, dim, generator=generator, dtype=torch.float64)
    Q = torch.linalg.qr(normal).Q
    A = (Q * eigenvalues.double()) @ Q.T
    return (A + A.T) / 2


def symmetric(name: str) -> Tensor:
    """Return the symmetric matrix of a name in `SPECTRA`."""
    return with_spectrum(SPECTRA[name])


def nonsymmetric(rank: int = DIM) -> Tensor:
    """Return a matrix that is far from symmetric, of a given rank."""
    generator = torch.Generator().manual_seed(1)
    B, C = torch.randn(2, DIM, rank, generator=generator, dtype=torch.float64)
    return B @ C.T / DIM + 0.5 * (B @ B.T) / DIM


# --- 200 x 200, arrays, for iterations

LARGE_DIM = 200
_RNG = np.random.default_rng(0)
_INDEX = np.arange(1, LARGE_DIM + 1)
_UNIFORM = _RNG.uniform(0, 2, LARGE_DIM)

LARGE_SPECTRA = {
    "power": _INDEX**-1.5,
    "exponential": 0.8**_INDEX,
    "vanishing": 0.5**_INDEX,
    "clustered": np.r_[5 + 1e-3 * _UNIFORM[:8], 1 + 0.1 * _UNIFORM[8:]],
    "multiple": np.r_[[5] * 4, [4] * 3, [3] * 2, _UNIFORM[9:]],
    "indefinite": np.r_[-4, -3, 5, _RNG.standard_normal(LARGE_DIM - 3)],
    "negative": -(_INDEX**-1.0),
    "singular": np.where(_INDEX < 30, 1 / _INDEX, 0.0),
    "identity": np.ones(LARGE_DIM),
    "zero": np.zeros(LARGE_DIM),
    "positive": np.r_[_UNIFORM[:-1] + 0.1, 50],
}


@cache
def large(name: str, dtype: type = np.float64) -> np.ndarray:
    """Return the matrix with the eigenvalues of a name in `LARGE_SPECTRA`."""
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((LARGE_DIM, LARGE_DIM)))[0]
    dense = (basis * LARGE_SPECTRA[name]) @ basis.T
    return ((dense + dense.T) / 2).astype(dtype)


class Counting(LinearOperator):
    """A matrix that counts its products, also with its transpose."""

    def __init__(self, A: Tensor | np.ndarray):
        self.matrix, self.products = np.asarray(A), 0
        super().__init__(np.float64, tuple(A.shape))

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        self.products += X.shape[1]
        return self.matrix @ X

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:  # an old SciPy has no default
        return self._rmatmat(x.reshape(-1, 1))

    def _rmatmat(self, X: np.ndarray) -> np.ndarray:
        self.products += X.shape[1]
        return self.matrix.T @ X
