"""Which structure the blocks of an approximation have, given how layers use the parameters."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from curvlinops.layers.factors import Kind, relation
from curvlinops.layers.place import Place, are_disjoint
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kronecker.layout import view_of
from curvlinops.operators.kronecker.options import Fallback, FisherType, Options
from curvlinops.operators.kronecker.usage import Usage, Uses
from curvlinops.support.records import recorded

#: Up to this size, parameters in no matrix product with data have a block as a whole.
_WHOLE = 4096

_ALONE = (
    "no block with a weight: it is added at other positions than those of the weight's inputs, as "
    "in transposed convolutions, or not to the products with one weight only"
)


@recorded
@dataclass(frozen=True)
class Block:
    """A diagonal block of the approximation.

    Attributes:
        names: A parameter, or a weight and its bias.
        structure: ``"kronecker"``, ``"dense"``, ``"diagonal"``, or ``"zero"``.
        kinds: The Kronecker products of which it is the sum.
        places: The parts of the parameters, ``None`` for all.
        scale: The last entry of all inputs if there is a bias, else ``None``.
        groups: The number of equal parts of the parameter that have a matrix each (``"dense"``).
        weight: For a bias: the number of the block of the weight to whose products it is added.
        twin: The same if the output gradients are those of the weight. Then only inputs are its
            own.
        reason: Why it has this structure.
    """

    names: tuple[str, ...]
    structure: str
    kinds: tuple[Kind, ...] = ()
    places: tuple[Place | None, ...] = (None,)
    scale: float | None = None
    groups: int = 1
    weight: int | None = None
    twin: int | None = None
    reason: str = ""


def plan(uses: Uses, space: ParameterSpace, options: Options) -> list[Block]:
    """Choose the structure of all blocks.

    Args:
        uses: How layers use the parameters.
        space: All parameters.
        options: The options of the approximation.

    Raises:
        NotImplementedError: If a parameter has no structure and none was chosen as fallback.
        ValueError: If two parameters have one block and different settings.
    """
    # without entries, whatever uses it: the output does not depend on it
    filled = {name for name, shape in space.shapes.items() if prod(shape)}
    unknown = {name: reason for name, reason in uses.unknown.items() if name in filled}
    used = {name: own for name, own in uses.known.items() if name in filled and name not in unknown}
    pairs = _pairs(used, space)
    joined = pairs if options.joint else {}
    for weight, bias in joined.items():
        _check_alike(weight, bias, options)
    blocks = []
    for name in space.names:
        if name in joined.values():
            continue
        if name in unknown:
            blocks.append(_fallback(name, unknown[name], space, options))
        elif name not in used:
            blocks.append(Block((name,), "zero", reason="the output does not depend on it"))
        else:
            blocks.extend(_known(name, used[name], joined.get(name), space, options))
    if options.fisher_type is FisherType.FORWARD_ONLY:
        _check_without_gradients(blocks)
    return _with_reasons(blocks) if options.joint else _linked(blocks, used, pairs, options)


def _alike(weight: str, bias: str, options: Options) -> bool:
    """Return whether two parameters have the same setting."""
    return (weight in options.reduced) == (bias in options.reduced)


def _check_alike(weight: str, bias: str, options: Options) -> None:
    if not _alike(weight, bias, options):
        raise ValueError(
            f"kfac_approx differs for '{weight}' and '{bias}', which have one block because of "
            "separate_weight_and_bias=False. Choose one setting for both, e.g. by the name of "
            "their module."
        )


def _check_without_gradients(blocks: Iterable[Block]) -> None:
    for block in blocks:
        if block.structure in ("dense", "diagonal"):
            raise NotImplementedError(
                f"fisher_type='forward-only' replaces a Kronecker factor, but '{block.names[0]}' "
                f"has none ({block.reason}). Leave it out of params."
            )


def _pairs(used: Mapping[str, AbstractSet[Usage]], space: ParameterSpace) -> dict[str, str]:
    """Return the weights that are always used together with one bias, and the bias."""
    pairs = {}
    for name, usages in used.items():
        partners = {usage.partner for usage in usages if usage.kind and not usage.kind.shift}
        names = {partner.name for partner in partners if partner is not None}
        if None in partners or len(names) != 1:
            continue
        (bias,) = names
        others = used.get(bias, frozenset())
        if (
            len({usage.kind for usage in usages}) == 1
            and len({usage.place for usage in usages}) == len(partners) == len(usages)
            and all(_fits(usage, space) for usage in usages)
            and all(other.partner and other.partner.name == name for other in others)
            and {other.place for other in others} == {partner.place for partner in partners}
        ):
            pairs[name] = bias
    return pairs


def _fits(usage: Usage, space: ParameterSpace) -> bool:
    """Return whether the bias has an entry for each output of the product."""
    kind, bias = usage.kind, usage.partner
    size = prod(space.shapes[bias.name] if bias.place is None else bias.place.shape)
    return not kind.lookup and size == kind.groups * kind.outputs


def _linked(
    blocks: list[Block],
    used: Mapping[str, AbstractSet[Usage]],
    pairs: Mapping[str, str],
    options: Options,
) -> list[Block]:
    """Let biases' blocks refer to those of their weights."""
    numbers = {
        (block.names[0], block.places[0]): number
        for number, block in enumerate(blocks)
        if block.structure == "kronecker"
    }
    for weight in pairs:
        for usage in used[weight]:
            own, bias = numbers.get((weight, usage.place)), usage.partner
            other = numbers.get((bias.name, bias.place))
            if None not in (own, other) and bias.scale == 1.0:
                shares = usage.kind.groups == 1 and _alike(weight, bias.name, options)
                twin = own if shares else None
                blocks[other] = replace(blocks[other], weight=own, twin=twin)
    return blocks


def _with_reasons(blocks: list[Block]) -> list[Block]:
    """Let biases that are in no block with a weight say why."""
    alone = [b.structure == "kronecker" and all(kind.shift for kind in b.kinds) for b in blocks]
    return [replace(b, reason=_ALONE) if own else b for b, own in zip(blocks, alone, strict=True)]


def _known(
    name: str, usages: AbstractSet[Usage], bias: str | None, space: ParameterSpace, options: Options
) -> list[Block]:
    if not any(usage.product for usage in usages):
        return [_written(name, space, options)]
    if any(usage.mapped for usage in usages):
        reason = "a layer uses a function of it"
        return [_fallback(name, reason, space, options)]
    by_place: dict[Place | None, set[Usage]] = {}
    for usage in usages:
        by_place.setdefault(usage.place, set()).add(usage)
    if any(usage.kind is None for usage in usages) or not _disjoint(list(by_place)):
        reason = "layers use it in ways that do not go together"
        return [_fallback(name, reason, space, options)]
    blocks = []
    # in the same order whatever was seen first
    for place in _ordered(by_place, repr):
        own = by_place[place]
        kinds = tuple(_ordered({usage.kind for usage in own}, lambda k: (k.lookup, repr(k))))
        if not all(relation(kinds[0], kind) for kind in kinds):
            reason = "layers use it as matrices of different shapes"
            return [_fallback(name, reason, space, options)]
        if view_of(name, space.shapes[name], place, kinds[0].arrangement) is None:
            reason = "layers use its entries in an order that is no strided view of it"
            return [_fallback(name, reason, space, options)]
        names, places, scale = (name,), (place,), None
        if bias is not None:
            partner = next(iter(own)).partner
            names, places, scale = (name, bias), (place, partner.place), partner.scale
        blocks.append(Block(names, "kronecker", kinds, places, scale))
    return blocks


def _ordered(some: Collection[Any], key: Callable[[Any], Any]) -> list[Any]:
    return sorted(some, key=key) if len(some) > 1 else list(some)


def _disjoint(places: Sequence[Place | None]) -> bool:
    """Return whether parts of a parameter, ``None`` for all of it, have no entries in common."""
    return len(places) == 1 or (None not in places and are_disjoint(places))


def _written(name: str, space: ParameterSpace, options: Options) -> Block:
    """Return the block of a parameter that is in no matrix product with data."""
    lengths = [length for length in space.shapes[name] if length != 1] or [1]
    groups, width, limit = prod(lengths[:-1]), lengths[-1], options.max_factor_size
    if groups * width <= min(limit, _WHOLE):
        groups, width = 1, groups * width
    if width > limit or groups * width**2 > limit**2:
        return Block((name,), "diagonal", reason=f"larger than max_factor_size={limit}")
    reason = "in no matrix product with data: its exact block"
    if groups > 1:
        reason += f", for each of {groups} vectors along the last axis"
    return Block((name,), "dense", groups=groups, reason=reason)


def _fallback(name: str, reason: str, space: ParameterSpace, options: Options) -> Block:
    if options.fallback is Fallback.ERROR:
        raise NotImplementedError(
            f"Parameter '{name}', {list(space.shapes[name])}, has no Kronecker-factored block: "
            f"{reason}. Leave it out of params, or choose fallback='diagonal' or "
            "fallback='dense'."
        )
    size, limit = prod(space.shapes[name]), options.max_factor_size
    if options.fallback is Fallback.DENSE and size > limit:
        reason += f", and it is larger than max_factor_size={limit}"
        return Block((name,), "diagonal", reason=reason)
    return Block((name,), options.fallback.value, reason=reason)
