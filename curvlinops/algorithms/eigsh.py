"""Some eigenvalues and eigenvectors of a symmetric matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.iteration import (
    Callback,
    Iteration,
    check_callback,
    check_on_failure,
    fail,
    solves,
    stops,
)
from curvlinops.algorithms.krylov import ASYMMETRY
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.rng import check_source, read_generator

#: The default ``ncv``, and how many bytes so many basis vectors may need.
_NCV, _BASIS_BYTES = 1000, 2**30
#: Restarts recombine the basis in parts of about this many bytes.
_PART = 2**20
#: A block of the basis has so many rows, or as many as fit into this many bytes.
_ROWS, _BLOCK = 4, 2**20
#: The chance that a random unit vector of n entries has a part below ``_CHANCE * n**-0.5`` along a
#: given direction.
_CHANCE = 1e-3
#: Probes need not tell eigenvalues apart that differ by less than this, or a hundred units of
#: rounding, relative to the norm of the matrix.
_RESOLUTION = 1e-12


@dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenpairs of a matrix; unpacks into eigenvalues and eigenvectors.

    Attributes:
        eigenvalues: Ascending, ``[k]``.
        eigenvectors: Orthonormal columns, ``[D, k]``.
        residuals: Norms ``||A x - lambda x||``, ``[k]``.
        num_products: Number of vectors that ``A`` was multiplied by.
        history: Number of products, and largest residual of the wanted pairs, at each check,
            ``[num_checks, 2]``, float64, on the CPU.
    """

    eigenvalues: Tensor
    eigenvectors: Tensor
    residuals: Tensor
    num_products: int
    history: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        """Unpack like the result of SciPy's ``eigsh``."""
        return iter((self.eigenvalues, self.eigenvectors))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return (self.eigenvalues, self.eigenvectors)[index]

    def __repr__(self) -> str:
        """Write the ends of the eigenvalues, and the shape of the eigenvectors."""
        (dim, k), values = self.eigenvectors.shape, self.eigenvalues.tolist()
        ends = f"{values[0]:.5g} ... {values[-1]:.5g}" if k > 1 else f"{values[0]:.5g}"
        return f"Eigenpairs({k} of {dim}, eigenvalues {ends}, num_products={self.num_products})"


@solves
def eigsh(
    A: AnyMatrix,
    k: int = 6,
    which: str = "LM",
    *,
    ncv: int | None = None,
    v0: Vectors | None = None,
    tol: float = 0.0,
    maxiter: int | None = None,
    verify: bool = True,
    on_failure: str = "warn",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callback = None,
) -> Eigenpairs:
    """Compute k eigenpairs ``A x = lambda x`` of a symmetric matrix, on its device.

    Thick-restart Lanczos with full reorthogonalization (Wu and Simon, SIAM J. Matrix Anal. Appl.
    2000). A Krylov space contains one copy of a multiple eigenvalue. So the search continues with
    random vectors, orthogonal to all earlier ones, until better eigenvalues are excluded, except
    for a chance of about 0.1 %. Eigenpairs of structured operators, such as KFAC, are computed from
    their structure.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        k: Number of eigenpairs, at most D. ``torch.linalg.eigh(A.to_dense())`` is faster for many.
        which: Eigenvalues of largest magnitude (``"LM"``), the largest (``"LA"``), the smallest
            (``"SA"``), or from both ends (``"BE"``; one more from the upper end if k is odd).
        ncv: Largest number of basis vectors, at least ``k + 2`` or D. More basis vectors need fewer
            products and more memory (``D * ncv`` numbers). More than D count as D. Default: 1000,
            or as many as fit into 1 GiB, but at least ``max(2 k + 1, 20)``.
        v0: The start, a vector of any kind that ``A`` multiplies. Default: random.
        tol: Largest residual relative to ``|lambda|``. Residuals of about ten units of rounding,
            relative to the norm of ``A``, are always accepted. With zero, residuals are as small as
            the accuracy of products allows.
        maxiter: Largest number of restarts. Default: 1000.
        verify: Whether to look for better eigenvalues in the space that the search has not covered.
            This takes a few products, or tens if the wanted eigenvalues lie in a dense part of the
            spectrum: for small networks, 10 to 40 % more. It takes none if ``v0`` is not given, and
            one eigenvalue is wanted from each end. With False, copies of an eigenvalue may be
            missing, and eigenvectors that are orthogonal to ``v0``.
        on_failure: Without convergence, ``"warn"`` and return the best pairs, or ``"raise"``.
        seed: Seed of random vectors. Default: always the same one; nothing is drawn from PyTorch's
            global generator.
        generator: Generator that draws the random vectors, instead of ``seed``.
        callback: Called at each check of convergence, after most products, with an ``Iteration``:
            the ``residuals`` of the wanted pairs, their Ritz vectors as ``iterate``, and their Ritz
            values as ``values``. If it returns True, ``eigsh`` returns these pairs, without a
            warning. The iterates take as much time as the products of small models. It is not
            called for structured operators.

    Returns:
        Eigenpairs on the device of ``A``. They unpack into ``(eigenvalues, eigenvectors)`` like
        SciPy's result, and have the attributes ``residuals``, ``num_products`` and ``history``.

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
    check_callback(callback)
    check_source(seed, generator)
    matrix = Matrix(A, square=True)
    k = check_count("k", k, at_most=matrix.shape[0])
    maxiter = check_count("maxiter", 1000 if maxiter is None else maxiter, at_least=0)
    if which == "SM":
        raise ValueError(
            "which='SM', the eigenvalues nearest to zero, is not supported: it needs solves. "
            "which='SA' finds the smallest ones, which are those of a positive semidefinite matrix "
            "such as the GGN."
        )
    check_choice("which", which, ("LM", "LA", "SA", "BE"))
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be at least zero and less than one, got {tol!r}.")
    start = None if v0 is None else matrix.read(v0).columns
    if start is not None and len(start) != 1:
        raise ValueError(f"v0 must be a single vector, got {len(start)}.")
    ncv = _basis_size(matrix, k, ncv)
    known = matrix.operator._eigenpairs(k, which)
    if known is not None:
        values, vectors = known
        residuals = matrix.space.norms((matrix @ vectors - vectors * values).T).to(vectors)
        history = _history([(matrix.num_products, float(residuals.max()))])
        return Eigenpairs(
            values, matrix.space.vectors(vectors), residuals, matrix.num_products, history
        )
    # the result does not depend on the start, so that there is no need to draw a seed
    generator = read_generator(matrix.device, 0 if seed is generator is None else seed, generator)
    basis, checks = LanczosBasis(matrix, start, ncv, generator), list[tuple[int, float]]()

    def observe(pairs: RitzPairs) -> bool:
        checks.append((matrix.num_products, float(pairs.residuals.max())))

        def state() -> Iteration:
            vectors = basis.rows.combine(pairs.vectors)
            return Iteration(
                iteration=len(checks),
                num_products=matrix.num_products,
                residuals=pairs.residuals.to(vectors.device),
                iterate=matrix.space.vectors(vectors),
                values=pairs.values.to(vectors),
            )

        return stops(callback, matrix.operator._team, state)

    search = _Search(basis, k, which, tol, verify, is_random=start is None)
    num_missed, pairs = search.run(maxiter, observe), search.found
    if num_missed:
        fail(
            f"eigsh: after {matrix.num_products} products {num_missed} of {k} pairs have not "
            f"converged, or may not be the wanted ones; residuals reach "
            f"{float(pairs.residuals.max()):.1e}. Allow a larger ncv, maxiter or tol.",
            on_failure,
        )
    vectors = basis.rows.release(pairs.vectors)
    values, residuals = pairs.values.to(vectors), pairs.residuals.to(vectors)
    vectors = matrix.space.vectors(vectors)
    return Eigenpairs(values, vectors, residuals, matrix.num_products, _history(checks))


def _history(checks: list[tuple[int, float]]) -> Tensor:
    """Return the products and largest residuals at each check, ``[num_checks, 2]``."""
    return torch.tensor(checks, dtype=torch.float64, device="cpu")


class RitzPairs(NamedTuple):
    """Approximate eigenpairs from a basis of m vectors; float64, on the CPU."""

    values: Tensor  # Ritz values [p], ascending
    vectors: Tensor  # Ritz vectors as columns of coefficients in the basis, [m, p]
    couplings: Tensor  # norms of the parts of the residuals that more products reduce, [p]
    noise: Tensor  # norms of the parts that stay, from rounding errors of the products, [p]
    is_locked: Tensor  # which pairs are from the locked rows of the basis, [p]

    @property
    def residuals(self) -> Tensor:
        """Residual norms, ``[p]``."""
        return torch.hypot(self.couplings, self.noise)

    def select(self, indices: Tensor) -> "RitzPairs":
        """Return the pairs with these indices."""
        return RitzPairs(*(field[..., indices] for field in self))


class _Search:
    """Decides which Ritz pairs of a basis are the wanted ones, and how the search goes on.

    A Krylov space has one copy of an eigenvalue, and no eigenvector that is orthogonal to the
    start. So a random start shows one eigenpair at each end. If more are wanted, or the start is
    not random, a probe follows: another Krylov space, of a random vector that is orthogonal to the
    converged pairs, which are locked. The search ends when the probe excludes better eigenvalues,
    and continues with those that it finds.
    """

    found: RitzPairs  # the wanted pairs at the last check, by ascending value
    num_missed: int  # the number of wanted pairs that have not converged, or are not there yet

    def __init__(
        self, basis: "LanczosBasis", k: int, which: str, tol: float, verify: bool, is_random: bool
    ):
        self._basis, self._k, self._which, self._tol = basis, k, which, tol
        self._verify, self._is_random = verify, is_random
        #: In a probe, wanted pairs are locked, and better eigenvalues are outside of these limits.
        self._limits: tuple[float, float] | None = None
        #: Outside of these, they have to be excluded.
        self._copies = -inf, inf

    def run(self, maxiter: int, observe: Callable[[RitzPairs], bool]) -> int:
        """Search; return the number of pairs that miss their goal, or may not be the wanted ones.

        ``observe`` is called with the wanted pairs at each check; True ends the search.
        """
        basis, restarts, checked = self._basis, 0, 0
        while True:
            # in a large basis, Ritz pairs cost more time than the products that they may save
            is_due = basis.size >= self._k and basis.size - checked > (basis.num_new / 160) ** 2
            if is_due or basis.is_full or basis.is_complete:
                checked = basis.size
                self.check()
                if observe(self.found):
                    return 0
                if self.is_done():
                    return self.num_missed
                if basis.is_full:
                    if restarts == maxiter:
                        # if all have converged, there may be better ones in the rest of the space
                        return max(self.num_missed, 1)
                    restarts, checked = restarts + 1, 0
                    self.restart()
            basis.expand()

    def check(self) -> None:
        """Compute the Ritz pairs, and find the wanted ones."""
        self._pairs = pairs = self._basis.ritz()
        # more products do not reduce the noise of products in low precision
        goals = (self._tol * pairs.values.abs()).clamp(min=self._basis.rounding)
        allowed = goals.maximum(pairs.noise)
        self._converged = pairs.couplings <= allowed
        known = (pairs.is_locked | (self._limits is None)).nonzero()[:, 0]
        self._order = known[_order(pairs.values[known], self._which)]
        wanted = self._order[: self._k].sort().values
        self.found, self._slack = pairs.select(wanted), float(allowed[wanted].max())
        self.num_missed = self._k - int(self._converged[wanted].sum())

    def is_done(self) -> bool:
        """Return whether the search ends; else begin what comes next."""
        basis = self._basis
        if self._limits is not None:
            low, high = self._limits
            values = self._pairs.values
            is_better = ~self._pairs.is_locked & ((values < low) | (values > high))
            if not bool(is_better.any()):
                below, above = self._copies
                self._limits = (
                    (-inf if self._excludes(below) else low),
                    (inf if self._excludes(above) else high),
                )
                return self._limits == (-inf, inf)
            self._use_probe(is_better)
        if self.num_missed or basis.is_beginning:
            return basis.is_complete
        at_one_end = (self._k + 1) // 2 if self._which == "BE" else self._k
        if basis.is_complete or not self._verify:
            return True
        if at_one_end == 1 and self._is_random:
            return self._excludes_far()
        self._begin_probe()
        return False

    def _begin_probe(self) -> None:
        """Look for better eigenvalues in the space that is orthogonal to the basis."""
        values, k = self.found.values, self._k
        if self._which == "LM":
            low = high = values.abs().sort().values
        else:
            num_low = {"LA": 0, "SA": k, "BE": k // 2}[self._which]
            low, high = -values[:num_low].flip(0), values[num_low:]
        (low, below), (high, above) = self._limit(low), self._limit(high)
        self._limits, self._copies = (-low, high), (-below, above)
        # unconverged pairs are locked, too, if there is room: then a probe takes fewer products
        is_settled = bool(self._converged.all())
        if self._basis.size > self._basis.most_locked(k):
            self._lock()
            is_settled = True
        self._basis.begin(self._basis.random_row(), is_settled)

    def _limit(self, wanted: Tensor) -> tuple[float, float]:
        """Return the number beyond which eigenvalues are better than the wanted, ascending ones.

        The second number is the one beyond which a probe excludes them. A random start has shown
        one copy of each eigenvalue, but for a small chance. So only further copies may be missing,
        and those of the last wanted one change nothing.
        """
        if not len(wanted):
            return inf, inf
        least = float(wanted[0]) + self._slack
        if not self._is_random or len(wanted) == 1:
            return least, least
        return least, max(least, float(wanted[1]) - self._slack)

    def _use_probe(self, is_better: Tensor) -> None:
        """Go on with the pairs of a probe, in place of unconverged ones that are locked."""
        self._limits = None
        if not self._basis.is_settled:
            better = self._pairs.select(is_better & ~self._converged)
            row = self._basis.rows.combine(better.vectors.sum(1, keepdim=True)).T
            self.check()
            self._lock()
            if len(better.values):
                self._basis.begin(row)
        self.check()

    def _lock(self) -> None:
        """Keep converged pairs only, the most wanted ones."""
        order = self._order[self._converged[self._order]]
        self._basis.lock(self._pairs.select(order[: self._basis.most_locked(self._k)]))

    def _excludes_far(self) -> bool:
        """Return whether the start excludes eigenvalues that would double the known spectrum."""
        low, high = float(self._pairs.values[0]), float(self._pairs.values[-1])
        low, high = 2 * low - high, 2 * high - low
        ends = {"LA": [high], "SA": [low]}.get(self._which, [low, high])
        return all(map(self._excludes, ends))

    def _excludes(self, limit: float) -> bool:
        return self._basis.excludes(limit, self._pairs)

    def restart(self) -> None:
        """Make room for more products."""
        basis, pairs, k = self._basis, self._pairs, self._k
        keep = k + (basis.ncv - k) // 3
        if self._limits is None:
            keep = min(keep + (k - self.num_missed) // 3, basis.ncv - 2)
            best = self._order[: max(k, keep // 2)]
            locked, new = best[pairs.is_locked[best]], self._order
        elif not basis.is_settled:
            self._lock()
            basis.begin(basis.random_row())
            return
        else:
            keep = min(keep, basis.ncv - 2)
            gaps = torch.stack([(pairs.values - limit).abs() for limit in self._limits]).amin(0)
            locked, new = pairs.is_locked.nonzero()[:, 0], gaps.argsort()
        new = new[~pairs.is_locked[new]]
        basis.restart(pairs, torch.cat([locked, new[: max(keep - len(locked), 1)]]))


def _basis_size(matrix: Matrix, k: int, ncv: int | None) -> int:
    """Return the largest number of basis vectors."""
    dim = matrix.shape[0]
    if ncv is not None:
        return min(check_count("ncv", ncv, at_least=min(k + 2, dim)), dim)
    affordable = min(_NCV, _BASIS_BYTES // (dim * matrix.dtype.itemsize))
    return min(dim, max(affordable, 2 * k + 1, 20))


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


class _Rows:
    """Vectors as rows of blocks, so that none moves when there are more."""

    def __init__(self, space: ParameterSpace):
        self._space, self._blocks = space, list[Tensor]()
        self._height = max(_ROWS, _BLOCK // max(space.local_dim * space.dtype.itemsize, 1))

    def __getitem__(self, index: int) -> Tensor:
        """Return a row, ``[1, D]``; the one after the last one is allocated."""
        block, row = divmod(index, self._height)
        if block == len(self._blocks):
            self._blocks.append(self._space.empty(self._height))
        return self._blocks[block][row : row + 1]

    def remove(self, first: int, stop: int, w: Tensor) -> Tensor:
        """Subtract from w ``[1, D]`` its parts along some rows; return them, float64, CPU."""
        parts = [torch.zeros(0, dtype=torch.float64, device="cpu")]
        for rows in self._slices(first, stop):
            coefficients = self._space.gram(rows, w)
            w.addmm_(coefficients.T, rows, alpha=-1)
            parts.append(coefficients.sum(1).double().cpu())
        return torch.cat(parts)

    def combine(self, Y: Tensor) -> Tensor:
        """Return combinations ``[D, p]`` of the first m rows, with coefficients ``[m, p]``."""
        out = self._space.empty(Y.shape[1]).zero_()
        for rows, some in zip(self._slices(0, len(Y)), Y.split(self._height), strict=True):
            out.addmm_(some.T.to(rows), rows)
        return out.T

    def recombine(self, Y: Tensor) -> None:
        """Replace the first p of m rows by combinations, with coefficients ``[m, p]``."""
        old, new = (list(self._slices(0, size)) for size in Y.shape)
        coefficients = Y.T.to(old[0])
        width = max(_PART // (len(Y) * coefficients.itemsize), 1)
        for start in range(0, self._space.local_dim, width):
            part = coefficients @ torch.cat([rows[:, start : start + width] for rows in old])
            for rows, values in zip(new, part.split(self._height), strict=True):
                rows[:, start : start + width] = values

    def release(self, Y: Tensor) -> Tensor:
        """Return combinations as ``combine`` does, in the memory of the rows, which end."""
        self.recombine(Y)
        rows = list(self._slices(0, Y.shape[1]))
        self._blocks.clear()
        return torch.cat(rows).T

    def _slices(self, first: int, stop: int) -> Iterator[Tensor]:
        """Yield some rows, block by block."""
        for start in range(first - first % self._height, stop, self._height):
            block = self._blocks[start // self._height]
            yield block[max(first - start, 0) : stop - start]


class LanczosBasis:
    """An orthonormal basis V with ``A V = V H + q b^T``, stored as ``rows``.

    q is the unit vector that is multiplied next. H has the measured coefficients, and is symmetric
    up to the rounding errors of products. V has ``size`` rows, and at most ``ncv``. The first
    ``num_locked`` stay as they are. The others are one Krylov space, orthogonal to them. If the
    locked pairs have not converged (``is_settled``), the vectors that their residuals need are
    neither in V nor in q.
    """

    def __init__(self, matrix: Matrix, start: Tensor | None, ncv: int, generator: torch.Generator):
        self._matrix, self._generator, self.ncv = matrix, generator, ncv
        self._space, self._eps = matrix.space, torch.finfo(matrix.dtype).eps
        self.rows = _Rows(matrix.space)  # V, then q
        self._H = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self._noise = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._norm = 0.0  # a lower bound on the norm of A: the largest product so far
        self._locked: RitzPairs | None = None
        self.size = self.num_locked = 0
        self.begin(self.random_row() if start is None else start)

    @property
    def rounding(self) -> float:
        """Ten units of rounding, times the norm of the matrix."""
        return 10 * self._eps * self._norm

    @property
    def num_new(self) -> int:
        """The number of rows of V that are not locked."""
        return self.size - self.num_locked

    @property
    def is_complete(self) -> bool:
        """Whether V spans the whole space."""
        return self.size == self._matrix.shape[0]

    @property
    def is_full(self) -> bool:
        """Whether there is no room for another product."""
        return self.size == self.ncv and not self.is_complete

    @property
    def is_beginning(self) -> bool:
        """Whether the start of a Krylov space waits for its first product."""
        return self._has_next and not self.num_new

    def random_row(self) -> Tensor:
        """Draw the start of a Krylov space, ``[1, D]``."""
        return self._space.draw(1, lambda x: x.normal_(generator=self._generator))

    def begin(self, row: Tensor, is_settled: bool = True) -> None:
        """Lock all of V, and begin the Krylov space of another row, orthogonal to V."""
        if self.size:
            pairs = self.ritz()
            self._locked = pairs._replace(is_locked=torch.ones_like(pairs.is_locked))
        self.num_locked, self.is_settled = self.size, is_settled
        size = self._space.norms(row).to(row).unsqueeze(1)
        row = row / size.where(size > 0, 1.0)
        for _ in range(2):
            self.rows.remove(0, self.size, row)
        row, _ = self._unit(row, 100 * self._eps)
        self.rows.remove(0, self.size, row)
        row, _ = self._unit(row, 0.5)
        self._set_next(row, torch.zeros(self.size, dtype=torch.float64, device="cpu"))
        self._first_coupled, self._log_betas, self._dropped = 0, 0.0, list[Tensor]()
        self._start = torch.zeros(self.size, dtype=torch.float64, device="cpu")  # q_0, in the basis

    def expand(self) -> None:
        """Multiply q by the matrix, and append q to V; if there is none, draw a random vector."""
        if not self._has_next:
            self.begin(self.random_row())
        m = self.size
        w = (self._matrix @ self.rows[m].T).T.contiguous()
        largest = float(self._space.norms(w))
        self._norm = max(self._norm, largest)
        H = torch.zeros(m + 1, m + 1, dtype=torch.float64, device="cpu")
        H[:m, :m], H[m, :m] = self._H, self._b
        # in exact arithmetic the first pass is enough; the second one removes rounding errors
        for first in (self._first_coupled, 0):
            H[first:, m] += self.rows.remove(first, m + 1, w)
        is_beginning = float(self.is_beginning)
        self.size = m + 1
        q, beta = self._unit(w, self.rounding)
        if 0 < beta < 0.1 * largest:
            # little is left, and its rounding errors are large relative to it: a third pass
            self.rows.remove(0, m + 1, q)
            q, rest = self._unit(q, 0.5)
            beta *= rest
        self._log_betas += log(beta) if beta else inf
        self._check_symmetric(H, m)
        self._H, self._first_coupled = H, m
        self._start, self._noise = (
            torch.nn.functional.pad(x, (0, 1), value=last)
            for x, last in ((self._start, is_beginning), (self._noise, 0.0))
        )
        b = torch.zeros(m + 1, dtype=torch.float64, device="cpu")
        b[m] = beta
        self._set_next(q, b)

    def ritz(self) -> RitzPairs:
        """Return the locked Ritz pairs, and those of the other rows."""
        first, parts = self.num_locked, []
        if self._locked is not None:
            rows = self.size - len(self._locked.vectors)
            padded = torch.nn.functional.pad(self._locked.vectors, (0, 0, 0, rows))
            parts.append(self._locked._replace(vectors=padded))
        if first < self.size:
            H = self._H[first:, first:]
            values, part = torch.linalg.eigh((H + H.T) / 2)
            # noise of different basis vectors is uncorrelated, so that squares add up
            noise = ((part**2).T @ self._noise[first:] ** 2).sqrt()
            noise = noise.hypot(((H - H.T) / 2 @ part).norm(dim=0))
            couplings = (self._b[first:] @ part).abs()
            to_locked = (self._H[:first, first:] @ part).norm(dim=0)
            if self.is_settled:  # as small as tolerances; more products do not reduce it
                noise = noise.hypot(to_locked)
            else:
                couplings = couplings.hypot(to_locked)
            is_locked = torch.zeros(len(values), dtype=torch.bool, device="cpu")
            vectors = torch.nn.functional.pad(part, (0, 0, first, 0))
            parts.append(RitzPairs(values, vectors, couplings, noise, is_locked))
        if len(parts) == 1:
            return parts[0]
        pairs = RitzPairs(*(torch.cat(fields, dim=-1) for fields in zip(*parts, strict=True)))
        return pairs.select(pairs.values.argsort(stable=True))

    def most_locked(self, k: int) -> int:
        """Return how many rows may be locked, so that there is room for a search of k pairs."""
        is_limited = self.ncv < self._matrix.shape[0]
        return min((k + self.ncv) // 2, self.ncv - 2) if is_limited else self.ncv

    def excludes(self, limit: float, pairs: RitzPairs) -> bool:
        """Return whether the Krylov space of a random vector excludes eigenvalues beyond a limit.

        Let x be a unit eigenvector that is orthogonal to the locked rows. Its products with the
        rows of the Krylov space obey their recurrence: ``<x, q_m> = p(lambda) <x, q_0>``, where
        ``p(lambda) = prod_i (lambda - theta_i) / prod_i beta_i`` increases beyond all Ritz values
        theta (those dropped at restarts, too). As ``|<x, q_m>| <= 1``, the start has a part of at
        most ``1 / p(limit)`` along x. A random vector has so small a part with a small chance only.

        A Ritz vector y that has converged next to the limit has a small part along x, ``coupling /
        (lambda - theta)``. If that is negligible, the bound holds for the rest of the start, with
        ``sum_i 1 / (limit - theta_i)`` of the other Ritz values in place of y's own.
        """
        if not self._has_next:
            return True
        num_left = self._matrix.shape[0] - self.num_locked
        chance = max(_CHANCE * num_left**-0.5, self._eps)
        new = pairs.select(~pairs.is_locked)
        gaps = (limit - new.values).abs()
        least = max(_RESOLUTION, 100 * self._eps) * self._norm
        parts = (new.vectors.T @ self._start).abs() * new.couplings / (gaps + least)
        is_settled = parts <= chance
        others = torch.cat([gaps[~is_settled], *((limit - x).abs() for x in self._dropped)])
        inverse = (1 / gaps[is_settled]).clamp(max=float((1 / others).sum()))
        return self._log_betas - float(others.log().sum() - inverse.log().sum()) <= log(chance)

    def restart(self, pairs: RitzPairs, kept: Tensor) -> None:
        """Replace V by some of all Ritz vectors, locked ones first; q stays."""
        is_dropped = ~pairs.is_locked
        is_dropped[kept] = False
        self._dropped.append(pairs.values[is_dropped])
        pairs = pairs.select(kept)
        self._start = pairs.vectors.T @ self._start
        q = self.rows[self.size][: int(self._has_next)].clone()
        self.rows.recombine(pairs.vectors)
        self.size, self._H, self._first_coupled = len(pairs.values), pairs.values.diag(), 0
        self._noise, self.num_locked = pairs.noise, int(pairs.is_locked.sum())
        eye = torch.eye(self.num_locked, dtype=torch.float64, device="cpu")
        locked = pairs.select(pairs.is_locked)._replace(vectors=eye)
        self._locked = locked if self.num_locked else None
        self._set_next(q, self._b @ pairs.vectors)

    def lock(self, pairs: RitzPairs) -> None:
        """Replace V by Ritz vectors, all of them locked, and drop q."""
        pairs = pairs._replace(is_locked=torch.ones_like(pairs.is_locked))
        self.restart(pairs, torch.arange(len(pairs.values), device="cpu"))
        self._has_next = False

    def _unit(self, row: Tensor, negligible: float) -> tuple[Tensor, float]:
        """Return a row ``[1, D]`` of norm one, or none if it is negligible, and its norm."""
        norm = self._space.norms(row)
        if self.is_complete or not len(row) or not float(norm) > negligible:
            return row[:0], 0.0
        return row / norm.to(row), float(norm)

    def _set_next(self, q: Tensor, b: Tensor) -> None:
        self._has_next, self._b = len(q) > 0, b
        self.rows[self.size][: len(q)] = q

    def _check_symmetric(self, H: Tensor, start: int) -> None:
        """Check that the measured coefficients of the last block are symmetric."""
        if self._matrix.operator.self_adjoint:
            return
        locked = self.num_locked
        asymmetry = float((H - H.T)[start:, locked:].norm()) / 2
        if asymmetry > ASYMMETRY * self._norm:
            raise ValueError(
                "The matrix is not symmetric: its products differ from those of its transpose by "
                f"about {asymmetry / self._norm:.1e} of its norm."
            )
