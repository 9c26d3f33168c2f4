"""Symmetric matrices with spectra of all kinds."""

from functools import cache

import numpy as np

DIM = 200
_RNG = np.random.default_rng(0)
_INDEX = np.arange(1, DIM + 1)
_UNIFORM = _RNG.uniform(0, 2, DIM)

EIGENVALUES = {
    "power": _INDEX**-1.5,
    "exponential": 0.8**_INDEX,
    "vanishing": 0.5**_INDEX,
    "clustered": np.r_[5 + 1e-3 * _UNIFORM[:8], 1 + 0.1 * _UNIFORM[8:]],
    "multiple": np.r_[[5] * 4, [4] * 3, [3] * 2, _UNIFORM[9:]],
    "indefinite": np.r_[-4, -3, 5, _RNG.standard_normal(DIM - 3)],
    "negative": -(_INDEX**-1.0),
    "singular": np.where(_INDEX < 30, 1 / _INDEX, 0.0),
    "identity": np.ones(DIM),
    "zero": np.zeros(DIM),
    "positive": np.r_[_UNIFORM[:-1] + 0.1, 50],
}


@cache
def matrix(name: str, dtype: type = np.float64) -> np.ndarray:
    """Return the matrix with the given eigenvalues in a random basis."""
    basis = np.linalg.qr(np.random.default_rng(1).standard_normal((DIM, DIM)))[0]
    dense = (basis * EIGENVALUES[name]) @ basis.T
    return ((dense + dense.T) / 2).astype(dtype)


class Counted:
    """A matrix-vector product that counts."""

    def __init__(self, matrix: np.ndarray):
        self.matrix, self.count = matrix, 0

    def __call__(self, x: np.ndarray) -> np.ndarray:
        self.count += 1
        return self.matrix @ x
