"""The pseudo-inverse of any matrix, by least squares."""

from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, overload

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, lsmr
from torch import Tensor

from curvlinops.algorithms.as_operator import AnyMatrix, Matrix, Product
from curvlinops.algorithms.iteration import check_on_failure, fail, solver
from curvlinops.algorithms.krylov import Kind
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.vectors import Array, Vectors
from curvlinops.support.arguments import check_count, check_number, without_graph
from curvlinops.support.norms import double_norm
from curvlinops.support.torch_modes import in_default_modes

#: Values of ``istop`` that mean failure.
_FAILURES = {3: "conlim is exceeded", 6: "the matrix is singular", 7: "maxiter is reached"}


class LSMRSolution(NamedTuple, Generic[Kind]):
    """The results of ``scipy.sparse.linalg.lsmr``, for each of K right-hand sides.

    Attributes:
        x: The solutions, of the same type as the right-hand sides.
        istop: Why the iteration ended. 0: x = 0 is the solution. 1: ``A x = b`` is solved. 2: the
            least-squares problem is solved. 3: the condition number exceeds ``conlim``. 4, 5, 6:
            the same as 1, 2, 3 up to rounding. 7: ``maxiter`` is reached.
        itn: Number of iterations.
        normr: ``sqrt(||b - A x||^2 + damp^2 ||x||^2)``.
        normar: ``||A^T (b - A x) - damp^2 x||``.
        norma: Estimate of the Frobenius norm of ``[A; damp I]``.
        conda: Estimate of the condition number of ``[A; damp I]``.
        normx: ``||x||``.
    """

    x: Kind
    istop: Tensor
    itn: Tensor
    normr: Tensor
    normar: Tensor
    norma: Tensor
    conda: Tensor
    normx: Tensor


class LSMRInverseLinearOperator(TorchLinearOperator):
    """The damped pseudo-inverse of any matrix, symmetric or not, square or not, by LSMR.

    ``x = argmin ||A x - b||^2 + damp^2 ||x||^2``; the minimizer of least norm, if there are several
    (Fong and Saunders, LSMR: An iterative algorithm for sparse least-squares problems, SIAM J. Sci.
    Comput. 2011). SciPy's ``lsmr`` solves for one right-hand side at a time, on the CPU: each
    product with a matrix on another device moves one vector there and one back. It has no
    ``callback``, since SciPy's function has none. The adjoint is the pseudo-inverse of the adjoint.

    Args:
        A: An operator with an adjoint, or a matrix of any kind, ``[M, D]``.
        damp: The damping.
        atol: See ``btol``.
        btol: The iteration ends if ``||r|| <= btol ||b|| + atol ||A|| ||x||``, or if
            ``||A^T r|| <= atol ||A|| ||r||``; r is the residual of the damped problem. Both
            tolerances are at least the rounding error of the operator's dtype.
        conlim: Largest condition number of ``[A; damp I]``; zero for no limit. SciPy's estimate is
            too large if the norm of ``A`` is below one.
        maxiter: Largest number of iterations. Default: ten times the smaller dimension.
        on_failure: Without convergence, ``"warn"`` or ``"raise"``.

    Raises:
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
    """

    def __init__(
        self,
        A: AnyMatrix,
        *,
        damp: float = 0.0,
        atol: float = 1e-6,
        btol: float = 1e-6,
        conlim: float = 1e8,
        maxiter: int | None = None,
        on_failure: str = "warn",
    ):
        self._matrix = Matrix(A)
        operator = self._matrix.operator
        super().__init__(operator.codomain, operator.domain, operator.self_adjoint)
        for space in (self.domain, self.codomain):
            space.check_whole(
                "the whole vectors that LSMRInverseLinearOperator needs",
                "Use MINRESInverseLinearOperator, or CGInverseLinearOperator.",
            )
        check_on_failure(on_failure)
        self.on_failure = on_failure
        atol, btol = check_number("atol", atol, 0), check_number("btol", btol, 0)
        damp, conlim = check_number("damp", damp), check_number("conlim", conlim, 0)
        maxiter = 10 * min(self.shape) if maxiter is None else maxiter
        self.maxiter = check_count("maxiter", maxiter)
        self.damp, self.atol, self.btol, self.conlim = abs(damp), atol, btol, conlim

    @overload
    def matvec_with_info(self, x: Array) -> LSMRSolution[Array]: ...
    @overload
    def matvec_with_info(self, x: Sequence[Tensor]) -> LSMRSolution[list[Tensor]]: ...
    @overload
    def matvec_with_info(self, x: Mapping[str, Tensor]) -> LSMRSolution[dict[str, Tensor]]: ...
    @in_default_modes
    def matvec_with_info(self, x: Vectors) -> LSMRSolution:
        """Solve for one or several right-hand sides; return all results of SciPy's ``lsmr``."""
        without_graph(x, "The right-hand side")
        given = self._read(x)
        X, *info = self._solve(given.columns)
        return LSMRSolution(given.write(X, self.codomain), *info)

    def _description(self) -> list[str]:
        return [self._matrix.operator._formula()]

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return (self._matrix.operator,)

    def _apply(self, columns: Tensor) -> Tensor:
        return self._solve(columns)[0]

    def _transposed(self) -> "LSMRInverseLinearOperator":
        names = "damp", "atol", "btol", "conlim", "maxiter", "on_failure"
        options = {name: getattr(self, name) for name in names}
        return LSMRInverseLinearOperator(self._matrix.operator.T, **options)

    def _solve(self, B: Tensor) -> tuple[Tensor, ...]:
        """Solve for columns; return the fields of ``LSMRSolution``, with true residuals."""
        multiply, transposed = self._matrix.__matmul__, self._matrix.adjoint_matmul
        eps = torch.finfo(self.torch_dtype).eps
        atol, btol = max(self.atol, eps), max(self.btol, eps)
        X = B.new_zeros(len(B), self._matrix.shape[1])
        info = torch.zeros(7, len(B), dtype=torch.float64, device=B.device)
        with solver(self):
            A = LinearOperator(
                self._matrix.shape, _on_host(multiply), _on_host(transposed), dtype=float
            )
            for k, b in enumerate(B.double().cpu().numpy()):
                with np.errstate(all="ignore"):  # scipy divides by zero at the end of the space
                    x, *numbers = lsmr(A, b, self.damp, atol, btol, self.conlim, self.maxiter)
                X[k], info[:, k] = torch.from_numpy(x).to(X), info.new_tensor(numbers)
            R = B - multiply(X.T).T
            gradient = transposed(R.T).T - self.damp**2 * X
        istop, itn, norma, conda = info[0].long(), info[1].long(), info[4], info[5]
        normx, normar = double_norm(X, 1), double_norm(gradient, 1)
        normr = torch.hypot(double_norm(R, 1), self.damp * normx)
        # true residuals contain the rounding errors of products
        slack = 10 * (atol + 10 * eps)
        solved = normr <= 10 * btol * double_norm(B, 1) + slack * norma * normx
        solved |= normar <= slack * norma * normr
        failed = ~solved | (istop == 3) | (istop >= 6)
        if bool(failed.any()):
            codes = istop[failed].tolist()
            reasons = sorted({_FAILURES.get(code, "rounding prevents it") for code in codes})
            worst = float((normar / (norma * normr))[failed].max())
            fail(
                f"{type(self).__name__}: {len(codes)} of {len(B)} problems are not solved "
                f"({', '.join(reasons)}), ||A^T r|| / (||A|| ||r||) is up to {worst:.1e} "
                f"(atol={self.atol:.1e}). Allow a larger tolerance, conlim or maxiter, or damp.",
                self.on_failure,
            )
        return X, istop, itn, normr, normar, norma, conda, normx


def _on_host(multiply: Product) -> Callable[[np.ndarray], np.ndarray]:
    """Return a product with NumPy arrays ``[D]``."""

    def product(x: np.ndarray) -> np.ndarray:
        return multiply(torch.from_numpy(x).reshape(-1, 1))[:, 0].double().cpu().numpy()

    return product
