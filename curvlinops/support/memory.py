"""Out-of-memory errors, which no fallback may hide."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

#: Texts in the errors of allocators and kernel libraries that have no type of their own.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory."""
    if isinstance(error, RuntimeError):  # PyTorch's allocator of the CPU raises a plain one
        return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in _SAYINGS)
    return isinstance(error, MemoryError)


@contextmanager
def suppressed() -> Iterator[None]:
    """Suppress all errors that users' code may raise, except out-of-memory errors."""
    try:
        yield
    except Exception as error:
        if lacks_memory(error):
            raise
