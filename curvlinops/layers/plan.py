"""Plans: what a graph has shown of uses and of samples, for later graphs that are the same.

For when two graphs are the same see ``Graph``. Graphs whose uses depend on the numbers in tensors
are read anew.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvlinops.layers.reading import ParameterUse
from curvlinops.support.torch_internals import input_metadata

Fact = TypeVar("Fact")


class Plan:
    """The uses of parameters in a graph; ``unread`` are used at a node whose rule is not known."""

    def __init__(self, uses: Iterable[ParameterUse], unread: Iterable[str]):
        self.uses, self.unread = tuple(uses), frozenset(unread)
        #: The uses, and the lookups in tables of which they are functions.
        self.read = (*self.uses, *(use.lookup for use in self.uses if use.lookup is not None))
        self._facts: dict[Hashable, Any] = {}

    def find_kinds(self, nodes: Sequence[Any], others: Mapping[ParameterUse, Any]) -> None:
        """Find equal uses, given the nodes and the other factors of one of the graphs."""
        kinds: dict[Hashable, int] = {}
        for use in self.uses:
            factor = facts_of(others[use])
            is_dense = factor is None or torch.strided in factor
            has_groups = use.use.is_settled and use.use.has_groups and prod(use.shape) > 0
            if is_dense and has_groups and use.entries is not None:
                of = input_metadata(nodes[use.node])
                output = tuple(of.shape), of.dtype, of.device
                facts = use.use, use.samples, use.shape, output, factor
                use.kind, use.factor = kinds.setdefault(facts, len(kinds)), factor

    def known(self, key: Hashable, find: Callable[[], Fact]) -> Fact:
        """Return what another class found out about the uses, by a key of its own."""
        if key not in self._facts:
            self._facts[key] = find()
        return self._facts[key]


def facts_of(other: Any) -> tuple | None:
    """Return what must be equal of uses' other factors; ``None`` if the graph shows it."""
    if not isinstance(other, Tensor):
        return None
    return other.shape, other.dtype, other.device, other.layout
