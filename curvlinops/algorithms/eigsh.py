"""Some eigenvalues and eigenvectors of a symmetric matrix."""

from math import acosh, log
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.convergence import check_on_failure, fail
from curvlinops.algorithms.krylov import KrylovSpace, RitzPairs
from curvlinops.algorithms.matrix import Matrix
from curvlinops.core.seeds import read_generator

#: Memory for the basis, beyond which the default ``ncv`` is no larger than scipy's.
_BASIS_BYTES = 2**30
#: Asymmetry, relative to the matrix's norm, that cannot be rounding of single precision.
_ASYMMETRY = 1e-3
#: About as many products as a confirmation needs.
_FEW = 10


class _Fields(NamedTuple):
    eigenvalues: Tensor | np.ndarray
    eigenvectors: Tensor | np.ndarray
    residuals: Tensor | np.ndarray


class Eigenpairs(_Fields):
    """Eigenvalues, eigenvectors and residuals; unpacks into these three.

    Attributes:
        eigenvalues: Ascending, ``[k]``.
        eigenvectors: Orthonormal columns, ``[D, k]``.
        residuals: Norms ``||A x - lambda x||``, ``[k]``.
        num_products: Number of vectors that ``A`` has been multiplied with.
    """

    num_products: int


def eigsh(
    A: Any,
    k: int = 6,
    which: str = "LM",
    *,
    block_size: int | None = None,
    ncv: int | None = None,
    v0: Tensor | np.ndarray | None = None,
    tol: float = 0.0,
    maxiter: int | None = None,
    confirm: bool = True,
    on_failure: str = "warn",
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Eigenpairs:
    """Compute k eigenpairs ``A x = lambda x`` of a symmetric matrix, on its device.

    Block thick-restart Lanczos with full reorthogonalization (Wu and Simon, SIAM J. Matrix Anal.
    Appl. 2000).

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        k: Number of eigenpairs, at most D.
        which: Eigenvalues of largest magnitude (``"LM"``), the largest (``"LA"``), the smallest
            (``"SA"``), or from both ends (``"BE"``; one more from the upper end if k is odd).
        block_size: How many vectors are multiplied at once. Default: as many as ``v0`` has, or
            one, which needs the fewest products. More pay where a product with several vectors
            costs little more than with one.
        ncv: Largest number of basis vectors that are kept, at least ``k + 2 * block_size`` or D.
            More need memory (``D * ncv`` numbers) and fewer products. Default: ``2 k + 50`` as
            long as that is at most 1 GiB, then fewer, but not below ``max(2 k + 1, 20)``.
        v0: Start vectors, ``[D]`` or ``[D, block_size]``. Default: random.
        tol: Residuals shall be at most ``tol * |lambda|``, or about ten units of rounding
            relative to the norm of ``A`` if that is larger. With zero they are as small as the
            accuracy of products allows.
        maxiter: Largest number of restarts. Default: 1000.
        confirm: Whether to confirm converged pairs by some products more (3 to about ``log(D)``),
            from a fresh random vector that is orthogonal to them. Copies of a multiple eigenvalue,
            which a Krylov space of few vectors does not contain, show up there.
        on_failure: Without convergence, ``"warn"`` and return what there is, or ``"raise"``.
        seed: Seeds start vectors. Default: PyTorch's global generator does.
        generator: Draws start vectors, instead of ``seed``.

    Returns:
        The named tuple ``(eigenvalues, eigenvectors, residuals)``, with attribute
        ``num_products``. Tensors for an operator of this package or a tensor, else numpy arrays.

    Raises:
        ValueError: If an argument is out of its range, or ``A`` is not symmetric.
        ConvergenceError: Without convergence, if ``on_failure="raise"``.

    Example:
        >>> import numpy as np
        >>> from curvlinops import eigsh
        >>> eigsh(np.diag([1.0, 2.0, 3.0]), k=2, which="LA").eigenvalues.round(6)
        array([2., 3.])
    """
    check_on_failure(on_failure)
    matrix = Matrix(A, square=True)
    rng = read_generator(matrix.device, seed, generator)
    start = _start(matrix, v0, block_size, rng)
    _check(matrix.shape[0], k, which, tol, maxiter)
    ncv = _basis_size(matrix, k, len(start), ncv)
    space = KrylovSpace(matrix, start, ncv)
    search = _Search(matrix, space, k, which, tol, ncv, confirm, rng)
    finished = search.run(1000 if maxiter is None else maxiter)
    return search.result(finished, on_failure)


class _Search:
    """The iteration: expand the space, restart it, and confirm what has converged."""

    def __init__(
        self,
        matrix: Matrix,
        space: KrylovSpace,
        k: int,
        which: str,
        tol: float,
        ncv: int,
        confirm: bool,
        generator: torch.Generator,
    ):
        self.matrix, self.space, self.generator = matrix, space, generator
        self.k, self.which, self.tol, self.ncv = k, which, tol, ncv
        self.confirm = confirm
        self.locked: Tensor | None = None
        self.locked_at = 0

    def run(self, maxiter: int) -> bool:
        """Iterate until the pairs are found; return whether they are."""
        space, dim = self.space, self.matrix.shape[0]
        restarts, checked = 0, 0
        while space.dim < dim:
            if space.dim + max(space.pending, 1) > self.ncv:
                if restarts == maxiter:
                    return False
                restarts, checked = restarts + 1, 0
                self._restart()
            if not space.pending:
                space.inject(_random(1, self.matrix, self.generator))
            space.expand()
            # in large spaces Ritz pairs cost more than they may save
            if space.dim >= self.k and space.dim - checked > space.dim // 32:
                if self._finished(space.ritz()):
                    return True
                checked = space.dim
        return True

    def _finished(self, ritz: RitzPairs) -> bool:
        """Return whether the wanted pairs have converged, and are confirmed by a fresh start."""
        wanted = _order(ritz.values, self.which)[: self.k].sort().values
        self._check_symmetric(ritz.noise[wanted])
        if bool(self._unfinished(ritz, wanted).any()):
            return False
        if not self.confirm:
            return True
        if self.matrix.shape[0] - self.space.dim <= _FEW:
            return False  # the whole space, soon, leaves nothing to confirm
        values = ritz.values[wanted]
        slack = 2 * self._goal(ritz, wanted) + ritz.residuals[wanted]
        if self.locked is None or bool(((values - self.locked).abs() > slack).any()):
            self.locked, self.locked_at = values, self.matrix.num_products
            fresh = _random(1, self.matrix, self.generator)
            self.space.lock(ritz.vectors[:, wanted], fresh)
            return False
        return self._nothing_missing(ritz, wanted)

    def _nothing_missing(self, ritz: RitzPairs, wanted: Tensor) -> bool:
        """Return whether a fresh random start would by now have shown a missing eigenvalue.

        The start contains about ``1/sqrt(D)`` of a missing eigenvector. j products amplify it, in
        comparison with eigenvectors of an interval of eigenvalues, by ``cosh(j arccosh(rho))``,
        where rho is the missing eigenvalue's distance from the center in units of the radius.
        """
        products, dim = self.matrix.num_products - self.locked_at, self.matrix.shape[0]
        rest = torch.ones_like(ritz.values, dtype=torch.bool)
        rest[wanted] = False
        if products < 3 or not bool(rest.any()):
            return False
        low = float((ritz.values - ritz.coupling)[rest].min())
        high = float((ritz.values + ritz.coupling)[rest].max())
        distance = float((ritz.values[wanted] - (low + high) / 2).abs().min())
        # never more than double at each product: distances may be tiny
        ratio = max(2 * distance / max(high - low, 1e-30), 1.25)
        return products * acosh(ratio) >= log(2 * dim**0.5)

    def _goal(self, ritz: RitzPairs, chosen: Tensor) -> Tensor:
        return (self.tol * ritz.values[chosen].abs()).clamp(min=self._rounding())

    def _unfinished(self, ritz: RitzPairs, chosen: Tensor) -> Tensor:
        """Return which of the chosen pairs further products may improve."""
        return ritz.coupling[chosen] > self._goal(ritz, chosen).maximum(ritz.noise[chosen])

    def _rounding(self) -> float:
        return 10 * torch.finfo(self.matrix.dtype).eps * self.space.norm

    def _restart(self) -> None:
        ritz = self.space.ritz()
        order = _order(ritz.values, self.which)
        if not self.space.pending:  # nothing is lost, everything has converged
            self.space.restart(ritz.vectors[:, order[: self.k]])
            return
        wanted = order[: self.k]
        done = self.k - int(self._unfinished(ritz, wanted).sum())
        keep = self.k + done // 2 + (self.ncv - self.k) // 2
        keep = min(keep, self.ncv - 2 * self.space.pending)
        self.space.restart(ritz.vectors[:, order[:keep]])

    def _check_symmetric(self, noise: Tensor) -> None:
        # what locking drops looks like asymmetry
        if self.locked is None and float(noise.max()) > _ASYMMETRY * self.space.norm:
            raise ValueError(
                f"The matrix is not symmetric: its products differ from those of its transpose by "
                f"about {float(noise.max()) / self.space.norm:.1e} of its norm."
            )

    def result(self, finished: bool, on_failure: str) -> Eigenpairs:
        """Return the wanted pairs; say so if they are not what was asked for."""
        ritz = self.space.ritz()
        wanted = _order(ritz.values, self.which)[: self.k].sort().values
        self._check_symmetric(ritz.noise[wanted])
        values, residuals, goal = (
            ritz.values[wanted],
            ritz.residuals[wanted],
            self._goal(ritz, wanted),
        )
        X = self.space.combine(ritz.vectors[:, wanted])
        missed = self._unfinished(ritz, wanted)
        if self.tol > 0 and bool((residuals > goal).any()):  # or estimates are too large
            residuals = (self.matrix @ X - X * values.to(X)).norm(dim=0).double().cpu()
            missed |= residuals > 2 * goal + 10 * self._rounding()
        if bool(missed.any()) or not finished:
            self._fail(int(missed.sum()), float(residuals.max()), on_failure)
        out = (values.to(X), X, residuals.to(X))
        pairs = Eigenpairs(*(self.matrix.write(part) for part in out))
        pairs.num_products = self.matrix.num_products
        return pairs

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


def _order(values: Tensor, which: str) -> Tensor:
    """Return the indices of ascending values, the most wanted ones first."""
    up = torch.arange(len(values))
    if which == "SA":
        return up
    if which == "LA":
        return up.flip(0)
    if which == "LM":
        return values.abs().argsort(descending=True)
    return torch.stack([up.flip(0), up], dim=1).flatten()[: len(values)]


def _random(count: int, matrix: Matrix, generator: torch.Generator) -> Tensor:
    shape = (count, matrix.shape[0])
    return torch.randn(shape, generator=generator, dtype=matrix.dtype, device=matrix.device)


def _start(matrix: Matrix, v0: Any, block_size: int | None, generator: torch.Generator) -> Tensor:
    """Return the rows of the first block, ``[b, D]``."""
    given = None if v0 is None else matrix.read(v0).T
    size = block_size if block_size is not None else (1 if given is None else len(given))
    if type(size) is not int or not 1 <= size <= matrix.shape[0]:
        raise ValueError(f"block_size must be an integer from 1 to D, got {block_size!r}.")
    if given is None:
        return _random(size, matrix, generator)
    if len(given) != size:
        raise ValueError(f"v0 has {len(given)} vectors, but block_size is {size}.")
    return given


def _check(dim: int, k: int, which: str, tol: float, maxiter: int | None) -> None:
    if which not in ("LM", "LA", "SA", "BE"):
        raise ValueError(f"which must be 'LM', 'LA', 'SA' or 'BE', got {which!r}.")
    if not isinstance(k, int | np.integer) or not 1 <= k <= dim:
        raise ValueError(f"k must be an integer from 1 to D = {dim}, got {k!r}.")
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be at least zero and less than one, got {tol!r}.")
    if maxiter is not None and (not isinstance(maxiter, int | np.integer) or maxiter < 0):
        raise ValueError(f"maxiter must be a non-negative integer, got {maxiter!r}.")


def _basis_size(matrix: Matrix, k: int, block: int, ncv: int | None) -> int:
    dim, least = matrix.shape[0], k + 2 * block
    if ncv is None:
        affordable = _BASIS_BYTES // (dim * matrix.dtype.itemsize)
        return min(dim, max(2 * k + 1, 20, k + 4 * block, min(2 * k + 50, affordable)))
    if not isinstance(ncv, int | np.integer) or not min(least, dim) <= ncv:
        raise ValueError(
            f"ncv must be an integer of at least k + 2 * block_size = {least}, got {ncv!r}."
        )
    return min(int(ncv), dim)
