"""Powers of two that bring numbers into float16's narrow range, and products back."""

from collections.abc import Mapping
from math import inf
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from curvlinops.core.functions import wide

#: What a tensor goes by.
Name = TypeVar("Name")


class Fit(NamedTuple):
    """Orders of the norms that become about one; ``None`` where vectors stay as they are.

    Attributes:
        vectors: Of the parameters' vectors, whose small entries count, too.
        outputs: Of what is backpropagated from outputs, over whose rows gradients are sums.
    """

    vectors: float | None = None
    outputs: float | None = None

    @classmethod
    def to(cls, dtypes: frozenset[torch.dtype]) -> "Fit":
        """Return what a graph needs through which derivatives pass in some dtypes."""
        return cls(inf, 2.0) if torch.float16 in dtypes else cls()

    def dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of vectors before they are fitted to tensors of a dtype."""
        return dtype if self.outputs is None else torch.promote_types(dtype, torch.float32)


def fitted(
    tensors: Mapping[Name, Tensor], order: float | None
) -> tuple[Mapping[Name, Tensor], Tensor | None]:
    """Return the parts of a vector, times a power of two, and this."""
    some = [tensor for tensor in tensors.values() if tensor.numel()]
    if order is None or not some:
        return tensors, None
    norms = [torch.linalg.vector_norm(x.detach(), order, dtype=torch.float64) for x in some]
    factor = reciprocal(torch.linalg.vector_norm(torch.stack(norms), order))
    return {name: wide(tensor) * factor for name, tensor in tensors.items()}, factor


def reciprocal(size: Tensor) -> Tensor:
    """Return the power of two by which a size becomes about one, for any size within 2^100."""
    return torch.exp2(-size.double().clamp(2.0**-100, 2.0**100).log2().round()).float()


def unfitted(
    products: Mapping[Name, Tensor | None], factor: Tensor | None
) -> dict[Name, Tensor | None]:
    """Return products with a vector that was multiplied by ``factor``, without it."""
    if factor is None:
        return dict(products)
    return {
        n: None if product is None else wide(product) / factor for n, product in products.items()
    }


def narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x``, in float32 or wider, in another dtype; not in float16, before it is fitted."""
    return x if dtype == torch.float16 else x.to(dtype)
