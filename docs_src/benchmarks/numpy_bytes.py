"""Counts the bytes of NumPy's arrays, among them those in which SciPy's solvers work.

NumPy lets others allocate its arrays (`PyDataMem_SetHandler`, NEP 49). Here the C library does it,
and each call is counted. Nothing else tells the arrays from Python's other objects.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CFUNCTYPE, POINTER, PYFUNCTYPE, c_char_p, c_size_t, c_void_p, py_object

import numpy

_C = ctypes.CDLL(None)
_MALLOC = CFUNCTYPE(c_void_p, c_size_t)(("malloc", _C))
_CALLOC = CFUNCTYPE(c_void_p, c_size_t, c_size_t)(("calloc", _C))
_REALLOC = CFUNCTYPE(c_void_p, c_void_p, c_size_t)(("realloc", _C))
_FREE = CFUNCTYPE(None, c_void_p)(("free", _C))

_PYTHON = ctypes.pythonapi
_NEW = PYFUNCTYPE(py_object, c_void_p, c_char_p, c_void_p)(("PyCapsule_New", _PYTHON))
_POINTER = PYFUNCTYPE(c_void_p, py_object, c_char_p)(("PyCapsule_GetPointer", _PYTHON))
_CORE = numpy._core if hasattr(numpy, "_core") else numpy.core  # before NumPy 2
_TABLE = ctypes.cast(_POINTER(_CORE._multiarray_umath._ARRAY_API, None), POINTER(c_void_p))
#: The function of this number in NumPy's table is `PyDataMem_SetHandler`.
_SET_HANDLER = PYFUNCTYPE(py_object, py_object)(_TABLE[304])

_FUNCTIONS = {
    "malloc": CFUNCTYPE(c_void_p, c_void_p, c_size_t),
    "calloc": CFUNCTYPE(c_void_p, c_void_p, c_size_t, c_size_t),
    "realloc": CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_size_t),
    "free": CFUNCTYPE(None, c_void_p, c_void_p, c_size_t),
}


class _Handler(ctypes.Structure):
    """The structure `PyDataMem_Handler`."""

    _fields_ = (
        ("name", ctypes.c_char * 127),
        ("version", ctypes.c_uint8),
        ("context", c_void_p),
        *_FUNCTIONS.items(),
    )


class ArrayBytes:
    """Counts the arrays that are made inside of `counting()`. It must outlive them."""

    def __init__(self):
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        ours = (self._malloc, self._calloc, self._realloc, self._free)
        functions = [kind(own) for kind, own in zip(_FUNCTIONS.values(), ours, strict=True)]
        self._handler = _Handler(b"counting", 1, None, *functions)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the arrays that are made from here on."""
        self.now = self.peak = 0
        self._sizes.clear()  # earlier arrays do not count
        before = _SET_HANDLER(_NEW(ctypes.addressof(self._handler), b"mem_handler", None))
        try:
            yield
        finally:
            _SET_HANDLER(before)

    def _malloc(self, _context: None, size: int) -> int | None:
        return self._add(_MALLOC(size), size)

    def _calloc(self, _context: None, number: int, size: int) -> int | None:
        return self._add(_CALLOC(number, size), number * size)

    def _realloc(self, _context: None, address: int | None, size: int) -> int | None:
        moved = _REALLOC(address, size)
        if moved:
            self.now -= self._sizes.pop(address, 0)
        return self._add(moved, size)

    def _free(self, _context: None, address: int | None, _size: int) -> None:
        self.now -= self._sizes.pop(address, 0)
        _FREE(address)

    def _add(self, address: int | None, size: int) -> int | None:
        if address:
            self._sizes[address] = size
            self.now += size
            self.peak = max(self.peak, self.now)
        return address
