"""A growing, restarted block Krylov space of a symmetric matrix."""

from dataclasses import dataclass
from math import frexp

import torch
from torch import Tensor

from curvlinops.algorithms.matrix import Matrix

#: Restarts recombine the basis in parts of about this many bytes.
_PART = 16 * 2**20


@dataclass(frozen=True)
class RitzPairs:
    """Approximate eigenpairs from a Krylov space of dimension m; float64, on the CPU.

    Attributes:
        values: Ritz values ``[m]``, ascending.
        vectors: Ritz vectors in the basis of the space, ``[m, m]``.
        coupling: What of each residual further products may reduce, ``[m]``.
        noise: What they may not: asymmetry, and about what restarts have dropped, ``[m]``.
    """

    values: Tensor
    vectors: Tensor
    coupling: Tensor
    noise: Tensor

    @property
    def residuals(self) -> Tensor:
        """The norms ``||A x - theta x||`` for the unit vectors x, ``[m]``."""
        return torch.hypot(self.coupling, self.noise)


class KrylovSpace:
    """An orthonormal basis V with ``A V = V H + Q B``, kept up by expanding and restarting.

    H holds measured coefficients and is not symmetrized, so that the relation, and the residuals
    that follow from it, are true also for a matrix that is symmetric up to rounding only. Q is the
    orthonormal block that is multiplied next. (Stewart, A Krylov-Schur algorithm for large
    eigenproblems, SIAM J. Matrix Anal. Appl. 2002; Wu and Simon, Thick-restart Lanczos method for
    large symmetric eigenvalue problems, 2000.)

    Args:
        A: The matrix.
        start: Rows ``[b, D]`` that span the first block; may be dependent.
        max_dim: How many rows the basis may have.

    Attributes:
        dim: Number m of rows of V.
        unit: The power of two in units of which everything is measured, so that squares neither
            overflow nor vanish: about the largest entry of the first product.
        norm: A lower bound on the norm of ``A``: the largest product so far.
    """

    def __init__(self, A: Matrix, start: Tensor, max_dim: int):
        self._A = A
        self._eps = torch.finfo(A.dtype).eps
        self._rows = start.new_zeros(max_dim + start.shape[0], A.shape[0])
        self._H = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self._drift = torch.zeros(0, dtype=torch.float64, device="cpu")
        self.dim, self.norm, self.unit = 0, 0.0, 1.0
        self.inject(start)

    @property
    def pending(self) -> int:
        """Number of rows of Q. Zero: the space is invariant."""
        return self._B.shape[0]

    @property
    def basis(self) -> Tensor:
        """The rows of V, ``[m, D]``."""
        return self._rows[: self.dim]

    def inject(self, block: Tensor) -> None:
        """Replace Q, which must be negligible, by what of other rows is orthogonal to V."""
        scale = block.norm(dim=1, keepdim=True)
        block = block / scale.where(scale > 0, 1.0)
        basis = self.basis
        for _ in range(2):
            block = block - (block @ basis.T) @ basis
        q, _ = self._factor(block, 100 * self._eps, self.dim)
        q, _ = self._factor(q - (q @ basis.T) @ basis, 0.5, self.dim)
        self._set_pending(q, torch.zeros(len(q), self.dim, dtype=torch.float64, device="cpu"))
        self._coupled = 0

    def grow(self, max_dim: int) -> None:
        """Let the basis have more rows."""
        used = self._rows[: self.dim + self.pending]
        self._rows = used.new_zeros(max_dim + max(self.pending, 1), used.shape[1])
        self._rows[: len(used)] = used

    def expand(self) -> tuple[Tensor, float]:
        """Multiply Q, and make it a part of V.

        Returns:
            For a single row q, the coefficients h and beta of ``A q = V h + beta r``, where r is
            the row that is multiplied next.
        """
        start, end = self.dim, self.dim + self.pending
        W = self._multiply(self._rows[start:end])
        self.norm = max(self.norm, float(W.norm(dim=1).max()))
        H = torch.zeros(end, end, dtype=torch.float64, device="cpu")
        H[:start, :start], H[start:, :start] = self._H, self._B
        # the first pass removes what theory says is there, the second one what rounding adds
        for first in (self._coupled, 0):
            rows = self._rows[first:end]
            before = float(W.norm())
            coefficients = rows @ W.T
            W.addmm_(coefficients.T, rows, alpha=-1)
            H[first:, start:] += coefficients.double().cpu()
        q, R = self._factor(W, 10 * self._eps * self.norm, end)
        if len(q) and float(torch.linalg.svdvals(R)[-1]) < 0.1 * before:
            # little is left, and rounding weighs the more: a third pass
            rows = self._rows[:end]
            q, correction = self._factor(q - (q @ rows.T) @ rows, 0.5, end)
            R = correction @ R
        self.dim, self._H, self._coupled = end, H, start
        self._drift = torch.cat(
            [self._drift, torch.zeros(end - start, dtype=torch.float64, device="cpu")]
        )
        B = torch.zeros(len(q), end, dtype=torch.float64, device="cpu")
        B[:, start:] = R
        self._set_pending(q, B)
        return H[:, start], float(R.norm())

    def _multiply(self, rows: Tensor) -> Tensor:
        W = (self._A @ rows.T).T.contiguous()
        largest = float(W.abs().max())
        if self.norm == 0 and largest > 0:  # all products so far are zero in any unit
            self.unit = 2.0 ** frexp(largest)[1]
        return W.div_(self.unit) if self.unit != 1 else W

    def _set_pending(self, q: Tensor, B: Tensor) -> None:
        self._rows[self.dim : self.dim + len(q)] = q
        self._B = B

    def _factor(self, W: Tensor, negligible: float, dim: int) -> tuple[Tensor, Tensor]:
        """Return orthonormal rows q ``[r, D]`` and R with ``W.T = q.T @ R``, up to negligible.

        There are at most as many rows as a space of dimension ``dim`` leaves directions.
        """
        Q, R = torch.linalg.qr(W.T)
        U, S, Vt = torch.linalg.svd(R.double().cpu())
        rank = min(int((S > negligible).sum()), W.shape[1] - dim)
        q = U[:, :rank].T.to(W) @ Q.T
        return q, S[:rank, None] * Vt[:rank]

    def ritz(self) -> RitzPairs:
        """Return the Ritz pairs of the space."""
        symmetric, skew = (self._H + self._H.T) / 2, (self._H - self._H.T) / 2
        values, vectors = torch.linalg.eigh(symmetric)
        noise = torch.hypot((skew @ vectors).norm(dim=0), self._carry(vectors))
        return RitzPairs(values, vectors, (self._B @ vectors).norm(dim=0), noise)

    def restart(self, Y: Tensor) -> None:
        """Reduce the space to ``V Y``, with the same Q.

        Args:
            Y: Ritz vectors, ``[m, p]``.
        """
        HY = self._H @ Y
        dropped = (HY - Y @ (Y.T @ HY)).norm(dim=0)
        self._drift = torch.hypot(dropped, self._carry(Y))
        old, new = self.dim, Y.shape[1]
        self._recombine(Y)
        q = self._rows[old : old + self.pending].clone()
        self.dim, self._H, self._coupled = new, Y.T @ HY, 0
        self._set_pending(q, self._B @ Y)

    def lock(self, Y: Tensor, block: Tensor) -> None:
        """Reduce the space to Ritz vectors that have converged, and go on with another block."""
        self.restart(Y)
        self._drift = torch.hypot(self._drift, self._B.norm(dim=0))
        self.inject(block)

    def renew(self, Y: Tensor) -> None:
        """Start again from ``V Y`` as the first block, which forgets what has been dropped."""
        block = self.combine(Y).T
        self.dim, self._H, self._drift = 0, self._H[:0, :0], self._drift[:0]
        self.inject(block)

    def _carry(self, Y: Tensor) -> Tensor:
        """Return what combinations of the basis have dropped, ``[p]``.

        What single vectors have dropped has no common direction: squares add up.
        """
        return ((Y**2).T @ self._drift**2).sqrt()

    def combine(self, Y: Tensor) -> Tensor:
        """Return vectors ``[D, p]``, given by their coefficients ``[m, p]``."""
        return self.basis.T @ Y.to(self.basis)

    def _recombine(self, Y: Tensor) -> None:
        Yt = Y.T.to(self._rows)
        width = max(_PART // (self.dim * self._rows.itemsize), 1)
        for part in self._rows.split(width, dim=1):
            part[: len(Yt)] = Yt @ part[: self.dim]
