"""Nodes, leaves and memory of autograd graphs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge

from curvlinops.support.pytree import leaves
from curvlinops.support.torch_internals import (
    can_be_called,
    function_of,
    input_metadata,
    saved_values,
    shape_of_output,
    strided_tensors,
    without_torch_function,
)

#: What a graph computed: a tensor, or where it left the graph if nobody reads its numbers.
Output = Tensor | GradientEdge
#: Functions that models and losses call to differentiate.
DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


def graph_nodes(*outputs: Output) -> list[Any]:
    """Return all nodes of the graph that computed some tensors, inputs before what uses them."""
    with without_torch_function():  # an evaluation watches what the model reads, not this
        stack = [x.node if isinstance(x, GradientEdge) else x.grad_fn for x in reversed(outputs)]
        entered = set[Any]()
    nodes: dict[Any, None] = {}
    while stack:
        node = stack.pop()
        if node in entered:
            nodes.setdefault(node)  # all of its inputs are there
        elif node is not None:
            entered.add(node)
            stack.append(node)
            stack += [source for source, _ in reversed(node.next_functions)]
    return list(nodes)


def has_plain_shape(node: Any) -> bool:
    """Return whether a node's output is no nested tensor, whose lengths are symbols."""
    return all(type(length) is int for length in input_metadata(node, 0).shape)


def shape_of_input(node: Any, position: int) -> tuple[int, ...]:
    """Return the shape of one of a node's inputs that have a gradient."""
    source, number = node.next_functions[position]
    return shape_of_output(source, number)


def precisions(nodes: Iterable[Any], output: Tensor) -> frozenset[torch.dtype]:
    """Return the real dtypes in which gradients pass a graph with these nodes and this output."""
    edges = (edge for node in nodes for edge in node.next_functions)
    dtypes = {input_metadata(node, index).dtype for node, index in edges if node is not None}
    return frozenset(dtype.to_real() for dtype in dtypes | {output.dtype})


def least_precise(nodes: Iterable[Any], output: Tensor) -> torch.dtype:
    """Return the least precise of ``precisions``."""
    return max(precisions(nodes, output), key=lambda dtype: torch.finfo(dtype).eps)


def custom_functions(nodes: Iterable[Any]) -> set[str]:
    """Return the names of the user's own autograd functions in a graph."""
    kinds = {type(node): node for node in nodes}
    return {node.name().removesuffix("Backward") for node in kinds.values() if is_users(node)}


def is_custom(node: Any, function: type | None = None) -> bool:
    """Return whether a node is that of an autograd function in Python, perhaps a certain one."""
    has_function = isinstance(node, BackwardCFunction)
    return has_function and (function is None or function_of(node) is function)


def is_users(node: Any) -> bool:
    """Return whether a node is that of one of the user's own autograd functions."""
    if not is_custom(node):
        return False
    return function_of(node).__module__.partition(".")[0] != __name__.partition(".")[0]


def runs_python(nodes: Sequence[Any]) -> bool:
    """Return whether backward passes run the user's code: functions, or hooks on saved tensors."""
    return bool(custom_functions(nodes)) or has_hooks_on_saved(nodes)


def has_hooks_on_saved(nodes: Iterable[Any]) -> bool:
    """Return whether hooks have replaced tensors that nodes save, as in checkpoints."""
    held = (getattr(value, "data", None) for node in nodes for value in saved_values(node))
    return not all(x is None or isinstance(x, Tensor) for x in held)


def loses_graph(node: Any, returned: tuple, given: tuple) -> bool:
    """Return whether a node returns a gradient without a graph, though those with one arrived.

    Zeros may be constant, or zero by accident, as behind a gate before its first step. Then the
    node is called with random gradients.
    """
    parts, arrived = _without_graph(returned), [x for x in given if x is not None]
    if not (parts and arrived and all(x.requires_grad for x in arrived)):
        return False
    if not any(map(torch.any, parts)) and can_be_called(node):
        generator = torch.Generator(parts[0].device).manual_seed(0)
        with suppress(Exception):  # nodes are not written for being called like this
            others = [x if x is None else _drawn_like(x, generator) for x in given]
            found = node(*others)
            parts = _without_graph(found if isinstance(found, tuple) else (found,))
    return any(map(torch.any, parts))


def _drawn_like(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return random numbers, in a dense tensor that requires gradients."""
    options = {"dtype": x.dtype, "device": x.device, "requires_grad": True}
    return torch.randn(x.shape, generator=generator, **options)


def _without_graph(gradients: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the dense tensors of gradients that have no graph."""
    constant = [x for x in gradients if x is not None and not x.requires_grad]
    return [part for x in constant for part in strided_tensors(x) if part.numel()]


def leaf_variables(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors at which a graph with these nodes begins, such as parameters."""
    variables = [getattr(node, "variable", None) for node in nodes]
    return (variable for variable in variables if isinstance(variable, Tensor))


def footprint(
    tensors: Iterable[Output],
    others: Iterable[Tensor] = (),
    nodes: Sequence[Any] | None = None,
) -> int:
    """Return the memory in bytes that tensors keep alive, each with the graph that computed it.

    Leaves of graphs, which are parameters, and ``others``, which are in memory anyway, do not
    count. Not seen are the inputs of checkpoints, and what the user's own functions keep inside of
    objects. The nodes of the graphs are looked for unless they are given.
    """
    with without_torch_function():  # an evaluation watches what the model calls
        tensors = list(tensors)
        nodes = graph_nodes(*tensors) if nodes is None else nodes
        # hooks on saved tensors, as of checkpoints, may have saved something else
        held = [getattr(value, "data", None) for node in nodes for value in saved_values(node)]
        held += leaves([getattr(node, "__dict__", None) for node in nodes])
        found = _storages(held)
        for address in _storages(leaf_variables(nodes)):
            found.pop(address, None)
        found |= _storages(tensors)
        for address in _storages(others):
            found.pop(address, None)
    return sum(found.values())


def addresses(x: Any) -> set[int]:
    """Return the addresses of a tensor's memory."""
    return set(_storages([x]))


def saved_memory(node: Any) -> set[int]:
    """Return the addresses of the memory of the tensors that a node has saved."""
    return set(_storages(getattr(value, "data", None) for value in saved_values(node)))


def _storages(objects: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of the storages of the tensors among some objects, by address."""
    found = dict[int, int]()
    for x in objects:
        with suppress(RuntimeError):  # a wrapper that does not show what it wraps
            for part in strided_tensors(x) if isinstance(x, Tensor) else ():
                storage = part.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return found
