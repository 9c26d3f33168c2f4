"""Reads operators and matrices of any kind as one kind of object for all algorithms."""

from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse, sparray, spmatrix
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace, not_finite
from curvlinops.linear_operator.vectors import Given, Vectors, is_native
from curvlinops.support.arguments import without_graph

#: A function that multiplies vectors.
Product = Callable[[Tensor], Tensor]
#: All operators and matrices that algorithms take.
AnyMatrix = TorchLinearOperator | Tensor | LinearOperator | np.ndarray | sparray | spmatrix
#: An approximate inverse: an operator, a matrix, or a function that multiplies a vector ``[D]``.
Preconditioner = AnyMatrix | Product | None


class Matrix:
    """An operator or matrix of any kind; it multiplies tensors and counts the products.

    ``operator`` is the same as an operator of this package, and ``num_products`` the number of
    vectors multiplied so far, by the matrix or its transpose.
    """

    def __init__(self, A: AnyMatrix, square: bool = False):
        self.operator = as_operator(A)
        self.shape: tuple[int, int] = tuple(self.operator.shape)
        self.device, self.dtype = self.operator.device, self.operator.torch_dtype
        self.space = self.operator.domain
        if self.space.in_parts != self.operator.codomain.in_parts:
            raise TypeError(
                f"The rows of {type(self.operator).__name__} belong to single processes, but its "
                "parameters are sharded. Algorithms need vectors that all processes share: pass a "
                "square operator with process_group, such as a GGNLinearOperator."
            )
        self.num_products = 0
        if square and self.shape[0] != self.shape[1]:
            raise ValueError(f"The matrix must be square, got shape {list(self.shape)}.")

    def __matmul__(self, X: Tensor) -> Tensor:
        """Multiply vectors ``[columns, K]``; refuse products that are not finite.

        The product is fastest if ``X`` is the transpose of a contiguous tensor.
        """
        return self._multiply(X, self.operator)

    def adjoint_matmul(self, X: Tensor) -> Tensor:
        """Multiply vectors ``[rows, K]`` by the transpose."""
        return self._multiply(X, self._adjoint)

    @cached_property
    def _adjoint(self) -> TorchLinearOperator:
        return self.operator.T

    def _multiply(self, X: Tensor, operator: TorchLinearOperator) -> Tensor:
        self.num_products += X.shape[1]
        out = operator._multiply_columns(X.T).T
        if X.shape[1] and self.space.any(not_finite({"": out}) is not None):
            raise ValueError("A product with the matrix is not finite, though the vector is.")
        return out

    def read(self, x: Vectors) -> Given:
        """Return a user's vectors, an array or a tensor for each parameter, as columns."""
        without_graph(x, "The vector")
        return self.operator._read(x if is_native(x) else np.array(x))


def as_operator(A: AnyMatrix) -> TorchLinearOperator:
    """Return any operator or matrix as an operator of this package."""
    if isinstance(A, TorchLinearOperator):
        return A
    if isinstance(A, Tensor):
        return _wrap_tensor(A)
    if isinstance(A, LinearOperator) or issparse(A):
        return _wrap_scipy(A)
    if isinstance(A, np.ndarray):
        return _wrap_tensor(torch.from_numpy(np.array(A)))
    raise TypeError(f"Expected a LinearOperator, a tensor, or an array, got a {type(A).__name__}.")


def read_preconditioner(preconditioner: Preconditioner, A: Matrix) -> TorchLinearOperator | None:
    """Return a preconditioner of a matrix, which may be a function of vectors ``[D]``."""
    if preconditioner is None:
        return None
    if callable(preconditioner) and not isinstance(preconditioner, LinearOperator):
        products = (partial(_apply_function, preconditioner), _no_adjoint)
        operator = ForeignLinearOperator(A.shape, A.dtype, A.device, *products)
    elif getattr(preconditioner, "ndim", 2) == 1:
        raise ValueError(
            f"preconditioner has shape {list(preconditioner.shape)}, expected a matrix. Pass "
            "DiagonalLinearOperator(d) for a diagonal d, or a function such as lambda v: d * v."
        )
    else:
        operator = Matrix(preconditioner, square=True).operator
    A.operator.domain.check_compatible(operator.domain)
    return operator


class ForeignLinearOperator(TorchLinearOperator):
    """Wraps a matrix from outside as an operator of this package.

    Its functions multiply ``[columns, K]`` by it, and ``[rows, K]`` by its transpose.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        multiply: Product,
        multiply_adjoint: Product,
        operands: tuple[TorchLinearOperator, ...] = (),
    ):
        rows, columns = shape
        self._own_operands = operands
        self._multiply_vectors, self._multiply_adjoint = multiply, multiply_adjoint
        domain = ParameterSpace.flat(columns, dtype, device)
        super().__init__(domain, ParameterSpace.flat(rows, dtype, device))

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return self._own_operands

    def _apply(self, columns: Tensor) -> Tensor:
        return self._multiply_vectors(columns.T).T

    def _transposed(self) -> "ForeignLinearOperator":
        products = self._multiply_adjoint, self._multiply_vectors
        return ForeignLinearOperator(
            self.shape[::-1], self.torch_dtype, self.device, *products, self._own_operands
        )


def _wrap_tensor(A: Tensor) -> TorchLinearOperator:
    if A.ndim != 2:
        raise ValueError(f"A matrix has two axes, got shape {list(A.shape)}.")
    if A.is_complex():
        raise TypeError(f"The matrix must be real, got {A.dtype}.")
    narrow = A.is_floating_point() and A.dtype != torch.float64
    A = without_graph(A, "The matrix").detach().to(torch.float32 if narrow else torch.float64)
    if A.layout is not torch.strided:
        A = A.to_sparse_coo()  # compressed formats have no transpose
    products = (partial(torch.matmul, matrix) for matrix in (A, A.T))
    operator = ForeignLinearOperator(tuple(A.shape), A.dtype, A.device, *products)
    operator.self_adjoint = A.layout is torch.strided and torch.equal(A, A.T)
    return operator


def _wrap_scipy(A: Any) -> TorchLinearOperator:
    dtype = np.dtype(A.dtype)
    if np.issubdtype(dtype, np.complexfloating):
        raise TypeError(f"The matrix must be real, got {dtype}.")
    narrow = np.issubdtype(dtype, np.floating) and dtype.itemsize < 8
    torch_dtype = torch.float32 if narrow else torch.float64
    products = (partial(_multiply_numpy, A, adjoint, torch_dtype) for adjoint in (False, True))
    operands = tuple(operators_in(A))
    return ForeignLinearOperator(A.shape, torch_dtype, torch.device("cpu"), *products, operands)


def operators_in(A: Any) -> Iterator[TorchLinearOperator]:
    """Yield the operators of this package in SciPy's sums, products and multiples."""
    stack = [A]
    while stack:
        if isinstance(A := stack.pop(), TorchLinearOperator):
            yield A
        elif isinstance(A, LinearOperator):
            stack += getattr(A, "args", ())


def _multiply_numpy(A: Any, adjoint: bool, dtype: torch.dtype, X: Tensor) -> Tensor:
    """Multiply vectors ``[D, K]`` by a SciPy matrix or its transpose."""
    X_numpy = X.cpu().numpy()
    if X.shape[1] == 0:
        out = np.zeros((A.shape[1] if adjoint else A.shape[0], 0))
    elif isinstance(A, LinearOperator) and not _takes_columns(A, adjoint):
        out = _multiply_vectors(A, adjoint, X_numpy)
    else:
        out = np.asarray((A.T if adjoint else A) @ X_numpy)
    if np.iscomplexobj(out):
        raise TypeError("A product with the matrix is complex; it must be real.")
    return torch.from_numpy(np.array(out)).to(X.device, dtype)


def _takes_columns(A: LinearOperator, adjoint: bool) -> bool:
    """Return whether a user's class implements products with several vectors.

    SciPy's own classes pass columns ``[D, 1]`` to functions that may be written for vectors
    ``[D]``, and these may broadcast a column to a wrong result.
    """
    kind, name = type(A), "_rmatmat" if adjoint else "_matmat"
    is_own = getattr(kind, name) is not getattr(LinearOperator, name)
    return is_own and not kind.__module__.startswith("scipy.")


def _multiply_vectors(A: LinearOperator, adjoint: bool, X: np.ndarray) -> np.ndarray:
    """Multiply vectors ``[D, K]`` one by one."""
    try:
        return np.stack([A.rmatvec(x) if adjoint else A.matvec(x) for x in X.T], axis=1)
    except NotImplementedError as error:
        if not adjoint:
            raise
        raise NotImplementedError(
            f"The algorithm multiplies by the transpose, which the {type(A).__name__} does not "
            "have. Give it rmatvec."
        ) from error


def _apply_function(function: Product, X: Tensor) -> Tensor:
    """Apply a linear function of vectors ``[D]`` to vectors ``[D, K]``, one by one."""
    columns = [function(x.clone()) for x in X.T]  # the function may work in place
    for out in columns:
        if not isinstance(out, Tensor) or out.shape != X.shape[:1]:
            found = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"A function as preconditioner takes and returns one vector, of shape "
                f"{list(X.shape[:1])}; it returned {found}."
            )
    return torch.stack(columns, dim=1) if columns else X


def _no_adjoint(X: Tensor) -> Tensor:
    raise NotImplementedError(
        "A function as preconditioner has no adjoint. Pass an operator or a matrix."
    )
