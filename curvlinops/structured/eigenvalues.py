"""Functions of eigenvalues, and the checks that they need."""

import torch
from torch import Tensor


def powers(values: Tensor, exponent: float, subject: str = "The operator") -> Tensor:
    """Raise eigenvalues to a power.

    Negative ones that are zero to working precision, compared with the largest, count as zero.

    Args:
        values: Eigenvalues, those of one matrix along the last axis.
        exponent: The power.
        subject: What has these eigenvalues, for messages.

    Raises:
        ValueError: If a value that is not an integer is raised, or zero to a negative power.
    """
    if values.numel() == 0:
        return values.clone()
    if not float(exponent).is_integer():
        lowest = values.amin(-1)
        if bool((lowest < -rounding(values)).any()):
            raise ValueError(
                f"{subject} is not positive semidefinite (lowest eigenvalue "
                f"{float(lowest.min()):.2e}), so that its power {exponent:g} is not defined. Add "
                "damping."
            )
        values = values.clamp(min=0)
    if exponent < 0 and bool((values == 0).any()):
        raise ValueError(f"{subject} is singular and has no power {exponent:g}. Add damping.")
    return 1 / values if exponent == -1 else values**exponent


def rounding(values: Tensor) -> Tensor:
    """Return how far computed eigenvalues of a matrix may be off, ``[...]``.

    Args:
        values: Eigenvalues, those of one matrix along the last axis.
    """
    size = values.shape[-1]
    return size * torch.finfo(values.dtype).eps * values.abs().amax(-1)


def signed_logarithm(values: Tensor, dim: int = -1) -> tuple[Tensor, Tensor]:
    """Return the sign of a product of numbers, and the logarithm of its absolute value."""
    return values.sign().prod(dim), values.abs().log().sum(dim)
