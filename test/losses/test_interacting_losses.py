"""Losses whose samples interact, on one batch that is all data: Hessian and GGN are defined."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from curvlinops import (
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
PARAMS = list(MODEL.parameters())
X, Y = torch.randn(6, 3).double(), torch.tensor([0, 0, 1, 1, 2, 2])


def info_nce(z: Tensor, y: Tensor) -> Tensor:
    """Samples with the same y attract each other."""
    z = z / z.square().sum(1, keepdim=True).sqrt()
    itself = torch.eye(len(z), dtype=torch.bool)
    logits = (2 * z @ z.T).masked_fill(itself, -1e9)
    pairs = (y[:, None] == y) & ~itself
    return -logits.log_softmax(1)[pairs].mean()


def barlow_twins(z: Tensor, y: Tensor) -> Tensor:
    """The correlation of two views, which are the halves of a row, becomes the identity."""
    first, second = ((z - z.mean(0)) / z.std(0)).chunk(2, 1)
    correlation = first.T @ second / (len(z) - 1)
    return (correlation - torch.eye(2, dtype=z.dtype)).square().sum()


def output(vector: Tensor) -> Tensor:
    parts = vector.split([p.numel() for p in PARAMS])
    named = zip(parts, MODEL.named_parameters(), strict=True)
    return functional_call(MODEL, {n: v.view_as(p) for v, (n, p) in named}, (X,))


def hessian(loss: Callable) -> Tensor:
    vector = nn.utils.parameters_to_vector(PARAMS).detach()
    return torch.autograd.functional.hessian(lambda v: loss(output(v), Y), vector)


def gauss_newton(loss: Callable) -> Tensor:
    vector = nn.utils.parameters_to_vector(PARAMS).detach()
    J = torch.autograd.functional.jacobian(output, vector).flatten(0, 1)
    z = output(vector)
    H = torch.autograd.functional.hessian(lambda rows: loss(rows.view_as(z), Y), z.flatten())
    return J.T @ H @ J


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [info_nce, barlow_twins])
@pytest.mark.parametrize("data", [[(X, Y)], DataLoader(TensorDataset(X, Y), batch_size=6)])
def test_one_batch(loss: Callable, reduction: str, data: Any):
    """The reduction does not matter: the value of the loss is L."""
    arguments = MODEL, loss, PARAMS, data
    H = HessianLinearOperator(*arguments, reduction=reduction)
    torch.testing.assert_close(H.to_dense(), hessian(loss))
    torch.testing.assert_close(H.gradient_and_loss()[1], loss(MODEL(X), Y))
    G = GGNLinearOperator(*arguments, reduction=reduction)
    torch.testing.assert_close(G.to_dense(), gauss_newton(loss))
    v = torch.ones(len(G.to_dense())).double()
    with G.linearized():
        torch.testing.assert_close(G @ (G @ v), gauss_newton(loss) @ gauss_newton(loss) @ v)


class Unsized:
    """Data whose number of batches only a pass shows."""

    def __iter__(self) -> Any:
        return iter([(X, Y)])


@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
@pytest.mark.parametrize("data", [[(X, Y)] * 2, [(X[:4], Y[:4]), (X[4:], Y[4:])], Unsized()])
@pytest.mark.parametrize("check", [True, False])
def test_other_data(kind: type, data: Any, check: bool):
    with pytest.raises(ValueError, match=r"Batch 0: info_nce is not the mean.*data=\[\(X, y\)\]"):
        H = kind(MODEL, info_nce, PARAMS, data, reduction="mean", check_deterministic=check)
        H @ torch.ones(H.shape[1])


def test_a_second_batch_comes_later():
    data = [(X, Y)]
    H = HessianLinearOperator(MODEL, info_nce, PARAMS, data, reduction="mean")
    v = torch.ones(H.shape[1]).double()
    expected = H @ v
    data.append((X, Y))
    for _ in range(2):
        with pytest.raises(ValueError, match="info_nce is not the mean"):
            H @ v
    data.pop()
    torch.testing.assert_close(H @ v, expected)


@pytest.mark.parametrize(
    "kind, options",
    [
        (EFLinearOperator, {}),
        (PerSampleGradientLinearOperator, {}),
        (GGNDiagonalLinearOperator, {}),
        (KFACLinearOperator, {"fisher_type": "empirical"}),
    ],
)
def test_quantities_of_samples(kind: type, options: dict):
    with pytest.raises(ValueError, match="info_nce is not the mean of its samples' losses"):
        kind(MODEL, info_nce, PARAMS, [(X, Y)], reduction="mean", **options)


def test_sampled_fisher():
    with pytest.raises(NotImplementedError, match="info_nce is not known as"):
        FisherMCLinearOperator(MODEL, info_nce, PARAMS, [(X, Y)], reduction="mean")
