"""Some eigenvalues and eigenvectors of a symmetric matrix."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.convergence import check_on_failure
from curvlinops.algorithms.krylov import KrylovSpace
from curvlinops.algorithms.lanczos import Eigenpairs, LanczosSearch, random_rows
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, TorchMatrix
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.progress import solves
from curvlinops.support.rng import read_generator
from curvlinops.support.torch_modes import in_default_modes

#: Memory for the basis, beyond which the default ``ncv`` is no larger than scipy's.
_BASIS_BYTES = 2**30
#: Up to this dimension the whole space is a cheap basis.
_SMALL = 1000


P = ParamSpec("P")


class _Eigensolver(Protocol[P]):
    @overload
    def __call__(self, A: TorchMatrix, *args: P.args, **kwargs: P.kwargs) -> Eigenpairs[Tensor]: ...
    @overload
    def __call__(
        self, A: AnyMatrix, *args: P.args, **kwargs: P.kwargs
    ) -> Eigenpairs[np.ndarray]: ...


def _eigensolver(function: Callable[Concatenate[AnyMatrix, P], Eigenpairs]) -> _Eigensolver[P]:
    return in_default_modes(function)


@_eigensolver
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
            More need memory (``D * ncv`` numbers) and fewer products. Default: D up to a dimension
            of 1000, and ``2 k + 50`` beyond, twice as many after every other time that these are
            used up, as long as that is at most 1 GiB; but not below ``max(2 k + 1, 20)``.
        v0: Start vectors, ``[D]`` or ``[D, block_size]``; or, for an operator on named parameters,
            a list or dictionary of tensors, like the vectors that it multiplies. Default: random.
        tol: Residuals shall be at most ``tol * |lambda|``, or about ten units of rounding
            relative to the norm of ``A`` if that is larger. With zero they are as small as the
            accuracy of products allows.
        maxiter: Largest number of restarts. Default: 1000.
        confirm: Whether to confirm converged pairs by further products, from a fresh random vector
            that is orthogonal to them. Copies of a multiple eigenvalue, which a Krylov space of few
            vectors does not contain, show up there. It ends when one that would change a value by
            more than about three times the tolerance would be overlooked with a chance of 3 % at
            most: after 2 to 6 products where the next eigenvalues are distant, in experiments after
            up to two thirds as many as before where eigenvalues are dense.
        on_failure: Without convergence, ``"warn"`` and return what there is, or ``"raise"``.
        seed: Seeds start vectors. Default: PyTorch's global generator does.
        generator: Draws start vectors, instead of ``seed``.

    Returns:
        An ``Eigenpairs``, which unpacks into ``(eigenvalues, eigenvectors)`` as scipy's result, and
        has the attributes ``residuals`` and ``num_products``. Tensors for an operator of this
        package or a tensor, else numpy arrays.

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
    k = check_count("k", k, at_most=matrix.shape[0])
    maxiter = check_count("maxiter", 1000 if maxiter is None else maxiter, at_least=0)
    check_choice("which", which, ("LM", "LA", "SA", "BE"))
    if not 0 <= tol < 1:
        raise ValueError(f"tol must be at least zero and less than one, got {tol!r}.")
    start = _start(matrix, v0, block_size, rng)
    ncv, max_ncv = _basis_sizes(matrix, k, len(start), ncv)
    space = KrylovSpace(matrix, start, ncv)
    search = LanczosSearch(matrix, space, k, which, tol, ncv, max_ncv, confirm, rng)
    finished = search.run(maxiter)
    return search.result(finished, on_failure)


def _start(
    matrix: Matrix, v0: Vectors | None, block_size: int | None, generator: torch.Generator
) -> Tensor:
    """Return the rows of the first block, ``[b, D]``."""
    given = None if v0 is None else matrix.read(v0).T
    size = block_size if block_size is not None else (1 if given is None else len(given))
    size = check_count("block_size", size, at_most=matrix.shape[0])
    if given is None:
        return random_rows(size, matrix, generator)
    if len(given) != size:
        raise ValueError(f"v0 has {len(given)} vectors, but block_size is {size}.")
    return given


def _basis_sizes(matrix: Matrix, k: int, block: int, ncv: int | None) -> tuple[int, int]:
    """Return how many vectors the basis may have at first, and in the end."""
    dim, least = matrix.shape[0], k + 2 * block
    if ncv is not None:
        ncv = min(check_count("ncv", ncv, at_least=min(least, dim)), dim)
        return ncv, ncv
    if dim <= _SMALL:
        return dim, dim
    affordable = _BASIS_BYTES // (dim * matrix.dtype.itemsize)
    first = max(2 * k + 1, 20, k + 4 * block, min(2 * k + 50, affordable))
    return min(dim, first), min(dim, max(first, affordable))
