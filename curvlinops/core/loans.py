"""What is changed for a while, and changed back also after interrupts.

An interrupt (Ctrl-C) may come at any call: also at that by which a ``with`` statement would leave
its context, which is never left then, or whenever its garbage is collected. So contexts that change
what is not theirs say how to change it back, and whoever calls all of them sees to that.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_HERE = threading.local()


def _open() -> list["Loan"]:
    """Return this thread's loans."""
    if not hasattr(_HERE, "loans"):
        _HERE.loans = []
    return _HERE.loans


class Loan:
    """Something that is changed, until it is settled or undone.

    Args:
        undo: Changes it back. It may be called at any time, twice if it is interrupted.
    """

    def __init__(self, undo: Callable[[], Any]):
        self._undo, self._among = undo, _open()
        self._among.append(self)

    def settle(self) -> None:
        """Say that nothing is left to be undone."""
        if self in self._among:
            self._among.remove(self)

    def undo(self) -> None:
        """Change it back, unless that is done."""
        if self in self._among:
            self._undo()
            self.settle()


def num_loans() -> int:
    """Return how many loans this thread has."""
    return len(_open())


def undo_loans(count: int) -> None:
    """Undo all but the first ``count`` loans of this thread, the last one first."""
    loans = _open()
    while len(loans) > count:
        loan = loans[-1]
        try:
            loan.undo()
        except Exception:  # the others matter, too
            loan.settle()


@contextmanager
def _lent(undo: Callable[[], Any]) -> Iterator[None]:
    """Let something be undone that what is inside undoes itself, unless it is interrupted."""
    loan = Loan(undo)
    try:
        yield
    except Exception:
        loan.settle()
        raise
    loan.settle()


@contextmanager
def entered() -> Iterator[ExitStack]:
    """Return a stack of contexts that are left together with this one."""
    stack = ExitStack()
    with _lent(stack.close), stack:
        yield stack


def surroundings() -> AbstractContextManager[None]:
    """Return a context in which others may change PyTorch's modes and switches."""
    return _lent(_Surroundings().restore)


class FunctionMode(TorchFunctionMode):
    """A mode that is left also if PyTorch, which takes modes away for a while, has lost it."""

    def __exit__(self, *error: Any) -> None:
        """Leave the mode, and those that were entered after it."""
        while self in _get_current_function_mode_stack():
            super().__exit__(*error)


class _Surroundings:
    """PyTorch's modes and switches, as they are."""

    def __init__(self) -> None:
        self._modes = _get_current_function_mode_stack()
        self._switches = [(setter, getter()) for getter, setter in _SWITCHES]
        self._cached, self._level = parametrize._cache_enabled, forward_ad._current_level
        compiler = sys.modules.get("torch._dynamo.eval_frame")
        self._stance = None if compiler is None else compiler._stance

    def restore(self) -> None:
        """Restore them."""
        while forward_ad._current_level > self._level:
            forward_ad.exit_dual_level()
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in self._modes:
            torch._C._push_on_torch_function_stack(mode)
        for setter, value in self._switches:
            setter(value)
        parametrize._cache_enabled = self._cached
        if self._stance is not None:
            sys.modules["torch._dynamo.eval_frame"]._set_stance(self._stance)


_CUDA = torch.backends.cuda
_SWITCHES: list[tuple[Callable[[], bool], Callable[[bool], Any]]] = [
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (_CUDA.flash_sdp_enabled, _CUDA.enable_flash_sdp),
    (_CUDA.mem_efficient_sdp_enabled, _CUDA.enable_mem_efficient_sdp),
    (_CUDA.math_sdp_enabled, _CUDA.enable_math_sdp),
    (_CUDA.cudnn_sdp_enabled, _CUDA.enable_cudnn_sdp),
]
