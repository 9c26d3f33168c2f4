"""Ordered, named tensors and their flat vector; several vectors at once as columns."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import accumulate
from math import inf, isfinite, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.support.arguments import nearest
from curvlinops.support.columns import Columns, flat
from curvlinops.support.norms import double_dot, double_dots, double_norm
from curvlinops.support.serialization import recorded
from curvlinops.support.torch_internals import without_torch_function
from curvlinops.team.team import ALONE


@recorded
class ParameterSpace:
    """The vector space of one or several named tensors, flattened row-major and concatenated.

    Args:
        shapes: Name and shape of each tensor, in the order of the flat vector.
        dtype: The type of the vectors. May be wider than that of the tensors (bfloat16
            parameters have float32 vectors).
        device: The device of the vectors.

    Attributes:
        dim: The dimension D of the space.
        local_shapes: The shapes of this process's parts of vectors, see ``ShardedSpace``.
        local_dim: The number of entries in this process's part of a vector.
    """

    #: Whether processes have parts of vectors.
    in_parts = False
    #: The processes that have parts of vectors.
    team = ALONE

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.dtype = dtype
        self.device = torch.device(device)
        self.dim = sum(map(prod, self.shapes.values()))
        self.local_shapes = self._shapes_of_parts()
        self._sizes = [prod(shape) for shape in self.local_shapes.values()]
        self._starts = dict(zip(self.shapes, accumulate(self._sizes, initial=0), strict=False))
        self.local_dim = sum(self._sizes)

    def _shapes_of_parts(self) -> dict[str, tuple[int, ...]]:
        return self.shapes

    def _record(self) -> tuple:
        return self.shapes, self.dtype, self.device

    @classmethod
    def flat(cls, dim: int, dtype: torch.dtype, device: torch.device) -> "ParameterSpace":
        """Return a space of plain vectors: one tensor without a name."""
        return cls({"": (dim,)}, dtype, device)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> "ParameterSpace":
        """Return the space of given floating-point tensors, all on one device.

        Its vectors are float64 if any of the tensors is, else float32.
        """
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        return cls(shapes, dtype_of_vectors(tensors), next(iter(tensors.values())).device)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of the flat vector."""
        return list(self.shapes)

    @property
    def is_flat(self) -> bool:
        """Whether this is a space of plain vectors, without parameter structure."""
        return self.shapes.keys() == {""}

    def slice(self, name: str) -> slice:
        """Return the place of a tensor in the flat vector."""
        start = self._starts[name]
        return slice(start, start + prod(self.local_shapes[name]))

    # --- vectors

    def split(self, vectors: Tensor | np.ndarray) -> dict[str, Tensor]:
        """Cut a vector, or vectors as columns, into tensors with the shapes of the parameters.

        The result has the form in which operators take and return dictionaries.

        Args:
            vectors: A vector ``[dim]``, or K columns ``[dim, K]``, such as eigenvectors. NumPy
                arrays are copied to the device of the space.

        Returns:
            A tensor ``[*shape]``, or ``[*shape, K]``, for each name; views where possible.

        Raises:
            ValueError: If the vectors have another shape.

        Example:
            >>> import torch
            >>> from curvlinops import ParameterSpace
            >>> space = ParameterSpace({"weight": (2, 3), "bias": (2,)})
            >>> {name: list(x.shape) for name, x in space.split(torch.ones(8, 5)).items()}
            {'weight': [2, 3, 5], 'bias': [2, 5]}
        """
        if isinstance(vectors, np.ndarray):
            vectors = torch.from_numpy(vectors.copy()).to(self.device)
        if vectors.ndim not in (1, 2) or len(vectors) != self.dim:
            raise ValueError(
                f"Vectors have shape {list(vectors.shape)}, expected [{self.dim}] or "
                f"[{self.dim}, K], with a column for each vector."
            )
        single = vectors.ndim == 1
        columns = self.split_rows(vectors.unsqueeze(0) if single else vectors.T)
        return {name: x[0] if single else x.movedim(0, -1) for name, x in columns.items()}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate tensors with the shapes of the parameters; the inverse of ``split``.

        Args:
            tensors: A tensor ``[*shape]``, or ``[*shape, K]``, for each name, in any order.

        Returns:
            A vector ``[dim]``, or K columns ``[dim, K]``.

        Raises:
            ValueError: If names, shapes or numbers of columns do not fit.
        """
        if tensors.keys() != self.shapes.keys():
            raise ValueError(f"Got tensors for {list(tensors)}, expected {self.names}.")
        single = all(tensors[name].shape == shape for name, shape in self.shapes.items())
        K = () if single else next(iter(tensors.values())).shape[-1:]
        for name, shape in self.shapes.items():
            if tensors[name].shape != (*shape, *K):
                raise ValueError(
                    f"The tensor for '{name}' has shape {list(tensors[name].shape)}, expected "
                    f"{list(shape)}, or with a last axis of K vectors for all names."
                )
        columns = {n: x.unsqueeze(0) if single else x.movedim(-1, 0) for n, x in tensors.items()}
        rows = self.join_rows(columns)
        return rows[0] if single else rows.T

    def split_rows(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, dim]`` into ``{name: [K, *shape]}`` (views where possible).

        Of vectors that are spread over processes, these are the parts of this process.
        """
        num_columns, shapes = flat.shape[0], self.local_shapes.items()
        parts = [flat] if len(self._sizes) == 1 else flat.split_with_sizes(self._sizes, 1)
        pairs = zip(shapes, parts, strict=True)
        return {
            name: part if len(shape) == 1 else part.reshape(num_columns, *shape)
            for (name, shape), part in pairs
        }

    def join_rows(self, columns: Columns) -> Tensor:
        """Turn ``{name: [K, *shape]}`` into vectors ``[K, dim]`` (a view where possible).

        Tensors that are not given are zero. Vectors that are one tensor, ``{"": [K, dim]}``, are
        returned as they are.
        """
        if "" in columns:
            return flat(columns[""])
        if len(self.shapes) == 1:
            return flat(columns[self.names[0]])
        if len(columns) < len(self.shapes):
            columns = self.fill(columns)
        if (vectors := self.joined_view(columns)) is not None:
            return vectors
        parts = [flat(columns[name]) for name in self.shapes]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def joined_view(self, columns: Columns) -> Tensor | None:
        """Return the contiguous vectors ``[K, dim]`` whose views ``columns`` are, if they are."""
        sized = [
            (columns[n], size) for n, size in zip(self.shapes, self._sizes, strict=True) if size
        ]
        if not sized or not len(first := sized[0][0]):
            return None
        num_columns, address, dtype = first.shape[0], first.data_ptr(), first.dtype
        end = first.storage_offset() + num_columns * self.local_dim
        if end > first.untyped_storage().nbytes() // first.itemsize:
            return None
        for column, size in sized:
            if (
                column.data_ptr() != address
                or column.dtype != dtype
                or (num_columns > 1 and column.stride(0) != self.local_dim)
                or not (column if num_columns == 1 else column[0]).is_contiguous()
            ):
                return None
            address += size * first.itemsize
        return first.as_strided((num_columns, self.local_dim), (self.local_dim, 1))

    def empty(self, num_columns: int) -> Tensor:
        """Return memory for ``num_columns`` vectors, ``[K, dim]``."""
        return torch.empty(num_columns, self.local_dim, dtype=self.dtype, device=self.device)

    def lazy_empty(self, num_columns: int) -> Columns:
        """Return memory for vectors; each tensor is allocated when it is first asked for.

        Gradients of samples then take memory that activations gave back, which lowers the peak by
        a fifth for convolutional networks and transformers.
        """
        return _LazyColumns(self, num_columns)

    def zeros(self, num_columns: int) -> Columns:
        """Return ``num_columns`` zero vectors; ``join`` returns their common memory."""
        return self.split_rows(self.empty(num_columns).zero_())

    def fill(self, columns: Columns, names: Iterable[str] | None = None) -> Columns:
        """Return some tensors of vectors, by default all; those that are not given are zero."""
        num_columns = next(iter(columns.values())).shape[0]
        names = self.shapes if names is None else names
        if columns.keys() >= set(names):
            return {name: columns[name] for name in names}
        missing = self.restricted([name for name in names if name not in columns])
        some = {name: columns[name] for name in names if name in columns}
        return missing.zeros(num_columns) | some

    def randn(self, num_columns: int, generator: torch.Generator) -> Columns:
        """Return ``num_columns`` standard normal vectors."""
        return self.split_rows(self.empty(num_columns).normal_(generator=generator))

    def parts(self, vectors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this process's parts of vectors, given tensors as users pass them."""
        return vectors

    def wholes(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return vectors as users get them, given this process's parts of them."""
        return parts

    def vectors(self, X: Tensor) -> Any:
        """Return vectors as users get them.

        Args:
            X: A vector ``[dim]``, or vectors ``[dim, K]``.

        Returns:
            ``X``; or if processes have parts of vectors, tensors by the names of the parameters.
        """
        return X

    def check_whole(self, what: str, remedy: str = "") -> None:
        """Refuse a quantity that needs whole vectors, if processes have parts of them.

        Args:
            what: The quantity, as the message names it.
            remedy: What to do instead.
        """

    def gathered(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return whole vectors, given this process's parts of them."""
        return columns

    @property
    def whole(self) -> "ParameterSpace":
        """The space of whole vectors."""
        return self

    def draw(self, num: int, fill: Callable[[Tensor], Any]) -> Tensor:
        """Return random vectors as rows, ``[num, dim]``.

        Args:
            num: The number of vectors.
            fill: Writes random numbers to a tensor of one axis.
        """
        rows = self.empty(num)
        for row in rows:  # the numbers that are drawn at once depend on their count
            fill(row)
        return rows

    def convert(self, columns: Columns, source: "ParameterSpace") -> Columns:
        """Read vectors of ``source`` as vectors of this space.

        Args:
            columns: Vectors of ``source``. Some of their tensors may be missing, which are zero;
                they stay missing if both spaces have the same tensors.
            source: A space that ``check_compatible`` accepts.

        Returns:
            The same vectors, named and shaped as in this space, in its dtype.
        """
        if source.names != self.names or source.shapes != self.shapes:
            columns = self.split_rows(source.join_rows(columns))
        return cast(columns, self.dtype)

    # --- checks

    def checked(self, columns: Columns, names: Sequence[str]) -> Columns:
        """Return tensors of products that a subclass of an operator computes.

        Args:
            columns: The products, at least some of their tensors.
            names: The tensors that are returned.

        Raises:
            ValueError: If they have other names or shapes than in this space.
        """
        expected = {name: self.local_shapes[name] for name in names}
        shapes = {name: tuple(columns[name].shape[1:]) for name in names if name in columns}
        if shapes != expected:
            returned = dict(shapes.items() - expected.items())
            expected = dict(expected.items() - shapes.items())
            raise ValueError(
                f"A product has tensors of shapes {returned} behind the axis of columns, where its "
                f"space has {expected}: _apply must return the wanted tensors of vectors of the "
                "codomain."
            )
        return {name: columns[name] for name in names}

    def check_compatible(self, other: "ParameterSpace") -> None:
        """Check that vectors of the two spaces may be added.

        Raises:
            ValueError: If dimension, device, or the parameters and their order differ. A
                space of plain vectors agrees with every space of its dimension.
        """
        if self.dim != other.dim:
            raise ValueError(f"Operators act on spaces of dimension {self.dim} and {other.dim}.")
        if self.device != other.device:
            raise ValueError(
                f"Operators live on {self.device} and {other.device}. Move one with to_device()."
            )
        if self.in_parts or other.in_parts:
            self._check_parts(other)
        if self.is_flat or other.is_flat:
            return
        if list(self.shapes.values()) != list(other.shapes.values()) or (
            self.names != other.names and set(self.names) == set(other.names)
        ):
            raise ValueError(
                "Operators act on different parameters, or on the same in another order: "
                f"{self.shapes} and {other.shapes}."
            )

    def _check_parts(self, other: "ParameterSpace") -> None:
        """Check that processes have the same parts of vectors of two spaces."""
        if self.local_shapes != other.local_shapes:
            raise ValueError(
                "One operator has vectors that are spread over processes, the other has whole ones."
            )

    # --- what depends on all entries of vectors, which are rows [K, dim]

    def dots(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the inner products of K pairs of vectors, ``[K]``, in float64."""
        return double_dots(first, second)

    def norms(self, rows: Tensor) -> Tensor:
        """Return the Euclidean norms of K vectors, ``[K]``, in float64."""
        return double_norm(rows, 1)

    def sums(self, rows: Tensor) -> Tensor:
        """Return the sums of the entries of K vectors, ``[K]``."""
        return rows.sum(1)

    def gram(self, first: Tensor, second: Tensor) -> Tensor:
        """Return all inner products of K and L vectors, ``[K, L]``."""
        return first @ second.T

    def overlaps(self, bases: Tensor, rows: Tensor) -> Tensor:
        """Return the inner products of K vectors with those of K bases, ``[K, m]``.

        Args:
            bases: The bases, ``[K, m, dim]``.
            rows: The vectors.
        """
        return torch.bmm(bases, rows.unsqueeze(2)).squeeze(2)

    def qr(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return orthonormal vectors Q, as rows, and triangular R with ``rows.T = Q.T @ R``."""
        Q, R = torch.linalg.qr(rows.T)
        return Q.T, R

    def largest(self, numbers: Tensor) -> float:
        """Return the largest absolute value of entries of vectors."""
        return float(torch.linalg.vector_norm(numbers, inf)) if numbers.numel() else 0.0

    def any(self, flag: bool) -> bool:
        """Return whether a flag is true in any process that has a part of the vectors."""
        return flag

    # --- other spaces

    def restricted(self, names: Sequence[str]) -> "ParameterSpace":
        """Return the space of some of the tensors, in the given order."""
        if list(names) == self.names:
            return self
        return ParameterSpace({name: self.shapes[name] for name in names}, self.dtype, self.device)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "ParameterSpace":
        """Return the same space on another device, or in another dtype."""
        device, dtype = torch.device(device or self.device), dtype or self.dtype
        same = (device, dtype) == (self.device, self.dtype)
        return self if same else ParameterSpace(self.shapes, dtype, device)

    def __repr__(self) -> str:
        return f"ParameterSpace({self.shapes}, {self.dtype}, '{self.device}')"


class _LazyColumns(dict):
    """Columns without values, each allocated when it is first asked for."""

    def __init__(self, space: ParameterSpace, num_columns: int):
        super().__init__()
        self._space, self._num_columns = space, num_columns

    def __missing__(self, name: str) -> Tensor:
        """Allocate a column."""
        shape, space = self._space.local_shapes[name], self._space
        self[name] = torch.empty(self._num_columns, *shape, dtype=space.dtype, device=space.device)
        return self[name]


def dtype_of_vectors(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of vectors for some parameters: float64 if any of them is, else float32."""
    is_wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    return torch.float64 if is_wide else torch.float32


# --- names


def match_names(names: Sequence[str], patterns: Iterable[str], what: str) -> list[str]:
    """Return the names that patterns choose, in the order of the patterns, each once.

    Args:
        names: Names of parameters.
        patterns: Names of parameters; names of modules, which stand for all of their parameters;
            or globs for either, such as ``"*.attn.*"``.
        what: Names the argument in errors.

    Raises:
        ValueError: If a pattern chooses nothing.
    """
    chosen = {pattern: _matches(names, pattern) for pattern in patterns}
    if unknown := [pattern for pattern, found in chosen.items() if not found]:
        raise ValueError(
            f"{what} has unknown names {unknown}. {nearest(unknown[0], names)} Names of modules, "
            "and globs such as '*.weight', choose several."
        )
    return list(dict.fromkeys(name for found in chosen.values() for name in found))


def _matches(names: Sequence[str], pattern: str) -> list[str]:
    if pattern in names:  # which may have brackets
        return [pattern]
    return [
        name
        for name in names
        if any(fnmatchcase(part, pattern) for part in accumulate(name.split("."), "{}.{}".format))
    ]


# --- operations on columns


def cast(columns: Columns, dtype: torch.dtype) -> Columns:
    """Return columns in a dtype."""
    return {name: column.to(dtype) for name, column in columns.items()}


def add(total: Columns, rows: slice | int, columns: Mapping[str, Tensor | None]) -> None:
    """Add some columns to the columns ``rows`` of a total, in place; ``None`` is zero."""
    names = [name for name, column in columns.items() if column is not None]
    if not names:
        return
    with without_torch_function():
        torch._foreach_add_(
            [total[name][rows] for name in names], [columns[name].detach() for name in names]
        )


def dot(first: Columns, second: Columns) -> float:
    """Return the inner product of columns, summed in float64."""
    return float(sum(double_dot(first[name], second[name]) for name in first))


def norm(columns: Columns) -> float:
    """Return the root of the sum of all squares, summed in float64."""
    return float(sum(double_norm(column) ** 2 for column in columns.values())) ** 0.5


def not_finite(columns: Columns, joined: Tensor | None = None) -> str | None:
    """Return the name of a tensor with NaN or infinite values, if there is one.

    Args:
        columns: Tensors by name.
        joined: The same numbers in one tensor, if there is one. It is faster to check.
    """
    # sums are fast; only when one overflows or is NaN look at each value
    sums = [x.detach().sum() for x in (columns.values() if joined is None else [joined])]
    if isfinite(float(sums[0] if len(sums) == 1 else torch.stack(sums).sum())):
        return None
    return next((n for n, column in columns.items() if not bool(column.isfinite().all())), None)
