"""Matrices with known spectra."""

import torch
from torch import Tensor

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
