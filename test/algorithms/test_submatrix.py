"""Submatrices, by indices and by names."""

import matrices
import numpy as np
import problems
import pytest
import torch
from contract import ALL, CASES, EXACT, dense, error, matrix, vectors
from torch.utils.flop_counter import FlopCounterMode

from curvlinops import (
    IdentityLinearOperator,
    SubmatrixLinearOperator,
    TorchLinearOperator,
)

PROBLEM = "mlp-ce-mean"
SQUARE = [name for name in EXACT if CASES[name].square]
NOT_SQUARE = ["jacobian", "transposed", "gradients"]


def build(case: str = "hessian", problem: str = PROBLEM, **options) -> TorchLinearOperator:
    return CASES[case].build(problems.make(problem), **options)


def positions(operator: TorchLinearOperator, names: list[str]) -> list[int]:
    slices = [operator.domain.slice(name) for name in names]
    return [i for part in slices for i in range(part.start, part.stop)]


def indices(dim: int, seed: int, num: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(dim, generator=generator)[:num].tolist()


@pytest.mark.parametrize(
    "case, problem",
    [(case, p) for case in SQUARE for p in (PROBLEM, "transformer-tied", "closure")]
    + [(case, PROBLEM) for case in NOT_SQUARE],
)
def test_by_indices(case: str, problem: str):
    A, expected = build(case, problem), dense(case, problem)
    rows, columns = indices(A.shape[0], 0, 5), indices(A.shape[1], 1, 4)
    S, truth = SubmatrixLinearOperator(A, rows, columns), expected[rows][:, columns]
    assert S.shape == (5, 4) and S.dtype == A.dtype
    assert error(matrix(S), truth) <= 1e-9 and error(matrix(S.T), truth.T) <= 1e-9
    assert np.allclose(S @ np.eye(4), truth, atol=1e-9)


@pytest.mark.parametrize("options", [{}, {"block_sizes": [2, 2]}], ids=str)
@pytest.mark.parametrize("case", SQUARE)
def test_by_names(case: str, options: dict):
    A, expected = build(case, **options), dense(case, PROBLEM)
    if "block_sizes" in options:
        half = A.space.slice(A.space.names[2]).start
        expected = torch.block_diag(expected[:half, :half], expected[half:, half:])
    first, *_, last = A.space.names
    names = A.space.names[1]
    for rows, columns in [([last, first], [names]), ([first], [last]), ([names], [names])]:
        S = SubmatrixLinearOperator(A, rows, columns)
        truth = expected[positions(A, rows)][:, positions(A, columns)]
        assert S.domain.names == columns and S.codomain.names == rows
        assert S.self_adjoint == (rows == columns)
        for v in (vectors(S), vectors(S, 3)):
            assert error(S @ v, truth @ v) <= 1e-9
            with S.linearized():
                assert error(S @ v, truth @ v) <= 1e-9
        u = vectors(S, 2, rows=True)
        assert error(S.T @ u, truth.T @ u) <= 1e-9
        product = S @ S.domain.split(vectors(S))
        assert list(product) == rows
        assert product[rows[0]].shape == A.space.shapes[rows[0]]


def test_mixed_and_nested():
    A, H = build(), dense("hessian", PROBLEM)
    a, _, c, d = A.space.names
    mixed = SubmatrixLinearOperator(A, [c], [3, 1])
    assert error(matrix(mixed), H[positions(A, [c])][:, [3, 1]]) <= 1e-9
    chosen = indices(A.shape[1], 2, 9)
    outer = SubmatrixLinearOperator(A, [d, a, c], chosen)
    for rows, columns in [([1, 0, 4], [8, 2]), ([c, d], [5])]:
        inner = SubmatrixLinearOperator(outer, rows, columns)
        places = positions(A, rows) if c in rows else [positions(A, [d, a, c])[i] for i in rows]
        truth = H[places][:, [chosen[i] for i in columns]]
        assert error(matrix(inner), truth) <= 1e-9 and error(matrix(inner.T), truth.T) <= 1e-9


#: Functions of the Hessian A, the Jacobian J, a dense matrix B and the identity, all of them
#: operators, or all tensors.
ALGEBRA = {
    "sum": lambda A, J, B, eye: A + 0.1 * eye,
    "sum with plain vectors": lambda A, J, B, eye: B + A,
    "multiple": lambda A, J, B, eye: -2 * A,
    "product": lambda A, J, B, eye: A @ (A + eye),
    "product with plain vectors": lambda A, J, B, eye: A @ B @ A,
    "power": lambda A, J, B, eye: (A @ A @ A) if isinstance(A, torch.Tensor) else A**3,
    "adjoint of a product": lambda A, J, B, eye: (2 * (A @ B) + A).T,
    "gram": lambda A, J, B, eye: J.T @ J,
    "adjoint": lambda A, J, B, eye: (3 * J).T @ (J + J),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_of_the_algebra(name: str):
    A, J = build(), build("jacobian")
    B = torch.randn(A.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    eye = torch.eye(A.shape[0], dtype=torch.float64)
    foreign = SubmatrixLinearOperator(B, range(len(B)), range(len(B)))  # as an operator of ours
    S = ALGEBRA[name](A, J, foreign, IdentityLinearOperator(A.space))
    truth = ALGEBRA[name](dense("hessian", PROBLEM), dense("jacobian", PROBLEM), B, eye)
    names = A.space.names
    for rows, columns in [(names[:1], names[2:3]), (names[3:0:-2], names[1:]), ([5, 0, 20], [3])]:
        sub = SubmatrixLinearOperator(S, rows, columns)
        places = [positions(A, i) if isinstance(i[0], str) else i for i in (rows, columns)]
        expected = truth[places[0]][:, places[1]]
        assert error(matrix(sub), expected) <= 1e-9
        assert error(matrix(sub.T), expected.T) <= 1e-9
    assert error(matrix(S.T), truth.T) <= 1e-9 and error(matrix(S.T.T), truth) <= 1e-9
    power = SubmatrixLinearOperator(A**0, names[:2], names[1:2])
    assert error(matrix(power), eye[positions(A, names[:2])][:, positions(A, names[1:2])]) == 0


@pytest.mark.parametrize("case", NOT_SQUARE)
def test_some_parameters_of_matrices_that_are_not_square(case: str):
    A, expected = build(case), dense(case, PROBLEM)
    J, expected = (A, expected) if A.codomain.is_flat else (A.T, expected.T)
    names = J.domain.names[2:0:-1]
    truth = expected[[4, 2]][:, positions(J, names)]
    for S in (
        SubmatrixLinearOperator(J, [4, 2], names),
        SubmatrixLinearOperator(J.T, names, [4, 2]).T,
    ):
        assert error(matrix(S), truth) <= 1e-9 and error(matrix(S.T), truth.T) <= 1e-9


def test_kinds_of_indices():
    B = matrices.nonsymmetric()
    for rows, columns in [
        (torch.tensor([3, 1]), np.array([0, 7, 5])),
        ([np.int64(3)], range(2)),
        (slice(1, 9, 3), slice(None)),
    ]:
        S, truth = SubmatrixLinearOperator(B, rows, columns), B.numpy()[rows][:, columns]
        assert np.allclose(S @ np.eye(S.shape[1]), truth)


def flops(operator: TorchLinearOperator) -> int:
    """Count those that depend on the vector."""
    v = vectors(operator)
    with operator.linearized():
        operator @ v
        with FlopCounterMode(display=False) as counter:
            operator @ v
    return counter.get_total_flops()


@pytest.mark.parametrize("case", ["hessian", "ggn"])
def test_computes_only_what_is_asked(case: str):
    A = build(case)
    (first, *_, last), full = A.space.names, flops(A)
    count = {
        (row, column): flops(SubmatrixLinearOperator(A, [row], [column]))
        for row in (first, last)
        for column in (first, last)
    }
    assert max(count.values()) < full and count[last, last] < count[first, first]
    # also by indices, and of sums, multiples and adjoints
    assert flops(SubmatrixLinearOperator(A, [A.shape[0] - 1], [A.shape[1] - 1])) < full
    eye = IdentityLinearOperator(A.space)
    for composed in (A + 0.1 * eye, 2 * A, (A + eye).T, eye + 2 * (A + eye)):
        assert flops(SubmatrixLinearOperator(composed, [last], [last])) == count[last, last]


def test_products_compute_only_what_is_asked():
    A = build()
    names, last = A.space.names, A.space.names[-1:]
    once = flops(SubmatrixLinearOperator(A, names, last))
    once += flops(SubmatrixLinearOperator(A, last, names))
    for product in (A @ A, A**2, (A @ (2 * A)).T):
        assert flops(SubmatrixLinearOperator(product, last, last)) == once < 2 * flops(A)
    J = build("jacobian")
    rows = range(4)
    for M, selection in [(J, (rows, last)), (J.T, (last, rows)), (J.T @ J, (last, last))]:
        assert flops(SubmatrixLinearOperator(M, *selection)) < flops(M)


@pytest.mark.parametrize("case", ["kfac", "ekfac"])
def test_blocks_of_approximations_are_multiplied_alone(case: str):
    A = ALL[case].build(problems.make(PROBLEM))
    first, last = A.space.names[0], A.space.names[-1]
    K, full = matrix(A), flops(A)
    for names in ([first], [last], [last, first]):
        S = SubmatrixLinearOperator(A, names, names)
        places = positions(A, names)
        assert error(matrix(S), K[places][:, places]) <= 1e-12
        assert flops(S) == flops(SubmatrixLinearOperator(A.structure, names, names)) < full


def test_errors():
    A = build()
    name, dim = A.space.names[0], A.shape[0]
    for idxs, kind, message in [
        ([dim], ValueError, f"row_idxs must lie between 0 and {dim - 1}, got \\[{dim}\\]"),
        ([0, -1], ValueError, "row_idxs must lie between"),
        ([3, 1, 3], ValueError, r"row_idxs has entries twice: \[3\]"),
        ([], ValueError, "at least one index or name"),
        (torch.tensor(3), ValueError, "at least one index or name"),
        ([1.0], ValueError, "must be integers, or names of parameters, got \\['float'\\]"),
        (torch.ones(dim, dtype=torch.bool), ValueError, "must be integers"),
        ([0, name], ValueError, "must be integers"),
        (name, TypeError, "got a string. Pass \\["),
        (["head"], ValueError, "unknown names \\['head'\\]. There are"),
        ([name, name], ValueError, "entries twice"),
    ]:
        with pytest.raises(kind, match=message):
            SubmatrixLinearOperator(A, idxs, [0])
        with pytest.raises(kind, match=message.replace("row_idxs", "col_idxs")):
            SubmatrixLinearOperator(A, [0], idxs)
    with pytest.raises(ValueError, match="its vectors are flat"):
        SubmatrixLinearOperator(torch.eye(3), ["weight"], [0])
    with pytest.raises(TypeError, match="Expected a LinearOperator"):
        SubmatrixLinearOperator("A", [0], [0])
