"""Structured operators: every method of every one against the dense matrix."""

import pickle
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import scipy.sparse.linalg as sla
import torch
from contract import error
from structured_cases import (
    A2,
    ALL,
    B2,
    CHANGES,
    CPU,
    DOUBLE,
    GA,
    GB,
    PLAIN,
    QUANTITIES,
    A,
    B,
    Blocks,
    C,
    Diag,
    Identity,
    Kron,
    Sum,
    a,
    b,
    damped,
    definite,
    eye,
    kron,
    network,
    one_block,
    positive,
    randn,
    sliced,
    stacked,
    weight_and_bias,
)
from tables import core
from torch import Tensor, nn

from curvlinops import (
    EighDecomposedLinearOperator,
    GGNDiagonalLinearOperator,
    ParameterSpace,
    ShiftedLinearOperator,
    StructuredLinearOperator,
    SubmatrixLinearOperator,
    TorchLinearOperator,
    load,
)
from curvlinops.structured import factor as factor_module
from curvlinops.structured.factor import Factor, small_inverses
from curvlinops.structured.layout import Layout, ParameterView

#: Of these, what is made is of another kind.
KINDS = [
    "itself",
    "damped twice",
    "scaled after damping",
    "inverse",
    "damped inverse",
    "power zero",
]
KINDS += ["eigendecomposition", "decomposition, damped", "float32"]


@pytest.mark.parametrize("name, change", core(product(ALL, KINDS), product(ALL, CHANGES)))
def test_everything(name: str, change: str):
    """Every quantity of every operator, also of those made from it."""
    operator, matrix = CHANGES[change](*ALL[name]())
    assert isinstance(operator, StructuredLinearOperator) and operator.self_adjoint
    single = operator.torch_dtype == torch.float32
    for label, (quantity, expected) in QUANTITIES.items():
        found = quantity(operator)
        assert found.dtype == operator.torch_dtype
        torch.testing.assert_close(
            found.double(),
            expected(matrix),
            rtol=1e-3 if single else 1e-8,
            atol=1e-4 if single else 1e-10,
            msg=lambda text, label=label: f"{label}: {text}",
        )


@pytest.mark.parametrize("name", ALL)
def test_operators_never_change(name: str):
    """Results may be changed in place, and share no memory with the operator."""
    operator, matrix = ALL[name]()
    for change in ("itself", "damped", "inverse", "eigendecomposition", "saved"):
        changed, expected = CHANGES[change](operator, matrix)
        for quantity, _ in QUANTITIES.values():
            quantity(changed).add_(100)
        torch.testing.assert_close(changed.to_dense(), expected)
    torch.testing.assert_close(operator.to_dense(), matrix)
    torch.testing.assert_close(operator.eigh().to_dense(), matrix)


@pytest.mark.parametrize("name", ALL)
def test_samples_have_the_covariance(name: str):
    operator, matrix = ALL[name]()
    draws, generator = 20_000, torch.Generator().manual_seed(0)
    x = operator.sample(generator, draws)
    assert x.shape == (len(matrix), draws)
    variances = matrix.diag().outer(matrix.diag()) + matrix**2
    error = (x @ x.T / draws - matrix) / (variances / draws).sqrt()
    assert error.abs().max() < 5
    torch.testing.assert_close(
        operator.sample(torch.Generator().manual_seed(3)),
        operator.sample(torch.Generator().manual_seed(3), 1)[:, 0],
    )
    torch.testing.assert_close(operator.sample(seed=3), operator.sample(None, 1, seed=3)[:, 0])


# --- algebra


NAMED = ParameterSpace({"weight": (2, 4), "bias": (4,)}, DOUBLE)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("flat", [Kron(B, A), Diag(positive(12)), Identity(12, 3.0)])
def test_sums_with_the_identity_keep_its_names(flat: StructuredLinearOperator, order: int):
    matrix = flat.to_dense().double() + 0.1 * eye(12)
    first, second = [flat, 0.1 * Identity(NAMED)][::order]
    total = pickle.loads(pickle.dumps(first + second))
    assert isinstance(total, StructuredLinearOperator)
    x = {name: randn(*shape) for name, shape in NAMED.shapes.items()}
    vector = torch.cat([value.flatten() for value in x.values()])
    for operator, expected in (
        (total, matrix),
        (total.inverse(), matrix.inverse()),
        (first + second + total, 2 * matrix),
    ):
        found = operator @ x
        assert {name: tuple(value.shape) for name, value in found.items()} == NAMED.shapes
        joined = torch.cat([value.flatten() for value in found.values()])
        torch.testing.assert_close(joined, expected @ vector)
    torch.testing.assert_close(total.logdet(), matrix.logdet())
    torch.testing.assert_close(total.diagonal(), matrix.diagonal())


FORMS = {
    "itself": lambda op: op,
    "damped": lambda op: damped(op, 2.0),
    "decomposed": lambda op: op.eigh(),
    "transposed": lambda op: op.T,
}


@pytest.mark.extensive
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ALL)
def test_sums_and_products_of_any_two(name: str, form: str):
    first, M = ALL[name]()
    first, M = FORMS[form](first), M + 2.0 * eye(len(M)) * (form == "damped")
    for second, N in (two for make in ALL.values() for two in [make()] if two[1].shape == M.shape):
        if not (first.space.is_flat or second.space.is_flat) and first.space != second.space:
            continue
        for operator, matrix in (
            (first + second, M + N),
            (second.eigh() - first, N - M),
            (first @ second, M @ N),
            (first + first, 2 * M),
            (first @ first, M @ M),
        ):
            torch.testing.assert_close(operator @ eye(len(M)), matrix)
            torch.testing.assert_close(operator.T @ eye(len(M)), matrix.T)
            if isinstance(operator, StructuredLinearOperator):
                torch.testing.assert_close(operator.to_dense(), matrix)
                torch.testing.assert_close(operator.frobenius_norm(), matrix.norm())
                torch.testing.assert_close(operator.trace(), matrix.trace())


ONE, TWO, M1, M2 = Kron(B, A), Kron(B2, A2), kron(B, A), kron(B2, A2)
EIGH, DIAGONALS = ONE.eigh(), Kron(Diag(b), Diag(a))
BLOCKS = Blocks({"a": Kron(A), "b": Diag(b)})
OTHERS = Blocks({"a": Kron(A2), "b": 2 * Identity(3)})
#: Sums and products, and whether their structure is kept.
COMBINED = {
    "two products": (ONE + TWO, M1 + M2, True),
    "the same twice": (ONE + ONE, 2 * M1, True),
    "diagonal factors twice": (DIAGONALS + DIAGONALS, 2 * kron(b.diag(), a.diag()), True),
    "a difference": (ONE - 0.5 * ONE, M1 / 2, True),
    "one factor in common": (ONE + Kron(B, A2), kron(B, A + A2), True),
    "three products": (ONE + TWO + ONE, 2 * M1 + M2, True),
    "blocks": (BLOCKS + OTHERS, torch.block_diag(A + A2, (b + 2).diag()), True),
    "other blocks": (BLOCKS + Blocks([Diag(b), Kron(A)]), None, False),
    "damped products": (ONE + Identity(12) + TWO, M1 + M2 + eye(12), False),
    "a damped factor": ((ONE + Identity(12)) @ TWO, (M1 + eye(12)) @ M2, False),
    "two eigendecompositions": (ONE.eigh() + TWO.eigh(), M1 + M2, False),
    "the same eigenvectors": (EIGH @ damped(EIGH, 0.5), M1 @ (M1 + 0.5 * eye(12)), True),
}


def test_transposed_eigenvectors():
    values, Q = torch.linalg.eigh(A)
    transposed = EighDecomposedLinearOperator(values, Q).eigenvectors.T
    torch.testing.assert_close(transposed @ eye(len(A)), Q.T)


@pytest.mark.parametrize("name", COMBINED)
def test_sums_and_products(name: str):
    operator, matrix, has_structure = COMBINED[name]
    assert isinstance(operator, StructuredLinearOperator) == has_structure
    if matrix is None:
        matrix = torch.block_diag(A, b.diag()) + torch.block_diag(b.diag(), A)
    torch.testing.assert_close(operator @ eye(len(matrix)), matrix)
    for quantity, expected in QUANTITIES.values() if has_structure else ():
        torch.testing.assert_close(quantity(operator), expected(matrix))


def test_factors_that_are_symmetric_up_to_rounding():
    """Some processors round products with a transpose so."""
    tall, noise = randn(30, 5).float() / 10, 1e-7 * randn(30, 30).float().triu(1)
    operator = Kron(tall @ tall.T + noise)
    root = damped(operator, 1e-5) ** -0.5
    expected = (tall.double() @ tall.double().T + 1e-5 * eye(30)).inverse()
    assert (root @ root.to_dense() - expected).norm() <= 1e-3 * expected.norm()


@pytest.mark.parametrize("groups", [(), (5,)])
def test_products_that_are_not_symmetric(groups: tuple[int, ...]):
    factors = [randn(*groups, 3, 2), randn(*groups, 4, 3), randn(*groups, 1, 2)]
    operator, matrix = Kron(*factors), kron(*factors)
    torch.testing.assert_close(operator @ eye(matrix.shape[1]), matrix)
    torch.testing.assert_close(operator.T @ eye(matrix.shape[0]), matrix.T)
    torch.testing.assert_close(operator.frobenius_norm(), matrix.norm())
    gram = operator.T @ operator
    assert not operator.self_adjoint and isinstance(gram, Kron) and gram.self_adjoint
    torch.testing.assert_close(
        damped(gram, 1.0).inverse().to_dense(),
        (matrix.T @ matrix + eye(matrix.shape[1])).inverse(),
    )
    factors = [randn(*groups, 3, 3), randn(*groups, 2, 2)]
    square, dense = Kron(*factors), kron(*factors)
    torch.testing.assert_close(square.det(), dense.det())
    opposite = factors[0], factors[1].flip(-2)
    torch.testing.assert_close(Kron(*opposite).det(), kron(*opposite).det())
    torch.testing.assert_close(square.trace(), dense.trace())
    torch.testing.assert_close((square**3).to_dense(), dense @ dense @ dense)
    torch.testing.assert_close((square**0) @ eye(len(dense)), eye(len(dense)))
    total, expected = damped(square, 0.1), dense + 0.1 * eye(len(dense))
    assert isinstance(total, ShiftedLinearOperator)
    torch.testing.assert_close(total.T.to_dense(), expected.T)
    torch.testing.assert_close(total.frobenius_norm(), expected.norm())
    torch.testing.assert_close((Blocks([square]).T).to_dense(), dense.T)


class Generic(TorchLinearOperator):
    """A matrix without structure."""

    def __init__(self, matrix: Tensor, space: ParameterSpace):
        self.matrix = matrix
        super().__init__(space, self_adjoint=True)

    def _apply(self, columns):
        return columns @ self.matrix.T


def test_generic_operands():
    operator, matrix = network()
    N = definite(len(matrix))
    generic, foreign = Generic(N, operator.space), sla.aslinearoperator(N.numpy())
    for found, expected in (
        (operator + generic, matrix + N),
        (generic + operator, matrix + N),
        (operator @ generic, matrix @ N),
        (generic @ operator, N @ matrix),
        (operator + foreign, matrix + N),
        (foreign @ operator, N @ matrix),
    ):
        np.testing.assert_allclose(found @ np.eye(len(N)), expected.numpy(), atol=1e-12)
    x = {name: randn(*shape) for name, shape in operator.space.shapes.items()}
    y = [value.flatten() for value in (operator @ x).values()]
    vector = torch.cat([value.flatten() for value in x.values()])
    torch.testing.assert_close(torch.cat(y), matrix @ vector)


def test_dtypes_are_promoted():
    single = Kron(B.float(), A.float())
    assert single.torch_dtype == single.inverse(0.1).torch_dtype == torch.float32
    assert (single + Identity(12)).torch_dtype == torch.float32
    assert (single @ Kron(B, A)).torch_dtype == Kron(B.float(), A).torch_dtype == DOUBLE
    assert Kron(B.bfloat16()).torch_dtype == torch.float32
    assert Blocks([single, Diag(a)]).torch_dtype == DOUBLE


def test_identity_on_shapes():
    shapes = [(2, 3), (2,), ()]
    for arguments in ((shapes,), (shapes, CPU, DOUBLE), (9, "cpu", DOUBLE)):
        identity = Identity(*arguments)
        dtype = DOUBLE if DOUBLE in arguments else torch.float32
        assert identity.torch_dtype == dtype and identity.device == CPU
        torch.testing.assert_close((3 * identity).to_dense(), 3 * torch.eye(9, dtype=dtype))
    vectors = [torch.randn(shape, dtype=DOUBLE) for shape in shapes]
    named = ParameterSpace(dict(zip("abc", shapes, strict=True)), DOUBLE)
    for found, x in zip((Identity(named) + 2 * Identity(shapes)) @ vectors, vectors, strict=True):
        torch.testing.assert_close(found, 3 * x, rtol=1e-14, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ALL)
def test_everything_on_a_gpu(name: str):
    operator, matrix = ALL[name]()
    operator = operator.to_device("cuda")
    for quantity, expected in QUANTITIES.values():
        found = quantity(operator)
        assert found.device.type == "cuda"
        torch.testing.assert_close(found.cpu(), expected(matrix), rtol=1e-8, atol=1e-9)
    assert operator.sample(torch.Generator("cuda"), 2).shape == (len(matrix), 2)


# --- decompositions


@pytest.mark.parametrize("is_diagonal", [False, True])
def test_factors_decompose_themselves(is_diagonal: bool):
    tensor = (GA.diagonal(dim1=-2, dim2=-1) if is_diagonal else GA).float()
    factor = Factor(tensor)
    dense = factor.dense().double()
    exact = torch.from_numpy(np.linalg.eigvalsh(dense.numpy()))
    # eigenvalues are computed again only for more precision
    for in_float64, tolerance in ((False, 1e-6), (True, 1e-12), (False, 1e-12)):
        values, vectors = factor.eigh(in_float64)
        assert (values.double().sort().values - exact).abs().max() <= tolerance
        Q = vectors.dense().double()
        torch.testing.assert_close(Q * values.unsqueeze(-2) @ Q.mT, dense, rtol=0, atol=1e-6)
        assert factor.eigh()[0] is values
    if not is_diagonal:
        with pytest.raises(ValueError, match="The last one contains NaN"):
            Factor(tensor / 0, symmetric=True).eigh(name="The last one")


FUNCTIONS_OF_FACTORS = {
    "inverse": (lambda F: F.inverse(0.1, "F"), lambda M: torch.linalg.inv(M + 0.1 * eye(3))),
    "shifted": (lambda F: F.shifted(0.1), lambda M: M + 0.1 * eye(3)),
    "power": (lambda F: F.power(-2.0, "F"), lambda M: torch.linalg.inv(M @ M)),
}


@pytest.mark.parametrize("name", FUNCTIONS_OF_FACTORS)
def test_functions_of_factors_know_their_eigenvalues(name: str):
    function, of_matrix = FUNCTIONS_OF_FACTORS[name]
    factor, expected = function(Factor(GA)), of_matrix(GA)
    torch.testing.assert_close(factor.dense(), expected)
    torch.testing.assert_close(factor.eigh()[0].sort().values, torch.linalg.eigvalsh(expected))


def test_eigendecompositions_that_fail_are_repeated(monkeypatch):
    """In float64, and in a batch only those that fail."""
    original, computed = torch.linalg.eigh, []

    def raises(matrix: Tensor):
        if matrix.dtype == torch.float32:
            raise torch.linalg.LinAlgError("did not converge")
        return original(matrix)

    def returns_nan(matrix: Tensor):
        values, vectors = original(matrix)
        computed.append((matrix.dtype, len(matrix)))
        if matrix.dtype == torch.float32:
            values[1] = torch.nan
        return values, vectors

    for fails in (raises, returns_nan):
        monkeypatch.setattr(torch.linalg, "eigh", fails)
        matrices = torch.stack([A, 2 * A, 3 * A]).float()
        torch.testing.assert_close(Kron(matrices).eigh().to_dense(), torch.block_diag(*matrices))
    assert computed == [(torch.float32, 3), (torch.float64, 1)]
    monkeypatch.setattr(torch.linalg, "eigh", lambda matrix: raises(matrix.float()))
    with pytest.raises(RuntimeError, match="'conv'.*did not converge"):
        Blocks({"conv": Kron(B, A)}).eigh()


def ill_conditioned() -> Tensor:
    """Return a float32 matrix that is regular, but inaccurate to invert in float32."""
    vectors, _ = torch.linalg.qr(randn(30, 30))
    return (vectors * torch.logspace(-5, 0, 30, dtype=DOUBLE) @ vectors.T).float()


@pytest.mark.parametrize("groups", [1, 3])
def test_inverse_is_retried_in_float64(groups: int):
    """In a batch only that of the matrix that needs it."""
    matrix = torch.stack([ill_conditioned(), definite(30).float(), 2 * definite(30).float()])
    matrix = ((matrix + matrix.mT) / 2)[:groups]
    expected = torch.linalg.inv(matrix.double())
    found, once = (Kron(matrix).inverse(0.0, retry).to_dense() for retry in (True, False))
    assert found.dtype == torch.float32
    expected = torch.block_diag(*expected)
    assert (found - expected).norm() / expected.norm() < 1e-6
    assert (once - expected).norm() / expected.norm() > 1e-5


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_indefinite_inverse(damping: float):
    matrix = definite(4) - 0.7 * eye(4)
    operator = Kron(matrix, -B)
    expected = (kron(matrix, -B) + damping * eye(12)).inverse()
    torch.testing.assert_close(operator.inverse(damping).to_dense(), expected)


@pytest.mark.parametrize("psd", [False, True])
@pytest.mark.parametrize("damping", [-0.7, -0.01, 0.0, 0.3])
def test_inverse_of_a_difference(damping: float, psd: bool):
    """A multiple of the identity may be subtracted from a matrix without negative eigenvalues."""
    matrix = definite(2, 4)
    operator = Kron(Factor(matrix, symmetric=True, psd=psd)).damped(damping)
    expected = torch.block_diag(*matrix) + damping * eye(8)
    torch.testing.assert_close(operator.inverse().to_dense(), expected.inverse())
    torch.testing.assert_close(operator.inverse().inverse().to_dense(), expected)
    torch.testing.assert_close(operator.det(), expected.det())


def test_singular():
    singular = torch.zeros(3, 3, dtype=DOUBLE)
    singular[:2, :2] = C
    operator = Kron(singular, A)
    assert operator.logdet() == -torch.inf and operator.det() == 0
    dense = operator.to_dense()
    torch.testing.assert_close(operator.inverse(0.1).to_dense(), (dense + 0.1 * eye(12)).inverse())
    torch.testing.assert_close((operator**0.5).to_dense() @ (operator**0.5).to_dense(), dense)
    assert operator.sample().isfinite().all()


def plain_layout(size: int) -> Layout:
    return Layout((ParameterView("weight", (size,), (1,)),))


def two_blocks(*matrices: Tensor) -> StructuredLinearOperator:
    """Two equal blocks as one operator with two groups."""
    shapes = {"first": matrices[0].shape[:1], "second": matrices[1].shape[:1]}
    views = tuple(ParameterView.whole(name, shape) for name, shape in shapes.items())
    return one_block(Kron(torch.stack(matrices)), shapes, Layout(views, 1, 2))


#: Singular operators, made of rank-deficient matrices ``[*, n, n]``.
SINGULAR = {
    "matrix": lambda x, _: Kron(x(8, 3)),
    "two factors": lambda x, y: Kron(y(3, 3), x(8, 3)),
    "groups": lambda x, y: Kron(torch.stack([y(8, 8), x(8, 3)])),
    "blocks": lambda x, y: Blocks([Kron(y(4, 4)), Kron(x(6, 2), y(3, 3))]),
    "layout": lambda x, y: one_block(Kron(y(4, 4), x(6, 2)), {"weight": (4, 6)}, plain_layout(24)),
    "stack": lambda x, y: two_blocks(y(4, 4), x(4, 2)),
    "sum": lambda x, y: Kron(y(3, 3), z := x(8, 3)) + Kron(y(3, 3), z),
    "sum of two": lambda x, y: Kron(Diag(y(3, 3).diagonal()), z := x(8, 3)) + Kron(y(3, 3), 2 * z),
    "decomposition": lambda x, y: Kron(y(3, 3), x(8, 3)).eigh(),
}


INVERSES = [
    lambda op: op.inverse(),
    lambda op: op**-1,
    lambda op: op**-0.5,
    lambda op: op.eigh().inverse(),
    lambda op: op.inverse(1e-18),  # eigenvalues that are given are exact
]


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("name", SINGULAR)
def test_logdet_is_infinite_where_there_is_no_inverse(name: str, dtype: torch.dtype):
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)

        def moment(n: int, rank: int, generator: torch.Generator = generator) -> Tensor:
            """A sum of squares in the given precision; definite for full rank."""
            x = torch.randn(n, rank, generator=generator, dtype=DOUBLE).to(dtype)
            return x @ x.T + (torch.eye(n, dtype=dtype) if n == rank else 0)

        operator = SINGULAR[name](moment, moment)
        for op in (operator, 3 * operator, damped(damped(operator, 1.0), -1.0)):
            assert op.logdet() == -torch.inf and op.det() == 0
            for invert in INVERSES[: 4 if name == "decomposition" else 5]:
                with pytest.raises(ValueError, match="singular to working precision"):
                    invert(op)
        regular = damped(operator, 0.1)
        assert regular.inverse().to_dense().isfinite().all() and regular.logdet().isfinite()


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_large_rows_do_not_hide_small_ones(dtype: torch.dtype):
    """Neither that others are not symmetric, nor their pivots."""
    matrix = torch.tensor([[1e20, 0.0, 0.0], [0.0, 1.0, 0.5], [0.0, -0.5, 1.0]], dtype=dtype)
    operator = Kron(matrix)
    torch.testing.assert_close(operator.T.to_dense(), matrix.T)
    expected = torch.tensor(46.05170186 + 0.22314355, dtype=dtype)
    torch.testing.assert_close(operator.logdet(), expected)
    # a large feature leaves the digits of small ones
    x = torch.randn(200, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    x *= torch.tensor([1e3, 1.0, 0.1, 1.0, 1.0], dtype=dtype)
    second, values = x.T @ x, (x.double().T @ x.double() / 200)
    operator, expected = damped(Kron(second / 200), 1e-4), values + 1e-4 * torch.eye(5).double()
    found, truth = operator.inverse().to_dense().double(), torch.linalg.inv(expected)
    assert (found - truth).norm() <= 1e-4 * truth.norm()
    torch.testing.assert_close(
        operator.logdet().double(), torch.logdet(expected), rtol=1e-4, atol=0
    )


def scaled_moments(size: int, num: int, *scales: float) -> Tensor:
    """Return second moments of ``num`` random vectors, of which some features are large."""
    X = torch.randn(num, size)
    X[:, : len(scales)] *= torch.tensor(scales)
    return (X.T @ X / num).unsqueeze(0)


def test_only_matrices_that_need_it_are_decomposed(monkeypatch):
    numbers, eigenpairs = [], factor_module.eigenpairs

    def counted(matrices: Tensor, *args: object) -> tuple[Tensor, Tensor]:
        numbers.append(len(matrices))
        return eigenpairs(matrices, *args)

    monkeypatch.setattr(factor_module, "eigenpairs", counted)
    matrices = [scaled_moments(6, num, 1e3) for num in (30, 3, 30)]  # the second is singular
    stack = Factor(torch.cat(matrices), symmetric=True, psd=True)
    alone = [Factor(matrix, symmetric=True, psd=True) for matrix in matrices]
    shifts = torch.tensor([[1e-2], [1e-6], [1e-3]], dtype=torch.float64)
    inverse = stack.inverse(shifts, "The stack")
    assert numbers == [1]
    expected = [f.inverse(shift, "A") for f, shift in zip(alone, shifts, strict=True)]
    for x, y in zip(inverse.tensor, expected, strict=True):
        assert error(x, y.tensor[0]) <= 1e-6
    signs, logarithms = inverse.slogdet()
    assert bool((signs == 1).all())
    for x, y in zip(logarithms, expected, strict=True):
        assert error(x, y.slogdet()[1][0]) <= 1e-5
    numbers.clear()
    values, _ = stack.eigh(in_float64=True)
    assert numbers == [2] and values.isfinite().all()
    for x, y in zip(values, alone, strict=True):
        assert error(x, y.eigh(in_float64=True)[0][0]) <= 1e-6


@pytest.mark.parametrize(
    ("shift", "num_cholesky"), [(1e-1, 1), (1e-3, 1), (1e-4, 0), (1e-5, 0), (0.0, 2)]
)
def test_few_squares_tell_how_to_invert(shift: float, num_cholesky: int, monkeypatch):
    """Decompositions that would not be precise enough are left out; the result is the same."""
    matrix, calls, cholesky = scaled_moments(200, 60, 1e2), [], torch.linalg.cholesky_ex

    def counted(*args: object, **options: object) -> object:
        calls.append(args)
        return cholesky(*args, **options)

    shifts = torch.full((2, 1), shift, dtype=torch.float64)
    stack = matrix.expand(2, -1, -1).contiguous()
    unknown = Factor(stack, symmetric=True, psd=True)
    known = Factor(stack, symmetric=True, psd=True, ranks=torch.tensor([60.0, 60.5]))
    if shift:
        expected = unknown.inverse(shifts, "A").tensor
        monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
        assert torch.equal(known.inverse(shifts, "A").tensor, expected)
    else:  # singular
        monkeypatch.setattr(torch.linalg, "cholesky_ex", counted)
        with pytest.raises(ValueError, match="is singular"):
            known.inverse(shifts, "A")
    assert len(calls) == num_cholesky


def test_small_eigenvalues_stay_after_the_inverse_of_another_matrix():
    scales = torch.logspace(4, -2, 4)
    matrices = torch.stack([torch.ones(4, 4), scales[:, None] * (torch.eye(4) + 0.3) * scales])
    stack, fresh = (Factor(matrices, symmetric=True, psd=True) for _ in range(2))
    stack.inverse(5e-5, "The stack", accurate=False)  # decomposes the first one alone
    torch.testing.assert_close(stack.eigh()[0], fresh.eigh()[0])


@pytest.mark.parametrize("shifts", [[1e-2] * 5, [1e-2, 1e-1, 1e-3, 1e-2, 1.0]], ids=["one", "own"])
def test_small_matrices_of_several_sizes_are_inverted_together(shifts: list[float]):
    """A large feature of one matrix, or a singular one, changes nothing for the others."""
    tensors = [
        scaled_moments(5, 30, 1e5, 1e3),
        scaled_moments(21, 100),
        scaled_moments(9, 4, 1e5).expand(2, 9, 9),
        scaled_moments(40, 90, 1e3),
        scaled_moments(33, 90, 1.0, 1e-3),
    ]
    factors = [Factor(tensor, symmetric=True, psd=True) for tensor in tensors]
    found = small_inverses(dict(enumerate(zip(factors, shifts, strict=True))), accurate=True)
    for i, (factor, shift) in enumerate(zip(factors, shifts, strict=True)):
        expected = torch.linalg.inv(tensors[i].double() + shift * torch.eye(factor.rows).double())
        if factor.groups == 1:
            assert error(found[i].tensor, expected) <= 1e-5
    shifts[2] = 1e-9
    assert 2 not in small_inverses(dict(enumerate(zip(factors, shifts, strict=True))), True)


def test_small_eigenvalues_of_products_of_accurate_factors():
    """They are less than the rounding errors of a matrix of that size, but known."""
    factors = [torch.logspace(-4, 0, n).diag() for n in (8, 9)]
    operator = damped(Kron(*factors), 1e-7)
    expected = kron(*(factor.double() for factor in factors)) + 1e-7 * eye(72)
    torch.testing.assert_close(operator.logdet().double(), expected.logdet(), rtol=1e-5, atol=0)
    inverse = operator.inverse().to_dense().double()
    torch.testing.assert_close(inverse, expected.inverse(), rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
@pytest.mark.parametrize("name", SINGULAR)
def test_damped_inverses_are_as_accurate_as_the_condition_allows(name: str, dtype: torch.dtype):
    def exact(n: int, rank: int) -> Tensor:
        """A sum of squares of integers, without rounding errors."""
        x = (3 * randn(n, rank, seed=rank)).round()
        return (x @ x.T + (eye(n) if n == rank else 0)).to(dtype)

    operator = SINGULAR[name](exact, exact)
    dense = operator.to_dense().double()
    if name == "decomposition":
        dense = Kron(exact(3, 3).double(), exact(8, 3).double()).to_dense()
    top = float(torch.linalg.eigvalsh(dense)[-1])
    for digits in range(1, 18):
        damping = 10.0**-digits * top
        total = damped(operator, damping)
        try:
            inverse = total.inverse().to_dense().double()
        except ValueError as error:
            assert "singular to working precision" in str(error)
            assert total.logdet() == -torch.inf and digits > 12
            continue
        expected = dense + damping * eye(len(dense))
        error = (inverse @ expected - eye(len(dense))).norm() / len(dense) ** 0.5
        assert error <= 10 * torch.finfo(dtype).eps * 10.0**digits
        assert total.logdet().isfinite()


# --- edges


EMPTY = {
    "matrix": lambda: Kron(A[:0, :0]),
    "factor": lambda: Kron(B, A[:0, :0]),
    "groups": lambda: Kron(GA[:0]),
    "diagonal": lambda: Diag(a[:0]),
    "identity": lambda: Identity(0),
    "negative": lambda: -Identity(0),
    "blocks": lambda: Blocks([Kron(A[:0, :0]), Diag(a[:0])]),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty(name: str):
    operator = EMPTY[name]()
    powers = [operator**exponent for exponent in (-1, -0.5, 0, 0.5, 2)]
    for changed in (operator, operator.inverse(), operator.inverse(0.1), *powers):
        assert changed.shape == (0, 0) and changed.to_dense().shape == (0, 0)
        assert changed.trace() == 0 and changed.logdet() == 0 and changed.det() == 1
        assert changed.diagonal().shape == changed.eigh().eigenvalues.shape == (0,)
        assert changed.frobenius_norm() == 0 and changed.sample().shape == (0,)
    assert (operator @ torch.zeros(0, 2)).shape == (0, 2)


def test_blocks():
    operator, _ = network()
    assert len(operator) == 4 and list(operator.blocks) == ["linear", "conv", "embedding", "norm"]
    assert [block.shape[0] for block in operator] == [15, 24, 12, 2]
    assert list(operator.inverse(0.1).blocks) == list(operator.blocks)
    assert list(Blocks(list(operator)).blocks) == [0, 1, 2, 3]
    one, _ = weight_and_bias()
    assert Blocks([one, one]).space.is_flat  # a name twice
    assert Blocks([one, Diag(a)]).space.is_flat


@pytest.mark.parametrize("combine", [lambda x, y: x + y, lambda x, y: x @ y])
def test_blocks_of_other_entries_are_not_combined_block_by_block(combine: Callable):
    """The same sizes, in another order, or of other entries of one parameter."""
    M, space = definite(4, 2), ParameterSpace({"w": (4,), "x": (4,)})
    even, odd = (Layout((ParameterView("w", (2,), (2,), k),)) for k in (0, 1))
    first, last = (Layout((ParameterView("w", (2,), (1,), k),)) for k in (0, 2))
    rest = [Layout((ParameterView("x", (2,), (1,), k),)) for k in (0, 2)]
    blocks = [Kron(x) for x in M]
    one = Blocks(blocks, space, [even, odd, *rest])
    for layouts in ([odd, even, *rest], [first, last, *rest], [even, odd, *rest[::-1]]):
        other = Blocks(blocks[::-1], space, layouts)
        expected = combine(one.to_dense(), other.to_dense())
        try:
            found = combine(one, other)
        except NotImplementedError:
            continue
        torch.testing.assert_close(found.to_dense(), expected)


def diagonal_by_name() -> tuple[StructuredLinearOperator, Tensor]:
    return Diag({"w0": a, "w1": b}), torch.cat([a, b]).diag()


#: What is added to the diagonal, and the keys that count for the parameters, in their order.
NUMBERS = {
    "diagonal": (diagonal_by_name, {"w1": 2.0, "*": 0.3}, ["*", "w1"]),
    "joint block": (weight_and_bias, {"": 0.3}, ["", ""]),
    "several blocks": (sliced, {"*": 1.0, ("weight", "bias"): 0.3}, [("weight", "bias")] * 2),
    "network": (
        network,
        {"*": 0.3, ("weight", "bias"): 2.0, "norm": 0.7, "conv": 0.1},
        [("weight", "bias"), "norm", "*", ("weight", "bias"), "conv"],
    ),
    "stack": (stacked, {"*": 0.3, ("w1", "b1"): 2.0}, [*"**", *[("w1", "b1")] * 2, *"***"]),
    "uneven stack": (
        lambda: stacked(3),
        {("w1", "b1"): 2.0, "*": 0.3, "gap": 0.7},
        ["*", "*", ("w1", "b1"), ("w1", "b1"), "gap", "*", "*"],
    ),
    "plain": (ALL["blocks"], {"*": 0.3}, ["*"]),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_by_parameter(name: str):
    make, given, keys = NUMBERS[name]
    operator, matrix = make()
    numbers = {key: torch.tensor(x).double().requires_grad_() for key, x in given.items()}
    entries = operator.space.split(torch.ones(len(matrix), dtype=DOUBLE)).values()
    added = [numbers[key] * x.flatten() for key, x in zip(keys, entries, strict=True)]
    total = matrix + torch.cat(added).diag()
    logdet, expected = operator.damped(numbers).logdet(), torch.logdet(total)
    torch.testing.assert_close(logdet, expected)
    slopes = (
        torch.autograd.grad(x, numbers.values(), allow_unused=True) for x in (logdet, expected)
    )
    for found, slope in zip(*slopes, strict=True):
        assert found is slope is None or torch.allclose(found, slope)
    damped = operator.damped(given)
    for quantity in ("product", "inverse", "logdet", "trace", "diagonal", "power -0.3"):
        compute, of_matrix = QUANTITIES[quantity]
        torch.testing.assert_close(compute(damped), of_matrix(total.detach()))


def test_what_is_not_differentiated_in_the_damping_is_refused():
    operator = network()[0].damped({"*": torch.tensor(0.1).double().requires_grad_()})
    for name, (quantity, _) in QUANTITIES.items():
        if name not in ("det", "logdet"):
            with pytest.raises((NotImplementedError, ValueError), match="requires gradients"):
                quantity(operator)
    for use in (lambda: 2 * operator, lambda: operator.sample(seed=0), operator.frobenius_norm):
        with pytest.raises(NotImplementedError, match=r"logdet\(\) and det\(\), but no .*no_grad"):
            use()
    with pytest.raises(NotImplementedError, match="cannot be saved"):
        operator.state_dict()


def test_equal_blocks():
    operator, dense = stacked(3)
    names = [("w0", "b0"), ("w1", "b1"), ("gap",), ("w2", "b2")]
    for changed in (operator, operator.inverse(0.1), load(operator.damped(0.1).state_dict())):
        assert list(changed.blocks) == names and len(changed) == 4
        assert [block.shape[0] for block in changed] == [6, 6, 3, 6]
        assert [layout.size for layout in changed.layouts] == [6, 6, 3, 6]
    for name, block in operator.blocks.items():
        index = torch.cat([torch.arange(len(dense))[operator.space.slice(n)] for n in name])
        torch.testing.assert_close(block.to_dense(), dense[index][:, index])
    again = Blocks(list(operator), operator.space, operator.layouts)
    assert torch.equal(again.to_dense(), operator.to_dense())
    part = {"w1": randn(2, 1, 2), "b1": randn(2)}
    rest = {name: torch.zeros(shape, dtype=DOUBLE) for name, shape in operator.space.shapes.items()}
    some = SubmatrixLinearOperator(operator, ["b1", "w2"], list(part)) @ part
    expected = operator @ (rest | part)
    assert all(torch.allclose(some[name], expected[name]) for name in ("b1", "w2"))


def test_views_of_permuted_entries():
    """A view leads back through reshapes and permutations, wherever strides can tell."""
    generator, plain = torch.Generator().manual_seed(0), ParameterView("weight", (64,), (1,))
    for _ in range(50):
        entries, view = torch.arange(64), plain
        for _ in range(3):
            shape = torch.tensor([2, 4, 2, 4])[torch.randperm(4, generator=generator)].tolist()
            order = torch.randperm(4, generator=generator).tolist()
            view = view.undo_permutation(shape, order)
            entries = entries.reshape([shape[axis] for axis in order])
            entries = entries.permute(*(order.index(axis) for axis in range(4))).flatten()
        assert torch.equal(view.of(torch.arange(64).unsqueeze(0)).flatten(), entries)
    six = ParameterView("weight", (4, 6), (1, 4))  # its reshaping to [3, 8] has no strides
    for shape, order in (((3, 8), (0, 1)), ((4, 6), (1, 0))):
        assert six.undo_permutation(shape, order) is None


# --- diagonals of parameters


def test_diagonals_in_the_shapes_of_parameters():
    tensors = [positive(6).reshape(2, 3), positive(2), positive(1)[0]]
    named, x = dict(zip("abc", tensors, strict=True)), [x + 1 for x in tensors]
    space = ParameterSpace({name: value.shape for name, value in named.items()}, DOUBLE)
    expected = [d * v for d, v in zip(tensors, x, strict=True)]
    for operator in (Diag(tensors), Diag(tuple(tensors)), Diag(named), Diag(tensors, space)):
        torch.testing.assert_close(operator @ x, expected)
    assert list(Diag(named).inverse() @ named) == ["a", "b", "c"]
    assert Diag([positive(2).float(), positive(2)]).torch_dtype == DOUBLE
    assert Diag([positive(2).bfloat16()]).torch_dtype == torch.float32


def test_functions_of_the_diagonal_of_the_ggn_do_not_follow_the_model():
    torch.manual_seed(0)
    model, X = nn.Sequential(nn.Linear(3, 2), nn.Tanh()).double(), randn(5, 3)
    data, params = [(X, randn(5, 2))], list(model.parameters())
    D = GGNDiagonalLinearOperator(model, nn.MSELoss(), params, data)
    v, fixed = randn(8), (D.structure, 2 * D, D + Identity(D.space), D @ D, D**0.5, D.inverse(1.0))
    before, old = [operator @ v for operator in fixed], D @ v
    with torch.no_grad():
        params[0].mul_(2)
    assert not torch.equal(D @ v, old)
    for operator, expected in zip(fixed, before, strict=True):
        assert isinstance(operator, StructuredLinearOperator)
        torch.testing.assert_close(operator @ v, expected, rtol=0, atol=0)


# --- errors


NEGATIVE = Kron(definite(3) - eye(3), A)
WEIGHT = ParameterSpace({"weight": (4,)})
ERRORS = [
    (lambda: Kron(), "at least one factor"),
    (lambda: Kron(a), r"Factor 0 .* 2 or 3 axes, got shape \[4\]"),
    (lambda: Kron(A, B / 0), "Factor 1 .* NaN or infinite"),
    (lambda: Kron(GA, GA[:2]), r"different numbers of groups: \[5, 2\]"),
    (lambda: Kron(A, Kron(GA)), "Factor 1 .* has groups"),
    (lambda: Kron(randn(2, 3)).trace(), "needs square factors"),
    (lambda: Kron(randn(3, 3)).inverse(), "needs a symmetric operator"),
    (lambda: Kron(randn(2, 3)) ** 2, "cannot be multiplied"),
    (lambda: Kron(A).inverse(float("nan")), "damping must be a (finite )?number"),
    (lambda: Kron(A) ** float("inf"), "exponent must be a finite number"),
    (lambda: Kron(B, 0 * A).inverse(), "Factor 1 .* singular.*damping"),
    (lambda: (0 * Identity(3)).inverse(), "singular.*damping"),
    (lambda: NEGATIVE**0.5, "not positive semidefinite.*lowest eigenvalue"),
    (lambda: Diag(-a[:3]).logdet(), "determinant is negative"),
    (lambda: Diag(A), "diagonal must have 1 axes"),
    (lambda: Diag([]), "has no tensors"),
    (lambda: Diag([a, b / 0]), "The diagonal's tensor 1 .* NaN or infinite"),
    (lambda: Diag([a], ParameterSpace({"x": (2, 2)}, DOUBLE)), "different parameters"),
    (lambda: Diag(a, PLAIN), "4 entries, the space dimension 3"),
    (lambda: EighDecomposedLinearOperator(a, B), r"shape \[4, 4\], got \[3, 3\]"),
    (lambda: Identity(-1), "must not be negative, got -1"),
    (lambda: Identity(3, 1e40), "float32 cannot be 1e[+]40"),
    (lambda: Blocks([]), "at least one block"),
    (lambda: Blocks({"x": Kron(randn(2, 3))}), "'x' is not square"),
    (lambda: Blocks([network()[0]], PLAIN), "not the parameters of the space"),
    (lambda: Blocks({"a": Kron(A), "b": Kron(0 * A)}).inverse(), "Block 'b': Factor 0 .* singular"),
    (lambda: two_blocks(A, 0 * A).inverse(), "Block 'second': Factor 0 .* singular"),
    (lambda: two_blocks(A, -A).power(0.5), "Block 'second': Factor 0 .* not positive semi"),
    (lambda: Blocks([Diag(a)], PLAIN), r"\[4\] entries cannot act on the 3 entries"),
    (lambda: Blocks([Diag(a)], WEIGHT, [plain_layout(3)]), r"\[4\] entries, their layouts \[3\]"),
    (lambda: Sum([]), "at least one term"),
    (lambda: Sum([Kron(A, B), Kron(B, A)]), "equal sizes"),
    (lambda: Sum([Kron(GA, GA), Kron(B, B)]), "numbers of groups"),
    (lambda: Sum([ONE, TWO], 11).inverse(0.1), "max_dense_dim=11.*factors diagonal.*iteratively"),
    (lambda: weight_and_bias()[0].damped({"bias": 0.1}), r"no number for \['weight'\].*'\*': 0"),
    (
        lambda: weight_and_bias()[0].damped({"": 0.1, "bias": 0.2}),
        "'weight', 'bias' have one block",
    ),
    (
        lambda: network()[0].eigh().damped({"*": 0.1, "norm": 1.0}),
        "have one block.*a tuple of names",
    ),
    (lambda: weight_and_bias()[0].damped({"head": 0.1}), r"unknown names \['head'\]"),
    (lambda: Kron(A).damped({"*": float("nan")}), "delta must be a finite number"),
    (lambda: Kron(A).damped(torch.tensor(torch.inf).requires_grad_()), "must be a finite number"),
    (lambda: Kron(randn(2, 3)).damped(0.1), "Only square operators"),
    (lambda: Kron(A) + Diag(b), "cannot be added"),
    (lambda: Kron(A) @ Diag(b), "cannot be multiplied"),
]
TYPE_ERRORS = [
    (lambda: Kron(A, np.eye(2)), "Factor 1 .* must be a tensor, got a ndarray"),
    (lambda: Kron(A.long()), "Factor 0 .* floating-point dtype"),
    (lambda: Kron(A, Kron(B).eigh()), r"EighDecomposed.*to_dense\(\)"),
    (lambda: Diag({"x": a, "y": 3.0}), "The diagonal's tensor 'y' must be a tensor, got a float"),
    (lambda: Diag([a, torch.ones(2).long()]), "The diagonal's tensor 1 must be of a real float"),
    (lambda: NEGATIVE.sample(0), "Integers are passed as seed"),
    (lambda: Blocks({"x": A}), "'x' is a Tensor"),
]


@pytest.mark.parametrize("number", range(len(ERRORS + TYPE_ERRORS)))
def test_errors(number: int):
    expression, match = (ERRORS + TYPE_ERRORS)[number]
    with pytest.raises(ValueError if number < len(ERRORS) else TypeError, match=match):
        expression()


TWO_TERMS = {
    "dense": ((B, A), (B2, A2)),
    "groups": ((GB, GA), (definite(5, 2, seed=1), definite(5, 3, seed=1))),
    "diagonal": ((Diag(b), A), (Diag(positive(3, seed=1)), A2)),
    "diagonal-dense": ((Diag(b), A), (B, A2)),
    "dense-diagonal": ((B, Diag(a)), (B2, A2)),
}


@pytest.mark.parametrize("name", TWO_TERMS)
def test_sums_of_two_terms_that_are_too_large_for_a_matrix(name: str):
    operator = Sum([Kron(*factors) for factors in TWO_TERMS[name]], max_dense_dim=1)
    dense = operator.to_dense()
    inverse, expected = operator.inverse(), torch.linalg.inv(dense)
    for found, matrix in ((inverse, expected), ((2 * inverse).inverse(), dense / 2)):
        torch.testing.assert_close(found.to_dense(), matrix)
        for quantity in ("diagonal", "trace", "norm", "logdet"):
            ask, of_matrix = QUANTITIES[quantity]
            torch.testing.assert_close(ask(found), of_matrix(matrix))
    torch.testing.assert_close(operator.logdet(), torch.logdet(dense))
    draws = inverse.sample(torch.Generator().manual_seed(0), 20_000)
    error = (draws @ draws.T / 20_000 - expected).norm() / expected.norm()
    assert error < 5 * (len(dense) / 20_000) ** 0.5


def test_diagonal_sums_need_no_matrix():
    pairs = [(positive(3, seed=i), positive(4, seed=i + 3)) for i in range(3)]
    operator = Sum([Kron(Diag(one), Diag(two)) for one, two in pairs], max_dense_dim=4)
    diagonal = sum(torch.kron(one, two) for one, two in pairs)
    torch.testing.assert_close(operator.inverse(0.1).to_dense(), torch.diag(1 / (diagonal + 0.1)))
    torch.testing.assert_close(operator.logdet(), diagonal.log().sum())
    torch.testing.assert_close((operator**0.5).to_dense(), torch.diag(diagonal.sqrt()))
