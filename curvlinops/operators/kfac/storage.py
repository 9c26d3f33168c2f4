"""Saved factors: sums over data as plain tensors and metadata."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.operators.kfac.blocks import Key, LayerUse, Uses
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.operators.origin import check_equal, identity_of
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import from_state, recorded, to_state

#: The format of saved factors. It changes when older files cannot be read any more.
FORMAT = "Kronecker factors 11"


@recorded
class Saved(NamedTuple):
    """What is saved: the fingerprint of an operator, and fields of ``Uses`` and ``FactorSums``."""

    fingerprint: dict[str, Any]
    known: Sequence[LayerUse]
    unknown: dict[str, str]
    tensors: dict[Key, Tensor]
    bases: dict[tuple[ParameterView, ...], Any]
    num_batches: int
    scale: float


def pack(sums: FactorSums, fingerprint: dict[str, Any]) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        fingerprint: That of the operator that has computed them.
    """
    known, unknown = sorted(sums.uses.known, key=repr), sums.uses.unknown
    fields = sums.tensors, sums.bases, sums.num_batches, sums.scale
    return to_state(Saved(fingerprint, known, unknown, *fields), FORMAT)


def unpack(
    state: Mapping[str, Any],
    fingerprint: dict[str, Any],
    space: ParameterSpace,
    options: Options,
    check_numbers: bool = True,
) -> FactorSums:
    """Return the means of a saved state, which share its memory.

    Args:
        state: The result of ``pack``.
        fingerprint: That of the operator that loads them.
        space: Its parameters.
        options: Its options.
        check_numbers: Whether NaN and infinite values are refused, for which all are read.

    Raises:
        ValueError: If the state has other contents, or is of other parameters, options or loss; if
            it is damaged.
    """
    saved = from_state(state, FORMAT, Saved, space.device, check_numbers)
    check_equal("saved state", saved.fingerprint, fingerprint)
    sums = FactorSums(space, options).with_uses(Uses(frozenset(saved.known), saved.unknown))
    return replace(
        sums,
        tensors=saved.tensors,
        bases=saved.bases,
        num_batches=saved.num_batches,
        scale=saved.scale,
    )


#: The options that sums depend on, beside the treatment of positions.
_OPTIONS = ("fisher_type", "exact", "separate_weight_and_bias", "max_factor_size", "fallback")
_OPTIONS += ("fit", "steps")


def fingerprint(operator: Any, reduced: frozenset[str]) -> dict[str, Any]:
    """Return plain values that are equal for operators whose sums have the same meaning."""
    space = operator.space
    return {
        "class": type(operator).__name__,
        "parameters": tuple(space.shapes.items()),
        "dtype": str(space.dtype),
        "loss": identity_of(operator.risk.loss),
        "reduced": tuple(sorted(reduced)),
        **{name: getattr(operator, name) for name in _OPTIONS},
    }


def check_mergeable(operator: Any, other: Any) -> None:
    """Check that two operators may be merged.

    Raises:
        ValueError: If they have different classes, parameters, options, or losses.
    """
    if type(other) is not type(operator):
        raise ValueError("Only operators of one class can be merged.")
    if other.risk.ranks.group is not operator.risk.ranks.group:
        raise ValueError("Only operators with the same process_group can be merged.")
    operator.space.check_compatible(other.space)
    check_equal("other operator", other._fingerprint(), operator._fingerprint())
