"""Reads and writes vectors: NumPy arrays, tensors, lists and dictionaries of tensors.

Inside of the package, K vectors are one tensor ``[K, dim]``, the *columns* of a product. What a
user passes is read once, at the edge, and the product is written in the same kind.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from numbers import Number
from types import NoneType
from typing import Any, NamedTuple, TypeVar

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


class Given(NamedTuple):
    """Vectors that a user passes: the columns ``[K, dim]``, and how products are written."""

    columns: Tensor
    is_single: bool
    kind: type

    def write(self, out: Tensor, space: ParameterSpace) -> Any:
        """Return columns of a space in the kind of the vectors that were passed."""
        out = out[0] if self.is_single else out.T
        if issubclass(self.kind, np.ndarray):
            return out.cpu().numpy()
        is_named = issubclass(self.kind, MAPPINGS)
        if not (is_named or issubclass(self.kind, LISTS)) or (is_named and space.is_flat):
            return out
        products = space.wholes(space.split_parts(out))
        return products if is_named else list(products.values())


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


def is_followed(columns: Tensor) -> bool:
    """Return whether autograd follows columns, in reverse or in forward mode."""
    return columns.requires_grad or forward_ad.unpack_dual(columns).tangent is not None


def is_scalar(x: Any) -> bool:
    """Return whether ``x`` is a real number, of Python, numpy or PyTorch; refuse complex ones."""
    scalar = isinstance(x, Number) or (isinstance(x, Tensor | np.ndarray) and x.ndim == 0)
    if scalar and (x.is_complex() if isinstance(x, Tensor) else np.iscomplexobj(x)):
        raise TypeError("The operator is real and cannot be combined with a complex number.")
    return scalar


def read(x: Any, space: ParameterSpace) -> Given:
    """Read one or several vectors of any kind, which are moved to a space's device and dtype.

    Autograd follows the columns, of which this process may have parts. Other shapes, names and
    types than those of the space are refused, and values that are not finite.
    """
    if isinstance(x, (LISTS, MAPPINGS)):
        flat = space.join_parts(read_tensors(x, space))
    elif isinstance(x, np.ndarray | Tensor):
        space.check_whole(
            "a flat array or tensor with a whole vector",
            "Pass a list or dictionary of DTensors with the parameters' placements, such as "
            "param.grad or torch.randn_like(param). Use this package's solvers instead of SciPy's.",
        )
        flat = (_from_numpy if isinstance(x, np.ndarray) else _from_tensor)(x, space)
        if flat.ndim not in (1, 2) or len(flat) != space.dim:
            hint = " Python reads A @ [x] * D as (A @ [x]) * D." if x.shape == (1,) else ""
            raise ValueError(
                f"Vector has shape {list(x.shape)}, expected [{space.dim}] or [{space.dim}, K]."
                f"{hint}"
            )
    else:
        raise TypeError(
            f"Cannot multiply with a {type(x).__name__}. Pass a numpy array, a tensor, or a "
            "list or dictionary of tensors."
        )
    is_single = flat.ndim == 1
    columns = flat.unsqueeze(0) if is_single else flat.T
    check_finite(columns, space)
    return Given(columns, is_single, type(x))


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


def read_tensors(x: Sequence | Mapping, space: ParameterSpace) -> dict[str, Tensor]:
    """Return this process's parts of tensors ``[*shape]`` or ``[*shape, K]`` by name, no copies."""
    values = _by_name(x, space)
    space.check_shapes(values)
    return {name: _from_tensor(x, space) for name, x in space.parts(values).items()}


def _by_name(x: Sequence | Mapping, space: ParameterSpace) -> dict[str, Tensor]:
    """Return the tensors of a list or dictionary by name, in the order of a space."""
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


def check_finite(columns: Tensor | Columns, space: ParameterSpace) -> None:
    """Refuse vectors with NaN or infinite values."""
    is_flat = isinstance(columns, Tensor)
    name = space.not_finite(columns) if is_flat else not_finite(columns)
    if name is not None:
        where = f" in parameter '{name}'" if name else ""
        raise ValueError(f"The vector contains NaN or infinite values{where}.")
