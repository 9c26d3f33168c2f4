r"""
Exact products or finite differences?
=====================================

Published Hessian spectra of large language models rest on differences of gradients, often in
bfloat16:

.. math:: H v \approx \frac{g(\theta + \epsilon v) - g(\theta - \epsilon v)}{2 \epsilon}

How good are they? On a small GPT we can tell: products of this package have no step, and float64
shows their own error. We look at single products, at the largest eigenvalues, and at the density of
the spectrum.
"""

import copy
import itertools
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from curvlinops import HessianLinearOperator, eigsh
from curvlinops.integrations.transformers import problem

torch.manual_seed(0)
start = time.perf_counter()

# %%
# A small GPT
# -----------
#
# It reads Python's help texts, character by character.

text = "".join(topics[name] for name in sorted(topics))
characters = {c: i for i, c in enumerate(sorted(set(text)))}
length = 64
tokens = torch.tensor([characters[c] for c in text[: len(text) // length * length]])
sequences = tokens.view(-1, length)

config = GPT2Config(
    n_layer=2, n_head=4, n_embd=64, vocab_size=len(characters), n_positions=length,
    bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = GPT2LMHeadModel(config).eval()  # without dropout
num_steps = 500
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=num_steps)
for _ in range(num_steps):
    ids = sequences[torch.randint(len(sequences), (32,))]
    optimizer.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    schedule.step()
print(f"loss of the last batch: {loss.item():.2f}")

ids = sequences[torch.randint(len(sequences), (8,))]
batch = {"input_ids": ids, "labels": ids}
theta = torch.cat([p.detach().flatten() for p in model.parameters()])
print(f"{len(theta)} parameters of norm {theta.norm():.1f}")

# %%
# Products
# --------
#
# Exact ones, of the model in three precisions. In bfloat16, the vectors are in float32.

models = {
    dtype: copy.deepcopy(model).to(dtype)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
}
exact = {dtype: HessianLinearOperator(*problem(m, [batch])) for dtype, m in models.items()}
truth = exact[torch.float64]

# %%
# And central differences. Weights are moved in float32 and rounded to the precision of the model,
# as FSDP does with ``MixedPrecisionPolicy(param_dtype=torch.bfloat16)``. The vectors have norm one.


def differences(dtype: torch.dtype, step: float) -> Callable[[Tensor], Tensor]:
    """Return a function that multiplies a vector by the Hessian, approximately."""
    moved = copy.deepcopy(models[dtype])
    params = list(moved.parameters())

    def gradient(point: Tensor) -> Tensor:
        parts = point.split([p.numel() for p in params])
        with torch.no_grad():
            for param, part in zip(params, parts, strict=True):
                param.copy_(part.view_as(param))
        gradients = torch.autograd.grad(moved(**batch).loss, params)
        return torch.cat([g.flatten() for g in gradients]).float()

    def multiply(v: Tensor) -> Tensor:
        ends = [gradient(theta + sign * step * v.float()) for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * step)

    return multiply


# %%
# The error of a product, by step size
# ------------------------------------
#
# A random vector stands for the bulk of the spectrum, the leading eigenvector for its outliers. A
# usual step is :math:`(1 + \|\theta\|) / \|v\|` times :math:`10^{-3}` to :math:`10^{-2}`. Not all
# papers tell theirs, so we try all.

pairs = eigsh(truth, k=1, which="LA", tol=1e-3)
random = torch.randn(len(theta), dtype=torch.float64)
vectors = {
    "random vector": random / random.norm(),
    "leading eigenvector": pairs.eigenvectors[:, -1],
}
products = {name: truth @ v for name, v in vectors.items()}


def errors(multiply: Callable[[Tensor], Tensor]) -> list[float]:
    """Return the relative errors of a product with each vector."""
    return [
        float((multiply(v).double() - products[name]).norm() / products[name].norm())
        for name, v in vectors.items()
    ]


usual = [c * float(1 + theta.norm()) for c in (1e-3, 1e-2)]
steps = torch.logspace(-6, 1, 15).tolist()
by_step, own = {}, {}
for dtype in (torch.float32, torch.bfloat16):
    by_step[dtype] = torch.tensor([errors(differences(dtype, step)) for step in steps])
    own[dtype] = errors(lambda v, A=exact[dtype]: A @ v.float())
    best = by_step[dtype].amax(1).argmin()
    print(f"{dtype}: errors for a random vector, and for the leading eigenvector")
    print("  exact product: {:.1e}, {:.1e}".format(*own[dtype]))
    print(
        "  differences, best step for both ({:.0e}): {:.1e}, {:.1e}".format(
            steps[best], *by_step[dtype][best].tolist()
        )
    )

# %%
# What products cost, in seconds. Inside of ``linearized()``, the forward pass is done.


def seconds(multiply: Callable[[Tensor], Tensor]) -> float:
    """Return the time of a product on one core, the best of three."""
    times = [time.process_time()]
    for _ in range(3):
        multiply(vectors["random vector"].float())
        times.append(time.process_time())
    return min(after - before for before, after in itertools.pairwise(times))


A = exact[torch.float32]
print(f"central differences: {seconds(differences(torch.float32, usual[0])):.3f} s")
print(f"exact product: {seconds(A.__matmul__):.3f} s")
with A.linearized():
    A @ theta
    print(f"exact product inside of linearized(): {seconds(A.__matmul__):.3f} s")

# %%
# Eigenvalues and densities
# -------------------------
#
# Lanczos' method with full reorthogonalization, from the same start vectors for all. (Solvers of
# this package check that a matrix is symmetric. They refuse these differences in bfloat16.)


def lanczos(multiply: Callable[[Tensor], Tensor], v: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """Return Ritz values and their weights after ``num`` products."""
    basis, T = v.new_zeros(num, len(v)), v.new_zeros(num, num)
    for i in range(num):
        basis[i] = v
        w = multiply(v).to(v)
        T[i, i] = w @ v
        for _ in range(2):
            w -= basis[: i + 1].T @ (basis[: i + 1] @ w)
        if i + 1 < num:
            T[i, i + 1] = T[i + 1, i] = w.norm()
            v = w / w.norm()
    values, coefficients = torch.linalg.eigh(T)
    return values, coefficients[0] ** 2


num_products, num_starts = 40, 2
starts = torch.randn(num_starts, len(theta), dtype=torch.float64)
starts /= starts.norm(dim=1, keepdim=True)


def spectrum(multiply: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Return the Ritz values and weights of all starts, ``[num_starts, num_products]``."""
    values, weights = zip(*(lanczos(multiply, v, num_products) for v in starts), strict=True)
    return torch.stack(values), torch.stack(weights)


spectra = {}
for dtype in (torch.float64, torch.bfloat16):
    A = exact[dtype]
    with A.linearized():
        spectra[f"exact, {str(dtype)[6:]}"] = spectrum(lambda v, A=A: A @ v.to(A.torch_dtype))
for dtype, step in [
    (torch.float32, 3e-4),
    (torch.float32, usual[0]),
    (torch.bfloat16, 3e-3),
    (torch.bfloat16, usual[0]),
    (torch.bfloat16, usual[1]),
]:
    name = f"{str(dtype)[6:]}, step {step:.1g}"
    spectra[name] = spectrum(differences(dtype, step))

reference = spectra["exact, float64"][0].amax()
print(f"{'':20s} largest eigenvalue   share of eigenvalues below -1")
for name, (values, weights) in spectra.items():
    largest, negative = values.amax(), (weights * (values < -1)).sum(1).mean()
    bias = 100 * float(largest / reference - 1)
    print(f"{name:20s} {largest:8.1f} ({bias:+6.2f} %)  {100 * negative:8.2f} %")

# %%
# The picture
# -----------
#
# Left, dotted: the errors of exact products. Grey: the usual steps. In the middle, each Ritz value
# relative to the true one. Right, the density of the bulk: each Ritz value is a Gaussian.

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
for (dtype, values), color in zip(by_step.items(), ("C0", "C1"), strict=True):
    for name, column, level, style in zip(vectors, values.T, own[dtype], ("-", "--"), strict=True):
        left.loglog(steps, column, color + style, label=f"{str(dtype)[6:]}, {name}")
        left.axhline(level, color=color, linestyle=":")
left.axvspan(*usual, color="gray", alpha=0.2)
left.set(xlabel="step", ylabel="relative error of a product", title="Differences by step")
left.legend(fontsize="x-small")

grid, width = torch.linspace(-15, 25, 600, dtype=torch.float64), 0.4
true = spectra["exact, float64"][0][0].flip(0)[:6]
for name, (values, weights) in spectra.items():
    middle.plot(range(1, 7), values[0].flip(0)[:6] / true, ".-", label=name)
    bumps = (-((grid - values[..., None]) ** 2) / (2 * width**2)).exp() / (width * 2.5066)
    right.semilogy(grid, (weights[..., None] * bumps).sum(1).mean(0), linewidth=1, label=name)
middle.set(xlabel="place", ylabel="relative to the truth", title="The largest eigenvalues")
right.set(xlabel="eigenvalue", ylim=(1e-6, 2), title="Density")
right.legend(fontsize="x-small")
plt.show()

# %%
# What to take from this
# ----------------------
#
# - A large step leaves the range in which the gradient is linear. That happens first along the
#   leading eigenvectors, so that the largest eigenvalues are wrong. A small step divides rounding
#   errors by a small number. Products with most vectors are small, so that the bulk is wrong.
# - In float32 there is a step between: with :math:`10^{-3}` or a bit less, central differences find
#   all of this spectrum to a percent or better. Then they are good enough. The usual steps are
#   larger, and off by ten percent or more.
# - In bfloat16 there is none: where the largest eigenvalue is right, half of the bulk is noise, and
#   looks like negative curvature. The largest step ruins the largest eigenvalue, too.
# - More data does not help. Rounding of the weights is the same for all batches: with 16 times as
#   many sequences, these errors in bfloat16 stay as they are.
# - An exact product has no step, and in bfloat16 errors of a few percent for every vector. Inside
#   of ``linearized()`` it takes the time of central differences, outside twice as much. It needs
#   more memory than a gradient, and a model that is twice differentiable.
#
# These are the numbers of one small model. The best step, and whether there is one, depend on the
# model; to find it, one needs exact products.

print(f"Time: {time.perf_counter() - start:.0f} s")
