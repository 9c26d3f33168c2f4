"""Least squares: the pseudo-inverse of any matrix."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Generic, NamedTuple, overload

import torch
from torch import Tensor

from curvlinops.algorithms.convergence import check_on_failure, fail
from curvlinops.algorithms.inverse import Kind, Systems
from curvlinops.algorithms.matrix import AnyMatrix, Matrix, Product
from curvlinops.algorithms.products import norms, scaled, solutions, unit_of, unit_rows
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import Columns
from curvlinops.linear_operator.vectors import Array, Vectors, to_columns
from curvlinops.support.arguments import check_count, check_number, without_graph
from curvlinops.support.progress import show_residuals, solver
from curvlinops.support.torch_modes import default_modes


class LSMRSolution(NamedTuple, Generic[Kind]):
    """What ``scipy.sparse.linalg.lsmr`` returns, for every right-hand side, ``[K]``.

    Attributes:
        x: The solutions, of the kind of the right-hand sides.
        istop: Why the iteration ended. 0: x = 0 is the solution. 1: ``A x = b`` is solved. 2: the
            least-squares problem is solved. 3: the condition number exceeds ``conlim``. 7:
            ``maxiter`` is reached.
        itn: Number of iterations.
        normr: ``||b - A x||``; with damping the root of ``||b - A x||^2 + damp^2 ||x||^2``.
        normar: ``||A^T (b - A x) - damp^2 x||``.
        norma: Estimate of the Frobenius norm of ``[A; damp I]``.
        conda: Estimate of its condition number.
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

    ``x = argmin ||A x - b||^2 + damp^2 ||x||^2``; of all minimizers the one of least norm (Fong and
    Saunders, LSMR: An iterative algorithm for sparse least-squares problems, SIAM J. Sci. Comput.
    2011). For all right-hand sides at once; those that are solved drop out. Its adjoint is the
    pseudo-inverse of the adjoint.

    Args:
        A: An operator with an adjoint, or a matrix of any kind, ``[M, D]``.
        damp: Damping.
        atol: See ``btol``.
        btol: The iteration ends if ``||r|| <= btol ||b|| + atol ||A|| ||x||``, or if
            ``||A^T r|| <= atol ||A|| ||r||``; r is the residual of the damped problem. Both
            tolerances are at least the rounding error of the operator's dtype.
        conlim: Largest condition number; zero for none.
        maxiter: Largest number of iterations. Default: ten times the smaller dimension.
        on_failure: If neither tolerance is reached, ``"warn"`` or ``"raise"``.

    Raises:
        ConvergenceError: Without convergence, if ``on_failure="raise"``.
        ValueError: If a solution is too large or too small for the matrix's type.
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
        check_on_failure(on_failure)
        self.on_failure = on_failure
        self.set_lsmr_hyperparameters(damp, atol, btol, conlim, maxiter)

    def set_lsmr_hyperparameters(
        self,
        damp: float = 0.0,
        atol: float = 1e-6,
        btol: float = 1e-6,
        conlim: float = 1e8,
        maxiter: int | None = None,
    ) -> None:
        """Set the options of the constructor again."""
        atol, btol = check_number("atol", atol, 0), check_number("btol", btol, 0)
        damp, conlim = check_number("damp", damp), check_number("conlim", conlim, 0)
        maxiter = 10 * min(self.shape) if maxiter is None else maxiter
        self.maxiter = check_count("maxiter", maxiter)
        self.damp = abs(damp)
        self.atol, self.btol, self.conlim = atol, btol, conlim or inf

    @overload
    def matvec_with_info(self, x: Array) -> LSMRSolution[Array]: ...
    @overload
    def matvec_with_info(self, x: Sequence[Tensor]) -> LSMRSolution[list[Tensor]]: ...
    @overload
    def matvec_with_info(self, x: Mapping[str, Tensor]) -> LSMRSolution[dict[str, Tensor]]: ...
    def matvec_with_info(self, x: Vectors) -> LSMRSolution:
        """Solve for right-hand sides, and return all that is known about the solutions."""
        without_graph(x, "The right-hand side")
        with default_modes():
            columns, write = to_columns(x, self.domain)
            X, *info = self._solve(self.domain.join(columns), adjoint=False)
            return LSMRSolution(write(self.codomain.split(X), self.codomain), *info)

    def _description(self) -> list[str]:
        return [self._matrix.operator._formula()]

    def _apply(self, columns: Columns) -> Columns:
        X, *_ = self._solve(self.domain.join(columns), adjoint=False)
        return self.codomain.split(X)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        X, *_ = self._solve(self.codomain.join(columns), adjoint=True)
        return self.domain.split(X)

    def _solve(self, B: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
        """Solve for rows; return the fields of ``LSMRSolution``."""
        with solver(type(self).__name__, self):
            return self._iterate(B, adjoint)

    def _iterate(self, B: Tensor, adjoint: bool) -> tuple[Tensor, ...]:
        multiply, transposed = self._matrix.__matmul__, self._matrix.adjoint_matmul
        if adjoint:
            multiply, transposed = transposed, multiply
        # squares of what is measured in units neither overflow nor vanish
        B, scale = unit_rows(B)
        u, beta = _unit(B)
        image = _rows(transposed, 1.0, u)
        unit = unit_of(image, u, self.damp)
        forward, backward = partial(_rows, multiply, unit), partial(_rows, transposed, unit)
        damp = self.damp / unit
        state, X = _start(B, u, beta, image / unit, damp)
        info = torch.zeros(5, len(B), dtype=torch.float64, device=B.device)
        sizes = norms(B)
        while len(state.place):
            # the first check is for solutions that are zero
            stop = self._stop(state, norms(X[state.place]), sizes[state.place], damp)
            ended = stop >= 0
            done = state.place[ended]
            info[:, done] = torch.stack(
                [stop, state.itn, state.normar, state.norma, state.conda()]
            )[:, ended]
            state.keep(~ended)
            if len(state.place):
                X.index_add_(0, state.place, _advance(state, forward, backward, damp))
        istop, itn, normar, norma, conda = info
        R, size = _unit(B - forward(X))
        gradient = backward(R) - scaled(damp**2 / size.where(size > 0, 1.0), X)
        true = norms(gradient) * size.where(size > 0, 1.0)
        normx, normr = norms(X), torch.hypot(size, damp * norms(X))
        self._report(istop, true, normar, normr, norma)
        X, normx = solutions(X, scale / unit), scale / unit * normx
        norms_of = (scale * normr, scale * unit * true, unit * norma)
        return X, istop.long(), itn.long(), *norms_of, conda, normx

    def _stop(self, s: "_State", normx: Tensor, normb: Tensor, damp: float) -> Tensor:
        """Return for each system why it ends, or -1."""
        normr = torch.hypot(norms(s.R), damp * normx)
        # nothing is smaller than rounding errors
        atol, btol = (max(tol, torch.finfo(self.torch_dtype).eps) for tol in (self.atol, self.btol))
        enough, least_enough = btol * normb + atol * s.norma * normx, atol * s.norma * normr
        solved, least = normr <= enough, s.normar <= least_enough
        show_residuals((normr, enough), (s.normar, least_enough))
        reasons = [
            (s.itn >= self.maxiter, 7.0),
            (s.conda() >= self.conlim, 3.0),
            (least, 2.0),
            (s.normar == 0, 2.0),
            (solved, 1.0),
            ((s.normar == 0) & (s.itn == 0), 0.0),
        ]
        stop = torch.full_like(s.normar, -1.0)
        for condition, reason in reasons:
            stop = torch.where(condition, reason, stop)
        return stop

    def _report(
        self, istop: Tensor, true: Tensor, normar: Tensor, normr: Tensor, norma: Tensor
    ) -> None:
        """Say which systems are not solved, or only in the eyes of the recursion."""
        eps = torch.finfo(self.torch_dtype).eps
        drifted = true > 10 * (normar + (self.atol + 10 * eps) * norma * normr)
        failed = (istop >= 3) | ((istop == 2) & drifted)
        if not bool(failed.any()):
            return
        reasons = {3: "conlim is exceeded", 7: "maxiter is reached", 2: "rounding prevents it"}
        why = [text for code, text in reasons.items() if bool((istop[failed] == code).any())]
        worst = float((true / (norma * normr))[failed].max())
        fail(
            f"{type(self).__name__}: {int(failed.sum())} of {len(istop)} problems are not "
            f"solved ({', '.join(why)}), ||A^T r|| / (||A|| ||r||) is up to {worst:.1e} "
            f"(atol={self.atol:.1e}). Allow a larger tolerance, conlim or maxiter, or damp.",
            self.on_failure,
        )


def _rows(multiply: Product, unit: float, rows: Tensor) -> Tensor:
    return multiply(rows.T).T.contiguous() / unit


@dataclass
class _State(Systems):
    """The Golub-Kahan bidiagonalization and the two QR decompositions of its matrix."""

    itn: Tensor
    R: Tensor  # residuals b - A x
    u: Tensor
    v: Tensor
    alpha: Tensor
    h: Tensor  # directions, and their products with A
    h_bar: Tensor
    Ah: Tensor
    Ah_bar: Tensor
    turn: Tensor  # what h loses of its predecessor
    alpha_bar: Tensor
    zeta_bar: Tensor
    rho: Tensor
    rho_bar: Tensor
    cos_bar: Tensor
    sin_bar: Tensor
    squares: Tensor  # of the bidiagonal matrix
    largest: Tensor  # diagonal entries of its second factor
    smallest: Tensor

    @property
    def normar(self) -> Tensor:
        return self.zeta_bar.abs()

    @property
    def norma(self) -> Tensor:
        return self.squares.sqrt()

    def conda(self) -> Tensor:
        """Return the estimated condition number, one before there is any."""
        return (self.largest / self.smallest).where(self.largest > 0, 1.0)


def _unit(rows: Tensor) -> tuple[Tensor, Tensor]:
    size = norms(rows)
    return scaled(1 / size.where(size > 0, 1.0), rows), size


def _start(B: Tensor, u: Tensor, beta: Tensor, image: Tensor, damp: float) -> tuple[_State, Tensor]:
    v, alpha = _unit(image)
    zero, one = torch.zeros_like(beta), torch.ones_like(beta)
    rows, images = torch.zeros_like(v), torch.zeros_like(u)
    state = _State(
        place=torch.arange(len(B), device=B.device),
        itn=zero,
        R=B,
        u=u,
        v=v,
        alpha=alpha,
        h=v,
        h_bar=rows,
        Ah=images,
        Ah_bar=images,
        turn=zero,
        alpha_bar=alpha,
        zeta_bar=alpha * beta,
        rho=one,
        rho_bar=one,
        cos_bar=one,
        sin_bar=zero,
        squares=alpha**2 + damp**2,
        largest=zero,
        smallest=torch.full_like(one, torch.inf),
    )
    return state, torch.zeros_like(v)


def _advance(s: _State, forward: Product, backward: Product, damp: float) -> Tensor:
    """Do one iteration; return the step of x."""
    image = forward(s.v)
    s.u, beta = _unit(image - scaled(s.alpha, s.u))
    s.v, s.alpha = _unit(backward(s.u) - scaled(beta, s.v))
    s.Ah = image - scaled(s.turn, s.Ah)
    alpha_hat = torch.hypot(s.alpha_bar, torch.full_like(beta, damp))
    rho, rho_old = torch.hypot(alpha_hat, beta), s.rho
    cos, sin = alpha_hat / rho, beta / rho
    theta, s.alpha_bar = sin * s.alpha, cos * s.alpha
    theta_bar, diagonal = s.sin_bar * rho, s.cos_bar * rho
    rho_bar, rho_bar_old = torch.hypot(diagonal, theta), s.rho_bar
    s.cos_bar, s.sin_bar = diagonal / rho_bar, theta / rho_bar
    zeta, s.zeta_bar = s.cos_bar * s.zeta_bar, -s.sin_bar * s.zeta_bar
    turn_bar = theta_bar * rho / (rho_old * rho_bar_old)
    s.h_bar = s.h - scaled(turn_bar, s.h_bar)
    s.Ah_bar = s.Ah - scaled(turn_bar, s.Ah_bar)
    length = zeta / (rho * rho_bar)
    s.R = s.R - scaled(length, s.Ah_bar)
    s.turn = theta / rho
    s.h = s.v - scaled(s.turn, s.h)
    s.rho, s.rho_bar, s.itn = rho, rho_bar, s.itn + 1
    s.squares = s.squares + beta**2 + s.alpha**2 + damp**2
    s.largest, s.smallest = s.largest.maximum(rho_bar), s.smallest.minimum(rho_bar)
    return scaled(length, s.h_bar)
