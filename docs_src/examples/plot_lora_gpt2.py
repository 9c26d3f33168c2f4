r"""
A GPT-2 with LoRA: curvature and uncertainty of adapters
========================================================

Low-rank adapters (LoRA) train a few thousand parameters of a language model and leave the rest
frozen. Their curvature is small enough to look at in full. We train a tiny GPT-2 on a made-up
language, adapt it to a dialect, with padding and masks as in practice, then

- compute the largest eigenvalues of the Hessian and of the generalized Gauss-Newton matrix (GGN),
- approximate the GGN by KFAC, and draw adapters from a Laplace approximation
  (Yang et al., *Bayesian low-rank adaptation for large language models*, ICLR 2024).
"""

import copy
import math
import time

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    KFACLinearOperator,
    eigsh,
)

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data
# ----
#
# In the language, sequences repeat a random word of three letters. In the dialect, every other
# repetition is reversed. Sequences have different lengths; padding is masked in the input, and
# ignored in the targets.

num_sequences, length, vocabulary = 64, 18, 20


def make_batches(dialect: bool) -> list:
    """Return batches ``({"input_ids", "attention_mask"}, targets)`` of 16 sequences."""
    words = torch.randint(1, vocabulary, (num_sequences, 3))
    pair = torch.cat([words, words.flip(1) if dialect else words], dim=1)
    tokens = pair.repeat(1, length // 6)
    lengths = torch.randint(9, length + 1, (num_sequences, 1))
    mask = (torch.arange(length) < lengths).long()
    targets = tokens[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
    return [
        ({"input_ids": t, "attention_mask": m}, y)
        for t, m, y in zip(tokens.split(16), mask.split(16), targets.split(16), strict=True)
    ]


# %%
# Model
# -----
#
# The logits are ``[B, V, T - 1]``, with the vocabulary on axis 1, as PyTorch's cross-entropy wants.


class LoRA(nn.Module):
    """A frozen layer plus a product of two thin matrices."""

    def __init__(self, base: nn.Module, rank: int):
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(base.weight.shape[0], rank) / base.weight.shape[0] ** 0.5)
        self.B = nn.Parameter(torch.zeros(rank, base.weight.shape[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add the adapter's output."""
        return self.base(x) + x @ self.A @ self.B


class NextToken(nn.Module):
    """Logits for all tokens but the first."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: dict) -> torch.Tensor:
        """Return the logits of a batch."""
        return self.model(**batch, use_cache=False).logits[:, :-1].movedim(2, 1)


config = GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=vocabulary, n_positions=length, bos_token_id=0,
    eos_token_id=0, attn_implementation="sdpa",
)  # fmt: skip
gpt2 = GPT2LMHeadModel(config).eval()
model = NextToken(gpt2)
loss_func = nn.CrossEntropyLoss(ignore_index=-100)


def train(params: list, dialect: bool, num_steps: int, lr: float) -> None:
    """Train some parameters, each step on fresh data."""
    optimizer = torch.optim.Adam(params, lr=lr)
    for _ in range(num_steps):
        X, y = make_batches(dialect)[0]
        optimizer.zero_grad()
        loss = loss_func(model(X), y)
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.2f} (guessing: {math.log(vocabulary):.2f})")


# %%
# The language first, then the dialect with adapters only
# -------------------------------------------------------

train(list(model.parameters()), dialect=False, num_steps=1500, lr=3e-3)

gpt2.requires_grad_(False)
for block in gpt2.transformer.h:
    block.attn.c_attn = LoRA(block.attn.c_attn, rank=2)
    block.mlp.c_fc = LoRA(block.mlp.c_fc, rank=2)
adapters = {n: p for n, p in model.named_parameters() if n.endswith((".A", ".B"))}
print(f"{sum(p.numel() for p in adapters.values())} parameters in the adapters")
train(list(adapters.values()), dialect=True, num_steps=500, lr=1e-2)
batches = make_batches(dialect=True)

# %%
# Curvature of the adapters
# -------------------------

H = HessianLinearOperator(model, loss_func, adapters, batches)
G = GGNLinearOperator(model, loss_func, adapters, batches)
found = {
    name: eigsh(A, k=8, which="LA", tol=1e-3, seed=0) for name, A in [("Hessian", H), ("GGN", G)]
}
smallest = eigsh(H, k=1, which="SA", tol=1e-2, seed=0).eigenvalues
print(f"smallest eigenvalue of the Hessian: {float(smallest[0]):.2e}")

# %%
# KFAC and a Laplace approximation
# --------------------------------
#
# Each adapter is a matrix that multiplies its input, so it has a Kronecker-factored block. A
# posterior adds up log-likelihoods: the loss has ``reduction="sum"``.

loss_sum = nn.CrossEntropyLoss(ignore_index=-100, reduction="sum")
K = KFACLinearOperator(model, loss_sum, adapters, batches, mc_samples=10)
assert {block.structure for block in K.report()} == {"kronecker"}

prior_precision = 100.0
posterior = K.damped(prior_precision).inverse()
draws = posterior.sample(torch.Generator().manual_seed(0), num_samples=20)

with torch.no_grad():
    X, y = batches[0]
    is_target = y != -100
    probabilities = []
    for draw in draws.T:
        sampled = copy.deepcopy(model)
        changes = K.space.split(draw)
        for name, param in sampled.named_parameters():
            if name in changes:
                param += changes[name]
        probabilities.append(sampled(X).softmax(1))
    mean = torch.stack(probabilities).mean(0)
    entropies = {
        "one set of adapters": -(p := model(X).softmax(1)).mul(p.log()).sum(1),
        "Laplace approximation": -mean.mul(mean.log()).sum(1),
    }

# %%
# The first three letters cannot be known. From then on the sequence follows from its first word.
# The Laplace approximation is less certain than one set of adapters.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, pairs in found.items():
    left.semilogy(range(1, 9), pairs.eigenvalues.flip(0), "o-", label=name)
left.set(xlabel="index", ylabel="eigenvalue", title="Largest eigenvalues")
for name, entropy in entropies.items():
    per_position = (entropy * is_target).sum(0) / is_target.sum(0).clamp(min=1)
    right.plot(range(1, length), per_position, label=name)
right.set(xlabel="position of the token", ylabel="entropy [nats]", title="Predictive uncertainty")
left.legend()
right.set_ylim(-0.1, 3.9)
right.legend(loc="upper right", fontsize="small")
fig.savefig("lora_gpt2.png", dpi=150)
assert entropies["Laplace approximation"].mean() > entropies["one set of adapters"].mean()

print(f"Figure: lora_gpt2.png. Time: {time.perf_counter() - start:.0f} s")
