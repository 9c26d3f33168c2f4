"""Gradients of samples for parameters that no rule knows."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_layers import rows_in_batches
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    JacobianLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = [pytest.mark.extensive, pytest.mark.usefixtures("double")]

Data = list[tuple[Any, Tensor]]


class StateSpace(nn.Module):
    """Long convolutions by Fourier transforms of what parameters decay like."""

    def __init__(self):
        super().__init__()
        self.decay, self.scale = (nn.Parameter(torch.randn(2, 4, 3)) for _ in range(2))
        self.read, self.head = nn.Linear(1, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x, T = self.read(x).mT, x.shape[1]
        for decay, scale in zip(self.decay, self.scale, strict=True):
            times = torch.arange(T, dtype=x.dtype)
            kernel = (scale[..., None] * torch.exp(-F.softplus(decay)[..., None] * times)).sum(1)
            spectrum = torch.fft.rfft(x, 2 * T) * torch.fft.rfft(kernel, 2 * T)
            x = x + torch.fft.irfft(spectrum, 2 * T)[..., :T].tanh()
        return self.head(x.mean(-1))


class Named(StateSpace):
    """Takes one tensor of the batch under two names, and something that all samples share."""

    def forward(self, X: dict[str, Tensor]) -> Tensor:
        return super().forward(X["x"]) + X["again"][:, 0] * X["shared"]


class Forces(nn.Module):
    """An energy and its derivatives."""

    def __init__(self, width: int):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.energy(x)
            (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
            return torch.cat([energy, -slope], 1)


class Fourth(torch.autograd.Function):
    """Multiplies by a weight; has no ``vmap``."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight.pow(4)

    @staticmethod
    def backward(ctx, g: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return g * weight.pow(4), 4 * weight.pow(3) * (g * x).sum(0)


class Wide(nn.Module):
    """A custom function on rows of many numbers."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.width = nn.Parameter(torch.randn(width)), width

    def forward(self, x: Tensor) -> Tensor:
        return Fourth.apply(x, self.weight).reshape(len(x), 2, -1).sum(2)


class Alone(StateSpace):
    """Has no single samples."""

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 1:
            raise RuntimeError("One is not enough.")
        return super().forward(x)


def series(*lengths: int) -> Data:
    return [(torch.randn(n, 6, 1), torch.randint(3, (n,))) for n in lengths]


def named(*lengths: int) -> Data:
    data = []
    for x, y in series(*lengths):
        data.append(({"x": x, "again": x, "shared": torch.randn(1, 3)}, y))
    return data


def points(*lengths: int) -> Data:
    return [(torch.randn(n, 4), torch.randn(n, 5)) for n in lengths]


def wide(*lengths: int) -> Data:
    return [(torch.randn(n, 64), torch.randn(n, 2)) for n in lengths]


CASES = {
    "vmap": (StateSpace, series, nn.CrossEntropyLoss),
    "vmap on dictionaries": (Named, named, nn.CrossEntropyLoss),
    "loop": (lambda: Forces(3), points, nn.MSELoss),
    "loop over a custom function": (lambda: Wide(64), wide, nn.MSELoss),
    "errors alone": (Alone, series, nn.CrossEntropyLoss),
}


@pytest.mark.parametrize("name", CASES)
def test_samples(name: str):
    make, sampled, kind = CASES[name]
    model, loss, data = make(), kind(), sampled(3, 5)
    params = list(model.parameters())
    options = {"check_deterministic": False, "num_data": 8}
    if sampled is named:
        options["batch_size_fn"] = lambda X: len(X["x"])
    rows = rows_in_batches(model, data, loss)
    A = PerSampleGradientLinearOperator(model, loss, params, data, **options)
    for _ in range(2):
        torch.testing.assert_close(A.dense(), rows)
        torch.testing.assert_close(A.norms(), rows.norm(dim=1))
        torch.testing.assert_close(A.gram(), rows @ rows.T)
    assert A.fallbacks
    some = PerSampleGradientLinearOperator(
        model, loss, params, data, subsampling=[6, 1, 4], **options
    )
    torch.testing.assert_close(some.dense(), rows[[6, 1, 4]])
    E = EFLinearOperator(model, loss, params, data, **options)
    v = torch.randn(E.shape[1])
    torch.testing.assert_close(E @ v, rows.T @ (rows @ v) / 8)


@pytest.mark.parametrize("make, sampled, kind", list(CASES.values()))
def test_several_vectors(make, sampled, kind):
    """What is backpropagated for the exact diagonal, and for the tangent kernel."""
    model, data = make(), sampled(3, 4)
    params, arguments = list(model.parameters()), {"check_deterministic": False}
    if isinstance(data[0][0], dict):
        arguments["batch_size_fn"] = lambda X: len(X["x"])
    D = GGNDiagonalLinearOperator(model, kind(), params, data, **arguments)
    if len(D.diagonal()) < 200:
        G = GGNLinearOperator(model, kind(), params, data, **arguments)
        torch.testing.assert_close(D.diagonal(), (G @ torch.eye(G.shape[1])).diagonal())
    J = JacobianLinearOperator(model, params, data, **arguments)
    J_dense = J.adjoint() @ torch.eye(J.shape[0])
    torch.testing.assert_close(J.gram(), J_dense.T @ J_dense)
