"""Eigenpairs, traces and densities from products, and their errors."""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from problems import Problem
from scipy.sparse.linalg import LinearOperator, eigsh
from scipy.stats import wasserstein_distance
from torch import Tensor
from truth import ggn_eigenvalues, ggn_trace

PAIRS, TOLERANCE, PRODUCTS = 10, 1e-3, 30
EIGENPAIRS = "{}, ten eigenpairs"
EIGENPAIRS_SCIPY = "{}, ten eigenpairs by scipy"
TRACES = {
    "GGN trace, Hutchinson": "hutchinson_trace",
    "GGN trace, Hutch++": "hutchpp_trace",
    "GGN trace, XTrace": "xtrace",
    "GGN trace, XNysTrace": "xnystrace",
}
DENSITY = f"GGN density, {PRODUCTS} Lanczos steps"


class Found(NamedTuple):
    """The result of an algorithm.

    Attributes:
        products: The number of products, if it is known.
        error: Computes the error; None if the exact result is not known.
    """

    products: int | None
    error: Callable[[], float | None]


def eigenpairs(library: ModuleType, name: str, A: Any) -> dict[str, Callable[[], Found]]:
    """Return this package's search for the largest eigenvalues, and scipy's with its operator."""

    starts, by_scipy = _starts(A), eigenpairs_by_scipy(A)

    def run() -> Found:
        pairs = library.eigsh(A, PAIRS, which="LA", tol=TOLERANCE, v0=next(starts))
        return Found(pairs.num_products, lambda: _residual(A, *pairs))

    def run_by_scipy() -> Found:
        with A.linearized():
            return by_scipy()

    return {EIGENPAIRS.format(name): run, EIGENPAIRS_SCIPY.format(name): run_by_scipy}


def _starts(A: LinearOperator) -> Iterator[np.ndarray]:
    """Generate start vectors, the same for all packages: the number of products depends on them."""
    for seed in count():
        yield np.random.default_rng(seed).standard_normal(A.shape[0], dtype=A.dtype)


def eigenpairs_by_scipy(A: LinearOperator) -> Callable[[], Found]:
    """Return ARPACK's search for the largest eigenvalues."""
    starts = _starts(A)
    return lambda: _by_scipy(A, next(starts))


def _by_scipy(A: LinearOperator, v0: np.ndarray) -> Found:
    products = 0

    def multiply(x: np.ndarray) -> np.ndarray:
        nonlocal products
        products += 1
        return A @ x

    counted = LinearOperator(A.shape, multiply, dtype=A.dtype)
    values, vectors = eigsh(counted, PAIRS, which="LA", tol=TOLERANCE, v0=v0)
    return Found(products, lambda: _residual(A, values, vectors))


def _residual(A: Any, values: Any, vectors: Any) -> float:
    """Return the largest residual, relative to its eigenvalue."""
    columns = [vectors[:, i] for i in range(len(values))]
    norm = torch.linalg.norm if isinstance(values, Tensor) else np.linalg.norm
    pairs = zip(values, columns, strict=True)
    return max(float(norm(A @ x - value * x) / abs(value)) for value, x in pairs)


def estimates(library: ModuleType, G: Any, problem: Problem) -> dict[str, Callable[[], Found]]:
    """Return the estimates that a library has of a GGN's trace and density."""
    num = min(PRODUCTS, G.shape[0] - G.shape[0] % 6)  # some take thirds, some halves
    true_trace = cache(lambda: ggn_trace(problem))
    true_values = cache(lambda: ggn_eigenvalues(problem))

    def trace(function: str) -> Found:
        found = float(getattr(library, function)(G, num))

        def error() -> float | None:
            exact = true_trace()
            return None if exact is None else abs(found - exact) / exact

        return Found(num, error)

    def density() -> Found:
        # a GGN is positive semidefinite
        found = library.lanczos_approximate_spectrum(G, num, boundaries=(0.0, None))
        return Found(None, lambda: _distance(*found, true_values(), G.shape[0]))

    present = {row: name for row, name in TRACES.items() if hasattr(library, name)}
    rows = {row: (lambda name=name: trace(name)) for row, name in present.items()}
    return rows | {DENSITY: density}


def _distance(grid: Tensor, density: Tensor, values: Tensor | None, dim: int) -> float | None:
    """Return the Wasserstein distance from the spectrum, in units of the largest eigenvalue."""
    if values is None:
        return None
    spectrum, weights = np.append(values, 0.0), np.append(np.ones(len(values)), dim - len(values))
    mass = np.gradient(grid.cpu().double()) * np.asarray(density.cpu().double())
    return float(wasserstein_distance(grid.cpu(), spectrum, mass, weights) / spectrum.max())
