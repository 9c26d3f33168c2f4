"""Products that autograd differentiates with respect to the vectors."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns
from curvlinops.linear_operator.vectors import check_finite
from curvlinops.support.torch_modes import default_modes


def product_with_graph(operator: Any, columns: Columns) -> Columns:
    """Multiply columns, as a part of autograd's graph.

    Args:
        operator: A ``TorchLinearOperator``.
        columns: Vectors of its domain.
    """
    out = _Product.apply(operator, list(columns), *columns.values())
    return dict(zip(operator.codomain.names, out, strict=True))


class _Product(torch.autograd.Function):
    """``x -> A x``, whose derivative is linear, too: ``g -> A^T g``."""

    @staticmethod
    def forward(ctx: Any, operator: Any, names: list[str], *values: Tensor) -> tuple:
        ctx.operator, ctx.names = operator, names
        columns = {name: value.detach() for name, value in zip(names, values, strict=True)}
        out = operator._multiply_columns(columns)
        # copies, since autograd would not let users change views in place
        return tuple(out[name].clone() for name in operator.codomain.names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        columns = dict(zip(ctx.operator.codomain.names, gradients, strict=True))
        try:
            with default_modes():
                check_finite(columns)
                out = ctx.operator._adjoint()._multiply_columns(columns)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The gradient of a product is a product with the adjoint. {error}"
            ) from error
        return None, None, *(out[name] for name in ctx.names)
