"""The fast path of PyTorch's attention: what operators compute is what the user's own call does."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from models import Using
from torch import Tensor, nn

import curvlinops

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")

N, T = 4, 5
LENGTHS = torch.tensor([4, 3, 4, 2])
CE = nn.CrossEntropyLoss()


def pooled(z: Tensor, padding: Tensor, pool: str) -> Tensor:
    if pool == "tokens":
        return z
    if pool == "masked":
        weight = (~padding).to(z)[..., None]
        return (z * weight).sum(1) / weight.sum(1)
    return z.mean(1) if pool == "mean" else z.sum(1)


def model(pool: str, kind: str = "encoder", dtype: torch.dtype = torch.float64) -> nn.Module:
    """An encoder and a head."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2) if kind == "encoder" else layer

    def forward(s: Using, X: dict[str, Tensor]) -> Tensor:
        z = s.encoder(X["x"], src_key_padding_mask=X["padding"])
        z = s.head(pooled(z, X["padding"], pool))
        return z.movedim(-1, 1) if pool == "tokens" else z

    return Using(forward, encoder=encoder, head=nn.Linear(8, 3)).to(dtype).eval()


def batch(pool: str, padded: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Any, Tensor]:
    generator = torch.Generator().manual_seed(1)
    lengths = LENGTHS if padded else torch.full((N,), T)
    padding = torch.arange(T) >= lengths[:, None]
    x = torch.randn(N, T, 8, generator=generator).to(dtype)
    y = torch.randint(3, (N, T) if pool == "tokens" else (N,), generator=generator)
    y = y.masked_fill(padding, -100) if pool == "tokens" else y
    return {"x": x, "padding": padding}, y


def is_fast(net: nn.Module, X: dict[str, Tensor]) -> bool:
    """Return whether the encoder takes its fast path in the user's own call."""
    return bool((net.encoder(X["x"], src_key_padding_mask=X["padding"])[3, 2:] == 0).all())


#: Which parameters are frozen and which are differentiated, and whether the user's call is fast;
#: ``None`` if PyTorch refuses it.
FROZEN = {
    "frozen": ("encoder", "head", True),
    "not frozen": ("", "head", False),
    "all": ("", "", False),
    "last layer": ("", "encoder.layers.1", False),
    "frozen first layer": ("encoder.layers.0", "encoder.layers.1", None),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("pool", ["masked", "tokens", "mean", "sum"])
def test_products_are_of_the_users_own_loss(pool: str, frozen: str):
    """They are, or an error says why not: it is for what follows the padded positions."""
    net, (X, y) = model(pool), batch(pool)
    prefix, wanted, fast = FROZEN[frozen]
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(not (prefix and name.startswith(prefix)))
    named = {n: p for n, p in net.named_parameters() if n.startswith(wanted)}
    data, options = [(X, y)], {"batch_size_fn": lambda X: len(X["x"])}
    if fast is not None:
        assert is_fast(net, X) == fast
    if fast and pool in ("mean", "sum"):
        for kind in (curvlinops.HessianLinearOperator, curvlinops.PerSampleGradientLinearOperator):
            with pytest.raises(ValueError, match=r"loss on the first batch.*set_fastpath_enabled"):
                kind(net, CE, named, data, **options)
        return
    H = curvlinops.HessianLinearOperator(net, CE, named, data, **options)
    with fast_path(fast is not None):
        expected = CE(net(X), y)
    gradient, loss = H.gradient_and_loss()
    torch.testing.assert_close(loss, expected.detach())
    grads = torch.autograd.grad(expected, list(named.values()))
    torch.testing.assert_close(list(gradient.values()), list(grads))


@contextmanager
def fast_path(is_enabled: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(is_enabled)
    yield
    torch.backends.mha.set_fastpath_enabled(before)


@pytest.mark.parametrize("pool", ["mean", "sum"])
def test_the_remedy(pool: str):
    net, (X, y) = model(pool), batch(pool)
    net.encoder.requires_grad_(False)
    with fast_path(False):
        assert not is_fast(net, X)
        H = curvlinops.HessianLinearOperator(net, CE, list(net.head.parameters()), [(X, y)])
        torch.testing.assert_close(H.gradient_and_loss()[1], CE(net(X), y).detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["encoder", "layer"])
@pytest.mark.parametrize("mode", ["module", "function", "other values"])
def test_the_fast_path_is_welcome_where_it_computes_the_same(
    mode: str, kind: str, dtype: torch.dtype
):
    net, data = model("mean", kind, dtype), [batch("mean", False, dtype)]
    net.encoder.requires_grad_(False)
    before = [parameter.requires_grad for parameter in net.parameters()]
    params: Any = {name: p for name, p in net.named_parameters() if "head" in name}
    if mode == "other values":
        params = {name: p.detach() + 1 for name, p in params.items()}
    if mode == "function":
        function: Any = lambda X: net(X)  # noqa: E731
        operator = curvlinops.HessianLinearOperator(function, CE, [*params.values()], data)
    else:
        operator = curvlinops.HessianLinearOperator(net, CE, params, data)
    assert (operator @ torch.ones(operator.shape[1])).isfinite().all()
    assert [parameter.requires_grad for parameter in net.parameters()] == before


def test_outputs_that_differ():
    """A Jacobian has rows of padded positions, too."""
    net, (X, _) = model("tokens"), batch("tokens")
    net.encoder.requires_grad_(False)
    with pytest.raises(ValueError, match="output on the first batch.*fast path"):
        curvlinops.JacobianLinearOperator(net, list(net.head.parameters()), [(X, None)])
    curvlinops.JacobianLinearOperator(
        net, list(net.head.parameters()), [(X, None)], check_deterministic=False
    )
