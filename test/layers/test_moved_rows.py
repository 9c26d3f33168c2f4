"""Rows of samples in an order that numbers decide, which differs from batch to batch."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import error
from models import Using
from sample_gradients import check_rows, rows_in_batches
from torch import Tensor, nn

from curvlinops import (
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    KFACLinearOperator,
)
from curvlinops import PerSampleGradientLinearOperator as PerSampleGradients

N, T, D = 4, 3, 6  # samples, positions, features
Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed(double):
    pass


def random(*shape: int) -> Tensor:
    return torch.randn(shape)


def sets(sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return elements of sets, to which sample they belong, and a matrix that sums over each."""
    owner = torch.arange(N).repeat_interleave(torch.tensor(sizes))
    return random(len(owner), D), owner, (owner == torch.arange(N)[:, None]).double()


ORDER = torch.tensor([2, 0, 3, 1])


def permutation(order: Tensor) -> Tensor:
    return torch.eye(N, dtype=torch.float64)[order]


def at(order: Tensor, h: Tensor) -> Tensor:
    """Return an order as an index of all entries."""
    return order[:, None].expand(h.shape)


def attention_to_one(h: Tensor, order: Tensor) -> Tensor:
    mask = permutation(order)[None] > 0
    return F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=mask)[0]


#: What permutes samples ``[N, D]`` by an order, and whether it reads or writes by indices, which
#: tell what samples are behind them.
MOVED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "index": (lambda h, order: h[order], True),
    "index, negative": (lambda h, order: h[order - N], True),
    "index of entries": (lambda h, order: h[order[:, None], torch.arange(h.shape[1])], True),
    "gather": (lambda h, order: h.gather(0, at(order, h)), True),
    "index select": (lambda h, order: h.index_select(0, order), True),
    "take along an axis": (lambda h, order: torch.take_along_dim(h, order[:, None], 0), True),
    "stack": (lambda h, order: torch.stack([h[i] for i in order.tolist()]), True),
    "index copy": (lambda h, order: torch.zeros_like(h).index_copy(0, order, h), True),
    "index add": (lambda h, order: torch.zeros_like(h).index_add(0, order, h), True),
    "scatter": (lambda h, order: torch.zeros_like(h).scatter(0, at(order, h), h), True),
    "scatter add": (lambda h, order: torch.zeros_like(h).scatter_add(0, at(order, h), h), True),
    "assigned": (lambda h, order: torch.zeros_like(h).index_put((order,), h), True),
    "take": (
        lambda h, order: h.take(order[:, None] * h.shape[1] + torch.arange(h.shape[1])), False
    ),
    "embedding": (lambda h, order: F.embedding(order, h), False),
    "embedding bag": (
        lambda h, order: F.embedding_bag(order, h, torch.arange(N), mode="sum"), False
    ),
    "matrix": (lambda h, order: permutation(order) @ h, False),
    "matrix behind": (lambda h, order: (h.T @ permutation(order).T).T, False),
    "einsum": (lambda h, order: torch.einsum("ij,jd->id", permutation(order), h), False),
    "einsum, other order": (
        lambda h, order: torch.einsum("jd,ij->id", h, permutation(order)), False
    ),
    "batched": (lambda h, order: torch.bmm(permutation(order)[None], h[None])[0], False),
    "sparse": (lambda h, order: torch.sparse.mm(permutation(order).to_sparse(), h), False),
    "convolution": (
        lambda h, order: F.conv1d(h[None], permutation(order)[:, :, None])[0], False
    ),
    "mask and sum": (lambda h, order: (permutation(order)[..., None] * h).sum(1), False),
    "mask and sum, in front": (
        lambda h, order: (permutation(order).T[..., None] * h[:, None]).sum(0), False
    ),
    "mask and maximum": (
        lambda h, order: torch.where(permutation(order)[..., None] > 0, h, -torch.inf).amax(1),
        False,
    ),
    "masked fill": (
        lambda h, order: h.expand(N, *h.shape).masked_fill(
            permutation(order)[..., None] == 0, 0
        ).sum(1),
        False,
    ),
    "where": (
        lambda h, order: torch.where((order == torch.arange(N))[:, None], h, h.flip(0)), False
    ),
    "attention": (attention_to_one, False),
}  # fmt: skip


def packed_attention(h: Tensor, owner: Tensor, pool: Tensor) -> Tensor:
    same = owner[:, None] == owner
    h = F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=same[None])[0]
    return (pool[..., None] * h).sum(1)


def bag(h: Tensor, owner: Tensor, pool: Tensor) -> Tensor:
    starts = torch.searchsorted(owner, torch.arange(N))
    return F.embedding_bag(torch.arange(len(h)), h, starts, mode="sum")


def zeros(h: Tensor) -> Tensor:
    return h.new_zeros(N, h.shape[1])


#: What reduces elements ``[total, D]`` over sets of any sizes, and whether the samples of equal
#: sets are proved.
POOLED: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], bool]] = {
    "product": (lambda h, owner, pool: pool @ h, False),
    "transposed product": (lambda h, owner, pool: (h.T @ pool.T).T, False),
    "einsum": (lambda h, owner, pool: torch.einsum("nt,td->nd", pool, h), False),
    "einsum, other order": (lambda h, owner, pool: torch.einsum("td,nt->nd", h, pool), False),
    "sparse product": (lambda h, owner, pool: torch.sparse.mm(pool.to_sparse(), h), True),
    "mask and sum": (lambda h, owner, pool: (pool[..., None] * h).sum(1), False),
    "where": (lambda h, owner, pool: torch.where(pool[..., None] > 0, h, 0.0).amax(1), False),
    "index add": (lambda h, owner, pool: zeros(h).index_add(0, owner, h), True),
    "scatter add": (lambda h, owner, pool: zeros(h).scatter_add(0, at(owner, h), h), True),
    "scatter mean": (
        lambda h, owner, pool: zeros(h).scatter_reduce(
            0, at(owner, h), h, "mean", include_self=False
        ),
        True,
    ),
    "assigned": (lambda h, owner, pool: zeros(h).index_put((owner,), h, accumulate=True), True),
    "gather": (lambda h, owner, pool: pool @ h.gather(0, at(torch.arange(len(h)), h)), False),
    "index": (
        lambda h, owner, pool: torch.stack([h[owner == n].sum(0) for n in range(N)]), True
    ),
    "parts": (
        lambda h, owner, pool: torch.stack([x.mean(0) for x in h.split(owner.bincount().tolist())]),
        True,
    ),
    "cumulative sum": (
        lambda h, owner, pool: h.cumsum(0)[owner.bincount().cumsum(0) - 1], False
    ),
    "embedding": (lambda h, owner, pool: pool @ F.embedding(torch.arange(len(h)), h), False),
    "embedding bag": (bag, False),
    "packed attention": (packed_attention, False),
}  # fmt: skip


# --- operators, whose first batch looks as if samples were on an axis

SUM = nn.MSELoss(reduction="sum")


def compare(function: Callable, inputs: list[dict[str, Tensor]], all_of_it: bool) -> None:
    """Compare what operators compute on batches of equal shapes with plain autograd."""
    parts = {"layer": nn.Linear(D, 3), "head": nn.Linear(3, 2)}
    model = Using(lambda s, X: s.head(function(torch.tanh(s.layer(X["x"])), X)), **parts)
    data, params = [(X, random(N, 2)) for X in inputs], list(model.parameters())
    rows = rows_in_batches(model, data, SUM)
    arguments, options = (model, SUM, params, data), {"batch_size_fn": lambda X: N}
    A = PerSampleGradients(*arguments, **options)
    if all_of_it:
        check_rows(A, rows)
    assert error(A.dense(), rows) <= 1e-12
    E = EKFACLinearOperator(*arguments, fisher_type="empirical", **options)
    assert error(E.trace(), rows.square().sum()) <= 1e-12
    squares = [
        torch.cat([g.flatten() for g in torch.autograd.grad(z, params, retain_graph=True)]).square()
        for X, _ in data
        for z in model(X).flatten()
    ]
    diagonal = GGNDiagonalLinearOperator(*arguments, **options).diagonal()
    assert error(diagonal, 2 * sum(squares)) <= 1e-12
    # averages over the positions of samples are refused
    options |= {"fisher_type": "empirical", "kfac_approx": "reduce"}
    with pytest.raises(NotImplementedError, match="not known to which samples"):
        KFACLinearOperator(*arguments, **options).trace()


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "curvlinops")


def some(table: dict) -> list[Any]:
    """Return the names of a table, of which every second one is tested each time."""
    return [
        pytest.param(n, marks=pytest.mark.extensive if i % 2 else []) for i, n in enumerate(table)
    ]


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", some(POOLED))
def test_sets_of_other_sizes_on_later_batches(name: str):
    inputs = []
    for sizes in ([3, 3, 3, 3], [2, 4, 1, 5], [3, 3, 4, 2]):
        x, owner, pool = sets(sizes)
        inputs.append({"x": x, "owner": owner, "pool": pool})
    compare(lambda h, X: POOLED[name][0](h, X["owner"], X["pool"]), inputs, all_of_it=True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", some(MOVED))
def test_other_permutations_on_later_batches(name: str):
    orders = torch.arange(N), ORDER, torch.tensor([1, 0, 2, 3])
    inputs = [{"x": random(N, D), "order": order} for order in orders]
    try:
        compare(lambda h, X: MOVED[name][0](h, X["order"]), inputs, all_of_it=False)
    except ValueError as refusal:  # a sample alone is another one
        assert "depends on the other samples" in str(refusal)
