"""Calls of the model that are replaced, because of what PyTorch's own derivatives lack.

Some are wrong, some are missing, some are slow. The replacements are active in every forward pass
and in every backward pass, which recomputes checkpointed parts of the forward. To change how a call
is differentiated, add a line to ``OVERRIDES``; to refuse a call, raise an error in its replacement.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from curvlinops.autodiff.overrides.attention import ATTENTION
from curvlinops.autodiff.overrides.convolution import CONVOLUTIONS
from curvlinops.autodiff.overrides.elementwise import gelu, hardsigmoid
from curvlinops.autodiff.overrides.embedding import embedding, embedding_bag, torch_embedding
from curvlinops.autodiff.overrides.norms import DEVIATIONS, cdist, weight_norm
from curvlinops.autodiff.overrides.recurrent import RECURRENT
from curvlinops.autodiff.overrides.writes import Protected, writes
from curvlinops.support import torch_internals

#: The ways to differentiate a model: an ordinary backward pass; a backward pass through the graph
#: of a backward pass; forward mode.
Differentiation = Literal["once", "twice", "forward"]

#: In every pass.
OVERRIDES: dict[Callable, Callable] = {
    F.embedding: embedding,
    torch.embedding: torch_embedding,
    F.embedding_bag: embedding_bag,
    F.hardsigmoid: hardsigmoid,
    torch.cdist: cdist,
    **RECURRENT,
}
if torch_internals.weight_norm is not None:
    OVERRIDES[torch_internals.weight_norm] = weight_norm

#: What reads the node of a tensor, on which hooks may be registered.
_READ_NODE = Tensor.grad_fn.__get__

#: In addition in forward mode, which the fused kernels of attention lack.
FORWARD = OVERRIDES | ATTENTION

#: In addition, where the graph of the backward pass is differentiated.
TWICE = FORWARD | CONVOLUTIONS | DEVIATIONS | {F.gelu: gelu}


class Overrides(TorchFunctionMode):
    """Replaces calls by a table while it is active, and refuses those that write to parameters.

    ``hooks`` gets the names of hooks on gradients.
    """

    def __init__(
        self, table: dict[Callable, Callable], protected: Protected, hooks: set[str] | None = None
    ):
        super().__init__()
        self._table, self._protected = table, protected
        self._hooks = set[str]() if hooks is None else hooks

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the replacement of ``func``, or ``func`` itself."""
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            hook = (*args, *kwargs.values())[1]
            self._hooks.add(f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}")
        elif func == _READ_NODE and not _is_of_checkpoint(sys._getframe(1)):
            self._hooks.add("hook on a grad_fn")  # PyTorch does not show hooks on nodes
        if writes(func, kwargs):
            self._protected.check(func, args, kwargs)
        if (kernel := torch_internals.kernel_in_python(func, args)) is not None:
            with self:  # it calls functions of the model
                return kernel(*args, **kwargs)
        return self._table.get(func, func)(*args, **kwargs)


def _is_of_checkpoint(frame: FrameType | None) -> bool:
    """Return whether PyTorch's checkpoints call, which give no node to the user.

    Modes of this package pass calls on.
    """
    name = "curvlinops"
    while frame is not None and name.partition(".")[0] == "curvlinops":
        name, frame = frame.f_globals.get("__name__", ""), frame.f_back
    return name == "torch.utils.checkpoint"


@contextmanager
def active(
    differentiation: Differentiation,
    protected: Protected,
    products: Mapping[Callable, Callable],
    hooks: set[str] | None = None,
) -> Iterator[None]:
    """Replace calls, and select attention kernels with the derivatives that are needed.

    Unless it is ``"once"``, attention that is not replaced runs in the math kernel, since the fused
    ones lack derivatives. If it is ``"twice"``, further calls, ``products``, are replaced.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    kernels = nullcontext() if differentiation == "once" else sdpa_kernel(SDPBackend.MATH)
    twice = TWICE | products if products else TWICE
    table = {"once": OVERRIDES, "forward": FORWARD, "twice": twice}[differentiation]
    torch.backends.mha.set_fastpath_enabled(False)  # in eval mode it has no derivatives
    try:
        with kernels, Overrides(table, protected, hooks):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
