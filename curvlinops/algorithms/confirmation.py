"""Whether eigenvalues that a Krylov space does not contain would have shown up."""

from math import inf

import torch
from torch import Tensor

#: Chance to overlook a missing eigenvector.
RISK = 0.03


class Confirmation:
    """The Lanczos recurrence from a random vector, as a bound on what may still be missing.

    Of a unit vector v, an eigenvector of eigenvalue ``lambda`` has the squared component

        ``(x.T @ v)^2 <= 1 / sum_{i <= j} p_i(lambda)^2``,

    whatever the matrix, where the ``p_i`` are the polynomials that are orthonormal for v, which j
    products determine (the Christoffel function; Golub and Meurant, Matrices, Moments and
    Quadrature, 2010, section 2). Beyond the eigenvalues of which v has more they grow quickly. A
    random v contains less than ``risk^2 / D`` of an eigenvector with probability below ``risk``:
    where the bound is as low as that, there is none. The same holds for the sum over any
    orthonormal vectors ``p_i(A) v``, such as those that restarts leave; the largest one counts.

    Args:
        values: The eigenvalues that have been found, ascending.
        which: Which ones of the matrix they shall be, as in ``eigsh``.
        slack: By how much something missing may change each of them.
        dim: The matrix's dimension D.
        before: The number of vectors of the basis that come before v. They contain the eigenvectors
            that have been found.
    """

    def __init__(self, values: Tensor, which: str, slack: Tensor, dim: int, before: int = 0):
        self.values, self._which = values, which
        self._enough = dim / RISK**2
        self._points = _read(values, which, slack)
        # the polynomials of the basis, at the points
        self._basis = values.new_zeros(len(self._points), before)
        self._next = torch.ones_like(self._points)
        self._sum = self._next**2

    def agrees(self, values: Tensor, slack: Tensor) -> bool:
        """Return whether these are the values that are being confirmed, ties aside."""
        own = self.values
        if self._which == "LM":  # which of two opposite ones comes first is up to rounding
            (values, order), own = values.abs().sort(), own.abs().sort().values
            slack = slack[order]
        return bool(((values - own).abs() <= slack).all())

    def add(self, coefficients: Tensor, beta: float) -> None:
        """Take in one more product.

        Args:
            coefficients: The h in ``A q = V h + beta r`` for the vector q that is the last one of
                the basis V now.
            beta: The coefficient of the next vector r.
        """
        if self.certain:
            return
        self._basis = torch.cat([self._basis, self._next[:, None]], dim=1)
        rest = self._points * self._next - self._basis @ coefficients
        self._next = rest / beta if beta > 0 else torch.full_like(rest, inf)
        self._sum = self._sum.maximum((self._basis**2).sum(1) + self._next**2)

    def restart(self, Y: Tensor) -> None:
        """Follow a restart, which replaces the basis V by ``V Y``."""
        if not self.certain:
            self._basis = self._basis @ Y

    @property
    def certain(self) -> bool:
        """Whether a missing eigenvector would have shown up, but for the risk."""
        return bool((self._sum >= self._enough).all())


def _read(values: Tensor, which: str, slack: Tensor) -> Tensor:
    """Return the least wanted values of which a copy matters.

    One more copy of the least wanted value of all changes none of them, and one of a value that is
    about as large changes them by no more than the distance.
    """
    split = {"SA": len(values), "LA": 0, "LM": 0, "BE": len(values) // 2}[which]
    ends = [(-1, -values[:split], slack[:split]), (1, values[split:], slack[split:])]
    if which == "LM":
        ends = [(-1, values.abs(), slack), (1, values.abs(), slack)]
    points = []
    for sign, wanted, allowed in ends:
        if len(wanted):
            least = wanted.argmin()
            harmless = wanted[least] + allowed[least]
            outer = wanted[wanted > harmless]
            points.append(sign * (outer.min() if len(outer) else harmless))
    return torch.stack(points)
