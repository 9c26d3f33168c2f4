"""Tells refusals, after which another way may serve, from errors that no fallback may hide."""

from pathlib import Path

import torch

#: Texts in the errors of allocators and kernel libraries that have no type of their own.
_SAYINGS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")

_PACKAGE = Path(__file__).parents[1]


def lacks_memory(error: BaseException) -> bool:
    """Return whether an error says that there is not enough memory."""
    if isinstance(error, RuntimeError):  # PyTorch's allocator of the CPU raises a plain one
        return isinstance(error, torch.OutOfMemoryError) or any(s in str(error) for s in _SAYINGS)
    return isinstance(error, MemoryError)


def is_refusal(error: BaseException) -> bool:
    """Return whether PyTorch or the user's code has refused a call, and not for lack of memory."""
    if lacks_memory(error):
        return False
    is_mistake = isinstance(error, NameError | AttributeError | AssertionError)
    return not (is_mistake and _is_raised_in(error, _PACKAGE))


def is_of_processes(error: BaseException) -> bool:
    """Return whether the communication with other processes has raised an error."""
    return _is_raised_in(error, _PACKAGE / "team")


def _is_raised_in(error: BaseException, directory: Path) -> bool:
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return (
        traceback is not None and directory in Path(traceback.tb_frame.f_code.co_filename).parents
    )
