"""Models of `problems` whose layers are no modules, written once more so that uses are recorded."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import problems
import torch
from kfac_reference import linear, lookup
from problems import Problem
from torch import Tensor, nn
from torch.nn import functional as F

Params = dict[str, Tensor]


def _cell(kind: str, W: Params, suffix: str, x: Tensor, state: tuple) -> tuple:
    """One step of a recurrent layer, `[1, d]`: the new output, and the new state."""
    w_ih, w_hh, b_ih, b_hh = (
        W[f"{n}_{suffix}"] for n in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    ours, theirs = linear(x, w_ih, b_ih), linear(state[0], w_hh, b_hh)
    if kind == "rnn":
        h = torch.tanh(ours + theirs)
        return h, (h,)
    if kind == "gru":
        (r, z, n), (s, y, m) = ours.chunk(3, -1), theirs.chunk(3, -1)
        z = torch.sigmoid(z + y)
        h = (1 - z) * torch.tanh(n + torch.sigmoid(r + s) * m) + z * state[0]
        return h, (h,)
    i, f, g, o = (ours + theirs).chunk(4, -1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    if f"weight_hr_{suffix}" in W:
        h = linear(h, W[f"weight_hr_{suffix}"])
    return h, (h, c)


def _layer(kind: str, W: Params, X: Tensor, layers: int = 1, directions: int = 1) -> Tensor:
    """A recurrent layer, `[1, T, d] -> [1, T, h]`."""
    for level in range(layers):
        outputs = []
        for suffix in [f"l{level}", f"l{level}_reverse"][:directions]:
            steps = list(X.unbind(1))
            if suffix.endswith("reverse"):
                steps.reverse()
            width = W[f"weight_hh_{suffix}"].shape
            state = X.new_zeros(1, width[1]), X.new_zeros(1, width[0] // 4)
            out = []
            for x in steps:
                h, state = _cell(kind, W, suffix, x, state)
                out.append(h)
            if suffix.endswith("reverse"):
                out.reverse()
            outputs.append(torch.stack(out, 1))
        X = torch.cat(outputs, -1)
    return X


def _inner(params: Params, prefix: str) -> Params:
    return {k.removeprefix(prefix): v for k, v in params.items() if k.startswith(prefix)}


def _head(params: Params, x: Tensor) -> Tensor:
    return linear(x, params["head.weight"], params["head.bias"])


def recurrent(kind: str, params: Params, X: Tensor, **options: int) -> Tensor:
    """`models.Recurrent`."""
    return _head(params, _layer(kind, _inner(params, "layer."), X, **options).mean(1))


def packed_lstm(params: Params, X: tuple[Tensor, Tensor]) -> Tensor:
    """`models.packed_lstm`: steps behind the length do not exist."""
    steps, length = X
    h = _layer("lstm", _inner(params, "layer."), steps[:, : int(length)])
    return _head(params, h.sum(1))


def _heads(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
    """Attention of `[1, T, E]` with several heads."""
    q, k, v = (x.unflatten(-1, (number, -1)).transpose(1, 2) for x in (q, k, v))
    a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (a @ v).transpose(1, 2).flatten(-2)


def _self_attention(W: Params, x: Tensor) -> Tensor:
    qkv = linear(x, W["in_proj_weight"], W["in_proj_bias"])
    return linear(_heads(*qkv.chunk(3, -1), 2), W["out_proj.weight"], W["out_proj.bias"])


def self_attention(params: Params, X: Tensor) -> Tensor:
    """`models.self_attention`."""
    return _head(params, torch.tanh(_self_attention(_inner(params, "attention."), X)).mean(1))


def cross_attention(params: Params, X: tuple[Tensor, Tensor]) -> Tensor:
    """`models.cross_attention`: three matrices, of which each has a third of the bias."""
    query, memory = X
    W = _inner(params, "attention.")
    q, k, v = (
        linear(x, W[f"{name}_proj_weight"], W["in_proj_bias"], bias_rows=slice(4 * i, 4 * i + 4))
        for i, (name, x) in enumerate(zip("qkv", (query, memory, memory), strict=True))
    )
    k, v = torch.cat([k, W["bias_k"]], 1), torch.cat([v, W["bias_v"]], 1)
    h = linear(_heads(q, k, v, 2), W["out_proj.weight"], W["out_proj.bias"])
    return _head(params, torch.tanh(h))


def encoder_layer(norm_first: bool, params: Params, X: Tensor) -> Tensor:
    """`models.encoder_layer`."""
    W = _inner(params, "layer.")

    def norm(i: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, (4,), W[f"norm{i}.weight"], W[f"norm{i}.bias"])

    def attend(x: Tensor) -> Tensor:
        return _self_attention(_inner(W, "self_attn."), x)

    def feed(x: Tensor) -> Tensor:
        h = F.gelu(linear(x, W["linear1.weight"], W["linear1.bias"]))
        return linear(h, W["linear2.weight"], W["linear2.bias"])

    if norm_first:
        X = X + attend(norm(1, X))
        X = X + feed(norm(2, X))
    else:
        X = norm(1, X + attend(X))
        X = norm(2, X + feed(X))
    return _head(params, X).transpose(1, 2)


def bag(mode: str, params: Params, X: Tensor) -> Tensor:
    """`models.bag`."""
    h = lookup(X, params["bag.weight"])
    return _head(params, torch.tanh(h.sum(1) if mode == "sum" else h.mean(1)))


def bare(params: Params, x: Tensor) -> Tensor:
    """`models.bare`."""
    h = torch.sin(x * params["scale"] + params["shift"])
    return linear(h, params["weight"], transposed=True) * params["scale"].sum()


def plain_mlp(names: str, params: Params, X: Tensor) -> Tensor:
    """`models.plain_mlp`: a bias that is added on its own has its exact block."""
    w, b, v = (params[name] for name in names)
    return linear(torch.tanh(linear(X, w, transposed=True) + b), v, transposed=True)


def _slopes(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second derivative of an elementwise function."""
    (first,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z, create_graph=True)
    return first, second


def pinn(params: Params, X: Tensor) -> Tensor:
    """`models.pinn`: backward passes multiply by the same weights from the other side."""
    w, b, v, c = (params[f"net.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias"))
    ones, second = X.new_ones(1, 1), X.new_tensor([[0.0, 1.0]])
    z = linear(X, w, b)
    u = linear(_activation(z), v, c)
    slope, bend = _slopes(_activation, z)
    g = linear(ones, v, transposed=True)
    du = linear(slope * g, w, transposed=True)
    along = linear(second, w)  # how z moves with the second coordinate
    d2u = linear(bend * g * along, w, transposed=True)
    return du[:, :1] - d2u[:, 1:] + u.square()


def _activation(z: Tensor) -> Tensor:
    return F.gelu(F.silu(torch.tanh(z)))


PLAIN: dict[str, Callable[[Params, Tensor], Tensor]] = {
    "rnn": partial(recurrent, "rnn"),
    "gru": partial(recurrent, "gru"),
    "lstm": partial(recurrent, "lstm"),
    "lstm-bidirectional": partial(recurrent, "lstm", layers=2, directions=2),
    "lstm-packed": packed_lstm,
    "float32-lstm": partial(recurrent, "lstm"),
    "bfloat16-lstm": partial(recurrent, "lstm"),
    "self-attention": self_attention,
    "cross-attention": cross_attention,
    "encoder-layer-eval": partial(encoder_layer, False),
    "encoder-layer-train": partial(encoder_layer, True),
    "embedding-bag-sum": partial(bag, "sum"),
    "embedding-bag-mean": partial(bag, "mean"),
    "bare-parameter": bare,
    "functional": partial(plain_mlp, "wbv"),
    "closure": partial(plain_mlp, "120"),
    "pinn": pinn,
}
#: Layers that the reference does not see; they have their exact blocks there.
WITHOUT_LAYERS = ("weight-norm",)


def make(name: str) -> Problem:
    """A problem whose reference model records its uses."""
    p = problems.make(name)
    if name in WITHOUT_LAYERS:
        return p
    # PyTorch's own modules have right first derivatives, and are seen
    return replace(p, reference_model=PLAIN.get(name))


def problem(
    model: Any, X: list[Any], loss: nn.Module, target: Callable = torch.randn_like
) -> Problem:
    """Return a problem in all parameters of a model."""
    data = [(x, target(model(x).detach())) for x in X]
    return Problem(model, loss, list(model.parameters()), data, mc=True)
