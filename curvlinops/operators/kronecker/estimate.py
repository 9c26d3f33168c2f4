"""What a batch adds to the sums that the blocks of an approximation are made of."""

from collections.abc import Iterable, Sequence
from math import prod

from torch import Tensor

from curvlinops.layers.factors import Kind, gradient_factor, input_factor, moment
from curvlinops.layers.forms import Form, innermost
from curvlinops.layers.gradients import SampleGradients
from curvlinops.layers.groups import Group, split
from curvlinops.layers.outer import sum_of
from curvlinops.layers.parts import Part
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kronecker.options import Options
from curvlinops.operators.kronecker.plan import Block, plan
from curvlinops.operators.kronecker.sums import Factors, Sums
from curvlinops.operators.kronecker.usage import Uses, kind_of
from curvlinops.operators.vectors import mark_last

#: Why there may be no factors in the reduce setting.
_OPEN = (
    "some of its layer's rows have no gradient, so that it is not known which samples they belong "
    "to, over which kfac_approx='reduce' averages ('expand' does not)"
)
_UNSORTED = "it is not known to which samples the rows of its layer belong"


class Estimator:
    """Adds batches to sums.

    Args:
        space: The parameters.
        options: The options of the approximation.
    """

    def __init__(self, space: ParameterSpace, options: Options):
        self._space, self._options = space, options
        self._planned: tuple[Uses, list[Block]] | None = None

    def plan(self, uses: Uses) -> list[Block]:
        """Choose the structure of all blocks; the next pass over the data mostly asks the same."""
        if self._planned is None or self._planned[0] != uses:
            self._planned = uses, plan(uses, self._space, self._options)
        return list(self._planned[1])

    def add(
        self,
        sums: Sums,
        samples: SampleGradients,
        vectors: Iterable[Tensor],
    ) -> None:
        """Add a batch.

        Args:
            sums: The sums over the batches before.
            samples: The batch's captured forward pass.
            vectors: What is backpropagated, ``[V, *output]`` each.

        Raises:
            ChangedError: If a parameter is used in a way that does not go together with what
                earlier batches showed, so that its sums have another structure.
        """
        for number, (u, last) in enumerate(mark_last(vectors)):
            parts = list(samples.parts(u, last))
            if number == 0:
                self._look(sums, parts, samples.fallbacks)
            rest = samples.rest(u)
            exact = {name for b in sums.blocks if b.structure != "kronecker" for name in b.names}
            unsorted = {part.name for part in parts if part.unsorted}
            rest += samples.one_by_one(u, (exact & unsorted).difference(samples.fallbacks))
            self._add(sums, parts, rest, with_inputs=number == 0)

    def _look(self, sums: Sums, parts: list[Part], unknown: dict[str, str]) -> None:
        """Choose the structure of the blocks, given one more batch."""
        reduced = self._options.reduced
        lost = {p.name for p in parts if p.open and p.name in reduced and kind_of(p) is not None}
        unsorted = {
            part.name
            for part in parts
            if part.unsorted and (part.name in reduced or kind_of(part) is None)
        }
        unknown = unknown | dict.fromkeys(lost, _OPEN) | dict.fromkeys(unsorted, _UNSORTED)
        uses = sums.uses.union(Uses.of(parts, unknown))
        if sums.blocks is None or uses != sums.uses:
            sums.adopt(uses, self.plan(uses))

    def _add(self, sums: Sums, parts: list[Part], rest: Sequence[Group], with_inputs: bool) -> None:
        numbers = {
            block.names[0]: number
            for number, block in enumerate(sums.blocks)
            if block.structure in ("dense", "diagonal")
        }
        by_name: dict[str, list[Form]] = {}
        for part in parts:
            if part.name in numbers and not part.unsorted:
                by_name.setdefault(part.name, []).append(part.form)
        found = by_block(sums.blocks, parts)
        parts.clear()  # what was added is not kept in memory
        for number in list(found):
            own = found.pop(number)
            for kind in sums.blocks[number].kinds:
                alike = [part for part in own if kind_of(part) == kind]
                if alike:
                    self._add_product(sums, (number, kind), alike, with_inputs)
        groups = [([name], sum_of(forms)) for name, forms in by_name.items()]
        for names, form in [*groups, *rest]:
            for some in form.parts():
                rows = split(names, form.rows(some).flatten(0, 1), self._space)
                for name in names:
                    self._add_matrix(sums, numbers[name], rows[name])

    def _add_product(
        self, sums: Sums, key: tuple[int, Kind], parts: list[Part], with_inputs: bool
    ) -> None:
        kind, block = key[1], sums.blocks[key[0]]
        reduce = block.names[0] in self._options.reduced
        # sums of outer products have no negative eigenvalues beyond the rounding of their dtype
        parts = [part._replace(form=part.form.to(self._space.dtype)) for part in parts]
        whole_input, whole_output = stays_whole(block, kind, self._options)
        gradients = None
        if block.twin is None:
            gradients = gradient_factor(parts, reduce, diagonal=not whole_output)
        if with_inputs:
            inputs, count = input_factor(parts, reduce, block.scale, diagonal=not whole_input)
            sums.add_product(key, Factors(inputs, count.double(), gradients))
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
        place, form, _ = innermost(part.form)
        number = numbers.get((part.name, place))
        if number is not None:
            found.setdefault(number, []).append(part._replace(form=form))
    return found
