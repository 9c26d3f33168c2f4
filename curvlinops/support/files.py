"""Files of objects: tensors by name, and a description in JSON. Reading runs no code of a file.

A file has one object, and perhaps a key, which tells to what the object belongs. In a description,
plain values are themselves, tuples are lists, and lists are read as tuples.

| in JSON | stands for |
|---|---|
| ``{"items": [[key, value], ...]}``, ``{"set": [...]}`` | a dictionary, a frozen set |
| ``{"class": name, "arguments": [...]}`` | an object of a class that is ``recorded`` |
| ``{"tensor": name, "dtype": name, "shape": [...]}`` | a tensor |
| ``{"dtype": name}`` | a dtype |
| ``{"device": null}`` | the device to which tensors are read |

Tensors that share memory are written once. Equal descriptions of objects are read as one object.
"""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from zlib import crc32

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from curvlinops.support.digest import checksum
from curvlinops.support.keys import Key, check_key

#: It changes when older files cannot be read any more.
_FORMAT = "curvlinops 1"
_SUFFIX = ".safetensors"

_READERS = (
    " Factors of KFAC and EKFAC are read by the method load(path) of an operator with model, loss "
    "and data; structured operators, such as inverses, by curvlinops.load(path); scores by the "
    "method scores(P, out=path) that wrote them; gradients by "
    "curvlinops.influence.GradientStore(path)."
)

Class = TypeVar("Class", bound=type)

_CLASSES: dict[str, type] = {}
_NAMES: dict[type, str] = {}


def recorded(cls: Class, name: str | None = None) -> Class:
    """Let objects of exactly this class be saved, by default under its name; also a decorator.

    They are made anew from the fields of dataclasses and named tuples and the values of
    enumerations, else from the arguments that their method ``_record`` returns. Under the name of
    another class, they are read as objects of that class.
    """
    _NAMES[cls] = name or cls.__name__
    _CLASSES.setdefault(_NAMES[cls], cls)
    return cls


class Saved(NamedTuple):
    """An object that was read, its key, and where it was, for messages."""

    value: Any
    key: Key | None
    source: str


# --- objects in memory


def pack(value: Any, key: Key | None = None) -> dict[str, Any]:
    """Return an object as tensors by name and ``"metadata"``, a string; see ``unpack``."""
    writer = _Writer()
    header = {"format": _FORMAT, "key": key, "content": writer.write(value)}
    return {"metadata": json.dumps(header), **writer.tensors}


def unpack(
    state: Mapping[str, Any],
    cls: type | tuple[type, ...],
    device: torch.device,
    source: str = "saved state",
    check_numbers: bool = True,
) -> Saved:
    """Return the object of a class that ``pack`` has made a state of, with its tensors on a device.

    NaN and infinite values are refused if ``check_numbers``, for which all are read.
    """
    if "metadata" not in state:
        raise ValueError("This is not the state of an operator: it has no metadata.")
    try:
        header = json.loads(state["metadata"])
        is_format = header["format"] == _FORMAT
        reader = _Reader(state, device, check_numbers)
        value = reader.read(header["content"]) if is_format else None
    except Exception as error:
        raise ValueError(f"The {source} is damaged: {type(error).__name__}: {error}.") from error
    if not is_format:
        raise ValueError(
            f"The {source} has the format {header['format']!r}, of another version of this "
            f"package: this one reads {_FORMAT!r}. Write it anew."
        )
    if not isinstance(value, cls):
        wanted = cls[0] if isinstance(cls, tuple) else cls
        raise ValueError(
            f"The {source} has a {type(value).__name__}, no {wanted.__name__}.{_READERS}"
        )
    return Saved(value, header["key"], source)


class _Writer:
    def __init__(self):
        self.tensors: dict[str, Tensor] = {}
        self._names: dict[tuple, str] = {}

    def write(self, value: Any) -> Any:
        if type(value) in _NAMES:
            return {"class": _NAMES[type(value)], "arguments": self.write(_arguments(value))}
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if type(value) in (list, tuple):
            return [self.write(entry) for entry in value]
        if type(value) is dict:
            return {"items": self.write(list(value.items()))}
        if type(value) is frozenset:
            return {"set": self.write(sorted(value, key=repr))}
        if isinstance(value, Tensor):
            name, dtype = self._named(value), _name(value.dtype)
            return {"tensor": name, "dtype": dtype, "shape": list(value.shape)}
        if isinstance(value, torch.dtype):
            return {"dtype": _name(value)}
        if isinstance(value, torch.device):
            return {"device": None}
        raise NotImplementedError(f"A {type(value).__name__} cannot be saved.")

    def _named(self, value: Tensor) -> str:
        # axes along which a tensor is expanded are written once
        once = tuple(slice(0, 1) if step == 0 else slice(None) for step in value.stride())
        tensor = value.detach()[once]
        memory = tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        name = self._names.setdefault(memory, str(len(self.tensors)))
        self.tensors[name] = tensor
        return name


def _arguments(value: Any) -> list[Any]:
    """Return the arguments from which an object is made anew."""
    if hasattr(value, "_record"):
        return list(value._record())
    if is_dataclass(value):
        return [getattr(value, field.name) for field in fields(value)]
    return [value.value] if isinstance(value, Enum) else list(value)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Reader:
    def __init__(self, state: Mapping[str, Any], device: torch.device, check_numbers: bool):
        tensors = ((name, x) for name, x in state.items() if isinstance(x, Tensor))
        self._tensors = {name: tensor.to(device) for name, tensor in tensors}
        self._device, self._check_numbers = device, check_numbers
        self._objects: dict[str, Any] = {}

    def read(self, data: Any) -> Any:
        match data:
            case list():
                return tuple(map(self.read, data))
            case {"items": pairs}:
                return dict(self.read(pairs))
            case {"set": entries}:
                return frozenset(self.read(entries))
            case {"tensor": name, "dtype": dtype, "shape": shape}:
                return self._tensor(name, getattr(torch, dtype)).expand(shape)
            case {"dtype": name}:
                return getattr(torch, name)
            case {"device": _}:
                return self._device
            case {"class": name, "arguments": arguments}:
                description = json.dumps(data)
                if description not in self._objects:
                    self._objects[description] = _CLASSES[name](*self.read(arguments))
                return self._objects[description]
        return data

    def _tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        values = self._tensors[name]
        if values.dtype != dtype:
            raise ValueError(f"The entry '{name}' should be of {dtype}, got {values.dtype}")
        if self._check_numbers and not bool(values.isfinite().all()):
            raise ValueError(f"The entry '{name}' has NaN or infinite values")
        return values


# --- files


def write(state: Mapping[str, Any], path: str | Path) -> None:
    """Write a state to a safetensors file with a checksum, which replaces an older one at once.

    The older file of that path stays as it is for those who have mapped it to memory. A process
    that is killed leaves the older file, and perhaps a part of the new one. Processes and threads
    that write to one path at the same time each have a new file of their own.
    """
    tensors, memory = dict[str, Tensor](), set[int]()
    for name, x in state.items():
        if isinstance(x, Tensor):
            x = x.cpu().contiguous()
            # in a file each tensor has all of its memory
            if x.data_ptr() in memory or x.untyped_storage().nbytes() != x.nbytes:
                x = x.clone()
            memory.add(x.data_ptr())
            tensors[name] = x
    path, metadata = Path(path), state["metadata"]
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.part")
    try:
        save_file(tensors, str(new), {"metadata": metadata, "crc32": _crc32(metadata, tensors)})
        with new.open("r+b") as file:
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


def read(
    path: str | Path,
    cls: type | tuple[type, ...],
    device: torch.device,
    remedy: str = "Write it anew.",
) -> Saved:
    """Read an object of a class from a file, whose tensors are mapped to memory on the CPU."""
    try:
        with safe_open(str(path), "pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(
            f"The file {path} is not a safetensors file, such as save() writes, or it is "
            f"incomplete. {remedy}"
        ) from error
    if not {"metadata", "crc32"} <= header.keys():
        raise ValueError(
            f"The file {path} is not the state of an operator, or of an older version of this "
            "package. Choose another path."
        )
    if header["crc32"] != _crc32(header["metadata"], tensors):
        raise ValueError(f"The file {path} is damaged: its checksum differs. {remedy}")
    state = {"metadata": header["metadata"], **tensors}
    return unpack(state, cls, device, f"file {path}", check_numbers=False)


def _crc32(metadata: str, tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum of a file's contents; dtypes and shapes are in the metadata, too."""
    sums = [(name, checksum(tensors[name])) for name in sorted(tensors)]
    return f"{crc32(repr((metadata, sums)).encode()):08x}"


# --- directories of parts, which are written once and never changed


def write_part(directory: Path, value: Any, key: Key, prefix: str = "") -> None:
    """Write an object to a new file of a directory, under a name that begins with ``prefix``."""
    directory.mkdir(parents=True, exist_ok=True)
    write(pack(value, key), directory / f"{prefix}{secrets.token_hex(8)}{_SUFFIX}")


def read_parts(
    directory: Path,
    cls: type | tuple[type, ...],
    device: torch.device,
    key: Key | None = None,
) -> Iterator[Saved]:
    """Yield the objects in the files of a directory that may not exist; other files are left out.

    All must have the key that is given, or that of the first one.
    """
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file, expected a directory. Choose another path.")
    for path in sorted(directory.glob(f"*{_SUFFIX}")):
        part = read(path, cls, device, "Delete it, and the call that wrote it computes it anew.")
        key = part.key if key is None else key
        remedy = " Choose another directory, or move the file away."
        check_key(part.source, part.key or {}, key or {}, remedy)
        yield part
