"""The user's modules, lent out and given back as found."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import filterfalse
from operator import is_not

import torch
from torch import nn

from curvlinops.core.parameters import with_attributes
from curvlinops.core.pytree import leaves

#: The types of containers whose contents are restored; subclasses may have other rules.
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, set, deque})

_OBSERVERS = ("_backward_hooks", "_backward_pre_hooks")

#: A container, and what was in it.
Before = tuple[Collection, Collection]

#: In a ``state``: what had other contents at the end of the first context, and which.
TRACES = "traces"


def modules_of(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all their children, each once, faster than ``nn.Module.modules``."""
    found, stack = {}, list(reversed([*roots]))
    while stack:
        module = stack.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                stack += [x for x in reversed([*module._modules.values()]) if x is not None]
    return list(found.values())


@contextmanager
def protected(roots: Iterable[nn.Module], state: dict, constant: bool = True) -> Iterator[None]:
    """Undo all that happens to modules inside the context.

    Buffers are replaced by copies, which are made once per ``state``: a checkpoint that is
    recomputed in the backward pass meets the forward pass's copies (with what that wrote to them),
    and attributes as that left them.

    Hooks and submodules that a pass makes stay, with the flags that say that they are made: the
    next pass would not make them again, or twice.

    Args:
        roots: The modules; their children are included.
        state: Kept by the caller from one entry to the next, empty at the first.
        constant: Whether buffers are constants. If not, those that require gradients, such as what
            the model computed in this very pass, stay as they are.
    """
    modules = [m for m in modules_of(roots) if not isinstance(m, torch.jit.ScriptModule)]
    if not state:
        buffers = (b for module in modules for b in module._buffers.values() if b is not None)
        copied = (b for b in buffers if constant or not b.requires_grad)
        state.update({id(b): with_attributes(b.detach().clone(), b) for b in copied})
    is_first = TRACES not in state
    found, inner, own, lent = [], _Contents(), _Contents(), []
    try:
        for module in modules:
            attributes, parameters, buffers = vars(module), module._parameters, module._buffers
            # attributes, too: recurrent layers and weight norm cache tensors in them
            found += [(part, dict(part)) for part in (attributes, parameters, buffers)]
            # and what is in them: hooks that a first pass registers, lists of auxiliary losses
            kinds = map(_CONTAINERS.__contains__, map(type, attributes.values()))
            names = _containers(tuple(attributes), tuple(kinds))
            for contents, some in zip((inner, own), names, strict=True):
                parts = map(attributes.__getitem__, some)
                # under whatever name
                contents.add([p for p in parts if p is not parameters and p is not buffers])
            # backward hooks observe the user's own backward passes, and are no part of the model
            for name in _OBSERVERS:
                attributes[name] = OrderedDict()
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = state.get(id(buffer), buffer)
            if is_first:
                lent += [(part, dict(part)) for part in (attributes, buffers)]
        for part, contents in state.get(TRACES, ()):
            _fill(part, contents)
        yield
    finally:
        changed, prepared = inner.changed(), own.changed()
        if is_first:
            traces = [*changed, *prepared, *(each for each in lent if _differ(*each))]
            state[TRACES] = [(part, _copy(part)) for part, _ in traces]
        if prepared:
            # hooks and submodules are made once, and what says so may be anywhere: they stay,
            # and so does all that may say so
            changed = [(part, before) for part, before in changed if leaves(_copy(part))]
            found = [(part, before | _flags(part, before)) for part, before in found]
        for part, before in found:
            _restore(part, before)
        for part, before in changed:
            _fill(part, before)


class _Contents:
    """What was in containers, most of which are empty."""

    def __init__(self) -> None:
        self._full: list[Before] = []
        self._empty: list[Collection] = []

    def add(self, parts: list[Collection]) -> None:
        """Remember what is in some more."""
        self._full += [(part, _copy(part)) for part in filter(None, parts)]
        self._empty += filterfalse(None, parts)

    def changed(self) -> list[Before]:
        """Return those in which there is something else now, and what was."""
        full = [(part, before) for part, before in self._full if _differ(part, before)]
        return full + [(part, ()) for part in filter(None, self._empty)]


@lru_cache(maxsize=1024)  # modules of one class have the same attributes
def _containers(names: tuple[str, ...], chosen: tuple[bool, ...]) -> tuple[list[str], list[str]]:
    """Tell the attributes that are containers: all others, and those of hooks and submodules."""
    containers = [name for name, is_one in zip(names, chosen, strict=True) if is_one]
    own = [name for name in containers if name == "_modules" or "_hooks" in name]
    return [name for name in containers if name not in own], own


def _flags(attributes: dict, before: dict) -> dict:
    """Return new values of a module's attributes that have no tensors."""
    return {
        name: value
        for name, value in attributes.items()
        if name not in _OBSERVERS and value is not before.get(name) and not leaves(value)
    }


def _restore(part: dict, before: dict) -> None:
    """Undo changes of a dictionary, and leave all other entries alone: other threads read them."""
    for name in [name for name in part if name not in before]:
        del part[name]
    for name, value in before.items():
        if part.get(name, part) is not value:
            part[name] = value
    if list(part) != list(before):  # an entry was taken out, and has been put back at the end
        _fill(part, before)


def _fill(part: Collection, contents: Collection) -> None:
    part.clear()
    (part.update if isinstance(part, (dict, set)) else part.extend)(contents)


def _copy(part: Collection) -> dict | list:
    return dict(part) if isinstance(part, dict) else list(part)


def _differ(part: Collection, before: Collection) -> bool:
    """Return whether a container has not the very objects, in the same order, that it had."""
    if len(part) != len(before) or any(map(is_not, part, before)):
        return True
    return isinstance(part, dict) and any(map(is_not, part.values(), before.values()))
