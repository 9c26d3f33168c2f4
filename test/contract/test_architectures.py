"""Architectures as people use them, against central differences."""

import pytest
import torch
from models import resnet, unet, vit
from torch import Tensor, nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
)


@pytest.mark.parametrize("build", [resnet, vit, unet])
def test_hessian_and_ggn(build):
    torch.manual_seed(0)
    model, X, y = build()
    model, X = model.double().eval(), X.double()
    params = list(model.parameters())
    loss = nn.CrossEntropyLoss()
    data = [(X[:1], y[:1]), (X[1:], y[1:])]
    H = HessianLinearOperator(model, loss, params, data)
    V = torch.randn(H.shape[1], 3, dtype=torch.float64)
    v, theta = V[:, 0], nn.utils.parameters_to_vector(params).detach()

    def gradient(at: Tensor) -> Tensor:
        nn.utils.vector_to_parameters(at, params)
        return nn.utils.parameters_to_vector(torch.autograd.grad(loss(model(X), y), params))

    eps = 1e-5
    slope = (gradient(theta + eps * v) - gradient(theta - eps * v)) / (2 * eps)
    nn.utils.vector_to_parameters(theta, params)
    assert (H @ v - slope).norm() <= 1e-6 * slope.norm()
    with H.linearized():
        for _ in range(2):
            torch.testing.assert_close((H @ V)[:, 0], H @ v, rtol=1e-8, atol=1e-10)

    G = GGNLinearOperator(model, loss, params, data)
    expected = torch.stack([G @ u for u in V.T], 1)  # by forward mode
    assert (G @ V - expected).norm() <= 1e-9 * expected.norm()


@pytest.fixture
def _process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


WRAPPERS = {
    "distributed": nn.parallel.DistributedDataParallel,
    "compiled": lambda model: torch.compile(model, backend="aot_eager"),
    "data-parallel": nn.DataParallel,
}


@pytest.mark.filterwarnings("ignore:.*does not support pickle:UserWarning")
@pytest.mark.usefixtures("_process_group")
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("kind", [HessianLinearOperator, GGNLinearOperator])
def test_wrapped(kind: type, wrapper: str):
    torch.manual_seed(0)
    plain, X, y = unet()
    plain, X, loss = plain.double(), X.double(), nn.CrossEntropyLoss()
    model = WRAPPERS[wrapper](plain)
    A = kind(model, loss, list(model.parameters()), [(X, y)])
    B = kind(plain, loss, list(plain.parameters()), [(X, y)])
    V = torch.randn(A.shape[1], 2, dtype=torch.float64)
    for _ in range(2):
        torch.testing.assert_close(A @ V, B @ V)
        torch.testing.assert_close(A @ V[:, 0], B @ V[:, 0])
        # the wrapper still trains, also between products
        loss(model(X), y).backward()
        expected = torch.autograd.grad(loss(plain(X), y), list(plain.parameters()))
        for param, grad in zip(plain.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, grad)
            param.grad = None
            param.data -= 0.1 * grad
