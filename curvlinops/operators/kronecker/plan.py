"""Which structure the blocks of an approximation have, given how layers use the parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from curvlinops.core.space import ParameterSpace
from curvlinops.layers.batch import Part
from curvlinops.layers.factors import Kind, relation
from curvlinops.layers.forms import Form, Mapped, Place, Within
from curvlinops.operators.kronecker.options import Fallback, FisherType, Options


class Partner(NamedTuple):
    """The bias that is added to a product with a weight.

    Attributes:
        name: The parameter.
        place: The part of it, ``None`` for all.
        scale: By what it is multiplied before.
    """

    name: str
    place: Place | None
    scale: float


class Usage(NamedTuple):
    """How a layer uses a parameter.

    Attributes:
        place: The part of it, ``None`` for all.
        kind: The Kronecker product, ``None`` if there is none.
        bias: The bias that belongs to the same product.
        mapped: Whether the layer uses a function of the parameter.
        product: Whether the layer multiplies with it, or with this function, as with a matrix.
    """

    place: Place | None
    kind: Kind | None
    bias: Partner | None = None
    mapped: bool = False
    product: bool = False


@dataclass(frozen=True)
class Block:
    """A diagonal block of the approximation.

    Attributes:
        names: A parameter, or a weight and its bias.
        structure: ``"kronecker"``, ``"dense"``, ``"diagonal"``, or ``"zero"``.
        kinds: The Kronecker products of which it is the sum.
        places: The parts of the parameters, ``None`` for all.
        scale: The last entry of all inputs if there is a bias, else ``None``.
        reason: Why it has this structure.
    """

    names: tuple[str, ...]
    structure: str
    kinds: tuple[Kind, ...] = ()
    places: tuple[Place | None, ...] = (None,)
    scale: float | None = None
    reason: str = ""


def usages(parts: Iterable[Part], joint: bool) -> dict[str, set[Usage]]:
    """Return how a batch's layers use the parameters.

    Args:
        parts: The uses.
        joint: Whether biases are to be treated together with weights.
    """
    parts = list(parts)
    biases = {
        part.key.index: Partner(part.name, place_of(part), part.shift)
        for part in parts
        if joint and part.shift is not None and not part.elsewhere
    }
    found: dict[str, set[Usage]] = {}
    for part in parts:
        kind = kind_of(part)
        bias = None if kind is None or kind.shift else biases.get(part.key.index)
        mapped = isinstance(part.form, Mapped)
        product = Kind.of(_innermost(part.form), part.shift is not None) is not None
        usage = Usage(place_of(part), kind, bias, mapped, product)
        found.setdefault(part.name, set()).add(usage)
    return found


def place_of(part: Part) -> Place | None:
    """Return which part of its parameter a layer uses, ``None`` if all."""
    return part.form.place if isinstance(part.form, Within) else None


def kind_of(part: Part) -> Kind | None:
    """Return the kind of the Kronecker product that a use makes."""
    form = part.form.form if isinstance(part.form, Within) else part.form
    return Kind.of(form, part.shift is not None)


def _innermost(form: Form) -> Form:
    """Return the gradients with respect to what the layer uses."""
    return form.form if isinstance(form, Mapped | Within) else form


def plan(
    used: Mapping[str, set[Usage]],
    unknown: Mapping[str, str],
    space: ParameterSpace,
    options: Options,
) -> list[Block]:
    """Choose the structure of all blocks.

    Args:
        used: How layers use the parameters.
        unknown: Parameters whose uses are not known, and why.
        space: All parameters.
        options: The options of the approximation.

    Raises:
        NotImplementedError: If a parameter has no structure and none was chosen as fallback.
    """
    joined = _joined(used, space) if options.joint else {}
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
    return blocks


def _check_without_gradients(blocks: Iterable[Block]) -> None:
    for block in blocks:
        if block.structure in ("dense", "diagonal"):
            raise NotImplementedError(
                f"fisher_type='forward-only' replaces a Kronecker factor, but '{block.names[0]}' "
                f"has none ({block.reason}). Leave it out of params."
            )


def _joined(used: Mapping[str, set[Usage]], space: ParameterSpace) -> dict[str, str]:
    """Return the weights that are always used together with one bias, and the bias."""
    joined = {}
    for name, usages in used.items():
        partners = {usage.bias for usage in usages}
        names = {partner.name for partner in partners if partner is not None}
        if None in partners or len(names) != 1:
            continue
        (bias,) = names
        alike = {(usage.place, usage.bias) for usage in usages}
        if (
            len({usage.kind for usage in usages}) == 1
            and all(_fits(usage, bias, space) for usage in usages)
            and all(other.kind is not None and other.kind.shift for other in used[bias])
            and len({place for place, _ in alike}) == len(alike)
            and {usage.place for usage in used[bias]} == {partner.place for partner in partners}
            and _is_only(bias, name, used)
        ):
            joined[name] = bias
    return joined


def _fits(usage: Usage, bias: str, space: ParameterSpace) -> bool:
    """Return whether the bias has an entry for each output of the product."""
    kind, place = usage.kind, usage.bias.place
    size = space.slice(bias).stop - space.slice(bias).start
    size = size if place is None else torch.Size(place.shape).numel()
    return kind is not None and not kind.lookup and size == kind.groups * kind.outputs


def _is_only(bias: str, weight: str, used: Mapping[str, set[Usage]]) -> bool:
    """Return whether no other weight has the same bias."""
    others = (usage for name, usages in used.items() if name != weight for usage in usages)
    return all(other.bias is None or other.bias.name != bias for other in others)


def _known(
    name: str, usages: set[Usage], bias: str | None, space: ParameterSpace, options: Options
) -> list[Block]:
    if not any(usage.product for usage in usages):
        size = space.slice(name).stop - space.slice(name).start
        small = size <= options.max_factor_size
        reason = "gradients of samples are written down"
        return [Block((name,), "dense" if small else "diagonal", reason=reason)]
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
    for place, own in by_place.items():
        kinds = tuple(sorted({usage.kind for usage in own}, key=lambda k: (k.lookup, repr(k))))
        if not all(relation(kinds[0], kind) for kind in kinds):
            reason = "layers use it as matrices of different shapes"
            return [_fallback(name, reason, space, options)]
        names, places, scale = (name,), (place,), None
        if bias is not None:
            partner = next(iter(own)).bias
            names, places, scale = (name, bias), (place, partner.place), partner.scale
        blocks.append(Block(names, "kronecker", kinds, places, scale))
    return blocks


def _disjoint(places: Sequence[Place | None]) -> bool:
    """Return whether parts of a parameter have no entries in common."""
    if len(places) == 1:
        return True
    if None in places:
        return False
    entries = torch.cat([place.entries(torch.device("cpu")) for place in places])
    return len(entries.unique()) == len(entries)


def _fallback(name: str, reason: str, space: ParameterSpace, options: Options) -> Block:
    if options.fallback is Fallback.ERROR:
        raise NotImplementedError(
            f"Parameter '{name}', {list(space.shapes[name])}, has no Kronecker-factored block: "
            f"{reason}. Leave it out of params, or choose fallback='diagonal' or "
            "fallback='dense'."
        )
    return Block((name,), options.fallback.value, reason=reason)
