"""Signals, such as Ctrl-C, that wait until they do not part a process from the others."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import distributed

#: What is called for the signals that wait; it may raise an exception such as KeyboardInterrupt.
_waiting: dict[int, Callable[[], Any]] = {}
_is_active = False


def delayed_signals() -> AbstractContextManager:
    """Return a context in which Ctrl-C waits until ``deliver_signals``, or the end.

    In the middle of a communication, an exception in one process would leave it out of step with
    the others. The signal to terminate waits, too, if it has a handler in Python. A second signal
    of a kind does not wait. A program of one process is left alone. Contexts may be nested.
    """
    is_main = threading.current_thread() is threading.main_thread()  # the one that has signals
    may_communicate = distributed.is_available() and distributed.is_initialized()
    is_needed = may_communicate and is_main and not _is_active
    return _delayed() if is_needed else nullcontext()


@contextmanager
def _delayed() -> Iterator[None]:
    global _is_active
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    found = {number: handler for number, handler in found.items() if callable(handler)}

    def wait(number: int, frame: Any) -> None:
        if _waiting.pop(number, None) is None:
            _waiting[number] = partial(found[number], number, frame)
        else:
            found[number](number, frame)

    _is_active = True
    try:
        for number in found:
            signal.signal(number, wait)
        yield
    finally:
        for number, handler in found.items():
            signal.signal(number, handler)
        _is_active = False
        deliver_signals()


def deliver_signals() -> None:
    """Handle the signals that wait, where an exception is sent to the processes that wait."""
    while _waiting and threading.current_thread() is threading.main_thread():
        _waiting.popitem()[1]()
