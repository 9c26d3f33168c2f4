"""What the graph of the first batch shows of a model and its loss."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from curvlinops.autodiff.graph_checks import Watch, needs_graph
from curvlinops.support.autograd_graph import (
    custom_functions,
    footprint,
    graph_nodes,
    precisions,
    signature,
)
from curvlinops.support.memory import suppressed
from curvlinops.support.torch_internals import without_torch_function


@dataclass(frozen=True)
class BatchFacts:
    """What the graph of one batch has shown.

    Attributes:
        graph_bytes: The memory of the graph, in bytes.
        dtypes: The real dtypes of the gradients that pass the graph.
        custom_functions: The names of the user's autograd functions, and of hooks on tensors.
        model_differentiates: Whether the model differentiates with respect to parameters itself,
            as meta-learning does, so that these have to require gradients in each evaluation.
        loss_needs_graph: Whether the loss depends on the parameters not only through the values of
            the output: it differentiates the output with respect to the input (a PINN), or uses
            the parameters itself (weight decay).
        signature: A hash of the graph's operations and their connections.
    """

    graph_bytes: int
    dtypes: frozenset[torch.dtype]
    custom_functions: frozenset[str]
    model_differentiates: bool
    loss_needs_graph: bool
    signature: int


def facts_of(problem: Any, output: Tensor, leaves: dict[str, Tensor], watch: Watch) -> BatchFacts:
    """Return what the graph of an output and its loss shows; ``watch`` is active."""
    loss, y, value, depends = problem.loss, problem.batch.y, output, False
    if loss is not None:
        if not loss.is_function_of_values:
            depends = needs_graph(loss, output, y, leaves, problem.model.params)
        loss.needs_graph = depends
        with suppressed():  # products have better messages
            value = loss.sum(output, y)
    with without_torch_function():  # the evaluation watches calls, which costs time
        nodes = list(graph_nodes(value))
        return BatchFacts(
            graph_bytes=footprint(value),
            dtypes=precisions(nodes, output),
            custom_functions=frozenset(custom_functions(nodes) | watch.hooks),
            model_differentiates=watch.differentiates,
            loss_needs_graph=depends,
            signature=signature(value),
        )


#: By model: what operators have learned of it, by everything that this depends on.
_LEARNED: weakref.WeakKeyDictionary[Any, dict[Hashable, dict]] = weakref.WeakKeyDictionary()

#: For how many kinds of batches, losses and train flags something is remembered per model.
_MOST_KEYS = 16


def learned(source: Any, key: Hashable) -> dict[Hashable, Any]:
    """Return a dictionary that all operators on a model share, until the model is freed.

    Who builds an operator for each step or batch need not learn everything again.

    Args:
        source: The user's model.
        key: What the contents depend on. They must not refer to the model.
    """
    try:
        entries = _LEARNED.setdefault(source, {})
    except TypeError:  # an object without weak references
        return {}
    if key not in entries and len(entries) >= _MOST_KEYS:
        del entries[next(iter(entries))]
    return entries.setdefault(key, {})
