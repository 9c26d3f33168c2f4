"""Any operator and any matrix as one kind of object, and seeds."""

import pickle

import numpy as np
import problems
import pytest
import scipy.sparse as sp
import scipy.sparse.linalg as sla
import torch
from contract import CASES

from curvlinops import CGInverseLinearOperator, dottest, eigsh, lanczos_logdet, xdiag
from curvlinops.algorithms.matrix import Matrix
from curvlinops.support.rng import read_generator

DENSE = np.random.default_rng(0).standard_normal((5, 7))
CPU = torch.device("cpu")


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

#: PyTorch says so at the first such tensor.
BETA = pytest.mark.filterwarnings("ignore:.*tensor support is in beta")


@BETA
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_multiplies(kind: str, dtype: type):
    dense = DENSE.astype(dtype)
    A = Matrix(KINDS[kind](dense))
    assert kind == "no-dtype" or A.dtype == torch.from_numpy(dense).dtype
    dense = torch.from_numpy(dense).to(A.dtype)
    X, Y = torch.randn(7, 3, dtype=A.dtype), torch.randn(5, 2, dtype=A.dtype)
    copies = [A] if "vectors" in kind or kind in ("no-dtype", "broadcasting") else [
        A, pickle.loads(pickle.dumps(A))
    ]  # fmt: skip
    for copy in copies:
        torch.testing.assert_close(copy @ X, dense @ X)
        torch.testing.assert_close(copy.adjoint_matmul(Y), dense.T @ Y)
    assert (A.shape, A.device, A.num_products) == ((5, 7), CPU, 5)


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


def test_operators_of_the_package():
    operator = CASES["ggn"].build(problems.make("mlp-ce-all-mean"))
    A = Matrix(operator, square=True)
    X = torch.ones(operator.shape[0], 2, dtype=A.dtype)
    torch.testing.assert_close(A @ X, operator @ X)
    assert A.operator is operator


@pytest.mark.parametrize("x", [np.ones(7), np.ones((7, 1)), torch.ones(7), [1] * 7], ids=str)
def test_reads_vectors(x):
    assert torch.equal(Matrix(DENSE).read_rows(x), torch.ones(1, 7, dtype=torch.float64))


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: Matrix(DENSE, square=True), ValueError, r"square, got shape \[5, 7\]"),
        (lambda: Matrix(DENSE[0]), ValueError, "two axes"),
        (lambda: Matrix(1j * DENSE), TypeError, "real"),
        (lambda: Matrix(sp.csr_matrix(1j * DENSE)), TypeError, "real"),
        (lambda: Matrix("no"), TypeError, "got a str"),
        (lambda: Matrix(DENSE).read_rows(np.ones(5)), ValueError, r"expected \[7\]"),
        (lambda: Matrix(DENSE).read_rows(np.full(7, np.nan)), ValueError, "NaN"),
        (lambda: Matrix(DENSE).read_rows(1j * np.ones(7)), TypeError, "complex"),
        (lambda: Matrix(np.nan * DENSE) @ torch.ones(7, 1), ValueError, "not finite"),
        (
            lambda: (
                Matrix(sla.LinearOperator((3, 3), lambda x: 1j * x, dtype=float)) @ torch.ones(3, 1)
            ),
            TypeError,
            "complex",
        ),
    ],
)
def test_errors(make, error: type, message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("call", [lambda A: xdiag(A, 4), dottest])
def test_operators_without_a_transpose(call):
    A = sla.LinearOperator((9, 9), lambda x: 2 * x, dtype=float)
    with pytest.raises(NotImplementedError, match="does not have. Give it rmatvec"):
        call(A)


def test_seeds():
    def draw(**arguments):
        generator = read_generator(CPU, **({"seed": None, "generator": None} | arguments))
        return torch.randn(3, generator=generator)

    assert torch.equal(draw(seed=3), draw(seed=3))
    assert not torch.equal(draw(seed=3), draw(seed=4))
    generator = torch.Generator().manual_seed(0)
    assert not torch.equal(draw(generator=generator), draw(generator=generator))
    torch.manual_seed(0)
    first, second = draw(), draw()
    torch.manual_seed(0)
    assert torch.equal(draw(), first) and not torch.equal(first, second)


@pytest.mark.parametrize(
    "seed, generator, error",
    [
        (1, torch.Generator(), ValueError),
        (-1, None, ValueError),
        (0.5, None, ValueError),
        (None, 3, TypeError),
    ],
)
def test_errors_of_seeds(seed, generator, error: type):
    with pytest.raises(error, match="seed|generator"):
        read_generator(CPU, seed, generator)
