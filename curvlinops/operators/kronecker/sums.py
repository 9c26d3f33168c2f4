"""Sums over data of which the blocks of an approximation are made."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isclose
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.factors import Kind
from curvlinops.operators.kronecker.plan import Block
from curvlinops.operators.kronecker.usage import Uses
from curvlinops.risk.distributed import Ranks

NO_USES = Uses({}, {})


class ChangedError(RuntimeError):
    """Data uses parameters in ways that need other sums than those that were added up.

    Args:
        names: The parameters of a block that has another structure.
        uses: What all data shows, that before included.
    """

    def __init__(self, names: Sequence[str], uses: Uses):
        super().__init__(
            f"Layers use {', '.join(names)} in other ways than the data before showed, so that its "
            "block has another structure, and sums cannot be added. Compute the factors from all "
            "data."
        )
        self.uses = uses


@dataclass
class Factors:
    """Sums over the data of which one Kronecker product is made.

    Attributes:
        inputs: Outer products of inputs, ``[G, I, I]``, or their diagonals ``[G, I]``.
        count: The number of these.
        gradients: Outer products of output gradients, ``[G, O, O]``, or their diagonals ``[G, O]``;
            ``None`` if they are those of a twin.
    """

    inputs: Tensor
    count: Tensor
    gradients: Tensor | None


@dataclass
class Sums:
    """Sums over the data of which all blocks are made.

    Attributes:
        uses: What the data shows of the parameters.
        blocks: The blocks; ``None`` before the first batch.
        products: Those of Kronecker structure, by number and kind.
        matrices: The others, by number: ``[G, D, D]``, or diagonals ``[G, D]``.
        terms: The share of the normalization.
        num_batches: How many batches there were, of the rank that had most.
    """

    uses: Uses = NO_USES
    blocks: list[Block] | None = None
    products: dict[tuple[int, Kind], Factors] = field(default_factory=dict)
    matrices: dict[int, Tensor] = field(default_factory=dict)
    terms: Tensor | float = 0.0
    num_batches: int = 0

    def scaled(self, factor: float) -> "Sums":
        """Return multiples of all sums."""
        products = {
            key: Factors(
                factor * own.inputs,
                factor * own.count,
                None if own.gradients is None else factor * own.gradients,
            )
            for key, own in self.products.items()
        }
        matrices = {number: factor * matrix for number, matrix in self.matrices.items()}
        # integers would become PyTorch's default dtype
        terms = self.terms.double() if isinstance(self.terms, Tensor) else self.terms
        return replace(self, products=products, matrices=matrices, terms=factor * terms)

    def plus(
        self, other: "Sums", plan: Callable[[Uses], list[Block]], decay: float = 1.0
    ) -> "Sums":
        """Return the sums over this and other data.

        Args:
            other: The other sums.
            plan: Chooses blocks for what both show.
            decay: By what these sums are multiplied first.

        Raises:
            ChangedError: If both show ways to use a parameter that do not go together.
        """
        uses = self.uses.union(other.uses)
        blocks = plan(uses) if self.blocks is None or uses != self.uses else self.blocks
        total, added = self.scaled(decay), replace(other)
        for sums in (total, added):
            if (sums.uses, sums.blocks) != (uses, blocks):
                sums.adopt(uses, blocks)
        for key, factors in added.products.items():
            total.add_product(key, factors)
        for number, matrix in added.matrices.items():
            total.add_matrix(number, matrix)
        total.terms = total.terms + added.terms
        total.num_batches += added.num_batches
        return total

    def over(self, ranks: Ranks, device: torch.device) -> "Sums":
        """Return the sums over the data of all ranks, whose blocks are the same.

        Args:
            ranks: The ranks, whose batches have numbers up to the largest of theirs.
            device: Where the sums are.
        """
        tensors: dict[tuple, Tensor] = {(number,): x for number, x in self.matrices.items()}
        for key, own in self.products.items():
            tensors |= {(*key, n): x for n, x in vars(own).items() if x is not None}
        matrices, products = {}, {}
        for key, total in ranks.add_all(tensors, device).items():
            if len(key) == 1:
                matrices[key[0]] = total
            else:
                products.setdefault(key[:2], {"gradients": None})[key[2]] = total
        return replace(
            self,
            products={key: Factors(**own) for key, own in products.items()},
            matrices=matrices,
            terms=ranks.total(self.terms),
            num_batches=ranks.largest(self.num_batches),
        )

    def agrees(self, other: "Sums") -> bool:
        """Return whether these are sums of the same numbers, but for rounding."""
        one, two = self._tensors(), other._tensors()
        if not isclose(float(self.terms), float(other.terms), rel_tol=1e-5):
            return False
        return one.keys() == two.keys() and all(_alike(one[key], two[key]) for key in one)

    def _tensors(self) -> dict[Any, Tensor]:
        """Return all sums by what they are sums of."""
        blocks = self.blocks or []
        found: dict[Any, Tensor] = {}
        for (number, kind), own in self.products.items():
            key = (blocks[number].names, blocks[number].places, kind)
            found |= {(*key, "inputs"): own.inputs, (*key, "count"): own.count}
            if own.gradients is not None:
                found |= {(*key, "gradients"): own.gradients}
        for number, matrix in self.matrices.items():
            found[blocks[number].names, blocks[number].places] = matrix
        return found

    def adopt(self, uses: Uses, blocks: list[Block]) -> None:
        """Take over the blocks that more data asks for.

        What is new has sums of zero: layers that were not used had no inputs and no gradients.

        Args:
            uses: What all data shows.
            blocks: The blocks for these uses.

        Raises:
            ChangedError: If a block has another structure than before.
        """
        before = self.blocks or []
        numbers = successors(before, blocks, uses)
        products = {}
        for (number, kind), own in self.products.items():
            gradients, new = own.gradients, numbers[number]
            if blocks[new].twin is not None:
                gradients = None
            elif gradients is None:  # the bias no longer belongs to its weight alone
                twin = before[number].twin
                gradients = self.products[twin, before[twin].kinds[0]].gradients.clone()
            products[new, kind] = replace(own, gradients=gradients)
        self.matrices = {numbers[number]: matrix for number, matrix in self.matrices.items()}
        self.uses, self.blocks, self.products = uses, blocks, products

    def add_product(self, key: tuple[int, Kind], factors: Factors) -> None:
        """Add to the sums of one Kronecker product, in place."""
        if key not in self.products:
            self.products[key] = replace(factors)
            return
        own = self.products[key]
        own.inputs += factors.inputs
        own.count += factors.count
        if own.gradients is not None:
            own.gradients += factors.gradients

    def add_matrix(self, number: int, matrix: Tensor) -> None:
        """Add to the sum of a block that is no Kronecker product, in place."""
        if number in self.matrices:
            self.matrices[number] += matrix
        else:
            self.matrices[number] = matrix

    def to(self, device: torch.device | str) -> None:
        """Move all sums."""
        for factors in self.products.values():
            factors.inputs = factors.inputs.to(device)
            factors.count = factors.count.to(device)
            if factors.gradients is not None:
                factors.gradients = factors.gradients.to(device)
        self.matrices = {n: matrix.to(device) for n, matrix in self.matrices.items()}
        self.terms = torch.as_tensor(self.terms, device=device)


def _alike(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape:
        return False
    tolerance = max(1e-9, 1e3 * torch.finfo(one.dtype).eps)
    return bool((one - two).norm() <= tolerance * one.norm())


def successors(before: Sequence[Block], after: Sequence[Block], uses: Uses) -> Mapping[int, int]:
    """Return the numbers that blocks have among those for more data.

    Args:
        before: The blocks.
        after: Those for more data.
        uses: What that data shows.

    Raises:
        ChangedError: If sums for a block are of no use for those after.
    """
    places = {(block.names, block.places): number for number, block in enumerate(after)}
    numbers = {}
    for number, block in enumerate(before):
        if block.structure == "zero":
            continue
        new = places.get((block.names, block.places))
        if new is None or not _extends(after[new], block):
            raise ChangedError(block.names, uses)
        numbers[number] = new
    return numbers


def _extends(after: Block, before: Block) -> bool:
    """Return whether a block has the same sums, and perhaps more."""
    alike = ("structure", "scale", "groups")
    return all(getattr(after, name) == getattr(before, name) for name in alike) and set(
        before.kinds
    ) <= set(after.kinds)
