"""Architectures as people use them, against central differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
)


class ResidualBlock(nn.Module):
    """Two convolutions with BatchNorm and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.softplus(self.norm1(self.conv1(x)))))
        return F.softplus(out + self.shortcut(x), beta=2.0)


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    """The layout of a ResNet-18, narrow; smooth, so that differences converge."""
    blocks = [
        ResidualBlock(i, o, s)
        for i, o, s in [(4, 4, 1), (4, 4, 1), (4, 8, 2), (8, 8, 1), (8, 8, 2)]
    ]
    stem = [nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.BatchNorm2d(4), nn.Softplus()]
    model = nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    return model, torch.randn(3, 3, 8, 8), torch.randint(5, (3,))


class ViT(nn.Module):
    """Patches, a class token, encoder layers."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 5, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 16, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.head(self.encoder(x)[:, 0])


def vit() -> tuple[nn.Module, Tensor, Tensor]:
    """A vision transformer."""
    return ViT(), torch.randn(3, 3, 8, 8), torch.randint(5, (3,))


class UNet(nn.Module):
    """Down, up, and a skip connection; a class for each pixel."""

    def __init__(self):
        super().__init__()
        self.down, self.inner = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, 2, 1)
        self.up, self.head = nn.ConvTranspose2d(6, 4, 2, 2), nn.Conv2d(8, 3, 1)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.down(x))
        return self.head(torch.cat([skip, F.gelu(self.up(self.norm(self.inner(skip))))], 1))


def unet() -> tuple[nn.Module, Tensor, Tensor]:
    """A segmentation network with ignored pixels."""
    y = torch.randint(3, (2, 4, 4))
    y[0, 0] = -100
    return UNet(), torch.randn(2, 2, 4, 4), y


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
