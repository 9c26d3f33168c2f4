"""Facts about a model and its loss, learned from the first evaluation."""

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from curvlinops.autodiff.evaluation import GraphError, not_registered
from curvlinops.losses.base import Loss
from curvlinops.support.autograd_graph import (
    DIFFERENTIATING,
    custom_functions,
    footprint,
    graph_nodes,
    leaf_variables,
    precisions,
    signature,
)
from curvlinops.support.memory import lacks_memory, suppressed
from curvlinops.support.pytree import leaves
from curvlinops.support.torch_internals import in_transform, without_torch_function

#: PyTorch's complaints if a function differentiates a tensor that has no graph.
_NO_GRAPH = ("does not require grad", "not have been used in the graph")


@dataclass(frozen=True)
class BatchFacts:
    """Facts that the first evaluation has shown.

    Attributes:
        graph_bytes: The memory of the graph, in bytes.
        dtypes: The real dtypes of the gradients that pass the graph.
        custom_functions: The names of the user's autograd functions, and of hooks on tensors.
        model_differentiates: Whether the model differentiates itself, as meta-learning does, so
            that its parameters have to require gradients in each evaluation.
        stops_gradients: Whether the model computes with its parameters outside of the graph
            (``torch.no_grad``, ``torch.autograd.grad`` without ``create_graph``). These are
            constants for backward passes, but forward mode would differentiate them.
        loss_needs_graph: Whether the loss depends on the parameters not only through the values of
            the output: it differentiates the output with respect to the input (a PINN), or uses
            the parameters itself (weight decay).
        signature: A hash of the graph's operations and their connections.
    """

    graph_bytes: int
    dtypes: frozenset[torch.dtype]
    custom_functions: frozenset[str]
    model_differentiates: bool
    stops_gradients: bool
    loss_needs_graph: bool
    signature: int


class Watch(TorchFunctionMode):
    """Watches the calls of model and loss; for the attributes see ``BatchFacts``.

    Args:
        replaced: The names of tensors that were replaced, by id.

    Attributes:
        hooks: The names of hooks that they register on tensors, which may change gradients.

    Raises:
        GraphError: When they differentiate with respect to one that was replaced: PyTorch would
            find no derivative, or zero.
    """

    def __init__(self, replaced: dict[int, str]):
        super().__init__()
        self._replaced = replaced
        self.differentiates = self.stops_gradients = False
        self.hooks: set[str] = set()

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call ``func``, and note how it uses gradients."""
        kwargs = kwargs or {}
        if func is Tensor.register_hook:
            hook = (*args, *kwargs.values())[1]
            self.hooks.add(f"hook {getattr(hook, '__qualname__', type(hook).__qualname__)}")
        if func is torch.autograd.grad and (
            lost := [x for x in args[1] if id(x) in self._replaced]
        ):
            raise not_registered(self._replaced[id(lost[0])])
        result = func(*args, **kwargs)
        if func in DIFFERENTIATING and not in_transform():
            self.differentiates = True
            self.stops_gradients |= not kwargs.get("create_graph", False)
        elif not torch.is_grad_enabled() and any(x.is_floating_point() for x in leaves(result)):
            self.stops_gradients |= any(x.requires_grad for x in leaves((args, kwargs)))
        return result


def facts_of(
    output: Tensor, loss: Loss | None, target: Any, parameters: set[int], watch: Watch
) -> BatchFacts:
    """Return the facts that the graphs of an output and its loss show.

    Args:
        output: The output.
        loss: The loss, if there is one.
        target: The batch's targets.
        parameters: The ids of the parameters, and of the tensors that replace them.
        watch: The mode that has watched the model. It is still active.
    """
    loss_needs_graph, value = False, output
    if loss is not None:
        loss_needs_graph = needs_graph(loss, output, target, parameters)
        with suppressed():  # products have better messages
            value = loss.sum(output, target)
    with without_torch_function():  # the evaluation watches calls, which costs time
        nodes = list(graph_nodes(value))
        return BatchFacts(
            graph_bytes=footprint(value),
            dtypes=precisions(nodes, output),
            custom_functions=frozenset(custom_functions(nodes) | watch.hooks),
            model_differentiates=watch.differentiates,
            stops_gradients=watch.stops_gradients,
            loss_needs_graph=loss_needs_graph,
            signature=signature(graph_nodes(value)),
        )


def needs_graph(loss: Loss, output: Tensor, target: Any, parameters: set[int]) -> bool:
    """Return whether a loss depends on the parameters not only through the output's values.

    For the arguments see ``facts_of``.
    """
    if loss.is_function_of_values:
        return False
    try:
        # with a graph, as usual, but not with the model's
        total = loss.sum(output.detach().requires_grad_().clone(), target)
    except Exception as error:
        if lacks_memory(error) or isinstance(error, GraphError):
            raise
        return isinstance(error, RuntimeError) and any(w in str(error) for w in _NO_GRAPH)
    if any(id(variable) in parameters for variable in leaf_variables(graph_nodes(total))):
        return True
    # derivatives that count as zero where there is no graph
    with_graph = loss.sum(output.clone(), target)
    with without_torch_function():  # the loss reads no numbers here
        return not torch.allclose(total, with_graph, rtol=1e-4, atol=0.0, equal_nan=True)


#: The facts that operators have learned about each model, by the key that they depend on.
_LEARNED: weakref.WeakKeyDictionary[Any, dict[Hashable, dict]] = weakref.WeakKeyDictionary()

#: The largest number of keys that are remembered for a model.
_MOST_KEYS = 16


def learned(source: Any, key: Hashable) -> dict[Hashable, Any]:
    """Return a dictionary that all operators on a model share, until the model is freed.

    So a new operator for each step or batch does not have to learn everything again.

    Args:
        source: The user's model.
        key: Everything that the contents depend on. The contents must not refer to the model.
    """
    try:
        entries = _LEARNED.setdefault(source, {})
    except TypeError:  # an object without weak references
        return {}
    if key not in entries and len(entries) >= _MOST_KEYS:
        del entries[next(iter(entries))]
    return entries.setdefault(key, {})
