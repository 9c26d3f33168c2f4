r"""
Which Kronecker product? KFAC, Shampoo, and closest fits
========================================================

KFAC, Shampoo, the closest product in the Frobenius norm and the most likely one are all Kronecker
products :math:`B \otimes A` for the same blocks of the generalized Gauss-Newton matrix (GGN), with
different factors. ``fit=`` chooses one, and EKFAC corrects the eigenvalues of each. We compare them
on a convolutional network and on a transformer for handwritten digits:

- how far are their blocks from the GGN's (``distance()``)?
- do influence scores with their inverses rank training samples as the exact inverse does?
- how many iterations of conjugate gradients do they save as preconditioners?

These are different questions, and they have different answers.
"""

from itertools import product

import matplotlib.pyplot as plt
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import nn

import curvlinops as cl

torch.manual_seed(0)

# %%
# Data and models
# ---------------
#
# The transformer reads the eight rows of an image as tokens.

images, labels = load_digits(return_X_y=True)
X = torch.tensor(images / 16.0).reshape(-1, 1, 8, 8)
y = torch.tensor(labels)
train, test = slice(0, 500), slice(-20, None)


class Transformer(nn.Module):
    """One layer of attention over the rows of an image."""

    def __init__(self, width: int = 12):
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.positions = nn.Parameter(0.1 * torch.randn(8, width))
        self.layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, ``[N, 10]``."""
        return self.head(self.layer(self.embed(x.squeeze(1)) + self.positions).mean(1))


models = {
    "CNN": nn.Sequential(
        nn.Conv2d(1, 6, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(6, 8, kernel_size=3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32, 10),
    ),
    "transformer": Transformer(),
}
loss_func = nn.CrossEntropyLoss()
data = [(X[train], y[train])]
for name, model in models.items():
    model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        for idx in torch.randperm(len(X[train])).split(64):
            optimizer.zero_grad()
            loss_func(model(X[idx]), y[idx]).backward()
            optimizer.step()
    model.eval()
    accuracy = (model(X[train]).argmax(1) == y[train]).double().mean().item()
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {accuracy:.1%} right")

# %%
# Three measures
# --------------
#
# Gradients are those of samples (the reduce setting), as in the GGN's blocks. The damping is the
# GGN's mean eigenvalue. The right-hand side of conjugate gradients is the loss's gradient, and the
# queries of the scores are gradients of test samples.

FITS = {"kfac": "KFAC", "shampoo": "Shampoo", "frobenius": "Frobenius", "kl": "KL"}
CLASSES = {cl.KFACLinearOperator: "", cl.EKFACLinearOperator: " + eigenvalues"}
distances: dict[str, dict[str, dict]] = {}
for model_name, model in models.items():
    problem = model, loss_func, dict(model.named_parameters()), data
    G = cl.GGNLinearOperator(*problem)
    dense = G.to_dense()
    damping = float(dense.trace()) / len(dense)
    damped = dense + damping * torch.eye(len(dense)).double()

    gradient = torch.cat([g.flatten() for g in G.gradient_and_loss()[0].values()])
    J = cl.PerSampleGradientLinearOperator(*problem).to_dense()
    queries = cl.PerSampleGradientLinearOperator(*problem[:3], [(X[test], y[test])]).to_dense()
    exact = J @ torch.linalg.solve(damped, queries.T)

    plain = cl.CGInverseLinearOperator(G.damped(damping), rtol=1e-3).solve(gradient)
    print(f"{model_name}: CG takes {int(plain.iterations)} iterations without a preconditioner")
    distances[model_name] = {}
    for (fit, name), (cls, more) in product(FITS.items(), CLASSES.items()):
        options = {"fisher_type": "type-2", "kfac_approx": "reduce"}
        K = cls(*problem, fit=fit, separate_weight_and_bias=False, **options)
        found = distances[model_name][name + more] = K.distance(num_vectors=30)
        mean = sum(float(error) for error, _ in found.values()) / len(found)
        inverse = K.inverse(damping, use_exact_damping=True)
        scores = J @ (inverse @ queries.T)
        ranks = [spearmanr(a, b).statistic for a, b in zip(scores.T, exact.T, strict=True)]
        solver = cl.CGInverseLinearOperator(G.damped(damping), preconditioner=inverse, rtol=1e-3)
        print(
            f"{name + more:>23}: distance {mean:.2f}, ranks {sum(ranks) / len(ranks):.2f}, "
            f"CG {int(solver.solve(gradient).iterations)}"
        )

# %%
# The distances by layer, with their standard errors:

fig, axes = plt.subplots(nrows=len(models), figsize=(8, 6), layout="constrained")
for ax, (model_name, found) in zip(axes, distances.items(), strict=True):
    bars = {key: x for key, x in found.items() if "+" not in key}
    for i, (name, errors) in enumerate(bars.items()):
        shifted = {layer.removesuffix(".weight"): error for layer, error in errors.items()}
        places = [number + 0.2 * (i - 1.5) for number in range(len(shifted))]
        heights = [float(x.estimate) for x in shifted.values()]
        widths = [float(x.standard_error) for x in shifted.values()]
        ax.bar(places, heights, width=0.2, yerr=widths, label=name)
    ax.set_xticks(range(len(shifted)), shifted, rotation=20, ha="right")
    ax.set(title=model_name, ylabel="relative distance")
axes[0].legend()
fig.savefig("kronecker_fits.png", dpi=150)
print("Figure: kronecker_fits.png")

# %%
# What we find
# ------------
#
# - The Frobenius fit is closest, by definition, and Shampoo is nearly as close. KFAC is farthest:
#   inputs and output gradients are not independent.
# - The closer fits rank training samples better, and the correction of eigenvalues helps all of
#   them a little. None is close to the exact inverse: what is between the layers is missing.
# - As preconditioners of these networks none saves iterations: the damped GGN has few large
#   eigenvalues, which conjugate gradients find fast.
#
# Measure the quantity that you need on your model.
