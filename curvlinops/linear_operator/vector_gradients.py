"""Products that autograd differentiates with respect to the vectors."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.linear_operator.space import Columns
from curvlinops.linear_operator.vectors import check_finite
from curvlinops.support.torch_modes import default_modes


def multiply_columns(operator: Any, columns: Columns, adjoint: bool) -> Columns:
    """Multiply columns; if autograd follows some of them, it follows the product, too.

    Args:
        operator: A ``TorchLinearOperator``.
        columns: Vectors of its domain, or of its codomain.
        adjoint: Whether to multiply by the adjoint.

    Returns:
        The product, which shares no memory with ``columns``.
    """
    if not any(map(_is_followed, columns.values())):
        return _multiply(operator, columns, adjoint)
    out = _Product.apply(operator, adjoint, list(columns), *columns.values())
    return dict(zip(_space_of_product(operator, adjoint).names, out, strict=True))


def _multiply(operator: Any, columns: Columns, adjoint: bool) -> Columns:
    space = _space_of_product(operator, adjoint)
    out = operator._apply_adjoint(columns) if adjoint else operator._apply(columns)
    space.check(out)
    taken = {column.untyped_storage().data_ptr() for column in columns.values()}
    return {
        name: out[name].clone() if out[name].untyped_storage().data_ptr() in taken else out[name]
        for name in space.shapes
    }


def _space_of_product(operator: Any, adjoint: bool) -> Any:
    return operator.domain if adjoint else operator.codomain


def _is_followed(column: Tensor) -> bool:
    return column.requires_grad or forward_ad.unpack_dual(column).tangent is not None


class _Product(torch.autograd.Function):
    """``x -> A x``, whose derivative is linear, too: ``g -> A^T g``."""

    @staticmethod
    def forward(ctx: Any, operator: Any, adjoint: bool, names: list[str], *values: Tensor) -> tuple:
        ctx.operator, ctx.adjoint, ctx.names = operator, adjoint, names
        columns = {name: value.detach() for name, value in zip(names, values, strict=True)}
        # no views, which autograd would not let users change in place
        return tuple(column.clone() for column in _multiply(operator, columns, adjoint).values())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        names = _space_of_product(ctx.operator, ctx.adjoint).names
        columns = dict(zip(names, gradients, strict=True))
        try:
            with default_modes():
                check_finite(columns)
                out = multiply_columns(ctx.operator, columns, not ctx.adjoint)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The gradient of a product is a product with the adjoint. {error}"
            ) from error
        return None, None, None, *(out[name] for name in ctx.names)
