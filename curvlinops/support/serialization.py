"""Saved objects: a description in JSON, and tensors by name. Reading runs no code of a file.

A description has plain values, lists and the entries below. Tuples are written as lists, and lists
are read as tuples.

| in JSON | stands for |
|---|---|
| ``{"items": [[key, value], ...]}`` | a dictionary |
| ``{"class": name, "arguments": [...]}`` | an object of a class that is ``recorded`` |
| ``{"tensor": name, "dtype": name, "shape": [...]}`` | a tensor |
| ``{"dtype": name}`` | a dtype |
| ``{"device": null}`` | the device to which tensors are read |

Tensors that share memory are written once. Equal descriptions of objects are read as one object.
"""

import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

Class = TypeVar("Class", bound=type)
Value = TypeVar("Value")

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


def to_state(value: Any, format: str) -> dict[str, Any]:
    """Return a value as tensors by name and ``"metadata"``, a string.

    Args:
        value: The value.
        format: What the value is, with a version. ``from_state`` reads states of equal format only.

    Raises:
        NotImplementedError: If the value has an object of a class that is not ``recorded``.
    """
    writer = _Writer()
    content = writer.write(value)
    return {"metadata": json.dumps({"format": format, "content": content}), **writer.tensors}


def from_state(
    state: Mapping[str, Any],
    format: str,
    cls: type[Value],
    device: torch.device,
    check_numbers: bool = True,
) -> Value:
    """Return the value that a state was made of, with its tensors on a device.

    Args:
        state: The state.
        format: Its format.
        cls: The class of the value.
        device: The device.
        check_numbers: Whether NaN and infinite values are refused, for which all are read.

    Raises:
        ValueError: If the state has another format, is damaged, or has no object of the class.
    """
    if "metadata" not in state:
        raise ValueError("This is not the state of an operator: it has no metadata.")
    source = f"The {source_of(state)}"
    try:
        metadata = json.loads(state["metadata"])
        is_format = metadata["format"] == format
        reader = _Reader(state, device, check_numbers)
        value = reader.read(metadata["content"]) if is_format else None
    except ValueError as error:
        raise ValueError(f"{source} is damaged: {error}") from error
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
        raise ValueError(f"{source} is damaged: {error!r}.") from error
    if not is_format:
        raise ValueError(
            f"{source} has the format {metadata['format']!r}, this function reads {format!r}. "
            "Factors of KFAC and EKFAC are read by the method load(path) of an operator with "
            "model, loss and data; structured operators, such as inverses, by curvlinops.load(path)"
            "; scores by the method scores(P, out=path) that wrote them; gradients by "
            "curvlinops.influence.GradientStore(path). A file of an earlier format must be written "
            "again."
        )
    if not isinstance(value, cls):
        raise ValueError(f"{source} has a {type(value).__name__}, no {cls.__name__}.")
    return value


class _Writer:
    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple, str] = {}

    def write(self, value: Any) -> Any:
        if type(value) in _NAMES:
            arguments = self.write(_arguments(value))
            return {"class": _NAMES[type(value)], "arguments": arguments}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (list, tuple):
            return [self.write(entry) for entry in value]
        if type(value) is dict:
            return {"items": self.write(list(value.items()))}
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if isinstance(value, torch.device):
            return {"device": None}
        raise NotImplementedError(f"A {type(value).__name__} cannot be saved.")

    def _tensor(self, value: Tensor) -> dict[str, Any]:
        # axes along which a tensor is expanded are written once
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())
        tensor = value.detach()[once]
        memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        name = self._names.setdefault(memory, str(len(self.tensors)))
        self.tensors[name] = tensor
        return {"tensor": name, "dtype": _name(value.dtype), "shape": list(value.shape)}


def _arguments(value: Any) -> list[Any]:
    """Return the arguments from which an object is made anew."""
    if hasattr(value, "_record"):
        return list(value._record())
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return list(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Reader:
    def __init__(self, state: Mapping[str, Any], device: torch.device, check_numbers: bool):
        tensors = ((name, x) for name, x in state.items() if isinstance(x, Tensor))
        self._tensors = {name: tensor.to(device) for name, tensor in tensors}
        self._device, self._check_numbers = device, check_numbers
        self._objects: dict[str, Any] = {}

    def read(self, data: Any) -> Any:
        if isinstance(data, list):
            return tuple(self.read(entry) for entry in data)
        if not isinstance(data, dict):
            return data
        if "items" in data:
            return dict(self.read(data["items"]))
        if "tensor" in data:
            return self._tensor(**data)
        if "dtype" in data:
            return getattr(torch, data["dtype"])
        if "device" in data:
            return self._device
        description = json.dumps(data)
        if description not in self._objects:
            arguments = self.read(data["arguments"])
            self._objects[description] = _CLASSES[data["class"]](*arguments)
        return self._objects[description]

    def _tensor(self, tensor: str, dtype: str, shape: list[int]) -> Tensor:
        values, entry = self._tensors[tensor], f"The entry '{tensor}'"
        if values.dtype != getattr(torch, dtype):
            raise ValueError(f"{entry} should be of torch.{dtype}, got {values.dtype}.")
        if self._check_numbers and not bool(values.isfinite().all()):
            raise ValueError(f"{entry} has NaN or infinite values.")
        return values.expand(shape)


# --- files

#: What stands in place of the checksum while it is computed.
_NO_CHECKSUM = "0" * 8
_SUFFIX = ".safetensors"
#: Where a state has the file from which it was read.
_SOURCE = "source"


def write_state(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state to a safetensors file with a checksum, which replaces an older one at once.

    The older file of that path stays as it is for those who have mapped it to memory. A process
    that is killed leaves the older file, and perhaps a part of the new one. Processes and threads
    that write to one path at the same time each have a new file of their own.

    Raises:
        OSError: If there is no space, or the file cannot be written.
    """
    tensors, memory = dict[str, Tensor](), set[int]()
    for name, value in state.items():
        if isinstance(value, Tensor):
            tensors[name] = value = value.contiguous()
            # in a file each tensor has all of its memory
            if value.data_ptr() in memory or value.untyped_storage().nbytes() != value.nbytes:
                tensors[name] = value.clone()
            memory.add(value.data_ptr())
    path = Path(path)
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    metadata = {"metadata": state["metadata"], "checksum": _NO_CHECKSUM}
    try:
        save_file(tensors, str(new), metadata)
        with new.open("r+b") as file:
            place, checksum = _checksum(file)
            file.seek(place)
            file.write(checksum)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        raise OSError(
            f"{path} cannot be written: {error}. Other files are as before. Make space, or choose "
            "another place, and try again."
        ) from error
    finally:
        with suppress(OSError):
            new.unlink()


def _checksum(file: BinaryIO) -> tuple[int, bytes]:
    """Return the place of a file's checksum, and the checksum of the rest."""
    start = file.read(8)
    header = file.read(int.from_bytes(start, "little"))
    found = re.search(b'"checksum":"(.{8})"', header)
    place = 0 if found is None else found.start(1)  # none where it is damaged
    rest = header[:place] + _NO_CHECKSUM.encode() + header[place + len(_NO_CHECKSUM) :]
    number = crc32(start + rest)
    while part := file.read(2**20):
        number = crc32(part, number)
    return len(start) + place, f"{number:08x}".encode()


def read_state(path: str | Path, remedy: str = "Write it anew.") -> dict[str, Any]:
    """Read a state from a safetensors file, which is mapped to memory.

    Args:
        path: The file.
        remedy: What to do about a damaged file, for messages.

    Raises:
        ValueError: If the file has no such state, or is damaged.
    """
    try:
        with safe_open(str(path), "pt") as file:
            metadata = file.metadata() or {}
            if not {"metadata", "checksum"} <= metadata.keys():
                raise ValueError(
                    f"The file {path} is not the state of an operator, or of an older version of "
                    "this package. Choose another path."
                )
            with Path(path).open("rb") as numbers:
                _, checksum = _checksum(numbers)
            if checksum != metadata["checksum"].encode():
                raise ValueError(f"The file {path} is damaged: its checksum differs. {remedy}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"The file {path} is not a safetensors file, such as save() writes, or it is "
            f"incomplete. {remedy}"
        ) from error
    return metadata | {_SOURCE: f"file {path}"} | tensors


def source_of(state: Mapping[str, Any]) -> str:
    """Return the file from which a state was read, for messages."""
    return state.get(_SOURCE, "saved state")


# --- directories of parts, which are written once and never changed


def write_part(state: Mapping[str, Any], directory: Path, prefix: str = "") -> None:
    """Write a state to a new file of a directory, under a name that no other file has.

    Args:
        state: The state.
        directory: The directory.
        prefix: The beginning of the name. Files are read in the order of their names.

    Raises:
        OSError: If there is no space, or the file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    write_state(state, directory / f"{prefix}{secrets.token_hex(8)}{_SUFFIX}")


def read_parts(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the states in the files of a directory. Files of other kinds are left out.

    Raises:
        ValueError: If there is something else at this path, or a file is damaged.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, expected a directory. Choose another path.")
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        yield read_state(path, "Delete it, and the call that wrote it computes it anew.")
