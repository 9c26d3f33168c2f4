"""Ordered, named tensors and their flat vector."""

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
from torch import Tensor

from curvlinops.support.records import recorded

#: K vectors at once, as ``{name: [K, *shape]}``: the form in which products are computed.
Columns = dict[str, Tensor]


def flat(column: Tensor) -> Tensor:
    """Return ``[K, *shape]`` as ``[K, entries]``; a scalar has one."""
    return column.reshape(column.shape[0], prod(column.shape[1:]))


class _Later(dict):
    """Tensors that are made when one is asked for: from memory that was given back until then.

    Args:
        make: Takes its name; returns it, or several.
    """

    def __init__(self, make: Callable[[str], Columns]):
        super().__init__()
        self._make = make

    def __missing__(self, name: str) -> Tensor:
        """Make a tensor."""
        self.update(self._make(name))
        return self[name]


@recorded
class ParameterSpace:
    """The vector space of one or several named tensors, flattened row-major and concatenated.

    Args:
        shapes: Name and shape of each tensor, in the order of the flat vector.
        dtype: The type of the vectors. May be wider than that of the tensors (bfloat16
            parameters have float32 vectors).
        device: Where the vectors live.
    """

    def __init__(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.dtype = dtype
        self.device = torch.device(device)
        ends = list(accumulate((prod(shape) for shape in self.shapes.values()), initial=0))
        self._slices = {name: slice(*ends[i : i + 2]) for i, name in enumerate(self.shapes)}
        self.dim = ends[-1]

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
        wide = any(tensor.dtype == torch.float64 for tensor in tensors.values())
        dtype = torch.float64 if wide else torch.float32
        return cls(shapes, dtype, next(iter(tensors.values())).device)

    @property
    def names(self) -> list[str]:
        """The names of the tensors, in the order of the flat vector."""
        return list(self.shapes)

    @property
    def is_flat(self) -> bool:
        """Whether this is a space of plain vectors, without parameter structure."""
        return self.names == [""]

    def slice(self, name: str) -> slice:
        """Return where the tensor ``name`` lies in the flat vector."""
        return self._slices[name]

    def split(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, dim]`` into ``{name: [K, *shape]}`` (views where possible)."""
        return {
            name: flat[:, self._slices[name]].reshape(flat.shape[0], *shape)
            for name, shape in self.shapes.items()
        }

    def join(self, columns: Columns) -> Tensor:
        """Turn ``{name: [K, *shape]}`` into vectors ``[K, dim]`` (a view where possible)."""
        # one tensor is a view of itself
        vectors = self.common_memory(columns) if len(self.shapes) > 1 else None
        if vectors is None:
            parts = [flat(columns[name]) for name in self.shapes]
            vectors = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return vectors

    def common_memory(self, columns: Columns) -> Tensor | None:
        """Return the vectors ``[K, dim]`` whose views ``columns`` are, ``None`` if they are not."""
        first = columns[next(iter(self.shapes))]
        num_columns, start = first.shape[0], first.storage_offset()
        if start + num_columns * self.dim > first.untyped_storage().nbytes() // first.itemsize:
            return None
        flat = first.as_strided((num_columns, self.dim), (self.dim, 1))
        views = self.split(flat)
        same = all(
            column.data_ptr() == views[name].data_ptr()
            and column.stride() == views[name].stride()
            and column.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
            for name, column in columns.items()
        )
        return flat if same else None

    def empty(self, num_columns: int) -> Tensor:
        """Return memory for ``num_columns`` vectors, ``[K, dim]``."""
        return torch.empty(num_columns, self.dim, dtype=self.dtype, device=self.device)

    def apart(self, num_columns: int) -> Columns:
        """Return memory for vectors; each tensor gets its own when it is asked for by name."""
        like = {"dtype": self.dtype, "device": self.device}
        return _Later(lambda n: {n: torch.empty(num_columns, *self.shapes[n], **like)})

    def together(self, num_columns: int) -> Columns:
        """Return common memory for vectors, made when one is asked for; ``join`` returns it."""
        return _Later(lambda _: self.split(self.empty(num_columns)))

    def zeros(self, num_columns: int) -> Columns:
        """Return ``num_columns`` zero vectors; ``join`` returns their common memory."""
        return self.split(self.empty(num_columns).zero_())

    def fill(self, columns: Columns) -> Columns:
        """Return vectors of which only some tensors are given; the others are zero."""
        num_columns = next(iter(columns.values())).shape[0]
        return self.zeros(num_columns) | columns

    def randn(self, num_columns: int, generator: torch.Generator) -> Columns:
        """Return ``num_columns`` standard normal vectors."""
        flat = torch.randn(
            num_columns, self.dim, generator=generator, dtype=self.dtype, device=self.device
        )
        return self.split(flat)

    def convert(self, columns: Columns, source: "ParameterSpace") -> Columns:
        """Read vectors of ``source`` as vectors of this space.

        Args:
            columns: Vectors of ``source``.
            source: A space that ``check_compatible`` accepts.

        Returns:
            The same vectors, named and shaped as in this space.
        """
        source.check(columns)
        if source.names != self.names or source.shapes != self.shapes:
            columns = self.split(source.join(columns))
        return {name: column.to(self.dtype) for name, column in columns.items()}

    def check(self, columns: Columns) -> None:
        """Check that products that a subclass of an operator computes are vectors of this space.

        Raises:
            ValueError: If they have other names or shapes.
        """
        shapes = {name: tuple(column.shape[1:]) for name, column in columns.items()}
        if shapes != self.shapes:
            found = dict(shapes.items() - self.shapes.items())
            own = dict(self.shapes.items() - shapes.items())
            raise ValueError(
                f"A product has tensors of shapes {found} behind the axis of columns, where its "
                f"space has {own}: _apply must return vectors of the codomain, and _apply_adjoint "
                "of the domain."
            )

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
        if self.is_flat or other.is_flat:
            return
        if list(self.shapes.values()) != list(other.shapes.values()) or (
            self.names != other.names and set(self.names) == set(other.names)
        ):
            raise ValueError(
                "Operators act on different parameters, or on the same in another order: "
                f"{self.shapes} and {other.shapes}."
            )

    def widened(self, dtype: torch.dtype) -> "ParameterSpace":
        """Return the same space with vectors at least as wide as ``dtype``."""
        return ParameterSpace(self.shapes, torch.promote_types(self.dtype, dtype), self.device)

    def restricted(self, names: Sequence[str]) -> "ParameterSpace":
        """Return the space of some of the tensors, in the given order."""
        return ParameterSpace({name: self.shapes[name] for name in names}, self.dtype, self.device)

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> "ParameterSpace":
        """Return the same space on another device, and perhaps in another dtype."""
        device, dtype = torch.device(device), dtype or self.dtype
        same = (device, dtype) == (self.device, self.dtype)
        return self if same else ParameterSpace(self.shapes, dtype, device)

    def __repr__(self) -> str:
        return f"ParameterSpace({self.shapes}, {self.dtype}, '{self.device}')"
