"""Attention in tiles: values and derivatives of those of PyTorch's math kernel."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from contract import ALL, error, vectors
from models import Using
from problems import Problem
from tables import core
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from curvlinops.autodiff.overrides import attention as module
from curvlinops.autodiff.overrides.attention import attention

# PyTorch's forward mode calls it
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

PLAIN = F.scaled_dot_product_attention


@pytest.fixture
def in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let all attention run in tiles, of two queries and 16 weights at least."""
    for name, value in {"FEW_WEIGHTS": 0, "_TILE": 16, "_MIN_QUERIES": 2}.items():
        monkeypatch.setattr(module, name, value)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def inputs(*shapes: tuple[int, ...], **options: Any) -> list[Tensor]:
    return [randn(*s, seed=i, **options).requires_grad_() for i, s in enumerate(shapes)]


# --- calls


N, H, R, T = 2, 4, 5, 7
Q, K, W = (N, H, R, 3), (N, H, T, 3), (N, H, T, 2)  # queries, keys, values
MASK = randn(R, T) > -0.5
PADDING = torch.tensor([[True] * T, [True] * 3 + [False] * 4])[:, None, None]
CALLS: dict[str, tuple[tuple, dict[str, Any]]] = {
    "plain": ((Q, K, W), {}),
    "scale": ((Q, K, W), {"scale": 0.3}),
    "grouped": ((Q, (N, 2, T, 3), (N, 2, T, 2)), {"enable_gqa": True}),
    "one head of keys": ((Q, (N, 1, T, 3), (N, 1, T, 2)), {"enable_gqa": True, "attn_mask": MASK}),
    "causal": ((Q, Q, Q), {"is_causal": True}),
    "causal, more keys": ((Q, K, W), {"is_causal": True}),
    "causal, more queries": ((K, Q, Q), {"is_causal": True, "scale": 0.3}),
    "causal, no samples": ((Q[1:], K[1:], W[1:]), {"is_causal": True}),
    "mask": ((Q, K, W), {"attn_mask": MASK}),
    "padding": ((Q, K, W), {"attn_mask": PADDING}),
    "padding of all keys": ((Q, K, W), {"attn_mask": PADDING & (torch.arange(R) > 1)[:, None]}),
    "additive": ((Q, K, W), {"attn_mask": randn(H, 1, T, seed=5)}),
    "infinite": ((Q, K, W), {"attn_mask": randn(N, H, R, T).masked_fill(~MASK, -torch.inf)}),
    "no samples": ((Q[1:], K[1:], W[1:]), {"attn_mask": MASK}),
}


def derivatives(call: Any, tensors: list[Tensor], options: dict[str, Any]) -> dict[str, Any]:
    """Return the output, and its derivatives of first, second and third order."""
    out = call(*tensors, **options)
    u = randn(*out.shape, seed=7).requires_grad_()
    v = [randn(*x.shape, seed=8 + i) for i, x in enumerate(tensors)]

    def gradients(outputs: Any, inputs: list[Tensor], vectors: Any, keep: bool = True) -> Any:
        return torch.autograd.grad(outputs, inputs, vectors, retain_graph=True, create_graph=keep)

    def columns(inputs: list[Tensor]) -> Any:
        several = [torch.stack([x, 2 * x]) for x in v]
        found = torch.func.vmap(lambda *x: gradients(first, inputs, x, keep=False))(*several)
        return [x[1] / 2 for x in found]

    first = gradients(out, tensors, u)
    second = gradients(first, [*tensors, u], v)
    third = gradients(sum(x.sin().sum() for x in second), tensors, None, keep=False)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, y) for x, y in zip(tensors, v, strict=True)]
        tangent = forward_ad.unpack_dual(call(*duals, **options)).tangent
        # PyTorch cannot differentiate the tangent of its own kernel, but ``<u, J v>``
        of_tangent = gradients(tangent, tensors, u) if call is attention else second[:3]
    return {
        "output": out,
        "first": first,
        "second": second,
        "third": third,
        "Jacobian": gradients(first, [u], v),
        "columns": columns([*tensors, u]),
        "columns of the Jacobian": columns([u]),
        "tangent": tangent,
        "gradient of the tangent": of_tangent,
    }


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name: str):
    shapes, options = CALLS[name]
    found = derivatives(attention, inputs(*shapes), options)
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(PLAIN, inputs(*shapes), options)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": MASK[:4, :4]}])
def test_numerical_derivatives(options: dict[str, Any]):
    shape = 1, 2, 4, 2

    def call(*tensors: Tensor) -> Tensor:
        return attention(*tensors, **options)

    assert gradcheck(call, inputs(shape, shape, shape), check_forward_ad=True)
    assert gradgradcheck(call, inputs(shape, shape, shape))


MANY = (2, 2, 1024, 4)
LEFT_TO_PYTORCH = {
    "few weights": ([(2, 2, 64, 4)] * 3, {}),
    "dropout": ([MANY] * 3, {"dropout_p": 0.5}),
    "a mask with a derivative": (
        [MANY] * 3,
        {"attn_mask": inputs((1024,), dtype=torch.float32)[0]},
    ),
    "samples that are broadcast": ([MANY, (1, *MANY[1:]), (1, *MANY[1:])], {}),
    "two axes of samples": ([(1, *MANY)] * 3, {}),
}


@pytest.mark.parametrize("name", LEFT_TO_PYTORCH)
def test_left_to_pytorch(name: str):
    shapes, options = LEFT_TO_PYTORCH[name]
    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        found = attention(*inputs(*shapes, dtype=torch.float32), **options)
        torch.manual_seed(0)
        expected = PLAIN(*inputs(*shapes, dtype=torch.float32), **options)
    assert found.grad_fn.name() == expected.grad_fn.name()
    assert torch.equal(found, expected)
    assert attention(*inputs(MANY, MANY, MANY)).grad_fn.name() == "AttentionBackward"


@pytest.mark.usefixtures("in_tiles")
def test_half_precision_is_summed_in_single_precision():
    shape, dtype = (1, 2, 300, 8), torch.bfloat16
    tensors = inputs(shape, shape, shape, dtype=dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    results = []
    for given in (tensors, exact):
        out = attention(*given, is_causal=True)
        first = torch.autograd.grad(out, given, randn(*shape).to(dtype).to(out), create_graph=True)
        v = [randn(*shape, seed=i).to(dtype).to(out) for i in range(3)]
        results.append([out, *first, *torch.autograd.grad(first, given, v)])
    for found, expected in zip(*results, strict=True):
        assert found.dtype is dtype
        # one rounding, which is 2^-9 at most, and that of the gradients between
        assert error(found.detach(), expected.detach()) <= 2**-9


@pytest.mark.usefixtures("in_tiles")
def test_autocast():
    shape = 2, 2, 6, 4
    single = [x.detach().float().requires_grad_() for x in inputs(shape, shape, shape)]
    for tensors in (single, inputs(shape, shape, shape)):
        with torch.autocast("cpu", torch.bfloat16), sdpa_kernel(SDPBackend.MATH):
            found, expected = attention(*tensors), PLAIN(*tensors)
        assert found.dtype is expected.dtype
        assert found.grad_fn.name() == "AttentionBackward"
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(x.sum(), tensors) for x in (found, expected)]
        torch.testing.assert_close(*gradients)


# --- operators


def heads(x: Tensor, number: int) -> Tensor:
    """Turn ``[N, T, H * d]`` into ``[N, H, T, d]``."""
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


def causal(s: Using, x: Tensor) -> Tensor:
    q, k, v = (heads(z, 2) for z in s.qkv(x).chunk(3, -1))
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return s.head(z.transpose(1, 2).flatten(2))[:, -1]


def grouped(s: Using, x: Tensor) -> Tensor:
    """Four heads of queries for two of keys; every second sample ends with padding."""
    is_token = (torch.arange(x.shape[1]) < 4) | (torch.arange(len(x)) % 2 == 0)[:, None]
    mask = is_token[:, None, None] & torch.ones(x.shape[1], x.shape[1]).tril().bool()
    q, k, v = heads(s.q(x), 4), heads(s.k(x), 2), heads(s.v(x), 2)
    z = F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True)
    return s.head(z.transpose(1, 2).flatten(2))[:, -1]


def encoder(s: Using, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return s.head(s.layer(x, mask, is_causal=True))[:, -1]


LAYER = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
#: Functions of the layers, and the layers.
MODELS: dict[str, tuple[Any, dict[str, nn.Module]]] = {
    "causal": (causal, {"qkv": nn.Linear(4, 12)}),
    "checkpoint": (
        lambda s, x: checkpoint(causal, s, x, use_reentrant=False),
        {"qkv": nn.Linear(4, 12)},
    ),
    "grouped, padded": (
        grouped,
        {"q": nn.Linear(4, 8), "k": nn.Linear(4, 4), "v": nn.Linear(4, 4)},
    ),
    "encoder layer": (encoder, {"layer": LAYER}),
}


CASES = ["hessian", "ggn", "jacobian", "gradients", "kfac"]


@pytest.mark.usefixtures("in_tiles")
@pytest.mark.parametrize(
    "name, case",
    core([*product(MODELS, CASES[:1]), *product(["causal"], CASES)], product(MODELS, CASES)),
)
def test_operators(name: str, case: str, monkeypatch: pytest.MonkeyPatch):
    function, layers = MODELS[name]
    width = 8 if "q" in layers else 4
    torch.manual_seed(0)
    model = Using(function, **copy.deepcopy(layers), head=nn.Linear(width, 3)).double()
    data = [(randn(n, 6, 4, seed=n), torch.arange(n) % 3) for n in (3, 2)]
    calls = []

    def products() -> list[Tensor]:
        p = Problem.of(model, nn.CrossEntropyLoss(), data)
        A = ALL[case].build(p)
        v, V = vectors(A), vectors(A, 3)
        found = [A @ v, A @ V, A.T @ (A @ V)]
        with A.linearized():
            return [*found, A @ v, A @ V]

    apply = module.Attention.apply
    monkeypatch.setattr(module.Attention, "apply", lambda *args: calls.append(0) or apply(*args))
    found = products()
    assert calls or case == "kfac"  # it differentiates once, through fused kernels
    monkeypatch.setattr(module, "FEW_WEIGHTS", 10**9)
    calls.clear()
    expected = products()
    assert not calls
    for one, other in zip(found, expected, strict=True):
        assert error(one, other) <= 1e-12
