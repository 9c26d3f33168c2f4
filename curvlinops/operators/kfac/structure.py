"""The structure of an approximation, which follows from how layers use the parameters.

Equal blocks make up stacks, which are computed together. Their sums are parts of one tensor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

from curvlinops.layers.factors import KroneckerShape
from curvlinops.operators.kfac.blocks import (
    GRADIENTS,
    INPUT_COUNT,
    INPUTS,
    MATRIX,
    WEIGHT,
    Block,
    LayerUse,
    Stack,
    Term,
    Uses,
    plan_blocks,
)
from curvlinops.operators.kfac.options import Options
from curvlinops.structured.layout import ParameterView, connected

#: The largest number of entries of a stack's matrix. Larger ones gain little, and take memory.
_LARGEST = 2**18


class Place(NamedTuple):
    """Where a sum is: in a stack, and its number there."""

    stack: Stack
    index: int


class Structure:
    """Blocks without matrices, the same as ``stacks`` of equal ones, and the places of sums."""

    def __init__(self, blocks: Sequence[Block], stacks: Iterable[Sequence[Block]]):
        self.blocks = blocks
        self.exact = {block.names[0]: block for block in blocks if block.is_exact}
        self._places = {(WEIGHT.kind, None): Place(WEIGHT, 0)}
        self.stacks = tuple(map(self._stack, stacks))
        self._blocks = {
            block.views: Place(stack, i)
            for stack in self.stacks
            for i, block in enumerate(stack.singles)
        }

    def _stack(self, members: Sequence[Block]) -> Block:
        """Return equal blocks as one, and note the places of their sums."""
        first, views = members[0], tuple(chain(*(block.views for block in members)))
        terms = tuple(map(self._term, zip(*(block.terms for block in members), strict=True)))
        if not terms:
            self._note(MATRIX, tuple(block.names[0] for block in members))
        several = tuple(members) if len(members) > 1 else ()
        return replace(first, views=views, terms=terms, members=several, keys={})

    def _term(self, terms: Sequence[Term]) -> Term:
        shape, gradients, inputs = terms[0].shape, list[Stack](), list[Stack]()
        for of in zip(*(term.of_gradients for term in terms), strict=True):
            gradients.append(self._note(GRADIENTS, of))
        for of in zip(*(term.of_inputs for term in terms), strict=True):
            inputs.append(self._note(INPUTS, of))
            self._note(INPUT_COUNT, of)
        shape = shape._replace(groups=shape.groups * len(terms))
        return Term(shape, tuple(gradients), tuple(inputs))

    def _note(self, kind: str, of: tuple[Any, ...]) -> Stack:
        stack = Stack(kind, of)
        for i, one in enumerate(of):  # several blocks may have the same sums
            self._places.setdefault((kind, one), Place(stack, i))
        return self._places[kind, of[0]].stack

    def place(self, kind: str, of: Any) -> Place | None:
        """Return where a sum is, ``None`` if no block needs it."""
        if (place := self._places.get((kind, of))) is not None:
            return place
        block, index = self._blocks.get(of, (None, 0))
        return block and Place(block.key(kind), index)


def structure_of(
    uses: Uses,
    shapes: Mapping[str, tuple[int, ...]],
    options: Options,
    is_apart: bool = False,
    owners: Mapping[str, int] | None = None,
    firsts: Mapping[ParameterView, KroneckerShape] | None = None,
) -> Structure:
    """Return the structure that follows from uses; see ``FactorSums`` for the other arguments.

    Blocks that are ``is_apart``, or of different ``owners``, make up no stacks.
    """
    if not (uses.known or uses.unknown):  # no batch was seen
        return Structure((), ())
    given = (tuple((x or {}).items()) for x in (shapes, uses.unknown, owners, firsts))
    return _structure(uses.known, uses.inputs, options, is_apart, *given)


@lru_cache(maxsize=16)  # factors that are computed anew mostly have the same structure
def _structure(
    known: frozenset[LayerUse],
    inputs: frozenset[tuple[LayerUse, ...]],
    options: Options,
    is_apart: bool,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    unknown: tuple[tuple[str, str], ...],
    owners: tuple[tuple[str, int], ...],
    firsts: tuple[tuple[ParameterView, KroneckerShape], ...],
) -> Structure:
    uses = Uses(known, dict(unknown), inputs)
    blocks = plan_blocks(uses, dict(shapes), options, dict(firsts))
    apart = ((block,) for block in blocks)
    return Structure(blocks, apart if is_apart else _stacks(blocks, options, dict(owners)))


def _stacks(
    blocks: Sequence[Block], options: Options, owners: Mapping[str, int]
) -> Iterator[tuple[Block, ...]]:
    """Yield equal blocks together; stacks share factors where their blocks do."""
    groups = connected(map(_connections, blocks))
    equal: dict[Any, list[list[Block]]] = {}
    for unit in ([blocks[i] for i in group] for group in groups):
        key = owners.get(unit[0].names[0]), _alike(unit, options)
        equal.setdefault(key, []).append(unit)
    for units in equal.values():
        step = max(_LARGEST // max(_largest(block, options) for block in units[0]), 1)
        for i in range(0, len(units), step):
            yield from zip(*units[i : i + step], strict=True)


def _connections(block: Block) -> list[Any]:
    """Return what blocks may share: factors, and the weight to which a bias belongs."""
    weight = [] if block.weight is None else [block.weight]
    sources = (x for term in block.terms for x in (*term.of_gradients, *term.of_inputs))
    return [block.views[0], *weight, *sources]


def _alike(unit: Sequence[Block], options: Options) -> Any:
    """Return a key that is equal for blocks that can be stacked; the blocks if they cannot."""
    places: dict[Any, int] = {}
    parts = []
    for block in unit:
        is_reduced = block.names[0] in options.reduced
        kind: tuple = block.structure, block.groups, block.layout.size, is_reduced
        if block.terms:
            (shape, outputs, inputs, *_), *others = block.terms
            widths = {use.has_bias_input(options) for together in inputs for use in together}
            if others or len(outputs) > 1 or len(inputs) > 1 or widths - {len(block.views) > 1}:
                return tuple(unit)
            kind = shape._replace(view=None), len(inputs), len(block.views), is_reduced
        elif len(block.views) > 1:
            return tuple(unit)
        parts.append((*kind, *(places.setdefault(x, len(places)) for x in _connections(block))))
    return tuple(parts)


def _largest(block: Block, options: Options) -> int:
    """Return the number of entries of a block's largest tensor."""
    sizes = [1, block.layout.size]
    if block.structure == "dense":
        sizes.append(block.layout.size**2 // block.groups)
    of_terms = (term.shape.factor_sizes(options.max_factor_size) for term in block.terms)
    return max(chain(sizes, *of_terms))
