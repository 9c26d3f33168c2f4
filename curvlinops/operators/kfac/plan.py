"""How layers use the parameters, and which structure the parameters' blocks have."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

from curvlinops.layers.factors import Kind, relation
from curvlinops.layers.gradients import PulledBackGradient
from curvlinops.layers.recorded import Part
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.options import Fallback, FisherType, Options
from curvlinops.structured.layout import ParameterView, are_disjoint
from curvlinops.support.records import recorded

#: A slice of a parameter, given its name; the place ``None`` is all of it.
Slice = tuple[str, ParameterView | None]

#: Up to this size, parameters in no matrix product with data have a block as a whole.
_WHOLE = 4096

#: Why a bias is in no block with a weight.
_SEPARATE = (
    "no block with a weight: it is added at other positions than those of the weight's inputs, as "
    "in transposed convolutions, or not to the products with one weight only"
)

# --- how layers use the parameters


@recorded
class LayerUse(NamedTuple):
    """How layers use a slice of a parameter. Kronecker factors are summed for each such use.

    Attributes:
        name: The parameter.
        place: The slice, in the order of the parameter; ``None`` for all of it.
        kind: The shape of the Kronecker product, ``None`` if there is none.
        partner: Of a weight, the bias that is added to all of its products, and to no others; of
            that bias, the weight.
        shares_gradients: Whether weight and bias have the same gradient factor B. It is summed for
            the weight only.
        through_function: Whether the layers use a function of the parameter.
        is_product: Whether they multiply by it, or by the function's value, as by a matrix.
    """

    name: str
    place: ParameterView | None
    kind: Kind | None
    partner: Slice | None = None
    shares_gradients: bool = False
    through_function: bool = False
    is_product: bool = False


class Uses(NamedTuple):
    """What data shows of all parameters.

    Attributes:
        known: How layers use them. Parameters without any use do not change the output.
        unknown: The parameters whose uses are not known, and why.
    """

    known: frozenset[LayerUse] = frozenset()
    unknown: Mapping[str, str] = {}

    def union(self, other: "Uses") -> "Uses":
        """Return what both data show."""
        return Uses(self.known | other.known, {**other.unknown, **self.unknown})

    def includes(self, known: Collection[LayerUse], unknown: Mapping[str, str]) -> bool:
        """Return whether other uses are among these."""
        return self.known.issuperset(known) and self.unknown.keys() >= unknown.keys()

    @property
    def names(self) -> set[str]:
        """The parameters that are used."""
        return {use.name for use in self.known} | self.unknown.keys()


@dataclass(eq=False, slots=True)
class _Group:
    """The gradients of one use, and the calls that they come from."""

    use: LayerUse
    parts: list[Part] = field(default_factory=list)
    calls: set[tuple[Callable, int]] = field(default_factory=set)


def group_by_use(parts: Iterable[Part], reduced: Collection[str]) -> dict[LayerUse, list[Part]]:
    """Return a batch's gradients by use.

    Args:
        parts: What calls of layers contribute to the gradients of parameters.
        reduced: The parameters that are treated by the reduce setting.
    """
    groups: dict[LayerUse, _Group] = {}
    weights: dict[tuple[Callable, int], _Group] = {}
    biases: dict[tuple[Callable, int], _Group] = {}
    for part in parts:
        is_function = isinstance(part.form, PulledBackGradient)
        form = part.form.form if is_function else part.form
        view = part.form.entries.view.in_order
        place = None if view.is_all(part.form.num_entries) else view
        kind, is_bias = Kind.of(form, part.shift is not None), part.shift is not None
        own = None if is_function else kind
        use = LayerUse(part.name, place, own, None, False, is_function, kind is not None)
        group = groups.setdefault(use, _Group(use))
        group.parts.append(part)
        group.calls.add(call := (part.key.call, part.key.index))
        if own is not None and not is_bias:
            weights[call] = group
        elif own is not None and part.shift == 1.0 and not part.elsewhere:
            biases[call] = group
    for call, bias in biases.items():
        weight = weights.get(call)
        if (
            weight is not None
            and weight.use.partner is None
            and _are_partners(weight, bias, weights, biases)
        ):
            w, b = weight.use, bias.use
            shares = w.kind.groups == 1 and (w.name in reduced) == (b.name in reduced)
            weight.use = w._replace(partner=(b.name, b.place), shares_gradients=shares)
            bias.use = b._replace(partner=(w.name, w.place), shares_gradients=shares)
    return {group.use: group.parts for group in groups.values()}


def _are_partners(weight: _Group, bias: _Group, weights: Mapping, biases: Mapping) -> bool:
    """Return whether a bias is added to all products with a weight, and to nothing else."""
    kind, size = weight.use.kind, bias.use.kind.groups * bias.use.kind.outputs
    return (
        weight.calls == bias.calls
        and all(weights[call] is weight and biases[call] is bias for call in weight.calls)
        and not kind.lookup
        and size == kind.groups * kind.outputs
        and bias.use.kind.view == bias.use.kind.view.in_order
    )


# --- which structure the blocks have


@recorded
@dataclass(frozen=True)
class BlockSpec:
    """What a diagonal block of the approximation is.

    Attributes:
        names: A parameter, or a weight and its bias.
        structure: ``"kronecker"``, ``"dense"``, ``"diagonal"``, or ``"zero"``.
        kinds: The Kronecker products of which it is the sum.
        places: The slices of the parameters, ``None`` for all.
        groups: The number of equal parts of the parameter that have a matrix each (``"dense"``).
        weight: For a bias with a block of its own: the weight to whose products it is added.
        reason: Why it has this structure.
    """

    names: tuple[str, ...]
    structure: str
    kinds: tuple[Kind, ...] = ()
    places: tuple[ParameterView | None, ...] = (None,)
    groups: int = 1
    weight: Slice | None = None
    reason: str = ""

    @property
    def slices(self) -> tuple[Slice, ...]:
        """The slices of the parameters."""
        return tuple(zip(self.names, self.places, strict=False))

    @property
    def slice(self) -> Slice:
        """That of the parameter, or of the weight."""
        return self.names[0], self.places[0]

    @property
    def is_exact(self) -> bool:
        """Whether it is the exact block, or the diagonal of that."""
        return self.structure in ("dense", "diagonal")


def plan_blocks(uses: Uses, space: ParameterSpace, options: Options) -> list[BlockSpec]:
    """Choose the structure of all blocks.

    Args:
        uses: How layers use the parameters.
        space: All parameters.
        options: The options of the approximation.

    Raises:
        NotImplementedError: If a parameter has no structure and none was chosen as fallback.
        ValueError: If two parameters have one block and different settings.
    """
    by_name: dict[str, list[LayerUse]] = {}
    for use in uses.known:
        if use.name not in uses.unknown and prod(space.shapes[use.name]):
            by_name.setdefault(use.name, []).append(use)
    pairs = _pairs(by_name)
    joined = pairs if options.joint else {}
    for weight, bias in joined.items():
        _check_same_setting(weight, bias, options)
    blocks: list[BlockSpec] = []
    for name, shape in space.shapes.items():
        if name in joined.values():
            continue
        if name in by_name:
            blocks += _blocks_of(name, by_name[name], joined.get(name), space, options)
        elif name in uses.unknown and prod(shape):
            blocks.append(_fallback(name, uses.unknown[name], space, options))
        else:
            blocks.append(BlockSpec((name,), "zero", reason="the output does not depend on it"))
    if options.fisher_type is FisherType.FORWARD_ONLY:
        _check_without_gradients(blocks)
    if options.joint:
        return blocks
    biases = set(pairs.values())
    partners = {(use.name, use.place): use.partner for name in biases for use in by_name[name]}
    return [replace(b, weight=partners.get(b.slice)) if b.names[0] in biases else b for b in blocks]


def _check_same_setting(weight: str, bias: str, options: Options) -> None:
    if (weight in options.reduced) != (bias in options.reduced):
        raise ValueError(
            f"kfac_approx differs for '{weight}' and '{bias}', which have one block because of "
            "separate_weight_and_bias=False. Choose one setting for both, e.g. by the name of "
            "their module."
        )


def _check_without_gradients(blocks: Iterable[BlockSpec]) -> None:
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
        names = {None if partner is None else partner[0] for partner in partners}
        if None in names or len(names) > 1 or uses[0].kind.shift:
            continue
        (bias,) = names
        others = by_name.get(bias, [])
        if (
            len({use.kind for use in uses}) == 1
            and len({use.place for use in uses}) == len(partners) == len(uses)
            and all(other.partner and other.partner[0] == name for other in others)
            and {(other.name, other.place) for other in others} == partners
        ):
            pairs[name] = bias
    return pairs


def _blocks_of(
    name: str, uses: list[LayerUse], bias: str | None, space: ParameterSpace, options: Options
) -> list[BlockSpec]:
    """Return the blocks of a parameter's slices, with those of the bias if there is one."""
    if not any(use.is_product for use in uses):
        return [_exact_block(name, space, options)]
    if any(use.through_function for use in uses):
        return [_fallback(name, "a layer uses a function of it", space, options)]
    by_place: dict[ParameterView | None, list[LayerUse]] = {}
    for use in uses:
        by_place.setdefault(use.place, []).append(use)
    if any(use.kind is None for use in uses) or not _disjoint(by_place):
        reason = "layers use it in ways that do not go together"
        return [_fallback(name, reason, space, options)]
    blocks = []
    # in the same order whatever was seen first
    for place in _ordered(by_place, repr):
        kinds = tuple(
            _ordered({use.kind for use in by_place[place]}, lambda k: (k.lookup, repr(k)))
        )
        if not all(relation(kinds[0], kind) for kind in kinds):
            reason = "layers use it as matrices of different shapes"
            return [_fallback(name, reason, space, options)]
        if bias is not None:
            (use,) = by_place[place]
            blocks.append(BlockSpec((name, bias), "kronecker", kinds, (place, use.partner[1])))
        else:
            is_separate_bias = options.joint and all(kind.shift for kind in kinds)
            reason = _SEPARATE if is_separate_bias else ""
            blocks.append(BlockSpec((name,), "kronecker", kinds, (place,), reason=reason))
    return blocks


def _ordered(some: Collection[Any], key: Callable[[Any], Any]) -> list[Any]:
    return sorted(some, key=key) if len(some) > 1 else list(some)


def _disjoint(places: Collection[ParameterView | None]) -> bool:
    """Return whether slices of a parameter have no entries in common."""
    return len(places) == 1 or (None not in places and are_disjoint(list(places)))


def _exact_block(name: str, space: ParameterSpace, options: Options) -> BlockSpec:
    """Return the block of a parameter that is in no matrix product with data."""
    lengths = [length for length in space.shapes[name] if length != 1] or [1]
    groups, width, limit = prod(lengths[:-1]), lengths[-1], options.max_factor_size
    if groups * width <= min(limit, _WHOLE):
        groups, width = 1, groups * width
    if width > limit or groups * width**2 > limit**2:
        return BlockSpec((name,), "diagonal", reason=f"larger than max_factor_size={limit}")
    reason = "in no matrix product with data: its exact block"
    if groups > 1:
        reason += f", for each of {groups} vectors along the last axis"
    return BlockSpec((name,), "dense", groups=groups, reason=reason)


def _fallback(name: str, reason: str, space: ParameterSpace, options: Options) -> BlockSpec:
    if options.fallback is Fallback.ERROR:
        raise NotImplementedError(
            f"Parameter '{name}', {list(space.shapes[name])}, has no Kronecker-factored block: "
            f"{reason}. Leave it out of params, or choose fallback='diagonal' or "
            "fallback='dense'."
        )
    size, limit = prod(space.shapes[name]), options.max_factor_size
    if options.fallback is Fallback.DENSE and size > limit:
        reason += f", and it is larger than max_factor_size={limit}"
        return BlockSpec((name,), "diagonal", reason=reason)
    return BlockSpec((name,), options.fallback.value, reason=reason)
