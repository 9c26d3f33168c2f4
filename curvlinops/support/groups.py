"""Groups of what belongs together."""

from collections.abc import Hashable, Iterable


def connected(sets: Iterable[Iterable[Hashable]]) -> list[list[int]]:
    """Return the indices of sets in groups, where sets of different groups share no element."""
    parents: dict[Hashable, Hashable] = {}

    def root(x: Hashable) -> Hashable:
        while (parent := parents.setdefault(x, x)) is not x:
            parents[x] = x = parents[parent]
        return x

    firsts = []
    for elements in sets:
        first, *others = elements
        firsts.append(first)
        for x in others:
            parents[root(x)] = root(first)
    groups: dict[Hashable, list[int]] = {}
    for i, first in enumerate(firsts):
        groups.setdefault(root(first), []).append(i)
    return list(groups.values())
