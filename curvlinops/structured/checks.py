"""What tensors must be to become part of an operator."""

import torch
from torch import Tensor

from curvlinops.core.arguments import without_graph
from curvlinops.core.columns import not_finite


def real(tensor: Tensor, name: str, ndim: tuple[int, ...]) -> Tensor:
    """Return a tensor of numbers without its graph, in float32 or float64.

    Args:
        tensor: The tensor.
        name: What it is, for messages.
        ndim: How many axes it may have.

    Raises:
        TypeError: If it is no tensor of real floating-point numbers.
        ValueError: If it has another number of axes, NaN or infinite values, or requires gradients.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got a {type(tensor).__name__}.")
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be of a real floating-point dtype, got {tensor.dtype}.")
    if tensor.ndim not in ndim:
        raise ValueError(
            f"{name} must have {' or '.join(map(str, ndim))} axes, got shape {list(tensor.shape)}."
        )
    if not_finite({name: tensor}) is not None:
        raise ValueError(f"{name} contains NaN or infinite values.")
    tensor = without_graph(tensor, name).detach()
    return tensor if tensor.dtype == torch.float64 else tensor.float()
