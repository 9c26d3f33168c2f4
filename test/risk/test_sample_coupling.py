"""Models whose output for a sample depends on other samples are refused, and no others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Using
from small import build, mlp
from torch import Tensor, nn

import curvlinops

pytestmark = pytest.mark.extensive

N = 16
LOSS = nn.MSELoss()
OPERATORS = {
    "rows": curvlinops.PerSampleGradientLinearOperator,
    "EF": curvlinops.EFLinearOperator,
    "diagonal": curvlinops.GGNDiagonalLinearOperator,
    "KFAC": curvlinops.KFACLinearOperator,
    "EKFAC": curvlinops.EKFACLinearOperator,
}


def net(function: Callable[[Using, Any], Tensor]) -> nn.Module:
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4), "second": nn.Linear(3, 4), "head": nn.Linear(4, 2)}
    return Using(function, **layers).double()


def headed(function: Callable[[Using, Tensor], Tensor]) -> nn.Module:
    return net(lambda s, x: s.head(function(s, x)))


def inputs() -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def rolled(m: Using, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x))
    return h + 0.5 * h.roll(2, 0) + m.second(x)


def following(m: Using, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x)) * m.second(x)
    return h + 0.5 * h.roll(-1, 0)


def centered(m: Using, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x) - m.second(x).mean(0))


def normalized(m: Using, x: Tensor) -> Tensor:
    return F.batch_norm(m.first(x), None, None, training=True) * m.second(x)


def standardized(m: Using, x: Tensor) -> Tensor:
    h = m.first(x)
    return (h - h.mean(0)) / h.std(0) * m.second(x)


def centered_by_constant(m: Using, x: Tensor) -> Tensor:
    h = torch.tanh(m.first(x) * m.second(x))
    return h - h.mean(0).detach()


def rescaled(m: Using, x: Tensor) -> Tensor:
    h = m.first(x) * m.second(x)
    return h / h.abs().max().detach()


def divided(m: Using, x: Tensor) -> Tensor:
    return m.first(x) * m.second(x) / len(x)


#: In the last ones, one sample alone is no number, or gradients have no part in the interaction.
COUPLED = [rolled, following, centered, normalized, standardized]
COUPLED += [centered_by_constant, rescaled, divided]


@pytest.mark.parametrize("function", COUPLED)
@pytest.mark.parametrize("kind", OPERATORS)
def test_samples_that_interact_are_refused(kind: str, function: Callable):
    model, data = headed(function), [(inputs(), torch.zeros(N, 2, dtype=torch.float64))]
    arguments = model, LOSS, list(model.parameters()), data
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS[kind](*arguments)
    curvlinops.HessianLinearOperator(*arguments)
    # empirical Fisher and KFAC-expand add up whatever the gradients are
    if function in (rolled, centered) and kind not in ("EF", "KFAC"):
        operator = OPERATORS[kind](*arguments, check_deterministic=False)
        with pytest.raises(ValueError, match="depends on the other samples"):
            operator.norms() if kind == "rows" else operator @ torch.ones(operator.shape[1])


@pytest.mark.parametrize("sizes", [[4, 12], [12, 4], [1, 15], [15, 1], [1, 1, 14]], ids=str)
def test_samples_that_interact_in_any_batch_are_refused(sizes: list[int]):
    """Construction looks at the first batch, which may have one sample."""
    model, y = headed(centered), torch.zeros(N, 2, dtype=torch.float64)
    data = list(zip(inputs().split(sizes), y.split(sizes), strict=True))
    with pytest.raises(ValueError, match="depends on the other samples"):
        OPERATORS["rows"](model, LOSS, list(model.parameters()), data).norms()


def pairs(m: Using, x: dict) -> Tensor:
    """Compares each sample with each other, as contrastive models do."""
    return torch.tanh(m.first(x["images"])) @ torch.tanh(m.second(x["texts"])).T


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize("size", [2, 5])
def test_outputs_for_pairs_of_samples_are_refused(kind: str, size: int):
    model = net(pairs)
    x = [torch.randn(size, 3).double() for _ in range(2)]
    data = [({"images": x[0], "texts": x[1]}, torch.arange(size))]
    options = {"batch_size_fn": lambda X: len(X["texts"])}
    with pytest.raises(ValueError, match="depends on the other samples"):
        build(OPERATORS[kind], model, data, **options)
    build(curvlinops.HessianLinearOperator, model, data, **options)


def trimmed(m: Using, x: Tensor) -> Tensor:
    """Drops what is padding in all samples of a batch."""
    length = int((x.abs().sum(-1) > 0).sum(1).max())
    return m.head(torch.tanh(m.first(x[:, :length]))).mT


def test_lengths_that_depend_on_the_longest_sample_are_no_interaction():
    model, lengths = net(trimmed), [2, 1, 2, 4, 3]
    x, y = torch.randn(5, 4, 3).double(), torch.ones(5, 4).long()
    for n, length in enumerate(lengths):
        x[n, length:], y[n, length:] = 0, -100
    params, loss = [*model.first.parameters(), *model.head.parameters()], nn.CrossEntropyLoss()
    rows = curvlinops.PerSampleGradientLinearOperator(model, loss, params, [(x, y)]).dense()
    loss.reduction = "sum"
    for n, length in enumerate(lengths):
        value = loss(model(x[n : n + 1]), y[n : n + 1, :length])
        expected = torch.cat([g.flatten() for g in torch.autograd.grad(value, params)])
        torch.testing.assert_close(rows[n], expected)


def test_batch_norm_without_running_statistics():
    """It couples samples in any mode."""
    model = mlp(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.warns(UserWarning, match="BatchNorm without running statistics"):
        build(curvlinops.HessianLinearOperator, model)
    with pytest.raises(ValueError, match="statistics couples.*track_running_stats=True"):
        build(curvlinops.EFLinearOperator, model)
