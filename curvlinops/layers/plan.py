"""Plans: what a graph has shown of uses and of samples, for later graphs that are the same.

For when two graphs are the same see ``Graph``. Graphs whose uses depend on the numbers in tensors
are read anew.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar

from curvlinops.layers.reading import ParameterUse

Fact = TypeVar("Fact")


class Plan:
    """The uses of parameters in a graph.

    Attributes:
        uses: The uses.
        read: The same, and the lookups in tables of which they are functions.
        unread: The parameters that meet data at a node whose rule is not known.
    """

    def __init__(self, uses: Iterable[ParameterUse], unread: Iterable[str]):
        self.uses, self.unread = tuple(uses), frozenset(unread)
        self.read = (*self.uses, *(use.lookup for use in self.uses if use.lookup is not None))
        self._facts: dict[Hashable, Any] = {}
        kinds: dict[Hashable, int] = {}
        for use in self.uses:
            if use.use.is_settled and use.entries is not None:
                of = use.use, use.samples, use.shape
                use.kind = kinds.setdefault(of, len(kinds))

    def known(self, key: Hashable, find: Callable[[], Fact]) -> Fact:
        """Return what another class found out about the uses, by a key of its own."""
        if key not in self._facts:
            self._facts[key] = find()
        return self._facts[key]
