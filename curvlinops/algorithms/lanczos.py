"""The search for eigenpairs in a Krylov space: what to keep, and when to stop."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Generic

import torch
from torch import Tensor

from curvlinops.algorithms.confirmation import Confirmation
from curvlinops.algorithms.convergence import fail
from curvlinops.algorithms.krylov import KrylovSpace, RitzPairs
from curvlinops.algorithms.matrix import Matrix
from curvlinops.algorithms.products import ASYMMETRY
from curvlinops.linear_operator.vectors import Array
from curvlinops.support.progress import show_residuals

#: With as few products left, the whole space comes before any confirmation.
_FEW = 3


@dataclass(frozen=True, eq=False)
class Eigenpairs(Generic[Array]):
    """Eigenvalues and eigenvectors, into which it unpacks; with residuals and costs.

    Attributes:
        eigenvalues: Ascending, ``[k]``.
        eigenvectors: Orthonormal columns, ``[D, k]``.
        residuals: Norms ``||A x - lambda x||``, ``[k]``.
        num_products: Number of vectors that ``A`` has been multiplied with.
    """

    eigenvalues: Array
    eigenvectors: Array
    residuals: Array
    num_products: int

    def __iter__(self) -> Iterator[Array]:
        """Unpack like the result of scipy's ``eigsh``."""
        return iter((self.eigenvalues, self.eigenvectors))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Array:
        return (self.eigenvalues, self.eigenvectors)[index]


class LanczosSearch:
    """The iteration: expand the space, restart it, and confirm what has converged."""

    def __init__(
        self,
        matrix: Matrix,
        space: KrylovSpace,
        k: int,
        which: str,
        tol: float,
        ncv: int,
        max_ncv: int,
        confirm: bool,
        generator: torch.Generator,
    ):
        self.matrix, self.space, self.generator = matrix, space, generator
        self.k, self.which, self.tol, self.ncv, self.max_ncv = k, which, tol, ncv, max_ncv
        self.confirm = confirm
        self.confirmation: Confirmation | None = None
        self.restarts = 0
        self.unconfirmed = 0  # how many products came before the first confirmation
        self.exhaust = False  # whether to go on to the whole space, which needs no confirmation

    def run(self, maxiter: int) -> bool:
        """Iterate until the pairs are found, with true residuals; return whether they are."""
        worst = inf
        while self._iterate(maxiter):
            excess = self._excess()
            if excess <= 1 or not excess < worst / 2 or not self._renew():
                return True
            worst = excess
        return False

    def _excess(self) -> float:
        """Return how many times as large as allowed residuals are after locking.

        What it drops of a pair with a large goal stays in pairs with small ones.
        """
        if self.confirmation is None or self.tol == 0:
            return 0.0
        ritz = self.space.ritz()
        wanted = self._wanted(ritz)
        return float((ritz.residuals[wanted] / self._allowed(ritz, wanted)).max())

    def _renew(self) -> bool:
        """Start again from the wanted pairs, which are confirmed; return whether there is room."""
        room = min(self.matrix.shape[0], 3 * self.k)
        if self.max_ncv < room:
            return False
        ritz = self.space.ritz()
        self.space.renew(ritz.vectors[:, self._wanted(ritz)])
        self._grow(max(self.ncv, room))
        self.confirm = self.exhaust = False
        return True

    def _iterate(self, maxiter: int) -> bool:
        space, dim = self.space, self.matrix.shape[0]
        checked, patient = 0, True
        while space.dim < dim:
            if space.dim + max(space.pending, 1) > self.ncv:
                if self.ncv < self.max_ncv and not patient:
                    self._grow(2 * self.ncv)
                    patient = True
                elif self.restarts == maxiter:
                    return False
                else:
                    self._restart()
                    checked, patient = 0, False
            if not space.pending:
                space.inject(random_rows(1, self.matrix, self.generator))
            step = space.expand()
            if self.confirm and self.confirmation is not None:
                self.confirmation.add(*step)
            # in large spaces Ritz pairs cost more than they may save
            asked = space.dim >= self.k and not self.exhaust
            if asked and space.dim - checked > (space.dim / 160) ** 2:
                if self._finished(space.ritz()):
                    return True
                checked = space.dim
        return True

    def _finished(self, ritz: RitzPairs) -> bool:
        """Return whether the wanted pairs have converged, and are confirmed by a fresh start."""
        wanted = self._wanted(ritz)
        self._check_symmetric(ritz.noise[wanted])
        if bool(self._unfinished(ritz, wanted).any()):
            return False
        if not self.confirm:
            return True
        values, slack = ritz.values[wanted], 2 * self._goal(ritz, wanted) + ritz.residuals[wanted]
        if self.confirmation is not None and self.confirmation.agrees(values, slack):
            return self.confirmation.certain
        dim, products = self.matrix.shape[0], self.matrix.num_products
        if self.confirmation is None:
            self.unconfirmed = products
        # as soon as confirmations have taken as many products as the rest of the whole space would
        cost = max(products - self.unconfirmed, self._rehearse(ritz, wanted, slack))
        if self.ncv >= dim and dim - self.space.dim <= cost:
            self.exhaust = True
            return False
        fresh = random_rows(1, self.matrix, self.generator)
        self.space.lock(ritz.vectors[:, wanted], fresh)
        self.confirmation = Confirmation(values, self.which, slack, dim, self.k)
        return False

    def _rehearse(self, found: RitzPairs, wanted: Tensor, slack: Tensor) -> int:
        """Return about how many products a confirmation takes, if the spectrum is as found."""
        dim, values = self.matrix.shape[0], found.values
        others = torch.ones_like(values, dtype=torch.bool)
        others[wanted] = False
        if int(others.sum()) < dim - self.space.dim:
            return _FEW  # at most as many as there are others, so the space is no closer
        rehearsal = Confirmation(values[wanted], self.which, slack, dim)
        spectrum = Matrix(values[others].diag(), counted=False)
        space = KrylovSpace(spectrum, values.new_ones(1, spectrum.shape[0]), spectrum.shape[0])
        while space.pending and not rehearsal.certain:
            coefficients, beta = space.expand()
            rehearsal.add(space.unit * coefficients, space.unit * beta)
        return max(_FEW, space.dim)

    def _wanted(self, ritz: RitzPairs) -> Tensor:
        return _order(ritz.values, self.which)[: self.k].sort().values

    def _allowed(self, ritz: RitzPairs, chosen: Tensor) -> Tensor:
        return 2 * self._goal(ritz, chosen) + 10 * self._rounding()

    def _goal(self, ritz: RitzPairs, chosen: Tensor) -> Tensor:
        return (self.tol * ritz.values[chosen].abs()).clamp(min=self._rounding())

    def _unfinished(self, ritz: RitzPairs, chosen: Tensor) -> Tensor:
        """Return which of the chosen pairs further products may improve."""
        coupling = ritz.coupling[chosen]
        allowed = self._goal(ritz, chosen).maximum(ritz.noise[chosen])
        show_residuals((coupling, allowed))
        return coupling > allowed

    def _rounding(self) -> float:
        return 10 * torch.finfo(self.matrix.dtype).eps * self.space.norm

    def _grow(self, ncv: int) -> None:
        self.ncv = min(ncv, self.max_ncv)
        self.space.grow(self.ncv)

    def _restart(self) -> None:
        self.restarts += 1
        ritz = self.space.ritz()
        order = _order(ritz.values, self.which)
        if not self.space.pending:  # nothing is lost, everything has converged
            self._keep(ritz.vectors[:, order[: self.k]])
            return
        wanted = order[: self.k]
        done = self.k - int(self._unfinished(ritz, wanted).sum())
        keep = self.k + done // 2 + (self.ncv - self.k) // 2
        keep = min(keep, self.ncv - 2 * self.space.pending)
        self._keep(ritz.vectors[:, order[:keep]])

    def _keep(self, Y: Tensor) -> None:
        self.space.restart(Y)
        if self.confirm and self.confirmation is not None:
            self.confirmation.restart(Y)

    def _check_symmetric(self, noise: Tensor) -> None:
        # what locking drops looks like asymmetry, and so does rounding of half precision
        suspicious = self.confirmation is None and not self.matrix.operator.self_adjoint
        if suspicious and float(noise.max()) > ASYMMETRY * self.space.norm:
            raise ValueError(
                f"The matrix is not symmetric: its products differ from those of its transpose by "
                f"about {float(noise.max()) / self.space.norm:.1e} of its norm."
            )

    def result(self, finished: bool, on_failure: str) -> Eigenpairs:
        """Return the wanted pairs; say so if they are not what was asked for."""
        ritz = self.space.ritz()
        wanted = self._wanted(ritz)
        self._check_symmetric(ritz.noise[wanted])
        values, residuals, goal = (
            ritz.values[wanted],
            ritz.residuals[wanted],
            self._goal(ritz, wanted),
        )
        X = self.space.combine(ritz.vectors[:, wanted])
        missed = self._unfinished(ritz, wanted)
        unit = self.space.unit
        if self.tol > 0 and bool((residuals > goal).any()):  # or estimates are too large
            difference = (self.matrix @ X) / unit - X * values.to(X)
            residuals = difference.norm(dim=0).double().cpu()
            missed |= residuals > self._allowed(ritz, wanted)
        if bool(missed.any()) or not finished:
            self._fail(int(missed.sum()), unit * float(residuals.max()), on_failure)
        out = ((unit * values).to(X), X, (unit * residuals).to(X))
        written = (self.matrix.write(part) for part in out)
        return Eigenpairs(*written, num_products=self.matrix.num_products)

    def _fail(self, missed: int, worst: float, on_failure: str) -> None:
        if missed:
            what = f"{missed} of {self.k} pairs have not converged, residuals reach {worst:.1e}"
        else:
            what = "the pairs have converged, but it is not confirmed that none is missing"
        fail(
            f"eigsh: after {self.matrix.num_products} products {what}. Allow a larger ncv, maxiter "
            "or tol.",
            on_failure,
        )


def random_rows(count: int, matrix: Matrix, generator: torch.Generator) -> Tensor:
    """Return standard normal rows ``[count, D]``."""
    shape = (count, matrix.shape[0])
    return torch.randn(shape, generator=generator, dtype=matrix.dtype, device=matrix.device)


def _order(values: Tensor, which: str) -> Tensor:
    """Return the indices of ascending values, the most wanted ones first."""
    up = torch.arange(len(values), device="cpu")
    if which == "SA":
        return up
    if which == "LA":
        return up.flip(0)
    if which == "LM":
        return values.abs().argsort(descending=True)
    return torch.stack([up.flip(0), up], dim=1).flatten()[: len(values)]
