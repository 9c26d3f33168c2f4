"""Saved factors: sums over data as plain tensors and metadata."""

import hashlib
import inspect
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.losses import Loss
from curvlinops.operators.kfac.blocks import Uses
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.sums import FactorSums
from curvlinops.support.serialization import metadata_of, read, write

#: The format of saved factors. It changes when older files cannot be read any more.
FORMAT = "Kronecker factors 9"

_SAME_LOSS = (
    "Functions are compared by their name and source, modules also by their options. Everything "
    "else, such as lambdas and closures, is only equal to itself: define the loss with def or as a "
    "module, and use it in both."
)

#: Random names of functions that have no name of their own.
_TOKENS: MutableMapping[Any, str] = WeakKeyDictionary()


def pack(sums: FactorSums, own: dict[str, Any]) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        own: The fingerprint of the operator that has computed them.
    """
    content, tensors = write(
        {
            "known": sorted(sums.uses.known, key=repr),
            "unknown": sums.uses.unknown,
            "tensors": sums.tensors,
            "bases": sums.bases,
            "num_batches": sums.num_batches,
        }
    )
    metadata = {"format": FORMAT, "fingerprint": own, "content": content}
    return {"metadata": json.dumps(metadata), **tensors}


def unpack(
    state: Mapping[str, Any], own: dict[str, Any], space: ParameterSpace, options: Options
) -> FactorSums:
    """Return the sums of a saved state, in memory of their own.

    Args:
        state: The result of ``pack``.
        own: The fingerprint of the operator that loads them.
        space: Its parameters.
        options: Its options.

    Raises:
        ValueError: If the state is not of this kind, or of other parameters, options or loss; if it
            is damaged.
    """
    metadata = metadata_of(state, FORMAT)
    check_equal("saved state", metadata["fingerprint"], own)
    entries = {
        name: x.to(space.device, copy=True) for name, x in state.items() if isinstance(x, Tensor)
    }
    content = read(metadata["content"], entries, space.device)
    tensors, bases = content["tensors"], content["bases"]
    uses = Uses(frozenset(content["known"]), content["unknown"])
    sums = FactorSums(space, options).with_uses(uses)
    return replace(sums, tensors=tensors, bases=bases, num_batches=content["num_batches"])


#: The options that sums depend on, beside the treatment of positions.
_OPTIONS = ("fisher_type", "exact", "separate_weight_and_bias", "max_factor_size", "fallback")


def fingerprint(operator: Any, reduced: frozenset[str]) -> dict[str, Any]:
    """Return plain values that are equal for operators whose sums have the same meaning."""
    space = operator.space
    return {
        "class": type(operator).__name__,
        "parameters": [[name, list(shape)] for name, shape in space.shapes.items()],
        "dtype": str(space.dtype),
        "loss": _identity(operator.risk.loss),
        "reduced": sorted(reduced),
        **{name: getattr(operator, name) for name in _OPTIONS},
    }


def check_equal(what: str, found: dict[str, Any], own: dict[str, Any]) -> None:
    """Compare the fingerprints of two operators.

    Args:
        what: The source of the first one, for messages.
        found: The fingerprint.
        own: The fingerprint of this operator.

    Raises:
        ValueError: If they differ, naming the first difference.
    """
    for key, value in own.items():
        if found.get(key) != value:
            message = (
                f"The {what} differs in {key}: it has {found.get(key)}, this operator {value}."
            )
            raise ValueError(f"{message} {_SAME_LOSS}" if key == "loss" else message)


def check_kind(own: Any, other: Any) -> None:
    """Check that two operators may be merged.

    Raises:
        ValueError: If they have different classes, parameters, options, or losses.
    """
    if type(other) is not type(own):
        raise ValueError("Only operators of one class can be merged.")
    if other.risk.ranks.group is not own.risk.ranks.group:
        raise ValueError("Only operators with the same process_group can be merged.")
    own.space.check_compatible(other.space)
    check_equal("other operator", other._fingerprint(), own._fingerprint())


def _identity(loss: Loss) -> dict[str, Any]:
    """Return plain values that are equal for equal losses only."""
    found: dict[str, Any] = {"name": loss.name, "reduction": loss.reduction}
    module = loss.module
    if not type(module).__module__.startswith("torch.nn."):
        is_module = isinstance(module, nn.Module)
        found["definition"] = _definition(type(module).forward if is_module else module)
    for path, part in module.named_modules() if isinstance(module, nn.Module) else ():
        prefix = f"{path}." if path else ""
        for name, value in (vars(part) | part.state_dict()).items():
            if isinstance(value, Tensor):
                found[prefix + name] = _digest(value.detach().cpu().double().numpy().tobytes())
            elif isinstance(value, bool | int | float | str) and name != "training":
                found[prefix + name] = value
    return found


def _definition(function: Any) -> Any:
    """Return plain values that identify a function, in all processes if it has a name."""
    if isinstance(function, partial):
        values = [repr(function.args), repr(sorted(function.keywords.items()))]
        return [_definition(function.func), *values]
    name = getattr(function, "__qualname__", "<object>")
    if "<" not in name and not isinstance(function, MethodType):
        try:
            return [name, _digest(inspect.getsource(function).encode())]
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
