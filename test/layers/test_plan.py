"""Graphs with the same operations and shapes, which use parameters in different ways."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from contract import error
from models import Using
from sample_gradients import rows_in_batches
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from curvlinops import KFACLinearOperator, PerSampleGradientLinearOperator

N, D = 4, 4
SUM = nn.MSELoss(reduction="sum")

#: Functions of ``x``, ``[N, D, D]``, whose argument ``k`` in (0, 1) decides.
FUNCTIONS: dict[str, Callable[[Using, Tensor, int], Tensor]] = {
    "axis of samples": lambda s, x, k: F.linear(x.transpose(k, k + 1), s.w).transpose(k, k + 1),
    "part of a weight": lambda s, x, k: F.linear(x[..., :2], s.w[:, 2 * k : 2 * k + 2]),
    "transposed weight": lambda s, x, k: x @ s.w.permute((0, 1) if k else (1, 0)),
    "weight of another layer": lambda s, x, k: F.linear(x, s.v if k else s.w),
    "scale": lambda s, x, k: torch.addmm(s.b, x[:, 0], s.w, beta=1 + k, alpha=2 - k)[:, None],
    "sign": lambda s, x, k: torch.add(x * s.b, s.c, alpha=1 - 2 * k),
    "row of a table": lambda s, x, k: x * s.w[k],
    "diagonal": lambda s, x, k: x[..., :3] * torch.diagonal(s.w, 2 * k - 1),
    "constant rows": lambda s, x, k: x + F.embedding(torch.tensor([k, 1, 2, k]), s.w),
    "rows of samples": lambda s, x, k: x + F.embedding((x[..., 0] > k).long(), s.w),
    "mask": lambda s, x, k: (x @ s.w).masked_fill(x[..., :1] > k, 0.0),
    "factor": lambda s, x, k: x * torch.where(x > k, s.b, s.c),
    "hooks on saved tensors": lambda s, x, k: (
        checkpoint(lambda x: torch.tanh(x @ s.w), x, use_reentrant=False)
        if k
        else torch.tanh(x @ s.w)
    ),
    "computed twice": lambda s, x, k: (
        (h := torch.tanh(x @ s.w)) + (h if k else torch.tanh(x @ s.w))
    ),
    "one layer twice": lambda s, x, k: torch.tanh(x @ s.w) * torch.tanh(x @ (s.v if k else s.w)),
    "one input": lambda s, x, k: torch.tanh(x @ s.w) + torch.tanh((x if k else x.flip(2)) @ s.v),
    "order of layers": lambda s, x, k: (
        torch.tanh(torch.tanh(x @ s.w) @ s.v) if k else torch.tanh(torch.tanh(x @ s.v) @ s.w)
    ),
    "length inside": lambda s, x, k: torch.tanh(torch.stack([x] * (2 + k), 1) @ s.w).sum(1),
    "length of a maximum": lambda s, x, k: torch.tanh(torch.stack([x] * (2 + k), 1) @ s.w).amax(1),
    "precision": lambda s, x, k: (
        torch.tanh(x @ s.w).to(torch.float32 if k else torch.float64).double()
    ),
    "frozen branch": lambda s, x, k: torch.tanh(x @ s.w) + (x @ s.v if k else (x @ s.v).detach()),
    "branch without gradients": lambda s, x, k: (
        torch.tanh(x @ s.w) + 0 * torch.tanh(x @ s.v if k else x * s.b)
    ),
    "sparse factor": lambda s, x, k: torch.tanh(
        (x[:, 0].to_sparse() if k else x[:, 0]) @ s.w
    ).unsqueeze(1),
    "order in memory": lambda s, x, k: torch.tanh((x if k else x.mT.contiguous().mT) @ s.w),
}


@pytest.mark.parametrize(
    "order",
    [
        (0, 1, 0, 1),
        pytest.param((1, 0, 1, 0), marks=pytest.mark.extensive),
        pytest.param((1, 1, 0, 0), marks=pytest.mark.extensive),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_graphs_that_look_alike(name: str, order: tuple[int, ...], double: None):
    def function(s: Using, X: dict[str, Tensor]) -> Tensor:
        return s.head(torch.tanh(FUNCTIONS[name](s, X["x"], int(X["k"][0]))).sum(1))[:, :2]

    w, v, b, c = (torch.randn(*shape) for shape in [(D, D), (D, D), (D,), (D,)])
    model = Using(function, w=w, v=v, b=b, c=c, head=nn.LazyLinear(2))
    inputs = [
        {"x": torch.randn(n, D, D), "k": torch.full((n,), k)}
        for k, n in [*((k, N) for k in order), (1, 1), (0, 1), (0, N)]
    ]
    model(inputs[0])
    data = [(X, torch.randn(len(X["x"]), 2)) for X in inputs]
    params, tolerance = dict(model.named_parameters()), 1e-6 if name == "precision" else 1e-12
    J = PerSampleGradientLinearOperator(model, SUM, list(params.values()), data)
    expected = rows_in_batches(model, data, SUM)
    for _ in range(2):
        assert error(J.dense(), expected) <= tolerance
        assert error(J.norms(), expected.norm(dim=1)) <= tolerance
    data = [(X, y) for X, y in data if len(y) > 1]
    options = {"fisher_type": "empirical", "fallback": "dense", "check_deterministic": False}
    K = KFACLinearOperator(model, SUM, params, data, **options)
    # no model of these has another batch
    first, *others = (
        KFACLinearOperator(m, SUM, dict(m.named_parameters()), [batch], **options)
        for batch in data
        for m in [copy.deepcopy(model)]
    )
    for other in others:
        first.merge(other)
    assert error(K.to_dense(), first.to_dense()) <= tolerance
