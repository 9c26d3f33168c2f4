"""The squared error."""

from collections.abc import Callable

import torch
from torch import Tensor

from curvlinops.losses.base import LastAxisLoss
from curvlinops.support.norms import wide


class SquaredError(LastAxisLoss):
    """``l_t = k |z - y|^2`` with k = 1/C for "mean", 1 for "sum": ``torch.nn.MSELoss``."""

    def sum(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the sum over all terms."""
        return (
            self._inner_scale(output)
            * (wide(output) - target.to(output.device, wide(output).dtype)).square().sum()
        )

    def _gradient(self, z: Tensor, output: Tensor, target: Tensor) -> Tensor:
        return 2.0 * self._inner_scale(output) * (z - self._rows(target).to(z.dtype))

    def _hessian(self, z: Tensor, output: Tensor, target: Tensor) -> Callable[[Tensor], Tensor]:
        scale = 2.0 * self._inner_scale(output)
        return lambda v: scale * v

    def _hessian_sqrt(self, z: Tensor, output: Tensor, target: Tensor) -> Tensor:
        num_terms, num_features = z.shape
        eye = torch.eye(num_features, dtype=z.dtype, device=z.device)
        root = (2.0 * self._inner_scale(output)) ** 0.5
        return (root * eye).unsqueeze(1).expand(-1, num_terms, -1)

    def _sample(
        self,
        z: Tensor,
        output: Tensor,
        target: Tensor,
        num_samples: int,
        generator: torch.Generator,
    ) -> Tensor:
        noise = torch.randn(
            num_samples, *z.shape, generator=generator, dtype=z.dtype, device=z.device
        )
        return (2.0 * self._inner_scale(output)) ** 0.5 * noise
