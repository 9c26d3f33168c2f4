"""The inverse as a truncated Neumann series."""

from math import isfinite
from typing import Any

import torch
from torch import Tensor

from curvlinops.algorithms.convergence import ConvergenceError
from curvlinops.algorithms.matrix import Matrix, Product
from curvlinops.algorithms.products import norms
from curvlinops.core.arguments import check_count, check_number
from curvlinops.core.operator import TorchLinearOperator
from curvlinops.core.space import Columns


class NeumannInverseLinearOperator(TorchLinearOperator):
    """The inverse as a truncated Neumann series.

    ``A^-1 ~ sum_{k=0}^{num_terms} (I - s P A)^k s P``, with scale s and preconditioner P (Lorraine
    et al., Optimizing millions of hyperparameters by implicit differentiation, AISTATS 2020). For
    a positive definite ``P A`` it converges if s is less than two over its largest eigenvalue. What
    is left out acts like damping; nothing is said about its size. The other inverses need fewer
    products for the same accuracy.

    Args:
        A: A square operator or matrix of any kind, ``[D, D]``.
        num_terms: Number of products with ``A``.
        scale: The scale s.
        check_nan: Whether to check that each term is finite, not the last one only.
        preconditioner: An operator or matrix that approximates the inverse. Default: identity.

    Raises:
        ConvergenceError: If the series diverges: a term is not finite, or the last one is larger
            than the first, or than the one before.
    """

    def __init__(
        self,
        A: Any,
        num_terms: int = 100,
        scale: float = 1.0,
        check_nan: bool = True,
        preconditioner: Any = None,
    ):
        self._matrix = Matrix(A, square=True)
        operator = self._matrix.operator
        self._preconditioner = None
        symmetric = operator.self_adjoint
        if preconditioner is not None:
            self._preconditioner = Matrix(preconditioner, square=True)
            operator.domain.check_compatible(self._preconditioner.operator.domain)
            symmetric = symmetric and self._preconditioner.operator.self_adjoint
        super().__init__(operator.codomain, operator.domain, symmetric)
        self.set_neumann_hyperparameters(num_terms, scale, check_nan)

    def set_neumann_hyperparameters(
        self, num_terms: int = 100, scale: float = 1.0, check_nan: bool = True
    ) -> None:
        """Set the options of the constructor again."""
        self.num_terms = check_count("num_terms", num_terms, at_least=0)
        self.scale, self.check_nan = check_number("scale", scale), check_nan
        if not isfinite(self.scale) or self.scale == 0:
            raise ValueError(f"scale must be a finite number other than zero, got {scale!r}.")

    def _apply(self, columns: Columns) -> Columns:
        rows = self._precondition(self.domain.join(columns), adjoint=False)

        def step(rows: Tensor) -> Tensor:
            return self._precondition(self._multiply(rows, adjoint=False), adjoint=False)

        return self.codomain.split(self._sum(rows, step))

    def _apply_adjoint(self, columns: Columns) -> Columns:
        # (I - s P A)^k s P has the transpose s P^T (I - s A^T P^T)^k
        def step(rows: Tensor) -> Tensor:
            return self._multiply(self._precondition(rows, adjoint=True), adjoint=True)

        rows = self._sum(self.codomain.join(columns), step)
        return self.domain.split(self._precondition(rows, adjoint=True))

    def _multiply(self, rows: Tensor, adjoint: bool) -> Tensor:
        matrix = self._matrix
        return (matrix.adjoint_matmul(rows.T) if adjoint else matrix @ rows.T).T

    def _precondition(self, rows: Tensor, adjoint: bool) -> Tensor:
        matrix = self._preconditioner
        if matrix is None:
            return rows
        return (matrix.adjoint_matmul(rows.T) if adjoint else matrix @ rows.T).T.to(rows)

    def _sum(self, rows: Tensor, step: Product) -> Tensor:
        term = total = self.scale * rows
        first = before = last = norms(term)
        for k in range(1, self.num_terms + 1):
            try:
                product = step(term)
            except ValueError as error:
                if bool((norms(term) > first).any()):
                    self._diverge(k, error)  # terms grow until a product overflows
                raise
            term = term - self.scale * product
            total = total + term
            if self.check_nan or k >= self.num_terms - 1:
                before, last = last, norms(term)
                if not bool(last.isfinite().all()):
                    self._diverge(k)
        # terms without curvature remain as they are, up to rounding
        growing = last > before * (1 + 100 * torch.finfo(term.dtype).eps)
        if bool((growing | (last > first)).any()):
            self._diverge(self.num_terms)
        return total

    def _diverge(self, k: int, cause: Exception | None = None) -> None:
        raise ConvergenceError(
            f"The Neumann series diverges (term {k} of {self.num_terms}). Choose a scale below two "
            f"over the largest eigenvalue (it is {self.scale}), and a positive definite matrix."
        ) from cause
