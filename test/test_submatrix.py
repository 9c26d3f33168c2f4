"""Submatrices, by indices and by names."""

import matrices
import numpy as np
import problems
import pytest
import torch
from contract import CASES, EXACT, dense, error, matrix, vectors
from scipy.sparse.linalg import aslinearoperator, eigsh
from torch.utils.flop_counter import FlopCounterMode

from curvlinops import SubmatrixLinearOperator, TorchLinearOperator

PROBLEM = "mlp-ce-mean"
SQUARE = [name for name in EXACT if CASES[name].square]


def build(case: str = "hessian", problem: str = PROBLEM, **options) -> TorchLinearOperator:
    return CASES[case].build(problems.make(problem), **options)


def positions(operator: TorchLinearOperator, names: list[str]) -> list[int]:
    slices = [operator.domain.slice(name) for name in names]
    return [i for part in slices for i in range(part.start, part.stop)]


def indices(dim: int, seed: int, num: int = 7) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(dim, generator=generator)[:num].tolist()


@pytest.mark.parametrize("problem", [PROBLEM, "transformer-tied", "closure"])
@pytest.mark.parametrize("case", SQUARE)
def test_by_indices(case: str, problem: str):
    A, expected = build(case, problem), dense(case, problem)
    rows, columns = indices(A.shape[0], 0), indices(A.shape[1], 1, 5)
    S = SubmatrixLinearOperator(A, rows, columns)
    truth = expected[rows][:, columns]
    assert S.shape == (7, 5) and S.dtype == A.dtype
    assert error(matrix(S), truth) <= 1e-9
    assert error(S.T @ torch.eye(7, dtype=torch.float64), truth.T) <= 1e-9
    assert np.allclose(S @ np.eye(5), truth, atol=1e-9)


@pytest.mark.parametrize(
    "cache, mode", [("none", "forward"), ("none", "reverse"), ("graph", "reverse")]
)
@pytest.mark.parametrize("case", SQUARE)
def test_by_names(case: str, cache: str, mode: str):
    A, expected = build(case, cache=cache, autodiff=mode), dense(case, PROBLEM)
    first, *_, last = A.space.names
    names = A.space.names[1]
    for rows, columns in [([last, first], [names]), ([first], [last]), ([names], [names])]:
        S = SubmatrixLinearOperator(A, rows, columns)
        truth = expected[positions(A, rows)][:, positions(A, columns)]
        assert S.domain.names == columns and S.codomain.names == rows
        assert S.self_adjoint == (rows == columns)
        for v in (vectors(S), vectors(S, 3)):
            assert error(S @ v, truth @ v) <= 1e-9
        u = vectors(S, 2, rows=True)
        assert error(S.T @ u, truth.T @ u) <= 1e-9
        v = S.domain.split(vectors(S).unsqueeze(0))
        product = S @ {name: value[0] for name, value in v.items()}
        assert list(product) == rows
        assert product[rows[0]].shape == A.space.shapes[rows[0]]


@pytest.mark.parametrize("case", ["jacobian", "transposed", "gradients"])
def test_matrices_that_are_not_square(case: str):
    A, expected = build(case), dense(case, PROBLEM)
    rows, columns = indices(A.shape[0], 0, 4), indices(A.shape[1], 1, 4)
    S = SubmatrixLinearOperator(A, rows, columns)
    assert error(matrix(S), expected[rows][:, columns]) <= 1e-9
    assert error(matrix(S.T), expected[rows][:, columns].T) <= 1e-9
    if case == "jacobian":
        S = SubmatrixLinearOperator(A, rows, A.domain.names[:1])
        assert error(matrix(S), expected[rows][:, positions(A, A.domain.names[:1])]) <= 1e-9


def test_integers_of_numpy():
    picked = SubmatrixLinearOperator(
        np.arange(12.0).reshape(3, 4), list(np.arange(2)), [np.int64(3)]
    )
    assert (picked @ np.eye(1)).tolist() == [[3.0], [7.0]]


def test_mixed_and_nested():
    A, H = build(), dense("hessian", PROBLEM)
    a, _, c, d = A.space.names
    mixed = SubmatrixLinearOperator(A, [c], [3, 1])
    assert error(matrix(mixed), H[positions(A, [c])][:, [3, 1]]) <= 1e-9
    outer_rows, outer_columns = [d, a, c], indices(A.shape[1], 2, 9)
    outer = SubmatrixLinearOperator(A, outer_rows, outer_columns)
    part = H[positions(A, outer_rows)][:, outer_columns]
    for rows, columns in [([1, 0, 4], [8, 2]), ([c, d], [5]), ([c], range(9))]:
        inner = SubmatrixLinearOperator(outer, rows, columns)
        where = rows
        if isinstance(rows[0], str):
            where = [positions(A, outer_rows).index(i) for i in positions(A, rows)]
        assert inner.operator is A
        assert error(matrix(inner), part[where][:, list(columns)]) <= 1e-9
    deeper = SubmatrixLinearOperator(inner, [0, 2], [7])
    assert error(matrix(deeper), part[where][[0, 2]][:, [7]]) <= 1e-9


def test_of_the_algebra():
    A, H = build(), dense("hessian", PROBLEM)
    rows, columns = [A.space.names[0]], [A.space.names[2]]
    truth = (2 * H + H @ H)[positions(A, rows)][:, positions(A, columns)]
    assert error(matrix(SubmatrixLinearOperator(2 * A + A @ A, rows, columns)), truth) <= 1e-9


def test_block_diagonal():
    A = build(block_sizes=[2, 2])
    H = matrix(A)
    names = A.space.names
    for rows, columns in [(names[:2], names[2:]), (names[1:3], names[2:]), (names[:1], names[1:])]:
        S = SubmatrixLinearOperator(A, rows, columns)
        truth = H[positions(A, rows)][:, positions(A, columns)]
        assert (matrix(S) - truth).norm() <= 1e-10


def test_other_kinds_of_matrices():
    B = matrices.nonsymmetric()
    rows, columns = torch.tensor([3, 1]), np.array([0, 7, 5])
    truth = B[rows][:, columns]
    for A in (B, B.numpy(), aslinearoperator(B.numpy())):
        S = SubmatrixLinearOperator(A, rows, columns)
        assert torch.allclose(S @ torch.eye(3, dtype=torch.float64), truth)
        assert np.allclose(S.T @ np.eye(2), truth.T)


def test_scipy_takes_it():
    A, H = build(), dense("hessian", PROBLEM)
    rows = indices(A.shape[0], 3, 12)
    S = SubmatrixLinearOperator(A, rows, rows)
    assert S.self_adjoint and S.T is S
    largest = eigsh(S, 1, which="LA", return_eigenvectors=False)
    assert abs(largest[0] - torch.linalg.eigvalsh(H[rows][:, rows])[-1]) <= 1e-8


@pytest.mark.parametrize("case", ["hessian", "ggn"])
def test_computes_only_what_is_asked(case: str):
    A = build(case, cache="graph", autodiff="reverse")
    first, last = A.space.names[0], A.space.names[-1]

    def flops(operator: TorchLinearOperator) -> int:
        v = vectors(operator)
        operator @ v
        with FlopCounterMode(display=False) as counter:
            operator @ v
        return counter.get_total_flops()

    full = flops(A)
    blocks = {(r, c): flops(SubmatrixLinearOperator(A, [r], [c])) for r in (first, last)
              for c in (first, last)}  # fmt: skip
    assert all(count < full for count in blocks.values())
    assert blocks[last, last] < blocks[first, first]
    # by indices, too
    assert flops(SubmatrixLinearOperator(A, [A.shape[0] - 1], [A.shape[1] - 1])) < full


def test_errors():
    A = build()
    name, dim = A.space.names[0], A.shape[0]
    for idxs, kind, message in [
        ([dim], ValueError, f"row_idxs must lie between 0 and {dim - 1}, got \\[{dim}\\]"),
        ([0, -1], ValueError, "row_idxs must lie between"),
        ([3, 1, 3], ValueError, r"row_idxs has indices twice: \[3\]"),
        ([], ValueError, "at least one index or name"),
        (torch.tensor(3), ValueError, "at least one index or name"),
        ([1.0], TypeError, "must be integers, or names of parameters, got \\['float'\\]"),
        (torch.ones(dim, dtype=torch.bool), TypeError, "must be integers"),
        ([0, name], TypeError, "must be integers"),
        (name, TypeError, "got a string. Pass \\["),
        (["head"], ValueError, "unknown names \\['head'\\]; there are"),
        ([name, name], ValueError, "names twice"),
    ]:
        with pytest.raises(kind, match=message):
            SubmatrixLinearOperator(A, idxs, [0])
        with pytest.raises(kind, match=message.replace("row_idxs", "col_idxs")):
            SubmatrixLinearOperator(A, [0], idxs)
    with pytest.raises(ValueError, match="its vectors are flat"):
        SubmatrixLinearOperator(torch.eye(3), ["weight"], [0])
    with pytest.raises(TypeError, match="Expected a LinearOperator"):
        SubmatrixLinearOperator("A", [0], [0])
