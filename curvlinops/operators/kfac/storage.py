"""Sums over data as plain tensors and metadata, to be saved and loaded."""

import hashlib
import inspect
import json
from collections.abc import Mapping, MutableMapping
from functools import partial
from types import MethodType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.losses import Loss
from curvlinops.operators.kfac.options import Options
from curvlinops.operators.kfac.plan import Uses
from curvlinops.operators.kfac.sums import FactorSums, Key, Planner
from curvlinops.support.records import metadata_of, read, write

#: Of what is saved. It is raised when older files cannot be read any more.
FORMAT = 5

#: Options that choose the structure of blocks. They may differ where they make no difference.
STRUCTURAL = ("max_factor_size", "fallback")

_SAME_LOSS = (
    "Functions are compared by their name and source, modules also by their options. Everything "
    "else, such as lambdas and closures, is only equal to itself: define the loss with def or as a "
    "module, and use it in both."
)

#: What stands for functions that have no name of their own.
_TOKENS: MutableMapping[Any, str] = WeakKeyDictionary()


def pack(sums: FactorSums, own: dict[str, Any]) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        own: The fingerprint of the operator that has computed them.
    """
    uses = sums.plan.uses
    content, bases = write(
        {
            "known": sorted(uses.known, key=repr),
            "unknown": dict(uses.unknown),
            "keys": list(sums.tensors),
            "num_batches": sums.num_batches,
            "bases": sums.bases,
        }
    )
    metadata = {"format": FORMAT, "fingerprint": own, "content": content}
    entries = {_entry(i, key): tensor for i, (key, tensor) in enumerate(sums.tensors.items())}
    return {"metadata": json.dumps(metadata), **entries, **bases}


def _entry(number: int, key: Key) -> str:
    """Return what a sum is called in a saved state, such as ``"3.layer.weight.A"``."""
    of, name = key
    of = of[0][0] if name == "moment" else getattr(of, "name", of)
    return ".".join(str(part) for part in (number, of, name) if part is not None)


def unpack(
    state: Mapping[str, Any], own: dict[str, Any], planner: Planner, has_bases: bool
) -> FactorSums:
    """Return the sums of a saved state, in memory of their own.

    Args:
        state: What ``pack`` returned.
        own: The fingerprint of the operator that loads them.
        planner: Plans this operator's blocks.
        has_bases: Whether eigenbases and eigenvalues are loaded, too.

    Raises:
        ValueError: If the state is not of this kind, or of other parameters, options or loss; if an
            entry is missing, or cannot be what it should be.
    """
    metadata = metadata_of(state, "a Kronecker-factored operator")
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"Unknown format {metadata.get('format')!r} of the saved state; factors have {FORMAT}. "
            "Structured operators, such as inverses, are read by curvlinops.load()."
        )
    theirs, space = metadata["fingerprint"], planner.space
    check_equal("saved state", theirs, {k: v for k, v in own.items() if k not in STRUCTURAL})
    tensors = {name: x for name, x in state.items() if isinstance(x, Tensor)}
    vectors = {n: _take(tensors, n, x.shape, space) for n, x in tensors.items() if n.isdigit()}
    content = read(metadata["content"], vectors, space.device)
    try:
        plan = planner.plan(Uses(frozenset(content["known"]), content["unknown"]))
    except (NotImplementedError, ValueError) as error:
        raise ValueError(_other_structure(theirs, own)) from error
    shapes, bases = dict(plan.shapes), content["bases"] if has_bases else {}
    for block in plan.blocks if has_bases else ():
        if block.structure == "kronecker" and block.slices not in bases:
            raise ValueError(
                "The saved state has no eigenvalues: it is that of a KFACLinearOperator."
            )
    shapes |= {(key, "moment"): basis.shape for key, basis in bases.items()}
    names = {key: _entry(i, key) for i, key in enumerate(content["keys"]) if key in shapes}
    is_alike = _structural(theirs) == _structural(own)
    for key, shape in shapes.items() if not is_alike else ():
        if key not in names or tensors[names[key]].shape != shape:
            raise ValueError(_other_structure(theirs, own))
    sums = {key: _take(tensors, name, shapes[key], space) for key, name in names.items()}
    return FactorSums(plan, sums, bases, content["num_batches"])


def _take(
    tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...], space: ParameterSpace
) -> Tensor:
    """Return a copy of an entry of a saved state."""
    if name not in tensors:
        raise ValueError(f"The saved state has no entry '{name}'.")
    # counts are scalars in float64
    tensor, dtype = tensors[name], space.dtype if shape else torch.float64
    if tensor.shape != shape or tensor.dtype != dtype:
        raise ValueError(
            f"The entry '{name}' of the saved state should be of shape {list(shape)} and {dtype}, "
            f"got {list(tensor.shape)} and {tensor.dtype}."
        )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"The entry '{name}' of the saved state has NaN or infinite values.")
    return tensor.to(space.device, copy=True)


def _other_structure(theirs: dict[str, Any], own: dict[str, Any]) -> str:
    return (
        f"The saved state was computed with {_structural(theirs)}, under which blocks have "
        f"another structure than under this operator's {_structural(own)}."
    )


def _structural(found: dict[str, Any]) -> str:
    return ", ".join(f"{name}={found.get(name)!r}" for name in STRUCTURAL)


def fingerprint(space: ParameterSpace, options: Options, loss: Loss) -> dict[str, Any]:
    """Return what must be equal for sums to have the same meaning."""
    return {
        "parameters": [[name, list(shape)] for name, shape in space.shapes.items()],
        "dtype": str(space.dtype),
        "loss": _identity(loss),
        "fisher_type": str(options.fisher_type),
        "exact": options.exact,
        "reduced": sorted(options.reduced),
        "separate_weight_and_bias": not options.joint,
        "max_factor_size": options.max_factor_size,
        "fallback": str(options.fallback),
    }


def check_equal(what: str, found: dict[str, Any], own: dict[str, Any]) -> None:
    """Check that sums of others have the same meaning as one's own.

    Args:
        what: What the others are, in messages.
        found: Their fingerprint.
        own: One's own.

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
    """Return what is equal for equal losses only: plain values, which JSON can hold."""
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
    """Return what tells a function from others, also in another process if it has a name."""
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
