"""A second device where there is none: memory on the CPU, labeled with where it would be.

Calls that mix devices raise an error, as they do on a GPU. What PyTorch creates inside of its own
calls has no label until it meets a tensor that has one.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CPU, OTHER = torch.device("cpu"), torch.device("cuda:0")
_LABELS: dict[int, tuple[StorageWeakRef, torch.device]] = {}
#: They take tensors of several devices.
_MIXING = {"copy_", "_to_copy", "index", "index_put", "index_put_", "_index_put_impl_"}
_MIXING |= {"_unsafe_index", "_pack_padded_sequence", "set_"}
_PROPERTIES = {
    Tensor.device.__get__: lambda place: place,
    Tensor.is_cuda.__get__: lambda place: place == OTHER,
    Tensor.is_cpu.__get__: lambda place: place == CPU,
}
_functorch = torch._C._functorch


def _storage(x: Tensor) -> Any:
    while _functorch.is_functorch_wrapped_tensor(x):
        x = _functorch.get_unwrapped(x)
    return None if x.layout is not torch.strided else x.untyped_storage()


def place_of(x: Tensor) -> torch.device | None:
    """Return where a tensor would be, ``None`` if that is not known."""
    storage = _storage(x)
    found = None if storage is None else _LABELS.get(storage._cdata)
    return None if found is None or found[0].expired() else found[1]


def put(tree: Any, place: torch.device | None) -> Any:
    """Label new tensors."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and place is not None and _storage(x) is not None:
            _LABELS[_storage(x)._cdata] = StorageWeakRef(_storage(x)), place
    return tree


def _read(device: Any) -> torch.device:
    return CPU if torch.device(device).type == "cpu" else OTHER


def _tensors(*trees: Any) -> list[Tensor]:
    return [x for x in tree_leaves(trees) if isinstance(x, Tensor)]


class _Operations(TorchDispatchMode):
    """Labels the results of operations, and refuses arguments that are in several places."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        places = [(place_of(x), x.ndim) for x in _tensors(args, kwargs)]
        known = {place for place, ndim in places if place is not None and ndim > 0}
        name = func.overloadpacket.__name__
        if name not in _MIXING:
            scalars = {place for place, ndim in places if ndim == 0}
            if len(known) > 1 or (known == {CPU} and OTHER in scalars):
                raise RuntimeError(f"{name}: expected all tensors on the same device, got {places}")
        elif places:
            known = {places[0][0]} - {None}
        out = func(*args, **kwargs)
        new = [x for x in _tensors(out) if place_of(x) is None]
        everywhere = {place for place, _ in places}
        if OTHER in known or everywhere == {OTHER}:
            put(new, OTHER)
        elif CPU in known or everywhere == {CPU}:
            put(new, CPU)
        return out


class _Calls(TorchFunctionMode):
    """Answers where tensors are, and creates them there."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if func in _PROPERTIES:
            return _PROPERTIES[func](place_of(args[0]) or CPU)
        if name in ("numpy", "__array__") and place_of(args[0]) == OTHER:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if name in ("cuda", "cpu"):
            return self._moved(args[0], [OTHER if name == "cuda" else CPU], {})
        if name == "to":
            return self._moved(args[0], list(args[1:]), kwargs)
        device = kwargs.pop("device", None)
        generator = kwargs.get("generator")
        if generator is not None:
            own = [place_of(x) or CPU for x in _tensors(args)] or [_read(device or "cpu")]
            if generator.device != own[0]:
                raise RuntimeError(f"{name}: a generator on {generator.device} for {own[0]}")
        if device is None:
            return func(*args, **kwargs)
        if name == "as_tensor" and isinstance(args[0], Tensor):
            return self._moved(args[0].to(kwargs.get("dtype")), [device], {})
        out = func(*args, **kwargs, device="cpu")
        # inside of its own calls PyTorch sees the memory's device
        return out if _read(device) == CPU and _called_by_torch() else put(out, _read(device))

    def _moved(self, x: Tensor, rest: list, kwargs: dict) -> Tensor:
        place = kwargs.pop("device", None)
        for i, argument in enumerate(rest):
            if isinstance(argument, str | torch.device):
                place, rest[i] = argument, None
            elif isinstance(argument, Tensor):
                place, rest[i] = place_of(argument) or CPU, argument.dtype
        rest = [r for r in rest if r is not None and not isinstance(r, bool)]  # whether to block
        kwargs.pop("non_blocking", None)
        here = place_of(x) or CPU
        if place is None or _read(place) == here:
            return x.to(*rest, **kwargs) if rest or kwargs else x
        return put(x.to(*rest, **kwargs | {"copy": True}), _read(place))


def _called_by_torch() -> bool:
    frame, handlers = sys._getframe(2), ("overrides/__init__.py", "capture.py", "dependence.py")
    while frame.f_code.co_filename.endswith((*handlers, "overrides.py", __file__)):
        frame = frame.f_back
    return "/torch/" in frame.f_code.co_filename


class _Generator(torch.Generator):
    """Random numbers as on the CPU."""

    def __new__(cls, device: Any = "cpu") -> "_Generator":
        return super().__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu"):
        self._place = _read(device)

    @property
    def device(self) -> torch.device:
        return self._place


@contextmanager
def second_device() -> Iterator[None]:
    """Let there be a device ``"cuda"``."""
    with pytest.MonkeyPatch.context() as patch, _Calls(), _Operations():
        from_numpy = torch.from_numpy
        patch.setattr(torch, "from_numpy", lambda array: put(from_numpy(array), CPU))
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        for name in ("memory_reserved", "memory_allocated"):
            patch.setattr(torch.cuda, name, lambda device: 0)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (2**33, 2**34))
        patch.setattr(torch.backends.cudnn, "is_acceptable", lambda x: False)
        yield
