"""Random expressions of operators equal those of their matrices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_algebra import SHAPES, Matrix, space
from torch import Tensor

from curvlinops import (
    BlockDiagonalLinearOperator,
    DiagonalLinearOperator,
    EighDecomposedLinearOperator,
    IdentityLinearOperator,
    KroneckerProductLinearOperator,
    ParameterSpace,
    StructuredLinearOperator,
    SubmatrixLinearOperator,
    TorchLinearOperator,
)

# repeatable, and without minutes for simpler examples of a failure
SETTINGS = settings(max_examples=100, deadline=None, derandomize=True, phases=[Phase.generate])
DOUBLE = torch.float64
Kron, Diag = KroneckerProductLinearOperator, DiagonalLinearOperator


class Pair(NamedTuple):
    """An operator, its matrix, and a number that its intermediate results do not exceed by much."""

    operator: Any
    matrix: Tensor
    scale: float


def pair(operator: Any, matrix: Tensor) -> Pair:
    return Pair(operator, matrix, float(matrix.norm()))


def randn(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=DOUBLE)


def definite(seed: int, n: int) -> Tensor:
    """Return a positive definite matrix, eigenvalues between 0.5 and 2."""
    Q = torch.linalg.qr(randn(seed, n, n)).Q
    return Q * torch.linspace(0.5, 2, n, dtype=DOUBLE) @ Q.T


def plain(dim: int) -> ParameterSpace:
    return ParameterSpace.flat(dim, DOUBLE, torch.device("cpu"))


def dense(seed: int, codomain: ParameterSpace, domain: ParameterSpace) -> Pair:
    matrix = randn(seed, codomain.dim, domain.dim)
    return pair(Matrix(matrix, domain, codomain), matrix)


def blocks(seed: int) -> Pair:
    B, A, d = definite(seed, 2), definite(seed + 1, 3), randn(seed, 3).abs() + 0.3
    operator = BlockDiagonalLinearOperator([Kron(B, A), Diag(d)])
    return pair(operator, torch.block_diag(torch.kron(B, A), d.diag()))


def kron(seed: int) -> Pair:
    B, A = randn(seed, 3, 3), randn(seed + 1, 3, 3)
    return pair(Kron(B, A), torch.kron(B, A))


def rectangular(seed: int) -> Pair:
    B, A = randn(seed, 2, 3), randn(seed + 1, 2, 3)
    return pair(Kron(B, A), torch.kron(B, A))


def diagonal(seed: int) -> Pair:
    named = {name: randn(seed, *shape).abs() + 0.3 for name, shape in SHAPES.items()}
    return pair(Diag(named), torch.cat([x.flatten() for x in named.values()]).diag())


def decomposed(seed: int) -> Pair:
    matrix = definite(seed, 9)
    return pair(EighDecomposedLinearOperator(*torch.linalg.eigh(matrix)), matrix)


def identity(of: ParameterSpace) -> Callable[[int], Pair]:
    return lambda seed: pair(IdentityLinearOperator(of), torch.eye(of.dim, dtype=DOUBLE))


#: Operators by their numbers of rows and columns, made from a seed.
LEAVES: dict[tuple[int, int], list[Callable[[int], Pair]]] = {
    (9, 9): [
        lambda seed: dense(seed, space(), space()),
        lambda seed: dense(seed, plain(9), space()),
        lambda seed: dense(seed, plain(9), plain(9)),
        *(blocks, kron, diagonal, decomposed, identity(plain(9)), identity(space())),
    ],
    (4, 9): [lambda seed: dense(seed, plain(4), space()), rectangular],
    (4, 4): [
        lambda seed: dense(seed, plain(4), plain(4)),
        lambda seed: pair(Diag(randn(seed, 4)), randn(seed, 4).diag()),
        identity(plain(4)),
    ],
}


@st.composite
def expressions(draw: Any, rows: int, columns: int, depth: int) -> Pair:
    """Draw a sum, product, multiple, power, adjoint, inverse, or an operator by itself."""

    def some(rows: int = rows, columns: int = columns) -> Pair:
        return draw(expressions(rows, columns, depth - 1))

    kinds = ["leaf", "adjoint"]
    if depth:
        kinds = ["sum", "difference", "product", "multiple", "quotient", "adjoint"]
        kinds += ["power", "damped", "inverse"] if rows == columns else []
    kind = draw(st.sampled_from(kinds))
    if kind == "adjoint" and depth:
        A, M, scale = some(columns, rows)
        return Pair(A.T, M.T, scale)
    if kind in ("leaf", "adjoint"):
        seed = draw(st.integers(0, 99))
        if (rows, columns) in LEAVES:
            return draw(st.sampled_from(LEAVES[rows, columns]))(seed)
        A, M, scale = draw(st.sampled_from(LEAVES[columns, rows]))(seed)
        return Pair(A.T, M.T, scale)
    if kind == "product":
        inner = draw(st.sampled_from([4, 9]))
        (A, M, a), (B, N, b) = some(rows, inner), some(inner, columns)
        return Pair(A @ B, M @ N, a * b)
    if kind in ("sum", "difference"):
        (A, M, a), (B, N, b) = some(), some()
        return Pair(*((A + B, M + N) if kind == "sum" else (A - B, M - N)), a + b)
    A, M, scale = some()
    eye = torch.eye(rows, dtype=DOUBLE)
    c = draw(st.sampled_from([-1.5, 0.5, torch.tensor(2.0)]))
    if kind == "multiple":
        return Pair(c * A, c * M, 2 * scale)
    if kind == "quotient":
        return Pair(A / c, M / c, 2 * scale)
    if kind == "power":
        exponent = draw(st.integers(0, 2))
        return Pair(A**exponent, torch.linalg.matrix_power(M, exponent), scale**exponent + 3)
    if kind == "inverse" and isinstance(A, StructuredLinearOperator) and A.self_adjoint:
        smallest = float(torch.linalg.eigvalsh(M)[0])
        if smallest > 1e-3 * scale:
            return Pair(A.inverse(0.1), (M + 0.1 * eye).inverse(), 3 * rows / smallest)
    return Pair(A.damped(0.3), M + 0.3 * eye, scale + 1)


SIZES = st.sampled_from([(9, 9), (9, 9), (4, 9), (9, 4), (4, 4)])
PAIRS = SIZES.flatmap(lambda size: expressions(*size, depth=3))


def check(found: Tensor, expected: Tensor, scale: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * (1 + scale))


@SETTINGS
@given(PAIRS)
def test_products(p: Pair):
    A, M, scale = p
    assert isinstance(A, TorchLinearOperator) and A.torch_dtype == DOUBLE
    assert A.shape == tuple(M.shape)
    right, left = randn(0, M.shape[1], 2), randn(1, M.shape[0], 2)
    for found, expected in (
        (A @ right, M @ right),
        (A @ right[:, 0], M @ right[:, 0]),
        (A.T @ left, M.T @ left),
        (left.T @ A, left.T @ M),
        (A.to_dense(), M),
        (A.T.to_dense(), M.T),
    ):
        check(found, expected, scale)
    with A.linearized():
        check(A @ right, M @ right, scale)
    if A.self_adjoint:
        check(M, M.T, scale)
        assert A.T is A


@SETTINGS
@given(PAIRS, st.data())
def test_submatrices(p: Pair, data: st.DataObject):
    """Of a submatrix, too."""
    S, M, scale = p
    for _ in range(2):
        chosen = []
        for size, of in zip(S.shape, (S.codomain, S.domain), strict=True):
            position = st.integers(0, size - 1)
            index = data.draw(st.lists(position, min_size=1, unique=True))
            places = index
            if not of.is_flat and data.draw(st.booleans()):
                index = data.draw(st.lists(st.sampled_from(of.names), min_size=1, unique=True))
                slices = [of.slice(name) for name in index]
                places = [i for part in slices for i in range(part.start, part.stop)]
            chosen.append((index, places))
        (rows, i), (columns, j) = chosen
        S, M = SubmatrixLinearOperator(S, rows, columns), M[i][:, j]
        x, y = randn(0, len(j), 2), randn(1, len(i), 2)
        for found, expected in ((S @ x, M @ x), (S.T @ y, M.T @ y), (S.to_dense(), M)):
            check(found, expected, scale)


@SETTINGS
@given(PAIRS.filter(lambda p: isinstance(p.operator, StructuredLinearOperator)))
def test_quantities_of_structured_results(p: Pair):
    A, M, scale = p
    check(A.frobenius_norm(), M.norm(), scale)
    if A.shape[0] != A.shape[1]:
        return
    check(A.trace(), M.trace(), scale)
    check(A.diagonal(), M.diag(), scale)
    if not A.self_adjoint:
        return
    values = torch.linalg.eigvalsh(M)
    check(A.eigvalsh().sort().values, values, scale)
    if float(values[0]) > 1e-3 * scale:
        largest = float(1 / values[0])
        check(A.logdet(), M.logdet(), scale * largest)
        check(A.inverse().to_dense(), M.inverse(), scale * largest**2)
        check((A**0.5).to_dense() @ (A**0.5).to_dense(), M, scale)
