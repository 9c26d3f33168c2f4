"""Nodes, leaves and memory of autograd graphs."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

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

#: Functions that models and losses call to differentiate.
DIFFERENTIATING = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}


def graph_nodes(*outputs: Tensor) -> list[Any]:
    """Return all nodes of the graph that computed some tensors, inputs before what uses them."""
    with without_torch_function():  # an evaluation watches what the model reads, not this
        stack, entered = [output.grad_fn for output in reversed(outputs)], set()
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
    return {node.name().removesuffix("Backward") for node in nodes if _is_custom(node)}


def is_custom(node: Any, function: type | None = None) -> bool:
    """Return whether a node is that of an autograd function in Python, perhaps a certain one."""
    has_function = isinstance(node, BackwardCFunction)
    return has_function and (function is None or function_of(node) is function)


def _is_custom(node: Any) -> bool:
    if not is_custom(node):
        return False
    return function_of(node).__module__.partition(".")[0] != __name__.partition(".")[0]


def runs_python(*outputs: Tensor) -> bool:
    """Return whether backward passes from some tensors run the user's code."""
    return any(map(is_python, graph_nodes(*outputs)))


def is_python(node: Any) -> bool:
    """Return whether a node runs the user's code: its backward, or hooks on what it has saved."""
    return _is_custom(node) or has_hooks_on_saved(node)


def has_hooks_on_saved(node: Any) -> bool:
    """Return whether hooks have replaced tensors that a node saves, as in checkpoints."""
    for value in saved_values(node):
        held = getattr(value, "data", None)
        if held is not None and not isinstance(held, Tensor):
            return True
    return False


def loses_graph(node: Any, returned: tuple, given: tuple) -> bool:
    """Return whether a node returns a gradient without a graph, though those with one arrived.

    Zeros may be constant, or zero by accident, as behind a gate before its first step. Then the
    node is called with random gradients.
    """
    arrived = [x for x in given if x is not None]
    if not (arrived and all(x.requires_grad for x in arrived)):
        return False
    parts = _without_graph(returned)
    if parts and not any(map(torch.any, parts)) and can_be_called(node):
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
    constant = (x for x in gradients if x is not None and not x.requires_grad)
    return [part for x in constant for part in strided_tensors(x) if part.numel()]


def leaf_variables(nodes: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors at which a graph with these nodes begins, such as parameters."""
    variables = (getattr(node, "variable", None) for node in nodes)
    return (variable for variable in variables if isinstance(variable, Tensor))


def footprint(
    tensors: Iterable[Tensor],
    others: Iterable[Tensor] = (),
    nodes: Sequence[Any] | None = None,
) -> int:
    """Return the memory in bytes that tensors keep alive, each with the graph that computed it.

    Leaves of graphs, which are parameters, and ``others``, which are in memory anyway, do not
    count. Not seen are the inputs of checkpoints, and what the user's own functions keep inside of
    objects. The nodes of the graphs are looked for unless they are given.
    """
    sizes: dict[int, int] = {}
    with without_torch_function():  # an evaluation watches what the model calls
        tensors = list(tensors)
        nodes = graph_nodes(*tensors) if nodes is None else nodes
        for node in nodes:
            for saved in saved_values(node):
                # hooks on saved tensors, as of checkpoints, may have saved something else
                held = getattr(saved, "data", None)
                if isinstance(held, Tensor):
                    sizes |= _storages(held)
            if in_python := getattr(node, "__dict__", None):
                for tensor in leaves(in_python):
                    sizes |= _storages(tensor)
        for variable in leaf_variables(nodes):
            for address in _storages(variable):
                sizes.pop(address, None)
        for tensor in tensors:
            sizes |= _storages(tensor)
        for tensor in others:
            for address in _storages(tensor):
                sizes.pop(address, None)
    return sum(sizes.values())


def addresses(tensor: Any) -> set[int]:
    """Return the addresses of a tensor's memory."""
    return set(_storages(tensor)) if isinstance(tensor, Tensor) else set()


def saved_memory(node: Any) -> set[int]:
    """Return the addresses of the memory of the tensors that a node has saved."""
    return {
        address
        for value in saved_values(node)
        for address in addresses(getattr(value, "data", None))
    }


def _storages(tensor: Tensor) -> dict[int, int]:
    """Return the bytes of a tensor's storages, by address."""
    with suppress(RuntimeError):  # a wrapper that does not show what it wraps
        storages = [part.untyped_storage() for part in strided_tensors(tensor)]
        return {storage.data_ptr(): storage.nbytes() for storage in storages}
    return {}
