r"""
Which training sequences does a language model owe a prediction to?
===================================================================

We train a small GPT-2 on a made-up language and ask, for each of some queries, which training
sequences lowered the loss of its answer most. The cause is known: a few sequences in the training
data have the fact that the query asks for. Influence functions should rank these first.

With the gradient :math:`g_q` of a query's loss and the gradients :math:`g_n` of the training
sequences,

.. math:: s_{nq} = g_n^\top (F + \delta I)^{-1} g_q

predicts how much the loss of the query falls per unit of weight that sequence :math:`n` gets in
addition (Koh and Liang, *Understanding black-box predictions via influence functions*, ICML 2017).
EKFAC approximates the Fisher matrix :math:`F` (Grosse et al., *Studying large language model
generalization with influence functions*, 2023, `arXiv:2308.03296
<https://arxiv.org/abs/2308.03296>`_). The steps are those for large models: the factors are in a
directory, and scores never take the gradients of all sequences.
"""

import time
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from curvlinops import EKFACLinearOperator, PerSampleGradientLinearOperator, write_factors
from curvlinops.influence import preconditioned, top_scores
from curvlinops.integrations.transformers import problem

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data
# ----
#
# A sequence is noise with one fact in it: the separator, a key, and the value of this key. Each
# fact is in ``num_copies`` sequences, amid other noise and at other positions. As in instruction
# tuning, the loss is that of the answer, the value, alone: other labels are -100. To know the value
# of a key, the model must have learned from the sequences with this key.

num_facts, num_copies, num_queries, length = 48, 6, 8, 12
num_words, num_values = 16, 12
first_key = num_words
first_value = first_key + num_facts
separator = first_value + num_values
vocabulary = separator + 1
values = torch.randint(num_values, (num_facts,))


def sequence(key: int) -> torch.Tensor:
    """Return words with a fact at a random position, ``[length]``."""
    tokens = torch.randint(num_words, (length,))
    place = int(torch.randint(length - 2, ()))
    tokens[place : place + 3] = torch.tensor(
        [separator, first_key + key, first_value + int(values[key])]
    )
    return tokens


train_sequences = [sequence(key) for key in range(num_facts) for _ in range(num_copies)]
is_cause = torch.arange(len(train_sequences))[:, None] // num_copies == torch.arange(num_queries)


def labeled(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return an entry of a batch, with the value as the only label."""
    is_value = (tokens >= first_value) & (tokens < separator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(~is_value, -100)}


# %%
# A query is one of the facts amid new noise.

queries = [labeled(sequence(key)) for key in range(num_queries)]
train_loader = DataLoader([labeled(x) for x in train_sequences], batch_size=32)
query_loader = DataLoader(queries, batch_size=num_queries)

# %%
# Training
# --------

config = GPT2Config(
    n_layer=2,
    n_head=4,
    n_embd=64,
    vocab_size=vocabulary,
    n_positions=length,
    bos_token_id=0,
    eos_token_id=0,
)
model = GPT2LMHeadModel(config).eval()  # without dropout
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
num_epochs = 8
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_epochs)
for _ in range(num_epochs):
    for batch in DataLoader(train_loader.dataset, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    schedule.step()

with torch.no_grad():
    query_loss = model(**next(iter(query_loader))).loss
print(f"loss of an answer: {query_loss:.2f}, that of a guess: {torch.tensor(num_values).log():.2f}")

# %%
# Influence
# ---------
#
# As usual for transformers, we take the layers of attention and MLP, whose blocks are Kronecker
# products. The damping is a tenth of EKFAC's mean eigenvalue.

for name, parameter in model.named_parameters():
    parameter.requires_grad_(".attn." in name or ".mlp." in name)

arguments = problem(model, train_loader)
rows = PerSampleGradientLinearOperator(*arguments)
query_rows = PerSampleGradientLinearOperator(*arguments[:3], problem(model, query_loader)[3])

with TemporaryDirectory() as directory:
    E = EKFACLinearOperator(*arguments, separate_weight_and_bias=False)
    E = write_factors(E, directory, parts=2)
    P = preconditioned(query_rows, E)  # {name: [*shape, queries]}

scores = rows.scores(P)  # [sequences, queries]

# %%
# How many of the sequences with the query's fact are among the ``num_copies`` of highest score? And
# has the first one the fact? For comparison: inner products of gradients, without the inverse.


def found(scores: torch.Tensor) -> float:
    """Return the share of sequences with the fact that rank first."""
    best = scores.topk(num_copies, dim=0).indices
    return float(is_cause.gather(0, best).float().mean())


def num_first(scores: torch.Tensor) -> int:
    """Return the number of queries for which the first sequence has the fact."""
    return int(is_cause.gather(0, scores.argmax(0, keepdim=True)).sum())


plain = rows.scores(query_rows.dense().T)
by_chance = num_copies / len(train_sequences)
for name, found_by in {"EKFAC": scores, "inner products of gradients": plain}.items():
    print(f"{name}: {found(found_by):.0%} of the sequences with the fact rank first,")
    print(f"    and the first one has it for {num_first(found_by)} of {num_queries} queries")
print(f"by chance: {by_chance:.0%}")

# %%
# If there are too many sequences and queries for a table of all scores, ``top_scores`` keeps the
# largest ones.

top = top_scores(rows, P, num_copies)
torch.testing.assert_close(top.values, scores.topk(num_copies, dim=0).values)
print(f"sequences of the first query: {top.indices[:, 0].tolist()}")

# %%
# Scores of tokens
# ----------------
#
# Which tokens of the best sequence matter? The scores of a sequence's positions add up to that of
# the sequence. The fact should stand out.

best = int(scores[:, 0].argmax())
first = {name: x[..., 0] for name, x in P.items()}
tokens = rows.scores(first, per_position=True)[best]
torch.testing.assert_close(tokens.sum(), scores[best, 0], rtol=1e-3, atol=1e-3)
is_fact = train_sequences[best] >= num_words
share = tokens[is_fact].abs().sum() / tokens.abs().sum()
print(f"share of the fact's three positions in the absolute scores: {share:.0%}")

# %%
# Low rank
# --------
#
# Each preconditioned query is as large as the model. ``low_rank`` keeps its best approximation of
# rank r for each layer, which takes less memory, and makes scores cheaper. ``relative_error`` is
# what it leaves out. ``preconditioned(..., rank=r)`` has no more than one batch of whole queries in
# memory.

ranks = (1, 2, 4, 8, 16)
correlations, errors, shares = [], [], []
for rank in ranks:
    low_rank = rows.low_rank(P, rank)
    approximate = rows.scores(low_rank)
    pair = torch.stack([approximate.flatten(), scores.flatten()])
    correlations.append(float(torch.corrcoef(pair)[0, 1]))
    errors.append(float(low_rank.relative_error.mean()))
    shares.append(found(approximate))
    print(f"rank {rank}: correlation {correlations[-1]:.3f}, found {shares[-1]:.0%}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
left.hist(
    [scores[is_cause].numpy(), scores[~is_cause].numpy()],
    bins=30,
    density=True,
    label=["same fact", "other facts"],
)
left.set(xlabel="score", yscale="log", title="Scores of training sequences")
left.legend()
right.plot(ranks, correlations, "o-", label="correlation with exact scores")
right.plot(ranks, errors, "s--", label="relative error of queries")
right.plot(ranks, shares, "^:", label="sequences with the fact that rank first")
right.set(xlabel="rank", xscale="log", ylim=(0, 1.05), title="Low-rank queries")
right.legend()
figure.tight_layout()

print(f"The page took {time.perf_counter() - start:.0f} s.")
