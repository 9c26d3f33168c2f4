"""Products that autograd differentiates with respect to the vectors."""

from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.vectors import as_tensor, by_name
from curvlinops.support.arguments import MAPPINGS
from curvlinops.support.torch_internals import base_of


def product_with_graph(operator: Any, x: Any, adjoint: bool) -> Any:
    """Multiply a tensor, or a list or dictionary of tensors, of which some require gradients.

    Args:
        operator: A ``TorchLinearOperator``.
        x: The vectors.
        adjoint: Whether to multiply by the adjoint.
    """
    domain, codomain = operator._spaces_of(adjoint)
    # casts are recorded, so that gradients return in the vectors' own dtype
    if isinstance(x, Tensor):
        return _Product.apply(operator, adjoint, False, as_tensor(x, domain))
    tensors = (as_tensor(tensor, domain) for tensor in by_name(x, domain).values())
    out = list(_Product.apply(operator, adjoint, True, *tensors))
    if not isinstance(x, MAPPINGS):
        return out
    if not codomain.is_flat:
        return dict(zip(codomain.names, out, strict=True))
    (shape,) = codomain.shapes.values()
    return out[0].reshape(codomain.dim, *out[0].shape[len(shape) :])


class _Product(torch.autograd.Function):
    """``x -> A x``, whose derivative is linear, too: ``g -> A^T g``.

    Vectors are tensors of an operator's structure, or one tensor, not ``structured``.
    """

    @staticmethod
    def forward(ctx: Any, operator: Any, adjoint: bool, structured: bool, *vectors: Tensor) -> Any:
        ctx.operator, ctx.adjoint, ctx.structured = operator, adjoint, structured
        if not structured:
            return _clone_view(operator._product(*vectors, adjoint))
        return tuple(_clone_view(out) for out in operator._product(list(vectors), adjoint))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        x = list(gradients) if ctx.structured else gradients[0]
        try:
            out = ctx.operator._product(x, not ctx.adjoint)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The gradient of a product is a product with the adjoint. {error}"
            ) from error
        return None, None, None, *(out if ctx.structured else (out,))


def _clone_view(out: Tensor) -> Tensor:
    """Return a tensor that may be changed in place, which autograd refuses for views."""
    return out if base_of(out) is None else out.clone()
