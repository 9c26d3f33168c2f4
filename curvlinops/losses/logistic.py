"""Binary cross-entropy with logits."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from curvlinops.losses.base import LastAxisLoss, constant
from curvlinops.support.norms import wide


class BinaryCrossEntropy(LastAxisLoss):
    """``torch.nn.BCEWithLogitsLoss`` with its ``weight`` and ``pos_weight``.

    With k = 1/C for "mean", 1 for "sum", a term's Hessian is diagonal,
    ``h = k w (pos_weight y + 1 - y) sigmoid(z) (1 - sigmoid(z))``.
    """

    def check(self, output: Tensor, target: Tensor) -> None:
        """Require equal shapes, and weights that do not depend on the sample."""
        super().check(output, target)
        for option in ("weight", "pos_weight"):
            value = getattr(self.module, option)
            if value is not None and value.ndim >= output.ndim and value.shape[:1] != (1,):
                raise ValueError(
                    f"BCEWithLogitsLoss's {option} of shape {list(value.shape)} has a batch axis "
                    f"(the output is {list(output.shape)}), so it belongs to one batch only. Give "
                    "it the shape of one sample."
                )

    def sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum over all terms."""
        z = wide(output)
        total = F.binary_cross_entropy_with_logits(
            z,
            target.to(z.dtype),
            weight=self._option("weight", z),
            pos_weight=self._option("pos_weight", z),
            reduction="sum",
        )
        return self._inner_scale(output) * total

    def _gradient(self, z: Tensor, output: Tensor, target: Tensor) -> Tensor:
        y = self._rows(target).to(z.dtype)
        weight, pos_weight = self._weights(output)
        scale = self._inner_scale(output) * weight
        return scale * ((1 - y) * z.sigmoid() - pos_weight * y * (-z).sigmoid())

    def _hessian(self, z: Tensor, output: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
        diagonal = self._scale(z, output, target) * _variance(z)
        return lambda v: diagonal * v

    def _hessian_sqrt(self, z: Tensor, output: Tensor, target: Tensor) -> Tensor:
        scale = self._sqrt_of_scale(self._scale(z, output, target, in_range=True))
        return torch.diag_embed(scale * _variance(z).sqrt()).movedim(-1, 0)

    def _sample(
        self,
        z: Tensor,
        output: Tensor,
        target: Tensor,
        num_samples: int,
        generator: torch.Generator,
    ) -> Tensor:
        sigmoid = z.sigmoid().expand(num_samples, *z.shape)
        labels = torch.bernoulli(sigmoid, generator=generator)
        scale = self._sqrt_of_scale(self._scale(z, output, target, in_range=True))
        return scale * torch.where(labels == 1, -(-z).sigmoid(), sigmoid)

    def _scale(self, z: Tensor, output: Tensor, target: Tensor, in_range: bool = False) -> Tensor:
        """Return the factor before ``sigmoid (1 - sigmoid)``, ``[T, C]``."""
        y = self._rows(target).to(z.dtype)
        if in_range and bool(((y < 0) | (y > 1)).any()):
            raise ValueError(
                "BCEWithLogitsLoss has targets outside [0, 1], which are no probabilities."
            )
        weight, pos_weight = self._weights(output)
        return self._inner_scale(output) * weight * (pos_weight * y + 1 - y)

    def _weights(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Return weight and pos_weight of each entry, as rows."""
        options = [self._option(option, wide(output)) for option in ("weight", "pos_weight")]
        ones = torch.ones((), dtype=wide(output).dtype, device=output.device)
        filled = [ones if option is None else option for option in options]
        weight, pos_weight = (self._rows(option.expand(output.shape)) for option in filled)
        return weight, pos_weight

    def _option(self, name: str, z: Tensor) -> Tensor | None:
        return constant(getattr(self.module, name), z)


def _variance(z: Tensor) -> Tensor:
    """Return ``sigmoid (1 - sigmoid)``, also where the sigmoid rounds to one."""
    return z.sigmoid() * (-z).sigmoid()
