"""Objects as plain data and tensors: what files hold, and is read without running their code."""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Class = TypeVar("Class", bound=type)

_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}


def recorded(cls: Class, name: str | None = None) -> Class:
    """Let objects of exactly this class be saved; also a decorator.

    Dataclasses and named tuples are made anew from their fields, others from what their method
    ``_record`` returns; by the class itself, or its method ``_restored`` if it has one.

    Args:
        cls: The class.
        name: What it is called in files. Default: its name. That of another class: its objects are
            read as objects of that one.
    """
    _NAMES[cls] = name or cls.__name__
    _CLASSES.setdefault(_NAMES[cls], cls)
    return cls


class Recorder:
    """Turns objects into plain data.

    What occurs several times, by identity, is written once, and is one object again when read.

    Attributes:
        tensors: The tensors in what was written so far, by name.
    """

    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple, str] = {}
        self._known: dict[int, int] = {}
        self._alive: list[Any] = []  # the numbers of objects that are gone are given again

    def write(self, value: Any) -> Any:
        """Return what JSON can hold.

        Raises:
            NotImplementedError: If the value has an object of a class that is not ``recorded``.
        """
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (list, tuple):
            return [self.write(one) for one in value]
        if type(value) is dict:
            return {"pairs": [[self.write(k), self.write(one)] for k, one in value.items()]}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}  # wherever it is read
        return self._object(value)

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())
        part = value.detach()[once]
        place = part.device, part.data_ptr(), part.dtype, part.shape, part.stride()
        name = self._names.setdefault(place, str(len(self.tensors)))
        self.tensors[name] = part
        return {"tensor": name, "shape": list(value.shape)}

    def _object(self, value: Any) -> dict[str, Any]:
        if id(value) in self._known:
            return {"again": self._known[id(value)]}
        name = _NAMES.get(type(value))
        if name is None:
            raise NotImplementedError(f"A {type(value).__name__} cannot be saved.")
        if hasattr(value, "_record"):
            arguments = value._record()
        elif is_dataclass(value):
            arguments = [getattr(value, field.name) for field in fields(value)]
        else:
            arguments = list(value)
        out = {"class": name, "of": [self.write(one) for one in arguments]}
        self._known[id(value)] = len(self._known)
        self._alive.append(value)
        return out


class Reader:
    """Turns what a ``Recorder`` wrote into objects.

    Args:
        tensors: The tensors by name.
        device: Where tensors go.
    """

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device):
        self._tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._device = device
        self._known: list[Any] = []

    def read(self, found: Any) -> Any:
        """Return the value; lists are tuples.

        Raises:
            ValueError: If this is not what a ``Recorder`` wrote.
        """
        try:
            return self._read(found)
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(f"The saved state is damaged: {error!r}.") from error

    def _read(self, found: Any) -> Any:
        if isinstance(found, list):
            return tuple(self._read(one) for one in found)
        if not isinstance(found, dict):
            return found
        kind, value = next(iter(found.items()), ("class", None))
        if kind == "pairs":
            return {self._read(k): self._read(one) for k, one in value}
        if kind == "tensor":
            return self._tensor(value, found["shape"])
        if kind == "dtype":
            return getattr(torch, value)
        if kind == "device":
            return self._device
        if kind == "again":
            return self._known[value]
        cls, arguments = _CLASSES[found["class"]], self._read(found["of"])
        self._known.append(getattr(cls, "_restored", cls)(*arguments))
        return self._known[-1]

    def _tensor(self, name: str, shape: list[int]) -> Tensor:
        tensor = self._tensors[name]
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"The entry '{name}' of the saved state has NaN or infinite values.")
        return tensor.expand(shape)


def write_state(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state, tensors by name and ``"metadata"``, to a safetensors file."""
    tensors: dict[str, Tensor] = {}
    memory: set[int] = set()
    for name, value in state.items():
        if isinstance(value, Tensor):
            value = value.contiguous()
            own = value.untyped_storage()
            # in a file each tensor has all of its memory
            if own.data_ptr() in memory or own.nbytes() != value.nbytes:
                value = value.clone()
            memory.add(own.data_ptr())
            tensors[name] = value
    save_file(tensors, str(path), {"metadata": state["metadata"]})


def read_state(path: str | Path) -> dict[str, Any]:
    """Read a state from a safetensors file.

    Raises:
        ValueError: If the file has no such state.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if "metadata" in metadata:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return {**metadata, **tensors}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, such as save() writes.") from error
    raise ValueError(f"{path} is not the state of an operator of this package.")


def metadata_of(state: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the metadata of a state.

    Raises:
        ValueError: If it has none, which says that it is not the state of ``what``.
    """
    if "metadata" not in state:
        raise ValueError(f"This is not the state of {what}: no metadata.")
    return json.loads(state["metadata"])
