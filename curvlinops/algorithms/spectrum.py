"""Smoothed densities of spectra, on linear and logarithmic axes."""

from collections.abc import Callable
from math import inf, isfinite, log, sqrt
from typing import Concatenate, NamedTuple, Unpack

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.iteration import solver
from curvlinops.algorithms.lanczos import Quadrature, lanczos
from curvlinops.algorithms.sampling import Estimator, P, RandomOptions, RunningMean, Sampler
from curvlinops.support.arguments import check_count
from curvlinops.support.torch_modes import in_default_modes, uncompiled

#: Smallest and largest eigenvalue; those that are ``None`` are estimated.
Boundaries = tuple[float | None, float | None] | None

#: Nodes with less weight are rounding errors.
_NEGLIGIBLE = 1e-14


class SpectralDensity(NamedTuple):
    """A density on a grid, with its standard error.

    Attributes:
        grid: Eigenvalues, ascending, ``[num_points]``.
        density: The density per unit of the eigenvalue, ``[num_points]``.
        standard_error: The standard error of the density, from the scatter of random vectors.
    """

    grid: Tensor
    density: Tensor
    standard_error: Tensor


#: Grid and density; with ``return_error`` also the error.
Density = tuple[Tensor, Tensor] | SpectralDensity


def _estimator(
    function: Callable[Concatenate[AnyMatrix, P], Density],
) -> Estimator[P, tuple[Tensor, Tensor], SpectralDensity]:
    return in_default_modes(function)


class LanczosApproximateSpectrumCached:
    """The density of a symmetric matrix's spectrum, for several widths without new products.

    The Lanczos runs from random directions are kept, and describe the matrix at the time of the
    first call; further runs are made when they are needed. The arguments are those of
    ``lanczos_approximate_spectrum``. On a logarithmic axis, boundaries are those of absolute
    eigenvalues.
    """

    @uncompiled
    def __init__(
        self,
        A: AnyMatrix,
        ncv: int,
        boundaries: Boundaries = None,
        **options: Unpack[RandomOptions],
    ):
        self._matrix = Matrix(A, square=True)
        self._ncv = check_count("ncv", ncv, at_least=2, at_most=self._matrix.shape[0])
        self._boundaries = _check_boundaries(boundaries)
        self._sampler = Sampler(self._matrix, "sphere", ncv, **options)
        self._rules: list[Quadrature] = []

    @in_default_modes
    def approximate_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 3.0,
        margin: float = 0.05,
        *,
        return_error: bool = False,
    ) -> Density:
        """Return grid and density; see ``lanczos_approximate_spectrum``."""
        return self._density(num_repeats, num_points, kappa, margin, return_error)

    @in_default_modes
    def approximate_log_spectrum(
        self,
        num_repeats: int = 1,
        num_points: int = 1024,
        kappa: float = 1.04,
        margin: float = 0.05,
        epsilon: float = 1e-5,
        *,
        return_error: bool = False,
    ) -> Density:
        """Return grid and density; see ``lanczos_approximate_log_spectrum``."""
        if not 0 < epsilon < inf:
            raise ValueError(f"epsilon must be positive and finite, got {epsilon!r}.")
        if any(end is not None and end < 0 for end in self._boundaries):
            raise ValueError(f"boundaries are absolute values here, got {self._boundaries}.")
        return self._density(num_repeats, num_points, kappa, margin, return_error, epsilon)

    def _density(
        self,
        num_repeats: int,
        num_points: int,
        kappa: float,
        margin: float,
        return_error: bool,
        epsilon: float | None = None,
    ) -> Density:
        """Return grid and density; with ``epsilon`` on a logarithmic axis."""
        num_repeats = check_count("num_repeats", num_repeats, 1 + return_error)
        num_points = check_count("num_points", num_points, 2)
        if not 1 < kappa < inf:
            raise ValueError(f"kappa must be larger than one, and finite, got {kappa!r}.")
        if not 0 <= margin < inf:
            raise ValueError(f"margin must not be negative, and finite, got {margin!r}.")
        is_log = epsilon is not None
        with solver(self._matrix.operator):
            rules = self._runs(num_repeats)
            low, high = self._ends(rules, is_log)
        nodes, weights, unit = rules.nodes, rules.weights, 1.0
        if is_log:
            nodes = (nodes.abs() + epsilon).log()
            low, high = log(low + epsilon), log(high + epsilon)
        else:
            unit = max(abs(low), abs(high)) or 1.0
        if high - low < 1e-4 * unit:
            low, high = low - 1e-2 * unit, high + 1e-2 * unit
        extra = margin * (high - low)
        low, high = low - extra, high + extra
        points = torch.linspace(low, high, num_points, dtype=torch.float64, device=nodes.device)
        _check_inside(nodes[weights > _NEGLIGIBLE], points)
        sigma = (high - low) / ((self._ncv - 1) * sqrt(8 * log(kappa)))
        grid = points.exp() if is_log else points
        # with these widths of the cells, the trapezoidal rule gives one
        half = grid.diff() / 2
        widths = torch.nn.functional.pad(half, (0, 1)) + torch.nn.functional.pad(half, (1, 0))
        runs = zip(nodes, weights, strict=True)
        densities = torch.stack([_smooth(points, sigma, *run) / widths for run in runs], dim=1)
        density, error = RunningMean().update(densities)
        results = [x.to(self._matrix.dtype) for x in (grid, density, error)]
        return SpectralDensity(*results) if return_error else tuple(results[:2])

    def _runs(self, num: int) -> Quadrature:
        """Return the rules of ``num`` runs, with ``ncv`` nodes; fewer if the callback stops."""
        missing = num - sum(len(rule.nodes) for rule in self._rules)
        for start in range(0, missing, self._sampler.chunk_size):
            X = self._sampler.draw(min(self._sampler.chunk_size, missing - start))
            self._rules.append(lanczos(self._matrix, X, self._ncv))
            if self._sampler.stops(len(self._rules), self._rules[-1].nodes):
                break
        return Quadrature(*(torch.cat(parts)[:num] for parts in zip(*self._rules, strict=True)))

    def _ends(self, rules: Quadrature, is_log: bool) -> tuple[float, float]:
        """Return the user's boundaries, or where they are not given those of the runs."""
        least, greatest = (
            int(x) for x in (rules.nodes[:, 0].argmin(), rules.nodes[:, -1].argmax())
        )
        ends = (
            float(rules.nodes[least, 0] - rules.residuals[least, 0]),
            float(rules.nodes[greatest, -1] + rules.residuals[greatest, -1]),
        )
        if is_log:
            # the smallest absolute value may lie in the interior of the spectrum
            inner = rules.nodes[rules.weights > _NEGLIGIBLE].abs().min()
            ends = float(inner), max(map(abs, ends))
        low, high = (
            end if given is None else given
            for given, end in zip(self._boundaries, ends, strict=True)
        )
        return low, high


@_estimator
def lanczos_approximate_spectrum(
    A: AnyMatrix,
    ncv: int,
    num_points: int = 1024,
    num_repeats: int = 1,
    kappa: float = 3.0,
    boundaries: Boundaries = None,
    margin: float = 0.05,
    *,
    return_error: bool = False,
    **options: Unpack[RandomOptions],
) -> Density:
    """Estimate the density of a symmetric matrix's eigenvalues.

    ``p(x) = 1/D sum_d g(x - lambda_d)``, g a Gaussian of standard deviation ``sigma = L / ((ncv -
    1) sqrt(8 log(kappa)))``, L the length of the grid; by stochastic Lanczos quadrature from random
    directions (Papyan, Traces of class/cross-class structure pervade deep learning spectra, JMLR
    2020, section 3; Ghorbani, Krishnan and Xiao, An investigation into neural net optimization via
    Hessian eigenvalue density, ICML 2019). Values are averages over the grid's cells, so that the
    trapezoidal rule gives one for Gaussians of any width.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        ncv: The number of products for each random vector, from 2 to D. The resolution is about
            the length of the spectrum divided by ``ncv``.
        num_points: Number of points of the grid.
        num_repeats: The number of random vectors.
        kappa: Larger than one. The larger, the narrower the Gaussians: half way to the next of
            ``ncv`` evenly spaced points they have fallen to ``1 / kappa`` of their height.
        boundaries: Smallest and largest eigenvalue. An end that is ``None`` is that of the Lanczos
            runs, and their residual beyond it. For accurate ends, pass those of
            ``eigsh(A, 2, "BE")``.
        margin: How far the grid extends beyond the boundaries on both sides, relative to their
            distance.
        return_error: Whether to return the standard error of the density, too.
        **options: ``chunk_size``: number of random vectors at once; ``ncv`` vectors are held in
            memory for each. Default: as many as need 64 MiB. ``seed``: seed of the random vectors.
            ``generator``: generator that draws them. Default: one seeded by PyTorch's global one.
            ``callback``: a function that is called with an ``Iteration`` after each block of
            ``chunk_size`` random vectors; ``values`` are the Ritz values of the block, ``[K,
            ncv]``. If it returns ``True``, the density is that of the vectors so far.

    Returns:
        Grid and density, both ``[num_points]``. With ``return_error`` a named tuple of ``grid``,
        ``density`` and ``standard_error``.

    Raises:
        ValueError: If products show that the matrix is not symmetric, it has eigenvalues outside of
            the boundaries and their margin, or an argument is out of range.
    """
    cached = LanczosApproximateSpectrumCached(A, ncv, boundaries, **options)
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
    epsilon: float = 1e-5,
    *,
    return_error: bool = False,
    **options: Unpack[RandomOptions],
) -> Density:
    """Estimate the density of ``|lambda| + epsilon``, smoothed on a logarithmic axis.

    The density of ``log(|lambda| + epsilon)`` is smoothed as in ``lanczos_approximate_spectrum``
    (Papyan 2020, appendix C). The result is the density of ``|lambda| + epsilon``, per unit of the
    eigenvalue, on a grid that is evenly spaced in the logarithm; ``grid * density`` is the density
    per unit of the natural logarithm.

    The arguments are those of ``lanczos_approximate_spectrum``, with ``boundaries`` of absolute
    values, ``margin`` relative to their distance in the logarithm, and ``epsilon > 0``, which makes
    the logarithm of zero finite.
    """
    cached = LanczosApproximateSpectrumCached(A, ncv, boundaries, **options)
    return cached.approximate_log_spectrum(
        num_repeats, num_points, kappa, margin, epsilon, return_error=return_error
    )


def _smooth(points: Tensor, sigma: float, nodes: Tensor, weights: Tensor) -> Tensor:
    """Integrate Gaussians, truncated and normalized, over the cells around ascending points."""
    edges = torch.cat([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]])
    x = (edges - nodes.unsqueeze(1)) / sigma
    left, right = x[:, :-1], x[:, 1:]
    # differences are accurate in the lower tail
    shares = torch.where(
        left > 0,
        torch.special.ndtr(-left) - torch.special.ndtr(-right),
        torch.special.ndtr(right) - torch.special.ndtr(left),
    )
    return (weights.unsqueeze(1) * shares / shares.sum(1, keepdim=True)).sum(0)


def _check_inside(nodes: Tensor, points: Tensor) -> None:
    """Check that all nodes lie inside of the grid."""
    low, high = float(points[0]), float(points[-1])
    outside = nodes[(nodes < low) | (nodes > high)]
    if len(outside):
        raise ValueError(
            f"The matrix has eigenvalues outside of the boundaries (and their margin): found "
            f"{float(outside[0]):.3e} on an axis from {low:.3e} to {high:.3e}. Pass wider "
            "boundaries, or None to have them estimated."
        )


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
