"""Operators and matrices of all kinds: algorithms take them alike."""

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch

from curvlinops import (
    CGInverseLinearOperator,
    MINRESInverseLinearOperator,
    SubmatrixLinearOperator,
    TorchLinearOperator,
    bilinear_form,
    dottest,
    eigsh,
    hutchinson_trace,
    lanczos_logdet,
    quadratic_form,
    xdiag,
)

DENSE = np.random.default_rng(0).standard_normal((5, 7))


class OnlyVectors(sla.LinearOperator):
    """Takes vectors ``[D]`` only, as SciPy's solvers pass them."""

    def __init__(self, A: np.ndarray):
        self.matrix = A
        super().__init__(A.dtype, A.shape)

    def _matvec(self, x: np.ndarray) -> np.ndarray:
        assert x.ndim == 1
        return self.matrix @ x

    def _rmatvec(self, x: np.ndarray) -> np.ndarray:
        assert x.ndim == 1
        return self.matrix.T @ x


class Columns(OnlyVectors):
    """Takes several vectors, too."""

    def _matmat(self, X: np.ndarray) -> np.ndarray:
        return self.matrix @ X


def broadcasting(A: np.ndarray) -> sla.LinearOperator:
    """Return an operator whose functions broadcast columns ``[D, 1]`` to a wrong result."""
    products = (lambda x, M=M: np.sum(M * x, axis=1) for M in (A, A.T))
    return sla.LinearOperator(A.shape, *products, dtype=A.dtype)


KINDS = {
    "numpy": lambda A: A,
    "tensor": torch.from_numpy,
    "sparse-tensor": lambda A: torch.from_numpy(A).to_sparse(),
    "csr-tensor": lambda A: torch.from_numpy(A).to_sparse_csr(),
    "csr": sp.csr_matrix,
    "coo-array": sp.coo_array,
    "scipy": sla.aslinearoperator,
    "no-dtype": lambda A: sla.LinearOperator(A.shape, lambda x: A @ x, lambda x: A.T @ x),
    "only-vectors": OnlyVectors,
    "sum-of-only-vectors": lambda A: OnlyVectors(A / 2) + OnlyVectors(A / 2),
    "transpose-of-only-vectors": lambda A: OnlyVectors(A.T).T,
    "columns": Columns,
    "broadcasting": broadcasting,
}
#: Their functions cannot be pickled.
NOT_PICKLED = ["no-dtype", "broadcasting"]


def wrapped(A) -> TorchLinearOperator:
    """Return a matrix of any kind as an operator of the package."""
    return SubmatrixLinearOperator(A, slice(None), slice(None))


@pytest.mark.filterwarnings("ignore:.*tensor support is in beta")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_multiplies(kind: str, dtype: type):
    dense = DENSE.astype(dtype)
    A = wrapped(KINDS[kind](dense))
    assert A.shape == (5, 7) and (kind == "no-dtype" or A.dtype == dtype)
    dense = torch.from_numpy(dense).to(A.torch_dtype)
    X, Y = torch.randn(7, 3, dtype=A.torch_dtype), torch.randn(5, 2, dtype=A.torch_dtype)
    for copy in [A] if kind in NOT_PICKLED else [A, pickle.loads(pickle.dumps(A))]:
        torch.testing.assert_close(copy @ X, dense @ X)
        torch.testing.assert_close(copy.T @ Y, dense.T @ Y)


SPD = DENSE.T @ DENSE / 40 + np.diag(np.linspace(0.2, 0.5, 7))
ALGORITHMS = {
    "eigsh": lambda A: eigsh(A, 2, seed=0).eigenvalues,
    "cg": lambda A: CGInverseLinearOperator(A, rtol=1e-10) @ np.ones((7, 2)),
    "xdiag": lambda A: xdiag(A, 4, seed=0),
    "logdet": lambda A: lanczos_logdet(A, 7, seed=0),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_operators_that_take_vectors_only(name: str):
    np.testing.assert_allclose(ALGORITHMS[name](OnlyVectors(SPD)), ALGORITHMS[name](SPD))


@pytest.mark.parametrize("x0", [np.ones(7), np.ones((7, 1)), torch.ones(7), [1] * 7], ids=str)
def test_start_vectors_of_all_kinds(x0):
    solution = CGInverseLinearOperator(SPD, x0=x0).solve(SPD @ np.ones(7))
    assert int(solution.iterations) == 0 and np.array_equal(solution.x, np.ones(7))


#: What reads vectors of the user's: matrices ``[7, 7]``, and a vector that is read.
READERS: dict[str, Callable] = {
    "eigsh, v0": lambda x: eigsh(SPD, 1, v0=x),
    "CG, x0": lambda x: CGInverseLinearOperator(SPD, x0=x).solve(np.ones(7)),
    "CG, x0 of solve": lambda x: CGInverseLinearOperator(SPD).solve(np.ones(7), x0=x),
    "MINRES, x0": lambda x: MINRESInverseLinearOperator(SPD, x0=x).solve(np.ones(7)),
    "quadratic_form": lambda x: quadratic_form(SPD, x, 0.1),
    "bilinear_form, left": lambda x: bilinear_form(SPD, x, np.ones(7), 0.1),
    "bilinear_form, right": lambda x: bilinear_form(SPD, np.ones(7), x, 0.1),
}


@pytest.mark.parametrize("name", READERS)
def test_vectors_with_a_graph_are_refused(name: str):
    """Results have no derivative with respect to these."""
    x = torch.linspace(1, 2, 7, dtype=torch.float64)
    READERS[name](x)
    with pytest.raises(ValueError, match=r"requires gradients, but only products.*\.detach\(\)"):
        READERS[name](x.requires_grad_())


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: hutchinson_trace(DENSE, 3), ValueError, r"square, got shape \[5, 7\]"),
        (lambda: dottest(DENSE[0]), ValueError, "two axes"),
        (lambda: dottest(1j * DENSE), TypeError, "real"),
        (lambda: dottest(torch.from_numpy(1j * DENSE)), TypeError, "real"),
        (lambda: dottest(sp.csr_matrix(1j * DENSE)), TypeError, "real"),
        (lambda: dottest("no"), TypeError, "got a str"),
        (lambda: dottest(np.nan * DENSE), ValueError, "not finite"),
        (lambda: eigsh(SPD, v0=np.ones(5)), ValueError, r"expected \[7\]"),
        (lambda: eigsh(SPD, v0=np.full(7, np.nan)), ValueError, "NaN"),
        (lambda: eigsh(SPD, v0=1j * np.ones(7)), TypeError, "complex"),
        (
            lambda: eigsh(sla.LinearOperator((3, 3), lambda x: 1j * x, dtype=float), 1),
            TypeError,
            "product with the matrix is complex",
        ),
        (
            lambda: xdiag(sla.LinearOperator((9, 9), lambda x: 2 * x, dtype=float), 4),
            NotImplementedError,
            "does not have. Give it rmatvec",
        ),
        (lambda: dottest(DENSE, seed=0.5), ValueError, "seed"),
        (lambda: dottest(DENSE, generator=3), TypeError, "generator"),
    ],
)
def test_errors(call, error: type, message: str):
    with pytest.raises(error, match=message):
        call()
