r"""
Sharpness along stochastic gradient descent
===========================================

Full-batch gradient descent with step size :math:`\eta` is stable where the largest eigenvalue of
the Hessian is below :math:`2 / \eta`. Stochastic gradient descent settles in regions that are
flatter still: the smaller the batch, the flatter (Keskar et al., *On large-batch training for deep
learning*, ICLR 2017; Wu et al., *How SGD selects the global minima in over-parameterized learning*,
NeurIPS 2018; Jastrzębski et al., *The break-even point on optimization trajectories of deep neural
networks*, ICLR 2020).

We follow two measures of sharpness for several step sizes and batch sizes: the largest eigenvalue
of the Hessian, and its trace, estimated from products with random vectors.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import GGNDiagonalLinearOperator, HessianLinearOperator, eigsh, xtrace

start = time.perf_counter()

# %%
# Data and model
# --------------
#
# We use the squared error. Its second derivative is constant. That of cross-entropy falls to zero
# with the loss, and the curvature with it.

images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:1000] / 8.0 - 1.0, dtype=torch.float32)
y = nn.functional.one_hot(torch.tensor(labels[:1000])).float()
loss_func = nn.MSELoss()

num_steps, interval = 3000, 100
settings = [(0.6, 256), (0.6, 32), (0.6, 8), (0.2, 256)]  # step sizes and batch sizes

# %%
# Training
# --------
#
# The curvature is that of the whole training data, whatever the batch size of the training.
# ``xtrace`` also returns its standard error. ``GGNDiagonalLinearOperator`` computes the trace of
# the generalized Gauss-Newton matrix (GGN) exactly, without random vectors.


def train(step_size: float, batch_size: int) -> dict[str, torch.Tensor]:
    """Train by stochastic gradient descent; return what was measured at every interval."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)]
    model = nn.Sequential(*layers)
    params, data = list(model.parameters()), [(X, y)]
    H = HessianLinearOperator(model, loss_func, params, data)
    G = GGNDiagonalLinearOperator(model, loss_func, params, data)
    optimizer = torch.optim.SGD(params, lr=step_size)

    rows, v0 = [], None
    for step in range(num_steps + 1):
        if step % interval == 0:
            largest = eigsh(H, k=1, which="LA", tol=1e-2, v0=v0, seed=0)
            v0 = largest.eigenvectors
            trace, error = xtrace(H, 40, "gaussian", return_error=True, seed=step)
            loss = H.gradient_and_loss()[1]
            rows.append(torch.stack([loss, largest.eigenvalues[0], trace, error, G.trace()]))
        idx = torch.randint(len(X), (batch_size,))
        optimizer.zero_grad()
        loss_func(model(X[idx]), y[idx]).backward()
        optimizer.step()
    names = ["loss", "largest", "trace", "error", "GGN"]
    return dict(zip(names, torch.stack(rows).T, strict=True))


runs = {setting: train(*setting) for setting in settings}
for (step_size, batch_size), run in runs.items():
    print(
        f"step size {step_size}, batch size {batch_size:3d}: loss {run['loss'][-1]:.4f}, "
        f"largest eigenvalue {run['largest'][-1]:.2f}, trace {run['trace'][-1]:.1f} +- "
        f"{run['error'][-1]:.1f} (GGN {run['GGN'][-1]:.1f})"
    )
large, small = runs[0.6, 256], runs[0.6, 8]
assert small["largest"][-1] < 0.8 * large["largest"][-1]
assert small["trace"][-1] < 0.8 * large["trace"][-1]

# %%
# Figure
# ------
#
# With batches of 256 and the larger step size the largest eigenvalue grows until it comes close to
# :math:`2 / \eta`; the smaller step size leaves it room to grow on. Small batches keep it far
# below, at the same step size and about the same loss. The trace tells the same. Bands are standard
# errors; the GGN has almost the same trace as the Hessian.

steps = interval * torch.arange(len(large["loss"]))
fig, axes = plt.subplots(ncols=3, figsize=(12, 3.6), layout="constrained")
for (step_size, batch_size), run in runs.items():
    label = rf"$\eta = {step_size}$, batch size {batch_size}"
    axes[0].semilogy(steps, run["loss"], label=label)
    axes[1].plot(steps, run["largest"], label=label)
    (line,) = axes[2].plot(steps, run["trace"], label=label)
    low, high = run["trace"] - run["error"], run["trace"] + run["error"]
    axes[2].fill_between(steps, low, high, alpha=0.3)
    axes[2].plot(steps, run["GGN"], ":", color=line.get_color())
axes[1].axhline(2 / 0.6, color="gray", linestyle="--", linewidth=1)
axes[1].text(0, 2 / 0.6 + 0.05, r"$2 / \eta$ for $\eta = 0.6$", color="gray")
axes[2].plot([], [], ":", color="gray", label="GGN")
names = ("training loss", "largest eigenvalue of the Hessian", "trace of the Hessian")
for ax, name in zip(axes, names, strict=True):
    ax.set(xlabel="step", ylabel=name)
axes[2].legend(fontsize="small", loc="lower right")
fig.savefig("sharpness_of_sgd.png", dpi=150)

print(f"Figure: sharpness_of_sgd.png. Time: {time.perf_counter() - start:.0f} s")
