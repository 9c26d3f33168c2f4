"""How parameters are sharded over processes, and their vectors."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


class ShardLayout(NamedTuple):
    """How a parameter is sharded along its first axis."""

    mesh: Any
    placements: tuple
    shape: tuple[int, ...]  # of the whole parameter
    part: slice  # of the first axis, which this process has
    group: Any  # the processes that have the parts

    @classmethod
    def of(cls, parameter: Any) -> "ShardLayout":
        """Return the layout of a DTensor."""
        mesh, placements = parameter.device_mesh, tuple(parameter.placements)
        group = mesh.get_group(next(i for i, x in enumerate(placements) if x.is_shard()))
        length = -(-len(parameter) // group.size())
        start = min(group.rank() * length, len(parameter))
        part = slice(start, start + len(parameter.to_local()))
        return cls(mesh, placements, tuple(parameter.shape), part, group)

    def whole(self, part: Tensor) -> Any:
        """Return the DTensor, with further axes behind, of which this process has a part."""
        from torch.distributed.tensor import DTensor

        shape = torch.Size((*self.shape, *part.shape[len(self.shape) :]))
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            part.contiguous(),
            self.mesh,
            self.placements,
            run_check=False,
            shape=shape,
            stride=strides,
        )


class GatheredColumns(Mapping):
    """Vectors ``[K, *part]`` of which each tensor is gathered when it is read, and not kept.

    ``gather`` returns ``[K, *shape]``, given a name and a part. Other objects stay as they are.
    """

    def __init__(self, parts: Mapping[str, Any], gather: Callable[[str, Tensor], Tensor]):
        self.parts, self._gather = parts, gather

    def __getitem__(self, name: str) -> Any:
        """Gather the tensors for a parameter."""
        part = self.parts[name]
        return self._gather(name, part) if isinstance(part, Tensor) else part

    # by default, a mapping tells by reading it
    def __contains__(self, name: object) -> bool:
        return name in self.parts

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
