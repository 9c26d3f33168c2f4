"""The one context in which every forward pass and every backward pass runs."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from curvlinops.core.decompositions import Rewriting
from curvlinops.core.model import Model


class Scope:
    """Evaluates a model at given parameter values, and can be entered again.

    The backward pass of a graph built in a scope runs in the same scope: activation
    checkpointing recomputes the forward pass there, which must meet the same parameters,
    buffers and kernels.

    Args:
        model: The model.
        values: Its parameters' values.
        twice: Whether derivatives beyond the plain gradient are taken, which the fused
            attention kernels do not have. Their replacement costs memory quadratic in the
            sequence length.
    """

    def __init__(self, model: Model, values: Mapping[str, Tensor], twice: bool = True):
        self._model = model
        self._values = values
        self._twice = twice
        self._state: dict = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter the scope."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._model.installed(self._values, self._state))
            if self._twice:
                stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_without_attention_fast_path())
            if "torch._dynamo" in sys.modules:  # imported by whoever compiled something
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(Rewriting())
            yield

    def output(self, X: Any) -> Any:
        """Evaluate the model; inside ``active()`` only."""
        return self._model(self._values, X)


@contextmanager
def _without_attention_fast_path() -> Iterator[None]:
    """Let attention layers in eval mode use differentiable operations."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
