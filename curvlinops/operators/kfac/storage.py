"""Saved factors: sums over data as plain tensors and metadata."""

import hashlib
import inspect
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.losses import Loss
from curvlinops.operators.kfac.blocks import Key, LayerUse, Uses
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.structured.layout import ParameterView
from curvlinops.support.serialization import from_state, recorded, to_state

#: The format of saved factors. It changes when older files cannot be read any more.
FORMAT = "Kronecker factors 11"

_SAME_LOSS = (
    "Functions are compared by their name and source, modules also by their options. Everything "
    "else, such as lambdas and closures, is only equal to itself: define the loss with def or as a "
    "module, and use it in both."
)

#: Random names of functions that have no name of their own.
_TOKENS: MutableMapping[Any, str] = WeakKeyDictionary()


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


def fingerprint(operator: Any, reduced: frozenset[str]) -> dict[str, Any]:
    """Return plain values that are equal for operators whose sums have the same meaning."""
    space = operator.space
    return {
        "class": type(operator).__name__,
        "parameters": tuple(space.shapes.items()),
        "dtype": str(space.dtype),
        "loss": _identity(operator.risk.loss),
        "reduced": tuple(sorted(reduced)),
        **{name: getattr(operator, name) for name in _OPTIONS},
    }


def check_equal(source: str, other: dict[str, Any], this: dict[str, Any]) -> None:
    """Compare the fingerprints of two operators.

    Args:
        source: Where the other one is from, for messages.
        other: The other fingerprint.
        this: The fingerprint of this operator.

    Raises:
        ValueError: If they differ, naming the first difference.
    """
    for name, value in this.items():
        if other.get(name) != value:
            message = (
                f"The {source} differs in {name}: it has {other.get(name)}, this operator {value}."
            )
            raise ValueError(f"{message} {_SAME_LOSS}" if name == "loss" else message)


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


def _identity(loss: Loss) -> dict[str, Any]:
    """Return plain values that are equal for equal losses only."""
    values: dict[str, Any] = {"name": loss.name, "reduction": loss.reduction}
    module = loss.module
    if not type(module).__module__.startswith("torch.nn."):
        is_module = isinstance(module, nn.Module)
        values["definition"] = _definition(type(module).forward if is_module else module)
    for path, submodule in module.named_modules() if isinstance(module, nn.Module) else ():
        prefix = f"{path}." if path else ""
        for name, value in (vars(submodule) | submodule.state_dict()).items():
            if isinstance(value, Tensor):
                values[prefix + name] = _digest(value.detach().cpu().double().numpy().tobytes())
            elif isinstance(value, bool | int | float | str) and name != "training":
                values[prefix + name] = value
    return values


def _definition(function: Any) -> Any:
    """Return plain values that identify a function, in all processes if it has a name."""
    if isinstance(function, partial):
        keywords = sorted(function.keywords.items())
        return _definition(function.func), repr(function.args), repr(keywords)
    name = getattr(function, "__qualname__", "<object>")
    if "<" not in name and not isinstance(function, MethodType):
        try:
            return name, _digest(inspect.getsource(function).encode())
        except TypeError:  # written in another language
            return name
        except OSError:  # typed at a prompt
            pass
    try:
        return _TOKENS.setdefault(function, uuid4().hex)
    except TypeError:  # without a hash
        return uuid4().hex


def _digest(numbers: bytes) -> str:
    return hashlib.sha256(numbers).hexdigest()[:16]
