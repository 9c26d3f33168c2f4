"""Saved factors: sums over data as plain tensors and metadata, of all parameters or in parts."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.identity import Identity, check_identity, check_same, identity_of
from curvlinops.operators.kfac.blocks import Key, LayerUse, Uses
from curvlinops.operators.kfac.options import FisherType, Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import (
    from_state,
    recorded,
    source_of,
    to_state,
)

#: The format of saved factors. It changes when older files cannot be read any more.
FORMAT = "Kronecker factors 13"

#: What to do about a file that does not belong to the others of its directory.
_OTHER_PART = (
    " The files of a directory must be of one computation: move those of others away, or choose "
    "another directory."
)


@recorded
class Saved(NamedTuple):
    """Sums of some parameters: whose they are, and fields of ``Uses`` and ``FactorSums``."""

    identity: str
    names: Sequence[str]
    known: Sequence[LayerUse]
    unknown: dict[str, str]
    tensors: dict[Key, Tensor]
    bases: dict[tuple[ParameterView, ...], Any]
    num_batches: int
    scale: float
    is_updated: bool

    def sums(self, space: ParameterSpace, options: Options) -> FactorSums:
        """Return the sums, which share memory with these."""
        uses = Uses(frozenset(self.known), self.unknown)
        sums = FactorSums(space.restricted(list(self.names)), options).with_uses(uses)
        fields = ("tensors", "bases", "num_batches", "scale", "is_updated")
        return replace(sums, **{name: getattr(self, name) for name in fields})


def pack(sums: FactorSums, identity: Identity) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        identity: That of the operator that has computed them.
    """
    uses = sorted(sums.uses.known, key=repr), sums.uses.unknown
    fields = sums.tensors, sums.bases, sums.num_batches, sums.scale, sums.is_updated
    return to_state(Saved(json.dumps(identity), sums.space.names, *uses, *fields), FORMAT)


#: Refuses an object that does not belong to an operator, given its place and its identity.
Check = Callable[[str, Identity], None]


def unpack(
    states: Iterable[Mapping[str, Any]],
    check: Check,
    device: torch.device | None,
    check_numbers: bool = False,
) -> list[Saved]:
    """Return the union of several states, which shares their memory. Each parameter is in one.

    Args:
        states: Results of ``pack`` by operators with one identity.
        check: Refuses other identities.
        device: Where tensors go.
        check_numbers: Whether NaN and infinite values are refused, for which all are read. The
            checksum of a file is computed from the numbers that were written.

    Raises:
        ValueError: If a state is damaged or foreign.
    """
    found: list[Saved] = []
    for state in states:
        saved = from_state(state, FORMAT, Saved, device, check_numbers)
        source, identity = source_of(state), json.loads(saved.identity)
        if found:
            check_same(source, identity, json.loads(found[0].identity), _OTHER_PART)
        else:
            check(source, identity)
        found.append(saved)
    needed, covered = [], set[str]()
    for part in sorted(found, key=lambda part: (-len(part.names), part.names)):
        if covered.issuperset(part.names):  # another process computed them, too
            continue
        if not covered.isdisjoint(part.names):
            raise ValueError(
                f"Several files have factors of {', '.join(part.names)}, together with those of "
                "other parameters. Delete the directory, and compute them again."
            )
        needed.append(part)
        covered.update(part.names)
    return needed


def joined(
    source: str, parts: Sequence[Saved], space: ParameterSpace, options: Options
) -> FactorSums:
    """Return the means of all parameters.

    Args:
        source: Where the parts are, for messages.
        parts: The parts.
        space: The parameters.
        options: The options of the approximation.

    Raises:
        ValueError: If some are missing, or the parts are of different data.
    """
    there = {name for part in parts for name in part.names}
    if missing := [name for name in space.names if name not in there]:
        raise ValueError(
            f"The {source} has factors of {len(there)} of {len(space.names)} parameters; "
            f"{missing[0]!r} is missing. Continue their computation by write_factors. All "
            "processes must have the same directory."
        )
    parts = sorted(parts, key=lambda part: space.names.index(part.names[0]))
    return FactorSums.beside([part.sums(space, options) for part in parts], space, options)


#: The options that sums depend on, beside the treatment of positions, and what is drawn.
_OPTIONS = (
    *("fisher_type", "exact", "separate_weight_and_bias", "max_factor_size", "fallback"),
    *("fit", "steps"),
)


def options_of(operator: Any, drawn: bool = True) -> dict[str, Any]:
    """Return the options on which sums depend.

    Args:
        operator: The operator.
        drawn: Whether sums of other random numbers are others.
    """
    names = list(_OPTIONS)
    if drawn and operator.fisher_type in (FisherType.MC, FisherType.TYPE2):
        names += ["mc_samples", "seed"]
    options = {name: getattr(operator, name) for name in names}
    return options | {"reduced": sorted(operator._options.reduced)}


def check_mergeable(operator: Any, other: Any) -> None:
    """Check that two operators may be merged; both are evaluated on the other one's first batch.

    Raises:
        ValueError: If they have different classes, parameters, options, models or losses.
    """
    if type(other) is not type(operator):
        raise ValueError("Only operators of one class can be merged.")
    if other.risk.ranks.group is not operator.risk.ranks.group:
        raise ValueError("Only operators with the same process_group can be merged.")
    operator.space.check_compatible(other.space)
    found = identity_of(other, options_of(other, drawn=False))
    options, data = options_of(operator, drawn=False), other.risk.data
    check_identity("other operator", found, operator, options, data=data)
