"""Small models for the test problems, each with one feature that curvature code gets wrong.

Sizes are chosen so that a dense Hessian takes well below a second. Nothing here fixes a dtype, so
that a float64 copy of a low-precision model is the same function in exact arithmetic.
"""

from collections.abc import Callable
from typing import Any

import torch
from recording import linear, lookup
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint


def mlp(inputs: int = 4, hidden: int = 3, outputs: int = 3) -> nn.Sequential:
    """Smooth two-layer net."""
    return nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs))


class Using(nn.Module):
    """A function of an input, and of modules and parameters by name."""

    def __init__(self, function: Callable[["Using", Any], Tensor], **parts: nn.Module | Tensor):
        super().__init__()
        self._function = function
        for name, part in parts.items():
            is_value = isinstance(part, Tensor) and not isinstance(part, nn.Parameter | nn.Buffer)
            setattr(self, name, nn.Parameter(part) if is_value else part)

    def forward(self, x: Any) -> Tensor:
        return self._function(self, x)


def scalar() -> nn.Sequential:
    """Net with outputs of shape `[N]`: no class axis at all."""
    return nn.Sequential(mlp(outputs=1), nn.Flatten(0))


class Tokens(nn.Module):
    """Token model whose positions interact through a running mean: `[N, T] -> [N, T, C]`."""

    def __init__(self, vocabulary: int = 5, width: int = 3, classes: int = 3, axis: int = -1):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.head = nn.Linear(width, classes)
        self.axis = axis  # 1: `[N, C, T]`, the layout cross-entropy wants

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        count = torch.arange(1, x.shape[1] + 1, device=h.device).unsqueeze(-1)
        h = h + torch.tanh(self.mix(h.cumsum(1) / count.to(h)))
        return self.head(h).movedim(-1, self.axis)


def cnn() -> nn.Sequential:
    """Convolutions, one grouped, with eval-mode BatchNorm and in-place ReLU: `[N, 2, 4, 4]`."""
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Conv2d(2, 4, 2, stride=2, groups=2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(16, 2),
    )
    norm = model[1]
    for tensor, low, high in [
        (norm.running_mean, -0.5, 0.5),
        (norm.running_var, 0.5, 2.0),
        (norm.weight, 0.5, 1.5),
        (norm.bias, -0.5, 0.5),
    ]:
        nn.init.uniform_(tensor, low, high)
    return model.eval()


def segmentation() -> nn.Sequential:
    """Per-pixel classes `[N, C, H, W]`: many terms per sample, shared weights."""
    return nn.Sequential(
        nn.Conv2d(1, 2, 2, padding=1), nn.Tanh(), nn.ConvTranspose2d(2, 3, 2, padding=1)
    )


def conv1d() -> nn.Sequential:
    """Circular, dilated and string-valued padding: `[N, 2, L] -> [N, 2]`."""
    return nn.Sequential(
        nn.Conv1d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Tanh(),
        nn.Conv1d(2, 2, 3, padding="same", dilation=2),
        nn.Tanh(),
        nn.Conv1d(2, 2, 2, padding="valid", bias=False),
        nn.AdaptiveAvgPool1d(1),
        nn.Flatten(),
    )


def norm(layer: nn.Module) -> nn.Module:
    """A non-linear layer, a normalisation over the sample, a head: `[N, 2, L] -> [N, 2]`."""
    for tensor in layer.parameters():
        nn.init.uniform_(tensor, 0.5, 1.5)
    parts = {"conv": nn.Conv1d(2, 4, 2), "norm": layer, "head": nn.Linear(4, 2)}
    return Using(lambda m, x: m.head(torch.tanh(m.norm(m.conv(x))).mean(-1)), **parts)


class Transformer(nn.Module):
    """Pre-norm block with fused attention: tokens `[N, T] -> [N, V, T]`.

    The norms compute in their own dtype, so that they may stay float32 in a bfloat16 body.
    """

    def __init__(self, tied: bool = False, vocabulary: int = 5, width: int = 4, length: int = 4):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) / 2)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 3), nn.GELU(), nn.Linear(3, width))
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    @staticmethod
    def norm(layer: nn.LayerNorm, h: Tensor) -> Tensor:
        return layer(h.to(layer.weight.dtype)).to(h.dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position[: x.shape[1]]
        # [N, T, 3E] -> three of [N, heads, T, E/heads]
        qkv = self.qkv(self.norm(self.norm1, h)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(*qkv, is_causal=True)
        h = h + self.proj(a.transpose(1, 2).flatten(-2))
        h = h + self.mlp(self.norm(self.norm2, h))
        return self.head(h).transpose(1, 2)


def encoder_layer(norm_first: bool = False) -> nn.Module:
    """PyTorch's own encoder layer: `[N, T, 4] -> [N, 2, T]`."""
    layer = nn.TransformerEncoderLayer(
        4, 2, dim_feedforward=3, dropout=0.0, batch_first=True, norm_first=norm_first,
        activation="gelu",
    )  # fmt: skip
    return Using(lambda m, x: m.head(m.layer(x)).transpose(1, 2), layer=layer, head=nn.Linear(4, 2))


def self_attention() -> nn.Module:
    """nn.MultiheadAttention without weights (fused kernel), time axis first inside."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        h, _ = m.attention(x, x, x, need_weights=False)
        return m.head(torch.tanh(h).mean(0))

    return Using(function, attention=nn.MultiheadAttention(4, 2), head=nn.Linear(4, 2))


def cross_attention() -> nn.Module:
    """Separate projections, kdim, vdim and bias_k: a tuple of `[N, T, 4]` and `[N, S, 3]`."""
    attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=3, add_bias_kv=True, batch_first=True)
    return Using(
        lambda m, x: m.head(torch.tanh(m.attention(x[0], x[1], x[1])[0])),
        attention=attention,
        head=nn.Linear(4, 2),
    )


class Recurrent(nn.Module):
    """A recurrent layer and a head on its last state: `[N, T, d] -> [N, 2]`."""

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].mean(1))


def packed_lstm() -> nn.Module:
    """Variable lengths, packed inside the forward: `([N, T, 2], lengths [N]) -> [N, 2]`."""

    def function(m: nn.Module, x: tuple[Tensor, Tensor]) -> Tensor:
        packed = pack_padded_sequence(x[0], x[1].cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(m.layer(packed)[0], batch_first=True)
        return m.head(h.sum(1))

    return Using(function, layer=nn.LSTM(2, 2, batch_first=True), head=nn.Linear(2, 2))


def checkpointed() -> nn.Module:
    """A block that is recomputed in the backward pass."""
    return Using(
        lambda m, x: m.head(torch.tanh(checkpoint(m.block, x, use_reentrant=False))),
        block=mlp(),
        head=nn.Linear(3, 2),
    )


def bag(mode: str) -> nn.Module:
    """EmbeddingBag over `[N, T]` indices and a head."""
    parts = {"bag": nn.EmbeddingBag(5, 3, mode=mode), "head": nn.Linear(3, 2)}
    return Using(lambda m, x: m.head(torch.tanh(m.bag(x))), **parts)


def masked_bag(padding_idx: int | None = None) -> nn.Module:
    """Mean of the unmasked token embeddings: `{"input_ids", "attention_mask"} -> [N, 3]`."""

    def function(m: nn.Module, x: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(m.mix(m.embed(x["input_ids"])))
        mask = x["attention_mask"].unsqueeze(-1).to(h)
        return m.head((h * mask).sum(1) / mask.sum(1))

    embed = nn.Embedding(5, 3, padding_idx=padding_idx)
    return Using(function, embed=embed, mix=nn.Linear(3, 3), head=nn.Linear(3, 3))


def padded(tied: bool = False) -> nn.Module:
    """Embedding with padding_idx whose pad positions do reach the output; optionally tied."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        h = m.embed(x)
        return m.head(h + torch.tanh(m.mix(h.cumsum(1)))).transpose(1, 2)

    embed = nn.Embedding(5, 3, padding_idx=1)
    nn.init.normal_(embed.weight)  # also the pad row, which PyTorch starts at zero
    model = Using(function, embed=embed, mix=nn.Linear(3, 3), head=nn.Linear(3, 5))
    if tied:
        model.head.weight = embed.weight
    return model


def bare() -> nn.Module:
    """Parameters used by plain operations, one of them broadcast and one transposed."""
    return Using(
        lambda m, x: torch.sin(x * m.scale + m.shift) @ m.weight * m.scale.sum(),
        scale=torch.rand(4) + 0.5,
        shift=torch.randn(()),
        weight=torch.randn(4, 3),
    )


def twice() -> nn.Module:
    """One linear layer used twice in a row."""
    return Using(
        lambda m, x: m.head(torch.tanh(m.shared(torch.tanh(m.shared(x))))),
        shared=nn.Linear(4, 4),
        head=nn.Linear(4, 3),
    )


class InnerSteps(nn.Module):
    """Each sample is predicted after a step of gradient descent on it, of learned size."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.randn(2))
        self.size = nn.Parameter(torch.tensor(0.3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self._predict(one) for one in x])

    @torch.enable_grad()
    def _predict(self, x: Tensor) -> Tensor:
        energy = torch.tanh(self.weight @ x + self.bias).square().sum()
        own = self.weight, self.bias
        weight, bias = torch.autograd.grad(energy, own, create_graph=True)
        return torch.tanh((self.weight - self.size * weight) @ x + self.bias - self.size * bias)


def pinn(net: nn.Module) -> nn.Module:
    """Residual of an equation: differentiates the net with respect to its input."""

    def function(m: nn.Module, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            u = m.net(x)
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (d2u,) = torch.autograd.grad(du[:, 1].sum(), x, create_graph=True)
        return du[:, :1] - d2u[:, 1:] + u.square()

    return Using(function, net=net)


def attention(m: Using, x: Tensor) -> Tensor:
    """Layers of single-head attention. Queries, keys and values have the same inputs."""
    for i in range(3):
        q, k, v, out, norm = (getattr(m, f"{name}{i}") for name in ("q", "k", "v", "out", "norm"))
        h = norm(x)
        x = x + out(torch.tanh(q(h) * k(h))[..., : v.out_features] + v(h))
    return x


def attention_layers() -> nn.Module:
    parts: dict[str, nn.Module] = {}
    for i in range(3):
        parts |= {f"{name}{i}": nn.Linear(4, 4, bias=name != "k") for name in ("q", "k", "out")}
        parts |= {f"v{i}": nn.Linear(4, 3 if i == 1 else 4), f"norm{i}": nn.LayerNorm(4)}
    parts["out1"] = nn.Linear(3, 4)
    return Using(attention, **parts)


def repeated(*kinds: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(*(layer for make in kinds for layer in (make(), nn.Tanh())), nn.Flatten())


#: Models with equal layers, and the shape of a sample.
EQUAL_LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "equal-layers": (lambda: repeated(*[lambda: nn.Linear(3, 3)] * 4), (3,)),
    "equal-layers-unevenly-spaced": (
        lambda: repeated(
            *[lambda: nn.Linear(3, 3)] * 2, lambda: nn.LayerNorm(3), *[lambda: nn.Linear(3, 3)] * 2
        ),
        (2, 3),
    ),
    "equal-convolutions": (
        lambda: repeated(*[lambda: nn.Conv1d(4, 4, 3, padding=1, groups=2)] * 3), (4, 3)
    ),
    "equal-norms": (
        lambda: repeated(*[lambda: nn.LayerNorm(3)] * 3, lambda: nn.Linear(3, 2)), (3,)
    ),
    "attention-layers": (attention_layers, (2, 4)),
}  # fmt: skip


def frozen_stem() -> nn.Module:
    """Features computed under no_grad, trained head."""
    return Using(lambda m, x: m.head(torch.no_grad()(m.stem)(x)), stem=mlp(), head=mlp(3, 3, 2))


# --- The same from plain operations, of which uses are recorded: where PyTorch is wrong, or has no
# second derivative, or layers are no modules

Params = dict[str, Tensor]


def plain_mlp(params: Params, X: Tensor) -> Tensor:
    """A functional model in three tensors: a bias that is added on its own has its exact block."""
    h = torch.tanh(linear(X, params["w"], transposed=True) + params["b"])
    return linear(h, params["v"], transposed=True)


def plain_weight_norm(params: Params, X: Tensor) -> Tensor:
    """`mlp` with weight_norm, dim 0 and dim 1: torch._weight_norm differentiates twice wrongly."""

    def weight(layer: int, axis: int) -> Tensor:
        size, direction = (params[f"{layer}.parametrizations.weight.original{i}"] for i in (0, 1))
        return size * direction / direction.square().sum(axis, keepdim=True).sqrt()

    h = torch.tanh(F.linear(X, weight(0, 1), params["0.bias"]))
    return F.linear(h, weight(2, 0), params["2.bias"])


def plain_padded(tied: bool, params: Params, X: Tensor) -> Tensor:
    """`padded`."""
    h = lookup(X, params["embed.weight"], 1)
    h = h + torch.tanh(linear(h.cumsum(1), params["mix.weight"], params["mix.bias"]))
    head = params["embed.weight" if tied else "head.weight"]
    return linear(h, head, params["head.bias"]).transpose(1, 2)


def plain_masked_bag(padding_idx: int, params: Params, X: dict[str, Tensor]) -> Tensor:
    """`masked_bag`."""
    h = lookup(X["input_ids"], params["embed.weight"], padding_idx)
    h = torch.tanh(linear(h, params["mix.weight"], params["mix.bias"]))
    mask = X["attention_mask"].unsqueeze(-1).to(h)
    return linear((h * mask).sum(1) / mask.sum(1), params["head.weight"], params["head.bias"])


def plain_bag(mode: str, params: Params, X: Tensor) -> Tensor:
    """`bag`: EmbeddingBag has no second derivative."""
    h = lookup(X, params["bag.weight"])
    h = h.sum(1) if mode == "sum" else h.mean(1)
    return linear(torch.tanh(h), params["head.weight"], params["head.bias"])


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


def plain_recurrent(kind: str, params: Params, X: Tensor, **options: int) -> Tensor:
    """`Recurrent`."""
    return _head(params, _layer(kind, _inner(params, "layer."), X, **options).mean(1))


def plain_packed_lstm(params: Params, X: tuple[Tensor, Tensor]) -> Tensor:
    """`packed_lstm`: steps behind the length do not exist."""
    W = _inner(params, "layer.")
    rows = [
        _layer("lstm", W, x[None, :length]).sum(1)
        for x, length in zip(X[0], X[1].tolist(), strict=True)
    ]
    return _head(params, torch.cat(rows))


def _heads(q: Tensor, k: Tensor, v: Tensor, number: int) -> Tensor:
    """Attention of `[1, T, E]` with several heads."""
    q, k, v = (x.unflatten(-1, (number, -1)).transpose(1, 2) for x in (q, k, v))
    a = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
    return (a @ v).transpose(1, 2).flatten(-2)


def _self_attention(W: Params, x: Tensor) -> Tensor:
    qkv = linear(x, W["in_proj_weight"], W["in_proj_bias"])
    return linear(_heads(*qkv.chunk(3, -1), 2), W["out_proj.weight"], W["out_proj.bias"])


def plain_self_attention(params: Params, X: Tensor) -> Tensor:
    """`self_attention`."""
    return _head(params, torch.tanh(_self_attention(_inner(params, "attention."), X)).mean(1))


def plain_cross_attention(params: Params, X: tuple[Tensor, Tensor]) -> Tensor:
    """`cross_attention`: three matrices, of which each has a third of the bias."""
    query, memory = X
    W = _inner(params, "attention.")
    q, k, v = (
        linear(x, W[f"{name}_proj_weight"], W["in_proj_bias"], bias_rows=slice(4 * i, 4 * i + 4))
        for i, (name, x) in enumerate(zip("qkv", (query, memory, memory), strict=True))
    )
    k, v = (
        torch.cat([x, W[name].expand(len(x), -1, -1)], 1)
        for x, name in ((k, "bias_k"), (v, "bias_v"))
    )
    h = linear(_heads(q, k, v, 2), W["out_proj.weight"], W["out_proj.bias"])
    return _head(params, torch.tanh(h))


def plain_encoder_layer(norm_first: bool, params: Params, X: Tensor) -> Tensor:
    """`encoder_layer`."""
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


def plain_bare(params: Params, x: Tensor) -> Tensor:
    """`bare`."""
    h = torch.sin(x * params["scale"] + params["shift"])
    return linear(h, params["weight"], transposed=True) * params["scale"].sum()


def _slopes(function: Callable[[Tensor], Tensor], z: Tensor) -> tuple[Tensor, Tensor]:
    """The first and the second derivative of an elementwise function."""
    (first,) = torch.autograd.grad(function(z).sum(), z, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), z, create_graph=True)
    return first, second


def plain_pinn(params: Params, X: Tensor) -> Tensor:
    """`pinn`: backward passes multiply by the same weights from the other side."""
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


class Conditional(nn.Module):
    """Uses a weight in a second way on batches of a certain size."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(3, 3), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        return self.head(torch.tanh(h) @ self.embed.weight.T if len(x) == 2 else h)


class Experts(nn.Module):
    """Chooses layers by the sign of a sample's first feature."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(3, 4)])
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4), nn.LayerNorm(4)])
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, kind = x.new_zeros(len(x), 4), (x[:, 0] > 0).long()
        for i, (expert, norm) in enumerate(zip(self.experts, self.norms, strict=True)):
            if bool((kind == i).any()):
                h = h.index_add(0, (kind == i).nonzero()[:, 0], norm(expert(x[kind == i])))
        return self.head(torch.tanh(h))


class Rewired(Conditional):
    """Uses a weight in ways that do not go together."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.embed.weight
        h = self.embed(x)
        return self.head(h @ torch.exp(weight) if len(x) == 2 else h)


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
