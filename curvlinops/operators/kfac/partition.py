"""Which parameters' factors belong together, and the passes and processes that compute them."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
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


def divided(
    uses: Uses,
    shapes: Mapping[str, Sequence[int]],
    limit: int,
    num: int,
    known: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Return to which of ``num`` processes or passes each parameter belongs; known ones stay.

    The largest units come first, to the process that has least: of memory, and of the time to
    decompose factors, which is about the power 1.5 of their size.
    """
    owners, loads, groups = dict(known or {}), [0.0] * num, units(uses, list(shapes))
    new = [group for group in groups if owners.keys().isdisjoint(group)]
    sizes = [num_entries(uses, group, shapes, limit) for group in new]
    memory, time = (max(sum(size**power for size in sizes), 1) for power in (1, 1.5))
    costs = (size / memory + size**1.5 / time for size in sizes)
    for cost, group in sorted(zip(costs, new, strict=True), key=lambda pair: -pair[0]):
        owner = loads.index(min(loads))
        owners |= dict.fromkeys(group, owner)
        loads[owner] += cost
    for group in groups:  # one that was joined to another later on
        owner = next(owners[name] for name in group if name in owners)
        owners |= dict.fromkeys(set(group) - owners.keys(), owner)
    return owners


def num_entries(
    uses: Uses, names: Collection[str], shapes: Mapping[str, Sequence[int]], limit: int
) -> int:
    """Return about how many numbers parameters and factors have; above the limit, diagonals."""
    factors: dict[ParameterView, int] = {}
    for use in uses.known:
        shape = use.shape
        if use.name not in names or shape is None or (shape.is_bias and use.shares_gradients):
            continue
        # processes have the uses in different orders
        factors[use.view] = max(sum(shape.factor_sizes(limit)), factors.get(use.view, 0))
    return sum(prod(shapes[name]) for name in names) + sum(factors.values())


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
