"""Projected gradients of samples in a directory, against dense gradients and dense projections."""

from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import problems
import pytest
import torch
from contract import CASES, dense, error
from tables import core
from torch import Tensor

from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    load,
    write_factors,
)
from curvlinops.influence import GradientStore, preconditioned
from curvlinops.influence.projection import preconditioned_projections

#: Convolutions with groups, lookups, tied weights, attention, recurrence, norms, weight norm, a
#: PINN, and parameters without a rule; batches are unequal in size.
NAMES = [
    *("mlp-ce-mean", "mlp-ce-all-mean", "cnn", "transformer-tied", "lstm", "weight-norm"),
    *("padding-idx", "inner-steps", "functional", "pinn"),
]
BASES: dict[str, dict[str, Any]] = {
    "kfac": {"cls": KFACLinearOperator},
    "kfac, joint": {"cls": KFACLinearOperator, "separate_weight_and_bias": False},
    "ekfac": {"cls": EKFACLinearOperator},
    "ekfac, joint": {"cls": EKFACLinearOperator, "separate_weight_and_bias": False},
}


def rows_of(p: problems.Problem, **options: Any) -> PerSampleGradientLinearOperator:
    return CASES["gradients"].build(p, check_deterministic=False, **options)


def basis_of(p: problems.Problem, cls: type, **options: Any) -> Any:
    options = {"fisher_type": "empirical", "check_deterministic": False} | options
    return p.build(cls, **options)


def matrix_of(store: GradientStore, rows: PerSampleGradientLinearOperator) -> Tensor:
    """Return the projection as a matrix ``[D, R]``, from its columns."""
    places = rows.domain.split(torch.arange(rows.shape[1], dtype=torch.float64))
    pieces = []
    for p in store.projections:
        G, outputs, _ = p.shape
        sides = [x.of(places[x.name].reshape(1, -1)).reshape(G, outputs, -1) for x in p.views]
        where = torch.cat(sides, dim=2).long()
        terms = max([1, *(len(x) for x in p.columns if x is not None)])
        B, A = (
            (torch.eye(n).view(1, 1, n, n) if x is None else x).double().expand(terms, G, -1, -1)
            for n, x in zip(p.shape[1:], p.columns, strict=True)
        )
        for g in range(G):
            piece = torch.zeros(rows.shape[1], B.shape[3] * A.shape[3], dtype=torch.float64)
            products = [
                torch.kron(B[k, g].contiguous(), A[k, g].contiguous()) for k in range(terms)
            ]
            piece[where[g].flatten()] = sum(products)
            pieces.append(piece)
    return torch.cat(pieces, dim=1)


def with_moments(store: GradientStore, rows: Tensor, P: Tensor, relative: float) -> Tensor:
    """Return the scores of all rows with all rows, with the mean outer products of parameters."""
    expected, start = torch.zeros(len(rows), len(rows), dtype=torch.float64), 0
    damping = relative * (rows @ P).square().mean()
    for x in store.projections:
        t = rows @ P[:, start : start + x.size]
        start += x.size
        eye = torch.eye(x.size, dtype=torch.float64)
        expected += t @ torch.linalg.solve(t.T @ t / len(t) + damping * eye, t.T)
    return expected


def damped(K: Any, relative: float) -> Tensor:
    """Return the inverse of a dense matrix plus a multiple of its mean eigenvalue."""
    matrix = K.structure.to_dense().double()
    eye = torch.eye(len(matrix), dtype=torch.float64)
    return torch.linalg.inv(matrix + relative * matrix.diagonal().mean() * eye)


@pytest.mark.parametrize("rank", [100, 2])
@pytest.mark.parametrize("name", NAMES)
def test_random_columns(name: str, rank: int, tmp_path: Path):
    check(name, rank, None, tmp_path)


@pytest.mark.extensive
@pytest.mark.parametrize("name", [x for x in problems.MODEL_NAMES if x not in NAMES])
def test_random_columns_of_all_models(name: str, tmp_path: Path):
    check(name, 2, None, tmp_path)


WITH_BASES = [x for x in NAMES if x not in ("inner-steps", "weight-norm")]


@pytest.mark.parametrize(
    "name, basis, rank",
    core(
        [*product(WITH_BASES, ["ekfac, joint"], [2]), *product(["cnn"], BASES, [100])],
        product(WITH_BASES, BASES, [100, 2]),
    ),
)
def test_bases(name: str, basis: str, rank: int, tmp_path: Path):
    check(name, rank, basis, tmp_path)


def check(name: str, rank: int, basis: str | None, path: Path) -> None:
    """Compare scores with dense projections of dense gradients."""
    p, expected = problems.make(name), dense("gradients", name)
    rows, K = rows_of(p), None
    if basis is not None:
        K = basis_of(p, **BASES[basis])
    store, tolerance = GradientStore.write(rows, path, rank, K, 0.3), 10 * p.tolerance
    P, found = matrix_of(store, rows), store.scores(rows).double()
    if K is None:
        eye = torch.eye(P.shape[1], dtype=torch.float64)
        assert error(P.T @ P, eye) <= tolerance
        assert error(found, with_moments(store, expected, P, 0.3)) <= tolerance
    else:
        assert error(found, expected @ P @ P.T @ expected.T) <= tolerance
        if rank == 100:
            assert error(found, expected @ damped(K, 0.3) @ expected.T) <= tolerance
        assert all(x.size <= x.shape[0] * rank**2 for x in store.projections)


@pytest.mark.parametrize("name", ["mlp-ce-mean", "cnn", "transformer-tied"])
def test_unbiased(name: str):
    """The mean over the seeds is the damped inverse."""
    p = problems.make(name)
    K, rows = basis_of(p, **BASES["ekfac, joint"]), rows_of(p)
    exact, structure = damped(K, 0.1), K.structure
    damping, mean = 0.1 * float(structure.trace()) / len(exact), torch.zeros_like(exact)
    for seed in range(200):
        found = preconditioned_projections(structure, 2, damping, seed)
        P = matrix_of(SimpleNamespace(projections=found), rows)
        mean += P @ P.T / 200
    assert error(mean, exact) <= 0.25


def test_many_eigenvalues(tmp_path: Path):
    """Eight terms are as good as all, for eigenvalues over many orders of magnitude."""
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 24, bias=False).double()
    scales = torch.logspace(-3, 0, 24, dtype=torch.float64)
    data = [(torch.randn(100, 24).double() * scales, torch.randn(100, 24).double())]
    args = model, torch.nn.MSELoss(), [model.weight], data
    rows, K = PerSampleGradientLinearOperator(*args), EKFACLinearOperator(*args)
    P = matrix_of(GradientStore.write(rows, tmp_path, 23, K), rows)
    assert P.shape == (24**2, 23**2)
    exact = damped(K, 0.1)
    assert error(P @ P.T, exact) <= 0.3
    share = (P * torch.linalg.solve(exact, P)).sum() / 24**2
    assert 0.95 < float(share) < 1.05  # of the trace of the identity


def test_queries_and_batches(tmp_path: Path):
    """Queries are other data with another loss; the split into batches changes nothing."""
    p = problems.make("mlp-ce-mean")
    E, rows = basis_of(p, EKFACLinearOperator), rows_of(p)
    other = torch.nn.CrossEntropyLoss(label_smoothing=0.5, reduction="sum")
    queries = PerSampleGradientLinearOperator(p.model, other, p.params, p.data[:1])
    expected = rows.scores(preconditioned(queries, E))
    for i, data in enumerate((p.data, problems.rebatched(p).data)):
        rows = PerSampleGradientLinearOperator(p.model, p.loss, p.params, data)
        store = GradientStore.write(rows, tmp_path / str(i), basis=E)
        assert error(store.scores(queries), expected) <= 1e-12
        again = GradientStore(tmp_path / str(i))  # without the training data
        assert error(again.scores(queries), expected) <= 1e-12


def test_factors_from_files_and_subsampling(tmp_path: Path):
    p = problems.make("cnn")
    E = basis_of(p, EKFACLinearOperator)
    write_factors(E, tmp_path / "factors")
    rows = rows_of(p, subsampling=[3, 0])
    store = GradientStore.write(rows, tmp_path / "store", 100, load(tmp_path / "factors"))
    expected = dense("gradients", "cnn")[[3, 0]]
    assert error(store.scores(rows), expected @ rows.domain.join(preconditioned(rows, E))) <= 1e-12
    none = GradientStore.write(rows_of(p, subsampling=[]), tmp_path / "none", 2)
    assert none.scores(rows).shape == (0, 2)


def test_lookups_are_not_written_as_ones(tmp_path: Path):
    """A table of a million rows: ones among zeros would take gigabytes."""
    torch.manual_seed(0)
    table = torch.nn.Embedding(10**6, 2, sparse=False)
    model = torch.nn.Sequential(table, torch.nn.Flatten(), torch.nn.Linear(2 * 700, 2))
    data = [(torch.randint(10**6, (1, 700)), torch.tensor([1]))]
    params = [table.weight]
    rows = PerSampleGradientLinearOperator(
        model, torch.nn.CrossEntropyLoss(), params, data, check_deterministic=False
    )
    store = GradientStore.write(rows, tmp_path, 1)
    assert store.projections[0].size == 1
    assert store.scores(rows).shape == (1, 1)


REFUSED = {
    "no rows": (lambda p: (basis_of(p, KFACLinearOperator), {}), TypeError, "PerSampleGradient"),
    "no rank": (lambda p: (rows_of(p), {"rank": 0}), ValueError, "rank"),
    "no basis": (lambda p: (rows_of(p), {"basis": rows_of(p)}), ValueError, "basis must be"),
    "other parameters": (
        lambda p: (rows_of(p), {"basis": basis_of(problems.make("cnn"), KFACLinearOperator)}),
        ValueError,
        "other parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path):
    make, kind, message = REFUSED[case]
    rows, options = make(problems.make("mlp-ce-mean"))
    with pytest.raises(kind, match=message):
        GradientStore.write(rows, tmp_path / "x", **options)
    assert not (tmp_path / "x").exists()


def test_refused_queries(tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    rows = rows_of(p)
    store = GradientStore.write(rows, tmp_path / "store", 2)
    with pytest.raises(ValueError, match="differs in the shape of|differs in parameters"):
        store.scores(rows_of(problems.make("cnn")))
    with pytest.raises(ValueError, match="larger relative_damping"):
        GradientStore.write(rows, tmp_path / "singular", 2, relative_damping=0.0).scores(rows)
    with pytest.raises(ValueError, match="'2.weight'.*larger relative_damping"):
        GradientStore.write(rows, tmp_path / "other", 2, basis_of(p, EKFACLinearOperator), 0.0)
    with pytest.raises(ValueError, match="no projections.*Choose another"):
        GradientStore(tmp_path / "nothing")
    with torch.no_grad():
        p.params[0].add_(0.1)
    with pytest.raises(ValueError, match=f"{tmp_path}.*differs in the values of"):
        store.scores(rows)
