"""The user's modules, lent out and given back as found."""

from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from operator import is_not

from torch import nn

_CONTAINERS = (dict, list, set, deque)

#: In a ``state``: what had other contents at the end of the first context, and which.
TRACES = "traces"


@contextmanager
def protected(roots: Iterable[nn.Module], state: dict, constant: bool = True) -> Iterator[None]:
    """Undo all that happens to modules inside the context.

    Buffers are replaced by copies, which are made once per ``state``: a checkpoint that is
    recomputed in the backward pass meets the forward pass's copies (with what that wrote to them),
    and attributes as that left them.

    Args:
        roots: The modules; their children are included.
        state: Kept by the caller from one entry to the next, empty at the first.
        constant: Whether buffers are constants. If not, those that require gradients, such as what
            the model computed in this very pass, stay as they are.
    """
    modules = list(dict.fromkeys(child for root in roots for child in root.modules()))
    if not state:
        buffers = (b for module in modules for b in module._buffers.values() if b is not None)
        copied = (b for b in buffers if constant or not b.requires_grad)
        state.update({id(buffer): buffer.detach().clone() for buffer in copied})
    found, inner, lent = [], [], []
    try:
        for module in modules:
            # attributes, too: recurrent layers and weight norm cache tensors in them
            parts = [vars(module), module._parameters, module._buffers]
            found += [(part, dict(part)) for part in parts]
            # and what is in them: hooks that a first pass registers, lists of auxiliary losses
            containers = [part for part in vars(module).values() if isinstance(part, _CONTAINERS)]
            inner += [(c, _copy(c)) for c in containers if not any(c is part for part in parts)]
            # backward hooks observe the user's own backward passes, and are no part of the model
            vars(module).update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = state.get(id(buffer), buffer)
            lent += [(part, dict(part)) for part in (vars(module), module._buffers)]
        for part, contents in state.get(TRACES, ()):
            _fill(part, contents)
        yield
    finally:
        changed = [(part, before) for part, before in inner if _differ(part, before)]
        if TRACES not in state:
            traces = [*changed, *(each for each in lent if _differ(*each))]
            state[TRACES] = [(part, _copy(part)) for part, _ in traces]
        for part, original in found + changed:
            _fill(part, original)


def _fill(part: Collection, contents: Collection) -> None:
    part.clear()
    (part.update if isinstance(part, (dict, set)) else part.extend)(contents)


def _copy(part: Collection) -> Collection:
    """Return a copy of a container's contents."""
    if not part:  # as are most of a module's dictionaries
        return ()
    return dict(part) if isinstance(part, dict) else list(part)


def _differ(part: Collection, before: Collection) -> bool:
    """Return whether a container has not the very objects, in the same order, that it had."""
    if not part and not before:
        return False
    if len(part) != len(before) or any(map(is_not, part, before)):
        return True
    return isinstance(part, dict) and any(map(is_not, part.values(), before.values()))
