"""Preconditioned queries and scores with them, against dense matrices of plain autograd."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import problems
import pytest
import reference
import torch
from contract import CASES, error, vectors
from live_bytes import LiveBytes
from models import Using
from problems import Problem
from torch import Tensor, nn

from curvlinops import (
    CGInverseLinearOperator,
    DiagonalLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    IdentityLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    KroneckerProductLinearOperator,
    PerSampleGradientLinearOperator,
    functional_variance,
    load,
    write_factors,
)
from curvlinops.influence import preconditioned, score_batches, self_scores, top_scores

#: Unequal batches; dictionaries as batches; convolutions; parameters without a rule.
NAMES = ["mlp-ce-mean", "dict-batch", "cnn", "functional", "lstm"]


def rows_of(p: Problem, **options: Any) -> PerSampleGradientLinearOperator:
    return CASES["gradients"].build(p, check_deterministic=False, **options)


def ekfac_of(p: Problem, cls: type = EKFACLinearOperator) -> Any:
    return p.build(cls, fisher_type="empirical", separate_weight_and_bias=False)


def damped(K: Any, relative: float) -> Tensor:
    """Return the inverse of a dense matrix plus a multiple of its mean eigenvalue."""
    matrix = K.structure.to_dense().double()
    eye = torch.eye(len(matrix), dtype=torch.float64)
    return torch.linalg.inv(matrix + relative * matrix.diagonal().mean() * eye)


@pytest.mark.parametrize("cls", [KFACLinearOperator, EKFACLinearOperator])
@pytest.mark.parametrize("name", NAMES)
def test_scores(name: str, cls: type):
    p = problems.make(name)
    g, rows, K = reference.per_sample_gradients(p), rows_of(p), ekfac_of(p, cls)
    tolerance = 100 * p.tolerance
    for relative in (0.1, 2.0):
        expected = g @ damped(K, relative) @ g.T
        P = preconditioned(rows, K, relative)
        assert error(rows.scores(P), expected) <= tolerance
        assert error(self_scores(rows, K, relative), expected.diagonal()) <= tolerance
    torch.testing.assert_close(
        preconditioned(rows, K), preconditioned(rows, K, 0.1), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", [*NAMES, "segmentation"])
def test_functional_variance(name: str):
    """The diagonal blocks of ``J S J^T``, with the inverses of structures and of a GGN."""
    p = problems.make(name)
    dense, J = reference.jacobian(p), CASES["jacobian"].build(p)
    num = J.codomain.shapes[""][0]
    G, K = CASES["ggn"].build(p).damped(1.0), ekfac_of(p).damped({"*": 0.5}).inverse()
    eye = torch.eye(len(dense.T), dtype=torch.float64)
    inverse = torch.linalg.inv(reference.ggn(p) + eye)
    for S, matrix in (
        (K, K.to_dense()),
        (KroneckerProductLinearOperator(K.to_dense()), K.to_dense()),  # on plain vectors
        (CGInverseLinearOperator(G, rtol=1e-10), inverse),
    ):
        whole = (dense @ matrix.double() @ dense.T).unflatten(0, (num, -1)).unflatten(2, (num, -1))
        expected = torch.stack([whole[n, :, n] for n in range(num)])
        assert error(functional_variance(J, S), expected) <= 100 * p.tolerance


@pytest.mark.parametrize("rank", [None, 100])
def test_parameters_in_another_order(rank: int | None):
    p = problems.make("mlp-ce-mean")
    named = {name: x for name, x in p.model.named_parameters() if any(x is y for y in p.params)}
    forward, backward = (
        replace(p, params=dict(order(named.items()))) for order in (list, reversed)
    )
    rows = rows_of(forward)
    P = preconditioned(rows, ekfac_of(forward), rank=rank)
    assert error(rows_of(backward).scores(P), rows.scores(P)) <= 1e-12
    assert (
        error(top_scores(rows_of(backward), P, 2).values, rows.scores(P).topk(2, 0).values) <= 1e-12
    )
    if rank is None:
        assert error((rows_of(backward) @ P), rows.scores(P)) <= 1e-12


def test_sign():
    """A step of training on the sample with the largest score lowers the query's loss."""
    p = problems.make("mlp-ce-mean")
    query = rows_of(p, subsampling=[1])
    scores = rows_of(p).scores(preconditioned(query, ekfac_of(p)))[:, 0]
    assert int(scores.argmax()) == 1
    X, y = (torch.cat([batch[i] for batch in p.data]) for i in (0, 1))

    def loss_after(n: int) -> float:
        (row,) = reference.per_sample_gradients(replace(p, data=[(X[n : n + 1], y[n : n + 1])]))
        step = damped(ekfac_of(p), 0.1) @ row
        vector = nn.utils.parameters_to_vector(p.params)
        with torch.no_grad():
            nn.utils.vector_to_parameters(vector - 1e-4 * step, p.params)
            after = float(p.loss(p.model(X[1:2]), y[1:2]))
            nn.utils.vector_to_parameters(vector, p.params)
        return after

    after = torch.tensor([loss_after(n) for n in range(len(X))], dtype=torch.float64)
    assert torch.equal(after.argsort(), scores.argsort(descending=True))


@pytest.mark.parametrize("name", NAMES)
def test_low_rank(name: str):
    """Queries of one batch after the other are those of all at once."""
    p = problems.make(name)
    rows, E = rows_of(p), ekfac_of(p)
    for queries in (rows, rows_of(p, subsampling=[3, 0, 2])):
        whole = rows.low_rank(preconditioned(queries, E), 2)
        low = preconditioned(queries, E, rank=2)
        assert (low.rank, low.num_bytes, low.shapes) == (2, whole.num_bytes, whole.shapes)
        assert error(rows.scores(low), rows.scores(whole)) <= 10 * p.tolerance
        torch.testing.assert_close(low.relative_error, whole.relative_error)
        torch.testing.assert_close(low.error_by_parameter, whole.error_by_parameter)


@pytest.mark.parametrize("rank", [None, 1])
def test_no_queries(rank: int | None):
    p = problems.make("mlp-ce-mean")
    P = preconditioned(rows_of(p, subsampling=[]), ekfac_of(p), rank=rank)
    assert rows_of(p).scores(P).shape == (5, 0)


def test_curvature_of_another_dtype():
    p = problems.make("mlp-ce-mean")
    E = ekfac_of(p)
    expected = self_scores(rows_of(p), E)
    p.model.float()
    low = replace(p, params=list(p.model.parameters()), data=[(X.float(), y) for X, y in p.data])
    found = self_scores(rows_of(low), E)
    assert found.dtype == torch.float32 and error(found, expected) <= 1e-5


def test_memory_of_queries():
    """Whole vectors are in memory for one batch of queries at a time."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    data = [(torch.randn(1, 64), torch.randn(1, 64)) for _ in range(20)]
    args = model, nn.MSELoss(), list(model.parameters())
    queries = PerSampleGradientLinearOperator(*args, data)
    K = IdentityLinearOperator(queries.domain)
    _, peak = LiveBytes().peaks(lambda: preconditioned(queries, K, rank=1))
    assert peak <= 10 * 4 * queries.shape[1]  # half of all whole vectors


def test_factors_in_a_directory(tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    rows, E = rows_of(p), ekfac_of(p)
    K = write_factors(E, tmp_path / "factors", parts=2)
    expected = rows.scores(preconditioned(rows, E))
    for factors in (K, load(tmp_path / "factors")):
        P = preconditioned(rows, factors)
        assert error(rows.scores(P, out=tmp_path / "scores"), expected) <= 1e-12
    assert len(list((tmp_path / "scores").iterdir())) == 1


# --- along training


@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_checkpoints(cls: type):
    """What steps at checkpoints on each sample do to queries; Adam's with its second moments."""
    p = problems.make("mlp-ce-mean")
    p = replace(p, params=dict(p.model.named_parameters()))
    optimizer, is_adam = cls(p.model.parameters(), lr=0.05), cls is torch.optim.AdamW
    rows, queries = rows_of(p), rows_of(p, subsampling=[4, 0])
    scores = expected = torch.zeros(5, 2).double()
    squares, rates = torch.zeros(rows.shape[1]).double(), (0.05, 0.02, 0.01)
    for step, rate in enumerate(rates, 1):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        X, y = p.data[0]
        p.loss(p.model(X), y).backward()
        gradient = torch.cat([x.grad.flatten() for x in p.params.values()])
        squares = 0.999 * squares + 0.001 * gradient.square()
        optimizer.step()

        P = queries.dense().T
        if is_adam:
            P = preconditioned(queries, adam(optimizer, p.params), relative_damping=0.0)
        scores = scores + rate * rows.scores(P)

        g = reference.per_sample_gradients(p)
        scale = (squares / (1 - 0.999**step)).sqrt() + 1e-8 if is_adam else 1.0
        expected = expected + rate * g @ (g[[4, 0]] / scale).T
    assert error(scores, expected) <= 1e-10


def adam(optimizer: torch.optim.Optimizer, params: dict) -> DiagonalLinearOperator:
    """What Adam divides by, as on the page about influence."""
    (group,) = optimizer.param_groups
    states = {name: optimizer.state[x] for name, x in params.items()}
    return DiagonalLinearOperator(
        {
            name: (x["exp_avg_sq"] / (1 - group["betas"][1] ** int(x["step"]))).sqrt()
            + group["eps"]
            for name, x in states.items()
        }
    )


# --- batch by batch


@pytest.mark.parametrize("subsampling", [None, [4, 0, 3, 3]])
@pytest.mark.parametrize("name", [*NAMES, "low rank"])
def test_batches(name: str, subsampling: list[int] | None):
    p = problems.make("mlp-ce-mean" if name == "low rank" else name)
    rows = rows_of(p, subsampling=subsampling)
    P = vectors(rows, 3)
    P = rows.low_rank(P, 1) if name == "low rank" else P
    expected = rows.scores(P)
    found, order = torch.zeros_like(expected), []
    for numbers, scores in score_batches(rows, P):
        found[numbers] = scores
        order.append(len(numbers))
    assert torch.equal(found, expected)
    assert sum(order) == len(expected)
    for largest, k in ((True, 1), (False, 2), (True, len(expected))):
        top, dense = top_scores(rows, P, k, largest), expected.topk(k, 0, largest)
        assert torch.equal(top.values, dense.values)
        assert torch.equal(expected.gather(0, top.indices), dense.values)
    if name != "low rank":
        one = rows.scores(P[:, 0])
        assert torch.equal(top_scores(rows, P[:, 0], 2).values, one.topk(2).values)


def test_positions():
    """Batches may have sequences of different lengths."""
    torch.manual_seed(0)
    layers = {"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 4)}
    model = Using(lambda m, x: m.head(m.embed(x)).transpose(1, 2), **layers).double()
    data = [(torch.randint(5, (2, t)), torch.randint(4, (2, t))) for t in (3, 6)]
    p = Problem.of(model, nn.CrossEntropyLoss(), data)
    rows = rows_of(p)
    P = vectors(rows, 2)
    found = [scores for _, scores in score_batches(rows, P, per_position=True)]
    assert [x.shape for x in found] == [(2, 3, 2), (2, 6, 2)]
    assert error(torch.cat([x.sum(1) for x in found]), rows.scores(P)) <= 1e-12


class Recorded(list):
    """Data that tells how many batches were read, and draws random numbers."""

    num_read = 0

    def __iter__(self) -> Iterator:
        for batch in super().__iter__():
            self.num_read += 1
            torch.rand(())
            yield batch


def test_batches_are_read_when_asked_for():
    """Between batches the caller may train, sample, and stop."""
    p = problems.make("mlp-ce-mean")
    data = Recorded([*p.data, *p.data])
    rows = rows_of(replace(p, data=data))
    P = vectors(rows, 2)
    expected = rows.scores(P)
    data.num_read, state = 0, torch.get_rng_state()
    batches = score_batches(rows, P)
    assert data.num_read == 0
    numbers, scores = next(batches)
    assert data.num_read == 1
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(scores, expected[numbers])
    assert not torch.is_inference_mode_enabled()
    with torch.no_grad():
        assert not p.model(p.data[0][0]).requires_grad
        p.params[0].mul_(2.0)
    numbers, scores = next(batches)
    assert data.num_read == 2
    assert torch.equal(scores, rows.scores(P)[numbers])
    del batches
    assert torch.equal(torch.get_rng_state(), state)


def test_data_with_random_numbers():
    """Each pass has the random numbers of a single one."""
    p = problems.make("mlp-ce-mean")

    class Noisy(list):
        def __iter__(self) -> Iterator:
            for X, y in super().__iter__():
                yield X + torch.randn_like(X), y

    rows = rows_of(replace(p, data=Noisy(p.data)))
    P = vectors(rows, 2)
    torch.manual_seed(1)
    expected = rows.scores(P)
    found = []
    for _, scores in score_batches(rows, P):
        found.append(scores)
        torch.rand(3)
        torch.manual_seed(7)
    assert torch.equal(torch.cat(found), expected)


def test_memory_of_scores():
    torch.manual_seed(0)
    model = nn.Linear(2, 1, bias=False)
    data = [(torch.randn(8, 2), torch.randn(8, 1)) for _ in range(40)]
    rows = PerSampleGradientLinearOperator(model, nn.MSELoss(), [model.weight], data)
    P = vectors(rows, 500)
    assert top_scores(rows, P, 2).values.shape == (2, 500)
    _, peak = LiveBytes().peaks(lambda: top_scores(rows, P, 2))
    assert peak <= 0.5 * 4 * 320 * 500  # half of all scores


def test_memory_of_variances():
    """The rows of one batch are in memory at a time, and their products."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.Tanh(), nn.Linear(40, 5))
    data, params = [(torch.randn(2, 30), None) for _ in range(40)], list(model.parameters())
    J = JacobianLinearOperator(model, params, data)
    S = 2.0 * IdentityLinearOperator(J.space)
    expected = 2.0 * J.to_dense().unflatten(0, (80, 5)).square().sum(2)
    found = functional_variance(J, S)
    torch.testing.assert_close(found.diagonal(dim1=1, dim2=2), expected)
    _, peak = LiveBytes().peaks(lambda: functional_variance(J, S))
    assert peak <= 4 * (4 * 10 * J.shape[1] + 80 * 25)  # of 400 rows


def test_changed_data():
    p = problems.make("mlp-ce-mean")
    data = [*p.data]
    rows = rows_of(replace(p, data=data))
    P = vectors(rows, 2)
    data.append(data[0])
    with pytest.raises(RuntimeError, match="Build a new operator"):
        top_scores(rows, P, 2)
    del data[1:]
    with pytest.raises(RuntimeError, match="has 3 rows|build a new operator"):
        top_scores(rows, P, 2)


def test_error_in_a_batch():
    p = problems.make("mlp-ce-mean")
    rows = rows_of(p)
    p.data[1] = (p.data[1][0] * float("nan"), p.data[1][1])
    with pytest.raises(ValueError, match="finite") as caught:
        list(score_batches(rows, vectors(rows, 1)))
    assert "batch 1" in "".join([str(caught.value), *caught.value.__notes__])


def unequal_outputs() -> JacobianLinearOperator:
    """Sequences of other lengths in each batch."""
    model = nn.Linear(3, 2)
    data = [(torch.randn(2, length, 3), None) for length in (3, 2)]
    return JacobianLinearOperator(model, list(model.parameters()), data)


REFUSED = {
    "no gradients": (lambda p, r, P: preconditioned(ekfac_of(p), ekfac_of(p)), TypeError, "PerS"),
    "no gradients, top": (lambda p, r, P: top_scores(ekfac_of(p), P, 1), TypeError, "PerSample"),
    "no inverse": (
        lambda p, r, P: preconditioned(r, p.build(GGNLinearOperator)),
        TypeError,
        "K must be.*got GGN",
    ),
    "other parameters": (
        lambda p, r, P: self_scores(r, ekfac_of(problems.make("cnn"))),
        ValueError,
        "K has other parameters",
    ),
    "variance of gradients": (
        lambda p, r, P: functional_variance(r, ekfac_of(p)),
        TypeError,
        "J must be a JacobianLinearOperator.*PerSample",
    ),
    "variance by a matrix": (
        lambda p, r, P: functional_variance(CASES["jacobian"].build(p), P @ P.T),
        TypeError,
        "covariance an operator.*Tensor",
    ),
    "variance of another model": (
        lambda p, r, P: functional_variance(
            CASES["jacobian"].build(p), ekfac_of(problems.make("cnn"))
        ),
        ValueError,
        "spaces of dimension",
    ),
    "variance of unequal batches": (
        lambda p, r, P: functional_variance(
            unequal := unequal_outputs(), 1.0 * unequal.T @ unequal
        ),
        ValueError,
        r"Batches differ in outputs for a sample: \[6, 4\]",
    ),
    "damping": (
        lambda p, r, P: preconditioned(r, ekfac_of(p), -0.1),
        ValueError,
        "relative_damping must be a finite number >= 0",
    ),
    "rank": (lambda p, r, P: preconditioned(r, ekfac_of(p), rank=0), ValueError, "rank"),
    "k": (lambda p, r, P: top_scores(r, P, 6), ValueError, "k is 6, but there are 5 rows"),
    "no k": (lambda p, r, P: top_scores(r, P, 0), ValueError, "k must be"),
    "vectors": (lambda p, r, P: score_batches(r, P[1:]), ValueError, "length|shape"),
    "positions of terms": (
        lambda p, r, P: score_batches(rows_of(p, terms="term"), P, per_position=True),
        ValueError,
        "per_position",
    ),
    "followed": (lambda p, r, P: score_batches(r, P.requires_grad_()), ValueError, "detach"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    call, kind, message = REFUSED[case]
    p = problems.make("mlp-ce-mean")
    rows = rows_of(p)
    with pytest.raises(kind, match=message):
        call(p, rows, vectors(rows, 2))
