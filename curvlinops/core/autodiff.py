"""Backward passes over a model bound to a batch, and what products are made of."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._vmap_internals import _vmap
from torch.autograd.graph import _engine_run_backward

from curvlinops.core.scope import Scope
from curvlinops.core.space import Columns, ParameterSpace

#: ``apply(V, names) -> (product, terms)``: the product of the columns ``V`` (some or all
#: parameters; the others count as zero) restricted to the parameters ``names``, summed over the
#: batch's terms, and the batch's share of the normalization.
Apply = Callable[[Columns, Iterable[str]], tuple[Columns, Tensor]]

#: A function of the model's output that also returns the batch's share of the normalization.
Head = Callable[[Tensor], tuple[Any, Tensor]]

Tensors = Mapping[str, Tensor]


class BoundModel(Protocol):
    """A model on one batch, as a function of its parameters."""

    space: ParameterSpace

    def leaves(self) -> dict[str, Tensor]:
        """Return tensors with the parameters' values, which require gradients."""

    def scope(self, values: Tensors, purpose: str) -> Scope:
        """Return the scope in which the parameters have these values."""

    def output(self, scope: Scope) -> Tensor:
        """Evaluate the model inside an active scope."""


def graph_nodes(*outputs: Tensor) -> Iterator[Any]:
    """Yield all nodes of the graph that computed some tensors."""
    stack, seen = [output.grad_fn for output in outputs], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            stack.extend(next_node for next_node, _ in node.next_functions)


def gradient(bound: BoundModel, head: Head) -> tuple[Tensor, Columns, Tensor]:
    """Return a scalar function of the output, its gradient (one column), and the terms."""
    leaves = bound.leaves()
    scope = bound.scope(leaves, "gradient")
    with scope.active():
        loss, terms = head(bound.output(scope))
        grads = pull({"": loss}, {"": None}, leaves, retain=False)
    return loss.detach(), stack(bound.space, [grads], leaves), terms


def transposed_jacobian(bound: BoundModel) -> tuple[Callable, int]:
    """Return ``apply(U, names) -> J^T U`` for U ``[K, M]``, and M, the number of outputs."""
    leaves = bound.leaves()
    scope = bound.scope(leaves, "gradient")
    with scope.active():
        output = bound.output(scope)

    def apply(U: Tensor, names: Iterable[str]) -> Columns:
        inputs = {name: leaves[name] for name in names}
        rows = U.reshape(-1, *output.shape).to(output.dtype)
        with scope.active():
            grads = [pull({"": output}, {"": row}, inputs) for row in rows]
        return stack(bound.space, grads, inputs)

    return apply, output.numel()


def pull(
    outputs: Mapping[str, Tensor | None],
    cotangents: Mapping[str, Tensor | None],
    inputs: Tensors,
    create_graph: bool = False,
    retain: bool = True,
    batched: bool = False,
) -> dict[str, Tensor | None]:
    """Return the gradient of ``<outputs, cotangents>`` w.r.t. each input, ``None`` where zero."""
    names = [
        name
        for name in cotangents
        # an output that does not depend on anything has derivative zero
        if outputs[name] is not None and outputs[name].requires_grad
    ]
    if not names or not inputs:
        return dict.fromkeys(inputs)
    leaves = tuple(inputs.values())

    def run(*weights: Tensor) -> tuple[Tensor | None, ...]:
        # torch.autograd.grad would suspend the scope's rewriting, in which checkpoints recompute
        return _engine_run_backward(
            tuple(outputs[name] for name in names),
            weights,
            retain or create_graph,
            create_graph,
            leaves,
            allow_unreachable=True,
            accumulate_grad=False,
        )

    weights = [
        torch.ones_like(outputs[name]) if cotangents[name] is None else cotangents[name]
        for name in names
    ]
    call = _vmap(run, 0, 0, allow_none_pass_through=True) if batched else run
    return dict(zip(inputs, call(*weights), strict=True))


def pull_columns(
    outputs: Mapping[str, Tensor | None], cotangents: Columns, inputs: Tensors
) -> Columns:
    """Do the same for several cotangents ``[K, *output]``, to get ``[K, *input]``."""
    num_columns = next(iter(cotangents.values())).shape[0]
    if num_columns == 1:
        single = {name: cotangent[0] for name, cotangent in cotangents.items()}
        grads = pull(outputs, single, inputs)
        grads = {n: None if g is None else g.unsqueeze(0) for n, g in grads.items()}
    else:
        grads = pull(outputs, cotangents, inputs, batched=True)
    return {
        name: inputs[name].new_zeros(num_columns, *inputs[name].shape)
        if grad is None
        else grad.detach()
        for name, grad in grads.items()
    }


def split_columns(V: Columns, leaves: Tensors, size: int) -> Iterator[Columns]:
    """Yield ``size`` columns after the other, each entry in its parameter's dtype."""
    num_columns = next(iter(V.values())).shape[0]
    for start in range(0, num_columns, size):
        yield {
            name: column[start : start + size].to(leaves[name].dtype) for name, column in V.items()
        }


def single_columns(V: Columns, leaves: Tensors) -> Iterator[Tensors]:
    """Yield the columns one by one, without their column axis."""
    for chunk in split_columns(V, leaves, size=1):
        yield {name: column[0] for name, column in chunk.items()}


def stack(
    space: ParameterSpace, products: list[Mapping[str, Tensor | None]], names: Iterable[str]
) -> Columns:
    """Stack products of single vectors, in the dtype of ``space``; ``None`` is zero."""
    singles = [
        {
            name: space.zeros(1, [name])[name]
            if product[name] is None
            else product[name].detach().to(space.dtype).unsqueeze(0)
            for name in names
        }
        for product in products
    ]
    return concatenate(singles)


def concatenate(parts: list[Columns]) -> Columns:
    """Put columns side by side; a single part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def add(total: Columns, part: Columns) -> None:
    """Add columns to a running total, which starts out empty.

    Not in place: autograd may return one tensor as the gradient of several parameters.
    """
    for name, column in part.items():
        total[name] = total[name] + column if name in total else column
