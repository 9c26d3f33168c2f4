"""Products that autograd differentiates with respect to the vectors."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import Columns
from curvlinops.linear_operator.vectors import check_finite
from curvlinops.support.torch_modes import default_modes


def product_with_graph(operator: Any, columns: Columns, adjoint: bool) -> Columns:
    """Multiply columns, as a part of autograd's graph.

    Args:
        operator: A ``TorchLinearOperator``.
        columns: Vectors of its domain; of its codomain for a product with the adjoint.
        adjoint: Whether to multiply by the adjoint.
    """
    out = _Product.apply(operator, adjoint, list(columns), *columns.values())
    return dict(zip(operator._spaces_of(adjoint)[1].names, out, strict=True))


class _Product(torch.autograd.Function):
    """``x -> A x``, whose derivative is linear, too: ``g -> A^T g``."""

    @staticmethod
    def forward(ctx: Any, operator: Any, adjoint: bool, names: list[str], *values: Tensor) -> tuple:
        ctx.operator, ctx.adjoint, ctx.names = operator, adjoint, names
        columns = {name: value.detach() for name, value in zip(names, values, strict=True)}
        out = operator._multiply_columns(columns, adjoint)
        # copies, since autograd would not let users change views in place
        return tuple(out[name].clone() for name in operator._spaces_of(adjoint)[1].names)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        operator, adjoint = ctx.operator, not ctx.adjoint
        columns = dict(zip(operator._spaces_of(adjoint)[0].names, gradients, strict=True))
        try:
            with default_modes():
                check_finite(columns)
                out = operator._multiply_columns(columns, adjoint)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The gradient of a product is a product with the adjoint. {error}"
            ) from error
        return None, None, None, *(out[name] for name in ctx.names)
