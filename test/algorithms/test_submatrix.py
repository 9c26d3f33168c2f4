"""Submatrices of operators on data; those of sums, products and powers are in test_algebra.py."""

from itertools import product

import matrices
import numpy as np
import problems
import pytest
import torch
from contract import ALL, CASES, EXACT, dense, error, matrix, pairs, places, vectors
from tables import core
from torch.utils.flop_counter import FlopCounterMode

from curvlinops import (
    IdentityLinearOperator,
    ParameterSpace,
    SubmatrixLinearOperator,
    TorchLinearOperator,
)

PROBLEM, OTHERS = "mlp-ce-mean", ["transformer-tied", "closure"]
BLOCKS = {"block_sizes": [2, 2]}


def build(case: str = "hessian", problem: str = PROBLEM, **options) -> TorchLinearOperator:
    return ALL[case].build(problems.make(problem), **options)


def selections(space: ParameterSpace) -> list[list]:
    """Return lists of indices, and of names where there are any."""
    indices = torch.randperm(space.dim, generator=torch.Generator().manual_seed(0))[:5].tolist()
    if space.is_flat:
        return [indices]
    first, second, *_, last = space.names
    return [indices, [last, first], [second], [last]]


@pytest.mark.parametrize(
    "case, problem, options",
    core(
        [
            *((case, PROBLEM, {}) for case in EXACT),
            *(("gradients", problem, {}) for problem in OTHERS),
            *(("hessian", PROBLEM, BLOCKS), ("hessian", "closure", {})),
        ],
        [
            *((*pair, {}) for pair in pairs(EXACT, OTHERS)),
            *((case, PROBLEM, BLOCKS) for case in EXACT if CASES[case].square),
        ],
    ),
)
def test_by_indices_and_names(case: str, problem: str, options: dict):
    A, expected = build(case, problem, **options), dense(case, problem)
    if options:
        half = A.space.slice(A.space.names[2]).start
        expected = torch.block_diag(expected[:half, :half], expected[half:, half:])
    combined = product if problem == PROBLEM else zip
    for rows, columns in combined(selections(A.codomain), selections(A.domain)):
        S = SubmatrixLinearOperator(A, rows, columns)
        truth = expected[places(A.codomain, rows)][:, places(A.domain, columns)]
        assert S.shape == tuple(truth.shape) and S.dtype == A.dtype
        assert S.self_adjoint == (CASES[case].square and rows == columns)
        v, V, u = vectors(S), vectors(S, 3), vectors(S, 2, rows=True)
        assert error(S @ v, truth @ v) <= 1e-9 and error(S.T @ u, truth.T @ u) <= 1e-9
        with S.linearized():
            assert error(S @ v, truth @ v) <= 1e-9 and error(S @ V, truth @ V) <= 1e-9
        if isinstance(rows[0], str) and isinstance(columns[0], str):
            found = S @ S.domain.split(vectors(S))
            assert {name: x.shape for name, x in found.items()} == S.codomain.shapes
            assert list(found) == rows and S.domain.names == columns


def test_kinds_of_indices():
    B = matrices.nonsymmetric()
    for rows, columns in [
        (torch.tensor([3, 1]), np.array([0, 7, 5])),
        ([np.int64(3)], range(2)),
        (slice(1, 9, 3), slice(None)),
    ]:
        S, truth = SubmatrixLinearOperator(B, rows, columns), B.numpy()[rows][:, columns]
        assert np.allclose(S @ np.eye(S.shape[1]), truth)


def flops(A: TorchLinearOperator, rows: list | None = None, columns: list | None = None) -> int:
    """Count those of a product with a submatrix that depend on the vector."""
    S = A if rows is None else SubmatrixLinearOperator(A, rows, columns)
    v = vectors(S)
    with S.linearized():
        S @ v
        with FlopCounterMode(display=False) as counter:
            S @ v
    return counter.get_total_flops()


@pytest.mark.parametrize("case", ["hessian", "ggn"])
def test_computes_only_what_is_asked(case: str):
    A = build(case)
    first, last, full = A.space.names[:1], A.space.names[-1:], flops(A)
    count = {(i, j): flops(A, [i], [j]) for i, j in product(first + last, repeat=2)}
    least = count[last[0], last[0]]
    assert max(count.values()) < full and least < count[first[0], first[0]]
    # also by indices, and of sums, multiples and adjoints
    assert flops(A, [A.shape[0] - 1], [A.shape[1] - 1]) < full
    eye = IdentityLinearOperator(A.space)
    for composed in (A + 0.1 * eye, 2 * A, (A + eye).T, eye + 2 * (A + eye)):
        assert flops(composed, last, last) == least


def test_products_compute_only_what_is_asked():
    A, J = build(), build("jacobian")
    names, last = A.space.names, A.space.names[-1:]
    once = flops(A, names, last) + flops(A, last, names)
    for square in (A @ A, A**2, (A @ (2 * A)).T):
        assert flops(square, last, last) == once < 2 * flops(A)
    rows = list(range(4))
    for M, selection in [(J, (rows, last)), (J.T, (last, rows)), (J.T @ J, (last, last))]:
        assert flops(M, *selection) < flops(M)


@pytest.mark.parametrize("case", ["kfac", "ekfac"])
def test_blocks_of_approximations_are_multiplied_alone(case: str):
    A = build(case)
    first, last = A.space.names[0], A.space.names[-1]
    K, full = matrix(A), flops(A)
    for names in ([first], [last], [last, first]):
        chosen = places(A.space, names)
        found = matrix(SubmatrixLinearOperator(A, names, names))
        assert error(found, K[chosen][:, chosen]) <= 1e-12
        assert flops(A, names, names) == flops(A.structure, names, names) < full


def test_errors():
    A = build()
    name, dim = A.space.names[0], A.shape[0]
    for idxs, kind, message in [
        ([dim], ValueError, f"row_idxs must lie between 0 and {dim - 1}, got \\[{dim}\\]"),
        ([0, -1], ValueError, "row_idxs must lie between"),
        ([3, 1, 3], ValueError, r"row_idxs has entries twice: \[3\]"),
        (3, ValueError, "row_idxs must be a list of at least one index or name"),
        ([], ValueError, "at least one index or name"),
        (slice(5, 5), ValueError, "at least one index or name"),
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
