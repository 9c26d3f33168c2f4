r"""
KFAC and EKFAC next to the GGN
==============================

Kronecker-factored approximate curvature (KFAC) replaces each layer's diagonal block of the
generalized Gauss-Newton matrix (GGN) by a Kronecker product of two small matrices; EKFAC corrects
its eigenvalues. For a small convolutional network all matrices can be written down. We

- compute KFAC's factors and read them by module,
- look at the GGN, KFAC and EKFAC side by side,
- measure how far each approximation is from the GGN's blocks.

`KFAC and EKFAC <../kfac_reference.html>`_ has the definitions.
"""

import matplotlib.pyplot as plt
import torch
from matplotlib.colors import LogNorm
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import EKFACLinearOperator, GGNLinearOperator, KFACLinearOperator

torch.manual_seed(0)

# %%
# Data and model
# --------------
#
# Handwritten digits, and a convolutional network with a few hundred parameters, trained a little.

images, labels = load_digits(return_X_y=True)
X = torch.tensor(images / 16.0).reshape(-1, 1, 8, 8)
y = torch.tensor(labels)

model = nn.Sequential(
    nn.Conv2d(1, 4, kernel_size=3, stride=2, padding=1),
    nn.Tanh(),
    nn.Conv2d(4, 6, kernel_size=3, stride=2, padding=1),
    nn.Tanh(),
    nn.Flatten(),
    nn.Linear(24, 10),
).double()
loss_func = nn.CrossEntropyLoss()
params = dict(model.named_parameters())

optimizer = torch.optim.Adam(params.values(), lr=1e-2)
for _ in range(8):
    for idx in torch.randperm(len(X)).split(64):
        optimizer.zero_grad()
        loss_func(model(X[idx]), y[idx]).backward()
        optimizer.step()
with torch.no_grad():
    print(f"Training accuracy: {(model(X).argmax(1) == y).double().mean().item():.1%}")

# %%
# Factors
# -------
#
# With ``fisher_type="type-2"`` nothing is sampled: the loss's Hessian is backpropagated exactly. In
# large models ``"mc"``, the default, needs one backward pass instead of one for each class.

data = [(X[:1000], y[:1000]), (X[1000:], y[1000:])]
K = KFACLinearOperator(model, loss_func, params, data, fisher_type="type-2")
K.compute_kronecker_factors()

for name, A in K.input_covariances.items():
    B = K.gradient_covariances[name]
    print(f"Module {name}: input factor {tuple(A.shape)}, gradient factor {tuple(B.shape)}")
for block in K.report():
    print(", ".join(block.names), block.structure, block.factors)

# %%
# The factors are means over the data. A layer's block is their Kronecker product, gradient factor
# first.

last = slice(K.space.slice("5.weight").start, K.space.slice("5.weight").stop)
kfac = K.to_dense()
torch.testing.assert_close(
    kfac[last, last], torch.kron(K.gradient_covariances["5"], K.input_covariances["5"])
)

# %%
# Three matrices
# --------------
#
# The pictures show the absolute values of all entries, on a logarithmic scale. Lines separate the
# parameters. KFAC and EKFAC are block-diagonal, and their blocks resemble those of the GGN.

ggn = GGNLinearOperator(model, loss_func, params, data).to_dense()
E = EKFACLinearOperator(model, loss_func, params, data, fisher_type="type-2")
ekfac = E.to_dense()
matrices = {"GGN": ggn, "KFAC": kfac, "EKFAC": ekfac}


def show(matrices: dict[str, torch.Tensor], title: str) -> plt.Figure:
    """Draw matrices side by side with one color scale."""
    top = matrices["GGN"].abs().max().item()
    norm = LogNorm(vmin=1e-5 * top, vmax=top, clip=True)
    colors = plt.get_cmap("magma", 10)  # two for each power of ten
    fig, axes = plt.subplots(ncols=len(matrices), figsize=(9, 3.4), layout="constrained")
    for ax, (name, matrix) in zip(axes, matrices.items(), strict=True):
        # zeros have no logarithm
        entries = (matrix.abs() + 1e-8 * top).numpy()
        image = ax.imshow(entries, norm=norm, cmap=colors, interpolation="none")
        ax.set(title=name, xticks=[], yticks=[])
    fig.colorbar(image, ax=axes, label="absolute value", shrink=0.8)
    fig.suptitle(title)
    return fig


fig = show(matrices, "All parameters")
weights = [name for name in params if name.endswith("weight")]  # biases are too small for names
centers = [(K.space.slice(name).start + K.space.slice(name).stop) / 2 for name in weights]
fig.axes[0].set_yticks(centers, weights)
for ax in fig.axes[:3]:
    ax.set_xticks(centers, weights, rotation=30, ha="right")
    for name in params:
        edge = K.space.slice(name).stop - 0.5
        ax.axhline(edge, color="white", linewidth=0.4)
        ax.axvline(edge, color="white", linewidth=0.4)
fig.savefig("kfac.png", dpi=150)

# %%
# One block, that of the last layer's weight:

blocks = {name: matrix[last, last] for name, matrix in matrices.items()}
fig = show(blocks, "Weight of the last layer")

# %%
# Distances
# ---------
#
# The distance of a block from the GGN's, relative to the latter's norm (Frobenius). EKFAC keeps
# KFAC's eigenvectors, and has the best eigenvalues for them: it is never worse. Its trace is that
# of the GGN.

errors = {
    approximation: [
        ((matrices[approximation] - ggn)[block, block].norm() / ggn[block, block].norm()).item()
        for block in map(K.space.slice, params)
    ]
    for approximation in ("KFAC", "EKFAC")
}
for name, kfac_error, ekfac_error in zip(params, *errors.values(), strict=True):
    print(f"{name:>10}: KFAC {kfac_error:.3f}, EKFAC {ekfac_error:.3f}")
    assert ekfac_error <= kfac_error + 1e-9
torch.testing.assert_close(E.trace(), ggn.trace())

fig, ax = plt.subplots(figsize=(6, 3), layout="constrained")
places = torch.arange(len(params))
for offset, (name, values) in zip((-0.2, 0.2), errors.items(), strict=True):
    ax.bar(places + offset, values, width=0.4, label=name)
ax.set(xticks=places, xticklabels=params, ylabel="relative distance")
ax.set_title("Distance from the GGN's blocks")
ax.legend()
print("Figure: kfac.png")
