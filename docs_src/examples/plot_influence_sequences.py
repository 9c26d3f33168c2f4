r"""
Which training sequences does a language model owe a prediction to?
===================================================================

We train a small GPT-2 on a made-up language and ask, for each of some queries, which training
sequences lowered the loss of its answer most. The cause is known: for each query, a few sequences
with the same fact are planted in the training data. Influence functions should rank these first.

With the gradient :math:`g_q` of a query's loss and the gradients :math:`g_n` of the training
sequences,

.. math:: s_{qn} = g_q^\top (F + \delta I)^{-1} g_n

predicts how much the loss of the query falls per unit of weight that sequence :math:`n` gets in
addition (Koh and Liang, *Understanding black-box predictions via influence functions*, ICML 2017).
EKFAC approximates the Fisher matrix :math:`F` (Grosse et al., *Studying large language model
generalization with influence functions*, 2023, `arXiv:2308.03296
<https://arxiv.org/abs/2308.03296>`_). The steps are those for large models: the factors are in a
directory, and scores never take the gradients of all sequences.
"""

import os
import time
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from curvlinops import EKFACLinearOperator, PerSampleGradientLinearOperator
from curvlinops.integrations.transformers import problem

# Set CURVLINOPS_GALLERY=fast for a first look.
FAST = os.environ.get("CURVLINOPS_GALLERY") == "fast"
torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data
# ----
#
# A sequence is noise with one fact in it: the separator, a subject, a relation, and the object that
# belongs to these two. Most facts are random. For each query, ``num_copies`` sequences have the
# fact that it asks for, amid other noise and at other positions.

num_queries, num_copies, num_others = 8, 4, 96 if FAST else 480
num_words, num_subjects, num_relations, num_objects, length = 32, 24, 4, 24, 16
first_subject = num_words
first_relation = first_subject + num_subjects
first_object = first_relation + num_relations
separator = first_object + num_objects
vocabulary = separator + 1


def sequence(subject: int, relation: int, answer: int) -> torch.Tensor:
    """Return words with a fact at a random position, ``[length]``."""
    tokens = torch.randint(num_words, (length,))
    place = int(torch.randint(length - 4, ()))
    fact = [separator, first_subject + subject, first_relation + relation, first_object + answer]
    tokens[place : place + 4] = torch.tensor(fact)
    return tokens


def random(*sizes: int) -> list[int]:
    """Return a random number below each of some sizes."""
    return [int(torch.randint(size, ())) for size in sizes]


facts = [(q, q % num_relations, random(num_objects)[0]) for q in range(num_queries)]
planted = [sequence(*fact) for fact in facts for _ in range(num_copies)]
# other sequences have the queries' subjects with other relations only
others = []
while len(others) < num_others:
    subject, relation, answer = random(num_subjects, num_relations, num_objects)
    if (subject, relation) not in [fact[:2] for fact in facts]:
        others.append(sequence(subject, relation, answer))
train_sequences = planted + others
is_planted = torch.arange(len(train_sequences)) // num_copies == torch.arange(num_queries)[:, None]

# %%
# A query is a fact amid new noise. Its loss is that of the object alone: the other labels are -100.

queries = []
for fact in facts:
    tokens = sequence(*fact)
    labels = tokens.masked_fill(tokens < first_object, -100).masked_fill(tokens == separator, -100)
    queries.append({"input_ids": tokens, "labels": labels})

train_loader = DataLoader([{"input_ids": x, "labels": x} for x in train_sequences], batch_size=32)
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
num_epochs = 10 if FAST else 40
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, num_epochs)
for _ in range(num_epochs):
    for batch in DataLoader(train_loader.dataset, batch_size=32, shuffle=True):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    schedule.step()

with torch.no_grad():
    query_loss = model(**next(iter(query_loader))).loss
print(
    f"loss of an answer: {query_loss:.2f}, that of a guess: {torch.tensor(num_objects).log():.2f}"
)

# %%
# Influence
# ---------
#
# As usual for transformers, we take the layers of attention and MLP, whose blocks are Kronecker
# products. A mean over all tokens has a small curvature, so the damping is relative to the mean
# eigenvalue of EKFAC.

for name, parameter in model.named_parameters():
    parameter.requires_grad_(".attn." in name or ".mlp." in name)

arguments = problem(model, train_loader)
rows = PerSampleGradientLinearOperator(*arguments)
query_rows = PerSampleGradientLinearOperator(*arguments[:3], problem(model, query_loader)[3])

with TemporaryDirectory() as directory:
    E = EKFACLinearOperator(
        *arguments,
        separate_weight_and_bias=False,
        directory=directory,
        module_partitions=2,
    )
    damping = 0.1 * float(E.trace()) / E.shape[0]
    preconditioned = E.inverse(damping) @ query_rows.dense().T  # [D, queries]

scores = rows.scores(preconditioned).T  # [queries, sequences]

# %%
# How many of the planted sequences are among the ``num_copies`` of highest score? For comparison:
# the same with inner products of gradients, without the inverse.


def found(scores: torch.Tensor) -> float:
    """Return the share of planted sequences that rank first."""
    best = scores.topk(num_copies, dim=1).indices
    return float(is_planted.gather(1, best).float().mean())


plain = rows.scores(query_rows.dense().T).T
print(f"planted sequences that rank first, EKFAC: {found(scores):.0%}")
print(f"planted sequences that rank first, inner products of gradients: {found(plain):.0%}")

# %%
# Scores of tokens
# ----------------
#
# Which tokens of the best sequence matter? The scores of a sequence's positions add up to that of
# the sequence. The fact should stand out.

best = int(scores[0].argmax())
tokens = rows.scores(preconditioned[:, 0], per_position=True)[best]
torch.testing.assert_close(tokens.sum(), scores[0, best], rtol=1e-3, atol=1e-3)
is_fact = train_sequences[best][:-1] >= num_words
print(
    f"share of the fact's positions in the absolute scores: {tokens[is_fact].abs().sum() / tokens.abs().sum():.0%}"
)

# %%
# Low rank
# --------
#
# Each preconditioned query is as large as the model. ``low_rank`` keeps its best approximation of
# rank r for each layer, which takes less memory, and makes scores cheaper. ``relative_error`` is
# what it leaves out.

ranks = (1, 2, 4, 8, 16)
correlations, errors, shares = [], [], []
for rank in ranks:
    low_rank = rows.low_rank(preconditioned, rank)
    approximate = rows.scores(low_rank).T
    pair = torch.stack([approximate.flatten(), scores.flatten()])
    correlations.append(float(torch.corrcoef(pair)[0, 1]))
    errors.append(float(low_rank.relative_error.mean()))
    shares.append(found(approximate))
    print(
        f"rank {rank}: correlation {correlations[-1]:.3f}, error {errors[-1]:.2f}, found {shares[-1]:.0%}"
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.5))
left.hist(
    [scores[is_planted].numpy(), scores[~is_planted].numpy()],
    bins=30,
    density=True,
    label=["planted", "other"],
)
left.set(xlabel="score", yscale="log", title="Scores of training sequences")
left.legend()
right.plot(ranks, correlations, "o-", label="correlation with exact scores")
right.plot(ranks, errors, "s--", label="relative error of queries")
right.plot(ranks, shares, "^:", label="planted sequences found")
right.set(xlabel="rank", xscale="log", ylim=(0, 1.05), title="Low-rank queries")
right.legend()
figure.tight_layout()

print(f"The page took {time.perf_counter() - start:.0f} s.")
