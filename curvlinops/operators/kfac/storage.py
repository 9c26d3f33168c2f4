"""Saved factors: sums over data as plain tensors and metadata, of all parameters or in parts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
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
    read_parts,
    recorded,
    source_of,
    to_state,
)

#: The format of saved factors. It changes when older files cannot be read any more.
FORMAT = "Kronecker factors 12"


#: What to do about a file that does not belong to the others of its directory.
OTHER_PART = (
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

    def sums(self, space: ParameterSpace, options: Options) -> FactorSums:
        """Return the sums, which share memory with these."""
        uses = Uses(frozenset(self.known), self.unknown)
        sums = FactorSums(space.restricted(list(self.names)), options).with_uses(uses)
        tensors, bases = self.tensors, self.bases
        return replace(
            sums, tensors=tensors, bases=bases, num_batches=self.num_batches, scale=self.scale
        )


def pack(sums: FactorSums, identity: Identity) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        identity: That of the operator that has computed them.
    """
    uses = sorted(sums.uses.known, key=repr), sums.uses.unknown
    fields = sums.tensors, sums.bases, sums.num_batches, sums.scale
    return to_state(Saved(json.dumps(identity), sums.space.names, *uses, *fields), FORMAT)


#: Refuses what does not belong to an operator, given where it is and its identity.
Check = Callable[[str, Identity], None]


def unpack(
    state: Mapping[str, Any], check: Check, space: ParameterSpace, options: Options
) -> FactorSums:
    """Return the means of a saved state, which share its memory.

    Args:
        state: The result of ``pack``.
        check: Refuses means of another operator.
        space: The parameters.
        options: The options of the approximation.

    Raises:
        ValueError: If the state has other contents, or is damaged.
    """
    saved = from_state(state, FORMAT, Saved, space.device)
    check(source_of(state), json.loads(saved.identity))
    return saved.sums(space, options)


def parts_in(path: Path, check: Check, device: torch.device) -> list[Saved]:
    """Return the means in the files of a directory; on the CPU they are read when they are used.

    Args:
        path: The directory.
        check: Refuses means of another operator.
        device: Where they go.

    Raises:
        ValueError: If a file is damaged or foreign.
    """
    parts: list[Saved] = []
    for state in read_parts(path):
        # the checksum is that of the numbers that were written
        parts.append(from_state(state, FORMAT, Saved, device, check_numbers=False))
        check(source_of(state), json.loads(parts[-1].identity))
    needed, covered = [], set[str]()
    for part in sorted(parts, key=lambda part: (-len(part.names), part.names)):
        if covered.issuperset(part.names):  # another process computed them, too
            continue
        if not covered.isdisjoint(part.names):
            raise ValueError(
                f"Files in {path} have different factors of {', '.join(part.names)}, as other "
                "versions of the package write them. Delete the directory, and compute them anew."
            )
        needed.append(part)
        covered.update(part.names)
    return needed


def names_in(path: Path, identity: Identity) -> set[str]:
    """Return the parameters whose factors are in a directory, which must have this identity."""
    remedy = " Choose another directory, or move the file away."
    check = partial(_check_same, identity, remedy)
    return {name for part in parts_in(path, check, torch.device("cpu")) for name in part.names}


def _check_same(this: Identity, remedy: str, source: str, other: Identity) -> None:
    check_same(source, other, this, remedy)


def joined(
    path: Path, parts: Sequence[Saved], space: ParameterSpace, options: Options
) -> FactorSums:
    """Return the means of all parameters.

    Raises:
        ValueError: If some are missing, or the parts are of different data.
    """
    order = {name: number for number, name in enumerate(space.names)}
    if missing := order.keys() - {name for part in parts for name in part.names}:
        raise ValueError(
            f"{path} has factors of {len(order) - len(missing)} of {len(order)} parameters; "
            f"{min(missing, key=order.get)!r} is missing. Continue their computation by "
            "write_factors; all processes must have the same directory."
        )
    parts = sorted(parts, key=lambda part: order[part.names[0]])
    try:
        return FactorSums.beside([part.sums(space, options) for part in parts], space, options)
    except ValueError as error:
        raise ValueError(f"{error} Delete {path}, and compute all factors anew.") from error


#: The options that sums depend on, beside the treatment of positions, and what is drawn.
_OPTIONS = ("fisher_type", "exact", "separate_weight_and_bias", "max_factor_size", "fallback")


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
