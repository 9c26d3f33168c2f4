"""Stochastic Lanczos quadrature: traces of functions of a symmetric matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.algorithms.matrix import AnyMatrix, Matrix
from curvlinops.algorithms.probes import Estimate, Goal, Probes, average, number_estimator
from curvlinops.support.arguments import check_count
from curvlinops.support.norms import double_norm
from curvlinops.support.progress import solves

#: Products for each random vector in ``lanczos_logdet``.
_DEFAULT_NCV = 50


@dataclass(frozen=True)
class Quadrature:
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
        self._basis = self._next.new_empty(len(self._next), 0, matrix.shape[0])
        self._diagonal = self._next.new_empty(len(self._next), 0)
        self._off_diagonal = self._next.new_empty(len(self._next), 0)
        self._alive = torch.ones(len(self._next), dtype=torch.bool, device=matrix.device)
        self._scale = self._next.new_full((len(self._next),), torch.finfo(matrix.dtype).tiny)

    @property
    def num_steps(self) -> int:
        """How many steps were made."""
        return self._diagonal.shape[1]

    @property
    def exhausted(self) -> bool:
        """Whether all vectors lie in invariant subspaces that have been found."""
        return self.num_steps == self.matrix.shape[0] or not bool(self._alive.any())

    def extend(self, num_steps: int) -> Quadrature:
        """Continue until ``num_steps`` steps are made; fewer if exhausted."""
        num_steps, done = min(num_steps, self.matrix.shape[0]), self.num_steps
        wider = self._basis.new_empty(len(self._next), num_steps, self.matrix.shape[0])
        wider[:, :done] = self._basis
        self._basis = wider
        while self.num_steps < num_steps and not self.exhausted:
            self._step()
        return self._quadrature()

    def _step(self) -> None:
        step = self.num_steps
        self._basis[:, step] = self._next
        known = self._basis[:, : step + 1]
        W = (self.matrix @ self._next.T).T
        overlaps = torch.zeros_like(known[:, :, 0])
        for _ in range(2):
            more = torch.bmm(known, W.unsqueeze(2)).squeeze(2)
            W = W - torch.bmm(more.unsqueeze(1), known).squeeze(1)
            overlaps = overlaps + more
        # in double precision, which has room for squares
        norms = double_norm(W, 1).to(W)
        largest = torch.maximum(overlaps.abs().amax(dim=1), norms)
        self._scale = torch.maximum(self._scale, largest)
        self._check_symmetric(overlaps)
        # one that has found its invariant subspace goes on with zeros; what it adds has no weight,
        # but is a number to which functions of the spectrum can be applied
        first = self._diagonal[:, 0] if step else overlaps[:, 0]
        diagonal = torch.where(self._alive, overlaps[:, step], first)
        self._diagonal = torch.cat([self._diagonal, diagonal.unsqueeze(1)], dim=1)
        eps = torch.finfo(self.matrix.dtype).eps
        self._alive = self._alive & (norms > 100 * eps * self._scale)
        alive = self._alive.unsqueeze(1)
        self._next = torch.where(alive, W / norms.unsqueeze(1), 0.0)
        off_diagonal = torch.where(alive, norms.unsqueeze(1), 0.0)
        self._off_diagonal = torch.cat([self._off_diagonal, off_diagonal], dim=1)

    def _check_symmetric(self, overlaps: Tensor) -> None:
        """Check that the last product overlaps as little with old vectors as it must."""
        if self.matrix.operator.self_adjoint or self.num_steps == 0:
            return
        expected = torch.zeros_like(overlaps[:, :-1])
        expected[:, -1] = self._off_diagonal[:, -1]
        wrong = (overlaps[:, :-1] - expected).abs().amax(dim=1)
        if bool((wrong > torch.finfo(self.matrix.dtype).eps ** 0.5 * self._scale).any()):
            raise ValueError(
                "The matrix is not symmetric, which Lanczos' method needs. Take its symmetric part "
                "(A + A.T) / 2 if that is meant."
            )

    def _quadrature(self) -> Quadrature:
        inner = self._off_diagonal[:, :-1].double()
        T = torch.diag_embed(self._diagonal.double())
        T = T + torch.diag_embed(inner, 1) + torch.diag_embed(inner, -1)
        nodes, vectors = torch.linalg.eigh(T)
        residuals = self._off_diagonal[:, -1:].double() * vectors[:, -1].abs()
        return Quadrature(nodes, vectors[:, 0].square(), residuals)


@number_estimator
@solves("trace_function")
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
) -> Tensor | np.number | np.ndarray | Estimate:
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
    matrix, goal = Matrix(A, square=True), Goal(rtol, return_error)
    ncv = check_ncv(ncv, matrix)
    probes = Probes(matrix, distribution, chunk_size, seed, generator, held=ncv)

    def sample(X: Tensor) -> Tensor:
        rule = Lanczos(matrix, X).extend(ncv)
        forms = (rule.weights * _evaluate(f, rule.nodes)).sum(1)
        return forms.to(matrix.dtype) * X.square().sum(0)

    return average(probes, goal.check_count("num_repeats", num_repeats), goal, sample)


@number_estimator
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
) -> Tensor | np.number | np.ndarray | Estimate:
    """Estimate the log-determinant of a symmetric positive definite matrix.

    ``log det A = tr log A``, by stochastic Lanczos quadrature. Matrices with few large eigenvalues
    above a damping need few products.

    Args:
        A: See ``trace_function``, also for the other arguments.
        ncv: The number of products for each random vector, at most D. Default: 50, or D if that is
            less. On matrices with smallest eigenvalues down to ``1e-5`` of the largest one, with
            decaying and with uniform spectra, what a larger one changes was less than a tenth of
            the standard error.
        num_repeats: The number of random vectors; an upper limit if ``rtol`` is given.
        distribution: ``"rademacher"``, ``"gaussian"`` or ``"sphere"``.
        rtol: Stop when the standard error is this small, relative to the estimate.
        return_error: Whether to return the standard error, too.
        chunk_size: How many random vectors are taken at once.
        seed: Seeds the random vectors.
        generator: Draws the random vectors.

    Returns:
        The estimate, a scalar. With ``return_error`` a named tuple of ``estimate`` and
        ``standard_error``.

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
    ncv = min(_DEFAULT_NCV, matrix.shape[0]) if ncv is None else ncv
    return trace_function(
        A,
        log,
        ncv,
        num_repeats,
        distribution,
        rtol=rtol,
        return_error=return_error,
        chunk_size=chunk_size,
        seed=seed,
        generator=generator,
    )


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
