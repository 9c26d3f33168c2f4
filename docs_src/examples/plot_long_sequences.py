r"""
Long sequences: what a product costs, and where the curvature comes from
========================================================================

Attention weighs every pair of tokens. An exact product with a Hessian or a generalized Gauss-Newton
matrix (GGN) differentiates these weights, and PyTorch's own way keeps all of them: memory grows
with the square of the length. Operators of this package compute the weights again, in tiles, and
need memory that is linear in the length. We ask two questions of a small causal transformer:

- what do exact products cost, up to 4096 tokens?
- how does the curvature change as the context grows, and which layers does it come from?

The transformer learns to count. Each sequence draws its tokens from a distribution of its own, so
that the best prediction of the next token is its frequency so far. The optimal loss is known, and
a longer context makes it smaller.
"""

import time
import weakref
from collections.abc import Callable

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import curvlinops as cl

# %%
# Model and data
# --------------
#
# ``F.scaled_dot_product_attention`` is all that is needed: operators replace it inside of their
# products. The model has no position embeddings, so it takes sequences of any length.


class Block(nn.Module):
    """A layer of causal attention, and an MLP."""

    def __init__(self, width: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states, ``[N, T, width]``."""
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # [N, heads, T, width of a head] each
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A causal transformer with two layers."""

    def __init__(self, num_tokens: int, width: int = 32, num_heads: int = 4):
        super().__init__()
        self.embed = nn.Embedding(num_tokens, width)
        self.blocks = nn.Sequential(Block(width, num_heads), Block(width, num_heads))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_tokens)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        """Return the inputs of the head, ``[N, T, width]``."""
        return self.norm(self.blocks(self.embed(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, ``[N, num_tokens, T]``."""
        return self.head(self.hidden(x)).movedim(-1, 1)


torch.manual_seed(0)
num_tokens, concentration = 16, 0.3
dirichlet = torch.distributions.Dirichlet(torch.full((num_tokens,), concentration))


def draw(num: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences of tokens, and the next tokens, ``[num, length]`` each."""
    tokens = torch.multinomial(dirichlet.sample((num,)), length + 1, replacement=True)
    return tokens[:, :-1], tokens[:, 1:]


model, loss_func = Transformer(num_tokens), nn.CrossEntropyLoss()
params = dict(model.named_parameters())
optimizer = torch.optim.AdamW(params.values())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=400)
for _ in range(400):
    X, y = draw(32, 128)
    optimizer.zero_grad()
    loss_func(model(X), y).backward()
    optimizer.step()
    schedule.step()
print(f"{sum(p.numel() for p in params.values())} parameters")

# %%
# The model has counted up to 128 tokens. It stays close to the optimum on sequences that are 16
# times as long.

X, y = draw(8, 2048)
with torch.no_grad():
    losses = F.cross_entropy(model(X), y, reduction="none").mean(0)
tokens = torch.cat([X, y[:, -1:]], 1)
counts = F.one_hot(tokens, num_tokens).cumsum(1)[:, :-1] + concentration
frequencies = counts / counts.sum(-1, keepdim=True)
best = -frequencies.gather(-1, y[..., None]).log().squeeze(-1).mean(0)
for start, stop in ((0, 16), (16, 128), (128, 1024), (1024, 2048)):
    own, optimum = losses[start:stop].mean(), best[start:stop].mean()
    print(f"positions {start:4} to {stop:4}: loss {own:.3f}, optimum {optimum:.3f}")
assert losses[128:].mean() < best[128:].mean() + 0.15

# %%
# What a product costs
# --------------------
#
# A Hessian product by hand takes two calls of ``torch.autograd.grad``. PyTorch's fused kernels have
# no second derivatives, so it needs the math kernel. We compare it with operators, for one sequence
# of random tokens, in time and in the peak of the memory of all tensors.


class Peak(TorchDispatchMode):
    """Counts the bytes of the tensors that are made inside, as the allocator of a GPU does."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self.known = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run an operation, and count its new tensors."""
        out = func(*args, **(kwargs or {}))
        old, new = (
            {x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)}
            for tree in ((args, kwargs), out)
        )
        for storage in old | new:
            if storage not in self.known:
                self.known.add(storage)
                if storage not in old:
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self.free, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return out

    def free(self, num_bytes: int) -> None:
        """Count a tensor that is gone."""
        self.now -= num_bytes


def cost(function: Callable[[], object]) -> tuple[float, float]:
    """Return the processor time of a call in seconds, and its peak of memory in MiB."""
    with Peak() as memory:
        function()
    start = time.process_time()
    function()
    return time.process_time() - start, memory.peak / 2**20


def by_hand(
    X: torch.Tensor, y: torch.Tensor, v: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Return a Hessian product in the way of plain PyTorch."""
    weights = list(params.values())
    with sdpa_kernel(SDPBackend.MATH):
        loss = loss_func(model(X), y)
        gradients = torch.autograd.grad(loss, weights, create_graph=True)
        return torch.autograd.grad(gradients, weights, list(v.values()))


lengths = (512, 1024, 2048, 4096)
v = {name: torch.randn_like(p) for name, p in params.items()}
costs: dict[str, list[tuple[float, float]]] = {"by hand": [], "Hessian": [], "GGN": []}
for length in lengths:
    one, next_one = draw(1, length)
    data = [(one, next_one)]
    H = cl.HessianLinearOperator(model, loss_func, params, data)
    G = cl.GGNLinearOperator(model, loss_func, params, data)
    if length <= 2048:
        costs["by hand"].append(cost(lambda X=one, y=next_one: by_hand(X, y, v)))
    costs["Hessian"].append(cost(lambda H=H: H @ v))
    costs["GGN"].append(cost(lambda G=G: G @ v))
    if length == 512:
        expected = dict(zip(params, by_hand(one, next_one, v), strict=True))
        torch.testing.assert_close(H @ v, expected, rtol=1e-3, atol=1e-5)
for name, found in costs.items():
    numbers = [f"{seconds:6.2f} s {peak:6.1f} MiB" for seconds, peak in found]
    print(f"{name:8}", *numbers, sep="  ")
assert costs["by hand"][2][1] > 3 * costs["by hand"][1][1]  # twice the length
assert costs["Hessian"][3][1] < 3 * costs["Hessian"][2][1]

_, axes = plt.subplots(ncols=2, figsize=(9, 3.5), layout="constrained")
for name, found in costs.items():
    for ax, values in zip(axes, zip(*found, strict=True), strict=True):
        ax.loglog(lengths[: len(values)], values, "o-", label=name)
for ax, label in zip(axes, ("processor time [s]", "peak of memory [MiB]"), strict=True):
    ax.set_xticks(lengths, lengths)
    ax.minorticks_off()
    ax.set_xlabel("tokens")
    ax.set_ylabel(label)
axes[0].legend()
plt.savefig("long_sequences_cost.png")

# %%
# Time is quadratic in all cases, since each token reads all tokens before it. Memory is quadratic
# by hand only: twice the length takes four times as much.
#
# Large vocabularies
# ------------------
#
# With many tokens, the logits take more memory than attention. ``LinearCrossEntropyLoss`` computes
# them for a few positions at a time. The model then returns the inputs of its head.

large = Transformer(num_tokens=16_384)
weights = [p for name, p in large.named_parameters() if not name.startswith("head")]
data = [(torch.randint(16_384, (1, 1024)), torch.randint(16_384, (1, 1024)))]
chunked = cl.LinearCrossEntropyLoss(large.head)
all_logits = cl.GGNLinearOperator(large, loss_func, weights, data)
few_logits = cl.GGNLinearOperator(large.hidden, chunked, weights, data)
w = [torch.randn_like(p) for p in weights]
torch.testing.assert_close(few_logits @ w, all_logits @ w, rtol=1e-3, atol=1e-6)
for name, G in {"CrossEntropyLoss": all_logits, "LinearCrossEntropyLoss": few_logits}.items():
    seconds, peak = cost(lambda G=G: G @ w)
    print(f"{name:22}: {seconds:5.2f} s, {peak:6.1f} MiB")

# %%
# Curvature as the context grows
# ------------------------------
#
# We cut the same 16,384 tokens into sequences of 16, 64, 256 and 1024 tokens. For each length we
# compute the largest eigenvalue of the Hessian, and the trace of the GGN by layer, from sampled
# labels.

parts = {
    "queries, keys, values": ["*.qkv"],
    "output of attention": ["*.out"],
    "MLP": ["*.mlp"],
    "embedding and norms": ["embed", "*norm*"],
    "head": ["head"],
}
contexts = (16, 64, 256, 1024)
largest, traces = [], {name: [] for name in parts}
for context in contexts:
    pieces = [x.reshape(-1, context).split(4096 // context) for x in (X, y)]
    data = list(zip(*pieces, strict=True))
    H = cl.HessianLinearOperator(model, loss_func, params, data)
    largest.append(float(cl.eigsh(H, k=1, which="LA", tol=1e-2).eigenvalues))
    D = cl.GGNDiagonalLinearOperator(model, loss_func, params, data, mc_samples=4)
    diagonal = D.space.split(D.diagonal())
    for name, patterns in parts.items():
        names = cl.select_parameters(model, *patterns)
        traces[name].append(float(sum(diagonal[n].sum() for n in names)))
    trace = sum(values[-1] for values in traces.values())
    shares = ", ".join(f"{name} {values[-1] / trace:.0%}" for name, values in traces.items())
    print(f"{context:4} tokens: largest eigenvalue {largest[-1]:.1f}, trace {trace:.0f} ({shares})")
assert largest[-1] > 1.3 * largest[0]

_, axes = plt.subplots(ncols=2, figsize=(9, 3.5), layout="constrained")
doublings = [2**i for i in range(4, 12)]
for name, values, style in (("model", losses, "o-"), ("optimum", best, "k--")):
    means = [float(values[stop // 2 : stop].mean()) for stop in doublings]
    axes[0].semilogx(doublings, means, style, label=name)
axes[0].axvline(128, color="gray", linewidth=0.5)  # the length in training
axes[0].set_xticks(doublings[::2], doublings[::2])
axes[0].minorticks_off()
axes[0].set_xlabel("position")
axes[0].set_ylabel("loss, mean from half of the position on")
for name, values in traces.items():
    axes[1].semilogx(contexts, values, "o-", label=name)
axes[1].semilogx(contexts, largest, "k--", label="largest eigenvalue")
axes[1].set_xticks(contexts, contexts)
axes[1].minorticks_off()
axes[1].set_xlabel("tokens in a sequence")
axes[1].set_ylabel("trace of the GGN")
axes[1].set_ylim(0, 45)
axes[0].legend()
axes[1].legend(fontsize="small", ncols=2, loc="upper left")
plt.savefig("long_sequences.png")
plt.show()

# %%
# The loss follows the optimum, also beyond the 128 tokens of the training (gray line). With the
# context, the largest eigenvalue nearly doubles, and the trace grows by a sixth. Both level off as
# the loss does. The shares of the layers hardly change: the head has nearly a half of the trace,
# and attention has two fifths.
