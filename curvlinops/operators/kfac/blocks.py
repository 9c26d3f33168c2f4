"""Layers' uses of parameters, and the diagonal blocks that follow from these."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.layers.factors import KroneckerShape, relation
from curvlinops.layers.reading import ParameterUse
from curvlinops.layers.samples import SampleGradients
from curvlinops.operators.kfac.options import Fallback, FisherType, Options
from curvlinops.structured.base import StructuredLinearOperator
from curvlinops.structured.factor import Factor
from curvlinops.structured.kronecker import (
    KroneckerProductLinearOperator,
    SumOfKroneckersLinearOperator,
)
from curvlinops.structured.layout import Layout, ParameterView, are_disjoint
from curvlinops.support.files import recorded

#: What a sum over data is of: second moments of inputs, their number, second moments of output
#: gradients, exact blocks, squares in an eigenbasis, factors of another fit than KFAC's, products
#: of the exact block with vectors. Eigenbases are kept beside them.
INPUTS, INPUT_COUNT, GRADIENTS, MATRIX, MOMENT = "A", "count", "B", "matrix", "moment"
FIT_INPUTS, FIT_OUTPUTS, PRODUCTS = "fit A", "fit B", "products"
BASIS_OUTPUTS, BASIS_INPUTS = BASES = "basis B", "basis A"

#: Parameters with at most so many entries get one exact block. Larger ones get one for each vector
#: along the last axis.
_WHOLE = 4096

#: Why a bias is in no block with a weight.
_SEPARATE = (
    "no block with a weight: it is added at other positions than those of the weight's inputs, as "
    "in transposed convolutions, or not to the products with one weight only"
)

# --- how layers use the parameters


@recorded
@dataclass(frozen=True)
class LayerUse:
    """A way in which layers use entries of a parameter. Each use has sums for Kronecker factors."""

    #: The entries of the parameter that layers use, in the parameter's order.
    view: ParameterView
    #: The shape of the Kronecker product, ``None`` if there is none.
    shape: KroneckerShape | None
    #: Whether layers multiply by the parameter, or a function of it, as by a matrix.
    is_product: bool
    #: For a weight, the bias that is added to all of its products, and to no others. For that bias,
    #: the weight.
    partner: ParameterView | None = None
    #: Whether both have the same factor B. It is summed for the weight only.
    shares_gradients: bool = False

    @property
    def name(self) -> str:
        """The parameter."""
        return self.view.name

    def has_bias_input(self, options: Options) -> bool:
        """Return whether the inputs have a one as last entry, for the bias in the same block."""
        return options.joint and self.partner is not None and not self.shape.is_bias


@recorded
class Uses(NamedTuple):
    """The uses of all parameters that some data shows."""

    #: The uses by layers. Parameters without any use do not change the output.
    known: frozenset[LayerUse] = frozenset()
    #: Parameters whose uses are not known, each with the reason.
    unknown: Mapping[str, str] = {}
    #: The uses that had the same inputs on a batch, whose sum they share.
    inputs: frozenset[tuple[LayerUse, ...]] = frozenset()

    def union(self, other: "Uses") -> "Uses":
        """Return the uses that one or the other shows."""
        unknown = dict(other.unknown | self.unknown)
        return Uses(self.known | other.known, unknown, self.inputs | other.inputs)

    def includes(self, other: "Uses") -> bool:
        """Return whether other uses are among these."""
        are_known = self.known >= other.known and self.inputs >= other.inputs
        return are_known and self.unknown.keys() >= other.unknown.keys()

    def of(self, names: Collection[str]) -> "Uses":
        """Return the uses of some parameters, which share no inputs with others."""
        known = frozenset(use for use in self.known if use.name in names)
        unknown = {name: reason for name, reason in self.unknown.items() if name in names}
        return Uses(known, unknown, frozenset(x for x in self.inputs if x[0].name in names))


@recorded
@dataclass(frozen=True)
class Stack:
    """The key of L sums of equal shape, which are side by side in one tensor ``[L G, *]``."""

    kind: str
    #: For each of the L sums: a ``LayerUse`` for the moments of its output gradients; the
    #: ``LayerUse``s that had the same inputs, for these and their number; a parameter's name for
    #: its exact block; else ``Block.views``.
    of: tuple[Any, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:  # each batch looks up the sums of hundreds of layers
        return hash((self.kind, self.of))

    def __reduce__(self) -> tuple:  # other processes have other hashes
        return Stack, (self.kind, self.of)

    @cached_property
    def counts(self) -> "Stack":
        """The key of the numbers of inputs."""
        return Stack(INPUT_COUNT, self.of)

    def names(self, index: int) -> set[str]:
        """Return the parameters to whose blocks one of the sums belongs."""
        of = self.of[index]
        if self.kind == WEIGHT.kind:
            return set()
        if self.kind == MATRIX:
            return {of}
        if self.kind == GRADIENTS:
            return {of.name, of.partner.name} if of.shares_gradients else {of.name}
        return {part.name for part in of}


#: The key of the data's weight: the number, or total weight, of loss terms.
WEIGHT = Stack("weight", (None,))

#: What is counted, so that it has no normalization.
COUNTS = (INPUT_COUNT, WEIGHT.kind)


#: How layers use parameters, and where in a graph.
Layers = Mapping[LayerUse, Sequence[ParameterUse]]


def layers_of(samples: SampleGradients, reduced: frozenset[str]) -> Layers:
    """Return the uses of a batch, given the parameters that have the reduce setting."""
    return samples.known(("layers", reduced), lambda: _layers(samples, reduced))


def _layers(samples: SampleGradients, reduced: frozenset[str]) -> Layers:
    layers: dict[LayerUse, list[ParameterUse]] = {}
    weights: dict[int, LayerUse] = {}
    biases: dict[int, LayerUse] = {}
    for place in samples.uses:
        shape = place.kronecker_shape
        use = LayerUse(place.view, shape, place.is_product)
        layers.setdefault(use, []).append(place)
        if shape is not None and not shape.is_bias:
            weights[place.call] = use
        elif shape is not None and place.use.joins_weight:
            biases[place.call] = use
    joined: dict[LayerUse, LayerUse] = {}
    for call, bias in biases.items():
        weight = weights.get(call)
        if weight is None or weight in joined or not _are_partners(weight, bias):
            continue
        calls = {place.call for place in layers[weight]}
        if calls == {place.call for place in layers[bias]} and all(
            (weights[call], biases[call]) == (weight, bias) for call in calls
        ):
            shares = weight.shape.groups == 1 and (weight.name in reduced) == (bias.name in reduced)
            joined[weight] = replace(weight, partner=bias.view, shares_gradients=shares)
            joined[bias] = replace(bias, partner=weight.view, shares_gradients=shares)
    return {joined.get(use, use): tuple(places) for use, places in layers.items()}


def _are_partners(weight: LayerUse, bias: LayerUse) -> bool:
    """Return whether a bias that is added to all products with a weight may have its block."""
    shape, size = weight.shape, bias.shape.groups * bias.shape.outputs
    is_whole = size == shape.groups * shape.outputs and bias.shape.view == bias.view
    return is_whole and not shape.one_hot_inputs


# --- which structure the blocks have


class Term(NamedTuple):
    """A Kronecker product ``B (x) A``, one of those whose sum is a block."""

    shape: KroneckerShape
    #: The uses whose sums make up B; for stacks, the keys of these sums.
    of_gradients: tuple[Any, ...] = ()
    #: Those whose inputs make up A, together where they had the same inputs.
    of_inputs: tuple[Any, ...] = ()
    #: B, the second moment of output gradients; ``None`` if it is not yet known.
    gradients: Factor | None = None
    #: A, the second moment of inputs; ``None`` for biases, whose inputs are ones.
    inputs: Factor | None = None

    @property
    def factors(self) -> list[Factor]:
        """B, and A if there is one."""
        return [factor for factor in (self.gradients, self.inputs) if factor is not None]


@dataclass(eq=False)
class Block:
    """A diagonal block of the approximation, or a stack of several equal ones."""

    #: The entries of a parameter, or of a weight and of its bias; of stacks, block by block.
    views: tuple[ParameterView, ...]
    #: ``"kronecker"``, ``"dense"``, ``"diagonal"``, or ``"zero"``, and why below.
    structure: str
    #: The Kronecker products that it is the sum of, with the groups of all blocks.
    terms: tuple[Term, ...] = ()
    #: The number of equal parts of the parameter that have a matrix each (``"dense"``).
    groups: int = 1
    #: For a bias with a block of its own: the weight to whose products it is added.
    weight: ParameterView | None = None
    reason: str = ""
    #: If it has no terms: matrices ``[G, n, n]`` of equal parts of the parameter, or their
    #: diagonals ``[G, n]``; ``None`` if they are not yet known. With an eigenbasis, eigenvalues.
    matrix: Tensor | None = None
    basis: Any = None
    #: The blocks that it is a stack of; empty for a single one.
    members: "tuple[Block, ...]" = ()
    #: The keys of sums for it, by kind.
    keys: dict[str, Stack] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The parameters."""
        return tuple(view.name for view in self.views)

    @cached_property
    def layout(self) -> Layout:
        """The entries of the parameters, in the order of the first Kronecker product's matrices."""
        if self.members:
            return Layout.of_several([member.layout for member in self.members])
        if not self.terms:
            return Layout(self.views)
        shape = self.terms[0].shape
        return Layout((shape.view, *self.views[1:]), shape.groups * shape.outputs)

    @property
    def singles(self) -> "tuple[Block, ...]":
        """The blocks that it is made of, without their matrices."""
        return self.members or (self,)

    def key(self, kind: str) -> Stack:
        """Return the key of sums for it, in a pass that knows the factors."""
        if kind not in self.keys:
            self.keys[kind] = Stack(kind, tuple(block.views for block in self.singles))
        return self.keys[kind]

    @property
    def parts(self) -> "tuple[Block, ...]":
        """The blocks that it is made of, with views of its matrices."""
        # a block that kept a reference to itself would wait for Python's garbage collector
        return self._parts if self.members else (self,)

    @cached_property
    def _parts(self) -> "tuple[Block, ...]":
        number, parts = len(self.members), []
        matrices = [None] * number if self.matrix is None else self.matrix.tensor_split(number)
        for i, member in enumerate(self.members):
            terms = [
                term._replace(
                    gradients=whole.gradients and whole.gradients.parts(number)[i],
                    inputs=whole.inputs and whole.inputs.parts(number)[i],
                )
                for term, whole in zip(member.terms, self.terms, strict=True)
            ]
            basis = self.basis and self.basis.part(self, [i])
            parts.append(replace(member, terms=tuple(terms), matrix=matrices[i], basis=basis))
        return tuple(parts)

    def operator(self) -> StructuredLinearOperator:
        """Return the operator on the block's entries, in the order of the first product."""
        if self.basis is not None:
            return self.basis.diagonal(self.matrix)
        if self.matrix is not None:
            return KroneckerProductLinearOperator(moment_factor(self.matrix))
        products = [KroneckerProductLinearOperator(*factors) for factors in self.products]
        return products[0] if len(products) == 1 else SumOfKroneckersLinearOperator(products)

    @property
    def is_here(self) -> bool:
        """Whether this process has its matrices."""
        return self.matrix is not None or any(term.factors for term in self.terms)

    @property
    def products(self) -> list[list[Factor]]:
        """The factors of the Kronecker products, in the order of the first one's."""
        first = self.terms[0].shape
        return [
            term.factors[::-1] if relation(first, term.shape) == "transposed" else term.factors
            for term in self.terms
        ]

    @property
    def is_exact(self) -> bool:
        """Whether it is the exact block, or the diagonal of that."""
        return self.structure in ("dense", "diagonal")


def moment_factor(matrix: Tensor, ranks: Tensor | None = None) -> Factor:
    """Return second moments, ``[G, n, n]`` or ``[G, n]``, as a factor."""
    return Factor(matrix, symmetric=True, psd=True, ranks=ranks)


def plan_blocks(
    uses: Uses,
    shapes: Mapping[str, tuple[int, ...]],
    options: Options,
    firsts: Mapping[ParameterView, KroneckerShape],
) -> tuple[Block, ...]:
    """Choose the structure of all blocks, given the shapes of all parameters.

    Blocks are in the order of their first Kronecker product. That may be given for some.
    """
    unknown = uses.unknown
    by_name: dict[str, list[LayerUse]] = {}
    for use in uses.known:
        if use.name not in unknown and use.view.size:
            by_name.setdefault(use.name, []).append(use)
    pairs = _pairs(by_name)
    joined = pairs if options.joint else {}
    for weight, bias in joined.items():
        _check_same_setting(weight, bias, options)
    blocks: list[Block] = []
    for name, shape in shapes.items():
        if name in joined.values():
            continue
        if name in by_name:
            blocks += _blocks_of(name, shape, by_name[name], name in joined, options)
        elif name in unknown and prod(shape):
            blocks.append(_fallback(name, shape, unknown[name], options))
        else:
            reason = "the output does not depend on it"
            blocks.append(Block((ParameterView.whole(name, shape),), "zero", reason=reason))
    if options.fisher_type is FisherType.FORWARD_ONLY:
        _check_without_gradients(blocks)
    sources = _Sources(uses)
    partners = {use.view: use.partner for name in pairs.values() for use in by_name[name]}
    for block in blocks:
        view, first = block.views[0], firsts.get(block.views[0])
        terms = sorted(block.terms, key=lambda term: term.shape != first)
        block.terms = tuple(sources.of(view, term) for term in terms)
        block.weight = None if options.joint else partners.get(view)
    return tuple(blocks)


class _Sources:
    """Which sums make up the factors of blocks."""

    def __init__(self, uses: Uses):
        self._uses: dict[ParameterView, list[LayerUse]] = {}
        self._inputs: dict[LayerUse, list[tuple[LayerUse, ...]]] = {}
        for use in uses.known:
            self._uses.setdefault(use.view, []).append(use)
        for together in uses.inputs:
            for use in together:
                self._inputs.setdefault(use, []).append(together)

    def of(self, view: ParameterView, term: Term) -> Term:
        """Return a term of a view with the uses that its factors are of."""
        found: set[LayerUse] = set()
        for use in self._uses[view]:
            if use.shape == term.shape and use.shape.is_bias and use.shares_gradients:
                weights = self._uses[use.partner]
                found.update(weight for weight in weights if weight.partner == view)
            elif use.shape == term.shape:
                found.add(use)
        inputs = {x for use in found if not term.shape.is_bias for x in self._inputs.get(use, ())}
        # in the same order, so with the same rounding, in all processes
        return Term(term.shape, tuple(_ordered(found)), tuple(_ordered(inputs)))


def _check_same_setting(weight: str, bias: str, options: Options) -> None:
    if (weight in options.reduced) != (bias in options.reduced):
        raise ValueError(
            f"kfac_approx differs for '{weight}' and '{bias}', which have one block because of "
            "separate_weight_and_bias=False. Choose one setting for both, e.g. by the name of "
            "their module."
        )


def _check_without_gradients(blocks: Iterable[Block]) -> None:
    for block in blocks:
        if block.is_exact:
            raise NotImplementedError(
                f"fisher_type='forward-only' replaces a Kronecker factor, but '{block.names[0]}' "
                f"has none ({block.reason}). Leave it out of params."
            )


def _pairs(by_name: Mapping[str, list[LayerUse]]) -> dict[str, str]:
    """Return the weights that are always used together with one bias, and the bias."""
    pairs = {}
    for name, uses in by_name.items():
        partners = {use.partner for use in uses}
        names = {None if partner is None else partner.name for partner in partners}
        if None in names or len(names) > 1 or uses[0].shape.is_bias:
            continue
        (bias,) = names
        others = by_name.get(bias, [])
        if (
            len({use.shape._replace(view=None) for use in uses}) == 1
            and len({use.view for use in uses}) == len(partners) == len(uses)
            and all(other.partner and other.partner.name == name for other in others)
            and {other.view for other in others} == partners
        ):
            pairs[name] = bias
    return pairs


def _blocks_of(
    name: str, shape: Sequence[int], uses: list[LayerUse], is_joint: bool, options: Options
) -> list[Block]:
    """Return the blocks of a parameter's parts, jointly with those of its bias if wanted."""
    if not any(use.is_product for use in uses):
        return [_exact_block(name, shape, options)]
    by_view: dict[ParameterView, list[LayerUse]] = {}
    for use in uses:
        by_view.setdefault(use.view, []).append(use)
    reason = _obstacle(by_view)
    if reason is not None:
        return [_fallback(name, shape, reason, options)]
    blocks = []
    for view in _ordered(by_view):
        terms = tuple(Term(shape) for shape in _shapes(by_view[view]))
        is_separate_bias = options.joint and all(term.shape.is_bias for term in terms)
        views = (view, by_view[view][0].partner) if is_joint else (view,)
        reason = _SEPARATE if is_separate_bias else ""
        blocks.append(Block(views, "kronecker", terms, reason=reason))
    return blocks


def _obstacle(by_view: Mapping[ParameterView, list[LayerUse]]) -> str | None:
    """Return why parts of a parameter are no sums of Kronecker products, ``None`` if they are."""
    without = [use for uses in by_view.values() for use in uses if use.shape is None]
    if any(use.is_product for use in without):
        return "a layer uses a function of it (for W = U @ V, write (x @ V.T) @ U.T)"
    if without or not are_disjoint(list(by_view)):
        return "layers use it in ways that do not go together"
    for shapes in map(_shapes, by_view.values()):
        if not all(relation(shapes[0], shape) for shape in shapes):
            return "layers use it as matrices of different shapes"
    return None


def _shapes(uses: Iterable[LayerUse]) -> list[KroneckerShape]:
    """Return the shapes of uses in an order that does not depend on the order of uses."""
    return _ordered({use.shape for use in uses}, lambda shape: (shape.one_hot_inputs, repr(shape)))


def _ordered(some: Collection[Any], key: Callable[[Any], Any] = repr) -> list[Any]:
    return sorted(some, key=key) if len(some) > 1 else list(some)


def _exact_block(name: str, shape: Sequence[int], options: Options) -> Block:
    """Return the block of a parameter that is in no matrix product with data."""
    lengths = [length for length in shape if length != 1] or [1]
    groups, width, limit = prod(lengths[:-1]), lengths[-1], options.max_factor_size
    views = (ParameterView.whole(name, shape),)
    if groups * width <= min(limit, _WHOLE):
        groups, width = 1, groups * width
    if width > limit or groups * width**2 > limit**2:
        return Block(views, "diagonal", reason=f"larger than max_factor_size={limit}")
    reason = "in no matrix product with data: its exact block"
    if groups > 1:
        reason += f", for each of {groups} vectors along the last axis"
    return Block(views, "dense", groups=groups, reason=reason)


def _fallback(name: str, shape: Sequence[int], reason: str, options: Options) -> Block:
    if options.fallback is Fallback.ERROR:
        raise NotImplementedError(
            f"Parameter '{name}', {list(shape)}, has no Kronecker-factored block: "
            f"{reason}. Leave it out of params, choose fallback='diagonal' or fallback='dense', or "
            "write a rule for the call (see the page Extending)."
        )
    structure, limit = options.fallback.value, options.max_factor_size
    if options.fallback is Fallback.DENSE and prod(shape) > limit:
        structure = "diagonal"
        reason += f", and it is larger than max_factor_size={limit}"
    return Block((ParameterView.whole(name, shape),), structure, reason=reason)
