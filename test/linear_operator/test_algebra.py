"""The algebra of operators: closed, native to PyTorch, and equal to that of the matrices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from contract import places
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from structured_cases import ALL as STRUCTURED
from structured_cases import DOUBLE, Blocks, Diag, Identity, Kron, eye, positive, randn
from torch import Tensor

from curvlinops import (
    CGInverseLinearOperator,
    LSMRInverseLinearOperator,
    NeumannInverseLinearOperator,
    ParameterSpace,
    StructuredLinearOperator,
    SubmatrixLinearOperator,
    TorchLinearOperator,
)
from curvlinops.linear_operator import operator as operator_module

SHAPES = {"weight": (2, 3), "bias": (2,), "scale": ()}
SPACE = ParameterSpace(SHAPES, DOUBLE)


class Matrix(TorchLinearOperator):
    """A dense matrix, which counts its products."""

    def __init__(self, matrix: Tensor, domain: ParameterSpace, codomain: ParameterSpace):
        self.matrix, self.count = matrix, 0
        super().__init__(domain, codomain)

    def _apply(self, columns):
        self.count += 1
        return columns @ self.matrix.T

    def _transposed(self):
        return type(self)(self.matrix.T, self.codomain, self.domain)


class NoNumpy(Matrix):
    """Fails where a product leaves PyTorch."""

    def _matmat(self, x):
        raise AssertionError("a product went through numpy")

    _matvec = _rmatmat = _rmatvec = _matmat


def flat(dim: int) -> ParameterSpace:
    return ParameterSpace.flat(dim, DOUBLE, torch.device("cpu"))


def dense(seed: int, codomain: ParameterSpace = SPACE, domain: ParameterSpace = SPACE) -> Matrix:
    return NoNumpy(randn(codomain.dim, domain.dim, seed=seed), domain, codomain)


# --- expressions: random ones, and a few that these do not have


class Pair(NamedTuple):
    """An operator, its matrix, and a number that its intermediate results do not exceed by much."""

    operator: Any
    matrix: Tensor
    scale: float


Leaf = Callable[[int], tuple[TorchLinearOperator, Tensor]]


def _dense(codomain: ParameterSpace, domain: ParameterSpace) -> Leaf:
    return lambda seed: ((A := dense(seed, codomain, domain)), A.matrix)


def _kron(rows: int, columns: int) -> Leaf:
    def leaf(seed: int) -> tuple[TorchLinearOperator, Tensor]:
        B, A = randn(rows, columns, seed=seed), randn(rows, columns, seed=seed + 1)
        return Kron(B, A), torch.kron(B, A)

    return leaf


def _diagonal(seed: int) -> tuple[TorchLinearOperator, Tensor]:
    d = positive(9, seed=seed)
    return Diag(SPACE.split(d)), d.diag()


#: Operators by their numbers of rows and columns, made from a seed.
LEAVES: dict[tuple[int, ...], list[Leaf]] = {
    (9, 9): [
        *(_dense(SPACE, SPACE), _dense(flat(9), SPACE), _dense(flat(9), flat(9))),
        *(_kron(3, 3), _diagonal),
        lambda seed: (Identity(flat(9)), eye(9)),
        lambda seed: (Identity(SPACE), eye(9)),
    ],
    (4, 9): [_dense(flat(4), SPACE), _kron(2, 3)],
    (4, 4): [lambda seed: (Diag(randn(4, seed=seed)), randn(4, seed=seed).diag())],
}
for _make in STRUCTURED.values():
    _size = tuple(_make()[1].shape)
    LEAVES.setdefault(_size, [_dense(flat(_size[0]), flat(_size[0]))])
    LEAVES[_size].append(lambda seed, make=_make: make())


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
        seed, is_known = draw(st.integers(0, 99)), (rows, columns) in LEAVES
        make = draw(st.sampled_from(LEAVES[(rows, columns) if is_known else (columns, rows)]))
        A, M = make(seed)
        return Pair(*((A, M) if is_known else (A.T, M.T)), float(M.norm()))
    if kind == "product":
        inner = draw(st.sampled_from([4, 9])) if {rows, columns} <= {4, 9} else rows
        (A, M, a), (B, N, b) = some(rows, inner), some(inner, columns)
        return Pair(A @ B, M @ N, a * b)
    if kind in ("sum", "difference"):
        (A, M, a), (B, N, b) = some(), some()
        return Pair(*((A + B, M + N) if kind == "sum" else (A - B, M - N)), a + b)
    A, M, scale = some()
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
            return Pair(A.inverse(0.1), (M + 0.1 * eye(rows)).inverse(), 3 * rows / smallest)
    return Pair(A.damped(0.3), M + 0.3 * eye(rows), scale + 1)


# repeatable, and without minutes for simpler examples of a failure
SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, phases=[Phase.generate])
SIZES = 3 * [(9, 9), (4, 9), (9, 4)] + [*LEAVES]
PAIRS = st.tuples(st.sampled_from(SIZES), st.integers(1, 3)).flatmap(
    lambda drawn: expressions(*drawn[0], depth=drawn[1])
)


def check(found: Tensor, expected: Tensor, scale: float) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11 * (1 + scale))


def check_products(A: TorchLinearOperator, M: Tensor, scale: float) -> None:
    assert isinstance(A, TorchLinearOperator) and A.torch_dtype == DOUBLE
    assert A.shape == tuple(M.shape)
    right, left = randn(M.shape[1], 2), randn(M.shape[0], 2)
    for found, expected in (
        (A @ right, M @ right),
        (A @ right[:, 0], M @ right[:, 0]),
        (A.T @ left, M.T @ left),
        (left.T @ A, left.T @ M),
        (left[:, 0] @ A, left[:, 0] @ M),
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
@given(PAIRS)
def test_random_expressions(p: Pair):
    check_products(*p)


@SETTINGS
@given(PAIRS, st.data())
def test_submatrices(p: Pair, data: st.DataObject):
    """Of a submatrix, too."""
    S, M, scale = p
    for _ in range(2):
        chosen = []
        for space in (S.codomain, S.domain):
            by_name = not space.is_flat and data.draw(st.booleans())
            each = st.sampled_from(space.names) if by_name else st.integers(0, space.dim - 1)
            chosen.append(data.draw(st.lists(each, min_size=1, unique=True)))
        i, j = map(places, (S.codomain, S.domain), chosen)
        S, M = SubmatrixLinearOperator(S, *chosen), M[i][:, j]
        x, y = randn(len(j), 2), randn(len(i), 2)
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


A, B, J, F, PLAIN = dense(0), dense(1), dense(0, flat(4)), dense(2, flat(9)), Identity(9)
a, b, j, f = A.matrix, B.matrix, J.matrix, F.matrix
K, L, d = randn(3, 3), randn(3, 3, seed=1), positive(3)
DK, KD = Kron(Diag(d), K), Kron(K, Diag(d))
EXPRESSIONS = {
    "negative": (-A, -a),
    "zero plus an operator": (0.0 + A, a),
    "numpy multiple": (np.float32(2) * A, 2 * a),
    "adjoint": (J.H, j.T),
    "third power": (A**3, a @ a @ a),
    "third power between two spaces": (F**3, f @ f @ f),
    # the identity on plain vectors has no precision of its own
    "nested sum": (B + (0.1 * PLAIN + (PLAIN + A)), a + b + 1.1 * eye(9)),
    "nested product": (J @ (0.1 * PLAIN) @ J.T, 0.1 * j @ j.T),
    "identity factors": (Kron(K, Identity(3)) @ Kron(Identity(3), L), torch.kron(K, L)),
    "diagonal and dense factors": (DK @ KD, torch.kron(d.diag() @ K, K @ d.diag())),
    "sum with a multiple of itself": (DK + 2 * DK, 3 * torch.kron(d.diag(), K)),
    "multiple of the identity": ((0.1 * PLAIN) @ KD, 0.1 * torch.kron(K, d.diag())),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_expressions(name: str, monkeypatch):
    monkeypatch.setattr(operator_module, "_DENSE_BLOCK", 4 * 9 * 8)  # dense ones in chunks
    operator, matrix = EXPRESSIONS[name]
    check_products(operator, matrix, scale=100)
    part = SubmatrixLinearOperator(operator, [1, 3], [0, 1])
    check(part.to_dense(), matrix[[1, 3], :2], scale=100)
    check(part.T.to_dense(), matrix[[1, 3], :2].T, scale=100)


#: A positive definite matrix with the names of SPACE, and operators that need all of their vectors.
POSITIVE = Diag(SPACE.split(positive(9))) + 0.01 * (A @ A.T)
SPD = POSITIVE.to_dense()
NAMED = {n: x for n, x in EXPRESSIONS.items() if not (x[0].domain.is_flat or x[0].codomain.is_flat)}
NAMED |= {
    "product of four": (A @ POSITIVE @ B @ A, a @ SPD @ b @ a),
    "identity": (Identity(SPACE), eye(9)),
    "square of a diagonal": (Diag(SPACE.split(d9 := positive(9))) ** 2, d9.diag() ** 2),
    "eigenvectors": (Diag(SPACE.split(d9)).eigh(), d9.diag()),
    "blocks": (
        Blocks([Diag(d9[:3]), Kron(SPD[3:, 3:])], SPACE),
        torch.block_diag(d9[:3].diag(), SPD[3:, 3:]),
    ),
    "CG": (CGInverseLinearOperator(POSITIVE, rtol=1e-13), SPD.inverse()),
    "Neumann": (
        NeumannInverseLinearOperator(Identity(SPACE) + 0.01 * A, 1, rtol=1),
        eye(9) - 0.01 * a,
    ),
    "LSMR": (
        LSMRInverseLinearOperator(POSITIVE + 0.1 * A, atol=0, btol=0),
        (SPD + 0.1 * a).inverse(),
    ),
}


@pytest.mark.parametrize("names", [["bias"], ["scale", "weight"], ["weight", "bias", "scale"]])
@pytest.mark.parametrize("name", NAMED)
def test_some_tensors_of_vectors_and_products(name: str, names: list[str]):
    """Tensors that are not given are zero, in products with the adjoint, too."""
    operator, matrix = NAMED[name]
    columns = torch.cat([torch.arange(9)[SPACE.slice(n)] for n in names])
    for wanted in (["scale"], ["weight", "bias"]):
        rows = torch.cat([torch.arange(9)[SPACE.slice(n)] for n in wanted])
        part = SubmatrixLinearOperator(operator, wanted, names)
        check(part.to_dense(), matrix[rows][:, columns], scale=100)
        check(part.T.to_dense(), matrix[rows][:, columns].T, scale=100)


def test_precision_of_the_identity_with_others():
    single = Matrix(a.float(), SPACE.to(dtype=torch.float32), SPACE.to(dtype=torch.float32))
    for operator in (single + PLAIN, PLAIN - single, single @ PLAIN, PLAIN @ PLAIN + PLAIN):
        assert operator.torch_dtype == torch.float32
    assert PLAIN.torch_dtype == torch.float32  # as before its use in sums
    assert single.dtype == np.float32
    assert (A + single).dtype == (single @ A).dtype == np.float64
    torch.testing.assert_close((single + A) @ eye(9), a + single.matrix.double())


def test_self_adjointness_is_kept():
    S = SubmatrixLinearOperator(Identity(SPACE), range(9), range(9))
    for operator in (S + S, 3 * S, -S, S**2, S / 2):
        assert operator.self_adjoint


REPRESENTATIONS = {
    "Matrix + 0.1 * Identity": A.damped(0.1),
    "Matrix - (2 * Matrix)": A - 2 * B,
    "(2 * (Matrix + Matrix)) @ Matrix**2": 2 * (A + B) @ A**2,
    "Matrix @ Matrix": J.T @ J,
    "Matrix - 3 * Identity": A - 3 * PLAIN,
}


@pytest.mark.parametrize("formula", REPRESENTATIONS)
def test_representation_shows_operands(formula: str):
    name = type(REPRESENTATIONS[formula]).__name__
    expected = f"{name}({formula.replace('Matrix', 'NoNumpy')}, 9 x 9, float64, cpu)"
    assert repr(REPRESENTATIONS[formula]) == expected


@pytest.mark.parametrize("adjoint", [False, True])
def test_foreign_operators(adjoint: bool):
    ours, theirs = Matrix(a, SPACE, SPACE), aslinearoperator(b.numpy())
    for operator, expected in (
        (ours + theirs, a + b),
        (theirs + ours, a + b),
        (ours - theirs, a - b),
        (ours @ theirs, a @ b),
        (theirs @ ours, b @ a),
    ):
        assert isinstance(operator, LinearOperator)
        operator, expected = (operator.T, expected.T) if adjoint else (operator, expected)
        np.testing.assert_allclose(operator @ np.eye(9), expected.numpy(), atol=1e-12)


def test_is_a_scipy_operator():
    assert isinstance(A, LinearOperator) and A.to_scipy() is A
    assert A.dtype == np.float64 and A.torch_dtype == DOUBLE and A.device.type == "cpu"


# --- what is refused


class Short(TorchLinearOperator):
    """A square operator whose products are too short."""

    def __init__(self):
        super().__init__(ParameterSpace({"a": (2, 3), "b": (4,)}), self_adjoint=True)

    def _apply(self, columns: Tensor) -> Tensor:
        return columns[:, :7]


@pytest.mark.parametrize(
    "build",
    [
        lambda A: A,
        lambda A: A.T,
        lambda A: A + 2 * A,
        lambda A: A + Identity(10),
        lambda A: Identity(10) @ A,
        lambda A: A**2,
    ],
)
def test_products_of_other_shapes(build: Callable):
    """A user's own operator must return vectors of its space, also inside of sums."""
    operator = build(Short())
    for x in (np.ones(10), torch.ones(10, 3), [torch.ones(2, 3), torch.ones(4)]):
        with pytest.raises(ValueError, match=r"Short has shape \[\d, 7\], expected \[\d, 10\]"):
            operator @ x


def test_matrices_that_are_too_large_to_write():
    every = slice(None)
    large = SubmatrixLinearOperator(Identity(200_000), every, every)
    with pytest.raises(ValueError, match=r"\[200000, 200000\] needs 149.0 GiB .* Submatrix"):
        large.to_dense()
    part = SubmatrixLinearOperator(large, range(3), range(3))
    torch.testing.assert_close(part.to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    "name, remedy",
    [
        ("trace", r"xtrace\(A, n\) or hutchinson_trace"),
        ("diagonal", r"xdiag\(A, n\) or hutchinson_diag.*GGNDiagonalLinearOperator"),
        ("frobenius_norm", "hutchinson_squared_fro"),
        ("logdet", "lanczos_logdet"),
        ("det", "lanczos_logdet"),
        ("eigh", r"eigsh\(A, k\)"),
        ("inverse", "CGInverseLinearOperator"),
    ],
)
def test_methods_that_need_structure(name: str, remedy: str):
    for operator in (A, A + B, 2 * A, A @ B, A**2, J.T):
        assert not hasattr(operator, name)
        with pytest.raises(
            AttributeError, match=rf"has no '{name}'. Only operators with .* {remedy}"
        ):
            getattr(operator, name)
    assert hasattr(PLAIN, name)


def test_other_names_of_equal_shapes():
    names = ParameterSpace({"w": (2, 3), "bias": (2,), "scale": ()}, DOUBLE)
    torch.testing.assert_close((A + dense(0, names, names)) @ eye(9), 2 * a)


OTHER_ORDER = ParameterSpace(dict(reversed(SHAPES.items())), DOUBLE)
OTHER_SHAPES = ParameterSpace(SHAPES | {"weight": (3, 2)}, DOUBLE)


@pytest.mark.parametrize(
    "expression, error, match",
    [
        (lambda: A + J, ValueError, r"shapes \(9, 9\) and \(4, 9\) cannot be added"),
        (lambda: A @ J, ValueError, "cannot be multiplied"),
        (lambda: J**2, ValueError, "square operator"),
        (lambda: J.damped(0.1), ValueError, r"damped, got shape \(4, 9\)"),
        (lambda: A.damped("much"), ValueError, "delta must be a finite number"),
        (lambda: A.damped(float("inf")), ValueError, "delta must be a finite number"),
        (lambda: J.damped({"*": 0.1}), TypeError, "add DiagonalLinearOperator"),
        (lambda: A + 0.1, TypeError, r"A.damped\(c\)"),
        (lambda: dense(0, OTHER_ORDER) ** 2, ValueError, "another order"),
        (lambda: A**0.5, ValueError, "integer >= 0"),
        (lambda: A**-1, ValueError, "integer >= 0"),
        (lambda: 2j * A, TypeError, "complex"),
        (lambda: torch.tensor(2j) * A, TypeError, "complex"),
        (lambda: A * np.array(2j), TypeError, "complex"),
        (lambda: A / B, ValueError, "divided by a scalar"),
        (lambda: A @ 2, ValueError, "Scalar operands"),
        (lambda: A + dense(0, OTHER_ORDER), ValueError, "another order"),
        (lambda: A + dense(0, OTHER_SHAPES), ValueError, "different parameters"),
    ],
)
def test_operands_that_do_not_fit(expression, error, match):
    with pytest.raises(error, match=match):
        expression()


# --- vectors, and their spaces


def test_products_are_not_repeated():
    operator = dense(0)
    operator @ torch.ones(9, 5)
    assert operator.count == 1


#: One or several vectors, made of an array of several.
VECTORS: dict[str, Callable] = {
    "one": lambda x: x[:, 0],
    "Fortran order": np.asfortranarray,
    "negative strides": lambda x: x[::-1],
    "slices": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "broadcast": lambda x: np.broadcast_to(x[:, :1], (9, 3)),
    "float32": lambda x: x.astype(np.float32),
    "float16": lambda x: x.astype(np.float16),
    "int8": lambda x: (10 * x).astype(np.int8),
    "booleans": lambda x: x > 0,
    "tensor": lambda x: torch.tensor(x),
    "tensor of slices": lambda x: torch.tensor(np.repeat(x, 2, axis=1))[:, ::2],
    "tensor of integers": lambda x: (10 * torch.tensor(x)).long(),
    "expanded tensor": lambda x: torch.ones(()).expand(9),
}


@pytest.mark.parametrize("name", VECTORS)
def test_kinds_of_vectors(name: str):
    x = VECTORS[name](np.random.default_rng(0).standard_normal((9, 3)))
    operator, single, kind = Matrix(a, SPACE, SPACE), x.ndim == 1, type(x)
    if kind is np.ndarray:
        x.flags.writeable = False
    wide = torch.from_numpy(x.astype(np.float64)) if kind is np.ndarray else x.double()
    forward, backward = (
        (operator.matvec, operator.rmatvec) if single else (operator.matmat, operator.rmatmat)
    )
    across = x @ operator.T if single else (x.T @ operator.T).T
    for y in (operator @ x, operator.dot(x), operator * x, across, forward(x)):
        assert type(y) is kind
        torch.testing.assert_close(torch.as_tensor(y), a @ wide)
    torch.testing.assert_close(torch.as_tensor(backward(x)), a.T @ wide)


@pytest.mark.parametrize("columns", [(), (2,), (0,)])
def test_structured_vectors(columns: tuple[int, ...]):
    v = randn(9, *columns)
    x = SPACE.split(v)
    # names count, not the order
    out = A @ dict(reversed(x.items()))
    assert list(out) == list(SHAPES) and all(out[name].shape == x[name].shape for name in x)
    torch.testing.assert_close(SPACE.join(out), a @ v)
    torch.testing.assert_close(J @ x, j @ v)
    as_list = A @ list(x.values())
    assert isinstance(as_list, list)
    torch.testing.assert_close(as_list, list(out.values()))
    torch.testing.assert_close(list(x.values()) @ A.T, as_list)


def test_vectors_in_the_shapes_of_the_parameters():
    assert SPACE.dim == 9 and SPACE.names == list(SHAPES) and SPACE.slice("bias") == slice(6, 8)
    v = torch.arange(9.0, dtype=DOUBLE)
    truth = {"weight": [[0.0, 1, 2], [3, 4, 5]], "bias": [6.0, 7], "scale": 8.0}  # row-major
    for same in (v, v.numpy(), v.flip(0).numpy()[::-1]):
        assert {name: x.tolist() for name, x in SPACE.split(same).items()} == truth
    assert SPACE.split(v)["weight"].data_ptr() == v.data_ptr()
    columns = torch.stack([v, -v], dim=1)
    parts, rows = SPACE.split(columns), SPACE.views(columns.T)
    assert {n: tuple(x.shape) for n, x in parts.items()} == {n: (*SHAPES[n], 2) for n in SHAPES}
    for sign, k in [(1, 0), (-1, 1)]:
        assert {n: (sign * x[..., k]).tolist() for n, x in parts.items()} == truth
        assert {n: (sign * x[k]).tolist() for n, x in rows.items()} == truth
    for vectors in (v, columns, columns[:, :1], columns[:, :0], torch.ones(9, 9)):
        assert torch.equal(SPACE.join(SPACE.split(vectors)), vectors)
    assert torch.equal(SPACE.join(dict(reversed(SPACE.split(v).items()))), v)
    assert torch.equal(flat(9).join(flat(9).split(columns)), columns)


def test_vectors_that_are_not_of_the_space():
    for shape in [(2, 9), (8,), (9, 2, 1), ()]:
        with pytest.raises(ValueError, match=r"expected \[9\] or \[9, K\]"):
            SPACE.split(torch.ones(shape))
    parts = SPACE.split(torch.ones(9, 2))
    with pytest.raises(ValueError, match=r"Got tensors for \['scale'\], expected \['weight'"):
        SPACE.join({"scale": parts["scale"]})
    for wrong, error in (
        (torch.ones(2), "unequal .* 'bias': 'one vector'"),
        (torch.ones(2, 3), "unequal .* 'bias': 3"),
        (torch.ones(3, 2), r"'bias' has shape .* expected \[2\] or \[2, K\]"),
    ):
        with pytest.raises(ValueError, match=error):
            SPACE.join(parts | {"bias": wrong})
