"""What objects hold without attributes that say so: caches, memory."""

import ctypes
import functools
import gc
import io
import mmap
from collections.abc import Iterator
from typing import Any

#: What functools.cache makes.
Cached = type(functools.cache(lambda: None))
#: Objects that are memory.
MEMORY = (ctypes.Structure.__base__, mmap.mmap, memoryview)
#: How many bytes of it are worth a comparison.
_MOST = 2**26


class Marker:
    """Something that equals nothing, not even itself."""

    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> bool:
        return False


#: Stands for what cannot be seen, or is not worth a comparison.
UNKNOWN = Marker()


def of_cached(function: Any) -> Iterator[tuple[int, Any]]:
    """Yield a function with a cache, and what it remembers."""
    for i, held in enumerate(gc.get_referents(function)):
        is_index = type(held) is dict and any(map(_is_link, held.values()))
        if not is_index and type(held) is not object:  # which marks keyword arguments
            yield i, held


def _is_link(part: Any) -> bool:
    return type(part).__name__ == "_lru_list_elem"


def of_memory(part: Any) -> Iterator[tuple[str, Any]]:
    """Yield what memory refers to, as far as Python knows where it points."""
    yield "_objects", getattr(part, "_objects", None)
    view = _view(part)
    if view is not None and view.nbytes > _MOST:
        yield "memory", UNKNOWN


def bytes_of(part: Any) -> bytes | None:
    """Return what memory contains, unless it is closed, or so large that it is unknown."""
    view = _view(part)
    return None if view is None or view.nbytes > _MOST else view.tobytes()


def _view(part: Any) -> memoryview | None:
    try:
        return memoryview(part)
    except ValueError:  # closed, or released
        return None


def text_of(part: io.StringIO | io.BytesIO) -> tuple | None:
    """Return what a file in memory contains, and its position, unless it is closed."""
    return None if part.closed else (part.getvalue(), part.tell())
