"""Lets tangents end where gradients end.

``torch.no_grad`` makes constants for backward passes only: forward mode would differentiate what
is computed inside. A dot-test notices that where the effect is large, but not for the norm of a
large weight, whose derivative along a random vector is small.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from curvlinops.support import torch_internals


class TangentSwitch:
    """Switches tangents off and on with gradients.

    Attributes:
        table: Replacements of the calls that stop gradients.
    """

    def __init__(self) -> None:
        self._is_off = False
        self.table: dict[Callable, Callable] = {
            torch_internals.set_grad_enabled: self._set_grad_enabled,
            torch.autograd.grad: _grad,
        }

    def _set_grad_enabled(self, enabled: bool) -> None:
        if enabled:
            self.restore()
        elif not torch_internals.in_backward() and torch_internals.are_tangents_enabled():
            # backward passes and custom functions stop gradients themselves, but not tangents
            torch_internals.set_tangents_enabled(False)
            self._is_off = True
        torch_internals.set_grad_enabled(enabled)

    def restore(self) -> None:
        """Switch tangents on if they are off."""
        if self._is_off:
            torch_internals.set_tangents_enabled(True)
            self._is_off = False


def _grad(*args: Any, create_graph: bool = False, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """Return gradients, which are constants without a graph."""
    grads = torch.autograd.grad(*args, create_graph=create_graph, **kwargs)
    return grads if create_graph else tuple(g if g is None else g.detach() for g in grads)
