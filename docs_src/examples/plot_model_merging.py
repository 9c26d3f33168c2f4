r"""
Merging models with Fisher weights
==================================

Two networks were fine-tuned from the same parameters on different tasks. Can we merge them into one
that does both tasks, without training? Averaging parameters is a start. But some directions in
parameter space matter more to a network than others, and its curvature tells which. We approximate
both losses by quadratic functions with curvature :math:`F_i` at the parameters :math:`\theta_i`,
and minimize their sum:

.. math:: \theta = \Big( \sum_i (F_i + \delta I) \Big)^{-1} \sum_i (F_i + \delta I) \, \theta_i

A diagonal :math:`F_i` makes this a weighted average of each parameter (Matena and Raffel, *Merging
models with Fisher-weighted averaging*, NeurIPS 2022, `arXiv:2111.09832
<https://arxiv.org/abs/2111.09832>`_). Nothing requires a diagonal: conjugate gradients solve the
system with any operator that can be multiplied by vectors (Tam et al., *Merging by matching models
in task parameter subspaces*, TMLR 2024, with Kronecker-factored approximate curvature, KFAC). The
damping :math:`\delta` leads from these merges to the plain average.
"""

import copy
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import (
    CGInverseLinearOperator,
    DiagonalLinearOperator,
    GGNDiagonalLinearOperator,
    GGNLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
    TorchLinearOperator,
)

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Tasks
# -----
#
# Reading digits that stand upright, and digits that lie on their side. Each task has its own
# training images. A few more, of both tasks, choose the damping; the rest are for testing.

images, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels))
X, y = torch.tensor(images / 16.0)[order], torch.tensor(labels)[order]


def turned(X: torch.Tensor) -> torch.Tensor:
    """Turn images by 90 degrees."""
    return X.reshape(-1, 8, 8).rot90(1, dims=(1, 2)).reshape(-1, 64)


tasks = {"upright": (X[:600], y[:600]), "turned": (turned(X[600:1200]), y[600:1200])}
validation = (torch.cat([X[1200:1300], turned(X[1200:1300])]), y[1200:1300].repeat(2))
test = (torch.cat([X[1300:], turned(X[1300:])]), y[1300:].repeat(2))


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the share of images that are classified correctly."""
    return (model(data[0]).argmax(dim=1) == data[1]).double().mean().item()


# %%
# Training
# --------
#
# A common start, trained on some upright digits; a network for each task; and, as an upper limit,
# one network trained on both.

loss_func = nn.CrossEntropyLoss()


def train(model: nn.Module, X: torch.Tensor, y: torch.Tensor, num_epochs: int) -> nn.Module:
    """Return a trained copy of a model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(num_epochs):
        for idx in torch.randperm(len(X)).split(64):
            optimizer.zero_grad()
            loss_func(model(X[idx]), y[idx]).backward()
            optimizer.step()
    return model


untrained = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()
base = train(untrained, X[:300], y[:300], num_epochs=5)
tuned = {name: train(base, *data, num_epochs=20) for name, data in tasks.items()}
both = train(
    base, *(torch.cat(tensors) for tensors in zip(*tasks.values(), strict=True)), num_epochs=20
)

# %%
# Curvature
# ---------
#
# Diagonals of the generalized Gauss-Newton matrix (GGN), which for cross-entropy is the Fisher
# matrix, and of the empirical Fisher matrix; KFAC; and the GGN itself.


def ggn_diagonal(*problem) -> TorchLinearOperator:
    """Return the diagonal of the GGN."""
    return GGNDiagonalLinearOperator(*problem)


def empirical_diagonal(*problem) -> TorchLinearOperator:
    """Return the diagonal of the empirical Fisher matrix, from squares of gradients."""
    rows = PerSampleGradientLinearOperator(*problem)
    return DiagonalLinearOperator(rows.second_moment())


def kfac(*problem) -> TorchLinearOperator:
    """Return KFAC."""
    return KFACLinearOperator(*problem, fisher_type="type-2", separate_weight_and_bias=False)


def ggn(*problem) -> TorchLinearOperator:
    """Return the GGN."""
    return GGNLinearOperator(*problem)


curvatures = {
    "empirical Fisher, diagonal": empirical_diagonal,
    "GGN, diagonal": ggn_diagonal,
    "KFAC": kfac,
    "GGN": ggn,
}

# %%
# Merging
# -------
#
# One function for all of them: sums, multiples and products are those of operators.


def vector(model: nn.Module) -> torch.Tensor:
    """Return a model's parameters."""
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def with_parameters(theta: torch.Tensor) -> nn.Module:
    """Return the network with other parameters."""
    model = copy.deepcopy(base)
    nn.utils.vector_to_parameters(theta, model.parameters())
    return model


average = sum(map(vector, tuned.values())) / len(tuned)


def merge(matrices: dict[str, TorchLinearOperator], damping: float) -> nn.Module:
    """Return the merged network."""
    damped = {name: A.damped(damping) for name, A in matrices.items()}
    right = sum(A @ vector(tuned[name]) for name, A in damped.items())
    total = damped["upright"] + damped["turned"]
    inverse = CGInverseLinearOperator(total, x0=average, rtol=1e-4)
    return with_parameters(inverse @ right)


dampings = [1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0]
scores = {}
for name, make in curvatures.items():
    matrices = {
        task: make(model, loss_func, list(model.parameters()), [tasks[task]])
        for task, model in tuned.items()
    }
    merged = [merge(matrices, damping) for damping in dampings]
    scores[name] = [(accuracy(model, validation), accuracy(model, test)) for model in merged]

final = {f"tuned: {task}": accuracy(model, test) for task, model in tuned.items()}
final["plain average"] = accuracy(with_parameters(average), test)
# the damping that is best on the validation images
final |= {name: max(pairs, key=lambda pair: pair[0])[1] for name, pairs in scores.items()}
final["trained on both"] = accuracy(both, test)
for name, value in final.items():
    print(f"{name:>26}: {value:.1%}")
assert final["GGN, diagonal"] > final["plain average"] + 0.1
assert final["KFAC"] > final["GGN, diagonal"]

# %%
# Figure
# ------
#
# The plain average is worse than either network. Weights from diagonals help a lot. KFAC merges as
# well as the GGN: it also has the entries for pairs of parameters of a layer. With little damping,
# merges rely on quadratic approximations far from where they hold.

fig, axes = plt.subplots(
    ncols=2, figsize=(11, 3.8), layout="constrained", gridspec_kw={"width_ratios": [1.2, 1]}
)
colors = dict(zip(curvatures, ("C0", "C1", "C2", "C3"), strict=True))
bars = axes[0].barh(
    list(final), list(final.values()), color=[colors.get(name, "lightgray") for name in final]
)
axes[0].bar_label(bars, fmt="{:.1%}", padding=3)
axes[0].invert_yaxis()
axes[0].set(xlim=(0, 1.1), title="test accuracy on both tasks")
for name, pairs in scores.items():
    axes[1].semilogx(dampings, [t for _, t in pairs], "o-", color=colors[name])
axes[1].axhline(final["plain average"], color="gray", linestyle="--", linewidth=1)
axes[1].text(dampings[1], final["plain average"] + 0.005, "plain average", color="gray")
axes[1].set(xlabel=r"damping $\delta$", ylabel="test accuracy", title="the same, for all dampings")
fig.savefig("model_merging.png", dpi=150)

print(f"Figure: model_merging.png. Time: {time.perf_counter() - start:.0f} s")
