"""Has anything changed that a computation depends on? Compares with a copy, bit by bit."""

import enum
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from curvlinops.core.references import references

_PLAIN = {
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), slice, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
}
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: An object that refers to more than this, such as a trainer, is not worth a comparison.
_MOST = 100_000


class Snapshot:
    """A copy of all tensors, arrays and plain values that objects refer to.

    Version counters would be cheaper than copies, but fused optimizers, ``.data`` and numpy
    views change a tensor behind them, and norms do not see a sign or a permutation.

    Args:
        root: Whatever the computation depends on, e.g. a list of a module and tensors.
        copied: Whether ``root`` itself is a private copy. If it is not, its tensors must stay in
            place, too: the computation may use their memory.

    Attributes:
        num_bytes: The memory of the copied tensors.
    """

    def __init__(self, root: Any, copied: bool = False):
        self._in_place = not copied
        self._tokens = []
        self.num_bytes = 0
        for token in _walk(root):
            if isinstance(token, Tensor):
                address = token.data_ptr() if self._in_place else None
                token = (address, token if copied else token.detach().clone(), token.requires_grad)
                self.num_bytes += token[1].untyped_storage().nbytes()
            elif isinstance(token, np.ndarray):
                token = token if copied else token.copy()
            self._tokens.append(token)

    def matches(self, root: Any) -> bool:
        """Return whether the object's tensors and values are those of the snapshot."""
        pairs: list[tuple[Tensor, Tensor]] = []
        tokens = iter(self._tokens)
        for token in _walk(root):
            known = next(tokens, _END)
            if isinstance(token, Tensor):
                if not (isinstance(known, tuple) and len(known) == 3):
                    return False
                address, copy, requires_grad = known
                moved = address is not None and address != token.data_ptr()
                if moved or token.requires_grad != requires_grad or not _alike(token, copy):
                    return False
                pairs.append((token.detach(), copy))
            elif isinstance(token, np.ndarray):
                if not _same_array(token, known):
                    return False
            elif not _same(token, known):
                return False
        return next(tokens, _END) is _END and _equal(pairs)


class _Marker:
    """Something that equals nothing else."""


_END = _Marker()


def _walk(root: Any) -> Iterator[Any]:
    """Yield what an object is made of, in an order that is always the same.

    Tensors and arrays as they are, all else as values to be compared.
    """
    stack, seen = [root], {}
    while stack:
        part = stack.pop()
        if _is_plain(part):
            yield type(part), part
            continue
        if id(part) in seen:
            yield seen[id(part)][0]
            continue
        seen[id(part)] = (len(seen), part)  # kept alive, so that no two have one id
        if len(seen) > _MOST:
            yield _Marker()
            return
        if isinstance(part, Tensor):
            # of sparse and other tensors without plain memory nothing is known
            yield part if _has_plain_memory(part) else _Marker()
        elif isinstance(part, np.ndarray):
            yield part
        else:
            plain: list[Any] = [_identity(part)]
            values = []
            is_module = isinstance(part, nn.Module)
            for name, value in references(part):
                if is_module and type(value) in (dict, OrderedDict) and not value:
                    continue  # most of a module's attributes are empty dictionaries of hooks
                plain.append(name)
                if _is_plain(value):
                    plain += (type(value), value)
                else:
                    values.append(value)
            yield plain
            stack += reversed(values)


def _identity(part: Any) -> Any:
    """Return what identifies an object, apart from what it refers to."""
    if isinstance(part, type | ModuleType | BuiltinFunctionType):
        return part
    code = getattr(part, "__code__", None)
    if code is not None:
        return code
    if isinstance(part, Mapping | list | tuple) or hasattr(part, "__dict__"):
        return type(part)
    return part  # opaque


def _is_plain(part: Any) -> bool:
    return type(part) in _PLAIN or isinstance(part, enum.Enum)


def _has_plain_memory(tensor: Tensor) -> bool:
    return (
        tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    )


def _same(token: Any, known: Any) -> bool:
    try:
        return bool(token == known)
    except (RuntimeError, ValueError, TypeError):  # an object that cannot be compared
        return False


def _same_array(array: np.ndarray, known: Any) -> bool:
    return (
        isinstance(known, np.ndarray)
        and (array.dtype, array.shape) == (known.dtype, known.shape)
        and not array.dtype.hasobject
        and array.tobytes() == known.tobytes()
    )


def _alike(tensor: Tensor, copy: Tensor) -> bool:
    return (tensor.shape, tensor.dtype, tensor.device) == (copy.shape, copy.dtype, copy.device)


def _equal(pairs: list[tuple[Tensor, Tensor]]) -> bool:
    """Return whether tensors agree bit by bit, with one synchronization on a GPU."""
    flags = []
    for one, two in pairs:
        one, two = _bits(one, two)
        if one.device.type != "cpu":
            flags.append((one != two).any())
        elif not torch.equal(one, two):
            return False
    return not flags or not bool(torch.stack(flags).any())


def _bits(*tensors: Tensor) -> list[Tensor]:
    """Return tensors' bits as integers: a NaN equals itself, and -0.0 is not 0.0."""
    tensors = [torch.view_as_real(t) if t.is_complex() else t for t in tensors]
    size = tensors[0].element_size()
    bits = [tensor.view(_INTEGERS[size]) for tensor in tensors]
    if not all(tensor.is_contiguous() for tensor in bits):
        return bits
    bits = [tensor.view(-1) for tensor in bits]
    wide = all(t.numel() * size % 8 == 0 and t.storage_offset() * size % 8 == 0 for t in bits)
    return [t.view(torch.int64) for t in bits] if wide else bits
