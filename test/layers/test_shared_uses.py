"""Parameters that all samples share: written into tensors, or scaled by constants."""

from collections.abc import Callable

import pytest
import torch
from sample_gradients import check, loop
from torch import Tensor, nn

from curvlinops import (
    EFLinearOperator,
    EKFACLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

pytestmark = pytest.mark.extensive


class Written(nn.Module):
    """A matrix whose entries are written one after the other."""

    def __init__(self, write: Callable[[nn.Module, Tensor, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.p, self.w = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(3, 3))
        self.rows, self.columns = torch.tril_indices(3, 3)
        self.first = nn.Linear(3, 3)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x).tanh()
        return z @ self.write(self, x.new_zeros(3, 3), z) + self.w.sum() + self.p.sum()


def triangle(net: Written, A: Tensor, z: Tensor) -> Tensor:
    A[net.rows, net.columns] = net.p
    return A


def product(net: Written, A: Tensor, z: Tensor) -> Tensor:
    L = triangle(net, A, z)
    return L @ L.T


def symmetric(net: Written, A: Tensor, z: Tensor) -> Tensor:
    A[net.rows, net.columns] = net.p
    A[net.columns, net.rows] = net.p
    return A


def by_rows(net: Written, A: Tensor, z: Tensor) -> Tensor:
    A[0] = net.w[0]
    A[1] = 2 * net.w[1]
    A[2, 2] = 1.0
    A[0, 0] = net.p[0] * net.p[1]
    return A


WRITTEN = {w.__name__: w for w in (triangle, product, symmetric, by_rows)}


@pytest.mark.parametrize("name", WRITTEN)
def test_parameters_written_into_a_matrix(name: str):
    torch.manual_seed(1)
    check(Written(WRITTEN[name]), [torch.randn(3, 3), torch.randn(2, 3)], covered=False)


def into_rows(net: Written, z: Tensor) -> Tensor:
    x = z.detach().clone()
    x[:, 0] = net.p[0]
    return x


class Overwritten(Written):
    def forward(self, x: Tensor) -> Tensor:
        return self.write(self, self.first(x).tanh()) @ self.w


def test_parameters_written_into_rows_of_samples():
    torch.manual_seed(1)
    check(Overwritten(into_rows), [torch.randn(3, 3), torch.randn(2, 3)], covered=False)


# --- scalars that all samples share


class Scaled(nn.Module):
    """One number scales all samples; its gradient may look like a multiple of any one's."""

    def __init__(self, entries: int):
        super().__init__()
        self.a, self.h = nn.Linear(5, 4), nn.Linear(4, 3)
        self.t = nn.Parameter(torch.full((entries,), 0.7))
        self.register_buffer("scale", torch.full((entries,), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.h(torch.tanh(self.a(x)) * (self.scale * self.t))


DTYPES = {torch.float64: 1e-8, torch.float32: 1e-3}


@pytest.mark.parametrize("entries", [1, 4])
@pytest.mark.parametrize("sizes", [(5, 2), (1, 4, 1, 3), (16, 16)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mixtures_of_samples_are_not_taken_for_one(
    dtype: torch.dtype, sizes: tuple[int, ...], entries: int
):
    """By chance, some of these nets make a mixture that is near one sample's weight."""
    loss = nn.CrossEntropyLoss()
    for seed in range(8):
        torch.manual_seed(seed)
        net = Scaled(entries).to(dtype)
        data = [(torch.randn(n, 5, dtype=dtype), torch.randint(3, (n,))) for n in sizes]
        rows = loop(net, [net.t], data, loss)
        found = PerSampleGradientLinearOperator(net, loss, [net.t], data).dense()
        assert (found - rows).norm() <= DTYPES[dtype] * rows.norm(), seed


def test_all_quantities_of_shared_parameters():
    loss = nn.CrossEntropyLoss()
    for seed in (3, 17):
        torch.manual_seed(seed)
        net = Scaled(1).double()
        data = [(torch.randn(n, 5).double(), torch.randint(3, (n,))) for n in (5, 2)]
        arguments = (net, loss, [net.t], data)
        ggn = (GGNLinearOperator(*arguments) @ torch.ones(1).double())[0]
        exact = {"fisher_type": "type-2", "fallback": "dense"}
        for found in (
            GGNDiagonalLinearOperator(*arguments).trace(),
            KFACLinearOperator(*arguments, **exact).trace(),
            EKFACLinearOperator(*arguments, **exact).trace(),
        ):
            torch.testing.assert_close(found, ggn, rtol=1e-8, atol=0.0)
        J = JacobianLinearOperator(net, [net.t], data)
        dense = J @ torch.eye(1).double()
        torch.testing.assert_close(J.gram(), dense @ dense.T, rtol=1e-8, atol=1e-12)


class Steps(nn.Module):
    """Euler's method for a differential equation, with a learned step."""

    def __init__(self):
        super().__init__()
        self.rate, self.step = nn.Linear(3, 3), nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.step * torch.tanh(self.rate(x))
        return x


def test_scalars_beside_shared_weights():
    torch.manual_seed(0)
    net, loss = Steps().double(), nn.CrossEntropyLoss(reduction="sum")
    params = list(net.parameters())
    data = [(torch.randn(n, 3).double(), torch.randint(3, (n,))) for n in (4, 3)]
    rows = loop(net, params, data, loss)
    E = EFLinearOperator(net, loss, params, data)
    V = torch.randn(E.shape[1], 3).double()
    for columns in (V[:, 0], V[:, 1], V, V):  # the first one is not kept
        torch.testing.assert_close(E @ columns, rows.T @ (rows @ columns))
