"""What code reads, as far as its instructions show, and whose code it is."""

import dis
import functools
import importlib
import inspect
import itertools
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from curvlinops.core.hidden import UNKNOWN

_INSTALLED = tuple(
    str(Path(sysconfig.get_path(kind)).resolve()) for kind in ("stdlib", "purelib", "platlib")
)
#: Folders of packages, also those of another environment that this one is built on.
_INSTALLED_FOLDERS = {"site-packages", "dist-packages"}
#: Global names by which code looks up what it does not name.
_LOOKUPS = {"globals", "eval", "exec", "__import__"}
#: The ids of what looks up anything, by whatever name code knows it.
_FINDERS = {*map(id, (importlib.import_module, __import__, eval, exec, globals))}
_GLOBAL = {"LOAD_GLOBAL", "LOAD_NAME"}
_STORE = {"STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL"}
_ATTRIBUTE = {"LOAD_ATTR", "LOAD_METHOD"}
_OF_OBJECT = {*_ATTRIBUTE, "STORE_ATTR", "DELETE_ATTR", "LOAD_SUPER_ATTR"}


def read_by(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield name and value of what code may read besides its variables, ``UNKNOWN`` for anything.

    Args:
        code: The code.
        scope: Its globals.
    """
    found = {(path, id(value)): (path, value) for path, value in _read(code, scope)}
    yield from found.values()
    names = names_in(code)
    for _, value in found.values():
        if is_own(value):  # for those who pass over modules
            yield from ((n, vars(value)[n]) for n in names if n in vars(value))
    if not {"environ", "getenv"}.isdisjoint(names):
        yield "environ", os.environ
    if looks_up(code) or any(id(value) in _FINDERS for _, value in found.values()):
        yield "anything", UNKNOWN


def _read(code: CodeType, scope: dict[str, Any]) -> Iterator[tuple[tuple, Any]]:
    """Yield what code reads of globals and of modules that it imports itself, and the paths."""
    paths = paths_in(code)
    yield from (_along(path, scope[path[0]]) for path in paths if path[0] in scope)
    for variable, module, name in imports_in(code):
        full = _absolute(module, scope)
        value = sys.modules.get(full)
        if name is None:
            outermost, wanted = sys.modules.get(full.partition(".")[0]), tuple(full.split("."))
            path, found = _along(wanted, outermost)  # which `import a.b as c` takes
            value = outermost if variable else found if path == wanted else value
        if not is_own(value):
            continue
        wanted = (full,) if name is None else (full, name)
        path, value = _along(wanted, value)
        if variable is None or path != wanted or not is_own(value):
            yield path, value
        else:  # a module: what is taken of it
            uses = (use for use in paths if use[0] == variable)
            yield from ((path + rest[1:], held) for rest, held in (_along(u, value) for u in uses))


def _absolute(module: str, scope: dict[str, Any]) -> str:
    """Return the name of a module that code imports."""
    name = module.lstrip(".")
    level = len(module) - len(name)
    if level == 0:
        return name
    package = (scope.get("__package__") or "").rsplit(".", level - 1)[0]
    return f"{package}.{name}" if name else package


def _along(path: tuple[str, ...], value: Any) -> tuple[tuple[str, ...], Any]:
    """Follow a path that begins with a value through the user's modules, as far as they have it."""
    for i, name in enumerate(path[1:], 1):
        # modules of another type may make attributes up
        if type(value) is not ModuleType or not is_own(value) or name not in vars(value):
            return _start(path, i), value
        value = vars(value)[name]
    return path, value


@functools.cache  # comparisons are faster with the very same names
def _start(path: tuple[str, ...], length: int) -> tuple[str, ...]:
    return path[:length]


def is_own(value: Any) -> bool:
    """Return whether something is a module of the user."""
    return isinstance(value, ModuleType) and not is_installed(value.__name__)


@functools.cache
def is_installed(module: str | None) -> bool:
    """Return whether a module is installed code or this package, not the user's own."""
    if module is None or module.split(".")[0] == "curvlinops":
        return module is not None
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:  # built into Python, or typed interactively
        return module in sys.builtin_module_names
    # some installers link to files elsewhere
    paths = (Path(file), Path(file).resolve())
    return str(paths[1]).startswith(_INSTALLED) or any(
        not _INSTALLED_FOLDERS.isdisjoint(path.parts) for path in paths
    )


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
