"""Where vectors enter and leave: numpy arrays, tensors, lists and dictionaries of tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from numbers import Number
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from curvlinops.linear_operator.columns import not_finite
from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.support.arguments import LISTS, MAPPINGS

#: Vectors of all kinds: arrays ``[D]`` or ``[D, K]``, or a tensor for each parameter.
Vectors = Tensor | np.ndarray | Sequence[Tensor] | Mapping[str, Tensor]

#: Turns a product's columns, which lie in the given space, into the kind that came in.
Writer = Callable[[Columns, ParameterSpace], Any]

_COMPLEX = "The operator is real, the vector complex. Multiply .real and .imag, or see to_scipy."


def is_ours(x: Any) -> bool:
    """Return whether a product with ``x`` is computed without scipy's conversions."""
    if isinstance(x, LISTS):
        shapes = {value.shape for value in x if isinstance(value, np.ndarray)}
        # arrays of one shape are an array's rows
        no_rows = len(shapes) > 1 or any(len(shape) > 1 for shape in shapes)
        return no_rows or any(value is None or isinstance(value, Tensor) for value in x)
    return type(x) is np.ndarray or isinstance(x, Tensor | MAPPINGS | Iterator)


def is_scalar(x: Any) -> bool:
    """Return whether ``x`` is a real number, of Python, numpy or PyTorch.

    Raises:
        TypeError: If it is complex.
    """
    scalar = isinstance(x, Number) or (isinstance(x, Tensor | np.ndarray) and x.ndim == 0)
    if scalar and (x.is_complex() if isinstance(x, Tensor) else np.iscomplexobj(x)):
        raise TypeError("The operator is real and cannot be combined with a complex number.")
    return scalar


def check_shapes(fit: bool, first: tuple, second: tuple, verb: str) -> None:
    """Raise an error that names two operators' shapes unless they fit."""
    if not fit:
        raise ValueError(f"Operators of shapes {first} and {second} cannot be {verb}.")


def cast(operator: LinearOperator, dtype: Any) -> LinearOperator:
    """Return an operator as a scipy operator whose products are numpy arrays of a given dtype."""
    dtype = np.dtype(dtype)

    def through(multiply: Callable) -> Callable:
        def product(x: Any) -> np.ndarray:
            x = np.asarray(x)
            if np.issubdtype(dtype, np.complexfloating) and np.iscomplexobj(x):
                return (multiply(x.real) + 1j * multiply(x.imag)).astype(dtype)
            return multiply(x).astype(dtype)

        return product

    forward, backward = through(operator.dot), through(operator.H.dot)
    return LinearOperator(operator.shape, forward, backward, forward, dtype, backward)


def read(x: Any, space: ParameterSpace) -> tuple[Columns, Writer]:
    """Read one or several vectors.

    Args:
        x: A numpy array or tensor ``[D]`` or ``[D, K]``, or a list or mapping of tensors
            ``[*shape]`` or ``[*shape, K]``, one for each parameter.
        space: The space of the vectors. They are moved to its device and cast to its dtype.

    Returns:
        The vectors as columns, and the function that writes a product in the same kind.

    Raises:
        ValueError: If shapes or names are not those of ``space``, or a value is not finite.
        TypeError: If the vectors are complex, or of an unknown kind.
    """
    if isinstance(x, np.ndarray):
        columns, write = _read_numpy(x, space)
    elif isinstance(x, Tensor):
        columns, write = _read_tensor(x, space)
    elif isinstance(x, LISTS | MAPPINGS):
        columns, write = _read_structure(by_name(x, space), space, isinstance(x, MAPPINGS))
    else:
        raise TypeError(
            f"Cannot multiply with a {type(x).__name__}. Pass a numpy array, a tensor, or a "
            "list or dictionary of tensors."
        )
    return columns, write


def _read_numpy(x: np.ndarray, space: ParameterSpace) -> tuple[Columns, Writer]:
    if not np.issubdtype(x.dtype, np.number) and x.dtype != bool:
        raise TypeError(f"Vectors must be numbers, got an array of dtype {x.dtype}.")
    if np.iscomplexobj(x):
        raise TypeError(_COMPLEX)
    _check_flat_shape(x.shape, space)
    numpy_dtype = np.float64 if space.dtype == torch.float64 else np.float32
    # torch warns about read-only arrays, and refuses negative strides
    x = np.require(x, numpy_dtype, requirements="W")
    x = x.copy() if min(x.strides) < 0 else x
    columns = _split(torch.from_numpy(x).to(space.device), space)

    def write(out: Columns, codomain: ParameterSpace) -> np.ndarray:
        joined = codomain.join(out).cpu().numpy()
        return joined[0] if x.ndim == 1 else joined.T

    return columns, write


def _read_tensor(x: Tensor, space: ParameterSpace) -> tuple[Columns, Writer]:
    _check_flat_shape(tuple(x.shape), space)
    columns = _split(_adopt(x, space), space)

    def write(out: Columns, codomain: ParameterSpace) -> Tensor:
        joined = codomain.join(out)
        return joined[0] if x.ndim == 1 else joined.T

    return columns, write


def _split(x: Tensor, space: ParameterSpace) -> Columns:
    columns = space.split(x.unsqueeze(0) if x.ndim == 1 else x.T)
    _check_finite(columns, [x])
    return columns


def _read_structure(
    values: dict[str, Tensor], space: ParameterSpace, named: bool
) -> tuple[Columns, Writer]:
    alone = [name for name, shape in space.shapes.items() if values[name].shape == shape]
    several = [name for name, shape in space.shapes.items() if values[name].shape != shape]
    for name in several:
        shape, found = space.shapes[name], values[name].shape
        if found[:-1] != shape:
            where = f" for parameter '{name}'" if name else ""
            columns = ", ".join([*map(str, shape), "K"])
            raise ValueError(
                f"Vector{where} has shape {list(found)}, expected {list(shape)} or [{columns}]."
            )
    if alone and several:
        raise ValueError(
            f"There is one vector for parameter '{alone[0]}', and there are several, "
            f"{list(values[several[0]].shape)}, for '{several[0]}': pass equally many for all."
        )
    columns = {
        name: _adopt(value.movedim(-1, 0) if several else value.unsqueeze(0), space)
        for name, value in values.items()
    }
    if len({column.shape[0] for column in columns.values()}) > 1:
        counts = {name: column.shape[0] for name, column in columns.items()}
        raise ValueError(f"Vectors have unequal numbers of columns: {counts}.")
    _check_finite(columns)

    def write(out: Columns, codomain: ParameterSpace) -> Any:
        if named and codomain.is_flat:
            joined = codomain.join(out)
            return joined.T if several else joined[0]
        parts = {n: out[n].movedim(0, -1) if several else out[n][0] for n in codomain.names}
        return parts if named else list(parts.values())

    return columns, write


def by_name(x: Any, space: ParameterSpace) -> dict[str, Tensor]:
    """Return the tensors of a list or dictionary by name, in the order of a space.

    Raises:
        ValueError: If there is not one for each of the space's names.
        TypeError: If one of them is no tensor.
    """
    if isinstance(x, MAPPINGS):
        values = dict(x)
        _check_names(values, space)
    else:
        _check_length(x, space)
        values = dict(zip(space.names, x, strict=True))
    for name, value in values.items():
        if not isinstance(value, Tensor):
            where = f" for parameter '{name}'" if name else ""
            hint = " Where a gradient is None, pass zeros." if value is None else ""
            kind = type(value).__name__
            raise TypeError(f"The vector{where} is a {kind}, expected a tensor.{hint}")
    return {name: values[name] for name in space.names}


def _check_length(values: Sized, space: ParameterSpace) -> None:
    if len(values) != len(space.names):
        each = "" if space.is_flat else f", one for each of the parameters {space.names}"
        raise ValueError(
            f"Got a list of {len(values)} tensors as vector, expected {len(space.names)}{each}."
        )


def _check_names(values: dict[str, Tensor], space: ParameterSpace) -> None:
    if space.is_flat:
        raise ValueError(f"Expected one flat vector of length {space.dim}, got {list(values)}.")
    missing = [name for name in space.names if name not in values]
    unknown = [name for name in values if name not in space.shapes]
    if missing or unknown:
        raise ValueError(
            f"The vector's names are not those of the operator: missing {missing}, unknown "
            f"{unknown}."
        )


def _check_flat_shape(shape: tuple[int, ...], space: ParameterSpace) -> None:
    if len(shape) not in (1, 2) or shape[0] != space.dim:
        raise ValueError(
            f"Vector has shape {list(shape)}, expected [{space.dim}] or [{space.dim}, K]."
        )


def adopt(x: Tensor, space: ParameterSpace) -> Tensor:
    """Return a tensor dense, and of a space's device and dtype."""
    if x.is_complex():
        raise TypeError(_COMPLEX)
    x = x if x.layout is torch.strided else x.to_dense()
    return x.to(space.device, space.dtype)


def _adopt(x: Tensor, space: ParameterSpace) -> Tensor:
    x = adopt(x.detach(), space)
    return x.clone() if x.is_inference() else x


def _check_finite(columns: Columns, together: Iterable[Tensor] = ()) -> None:
    name = not_finite(columns, together)
    if name is not None:
        where = f" in parameter '{name}'" if name else ""
        raise ValueError(f"The vector contains NaN or infinite values{where}.")
