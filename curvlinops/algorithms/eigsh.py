"""Some eigenvalues and eigenvectors of a symmetric matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.convergence import check_on_failure, fail
from curvlinops.algorithms.iterative import ASYMMETRY
from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.solver import solves
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.norms import double_norm
from curvlinops.support.progress import show_residuals
from curvlinops.support.rng import read_generator

#: The default ``ncv``, and how many bytes so many basis vectors may need.
_NCV, _BASIS_BYTES = 1000, 2**30
#: Restarts recombine the basis in parts of about this many bytes.
_PART = 16 * 2**20


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenpairs of a matrix; unpacks into eigenvalues and eigenvectors.

    Attributes:
        eigenvalues: Ascending, ``[k]``.
        eigenvectors: Orthonormal columns, ``[D, k]``.
        residuals: Norms ``||A x - lambda x||``, ``[k]``.
        num_products: Number of vectors that ``A`` was multiplied by.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    residuals: Tensor
    num_products: int

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack like the result of SciPy's ``eigsh``."""
        return iter((self.eigenvalues, self.eigenvectors))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return (self.eigenvalues, self.eigenvectors)[index]


@solves("eigsh")
def eigsh(
    A: AnyMatrix,
    k: int = 6,
    which: str = "LM",
    *,
    block_size: int | None = None,
    ncv: int | None = None,
    v0: Vectors | None = None,
    tol: float = 0.0,
    maxiter: int | None = None,
    on_failure: str = "warn",
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Compute k eigenpairs ``A x = lambda x`` of a symmetric matrix, on its device.

    Block thick-restart Lanczos with full reorthogonalization (Wu and Simon, SIAM J. Matrix Anal.
    Appl. 2000). Like SciPy's ``eigsh``, it may find fewer copies of a multiple eigenvalue than
    there are; ``block_size=m`` finds up to m copies. Eigenpairs of structured operators, such as
    KFAC, are computed from their structure.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        k: Number of eigenpairs, at most D.
        which: Eigenvalues of largest magnitude (``"LM"``), the largest (``"LA"``), the smallest
            (``"SA"``), or from both ends (``"BE"``; one more from the upper end if k is odd).
        block_size: Number of vectors that are multiplied at once. Default: as many as ``v0`` has,
            or one, which needs the fewest products. Larger blocks find multiple eigenvalues, and
            save time if a product with several vectors costs little more than with one.
        ncv: Largest number of basis vectors, at least ``k + 2 * block_size`` or D. More basis
            vectors need fewer products and more memory (``D * ncv`` numbers). Default: 1000, or as
            many as fit into 1 GiB, but at least ``max(2 k + 1, 20)``.
        v0: Start vectors, ``[D]`` or ``[D, block_size]``; or, for an operator on named parameters,
            a list or dictionary of tensors, like the vectors that it multiplies. Default: random.
        tol: Largest residual relative to ``|lambda|``. Residuals of about ten units of rounding,
            relative to the norm of ``A``, are always accepted. With zero, residuals are as small as
            the accuracy of products allows.
        maxiter: Largest number of restarts. Default: 1000.
        on_failure: Without convergence, ``"warn"`` and return the best pairs, or ``"raise"``.
        seed: Seed of the start vectors. Default: one drawn from PyTorch's global generator.
        generator: Generator that draws the start vectors, instead of ``seed``.

    Returns:
        Eigenpairs on the device of ``A``. They unpack into ``(eigenvalues, eigenvectors)`` like
        SciPy's result, and have the attributes ``residuals`` and ``num_products``.

    Raises:
        ValueError: If an argument is out of range, or ``A`` is not symmetric.
        ConvergenceError: Without convergence, if ``on_failure="raise"``.

    Example:
        >>> import numpy as np
        >>> from curvlinops import eigsh
        >>> eigsh(np.diag([1.0, 2.0, 3.0]), k=2, which="LA").eigenvalues.round(decimals=6)
        tensor([2., 3.], dtype=torch.float64)
    """
    check_on_failure(on_failure)
    matrix = Matrix(A, square=True)
    generator = read_generator(matrix.device, seed, generator)
    k = check_count("k", k, at_most=matrix.shape[0])
    maxiter = check_count("maxiter", 1000 if maxiter is None else maxiter, at_least=0)
    check_choice("which", which, ("LM", "LA", "SA", "BE"))
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be at least zero and less than one, got {tol!r}.")
    start = _start(matrix, v0, block_size, generator)
    ncv = _basis_size(matrix, k, len(start), ncv)
    known = matrix.operator._eigenpairs(k, which)
    if known is not None:
        values, vectors = known
        residuals = double_norm(matrix @ vectors - vectors * values, 0).to(vectors)
        return Eigenpairs(values, vectors, residuals, matrix.num_products)
    basis, pairs, num_missed = thick_restart_lanczos(
        matrix, start, k, which, lambda values: tol * values.abs(), ncv, maxiter, generator
    )
    residuals = torch.hypot(pairs.couplings, pairs.noise)
    if num_missed:
        fail(
            f"eigsh: after {matrix.num_products} products {num_missed} of {k} pairs have not "
            f"converged, residuals reach {float(residuals.max()):.1e}. Allow a larger ncv, maxiter "
            "or tol.",
            on_failure,
        )
    vectors = basis.combine(pairs.vectors)
    values, residuals = pairs.values.to(vectors), residuals.to(vectors)
    return Eigenpairs(values, vectors, residuals, matrix.num_products)


class RitzPairs(NamedTuple):
    """Approximate eigenpairs from a basis of m vectors; float64, on the CPU.

    Attributes:
        values: Ritz values ``[p]``, ascending.
        vectors: Ritz vectors as columns of coefficients in the basis, ``[m, p]``.
        couplings: Norms of the parts of the residuals that more products reduce, ``[p]``.
        noise: Norms of the parts that stay, from rounding errors of the products, ``[p]``.
    """

    values: Tensor
    vectors: Tensor
    couplings: Tensor
    noise: Tensor

    def select(self, indices: Tensor) -> "RitzPairs":
        """Return the pairs with these indices."""
        return RitzPairs(*(field[..., indices] for field in self))


def thick_restart_lanczos(
    matrix: Matrix,
    start: Tensor,
    k: int,
    which: str,
    goals: Callable[[Tensor], Tensor],
    ncv: int,
    maxiter: int,
    generator: torch.Generator,
) -> tuple["LanczosBasis", RitzPairs, int]:
    """Find eigenpairs at the ends of the spectrum by block thick-restart Lanczos.

    Args:
        matrix: The symmetric matrix.
        start: Rows ``[b, D]`` that span the first block.
        k: See ``eigsh``, as for ``which``, ``ncv`` and ``maxiter``.
        which: The wanted eigenvalues.
        goals: Takes all Ritz values ``[m]``; returns their largest residuals, ``[m]``.
        ncv: The largest number of basis vectors.
        maxiter: The largest number of restarts.
        generator: Draws new vectors where the basis spans an invariant subspace.

    Returns:
        The basis; the k wanted pairs, by ascending value; the number of pairs that miss their goal.
    """
    basis = LanczosBasis(matrix, start, ncv, generator)
    restarts = checked = 0
    while True:
        is_full = basis.size + max(basis.num_pending, 1) > ncv and basis.size < matrix.shape[0]
        # in a large basis, Ritz pairs cost more time than the products that they may save
        is_due = basis.size >= k and basis.size - checked > (basis.size / 160) ** 2
        if is_full or is_due or basis.size == matrix.shape[0]:
            pairs, checked = basis.ritz(), basis.size
            order = _order(pairs.values, which)
            wanted = order[:k].sort().values
            allowed = goals(pairs.values)[wanted].clamp(min=basis.rounding)
            found = pairs.select(wanted)
            # more products do not reduce the noise of products in low precision
            num_missed = int((found.couplings > allowed.maximum(found.noise)).sum())
            show_residuals((found.couplings, allowed))
            has_ended = basis.size == matrix.shape[0] or (is_full and restarts == maxiter)
            if len(wanted) == k and (num_missed == 0 or has_ended):
                return basis, found, num_missed
            if is_full:
                restarts, checked = restarts + 1, 0
                keep = k + (k - num_missed) // 3 + (ncv - k) // 3
                keep = min(keep, ncv - 2 * max(basis.num_pending, 1))
                basis.restart(pairs.select(order[:keep]))
        basis.expand()


def _start(
    matrix: Matrix, v0: Vectors | None, block_size: int | None, generator: torch.Generator
) -> Tensor:
    """Return the rows of the first block, ``[b, D]``."""
    given = None if v0 is None else matrix.read_rows(v0)
    size = block_size if block_size is not None else (1 if given is None else len(given))
    size = check_count("block_size", size, at_most=matrix.shape[0])
    if given is None:
        return _random_rows(size, matrix, generator)
    if len(given) != size:
        raise ValueError(f"v0 has {len(given)} vectors, but block_size is {size}.")
    return given


def _random_rows(count: int, matrix: Matrix, generator: torch.Generator) -> Tensor:
    shape = (count, matrix.shape[0])
    return torch.randn(shape, generator=generator, dtype=matrix.dtype, device=matrix.device)


def _basis_size(matrix: Matrix, k: int, block_size: int, ncv: int | None) -> int:
    """Return the largest number of basis vectors."""
    dim, least = matrix.shape[0], k + 2 * block_size
    if ncv is not None:
        return min(check_count("ncv", ncv, at_least=min(least, dim)), dim)
    affordable = min(_NCV, _BASIS_BYTES // (dim * matrix.dtype.itemsize))
    return min(dim, max(affordable, 2 * k + 1, 20, k + 4 * block_size))


def _order(values: Tensor, which: str) -> Tensor:
    """Return indices into ascending values, the most wanted value first."""
    ascending = torch.arange(len(values), device="cpu")
    if which == "SA":
        return ascending
    if which == "LA":
        return ascending.flip(0)
    if which == "LM":
        return values.abs().argsort(descending=True)
    return torch.stack([ascending.flip(0), ascending], dim=1).flatten()[: len(values)]


class LanczosBasis:
    """An orthonormal basis V with ``A V = V H + Q B``, stored as rows.

    Q is the orthonormal block that is multiplied next. H has the measured coefficients, and is
    symmetric up to the rounding errors of products.

    Args:
        matrix: The matrix.
        start: Rows ``[b, D]`` that span the first block; they may be linearly dependent.
        ncv: The largest number of rows.
        generator: Draws new rows when V spans an invariant subspace.

    Attributes:
        size: The number m of rows of V.
        num_pending: The number of rows of Q. If zero, V spans an invariant subspace.
    """

    def __init__(self, matrix: Matrix, start: Tensor, ncv: int, generator: torch.Generator):
        self._matrix, self._generator = matrix, generator
        self._eps = torch.finfo(matrix.dtype).eps
        self._ncv, self._block_size = ncv, len(start)
        self._rows = start.new_zeros(min(ncv, 50) + len(start), matrix.shape[0])  # V, then Q
        self._H = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self._noise = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._norm = 0.0  # a lower bound on the norm of A: the largest product so far
        self.size = 0
        self._inject(start)

    @property
    def rounding(self) -> float:
        """Ten units of rounding, times the norm of the matrix."""
        return 10 * self._eps * self._norm

    def expand(self) -> None:
        """Multiply Q by the matrix, and append Q to V."""
        if not self.num_pending:
            self._inject(_random_rows(1, self._matrix, self._generator))
        start, end = self.size, self.size + self.num_pending
        W = (self._matrix @ self._rows[start:end].T).T.contiguous()
        largest = float(double_norm(W, 1).max())
        self._norm = max(self._norm, largest)
        H = torch.zeros(end, end, dtype=torch.float64, device="cpu")
        H[:start, :start], H[start:, :start] = self._H, self._B
        # in exact arithmetic the first pass is enough; the second one removes rounding errors
        for first in (self._first_coupled, 0):
            rows = self._rows[first:end]
            coefficients = rows @ W.T
            W.addmm_(coefficients.T, rows, alpha=-1)
            H[first:, start:] += coefficients.double().cpu()
        Q, R = self._orthonormal(W, self.rounding, end)
        if len(Q) and float(torch.linalg.svdvals(R)[-1]) < 0.1 * largest:
            # little is left, and its rounding errors are large relative to it: a third pass
            rows = self._rows[:end]
            Q, correction = self._orthonormal(Q - (Q @ rows.T) @ rows, 0.5, end)
            R = correction @ R
        self._check_symmetric(H, start)
        self._noise = torch.cat([self._noise, self._noise.new_zeros(end - start)])
        self.size, self._H, self._first_coupled = end, H, start
        B = torch.zeros(len(Q), end, dtype=torch.float64, device="cpu")
        B[:, start:] = R
        self._set_pending(Q, B)

    def ritz(self) -> RitzPairs:
        """Return the Ritz pairs."""
        values, vectors = torch.linalg.eigh((self._H + self._H.T) / 2)
        skew = ((self._H - self._H.T) / 2 @ vectors).norm(dim=0)
        # noise of different basis vectors is uncorrelated, so that squares add up
        noise = torch.hypot(skew, ((vectors**2).T @ self._noise**2).sqrt())
        return RitzPairs(values, vectors, (self._B @ vectors).norm(dim=0), noise)

    def restart(self, pairs: RitzPairs) -> None:
        """Replace V by some Ritz vectors; Q stays."""
        Q = self._rows[self.size : self.size + self.num_pending].clone()
        coefficients = pairs.vectors.T.to(self._rows)
        width = max(_PART // (self.size * self._rows.itemsize), 1)
        for part in self._rows.split(width, dim=1):
            part[: len(coefficients)] = coefficients @ part[: self.size]
        self.size, self._H, self._first_coupled = len(coefficients), pairs.values.diag(), 0
        self._noise = pairs.noise
        self._set_pending(Q, self._B @ pairs.vectors)

    def combine(self, Y: Tensor) -> Tensor:
        """Return the vectors ``[D, p]`` with coefficients ``[m, p]`` in the basis."""
        rows = self._rows[: self.size]
        return rows.T @ Y.to(rows)

    def _inject(self, block: Tensor) -> None:
        """Orthogonalize rows against V, and make them the block Q."""
        sizes = block.norm(dim=1, keepdim=True)
        block = block / sizes.where(sizes > 0, 1.0)
        rows = self._rows[: self.size]
        for _ in range(2):
            block = block - (block @ rows.T) @ rows
        Q, _ = self._orthonormal(block, 100 * self._eps, self.size)
        Q, _ = self._orthonormal(Q - (Q @ rows.T) @ rows, 0.5, self.size)
        self._set_pending(Q, torch.zeros(len(Q), self.size, dtype=torch.float64, device="cpu"))
        self._first_coupled = 0

    def _orthonormal(self, W: Tensor, negligible: float, size: int) -> tuple[Tensor, Tensor]:
        """Return orthonormal rows Q ``[r, D]`` and R with ``W.T = Q.T @ R`` up to ``negligible``.

        A basis of the given size leaves ``D - size`` directions, which limits r.
        """
        Q, R = torch.linalg.qr(W.T)
        U, S, Vt = torch.linalg.svd(R.double().cpu())
        rank = min(int((S > negligible).sum()), W.shape[1] - size)
        return U[:, :rank].T.to(W) @ Q.T, S[:rank, None] * Vt[:rank]

    def _set_pending(self, Q: Tensor, B: Tensor) -> None:
        end = self.size + len(Q)
        if end > len(self._rows):
            longer = self._rows.new_zeros(min(2 * end, self._ncv + self._block_size), Q.shape[1])
            longer[: self.size] = self._rows[: self.size]
            self._rows = longer
        self._rows[self.size : end] = Q
        self.num_pending, self._B = len(Q), B

    def _check_symmetric(self, H: Tensor, start: int) -> None:
        """Check that the measured coefficients of the last block are symmetric."""
        asymmetry = float((H - H.T)[start:].norm()) / 2
        if not self._matrix.operator.self_adjoint and asymmetry > ASYMMETRY * self._norm:
            raise ValueError(
                "The matrix is not symmetric: its products differ from those of its transpose by "
                f"about {asymmetry / self._norm:.1e} of its norm."
            )
