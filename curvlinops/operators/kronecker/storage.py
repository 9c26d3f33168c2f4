"""Sums over data as plain tensors and metadata, to be saved and loaded."""

import hashlib
import inspect
import json
from collections.abc import Mapping, MutableMapping
from functools import partial
from math import prod
from types import MethodType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.losses import Loss
from curvlinops.operators.kronecker.estimate import stays_whole
from curvlinops.operators.kronecker.options import Options
from curvlinops.operators.kronecker.plan import plan
from curvlinops.operators.kronecker.sums import Factors, Sums
from curvlinops.operators.kronecker.usage import Uses
from curvlinops.support.records import metadata_of, read, write

#: Of what is saved. It is raised when older files cannot be read any more.
FORMAT = 4

#: Options that choose the structure of blocks. They may differ where they make no difference.
STRUCTURAL = ("max_factor_size", "fallback")

_SAME_LOSS = (
    "Functions are compared by their name and source, modules also by their options. Everything "
    "else, such as lambdas and closures, is only equal to itself: define the loss with def or as a "
    "module, and use it in both."
)

#: What stands for functions that have no name of their own.
_TOKENS: MutableMapping[Any, str] = WeakKeyDictionary()


def pack(sums: Sums, own: dict[str, Any]) -> dict[str, Any]:
    """Return sums as tensors by name, and metadata in one string.

    Args:
        sums: The sums.
        own: The fingerprint of what computed them.
    """
    tensors: dict[str, Tensor] = {
        "terms": torch.as_tensor(
            sums.terms, dtype=torch.float64, device=getattr(sums.terms, "device", "cpu")
        )
    }
    for (number, kind), factors in sums.products.items():
        prefix = f"{number}.{sums.blocks[number].kinds.index(kind)}"
        tensors[f"{prefix}.inputs"] = factors.inputs
        tensors[f"{prefix}.count"] = factors.count
        if factors.gradients is not None:
            tensors[f"{prefix}.gradients"] = factors.gradients
    for number, matrix in sums.matrices.items():
        tensors[f"{number}.matrix"] = matrix
    known = {name: sorted(usages, key=repr) for name, usages in sums.uses.known.items()}
    metadata = {
        "format": FORMAT,
        "fingerprint": own,
        "num_batches": sums.num_batches,
        "uses": write(known)[0],
        "unknown": sums.uses.unknown,
    }
    return {"metadata": json.dumps(metadata), **tensors}


def unpack(
    state: Mapping[str, Any],
    own: dict[str, Any],
    space: ParameterSpace,
    options: Options,
) -> tuple[Sums, dict[str, Tensor]]:
    """Return sums, and all other tensors.

    Args:
        state: What ``pack`` returned, perhaps with more tensors.
        own: The fingerprint of what loads them.
        space: Its parameters.
        options: Its options.

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
    theirs = metadata["fingerprint"]
    check_equal("saved state", theirs, {k: v for k, v in own.items() if k not in STRUCTURAL})
    uses = read(metadata["uses"], {}, space.device)
    known = {name: frozenset(usages) for name, usages in uses.items()}
    sums = Sums(Uses(known, metadata["unknown"]), num_batches=metadata["num_batches"])
    tensors = {n: x.to(space.device) for n, x in state.items() if isinstance(x, Tensor)}
    sums.terms = take(tensors, "terms", (), torch.float64)
    try:
        sums.blocks = plan(sums.uses, space, options)
        _take_all(sums, tensors, space, options)
    except (NotImplementedError, ValueError) as error:
        if _structural(theirs) == _structural(own):
            raise
        raise ValueError(
            f"The saved state was computed with {_structural(theirs)}, under which blocks have "
            f"another structure than under this operator's {_structural(own)}."
        ) from error
    return sums, tensors


def _take_all(
    sums: Sums, tensors: dict[str, Tensor], space: ParameterSpace, options: Options
) -> None:
    """Move tensors to the sums of blocks."""

    def factor(name: str, shape: tuple[int, int], whole: bool) -> Tensor:
        full = (*shape, shape[1]) if whole else shape
        return take_squares(tensors, name, full, space.dtype, matrix=whole)

    for number, block in enumerate(sums.blocks):
        for place, kind in enumerate(block.kinds):
            prefix, whole = f"{number}.{place}", stays_whole(block, kind, options)
            width = kind.inputs + (block.scale is not None)
            inputs = factor(f"{prefix}.inputs", (kind.groups, width), whole[0])
            gradients = None
            if block.twin is None:
                shape = (kind.groups, kind.outputs)
                gradients = factor(f"{prefix}.gradients", shape, whole[1])
            count = take_squares(tensors, f"{prefix}.count", (), torch.float64, matrix=False)
            sums.products[number, kind] = Factors(inputs, count, gradients)
        if block.structure in ("dense", "diagonal"):
            size = prod(space.shapes[block.names[0]])
            shape, whole = (block.groups, size // block.groups), block.structure == "dense"
            sums.matrices[number] = factor(f"{number}.matrix", shape, whole)


def take(
    tensors: dict[str, Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Tensor:
    """Remove an entry of a saved state, and return a copy.

    Args:
        tensors: The entries.
        name: The name of the entry.
        shape: What shape it must have.
        dtype: What dtype it must have.

    Raises:
        ValueError: If there is no such entry, or it cannot be what it should be.
    """
    if name not in tensors:
        raise ValueError(f"The saved state has no entry '{name}'.")
    found = tensors.pop(name)
    subject = f"The entry '{name}' of the saved state"
    if found.shape != shape or found.dtype != dtype:
        raise ValueError(
            f"{subject} should be of shape {list(shape)} and {dtype}, got {list(found.shape)} and "
            f"{found.dtype}."
        )
    if not bool(found.isfinite().all()):
        raise ValueError(f"{subject} contains NaN or infinite values.")
    return found.clone()


def take_squares(
    tensors: dict[str, Tensor], name: str, shape: tuple[int, ...], dtype: torch.dtype, matrix: bool
) -> Tensor:
    """Take an entry of sums of squares, or of outer products if it is a matrix."""
    found = take(tensors, name, shape, dtype)
    squares = found.diagonal(dim1=-2, dim2=-1) if matrix else found
    if bool((squares < 0).any()):
        raise ValueError(
            f"The entry '{name}' of the saved state has negative values where there should be sums "
            "of squares."
        )
    return found


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
