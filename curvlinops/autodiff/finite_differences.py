"""Compares derivatives with central differences, where autograd cannot be trusted.

PyTorch cannot know whether the backward of a custom ``torch.autograd.Function`` can be
differentiated: it is any Python code. A backward that detaches, or uses what the forward kept
outside of the graph, gives a Hessian that lacks a part, without an error, and is still symmetric.
So does a hook that replaces a gradient, as in deep equilibrium models, and a fused loss that
computes its gradient in the forward pass.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from curvlinops.support.warnings import warn

#: The largest relative difference that rounding and the finite step may explain.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-2}


def can_compare(dtypes: Iterable[torch.dtype]) -> bool:
    """Return whether differences are accurate in these dtypes."""
    return set(dtypes) <= _TOLERANCES.keys()


def check_derivative(
    product: Tensor,
    function: Callable[[Tensor], Tensor],
    x: Tensor,
    v: Tensor,
    dtypes: Iterable[torch.dtype],
    what: str,
    remedy: str,
) -> None:
    """Compare a derivative along a vector with central differences, at two step sizes.

    Args:
        product: The derivative of the function at x along v.
        function: The function.
        x: Its argument.
        v: The direction.
        dtypes: The dtypes in which the function computes, see ``can_compare``.
        what: Names the derivative in messages.
        remedy: What helps if it is wrong.

    Raises:
        RuntimeError: If they differ by more than the errors of both.
    """
    dtypes = set(dtypes)
    tolerance = max(_TOLERANCES[dtype] for dtype in dtypes)
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    slopes = []
    for step in (2 * eps**0.4, eps**0.4):
        h = step * max(_norm(x), 1e-3) / max(_norm(v), 1e-3)
        slopes.append((function(x + h * v).double() - function(x - h * v).double()) / (2 * h))
    scale = max(_norm(slopes[1]), 1e-30)
    error = min(_norm(product.double() - slope) for slope in slopes) / scale
    uncertainty = 3 * _norm(slopes[0] - slopes[1]) / scale
    if error <= tolerance:
        return
    if error <= uncertainty:
        warn(f"{what} could not be compared: differences are too inaccurate. {remedy}")
        return
    raise RuntimeError(f"{what} is off by {error:.1e} from central differences. {remedy}")


def _norm(x: Tensor) -> float:
    return float(x.double().norm())
