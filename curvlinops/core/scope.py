"""The one context in which every forward pass and every backward pass runs."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from curvlinops.core import overrides
from curvlinops.core.containers import lent
from curvlinops.core.model import Model
from curvlinops.core.protection import TRACES

_DIFFERENTIATION: dict[str, overrides.Differentiation] = {
    "gradient": "once",
    "reverse": "twice",
    "forward": "forward",
}

_ONE_ARGUMENT = (
    "The model got X, of type {}, as one argument. If it takes the entries of X as keyword "
    "arguments, as the models of Hugging Face do, wrap it in a Module whose forward(self, X) "
    "returns self.inner(**X).logits."
)


class Scope:
    """Evaluates a model at given parameter values, and can be entered again.

    The backward pass of a graph built in a scope runs in the same scope: activation
    checkpointing recomputes the forward pass there, which must meet the same parameters,
    buffers and kernels.

    Args:
        model: The model.
        values: Its parameters' values.
        purpose: What is done with it: ``"gradient"``, an ordinary backward pass;
            ``"forward"``, forward mode; or ``"reverse"``, a backward pass through the graph of
            a backward pass.
    """

    #: How often models were evaluated, in any scope.
    _evaluations = 0

    def __init__(self, model: Model, values: Mapping[str, Tensor], purpose: str):
        self._model = model
        self._values = values
        self.purpose = purpose
        self._state: dict = {}
        self._number = 0

    @property
    def is_current(self) -> bool:
        """Whether the world is as it was when the model was evaluated here.

        It is not if that left traces in modules, which were undone when the scope ended, or if
        another evaluation followed, which may have written to what the model keeps elsewhere.
        """
        return not self._state.get(TRACES) and self._number == Scope._evaluations

    @contextmanager
    def active(self) -> Iterator[None]:
        """Enter the scope."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            stack.enter_context(self._model.installed(self._values, self._state))
            stack.enter_context(_without_cached_weights())
            if _may_compile():
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            stack.enter_context(overrides.active(_DIFFERENTIATION[self.purpose]))
            yield

    def output(self, X: Any) -> Any:
        """Evaluate the model; inside ``active()`` only."""
        Scope._evaluations += 1
        self._number, may_compile = Scope._evaluations, _may_compile()
        try:
            return self._model(self._values, lent(X))
        except Exception as error:
            if _may_compile() and not may_compile:  # the model does, and began just now
                with torch.compiler.set_stance("force_eager"):
                    return self.output(X)
            if isinstance(X, Mapping):
                error.add_note(_ONE_ARGUMENT.format(type(X).__name__))
            raise


def _may_compile() -> bool:
    """Return whether what compiles is imported, as it is by whoever compiles something."""
    return "torch._dynamo" in sys.modules


@contextmanager
def _without_cached_weights() -> Iterator[None]:
    """Compute parametrized weights anew from the parameters in use, not from the user's."""
    cached = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = cached
