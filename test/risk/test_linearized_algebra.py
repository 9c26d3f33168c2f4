"""``linearized()`` enters what an operator is made of, and solvers enter it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from curvlinops import (
    CGInverseLinearOperator,
    IdentityLinearOperator,
    LanczosApproximateLogSpectrumCached,
    LanczosApproximateSpectrumCached,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    ParameterSpace,
    SubmatrixLinearOperator,
    TorchLinearOperator,
    eigsh,
    hutchinson_diag,
    hutchinson_squared_fro,
    hutchinson_trace,
    hutchpp_trace,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    lanczos_logdet,
    trace_function,
    xdiag,
    xnystrace,
    xtrace,
)
from curvlinops.linear_operator import operator as operator_module

DIM = 8
v = torch.ones(DIM, dtype=torch.float64)


class Counting(TorchLinearOperator):
    """A diagonal matrix that counts its products, and in how many it was linearized."""

    def __init__(self, self_adjoint: bool = True):
        super().__init__(ParameterSpace({"": (DIM,)}, torch.float64), self_adjoint=self_adjoint)
        self.diagonal = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)
        self.depth = self.entries = self.products = self.linearized_products = 0

    def _apply(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        self.products += 1
        self.linearized_products += self.depth > 0
        return {"": columns[""] * self.diagonal}

    def _apply_adjoint(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return self._apply(columns)

    @contextmanager
    def linearized(self) -> Iterator[None]:
        self.depth, self.entries = self.depth + 1, self.entries + 1
        try:
            yield
        finally:
            self.depth -= 1


Build = Callable[[TorchLinearOperator, TorchLinearOperator], TorchLinearOperator]

#: Operators made of one operator, or of two, and how many.
OPERANDS: dict[str, tuple[Build, int]] = {
    "multiple": (lambda A, B: -2 * A, 1),
    "power": (lambda A, B: A**2, 1),
    "power zero": (lambda A, B: A**0, 0),
    "adjoint": (lambda A, B: B.T @ A, 2),
    "damped": (lambda A, B: A.damped(0.1), 1),
    "sum": (lambda A, B: A + B, 2),
    "sum with structure": (lambda A, B: A + IdentityLinearOperator(DIM), 1),
    "product": (lambda A, B: A @ B, 2),
    "submatrix": (lambda A, B: SubmatrixLinearOperator(A, [0, 2], [1, 3]), 1),
    "CG": (lambda A, B: CGInverseLinearOperator(A), 1),
    "MINRES": (lambda A, B: MINRESInverseLinearOperator(A, damping=1.0), 1),
    "LSMR": (lambda A, B: LSMRInverseLinearOperator(A), 1),
    "Neumann": (lambda A, B: NeumannInverseLinearOperator(A), 1),
    "CG, preconditioned": (lambda A, B: CGInverseLinearOperator(A, preconditioner=B), 2),
    "Neumann, preconditioned": (
        lambda A, B: NeumannInverseLinearOperator(A, preconditioner=B.T),
        2,
    ),
    "function as preconditioner": (
        lambda A, B: CGInverseLinearOperator(A, preconditioner=torch.clone),
        1,
    ),
    "matrix as preconditioner": (
        lambda A, B: CGInverseLinearOperator(A, preconditioner=torch.eye(DIM)),
        1,
    ),
    "nested": (
        lambda A, B: SubmatrixLinearOperator((A @ B.T - 2 * A) ** 3, [0, 1], [1]).T,
        2,
    ),
    "inverse of an inverse": (
        lambda A, B: CGInverseLinearOperator(CGInverseLinearOperator(A) + B),
        2,
    ),
}


@pytest.mark.parametrize("build, number", OPERANDS.values(), ids=OPERANDS)
def test_operands_are_linearized(build: Build, number: int):
    parts = Counting(), Counting(self_adjoint=False)
    expected = [i < number for i in range(2)]
    operator = build(*parts)
    with operator.linearized() as entered:
        assert entered is None
        assert [part.depth > 0 for part in parts] == expected
        with pytest.raises(ZeroDivisionError), operator.linearized():
            raise ZeroDivisionError
        assert [part.depth > 0 for part in parts] == expected
    assert [part.depth for part in parts] == [0, 0]


SOLVERS: dict[str, Callable[[TorchLinearOperator], object]] = {
    "CG": lambda A: CGInverseLinearOperator(A) @ v,
    "MINRES": lambda A: MINRESInverseLinearOperator(A).solve(v),
    "LSMR": lambda A: LSMRInverseLinearOperator(A) @ v,
    "LSMR, info": lambda A: LSMRInverseLinearOperator(A).matvec_with_info(v),
    "Neumann": lambda A: NeumannInverseLinearOperator(A, rtol=1) @ v,
    "eigsh": lambda A: eigsh(A, 2),
    "hutchinson_trace": lambda A: hutchinson_trace(A, 2),
    "hutchinson_diag": lambda A: hutchinson_diag(A, num_matvecs=2),
    "hutchinson_squared_fro": lambda A: hutchinson_squared_fro(A, 2),
    "hutchpp_trace": lambda A: hutchpp_trace(A, 6),
    "xtrace": lambda A: xtrace(A, 6),
    "xdiag": lambda A: xdiag(A, 6),
    "xnystrace": lambda A: xnystrace(A, 6),
    "trace_function": lambda A: trace_function(A, torch.exp, 3),
    "lanczos_logdet": lambda A: lanczos_logdet(A),
    "spectrum": lambda A: lanczos_approximate_spectrum(A=A, ncv=3),
    "log spectrum": lambda A: lanczos_approximate_log_spectrum(A, 3),
    "cached spectrum": lambda A: LanczosApproximateSpectrumCached(A, 3).approximate_spectrum(),
    "cached log spectrum": lambda A: LanczosApproximateLogSpectrumCached(
        A, 3
    ).approximate_log_spectrum(),
}


@pytest.mark.parametrize("solve", SOLVERS.values(), ids=SOLVERS)
def test_solvers_linearize(solve: Callable[[TorchLinearOperator], object]):
    A = Counting()
    solve(A)
    assert A.products == A.linearized_products > 0 and A.depth == 0


def test_preconditioners_are_linearized():
    A, M = Counting(), Counting()
    CGInverseLinearOperator(A, preconditioner=M) @ v
    assert M.products == M.linearized_products > 0


@pytest.mark.parametrize("columns, entries", [(DIM, 0), (DIM - 1, 1)])
def test_dense_matrices_of_several_chunks(
    columns: int, entries: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(operator_module, "_DENSE_BLOCK", columns * DIM * 8)
    A = Counting()
    assert torch.equal(A.to_dense(), A.diagonal.diag())
    assert A.entries == entries and A.linearized_products == entries * A.products
