"""One pass over the data, which sums up what the blocks of an approximation are made of."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from curvlinops.core.space import ParameterSpace
from curvlinops.layers.batch import Part
from curvlinops.layers.factors import Kind, gradient_factor, input_factor, moment
from curvlinops.layers.forms import Form, Within
from curvlinops.layers.outer import add
from curvlinops.layers.samples import Group, SampleGradients, split
from curvlinops.operators.kronecker.options import Options
from curvlinops.operators.kronecker.plan import Block, Usage, kind_of, place_of, plan, usages


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

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes of the matrices."""
        return [list(x.shape) for x in (self.inputs, self.gradients) if x is not None]


@dataclass
class Sums:
    """Sums over the data of which all blocks are made.

    Attributes:
        blocks: The blocks; ``None`` before the first batch.
        products: Those of Kronecker structure, by number and kind.
        matrices: The others, by number: ``[G, D, D]``, or diagonals ``[G, D]``.
        terms: The share of the normalization.
        num_batches: How many batches there were.
    """

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
        return Sums(self.blocks, products, matrices, factor * self.terms, self.num_batches)

    def plus(self, other: "Sums") -> "Sums":
        """Return the sums over this and other data.

        Raises:
            ValueError: If these are of other blocks.
        """
        if self.blocks != other.blocks:
            raise ValueError("The other operator has blocks of other parameters or structure.")
        total = self.scaled(1.0)
        for key, factors in other.products.items():
            total.add_product(key, factors)
        for number, matrix in other.matrices.items():
            total.add_matrix(number, matrix)
        total.terms = total.terms + other.terms
        total.num_batches += other.num_batches
        return total

    def add_product(self, key: tuple[int, Kind], factors: Factors) -> None:
        """Add to the sums of one Kronecker product.

        Raises:
            ValueError: If of one a diagonal is known, and of the other the whole matrix.
        """
        if key not in self.products:
            self.products[key] = replace(factors)
            return
        own = self.products[key]
        if own.shapes != factors.shapes:
            raise ValueError(
                f"The factors of '{self.blocks[key[0]].names[0]}' have shapes {own.shapes}, those "
                f"to be added {factors.shapes}: they were computed with another max_factor_size."
            )
        self.products[key] = Factors(
            own.inputs + factors.inputs,
            own.count + factors.count,
            None if own.gradients is None else own.gradients + factors.gradients,
        )

    def add_matrix(self, number: int, matrix: Tensor) -> None:
        """Add to the sum of a block that is no Kronecker product."""
        own = self.matrices.get(number)
        self.matrices[number] = matrix if own is None else own + matrix

    def to(self, device: torch.device | str) -> None:
        """Move all sums."""
        for factors in self.products.values():
            factors.inputs = factors.inputs.to(device)
            factors.count = factors.count.to(device)
            if factors.gradients is not None:
                factors.gradients = factors.gradients.to(device)
        self.matrices = {n: matrix.to(device) for n, matrix in self.matrices.items()}
        self.terms = torch.as_tensor(self.terms).to(device)


class ChangedError(RuntimeError):
    """A batch uses parameters in other ways than those before."""


class Estimator:
    """Adds up batches.

    Args:
        space: The parameters.
        options: The options of the approximation.
    """

    def __init__(self, space: ParameterSpace, options: Options):
        self._space, self._options = space, options
        self._used: dict[str, set[Usage]] = {}
        self._unknown: dict[str, str] = {}
        self._blocks: list[Block] | None = None

    def add(
        self,
        sums: Sums,
        samples: SampleGradients,
        vectors: Iterable[Tensor],
        unknown: dict[str, str],
    ) -> None:
        """Add a batch.

        Args:
            sums: The sums over the batches before.
            samples: The batch's captured forward pass.
            vectors: What is backpropagated, ``[V, *output]`` each.
            unknown: Parameters whose uses are not known, and why.

        Raises:
            ChangedError: If parameters are used in ways that earlier batches did not show, so that
                their sums have another structure. Start once more.
        """
        for number, u in enumerate(vectors):
            parts = list(samples.parts(u))
            if number == 0:
                self._look(sums, parts, unknown)
            rest = samples.rest(u)
            self._add(sums, parts, rest, with_inputs=number == 0)

    def _look(self, sums: Sums, parts: list[Part], unknown: dict[str, str]) -> None:
        """Choose the structure of the blocks, given one more batch."""
        used = usages(parts)
        used = {n: used.get(n, set()) | self._used.get(n, set()) for n in {*used, *self._used}}
        if self._blocks is None or used != self._used or unknown != self._unknown:
            self._used, self._unknown = used, dict(unknown)
            self._blocks = plan(used, unknown, self._space, self._options)
        if sums.blocks is None:
            sums.blocks = self._blocks
        if sums.blocks != self._blocks:
            raise ChangedError(
                "The batch uses parameters in ways that the data before did not show, so that the "
                "factors have another structure. Compute them from all data."
            )

    def _add(self, sums: Sums, parts: list[Part], rest: Sequence[Group], with_inputs: bool) -> None:
        numbers = {
            block.names[0]: number
            for number, block in enumerate(sums.blocks)
            if block.structure in ("dense", "diagonal")
        }
        by_name: dict[str, list[Form]] = {}
        for part in parts:
            if part.name in numbers:
                by_name.setdefault(part.name, []).append(part.form)
        found = by_block(sums.blocks, parts)
        parts.clear()  # what was added is not kept in memory
        for number in list(found):
            own = found.pop(number)
            for kind in sums.blocks[number].kinds:
                alike = [part for part in own if kind_of(part) == kind]
                if alike:
                    self._add_product(sums, (number, kind), alike, with_inputs)
        groups = [([name], add(forms)) for name, forms in by_name.items()]
        for names, form in [*groups, *rest]:
            for some in form.parts():
                rows = split(names, form.rows(some).flatten(0, 1), self._space)
                for name in names:
                    self._add_matrix(sums, numbers[name], rows[name])

    def _add_product(
        self, sums: Sums, key: tuple[int, Kind], parts: list[Part], with_inputs: bool
    ) -> None:
        kind, block = key[1], sums.blocks[key[0]]
        dtype, reduce = self._space.dtype, block.names[0] in self._options.reduced
        whole_input, whole_output = stays_whole(block, kind, self._options)
        gradients = None
        if block.twin is None:
            gradients = gradient_factor(parts, reduce, diagonal=not whole_output).to(dtype)
        if with_inputs:
            inputs, count = input_factor(parts, reduce, block.scale, diagonal=not whole_input)
            sums.add_product(key, Factors(inputs.to(dtype), count.double(), gradients))
        elif gradients is not None:
            sums.products[key].gradients += gradients

    def _add_matrix(self, sums: Sums, number: int, rows: Tensor) -> None:
        """Add outer products of gradients ``[P, *shape]``, or their squares."""
        block = sums.blocks[number]
        size = prod(rows.shape[1:]) // block.groups
        rows = rows.reshape(len(rows), block.groups, size).to(self._space.dtype)
        sums.add_matrix(number, moment(rows, diagonal=block.structure == "diagonal"))


def stays_whole(block: Block, kind: Kind, options: Options) -> tuple[bool, bool]:
    """Return of which factors, those of inputs and of outputs, more than the diagonal is wanted."""
    inputs = kind.inputs + (block.scale is not None)
    limit = options.max_factor_size
    return not kind.lookup and inputs <= limit, kind.outputs <= limit


def by_block(blocks: Sequence[Block], parts: Iterable[Part]) -> dict[int, list[Part]]:
    """Return the uses of weights that make up blocks of Kronecker structure, by number.

    Their forms are those of what the layers use, which may be a part of a parameter.
    """
    numbers = {
        (block.names[0], block.places[0]): number
        for number, block in enumerate(blocks)
        if block.structure == "kronecker"
    }
    found: dict[int, list[Part]] = {}
    for part in parts:
        number = numbers.get((part.name, place_of(part)))
        if number is not None:
            within = isinstance(part.form, Within)
            own = part._replace(form=part.form.form) if within else part
            found.setdefault(number, []).append(own)
    return found
