"""The algebra of operators: closed, native to PyTorch, and equal to that of the matrices."""

import copy
import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import LinearOperator, aslinearoperator
from torch import Tensor

from curvlinops import (
    IdentityLinearOperator,
    ParameterSpace,
    SubmatrixLinearOperator,
    TorchLinearOperator,
)
from curvlinops.linear_operator import operator as operator_module

SHAPES = {"weight": (2, 3), "bias": (2,), "scale": ()}
DOUBLE = torch.float64


class Short(TorchLinearOperator):
    """A square operator whose second tensor is too short."""

    def __init__(self):
        super().__init__(ParameterSpace({"a": (2, 3), "b": (4,)}), self_adjoint=True)

    def _apply(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": columns["a"], "b": columns["b"][:, :1]}


@pytest.mark.parametrize(
    "build",
    [
        lambda A: A,
        lambda A: A.T,
        lambda A: A + 2 * A,
        lambda A: A + IdentityLinearOperator(10),
        lambda A: IdentityLinearOperator(10) @ A,
        lambda A: A**2,
    ],
)
def test_products_of_other_shapes(build: Callable):
    """A user's own operator must return vectors of its space, also inside of sums."""
    operator = build(Short())
    for x in (np.ones(10), torch.ones(10, 3), [torch.ones(2, 3), torch.ones(4)]):
        with pytest.raises(ValueError, match=r"shapes {'b': \(1,\)} .* has {'b': \(4,\)}"):
            operator @ x


class Matrix(TorchLinearOperator):
    """A dense matrix, which counts its products."""

    def __init__(self, matrix: Tensor, domain: ParameterSpace, codomain: ParameterSpace):
        self.matrix, self.count = matrix, 0
        super().__init__(domain, codomain)

    def _apply(self, columns):
        self.count += 1
        return self.codomain.split_rows(self.domain.join_rows(columns) @ self.matrix.T)

    def _apply_adjoint(self, columns):
        return self.domain.split_rows(self.codomain.join_rows(columns) @ self.matrix)


class Ones(TorchLinearOperator):
    """A square matrix of ones."""

    def __init__(self, dim: int):
        space = ParameterSpace.flat(dim, torch.float32, torch.device("cpu"))
        super().__init__(space, self_adjoint=True)

    def _apply(self, columns):
        return {"": columns[""].sum(1, keepdim=True).expand_as(columns[""])}


class NoNumpy(Matrix):
    """Fails where a product leaves PyTorch."""

    def _matmat(self, x):
        raise AssertionError("a product went through numpy")

    _matvec = _rmatmat = _rmatvec = _matmat


def space(dtype: torch.dtype = DOUBLE) -> ParameterSpace:
    return ParameterSpace(SHAPES, dtype)


def square(seed: int = 0, kind: type = NoNumpy, dtype: torch.dtype = DOUBLE) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    return kind(torch.randn(9, 9, generator=generator).to(dtype), space(dtype), space(dtype))


def tall(seed: int = 0) -> Matrix:
    generator = torch.Generator().manual_seed(seed)
    outputs = ParameterSpace.flat(4, DOUBLE, torch.device("cpu"))
    return NoNumpy(torch.randn(4, 9, generator=generator, dtype=DOUBLE), space(), outputs)


def across(seed: int = 2) -> Matrix:
    """From parameters to as many plain numbers, as a Jacobian may be."""
    return NoNumpy(square(seed).matrix, space(), ParameterSpace.flat(9, DOUBLE, "cpu"))


A, B, J, F = square(0), square(1), tall(), across()
a, b, j, f = A.matrix, B.matrix, J.matrix, F.matrix
eye, PLAIN = torch.eye(9, dtype=DOUBLE), IdentityLinearOperator(9)

EXPRESSIONS = {  # beside the random ones in test_expressions.py
    "negative": (-A, -a),
    "zero plus an operator": (0.0 + A, a),
    "numpy multiple": (np.float32(2) * A, 2 * a),
    "transpose": (A.T, a.T),
    "adjoint": (J.H, j.T),
    "damped between two spaces": (F.damped(0.1), f + 0.1 * eye),
    "adjoint of a power between two spaces": ((F**3).T, (f @ f @ f).T),
    "nested": ((A + B) @ (A - 3 * B) / 2 - B**2, (a + b) @ (a - 3 * b) / 2 - b @ b),
    # the identity on plain vectors has no precision of its own
    "nested sum": (B + (0.1 * PLAIN + (PLAIN + A)), a + b + 1.1 * eye),
    "nested product": (J @ (0.1 * PLAIN) @ J.T, 0.1 * j @ j.T),
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_algebra_is_that_of_matrices(name: str):
    operator, expected = EXPRESSIONS[name]
    assert isinstance(operator, TorchLinearOperator) and operator.torch_dtype == DOUBLE
    assert operator.shape == tuple(expected.shape)
    right, left = (torch.eye(size, dtype=DOUBLE) for size in reversed(operator.shape))
    some = SubmatrixLinearOperator(operator, [1, 3], [0, 1])
    for found, matrix in (
        (operator @ right, expected),
        (operator.to_dense(), expected),
        (left @ operator, expected),
        (operator.T @ left, expected.T),
        (operator @ right[0], expected[:, 0]),
        (left[0] @ operator, expected[0]),
        (some.to_dense(), expected[[1, 3], :2]),
    ):
        torch.testing.assert_close(found, matrix, rtol=1e-12, atol=1e-12)
    if operator.self_adjoint:
        torch.testing.assert_close(expected, expected.T)
        assert operator.T is operator


@pytest.mark.parametrize("name", ["nested", "transpose", "adjoint"])
def test_dense_matrices_in_chunks(name: str, monkeypatch):
    operator, expected = EXPRESSIONS[name]
    monkeypatch.setattr(operator_module, "_DENSE_BLOCK", 4 * 9 * 8)
    torch.testing.assert_close(operator.to_dense(), expected)
    torch.testing.assert_close(operator.T.to_dense(), expected.T)


def test_matrices_that_are_too_large_to_write():
    large = IdentityLinearOperator(200_000) + Ones(200_000)
    with pytest.raises(ValueError, match=r"\[200000, 200000\] needs 149.0 GiB .* Submatrix"):
        large.to_dense()
    part = SubmatrixLinearOperator(large, range(3), range(3))
    torch.testing.assert_close(part.to_dense(), torch.ones(3, 3) + torch.eye(3))


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


def test_precision_of_the_identity_with_others():
    single = square(0, dtype=torch.float32)
    for operator in (single + PLAIN, PLAIN - single, single @ PLAIN, PLAIN @ PLAIN + PLAIN):
        assert operator.torch_dtype == torch.float32
    assert PLAIN.torch_dtype == torch.float32  # as before its use in sums


def test_self_adjointness_is_kept():
    identity = IdentityLinearOperator(space())
    for operator in (identity + identity, 3 * identity, -identity, identity**2, identity / 2):
        assert operator.self_adjoint


@pytest.mark.parametrize("adjoint", [False, True])
def test_foreign_operators(adjoint: bool):
    ours = square(0, Matrix)
    theirs = aslinearoperator(b.numpy())
    cases = {
        "sum": (ours + theirs, a + b),
        "reverse sum": (theirs + ours, a + b),
        "difference": (ours - theirs, a - b),
        "product": (ours @ theirs, a @ b),
        "reverse product": (theirs @ ours, b @ a),
    }
    for operator, expected in cases.values():
        assert isinstance(operator, LinearOperator)
        operator = operator.T if adjoint else operator
        expected = expected.T if adjoint else expected
        np.testing.assert_allclose(operator @ np.eye(9), expected.numpy(), atol=1e-12)


def test_is_a_scipy_operator():
    assert isinstance(A, LinearOperator) and A.to_scipy() is A
    assert A.dtype == np.float64 and A.torch_dtype == DOUBLE and A.device.type == "cpu"
    single = square(0, dtype=torch.float32)
    assert single.dtype == np.float32
    assert (A + single).dtype == (single @ A).dtype == np.float64
    torch.testing.assert_close((single + A) @ eye, a + single.matrix.double())


#: One or several vectors, made of an array of several.
VECTORS: dict[str, Callable] = {
    "one": lambda x: x[:, 0],
    "Fortran order": np.asfortranarray,
    "negative strides": lambda x: x[::-1],
    "slices": lambda x: np.repeat(x, 2, axis=1)[:, ::2],
    "float32": lambda x: x.astype(np.float32),
    "booleans": lambda x: x > 0,
    "tensor": lambda x: torch.tensor(x),
    "tensor of slices": lambda x: torch.tensor(np.repeat(x, 2, axis=1))[:, ::2],
    "tensor of integers": lambda x: (10 * torch.tensor(x)).long(),
}


@pytest.mark.parametrize("name", VECTORS)
def test_kinds_of_vectors(name: str):
    x = VECTORS[name](np.random.default_rng(0).standard_normal((9, 3)))
    operator, single = square(0, Matrix), x.ndim == 1
    if isinstance(x, np.ndarray):
        x.flags.writeable = False
    kind = type(x)
    wide = torch.from_numpy(x.astype(np.float64)) if kind is np.ndarray else x.double()
    forward, backward = (
        (operator.matvec, operator.rmatvec) if single else (operator.matmat, operator.rmatmat)
    )
    across = x @ operator.T if single else (x.T @ operator.T).T
    for y in (operator @ x, operator.dot(x), operator * x, across, forward(x)):
        assert type(y) is kind
        torch.testing.assert_close(torch.as_tensor(y), a @ wide)
    torch.testing.assert_close(torch.as_tensor(backward(x)), a.T @ wide)


def flatten(x: dict[str, Tensor]) -> Tensor:
    """Flatten row-major, columns last."""
    return torch.cat(
        [
            x[name].flatten(0, len(shape) - 1) if shape else x[name].unsqueeze(0)
            for name, shape in SHAPES.items()
        ]
    )


@pytest.mark.parametrize("columns", [(), (2,), (0,)])
def test_structured_vectors(columns: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    x = {
        name: torch.randn((*shape, *columns), generator=generator, dtype=DOUBLE)
        for name, shape in SHAPES.items()
    }
    flat = flatten(x)
    # names count, not the order
    out = A @ dict(reversed(x.items()))
    assert list(out) == list(SHAPES) and all(out[name].shape == x[name].shape for name in x)
    torch.testing.assert_close(flatten(out), a @ flat)
    as_list = A @ list(x.values())
    assert isinstance(as_list, list)
    for one, other in zip(as_list, out.values(), strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(J @ x, j @ flat)
    back = list(x.values()) @ A.T
    torch.testing.assert_close(back[0], as_list[0])


REPRESENTATIONS = {
    "Matrix + 0.1 * Identity": A.damped(0.1),
    "Matrix - (2 * Matrix)": A - 2 * B,
    "(2 * (Matrix + Matrix)) @ Matrix**2": 2 * (A + B) @ A**2,
    "Matrix.T @ Matrix": J.T @ J,
    "Matrix - 3 * Identity": A - 3 * PLAIN,
}


@pytest.mark.parametrize("formula", REPRESENTATIONS)
def test_representation_shows_operands(formula: str):
    name = type(REPRESENTATIONS[formula]).__name__
    expected = f"{name}({formula.replace('Matrix', 'NoNumpy')}, 9 x 9, float64, cpu)"
    assert repr(REPRESENTATIONS[formula]) == expected


def test_products_are_not_repeated():
    operator = square(0)
    operator @ torch.ones(9, 5)
    assert operator.count == 1


def test_copies():
    for twin in (pickle.loads(pickle.dumps(A)), copy.deepcopy(A)):
        torch.testing.assert_close(twin @ eye, a)


@pytest.mark.parametrize(
    "expression, error, match",
    [
        (lambda: A + J, ValueError, r"shapes \(9, 9\) and \(4, 9\) cannot be added"),
        (lambda: A @ J, ValueError, "cannot be multiplied"),
        (lambda: J**2, ValueError, "square operator"),
        (lambda: J.damped(0.1), ValueError, r"damped, got shape \(4, 9\)"),
        (lambda: A.damped("much"), ValueError, "delta must be a number"),
        (lambda: A.damped(float("inf")), ValueError, "delta must be a finite number"),
        (lambda: A + 0.1, TypeError, r"A.damped\(c\)"),
        (lambda: renamed_rows("bias", "weight", "scale") ** 2, ValueError, "another order"),
        (lambda: A**0.5, ValueError, "integer >= 0"),
        (lambda: A**-1, ValueError, "integer >= 0"),
        (lambda: 2j * A, TypeError, "complex"),
        (lambda: torch.tensor(2j) * A, TypeError, "complex"),
        (lambda: A * np.array(2j), TypeError, "complex"),
        (lambda: A / B, ValueError, "divided by a scalar"),
        (lambda: A @ 2, ValueError, "Scalar operands"),
        (lambda: A + renamed("w", "bias", "scale"), None, None),
        (lambda: A + renamed("bias", "weight", "scale"), ValueError, "another order"),
        (lambda: A + reshaped(), ValueError, "different parameters"),
    ],
)
def test_operands_that_do_not_fit(expression, error, match):
    if error is None:
        torch.testing.assert_close(expression() @ eye, 2 * a)
        return
    with pytest.raises(error, match=match):
        expression()


def renamed(*names: str) -> Matrix:
    other = ParameterSpace(dict(zip(names, SHAPES.values(), strict=True)), DOUBLE)
    return Matrix(a, other, other)


def renamed_rows(*names: str) -> Matrix:
    return Matrix(a, space(), renamed(*names).domain)


def reshaped() -> Matrix:
    other = ParameterSpace({"weight": (3, 2), "bias": (2,), "scale": ()}, DOUBLE)
    return Matrix(a, other, other)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3])
def test_parts_of_powers_between_two_spaces(exponent: int):
    S = SubmatrixLinearOperator(F**exponent, [7, 2], ["bias", "scale"])
    expected = torch.linalg.matrix_power(f, exponent)[[7, 2]][:, [6, 7, 8]]
    torch.testing.assert_close(S @ torch.eye(3, dtype=DOUBLE), expected)
    torch.testing.assert_close(S.T @ torch.eye(2, dtype=DOUBLE), expected.T)


def test_space():
    s = space()
    assert s.dim == 9 and s.names == list(SHAPES) and s.slice("bias") == slice(6, 8)
    flat = torch.arange(18.0, dtype=DOUBLE).reshape(2, 9)
    parts = s.split_rows(flat)
    assert parts["weight"].shape == (2, 2, 3) and parts["scale"].shape == (2,)
    torch.testing.assert_close(s.join_rows(parts), flat)
    # row-major, in the given order
    torch.testing.assert_close(parts["weight"][0], torch.arange(6.0, dtype=DOUBLE).reshape(2, 3))


def test_vectors_in_the_shapes_of_the_parameters():
    s = space()
    v = torch.arange(9.0, dtype=DOUBLE)
    truth = {"weight": [[0.0, 1, 2], [3, 4, 5]], "bias": [6.0, 7], "scale": 8.0}
    for same in (v, v.numpy(), v.flip(0).numpy()[::-1]):
        assert {name: x.tolist() for name, x in s.split(same).items()} == truth
    assert s.split(v)["weight"].data_ptr() == v.data_ptr()
    columns = torch.stack([v, -v], dim=1)
    parts = s.split(columns)
    assert {n: tuple(x.shape) for n, x in parts.items()} == {n: (*SHAPES[n], 2) for n in SHAPES}
    for sign, k in [(1, 0), (-1, 1)]:
        assert {n: (sign * x[..., k]).tolist() for n, x in parts.items()} == truth
    for vectors in (v, columns, columns[:, :1], columns[:, :0], torch.ones(9, 9)):
        assert torch.equal(s.join(s.split(vectors)), vectors)
    assert torch.equal(s.join(dict(reversed(s.split(v).items()))), v)
    flat = ParameterSpace.flat(9, DOUBLE, torch.device("cpu"))
    assert torch.equal(flat.join(flat.split(columns)), columns)


def test_vectors_that_are_not_of_the_space():
    s = space()
    for shape in [(2, 9), (8,), (9, 2, 1), ()]:
        with pytest.raises(ValueError, match=r"expected \[9\] or \[9, K\]"):
            s.split(torch.ones(shape))
    parts = s.split(torch.ones(9, 2))
    with pytest.raises(ValueError, match=r"Got tensors for \['scale'\], expected \['weight'"):
        s.join({"scale": parts["scale"]})
    for wrong in (torch.ones(2), torch.ones(2, 3), torch.ones(3, 2)):
        with pytest.raises(ValueError, match=r"'bias' has shape .* expected \[2\], or with"):
            s.join(parts | {"bias": wrong})
