"""Sums over data of which the blocks of an approximation are made."""

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import TERMS, Key, Plan, Uses, needed_sums, plan_blocks
from curvlinops.operators.kfac.options import Options
from curvlinops.risk.distributed import Ranks
from curvlinops.structured.layout import ParameterView


class ChangedError(RuntimeError):
    """Data uses parameters in ways that need other sums than those that were added up.

    Args:
        names: The parameters.
        uses: The uses of all data, that before included.
    """

    def __init__(self, names: Collection[str], uses: Uses):
        super().__init__(
            f"Layers use {', '.join(names)} in other ways than the data before showed, so that its "
            "block has another structure, and sums cannot be added. Compute the factors from all "
            "data."
        )
        self.uses = uses


@dataclass
class FactorSums:
    """Sums over some data.

    Attributes:
        space: All parameters.
        options: The options of the approximation.
        plan: The blocks that are made of the sums.
        tensors: The sums. Those of an operator never change; new ones take their place.
        bases: The eigenbases of EKFAC's blocks, by ``BlockSpec.slices``.
        num_batches: The number of batches, of the rank that had most.
    """

    space: ParameterSpace
    options: Options
    plan: Plan = field(default_factory=Plan)
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    bases: dict[tuple[ParameterView, ...], Any] = field(default_factory=dict)
    num_batches: int = 0

    @property
    def terms(self) -> Tensor | float:
        """The data's share of the normalization."""
        return self.tensors.get(TERMS, 0.0)

    @property
    def need_samples(self) -> bool:
        """Whether the next batch has to tell which rows of layers belong to which sample."""
        # factors in the expand setting are sums over all rows; exact blocks are of samples
        has_exact_blocks = any(block.is_exact for block in self.plan.blocks)
        return bool(self.options.reduced or has_exact_blocks or not self.plan.blocks)

    def with_uses(self, uses: Uses) -> "FactorSums":
        """Return the sums for the blocks that these uses lead to.

        Args:
            uses: How this data and more use the parameters.

        Raises:
            ChangedError: If the blocks need other sums of this data.
        """
        if self.plan.blocks and self.plan.uses == uses:
            return self
        shapes = tuple(self.space.shapes.items())
        plan = plan_blocks(uses, shapes, self.options)
        if self.plan.blocks:
            needed = needed_sums(self.plan.uses, plan.blocks, shapes, self.options)
            changed = [k[0] for k, shape in needed.items() if self.plan.sums.get(k) != shape]
            if changed:
                names = {getattr(of, "name", of) for of in changed}
                raise ChangedError(sorted(names), uses)
        return replace(self, plan=plan)

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
            decay: By what these sums are multiplied first.
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
