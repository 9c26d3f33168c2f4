"""Saved objects: tensors by name and plain JSON, in safetensors files. Reading runs no code."""

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

    They are made anew by the class, from the fields of dataclasses and named tuples, else from the
    arguments that their method ``_record`` returns.

    Args:
        cls: The class.
        name: Its name in files. Default: its own. If it is the name of another class, objects are
            read as objects of that class.
    """
    _NAMES[cls] = name or cls.__name__
    _CLASSES.setdefault(_NAMES[cls], cls)
    return cls


def write(value: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return plain data that JSON can hold, and the tensors by name.

    Equal objects and shared tensors are written once. Lists are read as tuples, and devices as the
    one to which tensors are read.

    Raises:
        NotImplementedError: If the value has an object of a class that is not ``recorded``.
    """
    writer = _Writer()
    root = writer.write(value)
    return {"objects": writer.objects, "root": root}, writer.tensors


def read(data: Mapping[str, Any], tensors: Mapping[str, Tensor], device: torch.device) -> Any:
    """Return the value that was written, with its tensors on a device.

    Raises:
        ValueError: If ``write`` did not return ``data``, or not with these tensors.
    """
    try:
        reader = _Reader(tensors, device)
        for entry in data["objects"]:
            reader.objects.append(_CLASSES[entry["class"]](*reader.read(entry["arguments"])))
        return reader.read(data["root"])
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"The saved state is damaged: {error!r}.") from error


class _Writer:
    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self.objects: list[dict[str, Any]] = []
        self._names: dict[tuple, str] = {}
        self._numbers: dict[str, int] = {}

    def write(self, value: Any) -> Any:
        if value is None or type(value) in (bool, int, float, str):
            return value
        if type(value) in (list, tuple):
            return [self.write(part) for part in value]
        if type(value) is dict:
            return {"items": self.write(list(value.items()))}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"device": None}
        return self._tensor(value) if isinstance(value, Tensor) else self._object(value)

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        # axes along which a tensor is expanded are written once
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())
        part = value.detach()[once]
        memory = part.device, part.data_ptr(), part.dtype, part.shape, part.stride()
        name = self._names.setdefault(memory, str(len(self.tensors)))
        self.tensors[name] = part
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": name, "shape": list(value.shape), "dtype": dtype}

    def _object(self, value: Any) -> dict[str, Any]:
        name = _NAMES.get(type(value))
        if name is None:
            raise NotImplementedError(f"A {type(value).__name__} cannot be saved.")
        if hasattr(value, "_record"):
            arguments = value._record()
        elif is_dataclass(value):
            arguments = [getattr(value, field.name) for field in fields(value)]
        else:
            arguments = list(value)
        entry = {"class": name, "arguments": [self.write(argument) for argument in arguments]}
        number = self._numbers.setdefault(json.dumps(entry), len(self.objects))
        if number == len(self.objects):
            self.objects.append(entry)
        return {"object": number}


class _Reader:
    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device):
        self.tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        self.device = device
        self.objects: list[Any] = []

    def read(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(self.read(part) for part in data)
        if not isinstance(data, dict):
            return data
        if "items" in data:
            return dict(self.read(data["items"]))
        if "tensor" in data:
            return self._tensor(data["tensor"], getattr(torch, data["dtype"])).expand(data["shape"])
        if "dtype" in data:
            return getattr(torch, data["dtype"])
        return self.device if "device" in data else self.objects[data["object"]]

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self.tensors[name]
        if tensor.dtype != dtype:
            raise ValueError(
                f"The entry '{name}' of the saved state should be of {dtype}, got {tensor.dtype}."
            )
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"The entry '{name}' of the saved state has NaN or infinite values.")
        return tensor


def write_state(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state, tensors by name and ``"metadata"``, to a safetensors file."""
    tensors, memory = dict[str, Tensor](), set[int]()
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value = value.contiguous()
            # in a file each tensor has all of its memory
            if value.data_ptr() in memory or value.untyped_storage().nbytes() != value.nbytes:
                tensors[name] = value.clone()
            memory.add(value.data_ptr())
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
                return metadata | {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, such as save() writes.") from error
    raise ValueError(f"{path} is not the state of an operator of this package.")


def metadata_of(state: Mapping[str, Any], format: str) -> dict[str, Any]:
    """Return the metadata of a state.

    Args:
        state: The state.
        format: Its format, which is the entry ``"format"`` of the metadata.

    Raises:
        ValueError: If it has no metadata, or another format.
    """
    if "metadata" not in state:
        raise ValueError("This is not the state of an operator: it has no metadata.")
    metadata = json.loads(state["metadata"])
    found = metadata.get("format")
    if found != format:
        raise ValueError(
            f"The saved state has the format {found!r}, this function reads {format!r}. Factors of "
            "KFAC and EKFAC are read by the method load(path) of an operator with model, loss and "
            "data; structured operators, such as inverses, by curvlinops.load(path)."
        )
    return metadata
