"""Saved factors: sums over data as plain tensors and metadata."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.identity import Identity, check_identity, identity_of
from curvlinops.operators.kfac.blocks import Key, LayerUse, Uses
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import from_state, recorded, to_state

#: The format of saved factors. It changes when older files cannot be read any more.
FORMAT = "Kronecker factors 12"


@recorded
class Saved(NamedTuple):
    """What is saved: the identity of an operator, and fields of ``Uses`` and ``FactorSums``."""

    identity: str
    known: Sequence[LayerUse]
    unknown: dict[str, str]
    tensors: dict[Key, Tensor]
    bases: dict[tuple[ParameterView, ...], Any]
    num_batches: int
    scale: float


def pack(sums: FactorSums, identity: Identity) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        identity: That of the operator that has computed them.
    """
    known, unknown = sorted(sums.uses.known, key=repr), sums.uses.unknown
    fields = sums.tensors, sums.bases, sums.num_batches, sums.scale
    return to_state(Saved(json.dumps(identity), known, unknown, *fields), FORMAT)


def unpack(
    state: Mapping[str, Any],
    check: Callable[[Identity], None],
    space: ParameterSpace,
    options: Options,
    check_numbers: bool = True,
) -> FactorSums:
    """Return the means of a saved state, which share its memory.

    Args:
        state: The result of ``pack``.
        check: Refuses means that have another identity.
        space: The parameters.
        options: The options of the approximation.
        check_numbers: Whether NaN and infinite values are refused, for which all are read.

    Raises:
        ValueError: If the state has other contents, or is damaged.
    """
    saved = from_state(state, FORMAT, Saved, space.device, check_numbers)
    check(json.loads(saved.identity))
    sums = FactorSums(space, options).with_uses(Uses(frozenset(saved.known), saved.unknown))
    return replace(
        sums,
        tensors=saved.tensors,
        bases=saved.bases,
        num_batches=saved.num_batches,
        scale=saved.scale,
    )


#: The options that sums depend on, beside the treatment of positions, and what is drawn.
_OPTIONS = ("fisher_type", "exact", "separate_weight_and_bias", "max_factor_size", "fallback")


def options_of(operator: Any) -> dict[str, Any]:
    """Return the options on which the meaning of sums depends."""
    options = {name: getattr(operator, name) for name in _OPTIONS}
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
    found = identity_of(other, options_of(other))
    options, data = options_of(operator), other.risk.data
    check_identity("other operator", found, operator, options, data=data)
