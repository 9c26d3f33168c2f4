"""Sums over data of which the blocks of an approximation are made."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.capture import RecordedUse
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import WEIGHT, Block, Key, Uses, plan_blocks
from curvlinops.operators.kfac.options import Fallback, Options
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
        bases: The eigenbases of EKFAC's blocks, by ``Block.views``.
        num_batches: The number of batches, of the rank that had most.
    """

    space: ParameterSpace
    options: Options
    uses: Uses = field(default_factory=Uses)
    blocks: tuple[Block, ...] = ()
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    bases: dict[tuple[ParameterView, ...], Any] = field(default_factory=dict)
    num_batches: int = 0

    @property
    def weight(self) -> Tensor | float:
        """The data's weight: the number, or total weight, of loss terms."""
        return self.tensors.get(WEIGHT, 0.0)

    @property
    def exact_blocks(self) -> dict[str, Block]:
        """The exact blocks, or diagonals of these, by parameter."""
        return {block.names[0]: block for block in self.blocks if block.is_exact}

    def need_samples(self, uses: list[RecordedUse]) -> list[RecordedUse]:
        """Return the uses of which it matters which rows belong to which sample.

        Factors in the expand setting are sums over all rows. Exact blocks are of samples; which
        parameters get one as a fallback is known after the first batch.
        """
        options = self.options
        if not self.blocks and options.fallback is not Fallback.ERROR:
            return uses
        names = options.reduced.union(self.exact_blocks)
        return [
            use
            for use in uses
            if use.lookup is not None
            or not (use.use.is_product or use.use.is_bias)
            or use.entries is None
            or not names.isdisjoint(use.origins)
        ]

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
        if (before := self.tensors.get(key)) is None:
            self.tensors[key] = tensor
        else:
            before += tensor

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
