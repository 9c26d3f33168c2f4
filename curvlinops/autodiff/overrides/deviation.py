"""Standard deviations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _std(*args: Any, **kwargs: Any) -> Tensor:
    """Return the root of the variance.

    PyTorch sets the derivatives of a standard deviation of zero to zero, also the second ones of
    its square, which are not. Those of the root are not finite, so that such products are refused.
    """
    return torch.var(*args, **kwargs).sqrt()


def _std_mean(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    variance, mean = torch.var_mean(*args, **kwargs)
    return variance.sqrt(), mean


DEVIATIONS: dict[Callable, Callable] = {
    torch.std: _std,
    Tensor.std: _std,
    torch.std_mean: _std_mean,
}
