"""The linear datamodeling score, against SciPy and repeated draws."""

from typing import Any

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor

from curvlinops.influence import linear_datamodeling_score


def drawn(M: int, K: int, N: int = 30) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, subsets, and outputs with noise: some of it is that of the models."""
    scores = torch.randn(N, K) + torch.randn(N, 1)
    subsets = torch.rand(M, N) < 0.5
    noise = 3 * torch.randn(M, 1) + 20 * torch.rand(K) * torch.randn(M, K)
    return scores, subsets, subsets.float() @ scores + noise


def reference(scores: Tensor, subsets: Tensor, outputs: Tensor) -> list[float]:
    predicted = subsets.double() @ scores.double()
    return [float(spearmanr(x, y)[0]) for x, y in zip(predicted.T, outputs.double().T, strict=True)]


@pytest.mark.parametrize(("M", "K"), [(12, 3), (3, 1)])
def test_numbers(M: int, K: int):
    torch.manual_seed(0)
    scores, subsets, outputs = drawn(M, K)
    outputs[-1] = outputs[0]  # they share a rank
    found = linear_datamodeling_score(scores, subsets, outputs.requires_grad_())
    outputs = outputs.detach()
    expected = torch.tensor(reference(scores, subsets, outputs), dtype=torch.float64)
    torch.testing.assert_close(found.correlations, expected, rtol=0, atol=1e-12)
    assert found.mean == pytest.approx(float(expected.mean()), abs=1e-12)
    increasing = linear_datamodeling_score(scores.numpy(), subsets.int(), outputs.exp().numpy())
    torch.testing.assert_close(increasing, found)
    (against,) = linear_datamodeling_score(-scores[:, :1], subsets, outputs[:, :1])[:1]
    assert float(against) == pytest.approx(-float(expected[0]))
    if M > 3:
        without = [torch.arange(M) != m for m in range(M)]
        means = [sum(reference(scores, subsets[x], outputs[x])) / K for x in without]
        jackknife = (M - 1) * torch.tensor(means, dtype=torch.float64).var(correction=0)
        error = float((jackknife + expected.var() / K).sqrt())
        assert found.standard_error == pytest.approx(error)


@pytest.mark.extensive
@pytest.mark.parametrize(("M", "K"), [(40, 20), (15, 1)])
def test_standard_error(M: int, K: int):
    """It is that of the mean in repeated draws of subsets and queries."""
    torch.manual_seed(0)
    found = [linear_datamodeling_score(*drawn(M, K)) for _ in range(100)]
    means, errors = (torch.tensor([x[i] for x in found]) for i in (1, 2))
    assert float(errors.square().mean().sqrt() / means.std()) == pytest.approx(1, abs=0.25)


A, S, F = drawn(4, 2)
REFUSED: dict[str, tuple[tuple[Any, Any, Any], str]] = {
    "models": ((A, S, F[1:]), r"\[4, 30\], \[3, 2\]"),
    "indices": ((A, S.nonzero()[:, :1].T, F), r"subsets \[M, N\].*\[30, 2\], \[1, "),
    "one query without an axis": ((A[:, 0], S, F[:, 0]), r"got the shapes \[30\], .*\[4\]"),
    "no queries": ((A[:, :0], S, F[:, :0]), r"\[4, 0\]"),
    "two models": ((A, S[:2], F[:2]), "M >= 3"),
    "NaN": ((A, S, F * torch.tensor([1.0, torch.nan])), "outputs have NaN"),
    "equal outputs": ((A, S, F * torch.tensor([1.0, 0.0])), "same outputs for query 1: leave it"),
    "equal predictions": ((0 * A, S, F), "same predictions for query 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str):
    arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        linear_datamodeling_score(*arguments)
