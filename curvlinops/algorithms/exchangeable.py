"""Traces and diagonals from estimators that make the most of every random vector.

Each random vector spans, together with the others, a subspace in which the matrix is known, and
probes what the subspace of all *others* leaves out. Averaging over which vector is left out gives
the variance of both (Epperly, Tropp and Webber, XTrace: making the most of every sample in
stochastic trace estimation, SIAM Journal on Matrix Analysis and Applications 2024).
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.probes import (
    Average,
    Estimate,
    Goal,
    Probes,
    Sample,
    append,
    grow,
    number_estimator,
    quadratic_forms,
    rescale,
    vector_estimator,
)
from curvlinops.support.progress import solves


@number_estimator
@solves("xtrace")
def xtrace(
    A: AnyMatrix,
    num_matvecs: int,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the trace of a square matrix with XTrace.

    ``tr(A) = mean_i  tr(P_i A P_i) + x_i^T (I - P_i) A (I - P_i) x_i``, with P_i the projection on
    the range of A times all random vectors but x_i (equation 2.3 and Algorithm 2.1 of Epperly et
    al. 2024). Unbiased for every matrix; exact if the rank is below ``num_matvecs / 2``. Of
    Gaussian and spherical vectors what is left out is scaled to its expected length, which removes
    part of the variance.

    Args:
        A: See ``hutchinson_trace``, also for the other arguments.
        num_matvecs: The largest number of products with ``A``, at least two; each random vector
            takes two. From D on, the result is exact.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too: from the scatter of the terms of
            the mean (section 2.5 of Epperly et al. 2024), times ``sqrt(2)`` since they depend on
            each other. In experiments between 0.8 and 1.5 times the actual one; of random signs
            down to half of it where few entries on the diagonal make up most of the matrix, whose
            signs often agree. It needs six products at least.
        chunk_size: How many vectors are multiplied at once. ``num_matvecs`` vectors and as many
            products are held in memory in any case.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        The estimate, a scalar. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``.

    Raises:
        ValueError: If the matrix is not square, ``num_matvecs`` is too small, or another argument
            is not among its choices.
    """
    probes = Probes(Matrix(A, square=True), distribution, chunk_size, seed, generator)
    sketch = _Sketch(probes)

    def samples(num: int) -> Tensor:
        sketch.grow(num)
        return _traces_of_sketch(sketch)

    goal = Goal(rtol, return_error)
    return _average(probes, num_matvecs, goal, samples, quadratic_forms)


@vector_estimator
@solves("xdiag")
def xdiag(
    A: AnyMatrix,
    num_matvecs: int,
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the diagonal of a square matrix with XDiag.

    ``diag(A) = mean_i  diag(P_i A) + x_i * ((I - P_i) A x_i)``, with Rademacher vectors x_i and P_i
    the projection on the range of A times all others (section 2.4 of Epperly et al. 2024). Unbiased
    for every matrix, which must have products with its transpose; exact if the rank is below
    ``num_matvecs / 2``.

    Args:
        A: See ``hutchinson_trace``, also for the other arguments.
        num_matvecs: The largest number of products with ``A`` and its transpose, at least two; each
            random vector takes two. From D on, the result is exact.
        rtol: Stop when the norm of the standard errors is this small, relative to that of the
            estimate.
        return_error: Whether to return the standard errors, too; see ``xtrace``.
        chunk_size: How many vectors are multiplied at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        The estimate ``[D]``. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``, both ``[D]``.

    Raises:
        ValueError: If the matrix is not square, ``num_matvecs`` is too small, or another argument
            is not among its choices.
        NotImplementedError: If ``A`` has no products with its transpose.
    """
    probes = Probes(Matrix(A, square=True), "rademacher", chunk_size, seed, generator)
    sketch = _Sketch(probes, adjoint=True)

    def samples(num: int) -> Tensor:
        sketch.grow(num)
        left_out = _left_out(sketch.R)
        lengths = (left_out * sketch.R.double()).sum(0).to(sketch.Q.dtype)
        S = left_out.to(sketch.Q.dtype)
        QS = sketch.Q @ S
        known = (sketch.Q * sketch.Z).sum(1, keepdim=True)
        return known + QS * (sketch.X * lengths - sketch.Z @ S)

    return _average(probes, num_matvecs, Goal(rtol, return_error), samples, torch.mul)


def _average(
    probes: Probes, num_matvecs: int, goal: Goal, samples: Callable[[int], Tensor], exact: Sample
) -> Any:
    """Average over the vector that is left out, for more and more vectors.

    The samples depend on each other through all vectors. Where pairs of vectors dominate, the mean
    of all has twice the variance that it would have were they independent: a sum over ordered pairs
    has each pair twice. Experiments with many spectra show from 0.9 to 3 times.
    """

    def estimate(count: int) -> tuple[Tensor, Tensor]:
        average = Average()
        average.update(samples(count).to(probes.matrix.dtype))
        return average.mean, 2**0.5 * average.standard_error

    return grow(probes, num_matvecs, 2, goal, estimate, exact)


class _Sketch:
    """Random vectors X, ``A X = Q R`` with orthonormal Q, and ``Z = A Q`` or ``A^T Q``."""

    def __init__(self, probes: Probes, adjoint: bool = False):
        self._probes, self._adjoint = probes, adjoint
        empty = probes.draw(0)
        self.X, self.Q, self.Z = empty, empty, empty
        self.R = empty.new_zeros(0, 0)

    def grow(self, num: int) -> None:
        """Extend all to ``num`` random vectors; what is there remains as it is."""
        new = self._probes.draw(num - self.X.shape[1])
        Y, old = self._probes.multiply(new), len(self.R)
        # Householder's: orthogonal to Q also where products depend on it, or vanish
        basis, coefficients = torch.linalg.qr(torch.cat([self.Q, Y], dim=1))
        basis = basis[:, old:]
        R = self.R.new_zeros(num, num)
        R[:old, :old], R[:old, old:] = self.R, self.Q.T @ Y
        R[old:, old:] = coefficients[old:, old:]
        self.X, self.Q, self.R = append(self.X, new), append(self.Q, basis), R
        # contiguous vectors multiply fastest
        product = self._probes.multiply(basis.T.contiguous().T, self._adjoint)
        self.Z = append(self.Z, product)


def _left_out(R: Tensor) -> Tensor:
    """Return unit columns ``s_i``, orthogonal to the columns of R except for the i-th.

    If a column depends on the others, any direction that is orthogonal to all serves: a diagonal
    entry of zero is replaced by one that is negligible.
    """
    R = R.double().clone()
    diagonal = R.diagonal()
    tiny = torch.finfo(torch.float64).eps * (R.abs().max() + (R == 0).all())
    diagonal.copy_(torch.where(diagonal.abs() < tiny, tiny, diagonal))
    eye = torch.eye(len(R), dtype=R.dtype, device=R.device)
    S = torch.linalg.solve_triangular(R.T, eye, upper=False)
    return S / S.norm(dim=0)


def _traces_of_sketch(sketch: _Sketch) -> Tensor:
    """Return XTrace's estimates ``[K]``, each of which leaves one random vector out."""
    Q, R = sketch.Q, sketch.R.double()
    H, W, T = ((M.T @ N).double() for M, N in [(Q, sketch.Z), (Q, sketch.X), (sketch.Z, sketch.X)])
    S = _left_out(R)
    inside = H.trace() - (S * (H @ S)).sum(0)
    V = W - S * (S * W).sum(0)  # P_i x_i = Q v_i
    outside = (W * R - T * V - V * R + V * (H @ V)).sum(0)
    lengths = sketch.X.double().square().sum(0)
    return inside + rescale(outside, lengths - V.square().sum(0), lengths, sketch._probes, len(R))
