"""The types of products and sums, for type checkers; SciPy's class of operators has none."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np
from torch import Tensor

from curvlinops.linear_operator.vectors import Array

if TYPE_CHECKING:
    from curvlinops.linear_operator.operator import TorchLinearOperator

    class LinearOperator:
        """What operators inherit from SciPy's class.

        SciPy has no annotations. Were its class the base, mypy would take operators for numbers,
        and ``2 * H`` for an integer.
        """

        shape: tuple[int, int]
        dtype: np.dtype
        ndim: int

        def adjoint(self) -> "TorchLinearOperator":
            """See ``H``."""

        def transpose(self) -> "TorchLinearOperator":
            """See ``T``."""

else:
    from scipy.sparse.linalg import LinearOperator

#: What an operator makes of a dictionary of tensors.
Named = TypeVar("Named", covariant=True)
#: An operator that keeps its structure.
Operator = TypeVar("Operator", bound="TorchLinearOperator", covariant=True)


class Product(Protocol[Named]):
    """The type of a product with an operator, or with vectors, which keep their kind."""

    @overload
    def __call__(self, x: "TorchLinearOperator", /) -> "TorchLinearOperator": ...
    @overload
    def __call__(self, x: Array, /) -> Array: ...
    @overload
    def __call__(self, x: Sequence[Tensor], /) -> list[Tensor]: ...
    @overload
    def __call__(self, x: Mapping[str, Tensor], /) -> Named: ...


class Multiple(Protocol[Operator]):
    """The type of a product with a number, or with another operator by ``*``."""

    @overload
    def __call__(self, x: float, /) -> Operator: ...
    @overload
    def __call__(self, x: "TorchLinearOperator", /) -> "TorchLinearOperator": ...


class Sum(Protocol):
    """The type of a sum of operators."""

    @overload
    def __call__(self, x: "TorchLinearOperator", /) -> "TorchLinearOperator": ...
    @overload
    def __call__(self, x: LinearOperator, /) -> LinearOperator: ...


def product_type(method: Callable[[Any, Any], Any]) -> Product[dict[str, Tensor]]:
    """Give a method the type of a product."""
    return method
