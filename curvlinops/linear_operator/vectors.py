"""Converts vectors: NumPy arrays, tensors, lists and dictionaries of tensors."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from numbers import Number
from types import NoneType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.support.arguments import LISTS, MAPPINGS

#: Vectors of all kinds: arrays ``[D]`` or ``[D, K]``, or a tensor for each parameter.
Vectors = Tensor | np.ndarray | Sequence[Tensor] | Mapping[str, Tensor]
#: The kinds of single arrays.
Array = TypeVar("Array", Tensor, np.ndarray)

#: What scipy would turn into an array of objects or of text.
_REFUSED = str | bytes | Set | NoneType | nn.Module

#: Turns a product's columns, which lie in the given space, into the kind that came in.
FromColumns = Callable[[Columns, ParameterSpace], Any]


def is_native(x: Any) -> bool:
    """Return whether a product with ``x`` is computed without scipy's conversions."""
    if isinstance(x, LISTS):
        arrays = [value for value in x if isinstance(value, (np.ndarray, *LISTS))]
        shapes = {
            value.shape if isinstance(value, np.ndarray) else (len(value),) for value in arrays
        }
        # arrays and lists of one shape are the rows of an array
        are_rows = len(shapes) <= 1 and all(len(shape) <= 1 for shape in shapes)
        return not are_rows or any(value is None or isinstance(value, Tensor) for value in x)
    return type(x) is np.ndarray or isinstance(x, (Tensor, MAPPINGS, Iterator, _REFUSED))


def is_followed(columns: Columns) -> bool:
    """Return whether autograd follows some of the columns, in reverse or in forward mode."""
    return any(
        column.requires_grad or forward_ad.unpack_dual(column).tangent is not None
        for column in columns.values()
    )


def is_scalar(x: Any) -> bool:
    """Return whether ``x`` is a real number, of Python, numpy or PyTorch.

    Raises:
        TypeError: If it is complex.
    """
    scalar = isinstance(x, Number) or (isinstance(x, Tensor | np.ndarray) and x.ndim == 0)
    if scalar and (x.is_complex() if isinstance(x, Tensor) else np.iscomplexobj(x)):
        raise TypeError("The operator is real and cannot be combined with a complex number.")
    return scalar


def to_columns(x: Any, space: ParameterSpace, whole: bool = False) -> tuple[Columns, FromColumns]:
    """Read one or several vectors.

    Args:
        x: A numpy array or tensor ``[D]`` or ``[D, K]``, or a list or mapping of tensors
            ``[*shape]`` or ``[*shape, K]``, one for each parameter.
        space: The space of the vectors. They are moved to its device and cast to its dtype.
        whole: Whether arrays that autograd does not follow are columns ``{"": [K, D]}``.

    Returns:
        The vectors as columns, and the function that writes a product in the same kind. Autograd
        follows both.

    Raises:
        ValueError: If shapes or names are not those of ``space``, or a value is not finite.
        TypeError: If the vectors are complex, or of an unknown kind.
    """
    if isinstance(x, (LISTS, MAPPINGS)):
        return _structure_to_columns(x, space)
    if not isinstance(x, np.ndarray | Tensor):
        raise TypeError(
            f"Cannot multiply with a {type(x).__name__}. Pass a numpy array, a tensor, or a "
            "list or dictionary of tensors."
        )
    space.check_whole(
        "a flat array or tensor with a whole vector",
        "Pass a list or dictionary of DTensors with the parameters' placements, such as param.grad "
        "or torch.randn_like(param). Use this package's solvers instead of SciPy's.",
    )
    flat = _from_numpy(x, space) if isinstance(x, np.ndarray) else _from_tensor(x, space)
    if flat.ndim not in (1, 2) or len(flat) != space.dim:
        raise ValueError(
            f"Vector has shape {list(x.shape)}, expected [{space.dim}] or [{space.dim}, K]."
        )
    columns = columns_of(flat.unsqueeze(0) if flat.ndim == 1 else flat.T, space, whole)

    def from_columns(out: Columns, codomain: ParameterSpace) -> Tensor | np.ndarray:
        rows = codomain.join_rows(out)
        product = rows[0] if x.ndim == 1 else rows.T
        return product.cpu().numpy() if isinstance(x, np.ndarray) else product

    return columns, from_columns


def columns_of(rows: Tensor, space: ParameterSpace, whole: bool) -> Columns:
    """Return vectors ``[K, dim]`` as columns of a space, or as ``{"": [K, dim]}``.

    Args:
        rows: The vectors.
        space: Their space.
        whole: Whether vectors that autograd does not follow are one tensor.

    Raises:
        ValueError: If a value is NaN or infinite.
    """
    columns = {"": rows}
    is_finite = not_finite(columns) is None
    if is_finite and whole and not is_followed(columns):
        return columns
    columns = space.split_rows(rows)
    if not is_finite:
        check_finite(columns)
    return columns


def _from_numpy(x: np.ndarray, space: ParameterSpace) -> Tensor:
    if not np.issubdtype(x.dtype, np.number) and x.dtype != bool:
        raise TypeError(f"Vectors must be numbers, got an array of dtype {x.dtype}.")
    _check_real(np.iscomplexobj(x))
    # torch warns about read-only arrays, and refuses negative strides
    x = np.require(x, np.float64 if space.dtype == torch.float64 else np.float32, requirements="W")
    return torch.from_numpy(x if min(x.strides, default=0) >= 0 else x.copy()).to(space.device)


def _from_tensor(x: Tensor, space: ParameterSpace) -> Tensor:
    _check_real(x.is_complex())
    x = x if x.layout is torch.strided else x.to_dense()
    x = x.to(space.device, space.dtype)
    return x.clone() if x.is_inference() else x


def _structure_to_columns(
    x: Sequence | Mapping, space: ParameterSpace
) -> tuple[Columns, FromColumns]:
    values = _by_name(x, space)
    for name, shape in space.shapes.items():
        if shape not in (values[name].shape, values[name].shape[:-1]):
            where = f" for parameter '{name}'" if name else ""
            columns = ", ".join([*map(str, shape), "K"])
            raise ValueError(
                f"Vector{where} has shape {list(values[name].shape)}, expected {list(shape)} or "
                f"[{columns}]."
            )
    counts = {name: value.shape[len(space.shapes[name]) :] for name, value in values.items()}
    if len(set(counts.values())) > 1:
        listed = {name: count[0] if count else "one vector" for name, count in counts.items()}
        raise ValueError(
            f"Vectors have unequal numbers of columns: {listed}. Pass equally many for all."
        )
    single, named = not any(counts.values()), isinstance(x, MAPPINGS)
    columns = {name: _from_tensor(value, space) for name, value in space.parts(values).items()}
    columns = {n: x.unsqueeze(0) if single else x.movedim(-1, 0) for n, x in columns.items()}
    check_finite(columns)

    def from_columns(out: Columns, codomain: ParameterSpace) -> Any:
        if named and codomain.is_flat:
            rows = codomain.join_rows(out)
            return rows[0] if single else rows.T
        products = {n: out[n][0] if single else out[n].movedim(0, -1) for n in codomain.names}
        products = codomain.wholes(products)
        return products if named else list(products.values())

    return columns, from_columns


def _by_name(x: Sequence | Mapping, space: ParameterSpace) -> dict[str, Tensor]:
    """Return the tensors of a list or dictionary by name, in the order of a space.

    Raises:
        ValueError: If there is not one for each of the space's names.
        TypeError: If one of them is no tensor.
    """
    if isinstance(x, MAPPINGS):
        values = dict(x)
        if space.is_flat:
            raise ValueError(f"Expected one flat vector of length {space.dim}, got {list(values)}.")
        missing = [name for name in space.names if name not in values]
        unknown = [name for name in values if name not in space.shapes]
        if missing or unknown:
            raise ValueError(
                f"The vector's names are not those of the operator: missing {missing}, unknown "
                f"{unknown}."
            )
    elif len(x) == len(space.names):
        values = dict(zip(space.names, x, strict=True))
    else:
        each = "" if space.is_flat else f", one for each of the parameters {space.names}"
        raise ValueError(
            f"Got a list of {len(x)} tensors as vector, expected {len(space.names)}{each}."
        )
    for name, value in values.items():
        if not isinstance(value, Tensor):
            where = f" for parameter '{name}'" if name else ""
            hint = " Where a gradient is None, pass zeros." if value is None else ""
            kind = type(value).__name__
            raise TypeError(f"The vector{where} is a {kind}, expected a tensor.{hint}")
    return {name: values[name] for name in space.names}


def _check_real(is_complex: bool) -> None:
    if is_complex:
        raise TypeError("The operator is real, the vector complex. Multiply .real and .imag.")


def check_finite(columns: Columns) -> None:
    """Refuse vectors that are not finite.

    Raises:
        ValueError: If a value is NaN or infinite.
    """
    name = not_finite(columns)
    if name is not None:
        where = f" in parameter '{name}'" if name else ""
        raise ValueError(f"The vector contains NaN or infinite values{where}.")
