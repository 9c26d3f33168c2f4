"""Proves, from the graph alone, which entries of tensors belong to which sample.

Most operations treat samples apart: whatever the numbers are, sample n of the output depends on
sample n of an input, along an axis that shapes and options tell. From the model's output, whose
first axis numbers the samples, that axis is followed back to the outputs of layers. Where it gets
lost, be it for an operation that is not known, ``detection`` finds out what the numbers say.
"""

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.detection import unrelated
from curvlinops.layers.layout import Along, regular
from curvlinops.layers.moves import Move, operation, source_axis
from curvlinops.layers.uses import Use
from curvlinops.support.torch_internals import input_metadata

#: Operations that only change the shape.
_RESHAPES = frozenset({"Alias", "ReshapeAlias", "Squeeze", "UnsafeView", "Unsqueeze", "View"})


def samples_by_edge(output: Tensor, nodes: Iterable[Any]) -> dict[tuple[Any, int], int | None]:
    """Return where the samples lie in all tensors of a graph.

    Args:
        output: The graph's output, whose first axis numbers N > 1 samples.
        nodes: All nodes of the graph, which have no hooks.

    Returns:
        For each node and number of one of its outputs, the distance s between neighboring samples
        in the flattened tensor, whose entry i belongs to sample ``i // s % N``: neither this entry
        nor its gradient depends on other samples. ``None`` where that is not proven.
    """
    num_samples, waiting = len(output), Counter[Any]()
    if output.grad_fn is None:
        return {}
    for node in nodes:
        waiting.update(source for source, _ in node.next_functions if source is not None)
    found: dict[tuple[Any, int], int | None] = {
        (output.grad_fn, output.output_nr): prod(output.shape[1:])
    }
    ready, outputs = [output.grad_fn], {output.grad_fn: {output.output_nr}}
    while ready:
        node = ready.pop()
        for place, (source, number) in enumerate(node.next_functions):
            if source is None:
                continue
            shape = tuple(input_metadata(source, number).shape)
            for own in outputs[node]:
                step = _step(node, place, own, found[node, own], shape, num_samples)
                # a tensor may be used in different ways
                if found.setdefault((source, number), step) != step:
                    found[source, number] = None
            outputs.setdefault(source, set()).add(number)
            waiting[source] -= 1
            if not waiting[source]:
                ready.append(source)
    return found


def _step(
    node: Any, place: int, own: int, step: int | None, shape: tuple[int, ...], num_samples: int
) -> int | None:
    """Return the distance between samples in an input of a node, given that in an output."""
    if step is None:
        return None
    out = tuple(input_metadata(node, own).shape)
    if operation(node) in _RESHAPES:
        return step if prod(out) == prod(shape) else None
    found = axis_of(out, step, num_samples)
    if found is None:
        return None
    axis, inner = found
    source = source_axis(Move(node, place, axis, out, shape))
    return None if source is None else inner * prod(shape[source + 1 :])


def axis_of(shape: tuple[int, ...], step: int, num_samples: int) -> tuple[int, int] | None:
    """Return the axis that numbers the samples, and the distance between these along it.

    The axis may number other things as well, ``[outer * N * inner]``.

    Args:
        shape: A tensor's shape.
        step: The distance between neighboring samples in the flattened tensor.
        num_samples: N.
    """
    behind = 1
    for axis in reversed(range(len(shape))):
        if step < behind * shape[axis]:
            inner, rest = divmod(step, behind)
            fits = inner and not rest and shape[axis] % (inner * num_samples) == 0
            return (axis, inner) if fits else None
        behind *= shape[axis]
    return None


def layout_of(
    use: Use, shape: tuple[int, ...], step: int, like: Tensor, num_samples: int
) -> Along | None:
    """Return which of a use's rows belong to which sample, if they are in a regular order.

    Args:
        use: The use.
        shape: The shape of the call's output.
        step: The distance between neighboring samples in it, flattened.
        like: Where the output lies.
        num_samples: N.
    """
    found = axis_of(shape, step, num_samples)
    if found is None:
        return None
    axis, inner = found
    # whatever the rows are combined from, other samples show
    own = unrelated(num_samples, 0, like.new_empty(0, dtype=torch.float64))
    numbers = own.repeat_interleave(inner).repeat(shape[axis] // (inner * num_samples))
    numbers = numbers.reshape(-1, *(1,) * (len(shape) - axis - 1)).expand(1, *shape)
    num_lead = len(use.lead)
    rows = (use.order or use.split)(numbers)[0]
    first = rows[(..., *(slice(1),) * (rows.ndim - num_lead))]
    if any(rows.stride()[num_lead:]) and not bool((rows == first).all()):
        return None
    for layout in regular(use.lead, num_samples):
        sorted_rows = layout.by_sample(first, 0, num_lead, num_samples)
        if bool((sorted_rows.flatten(1) == own[:, None]).all()):
            return layout
    return None
