"""Products that autograd differentiates with respect to the vectors."""

from typing import Any, Protocol

import torch
from torch import Tensor

from curvlinops.core.arguments import MAPPINGS
from curvlinops.core.border import adopt, by_name
from curvlinops.core.space import ParameterSpace


class Multiplies(Protocol):
    """What autograd needs to know of an operator."""

    domain: ParameterSpace
    codomain: ParameterSpace

    def _product(self, x: Any, adjoint: bool) -> Any: ...


def product_with_graph(operator: Multiplies, x: Any, adjoint: bool) -> Any:
    """Multiply a tensor, or a list or dictionary of tensors, of which some require gradients."""
    domain, codomain = operator.domain, operator.codomain
    if adjoint:
        domain, codomain = codomain, domain
    if isinstance(x, Tensor):
        return _Product.apply(operator, adjoint, False, adopt(x, domain))
    values = by_name(x, domain).values()
    # casts are recorded, so that gradients return in the vectors' own dtype
    out = list(_Product.apply(operator, adjoint, True, *(adopt(value, domain) for value in values)))
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
    def forward(operator: Multiplies, adjoint: bool, structured: bool, *vectors: Tensor) -> Any:
        if not structured:
            return _own(operator._product(*vectors, adjoint))
        return tuple(_own(out) for out in operator._product(list(vectors), adjoint))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.operator, ctx.adjoint, ctx.structured, *_ = inputs

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

    @staticmethod
    def vmap(
        info: Any,
        in_dims: tuple,
        operator: Multiplies,
        adjoint: bool,
        structured: bool,
        *vectors: Tensor,
    ) -> Any:
        space = operator.codomain if adjoint else operator.domain
        ranks = [len(shape) for shape in space.shapes.values()] if structured else [1]
        parts = zip(vectors, in_dims[3:], strict=True)
        columns = [_as_columns(x, dim, info.batch_size) for x, dim in parts]
        several = any(x.ndim > 1 + rank for x, rank in zip(columns, ranks, strict=True))
        if several:  # of them for each of the batch
            columns = [x.flatten(-2) for x in columns]
        out = _Product.apply(operator, adjoint, structured, *columns)
        outs = list(out) if structured else [out]
        if several:
            outs = [x.unflatten(-1, (-1, info.batch_size)) for x in outs]
        return (tuple(outs), (-1,) * len(outs)) if structured else (outs[0], -1)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        if not ctx.structured:
            return _own(ctx.operator._product(tangents[3], ctx.adjoint))
        out = ctx.operator._product(list(tangents[3:]), ctx.adjoint)
        return tuple(_own(part) for part in out)


def _as_columns(x: Tensor, dim: int | None, num_columns: int) -> Tensor:
    """Return a tensor whose last axis is the one over which a function is vectorized."""
    if dim is None:
        return x.unsqueeze(-1).expand(*x.shape, num_columns)
    return x.movedim(dim, -1)


def _own(out: Tensor) -> Tensor:
    """Return a tensor that may be changed in place, which autograd refuses for views."""
    return out.clone() if out._is_view() else out
