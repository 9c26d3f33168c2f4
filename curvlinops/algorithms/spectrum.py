"""Densities of spectra, smoothed, on linear and logarithmic axes."""

from collections.abc import Callable
from dataclasses import replace
from math import inf, log
from typing import Any, Concatenate, Generic, Literal, NamedTuple, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.density import NEGLIGIBLE, Axis, Boundaries, KeptRuns, densities
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, TorchMatrix
from curvlinops.algorithms.probes import Average, P, Value
from curvlinops.support.arguments import check_count
from curvlinops.support.progress import solves
from curvlinops.support.torch_modes import in_default_modes


class SpectralDensity(NamedTuple, Generic[Value]):
    """A density on a grid, with its standard error.

    Attributes:
        grid: Eigenvalues, ascending, ``[num_points]``.
        density: The density per unit of the eigenvalue, ``[num_points]``.
        standard_error: That of the density, from the scatter between random vectors.
    """

    grid: Value
    density: Value
    standard_error: Value


_Both = Tensor | np.ndarray
#: Grid and density, perhaps with an error.
_Density = tuple[_Both, _Both] | SpectralDensity[_Both]


class _Estimator(Protocol[P]):
    @overload
    def __call__(
        self, A: TorchMatrix, *args: Any, return_error: Literal[True], **options: Any
    ) -> SpectralDensity[Tensor]: ...
    @overload
    def __call__(
        self, A: AnyMatrix, *args: Any, return_error: Literal[True], **options: Any
    ) -> SpectralDensity[np.ndarray]: ...
    @overload
    def __call__(
        self, A: TorchMatrix, *args: P.args, **options: P.kwargs
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def __call__(
        self, A: AnyMatrix, *args: P.args, **options: P.kwargs
    ) -> tuple[np.ndarray, np.ndarray]: ...


def _estimator(function: Callable[Concatenate[AnyMatrix, P], object]) -> _Estimator[P]:
    return in_default_modes(function)


class LanczosApproximateSpectrumCached:
    """The density of a symmetric matrix's spectrum, for trying widths without new products.

    See ``lanczos_approximate_spectrum``. Lanczos runs are kept, and made as they are needed; they
    belong to the matrix as it was when they were made.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        ncv: The number of products for each random vector, from 2 to D.
        boundaries: Smallest and largest eigenvalue, where known.
        boundaries_tol: How accurate estimates of the others must be, relative to the spread.
        chunk_size: How many random vectors are taken at once; ``ncv`` vectors are held in memory
            for each. Default: as many as need 64 MiB.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Raises:
        ValueError: See ``lanczos_approximate_spectrum``.
    """

    def __init__(
        self,
        A: AnyMatrix,
        ncv: int,
        boundaries: Boundaries = None,
        boundaries_tol: float = 1e-2,
        *,
        chunk_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ):
        self._runs = KeptRuns(A, ncv, boundaries, boundaries_tol, chunk_size, seed, generator)

    @overload
    def approximate_spectrum(
        self, *args: Any, return_error: Literal[True], **options: float
    ) -> SpectralDensity[_Both]: ...
    @overload
    def approximate_spectrum(
        self,
        num_repeats: int = ...,
        num_points: int = ...,
        kappa: float = ...,
        margin: float = ...,
    ) -> tuple[_Both, _Both]: ...
    @in_default_modes
    @solves("approximate_spectrum")
    def approximate_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 3.0,
        margin: float = 0.05,
        *,
        return_error: bool = False,
    ) -> _Density:
        """Return grid and density; see ``lanczos_approximate_spectrum``."""
        num_repeats = check_count("num_repeats", num_repeats, 1 + return_error)
        rules = self._runs.take(num_repeats)
        ends = self._runs.ends(rules)
        unit = max(abs(end) for end in ends) or 1.0
        axis = Axis.of(ends, num_points, margin, kappa, self._runs.ncv, unit)
        axis.check_inside(rules.nodes, rules.weights)
        found = densities(axis, axis.points, rules)
        return _report(self._runs.matrix, axis.points, found, return_error)


class LanczosApproximateLogSpectrumCached:
    """The density of a spectrum on a logarithmic axis, for trying widths without new products.

    See ``lanczos_approximate_log_spectrum``, and ``LanczosApproximateSpectrumCached``.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        ncv: The number of products for each random vector, from 2 to D.
        boundaries: Smallest and largest absolute value of the eigenvalues, where known.
        boundaries_tol: How accurate an estimate of the largest must be, relative to the spread.
        chunk_size: How many random vectors are taken at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Raises:
        ValueError: See ``lanczos_approximate_log_spectrum``.
    """

    def __init__(
        self,
        A: AnyMatrix,
        ncv: int,
        boundaries: Boundaries = None,
        boundaries_tol: float = 1e-2,
        *,
        chunk_size: int | None = None,
        seed: int | None = None,
        generator: torch.Generator | None = None,
    ):
        self._runs = KeptRuns(A, ncv, boundaries, boundaries_tol, chunk_size, seed, generator)
        if any(end is not None and end < 0 for end in self._runs.known):
            raise ValueError(f"boundaries are absolute values here, got {boundaries}.")

    @overload
    def approximate_log_spectrum(
        self, *args: Any, return_error: Literal[True], **options: float
    ) -> SpectralDensity[_Both]: ...
    @overload
    def approximate_log_spectrum(
        self,
        num_repeats: int = ...,
        num_points: int = ...,
        kappa: float = ...,
        margin: float = ...,
        epsilon: float = ...,
    ) -> tuple[_Both, _Both]: ...
    @in_default_modes
    @solves("approximate_log_spectrum")
    def approximate_log_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 1.04,
        margin: float = 0.05,
        epsilon: float = 1e-5,
        *,
        return_error: bool = False,
    ) -> _Density:
        """Return grid and density; see ``lanczos_approximate_log_spectrum``."""
        if not 0 < epsilon < inf:
            raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}.")
        num_repeats = check_count("num_repeats", num_repeats, 1 + return_error)
        rules = self._runs.take(num_repeats)
        shifted = rules.nodes.abs() + epsilon
        low, high = (None if end is None else end + epsilon for end in self._runs.known)
        if low is None:
            # it may lie in the interior of the spectrum, of which nothing else is known
            low = float(shifted[rules.weights > NEGLIGIBLE].min())
        if high is None:
            high = max(abs(end) for end in self._runs.outermost(rules, [0, 1])) + epsilon
        axis = Axis.of((log(low), log(high)), num_points, margin, kappa, self._runs.ncv, 1.0)
        rules = replace(rules, nodes=shifted.log())
        axis.check_inside(rules.nodes, rules.weights)
        grid = axis.points.exp()
        return _report(self._runs.matrix, grid, densities(axis, grid, rules), return_error)


@_estimator
def lanczos_approximate_spectrum(
    A: AnyMatrix,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 3.0,
    boundaries: Boundaries = None,
    margin: float = 0.05,
    boundaries_tol: float = 1e-2,
    *,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> _Density:
    """Estimate the density of a symmetric matrix's eigenvalues.

    ``p(x) = 1/D sum_d g(x - lambda_d)``, g a Gaussian of standard deviation ``sigma = L / ((ncv -
    1) sqrt(8 log(kappa)))``, L the length of the grid; by stochastic Lanczos quadrature from random
    directions (Papyan, Traces of class/cross-class structure pervade deep learning spectra, JMLR
    2020, section 3; Ghorbani, Krishnan and Xiao, An investigation into neural net optimization via
    Hessian eigenvalue density, ICML 2019). Values are averages over the grid's cells, so that the
    trapezoidal rule gives one whatever the width.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        ncv: The number of products for each random vector, from 2 to D. More resolve more.
        num_points: Number of points of the grid.
        num_repeats: The number of random vectors.
        kappa: Larger than one; the larger, the narrower the Gaussians: each has fallen to
            ``1 / kappa`` of its height half way to the next of ``ncv`` evenly spaced points.
        boundaries: Smallest and largest eigenvalue; each may be ``None``, and is then estimated
            from the Lanczos runs, continued where they are not accurate enough.
        margin: By how much the grid extends the boundaries on both sides, relative to their
            distance.
        boundaries_tol: How accurate estimated boundaries must be, relative to their distance.
        return_error: Whether to return the standard error of the density, too.
        chunk_size: How many random vectors are taken at once; ``ncv`` vectors are held in memory
            for each. Default: as many as need 64 MiB.
        seed: Seeds the random vectors.
        generator: Draws the random vectors. Default: one seeded by PyTorch's global generator.

    Returns:
        Grid and density, both ``[num_points]``. With ``return_error`` a named tuple of ``grid``,
        ``density`` and ``standard_error``.

    Raises:
        ValueError: If products show that the matrix is not symmetric, it has eigenvalues outside of
            the boundaries and their margin, or an argument is not among its choices.
    """
    cached = LanczosApproximateSpectrumCached(
        A, ncv, boundaries, boundaries_tol, chunk_size=chunk_size, seed=seed, generator=generator
    )
    return cached.approximate_spectrum(
        num_repeats, num_points, kappa, margin, return_error=return_error
    )


@_estimator
def lanczos_approximate_log_spectrum(
    A: AnyMatrix,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 1.04,
    boundaries: Boundaries = None,
    margin: float = 0.05,
    boundaries_tol: float = 1e-2,
    epsilon: float = 1e-5,
    *,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> _Density:
    """Estimate the density of ``|lambda| + epsilon``, smoothed on a logarithmic axis.

    The density of ``log(|lambda| + epsilon)`` is smoothed as in ``lanczos_approximate_spectrum``
    (Papyan 2020, appendix C), and returned as one of ``|lambda| + epsilon`` itself: per unit of the
    eigenvalue, on a grid that is evenly spaced in the logarithm. ``grid * density`` is the density
    per unit of the natural logarithm.

    Args:
        A: See ``lanczos_approximate_spectrum``, also for the other arguments.
        ncv: The number of products for each random vector, from 2 to D.
        num_points: Number of points of the grid.
        num_repeats: The number of random vectors.
        kappa: Larger than one; the larger, the narrower the Gaussians.
        boundaries: Smallest and largest absolute value of the eigenvalues; each may be ``None``.
        margin: By how much the grid extends the boundaries, relative to their distance in the
            logarithm.
        boundaries_tol: How accurate an estimate of the largest must be, relative to the spread.
        epsilon: Shifts the absolute values, so that they have logarithms.
        return_error: Whether to return the standard error of the density, too.
        chunk_size: How many random vectors are taken at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        Grid and density, both ``[num_points]``. With ``return_error`` a named tuple of ``grid``,
        ``density`` and ``standard_error``.

    Raises:
        ValueError: See ``lanczos_approximate_spectrum``; also if a boundary is negative, or
            ``epsilon`` is not positive and finite.
    """
    cached = LanczosApproximateLogSpectrumCached(
        A, ncv, boundaries, boundaries_tol, chunk_size=chunk_size, seed=seed, generator=generator
    )
    return cached.approximate_log_spectrum(
        num_repeats, num_points, kappa, margin, epsilon, return_error=return_error
    )


def _report(matrix: Matrix, grid: Tensor, found: Average, return_error: bool) -> _Density:
    values = [grid, found.mean] + ([found.standard_error] if return_error else [])
    values = [matrix.write(value.to(matrix.device, matrix.dtype)) for value in values]
    return SpectralDensity(*values) if return_error else tuple(values)
