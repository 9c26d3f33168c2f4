"""Sums over data from which the blocks of an approximation are computed."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from curvlinops.layers.factors import KroneckerShape
from curvlinops.linear_operator.space import ParameterSpace, not_finite
from curvlinops.operators.kfac.blocks import BASES, COUNTS, INPUTS, WEIGHT, Stack, Uses
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.partition import Placement, divided
from curvlinops.operators.kfac.structure import Structure, structure_of
from curvlinops.risk.batch_problem import NO_DERIVATIVE, OVERFLOW
from curvlinops.structured.layout import ParameterView
from curvlinops.support.files import recorded


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
    """Sums over some data, which become means once all batches were added."""

    space: ParameterSpace
    options: Options
    #: The uses of the parameters that the data shows.
    uses: Uses = field(default_factory=Uses)
    #: The sums, or means, and the eigenbases of EKFAC. Those of an operator never change; new ones
    #: take their place.
    tensors: dict[Stack, Tensor] = field(default_factory=dict)
    #: The number of batches, of the rank that had most.
    num_batches: int = 0
    #: The risk's normalization c, by which means of gradients were multiplied; ``None`` for sums.
    scale: float | None = None
    #: Whether there are batches that the operator's own data may not have.
    is_updated: bool = False
    #: The number of samples in the data of all ranks, if it is known.
    num_samples: int | None = None
    #: Whether equal sums are tensors of their own, as those in several files.
    is_apart: bool = False
    #: The shapes of the matrices in whose eigenbases eigenvalues are, by a block's first view.
    firsts: Mapping[ParameterView, KroneckerShape] = field(default_factory=dict)
    placement: Placement = field(default_factory=Placement)
    #: ``None``: it is found anew.
    structure: Structure = None

    def __post_init__(self) -> None:
        """Find the structure, and put the sums where it has them."""
        if self.structure is None:
            of_sums = self.is_apart, self.placement.owners, self.firsts
            self.structure = structure_of(self.uses, self.space.shapes, self.options, *of_sums)
            self.tensors = moved(self.tensors, self.structure)

    @property
    def weight(self) -> Tensor | float:
        """The data's weight: the number, or total weight, of loss terms."""
        return self.tensors.get(WEIGHT, 0.0)

    def with_uses(self, uses: Uses) -> "FactorSums":
        """Return the sums for these uses and more; raise a ChangedError if that needs others."""
        if self.uses == uses:
            return self
        after, before = replace(self, uses=uses, structure=None), self.structure.exact
        seen = {use.name for use in self.uses.known} | self.uses.unknown.keys()
        for name, block in after.structure.exact.items():
            if name in seen and (
                name not in before
                or (before[name].structure, before[name].groups) != (block.structure, block.groups)
            ):
                raise ChangedError(name)
        return after

    def learn(self, uses: Uses) -> None:
        """Change the structure if a batch shows new uses, see ``with_uses``."""
        if not self.uses.includes(uses):
            after = self.with_uses(self.uses.union(uses))
            self.uses, self.structure, self.tensors = after.uses, after.structure, after.tensors

    def check_finite(self) -> None:
        """Refuse NaN and infinite values, which gradients of a finite loss may have."""
        stack = not_finite(self.tensors) if self.tensors else None
        if stack is not None:
            sums = self.tensors[stack].tensor_split(len(stack.of))
            index = next(i for i, x in enumerate(sums) if not bool(x.isfinite().all()))
            names = ", ".join(map(repr, sorted(stack.names(index))))
            raise ValueError(
                f"Inputs or gradients in the block of {names} are NaN or infinite, though the "
                f"loss is finite: {NO_DERIVATIVE}, or {OVERFLOW}."
            )

    # --- some of the parameters

    def part(self, names: Collection[str]) -> "FactorSums":
        """Return the sums of some parameters, which must have no sum in common with others."""
        space = self.space.restricted(list(names))
        firsts = {view: shape for view, shape in self.firsts.items() if view.name in names}
        uses = self.uses.of(names)
        return replace(self, space=space, uses=uses, firsts=firsts, structure=None)

    @classmethod
    def joined(
        cls,
        source: str,
        parts: Iterable["FactorSums"],
        space: ParameterSpace,
        options: Options,
        number: int | None,
    ) -> "FactorSums":
        """Return the means of all parameters, from parts of one source and of the same data.

        Means over another ``number`` of samples are refused, if both are known.
        """
        uses, tensors, there, seen = Uses(), dict[Stack, Tensor](), set[str](), list[tuple]()
        firsts, is_updated = dict[ParameterView, KroneckerShape](), False
        for part in sorted(parts, key=lambda part: (-len(part.space.names), part.space.names)):
            names = part.space.names
            if there.issuperset(names):  # another process computed them, too
                continue
            if not there.isdisjoint(names):
                raise ValueError(
                    f"Several files have factors of {', '.join(names)}, together with those of "
                    "other parameters. Delete the directory, and compute them again."
                )
            there.update(names)
            uses = uses.union(part.uses)
            tensors |= part.tensors
            firsts |= part.firsts
            is_updated |= part.is_updated
            seen.append((part.num_batches, float(part.weight)))
            last = part
        if missing := [name for name in space.names if name not in there]:
            raise ValueError(
                f"The {source} has factors of {len(there)} of {len(space.names)} parameters; "
                f"{missing[0]!r} is missing. Continue their computation by write_factors. All "
                "processes must have the same directory."
            )
        if len(different := sorted({*seen})) > 1:
            raise ValueError(
                "The data was not the same in all passes for parts of the factors: numbers of "
                f"batches and weights were {different}. Delete the directory, and give the same "
                "data in each pass."
            )
        is_known = None not in (last.num_samples, number) and not is_updated
        if is_known and last.num_samples != number:
            raise ValueError(
                f"The {source} differs in the number of samples: it has {last.num_samples}, not "
                f"{number}. Pass the same data, or compute the factors again."
            )
        of_data = last.num_batches, last.scale, is_updated, last.num_samples
        # files are mapped to memory, and not read before they are used
        return cls(space, options, uses, tensors, *of_data, len(seen) > 1, firsts)

    def _record(self) -> tuple:
        # the structure follows from uses; files have whole parameters
        of_data = self.num_batches, self.scale, self.is_updated, self.num_samples
        where = self.is_apart, self.firsts
        return self.space.whole, self.options, self.uses, self.tensors, *of_data, *where

    def emptied(self) -> "FactorSums":
        """Return sums to which the batches that come next can be added."""
        return replace(self, tensors={}, scale=None)

    def add(self, stack: Stack, indices: Sequence[int], tensor: Tensor) -> None:
        """Add to some sums of a stack, in place: those of these numbers, side by side."""
        number, some = len(stack.of), selected(indices)
        before, is_whole = self.tensors.get(stack), some == slice(0, number)
        if before is None and is_whole:
            self.tensors[stack] = tensor
            return
        if before is None:
            size = number * (len(tensor) // len(indices))
            self.tensors[stack] = before = tensor.new_zeros(size, *tensor.shape[1:])
        if is_whole:
            before += tensor
        else:
            before.unflatten(0, (number, -1))[some] += tensor.unflatten(0, (len(indices), -1))

    # --- means

    def _by_factor(self, tensors: Mapping[Stack, Tensor]) -> dict[float, list[Tensor]]:
        """Return tensors beside these sums by the number by which the sums were multiplied."""
        found: dict[float, list[Tensor]] = {}
        for stack in self.tensors:
            tensor = tensors[stack]
            if self.scale is None or stack.kind in COUNTS:
                found.setdefault(1.0, []).append(tensor)
            elif stack.kind == INPUTS:
                # zeros for no input at all; with decay, counts are below one, too
                counts = [count or 1.0 for count in self.tensors[stack.counts].tolist()]
                is_one = len({*counts}) == 1
                parts = (tensor,) if is_one else tensor.tensor_split(len(counts))
                for count, part in zip(counts, parts, strict=False):
                    found.setdefault(1.0 / count, []).append(part)
            elif stack.kind not in BASES:
                found.setdefault(self.scale, []).append(tensor)
        return found

    def normalize(self, scale: Callable[[Tensor | float], float]) -> None:
        """Turn sums into means, in place, given the risk's normalization c of a weight."""
        self.scale = scale(self.weight) if float(self.weight) else 1.0
        for factor, tensors in self._by_factor(self.tensors).items():
            if factor != 1.0:
                torch._foreach_mul_(tensors, factor)

    def plus(self, other: "FactorSums", decay: float = 1.0) -> "FactorSums":
        """Return the sums over this, times a decay, and other data, in the memory of the other."""
        if other.scale is not None:
            for factor, means in other._by_factor(other.tensors).items():
                torch._foreach_mul_(means, 1.0 / factor)
        before = self
        if self.structure is not other.structure:
            before = replace(self, tensors=moved(self.tensors, other.structure))
        for stack, old in before.tensors.items():
            if stack not in other.tensors:
                is_basis = stack.kind in BASES
                other.tensors[stack] = old if is_basis else torch.zeros_like(old)
        sums = before._by_factor(other.tensors)
        for factor, means in before._by_factor(before.tensors).items():
            torch._foreach_add_(sums[factor], means, alpha=decay / factor)
        num_batches = self.num_batches + other.num_batches
        return replace(other, scale=None, num_batches=num_batches, is_updated=True)

    # --- several processes

    def divided(self) -> "FactorSums":
        """Return the sums with an owner for each parameter; those of others stay for now."""
        num, known = self.placement.ranks.size, self.placement.owners
        if num == 1:
            return self
        limit = self.options.max_factor_size
        owners = divided(self.uses, self.space.shapes, limit, num, known)
        if owners == known:
            return self
        return replace(self, placement=replace(self.placement, owners=owners), structure=None)

    def over_ranks(self) -> "FactorSums":
        """Return the sums, or this rank's part, over the data of all ranks, which know all uses."""
        sums = self.divided() if self.placement.is_divided else self
        ranks, holders = sums.placement.ranks, sums.placement.holders
        tensors = ranks.add_all(sums.tensors, self.space.device, lambda x: holders(x.names(0)))
        return replace(sums, tensors=tensors, num_batches=ranks.largest(self.num_batches))

    def own(self) -> "FactorSums":
        """Return the sums that this rank has to keep."""
        is_here = self.placement.is_here
        tensors = {stack: x for stack, x in self.tensors.items() if is_here(stack.names(0))}
        return replace(self, tensors=tensors)

    def to(self, space: ParameterSpace) -> "FactorSums":
        """Return the sums on the device of a space."""
        tensors = {stack: tensor.to(space.device) for stack, tensor in self.tensors.items()}
        return replace(self, space=space, tensors=tensors)


def selected(indices: Sequence[int]) -> slice | list[int]:
    """Return what selects entries: a slice if they are in order."""
    start = indices[0]
    in_order = [*indices] == [*range(start, start + len(indices))]
    return slice(start, start + len(indices)) if in_order else [*indices]


def moved(tensors: Mapping[Stack, Tensor], structure: Structure) -> dict[Stack, Tensor]:
    """Return sums where a structure has them, without those that it does not need."""
    out: dict[Stack, Tensor] = {}
    found: dict[Stack, dict[int, Tensor]] = {}
    for stack, tensor in tensors.items():
        place = structure.place(stack.kind, stack.of[0])
        if place is not None and place.stack == stack:
            out[place.stack] = tensor
            continue
        for of, part in zip(stack.of, tensor.tensor_split(len(stack.of)), strict=True):
            if (place := structure.place(stack.kind, of)) is not None:
                found.setdefault(place.stack, {})[place.index] = part
    for stack, parts in found.items():
        zeros = torch.zeros_like(next(iter(parts.values())))
        out[stack] = torch.cat([parts.get(i, zeros) for i in range(len(stack.of))])
    return out
