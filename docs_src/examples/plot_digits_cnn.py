r"""
Curvature of a small CNN
========================

We train a convolutional network on scikit-learn's handwritten digits and ask what the curvature
of its loss tells:

- how many eigenvalues of the Hessian stand apart from the others, compared with the number of
  classes,
- whether the generalized Gauss-Newton matrix (GGN) has the same large eigenvalues,
- how far a damped Newton step reduces the training loss.

The eigenvalues of one diagonal block are checked against a dense matrix. Everything is in double
precision, which the small network can afford.
"""

import time

import matplotlib.pyplot as plt
import numpy as np
import torch
from scipy.sparse.linalg import cg, eigsh
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from curvlinops import (
    GGNLinearOperator,
    HessianLinearOperator,
    lanczos_approximate_spectrum,
)

torch.manual_seed(0)
start = time.perf_counter()
print("Curvature of a small CNN on handwritten digits (about 20 s on two idle cores)")

# %%
# Data and model
# --------------
#
# 1797 images of 8 x 8 pixels in ten classes, a quarter of them held out.

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images / 16.0).reshape(-1, 1, 8, 8)
labels = torch.tensor(labels)
num_classes = 10
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
    nn.Linear(64, num_classes),
).double()
loss_func = nn.CrossEntropyLoss()
params = list(model.parameters())
num_params = sum(p.numel() for p in params)

# %%
# Training
# --------

print("\n1. Training")
optimizer = torch.optim.AdamW(params, lr=5e-3, weight_decay=1e-2)
num_epochs, batch_size = 30, 64
for _ in range(num_epochs):
    for idx in torch.randperm(len(X_train)).split(batch_size):
        optimizer.zero_grad()
        loss_func(model(X_train[idx]), y_train[idx]).backward()
        optimizer.step()

model.eval()
with torch.no_grad():
    accuracy = (model(X_test).argmax(dim=1) == y_test).double().mean().item()
print(f"   {len(X_train)} images, {num_params} parameters, test accuracy {accuracy:.1%}")
assert accuracy > 0.95

# %%
# The largest eigenvalues
# -----------------------
#
# The operators are SciPy linear operators, so ``scipy.sparse.linalg.eigsh`` runs on them as
# it is. Inside ``linearized()``, model and data stay as they are, and products share the work that
# does not depend on the vector. The data may come in batches of any size: the risk is the mean over
# all images, however they are split. Close to a minimum with small residuals, Hessian and GGN have
# almost the same large eigenvalues.

data = [(X_train[:1000], y_train[:1000]), (X_train[1000:], y_train[1000:])]

H = HessianLinearOperator(model, loss_func, params, data)
G = GGNLinearOperator(model, loss_func, params, data)

num_eigenvalues = 12
# ARPACK starts from a random vector; a fixed one makes the run repeat exactly.
v0 = np.random.default_rng(0).standard_normal(num_params)
options = {"k": num_eigenvalues, "which": "LA", "tol": 1e-4, "return_eigenvectors": False}
eigenvalues = {}
for name, A in [("Hessian", H), ("GGN", G)]:
    with A.linearized():
        eigenvalues[name] = eigsh(A, v0=v0, **options)[::-1]

print(f"\n2. The {num_eigenvalues} largest eigenvalues, by SciPy's eigsh")
print("   An eigenvalue is the second derivative of the training loss along its eigenvector.")
for name, values in eigenvalues.items():
    print(f"   {name + ':':<8} " + " ".join(f"{value:.2f}" for value in values))

# %%
# The gap is where an eigenvalue is the largest multiple of the next one.

largest = eigenvalues["Hessian"]
gap = largest[:-1] / largest[1:]
num_outliers = int(gap.argmax()) + 1
print(f"   {num_outliers} outliers, {num_classes} classes.")
print(f"   Number {num_outliers} is {gap.max():.1f} times as large as the next eigenvalue.")
assert num_outliers == num_classes - 1

# %%
# Check against a dense matrix
# ----------------------------
#
# An operator may be restricted to some of the parameters. For the last layer's weight and bias
# the matrix is small enough to be formed, and we can form it *without* the operator: with the
# features :math:`z_n` that enter the layer held fixed, differentiate the loss twice.

last = model[-1]
H_last = HessianLinearOperator(model, loss_func, [last.weight, last.bias], data)
with torch.no_grad():
    features = model[:-1](X_train)


def last_layer_loss(theta: torch.Tensor) -> torch.Tensor:
    """Return the training loss as a function of the last layer's flattened parameters."""
    weight, bias = theta.split([last.weight.numel(), last.bias.numel()])
    logits = nn.functional.linear(features, weight.reshape_as(last.weight), bias)
    return nn.functional.cross_entropy(logits, y_train)


theta = nn.utils.parameters_to_vector([last.weight, last.bias]).detach().requires_grad_()
(gradient,) = torch.autograd.grad(last_layer_loss(theta), theta, create_graph=True)
dense = torch.stack([torch.autograd.grad(g, theta, retain_graph=True)[0] for g in gradient]).numpy()

# One column of the operator's matrix per column of the identity; here only a few of them.
columns = [0, 123, len(dense) - 1]
np.testing.assert_allclose(
    H_last @ np.eye(len(dense))[:, columns], dense[:, columns], rtol=1e-8, atol=1e-12
)

with H_last.linearized():
    from_operator = eigsh(H_last, v0=v0[: len(dense)], **options | {"tol": 0})
from_dense = np.linalg.eigvalsh(dense)[-num_eigenvalues:]
np.testing.assert_allclose(from_operator, from_dense, rtol=1e-6)
max_error = np.abs(from_operator / from_dense - 1).max()
print(f"\n3. Check: the last layer's Hessian, {len(dense)} x {len(dense)}, by plain autograd")
print(f"   Eigenvalues of operator and dense matrix agree to {max_error:.0e} (relative).")

# %%
# A damped Newton step
# --------------------
#
# The step :math:`s` solves
#
# .. math:: (G + \delta I) \, s = -g
#
# with the gradient :math:`g` and a damping :math:`\delta > 0`. The GGN is positive semi-definite,
# so conjugate gradients work. ``G.damped(damping)`` is the matrix of the system, an operator.

damping = 1e-2
gradients, loss_before = G.gradient_and_loss()
g = nn.utils.parameters_to_vector(gradients).numpy()

system = G.damped(damping)
with system.linearized():
    step, info = cg(system, -g, rtol=1e-4, maxiter=200)
assert info == 0, "conjugate gradients did not converge"

with torch.no_grad():
    theta = nn.utils.parameters_to_vector(params)
    nn.utils.vector_to_parameters(theta + torch.from_numpy(step), params)
    _, loss_after = G.gradient_and_loss()
    nn.utils.vector_to_parameters(theta, params)
print(f"\n4. A Newton step with the GGN, damping {damping}, by SciPy's cg")
print(f"   The training loss falls from {loss_before:.4f} to {loss_after:.4f}. We undo the step.")
assert loss_after < loss_before

# %%
# Figure
# ------
#
# How many eigenvalues stand apart? Some Lanczos iterations estimate the density of all eigenvalues:
# nearly all are close to zero. One fewer than there are classes stand apart, because they come
# from how the gradients' means differ between classes (Papyan, *Traces of class/cross-class
# structure pervade deep learning spectra*, JMLR 2020). The positions of their peaks are accurate.
# Their heights are random: each eigenvalue has a weight of one over the number of parameters on
# average.

grid, density = lanczos_approximate_spectrum(H, ncv=60, num_repeats=3, seed=2)

fig, ax = plt.subplots(figsize=(7, 4), layout="constrained")
ax.fill_between(grid, density, 1e-4, color="tab:blue", alpha=0.3, linewidth=0)
ax.semilogy(grid, density, color="tab:blue", label=f"density of all {num_params} eigenvalues")
for values, style, label in (
    (largest[:num_outliers], "tab:red", f"{num_outliers} outliers"),
    (largest[num_outliers:], "black", f"the next {num_eigenvalues - num_outliers} eigenvalues"),
):
    ax.plot(values, np.full_like(values, 3e-4), "v", color=style, label=label)
ax.axvspan(largest[num_outliers], largest[num_outliers - 1], color="0.92", label="gap", zorder=0)
ax.set(
    xlabel="eigenvalue of the Hessian (second derivative of the training loss)",
    ylabel="density per unit of eigenvalue",
    ylim=(1e-4, 2 * density.max().item()),
    title=f"{num_classes} classes, {num_outliers} eigenvalues stand apart",
)
ax.legend()
fig.savefig("spectrum.png", dpi=150)

print("\n5. Figure: spectrum.png, the density of all eigenvalues and the outliers")
print(f"   The run took {time.perf_counter() - start:.0f} s.")
