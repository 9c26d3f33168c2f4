"""How layers use parameters, as far as the data shows."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from curvlinops.layers.factors import Kind
from curvlinops.layers.forms import innermost
from curvlinops.layers.parts import Part
from curvlinops.layers.place import Place
from curvlinops.support.records import recorded


@recorded
class Partner(NamedTuple):
    """The bias that is added to a product with a weight; seen from the bias, the weight.

    Attributes:
        name: The parameter.
        place: The part of it, ``None`` for all.
        scale: By what the bias is multiplied before.
    """

    name: str
    place: Place | None
    scale: float


@recorded
class Usage(NamedTuple):
    """How a layer uses a parameter.

    Attributes:
        place: The part of it, ``None`` for all.
        kind: The Kronecker product, ``None`` if there is none.
        partner: What belongs to the same product.
        mapped: Whether the layer uses a function of the parameter.
        product: Whether the layer multiplies with it, or with this function, as with a matrix.
    """

    place: Place | None
    kind: Kind | None
    partner: Partner | None = None
    mapped: bool = False
    product: bool = False


@dataclass(frozen=True)
class Uses:
    """What some data shows of all parameters.

    Attributes:
        known: How layers use them; those that none uses are missing.
        unknown: Those whose uses are not known, and why.
    """

    known: Mapping[str, frozenset[Usage]]
    unknown: Mapping[str, str]

    @classmethod
    def of(cls, parts: Iterable[Part], unknown: Mapping[str, str]) -> "Uses":
        """Return what a batch shows."""
        return cls(usages(parts), dict(unknown))

    def union(self, other: "Uses") -> "Uses":
        """Return what both data show."""
        names = [*self.known, *(name for name in other.known if name not in self.known)]
        none: frozenset[Usage] = frozenset()
        known = {n: self.known.get(n, none) | other.known.get(n, none) for n in names}
        return Uses(known, {**other.unknown, **self.unknown})

    def include(self, other: "Uses") -> bool:
        """Return whether other data shows nothing new."""
        return self.union(other) == self


def usages(parts: Iterable[Part]) -> dict[str, frozenset[Usage]]:
    """Return how a batch's layers use the parameters."""
    seen = [(part, _call(part), *innermost(part.form)) for part in parts]
    biases, weights = {}, {}
    for part, call, place, *_ in seen:
        if part.shift is not None and not part.elsewhere:
            biases[call] = Partner(part.name, place, part.shift)
    for part, call, place, *_ in seen:
        if part.shift is None and call in biases:
            weights[call] = Partner(part.name, place, biases[call].scale)
    found: dict[str, set[Usage]] = {}
    for part, call, place, form, mapped in seen:
        partners = biases if part.shift is None else weights
        kind = Kind.of(form, part.shift is not None)
        own = None if mapped else kind
        usage = Usage(place, own, partners.get(call), mapped, product=kind is not None)
        found.setdefault(part.name, set()).add(usage)
    return {name: frozenset(own) for name, own in found.items()}


def _call(part: Part) -> tuple[Callable, int]:
    """Return what is equal for the arguments of one call only."""
    return part.key.call, part.key.index


def kind_of(part: Part) -> Kind | None:
    """Return the kind of the Kronecker product that a use makes."""
    _, form, mapped = innermost(part.form)
    return None if mapped else Kind.of(form, part.shift is not None)
