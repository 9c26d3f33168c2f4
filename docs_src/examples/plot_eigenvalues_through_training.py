r"""
Eigenvalues through training: the edge of stability
===================================================

On a quadratic with largest eigenvalue :math:`\lambda`, gradient descent with step size
:math:`\eta` diverges if :math:`\lambda > 2 / \eta`. Neural networks do something else (Cohen et
al., *Gradient descent on neural networks typically occurs at the edge of stability*, ICLR 2021,
`arXiv:2103.00065 <https://arxiv.org/abs/2103.00065>`_):

- *progressive sharpening*: the largest eigenvalue of the loss's Hessian grows,
- *edge of stability*: once it reaches :math:`2 / \eta` it stays there, and the loss goes on
  falling, no longer monotonically.

We train a small network on scikit-learn's handwritten digits by full-batch gradient descent with
three step sizes, and follow the leading eigenvalues of the Hessian and of the generalized
Gauss-Newton matrix (GGN). The eigenvectors of some steps ago are almost eigenvectors now. So each
search starts from those of the search before, which saves products.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import GGNLinearOperator, HessianLinearOperator, eigsh

start = time.perf_counter()

# %%
# Data, model and loss
# --------------------
#
# Five hundred images, a smooth network with two hidden layers, and the squared error to one-hot
# targets.

images, labels = load_digits(return_X_y=True)
X = torch.tensor(images[:500] / 8.0 - 1.0, dtype=torch.float32)
y = nn.functional.one_hot(torch.tensor(labels[:500])).float()
loss_func = nn.MSELoss()


def make_model() -> nn.Module:
    """Return the network, with the same initial parameters each time."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 10)]
    return nn.Sequential(*layers)


# %%
# Training
# --------
#
# Operators always see the current values of the parameters: they are made once, before training.
# Each search for eigenvalues starts from the sum of the eigenvectors found by the one before.

num_eigenvalues = 3
num_steps, interval = 1000, 25
step_sizes = [0.5, 2 / 3, 1.0]


def train(step_size: float) -> dict[str, torch.Tensor]:
    """Train by gradient descent; return losses, and eigenvalues at every interval."""
    model = make_model()
    params, data = list(model.parameters()), [(X, y)]
    H = HessianLinearOperator(model, loss_func, params, data)
    G = GGNLinearOperator(model, loss_func, params, data)
    optimizer = torch.optim.SGD(params, lr=step_size)

    losses, hessian, ggn, v_hessian, v_ggn = [], [], [], None, None
    for step in range(num_steps + 1):
        if step % interval == 0:
            found = eigsh(H, k=num_eigenvalues, which="LA", tol=1e-3, v0=v_hessian, seed=0)
            hessian.append(found.eigenvalues.sort(descending=True).values)
            v_hessian = found.eigenvectors.sum(dim=1)
            found = eigsh(G, k=1, which="LA", tol=1e-3, v0=v_ggn, seed=0)
            ggn.append(found.eigenvalues[0])
            v_ggn = found.eigenvectors
        optimizer.zero_grad()
        loss = loss_func(model(X), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
    return {
        "loss": torch.tensor(losses),
        "Hessian": torch.stack(hessian),
        "GGN": torch.stack(ggn),
    }


runs = {step_size: train(step_size) for step_size in step_sizes}
for step_size, run in runs.items():
    print(
        f"step size {step_size:.2f}: 2 / step size = {2 / step_size:.2f}, largest eigenvalue "
        f"{run['Hessian'][0, 0]:.2f} at first, {run['Hessian'][-1, 0]:.2f} in the end; loss "
        f"{run['loss'][0]:.3f} -> {run['loss'][-1]:.4f}"
    )
    assert abs(run["Hessian"][-1, 0] * step_size / 2 - 1) < 0.1
    assert run["loss"][-1] < run["loss"][0] / 5

# %%
# Figure
# ------
#
# The largest eigenvalue rises until it meets the dashed line, :math:`2 / \eta`, and stays. Then the
# second and third arrive, too. The largest eigenvalue of the GGN is almost the Hessian's: what
# sharpens is the Jacobian of the network, not its second derivative.

steps = interval * torch.arange(len(runs[step_sizes[0]]["GGN"]))
fig, (left, right) = plt.subplots(ncols=2, figsize=(10, 4), layout="constrained")
for number, (step_size, run) in enumerate(runs.items()):
    color = f"C{number}"
    left.axhline(2 / step_size, color=color, linestyle="--", linewidth=1)
    left.plot(steps, run["Hessian"][:, 1:], color=color, linewidth=0.8, alpha=0.6)
    left.plot(steps, run["Hessian"][:, 0], color=color, label=rf"$\eta = {step_size:.2f}$")
    left.plot(steps, run["GGN"], ".", color="black", markersize=3)
    right.semilogy(run["loss"], color=color, label=rf"$\eta = {step_size:.2f}$")
left.plot([], [], color="gray", linewidth=0.8, label="second and third")
left.plot([], [], ".", color="black", markersize=3, label="largest of the GGN")
left.plot([], [], "--", color="gray", linewidth=1, label=r"$2 / \eta$")
left.set(xlabel="step", ylabel="eigenvalue", ylim=(1, None))
left.set_title("Largest eigenvalues of the Hessian")
left.legend(ncols=2, fontsize="small", loc="lower right")
right.set(xlabel="step", ylabel="mean squared error", title="Training loss")
right.legend()
fig.savefig("eigenvalues_through_training.png", dpi=150)

# %%
# Warm starts
# -----------
#
# How many products does a warm start save? We train on for ten steps, and compare. Asked for less
# accuracy, a warm start is cheaper still: good for a monitor that runs along with training.

model = make_model()
params = list(model.parameters())
H = HessianLinearOperator(model, loss_func, params, [(X, y)])
optimizer = torch.optim.SGD(params, lr=step_sizes[0])


def step_on(num_steps: int) -> None:
    """Do some steps of gradient descent."""
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_func(model(X), y).backward()
        optimizer.step()


step_on(num_steps // 2)
v0 = eigsh(H, k=num_eigenvalues, which="LA", tol=1e-3, seed=0).eigenvectors.sum(dim=1)
step_on(10)
products = {}
for tol in (1e-3, 1e-2):
    for name, vector in [("cold", None), ("warm", v0)]:
        found = eigsh(H, k=num_eigenvalues, which="LA", tol=tol, v0=vector, seed=0)
        products[name] = found.num_products
    print(f"tol={tol:.0e}: products {products}")
    assert products["warm"] <= products["cold"]

print(f"Figure: eigenvalues_through_training.png. Time: {time.perf_counter() - start:.0f} s")
