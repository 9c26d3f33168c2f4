"""What a process requests on a batch, and probably requests again on the next one."""

from collections.abc import Hashable
from typing import Any

_UNKNOWN: tuple[tuple, tuple] = (), ()


class Schedule:
    """The requests of a process on earlier batches, in their order."""

    def __init__(self) -> None:
        #: By task and first request, a pair: the requests that followed, if the latest two batches
        #: agree, else none; and those of the latest batch.
        self._known: dict[tuple, tuple[tuple, tuple]] = {}
        self._task: Hashable = None
        self._requests: list[Any] = []

    def begin(self, task: Hashable) -> None:
        """Note that the next requests are for a batch in a task; ``None`` for anything else."""
        if self._task is not None and self._requests:
            key, latest = (self._task, self._requests[0]), tuple(self._requests[1:])
            _, before = self._known.get(key, _UNKNOWN)
            self._known[key] = latest if latest == before else (), latest
        self._task, self._requests = task, []

    def next(self, request: Any) -> tuple:
        """Note a request; return those that will follow, if it is the first one of a batch."""
        self._requests.append(request)
        if len(self._requests) > 1:
            return ()
        repeated, _ = self._known.get((self._task, request), _UNKNOWN)
        return repeated
