"""Plain values that tell whether a computation is of the same model, loss and data as another."""

import hashlib
import inspect
import json
from collections.abc import MutableMapping
from functools import partial
from itertools import islice
from types import MethodType
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from curvlinops.losses import Loss
from curvlinops.operators.base import DataLinearOperator
from curvlinops.risk.agreement import checksums_of
from curvlinops.support.digest import digest

_SAME_LOSS = (
    "Functions are compared by their name and source, modules also by their options. Everything "
    "else, such as lambdas and closures, is only equal to itself: define the loss with def or as a "
    "module, and use it in both."
)

#: Random names of functions that have no name of their own.
_TOKENS: MutableMapping[Any, str] = WeakKeyDictionary()


def origin_of(operator: DataLinearOperator) -> dict[str, Any]:
    """Return plain values that are equal if parameters and buffers are, and the first batch is.

    All processes of the operator's group, or with shards of the model, call it together.
    """
    first: list[tuple] = []
    with operator._together("first batch"), operator._batches("first batch") as problems:
        for problem in islice(problems, 1):
            first = digest((problem.batch.X, problem.batch.y))
    own = [(shape, str(dtype), checksum) for shape, dtype, checksum in first]
    batches = operator.risk.ranks.gather_objects(own)
    values = {f"the values of {name}": x for name, x in checksums_of(operator.risk).items()}
    if shards := operator.risk.model.shards:
        parts = [number for *_, number in digest(shards.parts())]
        values["the values of sharded parameters"] = operator.risk.peers.gather_objects(parts)
    return {"the first batch": batches} | values


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings as they are read from JSON."""
    return json.loads(json.dumps(settings))


def check_equal(source: str, other: dict[str, Any], this: dict[str, Any]) -> None:
    """Compare the fingerprints of two operators.

    Args:
        source: Where the other one is from, for messages.
        other: The other fingerprint.
        this: The fingerprint of this operator.

    Raises:
        ValueError: If they differ, naming the first difference. Values under names that begin
            with "the" are checksums, and are not shown.
    """
    for name, value in this.items():
        if other.get(name) != value:
            # checksums are no numbers for people
            shown = f": it has {other.get(name)}, this operator {value}"
            message = f"The {source} differs in {name}{'' if name.startswith('the ') else shown}."
            raise ValueError(f"{message} {_SAME_LOSS}" if name == "loss" else message)


def identity_of(loss: Loss) -> dict[str, Any]:
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
