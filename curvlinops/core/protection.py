"""The user's modules, lent out and given back as found."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

#: In a ``state``: that modules had other attributes or buffers at the end of the context.
TRACES = "traces"


@contextmanager
def protected(roots: Iterable[nn.Module], state: dict, constant: bool = True) -> Iterator[None]:
    """Undo all that happens to modules inside the context.

    Buffers are replaced by copies, which are made once per ``state``: a checkpoint that is
    recomputed in the backward pass meets the forward pass's copies (with what that wrote to them).

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
    found, lent = [], []
    try:
        for module in modules:
            # attributes, too: recurrent layers and weight norm cache tensors in them
            parts = [vars(module), module._parameters, module._buffers]
            found += [(part, dict(part)) for part in parts]
            # backward hooks observe the user's own backward passes, and are no part of the model
            vars(module).update(_backward_hooks=OrderedDict(), _backward_pre_hooks=OrderedDict())
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = state.get(id(buffer), buffer)
            lent += [(part, dict(part)) for part in (vars(module), module._buffers)]
        yield
    finally:
        if any(_differ(part, before) for part, before in lent):
            state[TRACES] = True
        for part, original in found:
            part.clear()
            part.update(original)


def _differ(part: dict, before: dict) -> bool:
    return part.keys() != before.keys() or any(part[name] is not x for name, x in before.items())
