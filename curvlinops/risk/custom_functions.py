"""Compares Hessians of models with custom autograd functions with differences of gradients.

PyTorch cannot know whether the backward of a custom function can be differentiated: it is any
Python code. A backward that detaches, or uses what the forward kept outside of the graph, gives a
Hessian that lacks a part, without an error, and is still symmetric. So does a hook that replaces a
gradient, as in deep equilibrium models.
"""

import torch
from torch import Tensor

from curvlinops.autodiff.backward import vjp
from curvlinops.autodiff.mode_selection import Mode
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.warnings import warn

_TWICE = "the custom autograd functions, or hooks, of the model ({}) can be differentiated twice"


def check_custom_functions(problem: BatchProblem, mode: Mode) -> None:
    """Compare a Hessian product with central differences of the gradient, at two step sizes.

    For models with custom autograd functions, or hooks on tensors (hooks on nodes of the graph,
    ``grad_fn.register_hook``, cannot be seen).

    Raises:
        RuntimeError: If they differ by more than 10 % at both step sizes.
    """
    names = ", ".join(sorted(problem.facts.custom_functions))
    leaves, space = problem.leaves(), problem.space
    dtypes = {leaf.dtype for leaf in leaves.values()} | problem.facts.dtypes
    if not problem.can_substitute or not dtypes <= {torch.float32, torch.float64}:
        warn(
            f"Whether {_TWICE.format(names)} cannot be checked: the model is a closure, or has "
            "dtypes of less than 32 bits. If they cannot, the Hessian is wrong."
        )
        return
    theta = space.join({name: leaf.detach().unsqueeze(0) for name, leaf in leaves.items()})
    v = space.join(space.randn(1, torch.Generator(space.device).manual_seed(0)))
    # not along parameters whose gradient is zero by definition, such as rows of padding
    v = torch.where(_gradient(problem, theta) == 0, 0.0, v)
    product = space.zeros(1)
    mode.hessian(problem, problem.loss_seed)(space.split(v), product)
    Hv, slopes = space.join(product).double(), []
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    for step in (2 * eps**0.4, eps**0.4):
        h = step * max(_norm(theta), 1e-3) / max(_norm(v), 1e-3)
        difference = _gradient(problem, theta + h * v) - _gradient(problem, theta - h * v)
        slopes.append(difference / (2 * h))
    error = min(_norm(Hv - slope) / max(_norm(slope), 1e-30) for slope in slopes)
    if error <= 0.1:
        return
    if error <= 3 * _norm(slopes[0] - slopes[1]) / max(_norm(slopes[1]), 1e-30):
        warn(
            f"Whether {_TWICE.format(names)} could not be checked: differences of the gradient are "
            "too inaccurate. If they cannot, the Hessian is wrong."
        )
        return
    raise RuntimeError(
        "The Hessian product is not the derivative of the gradient: the backward of a custom "
        "autograd.Function, or a hook that changes gradients, is not differentiable (one of "
        f"{names}). Make it differentiable, or build the function from PyTorch operations. If "
        "the difference is meant, as in straight-through estimators, pass autodiff='reverse'."
    )


def _gradient(problem: BatchProblem, theta: Tensor) -> Tensor:
    """Return the gradient of the loss's sum at flat parameters, ``[1, D]`` both, in float64."""
    columns, space = problem.space.split(theta), problem.space
    leaves = {n: columns[n][0].to(x.dtype).requires_grad_() for n, x in problem.leaves().items()}
    evaluation = problem.evaluation(leaves, "once")
    with evaluation.active():
        loss, _ = problem.loss_sum(problem.output(evaluation))
        grads = vjp({"": loss}, {"": None}, leaves, retain=False)
    zeros = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    given = {name: grad for name, grad in grads.items() if grad is not None}
    return space.join({n: x.unsqueeze(0) for n, x in (zeros | given).items()}).double()


def _norm(x: Tensor) -> float:
    return float(x.double().norm())
