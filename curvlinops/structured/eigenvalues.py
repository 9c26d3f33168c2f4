"""Functions of eigenvalues, and the checks that they need."""

from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.core.records import recorded

#: Eigenvalues below so many rounding errors of the largest one have less than half of the digits.
SLACK = 500.0


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


def singular(subject: str, values: Tensor, eps: float = 0.0) -> ValueError:
    """Return the error that a matrix has no inverse.

    Args:
        subject: The matrix.
        values: Its eigenvalues.
        eps: The rounding error of its entries, if that of another dtype.
    """
    is_double = max(eps, torch.finfo(values.dtype).eps) <= torch.finfo(torch.float64).eps
    return ValueError(
        f"{subject} is singular to working precision (eigenvalues from {float(values.min()):.2e} "
        f"to {float(values.max()):.2e}): its damping is zero, or less than their rounding errors. "
        "Add more, by inverse(damping) or as in A + damping * IdentityLinearOperator(A.space)"
        f"{'' if is_double else ', or compute in float64'}."
    )


def rounding(values: Tensor, slack: float = 0.0) -> Tensor:
    """Return how far computed eigenvalues of a matrix may be off, ``[...]``.

    Args:
        values: Eigenvalues, those of one matrix along the last axis.
        slack: How many rounding errors of the largest one it is at least.
    """
    if values.numel() == 0:
        return values.new_zeros(values.shape[:-1])
    size = max(values.shape[-1], slack)
    return size * torch.finfo(values.dtype).eps * values.abs().amax(-1)


def is_added(x: Tensor, shift: float | Tensor) -> bool:
    """Return whether what is added to numbers is not lost in their rounding."""
    added = (x + shift).to(x).double() - x.double()
    return bool(((added - shift).abs() <= 1e-3 * abs(shift)).all())


@recorded
class Floor(NamedTuple):
    """What is known of symmetric matrices' eigenvalues before these are computed; else nothing.

    Attributes:
        value: No eigenvalue is below, but for rounding; one for each group, ``[G, 1]``, or for all.
        eps: The rounding error of the entries, which may be wide by now.
    """

    value: float | Tensor = -inf
    eps: float = 0.0

    def noise(self, values: Tensor) -> Tensor:
        """Return by how much rounding of the entries is known to have moved eigenvalues, ``[G]``.

        What is farther below the floor than by rounding is no noise.

        Args:
            values: Computed eigenvalues ``[G, n]``.
        """
        if values.numel() == 0:
            return values.new_zeros(len(values))
        below = (self._of(values) - values.amin(-1, keepdim=True)).clamp(min=0).squeeze(-1)
        bound = (SLACK + values.shape[-1]) * self.eps * values.abs().amax(-1)
        return below.where(below <= bound, 0)

    def lift(self, values: Tensor) -> Tensor:
        """Return eigenvalues, ``[G, n]``, of which none is below the floor by rounding."""
        lifted = self.noise(values).unsqueeze(-1) > 0
        return values.maximum(self._of(values)).where(lifted, values)

    def _of(self, values: Tensor) -> Tensor:
        return torch.as_tensor(self.value, dtype=values.dtype, device=values.device)

    def scaled(self, scalar: float) -> "Floor":
        """Return the floor of a multiple."""
        return self._replace(value=scalar * self.value) if scalar > 0 else Floor()

    def shifted(self, shift: float | Tensor) -> "Floor":
        """Return the floor of the sum with multiples of the identity, see ``value``."""
        unknown = isinstance(self.value, float) and self.value == -inf
        return self if unknown else self._replace(value=self.value + shift)

    def rounded(self, dtype: torch.dtype) -> "Floor":
        """Return the floor after a conversion to another dtype."""
        return self._replace(eps=max(self.eps, torch.finfo(dtype).eps))


def signed_logarithm(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sign of the last axis' product, and the logarithm of its absolute value."""
    return values.sign().prod(-1), values.abs().log().sum(-1)
