"""Lanczos runs from random vectors, and traces of functions of a symmetric matrix by quadrature."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.probes import Average, Probes, StoppingRule, estimator
from curvlinops.support.arguments import check_count
from curvlinops.support.norms import double_norm

#: Products for each random vector in ``lanczos_logdet``.
_DEFAULT_NCV = 50


class Quadrature(NamedTuple):
    """Gauss quadrature rules of a symmetric matrix A, one for each of K starting vectors.

    ``x^T f(A) x / x^T x = sum_m weights_m f(nodes_m)``, exact for polynomials f of degree below
    twice the number M of nodes (Golub and Meurant, Matrices, moments and quadrature, 1994).

    Attributes:
        nodes: The Ritz values ``[K, M]``, ascending, float64.
        weights: Their weights ``[K, M]``, which add up to one, float64.
        residuals: ``|A y - node y|`` of the normalized Ritz vectors y, ``[K, M]``, float64.
    """

    nodes: Tensor
    weights: Tensor
    residuals: Tensor


class Lanczos:
    """Lanczos' three-term recurrence from several starting vectors at once.

    All vectors are kept, and orthogonalized against twice, since the recurrence alone soon loses
    orthogonality and then finds eigenvalues more than once.

    Args:
        matrix: The symmetric matrix.
        X: The starting vectors, ``[D, K]``.
    """

    def __init__(self, matrix: Matrix, X: Tensor):
        self.matrix = matrix
        self._next = X.T / X.norm(dim=0).unsqueeze(1)
        num = len(self._next)
        self._basis = self._next.new_empty(num, 0, matrix.shape[0])
        self._diagonal: list[Tensor] = []
        self._off_diagonal: list[Tensor] = []
        #: Which vectors do not lie in the invariant subspaces that their runs span.
        self._alive = torch.ones(num, dtype=torch.bool, device=matrix.device)
        self._scale = self._next.new_full((num,), torch.finfo(matrix.dtype).tiny)

    @property
    def exhausted(self) -> bool:
        """Whether all runs span invariant subspaces."""
        return len(self._diagonal) == self.matrix.shape[0] or not bool(self._alive.any())

    def extend(self, num_steps: int) -> Quadrature:
        """Continue to ``num_steps`` steps.

        Returns:
            Rules of that many nodes. Nodes beyond the dimension of an invariant subspace have no
            weight.
        """
        done = len(self._diagonal)
        basis = self._basis.new_empty(len(self._next), num_steps, self.matrix.shape[0])
        basis[:, :done] = self._basis[:, :done]
        self._basis = basis
        while len(self._diagonal) < num_steps and not self.exhausted:
            self._step()
        missing = num_steps - len(self._diagonal)
        # nodes without weight are Rayleigh quotients, to which functions of the spectrum apply
        diagonal = torch.stack(self._diagonal + missing * self._diagonal[:1], dim=1).double()
        zeros = torch.zeros_like(self._diagonal[0])
        off_diagonal = torch.stack(self._off_diagonal + missing * [zeros], dim=1).double()
        inner = off_diagonal[:, :-1]
        T = torch.diag_embed(diagonal) + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
        nodes, vectors = torch.linalg.eigh(T)
        return Quadrature(
            nodes, vectors[:, 0].square(), off_diagonal[:, -1:] * vectors[:, -1].abs()
        )

    def _step(self) -> None:
        step = len(self._diagonal)
        self._basis[:, step] = self._next
        basis = self._basis[:, : step + 1]
        W = (self.matrix @ self._next.T).T
        overlaps = torch.zeros_like(basis[:, :, 0])
        for _ in range(2):
            more = torch.bmm(basis, W.unsqueeze(2)).squeeze(2)
            W = W - torch.bmm(more.unsqueeze(1), basis).squeeze(1)
            overlaps = overlaps + more
        # in double precision, which has room for squares
        norms = double_norm(W, 1).to(W)
        largest = torch.maximum(overlaps.abs().amax(dim=1), norms)
        self._scale = torch.maximum(self._scale, largest)
        if step and not self.matrix.operator.self_adjoint:
            self._check_symmetric(overlaps)
        # a run that has ended goes on with zeros
        first = self._diagonal[0] if step else overlaps[:, 0]
        self._diagonal.append(torch.where(self._alive, overlaps[:, step], first))
        eps = torch.finfo(self.matrix.dtype).eps
        self._alive = self._alive & (norms > 100 * eps * self._scale)
        self._next = torch.where(self._alive.unsqueeze(1), W / norms.unsqueeze(1), 0.0)
        self._off_diagonal.append(torch.where(self._alive, norms, 0.0))

    def _check_symmetric(self, overlaps: Tensor) -> None:
        """Check that the last product is orthogonal to all vectors but the last two."""
        wrong = overlaps[:, :-1].clone()
        wrong[:, -1] -= self._off_diagonal[-1]
        tolerance = torch.finfo(self.matrix.dtype).eps ** 0.5 * self._scale
        if bool((wrong.abs().amax(dim=1) > tolerance).any()):
            raise ValueError(
                "The matrix is not symmetric, which Lanczos' method needs. Take its symmetric part "
                "(A + A.T) / 2 if that is meant."
            )


@estimator("trace_function", np.floating)
def trace_function(
    A: AnyMatrix,
    f: Callable[[Tensor], Tensor],
    ncv: int,
    num_repeats: int = 10,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Estimate the trace of a function of a symmetric matrix, ``tr f(A) = sum_d f(lambda_d)``.

    ``E[x^T f(A) x]``, with the quadratic forms from Lanczos quadrature (Ubaru, Chen and Saad, Fast
    estimation of tr(f(A)) via stochastic Lanczos quadrature, SIMAX 2017). The quadrature is exact
    for polynomials of degree below ``2 ncv``, and for all f if ``A`` has at most ``ncv`` distinct
    eigenvalues.

    Args:
        A: A symmetric operator, any other scipy LinearOperator, or a matrix.
        f: The function of eigenvalues, a tensor to a tensor of the same shape, entry by entry.
        ncv: The number of products for each random vector, at most D.
        num_repeats: The number of random vectors; an upper limit if ``rtol`` is given.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too. It is that of sampling, and says
            nothing about the quadrature: compare with a larger ``ncv``.
        chunk_size: How many random vectors are taken at once. ``ncv`` vectors are held in memory
            for each. Default: as many as need 64 MiB.
        seed: Seeds the random vectors.
        generator: Draws the random vectors. Default: one seeded by PyTorch's global generator.

    Returns:
        The estimate, a scalar. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``.

    Raises:
        ValueError: If the matrix is not square, products show that it is not symmetric, f is not
            finite at an approximate eigenvalue, or an argument is not among its choices.
        TypeError: If f returns complex numbers.
    """
    matrix = Matrix(A, square=True)
    ncv = check_ncv(ncv, matrix)
    probes = Probes(matrix, distribution, chunk_size, seed, generator, held=ncv)
    return _average(probes, f, ncv, num_repeats, StoppingRule(rtol, return_error))


@estimator("lanczos_logdet", np.floating)
def lanczos_logdet(
    A: AnyMatrix,
    ncv: int | None = None,
    num_repeats: int = 10,
    distribution: str = "rademacher",
    *,
    rtol: float | None = None,
    return_error: bool = False,
    chunk_size: int | None = None,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Any:
    """Estimate the log-determinant of a symmetric positive definite matrix.

    ``log det A = tr log A``, by stochastic Lanczos quadrature. Matrices with few large eigenvalues
    above a damping need few products.

    Args:
        A: A symmetric positive definite matrix. The arguments are those of ``trace_function``.
        ncv: The number of products for each random vector. Default: 50, or D if that is less. On
            matrices with smallest eigenvalues down to ``1e-5`` of the largest one, with decaying
            and with uniform spectra, a larger one changed the result by less than a tenth of the
            standard error.
        num_repeats: The number of random vectors; an upper limit if ``rtol`` is given.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too.
        chunk_size: How many random vectors are taken at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        A scalar, or with ``return_error`` a named tuple of ``estimate`` and ``standard_error``.

    Raises:
        ValueError: If the matrix turns out not to be positive definite, up to rounding.
    """

    def log(nodes: Tensor) -> Tensor:
        smallest, largest = float(nodes.min()), float(nodes.max())
        rounding = 10 * torch.finfo(matrix.dtype).eps * max(largest, 0.0)
        if smallest <= rounding:
            limit = " to working precision" if smallest >= -rounding else ""
            raise ValueError(
                f"The matrix is not positive definite{limit}: it has an eigenvalue of "
                f"{smallest:.1e} or less, and one of {largest:.1e}. Add a multiple of the identity."
            )
        return nodes.log()

    matrix = Matrix(A, square=True)
    ncv = check_ncv(min(_DEFAULT_NCV, matrix.shape[0]) if ncv is None else ncv, matrix)
    probes = Probes(matrix, distribution, chunk_size, seed, generator, held=ncv)
    return _average(probes, log, ncv, num_repeats, StoppingRule(rtol, return_error))


def _average(
    probes: Probes, f: Callable[[Tensor], Tensor], ncv: int, num_repeats: int, rule: StoppingRule
) -> Any:
    """Average ``x^T f(A) x`` over random vectors; see ``trace_function``."""
    num_repeats = check_count("num_repeats", num_repeats, at_least=1 + rule.return_error)
    average = Average()

    def update(X: Tensor) -> tuple[Tensor, Tensor]:
        nodes, weights, _ = Lanczos(probes.matrix, X).extend(ncv)
        forms = (weights * _evaluate(f, nodes)).sum(1)
        return average.update(forms.to(probes.matrix.dtype) * X.square().sum(0))

    return rule.run(probes, rule.chunks(num_repeats, probes.chunk_size), update)


def check_ncv(ncv: Any, matrix: Matrix, at_least: int = 1) -> int:
    """Return the number of Lanczos vectors, which must fit the matrix."""
    ncv, dim = check_count("ncv", ncv, at_least), matrix.shape[0]
    if dim < at_least:
        raise ValueError(f"The matrix needs at least {at_least} dimensions, it has {dim}.")
    if ncv > dim:
        raise ValueError(f"ncv must be at most the dimension {dim}, got {ncv}.")
    return ncv


def _evaluate(f: Callable[[Tensor], Tensor], nodes: Tensor) -> Tensor:
    values = f(nodes)
    if not isinstance(values, Tensor) or values.shape != nodes.shape:
        shape = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise ValueError(f"f must return a tensor of shape {list(nodes.shape)}, got {shape}.")
    if values.is_complex():
        raise TypeError("f must return real numbers. Take real and imaginary parts, one at a time.")
    if not bool(values.isfinite().all()):
        where = float(nodes[~values.isfinite()][0])
        raise ValueError(f"f is not finite at {where:.3e}, an approximate eigenvalue.")
    return values
