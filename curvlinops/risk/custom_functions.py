"""Compares Hessians of models with custom autograd functions with differences of gradients.

PyTorch cannot know whether the backward of a custom function can be differentiated: it is any
Python code. A backward that detaches, or uses what the forward kept outside of the graph, gives a
Hessian that lacks a part, without an error, and is still symmetric. So does a hook that replaces a
gradient, as in deep equilibrium models.
"""

import torch

from curvlinops.autodiff.backward import Tensors, vjp
from curvlinops.autodiff.mode_selection import Mode
from curvlinops.linear_operator.space import Columns, norm
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.warnings import warn

_TWICE = "the custom autograd functions, or hooks, of the model ({}) can be differentiated twice"


def check_custom_functions(problem: BatchProblem, mode: Mode) -> None:
    """Compare a Hessian product with central differences of the gradient, at two step sizes.

    Only for models with custom autograd functions, or hooks on tensors (hooks on nodes of the
    graph, ``grad_fn.register_hook``, cannot be seen).

    Raises:
        RuntimeError: If they differ by more than 10 % at both step sizes.
    """
    if not (functions := problem.facts.custom_functions):
        return
    names = ", ".join(sorted(functions))
    theta = {name: leaf.detach() for name, leaf in problem.leaves().items()}
    dtypes = {x.dtype for x in theta.values()} | problem.facts.dtypes
    if not problem.can_substitute or not dtypes <= {torch.float32, torch.float64}:
        warn(
            f"Whether {_TWICE.format(names)} cannot be checked: the model is a closure, or has "
            "dtypes of less than 32 bits. If they cannot, the Hessian is wrong."
        )
        return
    v = problem.space.randn(1, torch.Generator(problem.space.device).manual_seed(0))
    # not along parameters whose gradient is zero by definition, such as rows of padding
    v = {n: torch.where(g == 0, 0.0, v[n][0]) for n, g in _gradient(problem, theta).items()}
    product = problem.space.zeros(1)
    columns = {name: x.unsqueeze(0) for name, x in v.items()}
    mode.hessian(problem, problem.loss_seed)(columns, product)
    scale = max(norm(theta), 1e-3) / max(norm(v), 1e-3)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    slopes = [_slope(problem, theta, v, step * scale) for step in (2 * eps**0.4, eps**0.4)]
    Hv = {name: x[0] for name, x in product.items()}
    error = min(_distance(Hv, slope) / max(norm(slope), 1e-30) for slope in slopes)
    if error <= 0.1:
        return
    if error <= 3 * _distance(*slopes) / max(norm(slopes[1]), 1e-30):
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


def _slope(problem: BatchProblem, theta: Tensors, v: Tensors, step: float) -> Columns:
    """Return the central difference of the gradient along ``v``."""
    moved = ({n: x + h * v[n].to(x.dtype) for n, x in theta.items()} for h in (step, -step))
    ahead, behind = (_gradient(problem, values) for values in moved)
    return {name: (ahead[name] - behind[name]) / (2 * step) for name in theta}


def _gradient(problem: BatchProblem, values: Tensors) -> Columns:
    """Return the gradient of the loss's sum at other values of the parameters, in float64."""
    leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
    evaluation = problem.evaluation(leaves, "once")
    with evaluation.active():
        loss, _ = problem.loss_sum(problem.output(evaluation))
        grads = vjp({"": loss}, {"": None}, leaves, retain=False)
    return {
        n: (torch.zeros_like(x) if (g := grads[n]) is None else g).double()
        for n, x in leaves.items()
    }


def _distance(one: Columns, two: Columns) -> float:
    return norm({name: one[name].double() - two[name] for name in one})
