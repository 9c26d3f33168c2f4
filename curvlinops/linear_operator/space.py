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
from curvlinops.support.columns import Columns
from curvlinops.support.files import recorded
from curvlinops.support.norms import double_dots, double_norm
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
        self.check_whole("a flat vector")
        if isinstance(vectors, np.ndarray):
            vectors = torch.from_numpy(vectors.copy()).to(self.device)
        if vectors.ndim not in (1, 2) or len(vectors) != self.dim:
            raise ValueError(
                f"Vectors have shape {list(vectors.shape)}, expected [{self.dim}] or "
                f"[{self.dim}, K], with a column for each vector."
            )
        return self.split_parts(vectors)

    def split_parts(self, vectors: Tensor) -> dict[str, Tensor]:
        """Cut ``[local_dim]`` or ``[local_dim, K]`` into this process's tensors of the vectors."""
        if vectors.ndim == 1:
            return {name: x[0] for name, x in self.views(vectors.unsqueeze(0)).items()}
        return {name: x.movedim(0, -1) for name, x in self.views(vectors.T).items()}

    def join(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Concatenate tensors with the shapes of the parameters; the inverse of ``split``.

        Args:
            tensors: A tensor ``[*shape]``, or ``[*shape, K]``, for each name, in any order.

        Returns:
            A vector ``[dim]``, or K columns ``[dim, K]``.

        Raises:
            ValueError: If names, shapes or numbers of columns do not fit.
        """
        self.check_whole("a flat vector")
        if tensors.keys() != self.shapes.keys():
            raise ValueError(f"Got tensors for {list(tensors)}, expected {self.names}.")
        self.check_shapes(tensors)
        return self.join_parts(tensors)

    def join_parts(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Concatenate this process's tensors of vectors; undo ``split_parts``.

        The only copy of the numbers, and none if there is one tensor.
        """
        flat = [
            parts[name].reshape(prod(shape), *parts[name].shape[len(shape) :])
            for name, shape in self.local_shapes.items()
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat)

    def views(self, columns: Tensor) -> Columns:
        """Return columns ``[K, dim]`` by parameter, ``{name: [K, *shape]}``, views where possible.

        Of vectors that are spread over processes, these are the parts of this process.
        """
        num_columns, shapes = columns.shape[0], self.local_shapes.items()
        parts = [columns] if len(self._sizes) == 1 else columns.split_with_sizes(self._sizes, 1)
        pairs = zip(shapes, parts, strict=True)
        return {
            name: part if len(shape) == 1 else part.reshape(num_columns, *shape)
            for (name, shape), part in pairs
        }

    def not_finite(self, columns: Tensor) -> str | None:
        """Return the name of a tensor with NaN or infinite values in columns, if there is one."""
        return None if not_finite({"": columns}) is None else not_finite(self.views(columns))

    def cut(self, columns: Tensor, some: "ParameterSpace") -> Tensor:
        """Return the entries of columns that belong to some of the tensors."""
        return torch.cat([columns[:, self.slice(name)] for name in some.names], 1)

    def embed(self, columns: Tensor, some: "ParameterSpace") -> Tensor:
        """Return columns with zeros beside the entries of some of the tensors; undo ``cut``."""
        out = columns.new_zeros(len(columns), self.local_dim)
        for name in some.names:
            out[:, self.slice(name)] = columns[:, some.slice(name)]
        return out

    def empty(self, num_columns: int) -> Tensor:
        """Return memory for ``num_columns`` vectors, ``[K, dim]``."""
        return torch.empty(num_columns, self.local_dim, dtype=self.dtype, device=self.device)

    def zeros(self, num_columns: int) -> Tensor:
        """Return ``num_columns`` zero vectors, ``[K, dim]``."""
        return self.empty(num_columns).zero_()

    def lazy_empty(self, num_rows: int) -> Columns:
        """Return memory for gradients of samples; each tensor is allocated when it is asked for.

        They then take memory that activations gave back, which lowers the peak by a fifth for
        convolutional networks and transformers.
        """
        return _LazyColumns(self, num_rows)

    def parts(self, vectors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this process's parts of vectors, given tensors as users pass them."""
        return vectors

    def wholes(self, parts: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return vectors as users get them, given this process's parts of them."""
        return parts

    def vectors(self, X: Tensor) -> Any:
        """Return vectors ``[dim]`` or ``[dim, K]`` as users get them: by name if in parts."""
        return X

    def check_whole(self, what: str, remedy: str = "") -> None:
        """Refuse a quantity that needs whole vectors, if processes have parts of them."""

    def gathered(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return whole vectors, given this process's parts of them."""
        return columns

    @property
    def whole(self) -> "ParameterSpace":
        """The space of whole vectors."""
        return self

    def draw(self, num: int, fill: Callable[[Tensor], Any]) -> Tensor:
        """Return random vectors ``[num, dim]``; ``fill`` writes numbers to a tensor of one axis."""
        columns = self.empty(num)
        for column in columns:  # the numbers that are drawn at once depend on their count
            fill(column)
        return columns

    # --- checks

    def check_shapes(self, tensors: Mapping[str, Tensor]) -> None:
        """Refuse tensors that are neither ``[*shape]`` for all names nor ``[*shape, K]``."""
        for name, shape in self.shapes.items():
            if shape not in (tensors[name].shape, tensors[name].shape[:-1]):
                where = f" for parameter '{name}'" if name else ""
                columns = ", ".join([*map(str, shape), "K"])
                raise ValueError(
                    f"Vector{where} has shape {list(tensors[name].shape)}, expected {list(shape)} "
                    f"or [{columns}]."
                )
        counts = {name: tensors[name].shape[len(shape) :] for name, shape in self.shapes.items()}
        if len(set(counts.values())) > 1:
            listed = {name: count[0] if count else "one vector" for name, count in counts.items()}
            raise ValueError(
                f"Vectors have unequal numbers of columns: {listed}. Pass equally many for all."
            )

    def check_compatible(self, other: "ParameterSpace") -> None:
        """Refuse spaces whose vectors cannot be added: of another dimension, device, or parameters.

        A space of plain vectors agrees with every space of its dimension.
        """
        if self.dim != other.dim:
            raise ValueError(f"Operators act on spaces of dimension {self.dim} and {other.dim}.")
        if self.device != other.device:
            raise ValueError(
                f"Operators live on {self.device} and {other.device}. Move one with to_device()."
            )
        is_spread = self.in_parts or other.in_parts
        if is_spread and self.local_shapes != other.local_shapes:
            raise ValueError(
                "One operator has vectors that are spread over processes, the other has whole ones."
            )
        if self.is_flat or other.is_flat:
            return
        if list(self.shapes.values()) != list(other.shapes.values()) or (
            self.names != other.names and set(self.names) == set(other.names)
        ):
            raise ValueError(
                "Operators act on different parameters, or on the same in another order: "
                f"{self.shapes} and {other.shapes}."
            )

    # --- what depends on all entries of vectors, which are columns [K, dim]

    def dots(self, first: Tensor, second: Tensor) -> Tensor:
        """Return the inner products of K pairs of vectors, ``[K]``, in float64."""
        return self.team.add(double_dots(self._counted(first), second))

    def norms(self, columns: Tensor) -> Tensor:
        """Return the Euclidean norms of K vectors, ``[K]``, in float64."""
        return double_norm(columns, 1)

    def sums(self, columns: Tensor) -> Tensor:
        """Return the sums of the entries of K vectors, ``[K]``."""
        return self.team.add(self._counted(columns).sum(1))

    def gram(self, first: Tensor, second: Tensor) -> Tensor:
        """Return all inner products of K and L vectors, ``[K, L]``."""
        return self.team.add(self._counted(first) @ second.T)

    def overlaps(self, bases: Tensor, columns: Tensor) -> Tensor:
        """Return the inner products of K columns with K bases ``[K, m, dim]``, ``[K, m]``."""
        return self.team.add(torch.bmm(bases, self._counted(columns).unsqueeze(2)).squeeze(2))

    def qr(self, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Return orthonormal columns Q, and triangular R, with ``columns.T = Q.T @ R``."""
        Q, R = torch.linalg.qr(columns.T)
        return Q.T, R

    def largest(self, numbers: Tensor) -> float:
        """Return the largest absolute value of entries of vectors."""
        own = float(torch.linalg.vector_norm(numbers, inf)) if numbers.numel() else 0.0
        return self.team.largest(own)

    def any(self, flag: bool) -> bool:
        """Return whether a flag is true in any process that has a part of the vectors."""
        return self.team.any(lambda: flag)

    def _counted(self, columns: Tensor) -> Tensor:
        """Return vectors in which one process alone has the entries that several have."""
        return columns

    # --- other spaces

    def restricted(self, names: Sequence[str]) -> "ParameterSpace":
        """Return the space of some of the tensors, in the given order."""
        if list(names) == self.names:
            return self
        return self._like({name: self.shapes[name] for name in names}, self.dtype, self.device)

    def to(
        self, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "ParameterSpace":
        """Return the same space on another device, or in another dtype."""
        device, dtype = torch.device(device or self.device), dtype or self.dtype
        same = (device, dtype) == (self.device, self.dtype)
        return self if same else self._like(self.shapes, dtype, device)

    def _like(
        self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype, device: torch.device
    ) -> "ParameterSpace":
        """Return a space of some of the tensors."""
        return ParameterSpace(shapes, dtype, device)

    def __repr__(self) -> str:
        return f"ParameterSpace({self.shapes}, {self.dtype}, '{self.device}')"


class _LazyColumns(dict):
    """Rows without values, by parameter, each tensor allocated when it is first asked for."""

    def __init__(self, space: ParameterSpace, num_rows: int):
        super().__init__()
        self._space, self._num_rows = space, num_rows

    def __missing__(self, name: str) -> Tensor:
        """Allocate a tensor."""
        shape, space = self._space.local_shapes[name], self._space
        self[name] = torch.empty(self._num_rows, *shape, dtype=space.dtype, device=space.device)
        return self[name]


def dtype_of_vectors(tensors: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype of vectors for some parameters: float64 if any of them is, else float32."""
    is_wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
    return torch.float64 if is_wide else torch.float32


# --- names


def match_names(names: Sequence[str], patterns: Iterable[str], what: str) -> list[str]:
    """Return the names that patterns choose, in the order of the patterns, each once.

    A pattern is a name of a parameter; of a module (the model's is empty), which stands for all of
    its parameters; or a glob for either, such as ``"*.attn.*"``.
    """
    chosen = {pattern: _matches(names, pattern) for pattern in patterns}
    if unknown := [pattern for pattern, found in chosen.items() if not found]:
        raise ValueError(
            f"{what} has unknown names {unknown}. {nearest(unknown[0], names)} Names of modules, "
            "and globs such as '*.weight', choose several."
        )
    return list(dict.fromkeys(name for found in chosen.values() for name in found))


def by_name(given: Mapping[Any, Any], names: Sequence[str], what: str) -> dict[str, Any]:
    """Return values by name, given by patterns or tuples of these; the narrowest one counts."""
    keys = {k: match_names(names, k if isinstance(k, tuple) else [k], what) for k in given}
    order = sorted(keys, key=lambda key: (-len(keys[key]), len(key)))
    return {name: given[key] for key in order for name in keys[key]}


def _matches(names: Sequence[str], pattern: str) -> list[str]:
    if pattern in names:  # which may have brackets
        return [pattern]
    return [
        name
        for name in names
        if not pattern
        or any(fnmatchcase(part, pattern) for part in accumulate(name.split("."), "{}.{}".format))
    ]


# --- operations on columns


def add(total: Columns, some: slice | int, columns: Mapping[str, Tensor | None]) -> None:
    """Add columns to ``some`` of the columns of a total, in place; ``None`` is zero."""
    names = [name for name, column in columns.items() if column is not None]
    if not names:
        return
    with without_torch_function():
        torch._foreach_add_(
            [total[name][some] for name in names], [columns[name].detach() for name in names]
        )


def norm(columns: Columns) -> float:
    """Return the root of the sum of all squares, summed in float64."""
    return float(sum(double_norm(column) ** 2 for column in columns.values())) ** 0.5


def not_finite(columns: Columns) -> str | None:
    """Return the name of a tensor with NaN or infinite values, if there is one."""
    # sums are fast; only when one overflows or is NaN look at each value
    sums = [x.detach().sum() for x in columns.values()]
    if not sums[0].is_cpu:
        sums = [torch.stack(sums).sum()]
    if isfinite(sum(map(float, sums))):
        return None
    return next((n for n, column in columns.items() if not bool(column.isfinite().all())), None)
