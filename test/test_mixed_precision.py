"""Models with parameters of two precisions: operators work in the wider one."""

from copy import deepcopy
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import curvlinops

DTYPES = [
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float64),
]
FACTORED = [curvlinops.KFACLinearOperator, curvlinops.EKFACLinearOperator]
X = torch.linspace(-1, 2, 36).sin().reshape(9, 4)
Y = torch.arange(9) % 3


class Mixed(nn.Module):
    """A body in one precision, a head in another; few gradients for many outputs."""

    def __init__(self, body: torch.dtype, head: torch.dtype):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(3, 4).to(body)
        self.first = nn.Linear(4, 12).to(body)
        self.conv = nn.Conv1d(1, 2, 3, stride=3).to(body)
        self.norm = nn.LayerNorm(8).to(head)
        self.head = nn.Linear(8, 3).to(head)
        self.body, self.tail = body, head

    def forward(self, x: Tensor) -> Tensor:
        index = (x[:, 0] > 0).long()
        z = torch.tanh(self.first(x.to(self.body) + self.embed(index)))
        z = torch.tanh(self.conv(z.unsqueeze(1))).flatten(1).to(self.tail)
        return self.head(self.norm(z))


def gradients(body: torch.dtype, head: torch.dtype) -> Tensor:
    """Gradients of the samples' losses, in float64."""
    model = deepcopy(Mixed(body, head)).double()
    model.body = model.tail = torch.float64
    losses = nn.CrossEntropyLoss(reduction="none")(model(X.double()), Y)
    rows = [torch.autograd.grad(loss, model.parameters(), retain_graph=True) for loss in losses]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


def build(kind: type, body: torch.dtype, head: torch.dtype, **options):
    model = Mixed(body, head)
    data = [(X[:5], Y[:5]), (X[5:], Y[5:])]
    return kind(model, nn.CrossEntropyLoss(), list(model.parameters()), data, **options)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("separate, approx", list(product([True, False], ["expand", "reduce"])))
def test_trace_of_ekfac_is_exact(dtypes, separate, approx):
    options = {"separate_weight_and_bias": separate, "kfac_approx": approx}
    ekfac = build(FACTORED[1], *dtypes, fisher_type="empirical", **options)
    expected = gradients(*dtypes).square().sum() / 9
    tolerance = 0.05 if torch.bfloat16 in dtypes else 1e-5
    torch.testing.assert_close(ekfac.trace().double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtypes", DTYPES)
def test_factors_of_the_last_layer(dtypes):
    kfac = build(FACTORED[0], *dtypes, fisher_type="empirical")
    P = Mixed(*dtypes)(X).double().softmax(1)
    g = P - torch.eye(3).double()[Y]
    tolerance = 0.05 if torch.bfloat16 in dtypes else 1e-5
    found = kfac.gradient_covariances["head"].double()
    torch.testing.assert_close(found, (g.T @ g / 9).detach(), rtol=tolerance, atol=1e-8)


@pytest.mark.parametrize("kind", FACTORED)
@pytest.mark.parametrize("dtypes", [pair for pair in DTYPES if torch.float64 in pair])
@pytest.mark.parametrize("damping", [1e-4, 1e-7, 1e-10])
def test_inverse_is_positive_definite_and_bounded(kind, dtypes, damping):
    """Factors of rank below their size, in float64 whatever the layer's own precision."""
    operator = build(kind, *dtypes, fisher_type="type-2")
    inverse = operator.inverse(damping, use_exact_damping=True)
    matrix = inverse @ torch.eye(inverse.shape[0], dtype=torch.float64)
    values = torch.linalg.eigvalsh(matrix)
    # eigvalsh itself is accurate up to rounding errors of the largest one
    largest = 1 / damping
    assert float(values[0]) > -1e-13 * largest
    assert float(values[-1]) <= largest * (1 + 1e-6)
    assert bool(operator.sample(torch.Generator().manual_seed(0)).isfinite().all())
