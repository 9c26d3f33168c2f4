"""Signals that wait in programs of several processes."""

import signal
import threading
from collections.abc import Iterator

import pytest

from curvlinops.support.signals import delayed_signals, deliver_signals, distributed

INT, TERM = signal.SIGINT, signal.SIGTERM


class Terminated(Exception):
    """What a user's handler raises."""


def terminate(number: int, frame: object) -> None:
    raise Terminated


#: Handlers of the user, and what they raise.
HANDLERS = {
    "Ctrl-C": (INT, signal.default_int_handler, KeyboardInterrupt),
    "own Ctrl-C": (INT, terminate, Terminated),
    "own SIGTERM": (TERM, terminate, Terminated),
}


@pytest.fixture(autouse=True)
def several_processes(monkeypatch) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)


@pytest.fixture(params=HANDLERS)
def sent(request) -> Iterator[tuple[int, type[BaseException]]]:
    """A signal, and what its handler raises."""
    number, handler, error = HANDLERS[request.param]
    before = signal.signal(number, handler)
    yield number, error
    assert signal.getsignal(number) is handler
    signal.signal(number, before)


def test_at_the_end(sent):
    number, error, reached = *sent, []
    with pytest.raises(error), delayed_signals():
        with delayed_signals():
            signal.raise_signal(number)
        reached.append(True)
    assert reached
    with delayed_signals():
        deliver_signals()


def test_at_delivery(sent):
    number, error = sent
    with delayed_signals():
        signal.raise_signal(number)
        with pytest.raises(error):
            deliver_signals()
        deliver_signals()


def test_second_one_does_not_wait(sent):
    number, error = sent
    with delayed_signals():
        for _ in range(2):
            signal.raise_signal(number)
            with pytest.raises(error):
                signal.raise_signal(number)


def test_with_another_error(sent):
    number, error = sent
    with pytest.raises(error) as raised, delayed_signals():
        signal.raise_signal(number)
        raise KeyError("here")
    assert isinstance(raised.value.__context__, KeyError)


def test_one_process(sent, monkeypatch):
    number, error = sent
    monkeypatch.setattr(distributed, "is_initialized", lambda: False)
    with delayed_signals(), pytest.raises(error):
        signal.raise_signal(number)


def test_another_thread(sent):
    """Python handles signals in the main thread."""
    number, error = sent

    def run() -> None:
        with delayed_signals():
            deliver_signals()
            found.append(signal.getsignal(number))

    found, thread = [], threading.Thread(target=run)
    with pytest.raises(error), delayed_signals():
        signal.raise_signal(number)
        thread.start()
        thread.join()
        found.append(signal.getsignal(number))
    assert found[0] is found[1]


def test_signals_without_a_handler_are_left_alone():
    before = signal.signal(TERM, signal.SIG_DFL)
    try:
        with delayed_signals():
            assert signal.getsignal(TERM) is signal.SIG_DFL
    finally:
        signal.signal(TERM, before)
