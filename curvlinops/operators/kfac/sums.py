"""Sums over data from which the blocks of an approximation are computed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace, not_finite
from curvlinops.operators.kfac.blocks import (
    COUNTS,
    INPUT_COUNT,
    INPUTS,
    MATRIX,
    OF_BLOCKS,
    WEIGHT,
    Block,
    Key,
    LayerUse,
    Uses,
    plan_blocks,
)
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.partition import among, num_entries, units
from curvlinops.risk.batch_problem import NO_DERIVATIVE, OVERFLOW
from curvlinops.structured.layout import ParameterView
from curvlinops.support.files import recorded
from curvlinops.team.team import ALONE, Team


class ChangedError(RuntimeError):
    """Data uses a parameter in a way that needs other sums than those that were added up."""

    def __init__(self, name: str):
        super().__init__(
            f"Layers use {name} in other ways than the data before showed, so that its block has "
            "another structure, and sums cannot be added. Compute the factors from all data, with "
            "a batch first that uses it in the new way; or leave it out of params."
        )


@recorded
@dataclass
class FactorSums:
    """Sums over some data, which become means once all batches were added.

    Attributes:
        space: All parameters.
        options: The options of the approximation.
        uses: The uses of the parameters that the data shows.
        blocks: The blocks that are made of the sums.
        tensors: The sums, or means. Those of an operator never change; new ones take their place.
        bases: The eigenbases of EKFAC's blocks, by ``Block.views``.
        num_batches: The number of batches, of the rank that had most.
        scale: The risk's normalization c, by which means of gradients were multiplied; ``None`` for
            sums.
        is_updated: Whether there are batches among the data that the operator's own may not have.
        num_samples: The number of samples in the data of all ranks, if it is known.
        ranks: The processes that compute the sums together.
        owners: The rank that has the sums of a parameter; empty if all ranks have all.
    """

    space: ParameterSpace
    options: Options
    uses: Uses = field(default_factory=Uses)
    blocks: tuple[Block, ...] = ()
    tensors: dict[Key, Tensor] = field(default_factory=dict)
    bases: dict[tuple[ParameterView, ...], Any] = field(default_factory=dict)
    num_batches: int = 0
    scale: float | None = None
    is_updated: bool = False
    num_samples: int | None = None
    ranks: Team = ALONE
    owners: Mapping[str, int] = field(default_factory=dict)

    @property
    def weight(self) -> Tensor | float:
        """The data's weight: the number, or total weight, of loss terms."""
        return self.tensors.get(WEIGHT, 0.0)

    @property
    def exact_blocks(self) -> dict[str, Block]:
        """The exact blocks, or diagonals of these, by parameter."""
        return {block.names[0]: block for block in self.blocks if block.is_exact}

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

    def check_finite(self) -> None:
        """Refuse NaN and infinite values, which gradients of a finite loss may have."""
        key = not_finite(self.tensors) if self.tensors else None
        if key is not None:
            names = ", ".join(map(repr, sorted(_names(key))))
            raise ValueError(
                f"Inputs or gradients in the block of {names} are NaN or infinite, though the "
                f"loss is finite: {NO_DERIVATIVE}, or {OVERFLOW}."
            )

    def check_samples(self, source: str, number: int | None) -> None:
        """Refuse means over another number of samples than an operator's, if both are known."""
        is_known = None not in (self.num_samples, number) and not self.is_updated
        if is_known and self.num_samples != number:
            raise ValueError(
                f"The {source} differs in the number of samples: it has {self.num_samples}, not "
                f"{number}. Pass the same data, or compute the factors again."
            )

    # --- some of the parameters

    def units(self) -> list[list[str]]:
        """Return the parameters in groups whose blocks have no sum in common."""
        return units(self.uses, self.space.names, map(_names, self.tensors))

    def part(self, names: Collection[str]) -> "FactorSums":
        """Return the sums of some parameters, which must have no sum in common with others."""
        known = frozenset(use for use in self.uses.known if use.name in names)
        unknown = {name: x for name, x in self.uses.unknown.items() if name in names}
        return replace(
            self,
            space=self.space.restricted(list(names)),
            uses=Uses(known, unknown),
            blocks=tuple(block for block in self.blocks if block.names[0] in names),
            tensors={
                key: x
                for key, x in self.tensors.items()
                if key == WEIGHT or not _names(key).isdisjoint(names)
            },
            bases={views: x for views, x in self.bases.items() if views[0].name in names},
            owners={name: rank for name, rank in self.owners.items() if name in names},
        )

    @classmethod
    def joined(
        cls,
        source: str,
        parts: Iterable["FactorSums"],
        space: ParameterSpace,
        options: Options,
    ) -> "FactorSums":
        """Return the means of all parameters, from means of some of them.

        Args:
            source: Where the parts are, for messages.
            parts: The parts. Several may have the same parameters.
            space: All parameters.
            options: The options of the approximation.

        Raises:
            ValueError: If parameters are missing, or the parts are of different data.
        """
        needed, there = list[FactorSums](), set[str]()
        for part in sorted(parts, key=lambda part: (-len(part.space.names), part.space.names)):
            names = part.space.names
            if there.issuperset(names):  # another process computed them, too
                continue
            if not there.isdisjoint(names):
                raise ValueError(
                    f"Several files have factors of {', '.join(names)}, together with those of "
                    "other parameters. Delete the directory, and compute them again."
                )
            needed.append(part)
            there.update(names)
        if missing := [name for name in space.names if name not in there]:
            raise ValueError(
                f"The {source} has factors of {len(there)} of {len(space.names)} parameters; "
                f"{missing[0]!r} is missing. Continue their computation by write_factors. All "
                "processes must have the same directory."
            )
        all_of, seen = cls(space, options), set[tuple]()
        for part in sorted(needed, key=lambda part: space.names.index(part.space.names[0])):
            seen.add((part.num_batches, float(part.weight)))
            all_of.uses = all_of.uses.union(part.uses)
            all_of.tensors |= part.tensors
            all_of.bases |= part.bases
            all_of.num_batches, all_of.scale = part.num_batches, part.scale
            all_of.is_updated |= part.is_updated
            all_of.num_samples = part.num_samples
        if len(seen) > 1:
            raise ValueError(
                "The data was not the same in all passes for parts of the factors: numbers of "
                f"batches and weights were {sorted(seen)}. Delete the directory, and give the same "
                "data in each pass."
            )
        all_of.blocks = plan_blocks(all_of.uses, space.shapes, options)
        return all_of

    def _record(self) -> tuple:
        sums = self.tensors, self.bases, self.num_batches, self.scale, self.is_updated
        # blocks follow from uses; files have whole parameters
        return self.space.whole, self.options, self.uses, (), *sums, self.num_samples

    def emptied(self) -> "FactorSums":
        """Return sums to which the batches that come next can be added."""
        return replace(self, tensors={}, scale=None)

    def add(self, key: Key, tensor: Tensor) -> None:
        """Add to one of the sums, in place."""
        if (before := self.tensors.get(key)) is None:
            self.tensors[key] = tensor
        else:
            before += tensor

    def keys_of_inputs(self) -> dict[LayerUse, list[Key]]:
        """Return the keys of the sums to which the inputs of each use were added."""
        keys: dict[LayerUse, list[Key]] = {}
        for key in self.tensors:
            if key[1] == INPUTS:
                for use in key[0]:
                    keys.setdefault(use, []).append(key)
        return keys

    # --- means

    def normalization(self, key: Key) -> float:
        """Return the number by which a sum was multiplied."""
        if self.scale is None or key[1] in COUNTS:
            return 1.0
        if key[1] != INPUTS:
            return self.scale
        # zeros for no input at all; with decay, counts are below one, too
        return 1.0 / (float(self.tensors[key[0], INPUT_COUNT]) or 1.0)

    def normalize(self, scale: Callable[[Tensor | float], float]) -> None:
        """Turn sums into means, in place.

        Args:
            scale: Returns the risk's normalization c, given the data's weight.
        """
        self.scale = scale(self.weight) if float(self.weight) else 1.0
        equal: dict[float, list[Tensor]] = {}
        for key, tensor in self.tensors.items():
            if key[1] not in COUNTS:
                equal.setdefault(self.normalization(key), []).append(tensor)
        for factor, tensors in equal.items():
            torch._foreach_mul_(tensors, factor)

    def plus(
        self,
        other: "FactorSums",
        scale: Callable[[Tensor | float], float],
        decay: float = 1.0,
        overwrite: bool = False,
    ) -> "FactorSums":
        """Return the means over this and other data, for the other's blocks.

        Args:
            other: The means over the other data.
            scale: Returns the risk's normalization c, given the data's weight.
            decay: The factor by which these sums are multiplied first.
            overwrite: Whether the result takes the memory of the other means.
        """
        num_batches, bases = self.num_batches + other.num_batches, other.bases | self.bases
        both = replace(other, tensors={}, bases=bases, num_batches=num_batches, scale=None)
        both.is_updated = True
        # of many small tensors, those with equal factors are added by one call
        equal: dict[tuple[float, float], list[Key]] = {}
        # the counts and the weight come first: they tell the normalization of the others
        for key in sorted(self.tensors | other.tensors, key=lambda key: key[1] not in COUNTS):
            if both.scale is None and key[1] not in COUNTS:
                both.scale = scale(both.weight)
            after, (old, new) = both.normalization(key), (x.tensors.get(key) for x in (self, other))
            of_old = 0.0 if old is None else decay * after / self.normalization(key)
            of_new = 0.0 if new is None else after / other.normalization(key)
            if old is None or new is None:
                tensor, factor = (old, of_old) if new is None else (new, of_new)
                both.tensors[key] = tensor if factor == 1.0 else factor * tensor
                continue
            if key[1] in COUNTS:
                both.tensors[key] = (new * of_new).add_(old, alpha=of_old)
            else:
                equal.setdefault((of_old, of_new), []).append(key)
        for (of_old, of_new), keys in equal.items():
            olds, news = ([x.tensors[key] for key in keys] for x in (self, other))
            if overwrite:
                torch._foreach_mul_(news, of_new)
            else:
                news = torch._foreach_mul(news, of_new)
            torch._foreach_add_(news, olds, alpha=of_old)
            both.tensors.update(zip(keys, news, strict=True))
        return both

    # --- several processes

    def is_here(self, name: str) -> bool:
        """Return whether this rank has the sums of a parameter."""
        return self.owners.get(name, self.ranks.rank) == self.ranks.rank

    def distributed(self, keys: Iterable[Key]) -> "FactorSums":
        """Return the sums with an owner for each parameter; those of others stay for now.

        Args:
            keys: The keys of the sums of all ranks.
        """
        groups = units(self.uses, self.space.names, map(_names, keys))
        new = [group for group in groups if self.owners.keys().isdisjoint(group)]
        limit = self.options.max_factor_size
        sizes = [num_entries(self.uses, group, self.space.shapes, limit) for group in new]
        owners = dict(self.owners)
        for group, rank in zip(new, among(sizes, self.ranks.size), strict=True):
            owners |= dict.fromkeys(group, rank)
        for group in groups:  # one that was joined to another later on
            known = [owners[name] for name in group if name in owners]
            owners |= dict.fromkeys(set(group) - owners.keys(), known[0])
        return replace(self, owners=owners)

    @property
    def owning_ranks(self) -> Team:
        """The processes each of which has the sums of some parameters."""
        return self.ranks if self.owners else ALONE

    def holders(self, key: Key) -> Sequence[int]:
        """Return the ranks that have a sum."""
        if not self.owners or key == WEIGHT:
            return range(self.ranks.size)
        return sorted({self.owners[name] for name in _names(key)})

    def over_ranks(self, partition: bool) -> "FactorSums":
        """Return the sums over the data of all ranks, which have the same blocks.

        Args:
            partition: Whether each rank gets a part of the sums.
        """
        ranks = self.ranks
        keys = {key: None for each in ranks.gather_objects(list(self.tensors)) for key in each}
        sums = self.distributed(keys) if partition else self
        tensors = ranks.add_all(self.tensors, self.space.device, sums.holders)
        return replace(sums, tensors=tensors, num_batches=ranks.largest(self.num_batches))

    def own(self) -> "FactorSums":
        """Return the sums that this rank has to keep."""
        tensors = {
            key: x for key, x in self.tensors.items() if self.ranks.rank in self.holders(key)
        }
        bases = {views: x for views, x in self.bases.items() if self.is_here(views[0].name)}
        return replace(self, tensors=tensors, bases=bases)

    def to(self, space: ParameterSpace) -> "FactorSums":
        """Return the sums on the device of a space."""
        tensors = {key: tensor.to(space.device) for key, tensor in self.tensors.items()}
        bases = {
            views: basis.with_tensors({n: x.to(space.device) for n, x in basis.tensors().items()})
            for views, basis in self.bases.items()
        }
        return replace(self, space=space, tensors=tensors, bases=bases)


def _names(key: Key) -> set[str]:
    """Return the parameters to whose blocks a sum belongs."""
    of, kind = key
    if key == WEIGHT:
        return set()
    if kind == MATRIX:
        return {of}
    if kind in (INPUTS, INPUT_COUNT, *OF_BLOCKS):
        return {part.name for part in of}
    return {of.name, of.partner.name} if of.shares_gradients else {of.name}
