"""The base of iterative inverses of symmetric matrices: options, products, true residuals."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Generic, NamedTuple, TypeVar, overload

import torch
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix, Preconditioner, read_preconditioner
from curvlinops.algorithms.iteration import (
    Callback,
    Iteration,
    check_callback,
    check_on_failure,
    fail,
    solver,
    stops,
)
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.linear_operator.vectors import Array, Vectors
from curvlinops.support.arguments import check_count, check_number, without_graph
from curvlinops.support.torch_modes import in_default_modes

#: A larger asymmetry, relative to the matrix's norm, cannot be rounding in single precision.
ASYMMETRY = 1e-3

#: The type of the right-hand sides.
Kind = TypeVar("Kind")


class Solution(NamedTuple, Generic[Kind]):
    """Solutions of linear systems, and how accurate they are.

    Attributes:
        x: The solutions, of the same type as the right-hand sides.
        residuals: True residual norms ``||b - A x||``, ``[K]``, float64.
        iterations: Number of iterations, ``[K]``.
        converged: Whether the tolerance is reached, ``[K]``.
        history: Residual norms after each iteration, as the recursion computes them,
            ``[num_iterations, K]``, float64. Those of a system that is solved stay the same.
    """

    x: Kind
    residuals: Tensor
    iterations: Tensor
    converged: Tensor
    history: Tensor


class KrylovInverseLinearOperator(TorchLinearOperator):
    """The inverse of a symmetric matrix, ``(A + damping I)^-1``, by an iteration.

    A subclass implements ``_improve``, which reduces the residuals that its recursion computes.
    Convergence depends on the true residuals: if these are too large, the iteration restarts from
    the solution so far.

    Args:
        A: A symmetric operator or matrix of any kind, ``[D, D]``.
        preconditioner: A symmetric positive definite operator or matrix that approximates the
            inverse; or a function that multiplies a vector by such an approximation, from a tensor
            ``[D]`` to a tensor ``[D]``. Default: none.
        rtol: See ``atol``.
        atol: A system is solved if ``||b - A x|| <= max(rtol ||b||, atol)``.
        maxiter: Largest number of iterations. Default: ``10 D``.
        damping: Multiple of the identity that is added to ``A``.
        x0: Start of the iteration for every right-hand side that is not zero, ``[D]``. Default:
            zero.
        on_failure: Without convergence, ``"warn"`` and return the best solution, or ``"raise"``.
        callback: A function that is called with an ``Iteration`` after each iteration, for products
            with the inverse, too. If it returns ``True``, the iteration stops, and the result is
            the iterate so far, without a warning. If several processes multiply together, all of
            them then stop.

    Raises:
        ValueError: If an argument is out of range, or products show that the matrix is not
            symmetric.
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
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
        callback: Callback = None,
    ):
        self._matrix = Matrix(A, square=True)
        operator = self._matrix.operator
        operator.domain.check_compatible(operator.codomain)
        super().__init__(operator.domain, self_adjoint=True)
        self.rtol, self.atol = check_number("rtol", rtol, 0), check_number("atol", atol, 0)
        if self.rtol == self.atol == 0:
            raise ValueError("rtol and atol must not both be zero.")
        self.maxiter = check_count("maxiter", 10 * self.shape[0] if maxiter is None else maxiter)
        self._x0 = None if x0 is None else self._matrix.read(x0).columns
        self._preconditioner = read_preconditioner(preconditioner, self._matrix)
        self.damping = check_number("damping", damping)
        check_on_failure(on_failure)
        self.on_failure = on_failure
        self._callback = check_callback(callback)

    def _improve(
        self, A: "DampedMatrix", X: Tensor, log: "IterationLog", systems: "Systems", budget: int
    ) -> None:
        """Add approximate solutions of unsolved systems to columns X ``[K, D]``, in place."""
        raise NotImplementedError

    @overload
    def solve(self, B: Array, x0: Vectors | None = None) -> Solution[Array]: ...
    @overload
    def solve(self, B: Sequence[Tensor], x0: Vectors | None = None) -> Solution[list[Tensor]]: ...
    @overload
    def solve(
        self, B: Mapping[str, Tensor], x0: Vectors | None = None
    ) -> Solution[dict[str, Tensor]]: ...
    @in_default_modes
    def solve(self, B: Vectors, x0: Vectors | None = None) -> Solution:
        """Solve linear systems.

        Args:
            B: One or several right-hand sides, of any type that operators multiply.
            x0: Start of the iteration: one vector, or one for each right-hand side.

        Returns:
            The named tuple ``(x, residuals, iterations, converged, history)``.

        Raises:
            ValueError: If a right-hand side requires gradients; only products have derivatives.
        """
        without_graph(B, "The right-hand side")
        given = self._read(B)
        start = self._x0 if x0 is None else self._matrix.read(x0).columns
        X, *info = self._solve(given.columns, start)
        return Solution(given.write(X, self.codomain), *info)

    def _description(self) -> list[str]:
        return [self._matrix.operator._formula()]

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        given = self._matrix.operator, self._preconditioner
        return tuple(operator for operator in given if operator is not None)

    def _apply(self, columns: Tensor) -> Tensor:
        return self._solve(columns, self._x0)[0]

    def _solve(self, B: Tensor, x0: Tensor | None) -> tuple[Tensor, ...]:
        """Solve for columns ``[K, D]``; return the fields of ``Solution``, with columns."""
        with solver(self):
            # a new object for each call, which no other thread changes
            A = DampedMatrix(self._matrix, self.damping, self._preconditioner, type(self).__name__)
            sizes = check_sizes(self.domain, B)
            goal = (self.rtol * sizes).clamp(min=self.atol)
            X, R = B.new_zeros(1, 1).expand_as(B), B
            if x0 is not None:
                if len(x0) not in (1, len(B)):
                    raise ValueError(
                        f"x0 has {len(x0)} columns for {len(B)} right-hand sides. Pass one for "
                        "all, or one for each."
                    )
                X = x0.expand_as(B).clone()
                X[sizes == 0] = 0.0  # zero is the solution
                R = B - A.multiply(X)
            residuals = self.domain.norms(R)
            log = IterationLog(A, residuals, partial(stops, self._callback, self._team))
            rounding = 10 * torch.finfo(self.torch_dtype).eps
            index = (residuals > goal).nonzero().squeeze(1)
            R = _rows(R, index)
            while len(index) and (done := int(log.iterations.max())) < self.maxiter:
                before = residuals[index]
                # the recursion drifts, hence a margin; rounding limits what one run can gain
                target = (0.9 * goal[index]).maximum(rounding * before)
                # the index of each system's right-hand side, residuals, and norms to reach
                systems = Systems(index=index, R=R, goal=target)
                del R  # which the iteration replaces
                # a restart takes at most as many products as all runs before it
                budget = min(self.maxiter - done, max(done, 10) if done else self.maxiter)
                candidate = X.clone(memory_format=torch.contiguous_format)
                self._improve(A, candidate, log, systems, budget)
                R = _rows(B, index) - A.multiply(_rows(candidate, index))
                after = self.domain.norms(R)
                better = (after < before) | log.has_stopped
                candidate[index[~better]] = X[index[~better]]
                X, residuals[index[better]] = candidate, after[better]
                if log.has_stopped:
                    break
                # a residual that does not halve is as small as rounding allows
                going = (after > goal[index]) & (after < before / 2)
                index, R = index[going], _rows(R, going.nonzero().squeeze(1))
            converged = residuals <= goal
            if not log.has_stopped:
                self._report(converged, residuals / sizes, log.iterations)
            return X.contiguous(), residuals, log.iterations, converged, log.history()

    def _report(self, converged: Tensor, relative: Tensor, iterations: Tensor) -> None:
        if not bool(converged.all()):
            fail(
                f"{type(self).__name__}: {int((~converged).sum())} of {len(converged)} systems are "
                f"not solved after {int(iterations.max())} iterations, ||b - A x|| / ||b|| is up "
                f"to {float(relative[~converged].max()):.1e} (rtol={self.rtol:.1e}, "
                f"atol={self.atol:.1e}). Allow a larger tolerance or maxiter, precondition, or "
                "damp.",
                self.on_failure,
            )


class DampedMatrix:
    """A symmetric matrix with damping, and its preconditioner; messages name the method."""

    def __init__(
        self,
        matrix: Matrix,
        damping: float,
        preconditioner: TorchLinearOperator | None,
        method: str,
    ):
        self._matrix, self._damping, self._method = matrix, damping, method
        self.space = matrix.space
        self._preconditioner = preconditioner
        self._last: tuple[Tensor, Tensor] | None = None
        self.num_products = 0

    def multiply(self, columns: Tensor) -> Tensor:
        """Multiply columns ``[K, D]`` by ``A + damping I``; refuse what is not symmetric."""
        self.num_products += len(columns)
        out = (self._matrix @ columns.T).T.contiguous()
        if self._damping:
            out.add_(columns, alpha=self._damping)
        if len(columns) and not self._matrix.operator.self_adjoint:
            self._check_symmetric(columns, out)
        return out

    def precondition(self, columns: Tensor) -> Tensor:
        """Multiply columns ``[K, D]`` by the preconditioner."""
        if self._preconditioner is None:
            return columns
        return self._preconditioner._multiply_columns(columns).contiguous().to(columns)

    def _check_symmetric(self, columns: Tensor, products: Tensor) -> None:
        """Check ``<x, A y> = <A x, y>`` for the last two products, without another one."""
        last, self._last = self._last, (columns, products)
        if last is None or last[0].shape != columns.shape:
            return
        dots, norms = self.space.dots, self.space.norms
        difference = dots(last[0], products) - dots(last[1], columns)
        size_x, size_Ax, size_y, size_Ay = (norms(x) for x in (*last, columns, products))
        norm = torch.cat([size_Ax / size_x, size_Ay / size_y]).nan_to_num().max()
        if bool((difference.abs() > ASYMMETRY * norm * size_x * size_y).any()):
            raise ValueError(
                f"{self._method} needs a symmetric matrix, and this one is not symmetric. Use "
                "LSMRInverseLinearOperator, or the symmetric part (A + A.T) / 2."
            )


class Systems(SimpleNamespace):
    """The state of an iteration for K systems; each attribute is a tensor ``[K, ...]``."""

    def keep(self, going: Tensor) -> None:
        """Keep the systems for which ``going`` is true."""
        if not bool(going.all()):
            vars(self).update({name: tensor[going] for name, tensor in vars(self).items()})


class IterationLog:
    """Records the iterations of a solver, and calls the user's callback after each."""

    def __init__(
        self, A: DampedMatrix, residuals: Tensor, stops: Callable[[Callable[[], Iteration]], bool]
    ):
        self._A, self._stops = A, stops
        self._residuals = [residuals]
        self.iterations = torch.zeros_like(residuals, dtype=torch.int64)
        self.has_stopped = False

    def add(self, X: Tensor, systems: Systems, residuals: Tensor) -> bool:
        """Record solutions ``[K, D]`` and these systems' residuals; return whether to stop."""
        self.iterations[systems.index] += 1
        current = self._residuals[-1].index_copy(0, systems.index, residuals)
        self._residuals.append(current)
        self.has_stopped = self._stops(partial(self._state, X))
        return self.has_stopped

    def _state(self, X: Tensor) -> Iteration:
        return Iteration(
            iteration=len(self._residuals) - 1,
            num_products=self._A.num_products,
            residuals=self._residuals[-1],
            iterate=self._A.space.vectors(X.T),
        )

    def history(self) -> Tensor:
        """Return the residual norms after each iteration, ``[num_iterations, K]``."""
        return torch.stack(self._residuals)[1:]


def _rows(columns: Tensor, index: Tensor) -> Tensor:
    """Return columns by their indices, without a copy if these are all."""
    return columns if len(index) == len(columns) else columns[index]


def check_sizes(space: ParameterSpace, columns: Tensor) -> Tensor:
    """Return the norms of vectors ``[K, D]``, whose squares neither over- nor underflow."""
    sizes = space.norms(columns)
    is_zero = space.norms((columns != 0).to(columns)) == 0
    if not bool(((sizes == sizes.clamp(1e-150, 1e150)) | is_zero).all()):
        raise ValueError(
            "Norms of right-hand sides must be zero, or between 1e-150 and 1e150. Scale the "
            "right-hand sides."
        )
    return sizes


def add_scaled(columns: Tensor, factors: Tensor, others: Tensor) -> Tensor:
    """Return ``columns + factors * others`` with a factor for each, ``[K]``."""
    return torch.addcmul(columns, factors.to(columns).unsqueeze(1), others)


def scaled(factors: Tensor, columns: Tensor) -> Tensor:
    """Multiply each row of ``[K, D]`` by its factor."""
    return factors.to(columns).unsqueeze(1) * columns


def orthonormalized(
    space: ParameterSpace, columns: Tensor, bases: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return unit vectors orthogonal to bases ``[K, m, D]``, overlaps ``[K, m]``, norms ``[K]``.

    The norms are those of what is outside of the bases, by two passes of Gram and Schmidt. Vectors
    ``[K, D]`` of which only rounding errors are outside have the unit vector zero.
    """
    overlaps = columns.new_zeros(bases.shape[:2], dtype=torch.float64)
    sizes = overlaps.new_ones(len(columns), 1)
    for _ in range(2):
        more = space.overlaps(bases, columns)
        columns, overlaps = columns - combined(bases, more), overlaps + sizes * more
        outside = space.norms(columns)
        columns = scaled((1 / outside).nan_to_num(posinf=0.0), columns)
        sizes = sizes * outside.unsqueeze(1)
    is_outside = outside > 0.5
    return scaled(is_outside, columns), overlaps, sizes[:, 0] * is_outside


def combined(bases: Tensor, x: Tensor) -> Tensor:
    """Return combinations ``[K, D]`` of vectors ``[K, m, D]``, with coefficients ``[K, m]``."""
    return torch.bmm(x.to(bases).unsqueeze(1), bases).squeeze(1)


def check_positive(squares: Tensor) -> Tensor:
    """Return ``<r, M r>`` of residuals r, ``[K]``, if the preconditioner M is positive definite."""
    if bool((squares <= 0).any()):
        raise ValueError("The preconditioner is not positive definite.")
    return squares
