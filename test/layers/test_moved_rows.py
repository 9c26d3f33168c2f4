"""Rows of samples in an order that numbers decide, which differs from batch to batch."""

import logging
from collections.abc import Callable

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


#: What permutes samples ``[N, D]`` by values.
MOVED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda h, order: h[order],
    "gather": lambda h, order: h.gather(0, at(order, h)),
    "index select": lambda h, order: h.index_select(0, order),
    "take along an axis": lambda h, order: torch.take_along_dim(h, order[:, None], 0),
    "embedding": lambda h, order: F.embedding(order, h),
    "embedding bag": lambda h, order: F.embedding_bag(order, h, torch.arange(N), mode="sum"),
    "matrix": lambda h, order: permutation(order) @ h,
    "matrix behind": lambda h, order: (h.T @ permutation(order).T).T,
    "einsum": lambda h, order: torch.einsum("ij,jd->id", permutation(order), h),
    "einsum, other order": lambda h, order: torch.einsum("jd,ij->id", h, permutation(order)),
    "batched": lambda h, order: torch.bmm(permutation(order)[None], h[None])[0],
    "sparse": lambda h, order: torch.sparse.mm(permutation(order).to_sparse(), h),
    "mask and sum": lambda h, order: (permutation(order)[..., None] * h).sum(1),
    "mask and sum, in front": lambda h, order: (
        permutation(order).T[..., None] * h[:, None]
    ).sum(0),
    "mask and maximum": lambda h, order: torch.where(
        permutation(order)[..., None] > 0, h, -torch.inf
    ).amax(1),
    "masked fill": lambda h, order: h.expand(N, *h.shape).masked_fill(
        permutation(order)[..., None] == 0, 0
    ).sum(1),
    "where": lambda h, order: torch.where((order == torch.arange(N))[:, None], h, h.flip(0)),
    "index add": lambda h, order: h.new_zeros(N, h.shape[1]).index_add(0, order, h),
    "scatter": lambda h, order: h.new_zeros(N, h.shape[1]).scatter_add(0, at(order, h), h),
    "assigned": lambda h, order: h.new_zeros(N, h.shape[1]).index_put((order,), h),
    "attention": attention_to_one,
}  # fmt: skip


def packed_attention(h: Tensor, owner: Tensor, pool: Tensor) -> Tensor:
    same = owner[:, None] == owner
    h = F.scaled_dot_product_attention(h[None], h[None], h[None], attn_mask=same[None])[0]
    return (pool[..., None] * h).sum(1)


def bag(h: Tensor, owner: Tensor, pool: Tensor) -> Tensor:
    starts = torch.searchsorted(owner, torch.arange(N))
    return F.embedding_bag(torch.arange(len(h)), h, starts, mode="sum")


#: What sums elements ``[total, D]`` over sets of any sizes.
POOLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "product": lambda h, owner, pool: pool @ h,
    "transposed product": lambda h, owner, pool: (h.T @ pool.T).T,
    "einsum": lambda h, owner, pool: torch.einsum("nt,td->nd", pool, h),
    "einsum, other order": lambda h, owner, pool: torch.einsum("td,nt->nd", h, pool),
    "sparse product": lambda h, owner, pool: torch.sparse.mm(pool.to_sparse(), h),
    "mask and sum": lambda h, owner, pool: (pool[..., None] * h).sum(1),
    "where": lambda h, owner, pool: torch.where(pool[..., None] > 0, h, 0.0).sum(1),
    "index add": lambda h, owner, pool: h.new_zeros(N, h.shape[1]).index_add(0, owner, h),
    "gather": lambda h, owner, pool: pool @ h.gather(
        0, torch.arange(len(h))[:, None].expand(h.shape)
    ),
    "index": lambda h, owner, pool: torch.stack([h[owner == n].sum(0) for n in range(N)]),
    "parts": lambda h, owner, pool: torch.stack(
        [part.sum(0) for part in h.split(pool.sum(1).long().tolist())]
    ),
    "embedding": lambda h, owner, pool: pool @ F.embedding(torch.arange(len(h)), h),
    "embedding bag": bag,
    "packed attention": packed_attention,
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


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", POOLED)
def test_sets_of_other_sizes_on_later_batches(name: str):
    inputs = []
    for sizes in ([3, 3, 3, 3], [2, 4, 1, 5], [3, 3, 4, 2]):
        x, owner, pool = sets(sizes)
        inputs.append({"x": x, "owner": owner, "pool": pool})
    compare(lambda h, X: POOLED[name](h, X["owner"], X["pool"]), inputs, all_of_it=True)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", MOVED)
def test_other_permutations_on_later_batches(name: str):
    orders = torch.arange(N), ORDER, torch.tensor([1, 0, 2, 3])
    inputs = [{"x": random(N, D), "order": order} for order in orders]
    try:
        compare(lambda h, X: MOVED[name](h, X["order"]), inputs, all_of_it=False)
    except ValueError as refusal:  # a sample alone is another one
        assert "depends on the other samples" in str(refusal)
