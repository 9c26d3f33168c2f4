"""Keys of files: plain values and numbers by name, which tell to what a file belongs."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.support.digest import checksum, sketch
from curvlinops.support.torch_internals import strided_tensors

#: Plain values, and entries of ``numbers``, as JSON has them.
Key = dict[str, Any]

#: The largest difference of numbers that are read, relative to the norm: they were perhaps rounded
#: to float32 before.
_READ = 1e-6
#: The same for numbers that are computed, by dtype: the rounding of a deep model, on a GPU perhaps
#: with products in TF32, which has a precision of 1e-3; in half precision that of a few operations.
_COMPUTED = {torch.float64: 1e-8, torch.float32: 1e-3}
_COMPUTED_IN_HALF = 5e-2

#: The length up to which messages show two values.
_SHORT = 80


def numbers(values: list[float], tolerance: float = 0.0, kind: str = "") -> Key:
    """Return an entry that equals others of its kind within a tolerance, relative to the first."""
    return {"numbers": values, "tolerance": tolerance, "kind": kind}


def tolerance_of(*dtypes: torch.dtype) -> float:
    """Return the largest relative difference of numbers that are computed in floating point."""
    return max(_COMPUTED.get(x, _COMPUTED_IN_HALF) for x in dtypes if x.is_floating_point)


def of_tensors(tensors: Mapping[str, Tensor], tolerance: float = _READ) -> Key:
    """Return shape, dtype and a few numbers of tensors by name; integers are taken exactly."""
    found = Key()
    for name, whole in tensors.items():
        for i, x in enumerate(strided_tensors(whole)):
            is_exact = not (x.is_floating_point() or x.is_complex())
            some = [checksum(x.cpu())] if is_exact else sketch(x).tolist()
            kind, part = f"{tuple(x.shape)} {x.dtype}", f"{name}, part {i}" if i else name
            found[part] = numbers(some, 0.0 if is_exact else tolerance, kind)
    return found


def check_key(source: str, key: Key, expected: Key, remedy: str = "") -> None:
    """Refuse a file whose key differs from the one that is expected; name the first difference."""
    for name, new in expected.items():
        old = key.get(name)
        if is_numbers(old) and is_numbers(new):
            if not _agree(old, new):
                raise ValueError(f"The {source} differs in {name}.{remedy}")
        elif old != new:
            values = f": it has {old}, not {new}"
            values = values if len(values) < _SHORT else ""
            raise ValueError(f"The {source} differs in {name}{values}.{remedy}")


def is_numbers(value: Any) -> bool:
    """Return whether a value is one of ``numbers``."""
    return isinstance(value, dict) and "numbers" in value


def _agree(old: Key, new: Key) -> bool:
    """Return whether numbers are the same within rounding, relative to the first one, a norm."""
    if old["kind"] != new["kind"]:
        return False
    tolerance = max(old["tolerance"], new["tolerance"])
    scale = max(old["numbers"][0], new["numbers"][0])
    pairs = zip(old["numbers"], new["numbers"], strict=True)
    return all(a == b or abs(a - b) <= tolerance * scale or (a != a and b != b) for a, b in pairs)
