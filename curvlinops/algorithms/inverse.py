"""What inverses by Krylov methods share: goals, true residuals, and failures."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any, Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from curvlinops.algorithms.convergence import NegativeCurvatureError, check_on_failure, fail
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, Preconditioner, read_preconditioner
from curvlinops.algorithms.products import Products, multiples, norms, solutions, unit_rows
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import Columns
from curvlinops.linear_operator.vectors import Array, Vectors, to_columns
from curvlinops.support.arguments import check_count, check_number, without_graph
from curvlinops.support.progress import solver
from curvlinops.support.torch_modes import default_modes

#: The kind of the right-hand sides.
Kind = TypeVar("Kind")


class Solution(NamedTuple, Generic[Kind]):
    """Solutions of linear systems, and how good they are.

    Attributes:
        x: The solutions, of the kind of the right-hand sides.
        residuals: True residual norms ``||b - A x||``, ``[K]``.
        iterations: Number of iterations, ``[K]``.
        converged: Whether the tolerance is reached, ``[K]``.
    """

    x: Kind
    residuals: Tensor
    iterations: Tensor
    converged: Tensor


class KrylovInverseLinearOperator(TorchLinearOperator):
    """The inverse of a symmetric matrix, ``(A + damping I)^-1``, by an iteration.

    A subclass writes ``_correct``, which reduces residuals as its own recursion sees them. The true
    residuals decide: where they are larger, the iteration starts again from the solution so far.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        preconditioner: A symmetric positive definite operator or matrix that approximates the
            inverse; or a function that multiplies by one: a vector ``[D]``, or if it does not take
            these, several at once, ``[D, K]``, tensors like the products of ``A``.
        rtol: See ``atol``.
        atol: A system is solved if ``||b - A x|| <= max(rtol ||b||, atol)``.
        maxiter: Largest number of iterations. Default: ``10 D``.
        damping: Multiple of the identity that is added to ``A``.
        x0: Start of the iteration for every right-hand side that is not zero, ``[D]``. Default:
            zero.
        on_failure: Without convergence, ``"warn"`` and return the best solution, or ``"raise"``.

    Raises:
        ValueError: If an argument is out of its range, products show that the matrix is not
            symmetric, or a solution is too large or too small for the matrix's type.
    """

    def __init__(
        self,
        A: AnyMatrix,
        *,
        preconditioner: Preconditioner = None,
        rtol: float = 1e-5,
        atol: float = 0.0,
        maxiter: int | None = None,
        damping: float = 0.0,
        x0: Vectors | None = None,
        on_failure: str = "warn",
    ):
        self._matrix = Matrix(A, square=True)
        operator = self._matrix.operator
        operator.domain.check_compatible(operator.codomain)
        super().__init__(operator.domain, self_adjoint=True)
        self._preconditioner = read_preconditioner(preconditioner, self._matrix)
        self._set(rtol, atol, maxiter, x0)
        self._limit = 100 * torch.finfo(self.torch_dtype).eps
        self.damping = check_number("damping", damping)
        if not isfinite(self.damping):
            raise ValueError(f"damping must be finite, got {damping}.")
        check_on_failure(on_failure)
        self.on_failure = on_failure

    def _correct(self, A: Products, R: Tensor, goal: Tensor, budget: int) -> tuple[Tensor, Tensor]:
        """Solve ``(A + damping I) X = R`` approximately, starting from zero.

        Args:
            A: Multiplies by the matrix, damped, and by the preconditioner.
            R: Right-hand sides as rows, ``[K, D]``, none of which has reached its goal.
            goal: The residual norms that shall be reached, ``[K]``.
            budget: Largest number of iterations.

        Returns:
            The rows X, and the number of iterations of each.
        """
        raise NotImplementedError

    def _set(self, rtol: float, atol: float, maxiter: int | None, x0: Vectors | None) -> None:
        rtol, atol = check_number("rtol", rtol, 0), check_number("atol", atol, 0)
        if rtol == atol == 0:
            raise ValueError("rtol and atol must not both be zero.")
        self.maxiter = check_count("maxiter", 10 * self.shape[0] if maxiter is None else maxiter)
        self.rtol, self.atol = rtol, atol
        without_graph(x0, "x0")
        self._x0 = None if x0 is None else self.domain.join(to_columns(x0, self.domain)[0])

    # --- products

    @overload
    def solve(self, B: Array, x0: Vectors | None = None) -> Solution[Array]: ...
    @overload
    def solve(self, B: Sequence[Tensor], x0: Vectors | None = None) -> Solution[list[Tensor]]: ...
    @overload
    def solve(
        self, B: Mapping[str, Tensor], x0: Vectors | None = None
    ) -> Solution[dict[str, Tensor]]: ...
    def solve(self, B: Vectors, x0: Vectors | None = None) -> Solution:
        """Solve linear systems.

        Args:
            B: Right-hand sides: a vector or several, of any kind that operators take.
            x0: Start of the iteration: one vector, or one for each right-hand side.

        Returns:
            The named tuple ``(x, residuals, iterations, converged)``.

        Raises:
            ValueError: If a right-hand side requires gradients: only products have derivatives.
        """
        without_graph(B, "The right-hand side")
        with solver(type(self).__name__, self), default_modes(), self._vectors_like(B):
            columns, write = to_columns(B, self.domain)
            start = self._x0 if x0 is None else self.domain.join(to_columns(x0, self.domain)[0])
            X, *info = self._solve(self._products(self.damping), self.domain.join(columns), start)
            return Solution(write(self.codomain.split(X), self.codomain), *info)

    def _product(self, x: Any, adjoint: bool = False) -> Any:
        with self._vectors_like(x):
            return super()._product(x, adjoint)

    @contextmanager
    def _vectors_like(self, B: Any) -> Iterator[None]:
        """Let errors have vectors of the kind of some right-hand sides."""

        def written(rows: Tensor) -> Any:
            with default_modes():
                _, write = to_columns(B, self.domain)
                return write(self.domain.split(rows), self.domain)

        try:
            yield
        except NegativeCurvatureError as error:
            error.change(self, written, written)
            raise

    def _description(self) -> list[str]:
        return [self._matrix.operator._formula()]

    def _apply(self, columns: Columns) -> Columns:
        A = self._products(self.damping)
        with solver(type(self).__name__, self):
            X, *_ = self._solve(A, self.domain.join(columns), self._x0)
        return self.codomain.split(X)

    def _products(self, damping: float) -> Products:
        """Return what multiplies in one call, so that calls in several threads do not meet."""
        return Products(self._matrix, damping, self._preconditioner, type(self).__name__)

    def _solve(
        self, A: Products, B: Tensor, x0: Tensor | None, iterations: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Solve for rows ``[K, D]``; return solutions, residuals, iterations, converged.

        Args:
            A: Multiplies by the matrix.
            B: The right-hand sides.
            x0: Start of the iteration.
            iterations: How many have led to that, ``[K]``.
        """
        B, sizes = unit_rows(B)
        goal = (self.rtol * norms(B)).maximum(self.atol / sizes)
        X, R = torch.zeros_like(B), B
        if x0 is not None and bool(x0.any()):
            X = multiples(_expand(x0, B), 1 / sizes)
            X[~B.any(dim=1)] = 0.0  # no other start is better
            R = B - A.multiply(X) * A.unit
            X *= A.unit
        residuals = norms(R)
        none = torch.zeros(len(B), dtype=torch.int64, device=B.device)
        iterations = none if iterations is None else iterations.clone()
        trying = residuals > goal
        while bool(trying.any()) and int(iterations.max()) < self.maxiter:
            chosen, done = trying.nonzero().squeeze(1), int(iterations.max())
            # a bit more than needed, as recursions drift; but rounding limits what one run reaches
            target = (0.9 * goal[chosen]).maximum(self._limit * residuals[chosen])
            # and what it has spoiled is not worth more products than there were
            budget = min(self.maxiter - done, max(done, 10) if done else self.maxiter)
            try:
                step, count = self._correct(A, R[chosen], target, budget)
            except NegativeCurvatureError as error:
                error.change(
                    A,
                    lambda rows, i=chosen: torch.zeros_like(X).index_copy(0, i, rows),
                    lambda rows, i=chosen: solutions(X.index_add(0, i, rows), sizes / A.unit),
                    then=self,
                )
                raise
            step += X[chosen]
            rest = B[chosen] - A.multiply(step)
            found, before = norms(rest), residuals[chosen]
            iterations[chosen] += count
            better = found < before
            chosen, found, before = chosen[better], found[better], before[better]
            X[chosen], residuals[chosen] = step[better], found
            R = R.clone()
            R[chosen] = rest[better]
            trying = torch.zeros_like(trying)
            # what does not even halve has come as far as rounding allows
            trying[chosen] = (found > goal[chosen]) & (found < before / 2)
        converged = residuals <= goal
        self._report(converged, residuals, norms(B), iterations)
        unit = A.unit or 1.0  # nothing is multiplied for zeros
        return solutions(X, sizes / unit), sizes * residuals, iterations, converged

    def _report(
        self, converged: Tensor, residuals: Tensor, sizes: Tensor, iterations: Tensor
    ) -> None:
        if bool(converged.all()):
            return
        worst = float((residuals / sizes)[~converged].max())
        fail(
            f"{type(self).__name__}: {int((~converged).sum())} of {len(converged)} systems are not "
            f"solved after {int(iterations.max())} iterations, ||b - A x|| / ||b|| is up to "
            f"{worst:.1e} (rtol={self.rtol:.1e}, atol={self.atol:.1e}). Allow a larger tolerance "
            "or maxiter, precondition, or damp.",
            self.on_failure,
        )


@dataclass
class Systems:
    """The state of an iteration for K systems; every field has K as its first axis.

    Attributes:
        place: Which of the right-hand sides each system is.
    """

    place: Tensor

    def keep(self, going: Tensor) -> None:
        """Drop all systems but those where ``going`` is true."""
        if bool(going.all()):
            return
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name)[going])


def check_positive(product: Tensor, rows: Tensor) -> Tensor:
    """Return ``<r, M r>`` if the preconditioner M is positive definite."""
    if bool(((product <= 0) & (rows.abs().amax(dim=1) > 0)).any()):
        raise ValueError("The preconditioner is not positive definite.")
    return product


def _expand(x0: Tensor, B: Tensor) -> Tensor:
    if len(x0) not in (1, len(B)):
        raise ValueError(
            f"x0 has {len(x0)} columns for {len(B)} right-hand sides. Pass one for all, or one for "
            "each."
        )
    return x0.expand_as(B).clone()
