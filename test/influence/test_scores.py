"""Inner products of the gradients of samples with vectors, against plain autograd."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import problems
import pytest
import reference
import torch
from contract import CASES, dense, error, vectors
from live_bytes import LiveBytes
from models import Using
from problems import Problem
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from curvlinops import PerSampleGradientLinearOperator
from curvlinops.influence import row_files
from curvlinops.layers import gradients


def rows_of(p: Problem, **options: Any) -> PerSampleGradientLinearOperator:
    return CASES["gradients"].build(p, check_deterministic=False, **options)


def test_kinds_of_vectors():
    p = problems.make("mlp-ce-mean")
    rows = rows_of(p)
    P = vectors(rows, 2)
    expected = rows.scores(P)
    found = rows.scores(P.numpy())
    assert isinstance(found, np.ndarray)
    assert np.allclose(found, expected)
    as_dict = rows.domain.split(P)
    assert torch.equal(rows.scores(list(as_dict.values())), expected)
    one = rows.scores({name: part[..., 0] for name, part in as_dict.items()})
    assert torch.equal(one, rows.scores(P[:, 0]))
    with pytest.raises(ValueError, match="length|shape"):
        rows.scores(P[1:])


def test_derivatives_with_respect_to_vectors(tmp_path: Path):
    rows = rows_of(problems.make("transformer-tied"))
    P = vectors(rows, 3).requires_grad_()
    weights = torch.randn(rows.shape[0], 3, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((rows.scores(P) * weights).sum(), P)
    assert error(gradient, rows.dense().T @ weights) <= 1e-12
    for options in ({"out": tmp_path / "scores"}, {"per_position": True}):
        with pytest.raises(ValueError, match="not differentiable.*detach"):
            rows.scores(P, **options)
    with pytest.raises(ValueError, match="not differentiable.*detach"):
        rows.low_rank(P, 2)


def test_batches_without_rows(tmp_path: Path):
    p = sequences(5, 5)
    P, whole = vectors(rows_of(p), 2), rows_of(p).scores(vectors(rows_of(p), 2), per_position=True)
    X, y = p.data[0]
    empty = X[:0], y[:0]
    rows = rows_of(replace(p, data=[empty, p.data[0], empty, p.data[1]]))
    for out in (None, tmp_path / "scores", tmp_path / "scores"):
        scores = rows.scores(P, out=out, per_position=True)
        torch.testing.assert_close(scores, whole)
    none = rows_of(p, subsampling=[])
    assert none.scores(P).shape == (0, 2)
    assert none.scores(P[:, 0]).shape == (0,)
    for _ in range(2):
        assert none.scores(P, out=tmp_path / "none").shape == (0, 2)


def test_one_query_for_one_output(tmp_path: Path):
    """A column of queries has one entry for the bias, with a stride."""
    model = nn.Linear(3, 1).double()
    data = [(torch.randn(1, 3).double(), torch.randn(1, 2)[:, 1:].double()) for _ in range(4)]
    p = Problem.of(model, nn.MSELoss(), data)
    rows, P = rows_of(p), vectors(rows_of(p), 3)
    expected = reference.per_sample_gradients(p) @ P
    queries = (P[:, 1], P[:, 1:2], P.numpy()[:, 1])
    for number, (query, column) in enumerate(zip(queries, (1, slice(1, 2), 1), strict=True)):
        for _ in range(2):
            found = rows.scores(query, out=tmp_path / str(number))
            assert error(torch.as_tensor(found), expected[:, column]) <= 1e-12


def test_products_without_rules():
    """Parameters without a rule need one pass for a batch in products, not one for each sample."""
    p = problems.make("lstm-packed")
    rows = rows_of(p)
    P, calls = vectors(rows, 3), []
    rows @ P  # which finds out that a parameter has no rule
    hook = p.model.register_forward_hook(lambda *_: calls.append(1))
    found = rows @ P
    hook.remove()
    assert len(calls) == len(p.data)
    assert error(found, dense("gradients", "lstm-packed") @ P) <= p.tolerance


def test_memory_of_one_layer():
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(128, 128, bias=False), nn.Tanh())]
    model = nn.Sequential(*layers)
    data = [(torch.randn(64, 128), torch.randn(64, 128)) for _ in range(2)]
    rows = PerSampleGradientLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    P = vectors(rows, 4)
    assert rows.low_rank(P, 8).num_bytes < P.nbytes / 4
    _, peak = LiveBytes().peaks(lambda: rows.scores(P))
    of_batch = 64 * 4 * rows.shape[1]
    assert peak <= 0.3 * of_batch


class Read(TorchDispatchMode):
    """Counts the numbers that products of matrices read."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple, kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            self.numbers += args[0].numel() + args[1].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", ["[D, K]", "[K, D]", "rank 1"])
def test_some_samples_at_a_time(order: str, monkeypatch: pytest.MonkeyPatch):
    """Parts of a batch read the vectors once each, not once for each sample."""
    torch.manual_seed(0)
    model, data = nn.Linear(20, 20, bias=False), [(torch.randn(64, 20), torch.randn(64, 20))]
    rows = PerSampleGradientLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
    P = vectors(rows, 8)
    expected, size = rows.dense() @ P, P.numel()
    P = P.T.contiguous().T if order == "[K, D]" else P
    if order == "rank 1":
        P = rows.low_rank(P, 1)
        (part,) = P.columns.values()
        expected, size = rows.dense() @ part.dense().flatten(1).T, P.num_bytes // 4
    monkeypatch.setattr(gradients, "BYTES", 4 * 16 * (size // 20))
    with Read() as read:
        found = rows.scores(P)
    assert error(found, expected) <= 1e-5
    assert 4 * size < read.numbers <= 30 * size


# --- by position


def tokens(m: Any, x: Tensor) -> Tensor:
    """A transformer of layers ``m``: ``[N, T]`` to ``[N, C, T]``."""
    h = torch.tanh(m.norm(m.embed(x)))
    q, k, v = m.q(h), m.k(h), m.v(h)
    h = h + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return m.head(torch.tanh(m.out(h))).transpose(1, 2)


def sequences(*lengths: int, **parts: nn.Module) -> Problem:
    torch.manual_seed(0)
    layers = {name: nn.Linear(3, 3) for name in ("q", "k", "v", "out")}
    layers |= {"embed": nn.Embedding(7, 3), "norm": nn.LayerNorm(3, eps=0.1)}
    model = Using(tokens, head=nn.Linear(3, 4), **layers | parts).double()
    data = [
        (torch.randint(7, (n, t)), torch.randint(4, (n, t)))
        for n, t in zip((3, 2), lengths, strict=True)
    ]
    return Problem.of(model, nn.CrossEntropyLoss(), data)


def by_position(p: Problem, P: Tensor) -> Tensor:
    """Scores ``[N, T, K]``; at other positions, layers have constants in place of parameters."""
    constant = deepcopy(p.model)

    def only(t: int, name: str) -> Callable[[Tensor], Tensor]:
        own, other = getattr(p.model, name), getattr(constant, name)
        return lambda h: torch.cat([other(h[:, :t]), own(h[:, t : t + 1]), other(h[:, t + 1 :])], 1)

    rows = []
    for X, y in p.data:
        for n, t in product(range(len(X)), range(X.shape[1])):
            layers = {name: only(t, name) for name, _ in p.model.named_children()}
            output = tokens(SimpleNamespace(**layers), X[n : n + 1])
            grads = torch.autograd.grad(p.loss(output, y[n : n + 1]) * y.shape[1], p.params)
            rows.append(torch.cat([g.flatten() for g in grads]))
    return (torch.stack(rows) @ P).unflatten(0, (-1, X.shape[1]))


def test_scores_of_positions():
    p = sequences(5, 5)
    rows = rows_of(p)
    P = vectors(rows, 3)
    scores = rows.scores(P, per_position=True)
    assert scores.shape == (5, 5, 3)
    assert error(scores, by_position(p, P)) <= 1e-10
    assert error(scores.sum(1), rows.scores(P)) <= 1e-10
    assert rows.scores(P[:, 0], per_position=True).shape == (5, 5)
    assert error(rows.scores(rows.low_rank(P, 4), per_position=True), scores) <= 1e-10


#: The positions twice: once each in two halves.
TWICE = Using(lambda s, x: s.inner(x.mean(1, keepdim=True)).expand_as(x), inner=nn.Linear(3, 3))


@pytest.mark.parametrize(
    "part, message",
    [
        (
            {"v": nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))},
            "'v.parametrizations.weight.original.' has no positions",
        ),
        ({"v": TWICE}, "'v.inner.weight' has 1 positions for each sample"),
    ],
)
def test_layers_without_the_positions(part: dict[str, nn.Module], message: str):
    rows = rows_of(sequences(5, 5, **part))
    with pytest.raises(ValueError, match=f"{message}.*leave the others out of params"):
        rows.scores(vectors(rows, 1), per_position=True)


def test_sequences_of_other_lengths(tmp_path: Path):
    rows = rows_of(sequences(5, 4))
    P = vectors(rows, 1)
    for out in (None, tmp_path / "scores"):
        with pytest.raises(ValueError, match="sequences of 5 and of 4 positions.*pad all"):
            rows.scores(P, out=out, per_position=True)
    terms = rows_of(sequences(5, 5), terms="term")
    with pytest.raises(ValueError, match="omit terms='term'"):
        terms.scores(P, per_position=True)


# --- low rank


@pytest.mark.parametrize("name", ["mlp-mse-mean", "cnn", "transformer-tied"])
def test_low_rank(name: str):
    p = problems.make(name)
    rows = rows_of(p)
    P = vectors(rows, 3)
    exact = rows.scores(P)
    full = rows.low_rank(P, 100)
    assert error(rows.scores(full), exact) <= 1e-12
    assert not full.relative_error.any()
    low = rows.low_rank(P, 2)
    # the nearest matrices of rank two, by the singular value decomposition
    columns, squares = [], 0.0
    for x, part in zip(p.params, P.split([x.numel() for x in p.params]), strict=True):
        each = []
        for column in part.T:
            matrix = column.view(len(x), -1) if x.ndim > 1 else column.view(-1, 1)
            U, S, V = torch.linalg.svd(matrix, full_matrices=False)
            each.append((U[:, :2] * S[:2] @ V[:2]).flatten())
        columns.append(torch.stack(each, 1))
        squares = squares + (columns[-1] - part).square().sum(0)
    nearest = torch.cat(columns)
    assert error(low.relative_error, squares.sqrt() / P.norm(dim=0)) <= 1e-8
    scores = rows.scores(low)
    assert error(scores, reference.per_sample_gradients(p) @ nearest) <= 1e-8
    bound = rows.norms()[:, None] * P.norm(dim=0) * low.relative_error
    assert bool(((scores - exact).abs() <= bound * (1 + 1e-9)).all())
    one = rows.low_rank(P[:, 0], 2)
    assert error(rows.scores(one), scores[:, 0]) <= 1e-12
    with pytest.raises(ValueError, match="low rank already"):
        rows.low_rank(one, 1)
    other = rows_of(replace(p, params=p.params[:2]))
    with pytest.raises(ValueError, match="other parameters"):
        other.scores(low)


@pytest.mark.parametrize("size", [1.0, 1e-100, 1e-160, 1e-250])
def test_low_rank_of_small_vectors(size: float):
    """Squares of the entries may vanish. A learned temperature has no axes."""
    torch.manual_seed(0)
    parts = {"layer": nn.Linear(6, 5), "temperature": torch.tensor(2.0)}
    model = Using(lambda s, X: s.layer(X) * s.temperature, **parts).double()
    data = [(torch.randn(4, 6).double(), torch.randint(5, (4,)))]
    params = list(model.parameters())
    rows = PerSampleGradientLinearOperator(model, nn.CrossEntropyLoss(), params, data)
    P = vectors(rows, 3)
    plain, small = rows.low_rank(P, 2), rows.low_rank(size * P, 2)
    assert error(small.relative_error, plain.relative_error) <= 1e-12
    assert float(plain.relative_error.min()) > 0.01
    assert error(rows.scores(small) / size, rows.scores(plain)) <= 1e-12
    assert rows.scores(rows.low_rank(P[:, :0], 2)).shape == (4, 0)


# --- files


def test_files(tmp_path: Path):
    p = problems.make("mlp-ce-mean")
    rows = rows_of(p)
    P, low = vectors(rows, 3), rows.low_rank(vectors(rows, 3), 1)
    chosen = rows_of(p, subsampling=[4, 0, 3])
    cases = {"all": (rows, P), "NumPy": (rows, P.numpy()), "one": (rows, P[:, 0])}
    cases |= {"low rank": (rows, low), "some": (chosen, P)}
    for name, (of, columns) in cases.items():
        expected = of.scores(columns)
        for _ in range(2):  # computed, then found
            found = of.scores(columns, out=str(tmp_path / name))
            assert type(found) is type(expected)
            assert error(torch.as_tensor(found), torch.as_tensor(expected)) <= 1e-14
            assert len(list((tmp_path / name).iterdir())) == 1
    with pytest.raises(ValueError, match="should be a directory.*np.save"):
        rows.scores(P, out=tmp_path / "scores.npy")


def test_files_of_other_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Scores are continued if samples are in other batches after the first one."""
    monkeypatch.setattr(row_files, "SECONDS", 0.0)
    p = problems.make("mlp-ce-mean")
    (X, y), rows = p.data[1], rows_of(replace(p, data=[*p.data, *p.data]))
    P = vectors(rows, 2)
    expected = rows.scores(P, out=tmp_path)
    min(tmp_path.iterdir()).unlink()
    again = [p.data[0], (X[:1], y[:1]), (X[1:], y[1:]), *p.data]
    found = rows_of(replace(p, data=again)).scores(P, out=tmp_path)
    assert error(found, expected) <= 1e-12
