"""Sums over data of which the blocks of an approximation are made."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import WEIGHT, BlockSpec, Key, Uses, plan_blocks
from curvlinops.operators.kfac.options import Options
from curvlinops.risk.distributed import Ranks
from curvlinops.structured.layout import ParameterView


class ChangedError(RuntimeError):
    """Data uses a parameter in a way that needs other sums than those that were added up."""

    def __init__(self, name: str):
        super().__init__(
            f"Layers use {name} in other ways than the data before showed, so that its block has "
            "another structure, and sums cannot be added. Compute the factors from all data, with "
            "a batch first that uses it in the new way; or leave it out of params."
        )


@dataclass
class FactorSums:
    """Sums over some data.

    Attributes:
        space: All parameters.
        options: The options of the approximation.
        uses: The uses of the parameters that the data shows.
        blocks: The blocks that are made of the sums.
        tensors: The sums. Those of an operator never change; new ones take their place.
        bases: The eigenbases of EKFAC's blocks, by ``BlockSpec.slices``.
        num_batches: The number of batches, of the rank that had most.
    """

    space: ParameterSpace
    options: Options
    uses: Uses = field(default_factory=Uses)
    blocks: tuple[BlockSpec, ...] = ()
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    bases: dict[tuple[ParameterView, ...], Any] = field(default_factory=dict)
    num_batches: int = 0

    @property
    def weight(self) -> Tensor | float:
        """The data's weight, its share of the normalization."""
        return self.tensors.get(WEIGHT, 0.0)

    @property
    def exact_blocks(self) -> dict[str, BlockSpec]:
        """The exact blocks, or diagonals of these, by parameter."""
        return {block.names[0]: block for block in self.blocks if block.is_exact}

    @property
    def need_samples(self) -> bool:
        """Whether the next batch has to tell which rows of layers belong to which sample."""
        # factors in the expand setting are sums over all rows; exact blocks are of samples
        return bool(self.options.reduced or not self.blocks or self.exact_blocks)

    def with_uses(self, uses: Uses) -> "FactorSums":
        """Return the sums for the blocks that these uses lead to.

        Args:
            uses: The uses that this data and more show.

        Raises:
            ChangedError: If a block becomes an exact one, which this data has no sums for.
        """
        if self.blocks and self.uses == uses:
            return self
        blocks = plan_blocks(uses, self.space.shapes, self.options)
        after = replace(self, uses=uses, blocks=blocks)
        before = self.exact_blocks
        for name, block in after.exact_blocks.items():
            if name in self.uses.names and (
                name not in before
                or (before[name].structure, before[name].groups) != (block.structure, block.groups)
            ):
                raise ChangedError(name)
        return after

    def emptied(self) -> "FactorSums":
        """Return sums to which the batches that come next can be added."""
        return replace(self, tensors={})

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add to one of the sums, in place."""
        if key in self.tensors:
            self.tensors[key] += tensor
        else:
            self.tensors[key] = tensor

    def plus(
        self, other: "FactorSums", decay: float = 1.0, overwrite: bool = False
    ) -> "FactorSums":
        """Return the sums over this and other data, for the other's blocks.

        Args:
            other: The sums over the other data.
            decay: The factor by which these sums are multiplied first.
            overwrite: Whether the result takes the memory of the other sums.
        """
        tensors = {}
        for key in self.tensors | other.tensors:
            old, new = self.tensors.get(key), other.tensors.get(key)
            if new is None:
                tensors[key] = old if decay == 1.0 else decay * old
            elif old is None:
                tensors[key] = new
            else:
                out = new if overwrite else None
                tensors[key] = torch.add(new, old, alpha=decay, out=out)
        num_batches = self.num_batches + other.num_batches
        bases = other.bases | self.bases
        return replace(other, tensors=tensors, bases=bases, num_batches=num_batches)

    def over(self, ranks: Ranks) -> "FactorSums":
        """Return the sums over the data of all ranks, which have the same blocks."""
        tensors = ranks.add_all(self.tensors, self.space.device)
        return replace(self, tensors=tensors, num_batches=ranks.largest(self.num_batches))

    def to(self, space: ParameterSpace) -> "FactorSums":
        """Return the sums on the device of a space."""
        tensors = {key: tensor.to(space.device) for key, tensor in self.tensors.items()}
        bases = {key: basis.map(lambda x: x.to(space.device)) for key, basis in self.bases.items()}
        return replace(self, space=space, tensors=tensors, bases=bases)
