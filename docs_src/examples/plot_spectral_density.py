r"""
Spectral density of a Hessian
=============================

Most eigenvalues of a classifier's Hessian are about zero. A few stand apart: one less than there
are classes, since they come from how the gradients' means differ between classes (Papyan, *Traces
of class/cross-class structure pervade deep learning spectra*, JMLR 2020). We look for these on
scikit-learn's handwritten digits, which have ten classes, before and after a short training.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    eigsh,
    lanczos_approximate_spectrum,
    plot_spectrum,
)

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data and model
# --------------

images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16.0), torch.tensor(labels)
num_classes = 10

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_classes)).double()
loss_func = nn.CrossEntropyLoss()
params = list(model.parameters())
print(f"{len(X)} images, {sum(p.numel() for p in params)} parameters")


def train(num_epochs: int) -> None:
    """Train the model by stochastic gradient descent."""
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    for _ in range(num_epochs):
        for idx in torch.randperm(len(X)).split(32):
            optimizer.zero_grad()
            loss_func(model(X[idx]), y[idx]).backward()
            optimizer.step()


# %%
# Densities
# ---------
#
# We take eighty products for each of ten random vectors. The density is a sum of Gaussians.
# ``kappa=5`` makes them wide enough that the bulk is smooth, and narrow enough that outliers are
# apart; larger values show wiggles in the bulk that are no eigenvalues. Bands reach two standard
# errors to both sides. As a check, we mark the ten largest eigenvalues of the generalized
# Gauss-Newton matrix (GGN), which is the part of the Hessian that has the outliers.

num_repeats = 10


def draw(ax: plt.Axes) -> float:
    """Draw both densities, and return the ratio of the GGN's ninth and tenth eigenvalues."""
    data = [(X, y)]
    G = GGNLinearOperator(model, loss_func, params, data)
    H = HessianLinearOperator(model, loss_func, params, data)
    for name, A in [("Hessian", H), ("GGN", G)]:
        result = lanczos_approximate_spectrum(
            A, ncv=80, num_repeats=num_repeats, kappa=5, return_error=True, seed=0
        )
        assert abs(torch.trapezoid(result.density, result.grid) - 1) < 1e-10
        grid, density, error = result
        plot_spectrum(grid, density, 2 * error, ax=ax, label=name, floor=1e-4)
    largest = eigsh(G, k=num_classes, which="LA", seed=0).eigenvalues.sort(descending=True).values
    ax.plot(largest, torch.full_like(largest, 3e-4), "|", color="black", label="GGN, ten largest")
    print("Largest eigenvalues of the GGN: " + " ".join(f"{value:.3f}" for value in largest))
    return float(largest[num_classes - 2] / largest[num_classes - 1])


fig, axes = plt.subplots(2, 1, figsize=(7, 6), layout="constrained")
for ax, num_epochs in zip(axes, (0, 2), strict=True):
    train(num_epochs)
    with torch.no_grad():
        accuracy = (model(X).argmax(dim=1) == y).double().mean().item()
    gap = draw(ax)
    print(f"After {num_epochs} epochs: accuracy {accuracy:.1%}, gap after the ninth {gap:.1f}")
    assert gap > (4 if num_epochs == 0 else 1.3)
    ax.set_title(f"after {num_epochs} epochs, accuracy {accuracy:.0%}")
    ax.set_xlabel("eigenvalue" if num_epochs else "")
    ax.set_ylabel("share of eigenvalues per unit")
    ax.legend()
fig.savefig("spectral_density.png", dpi=150)

# %%
# Before training, the tenth eigenvalue of the GGN is almost ten times smaller than the ninth.
# Training moves the outliers apart, and fills the gap from below: after two epochs it is a factor
# of two. The Hessian has the same outliers, and negative eigenvalues besides.

print(f"Figure: spectral_density.png. Time: {time.perf_counter() - start:.0f} s")
