"""Hessians that are a diagonal, or a diagonal and a rank of one, such as that of a softmax."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class FactoredHessian(NamedTuple):
    """The Hessians of terms as ``sum_v s_v s_v^T`` with ``s_v = r_v (e_v - p)``, v from 1 to C.

    r and p are ``[T, C]``. If it is singular, p are probabilities, and r a multiple of their square
    roots in each term, so that the sum of all ``r_v s_v`` is zero.
    """

    r: Tensor
    p: Tensor
    is_singular: bool = False

    @property
    def _rest(self) -> Tensor:
        """``1 - p``, accurate also where p rounds to one."""
        if not self.is_singular:
            return 1 - self.p
        top = self.p.argmax(1, keepdim=True)
        others = self.p.scatter(1, top, 0.0).sum(1, keepdim=True)
        return (1 - self.p).scatter(1, top, others)

    def columns(self, some: slice, minimal: bool) -> Tensor:
        """Return some s_v, ``[V, T, C]``; of a root of C - 1 columns if ``minimal`` and singular.

        A reflection that maps r to the last axis makes the last column zero, and the others
        ``r_v (e_v - (p + q e_C) / (1 + q))`` with ``q = sqrt(p_C)``.
        """
        mean, minimal = self.p.clone(), minimal and self.is_singular
        some = slice(some.start, min(some.stop, mean.shape[1] - minimal))
        last = mean[:, -1:].sqrt() * minimal
        mean[:, -1:] += last
        scale = (self.r / (1 + last))[:, some]
        columns = -scale.T.contiguous().unsqueeze(-1) * mean
        # without a difference of two numbers near one
        columns.diagonal(some.start, 0, 2).copy_(scale * (last + self._rest)[:, some])
        return columns

    def times(self, matrix: Tensor, at_once: int) -> Iterator[Tensor]:
        """Yield products of some s_v at a time with a matrix ``[C, I]``, ``[V, T, I]``."""
        matrix = matrix.to(self.r)
        mean = self.p @ matrix
        for scale, row in zip(self.r.T.split(at_once), matrix.split(at_once), strict=True):
            yield scale.unsqueeze(-1) * (row.unsqueeze(1) - mean)

    def along(self, Q: Tensor | None) -> Tensor:
        """Return ``q^T H q`` for the columns q of ``[C, K]``, or the diagonals, ``[T, K]``."""
        squares = self.r.square()
        if Q is None:
            return squares * self._rest
        Q = Q.to(self.r)
        pairs = zip(squares, self.p @ Q, strict=True)
        return torch.stack([square @ (Q - mean).square() for square, mean in pairs])

    def sum(self) -> Tensor:
        """Return the sum over the terms, ``[C, C]``."""
        rows = self.r.square().sum(1, keepdim=True).sqrt() * self.p
        total = -rows.T @ rows
        total.diagonal().copy_(self.along(None).sum(0))
        return total
