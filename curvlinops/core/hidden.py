"""What objects hold, and what code reads, without attributes that say so."""

import ctypes
import dis
import functools
import gc
import inspect
import io
import itertools
import mmap
from collections.abc import Iterator
from types import CodeType
from typing import Any

#: What functools.cache makes.
Cached = type(functools.cache(lambda: None))
#: Objects that are memory.
MEMORY = (ctypes.Structure.__base__, mmap.mmap, memoryview)
#: How many bytes of it are worth a comparison.
_MOST = 2**26
#: Global names by which code looks up what it does not name.
_LOOKUPS = {"globals", "eval", "exec", "__import__"}
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_STORE = {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_OF_OBJECT = {*_ATTRIBUTE, "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"}


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


@functools.cache
def names_in(code: CodeType) -> tuple[str, ...]:
    """Return the names that a function's code, and that of functions in it, looks up."""
    names = (name for inner in _inside(code) for name in names_in(inner))
    return tuple(dict.fromkeys([*code.co_names, *names]))


@functools.cache
def paths_in(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Return the globals that a function's code reads, with attributes that it takes at once.

    A global by itself, ``("config",)``, may end up anywhere. Of one that occurs as
    ``("config", "SCALE")`` only, nothing but this attribute is read. Variables that an import
    within the code makes are among them.
    """
    steps, found = _steps(code), []
    variables = {variable for variable, _, _ in imports_in(code)}
    for i, step in enumerate(steps):
        taken = itertools.takewhile(lambda each: each.opname in _ATTRIBUTE, steps[i + 1 :])
        attributes = [each.argval for each in taken] if isinstance(step.argval, str) else []
        found += [(name, *attributes) for name in _names_of(step, variables)]
    inner = (path for each in _inside(code) for path in paths_in(each))
    return tuple(dict.fromkeys([*found, *inner]))


def _names_of(step: dis.Instruction, variables: set[str | None]) -> list[str]:
    """Return the globals, and those of some variables, that an instruction uses."""
    if step.opname in _STORE or step.opcode in dis.hasconst:
        return []
    if step.opcode in dis.hasname:
        is_global = not step.opname.startswith("IMPORT") and step.opname not in _OF_OBJECT
        return [step.argval] if is_global else []
    used = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return [name for name in used if isinstance(name, str) and name in variables]


@functools.cache
def imports_in(code: CodeType) -> tuple[tuple[str | None, str, str | None], ...]:
    """Return what a function's code imports itself.

    Returns:
        For each import the variable, if it can be seen; the module, which begins with dots if it
        is relative; and what is taken of it. If that is nothing, the variable is the module's
        outermost package.
    """
    steps, found = _steps(code), []
    for i, step in enumerate(steps):
        if step.opname == "IMPORT_NAME":
            module = "." * steps[i - 2].argval + step.argval
            for k, name in enumerate(steps[i - 1].argval or (None,)):
                after = steps[i + 1 if name is None else i + 2 * k + 2]
                variable = after.argval if after.opname in _STORE else None
                found.append((variable, module, name))
    inner = (each for part in _inside(code) for each in imports_in(part))
    return tuple(dict.fromkeys([*found, *inner]))


def _steps(code: CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]


@functools.cache
def looks_up(code: CodeType) -> bool:
    """Return whether code may read anything, by names that are made when it runs."""
    names = set(names_in(code))
    if {"sys", "modules"} <= names or "import_module" in names:
        return True
    if names.isdisjoint(_LOOKUPS):
        return False
    # not attributes, such as module.eval()
    found = (i.argval for i in dis.get_instructions(code) if i.opname in _GLOBAL)
    return not _LOOKUPS.isdisjoint(found) or any(map(looks_up, _inside(code)))


def _inside(code: CodeType) -> list[CodeType]:
    return [constant for constant in code.co_consts if inspect.iscode(constant)]
