"""Where the entries of a block's matrices are in the parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from curvlinops.layers.place import Place
from curvlinops.linear_operator.space import Columns
from curvlinops.operators.kronecker.plan import BlockSpec
from curvlinops.support.records import recorded


@recorded
@dataclass(frozen=True)
class Entries:
    """The entries of some blocks with the same parameters, and their places in these.

    Blocks follow one another; a Kronecker product's entries are ``[G, O, I]``, where the bias's
    are the last inputs. Last come entries that no block has.

    Args:
        shapes: Name and shape of each parameter.
        blocks: The blocks.
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]
    blocks: tuple[BlockSpec, ...]

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]], blocks: Sequence[BlockSpec]) -> "Entries":
        """Return the entries of parameters of given shapes."""
        return cls(tuple((name, tuple(shape)) for name, shape in shapes.items()), tuple(blocks))

    @cached_property
    def sizes(self) -> list[int]:
        """The numbers of the blocks' entries."""
        return [sum(prod(shape) for shape in self._part_shapes(b)) for b in self.blocks]

    @cached_property
    def num_rest(self) -> int:
        """The number of entries that no block has."""
        return sum(prod(shape) for _, shape in self.shapes) - sum(self.sizes)

    def gather(self, columns: Columns) -> Tensor:
        """Turn vectors ``{name: [K, *shape]}`` into ``[K, n]``."""
        found = []
        for block in self.blocks:
            parts = [
                columns[name] if place is None else _flat(columns[name])[:, _index(place, columns)]
                for name, place in zip(block.names, block.places, strict=True)
            ]
            found.append(self._to_matrix(block, parts))
        if self.num_rest:
            found += [_flat(columns[name])[:, index] for name, index in self._rest(columns)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)

    def scatter(self, flat: Tensor) -> Columns:
        """Turn vectors ``[K, n]`` into ``{name: [K, *shape]}``; the inverse of ``gather``."""
        if all(place is None for block in self.blocks for place in block.places):
            (block,) = self.blocks
            parts, shapes = self._to_parts(block, flat), dict(self.shapes)
            return {
                name: part.reshape(len(flat), *shapes[name])
                for name, part in zip(block.names, parts, strict=True)
            }
        out = {name: flat.new_zeros(len(flat), prod(shape)) for name, shape in self.shapes}
        pieces = flat.split([*self.sizes, self.num_rest], dim=1)
        for block, piece in zip(self.blocks, pieces, strict=False):
            parts = self._to_parts(block, piece)
            for name, place, part in zip(block.names, block.places, parts, strict=True):
                out[name][:, _index(place, out)] = _flat(part)
        rest = self._rest(out)
        for (name, index), piece in zip(
            rest, pieces[-1].split([len(index) for _, index in rest], dim=1), strict=True
        ):
            out[name][:, index] = piece
        return {name: out[name].reshape(len(flat), *shape) for name, shape in self.shapes}

    def _to_matrix(self, block: BlockSpec, parts: list[Tensor]) -> Tensor:
        """Turn vectors of a block's parts of parameters into ``[K, n]``."""
        if not block.kinds:
            return _flat(parts[0])
        kind = block.kinds[0]
        lead = (len(parts[0]), kind.groups, kind.outputs)
        weight = kind.arrangement.undo(parts[0], 1).reshape(*lead, kind.inputs)
        if len(parts) == 1:
            return weight.flatten(1)
        return torch.cat([weight, parts[1].reshape(*lead, 1)], dim=3).flatten(1)

    def _to_parts(self, block: BlockSpec, flat: Tensor) -> list[Tensor]:
        if not block.kinds:
            return [flat]
        kind = block.kinds[0]
        matrix = flat.unflatten(1, (kind.groups, kind.outputs, -1))
        weight = kind.arrangement.apply(matrix[..., : kind.inputs], 1)
        return [weight] if len(block.names) == 1 else [weight, matrix[..., -1]]

    def _part_shapes(self, block: BlockSpec) -> list[tuple[int, ...]]:
        shapes = dict(self.shapes)
        return [
            shapes[name] if place is None else place.shape
            for name, place in zip(block.names, block.places, strict=True)
        ]

    def _rest(self, like: Columns) -> list[tuple[str, Tensor]]:
        """Return the indices of entries that no block has."""
        rest = []
        for name, shape in self.shapes:
            free = torch.ones(prod(shape), dtype=torch.bool, device=like[name].device)
            for block in self.blocks:
                for own, place in zip(block.names, block.places, strict=True):
                    if own == name:
                        free[slice(None) if place is None else _index(place, like)] = False
            rest.append((name, free.nonzero().squeeze(1)))
        return rest


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)


def _index(place: Place | None, like: Columns) -> Tensor | slice:
    return slice(None) if place is None else place.entries(next(iter(like.values())).device)
