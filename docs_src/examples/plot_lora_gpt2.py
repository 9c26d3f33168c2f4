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
from curvlinops.integrations.transformers import problem

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
    """Return batches of 16 sequences, as a data loader for Hugging Face models yields them."""
    words = torch.randint(1, vocabulary, (num_sequences, 3))
    pair = torch.cat([words, words.flip(1) if dialect else words], dim=1)
    tokens = pair.repeat(1, length // 6)
    lengths = torch.randint(9, length + 1, (num_sequences, 1))
    mask = (torch.arange(length) < lengths).long()
    entries = {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100),
    }
    return [
        {name: x[start : start + 16] for name, x in entries.items()}
        for start in range(0, num_sequences, 16)
    ]


# %%
# Model
# -----


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


config = GPT2Config(
    n_layer=2, n_head=2, n_embd=32, vocab_size=vocabulary, n_positions=length, bos_token_id=0,
    eos_token_id=0, attn_implementation="sdpa",
)  # fmt: skip
model = GPT2LMHeadModel(config).eval()


def train(params: list, dialect: bool, num_steps: int, lr: float) -> None:
    """Train some parameters, each step on fresh data."""
    optimizer = torch.optim.Adam(params, lr=lr)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(**make_batches(dialect)[0]).loss
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.2f} (guessing: {math.log(vocabulary):.2f})")


# %%
# The language first, then the dialect with adapters only
# -------------------------------------------------------

train(list(model.parameters()), dialect=False, num_steps=1500, lr=3e-3)

model.requires_grad_(False)
for block in model.transformer.h:
    block.attn.c_attn = LoRA(block.attn.c_attn, rank=2)
    block.mlp.c_fc = LoRA(block.mlp.c_fc, rank=2)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
print(f"{sum(p.numel() for p in adapters)} parameters in the adapters")
train(adapters, dialect=True, num_steps=500, lr=1e-2)
batches = make_batches(dialect=True)

# %%
# Curvature of the adapters
# -------------------------
#
# ``problem`` returns what all operators take: the model as a function to logits, its loss, the
# parameters that require gradients, and the data.

arguments = problem(model, batches)
H, G = HessianLinearOperator(*arguments), GGNLinearOperator(*arguments)
found = {
    name: eigsh(A, k=8, which="LA", tol=1e-3, seed=0) for name, A in [("Hessian", H), ("GGN", G)]
}
smallest = eigsh(H, k=1, which="SA", tol=1e-2, seed=0).eigenvalues
print(f"smallest eigenvalue of the Hessian: {float(smallest[0]):.2e}")

# %%
# KFAC and a Laplace approximation
# --------------------------------
#
# Each adapter is a matrix that multiplies its input, so it has a Kronecker-factored block. The loss
# is the mean over all tokens that are predicted. A posterior adds up their log-likelihoods.

K = KFACLinearOperator(*arguments, mc_samples=10)
assert {block.structure for block in K.report()} == {"kronecker"}

num_tokens = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
prior_precision = 100.0
posterior = (num_tokens * K).damped(prior_precision).inverse()
draws = posterior.sample(torch.Generator().manual_seed(0), num_samples=20)

with torch.no_grad():
    is_target = batches[0]["labels"][:, 1:] != -100
    probabilities = []
    for draw in draws.T:
        sampled = copy.deepcopy(model)
        changes = K.space.split(draw)
        for name, param in sampled.named_parameters():
            if name in changes:
                param += changes[name]
        probabilities.append(sampled(**batches[0]).logits[:, :-1].softmax(2))
    p, mean = model(**batches[0]).logits[:, :-1].softmax(2), torch.stack(probabilities).mean(0)
    entropies = {
        "one set of adapters": -p.mul(p.log()).sum(2),
        "Laplace approximation": -mean.mul(mean.log()).sum(2),
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
