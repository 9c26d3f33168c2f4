"""Compares products through graphs with custom autograd functions, or hooks that change gradients.

PyTorch cannot know whether the backward of a custom function can be differentiated: it is any
Python code. Hooks on tensors count, too; hooks on nodes (``grad_fn.register_hook``) cannot be seen.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError, vjp
from curvlinops.autodiff.finite_differences import can_compare, check_derivative
from curvlinops.linear_operator.space import Columns, norm
from curvlinops.risk.batch_problem import BatchProblem, Recording
from curvlinops.support.norms import wide
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_internals import without_torch_function
from curvlinops.support.warnings import warn

#: Largest relative difference of an inner product that is computed in two ways.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}

Tensors = Mapping[str, Tensor]


def check_jacobian(
    problem: BatchProblem, recording: Recording, jvp: Callable[[Columns], Tensor]
) -> None:
    """Compare ``<w, J v>`` with ``<J^T w, v>``, whose ``J^T`` is an ordinary backward pass.

    Args:
        problem: The model on a batch.
        recording: Its forward pass.
        jvp: Multiplies columns with the Jacobian J of the output.

    Raises:
        NoDerivativeError: If they differ.
    """
    _, leaves, output = recording
    if problem.shards is not None:
        warn(
            "Products with the Jacobian are not compared with ordinary backward passes, since "
            f"parameters are sharded. The backward of {', '.join(problem.uncompared)} must be "
            "differentiable with respect to the gradient that it gets."
        )
        problem.was_compared({})
        return
    generator = torch.Generator(output.device).manual_seed(0)
    draw = {"generator": generator, "device": output.device}
    with without_torch_function():
        w = torch.randn(output.shape, dtype=output.dtype, **draw)
        v = {n: torch.randn((1, *x.shape), dtype=x.dtype, **draw) for n, x in leaves.items()}
    Jv, JTw = jvp(v)[0], vjp({"": output}, {"": w}, leaves)
    with without_torch_function():
        grads = {name: x for name, x in JTw.items() if x is not None}
        products = ({"": w}, {"": Jv}), ({name: v[name][0] for name in grads}, grads)
        is_right = bool(grads) and agree(*products, problem.precisions)
    if not is_right:
        raise NoDerivativeError(
            "The backward of a custom autograd.Function, or a hook that changes gradients (one of "
            f"{', '.join(problem.uncompared)}), cannot be differentiated with respect to the "
            "gradient that it gets, so that products with the Jacobian are wrong. Compute with "
            "PyTorch operations in it, and neither detach the gradient nor leave PyTorch. "
            "check_deterministic=False skips this comparison."
        )
    problem.was_compared(grads)


def agree(
    first: tuple[Tensors, Tensors],
    second: tuple[Tensors, Tensors],
    precisions: frozenset[torch.dtype] = frozenset(),
) -> bool:
    """Return whether two inner products are equal to rounding.

    Args:
        first: Two vectors, each as tensors by name.
        second: Two other vectors.
        precisions: Further dtypes in which the vectors were computed.
    """
    one, two = (
        float(sum(torch.dot(wide(x).reshape(-1), wide(ys[n]).reshape(-1)) for n, x in xs.items()))
        for xs, ys in (first, second)
    )
    dtypes = {x.dtype for tensors in (*first, *second) for x in tensors.values()} | precisions
    tolerance = max(_TOLERANCES.get(dtype, 0.1) for dtype in dtypes)
    error = abs(one - two) - tolerance * max(abs(one), abs(two))
    if error <= 0:
        return True
    rounding = 50 * max(torch.finfo(dtype).eps for dtype in dtypes)
    return error <= rounding * max(norm(xs) * norm(ys) for xs, ys in (first, second))


def check_hessian(problem: BatchProblem, apply: Callable[[Columns, Columns], Tensor]) -> None:
    """Compare a Hessian product with central differences of the gradient.

    Args:
        problem: Model and loss on a batch.
        apply: Multiplies one column with the batch's Hessian.

    Raises:
        RuntimeError: If they differ by more than rounding.
    """
    remedy = (
        "The backward of a custom autograd.Function, or a hook that changes gradients (one of "
        f"{', '.join(problem.uncompared)}), may not be differentiable. Make it differentiable, or "
        "build it from PyTorch operations. If the difference is meant, as in straight-through "
        "estimators, pass check_deterministic=False."
    )
    leaves, space = problem.leaves(), problem.space
    dtypes = {leaf.dtype for leaf in leaves.values()} | problem.precisions
    if problem.shards or not problem.can_substitute or not can_compare(dtypes):
        reason = "the model is a closure, is sharded, or computes with less than 32 bits"
        problem.was_compared({})
        warn(f"The Hessian product cannot be compared with differences: {reason}. {remedy}")
        return
    with preserved_rng():
        theta = space.join_rows({name: leaf.detach().unsqueeze(0) for name, leaf in leaves.items()})
        generator = torch.Generator(space.device).manual_seed(0)
        v, noise = space.join_rows(space.randn(2, generator)).split(1)
        grads = _gradients(problem, theta)
        # not along parameters whose gradient is zero by definition, such as rows of padding; others
        # may be zero by accident, but not at parameters nearby
        nearby = _gradients(problem, theta + 0.01 * (theta.abs().mean() + 0.01) * noise)
        v = torch.where(_joined(problem, nearby) == 0, 0.0, v)
        product = space.zeros(1)
        apply(space.split_rows(v), product)

        def function(x: Tensor) -> Tensor:
            return _joined(problem, _gradients(problem, x))

        what = f"The Hessian product on batch {problem.batch.index}"
        check_derivative(space.join_rows(product), function, theta, v, dtypes, what, remedy)
    problem.was_compared(grads)


def _gradients(problem: BatchProblem, theta: Tensor) -> dict[str, Tensor]:
    """Return the gradients of the loss's sum at flat parameters, ``[1, D]``, where there are."""
    columns = problem.space.split_rows(theta)
    leaves = {n: columns[n][0].to(x.dtype).requires_grad_() for n, x in problem.leaves().items()}
    evaluation = problem.evaluation(leaves, "once")
    with evaluation.active():
        loss, _ = problem.loss_sum(problem.output(evaluation))
        grads = vjp({"": loss}, {"": None}, leaves, retain=False)
    return {name: grad for name, grad in grads.items() if grad is not None}


def _joined(problem: BatchProblem, grads: dict[str, Tensor]) -> Tensor:
    """Return gradients as a vector ``[1, D]``."""
    zeros = problem.space.zeros(1)
    return problem.space.join_rows(
        zeros | {name: grad.unsqueeze(0) for name, grad in grads.items()}
    )
