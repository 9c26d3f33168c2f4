"""Which parameters' factors belong together, and the passes and processes that compute them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod

from curvlinops.operators.kfac.blocks import Uses
from curvlinops.structured.layout import ParameterView, connected
from curvlinops.team.team import ALONE, Team


def units(uses: Uses, names: Sequence[str]) -> list[list[str]]:
    """Return the parameters in groups whose blocks have no factor in common."""
    pairs = [{use.name, use.partner.name} for use in uses.known if use.partner is not None]
    together = [{use.name for use in shared} for shared in uses.inputs]
    groups = connected([*([name] for name in names), *pairs, *together])
    return [[names[i] for i in group if i < len(names)] for group in groups]


def num_entries(
    uses: Uses, names: Collection[str], shapes: Mapping[str, Sequence[int]], limit: int
) -> int:
    """Return about how many numbers parameters and factors have; above the limit, diagonals."""
    factors: dict[ParameterView, int] = {}
    for use in uses.known:
        shape = use.shape
        if use.name not in names or shape is None or (shape.is_bias and use.shares_gradients):
            continue
        sizes = [(shape.outputs, False)]
        sizes += [] if shape.is_bias else [(shape.inputs, shape.one_hot_inputs)]
        number = shape.groups * sum(
            size if is_diagonal or size > limit else size**2 for size, is_diagonal in sizes
        )
        # processes have the uses in different orders
        factors[use.view] = max(number, factors.get(use.view, 0))
    return sum(prod(shapes[name]) for name in names) + sum(factors.values())


def in_passes(groups: Sequence[list[str]], sizes: Sequence[int], num: int) -> list[list[str]]:
    """Divide groups of parameters into at most ``num`` parts of neighbors of about equal size."""
    total, parts = sum(sizes), dict[int, list[str]]()
    for group, size, end in zip(groups, sizes, accumulate(sizes), strict=True):
        middle = end - size / 2
        parts.setdefault(min(int(middle * num / max(total, 1)), num - 1), []).extend(group)
    return list(parts.values())


@dataclass(frozen=True)
class Placement:
    """Which processes have the blocks of which parameters."""

    ranks: Team = ALONE
    #: The rank that has those of a parameter; ``None`` if all ranks have all.
    owners: Mapping[str, int] | None = None

    @property
    def is_divided(self) -> bool:
        """Whether each process has the blocks of some parameters."""
        return self.owners is not None

    @property
    def team(self) -> Team:
        """The processes that need each other for all blocks."""
        return self.ranks if self.is_divided else ALONE

    def holders(self, names: Collection[str]) -> Sequence[int]:
        """Return the ranks that have blocks of some parameters; all if there are no names."""
        if self.owners is None or not names:
            return range(self.ranks.size)
        return sorted({self.owners[name] for name in names})

    def is_here(self, names: Collection[str]) -> bool:
        """Return whether this process is among the holders."""
        return self.ranks.rank in self.holders(names)

    def divided(self, groups: Sequence[list[str]], sizes: Sequence[int]) -> "Placement":
        """Return one owner for each group of parameters, given sizes; known owners stay.

        The largest groups come first, to the process that has least. The time to decompose factors
        is about the power 1.5 of their size, and counts as much as memory.
        """
        owners, loads = dict(self.owners or {}), [0.0] * self.ranks.size
        pairs = zip(groups, sizes, strict=True)
        new = [(group, size) for group, size in pairs if owners.keys().isdisjoint(group)]
        memory, time = (max(sum(size**power for _, size in new), 1) for power in (1, 1.5))
        costs = [(group, size / memory + size**1.5 / time) for group, size in new]
        for group, cost in sorted(costs, key=lambda pair: -pair[1]):
            rank = loads.index(min(loads))
            owners |= dict.fromkeys(group, rank)
            loads[rank] += cost
        for group in groups:  # one that was joined to another later on
            owner = next(owners[name] for name in group if name in owners)
            owners |= dict.fromkeys(set(group) - owners.keys(), owner)
        return replace(self, owners=owners)
