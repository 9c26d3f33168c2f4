"""Lanczos runs that are kept, and the smoothed densities that are made of them."""

from dataclasses import dataclass
from math import inf, isfinite, log, sqrt

import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.probes import Average, Probes
from curvlinops.algorithms.quadrature import Lanczos, Quadrature, check_ncv
from curvlinops.support.arguments import check_count

#: Smallest and largest eigenvalue, as far as they are known.
Boundaries = tuple[float | None, float | None] | None

#: Nodes with less weight are rounding errors.
NEGLIGIBLE = 1e-14


class KeptRuns:
    """Lanczos runs from random directions, made when they are needed, and the spectrum's ends.

    Args:
        A: The symmetric matrix.
        ncv: The number of steps of each run.
        boundaries: The known ends of the spectrum.
        tol: How accurate the others must be, relative to the spread.
        chunk_size: How many runs are made at once.
        seed: Seeds the directions.
        generator: Draws the directions.
    """

    def __init__(
        self,
        A: AnyMatrix,
        ncv: int,
        boundaries: Boundaries,
        tol: float,
        chunk_size: int | None,
        seed: int | None,
        generator: torch.Generator | None,
    ):
        self.matrix = Matrix(A, square=True)
        self.ncv = check_ncv(ncv, self.matrix, at_least=2)
        self.known = _check_boundaries(boundaries)
        if not 0 < tol < 1:
            raise ValueError(f"boundaries_tol must lie between 0 and 1, got {tol!r}.")
        self._tol = tol
        self._probes = Probes(self.matrix, "sphere", chunk_size, seed, generator, held=ncv)
        # a search that is made in between must not change the directions
        drawn = torch.randint(
            2**62, (), generator=self._probes.generator, device=self.matrix.device
        )
        self._search_probes = Probes(self.matrix, "sphere", seed=int(drawn))
        self._rules: list[Quadrature] = []
        self._search: Quadrature | None = None

    def take(self, num: int) -> Quadrature:
        """Return the first ``num`` runs, each with ``ncv`` nodes."""
        for X in self._probes.chunks(num - sum(len(rule.nodes) for rule in self._rules)):
            self._rules.append(_pad(Lanczos(self.matrix, X).extend(self.ncv), self.ncv))
        names = ("nodes", "weights", "residuals")
        return Quadrature(
            *(torch.cat([getattr(rule, name) for rule in self._rules])[:num] for name in names)
        )

    def ends(self, rules: Quadrature) -> tuple[float, float]:
        """Return the ends of the spectrum: those that are known, estimates of the others."""
        if None not in self.known:
            return self.known
        found = self.outermost(rules, [end for end in (0, 1) if self.known[end] is None])
        low, high = (f if k is None else k for f, k in zip(found, self.known, strict=True))
        if low > high:
            raise ValueError(f"boundaries {self.known} do not fit the spectrum, {found}.")
        return low, high

    def outermost(self, rules: Quadrature, wanted: list[int]) -> tuple[float, float]:
        """Return estimates of both ends of the spectrum from given runs.

        Where these are not accurate enough, another run is continued until it is.

        Args:
            rules: The runs.
            wanted: Which ends must be accurate: 0, 1, or both.
        """
        (low, high), errors = _outermost(rules)
        if not self._accurate(rules, wanted):
            if self._search is None:
                self._search = self._search_ends(wanted)
            more, errors = _outermost(self._search)
            low, high = min(low, more[0]), max(high, more[1])
        return low - errors[0], high + errors[1]

    def _search_ends(self, wanted: list[int]) -> Quadrature:
        run, steps = Lanczos(self.matrix, self._search_probes.draw(1)), self.ncv
        while True:
            steps *= 2
            rule = run.extend(steps)
            if run.exhausted or self._accurate(rule, wanted):
                return rule

    def _accurate(self, rules: Quadrature, wanted: list[int]) -> bool:
        (low, high), errors = _outermost(rules)
        return all(errors[end] <= self._tol * (high - low) for end in wanted)


@dataclass(frozen=True)
class Axis:
    """Evenly spaced points, and the Gaussian that smooths on them.

    Attributes:
        points: ``[P]``, float64, ascending.
        sigma: The Gaussian's standard deviation.
    """

    points: Tensor
    sigma: float

    @classmethod
    def of(
        cls,
        ends: tuple[float, float],
        num_points: int,
        margin: float,
        kappa: float,
        ncv: int,
        unit: float,
    ) -> "Axis":
        """Return the axis between two ends, extended by a margin (relative to their distance).

        Ends that coincide, compared with ``unit``, are moved apart.
        """
        num_points = check_count("num_points", num_points, 2)
        if not 1 < kappa < inf:
            raise ValueError(f"kappa must be larger than one, and finite, got {kappa!r}.")
        if not 0 <= margin < inf:
            raise ValueError(f"margin must not be negative, and finite, got {margin!r}.")
        low, high = ends
        if high - low < 1e-4 * unit:
            low, high = low - 1e-2 * unit, high + 1e-2 * unit
        extra = margin * (high - low)
        points = torch.linspace(
            low - extra, high + extra, num_points, dtype=torch.float64, device="cpu"
        )
        length = high - low + 2 * extra
        return cls(points, length / ((ncv - 1) * sqrt(8 * log(kappa))))

    def smooth(self, nodes: Tensor, weights: Tensor) -> Tensor:
        """Return how much of the Gaussians around nodes is nearest to each point.

        Args:
            nodes: ``[M]``, inside the axis.
            weights: Their weights ``[M]``.

        Returns:
            Shares ``[P]`` that add up to the sum of the weights: what is beyond the ends of the
            axis is distributed over the rest of each Gaussian.
        """
        points = self.points.to(nodes.device)
        edges = torch.cat([points[:1], (points[1:] + points[:-1]) / 2, points[-1:]])
        x = (edges - nodes.unsqueeze(1)) / self.sigma
        left, right = x[:, :-1], x[:, 1:]
        # in the tail where differences are accurate
        shares = torch.where(
            left > 0,
            torch.special.ndtr(-left) - torch.special.ndtr(-right),
            torch.special.ndtr(right) - torch.special.ndtr(left),
        )
        return (weights.unsqueeze(1) * shares / shares.sum(1, keepdim=True)).sum(0)

    def check_inside(self, nodes: Tensor, weights: Tensor) -> None:
        """Check that no node of some weight lies outside, where it would be lost."""
        nodes = nodes[weights > NEGLIGIBLE]
        low, high = float(self.points[0]), float(self.points[-1])
        outside = nodes[(nodes < low) | (nodes > high)]
        if len(outside):
            raise ValueError(
                f"The matrix has eigenvalues outside of the boundaries (and their margin): found "
                f"{float(outside[0]):.3e} on an axis from {low:.3e} to {high:.3e}. Pass wider "
                "boundaries, or None to have them estimated."
            )


def densities(axis: Axis, grid: Tensor, rules: Quadrature) -> Average:
    """Average the densities of all runs, per unit of ``grid``; trapezoids add up to one."""
    spacing = grid.diff() / 2
    widths = torch.nn.functional.pad(spacing, (0, 1)) + torch.nn.functional.pad(spacing, (1, 0))
    total = Average()
    for nodes, weights in zip(rules.nodes, rules.weights, strict=True):
        total.update((axis.smooth(nodes, weights).to(widths) / widths).unsqueeze(1))
    return total


def _outermost(rules: Quadrature) -> tuple[list[float], list[float]]:
    """Return the outermost nodes, and their residuals, within which there are eigenvalues."""
    low, high = int(rules.nodes[:, 0].argmin()), int(rules.nodes[:, -1].argmax())
    nodes = [float(rules.nodes[low, 0]), float(rules.nodes[high, -1])]
    return nodes, [float(rules.residuals[low, 0]), float(rules.residuals[high, -1])]


def _pad(rule: Quadrature, num: int) -> Quadrature:
    """Repeat the last node without weight, if a run ended early."""
    missing = num - rule.nodes.shape[1]
    last = rule.nodes[:, -1:].expand(-1, missing)
    nothing = torch.zeros_like(last)
    return Quadrature(
        torch.cat([rule.nodes, last], dim=1),
        torch.cat([rule.weights, nothing], dim=1),
        torch.cat([rule.residuals, rule.residuals[:, -1:].expand(-1, missing)], dim=1),
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
