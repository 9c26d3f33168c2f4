"""Checks of arguments: numbers, devices, choices, and tensors without a graph."""

import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from math import inf, isfinite
from operator import index
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

Choice = TypeVar("Choice", bound=str)

#: Values that are equal if they look equal.
PLAIN = (bool, int, float, complex, str, bytes, type(None), slice, range, torch.device, torch.Size)
#: Containers with one tensor for each parameter, in their order or by name. Tuples of types: the
#: compiler of PyTorch before 2.11 fails at unions.
LISTS = (list, tuple, nn.ParameterList)
MAPPINGS = (Mapping, nn.ParameterDict)


def as_integer(value: Any) -> int | None:
    """Return a value as an integer, ``None`` if it is no integer of Python, NumPy or PyTorch."""
    try:
        # True is an integer to Python
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None


def as_device(device: torch.device | str) -> torch.device:
    """Return a device with its number (``"cuda"`` becomes ``cuda:0``), if it can be used here."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        kind = torch.accelerator.current_accelerator()
        others = [f"{kind.type}:{i}" for i in range(torch.accelerator.device_count())]
        raise ValueError(
            f"Device {device!r} cannot be used here. There are {['cpu', *others]}."
        ) from error


def check_count(name: str, value: Any, at_least: int = 1, at_most: int | None = None) -> int:
    """Return an argument as an integer between two bounds; also NumPy's and PyTorch's."""
    number = as_integer(value)
    if number is None or number < at_least or (at_most is not None and number > at_most):
        allowed = f">= {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise ValueError(f"{name} must be an integer {allowed}, got {value!r}.")
    return number


def check_number(name: str, value: Any, at_least: float = -inf) -> float:
    """Return an argument as a finite real number, at least ``at_least``; also NumPy's."""
    without_graph(value, name)
    try:
        # float() reads strings and truth values, too
        is_bool = isinstance(value, bool) or str(getattr(value, "dtype", "")).endswith("bool")
        number = float("nan") if is_bool or isinstance(value, str) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = float("nan")
    if not isfinite(number) or number < at_least:
        bound = "" if at_least == -inf else f" >= {at_least:g}"
        raise ValueError(f"{name} must be a finite number{bound}, got {value!r}.")
    return number


def check_choice(name: str, value: Any, choices: Iterable[Choice]) -> Choice:
    """Return the choice that equals an argument; refuse others."""
    choices = list(choices)
    if not isinstance(value, str) or value not in choices:
        known = [str(choice) for choice in choices]
        raise ValueError(f"{name} must be one of {known}, got {value!r}.")
    return choices[choices.index(value)]


def check_flag(name: str, value: Any) -> None:
    """Refuse an argument that is no truth value of Python or NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name} must be True or False, got {value!r}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a sentence about the known name that is meant by an unknown one, or about some."""
    known = list(known)
    inner = [other for other in known if name in (other.split("_")[0], other.rpartition(".")[2])]
    if near := inner or get_close_matches(name, known, n=1):
        return f"Did you mean '{near[0]}'?"
    more = f", and {len(known) - 10} more" if len(known) > 10 else ""
    return f"There are {known[:10]}{more}."


def changed(cls: type, values: Mapping[str, Any]) -> list[str]:
    """Return ``name=value`` for arguments of a class with other values than defaults, but None."""
    options = [p for p in inspect.signature(cls).parameters.values() if p.name in values]
    options = [p for p in options if p.default is not None and p.default is not p.empty]
    given = [(p.name, values[p.name]) for p in options if values[p.name] != p.default]
    return [f"{name}={value!r}" for name, value in given]


def without_graph(x: Any, name: str) -> Any:
    """Return an argument; refuse tensors that autograd follows: derivatives would be missing."""
    parts = x.values() if isinstance(x, MAPPINGS) else x if isinstance(x, LISTS) else [x]
    if any(isinstance(part, Tensor) and is_differentiated(part) for part in parts):
        raise ValueError(
            f"{name} requires gradients, but only products A @ v have derivatives, in v, and "
            "A.damped(c).logdet(), in c. Pass it as .detach(), or use torch.no_grad()."
        )
    return x


def is_differentiated(x: Tensor) -> bool:
    """Return whether derivatives with respect to a tensor are recorded, in either mode."""
    recorded = x.requires_grad and torch.is_grad_enabled()
    return recorded or forward_ad.unpack_dual(x).tangent is not None
