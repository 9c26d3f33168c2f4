"""Some eigenvalues and eigenvectors of a symmetric matrix."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix
from curvlinops.algorithms.callbacks import Callback, Iteration, stops
from curvlinops.algorithms.convergence import check_on_failure, fail
from curvlinops.algorithms.krylov import ASYMMETRY
from curvlinops.algorithms.solver import solves
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import as_integer, check_choice, check_count
from curvlinops.support.progress import show_residuals
from curvlinops.support.rng import read_generator

#: The default ``ncv``, and how many bytes so many basis vectors may need.
_NCV, _BASIS_BYTES = 1000, 2**30
#: Restarts recombine the basis in parts of about this many bytes.
_PART = 16 * 2**20
#: A continuation has shown its end of the spectrum when the residual is this part of its distance
#: to the wanted eigenvalues.
_CERTAIN = 0.1


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
    callback: Callback = None,
) -> Eigenpairs:
    """Compute k eigenpairs ``A x = lambda x`` of a symmetric matrix, on its device.

    Block thick-restart Lanczos with full reorthogonalization (Wu and Simon, SIAM J. Matrix Anal.
    Appl. 2000). Where the basis spans an invariant subspace, such as the range of a GGN of low
    rank, the search continues with a random vector orthogonal to it, until one brings nothing
    better. So all copies of a multiple eigenvalue are found if there are few different eigenvalues.
    Among many, the pairs may converge before the basis spans an invariant subspace, and copies may
    be missing; ``block_size=m`` finds m of them. Eigenpairs of structured operators, such as KFAC,
    are computed from their structure.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        k: Number of eigenpairs, at most D. ``torch.linalg.eigh(A.to_dense())`` is faster for many.
        which: Eigenvalues of largest magnitude (``"LM"``), the largest (``"LA"``), the smallest
            (``"SA"``), or from both ends (``"BE"``; one more from the upper end if k is odd).
        block_size: Number of vectors that are multiplied at once. Default: as many as ``v0`` has,
            or one, which needs the fewest products. Larger blocks find all copies of multiple
            eigenvalues, and save time if a product with several vectors costs little more than
            with one.
        ncv: Largest number of basis vectors, at least ``k + 2 * block_size`` or D. More basis
            vectors need fewer products and more memory (``D * ncv`` numbers). More than D count as
            D. Default: 1000, or as many as fit into 1 GiB, but at least ``max(2 k + 1, 20)``.
        v0: Start vectors, ``[D]`` or ``[D, block_size]``; or, for an operator on named parameters,
            a list or dictionary of tensors, like the vectors that it multiplies. Default: random.
        tol: Largest residual relative to ``|lambda|``. Residuals of about ten units of rounding,
            relative to the norm of ``A``, are always accepted. With zero, residuals are as small as
            the accuracy of products allows.
        maxiter: Largest number of restarts. Default: 1000.
        on_failure: Without convergence, ``"warn"`` and return the best pairs, or ``"raise"``.
        seed: Seed of the start vectors. Default: one drawn from PyTorch's global generator.
        generator: Generator that draws the start vectors, instead of ``seed``.
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
    matrix = Matrix(A, square=True)
    generator = read_generator(matrix.device, seed, generator)
    k = _count_pairs(k, matrix)
    maxiter = check_count("maxiter", 1000 if maxiter is None else maxiter, at_least=0)
    check_choice("which", which, ("LM", "LA", "SA", "BE"))
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be at least zero and less than one, got {tol!r}.")
    start = _start(matrix, v0, block_size, generator)
    ncv = _basis_size(matrix, k, len(start), ncv)
    known = matrix.operator._eigenpairs(k, which)
    if known is not None:
        values, vectors = known
        residuals = matrix.space.norms((matrix @ vectors - vectors * values).T).to(vectors)
        check = [matrix.num_products, float(residuals.max())]
        history = torch.tensor([check], dtype=torch.float64, device="cpu")
        return Eigenpairs(values, matrix.vectors(vectors), residuals, matrix.num_products, history)
    observer = _Observer(matrix, callback)
    goals = partial(_relative, tol)
    basis, pairs, num_missed = thick_restart_lanczos(
        matrix, start, k, which, goals, ncv, maxiter, generator, observer
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
    observe: Callable[["LanczosBasis", RitzPairs], bool] | None = None,
) -> tuple["LanczosBasis", RitzPairs, int]:
    """Find eigenpairs at the ends of the spectrum by block thick-restart Lanczos.

    Converged pairs are accepted at once if each product has brought as many new vectors as it had
    columns. Otherwise there is an invariant subspace, and a Krylov space shows nothing outside of
    it. Then converged vectors are locked, and the search continues with a random vector orthogonal
    to them, which has a part in each eigenspace that is left. Each one that brings better pairs
    brings at least one, so that at most ``k + 1`` are needed.

    Args:
        matrix: The symmetric matrix.
        start: Rows ``[b, D]`` that span the first block.
        k: See ``eigsh``, as for ``which``, ``ncv`` and ``maxiter``.
        which: The wanted eigenvalues.
        goals: Takes all Ritz values ``[m]``; returns their largest residuals, ``[m]``.
        ncv: The largest number of basis vectors.
        maxiter: The largest number of restarts.
        generator: Draws new vectors where the basis spans an invariant subspace.
        observe: Called with the basis and the wanted pairs at each check. True ends the search.

    Returns:
        The basis; the k wanted pairs, by ascending value; the number of pairs that miss their goal,
        or may not be the wanted ones.
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
            wanted = _best(pairs.values, k, which)
            # more products do not reduce the noise of products in low precision
            allowed = goals(pairs.values).clamp(min=basis.rounding).maximum(pairs.noise)
            converged = pairs.couplings <= allowed
            found = pairs.select(wanted)
            num_missed = int((~converged[wanted]).sum())
            show_residuals((found.couplings, allowed[wanted]))
            stopped = observe is not None and observe(basis, found)
            if stopped or (len(wanted) == k and basis.size == matrix.shape[0]):
                return basis, found, 0 if stopped else num_missed
            is_converged = len(wanted) == k and num_missed == 0
            if is_converged and not basis.is_deficient:
                return basis, found, 0
            gained, is_open = _continuation(pairs, k, which, float(allowed[wanted].max()))
            if not is_open:
                locked = pairs.is_locked.nonzero()[:, 0]
                return basis, pairs.select(locked[_best(pairs.values[locked], k, which)]), 0
            if len(wanted) == k and is_full and restarts == maxiter:
                # if all have converged, there may be better ones in the space that was not seen
                return basis, found, max(num_missed, 1)
            if is_converged and gained and basis.num_pending:
                checked = 0
                most = ncv if ncv == matrix.shape[0] else min((k + ncv) // 2, ncv - 2)
                basis.lock(pairs.select(order[converged[order]][:most]))
            elif is_full:
                restarts, checked = restarts + 1, 0
                keep = k + (k - num_missed) // 3 + (ncv - k) // 3
                keep = min(keep, ncv - 2 * max(basis.num_pending, 1))
                basis.restart(pairs.select(_kept(pairs.is_locked, order, k, keep)))
        basis.expand()


def _continuation(pairs: RitzPairs, k: int, which: str, slack: float) -> tuple[bool, bool]:
    """Compare the Ritz values since the last continuation with the k best locked ones.

    Args:
        pairs: All Ritz pairs.
        k: The number of wanted pairs.
        which: The wanted eigenvalues.
        slack: Differences of eigenvalues that do not count.

    Returns:
        Whether one is better. Whether one is, or may become so with more products.
    """
    locked, new = pairs.select(pairs.is_locked), pairs.select(~pairs.is_locked)
    if len(locked.values) < k or not len(new.values):
        return True, True
    best = locked.values[_best(locked.values, k, which)]
    smallest = float(best.abs().min())
    low = {"LM": -smallest, "LA": -inf, "SA": float(best[-1])}.get(which)
    high = {"LM": smallest, "LA": float(best[0]), "SA": inf}.get(which)
    if which == "BE":
        low, high = (float(best[k // 2 - 1]) if k > 1 else -inf), float(best[k // 2])
    low, high = low - slack, high + slack
    ends, reach = new.values[[0, -1]], new.couplings[[0, -1]] / _CERTAIN
    gained = bool(ends[0] < low or ends[1] > high)
    return gained, bool(gained or ends[0] - reach[0] < low or ends[1] + reach[1] > high)


def _kept(is_locked: Tensor, order: Tensor, k: int, keep: int) -> Tensor:
    """Return the indices of pairs that stay at a restart, locked ones first.

    Args:
        is_locked: Which pairs are locked.
        order: Indices of pairs, the most wanted first.
        k: The number of wanted pairs.
        keep: How many pairs stay; one more if it were only locked ones.
    """
    locked, new = order[is_locked[order]], order[~is_locked[order]]
    locked = locked[: max(k, keep // 2)]
    return torch.cat([locked, new[: max(keep - len(locked), 1)]])


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
        num_locked: The number of first rows of V that span an invariant subspace, up to rounding
            errors and tolerances. The others are the Krylov space of the last continuation.
        num_pending: The number of rows of Q. If zero, V spans an invariant subspace.
        is_deficient: Whether a product has brought fewer new vectors than it had columns: an
            invariant subspace, outside of which there may be anything.
    """

    def __init__(self, matrix: Matrix, start: Tensor, ncv: int, generator: torch.Generator):
        self._matrix, self._generator = matrix, generator
        self._eps = torch.finfo(matrix.dtype).eps
        self._ncv, self._block_size = ncv, len(start)
        self._space = matrix.space
        self._rows = start.new_zeros(min(ncv, 50) + len(start), start.shape[1])  # V, then Q
        self._H = torch.zeros(0, 0, dtype=torch.float64, device="cpu")
        self._noise = torch.zeros(0, dtype=torch.float64, device="cpu")
        self._norm = 0.0  # a lower bound on the norm of A: the largest product so far
        self.size = self.num_locked = 0
        self.is_deficient = False
        self._weakest = inf  # the smallest singular value of the last R
        self._inject(start)

    @property
    def rounding(self) -> float:
        """Ten units of rounding, times the norm of the matrix."""
        return 10 * self._eps * self._norm

    def expand(self) -> None:
        """Multiply Q by the matrix, and append Q to V; if Q is empty, draw a random vector."""
        if not self.num_pending:
            self.num_locked = self.size
            self._inject(_random_rows(1, self._matrix, self._generator))
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
        if len(Q) and float(torch.linalg.svdvals(R)[-1]) < 0.1 * largest:
            # little is left, and its rounding errors are large relative to it: a third pass
            rows = self._rows[:end]
            Q, correction = self._orthonormal(Q - self._space.gram(Q, rows) @ rows, 0.5, end)
            R = correction @ R
        skew = self._check_symmetric(H, start)
        self._note_deficiency(R, len(W), end, skew)
        self._noise = torch.cat([self._noise, self._noise.new_zeros(end - start)])
        self.size, self._H, self._first_coupled = end, H, start
        B = torch.zeros(len(Q), end, dtype=torch.float64, device="cpu")
        B[:, start:] = R
        self._set_pending(Q, B)

    def ritz(self) -> RitzPairs:
        """Return the Ritz pairs, of the locked rows and of the others."""
        blocks = []
        for first, end in ((0, self.num_locked), (self.num_locked, self.size)):
            if first == end:
                continue
            H, B = self._H[first:end, first:end], self._B[:, first:end]
            values, part = torch.linalg.eigh((H + H.T) / 2)
            skew = ((H - H.T) / 2 @ part).norm(dim=0)
            if first:  # products of new rows with locked ones, where a tolerance is loose
                skew = skew.hypot((self._H[:first, first:end] @ part).norm(dim=0))
            # noise of different basis vectors is uncorrelated, so that squares add up
            noise = torch.hypot(skew, ((part**2).T @ self._noise[first:end] ** 2).sqrt())
            is_locked = torch.full(values.shape, first < self.num_locked, device="cpu")
            vectors = torch.nn.functional.pad(part, (0, 0, first, self.size - end))
            blocks.append(RitzPairs(values, vectors, (B @ part).norm(dim=0), noise, is_locked))
        if len(blocks) == 1:
            return blocks[0]
        pairs = RitzPairs(*(torch.cat(fields, dim=-1) for fields in zip(*blocks, strict=True)))
        return pairs.select(pairs.values.argsort(stable=True))

    def restart(self, pairs: RitzPairs) -> None:
        """Replace V by some Ritz vectors, locked ones first; Q stays."""
        Q = self._rows[self.size : self.size + self.num_pending].clone()
        coefficients = pairs.vectors.T.to(self._rows)
        width = max(_PART // (self.size * self._rows.itemsize), 1)
        for part in self._rows.split(width, dim=1):
            part[: len(coefficients)] = coefficients @ part[: self.size]
        self.size, self._H, self._first_coupled = len(coefficients), pairs.values.diag(), 0
        self._noise, self.num_locked = pairs.noise, int(pairs.is_locked.sum())
        self._set_pending(Q, self._B @ pairs.vectors)

    def lock(self, pairs: RitzPairs) -> None:
        """Replace V by converged Ritz vectors, and drop Q."""
        self.restart(pairs)
        self._noise = pairs.noise.hypot(pairs.couplings)
        self._set_pending(self._rows[:0], self._B[:0])

    def combine(self, Y: Tensor) -> Tensor:
        """Return the vectors ``[D, p]`` with coefficients ``[m, p]`` in the basis."""
        rows = self._rows[: self.size]
        return rows.T @ Y.to(rows)

    def _inject(self, block: Tensor) -> None:
        """Orthogonalize rows against V, and make them the block Q."""
        sizes = self._space.norms(block).to(block).unsqueeze(1)
        block = block / sizes.where(sizes > 0, 1.0)
        rows = self._rows[: self.size]
        for _ in range(2):
            block = block - self._space.gram(block, rows) @ rows
        Q, _ = self._orthonormal(block, 100 * self._eps, self.size)
        Q, _ = self._orthonormal(Q - self._space.gram(Q, rows) @ rows, 0.5, self.size)
        self._set_pending(Q, torch.zeros(len(Q), self.size, dtype=torch.float64, device="cpu"))
        self._first_coupled = 0

    def _orthonormal(self, W: Tensor, negligible: float, size: int) -> tuple[Tensor, Tensor]:
        """Return orthonormal rows Q ``[r, D]`` and R with ``W.T = Q.T @ R`` up to ``negligible``.

        A basis of the given size leaves ``D - size`` directions, which limits r.
        """
        Q, R = self._space.qr(W)
        U, S, Vt = torch.linalg.svd(R.double().cpu())
        rank = min(int((S > negligible).sum()), self._matrix.shape[0] - size)
        return U[:, :rank].T.to(W) @ Q, S[:rank, None] * Vt[:rank]

    def _set_pending(self, Q: Tensor, B: Tensor) -> None:
        end = self.size + len(Q)
        if end > len(self._rows):
            longer = self._rows.new_zeros(min(2 * end, self._ncv + self._block_size), Q.shape[1])
            longer[: self.size] = self._rows[: self.size]
            self._rows = longer
        self._rows[self.size : end] = Q
        self.num_pending, self._B = len(Q), B

    def _check_symmetric(self, H: Tensor, start: int) -> float:
        """Check that the measured coefficients of the last block are symmetric.

        Returns:
            The norm of their skew part.
        """
        locked = self.num_locked
        asymmetry = float((H - H.T)[start:, locked:].norm()) / 2
        if not self._matrix.operator.self_adjoint and asymmetry > ASYMMETRY * self._norm:
            raise ValueError(
                "The matrix is not symmetric: its products differ from those of its transpose by "
                f"about {asymmetry / self._norm:.1e} of its norm."
            )
        return asymmetry

    def _note_deficiency(self, R: Tensor, width: int, end: int, skew: float) -> None:
        """Note whether a product has brought fewer new vectors than it had columns.

        Args:
            R: Coefficients of the new vectors.
            width: The number of columns of the product.
            end: The number of rows of V.
            skew: The norm of the skew part of the last coefficients.
        """
        left = self._matrix.shape[0] - end
        if not left:
            return
        # noise is measured in the directions of V; there is as much in each of those left
        noise = 3 * skew * (left / end) ** 0.5
        weakest = float(torch.linalg.svdvals(R)[-1]) if len(R) else 0.0
        # rounding errors of earlier vectors have grown when their Krylov space ends
        is_end = weakest < min(self._eps ** (2 / 3) * self._norm, 1e-3 * self._weakest)
        if len(R) < min(width, left) or weakest < noise or is_end:
            self.is_deficient = True
        self._weakest = weakest
