"""Compares products through graphs with custom autograd functions, or hooks on gradients."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvlinops.autodiff.backward import vjp
from curvlinops.autodiff.custom_functions import (
    Gradient,
    Tensors,
    check_adjoint,
    check_derivative,
    directions,
)
from curvlinops.linear_operator.space import Columns
from curvlinops.risk.batch_problem import BatchProblem, Recording
from curvlinops.support.norms import double_norm
from curvlinops.support.rng import preserved_rng
from curvlinops.support.warnings import warn


def check_jacobian(
    problem: BatchProblem, recording: Recording, jvp: Callable[[Columns], Tensor]
) -> None:
    """Compare products with the Jacobian of the output with ordinary backward passes."""
    _, leaves, output = recording
    if problem.space.in_parts:
        warn(
            "Products with the Jacobian are not compared with ordinary backward passes, since "
            f"parameters are sharded. The backward of {', '.join(problem.uncompared)} must be "
            "differentiable with respect to the gradient that it gets."
        )
        problem.functions.were_compared(True)
        return

    def transposed(w: Tensor) -> dict[str, Tensor]:
        grads = vjp({"": output}, {"": w}, leaves)
        return {name: x for name, x in grads.items() if x is not None}

    def product(v: Tensors) -> Tensor:
        return jvp({name: x.unsqueeze(0) for name, x in v.items()})[0]

    what = (
        f"{_culprits(problem)} cannot be differentiated with respect to the gradient that it "
        "gets, or is not linear in it (it clips, or normalizes), so that products with the "
        "Jacobian are wrong. Compute with PyTorch operations in it, do not detach the gradient, "
        "and clip gradients outside of the model. check_deterministic=False skips this comparison."
    )
    dtypes = {x.dtype for x in (output, *leaves.values())} | problem.functions.precisions
    is_complete = check_adjoint(product, transposed, leaves, output, dtypes, what)
    problem.functions.were_compared(is_complete)


def check_hessian(problem: BatchProblem, apply: Callable[[Columns, Columns], Tensor]) -> None:
    """Compare products with the Hessian with central differences of the gradient."""
    remedy = (
        f"{_culprits(problem)} may not be differentiable. Make it differentiable, or build it from "
        "PyTorch operations. If the difference is meant, as in straight-through estimators, pass "
        "check_deterministic=False."
    )
    if problem.space.in_parts or not problem.model.substitutable:
        reason = "the model is a closure, or sharded"
        warn(f"The Hessian product cannot be compared with differences: {reason}. {remedy}")
        problem.functions.were_compared(True)
        return
    if not (problem.loss.is_function_of_values or problem.loss_needs_graph):
        # the loss compares its own Hessian: in that of the parameters, its parts are mixed
        alone = problem.evaluation(problem.constants(), "once").active()
        with preserved_rng(), alone as evaluation:
            problem.loss.hessian(problem.output(evaluation).detach(), problem.batch.y)

    def function(values: Tensors) -> dict[str, Tensor]:
        leaves = {name: x.clone().requires_grad_() for name, x in values.items()}
        with problem.evaluation(leaves, "once").active() as evaluation:
            loss, _ = problem.loss_sum(problem.output(evaluation))
            grads = vjp({"": loss}, {"": None}, leaves, retain=False)
        return {n: torch.zeros_like(values[n]) if x is None else x for n, x in grads.items()}

    def product(v: Tensors) -> dict[str, Tensor]:
        out = problem.space.views(problem.space.zeros(1))
        apply({name: x.unsqueeze(0) for name, x in v.items()}, out)
        return {name: x[0] for name, x in out.items()}

    def norms(gradient: Tensors) -> Tensor:
        return torch.stack([double_norm(x) for x in gradient.values()])

    at = {name: leaf.detach() for name, leaf in problem.leaves().items()}
    dtypes = {x.dtype for x in at.values()} | problem.functions.precisions
    with preserved_rng():
        near = {
            name: at[name] + 0.01 * (at[name].abs().mean() + 0.01) * z
            for name, z in directions(at, at, seed=0)
        }
        gradient = Gradient(at, near, function, product, norms)
        what = f"The Hessian product on batch {problem.batch.index}"
        is_complete = check_derivative(gradient, dtypes, what, remedy)
    problem.functions.were_compared(is_complete)


def _culprits(problem: BatchProblem) -> str:
    """Return the names of what is compared, for messages."""
    names = ", ".join(problem.uncompared)
    subject = "The backward of a custom autograd.Function, or a hook that changes gradients"
    return f"{subject} (one of {names}),"
