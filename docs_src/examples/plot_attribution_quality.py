r"""
Is an attribution any good?
===========================

An influence score predicts what one training sample does to the loss of a query. Does it? We train
models anew on random halves of the data. For a half :math:`S` and a query :math:`q`, the scores
:math:`s_{nq}` predict

.. math:: -\ell_q(\theta_S) \approx \text{const} + \sum_{n \in S} s_{nq}

The *linear datamodeling score* is the rank correlation of both sides over the halves, from -1 to 1
(Park et al., *TRAK: attributing model behavior at scale*, ICML 2023, `arXiv:2303.14186
<https://arxiv.org/abs/2303.14186>`_). We compare EKFAC, compressed gradients in a store, the second
moments of Adam, checkpoints along training (TracIn), and plain inner products of gradients.
"""

import time
from tempfile import TemporaryDirectory

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from curvlinops import (
    DiagonalLinearOperator,
    EKFACLinearOperator,
    GGNLinearOperator,
    PerSampleGradientLinearOperator,
)
from curvlinops.influence import GradientStore, linear_datamodeling_score, preconditioned

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data and training
# -----------------
#
# 400 images of digits, 60 queries, and a small network. All models are trained in the same way,
# several at once: each has a mask of the images that it sees.

num_data, num_queries, num_steps = 400, 60, 200
images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels))[: num_data + num_queries]
X, y = torch.tensor(images / 16.0, dtype=torch.float32)[order], torch.tensor(labels)[order]
X, X_query, y, y_query = X[:num_data], X[num_data:], y[:num_data], y[num_data:]

learning_rate = 0.01


def make_model() -> nn.Module:
    """Return a new network."""
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


skeleton = make_model()


def losses(stacked: dict[str, Tensor], X: Tensor, y: Tensor) -> Tensor:
    """Return the losses of M models on N images, ``[M, N]``."""
    outputs = vmap(lambda params: functional_call(skeleton, params, X))(stacked)
    targets = y.expand(len(outputs), -1)
    return nn.functional.cross_entropy(outputs.movedim(2, 1), targets, reduction="none")


def train(masks: Tensor, seed: int) -> tuple[list[dict[str, Tensor]], torch.optim.AdamW]:
    """Train a model for each mask ``[M, N]``; return five checkpoints, and Adam's state."""
    torch.manual_seed(seed)
    stacked, _ = stack_module_state([make_model() for _ in masks])
    optimizer = torch.optim.AdamW(stacked.values(), lr=learning_rate, weight_decay=0.1)
    weights = masks / masks.sum(1, keepdim=True)
    checkpoints = []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        (weights * losses(stacked, X, y)).sum().backward()
        optimizer.step()
        if step % (num_steps // 5) == 0:
            checkpoints.append({name: x.detach().clone() for name, x in stacked.items()})
    return checkpoints, optimizer


# %%
# Models of random halves
# -----------------------
#
# Where a training starts matters, too. So each half has two models, with other initial weights, and
# the outputs are their means. How well do the models of one start predict those of the other? That
# is no bound for attributions, which need not predict the noise, but it tells how large it is.

num_subsets = 100
subsets = torch.stack([torch.randperm(num_data) < num_data // 2 for _ in range(num_subsets)])
with_seeds = []
for seed in (1, 2):
    checkpoints, _ = train(subsets.float(), seed)
    with_seeds.append(-losses(checkpoints[-1], X_query, y_query))
outputs = torch.stack(with_seeds).mean(0)  # [subsets, queries]

identity = torch.eye(num_subsets)  # each model predicts the one on the same half
noise = linear_datamodeling_score(with_seeds[0], identity, with_seeds[1])
print(f"models with another start: {noise.mean:.3f} +- {noise.standard_error:.3f}")

# %%
# Attributions
# ------------
#
# Scores are those of a model that is trained on all images. We take three, with other starts. A
# relative damping of 0.1 is the default.

loss_func = nn.CrossEntropyLoss()
dampings = [0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0]
methods: dict[str, list[Tensor]] = {}
curves: dict[str, list[list[float]]] = {"EKFAC": [], "exact GGN": []}


def quality(scores: Tensor) -> float:
    """Return the linear datamodeling score."""
    return linear_datamodeling_score(scores, subsets, outputs).mean


for seed in (11, 12, 13):
    checkpoints, optimizer = train(torch.ones(1, num_data), seed)
    model = make_model()
    model.load_state_dict({name: x[0] for name, x in checkpoints[-1].items()})
    params = dict(model.named_parameters())
    problem = (model, loss_func, params)
    rows = PerSampleGradientLinearOperator(*problem, [(X, y)])
    queries = PerSampleGradientLinearOperator(*problem, [(X_query, y_query)])
    E = EKFACLinearOperator(
        *problem, [(X, y)], fisher_type="type-2", separate_weight_and_bias=False
    )
    found = {"EKFAC": rows.scores(preconditioned(queries, E))}

    # compressed gradients: at most 64 numbers for each matrix
    with TemporaryDirectory() as directory:
        for name, basis in {"with EKFAC": E, "without a basis": None}.items():
            store = GradientStore.write(rows, f"{directory}/{name}", rank=8, basis=basis)
            found[f"store of rank 8, {name}"] = store.scores(queries)

    # what Adam divides by: its second moments, without their bias
    moments = [optimizer.state[x] for x in optimizer.param_groups[0]["params"]]
    roots = [(x["exp_avg_sq"][0] / (1 - 0.999 ** int(x["step"]))).sqrt() for x in moments]
    A = DiagonalLinearOperator(dict(zip(params, [x + 1e-8 for x in roots], strict=True)))
    found["Adam's diagonal"] = rows.scores(preconditioned(queries, A, relative_damping=0.0))

    found["inner products of gradients"] = rows.scores(queries.dense().T)

    # operators follow the model: the last checkpoint comes last
    along = torch.zeros(num_data, num_queries)
    for checkpoint in checkpoints:
        model.load_state_dict({name: x[0] for name, x in checkpoint.items()})
        along += learning_rate * rows.scores(queries.dense().T)
    found["five checkpoints (TracIn)"] = along

    for name, scores in found.items():
        methods.setdefault(name, []).append(scores)

    G = GGNLinearOperator(*problem, [(X, y)]).to_dense()
    mean = float(E.trace()) / E.shape[0]
    for curve in curves.values():
        curve.append([])
    for damping in dampings:
        P = preconditioned(queries, E, relative_damping=damping)
        curves["EKFAC"][-1].append(quality(rows.scores(P)))
        damped = G + damping * mean * torch.eye(len(G))
        P = torch.linalg.solve(damped, queries.dense().T)
        curves["exact GGN"][-1].append(quality(rows.scores(P)))

# %%
# The error of a single model's score is the standard error for other queries and halves. Means of
# the scores of three models are better than those of one.

bars = {}
print(f"{'':33s} three models              their mean")
for name, scores in methods.items():
    single = [linear_datamodeling_score(x, subsets, outputs) for x in scores]
    together = linear_datamodeling_score(torch.stack(scores).mean(0), subsets, outputs)
    bars[name] = single, together
    print(
        f"{name:33s}",
        *(f"{x.mean:.3f}" for x in single),
        f"+- {single[0].standard_error:.3f}   {together.mean:.3f} +- {together.standard_error:.3f}",
    )

# %%
# EKFAC predicts best. Adam's diagonal is no better than no matrix at all, though Adam trained these
# models. Both stores lose some of the score; at this small rank, the one without a basis loses
# less.
#
# What does the damping do? With little damping, the exact GGN is *worse* than EKFAC. One reason:
# along eigenvectors with small eigenvalues, 200 steps hardly move, whereas the inverse goes to the
# minimum. With its own best damping, the exact GGN is better than EKFAC.

for name, curve in curves.items():
    best = torch.tensor(curve).mean(0)
    print(f"{name}: {best.max():.3f} at the damping {dampings[int(best.argmax())]:g}")

fig, (left, right) = plt.subplots(
    ncols=2, figsize=(11, 4), layout="constrained", width_ratios=[3, 2]
)
for place, (single, together) in enumerate(bars.values()):
    left.barh(place, together.mean, xerr=together.standard_error, color="C0", alpha=0.6)
    left.plot([x.mean for x in single], [place] * len(single), "k|", markersize=14)
left.axvline(noise.mean, color="gray", linestyle=":", label="a model with another start")
left.set(
    yticks=range(len(bars)), yticklabels=list(bars), xlabel="linear datamodeling score", xlim=(0, 1)
)
left.invert_yaxis()
left.set_title("Means of three models' scores (bars), and single models (lines)", fontsize=10)
left.legend(fontsize="small")
for name, curve in curves.items():
    values = torch.tensor(curve)
    right.fill_between(dampings, values.amin(0), values.amax(0), alpha=0.3)
    right.plot(dampings, values.mean(0), "o-", label=name)
right.set(xscale="log", xlabel="damping / mean eigenvalue", title="Single models")
right.legend()
fig.savefig("attribution_quality.png", dpi=150)

averages = {name: sum(x.mean for x in single) / 3 for name, (single, _) in bars.items()}
assert max(averages, key=averages.__getitem__) == "EKFAC"

print(f"Figure: attribution_quality.png. Time: {time.perf_counter() - start:.0f} s")
