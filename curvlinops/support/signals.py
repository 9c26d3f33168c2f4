"""Signals, such as Ctrl-C, that wait until they do not part a process from the others."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import distributed

#: What is called for the signals that wait; it may raise an exception such as KeyboardInterrupt.
_waiting: dict[int, Callable[[], Any]] = {}
_is_active = False


@contextmanager
def delayed_signals() -> Iterator[None]:
    """Let Ctrl-C wait until ``deliver_signals``, or the end of the context.

    In the middle of a communication, an exception in one process would leave it out of step with
    the others. The signal to terminate waits, too, if it has a handler in Python. A second signal
    of a kind does not wait. A program of one process is left alone. Contexts may be nested.
    """
    global _is_active
    if _is_active or not _may_communicate():
        yield
        return
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


def _may_communicate() -> bool:
    """Return whether there are several processes, in the thread that handles signals."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and distributed.is_available() and distributed.is_initialized()
