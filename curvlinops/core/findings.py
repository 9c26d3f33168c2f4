"""What operators find out about a model, of which others on the same model make use."""

import copy
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from curvlinops.core.model import Model
from curvlinops.core.walk import Structure

#: Something that has ``is_complete``: whether others can make use of a copy.
Found = TypeVar("Found")

#: For how many structures of a model and of its batches something is remembered.
_MOST = 16


class Findings:
    """Objects that find out something about a model, and remember it.

    They remember it in attributes: values that never change, and containers of such values.

    Args:
        known: What others have found out, of which this gets copies.
    """

    def __init__(self, known: dict[tuple, Any]):
        self._known, self._own = known, {}

    def get(self, make: Callable[..., Found], *args: Any) -> Found:
        """Return what ``make(*args)`` made the first time, here or elsewhere."""
        key = (make, *args)
        if key not in self._own:
            self._own[key] = _copied(self._known[key]) if key in self._known else make(*args)
        return self._own[key]

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Let others have what is found out meanwhile, unless there is an error."""
        before = set(self._own)
        yield
        for key in self._own.keys() - before - self._known.keys():
            if self._own[key].is_complete:
                self._known[key] = _copied(self._own[key])

    def forget(self, make: Callable[..., Found]) -> None:
        """Let ``make()`` make its object anew."""
        self._own.pop((make,), None)
        self._known.pop((make,), None)

    def withdraw(self) -> None:
        """Let nobody else have anything."""
        self._known.clear()
        self._known = {}


def _copied(found: Found) -> Found:
    """Return a copy with containers of its own."""
    twin = copy.copy(found)
    containers = {n: x for n, x in vars(twin).items() if isinstance(x, dict | set | list)}
    vars(twin).update({name: copy.copy(x) for name, x in containers.items()})
    return twin


#: By the id of a module or parameter: this, and what is known about it, the latest first.
_KNOWN: dict[int, tuple[weakref.ref, list[tuple[list[Structure], dict[tuple, Any]]]]] = {}


def recall(model: Model, structures: list[Structure]) -> Findings:
    """Return what was found out about a model of the same structure, or a new place for that.

    It is forgotten with the user's module, of which it must keep nothing alive, or tensors.

    Args:
        model: The model.
        structures: Of all that findings depend on.
    """
    users = (*model.roots, *model.params.values())[0]
    _, known = _KNOWN.setdefault(id(users), (weakref.ref(users, _forgetting(id(users))), []))
    found = next((f for s, f in known if s == structures), {})
    known[:] = [(structures, found), *((s, f) for s, f in known if f is not found)][:_MOST]
    return Findings(found)


def _forgetting(key: int) -> Callable[[weakref.ref], None]:
    return lambda _: _KNOWN.pop(key, None)
