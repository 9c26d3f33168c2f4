"""The loss over lines and planes through the parameters."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from curvlinops.autodiff.model import Model
from curvlinops.linear_operator.space import Columns
from curvlinops.linear_operator.vectors import Vectors
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.torch_modes import in_default_modes


class LossAlong(NamedTuple):
    """Values of the loss along one or two directions; float64, on the CPU.

    Attributes:
        steps: The steps ``t`` along each direction, ``[S]``.
        losses: One direction ``v``: the losses ``L(theta + t v)``, ``[S]``. Two: the losses
            ``L(theta + steps[i] v_1 + steps[j] v_2)``, ``[S, S]``.
        quadratic: The quadratic approximations ``L(theta) + g^T d + d^T A d / 2`` at the same
            displacements ``d``, with the gradient g and the operator A; of the shape of ``losses``.
    """

    steps: Tensor
    losses: Tensor
    quadratic: Tensor


@in_default_modes
def loss_along(
    A: DataLinearOperator, directions: Vectors, steps: Iterable[float] | Tensor | np.ndarray
) -> LossAlong:
    """Evaluate the loss over steps along one or two directions from the present parameters.

    All steps share one pass over the data, with a forward pass for each step (for each pair of
    steps, if there are two directions) and batch. The model is evaluated with other tensors than
    its parameters, which stay as they are. The quadratic approximation takes a gradient and as many
    products as directions; for a unit eigenvector of the Hessian its curvature is the eigenvalue.

    Args:
        A: An operator with model, loss and data, such as ``HessianLinearOperator``.
        directions: One vector, ``[D]`` or ``[D, 1]``, or two, ``[D, 2]``, or lists or dictionaries
            of tensors, like the vectors that ``A`` multiplies. They are not normalized: a step is
            in units of the direction's length.
        steps: The steps, S numbers.

    Returns:
        A named tuple of ``steps``, ``losses`` and ``quadratic``. Losses that are not finite are
        returned as they are.

    Raises:
        TypeError: If ``A`` has no model, loss and data.
        ValueError: If the directions are not one or two vectors of the parameters, the steps are no
            finite numbers, ``A`` is not square, or its model is a function that uses the very
            tensors in ``params``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from curvlinops import HessianLinearOperator, eigsh, loss_along
        >>> model = nn.Linear(2, 1)
        >>> data = [(torch.randn(6, 2), torch.randn(6, 1))]
        >>> H = HessianLinearOperator(model, nn.MSELoss(), list(model.parameters()), data)
        >>> top = eigsh(H, k=1, seed=0).eigenvectors
        >>> curve = loss_along(H, top, torch.linspace(-1, 1, 11))
        >>> torch.allclose(curve.losses, curve.quadratic, rtol=1e-4)  # quadratic, as MSE is
        True
    """
    if not isinstance(A, DataLinearOperator):
        raise TypeError(
            f"loss_along needs an operator with model, loss and data, such as "
            f"HessianLinearOperator, got {type(A).__name__}."
        )
    if A.risk.loss is None or A.shape[0] != A.shape[1]:
        raise ValueError(
            f"loss_along needs a square operator with a loss, got {A!r}. Pass a "
            "HessianLinearOperator or a GGNLinearOperator."
        )
    if not A.risk.model.substitutable:
        raise ValueError(
            "The model is a function that uses the very tensors in params, so that it cannot be "
            "evaluated at others. Pass a Module, or a function (params, X) -> output with a "
            "dictionary as params."
        )
    A.space.check_whole(
        "the whole parameters that loss_along moves",
        "Leave them out of params, or load other values into the model, and call "
        "gradient_and_loss() of an operator.",
    )
    grid = _read_steps(steps)
    columns = A._read(directions).columns.detach()
    if len(columns) not in (1, 2):
        raise ValueError(f"directions must be one or two vectors, got {len(columns)}.")
    shape = (len(grid),) * len(columns)
    points = torch.cartesian_prod(*[grid] * len(columns)).reshape(-1, len(columns))
    losses = _losses(A, columns, points)
    return LossAlong(grid, losses.reshape(shape), _quadratic(A, columns, points).reshape(shape))


def _read_steps(steps: Iterable[float] | Tensor | np.ndarray) -> Tensor:
    """Return the steps, ``[S]``."""
    is_list = isinstance(steps, Iterable) and not isinstance(steps, Tensor | np.ndarray)
    values = list(steps) if is_list else steps
    grid = torch.as_tensor(values, dtype=torch.float64, device="cpu").detach()
    if grid.ndim != 1 or not len(grid) or not bool(grid.isfinite().all()):
        raise ValueError(
            f"steps must be a list of finite numbers, at least one, got shape {list(grid.shape)}"
            f"{'' if grid.isfinite().all() else ' with NaN or infinite values'}."
        )
    return grid


def _losses(A: DataLinearOperator, directions: Tensor, points: Tensor) -> Tensor:
    """Return the losses where combinations ``[P, K]`` of directions ``[K, D]`` lead."""
    sums = torch.zeros(len(points), dtype=torch.float64, device="cpu")
    coefficients = points.tolist()
    with (
        A._together("loss_along", directions, points=coefficients) as totals,
        A._batches("loss_along") as batches,
    ):
        columns = A.space.views(directions)
        for problem in batches:
            for i, point in enumerate(coefficients):
                value, share = _loss_sum(problem, columns, point)
                sums[i] += float(value)
            totals["weight"] += share
    return sum(A.risk.ranks.gather_objects(sums)) * A.risk.scale(totals["weight"])


def _loss_sum(
    problem: BatchProblem, directions: Columns, coefficients: list[float]
) -> tuple[Tensor, Tensor]:
    """Return the sum of a batch's terms at other parameters, and the batch's weight."""
    problem.at(_moved(problem.model, directions, coefficients))
    with problem.recording("once") as recording:
        value, weight = problem.loss_sum(recording.output)
    return value.detach(), weight


def _moved(model: Model, directions: Columns, coefficients: list[float]) -> dict[str, Tensor]:
    """Return the values of the model's parameters, moved along the directions."""
    values = {}
    for name, param in model.params.items():
        change = sum(c * column for c, column in zip(coefficients, directions[name], strict=True))
        values[name] = (param.detach() + change).to(param.dtype)
    return values


def _quadratic(A: DataLinearOperator, columns: Tensor, points: Tensor) -> Tensor:
    """Return the quadratic approximation at combinations ``[P, K]`` of directions ``[K, D]``."""
    gradient, loss = A.gradient_and_loss()
    g = A._read(gradient).columns[0]
    slopes = (columns @ g).double().cpu()
    curvatures = (columns @ (A @ columns.T)).double().cpu()
    return float(loss) + points @ slopes + ((points @ curvatures) * points).sum(1) / 2
