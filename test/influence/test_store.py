"""Projected gradients of samples in a directory, against dense gradients and dense projections."""

from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from contract import CASES, dense, error
from torch import Tensor

from curvlinops import (
    EKFACLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    load,
    write_factors,
)
from curvlinops.influence import GradientStore, preconditioned
from curvlinops.operators import scores

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
    return cls(p.model, p.loss, p.params, p.data, batch_size_fn=p.batch_size_fn, **options)


def matrix_of(store: GradientStore, rows: PerSampleGradientLinearOperator) -> Tensor:
    """Return the projection as a matrix ``[D, R]``, from its columns."""
    places = rows.domain.split(torch.arange(rows.shape[1], dtype=torch.float64))
    pieces = []
    for p in store.projections:
        G, outputs, _ = p.shape
        sides = [x.of(places[x.name].reshape(1, -1)).reshape(G, outputs, -1) for x in p.views]
        where = torch.cat(sides, dim=2).long()
        B, A = (
            (torch.eye(n).unsqueeze(0) if x is None else x).double().expand(G, -1, -1)
            for n, x in zip(p.shape[1:], p.columns, strict=True)
        )
        for g in range(G):
            piece = torch.zeros(rows.shape[1], B.shape[2] * A.shape[2], dtype=torch.float64)
            piece[where[g].flatten()] = torch.kron(B[g].contiguous(), A[g].contiguous())
            pieces.append(piece)
    return torch.cat(pieces, dim=1)


def expected_scores(store: GradientStore, rows: Tensor, P: Tensor, damping: float) -> Tensor:
    """Return the scores of all rows with all rows, of dense gradients."""
    expected, start = torch.zeros(len(rows), len(rows), dtype=torch.float64), 0
    for x in store.projections:
        t = rows @ P[:, start : start + x.size]
        start += x.size
        C = t.T @ t / len(t) if x.eigenvalues is None else x.eigenvalues.flatten().diag()
        eye = torch.eye(len(C), dtype=torch.float64)
        expected += t @ torch.linalg.solve(C + damping * eye, t.T)
    return expected


@pytest.mark.parametrize("rank", [100, 2])
@pytest.mark.parametrize("name", NAMES)
def test_random_columns(name: str, rank: int, tmp_path: Path):
    check(name, rank, None, tmp_path)


@pytest.mark.extensive
@pytest.mark.parametrize("name", [x for x in problems.NAMES if x not in NAMES])
def test_random_columns_of_all_models(name: str, tmp_path: Path):
    check(name, 2, None, tmp_path)


@pytest.mark.parametrize("rank", [100, 2])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", [x for x in NAMES if x not in ("inner-steps", "weight-norm")])
def test_eigenvectors(name: str, basis: str, rank: int, tmp_path: Path):
    check(name, rank, basis, tmp_path)


def check(name: str, rank: int, basis: str | None, path: Path) -> None:
    """Compare scores, and the norms that are kept, with dense projections of dense gradients."""
    p, expected = problems.make(name), dense("gradients", name)
    rows, K = rows_of(p), None
    if basis is not None:
        K = basis_of(p, **BASES[basis])
    store, tolerance = GradientStore.write(rows, path, rank, K), 10 * p.tolerance
    P = matrix_of(store, rows)
    eye = torch.eye(P.shape[1], dtype=torch.float64)
    assert error(P.T @ P, eye) <= tolerance
    matrix = None if K is None else K.structure.to_dense().double()
    mean = (expected @ P).square().mean() if matrix is None else matrix.diagonal().mean()
    found = store.scores(rows, 0.3).double()
    assert error(found, expected_scores(store, expected, P, 0.3 * mean)) <= tolerance
    whole, part = expected.norm(dim=1), (expected @ P).norm(dim=1)
    assert error(store.kept, (part / whole).where(whole > 0, 1.0)) <= max(tolerance, 1e-7)
    if K is not None:
        values = torch.cat([x.eigenvalues.flatten() for x in store.projections])
        assert error(P.T @ matrix @ P, values.diag()) <= tolerance
        if rank == 100:
            eye = torch.eye(len(matrix), dtype=torch.float64)
            inverse = torch.linalg.inv(matrix + 0.3 * mean * eye)
            assert error(found, expected @ inverse @ expected.T) <= tolerance


def test_leading_eigenvectors(tmp_path: Path):
    """No columns of the factors have larger eigenvalues."""
    p = problems.make("mlp-ce-mean")
    K = basis_of(p, KFACLinearOperator)
    store = GradientStore.write(rows_of(p), tmp_path, 2, K)
    for x in store.projections:
        module = x.views[0].name.rpartition(".")[0]
        if x.inputs is not None:
            sides = K.gradient_covariances[module], K.input_covariances[module]
            B, A = (torch.linalg.eigvalsh(side)[-2:] for side in sides)
            assert (
                error(x.eigenvalues.flatten().sort()[0], torch.outer(B, A).flatten().sort()[0])
                <= 1e-12
            )


def test_queries_and_batches(tmp_path: Path):
    """Queries are other data with another loss; the split into batches changes nothing."""
    p = problems.make("mlp-ce-mean")
    E, rows = basis_of(p, EKFACLinearOperator), rows_of(p)
    other = torch.nn.CrossEntropyLoss(label_smoothing=0.5, reduction="sum")
    queries = PerSampleGradientLinearOperator(p.model, other, p.params, p.data[:1])
    expected = rows.dense() @ preconditioned(queries, E)
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
    assert error(store.scores(rows), expected @ preconditioned(rows, E)) <= 1e-12
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
    assert bool((store.kept < 0.1).all())


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
        store.scores(rows, 0.0)
    with pytest.raises(ValueError, match="no projections.*Choose another"):
        GradientStore(tmp_path / "nothing")
    with torch.no_grad():
        p.params[0].add_(0.1)
    with pytest.raises(ValueError, match=f"{tmp_path}.*differs in the values of"):
        store.scores(rows)


def test_incomplete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scores, "SECONDS", 0.0)
    p = problems.make("mlp-ce-mean")
    store = GradientStore.write(rows_of(p), tmp_path, 2)
    expected = store.scores(rows_of(p))
    file = max(tmp_path.iterdir(), key=lambda x: b"StoredGradients" in x.read_bytes())
    file.unlink()
    with pytest.raises(ValueError, match=f"{tmp_path} has the gradients of . of 5.*Continue"):
        GradientStore(tmp_path).scores(rows_of(p))
    store = GradientStore.write(rows_of(p), tmp_path, 2)
    assert torch.equal(store.scores(rows_of(p)), expected)
