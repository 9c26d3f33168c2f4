"""Backward passes through graphs, with several columns at once."""

import logging
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import ceil
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge
from torch.utils.checkpoint import CheckpointError

from curvlinops.linear_operator.space import Columns
from curvlinops.support.autograd_graph import Output, footprint
from curvlinops.support.devices import bytes_of_pass
from curvlinops.support.refusals import is_of_processes, is_refusal, lacks_memory
from curvlinops.support.torch_internals import (
    input_metadata,
    run_backward,
    without_torch_function,
)
from curvlinops.support.warnings import first_line
from curvlinops.team.scattering import is_stand_in, stand_in
from curvlinops.team.shards import WHOLE, Shards

_LOGGER = logging.getLogger("curvlinops")

Tensors = Mapping[str, Tensor]

#: The key of an input of a graph.
Name = TypeVar("Name")


def vjp(
    outputs: Mapping[str, Output | None],
    cotangents: Mapping[str, Tensor | None],
    inputs: Mapping[Name, Tensor | GradientEdge],
    create_graph: bool = False,
    retain: bool = True,
) -> dict[Name, Tensor | None]:
    """Return the gradient of ``<outputs, cotangents>`` w.r.t. each input, ``None`` where zero."""
    with without_torch_function():  # an evaluation watches what the model calls
        starts = {
            name: outputs[name]
            for name in cotangents
            # an output that does not depend on anything has derivative zero
            if isinstance(outputs[name], GradientEdge)
            or getattr(outputs[name], "requires_grad", False)
        }
        if not starts or not inputs:
            return dict.fromkeys(inputs)
        weights = [_weight(start, cotangents[name]) for name, start in starts.items()]
    ends = tuple(inputs.values())
    grads = _run(tuple(starts.values()), tuple(weights), ends, retain or create_graph, create_graph)
    return dict(zip(inputs, grads, strict=True))


def _weight(output: Output, cotangent: Tensor | None) -> Tensor:
    """Return the cotangent with which a backward pass starts; by default ones."""
    if cotangent is None:
        return output.new_ones(output.shape)
    if isinstance(output, GradientEdge):
        return canonical(cotangent)  # autograd casts it
    if is_stand_in(output):  # then the cotangent only stands for a vector
        return cotangent
    return canonical(cotangent.to(output.dtype))


#: What PyTorch says of a second pass through layers under selective activation checkpointing.
_SELECTIVE = "under selective activation checkpoint"


def _run(
    starts: tuple[Any, ...],
    cotangents: tuple[Tensor, ...],
    inputs: tuple[Any, ...],
    retain: bool,
    create_graph: bool = False,
) -> tuple[Tensor | None, ...]:
    """Run a backward pass; ``torch.autograd.grad`` would suspend the evaluation's rewriting.

    In that, checkpoints recompute the forward pass.
    """
    try:
        return run_backward(
            starts,
            cotangents,
            retain,
            create_graph,
            inputs,
            allow_unreachable=True,
            accumulate_grad=False,
        )
    except RuntimeError as error:
        raise_selective(error)
        raise


def raise_selective(error: Exception) -> None:
    """Raise an error with a remedy if PyTorch refuses to compute checkpointed layers again."""
    # older versions of PyTorch say that a checkpoint computes other values the second time
    if _SELECTIVE in str(error) or isinstance(error, CheckpointError):
        raise NoDerivativeError(
            "Layers under selective activation checkpointing, and those whose checkpoint computes "
            "other values the second time, can be differentiated once, but this needs several "
            "backward passes, or the tensors that they save. Take plain activation checkpointing "
            "for them, torch.utils.checkpoint.checkpoint(..., use_reentrant=False) "
            "without context_fn, or none."
        ) from error


def saved(node: Any, name: str) -> Any:
    """Return what a node of a graph has saved, which checkpoints compute again."""
    try:
        return getattr(node, name)
    except RuntimeError as error:
        raise_selective(error)
        raise


def edge_vjp(edge: GradientEdge, cotangents: Tensor, target: GradientEdge) -> Tensor:
    """Return what passes an edge nearer to the leaves, ``[K, *target]``, given ``[K, *]``.

    The graph is kept.
    """

    def product(cotangent: Tensor) -> Tensor:
        with without_torch_function():  # an evaluation watches what the model calls
            cotangent = canonical(cotangent)
        found = _run((edge,), (cotangent,), (target,), retain=True)[0]
        with without_torch_function():
            if found is None:
                like = input_metadata(target.node, target.output_nr)
                found = cotangent.new_zeros(tuple(like.shape), dtype=like.dtype)
            return found.detach()

    if len(cotangents) == 1:
        return product(cotangents[0]).unsqueeze(0)
    return torch.func.vmap(product)(cotangents)


def canonical(cotangent: Tensor) -> Tensor:
    """Return a cotangent in contiguous memory, with the strides that its shape has there.

    The stride of an axis of length one is arbitrary, but ``native_batch_norm_backward`` reads it.
    """
    is_canonical = cotangent.is_contiguous() and 1 not in cotangent.shape
    return cotangent if is_canonical else cotangent.reshape(-1).reshape(cotangent.shape)


def batched_vjp(
    outputs: Mapping[str, Output | None],
    cotangents: Columns,
    inputs: Mapping[Name, Tensor | GradientEdge],
    retain: bool = True,
) -> dict[Name, Tensor | None]:
    """Multiply cotangents ``[K, *output]`` with the transposed Jacobian of outputs by inputs.

    Inputs are tensors of the graph, or places in it. Each has ``[K, *input]``, ``None`` where no
    output depends on it. See ``vjp``.
    """
    with without_torch_function():  # an evaluation watches what the model calls
        single = len(next(iter(cotangents.values()))) == 1
        columns = {name: cotangent[0] for name, cotangent in cotangents.items()} if single else {}
    if single:
        grads = vjp(outputs, columns, inputs, retain=retain)
        with without_torch_function():
            return {
                name: None if grad is None else grad.detach().unsqueeze(0)
                for name, grad in grads.items()
            }

    def product(columns: Tensors) -> dict[Name, Tensor]:
        grads = vjp(outputs, columns, inputs, retain=retain)
        return {name: grad.detach() for name, grad in grads.items() if grad is not None}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
        grads = torch.func.vmap(product)(cotangents)
    return {name: grads.get(name) for name in inputs}


def vjp_columns(
    outputs: Mapping[str, Output | None],
    cotangents: Columns,
    inputs: Tensors,
    retain: bool = True,
) -> Columns:
    """Multiply like ``batched_vjp``, with zeros where no output depends on an input."""
    grads = batched_vjp(outputs, cotangents, inputs, retain)
    missing = [name for name, grad in grads.items() if grad is None]
    num_columns = len(next(iter(cotangents.values()))) if missing else 0
    zeros = {name: _zeros(inputs[name], num_columns) for name in missing}
    return grads | zeros


def _zeros(like: Tensor, num_columns: int) -> Tensor:
    shape = num_columns, *like.shape
    return stand_in(like, shape) if is_stand_in(like) else like.new_zeros(shape)


# --- missing derivatives


class NoDerivativeError(NotImplementedError):
    """PyTorch lacks a derivative of the model, or the loss, that a product needs."""


@contextmanager
def explained(
    functions: Collection[str], ordinary: Callable[[], Any] = lambda: None
) -> Iterator[None]:
    """Raise a NoDerivativeError for errors of PyTorch that the ordinary pass does not raise.

    The backward pass in this context is differentiated, or differentiates another; ``functions``
    are the names of custom functions that may be the cause.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, NoDerivativeError) or lacks_memory(error) or is_of_processes(error):
            raise
        message = str(error)
        try:
            ordinary()
        except RuntimeError as other:  # another one, if the graph was used up
            if str(other) == message:
                raise
        hints = []
        if "attention" in message:
            hints.append(
                "call torch.nn.functional.scaled_dot_product_attention (of which operators compute "
                "all derivatives) instead of another fused kernel; in transformers, load the model "
                "with attn_implementation='eager' or 'sdpa'"
            )
        if "once_differentiable" in message:
            hints.append("make the backward of each custom autograd.Function differentiable")
        hints.append("replace the operation by one composed of differentiable operations")
        which = ", ".join(sorted(functions))
        which = f" (perhaps in custom autograd.Function {which})" if which else ""
        raise NoDerivativeError(
            "PyTorch lacks a derivative of this model that the product needs: "
            f"{first_line(error).rstrip('.')}{which}. What helps: {', or '.join(hints)}."
        ) from error


# --- several columns at once


def in_chunks(
    product: Callable[..., Columns],
    size: int | None,
    tensors: tuple[Output, ...] = (),
    shards: Shards = WHOLE,
) -> Callable[..., Iterator[tuple[slice, Columns]]]:
    """Return a function that applies a product to any number of columns, by ``vmap``.

    It yields slices of the columns, each with its product; further arguments are those of the
    product. By default as many columns are taken at once as have ``bytes_of_pass``, if each needs
    itself, and what ``tensors``, which the product keeps, and their graphs do. The number is halved
    while the memory is too small. Where an operation does not support ``vmap``, columns are taken
    one by one.
    """

    def chunks(V: Columns, *args: Any) -> Iterator[tuple[slice, Columns]]:
        nonlocal size
        first = next(iter(V.values()))
        num_columns, start = len(first), 0
        if num_columns > 1 and size is None:
            each = footprint(tensors) + sum(column[0].nbytes for column in V.values())
            size = max(bytes_of_pass(first.device) // max(each, 1), 1)
        failure = None
        while start < num_columns:
            rest = 1 if failure else num_columns - start
            # in equal parts
            some = slice(start, start + (1 if rest == 1 else ceil(rest / ceil(rest / size))))
            shards.at_columns(some)
            try:
                part = product(_take(V, some, shards), *args)
            except Exception as error:  # a user's own backward may raise anything
                if some.stop == start + 1:
                    raise
                if shards.has_added:
                    raise RuntimeError(
                        "The product of several vectors failed, after a part of it was added to "
                        f"the sums of other processes: {first_line(error)}. Pass chunk_size=1."
                    ) from error
                if is_refusal(error):
                    failure = first_line(error)
                elif lacks_memory(error):
                    size = (some.stop - start) // 2
                    _LOGGER.warning("No memory for so many columns at once, now %d.", size)
                else:
                    raise
                continue
            if failure:  # one column works, several by vmap do not
                _LOGGER.info("Columns are multiplied one by one: %s", failure)
                size, failure = 1, None
            yield some, shards.unsummed(part)
            start = some.stop

    return chunks


def _take(V: Columns, some: slice, shards: Shards) -> Columns:
    with without_torch_function():  # an evaluation watches what the model calls
        chosen = {name: column[some] for name, column in V.items()}
        # contiguous, each: the entries of a matrix's columns are far apart in its memory
        return {
            name: shards.cotangent(name, len(x)) if name in shards.params else _near(x)
            for name, x in chosen.items()
        }


def _near(x: Tensor) -> Tensor:
    return x if x[0].is_contiguous() else x.contiguous()
