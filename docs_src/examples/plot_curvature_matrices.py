r"""
Hessian, Gauss-Newton, Fisher, and empirical Fisher
===================================================

Four matrices are called curvature. Let :math:`\ell_n` be the loss of a data point, a function of
the network's output :math:`f_n`, and :math:`J_n` the Jacobian of this output. The four are

- the Hessian :math:`H = \frac{1}{N} \sum_n \nabla^2_\theta \, \ell_n`,
- the generalized Gauss-Newton matrix (GGN)
  :math:`G = \frac{1}{N} \sum_n J_n^\top \, \nabla^2_f \ell_n \, J_n`,
- the Fisher matrix
  :math:`F = \frac{1}{N} \sum_n \mathbb{E}_{y \sim p(y \mid f_n)} \, g_n(y) \, g_n(y)^\top`, with
  :math:`g_n(y) = -\nabla_\theta \log p(y \mid f_n)`,
- the empirical Fisher matrix :math:`E = \frac{1}{N} \sum_n g_n(y_n) \, g_n(y_n)^\top`.

For cross-entropy :math:`F = G`, which differs from :math:`H` by the network's second derivatives,
weighted by residuals (Martens, *New insights and perspectives on the natural gradient method*, JMLR
2020). The empirical Fisher matrix takes the labels of the data instead of the expectation. It is a
different matrix (Kunstner et al., *Limitations of the empirical Fisher approximation for natural
gradient descent*, NeurIPS 2019). We look at all four, for a network so small that they can be
written down, before and after training.
"""

import time

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import SymLogNorm
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from torch import nn

from curvlinops import (
    EFLinearOperator,
    FisherMCLinearOperator,
    GGNLinearOperator,
    HessianLinearOperator,
)

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data and model
# --------------
#
# The digits from zero to four, in six principal components.

images, labels = load_digits(n_class=5, return_X_y=True)
components = PCA(6, whiten=True, random_state=0).fit_transform(images)
X, y = torch.tensor(components), torch.tensor(labels)

model = nn.Sequential(
    nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 5)
).double()
loss_func = nn.CrossEntropyLoss()
params = dict(model.named_parameters())
print(f"{len(X)} images, {sum(p.numel() for p in params.values())} parameters")


def train(num_epochs: int) -> None:
    """Train the model with Adam."""
    optimizer = torch.optim.Adam(params.values(), lr=1e-2)
    for _ in range(num_epochs):
        for idx in torch.randperm(len(X)).split(64):
            optimizer.zero_grad()
            loss_func(model(X[idx]), y[idx]).backward()
            optimizer.step()


# %%
# Matrices
# --------
#
# ``to_dense()`` returns the matrices. The expectation in the Fisher matrix is an average
# over sampled labels.


def matrices() -> dict[str, torch.Tensor]:
    """Return all four matrices."""
    arguments = (model, loss_func, params, [(X, y)])
    operators = {
        "Hessian": HessianLinearOperator(*arguments),
        "GGN": GGNLinearOperator(*arguments),
        "Fisher, sampled": FisherMCLinearOperator(*arguments, mc_samples=100),
        "empirical Fisher": EFLinearOperator(*arguments),
    }
    return {name: A.to_dense() for name, A in operators.items()}


def distances(found: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return distances from the GGN, relative to its norm."""
    ggn = found["GGN"]
    return {name: ((A - ggn).norm() / ggn.norm()).item() for name, A in found.items()}


stages = {}
for title, num_epochs in [("before training", 0), ("after training", 30)]:
    train(num_epochs)
    with torch.no_grad():
        accuracy = (model(X).argmax(dim=1) == y).double().mean().item()
    stages[title] = matrices()
    print(f"{title}, accuracy {accuracy:.1%}; distances from the GGN:")
    for name, distance in distances(stages[title]).items():
        print(f"{name:>18}: {distance:.3f}")

after = distances(stages["after training"])
assert after["Fisher, sampled"] < 0.1
assert after["Hessian"] < distances(stages["before training"])["Hessian"] / 2
assert after["empirical Fisher"] > 2 * after["Hessian"]

# %%
# Figures
# -------
#
# Lines separate weights and biases of the three layers. Colors are logarithmic, with the sign, and
# each row has its own scale. Before training, residuals are large, and the Hessian differs from the
# GGN. Training makes them similar. The empirical Fisher matrix stays different: an image whose
# class has probability :math:`1 - \varepsilon` adds a term of order :math:`\varepsilon^2` to it,
# and one of order :math:`\varepsilon` to the GGN.

fig, axes = plt.subplots(nrows=2, ncols=4, figsize=(11, 6), layout="constrained")
for row, (title, found) in zip(axes, stages.items(), strict=True):
    top = max(A.abs().max().item() for A in found.values())
    norm = SymLogNorm(linthresh=1e-3 * top, vmin=-top, vmax=top)
    row[0].set_ylabel(title)
    for ax, (name, A) in zip(row, found.items(), strict=True):
        image = ax.imshow(A.numpy(), norm=norm, cmap="RdBu_r", interpolation="none")
        sizes = torch.tensor([p.numel() for p in params.values()])
        centers, edges = sizes.cumsum(0) - sizes / 2, sizes.cumsum(0)[:-1] - 0.5
        # the biases are too small for names of their own
        weights = [(c, n) for c, n in zip(centers.tolist(), params, strict=True) if "weight" in n]
        ticks, labels = zip(*weights, strict=True)
        ax.set(title=name, yticks=[])
        ax.set_xticks(ticks, labels, rotation=30, ha="right", fontsize="x-small")
        if ax is row[0]:
            ax.set_yticks(ticks, labels, fontsize="x-small")
        for edge in edges.tolist():
            ax.axhline(edge, color="black", linewidth=0.3)
            ax.axvline(edge, color="black", linewidth=0.3)
    fig.colorbar(image, ax=row, shrink=0.9, label="entry")
fig.savefig("curvature_matrices.png", dpi=150)

# %%
# The same in eigenvalues, in descending order. Only the Hessian has negative ones.

fig, axes = plt.subplots(ncols=2, figsize=(9, 3.2), layout="constrained")
for ax, (title, found) in zip(axes, stages.items(), strict=True):
    for (name, A), style in zip(found.items(), ("-", "-", "--", "-"), strict=True):
        ax.plot(torch.linalg.eigvalsh(A).flip(0), style, label=name)
    ax.set_yscale("symlog", linthresh=1e-4)
    ax.axhline(0, color="gray", linewidth=0.5)
    ax.set(title=title, xlabel="index", ylabel="eigenvalue")
axes[0].legend(fontsize="small")
fig.savefig("curvature_eigenvalues.png", dpi=150)

print(
    "Figures: curvature_matrices.png, curvature_eigenvalues.png. "
    f"Time: {time.perf_counter() - start:.0f} s"
)
