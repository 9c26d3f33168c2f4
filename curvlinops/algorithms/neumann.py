"""The inverse as a truncated Neumann series."""

from functools import partial

from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix, Preconditioner, read_preconditioner
from curvlinops.algorithms.iteration import (
    Callback,
    DivergenceError,
    Iteration,
    check_callback,
    check_on_failure,
    fail,
    solver,
    stops,
)
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.support.arguments import check_count, check_number


class NeumannInverseLinearOperator(TorchLinearOperator):
    """The inverse as a truncated Neumann series.

    ``A^-1 ~ sum_{k=0}^{num_terms} (I - s P A)^k s P``, with scale s and preconditioner P (Lorraine
    et al., Optimizing millions of hyperparameters by implicit differentiation, AISTATS 2020). For
    a positive definite ``P A`` it converges if s is less than two over its largest eigenvalue. The
    truncation acts like damping. The other inverses need fewer products for the same accuracy.

    The last term is the residual of the sum without it, ``s P (b - A x)``, so that the check of
    convergence costs no product.

    Args:
        A: A square operator or matrix of any kind, ``[D, D]``.
        num_terms: Number of products with ``A``.
        scale: The scale s.
        check_nan: Whether to check after each term that it is finite, not only at the end.
        preconditioner: An operator or matrix that approximates the inverse, or a function that
            multiplies a vector ``[D]`` by such an approximation. With a function, the inverse
            multiplies vectors, but has no adjoint, which ``xdiag``, LSMR and gradients of products
            need. Default: identity.
        rtol: Largest norm of the last term, relative to the first one. Pass 1 if the series is to
            be truncated early.
        on_failure: If the last term is larger, ``"warn"`` or ``"raise"``.
        callback: A function that is called with an ``Iteration`` after each term; the residuals are
            norms of the last term. If it returns ``True``, the result is the sum so far, without a
            check of convergence.

    Raises:
        DivergenceError: If a term is not finite, or the last one is larger than the first.
        ConvergenceError: If the last term is larger than ``rtol`` allows, and
            ``on_failure="raise"``.
    """

    def __init__(
        self,
        A: AnyMatrix,
        num_terms: int = 100,
        scale: float = 1.0,
        check_nan: bool = True,
        preconditioner: Preconditioner = None,
        rtol: float = 1e-2,
        on_failure: str = "warn",
        callback: Callback = None,
    ):
        check_on_failure(on_failure)
        self.rtol, self.on_failure = check_number("rtol", rtol, 0), on_failure
        self._callback = check_callback(callback)
        self._matrix = Matrix(A, square=True)
        operator = self._matrix.operator
        self._preconditioner = read_preconditioner(preconditioner, self._matrix)
        symmetric = operator.self_adjoint
        if self._preconditioner is not None:
            symmetric = symmetric and self._preconditioner.self_adjoint
        super().__init__(operator.codomain, operator.domain, symmetric)
        self.num_terms = check_count("num_terms", num_terms, at_least=0)
        self.scale, self.check_nan = check_number("scale", scale), check_nan
        if self.scale == 0:
            raise ValueError("scale must not be zero.")

    def _description(self) -> list[str]:
        return [self._matrix.operator._formula()]

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        given = self._matrix.operator, self._preconditioner
        return tuple(operator for operator in given if operator is not None)

    def _apply(self, columns: Tensor) -> Tensor:
        return self._sum(self._precondition(columns))

    def _transposed(self) -> "NeumannInverseLinearOperator":
        # (I - s P A)^k s P has the transpose (I - s P^T A^T)^k s P^T
        preconditioner = self._preconditioner and self._preconditioner.T
        options = self.num_terms, self.scale, self.check_nan, preconditioner, self.rtol
        options += self.on_failure, self._callback
        return NeumannInverseLinearOperator(self._matrix.operator.T, *options)

    def _precondition(self, columns: Tensor) -> Tensor:
        """Multiply columns ``[K, D]`` by the preconditioner."""
        if self._preconditioner is None:
            return columns
        return self._preconditioner._multiply_columns(columns).to(columns)

    def _sum(self, columns: Tensor) -> Tensor:
        """Return ``scale * sum_k (I - scale P A)^k columns``, for columns ``[K, D]``."""
        with solver(self):
            term = total = self.scale * columns
            first = last = self.domain.norms(term)
            for k in range(1, self.num_terms + 1):
                try:
                    term = term - self.scale * self._precondition((self._matrix @ term.T).T)
                except ValueError:
                    if bool((last > first).any()):  # the product with a large term overflows
                        self._diverge(k)
                    raise
                total = total + term
                last = self.domain.norms(term)
                if (self.check_nan or k == self.num_terms) and not bool(last.isfinite().all()):
                    self._diverge(k)
                state = partial(self._state, k, last, total)
                if stops(self._callback, self._team, state):
                    return total
        if bool((last > first).any()):
            self._diverge(self.num_terms)
        if bool((last > self.rtol * first).any()):
            fail(
                f"The Neumann series has not converged after {self.num_terms} terms: relative "
                f"residuals are up to {float((last / first).nan_to_num().max()):.1e} "
                f"(rtol={self.rtol:.1e}). Use more terms, a larger scale, or a preconditioner; "
                "CGInverseLinearOperator needs fewer products. To truncate the series early, pass "
                "rtol=1.",
                self.on_failure,
            )
        return total

    def _state(self, k: int, residuals: Tensor, total: Tensor) -> Iteration:
        return Iteration(
            iteration=k,
            num_products=k * len(total),
            residuals=residuals,
            iterate=self.domain.vectors(total.T),
        )

    def _diverge(self, k: int) -> None:
        raise DivergenceError(
            f"The Neumann series diverges (term {k} of {self.num_terms}). Choose a scale below two "
            f"over the largest eigenvalue (it is {self.scale}), and a positive definite matrix."
        )
