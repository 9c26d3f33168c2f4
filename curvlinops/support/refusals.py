"""Tells refusals, after which another way may serve, from errors that no fallback may hide."""

from pathlib import Path

import torch

#: Texts in the errors of allocators and kernel libraries that have no type of their own.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")

_PACKAGE = str(Path(__file__).parents[1])


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory."""
    if isinstance(error, RuntimeError):  # PyTorch's allocator of the CPU raises a plain one
        return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in _SAYINGS)
    return isinstance(error, MemoryError)


def is_refusal(error: BaseException) -> bool:
    """Return whether PyTorch or the user's code has refused a call, and not for lack of memory."""
    if lacks_memory(error):
        return False
    if not isinstance(error, NameError | AttributeError | AssertionError):
        return True
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is None or not traceback.tb_frame.f_code.co_filename.startswith(_PACKAGE)
