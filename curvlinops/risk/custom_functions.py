"""Compares Hessian products with differences of gradients, if the graph has custom functions."""

import torch
from torch import Tensor

from curvlinops.autodiff.backward import vjp
from curvlinops.autodiff.finite_differences import can_compare, check_derivative
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import Apply
from curvlinops.support.rng import preserved_rng
from curvlinops.support.warnings import warn


def check_hessian(problem: BatchProblem, apply: Apply) -> None:
    """Compare a Hessian product with central differences of the gradient.

    For graphs with custom autograd functions, or hooks on tensors (hooks on nodes of the graph,
    ``grad_fn.register_hook``, cannot be seen).

    Args:
        problem: Model and loss on a batch.
        apply: Multiplies one column with the batch's Hessian.

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    names = ", ".join(problem.uncompared)
    remedy = (
        f"The backward of a custom autograd.Function, or a hook that changes gradients (one of "
        f"{names}), may not be differentiable. Make it differentiable, or build it from PyTorch "
        "operations. If the difference is meant, as in straight-through estimators, pass "
        "check_deterministic=False."
    )
    leaves, space = problem.leaves(), problem.space
    dtypes = {leaf.dtype for leaf in leaves.values()}
    if not problem.can_substitute or not can_compare(dtypes):
        reason = "the model is a closure, or has parameters of less than 32 bits"
        problem.was_compared({})
        warn(f"The Hessian product cannot be compared with differences: {reason}. {remedy}")
        return
    with preserved_rng():
        theta = space.join({name: leaf.detach().unsqueeze(0) for name, leaf in leaves.items()})
        generator = torch.Generator(space.device).manual_seed(0)
        v, noise = space.join(space.randn(2, generator)).split(1)
        grads = _gradients(problem, theta)
        # not along parameters whose gradient is zero by definition, such as rows of padding; others
        # may be zero by accident, but not at parameters nearby
        nearby = _gradients(problem, theta + 0.01 * (theta.abs().mean() + 0.01) * noise)
        v = torch.where(_joined(problem, nearby) == 0, 0.0, v)
        product = space.zeros(1)
        apply(space.split(v), product)

        def function(x: Tensor) -> Tensor:
            return _joined(problem, _gradients(problem, x))

        what = f"The Hessian product on batch {problem.batch.index}"
        check_derivative(space.join(product), function, theta, v, dtypes, what, remedy)
        problem.was_compared(grads)


def _gradients(problem: BatchProblem, theta: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the loss's sum at flat parameters, ``[1, D]``, where there are."""
    columns = problem.space.split(theta)
    leaves = {n: columns[n][0].to(x.dtype).requires_grad_() for n, x in problem.leaves().items()}
    evaluation = problem.evaluation(leaves, "once")
    with evaluation.active():
        loss, _ = problem.loss_sum(problem.output(evaluation))
        grads = vjp({"": loss}, {"": None}, leaves, retain=False)
    return {name: grad for name, grad in grads.items() if grad is not None}


def _joined(problem: BatchProblem, grads: dict[str, Tensor]) -> Tensor:
    """Return gradients as a vector ``[1, D]``."""
    zeros = problem.space.zeros(1)
    return problem.space.join(zeros | {name: grad.unsqueeze(0) for name, grad in grads.items()})
