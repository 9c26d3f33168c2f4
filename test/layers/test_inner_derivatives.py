"""Models whose output has derivatives with respect to the input, as those of PINNs."""

from collections.abc import Callable
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.nn.functional as F
from models import Using
from sample_gradients import Row, batches, core, weight
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

L, points = nn.Linear, batches(2)
MODELS: dict[str, Row] = {}


# --- ways to differentiate


def _grad(u: Tensor, x: Tensor) -> Tensor:
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def _leaf(x: Tensor) -> Tensor:
    return x.detach().requires_grad_()


def _along(function: Callable, x: Tensor, axis: int) -> Tensor:
    return torch.func.jvp(function, (x,), (torch.eye(2)[axis].expand_as(x),))[1]


def laplacian(m: Using, x: Tensor) -> Tensor:
    x = _leaf(x)
    du = _grad(m.net(x), x)
    return sum(_grad(du[:, i], x)[:, i] for i in range(2)).unsqueeze(1)


def values_and_derivatives(m: Using, x: Tensor) -> Tensor:
    x = _leaf(x)
    u = m.net(x)
    du = _grad(u, x)
    return torch.cat([u, du, u * _grad(du[:, 1], x)], 1)


def fourth_derivative(m: Using, x: Tensor) -> Tensor:
    x = _leaf(x)
    u = m.net(x)
    for _ in range(4):
        u = _grad(u, x)[:, :1]
    return u


def hamiltonian(m: Using, x: Tensor) -> Tensor:
    dp, dq = torch.func.grad(lambda z: m.net(z).sum())(x).unbind(1)
    return torch.stack([dq, -dp], 1)


def batched_gradients(m: Using, x: Tensor) -> Tensor:
    x = _leaf(x)
    u = m.net(x)
    seeds = torch.eye(u.shape[1]).unsqueeze(1).expand(-1, len(x), -1)
    (rows,) = torch.autograd.grad(u, x, seeds, create_graph=True, is_grads_batched=True)
    return rows.transpose(0, 1).flatten(1)


def jacobian(m: Using, x: Tensor) -> Tensor:
    rows = torch.autograd.functional.jacobian(lambda z: m.net(z).sum(0), x, create_graph=True)
    return rows.transpose(0, 1).flatten(1)


def product_with_the_hessian(m: Using, x: Tensor) -> Tensor:
    options = {"create_graph": True}
    v = torch.ones_like(x)
    return torch.autograd.functional.hvp(lambda z: m.net(z).sum(), x, v, **options)[1]


def forward_mode(m: Using, x: Tensor) -> Tensor:
    """The values, a derivative, and the Laplacian."""
    u, du = torch.func.jvp(m.net, (x,), (torch.ones_like(x),))
    second = sum(_along(lambda z, i=i: _along(m.net, z, i), x, i) for i in range(2))
    return torch.cat([u, du, second], 1)


def forward_over_reverse(m: Using, x: Tensor) -> Tensor:
    return _along(torch.func.grad(lambda z: m.net(z).sum()), x, 0)


def hessian_by_vmap(m: Using, x: Tensor) -> Tensor:
    hessian = torch.func.hessian(lambda z: m.net(z).sum())
    return torch.func.vmap(lambda z: hessian(z).trace())(x).unsqueeze(1)


def hessian_of_batches_of_one(m: Using, x: Tensor) -> Tensor:
    hessian = torch.func.hessian(lambda z: m.net(z.unsqueeze(0)).sum())
    return torch.func.vmap(lambda z: hessian(z).trace())(x).unsqueeze(1)


def rows_by_vmap(m: Using, x: Tensor) -> Tensor:
    rows = (torch.func.vmap(f(m.net))(x) for f in (torch.func.jacrev, torch.func.jacfwd))
    return torch.cat([x.flatten(1) for x in rows], 1)


#: Ways to differentiate, each with an activation.
WAYS: dict[Callable[[Using, Tensor], Tensor], type[nn.Module]] = {
    laplacian: nn.SiLU,
    values_and_derivatives: nn.GELU,
    fourth_derivative: nn.Tanh,
    hamiltonian: nn.Softplus,
    batched_gradients: nn.ReLU,
    jacobian: nn.Sigmoid,
    product_with_the_hessian: nn.Mish,
    forward_mode: nn.Tanh,
    forward_over_reverse: nn.GELU,
    hessian_by_vmap: nn.Softplus,
    hessian_of_batches_of_one: nn.SiLU,
    rows_by_vmap: nn.Tanh,
}
#: Ways that differentiate each of several outputs.
SEVERAL = batched_gradients, jacobian, rows_by_vmap
ACTIVATIONS = nn.Tanh, nn.SiLU, nn.GELU, nn.Softplus, nn.ELU


def mlp(activation: type[nn.Module], outputs: int) -> nn.Module:
    return nn.Sequential(L(2, 4), activation(), L(4, 3), activation(), L(3, outputs))


for _way, _kind in [*WAYS.items(), *zip(WAYS, cycle(ACTIVATIONS), strict=False)]:
    MODELS[f"{_way.__name__}, {_kind.__name__}"] = Row(
        _way,
        {"net": partial(mlp, _kind, 1 + (_way in SEVERAL))},
        points,
        core=WAYS[_way] is _kind and _way in (laplacian, forward_mode, hessian_of_batches_of_one),
    )


def gated(m: Using, x: Tensor) -> Tensor:
    """The modified MLP of PINNs: all layers mix the same two features."""
    u, v, h = (torch.tanh(layer(x)) for layer in (m.u, m.v, m.first))
    h = h * u + (1 - h) * v
    h = torch.tanh(m.second(h))
    return m.head(h * u + (1 - h) * v)


def factorized(m: Using, x: Tensor) -> Tensor:
    """A weight is a product of directions and scales."""
    return m.head(torch.tanh(F.linear(x, m.direction * m.scale.exp(), m.bias)))


def polynomials(m: Using, x: Tensor) -> Tensor:
    """An edge of the net has a function of its own."""
    basis = torch.cos(torch.arange(3) * torch.tanh(x).arccos().unsqueeze(-1))
    return m.head(torch.einsum("nik,iok->no", basis, m.coefficients))


def convolved(m: Using, x: Tensor) -> Tensor:
    images = m.first(x).unflatten(1, (2, 3, 3))
    return m.head(torch.tanh(m.conv(images)).flatten(1))


def attending(m: Using, x: Tensor) -> Tensor:
    q, k, v = m.qkv(m.first(x.unsqueeze(2))).chunk(3, 2)
    return m.head(torch.tanh((q @ k.mT).softmax(-1) @ v).mean(1))


def operator_net(m: Using, x: Tensor) -> Tensor:
    """All points see the same function."""
    branch = m.branch(torch.linspace(0, 1, 5).unsqueeze(0))
    return (branch * torch.tanh(m.trunk(x))).sum(1, keepdim=True)


#: Nets that differ in how they use parameters.
NETS: dict[str, Callable[[], nn.Module]] = {
    "sines": lambda: Using(
        lambda m, x: m.head(torch.sin(3 * m.first(x))), first=L(2, 4), head=L(4, 1)
    ),
    "gated": lambda: Using(
        gated, u=L(2, 4), v=L(2, 4), first=L(2, 4), second=L(4, 4), head=L(4, 1)
    ),
    "factorized": lambda: Using(
        factorized, direction=weight(4, 2), scale=weight(4, 1), bias=weight(4), head=L(4, 1)
    ),
    "weight-norm": lambda: nn.Sequential(weight_norm(L(2, 4)), nn.Tanh(), L(4, 1)),
    "slopes": lambda: Using(
        lambda m, x: m.head(torch.tanh(m.slope * m.first(x))), first=L(2, 4), slope=weight(4),
        head=L(4, 1),
    ),
    "radial": lambda: Using(
        lambda m, x: m.head((-(x.unsqueeze(1) - m.centers).square().sum(2)).exp()),
        centers=weight(4, 2), head=L(4, 1),
    ),
    "polynomials": lambda: Using(polynomials, coefficients=weight(2, 4, 3), head=L(4, 1)),
    "convolution": lambda: Using(
        convolved, first=L(2, 18), conv=nn.Conv2d(2, 4, 3), head=L(4, 1)
    ),
    "grouped-convolution": lambda: Using(
        convolved, first=L(2, 18), head=L(24, 1),
        conv=nn.Conv2d(2, 4, (2, 3), stride=(1, 2), padding=1, groups=2, dilation=(2, 1)),
    ),
    "attention": lambda: Using(attending, first=L(1, 4), qkv=L(4, 12), head=L(4, 1)),
    "operator-net": lambda: Using(operator_net, branch=L(5, 4), trunk=L(2, 4)),
    "layer-norm": lambda: nn.Sequential(L(2, 4), nn.LayerNorm(4), nn.Tanh(), L(4, 1)),
}  # fmt: skip


def equation(m: Using, x: Tensor) -> Tensor:
    """The residual of an equation with an unknown coefficient."""
    x = _leaf(x)
    u = m.net(x)
    du = _grad(u, x)
    return m.viscosity * _grad(du[:, 1], x)[:, 1:] - u * du[:, :1]


for _name, _make in NETS.items():
    _parts = {"net": _make, "viscosity": (1,)}
    _covered = _name != "layer-norm"  # no rule for the scale in the derivative
    _core = _name in ("gated", "grouped-convolution")
    MODELS[f"equation, {_name}"] = Row(equation, _parts, points, _covered, core=_core)
    MODELS[f"forward mode, {_name}"] = Row(forward_mode, {"net": _make}, points)


@pytest.mark.parametrize("name", core(MODELS))
def test_models(name: str, double: None):
    torch.manual_seed(0)
    MODELS[name].check()
