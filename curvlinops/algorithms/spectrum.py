"""Densities of spectra, smoothed, on linear and logarithmic axes."""

from collections.abc import Callable
from math import inf, isfinite, log, sqrt
from typing import Any, Concatenate, Generic, Literal, NamedTuple, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.convergence import ConvergenceWarning
from curvlinops.algorithms.lanczos import Lanczos, Quadrature, check_ncv
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, TorchMatrix
from curvlinops.algorithms.probes import Average, P, Probes, Value
from curvlinops.support.arguments import check_count
from curvlinops.support.progress import solves
from curvlinops.support.torch_modes import in_default_modes
from curvlinops.support.warnings import warn

#: Smallest and largest eigenvalue, as far as they are known.
Boundaries = tuple[float | None, float | None] | None

#: Nodes with less weight are rounding errors.
_NEGLIGIBLE = 1e-14

#: How many Lanczos vectors a search for the ends of a spectrum takes, and how many bytes.
_SEARCH_STEPS, _SEARCH_BYTES = 500, 2**30


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


class _LanczosRuns:
    """Lanczos runs from random directions, which are kept and made as they are needed.

    They belong to the matrix as it was when they were made.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        ncv: The number of products for each random vector, from 2 to D.
        boundaries: The ends of the spectrum, or of its absolute values on a logarithmic axis; each
            may be ``None``, and is then estimated.
        boundaries_tol: How accurate estimated boundaries must be, relative to the spread.
        chunk_size: How many random vectors are taken at once; ``ncv`` vectors are held in memory
            for each. Default: as many as need 64 MiB.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Raises:
        ValueError: See ``lanczos_approximate_spectrum``.
    """

    #: Whether boundaries are those of absolute values.
    _is_log = False

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
        self._matrix = Matrix(A, square=True)
        self._ncv = check_ncv(ncv, self._matrix, at_least=2)
        self._boundaries = _check_boundaries(boundaries)
        if self._is_log and any(end is not None and end < 0 for end in self._boundaries):
            raise ValueError(f"boundaries are absolute values here, got {boundaries}.")
        if not 0 < boundaries_tol < 1:
            raise ValueError(f"boundaries_tol must lie between 0 and 1, got {boundaries_tol!r}.")
        self._tol = boundaries_tol
        self._probes = Probes(self._matrix, "sphere", chunk_size, seed, generator, held=ncv)
        # a search for the ends must not change the directions of later runs
        device = self._matrix.device
        drawn = torch.randint(2**62, (), generator=self._probes.generator, device=device)
        self._search_probes = Probes(self._matrix, "sphere", seed=int(drawn))
        self._rules: list[Quadrature] = []
        self._search: Quadrature | None = None

    def _density(
        self,
        num_repeats: int,
        num_points: int,
        kappa: float,
        margin: float,
        return_error: bool,
        epsilon: float | None = None,
    ) -> Any:
        """Return grid and density; with ``epsilon`` that of ``|lambda| + epsilon``."""
        num_repeats = check_count("num_repeats", num_repeats, 1 + return_error)
        num_points = check_count("num_points", num_points, 2)
        if not 1 < kappa < inf:
            raise ValueError(f"kappa must be larger than one, and finite, got {kappa!r}.")
        if not 0 <= margin < inf:
            raise ValueError(f"margin must not be negative, and finite, got {margin!r}.")
        rules = self._runs(num_repeats)
        nodes, weights, unit = rules.nodes, rules.weights, 1.0
        if epsilon is None:
            low, high = self._ends(rules)
            unit = max(abs(low), abs(high)) or 1.0
        else:
            nodes = (nodes.abs() + epsilon).log()
            low, high = self._log_ends(rules, epsilon)
        if high - low < 1e-4 * unit:
            low, high = low - 1e-2 * unit, high + 1e-2 * unit
        extra = margin * (high - low)
        low, high = low - extra, high + extra
        points = torch.linspace(low, high, num_points, dtype=torch.float64, device=nodes.device)
        _check_inside(nodes[weights > _NEGLIGIBLE], points)
        sigma = (high - low) / ((self._ncv - 1) * sqrt(8 * log(kappa)))
        grid, average = points if epsilon is None else points.exp(), Average()
        # trapezoids add up to one
        half = grid.diff() / 2
        widths = torch.nn.functional.pad(half, (0, 1)) + torch.nn.functional.pad(half, (1, 0))
        for run in zip(nodes, weights, strict=True):
            density, error = average.update((_smooth(points, sigma, *run) / widths).unsqueeze(1))
        matrix = self._matrix
        results = [matrix.write(x.to(matrix.dtype)) for x in (grid, density, error)]
        return SpectralDensity(*results) if return_error else tuple(results[:2])

    def _runs(self, num: int) -> Quadrature:
        """Return the rules of the first ``num`` runs, each with ``ncv`` nodes."""
        missing = num - sum(len(rule.nodes) for rule in self._rules)
        for start in range(0, missing, self._probes.chunk_size):
            X = self._probes.draw(min(self._probes.chunk_size, missing - start))
            self._rules.append(Lanczos(self._matrix, X).extend(self._ncv))
        return Quadrature(*(torch.cat(parts)[:num] for parts in zip(*self._rules, strict=True)))

    def _ends(self, rules: Quadrature) -> tuple[float, float]:
        """Return the ends of the spectrum: those that are known, estimates of the others."""
        unknown = [end for end in (0, 1) if self._boundaries[end] is None]
        if not unknown:
            return self._boundaries
        estimates = self._outermost(rules, unknown)
        low, high = (
            estimate if end is None else end
            for estimate, end in zip(estimates, self._boundaries, strict=True)
        )
        if low > high:
            raise ValueError(f"boundaries {self._boundaries} do not fit the spectrum, {estimates}.")
        return low, high

    def _log_ends(self, rules: Quadrature, epsilon: float) -> tuple[float, float]:
        """Return the logarithms of the ends of ``|lambda| + epsilon``."""
        low, high = self._boundaries
        if low is None:
            # it may lie in the interior of the spectrum, of which nothing else is known
            low = float(rules.nodes[rules.weights > _NEGLIGIBLE].abs().min())
        if high is None:
            high = max(abs(end) for end in self._outermost(rules, [0, 1]))
        return log(low + epsilon), log(high + epsilon)

    def _outermost(self, rules: Quadrature, wanted: list[int]) -> tuple[float, float]:
        """Return estimates of both ends of the spectrum from given runs.

        If they are not accurate enough, another run is continued until they are.

        Args:
            rules: The runs.
            wanted: Which ends must be accurate: 0, 1, or both.
        """
        (low, high), errors = _outermost_nodes(rules)
        if not self._is_accurate(rules, wanted):
            if self._search is None:
                self._search = self._search_ends(wanted)
            found, errors = _outermost_nodes(self._search)
            low, high = min(low, found[0]), max(high, found[1])
        return low - errors[0], high + errors[1]

    def _search_ends(self, wanted: list[int]) -> Quadrature:
        """Continue one run until its ends are accurate, or it has as many vectors as allowed."""
        dim, itemsize = self._matrix.shape[0], self._matrix.dtype.itemsize
        affordable = max(min(_SEARCH_STEPS, _SEARCH_BYTES // (dim * itemsize)), self._ncv)
        run, steps = Lanczos(self._matrix, self._search_probes.draw(1)), self._ncv
        while True:
            steps = min(2 * steps, affordable, dim)
            rule = run.extend(steps)
            if run.exhausted or self._is_accurate(rule, wanted):
                return rule
            if steps == affordable:
                warn(
                    f"After {steps} Lanczos vectors the ends of the spectrum are not as accurate "
                    f"as boundaries_tol={self._tol}. The grid is wider by their errors. Pass "
                    "boundaries, or a larger boundaries_tol.",
                    ConvergenceWarning,
                )
                return rule

    def _is_accurate(self, rules: Quadrature, wanted: list[int]) -> bool:
        (low, high), errors = _outermost_nodes(rules)
        return all(errors[end] <= self._tol * (high - low) for end in wanted)


class LanczosApproximateSpectrumCached(_LanczosRuns):
    """The density of a symmetric matrix's spectrum, for trying widths without new products.

    Lanczos runs are kept, and made as they are needed; they belong to the matrix as it was when
    they were made. All arguments are those of ``lanczos_approximate_spectrum``.
    """

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
        return self._density(num_repeats, num_points, kappa, margin, return_error)


class LanczosApproximateLogSpectrumCached(_LanczosRuns):
    """The density of a spectrum on a logarithmic axis, for trying widths without new products.

    All arguments are those of ``lanczos_approximate_log_spectrum``. See also
    ``LanczosApproximateSpectrumCached``.
    """

    _is_log = True

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
        return self._density(num_repeats, num_points, kappa, margin, return_error, epsilon)


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
            from the Lanczos runs. If these are not accurate enough, another run is continued, up to
            500 vectors or 1 GiB.
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
        A: A symmetric matrix. See ``lanczos_approximate_spectrum`` for all arguments.
        ncv: The number of products for each random vector, from 2 to D.
        num_points: Number of points of the grid.
        num_repeats: The number of random vectors.
        kappa: Larger than one; the larger, the narrower the Gaussians.
        boundaries: Smallest and largest absolute value of the eigenvalues; each may be ``None``.
        margin: By how much the grid extends the boundaries, relative to their distance in the
            logarithm.
        boundaries_tol: How accurate an estimate of the largest must be, relative to the spread.
        epsilon: Positive. It shifts the absolute values, so that they have logarithms.
        return_error: Whether to return the standard error of the density, too.
        chunk_size: How many random vectors are taken at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        Grid and density, both ``[num_points]``, or with ``return_error`` a named tuple.
    """
    cached = LanczosApproximateLogSpectrumCached(
        A, ncv, boundaries, boundaries_tol, chunk_size=chunk_size, seed=seed, generator=generator
    )
    return cached.approximate_log_spectrum(
        num_repeats, num_points, kappa, margin, epsilon, return_error=return_error
    )


def _smooth(points: Tensor, sigma: float, nodes: Tensor, weights: Tensor) -> Tensor:
    """Return how much of the Gaussians around nodes is nearest to each point.

    Args:
        points: Evenly spaced and ascending, ``[P]``.
        sigma: The standard deviation of the Gaussians.
        nodes: ``[M]``, between the first and the last point.
        weights: Their weights ``[M]``.

    Returns:
        Shares ``[P]`` that add up to the sum of the weights: what is beyond the ends of the
        axis is distributed over each Gaussian's share inside.
    """
    edges = torch.cat([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]])
    x = (edges - nodes.unsqueeze(1)) / sigma
    left, right = x[:, :-1], x[:, 1:]
    # in the tail where differences are accurate
    shares = torch.where(
        left > 0,
        torch.special.ndtr(-left) - torch.special.ndtr(-right),
        torch.special.ndtr(right) - torch.special.ndtr(left),
    )
    return (weights.unsqueeze(1) * shares / shares.sum(1, keepdim=True)).sum(0)


def _check_inside(nodes: Tensor, points: Tensor) -> None:
    """Check that no node lies outside of the grid, where it would be lost."""
    low, high = float(points[0]), float(points[-1])
    outside = nodes[(nodes < low) | (nodes > high)]
    if len(outside):
        raise ValueError(
            f"The matrix has eigenvalues outside of the boundaries (and their margin): found "
            f"{float(outside[0]):.3e} on an axis from {low:.3e} to {high:.3e}. Pass wider "
            "boundaries, or None to have them estimated."
        )


def _outermost_nodes(rules: Quadrature) -> tuple[list[float], list[float]]:
    """Return the outermost nodes, and their residuals, within which there are eigenvalues."""
    low, high = int(rules.nodes[:, 0].argmin()), int(rules.nodes[:, -1].argmax())
    nodes = [float(rules.nodes[low, 0]), float(rules.nodes[high, -1])]
    return nodes, [float(rules.residuals[low, 0]), float(rules.residuals[high, -1])]


def _check_boundaries(boundaries: Boundaries) -> tuple[float | None, float | None]:
    if boundaries is None:
        return None, None
    if not isinstance(boundaries, list | tuple) or len(boundaries) != 2:
        raise ValueError(f"boundaries must be a pair, got {boundaries!r}.")
    low, high = (None if end is None else float(end) for end in boundaries)
    numbers = [end for end in (low, high) if end is not None]
    if not all(isfinite(end) for end in numbers) or (len(numbers) == 2 and not low < high):
        raise ValueError(f"boundaries must be finite and ascending, got {boundaries!r}.")
    return low, high
