"""Some eigenvalues and eigenvectors of a symmetric matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf, log
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.callbacks import Callback, Iteration, check_callback, stops
from curvlinops.algorithms.convergence import check_on_failure, fail
from curvlinops.algorithms.krylov import ASYMMETRY
from curvlinops.algorithms.solver import solves
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import as_integer, check_choice, check_count
from curvlinops.support.rng import check_source, read_generator

#: The default ``ncv``, and how many bytes so many basis vectors may need.
_NCV, _BASIS_BYTES = 1000, 2**30
#: Norms above this can be trusted, also in float64.
_SMALL = 1e-100
#: Restarts recombine the basis in parts of about this many bytes.
_PART = 16 * 2**20
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


@solves
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
    verify: bool = True,
    on_failure: str = "warn",
    seed: int | None = None,
    generator: torch.Generator | None = None,
    callback: Callback = None,
) -> Eigenpairs:
    """Compute k eigenpairs ``A x = lambda x`` of a symmetric matrix, on its device.

    Block thick-restart Lanczos with full reorthogonalization (Wu and Simon, SIAM J. Matrix Anal.
    Appl. 2000). The Krylov space of m vectors contains at most m copies of a multiple eigenvalue.
    So the search continues with random vectors, orthogonal to all earlier ones, until better
    eigenvalues are excluded, except for a chance of about 0.1 %. Eigenpairs of structured
    operators, such as KFAC, are computed from their structure.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        k: Number of eigenpairs, at most D. ``torch.linalg.eigh(A.to_dense())`` is faster for many.
        which: Eigenvalues of largest magnitude (``"LM"``), the largest (``"LA"``), the smallest
            (``"SA"``), or from both ends (``"BE"``; one more from the upper end if k is odd).
        block_size: Number of vectors that are multiplied at once. Default: as many as ``v0`` has,
            or one, which needs the fewest products. Larger blocks save time if a product with
            several vectors costs little more than with one.
        ncv: Largest number of basis vectors, at least ``k + 2 * block_size`` or D. More basis
            vectors need fewer products and more memory (``D * ncv`` numbers). More than D count as
            D. Default: 1000, or as many as fit into 1 GiB, but at least ``max(2 k + 1, 20)``.
        v0: Start vectors, ``[D]`` or ``[D, block_size]``; or, for an operator on named parameters,
            a list or dictionary of tensors, like the vectors that it multiplies. Default: random.
        tol: Largest residual relative to ``|lambda|``. Residuals of about ten units of rounding,
            relative to the norm of ``A``, are always accepted. With zero, residuals are as small as
            the accuracy of products allows.
        maxiter: Largest number of restarts. Default: 1000.
        verify: Whether to look for better eigenvalues in the space that the search has not covered.
            This takes a few products, or tens if the wanted eigenvalues lie in a dense part of the
            spectrum. It takes none if ``v0`` is not given, and at most ``block_size`` eigenvalues
            are wanted from each end. With False, copies of an eigenvalue may be missing, and
            eigenvectors that are orthogonal to ``v0``.
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
    k = _count_pairs(k, matrix)
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
    given = None if v0 is None else matrix.read_rows(v0)
    block_size = _block_size(matrix, given, block_size)
    ncv = _basis_size(matrix, k, block_size, ncv)
    known = matrix.operator._eigenpairs(k, which)
    if known is not None:
        values, vectors = known
        residuals = matrix.space.norms((matrix @ vectors - vectors * values).T).to(vectors)
        check = [matrix.num_products, float(residuals.max())]
        history = torch.tensor([check], dtype=torch.float64, device="cpu")
        return Eigenpairs(values, matrix.vectors(vectors), residuals, matrix.num_products, history)
    # the result does not depend on the start, so that there is no need to draw a seed
    generator = read_generator(matrix.device, 0 if seed is generator is None else seed, generator)
    start = _random_rows(block_size, matrix, generator) if given is None else given
    observer = _Observer(matrix, callback)
    goals = partial(_relative, tol)
    num_random = (block_size if given is None else 0) if verify else None
    basis, pairs, num_missed = thick_restart_lanczos(
        matrix, start, k, which, goals, ncv, maxiter, generator, num_random, observer
    )
    if num_missed:
        fail(
            f"eigsh: after {matrix.num_products} products {num_missed} of {k} pairs have not "
            f"converged, or may not be the wanted ones; residuals reach "
            f"{float(pairs.residuals.max()):.1e}. Allow a larger ncv, maxiter or tol.",
            on_failure,
        )
    vectors = basis.combine(pairs.vectors)
    values, residuals = pairs.values.to(vectors), pairs.residuals.to(vectors)
    vectors = matrix.vectors(vectors)
    return Eigenpairs(values, vectors, residuals, matrix.num_products, observer.history())


def _relative(tol: float, values: Tensor) -> Tensor:
    return tol * values.abs()


def _count_pairs(k: int, matrix: Matrix) -> int:
    """Check the number of pairs."""
    dim, number = matrix.shape[0], as_integer(k)
    if number is not None and number > dim > 0:
        raise ValueError(
            f"k must be from 1 to {dim}, the number of eigenvalues, got {k}. All eigenpairs: "
            "torch.linalg.eigh(A.to_dense())."
        )
    return check_count("k", k, at_most=dim)


class _Observer:
    """Records the checks of convergence, and shows them to a callback.

    Args:
        matrix: The matrix.
        callback: The user's callback.
    """

    def __init__(self, matrix: Matrix, callback: Callback):
        self._matrix, self._callback = matrix, callback
        self._checks: list[tuple[int, float]] = []

    def __call__(self, basis: "LanczosBasis", pairs: "RitzPairs") -> bool:
        """Note the wanted pairs at a check; return whether the callback stops."""
        self._checks.append((self._matrix.num_products, float(pairs.residuals.max())))
        return stops(self._callback, self._matrix.operator, partial(self._state, basis, pairs))

    def _state(self, basis: "LanczosBasis", pairs: "RitzPairs") -> Iteration:
        vectors = basis.combine(pairs.vectors)
        return Iteration(
            iteration=len(self._checks),
            num_products=self._matrix.num_products,
            residuals=pairs.residuals.to(vectors.device),
            iterate=self._matrix.vectors(vectors),
            values=pairs.values.to(vectors),
        )

    def history(self) -> Tensor:
        """Return the products and largest residuals, ``[num_checks, 2]``."""
        return torch.tensor(self._checks, dtype=torch.float64, device="cpu")


class RitzPairs(NamedTuple):
    """Approximate eigenpairs from a basis of m vectors; float64, on the CPU.

    Attributes:
        values: Ritz values ``[p]``, ascending.
        vectors: Ritz vectors as columns of coefficients in the basis, ``[m, p]``.
        couplings: Norms of the parts of the residuals that more products reduce, ``[p]``.
        noise: Norms of the parts that stay, from rounding errors of the products, ``[p]``.
        is_locked: Which pairs are from the locked rows of the basis, ``[p]``.
    """

    values: Tensor
    vectors: Tensor
    couplings: Tensor
    noise: Tensor
    is_locked: Tensor

    @property
    def residuals(self) -> Tensor:
        """Residual norms, ``[p]``."""
        return torch.hypot(self.couplings, self.noise)

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
    num_random: int | None,
    observe: Callable[["LanczosBasis", RitzPairs], bool] | None = None,
) -> tuple["LanczosBasis", RitzPairs, int]:
    """Find eigenpairs at the ends of the spectrum by block thick-restart Lanczos.

    A Krylov space has at most as many copies of an eigenvalue as there are start vectors, and no
    eigenvector that is orthogonal to them. So b random vectors show b eigenpairs at each end. If
    more are wanted, or the start is not random, a probe follows: another Krylov space, of a random
    vector that is orthogonal to the basis. The search ends when the probe excludes better
    eigenvalues, and continues with those that it finds. Each probe but the last one brings at least
    one pair.

    Args:
        matrix: The symmetric matrix.
        start: Rows ``[b, D]`` that span the first block.
        k: See ``eigsh``, as for ``which``, ``ncv`` and ``maxiter``.
        which: The wanted eigenvalues.
        goals: Takes all Ritz values ``[m]``; returns their largest residuals, ``[m]``.
        ncv: The largest number of basis vectors.
        maxiter: The largest number of restarts.
        generator: Draws the vectors of probes.
        num_random: The number of vectors of the start that are random. ``None``: no probes.
        observe: Called with the basis and the wanted pairs at each check. True ends the search.

    Returns:
        The basis; the k wanted pairs, by ascending value; the number of pairs that miss their goal,
        or may not be the wanted ones.
    """
    basis = LanczosBasis(matrix, start, ncv, generator)
    search = _Search(basis, k, which, goals, num_random)
    restarts = checked = 0
    while True:
        # in a large basis, Ritz pairs cost more time than the products that they may save
        is_due = basis.size >= k and basis.size - checked > (basis.num_new / 160) ** 2
        if is_due or basis.is_full or basis.is_complete:
            checked = basis.size
            search.check()
            if observe is not None and observe(basis, search.found):
                return basis, search.found, 0
            if search.is_done():
                return basis, search.found, search.num_missed
            if basis.is_full:
                if restarts == maxiter:
                    # if all have converged, there may be better ones in the rest of the space
                    return basis, search.found, max(search.num_missed, 1)
                restarts, checked = restarts + 1, 0
                search.restart()
        basis.expand()


class _Search:
    """Decides which Ritz pairs of a basis are the wanted ones, and how the search goes on.

    Args:
        basis: The basis.
        k: The number of wanted pairs.
        which: The wanted eigenvalues.
        goals: The largest residuals, as a function of all Ritz values.
        num_random: See ``thick_restart_lanczos``.

    Attributes:
        found: The wanted pairs at the last check, by ascending value.
        num_missed: The number of wanted pairs that have not converged, or are not there yet.
    """

    found: RitzPairs
    num_missed: int

    def __init__(
        self,
        basis: "LanczosBasis",
        k: int,
        which: str,
        goals: Callable[[Tensor], Tensor],
        num_random: int | None,
    ):
        self._basis, self._k, self._which, self._goals = basis, k, which, goals
        self._num_random = num_random
        #: In a probe, wanted pairs are locked, and better eigenvalues are outside of these limits.
        self._limits: tuple[float, float] | None = None

    def check(self) -> None:
        """Compute the Ritz pairs, and find the wanted ones."""
        self._pairs = pairs = self._basis.ritz()
        # more products do not reduce the noise of products in low precision
        allowed = self._goals(pairs.values).clamp(min=self._basis.rounding).maximum(pairs.noise)
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
                low, high = (
                    (-inf if self._excludes(low) else low),
                    (inf if self._excludes(high) else high),
                )
                self._limits = low, high
                return self._limits == (-inf, inf)
            self._use_probe(is_better)
        if self.num_missed or basis.is_beginning:
            return basis.is_complete
        at_one_end = (self._k + 1) // 2 if self._which == "BE" else self._k
        if basis.is_complete or self._num_random is None:
            return True
        if at_one_end <= self._num_random:
            return self._num_random > 1 or self._excludes_far()
        self._begin_probe()
        return False

    def _begin_probe(self) -> None:
        """Look for better eigenvalues in the space that is orthogonal to the basis."""
        values, k = self.found.values, self._k
        smallest, num_low = float(values.abs().min()), k // 2
        low = {"LM": -smallest, "SA": float(values[-1])}.get(self._which, -inf)
        high = {"LM": smallest, "LA": float(values[0])}.get(self._which, inf)
        if self._which == "BE":
            low, high = (float(values[num_low - 1]) if num_low else -inf), float(values[num_low])
        self._limits, self._num_random = (low - self._slack, high + self._slack), 0
        # unconverged pairs are locked, too, if there is room: then a probe takes fewer products
        is_settled = bool(self._converged.all())
        if self._basis.size > self._basis.most_locked(k):
            self._lock()
            is_settled = True
        self._basis.begin(self._basis.random_row(), is_settled)

    def _use_probe(self, is_better: Tensor) -> None:
        """Go on with the pairs of a probe, in place of unconverged ones that are locked."""
        self._limits = None
        if not self._basis.is_settled:
            better = self._pairs.select(is_better & ~self._converged)
            rows = self._basis.combine(better.vectors.sum(1, keepdim=True)).T
            self.check()
            self._lock()
            if len(better.values):
                self._basis.begin(rows)
        self.check()

    def _excludes_far(self) -> bool:
        """Return whether the start excludes eigenvalues that would double the known spectrum."""
        low, high = float(self._pairs.values[0]), float(self._pairs.values[-1])
        low, high = 2 * low - high, 2 * high - low
        ends = {"LA": [high], "SA": [low]}.get(self._which, [low, high])
        return all(map(self._excludes, ends))

    def _excludes(self, limit: float) -> bool:
        return self._basis.excludes(limit, self._pairs)

    def _lock(self) -> None:
        """Keep converged pairs only, the most wanted ones."""
        order = self._order[self._converged[self._order]]
        self._basis.lock(self._pairs.select(order[: self._basis.most_locked(self._k)]))

    def restart(self) -> None:
        """Make room for more products."""
        basis, pairs, k = self._basis, self._pairs, self._k
        keep = k + (basis.ncv - k) // 3
        if self._limits is None:
            keep = min(keep + (k - self.num_missed) // 3, basis.ncv - 2 * max(basis.num_pending, 1))
            best = self._order[: max(k, keep // 2)]
            locked, new = best[pairs.is_locked[best]], self._order
        elif basis.is_settled:
            keep = min(keep, basis.ncv - 2)
            gaps = torch.stack([(pairs.values - limit).abs() for limit in self._limits]).amin(0)
            locked, new = pairs.is_locked.nonzero()[:, 0], gaps.argsort()
        else:
            self._lock()
            basis.begin(basis.random_row())
            return
        new = new[~pairs.is_locked[new]]
        basis.restart(pairs, torch.cat([locked, new[: max(keep - len(locked), 1)]]))


def _block_size(matrix: Matrix, given: Tensor | None, block_size: int | None) -> int:
    """Return the number of start vectors."""
    size = block_size if block_size is not None else (1 if given is None else len(given))
    size = check_count("block_size", size, at_most=matrix.shape[0])
    if given is not None and len(given) != size:
        raise ValueError(f"v0 has {len(given)} vectors, but block_size is {size}.")
    return size


def _random_rows(count: int, matrix: Matrix, generator: torch.Generator) -> Tensor:
    return matrix.space.draw(count, lambda x: x.normal_(generator=generator))


def _basis_size(matrix: Matrix, k: int, block_size: int, ncv: int | None) -> int:
    """Return the largest number of basis vectors."""
    dim, least = matrix.shape[0], k + 2 * block_size
    if ncv is not None:
        return min(check_count("ncv", ncv, at_least=min(least, dim)), dim)
    affordable = min(_NCV, _BASIS_BYTES // (dim * matrix.dtype.itemsize))
    return min(dim, max(affordable, 2 * k + 1, 20, k + 4 * block_size))


def _best(values: Tensor, k: int, which: str) -> Tensor:
    """Return indices of the k most wanted ones of ascending values, ascending."""
    return _order(values, which)[:k].sort().values


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
        num_locked: The number of first rows of V that stay as they are. The others are one Krylov
            space, orthogonal to them.
        num_pending: The number of rows of Q. If zero, the Krylov space has ended.
        is_settled: Whether the locked Ritz pairs have converged.
    """

    def __init__(self, matrix: Matrix, start: Tensor, ncv: int, generator: torch.Generator):
        self._matrix, self._generator = matrix, generator
        self._eps = torch.finfo(matrix.dtype).eps
        self.ncv, self._block_size = ncv, len(start)
        self._space = matrix.space
        self._rows = start.new_zeros(min(ncv, 50) + len(start), start.shape[1])  # V, then Q
        self._H = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self._noise = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._norm = 0.0  # a lower bound on the norm of A: the largest product so far
        self._locked: RitzPairs | None = None
        self.is_settled = True
        self.size = self.num_locked = 0
        self._inject(start)

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
        return self.size + max(self.num_pending, 1) > self.ncv and not self.is_complete

    @property
    def is_beginning(self) -> bool:
        """Whether the start of a Krylov space waits for its first product."""
        return self.num_pending > 0 and self.size == self.num_locked

    def expand(self) -> None:
        """Multiply Q by the matrix, and append Q to V; if Q is empty, draw a random vector."""
        if not self.num_pending:
            self.begin(self.random_row())
        start, end = self.size, self.size + self.num_pending
        W = (self._matrix @ self._rows[start:end].T).T.contiguous()
        largest = float(self._space.norms(W).max())
        self._norm = max(self._norm, largest)
        H = torch.zeros(end, end, dtype=torch.float64, device="cpu")
        H[:start, :start], H[start:, :start] = self._H, self._B
        # in exact arithmetic the first pass is enough; the second one removes rounding errors
        for first in (self._first_coupled, 0):
            rows = self._rows[first:end]
            coefficients = self._space.gram(rows, W)
            W.addmm_(coefficients.T, rows, alpha=-1)
            H[first:, start:] += coefficients.double().cpu()
        Q, R = self._orthonormal(W, self.rounding, end)
        if len(Q) and float(R if len(W) == 1 else torch.linalg.svdvals(R)[-1]) < 0.1 * largest:
            # little is left, and its rounding errors are large relative to it: a third pass
            rows = self._rows[:end]
            Q, correction = self._orthonormal(Q - self._space.gram(Q, rows) @ rows, 0.5, end)
            R = correction @ R
        self._log_betas += log(abs(float(R))) if len(R) == len(W) == 1 else inf
        first = torch.full(
            (end - start,), float(self.is_beginning), dtype=torch.float64, device="cpu"
        )
        self._start = torch.cat([self._start, first])
        self._check_symmetric(H, start)
        self._noise = torch.cat([self._noise, self._noise.new_zeros(end - start)])
        self.size, self._H, self._first_coupled = end, H, start
        B = torch.zeros(len(Q), end, dtype=torch.float64, device="cpu")
        B[:, start:] = R
        self._set_pending(Q, B)

    def ritz(self) -> RitzPairs:
        """Return the locked Ritz pairs, and those of the other rows."""
        first, parts = self.num_locked, []
        if self._locked is not None:
            rows = self.size - len(self._locked.vectors)
            padded = torch.nn.functional.pad(self._locked.vectors, (0, 0, 0, rows))
            parts.append(self._locked._replace(vectors=padded))
        if first < self.size:
            H, B = self._H[first:, first:], self._B[:, first:]
            values, part = torch.linalg.eigh((H + H.T) / 2)
            skew = ((H - H.T) / 2 @ part).norm(dim=0)
            # noise of different basis vectors is uncorrelated, so that squares add up
            noise = torch.hypot(skew, ((part**2).T @ self._noise[first:] ** 2).sqrt())
            couplings = (B @ part).norm(dim=0)
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

    def begin(self, rows: Tensor, is_settled: bool = True) -> None:
        """Lock all of V, and begin the Krylov space of other rows, orthogonal to V.

        Args:
            rows: The start, ``[b, D]``.
            is_settled: Whether all locked pairs have converged. If not, the vectors that their
                residuals need are neither in V nor in Q.
        """
        if self.size:
            pairs = self.ritz()
            self._locked = pairs._replace(is_locked=torch.ones_like(pairs.is_locked))
        self.num_locked, self.is_settled = self.size, is_settled
        self._inject(rows)

    def most_locked(self, k: int) -> int:
        """Return how many rows may be locked, so that there is room for a search of k pairs."""
        is_limited = self.ncv < self._matrix.shape[0]
        return min((k + self.ncv) // 2, self.ncv - 2) if is_limited else self.ncv

    def random_row(self) -> Tensor:
        """Draw the start of another Krylov space, ``[1, D]``."""
        return _random_rows(1, self._matrix, self._generator)

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

        Args:
            limit: A number beyond the Ritz values.
            pairs: All Ritz pairs.
        """
        if not self.num_pending:
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
        """Replace V by Ritz vectors; Q stays.

        Args:
            pairs: All Ritz pairs.
            kept: Indices of those that stay, locked ones first.
        """
        is_dropped = ~pairs.is_locked
        is_dropped[kept] = False
        self._dropped.append(pairs.values[is_dropped])
        pairs = pairs.select(kept)
        self._start = pairs.vectors.T @ self._start
        Q = self._rows[self.size : self.size + self.num_pending].clone()
        coefficients = pairs.vectors.T.to(self._rows)
        width = max(_PART // (self.size * self._rows.itemsize), 1)
        for part in self._rows.split(width, dim=1):
            part[: len(coefficients)] = coefficients @ part[: self.size]
        self.size, self._H, self._first_coupled = len(coefficients), pairs.values.diag(), 0
        self._noise, self.num_locked = pairs.noise, int(pairs.is_locked.sum())
        eye = torch.eye(self.num_locked, dtype=torch.float64, device="cpu")
        locked = pairs.select(pairs.is_locked)._replace(vectors=eye)
        self._locked = locked if self.num_locked else None
        self._set_pending(Q, self._B @ pairs.vectors)

    def lock(self, pairs: RitzPairs) -> None:
        """Replace V by Ritz vectors, all of them locked, and drop Q."""
        pairs = pairs._replace(is_locked=torch.ones_like(pairs.is_locked))
        self.restart(pairs, torch.arange(len(pairs.values), device="cpu"))
        self._set_pending(self._rows[:0], self._B[:0])

    def combine(self, Y: Tensor) -> Tensor:
        """Return the vectors ``[D, p]`` with coefficients ``[m, p]`` in the basis."""
        rows = self._rows[: self.size]
        return rows.T @ Y.to(rows)

    def _inject(self, block: Tensor) -> None:
        """Orthogonalize rows against V, and make them the block Q, the start of a Krylov space."""
        sizes = self._space.norms(block).to(block).unsqueeze(1)
        block = block / sizes.where(sizes > 0, 1.0)
        rows = self._rows[: self.size]
        for _ in range(2):
            block = block - self._space.gram(block, rows) @ rows
        Q, _ = self._orthonormal(block, 100 * self._eps, self.size)
        Q, _ = self._orthonormal(Q - self._space.gram(Q, rows) @ rows, 0.5, self.size)
        self._set_pending(Q, torch.zeros(len(Q), self.size, dtype=torch.float64, device="cpu"))
        self._first_coupled = 0
        self._log_betas, self._dropped = 0.0, list[Tensor]()
        self._start = torch.zeros(self.size, dtype=torch.float64, device="cpu")  # q_0, in the basis

    def _orthonormal(self, W: Tensor, negligible: float, size: int) -> tuple[Tensor, Tensor]:
        """Return orthonormal rows Q ``[r, D]`` and R with ``W.T = Q.T @ R`` up to ``negligible``.

        A basis of the given size leaves ``D - size`` directions, which limits r.
        """
        most = self._matrix.shape[0] - size
        # squares of smaller numbers vanish
        if len(W) == 1 and float(norm := self._space.norms(W)) > _SMALL:
            rank = min(int(norm > negligible), most)
            return (W / norm.to(W))[:rank], norm[:rank, None].cpu()
        Q, R = self._space.qr(W)
        U, S, Vt = torch.linalg.svd(R.double().cpu())
        rank = min(int((S > negligible).sum()), most)
        return U[:, :rank].T.to(W) @ Q, S[:rank, None] * Vt[:rank]

    def _set_pending(self, Q: Tensor, B: Tensor) -> None:
        end = self.size + len(Q)
        if end > len(self._rows):
            longer = self._rows.new_zeros(min(2 * end, self.ncv + self._block_size), Q.shape[1])
            longer[: self.size] = self._rows[: self.size]
            self._rows = longer
        self._rows[self.size : end] = Q
        self.num_pending, self._B = len(Q), B

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
