"""PyTorch's default device is where users make tensors; the package's lie where the data is."""

import numpy as np
import problems
import pytest
import torch
from contract import ALL, vectors

from curvlinops import (
    CGInverseLinearOperator,
    IdentityLinearOperator,
    KroneckerProductLinearOperator,
    LSMRInverseLinearOperator,
    MINRESInverseLinearOperator,
    NeumannInverseLinearOperator,
    SubmatrixLinearOperator,
    dottest,
    eigsh,
    hutchinson_diag,
    hutchpp_trace,
    lanczos_approximate_log_spectrum,
    lanczos_approximate_spectrum,
    lanczos_logdet,
    xdiag,
    xnystrace,
    xtrace,
)

A = np.diag(np.linspace(0.5, 1.5, 9))
B = np.ones(9)
CPU = {"device": "cpu", "dtype": torch.float64}
CALLS = {
    "eigsh": lambda: eigsh(A, 2, seed=0).eigenvalues,
    "spectrum": lambda: lanczos_approximate_spectrum(A, 4, seed=0)[1],
    "log spectrum": lambda: lanczos_approximate_log_spectrum(A, 4, seed=0)[1],
    "logdet": lambda: lanczos_logdet(A, 4, seed=0),
    "diagonal": lambda: hutchinson_diag(A, 4, seed=0),
    "hutchpp": lambda: hutchpp_trace(A, 3, seed=0),
    "xtrace": lambda: xtrace(A, 4, "gaussian", rtol=0.1, seed=0),
    "xdiag": lambda: xdiag(A, 4, seed=0),
    "xnystrace": lambda: xnystrace(A, 4, "gaussian", seed=0),
    "dottest": lambda: dottest(A, seed=0),
    "submatrix": lambda: SubmatrixLinearOperator(A, [0, 3], np.arange(9)) @ B,
    "submatrix of one": lambda: (
        SubmatrixLinearOperator(SubmatrixLinearOperator(A, [0, 3], range(9)), [1], [2, 3]) @ B[:2]
    ),
    "power of the identity": lambda: (IdentityLinearOperator(9, 4.0) ** 0.5) @ B,
    "damped Kronecker product": lambda: (
        KroneckerProductLinearOperator(2 * torch.eye(3, **CPU), torch.ones(3, 3, **CPU)).inverse(
            0.1
        )
        @ B
    ),
    "cg": lambda: CGInverseLinearOperator(A, preconditioner=A) @ B,
    "minres": lambda: MINRESInverseLinearOperator(A) @ B,
    "lsmr": lambda: LSMRInverseLinearOperator(A) @ B,
    "neumann": lambda: NeumannInverseLinearOperator(A) @ B,
}


@pytest.mark.parametrize("name", CALLS)
def test_algorithms(name: str):
    expected = np.asarray(CALLS[name]())
    # stands for a graphics card: what lies there by mistake has no values
    with torch.device("meta"):
        found = np.asarray(CALLS[name]())
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("problem", ["mlp-ce-mean", "tokens-bce-sum"])
@pytest.mark.parametrize("case", ALL)
def test_operators(case: str, problem: str):
    operator = ALL[case].build(problems.make(problem))
    v, p = vectors(operator), problems.make(problem)
    with torch.device("meta"):
        found = ALL[case].build(p) @ v
    torch.testing.assert_close(found, operator @ v)
