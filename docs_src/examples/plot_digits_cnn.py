r"""
Curvature of a small CNN
========================

We train a convolutional network on scikit-learn's handwritten digits and look at the curvature
of its loss through SciPy:

- the ten largest eigenvalues of the Hessian and of the generalized Gauss-Newton matrix (GGN),
- a check against a dense eigendecomposition of one diagonal block,
- a damped Newton step.

Everything is in double precision, which the small network can afford.
"""

import os
import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.sparse.linalg import cg, eigsh
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from tqdm import tqdm

from curvlinops import GGNLinearOperator, HessianLinearOperator, IdentityLinearOperator

torch.manual_seed(0)
start = time.perf_counter()

# Progress bars are for terminals: pages of the site are built with TQDM_DISABLE=1.
PROGRESSBAR = "TQDM_DISABLE" not in os.environ

# %%
# Data and model
# --------------
#
# 1797 images of 8 x 8 pixels, a quarter of them held out.

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16.0).reshape(-1, 1, 8, 8)
labels = torch.tensor(labels)
train_idx, test_idx = train_test_split(
    np.arange(len(labels)), test_size=0.25, random_state=0, stratify=labels.numpy()
)
X_train, y_train = images[train_idx], labels[train_idx]
X_test, y_test = images[test_idx], labels[test_idx]

model = nn.Sequential(
    nn.Conv2d(1, 8, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(8, 16, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(64, 10),
).double()
loss_func = nn.CrossEntropyLoss()
params = list(model.parameters())
num_params = sum(p.numel() for p in params)
print(f"{len(X_train)} training images, {num_params} parameters")

# %%
# Training
# --------

optimizer = torch.optim.AdamW(params, lr=5e-3, weight_decay=1e-2)
num_epochs, batch_size = 30, 64
for _ in tqdm(range(num_epochs), desc="Training", unit="epoch"):
    for idx in torch.randperm(len(X_train)).split(batch_size):
        optimizer.zero_grad()
        loss_func(model(X_train[idx]), y_train[idx]).backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(X_test).argmax(dim=1) == y_test).double().mean().item()
print(f"Test accuracy: {accuracy:.1%}")
assert accuracy > 0.95

# %%
# Eigenvalues
# -----------
#
# The operators are SciPy linear operators, so ``scipy.sparse.linalg.eigsh`` runs on them as
# it is. The data may come in batches of any size: the risk is the mean over all images, however
# they are split.

data = [(X_train[:1000], y_train[:1000]), (X_train[1000:], y_train[1000:])]

H = HessianLinearOperator(model, loss_func, params, data, progressbar=PROGRESSBAR)
G = GGNLinearOperator(model, loss_func, params, data, progressbar=PROGRESSBAR)

num_eigenvalues = 10
# ARPACK starts from a random vector; a fixed one makes the run repeat exactly.
v0 = np.random.default_rng(0).standard_normal(num_params)
eigenvalues = {
    name: eigsh(A, k=num_eigenvalues, which="LA", v0=v0, return_eigenvectors=False)[::-1]
    for name, A in [("Hessian", H), ("GGN", G)]
}
for name, values in eigenvalues.items():
    print(f"{name + ':':<9}" + " ".join(f"{value:.4f}" for value in values))

# %%
# Check against a dense matrix
# ----------------------------
#
# An operator may be restricted to some of the parameters. For the last layer's weight and bias
# the matrix is small enough to be formed, and we can form it *without* the operator: with the
# features :math:`z_n` that enter the layer held fixed, differentiate the loss twice.

last = model[-1]
H_last = HessianLinearOperator(
    model, loss_func, [last.weight, last.bias], data, progressbar=PROGRESSBAR
)
with torch.no_grad():
    features = model[:-1](X_train)


def last_layer_loss(theta: torch.Tensor) -> torch.Tensor:
    """Return the training loss as a function of the last layer's flattened parameters."""
    weight, bias = theta.split([last.weight.numel(), last.bias.numel()])
    logits = nn.functional.linear(features, weight.reshape_as(last.weight), bias)
    return nn.functional.cross_entropy(logits, y_train)


theta = nn.utils.parameters_to_vector([last.weight, last.bias]).detach().requires_grad_()
(gradient,) = torch.autograd.grad(last_layer_loss(theta), theta, create_graph=True)
dense = torch.stack(
    [
        torch.autograd.grad(g, theta, retain_graph=True)[0]
        for g in tqdm(gradient, desc="Dense Hessian", unit="row")
    ]
).numpy()

# One column of the operator's matrix per column of the identity; here only a few of them.
columns = [0, 123, len(dense) - 1]
np.testing.assert_allclose(
    H_last @ np.eye(len(dense))[:, columns], dense[:, columns], rtol=1e-8, atol=1e-12
)

from_operator = eigsh(
    H_last, k=num_eigenvalues, which="LA", v0=v0[: len(dense)], return_eigenvectors=False
)
from_dense = np.linalg.eigvalsh(dense)[-num_eigenvalues:]
np.testing.assert_allclose(from_operator, from_dense, rtol=1e-6)
max_error = np.abs(from_operator / from_dense - 1).max()
print(f"Last layer, {len(dense)} x {len(dense)}: eigenvalues agree to {max_error:.0e}")

# %%
# A damped Newton step
# --------------------
#
# The step :math:`s` solves
#
# .. math:: (G + \delta I) \, s = -g
#
# with the gradient :math:`g` and a damping :math:`\delta > 0`. The GGN is positive semi-definite,
# hence conjugate gradients apply. Sums and multiples of operators are operators.

damping = 1e-2
gradients, loss_before = G.gradient_and_loss()
g = nn.utils.parameters_to_vector(gradients).numpy()

step, info = cg(G + damping * IdentityLinearOperator(G.space), -g, rtol=1e-4, maxiter=200)
assert info == 0, "conjugate gradients did not converge"

with torch.no_grad():
    theta = nn.utils.parameters_to_vector(params)
    nn.utils.vector_to_parameters(theta + torch.from_numpy(step), params)
_, loss_after = G.gradient_and_loss()
print(f"Training loss: {loss_before:.6f}, after the Newton step: {loss_after:.6f}")
assert loss_after < loss_before

# %%
# Figure
# ------
#
# Close to a minimum with small residuals, Hessian and GGN have almost the same leading
# eigenvalues.

fig, ax = plt.subplots(figsize=(5, 3), layout="constrained")
index = np.arange(1, num_eigenvalues + 1)
ax.semilogy(index, eigenvalues["Hessian"], "o-", label="Hessian")
ax.semilogy(index, eigenvalues["GGN"], "x--", label="GGN")
ax.set(xlabel="index", ylabel="eigenvalue", xticks=index, title="Largest eigenvalues")
ax.legend()
fig.savefig("eigenvalues.png", dpi=150)

print(f"Figure: eigenvalues.png. Time: {time.perf_counter() - start:.0f} s")
