"""Whether eigenvalues that a Krylov space does not contain would have shown up."""

from math import inf

import torch
from torch import Tensor

#: Chance to overlook a missing eigenvector.
RISK = 0.03
#: From this tolerance on, values are rough, and confirmations where eigenvalues are dense short:
#: what is missing there changes the others by the small distances between them.
_ROUGH = 1e-5


class Confirmation:
    """The Lanczos recurrence from a random vector, as a bound on what may still be missing.

    Of a unit vector v, an eigenvector of eigenvalue ``lambda`` has the squared component

        ``(x.T @ v)^2 <= 1 / sum_{i <= j} p_i(lambda)^2``,

    whatever the matrix, where the ``p_i`` are the polynomials that are orthonormal for v, which j
    products determine (the Christoffel function; Golub and Meurant, Matrices, Moments and
    Quadrature, 2010, section 2). Beyond the eigenvalues of which v has more they grow quickly. A
    random v contains less than ``risk^2 / D`` of an eigenvector with probability below ``risk``:
    where the bound is as low as that, there is none.

    Args:
        values: The eigenvalues that have been found, ascending.
        which: Which ones of the matrix they shall be, as in ``eigsh``.
        slack: How far values may differ that count as equal.
        tol: The relative tolerance of the values.
        dim: The matrix's dimension D.
        start: Number of products before the random vector.
    """

    def __init__(self, values: Tensor, which: str, slack: float, tol: float, dim: int, start: int):
        self.values, self._start = values, start
        self._affordable = start / 3 if tol < _ROUGH else max(5, start / 15)
        self._enough = dim / RISK**2
        self._points, self._copies = _read(values, which, slack)
        self._before, self._last = torch.zeros_like(self._points), torch.ones_like(self._points)
        self._sum, self._beta = self._last**2, 0.0

    def agrees(self, values: Tensor, slack: Tensor) -> bool:
        """Return whether these are the values that are being confirmed."""
        return bool(((values - self.values).abs() <= slack).all())

    def add(self, alpha: float, beta: float) -> None:
        """Take in one more step of the recurrence, ``A v = beta w + alpha v + ...``."""
        if self._certain:
            return
        following = (self._points - alpha) * self._last - self._beta * self._before
        following = following / beta if beta > 0 else torch.full_like(following, inf)
        self._before, self._last, self._beta = self._last, following, beta
        self._sum = self._sum + following**2

    def enough(self, num_products: int) -> bool:
        """Return whether a missing eigenvector would have shown up, but for the risk.

        Where that takes many products, a third of those before must do, for rough values a
        fifteenth, unless there are copies.
        """
        if self._certain:
            return True
        return not self._copies and num_products - self._start >= self._affordable

    @property
    def _certain(self) -> bool:
        return bool((self._sum >= self._enough).all())


def _read(values: Tensor, which: str, slack: float) -> tuple[Tensor, bool]:
    """Return the least wanted values of which a copy matters, and whether there are copies.

    One more copy of the least wanted value of all would not change any of them.
    """
    split = {"SA": len(values), "LA": 0, "LM": 0, "BE": len(values) // 2}[which]
    ends = [(-1, -values[:split]), (1, values[split:])]
    if which == "LM":
        ends = [(-1, values.abs()), (1, values.abs())]
    points, copies = [], False
    for sign, wanted in ends:
        if len(wanted):
            outer = wanted[wanted > wanted.min() + slack].sort().values
            points.append(sign * (outer if len(outer) else wanted).min())
            copies |= bool((outer.diff() <= slack).any())
    return torch.stack(points), copies
