"""Losses whose samples interact, on one batch that is all data: Hessian and GGN are defined."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import reference
import torch
from models import Using
from problems import Problem
from torch import Tensor, nn
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
V = torch.ones(36).double()


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


def whole(loss: Callable) -> Problem:
    """A problem of the references, whose only sample is the batch."""
    model = Using(lambda s, x: s.net(x[0]), net=MODEL)
    return Problem(
        model, lambda z, y: loss(z, y[0]), PARAMS, [(X[None], Y[None])], mc=False, reduction="sum"
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("loss", [info_nce, barlow_twins])
@pytest.mark.parametrize("data", [[(X, Y)], DataLoader(TensorDataset(X, Y), batch_size=6)])
def test_one_batch(loss: Callable, reduction: str, data: Any):
    """The reduction does not matter: the value of the loss is L."""
    arguments = MODEL, loss, PARAMS, data
    H = HessianLinearOperator(*arguments, reduction=reduction)
    torch.testing.assert_close(H.to_dense(), reference.hessian(whole(loss)))
    torch.testing.assert_close(H.gradient_and_loss()[1], loss(MODEL(X), Y))
    G, expected = GGNLinearOperator(*arguments, reduction=reduction), reference.ggn(whole(loss))
    torch.testing.assert_close(G.to_dense(), expected)
    with G.linearized():
        torch.testing.assert_close(G @ (G @ V), expected @ expected @ V)


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
    expected = H @ V
    data.append((X, Y))
    for _ in range(2):
        with pytest.raises(ValueError, match="info_nce is not the mean"):
            H @ V
    data.pop()
    torch.testing.assert_close(H @ V, expected)


EMPIRICAL = partial(KFACLinearOperator, fisher_type="empirical")


def squared_sum(output: Tensor, target: Tensor) -> Tensor:
    """The sum over samples, not their mean."""
    return output.square().sum()


def spread(output: Tensor, target: Tensor) -> Tensor:
    """The variance over the batch, which is zero for one sample."""
    return (output - output.mean(0)).square().mean()


@pytest.mark.parametrize("loss", [spread, squared_sum])
@pytest.mark.parametrize(
    "kind",
    [
        HessianLinearOperator,
        GGNLinearOperator,
        EFLinearOperator,
        PerSampleGradientLinearOperator,
        EMPIRICAL,
    ],
)
def test_a_batch_of_one_sample_does_not_show_a_sum(kind: Callable, loss: Callable):
    data = [(X[:1], Y[:1]), (X[1:], Y[1:])]
    A = kind(MODEL, loss, PARAMS, data, reduction="mean")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"Batch 1: {loss.__name__} is not the mean"):
            A @ V


NO_SUM, UNKNOWN = "is not the mean of its samples' losses", "is not known as"
OF_SAMPLES: list[tuple[Callable, type[Exception], str]] = [
    (EFLinearOperator, ValueError, NO_SUM),
    (PerSampleGradientLinearOperator, ValueError, NO_SUM),
    (GGNDiagonalLinearOperator, ValueError, NO_SUM),
    (EMPIRICAL, ValueError, NO_SUM),
    (FisherMCLinearOperator, NotImplementedError, UNKNOWN),
]


@pytest.mark.parametrize("kind, error, match", OF_SAMPLES)
def test_quantities_of_samples(kind: Callable, error: type[Exception], match: str):
    with pytest.raises(error, match=f"info_nce {match}"):
        kind(MODEL, info_nce, PARAMS, [(X, Y)], reduction="mean")
