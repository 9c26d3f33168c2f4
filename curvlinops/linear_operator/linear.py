"""Products with a scipy LinearOperator, of numpy arrays and tensors alike."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from curvlinops.linear_operator.columns import apart
from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.linear_operator.vector_gradients import product_with_graph
from curvlinops.linear_operator.vectors import is_ours, read
from curvlinops.support.arguments import has_graph
from curvlinops.support.torch_internals import in_transform
from curvlinops.support.torch_modes import default_modes, uncompiled

if TYPE_CHECKING:

    class LinearOperator:
        """What operators inherit from SciPy's class.

        SciPy has no annotations. Were its class the base, mypy would take operators for numbers,
        and ``2 * H`` for an integer.
        """

        shape: tuple[int, int]
        dtype: np.dtype
        ndim: int

        def adjoint(self) -> "LinearMap":
            """See ``H``."""

        def transpose(self) -> "LinearMap":
            """See ``T``."""

else:
    from scipy.sparse.linalg import LinearOperator

#: The kinds of single arrays.
Array = TypeVar("Array", Tensor, np.ndarray)


class VectorProduct(Protocol):
    """The type of a product with vectors, which returns the kind that came in."""

    @overload
    def __call__(self, x: Array, /) -> Array: ...
    @overload
    def __call__(self, x: Sequence[Tensor], /) -> list[Tensor]: ...
    @overload
    def __call__(self, x: Mapping[str, Tensor], /) -> dict[str, Tensor]: ...


def _multiplies(method: Callable[[Any, Any], Any]) -> VectorProduct:
    """Give a method the type of a product."""
    return method


class LinearMap(LinearOperator):
    """A real matrix whose products run in PyTorch; ``TorchLinearOperator`` without its algebra.

    Args:
        domain: The space of the vectors that the matrix takes.
        codomain: The space of the vectors that it returns. Default: ``domain``.
        self_adjoint: Whether the matrix equals its adjoint.
    """

    def __init__(
        self,
        domain: ParameterSpace,
        codomain: ParameterSpace | None = None,
        self_adjoint: bool = False,
    ):
        self.domain = domain
        self.codomain = domain if codomain is None else codomain
        self.self_adjoint = self_adjoint
        numpy_dtype = np.float64 if domain.dtype == torch.float64 else np.float32
        super().__init__(numpy_dtype, (self.codomain.dim, self.domain.dim))

    def _apply(self, columns: Columns) -> Columns:
        """Multiply vectors ``{name: [K, *shape]}`` of the domain by the operator."""
        raise NotImplementedError

    def _apply_adjoint(self, columns: Columns) -> Columns:
        """Multiply vectors of the codomain by the adjoint operator."""
        if self.self_adjoint:
            return self._apply(columns)
        raise NotImplementedError(f"{type(self).__name__} has no adjoint.")

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        """Multiply vectors that are zero outside of ``columns``; return the tensors ``names``."""
        out = self._apply(self.domain.fill(columns))
        return {name: out[name] for name in names}

    def _apply_adjoint_restricted(self, columns: Columns, names: list[str]) -> Columns:
        """Multiply vectors of the codomain, some of their tensors, by the adjoint."""
        out = self._apply_adjoint(self.codomain.fill(columns))
        return {name: out[name] for name in names}

    def _widened(self, dtype: torch.dtype) -> "LinearMap":
        """Return the matrix with products in ``dtype`` if it has no precision of its own."""
        return self

    @property
    def space(self) -> ParameterSpace:
        """The space of the vectors that the operator takes."""
        return self.domain

    @property
    def device(self) -> torch.device:
        """The device on which products are computed."""
        return self.domain.device

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of products, as a torch dtype."""
        return self.domain.dtype

    # --- products. scipy's public methods convert to numpy, so each is asked first

    @uncompiled
    def _product(self, x: Any, adjoint: bool = False) -> Any:
        if has_graph(x) and not in_transform():
            return product_with_graph(self, x, adjoint)
        domain, codomain = (self.codomain, self.domain) if adjoint else (self.domain, self.codomain)
        with default_modes():
            columns, write = read(x, domain)
            out = self._apply_adjoint(columns) if adjoint else self._apply(columns)
            codomain.check(out)
            return write(apart(out, columns), codomain)  # never the caller's memory

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        return self._product(np.asarray(x))

    def _rmatmat(self, x: np.ndarray) -> np.ndarray:
        return self._product(np.asarray(x), adjoint=True)

    _matvec = _matmat
    _rmatvec = _rmatmat

    @_multiplies
    def matvec(self, x: Any) -> Any:
        """Multiply one vector. See scipy's LinearOperator; takes tensors, too."""
        return self._product(x) if is_ours(x) else super().matvec(x)

    @_multiplies
    def matmat(self, X: Any) -> Any:
        """Multiply several vectors. See scipy's LinearOperator; takes tensors, too."""
        return self._product(X) if is_ours(X) else super().matmat(X)

    @_multiplies
    def rmatvec(self, x: Any) -> Any:
        """Multiply one vector by the adjoint."""
        return self._product(x, adjoint=True) if is_ours(x) else super().rmatvec(x)

    @_multiplies
    def rmatmat(self, X: Any) -> Any:
        """Multiply several vectors by the adjoint."""
        return self._product(X, adjoint=True) if is_ours(X) else super().rmatmat(X)
