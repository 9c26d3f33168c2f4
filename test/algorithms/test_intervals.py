"""Intervals of quadratic and bilinear forms of inverses: they contain the truth."""

import copy
from typing import Any, NamedTuple

import matrices
import mpmath
import numpy as np
import pytest
import torch
from small import batches, build, dense, mlp
from tables import core
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    IdentityLinearOperator,
    KFACLinearOperator,
    KroneckerProductLinearOperator,
    ParameterSpace,
    PerSampleGradientLinearOperator,
    bilinear_form,
    certified_scores,
    quadratic_form,
)

mpmath.mp.dps = 60
_precise = np.vectorize(mpmath.mpf, otypes=[object])


def truth(root: np.ndarray, G: np.ndarray, damping: float) -> np.ndarray:
    """Return ``G^T (B B^T + damping I)^-1 G``, by elimination with 60 digits.

    Args:
        root: B. The product in float64 would not be semidefinite.
        G: Vectors, ``[D, K]``.
        damping: The damping.
    """
    B, X = _precise(root), _precise(G)
    M = B @ B.T + np.diag(_precise(np.full(len(B), damping)))
    total = 0
    for k in range(len(M)):  # with M = L P L^T it is the sum of x x^T / P_k over rows x of L^-1 G
        total = total + np.outer(X[k], X[k] / M[k, k])
        column = M[k + 1 :, k] / M[k, k]
        X[k + 1 :] -= np.outer(column, X[k])
        M[k + 1 :, k + 1 :] -= np.outer(column, M[k, k + 1 :])
    return total


class Case(NamedTuple):
    """A root B of the matrix ``B B^T``, vectors ``[D, K]``, and arguments of ``quadratic_form``."""

    root: np.ndarray
    G: np.ndarray
    damping: float
    num_products: int
    rtol: float
    preconditioner: np.ndarray | None


def draw(rng: np.random.Generator) -> Case:
    """Draw a positive semidefinite matrix, vectors, damping, and other arguments."""
    dim = int(rng.integers(1, 13))
    rank = int(rng.integers(0, dim + 1))
    decaying = 10.0 ** rng.uniform(-12, 0, dim)
    eigenvalues = {
        "decaying": decaying,
        "repeated": rng.choice(decaying[:2], dim),
        "equal": np.ones(dim),
        "diagonal": decaying,
        "products are exact": 0.25 ** rng.integers(0, 5, dim),
    }
    kind = rng.choice([*eigenvalues])
    basis = np.linalg.qr(rng.standard_normal((dim, dim)))[0]
    if kind == "diagonal":
        basis = np.eye(dim)
    if kind == "products are exact":
        basis = rng.integers(-3, 4, (dim, dim)).astype(float)
    scales = np.sqrt(eigenvalues[kind][:rank]) * 10.0 ** rng.integers(-4, 5)
    root = basis[:, :rank] * scales
    A = root @ root.T
    basis = np.linalg.eigh(A)[1]
    mean = np.trace(A) / dim or 1.0
    damping = float(mean * 10.0 ** rng.uniform(-12, 3))
    normal = rng.standard_normal(dim)
    vectors = [
        normal,
        A @ normal,
        np.zeros(dim),
        np.eye(dim)[0],
        basis[:, int(rng.integers(dim))],
        basis[:, 0] + 1e-9 * normal,
        basis @ (rng.random(dim) < 0.5),
    ]
    num = int(rng.integers(1, 4))
    G = np.stack([vectors[i] for i in rng.integers(len(vectors), size=num)], 1)
    G = G * 10.0 ** rng.integers(-5, 6, num)
    noise = rng.standard_normal((dim, dim))
    inverse = np.linalg.pinv(A + damping * np.eye(dim), hermitian=True)
    preconditioners = [None, None, inverse, inverse + np.diag(np.diag(inverse)), noise @ noise.T]
    return Case(
        root,
        G.astype(np.float32).astype(np.float64),
        damping,
        int(rng.integers(2, dim + 3)),
        float(rng.choice([0.0, 1e-2])),
        preconditioners[int(rng.integers(len(preconditioners)))],
    )


def check(case: Case) -> None:
    """Check the intervals of the forms of all columns, and of pairs of columns."""
    exact = truth(case.root, case.G, case.damping)
    for dtype in (torch.float64, torch.float32):
        # products in float32 are those of the float64 matrix, with rounding errors
        A, G = (torch.from_numpy(x).to(dtype) for x in (case.root @ case.root.T, case.G))
        P = None if case.preconditioner is None else torch.from_numpy(case.preconditioner)
        options = (case.damping, case.num_products, case.rtol)
        forms = quadratic_form(A, G, *options, preconditioner=P)
        pairs = bilinear_form(A, G, G.flip(1), *options, preconditioner=P)
        for value, interval in ((exact, forms), (exact[:, ::-1], pairs)):
            lower, upper = _precise(interval.lower), _precise(interval.upper)
            assert (lower <= value.diagonal()).all() and (value.diagonal() <= upper).all()


def test_intervals_contain_the_truth():
    for seed in (*range(100), 9483):  # the last: a vector whose product is rounding alone
        check(draw(np.random.default_rng(seed)))


def test_scores_contain_the_truth():
    for seed in range(50):
        case, rng = draw(np.random.default_rng(seed)), np.random.default_rng(seed)
        rows = rng.standard_normal((4, len(case.root))).astype(np.float32).astype(np.float64)
        exact = truth(case.root, np.hstack([rows.T, case.G]), case.damping)[:4, 4:]
        for dtype in (torch.float64, torch.float32):
            A, R, Q = (
                torch.from_numpy(x).to(dtype) for x in (case.root @ case.root.T, rows, case.G)
            )
            K = IdentityLinearOperator(ParameterSpace({"": (len(A),)}, dtype))
            found = certified_scores(R, Q, A, K, case.damping, 4, case.num_products)
            for k, order in enumerate(found.rows.T.tolist()):
                lower, upper = (_precise(x[:, k]) for x in (found.lower, found.upper))
                assert (lower <= exact[order, k]).all() and (exact[order, k] <= upper).all()


@pytest.mark.slow
def test_intervals_contain_the_truth_of_many():
    for seed in range(100, 10_000):
        check(draw(np.random.default_rng(seed)))


def log_truth(root: np.ndarray, G: np.ndarray, damping: float) -> np.ndarray:
    """Return ``g^T log(B B^T + damping I) g`` of columns, by eigenvectors with 60 digits."""
    B = _precise(root)
    M = B @ B.T + np.diag(_precise(np.full(len(B), damping)))
    values, vectors = mpmath.eigsy(mpmath.matrix(M.tolist()))
    overlaps = np.array(vectors.tolist(), dtype=object).reshape(M.shape).T @ _precise(G)
    logs = np.array([mpmath.log(value) for value in values], dtype=object)
    return (overlaps * overlaps * logs[:, None]).sum(0)


def check_log(case: Case) -> None:
    """Check the intervals of logarithms of matrices, of at most seven dimensions."""
    if len(case.root) > 7:
        return
    exact = log_truth(case.root, case.G, case.damping)
    for dtype in (torch.float64, torch.float32):
        A, G = (torch.from_numpy(x).to(dtype) for x in (case.root @ case.root.T, case.G))
        options = (case.damping, case.num_products, case.rtol)
        found = quadratic_form(A, G, *options, function="log")
        assert (_precise(found.lower) <= exact).all() and (exact <= _precise(found.upper)).all()


def test_logarithms_contain_the_truth():
    for seed in range(100):
        check_log(draw(np.random.default_rng(seed)))


@pytest.mark.slow
def test_logarithms_contain_the_truth_of_many():
    for seed in range(100, 10_000):
        check_log(draw(np.random.default_rng(seed)))


def test_log_determinant_and_effective_dimension():
    """The intervals of all unit vectors add up to the interval of the trace."""
    A = matrices.symmetric("clustered")
    eye = torch.eye(len(A), dtype=torch.float64)
    logs = quadratic_form(A, eye, 0.1, rtol=1e-6, function="log")
    exact = torch.logdet(A + 0.1 * eye)
    assert logs.lower.sum() <= exact <= logs.upper.sum() <= logs.lower.sum() + 1e-6 * len(A)
    inverses = quadratic_form(A, eye, 0.1, rtol=1e-6)
    exact = torch.linalg.solve(A + 0.1 * eye, A).trace()
    low, high = (len(A) - 0.1 * bound.sum() for bound in (inverses.upper, inverses.lower))
    assert low <= exact <= high <= low + 1e-6 * len(A)


# --- what they are


def lanczos_rules(A: Tensor, g: Tensor, damping: float, num: int) -> tuple[float, float]:
    """Return the rules of Gauss and of Gauss and Radau, with the node ``damping``."""
    Q, alpha, beta = [g / g.norm()], [], []
    for _ in range(num):
        w = A @ Q[-1]
        alpha.append(w @ Q[-1])
        basis = torch.stack(Q)
        for _ in range(2):
            w = w - basis.T @ (basis @ w)
        beta.append(w.norm())
        Q.append(w / beta[-1])
    off = torch.stack(beta[:-1])
    T = torch.stack(alpha).diag() + off.diag(1) + off.diag(-1)
    e = torch.eye(num + 1, dtype=T.dtype)
    gauss = torch.linalg.solve(T + damping * e[:num, :num], e[:num, 0])[0]
    radau = torch.zeros_like(e)
    radau[:num, :num] = T + damping * e[:num, :num]
    radau[num, num - 1] = radau[num - 1, num] = beta[-1]
    radau[num, num] = damping + beta[-1] ** 2 * torch.linalg.solve(T, e[:num, num - 1])[-1]
    return float(g @ g * gauss), float(g @ g * torch.linalg.solve(radau, e[:, 0])[0])


@pytest.mark.parametrize("num", [2, 3, 6])
@pytest.mark.parametrize("damping", [1.0, 1e-2])
def test_rules_of_gauss_and_radau(num: int, damping: float):
    A = matrices.symmetric("decaying")
    g = torch.linspace(1, 2, len(A), dtype=torch.float64)
    expected = lanczos_rules(A, g, damping, num)
    found = quadratic_form(A, g, damping, num, rtol=0)
    np.testing.assert_allclose(found[:2], expected, rtol=1e-9)
    assert found.num_products == num


def test_a_preconditioner_saves_products():
    A = matrices.symmetric("decaying")
    g, eye = torch.ones(len(A), dtype=torch.float64), torch.eye(len(A), dtype=torch.float64)
    near = torch.linalg.inv(1.5 * A + 1e-4 * eye)
    plain, better = (quadratic_form(A, g, 1e-4, preconditioner=P) for P in (None, near))
    exact = g @ torch.linalg.solve(A + 1e-4 * eye, g)
    assert plain.lower <= exact <= plain.upper and better.lower <= exact <= better.upper
    assert better.num_products < plain.num_products / 2


@pytest.mark.parametrize("width", [7, 9, 12])
def test_narrow_intervals_of_a_matrix_of_low_rank(width: int, double: None):
    """What rounding makes of zeros does not make the upper bound large."""
    torch.manual_seed(0)
    first, second = nn.Linear(3, width), nn.Linear(width, width)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), nn.Linear(width, 3))
    data = [(torch.randn(n, 3), torch.randint(3, (n,))) for n in (4, 3, 2)]
    G = build(GGNLinearOperator, model, data)
    P = build(KFACLinearOperator, model, data, fisher_type="empirical").inverse(0.1)
    for g in torch.randn(4, G.shape[0]):
        exact = g @ torch.linalg.solve(G @ torch.eye(len(g)) + 0.1 * torch.eye(len(g)), g)
        found = quadratic_form(G, g, 0.1, rtol=1e-8, preconditioner=P)
        assert found.lower <= exact <= found.upper <= found.lower + 1e-8 * found.upper


def test_columns_share_products_until_their_intervals_are_narrow():
    A = matrices.Counting(matrices.symmetric("decaying"))
    eigenvector = torch.linalg.eigh(matrices.symmetric("decaying")).eigenvectors[:, -1]
    ones = torch.ones(len(eigenvector), dtype=torch.float64)
    G = torch.stack([eigenvector, ones, 0 * ones], 1)
    found = quadratic_form(A, G, 1e-3, rtol=1e-3)
    # two for the eigenvector, none for zero
    assert A.products == 2 + found.num_products
    assert (found.upper - found.lower <= 1e-3 * found.upper).all()
    single = [quadratic_form(A, g, 1e-3, rtol=1e-3) for g in G.T]
    for name in ("lower", "upper"):
        expected = torch.stack([getattr(interval, name) for interval in single])
        torch.testing.assert_close(getattr(found, name), expected, rtol=1e-9, atol=0)
    assert single[2] == (0.0, 0.0, 0)


# --- operators and vectors

MODEL, DATA = mlp(), batches(7, 4)
G = build(GGNLinearOperator, MODEL, DATA)
DENSE = dense(GGNLinearOperator, MODEL, DATA)
EYE = torch.eye(len(DENSE), dtype=torch.float64)
NAMED = dict(MODEL.named_parameters())


def vectors(*columns: int) -> dict[str, Tensor]:
    """Return vectors by the names of the parameters."""
    generator = torch.Generator().manual_seed(0)
    return {
        n: torch.randn(*p.shape, *columns, dtype=torch.float64, generator=generator)
        for n, p in NAMED.items()
    }


def flat(named: dict[str, Tensor], *columns: int) -> Tensor:
    return torch.cat([x.reshape(-1, *columns) for x in named.values()])


@pytest.mark.parametrize("columns", [(), (3,)])
@pytest.mark.parametrize("kind", ["tensor", "array", "list", "dictionary"])
def test_kinds_of_vectors(kind: str, columns: tuple[int, ...]):
    operator = build(GGNLinearOperator, MODEL, DATA, params=NAMED)
    named, x = vectors(*columns), flat(vectors(*columns), *columns)
    g = {"tensor": x, "array": x.numpy(), "list": [*named.values()], "dictionary": named}[kind]
    exact = (x * torch.linalg.solve(DENSE + 0.1 * EYE, x)).sum(0)
    for found in (quadratic_form(operator, g, 0.1), bilinear_form(operator, g, g, 0.1)):
        assert found.lower.shape == found.upper.shape == columns
        assert found.lower.dtype == torch.float64
        assert (found.lower <= exact).all() and (exact <= found.upper).all()


def test_pairs_of_one_vector_and_several():
    x, X = flat(vectors()), flat(vectors(3), 3)
    exact = torch.linalg.solve(DENSE + 0.1 * EYE, X).T @ x
    for pair in ((x, X), (X, x)):
        found = bilinear_form(G, *pair, 0.1, rtol=1e-6)
        assert (found.lower <= exact).all() and (exact <= found.upper).all()
        torch.testing.assert_close(found.lower, exact, rtol=0, atol=1e-4)


STRUCTURES = {
    "KFAC": lambda: build(KFACLinearOperator, MODEL, DATA),
    "EKFAC": lambda: build(EKFACLinearOperator, MODEL, DATA),
    "Kronecker": lambda: KroneckerProductLinearOperator(3 * EYE[:4, :4], DENSE[:8, :8]),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structure_is_exact(name: str):
    K = STRUCTURES[name]()
    X = torch.randn(len(K.to_dense()), 3, dtype=torch.float64)
    M = K.to_dense() + 1e-3 * torch.eye(len(X), dtype=torch.float64)
    exact = X.T @ torch.linalg.solve(M, X)
    forms, pairs = quadratic_form(K, X, 1e-3), bilinear_form(K, X, X[:, 0], 1e-3)
    assert forms.num_products == pairs.num_products == 0
    for bound in (0, 1):
        torch.testing.assert_close(forms[bound], exact.diagonal(), rtol=1e-9, atol=0)
        torch.testing.assert_close(pairs[bound], exact[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("damping", [1.0, 1e-3])
def test_models_that_round_more(dtype: torch.dtype, damping: float):
    """The truth is that of the same model in float64."""
    low = copy.deepcopy(MODEL).to(dtype)
    X, y = (torch.cat(parts) for parts in zip(*DATA, strict=True))
    exact = dense(GGNLinearOperator, copy.deepcopy(low).double(), [(X.to(dtype).double(), y)])
    operator = build(GGNLinearOperator, low, [(X.to(dtype), y)])
    g = flat(vectors(20), 20).float()
    M = exact + damping * EYE
    value = (g.double() * torch.linalg.solve(M, g.double())).sum(0)
    for num in (2, 4, 8, 16):
        found = quadratic_form(operator, g, damping, num, rtol=0)
        assert (found.lower <= value).all() and (value <= found.upper).all()


INDEFINITE = matrices.symmetric("indefinite")
ONES = torch.ones(len(INDEFINITE), dtype=torch.float64)
SEMIDEFINITE = matrices.symmetric("clustered")
WRONG = {
    "indefinite": (
        lambda: quadratic_form(INDEFINITE, ONES, 2.0),
        "not positive semidefinite: it has an eigenvalue of -.* Take a Gauss-Newton matrix",
    ),
    "negative, one dimension": (
        lambda: quadratic_form(-torch.ones(1, 1), torch.ones(1), 2.0),
        "not positive semidefinite",
    ),
    "Hessian": (
        lambda: bilinear_form(build(HessianLinearOperator, MODEL), flat(vectors()), EYE[0], 1.0),
        "not positive semidefinite",
    ),
    "asymmetric": (
        lambda: quadratic_form(matrices.nonsymmetric(), ONES, 1.0),
        "symmetric part",
    ),
    "no damping": (lambda: quadratic_form(SEMIDEFINITE, ONES, 0.0), "damping must be positive"),
    "infinite damping": (
        lambda: quadratic_form(SEMIDEFINITE, ONES, float("inf")),
        "damping must be a finite number",
    ),
    "one product": (
        lambda: quadratic_form(SEMIDEFINITE, ONES, 1.0, 1),
        "num_products must be an integer >= 2",
    ),
    "rtol": (
        lambda: quadratic_form(SEMIDEFINITE, ONES, 1.0, rtol=-1),
        "rtol must be a finite number >= 0",
    ),
    "columns": (
        lambda: bilinear_form(G, flat(vectors(3), 3), flat(vectors(2), 2), 1.0),
        "g has 3 columns, h has 2",
    ),
    "norms": (lambda: quadratic_form(SEMIDEFINITE, 1e-200 * ONES, 1.0), "between 1e-150 and 1e150"),
    "gradients": (
        lambda: quadratic_form(G, flat(vectors()).requires_grad_(), 1.0),
        "requires gradients",
    ),
    "function": (
        lambda: quadratic_form(SEMIDEFINITE, ONES, 1.0, function="exp"),
        "function must be one of",
    ),
    "preconditioned logarithm": (
        lambda: quadratic_form(
            SEMIDEFINITE, ONES, 1.0, preconditioner=SEMIDEFINITE, function="log"
        ),
        "takes no preconditioner",
    ),
    "not square": (lambda: quadratic_form(SEMIDEFINITE[:3], ONES, 1.0), "must be square"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str):
    call, message = WRONG[name]
    with pytest.raises(ValueError, match=message):
        call()


# --- scores


def scores(damping: float, top: int, rows: Any = None, **options: Any) -> tuple[Any, Tensor]:
    """Return certified scores of samples with the first as query, and the exact scores."""
    operator = build(PerSampleGradientLinearOperator, MODEL, DATA)
    gradients, K = dense(PerSampleGradientLinearOperator, MODEL, DATA), STRUCTURES["EKFAC"]()
    query = gradients[0]
    if rows is not None:
        gradients = operator = gradients[rows]
    found = certified_scores(operator, query, G, K, damping, top, **options)
    return found, gradients @ torch.linalg.solve(DENSE + damping * EYE, query)


@pytest.mark.parametrize("damping", [1.0, 1e-2])
@pytest.mark.parametrize("top", [1, 4, 100])
def test_scores_are_refined_until_their_order_is_decided(damping: float, top: int):
    found, exact = scores(damping, top)
    assert found.is_decided and found.num_products <= 30
    assert found.rows.tolist() == exact.argsort(descending=True)[:top].tolist()
    mine = exact[found.rows]
    assert (found.lower <= mine).all() and (mine <= found.upper).all()
    assert (found.lower[:-1] > found.upper[1:]).all()
    K = STRUCTURES["EKFAC"]().damped(damping).inverse()
    gradients = dense(PerSampleGradientLinearOperator, MODEL, DATA)
    torch.testing.assert_close(found.estimates, (gradients @ (K @ gradients[0]))[found.rows])


@pytest.mark.parametrize("options", [{"rows": [2, 0, 2]}, {"rows": None, "num_products": 2}])
def test_scores_that_stay_undecided(options: dict[str, Any]):
    found, exact = scores(1e-3, 8, **options)
    assert not found.is_decided
    assert (found.lower <= exact[found.rows]).all() and (exact[found.rows] <= found.upper).all()


@pytest.mark.parametrize(
    "seed, dtype",
    core(
        [(0, torch.float64), (1, torch.float64), (0, torch.float32)],
        ((i, torch.float64) for i in range(2, 10)),
    ),
)
def test_scores_of_all_rows(seed: int, dtype: torch.dtype):
    """EKFAC ranks other rows first; the truth is that of the same model in float64."""
    torch.manual_seed(seed)
    X, y, queries = torch.randn(80, 5), torch.randint(3, (80,)), torch.randn(3, 5)
    layers, loss = (nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 3)), nn.CrossEntropyLoss()
    model = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), 2e-2)
    for _ in range(50):
        optimizer.zero_grad()
        loss(model(X), y).backward()
        optimizer.step()

    def operators(dtype: torch.dtype) -> list[Any]:
        own = copy.deepcopy(model).to(dtype)
        problem = own, loss, list(own.parameters())
        data = [(X[some].to(dtype), y[some]) for some in (slice(50), slice(50, 80))]
        options = {"fisher_type": "type-2", "separate_weight_and_bias": False}
        return [
            PerSampleGradientLinearOperator(*problem, data),
            PerSampleGradientLinearOperator(*problem, [(queries.to(dtype), y[:3])]).dense().T,
            GGNLinearOperator(*problem, data),
            EKFACLinearOperator(*problem, data, **options),
        ]

    rows, _, A, K = operators(torch.float64)
    damping = 0.1 * float(K.trace()) / len(A.to_dense())
    M = A.to_dense() + damping * torch.eye(A.shape[0], dtype=torch.float64)
    given = operators(dtype)
    exact = rows.dense() @ torch.linalg.solve(M, given[1].double())
    found = certified_scores(*given, damping, top=5)
    mine = exact.gather(0, found.rows)
    assert (found.lower <= mine).all() and (mine <= found.upper).all()
    is_right = (found.rows == exact.topk(5, dim=0).indices).all(0)
    assert is_right[found.is_decided].all()
    if dtype == torch.float64:
        assert found.is_decided.all()
        assert (found.estimates.diff(dim=0) > 0).any()
    if dtype == torch.float64 and seed == 0:
        given[1] = given[1][:, 1]
        alone = certified_scores(*given, damping, top=5)
        assert alone.rows.tolist() == found.rows[:, 1].tolist() and alone.is_decided is True


def test_scores_of_a_zero_query():
    found = certified_scores(EYE, 0 * EYE[:, :2], G, STRUCTURES["EKFAC"](), 1.0, top=3)
    assert not found.is_decided.any() and not found.upper.any() and not found.lower.any()


def test_scores_of_other_parameters():
    reverse = dict(reversed(NAMED.items()))
    rows = build(PerSampleGradientLinearOperator, MODEL, DATA, params=reverse)
    kinds = GGNLinearOperator, KFACLinearOperator
    others = (build(kind, MODEL, DATA, params=NAMED) for kind in kinds)
    with pytest.raises(ValueError, match="in another order"):
        certified_scores(rows, EYE[0], *others, 1.0)
