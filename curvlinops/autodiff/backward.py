"""Backward passes through a model on one batch, with several columns at once."""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from math import ceil
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from curvlinops.autodiff.evaluation import Evaluation
from curvlinops.linear_operator.space import Columns, ParameterSpace, add
from curvlinops.support.autograd_graph import footprint
from curvlinops.support.memory import lacks_memory
from curvlinops.support.torch_internals import run_backward, without_torch_function
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")

#: A batched pass needs about the graph's memory for each column. Several are faster while this
#: fits the caches, about, or while a pass is too short to occupy the device; see the benchmarks.
_BUDGETS = {"cpu": 64 * 2**20, "cuda": 512 * 2**20}

#: ``apply(V, out) -> terms``: adds the product with the columns ``V`` (some or all parameters; the
#: others count as zero), summed over the batch's terms, to the columns ``out`` (the parameters that
#: are wanted), in place. Returns the batch's share of the normalization.
Apply = Callable[[Columns, Columns], Tensor]

#: A function of the model's output that also returns the batch's share of the normalization.
Head = Callable[[Tensor], tuple[Any, Tensor]]

#: The start of a backward pass: a tensor and its cotangent; ``None`` stands for the number one.
Seed = tuple[Tensor, Tensor | None]

Tensors = Mapping[str, Tensor]

#: The key of an input of a graph.
Name = TypeVar("Name")


class Recording(NamedTuple):
    """A forward pass that was recorded.

    Attributes:
        evaluation: The evaluation of forward and backward passes.
        leaves: The tensors that replaced the parameters. They require gradients.
        output: The output, with its graph.
    """

    evaluation: Evaluation
    leaves: dict[str, Tensor]
    output: Tensor


class Problem(Protocol):
    """A model on one batch, as a function of its parameters (see ``BatchProblem``)."""

    space: ParameterSpace
    batch: Any
    num_samples: int
    can_substitute: bool
    is_first: bool
    facts: Any

    def on(self, batch: Any) -> "Problem": ...
    def leaves(self) -> dict[str, Tensor]: ...
    def constants(self) -> dict[str, Tensor]: ...
    def evaluation(self, values: Tensors, differentiation: str) -> Evaluation: ...
    def output(self, evaluation: Evaluation) -> Tensor: ...
    def check_memory(self, output: Tensor, leaves: Tensors) -> None: ...
    def recording(self, differentiation: str) -> AbstractContextManager[Recording]: ...


def evaluate(problem: Problem) -> Tensor:
    """Return the output, without its graph."""
    if problem.is_first:
        with problem.recording("once") as recording:
            return recording.output.detach()
    evaluation = problem.evaluation(problem.constants(), "once")
    with evaluation.active():
        return problem.output(evaluation).detach()


def gradient(problem: Problem, head: Head) -> tuple[Tensor, Columns, Tensor]:
    """Return a scalar function of the output, its gradient (one column), and the terms."""
    with problem.recording("once") as (_, leaves, output):
        loss, terms = head(output)
        grads = vjp({"": loss}, {"": None}, leaves, retain=not problem.can_substitute)
    out = problem.space.zeros(1)
    add(out, 0, grads)
    return loss.detach(), out, terms


def transposed_jacobian(problem: Problem, chunk_size: int | None = None) -> tuple[Callable, Tensor]:
    """Return ``apply(U, out)``, which adds ``J^T U``, and the output.

    U has the shape ``[K, *output]``, or fewer axes; like an ``Apply``, the function works in place.

    Args:
        problem: The model on a batch.
        chunk_size: The number of columns in one backward pass.
    """
    with problem.recording("once") as recording:
        evaluation, leaves, output = recording

    def product(u: Columns, inputs: Tensors) -> Columns:
        return vjp_columns({"": output}, u, inputs)

    chunks = in_chunks(product, chunk_size)

    def apply(U: Tensor, out: Columns) -> None:
        inputs = {name: leaves[name] for name in out}
        cotangents = {"": U.reshape(U.shape[0], *output.shape)}
        with evaluation.active():
            for rows, part in chunks(cotangents, {"": output.dtype}, inputs):
                add(out, rows, part)

    return apply, output.detach()


def vjp(
    outputs: Mapping[str, Tensor | None],
    cotangents: Mapping[str, Tensor | None],
    inputs: Mapping[Name, Tensor | GradientEdge],
    create_graph: bool = False,
    retain: bool = True,
) -> dict[Name, Tensor | None]:
    """Return the gradient of ``<outputs, cotangents>`` w.r.t. each input, ``None`` where zero."""
    with without_torch_function():  # an evaluation watches what the model calls
        names = [
            name
            for name in cotangents
            # an output that does not depend on anything has derivative zero
            if outputs[name] is not None and outputs[name].requires_grad
        ]
        if not names or not inputs:
            return dict.fromkeys(inputs)
        weights = {
            name: torch.ones_like(outputs[name]) if cotangents[name] is None else cotangents[name]
            for name in names
        }
        weights = {name: weight.to(outputs[name].dtype) for name, weight in weights.items()}
    # torch.autograd.grad would suspend the evaluation's rewriting, in which checkpoints recompute
    grads = run_backward(
        tuple(outputs[name] for name in names),
        tuple(weights.values()),
        retain or create_graph,
        create_graph,
        tuple(inputs.values()),
        allow_unreachable=True,
        accumulate_grad=False,
    )
    return dict(zip(inputs, grads, strict=True))


def batched_vjp(
    outputs: Mapping[str, Tensor | None],
    cotangents: Columns,
    inputs: Mapping[Name, Tensor | GradientEdge],
    retain: bool = True,
) -> dict[Name, Tensor | None]:
    """Multiply several cotangents with the transposed Jacobian of outputs by inputs.

    Args:
        outputs: Each has a cotangent; see ``vjp``.
        cotangents: ``[K, *output]``.
        inputs: Tensors of the graph, or places in it.
        retain: Whether the graph is used again.

    Returns:
        ``[K, *input]`` for each input; ``None`` where no output depends on it.
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
    outputs: Mapping[str, Tensor | None],
    cotangents: Columns,
    inputs: Tensors,
    retain: bool = True,
) -> Columns:
    """Multiply like ``batched_vjp``, with zeros where no output depends on an input."""
    grads = batched_vjp(outputs, cotangents, inputs, retain)
    missing = [name for name, grad in grads.items() if grad is None]
    num_columns = len(next(iter(cotangents.values()))) if missing else 0
    zeros = {name: inputs[name].new_zeros(num_columns, *inputs[name].shape) for name in missing}
    return grads | zeros


# --- several columns at once


def room_for(num_columns: int, graph_bytes: int, device: torch.device) -> bool:
    """Return whether a pass with so many columns is still fast, given the graph's memory."""
    return num_columns * graph_bytes <= _BUDGETS.get(device.type, _BUDGETS["cuda"])


def in_chunks(
    product: Callable[..., Columns], size: int | None
) -> Callable[..., Iterator[tuple[slice, Columns]]]:
    """Return a function that applies a product to any number of columns.

    Args:
        product: Takes and returns columns. It computes several by ``vmap``. Where an operation does
            not support that, columns are taken one by one.
        size: The number of columns at once. It is halved while the memory is too small. Default: as
            many as have ``_BUDGETS`` bytes with the tensors in the product's closure.

    Returns:
        A function of columns, of the dtypes to cast them to, and of further arguments of the
        product. It yields slices of the columns, each with its product.
    """

    def chunks(
        V: Columns, dtypes: Mapping[str, torch.dtype], *args: Any
    ) -> Iterator[tuple[slice, Columns]]:
        nonlocal size
        some = next(iter(V.values()))
        num_columns, start = some.shape[0], 0
        if num_columns > 1 and size is None:
            budget = _BUDGETS.get(some.device.type, _BUDGETS["cuda"])
            size = max(budget // max(footprint(product), 1), 1)
        failure = None
        while start < num_columns:
            rest = 1 if failure else num_columns - start
            # in equal parts
            rows = slice(start, start + (1 if rest == 1 else ceil(rest / ceil(rest / size))))
            try:
                part = product(_take(V, rows, dtypes), *args)
            except Exception as error:  # a user's own backward may raise anything
                if rows.stop == start + 1:
                    raise
                if lacks_memory(error):
                    size = (rows.stop - start) // 2
                    _LOGGER.warning("No memory for so many columns at once, now %d.", size)
                else:
                    failure = first_line(error)
                continue
            if failure:  # one column works, several by vmap do not
                _LOGGER.info("Columns are multiplied one by one: %s", failure)
                size, failure = 1, None
            yield rows, part
            start = rows.stop

    return chunks


def single_columns(V: Columns, dtypes: Mapping[str, torch.dtype]) -> Iterator[dict[str, Tensor]]:
    """Yield the columns one by one, cast to ``dtypes``, without their column axis."""
    for index in range(next(iter(V.values())).shape[0]):
        column = _take(V, slice(index, index + 1), dtypes)
        yield {name: value[0] for name, value in column.items()}


def _take(V: Columns, rows: slice, dtypes: Mapping[str, torch.dtype]) -> Columns:
    with without_torch_function():  # an evaluation watches what the model calls
        # contiguous: the columns of a matrix are far apart in its memory
        return {name: column[rows].to(dtypes[name]).contiguous() for name, column in V.items()}
