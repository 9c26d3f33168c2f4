"""Has anything changed that a computation depends on? Compares with a copy, bit by bit."""

import enum
import operator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.core.hidden import UNKNOWN
from curvlinops.core.references import is_plain
from curvlinops.core.walk import END, Structure, contents_of, walk

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(enum.Enum):
    """What is different."""

    NOTHING = "nothing"
    NUMBERS = "values of tensors or arrays"
    STRUCTURE = "anything else"


class Snapshot:
    """A copy of all tensors, arrays and plain values that objects refer to.

    Version counters would be cheaper than copies, but fused optimizers, ``.data`` and numpy
    views change a tensor behind them, and norms do not see a sign or a permutation.

    Args:
        root: Whatever the computation depends on, e.g. a list of a module and tensors. Tensors must
            stay in place, too: the computation may use their memory.
        copy_of: If ``root`` is a private copy, of what; those tensors may move, and lie in memory
            in another way than their copies.
        numbers: Whether tensors and arrays are copied now; see ``copy_numbers``.

    Attributes:
        has_numbers: Whether tensors and arrays are compared, too.
    """

    def __init__(self, root: Any, copy_of: Any = None, numbers: bool = True):
        self._root, self.has_numbers = root, False
        self._tokens: list[Any] = []
        self._tensors: list[_TensorCopy] = []
        self._arrays: list[_ArrayCopy] = []
        # what each object refers to, to see at a glance that none refers to anything else
        self._contents: list[tuple[Any, tuple]] = []
        self._empty: list[Any] = []
        copied = (part for part in walk(copy_of) if isinstance(part, Tensor))
        for token in walk(root, self._contents, self._empty):
            if isinstance(token, Tensor):
                token = _TensorCopy(token, next(copied, token))
                self._tensors.append(token)
            elif isinstance(token, np.ndarray):
                token = _ArrayCopy(token)
                self._arrays.append(token)
            self._tokens.append(token)
        self._is_known = all(token is not UNKNOWN for token in self._tokens)
        if numbers:
            self.copy_numbers()

    def copy_numbers(self) -> None:
        """Copy tensors and arrays, too, and compare them from now on."""
        if not self.has_numbers:
            for own in (*self._tensors, *self._arrays):
                own.make()
            self.has_numbers = True

    @property
    def structure(self) -> Structure:
        """What the objects are made of, numbers aside."""
        copies = _TensorCopy | _ArrayCopy
        return Structure([t.original if isinstance(t, copies) else t for t in self._tokens])

    def matches(self, root: Any) -> bool:
        """Return whether the object's tensors and values are those of the snapshot."""
        return self.compare(root) is Change.NOTHING

    def compare(self, root: Any) -> Change:
        """Return what is different from the snapshot."""
        if self._refers_to_the_same(root):
            pairs = [(copy.original, copy) for copy in self._tensors]
            arrays = [(copy.original, copy) for copy in self._arrays]
        else:
            pairs, arrays = [], []
            tokens = iter(self._tokens)
            for token in walk(root):
                known = next(tokens, END)
                if isinstance(token, Tensor):
                    if not isinstance(known, _TensorCopy):
                        return Change.STRUCTURE
                    pairs.append((token, known))
                elif isinstance(token, np.ndarray):
                    if not isinstance(known, _ArrayCopy):
                        return Change.STRUCTURE
                    arrays.append((token, known))
                elif not _same(token, known):
                    return Change.STRUCTURE
            if next(tokens, END) is not END:
                return Change.STRUCTURE
        if not self.has_numbers:
            return Change.NOTHING
        same = not any(copy.differs(array) for array, copy in arrays) and _equal(pairs)
        return Change.NOTHING if same else Change.NUMBERS

    def _refers_to_the_same(self, root: Any) -> bool:
        """Return whether all references, and hence all but the contents of tensors, are the same.

        May fail for what is equal, but not identical.
        """
        if not self._is_known or any(self._empty) or not _identical(root, self._root):
            return False
        for part, before in self._contents:
            now = contents_of(part)
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return True


class _ArrayCopy:
    """An array, and a copy of it once it is made."""

    def __init__(self, array: np.ndarray):
        self.original = self._copy = array

    def make(self) -> None:
        """Copy it."""
        self._copy = self.original.copy()

    def differs(self, array: np.ndarray) -> bool:
        """Return whether an array is another one."""
        return (
            (array.dtype, array.shape) != (self._copy.dtype, self._copy.shape)
            or array.dtype.hasobject
            or array.tobytes() != self._copy.tobytes()
        )


class _TensorCopy:
    """A tensor, and a copy of it, as its bits, once it is made.

    Args:
        tensor: The tensor.
        copied: If another one, that of which ``tensor`` is a private copy.
    """

    def __init__(self, tensor: Tensor, copied: Tensor):
        self.original = tensor
        self.copy: Tensor | None = None
        if copied is not tensor:
            self._hold(copied, tensor.detach(), None)

    def make(self) -> None:
        """Copy it."""
        if self.copy is None:
            tensor = self.original
            self._hold(tensor, tensor.detach().clone(), _place(tensor))

    def _hold(self, tensor: Tensor, copy: Tensor, place: tuple | None) -> None:
        self.copy, self._place, self._kind = copy, place, _kind_of(tensor)
        self._bits = _bits(copy, tensor.is_contiguous())

    def differs(self, tensor: Tensor) -> bool | Tensor:
        """Return whether a tensor is another one; on a GPU the answer stays there."""
        if self._place is not None and self._place != _place(tensor):
            return True
        if self._kind != _kind_of(tensor):
            return True
        bits, known = _bits(tensor, tensor.is_contiguous()), self._bits
        if bits.dtype != known.dtype:  # aligned in another way
            narrow = min(bits.dtype, known.dtype, key=lambda dtype: dtype.itemsize)
            bits, known = bits.view(narrow), known.view(narrow)
        if bits.device.type == "cpu":
            return not torch.equal(bits, known)
        return (bits != known).any()


def _identical(now: Any, before: Any) -> bool:
    """Return whether two are one object, or lists and dictionaries of the same objects."""
    if now is before:
        return True
    if type(now) is not type(before) or type(now) not in (list, tuple, dict):
        return is_plain(now) and _same((type(now), now), (type(before), before))
    if len(now) != len(before):
        return False
    if type(now) is dict:
        return list(now) == list(before) and all(_identical(now[k], before[k]) for k in now)
    return all(map(_identical, now, before))


def _same(token: Any, known: Any) -> bool:
    try:
        return bool(token == known)
    except (RuntimeError, ValueError, TypeError):  # an object that cannot be compared
        return False


def _kind_of(tensor: Tensor) -> tuple:
    """Return what a model may treat in another way, numbers aside."""
    kind = (tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad)
    return *kind, tensor.is_contiguous()


def _place(tensor: Tensor) -> tuple:
    """Return where a tensor lies, and how often it was written to.

    Autograd refuses graphs of tensors that were overwritten, even by the same numbers.
    """
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _equal(pairs: list[tuple[Tensor, _TensorCopy]]) -> bool:
    """Return whether tensors agree bit by bit, with one synchronization on a GPU."""
    pending = []
    for tensor, copy in pairs:
        differs = copy.differs(tensor)
        if isinstance(differs, Tensor):
            pending.append(differs)
        elif differs:
            return False
    return not pending or not bool(torch.stack(pending).any())


def _bits(tensor: Tensor, flat: bool) -> Tensor:
    """Return the tensor's bits as integers: a NaN equals itself, and -0.0 is not 0.0."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    size = tensor.element_size()
    if not flat:
        return tensor.view(_INTEGERS[size])
    bits = tensor.view(-1).view(_INTEGERS[size])
    wide = bits.numel() * size % 8 == 0 and bits.storage_offset() * size % 8 == 0
    return bits.view(torch.int64) if wide else bits
