"""The scipy LinearOperator that multiplies numpy arrays and tensors alike, and its algebra."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import lru_cache, reduce
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar, overload

import numpy as np
import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.linear_operator.vectors import (
    Array,
    Given,
    check_finite,
    is_followed,
    is_native,
    is_scalar,
    read,
)
from curvlinops.support.arguments import (
    as_integer,
    changed,
    check_count,
    check_number,
    nearest,
    without_graph,
)
from curvlinops.support.torch_modes import default_modes, in_default_modes, uncompiled
from curvlinops.team.team import Team, largest

if TYPE_CHECKING:  # SciPy has no annotations: mypy would take operators for numbers

    class LinearOperator:
        """SciPy's class."""
else:
    from scipy.sparse.linalg import LinearOperator

#: The largest matrix that ``to_dense`` writes, in bytes.
_LARGEST_DENSE = 4 * 2**30
#: Bytes of vectors that ``to_dense`` multiplies at once.
_DENSE_BLOCK = 64 * 2**20


@contextmanager
def all_linearized(*operators: "TorchLinearOperator") -> Iterator[None]:
    """Linearize operators."""
    with ExitStack() as stack:
        for operator in operators:
            stack.enter_context(operator.linearized())
        yield


def raised_in_all(*operators: "TorchLinearOperator") -> AbstractContextManager[None]:
    """Return a context that raises an error in all processes that multiply together.

    Not if they have parts of vectors: then they communicate between products, too.
    """
    are_whole = not any(operator.domain.in_parts for operator in operators)
    return largest(x._team for x in operators if are_whole).raise_on_all_ranks()


_SOLVE = "Solve with CGInverseLinearOperator(A), or MINRESInverseLinearOperator(A)."

#: Methods that only operators with structure have, and what to call instead.
_OF_STRUCTURE = {
    "trace": "Estimate it by xtrace(A, n) or hutchinson_trace(A, n).",
    "diagonal": "Estimate it by xdiag(A, n) or hutchinson_diag(A, n); GGNDiagonalLinearOperator "
    "computes that of the GGN.",
    "frobenius_norm": "Estimate its square by hutchinson_squared_fro(A, n).",
    "logdet": "Estimate it by lanczos_logdet(A).",
    "det": "Estimate its logarithm by lanczos_logdet(A).",
    "eigh": "Compute k eigenpairs by eigsh(A, k), or all by torch.linalg.eigh(A.to_dense()).",
    "eigvalsh": "Compute k of them by eigsh(A, k), or all by torch.linalg.eigvalsh(A.to_dense()).",
    "inverse": _SOLVE,
    "solve": _SOLVE,
}

#: Attributes that people look for, and what to write instead.
REMEDIES = {
    **dict.fromkeys(("spectrum", "density"), "Call lanczos_approximate_spectrum(A, ncv)."),
    **dict.fromkeys(("hvp", "vhp", "mvp", "mv"), "Write A @ x."),
    **{
        name: f"Only operators with structure have it, such as KFACLinearOperator. {remedy}"
        for name, remedy in _OF_STRUCTURE.items()
    },
    **dict.fromkeys(
        ("eigenvalues", "eigvals"),
        "Compute k of them by eigsh(A, k); operators with structure have A.eigvalsh().",
    ),
    **dict.fromkeys(
        ("dense", "matrix", "todense", "toarray", "numpy"),
        "A.to_dense() is the matrix as a tensor.",
    ),
    "diag": f"Operators with structure have diagonal(). For others: {_OF_STRUCTURE['diagonal']}",
    **dict.fromkeys(("to", "cuda", "cpu"), "Call A.to_device(device)."),
    **dict.fromkeys(("double", "float"), "Convert the model, and build the operator anew."),
    "inv": f"Operators with structure have A.inverse(). For others: {_SOLVE}",
    "gradient_and_loss": "Call it on the operators on data of which this one is made, and add up.",
}


@lru_cache
def _keywords_of(cls: type) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class's constructor."""
    return inspect.signature(cls).parameters


#: The product with a dictionary of tensors.
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


class Combined(Protocol[Operator]):
    """The type of a sum, or of a multiple."""

    def __call__(self, x: "float | LinearOperator", /) -> Operator:
        """Combine with a number, or an operator."""


def _product_type(method: Callable[[Any, Any], Any]) -> Product[dict[str, Tensor]]:
    """Give a method the type of a product."""
    return method


class TorchLinearOperator(LinearOperator):
    """A real linear operator whose products run in PyTorch.

    ``A @ x`` takes numpy arrays, tensors, and lists or dictionaries of tensors, and returns the
    same kind; tensors never leave the operator's device. Sums, multiples, products, powers and
    adjoints of such operators are operators of this class; with other scipy operators they are
    scipy operators.

    Products can be differentiated with respect to the vectors, but not with respect to the tensors
    of the operator. This takes an adjoint.

    A subclass implements ``_apply``, and ``_transposed`` unless it is self-adjoint; and
    ``_operands`` if it multiplies with other operators.

    Args:
        domain: The space of the vectors that the operator takes.
        codomain: The space of the vectors that it returns. Default: ``domain``.
        self_adjoint: Whether the operator equals its adjoint.
    """

    shape: tuple[int, int]
    dtype: np.dtype
    ndim: int
    T: "TorchLinearOperator"
    H: "TorchLinearOperator"

    def __init_subclass__(cls, **options: Any):
        super().__init_subclass__(**options)
        # construction is not compiled, either; dataclasses generate __init__ only later
        for name in {"__init__", "__post_init__"} & vars(cls).keys():
            setattr(cls, name, uncompiled(vars(cls)[name]))

    @uncompiled
    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Refuse unknown keywords by what to do instead."""
        for name in kwargs.keys() - _keywords_of(cls).keys():
            known = _keywords_of(cls)
            if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
                raise TypeError(f"{cls.__name__} has no option '{name}'. {nearest(name, known)}")
        return super().__new__(cls)

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

    if not TYPE_CHECKING:  # type checkers know that other names are missing

        def __getattr__(self, name: str) -> Any:
            """Refuse attributes that people look for by what to write instead."""
            remedy = REMEDIES.get(name)
            if remedy is None and name in sys.modules["curvlinops"].__all__:
                remedy = f"Write curvlinops.{name}(...)."
            if remedy is not None:
                raise AttributeError(f"{type(self).__name__} has no '{name}'. {remedy}")
            return self.__getattribute__(name)  # raises the error of Python, or of a property

    # --- what a subclass implements

    def _apply(self, columns: Tensor) -> Tensor:
        """Multiply K vectors, ``[K, domain.dim]``; return ``[K, codomain.dim]``.

        ``domain.views(columns)`` has their tensors by name. If processes have parts of vectors,
        these are this one's parts.
        """
        raise NotImplementedError

    def _transposed(self) -> "TorchLinearOperator":
        """Return the adjoint; asked only if the operator is not self-adjoint."""
        raise NotImplementedError(f"{type(self).__name__} has no adjoint.")

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> "TorchLinearOperator":
        """Return the rows and columns of some tensors; products may compute these alone."""
        return PartLinearOperator(self, rows, columns)

    def _operands(self) -> "tuple[TorchLinearOperator, ...]":
        """Return the operators that this one multiplies with, see ``linearized``."""
        return ()

    @property
    def _team(self) -> Team:
        """The processes that multiply together: of several teams, the largest."""
        return largest([self.domain.team, *(operand._team for operand in self._operands())])

    @property
    def _begins_with_gather(self) -> bool:
        """Whether processes that multiply together first communicate by a gather of objects.

        An error in one of them, before its product, is then raised in all.
        """
        in_parts = self.domain.in_parts or self.codomain.in_parts
        together = [x for x in self._operands() if x._team.size > 1]
        is_one_group = len({x._team.group for x in together}) <= 1
        return not in_parts and is_one_group and all(x._begins_with_gather for x in together)

    def _reading_together(self) -> AbstractContextManager[None]:
        """Raise an error before a product in all processes that multiply together."""
        team = self._team
        is_sent = team.size > 1 and self._begins_with_gather
        return team.sending() if is_sent else team.raise_on_all_ranks()

    # --- products. scipy's public methods convert to numpy, so each is asked first

    @in_default_modes
    def _product(self, x: Any) -> Any:
        """Multiply vectors of any kind."""
        given = self._read(x)
        return given.write(self._multiply(given.columns), self.codomain)

    def _read(self, x: Any) -> Given:
        """Read vectors; an error in one process is raised in all that multiply together."""
        with self._reading_together():
            return read(x, self.domain)

    @in_default_modes
    def _multiply_columns(self, columns: Tensor) -> Tensor:
        """Multiply columns ``[K, dim]``, of which this process may have parts."""
        with self._reading_together():
            columns = columns.to(self.device, self.torch_dtype)
            check_finite(columns, self.domain)
        return self._multiply(columns)

    def _multiply(self, columns: Tensor) -> Tensor:
        """Multiply columns; return columns in memory of their own."""
        if is_followed(columns):
            return _Differentiable.apply(self, columns)
        out = self._checked_apply(columns)
        is_alias = out.untyped_storage().data_ptr() == columns.untyped_storage().data_ptr()
        return out.clone() if is_alias else out

    def _checked_apply(self, columns: Tensor) -> Tensor:
        """Multiply columns; refuse products of another shape, which a subclass may return."""
        out, expected = self._apply(columns), (len(columns), self.codomain.local_dim)
        if tuple(out.shape) != expected:
            raise ValueError(
                f"A product with {type(self).__name__} has shape {list(out.shape)}, expected "
                f"{list(expected)}: _apply must return K vectors of the codomain, [K, dim]."
            )
        return out

    def _matmat(self, x: np.ndarray) -> np.ndarray:
        return self._product(np.asarray(x))

    def _rmatmat(self, x: np.ndarray) -> np.ndarray:
        return self._adjoint()._product(np.asarray(x))

    _matvec = _matmat
    _rmatvec = _rmatmat

    @_product_type
    def matvec(self, x: Any) -> Any:
        """Multiply one vector. See scipy's LinearOperator; takes tensors, too."""
        return self._product(x) if is_native(x) else super().matvec(x)

    @_product_type
    def matmat(self, X: Any) -> Any:
        """Multiply several vectors. See scipy's LinearOperator; takes tensors, too."""
        return self._product(X) if is_native(X) else super().matmat(X)

    @_product_type
    def rmatvec(self, x: Any) -> Any:
        """Multiply one vector by the adjoint."""
        return self._adjoint()._product(x) if is_native(x) else super().rmatvec(x)

    @_product_type
    def rmatmat(self, X: Any) -> Any:
        """Multiply several vectors by the adjoint."""
        return self._adjoint()._product(X) if is_native(X) else super().rmatmat(X)

    @_product_type
    def dot(self, x: Any) -> Any:
        """Multiply a vector, several vectors, an operator, or a scalar."""
        if is_scalar(x):
            return self._scaled(_factor(x))
        if isinstance(x, TorchLinearOperator):
            product = self._times(x)
            return ProductLinearOperator(self, x) if product is None else product
        return self._product(x) if is_native(x) else super().dot(x)

    def _rdot(self, x: Any) -> Any:
        if is_scalar(x):
            return self._scaled(_factor(x))
        if isinstance(x, Tensor | np.ndarray) and x.ndim == 2:
            return self._adjoint()._product(x.T).T
        return self._adjoint()._product(x) if is_native(x) else super()._rdot(x)

    __mul__: Combined["TorchLinearOperator"] = dot
    __rmul__: Combined["TorchLinearOperator"] = _rdot

    @_product_type
    @uncompiled
    def __matmul__(self, x: Any) -> Any:
        # to NumPy, text is a scalar
        return self._product(x) if isinstance(x, str | bytes) else super().__matmul__(x)

    @_product_type
    @uncompiled
    def __rmatmul__(self, x: Any) -> Any:
        return self._product(x) if isinstance(x, str | bytes) else super().__rmatmul__(x)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        # numpy would make arrays of objects, and np.dot(A, x) would scale A by every entry
        raise TypeError(
            f"NumPy cannot convert a {type(self).__name__} to an array. Use A @ x for products, "
            "A.to_dense() for the matrix as a tensor, and scipy's aslinearoperator(x) to combine "
            "an array x with an operator."
        )

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse indices, and loops over an operator."""
        raise TypeError(
            f"A {type(self).__name__} has no entries. Take a part of it by "
            "SubmatrixLinearOperator(A, rows, columns), or entries of the matrix A.to_dense()."
        )

    def to_scipy(self, dtype: Any = None) -> LinearOperator:
        """Return the operator, a scipy LinearOperator; for another real dtype, one that casts."""
        dtype = np.dtype(self.dtype if dtype is None else dtype)
        if dtype == self.dtype:
            return self
        products = (lambda x: (self @ x).astype(dtype)), (lambda x: (self.T @ x).astype(dtype))
        return LinearOperator(self.shape, *products, products[0], dtype, products[1])

    @contextmanager
    def linearized(self) -> Iterator[None]:
        """Take model, loss and data as constant inside the context.

        Products share the work that does not depend on the vectors. The solvers and estimators of
        this package enter it themselves; around SciPy's, write::

            with A.linearized():
                eigenvalues, eigenvectors = scipy.sparse.linalg.eigsh(A, k=3)
        """
        with all_linearized(*self._operands()):
            yield

    @in_default_modes
    def to_dense(self) -> Tensor:
        """Return the matrix, ``[M, D]``, from products with the unit vectors.

        Matrices with fewer rows than columns are computed row by row, with their adjoint if they
        have one.

        Raises:
            ValueError: If the matrix needs more than 4 GiB.
        """
        rows, columns = self.shape
        for space in (self.domain, self.codomain):
            space.check_whole(
                "a whole matrix",
                "Multiply vectors, or use eigsh, hutchinson_trace or CGInverseLinearOperator.",
            )
        size = rows * columns * self.torch_dtype.itemsize
        if size > _LARGEST_DENSE:
            raise ValueError(
                f"The matrix of shape [{rows}, {columns}] needs {size / 2**30:.1f} GiB of memory, "
                f"to_dense() writes at most {_LARGEST_DENSE / 2**30:.0f} GiB. Take a part of it "
                "with SubmatrixLinearOperator, multiply a few vectors with A @ X, or use eigsh, "
                "hutchinson_trace or hutchinson_diag, which need no matrix."
            )
        if rows < columns:
            with suppress(NotImplementedError):  # no adjoint
                return self._row_by_row()
        return self._transposed_dense().T.contiguous()

    def _row_by_row(self) -> Tensor:
        """Return the matrix from products with the adjoint."""
        return self._adjoint()._transposed_dense()

    def _transposed_dense(self) -> Tensor:
        """Return the transpose of the matrix, ``[D, M]``, from products with the unit vectors."""
        length, num = self.shape
        out = torch.empty(num, length, dtype=self.torch_dtype, device=self.device)
        chunk = max(_DENSE_BLOCK // max(length * self.torch_dtype.itemsize, 1), 1)
        with all_linearized(*[self] * (num > chunk)):
            for start in range(0, num, chunk):
                part = out[start : start + chunk]
                units = torch.zeros(len(part), num, dtype=self.torch_dtype, device=self.device)
                units.diagonal(start).fill_(1.0)
                part.copy_(self._product(units.T).T)
        return out

    def __repr__(self) -> str:
        dtype = str(self.torch_dtype).removeprefix("torch.")
        size = " x ".join(map(str, self.shape))
        parts = [*self._description(), size, dtype, str(self.device)]
        return f"{type(self).__name__}({', '.join(parts + changed(type(self), self._arguments()))})"

    def _description(self) -> list[str]:
        """Return the parts of ``repr`` beside size and arguments."""
        formula = self._formula()
        return [] if formula == self._short_name else [formula]

    def _arguments(self) -> dict[str, Any]:
        """Return arguments by name, of which ``repr`` shows those that are not the default."""
        return {n: value for n, value in vars(self).items() if isinstance(value, int | float | str)}

    def _formula(self) -> str:
        """Return the text for the operator inside the ``repr`` of another one."""
        return self._short_name

    @property
    def _short_name(self) -> str:
        return type(self).__name__.removesuffix("LinearOperator")

    # --- algebra

    def _add(self, other: Any) -> LinearOperator:
        if isinstance(other, TorchLinearOperator):
            total = self._plus(other)
            return SumLinearOperator(self, other) if total is None else total
        if is_scalar(other) and other == 0:  # Python's sum() starts with it
            return self
        if isinstance(other, np.ndarray | Tensor) or is_scalar(other):
            raise TypeError(
                "Operators can only be added to operators: use "
                "KroneckerProductLinearOperator(torch.as_tensor(M)) for a matrix M, and "
                "A.damped(c) to add a multiple of the identity."
            )
        return super().__add__(other)

    __add__: Combined["TorchLinearOperator"] = _add
    __sub__: Combined["TorchLinearOperator"]

    def __radd__(self, other: int) -> "TorchLinearOperator":
        return self._add(other)

    def damped(self, delta: float) -> "TorchLinearOperator":
        """Return ``A + delta I``; see ``StructuredLinearOperator`` for operators with structure.

        Args:
            delta: The number that is added to the diagonal.

        Raises:
            ValueError: If A is not square, or ``delta`` no finite number.
        """
        if isinstance(delta, Mapping):
            raise TypeError(
                "For a number by parameter, add DiagonalLinearOperator({name: tensor})."
            )
        delta = check_number("delta", delta)
        if self.shape[0] != self.shape[1]:
            raise ValueError(f"Only square operators can be damped, got shape {self.shape}.")
        return self + delta * PowerLinearOperator(self, 0)

    def __neg__(self) -> "TorchLinearOperator":
        return self._scaled(-1.0)

    def __truediv__(self, scalar: float) -> "TorchLinearOperator":
        if not is_scalar(scalar):
            raise ValueError("A linear operator can only be divided by a scalar.")
        return self._scaled(1.0 / _factor(scalar))

    def __pow__(self, exponent: Any) -> "TorchLinearOperator":
        return PowerLinearOperator(self, exponent)

    # --- what an operator with structure overrides to keep it

    _has_structure = False

    def _widened(self, dtype: torch.dtype) -> "TorchLinearOperator":
        """Return the operator with products in ``dtype`` if it has no precision of its own."""
        return self

    def _structured(self) -> "TorchLinearOperator":
        """Return the same matrix with its structure, if it has one."""
        return self

    def _plus(self, other: "TorchLinearOperator") -> "TorchLinearOperator | None":
        """Return the sum with another operator, or None if it has no structure to keep."""
        return None

    def _times(self, other: "TorchLinearOperator") -> "TorchLinearOperator | None":
        """Return the product with another operator, or None if it has no structure to keep."""
        return None

    def _scaled(self, scalar: float) -> "TorchLinearOperator":
        return ScaledLinearOperator(self, scalar)

    def _eigenpairs(self, k: int, which: str) -> tuple[Tensor, Tensor] | None:
        """Return k eigenvalues and eigenvectors as ``eigsh``, or None if no structure has them."""
        return None

    @in_default_modes
    def _adjoint(self) -> "TorchLinearOperator":
        return self if self.self_adjoint else self._transposed()

    def _transpose(self) -> "TorchLinearOperator":
        return self._adjoint()


class _Differentiable(torch.autograd.Function):
    """``x -> A x``, whose derivative is linear, too: ``g -> A^T g``."""

    @staticmethod
    def forward(ctx: Any, operator: Any, columns: Tensor) -> Tensor:
        """Multiply columns, given a ``TorchLinearOperator``."""
        ctx.operator = operator
        # a copy, since autograd would not let users change views in place
        return operator._multiply(columns.detach()).clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        """Multiply gradients by the adjoint."""
        try:
            with default_modes():
                check_finite(gradient, ctx.operator.codomain)
                return None, ctx.operator._adjoint()._multiply(gradient)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"The gradient of a product is a product with the adjoint. {error}"
            ) from error


class SumLinearOperator(TorchLinearOperator):
    """The sum of operators; a sum among them gives its terms."""

    def __init__(self, *operators: TorchLinearOperator):
        first, *others = operators
        for other in others:
            if first.shape != other.shape:
                raise ValueError(
                    f"Operators of shapes {first.shape} and {other.shape} cannot be added."
                )
            first.domain.check_compatible(other.domain)
            first.codomain.check_compatible(other.codomain)
        # of spaces that agree, keep one that has parameter structure
        domain = min((x.domain for x in operators), key=lambda space: space.is_flat)
        codomain = min((x.codomain for x in operators), key=lambda space: space.is_flat)
        dtype = reduce(torch.promote_types, (x.torch_dtype for x in operators))
        terms = _members(operators, SumLinearOperator, "terms")
        self.terms = tuple(term._widened(dtype) for term in terms)
        symmetric = all(x.self_adjoint for x in operators)
        super().__init__(domain.to(dtype=dtype), codomain.to(dtype=dtype), symmetric)

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return self.terms

    def _apply(self, columns: Tensor) -> Tensor:
        first, *others = self.terms
        out = first._multiply(columns.to(first.torch_dtype)).to(self.torch_dtype)
        for term in others:
            out += term._checked_apply(columns.to(term.torch_dtype))
        return out

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        names = self.codomain.names, self.domain.names
        if any((x.codomain.names, x.domain.names) != names for x in self.terms):
            return super()._part(rows, columns)
        return SumLinearOperator(*(term._part(rows, columns) for term in self.terms))

    def _formula(self) -> str:
        return " + ".join(term._formula() for term in self.terms).replace(" + -", " - ")

    def _transposed(self) -> TorchLinearOperator:
        return SumLinearOperator(*(term.T for term in self.terms))


def _members(
    operators: Iterable[TorchLinearOperator], kind: type, name: str
) -> Iterator[TorchLinearOperator]:
    """Yield operators, with the members of sums or products in their places."""
    for operator in operators:
        yield from getattr(operator, name) if type(operator) is kind else (operator,)


class ScaledLinearOperator(TorchLinearOperator):
    """A multiple of an operator."""

    def __init__(self, operator: TorchLinearOperator, scalar: float):
        self.operator, self.scalar = operator, scalar
        super().__init__(operator.domain, operator.codomain, operator.self_adjoint)

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return (self.operator,)

    def _apply(self, columns: Tensor) -> Tensor:
        return self.scalar * self.operator._checked_apply(columns)

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        return ScaledLinearOperator(self.operator._part(rows, columns), self.scalar)

    def _formula(self) -> str:
        factor = "-" if self.scalar == -1 else f"{self.scalar:g} * "
        return f"{factor}{_in_parentheses(self.operator)}"

    def _transposed(self) -> TorchLinearOperator:
        return ScaledLinearOperator(self.operator.T, self.scalar)


class ProductLinearOperator(TorchLinearOperator):
    """The product of operators, the last of which is applied first."""

    def __init__(self, *operators: TorchLinearOperator):
        for left, right in pairwise(operators):
            if left.shape[1] != right.shape[0]:
                raise ValueError(
                    f"Operators of shapes {left.shape} and {right.shape} cannot be multiplied."
                )
            left.domain.check_compatible(right.codomain)
            if left.domain.in_parts and not (left.codomain.in_parts or right.domain.in_parts):
                raise TypeError(
                    "Rows belong to single processes, and parameters are sharded, so that no "
                    "process has a product of rows with rows of other processes. Use gram() for "
                    "the rows of one process, or the other order, J.T @ J."
                )
        dtype = reduce(torch.promote_types, (x.torch_dtype for x in operators))
        factors = _members(operators, ProductLinearOperator, "factors")
        self.factors = tuple(factor._widened(dtype) for factor in factors)
        domain, codomain = operators[-1].domain, operators[0].codomain
        super().__init__(domain.to(dtype=dtype), codomain.to(dtype=dtype))

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return self.factors

    def _apply(self, columns: Tensor) -> Tensor:
        for factor in reversed(self.factors):
            columns = factor._checked_apply(columns.to(factor.torch_dtype))
        return columns.to(self.torch_dtype)

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        first, *between, last = self.factors
        first, last = first._part(rows, first.domain), last._part(last.codomain, columns)
        return ProductLinearOperator(first, *between, last)

    def _formula(self) -> str:
        return " @ ".join(map(_in_parentheses, self.factors))

    def _transposed(self) -> TorchLinearOperator:
        return ProductLinearOperator(*(factor.T for factor in reversed(self.factors)))


class PowerLinearOperator(TorchLinearOperator):
    """A non-negative integer power of a square operator."""

    def __init__(self, operator: TorchLinearOperator, exponent: int):
        if operator.shape[0] != operator.shape[1]:
            raise ValueError(f"Powers need a square operator, got shape {operator.shape}.")
        operator.domain.check_compatible(operator.codomain)
        if (as_integer(exponent) or 0) < 0:
            raise ValueError(f"exponent must be an integer >= 0, got {exponent}. {_SOLVE}")
        self.operator, self.exponent = operator, check_count("exponent", exponent, at_least=0)
        super().__init__(operator.domain, operator.codomain, operator.self_adjoint)

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return (self.operator,) if self.exponent else ()

    def _apply(self, columns: Tensor) -> Tensor:
        for _ in range(self.exponent):
            columns = self.operator._checked_apply(columns)
        return columns

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        if self.exponent < 2:
            return super()._part(rows, columns)
        return ProductLinearOperator(*[self.operator] * self.exponent)._part(rows, columns)

    def _formula(self) -> str:
        if self.exponent == 0:
            return "Identity"
        return f"{_in_parentheses(self.operator)}**{self.exponent}"

    def _transposed(self) -> TorchLinearOperator:
        return PowerLinearOperator(self.operator.T, self.exponent)


class PartLinearOperator(TorchLinearOperator):
    """The rows and columns of some tensors, cut out of products with a whole operator."""

    def __init__(
        self, operator: TorchLinearOperator, rows: ParameterSpace, columns: ParameterSpace
    ):
        self.operator = operator
        super().__init__(columns, rows, operator.self_adjoint and rows.names == columns.names)

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return (self.operator,)

    def _apply(self, columns: Tensor) -> Tensor:
        whole = self.operator.domain.embed(columns, self.domain)
        return self.operator.codomain.cut(self.operator._checked_apply(whole), self.codomain)


def _in_parentheses(operator: TorchLinearOperator) -> str:
    formula = operator._formula()
    return f"({formula})" if " " in formula else formula


def _factor(scalar: Any) -> float:
    return float(without_graph(scalar, "The factor"))
