r"""
The neural tangent kernel, before and after training
=====================================================

A network that is linearized around its parameters :math:`\theta` is a kernel machine with the
kernel :math:`J J^\top`, where :math:`J` is the Jacobian of the outputs with respect to the
parameters (Jacot et al., *Neural tangent kernel*, NeurIPS 2018). How well does this kernel predict,
at initialization and after training? And do its largest eigenvectors align with the labels?

``JacobianLinearOperator.gram()`` computes the kernel without the Jacobian.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import JacobianLinearOperator

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data and model
# --------------
#
# Is a digit odd? The labels are -1 and 1, and the network has one output.

num_train, num_test = 300, 200
images, digits = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16.0).double(), 2.0 * torch.tensor(digits % 2).double() - 1
X, y = X[: num_train + num_test], y[: num_train + num_test]

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).double()
params = list(model.parameters())


def kernel() -> torch.Tensor:
    """Return the kernel of training and test data at the present parameters, ``[N, N]``."""
    return JacobianLinearOperator(model, params, [(X, None)]).gram()


# %%
# Kernel regression
# -----------------
#
# The linearized network that fits the residuals of the training data predicts with the kernel.


def predict(K: torch.Tensor, ridge: float = 1e-3) -> torch.Tensor:
    """Return the linearized network's outputs on the test data after it was trained."""
    with torch.no_grad():
        outputs = model(X).squeeze(1)
    train, test = slice(0, num_train), slice(num_train, None)
    damped = K[train, train] + ridge * K[train, train].diagonal().mean() * torch.eye(num_train)
    weights = torch.linalg.solve(damped, (y - outputs)[train])
    return outputs[test] + K[test, train] @ weights


def accuracy(outputs: torch.Tensor) -> float:
    """Return which share of the test data is classified correctly."""
    return float((outputs.sign() == y[num_train:]).double().mean())


def alignment(K: torch.Tensor) -> torch.Tensor:
    """Return which share of the labels the largest eigenvectors explain, one after the other."""
    _, vectors = torch.linalg.eigh(K[:num_train, :num_train])
    coefficients = vectors.flip(1).T @ y[:num_train]
    return coefficients.square().cumsum(0) / num_train


before = kernel()
accuracies = {"kernel at initialization": accuracy(predict(before))}

# %%
# Training
# --------

optimizer = torch.optim.Adam(params, lr=1e-3)
for _ in range(500):
    optimizer.zero_grad()
    nn.functional.mse_loss(model(X[:num_train]).squeeze(1), y[:num_train]).backward()
    optimizer.step()

after = kernel()
accuracies["trained network"] = accuracy(model(X[num_train:]).squeeze(1).detach())
accuracies["kernel after training"] = accuracy(predict(after))
for name, value in accuracies.items():
    print(f"{name}: {100 * value:.0f} % of the test data are correct")
assert min(accuracies.values()) > 0.8

# %%
# The kernel has turned towards the labels: fewer of its eigenvectors explain more of them.

fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, K in [("initialization", before), ("after training", after)]:
    values = torch.linalg.eigvalsh(K[:num_train, :num_train]).flip(0)
    left.loglog(range(1, num_train + 1), values.clamp(min=1e-12) / values[0], label=name)
    right.semilogx(range(1, num_train + 1), alignment(K), label=name)
left.set(xlabel="index", ylabel="eigenvalue / largest eigenvalue", title="Spectrum")
left.set_ylim(1e-8, 2)
right.set(
    xlabel="number of eigenvectors", ylabel="explained share of the labels", title="Alignment"
)
left.legend()
right.legend()
fig.savefig("tangent_kernel.png", dpi=150)
assert alignment(after)[4] > alignment(before)[4]

print(f"Figure: tangent_kernel.png. Time: {time.perf_counter() - start:.0f} s")
