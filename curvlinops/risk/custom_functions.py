"""Can the backward passes of the user's autograd functions be differentiated?

PyTorch cannot know: they are any Python code. A backward that detaches, or uses what the forward
kept outside of the graph, gives a Hessian that lacks a part, without an error, and is still
symmetric. So does a hook that replaces a gradient, as in deep equilibrium models.
"""

import torch

from curvlinops.autodiff.backward import Tensors, pull
from curvlinops.autodiff.mode_selection import Mode
from curvlinops.linear_operator.space import Columns, norm
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.warnings import warn


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
            f"The model has custom autograd functions, or hooks ({names}), and is a closure or has "
            "dtypes of less than 32 bits: whether they can be differentiated twice cannot be "
            "checked. If they cannot, the Hessian is wrong."
        )
        return
    v = problem.space.randn(1, torch.Generator(problem.space.device).manual_seed(0))
    # not along parameters whose gradient is zero by definition, such as rows of padding
    v = {n: torch.where(g == 0, 0.0, v[n][0]) for n, g in _gradient(problem, theta).items()}
    scale = max(norm(theta), 1e-3) / max(norm(v), 1e-3)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    product = problem.space.zeros(1)
    mode.hessian(problem, problem.loss_seed)(
        {name: x.unsqueeze(0) for name, x in v.items()}, product
    )
    slopes = [_slope(problem, theta, v, step * scale) for step in (2 * eps**0.4, eps**0.4)]
    Hv = {name: x[0] for name, x in product.items()}
    errors = [_distance(Hv, slope) / max(norm(slope), 1e-30) for slope in slopes]
    noise = _distance(*slopes) / max(norm(slopes[1]), 1e-30)
    if min(errors) <= 0.1:
        return
    if min(errors) <= 3 * noise:
        warn(
            f"Whether the custom autograd functions, or hooks, of the model ({names}) can be "
            "differentiated twice could not be checked: differences of the gradient are too "
            "inaccurate. If they cannot, the Hessian is wrong."
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
    ahead, behind = (
        _gradient(
            problem, {name: x + sign * step * v[name].to(x.dtype) for name, x in theta.items()}
        )
        for sign in (1, -1)
    )
    return {name: (ahead[name] - behind[name]) / (2 * step) for name in theta}


def _gradient(problem: BatchProblem, values: Tensors) -> Columns:
    """Return the gradient of the loss's sum at other values of the parameters, in float64."""
    leaves = {name: x.detach().requires_grad_() for name, x in values.items()}
    evaluation = problem.evaluation(leaves, "once")
    with evaluation.active():
        loss, _ = problem.loss_sum(problem.output(evaluation))
        grads = pull({"": loss}, {"": None}, leaves, retain=False)
    return {
        n: (torch.zeros_like(x) if (g := grads[n]) is None else g).double()
        for n, x in leaves.items()
    }


def _distance(one: Columns, two: Columns) -> float:
    return norm({name: one[name].double() - two[name] for name in one})
