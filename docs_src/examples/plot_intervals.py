r"""
How good is an influence score?
===============================

Influence scores are numbers :math:`g_i^\top (G + \delta I)^{-1} g_j` of gradients of samples. With
EKFAC in place of the exact Gauss-Newton matrix :math:`G` they are cheap, but nothing tells how far
off they are. Products with :math:`G` are exact. A few of them enclose each score in an interval.
"""

import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import (
    EKFACLinearOperator,
    GGNLinearOperator,
    PerSampleGradientLinearOperator,
    certified_scores,
    quadratic_form,
)

torch.manual_seed(0)
start = time.perf_counter()

# %%
# A network, its matrices, and gradients
# --------------------------------------
#
# A small network on handwritten digits. The damping is ten times that of other pages on influence:
# with less, intervals take more products (105 in place of 36 at the end).

images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16.0), torch.tensor(labels)
num_data = 300
train, test = (X[:num_data], y[:num_data]), (X[1000:1001], y[1000:1001])

model = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double()
loss_func = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(100):
    optimizer.zero_grad()
    loss_func(model(train[0]), train[1]).backward()
    optimizer.step()

params = dict(model.named_parameters())
problem = (model, loss_func, params, [train])
G = GGNLinearOperator(*problem)
K = EKFACLinearOperator(*problem, fisher_type="type-2", separate_weight_and_bias=False)
rows = PerSampleGradientLinearOperator(*problem)
query = PerSampleGradientLinearOperator(model, loss_func, params, [test]).dense()[0]
damping = float(K.trace()) / len(query)  # the mean eigenvalue
inverse = K.damped(damping).inverse()

# %%
# One score and its interval
# --------------------------
#
# The query with itself. A callback records the interval after each product. EKFAC's inverse as
# preconditioner saves products; its quality has no influence on whether the interval holds.

runs = {}
for name, preconditioner in {"plain": None, "with EKFAC's inverse": inverse}.items():
    seen = []
    found = quadratic_form(
        G,
        query,
        damping,
        rtol=1e-3,
        preconditioner=preconditioner,
        callback=lambda state, seen=seen: seen.append(state.values),
    )
    runs[name] = torch.stack(seen)
    interval = f"between {found.lower:.5g} and {found.upper:.5g}"
    print(f"{name}: {interval} after {found.num_products} products")
ekfac = float(query @ (inverse @ query))
print(f"EKFAC: {ekfac:.5g}, {100 * (ekfac / float(found.upper) - 1):+.0f} %")

# %%
# The samples with the largest scores
# -----------------------------------
#
# Intervals of the scores of all samples tell which ones these are, and in which order. They are
# refined until the leading ones are certain.

top = certified_scores(rows, query, G, K, damping, top=10)
print(f"Order decided: {top.is_decided}, after {top.num_products} products with the query")

# %%
# Both in one picture
# -------------------

figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
for (name, bounds), color in zip(runs.items(), ("C0", "C1"), strict=True):
    products = range(2, 2 + len(bounds))
    left.fill_between(products, *bounds.T, color=color, alpha=0.25)
    left.plot(products, bounds, color=color, marker=".", label=[f"interval, {name}", None])
left.axhline(ekfac, color="black", linestyle="--", label="EKFAC's value")
left.set(xlabel="products with the exact matrix", title="Score of a query with itself")
left.set_yscale("log")
left.legend()
places = range(1, 1 + len(top.rows))
middles, halves = (top.lower + top.upper) / 2, (top.upper - top.lower) / 2
right.errorbar(places, middles, halves, fmt="o", capsize=4, color="C1", label="interval")
right.plot(places, top.estimates, "k_", markersize=12, label="EKFAC's value")
right.set(xlabel="place of the training sample", title="The ten largest scores")
right.legend()
plt.show()

print(f"Time: {time.perf_counter() - start:.0f} s")
