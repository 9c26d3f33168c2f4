"""Products that autograd differentiates with respect to the vectors."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.vectors import check_finite
from curvlinops.support.torch_modes import default_modes


class Product(torch.autograd.Function):
    """``x -> A x``, whose derivative is linear, too: ``g -> A^T g``."""

    @staticmethod
    def forward(ctx: Any, operator: Any, columns: Tensor) -> Tensor:
        """Multiply columns, given a ``TorchLinearOperator``."""
        ctx.operator = operator
        # a copy, since autograd would not let users change views in place
        return operator._multiply(columns.detach()).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Multiply gradients by the adjoint."""
        try:
            with default_modes():
                check_finite(gradient, ctx.operator.codomain)
                return None, ctx.operator._adjoint()._multiply(gradient)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The gradient of a product is a product with the adjoint. {error}"
            ) from error
