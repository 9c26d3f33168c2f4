r"""
A Laplace approximation by hand
===============================

Let :math:`\theta^*` minimize the negative log-likelihood of the data plus
:math:`\frac{\tau}{2} \lVert\theta\rVert^2`. It is the mode of a posterior, with a normal prior of
precision :math:`\tau`. Laplace's approximation of the posterior is a normal distribution around
the mode,

.. math:: p(\theta \mid \mathcal{D}) \approx \mathcal{N}\left(\theta^*, (G + \tau I)^{-1}\right),

with the generalized Gauss-Newton matrix (GGN) :math:`G` of the negative log-likelihood. It also
estimates the evidence, which chooses the prior precision without held-out data:

.. math::
    \log p(\mathcal{D} \mid \tau) \approx \log p(\mathcal{D} \mid \theta^*)
    - \frac{\tau}{2} \lVert\theta^*\rVert^2 + \frac{D}{2} \log \tau
    - \frac{1}{2} \log \det (G + \tau I)

(MacKay, *A practical Bayesian framework for backpropagation networks*, Neural Computation 1992).
For large networks :math:`G` is replaced by Kronecker-factored approximate curvature (KFAC; Ritter
et al., *A scalable Laplace approximation for neural networks*, ICLR 2018). Inverse, determinant and
samples are methods of structured operators. We compare the exact GGN and KFAC on two moons, and
tune a prior precision for each layer.
"""

import time
from math import log

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import make_moons
from torch import nn

from curvlinops import (
    EighDecomposedLinearOperator,
    GGNLinearOperator,
    JacobianLinearOperator,
    KFACLinearOperator,
    TorchLinearOperator,
)

start = time.perf_counter()

# %%
# Data and model
# --------------
#
# Log-likelihoods are sums, hence ``reduction="sum"``.

points, classes = make_moons(100, noise=0.3, random_state=0)
X, y = torch.tensor(points), torch.tensor(classes, dtype=torch.float64).unsqueeze(1)
points, classes = make_moons(2000, noise=0.3, random_state=1)
X_test, y_test = torch.tensor(points), torch.tensor(classes, dtype=torch.float64).unsqueeze(1)

loss_func = nn.BCEWithLogitsLoss(reduction="sum")


def find_mode(tau: float) -> nn.Module:
    """Return the network at the mode of the posterior."""
    torch.manual_seed(0)
    layers = [nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)]
    model = nn.Sequential(*layers).double()
    params = list(model.parameters())
    optimizer = torch.optim.LBFGS(params, max_iter=1000, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        prior = tau / 2 * sum(p.square().sum() for p in params)
        loss = loss_func(model(X), y) + prior
        loss.backward()
        return loss

    optimizer.step(closure)
    return model


# %%
# Two approximations of the GGN
# -----------------------------
#
# Both are structured operators, and are used in the same way. For a few hundred parameters the GGN
# can be formed and decomposed.


def exact(model: nn.Module) -> EighDecomposedLinearOperator:
    """Return the GGN, decomposed."""
    G = GGNLinearOperator(model, loss_func, list(model.parameters()), [(X, y)])
    return EighDecomposedLinearOperator(*torch.linalg.eigh(G.to_dense()))


def kfac(model: nn.Module) -> KFACLinearOperator:
    """Return KFAC; weight and bias of a layer share a block."""
    params = list(model.parameters())
    return KFACLinearOperator(
        model,
        loss_func,
        params,
        [(X, y)],
        fisher_type="type-2",
        separate_weight_and_bias=False,
    )


approximations = {"GGN": exact, "KFAC": kfac}

# %%
# Evidence
# --------
#
# For each prior precision we find the mode, and compute the evidence from the training data. The
# test data show whether its choice was right. Dotted lines mark the largest evidence. With a small
# prior precision, the optimizer finds modes of different quality.


@torch.no_grad()
def log_evidence(model: nn.Module, A: TorchLinearOperator, tau: float) -> float:
    """Return the evidence, given the GGN or an approximation of it."""
    theta = nn.utils.parameters_to_vector(model.parameters())
    log_likelihood = -loss_func(model(X), y)
    log_prior = -tau / 2 * theta.square().sum() + len(theta) / 2 * log(tau)
    return (log_likelihood + log_prior - A.damped(tau).logdet() / 2).item()


exponents = [-2, -1.5, -1, -0.75, -0.5, -0.25, 0, 0.5, 1]
taus = [10**exponent for exponent in exponents]
evidence, test = {"GGN": [], "KFAC": []}, []
for tau in taus:
    model = find_mode(tau)
    with torch.no_grad():
        test.append(-loss_func(model(X_test), y_test).item() / len(X_test))
    for name, make in approximations.items():
        evidence[name].append(log_evidence(model, make(model), tau))
    print(
        f"tau = {tau:5.2f}: log evidence {evidence['GGN'][-1]:7.1f} (GGN), "
        f"{evidence['KFAC'][-1]:7.1f} (KFAC); test log-likelihood {test[-1]:.3f}"
    )

best = {name: taus[values.index(max(values))] for name, values in evidence.items()}
print(f"Most evidence at tau = {best['GGN']:.2f} (GGN), {best['KFAC']:.2f} (KFAC)")
# either choice is nearly as good as the best on the test data
for tau in best.values():
    assert test[taus.index(tau)] > max(test) - 0.05

fig, axes = plt.subplots(ncols=2, figsize=(8, 3), layout="constrained")
for name, values in evidence.items():
    (line,) = axes[0].semilogx(taus, values, "o-", label=name)
    for ax in axes:
        ax.axvline(best[name], color=line.get_color(), linestyle=":")
axes[0].set(title="Evidence, from training data", ylabel="log evidence [nats]")
axes[0].legend()
axes[1].semilogx(taus, test, "o-", color="C2")
axes[1].set(title="Test data", ylabel="log-likelihood per point [nats]")
for ax in axes:
    ax.set_xlabel(r"prior precision $\tau$")
fig.savefig("laplace_evidence.png", dpi=150)

# %%
# A precision for each layer
# --------------------------
#
# The evidence can choose many precisions at once, here one for each layer. The log-determinant is
# differentiable in them, so that an optimizer finds them for a given mode. KFAC is decomposed only
# once, and an evaluation takes milliseconds.


def tune(model: nn.Module, A: KFACLinearOperator, tau: float) -> dict[tuple[str, ...], float]:
    """Return the precision of each block that has the most evidence, starting from one for all."""
    theta = A.space.split(nn.utils.parameters_to_vector(model.parameters()).detach())
    logs = {
        names: torch.tensor(log(tau), dtype=torch.float64, requires_grad=True) for names in A.blocks
    }
    tuner = torch.optim.LBFGS(logs.values(), max_iter=100, line_search_fn="strong_wolfe")

    def negative_log_evidence() -> torch.Tensor:
        tuner.zero_grad()
        taus = {names: x.exp() for names, x in logs.items()}
        loss = A.damped(taus).logdet() / 2  # differentiable in the precisions
        for names, x in logs.items():
            for some in (theta[name] for name in names):
                loss = loss + (taus[names] * some.square().sum() - x * some.numel()) / 2
        loss.backward()
        return loss

    start = negative_log_evidence().item()
    tuner.step(negative_log_evidence)
    gain = start - negative_log_evidence().item()
    assert gain > 0
    print(f"{gain:.1f} more log evidence than with {tau:.2f} for all:")
    return {names: x.exp().item() for names, x in logs.items()}


model = find_mode(best["KFAC"])
layers = tune(model, kfac(model), best["KFAC"])
print(", ".join(f"{names[0].split('.')[0]}: {value:.2f}" for names, value in layers.items()))

# %%
# Predictions
# -----------
#
# The network, linearized at the mode, has normally distributed outputs (Khan et al., *Approximate
# inference turns deep networks into Gaussian processes*, NeurIPS 2019; Immer et al., *Improving
# predictions of Bayesian neural nets via local linearization*, AISTATS 2021). With the Jacobian
# :math:`J` of the outputs on a grid, and draws :math:`s \sim \mathcal{N}(0, (G + \tau I)^{-1})`,
# draws of the function are :math:`f_{\theta^*} + J s`. Probabilities are averages over draws.

tau = best["GGN"]
model = find_mode(tau)
params = list(model.parameters())
ticks = torch.linspace(-4, 5, 80, dtype=torch.float64)
grid = torch.cartesian_prod(ticks, ticks)
num_draws = 300


@torch.no_grad()
def draw_outputs(A: TorchLinearOperator, inputs: torch.Tensor) -> torch.Tensor:
    """Return draws of the network's outputs, a column for each."""
    generator = torch.Generator().manual_seed(0)
    s = A.damped(tau).inverse().sample(generator, num_draws)
    J = JacobianLinearOperator(model, params, [(inputs, None)])
    return model(inputs) + J @ s


def mean_log_likelihood(probabilities: torch.Tensor) -> float:
    """Return the mean log-likelihood of test data."""
    return -nn.functional.binary_cross_entropy(probabilities, y_test[:, 0]).item()


with torch.no_grad():
    maps = {"mode": model(grid).sigmoid()}
    likelihoods = {"mode": mean_log_likelihood(model(X_test)[:, 0].sigmoid())}
draws = {}
for name, make in approximations.items():
    A = make(model)
    draws[name] = draw_outputs(A, grid)
    maps[name] = draws[name].sigmoid().mean(dim=1)
    likelihoods[name] = mean_log_likelihood(draw_outputs(A, X_test).sigmoid().mean(dim=1))
print("Test log-likelihood: " + ", ".join(f"{n} {v:.4f}" for n, v in likelihoods.items()))
assert min(likelihoods["GGN"], likelihoods["KFAC"]) > likelihoods["mode"] - 0.02

# %%
# The mode alone is certain far away from the data. The posterior is not. Gray lines are decision
# boundaries of a few draws, which agree where there are data. The posterior of KFAC is narrower,
# and has less evidence.

fig, axes = plt.subplots(ncols=3, figsize=(11, 3.6), sharey=True, layout="constrained")
square = (len(ticks), len(ticks))
for ax, (name, values) in zip(axes, maps.items(), strict=True):
    image = ax.contourf(
        ticks.numpy(),
        ticks.numpy(),
        values.reshape(square).T.numpy(),
        levels=torch.linspace(0, 1, 21).tolist(),
        cmap="RdBu_r",
    )
    for column in draws[name].T[:12] if name in draws else ():
        ax.contour(
            ticks.numpy(),
            ticks.numpy(),
            column.reshape(square).T.numpy(),
            levels=[0],
            colors="gray",
            linewidths=0.5,
        )
    for label, color in [(0, "tab:blue"), (1, "tab:red")]:
        ax.plot(
            *X[y[:, 0] == label].T.numpy(), "o", color=color, markersize=3, mec="white", mew=0.3
        )
    ax.set(title=f"{name}, test log-likelihood {likelihoods[name]:.3f}", aspect="equal")
    ax.set_xlabel("first input")
axes[0].set_ylabel("second input")
fig.colorbar(image, ax=axes, label="probability of the red class", ticks=[0, 0.5, 1])
fig.savefig("laplace.png", dpi=150)

print(f"Figures: laplace_evidence.png, laplace.png. Time: {time.perf_counter() - start:.0f} s")
