r"""
Influence functions, checked by retraining
==========================================

How would the loss on a test image change, had one training image been missing? Let

.. math:: \theta^* = \arg\min_\theta \sum_n \ell_n(\theta) + \frac{w}{2} \lVert\theta\rVert^2

minimize a regularized loss with Hessian :math:`H + w I`. Without the term :math:`\ell_i` the
minimum moves by about :math:`(H + w I)^{-1} \nabla \ell_i`, a Newton step. To first order, the loss
on a test image changes by

.. math:: \nabla \ell_\text{test}^\top (H + w I)^{-1} \, \nabla \ell_i

(Koh and Liang, *Understanding black-box predictions via influence functions*, ICML 2017,
`arXiv:1703.04730 <https://arxiv.org/abs/1703.04730>`_; Cook and Weisberg, *Residuals and influence
in regression*, 1982). With one linear system for each test image we know the influence of *all*
training images. We solve it by conjugate gradients, preconditioned by Kronecker-factored
approximate curvature (KFAC), and check the predictions by training again without the image.
"""

import copy
import time

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

from curvlinops import (
    CGInverseLinearOperator,
    HessianLinearOperator,
    KFACInverseLinearOperator,
    KFACLinearOperator,
    PerSampleGradientLinearOperator,
)

torch.manual_seed(0)
start = time.perf_counter()

# %%
# Data and models
# ---------------
#
# Multinomial logistic regression, whose minimum is unique, and a small network. With
# ``reduction="sum"`` all quantities are sums over images, as in the formulas above.

num_data = 1000
images, labels = load_digits(return_X_y=True)
X, y = torch.tensor(images / 16.0), torch.tensor(labels)
X_test, y_test = X[1000:], y[1000:]
X, y = X[:num_data], y[:num_data]

loss_func = nn.CrossEntropyLoss(reduction="sum")
weight_decay = 0.01 * num_data

models = {
    "logistic regression": nn.Linear(64, 10).double(),
    "network": nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10)).double(),
}

# %%
# Training
# --------
#
# Influence functions are about minima, so we go there: roughly by L-BFGS, then by Newton's method.


def train(model: nn.Module) -> None:
    """Minimize the regularized loss by L-BFGS."""
    params = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        params, max_iter=500, line_search_fn="strong_wolfe", tolerance_grad=1e-3
    )

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        penalty = weight_decay / 2 * sum(p.square().sum() for p in params)
        loss = loss_func(model(X), y) + penalty
        loss.backward()
        return loss

    optimizer.step(closure)


def kfac_inverse(model: nn.Module) -> KFACInverseLinearOperator:
    """Return the inverse of KFAC plus weight decay; each layer's weight and bias share a block."""
    K = KFACLinearOperator(
        model,
        loss_func,
        list(model.parameters()),
        [(X, y)],
        fisher_type="type-2",
        separate_weight_and_bias=False,
    )
    return K.inverse(damping=weight_decay, use_exact_damping=True)


def newton(
    model: nn.Module, data: list, preconditioner: KFACInverseLinearOperator, atol: float
) -> None:
    """Do Newton steps until the gradient's norm is below a tolerance."""
    params = list(model.parameters())
    H = HessianLinearOperator(model, loss_func, params, data)
    H_inv = CGInverseLinearOperator(
        H, damping=weight_decay, preconditioner=preconditioner, rtol=1e-2
    )
    for _ in range(20):
        gradient, _ = H.gradient_and_loss()
        gradient = [g + weight_decay * p.detach() for g, p in zip(gradient, params, strict=True)]
        if torch.cat([g.flatten() for g in gradient]).norm() < atol:
            return
        with torch.no_grad():
            for p, step in zip(params, H_inv @ gradient, strict=True):
                p -= step
    raise RuntimeError("Newton's method did not converge.")


# %%
# Predictions
# -----------
#
# We predict for the test images with the largest loss. Their gradients are the right-hand sides,
# and are solved together. One product with the N x D matrix of training gradients turns solutions
# into influences. That matrix is not formed either.


def predict(
    model: nn.Module, test: torch.Tensor, preconditioner: KFACInverseLinearOperator | None
) -> torch.Tensor:
    """Predict changes of losses, one row for each training image, one column for each test."""
    params = list(model.parameters())
    H = HessianLinearOperator(model, loss_func, params, [(X, y)])
    H_inv = CGInverseLinearOperator(
        H, damping=weight_decay, preconditioner=preconditioner, rtol=1e-6
    )
    J_test = PerSampleGradientLinearOperator(
        model, loss_func, params, [(X_test[test], y_test[test])]
    )
    solution = H_inv.solve(J_test.to_dense().T)
    how = "plain" if preconditioner is None else "with KFAC"
    print(f"  iterations of conjugate gradients, {how}: {solution.iterations.tolist()}")
    return PerSampleGradientLinearOperator(model, loss_func, params, [(X, y)]) @ solution.x


@torch.no_grad()
def losses_on(model: nn.Module, test: torch.Tensor) -> torch.Tensor:
    """Return the losses on single test images."""
    return nn.functional.cross_entropy(model(X_test[test]), y_test[test], reduction="none")


# %%
# Retraining
# ----------
#
# We leave out, one after the other, the images with the largest predicted influence, and some
# others.

num_left_out = 16


def retrain(
    model: nn.Module,
    test: torch.Tensor,
    chosen: torch.Tensor,
    preconditioner: KFACInverseLinearOperator,
) -> torch.Tensor:
    """Return the actual changes of losses when training images are left out."""
    changes = []
    for i in chosen:
        without = torch.arange(num_data) != i
        other = copy.deepcopy(model)
        newton(other, [(X[without], y[without])], preconditioner, atol=1e-4)
        changes.append(losses_on(other, test) - losses_on(model, test))
    return torch.stack(changes)


results = {}
for name, model in models.items():
    train(model)
    M = kfac_inverse(model)
    newton(model, [(X, y)], M, atol=1e-6)
    accuracy = (model(X_test).argmax(dim=1) == y_test).double().mean().item()
    print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, test {accuracy:.1%}")

    test = losses_on(model, torch.arange(len(X_test))).argsort(descending=True)[:5]
    predict(model, test, None)
    influence = predict(model, test, M)
    chosen = influence.abs().amax(dim=1).argsort(descending=True)
    half = num_left_out // 2
    chosen = torch.cat([chosen[:half], chosen[half :: num_data // half]])

    actual, predicted = retrain(model, test, chosen, M), influence[chosen]
    correlation = torch.stack([actual.flatten(), predicted.flatten()]).corrcoef()[0, 1].item()
    print(f"  correlation of predicted and actual changes: {correlation:.4f}")
    assert correlation > 0.98
    results[name] = (model, test, influence, predicted, actual, correlation)

# %%
# Predictions of the logistic regression are almost on the diagonal. They are a little too small in
# size: the Newton step uses the Hessian of all images, and that without the image is smaller. The
# network is farther from a quadratic, but its predictions still tell which images matter.

fig, axes = plt.subplots(
    ncols=len(results), figsize=(4.5 * len(results), 4), layout="constrained", squeeze=False
)
for ax, (name, (*_, predicted, actual, correlation)) in zip(axes[0], results.items(), strict=True):
    ends = [actual.min(), actual.max()]
    ax.plot(ends, ends, color="gray", linewidth=1, label="prediction = change")
    for k in range(predicted.shape[1]):
        ax.plot(predicted[:, k], actual[:, k], "o", markersize=4, label=f"test image {k + 1}")
    ax.set(
        xlabel="predicted change of the test loss",
        ylabel="actual change after retraining",
        title=f"{name}, correlation {correlation:.4f}",
    )
axes[0, 0].legend(fontsize="small")
fig.savefig("influence.png", dpi=150)

# %%
# Who did it?
# -----------
#
# We show the training images that matter most for two of the test images. Leaving out an image on
# the left lowers the loss: the image is harmful. Images on the right are helpful.

model, test, influence, *_ = results["logistic regression"]
num_shown = 4
fig, axes = plt.subplots(nrows=2, ncols=2 * num_shown + 1, figsize=(10, 3.2), layout="constrained")
for row, k in zip(axes, (0, 1), strict=True):
    order = influence[:, k].argsort()
    columns = torch.cat([order[:num_shown], order[-num_shown:]])
    guess = model(X_test[test[k]]).argmax().item()
    row[num_shown].imshow(X_test[test[k]].reshape(8, 8).numpy(), cmap="Reds")
    row[num_shown].set_title(f"test: {y_test[test[k]]}\nread as {guess}", fontsize=9, color="C3")
    for ax, i in zip([*row[:num_shown], *row[num_shown + 1 :]], columns, strict=True):
        ax.imshow(X[i].reshape(8, 8).numpy(), cmap="Greys")
        ax.set_title(f"{y[i]}\n{influence[i, k]:+.3f}", fontsize=9)
for ax in axes.flat:
    ax.set(xticks=[], yticks=[])
fig.suptitle("Change of the test loss without the image: harmful ones left, helpful ones right")
fig.savefig("influence_images.png", dpi=150)

print(f"Figures: influence.png, influence_images.png. Time: {time.perf_counter() - start:.0f} s")
