"""Any operator and any matrix, read as one kind of thing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy.sparse import issparse, sparray, spmatrix
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.linear_operator.vectors import Vectors, is_native, to_columns
from curvlinops.support.arguments import without_graph
from curvlinops.support.progress import count_products

#: Multiplies several vectors ``[D, K]``.
Product = Callable[[Tensor], Tensor]

#: Matrices whose products are tensors.
TorchMatrix = TorchLinearOperator | Tensor
#: All matrices. Products of those that are not PyTorch's are numpy arrays.
AnyMatrix = TorchMatrix | LinearOperator | np.ndarray | sparray | spmatrix
#: What approximates a matrix's inverse: a matrix, or a function that multiplies by it.
Preconditioner = AnyMatrix | Product | None


class ForeignLinearOperator(TorchLinearOperator):
    """A matrix that is not of this package, as an operator that is.

    Args:
        shape: The matrix's shape.
        dtype: The type in which products are returned, float32 or float64.
        device: Where the matrix lives.
        multiply: Multiplies ``[columns, K]`` by the matrix.
        multiply_adjoint: Multiplies ``[rows, K]`` by its transpose.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        dtype: torch.dtype,
        device: torch.device,
        multiply: Product,
        multiply_adjoint: Product,
    ):
        rows, columns = shape
        self._multiply, self._multiply_adjoint = multiply, multiply_adjoint
        domain = ParameterSpace.flat(columns, dtype, device)
        super().__init__(domain, ParameterSpace.flat(rows, dtype, device))

    def _apply(self, columns: Columns) -> Columns:
        return {"": self._multiply(columns[""].T).T}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return {"": self._multiply_adjoint(columns[""].T).T}


class Matrix:
    """Any operator or matrix, multiplied with tensors, and the number of its products.

    Args:
        A: An operator of this package, any other scipy LinearOperator, or a matrix: a tensor, a
            numpy array, or a sparse matrix of scipy's.
        square: Whether the algorithm needs a square matrix.
        counted: Whether the solver's progress bar counts its products.

    Attributes:
        operator: ``A`` as an operator of this package.
        shape: Its shape.
        device: Where its products live.
        dtype: The type of its products, float32 or float64.
        num_products: Number of columns that were multiplied so far, by it or its adjoint.

    Raises:
        TypeError: If ``A`` is none of these, or complex.
        ValueError: If it is not a matrix, or not square though it must be.
    """

    def __init__(self, A: AnyMatrix, square: bool = False, counted: bool = True):
        self.operator = as_operator(A)
        self.shape: tuple[int, int] = tuple(self.operator.shape)
        self.device, self.dtype = self.operator.device, self.operator.torch_dtype
        self.num_products, self._counted = 0, counted
        self._takes_numpy = not isinstance(A, TorchLinearOperator | Tensor)
        if square and self.shape[0] != self.shape[1]:
            raise ValueError(f"The matrix must be square, got shape {list(self.shape)}.")

    def __matmul__(self, X: Tensor) -> Tensor:
        """Multiply vectors ``[columns, K]``.

        Fastest if each vector is contiguous, that is, if ``X`` is the transpose of a contiguous
        tensor.

        Raises:
            ValueError: If the product is not finite.
        """
        return self._multiply(self.operator, X)

    def adjoint_matmul(self, X: Tensor) -> Tensor:
        """Multiply vectors ``[rows, K]`` by the transpose."""
        return self._multiply(self.operator.T, X)

    def _multiply(self, operator: TorchLinearOperator, X: Tensor) -> Tensor:
        self.num_products += X.shape[1]
        out = operator @ X
        if self._counted:
            count_products(X.shape[1])
        if X.shape[1] and not_finite({"": out}) is not None:
            raise ValueError("A product with the matrix is not finite, though the vector is.")
        return out

    def read(self, x: Vectors) -> Tensor:
        """Return vectors ``[columns, K]`` that a user passed.

        Args:
            x: A numpy array or a tensor, ``[columns]`` or ``[columns, K]``; or a list or dictionary
                of tensors, one for each parameter.
        """
        without_graph(x, "The vector")
        domain = self.operator.domain
        return domain.join(to_columns(x if is_native(x) else np.array(x), domain)[0]).T

    def write(self, x: Tensor) -> Tensor | np.ndarray:
        """Return a result in the matrix's own kind.

        Returns:
            The tensor for an operator of this package or a tensor; a numpy array for any other
            scipy operator, a numpy array, or a sparse matrix of scipy's.
        """
        return x.cpu().numpy() if self._takes_numpy else x


def read_preconditioner(preconditioner: Preconditioner, matrix: Matrix) -> Matrix | None:
    """Return what approximates a matrix's inverse.

    Args:
        preconditioner: An operator or matrix; a function of vectors, see ``_of_function``; or
            ``None``.
        matrix: The matrix.

    Raises:
        ValueError: If it has another shape than the matrix, or other parameters.
    """
    if preconditioner is None:
        return None
    if callable(preconditioner) and not isinstance(preconditioner, LinearOperator):
        preconditioner = ForeignLinearOperator(
            matrix.shape,
            matrix.dtype,
            matrix.device,
            partial(_of_function, preconditioner),
            _no_adjoint,
        )
    found = Matrix(preconditioner, square=True, counted=False)
    matrix.operator.domain.check_compatible(found.operator.domain)
    return found


def _of_function(function: Product, X: Tensor) -> Tensor:
    """Apply a linear function to vectors ``[D, K]``.

    It gets them one by one, ``[D]``, since on several at once it may broadcast to a wrong result.
    If it does not take these, it gets all at once.
    """
    try:
        columns = [function(x.clone()) for x in X.T]
        takes_vectors = all(column.shape == X.shape[:1] for column in columns)
    except Exception:  # whatever it raises, it raises again below if it takes no vectors at all
        takes_vectors = False
    if takes_vectors:
        return torch.stack(columns, dim=1) if columns else X
    out = function(X.clone())
    if not isinstance(out, Tensor) or out.shape != X.shape:
        found = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ValueError(
            f"A function as preconditioner takes a tensor of shape {list(X.shape[:1])}, or "
            f"{list(X.shape)}, and returns one of the same shape; it returned {found}."
        )
    return out


def _no_adjoint(X: Tensor) -> Tensor:
    raise NotImplementedError(
        "The adjoint of the preconditioner, a function, is not known. Pass an operator or a matrix."
    )


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


def _wrap_tensor(A: Tensor) -> TorchLinearOperator:
    if A.ndim != 2:
        raise ValueError(f"A matrix has two axes, got shape {list(A.shape)}.")
    if A.is_complex():
        raise TypeError(f"The matrix must be real, got {A.dtype}.")
    narrow = A.is_floating_point() and A.dtype != torch.float64
    A = without_graph(A, "The matrix").detach().to(torch.float32 if narrow else torch.float64)
    if A.layout in (torch.strided, torch.sparse_coo):
        both = (A, A.T)
    else:  # compressed by rows they multiply fastest, but have no transpose
        both = (A.to_sparse_coo().to_sparse_csr(), A.to_sparse_coo().T.to_sparse_csr())
    products = (partial(torch.matmul, matrix) for matrix in both)
    return ForeignLinearOperator(tuple(A.shape), A.dtype, A.device, *products)


def _wrap_scipy(A: Any) -> TorchLinearOperator:
    dtype = np.dtype(A.dtype)
    if np.issubdtype(dtype, np.complexfloating):
        raise TypeError(f"The matrix must be real, got {dtype}.")
    narrow = np.issubdtype(dtype, np.floating) and dtype.itemsize < 8
    torch_dtype = torch.float32 if narrow else torch.float64

    products = (
        partial(_through_numpy, A, adjoint, _takes_blocks(A, adjoint), torch_dtype)
        for adjoint in (False, True)
    )
    return ForeignLinearOperator(A.shape, torch_dtype, torch.device("cpu"), *products)


def _takes_blocks(A: Any, adjoint: bool) -> bool:
    """Return whether a matrix of scipy's has a product of its own with several vectors.

    Otherwise scipy passes columns ``[D, 1]`` to a function that may be written for vectors ``[D]``,
    as scipy's own solvers pass them. It may fail on columns, or broadcast them to a wrong result.
    """
    if not isinstance(A, LinearOperator):
        return True
    operands = [part for part in getattr(A, "args", ()) if isinstance(part, LinearOperator)]
    if operands:  # of a sum, a product, a multiple, or a transpose
        return all(_takes_blocks(part, each) for part in operands for each in (False, True))
    name = "rmatmat" if adjoint else "matmat"
    private = f"_CustomLinearOperator__{name}_impl"  # of LinearOperator(shape, matvec, ...)
    if private in vars(A):
        return vars(A)[private] is not None
    return getattr(type(A), f"_{name}") is not getattr(LinearOperator, f"_{name}")


def _through_numpy(A: Any, adjoint: bool, blocks: bool, dtype: torch.dtype, X: Tensor) -> Tensor:
    X_numpy = X.cpu().numpy()
    if not blocks:
        out = _columns(A, adjoint, X_numpy)
    else:
        out = np.asarray((A.T if adjoint else A) @ X_numpy)
    if np.iscomplexobj(out):
        raise TypeError("A product with the matrix is complex; it must be real.")
    return torch.from_numpy(np.array(out)).to(X.device, dtype)


def _columns(A: LinearOperator, adjoint: bool, X: np.ndarray) -> np.ndarray:
    """Multiply vectors ``[columns, K]`` one by one."""
    if X.shape[1] == 0:
        return np.zeros((A.shape[1] if adjoint else A.shape[0], 0))
    try:
        return np.stack([A.rmatvec(x) if adjoint else A.matvec(x) for x in X.T], axis=1)
    except NotImplementedError as error:
        if not adjoint:
            raise
        raise NotImplementedError(
            f"Products with the transpose are needed, which the operator, a {type(A).__name__}, "
            "does not have. Give it rmatvec or rmatmat."
        ) from error
