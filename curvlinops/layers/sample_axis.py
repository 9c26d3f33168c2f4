"""Proves from autograd's graph which axis of each node's output numbers the samples.

A node's output has an axis of samples if each of its entries influences the outputs of one sample
only, the one whose number is its place on that axis. The model's output has it on axis 0. From
there it is followed back, node by node: a rule for each kind of node says where the samples are in
an input, if they are at a given place in the output. Nothing else is believed: what no rule proves
is unknown, and so is everything that reaches the output through it.

The rules hold for the numbers of the batch whose graph it is. Most need shapes and saved arguments
alone. Rows that are read or written at indices are followed by these indices. Assignments to parts
of a tensor do not say which parts, nor do functions of the user: their nodes are called with
gradients that differ between the samples, and must return gradients that differ likewise.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Size, Tensor
from torch.autograd.graph import GradientEdge

from curvlinops.support.torch_internals import (
    gradients_of_inputs,
    input_metadata,
    is_users_function,
    saved,
    saved_axes,
    shape_of_output,
)

#: A node of autograd's graph.
Node: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]


class SampleAxis(NamedTuple):
    """The axis that numbers the samples: its length is ``before * N * after``.

    The entry at ``i`` belongs to the sample ``(i // after) % N``.

    Attributes:
        axis: The axis.
        before: Number of positions that are a slower index than the sample.
        after: Number of positions that are a faster index than the sample.
    """

    axis: int
    before: int
    after: int


class Constant(Enum):
    """What a tensor is that has no axis of samples."""

    #: It is broadcast to the samples, or repeated for each.
    CONSTANT = auto()
    #: Samples read it, as a matrix that multiplies them, or as a table of rows. These may also be
    #: rows of samples in an order that is not known.
    TABLE = auto()


CONSTANT: Final = Constant.CONSTANT
TABLE: Final = Constant.TABLE


class _Assigned(NamedTuple):
    """An axis along which entries belong to samples in any order.

    Attributes:
        axis: The axis.
        samples: The sample of each entry; -1 for entries that influence no output.
        N: The number of samples.
    """

    axis: int
    samples: Tensor
    N: int


class _OfOneSample(NamedTuple):
    """The whole tensor belongs to a sample, as in a loop over samples."""

    sample: int
    N: int


#: Where the samples are in a tensor.
Place: TypeAlias = SampleAxis | _Assigned
#: What a rule says of an input. ``None``: nothing. ``False``: it does not influence this output.
Claim: TypeAlias = Place | _OfOneSample | Constant | None
RuleClaim: TypeAlias = Claim | Literal[False]
#: A rule for a node: it gets the node, the place of the samples in an output, the output's shape,
#: and the position and shape of an input.
Rule: TypeAlias = Callable[[Node, Place, Shape, int, Shape], RuleClaim]


def sample_axes(
    output_edge: GradientEdge, output_shape: Shape | Size, num_samples: int, order: Sequence[Node]
) -> dict[tuple[Node, int], SampleAxis | Constant]:
    """Find the axis of samples in the outputs of the nodes of a graph.

    Args:
        output_edge: The model's output, whose axis 0 numbers the samples. It may also have the
            length ``N * S``, with the samples as the slower index.
        output_shape: Its shape.
        num_samples: N, at least 2.
        order: All nodes of the graph, inputs before those who use them. Only nodes on the way from
            the leaves to the output are looked at.

    Returns:
        A dictionary from a node and the number of one of its outputs to the axis of the samples, or
        to ``CONSTANT`` or ``TABLE``. What is not proved is absent, and so are leaves.
    """
    root, length = output_edge.node, output_shape[0] if output_shape else 0
    if num_samples < 2 or length == 0 or length % num_samples:
        return {}
    found: dict[Node, dict[int, Claim]] = {}
    found[root] = {output_edge.output_nr: SampleAxis(0, 1, length // num_samples)}
    shapes: dict[tuple[Node, int], Shape] = {}

    def shape_of(node: Node, number: int) -> Shape:
        key = node, number
        if key not in shapes:
            shapes[key] = shape_of_output(node, number)
        return shapes[key]

    for node in reversed(order):
        outputs = found.get(node)
        sources = node.next_functions
        if outputs is None or not sources:
            continue
        name = node.name()
        for number, place in outputs.items():
            if isinstance(place, _Assigned):
                place = outputs[number] = _regular(place)
            rule: Callable[..., RuleClaim] | None = None
            if isinstance(place, _OfOneSample):
                rule = partial(_of_one_sample, name, number)
            elif place is not None and not isinstance(place, Constant):
                rule = _rule_of(node, name, number)
            shape = shape_of(node, number) if rule else ()
            for position, (source, source_number) in enumerate(sources):
                if source is None or not source.next_functions:
                    continue
                claim: RuleClaim = place if isinstance(place, Constant) else None
                if rule is not None:
                    try:
                        source_shape = shape_of(source, source_number)
                        claim = rule(node, place, shape, position, source_shape)
                    except (AttributeError, RuntimeError):
                        pass  # another version of PyTorch, or a saved tensor is no longer there
                if claim is False:
                    continue
                claims = found.setdefault(source, {})
                if source_number in claims:
                    claim = _merged(claims[source_number], claim)
                claims[source_number] = claim
    return {
        (node, number): claim
        for node, claims in found.items()
        for number, claim in claims.items()
        if isinstance(claim, SampleAxis | Constant)
    }


def _number_of_samples(place: Place, shape: Shape) -> int:
    if isinstance(place, _Assigned):
        return place.N
    return shape[place.axis] // (place.before * place.after)


def _moved(place: Place, axis: int) -> Place:
    """The same place along another axis."""
    return place if axis == place.axis else place._replace(axis=axis)


def _samples_of(place: Place, shape: Shape) -> Tensor:
    """Return the sample of each entry along the axis of the samples, on the CPU."""
    if isinstance(place, _Assigned):
        return place.samples
    N = _number_of_samples(place, shape)
    return torch.arange(shape[place.axis], device="cpu") // place.after % N


def _only(samples: Tensor, N: int) -> _OfOneSample | None:
    """Return the sample to which all entries belong that influence an output, if it is one."""
    used = samples[samples >= 0].tolist()
    return _OfOneSample(used[0], N) if len({*used}) == 1 else None


def _regular(place: _Assigned) -> Place | _OfOneSample:
    """Return the axis of samples that says the same, if there is one."""
    length = len(place.samples)
    for regular in _places((length,), place.N):
        samples = _samples_of(regular, (length,))
        if bool(((place.samples == samples) | (place.samples < 0)).all()):
            return _moved(regular, place.axis)
    return _only(place.samples, place.N) or place


def _places(shape: Shape, N: int) -> Iterator[SampleAxis]:
    """Where samples may be: slower or faster than all other positions along an axis."""
    for axis, length in enumerate(shape):
        if length and length % N == 0:
            for after in {length // N: None, 1: None}:
                yield SampleAxis(axis, length // (N * after), after)


def _merged(one: Claim, other: Claim) -> Claim:
    """Return what two who use a tensor say of it, if they agree."""
    if one is None or other is None:
        return None
    if isinstance(one, Constant | _OfOneSample):
        one, other = other, one
    if isinstance(other, Constant):
        if one is other:
            return one
        return TABLE if isinstance(one, Constant | _OfOneSample) else None
    if isinstance(one, SampleAxis) and isinstance(other, SampleAxis):
        return one if one == other else None
    if isinstance(one, _OfOneSample):  # both are
        return one if one == other else TABLE
    if isinstance(one, SampleAxis):
        one, other = other, one
    if not isinstance(one, _Assigned):
        return None
    if isinstance(other, _OfOneSample) or one.axis != other.axis:
        if isinstance(other, _Assigned):
            other = _only(other.samples, other.N)
        same = _only(one.samples, one.N)
        return same if same == other else None
    samples = _samples_of(other, (*[0] * one.axis, len(one.samples)))
    if not bool(((one.samples == samples) | (one.samples < 0) | (samples < 0)).all()):
        return None
    if isinstance(other, SampleAxis):
        return other
    return one._replace(samples=torch.maximum(one.samples, samples))


# --- elementwise operations


def _broadcast(place: Place, out: Shape, source: Shape) -> Claim:
    """Entries of the output depend on the entries at the same place in a broadcast input."""
    axis = place.axis - len(out) + len(source)
    if axis < 0 or source[axis] == 1:
        return CONSTANT
    return _moved(place, axis) if source[axis] == out[place.axis] else None


def _elementwise(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    return _broadcast(place, out, source)


def _along(name: str, node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Softmax, sums of what came before, flips, ...: only entries along some axes interact."""
    axes = saved_axes(node, name, len(out))
    if place.axis in axes or len(source) != len(out):
        return None
    return _broadcast(place, out, source)


def _trailing(number: int, node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Pooling, inverses, ...: entries of the first axes do not interact."""
    first = len(source) - number
    return place if place.axis < first and source[:first] == out[:first] else None


# --- views and reductions


def _view(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Both shapes have the same entries in the same order."""
    if prod(source) != prod(out) or prod(out) == 0:
        return None
    N, first = _number_of_samples(place, out), place.axis + 1
    if isinstance(place, _Assigned):
        samples = place.samples.repeat(prod(out[: place.axis]))
        for number in range(1, len(source) + 1):
            copies, rest = divmod(prod(source[:number]), len(samples))
            if copies and not rest:
                samples = samples.repeat_interleave(copies).reshape(source[:number])
                return _written(samples, source, N)
        return None
    inner = place.after * prod(out[first:])  # entries from one sample to the next
    for axis, length in reversed([*enumerate(source)]):
        after, rest = divmod(inner, prod(source[axis + 1 :]))
        if rest:
            return None
        if length % (N * after) == 0:
            return SampleAxis(axis, length // (N * after), after)
    return None


def _transpose(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    (first,), (second,) = (saved_axes(node, x, len(out)) for x in ("dim0", "dim1"))
    return _moved(place, {first: second, second: first}.get(place.axis, place.axis))


def _matrix_transpose(node: Node, place: Place, out: Shape, *_: Any) -> Claim:
    return _moved(place, len(out) - 1 - place.axis)


def _permute(node: Node, place: Place, out: Shape, *_: Any) -> Claim:
    return _moved(place, saved_axes(node, "dims", len(out))[place.axis])


def _without(axes: Iterable[int], place: Place, out: Shape, source: Shape) -> Claim:
    """The output has all axes of the input but some."""
    kept = [axis for axis in range(len(source)) if axis not in axes]
    if len(kept) != len(out) or source[kept[place.axis]] != out[place.axis]:
        return None
    return _moved(place, kept[place.axis])


def _with(axis: int, place: Place, out: Shape, source: Shape) -> Claim:
    """The output has one more axis than the input."""
    if place.axis == axis or len(source) != len(out) - 1:
        return None
    return _moved(place, place.axis - (place.axis > axis))


def _unsqueeze(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    return _with(*saved_axes(node, "dim", len(out)), place, out, source)


def _squeeze(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Axes of length one have no samples; which of several are left out does not matter."""
    axes: Sequence[int] = range(len(source))
    if hasattr(node, "_saved_dim"):
        axes = saved_axes(node, "dim", len(source))
    return _without([axis for axis in axes if source[axis] == 1], place, out, source)


def _select(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """One entry along an axis, or the list of them."""
    return _without(saved_axes(node, "dim", len(source)), place, out, source)


def _reduce(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """A sum or a maximum along some axes."""
    axes = saved_axes(node, "dim", len(source))
    if saved(node, "keepdim"):
        return place if len(source) == len(out) and place.axis not in axes else None
    return _without(axes, place, out, source)


def _diagonal(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """The diagonal comes last."""
    if place.axis == len(out) - 1:
        return None
    axes = {*saved_axes(node, "dim1", len(source)), *saved_axes(node, "dim2", len(source))}
    return _moved(place, [x for x in range(len(source)) if x not in axes][place.axis])


def _unfold(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Windows along an axis; their entries come last."""
    axes = *saved_axes(node, "dimension", len(source)), len(out) - 1
    return None if place.axis in axes else place


def _folded(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """The gradient of windows."""
    return None if place.axis in saved_axes(node, "dim", len(out)) else place


def _pad(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    last = 2 * (len(out) - 1 - place.axis)  # the last axis comes first
    return None if any(saved(node, "pad")[last : last + 2]) else place


def _repeat(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Copies of the input, one after the other along each axis."""
    axis = place.axis - len(out) + len(source)
    if isinstance(place, _Assigned):
        return _broadcast(place, out, source)
    if axis < 0 or place.after % source[axis] == 0:  # each sample has whole copies
        return CONSTANT
    before, rest = divmod(source[axis], _number_of_samples(place, out) * place.after)
    return None if rest else SampleAxis(axis, before, place.after)


def _part(axis: int, start: int, step: int, place: Place, out: Shape, source: Shape) -> Claim:
    """The output is a part of the input along the axis of the samples."""
    N, length = _number_of_samples(place, out), source[axis]
    if isinstance(place, SampleAxis) and step == 1:
        before, rest = divmod(length, N * place.after)
        if rest == start % (N * place.after) == 0:
            return SampleAxis(axis, before, place.after)
    samples = _samples_of(place, out)
    whole = samples.new_full((length,), -1)
    whole[start : start + step * len(samples) : step] = samples
    return _Assigned(axis, whole, N)


def _start(value: int | None, length: int) -> int:
    """Return where a slice starts, or which entry is selected."""
    value = value or 0
    return max(value + length, 0) if value < 0 else value


def _slice(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(out))
    if place.axis != axis or source == out:
        return place
    start = _start(saved(node, "start"), source[axis])
    return _part(axis, start, saved(node, "step"), place, out, source)


def _split(number: int, node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(out))
    if place.axis != axis:
        return place
    start = sum(shape_of_output(node, k)[axis] for k in range(number))
    return _part(axis, start, 1, place, out, source)


def _of_one_sample(
    name: str, number: int, node: Node, place: _OfOneSample, out: Shape, _: int, source: Shape
) -> Claim:
    """Whatever influences the tensor of a sample belongs to it; other parts may not."""
    if name not in _PARTS:
        return place
    (axis,) = saved_axes(node, "dim", len(source))
    length = out[axis] if len(out) == len(source) else 1
    samples = torch.full((length,), place.sample, device="cpu")
    only = (*out[:axis], length)
    if name == "SelectBackward0":
        number = _start(saved(node, "index"), source[axis])
    elif name == "SliceBackward0":
        start, step = _start(saved(node, "start"), source[axis]), saved(node, "step")
        return _part(axis, start, step, _Assigned(axis, samples, place.N), only, source)
    elif name != "UnbindBackward0":
        number = sum(shape_of_output(node, k)[axis] for k in range(number))
    return _part(axis, number, 1, _Assigned(axis, samples, place.N), only, source)


def _flip(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    if place.axis not in saved_axes(node, "dims", len(out)):
        return place
    samples, N = _samples_of(place, out), _number_of_samples(place, out)
    return _Assigned(place.axis, samples.flip(0), N)


def _roll(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    axes, shifts = saved(node, "dims"), saved(node, "shifts")
    if not axes:
        return None
    axes = saved_axes(node, "dims", len(out))
    shift = sum(s for axis, s in zip(axes, shifts, strict=True) if axis == place.axis)
    if place.axis not in axes:
        return place
    samples, N = _samples_of(place, out), _number_of_samples(place, out)
    return _Assigned(place.axis, samples.roll(-shift), N)


def _cat(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(out))
    if len(source) != len(out):
        return None
    if place.axis != axis:
        return place
    before, N = node.next_functions[:position], _number_of_samples(place, out)
    if any(other is None for other, _ in before):  # of unknown length
        return None
    start = sum((shape_of_output(*x)[axis:] or (0,))[0] for x in before)
    length = source[axis]
    if isinstance(place, SampleAxis):
        before, rest = divmod(length, N * place.after)
        if rest == start % (N * place.after) == 0:
            return SampleAxis(axis, before, place.after)
    return _Assigned(axis, _samples_of(place, out)[start : start + length], N)


def _stack(node: Node, place: Place, out: Shape, position: int, source: Shape) -> RuleClaim:
    (axis,) = saved_axes(node, "dim", len(out))
    if place.axis != axis:
        return _with(axis, place, out, source)
    sample = int(_samples_of(place, out)[position])
    return sample >= 0 and _OfOneSample(sample, _number_of_samples(place, out))


# --- products


def _product(
    first: int, node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """``[b r i], [b i o] -> [b r o]``, with or without b; what is added comes in front."""
    if position < first:
        return _broadcast(place, out, source)
    is_left = position == first
    if place.axis < len(out) - 2:
        return place
    return place if is_left == (place.axis == len(out) - 2) else TABLE


def _sum_of_products(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``[r o], [b r i], [b i o] -> [r o]``."""
    if position == 0:
        return _broadcast(place, out, source)
    return _moved(place, place.axis + 1) if position - 1 == place.axis else TABLE


def _matrix_vector(
    first: int, node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """``[r i], [i] -> [r]``."""
    if position < first:
        return _broadcast(place, out, source)
    return place if position == first else TABLE


def _outer(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``[r o], [r], [o] -> [r o]``."""
    if position == 0:
        return _broadcast(place, out, source)
    return _moved(place, 0) if position - 1 == place.axis else TABLE


def _linear(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``[* i], [o i], [o] -> [* o]``."""
    if place.axis < len(out) - 1:
        return TABLE if position else place
    return _moved(place, 0) if position else TABLE


def _grouped(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``[r i], [e i o] -> [r o]``, with one of the matrices for each row."""
    if place.axis != 0 or len(out) != 2 or len(source) != 2 + position:
        return None
    return TABLE if position else place


def _trilinear(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """The sum over some axes of the product of three tensors, each without some other axes."""
    missing = saved(node, f"expand{position + 1}")
    ndim, summed = len(source) + len(missing), saved(node, "sumdim")
    kept = [axis for axis in range(ndim) if axis not in summed]
    if len(kept) != len(out):
        return None
    axis = kept[place.axis]
    own = axis - sum(x < axis for x in missing)
    if axis in missing or source[own] == 1:
        return TABLE
    return _moved(place, own) if source[own] == out[place.axis] else None


def _distances(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``[* r i], [* o i] -> [* r o]``."""
    rows = len(out) - 2
    if place.axis < rows:
        return _broadcast(place, out, source)
    is_own = position == place.axis - rows
    return _moved(place, len(source) - 2) if is_own else TABLE


def _convolution(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    if place.axis == 0:
        return TABLE if position else place
    if place.axis > 1:
        return TABLE if position else None
    groups, transposed = saved(node, "groups"), saved(node, "transposed")
    if position == 2 or (position == 1 and not transposed):
        return _moved(place, 0)
    if groups == 1:
        return _moved(place, 1) if position else TABLE
    if isinstance(place, _Assigned):
        return None
    after, rest = divmod(place.after, out[1] // groups)  # groups after a sample
    if rest:
        return None
    axis = 1 - position
    return SampleAxis(axis, place.before, after * (source[axis] // groups))


def _attention(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """Queries ``[b h r i]``, keys ``[b h s i]``, values ``[b h s o]``, a bias ``[b h r s]``."""
    if place.axis < 2:
        return (
            _broadcast(place, out, source)
            if position == 3
            else (place if source[place.axis] == out[place.axis] else None)
        )
    if position == 3:
        return _broadcast(place, out, source) if place.axis == 2 else TABLE
    return place if position == (0 if place.axis == 2 else 2) else TABLE


# --- norms and cells


def _layer_norm(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    if place.axis >= len(out) - len(saved(node, "normalized_shape")):
        return None
    return TABLE if position else place


def _layer_norm_backward(
    node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """The gradient of the input, from gradient, input, mean, deviation, weight, bias."""
    if place.axis >= len(out) - len(saved(node, "normalized_shape")):
        return None
    return place if position < 4 else TABLE


def _group_norm(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    if place.axis != 0 or saved(node, "N") != out[0]:
        return None
    return TABLE if position else place


def _batch_norm(
    training: bool | str, node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """Channels do not interact; the entries of one do in training."""
    if position:
        return TABLE if place.axis != 1 else _moved(place, 0)
    mixes = saved(node, training) if isinstance(training, str) else training
    return place if place.axis == 1 or not mixes else None


def _batch_norm_backward(
    node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """The gradient of the input, from gradient, input, weight, and statistics."""
    if saved(node, "train") or place.axis == 1:
        return None
    return place if position < 2 else TABLE


def _convolution_backward(
    node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """The gradient of the input, from gradient, input, weight."""
    if place.axis != 0:
        return None
    return place if position < 2 else TABLE


def _cell(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """A step of a recurrent layer, from two products, the last state, and two biases."""
    if place.axis != 0:
        return None
    return place if position < 2 or len(source) == 2 else TABLE


def _grid(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """Channels of images, read at places."""
    if place.axis == 0:
        return place
    if place.axis == 1:
        return TABLE if position else place
    return None


# --- rows that are read and written at indices


def _along_axis(samples: Tensor, axis: int, shape: Shape | Size) -> Tensor:
    """Samples of the entries along an axis, for all entries of a tensor."""
    return samples.reshape(-1, *[1] * (len(shape) - axis - 1)).expand(shape)


def _read(index: Tensor, axis: int, samples: Tensor, source: Shape, N: int) -> Claim:
    """Entries along an axis of the input belong to the sample that reads them, if it is one."""
    is_used = samples >= 0
    index, samples = index[is_used], samples[is_used]
    index = torch.where(index < 0, index + source[axis], index).long()
    ends = [
        samples.new_full((source[axis],), none).scatter_reduce(0, index, samples, reduce)
        for none, reduce in ((-1, "amax"), (N, "amin"))
    ]
    return _Assigned(axis, ends[0], N) if torch.equal(*(end[index] for end in ends)) else None


def _written(samples: Tensor, source: Shape, N: int) -> _Assigned | None:
    """Entries of the input are written to samples: along which axis are these numbered?"""
    if samples.numel() == 0:
        return None
    for axis, length in enumerate(samples.shape):
        first = samples.movedim(axis, -1).reshape(-1, length)[0]
        if length <= source[axis] and bool(
            (samples == _along_axis(first, axis, samples.shape)).all()
        ):
            whole = first.new_full((source[axis],), -1)
            whole[:length] = first
            return _Assigned(axis, whole, N)
    return None


class _Indexed(NamedTuple):
    """The tensors that index the axes of a tensor, and how the result's axes follow from them."""

    tensors: dict[int, Tensor]
    block: Shape  # what the tensors broadcast to
    start: int  # the block's first axis in the result
    free: list[int]  # the axes that are not indexed

    def axis_of(self, axis: int) -> int:
        """Where an axis that is not indexed is in the result."""
        place = self.free.index(axis)
        return place + (len(self.block) if place >= self.start else 0)

    def result(self, shape: Shape) -> Shape:
        free = [shape[axis] for axis in self.free]
        return (*free[: self.start], *self.block, *free[self.start :])


def _indexed(node: Node, shape: Shape) -> _Indexed | None:
    tensors: dict[int, Tensor] = {}
    axis = 0
    for index in saved(node, "indices"):
        index = None if index is None else index.cpu()
        if index is None:
            axis += 1
        elif index.dtype in (torch.bool, torch.uint8):
            for places in index.nonzero().unbind(1):
                tensors[axis] = places
                axis += 1
        else:
            tensors[axis] = index
            axis += 1
    if not tensors:
        return None
    axes = sorted(tensors)
    adjacent = axes[-1] - axes[0] == len(axes) - 1
    block = tuple(torch.broadcast_shapes(*(x.shape for x in tensors.values())))
    free = [x for x in range(len(shape)) if x not in tensors]
    return _Indexed(tensors, block, axes[0] if adjacent else 0, free)


def _index(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """``x[i, j]``, also with masks."""
    indexed, N = _indexed(node, source), _number_of_samples(place, out)
    if indexed is None:
        return None
    first, last = indexed.start, indexed.start + len(indexed.block)
    if not first <= place.axis < last:
        axis = indexed.free[place.axis - (len(indexed.block) if place.axis >= last else 0)]
        return _moved(place, axis) if source[axis] == out[place.axis] else None
    samples, claims = _samples_of(place, out), []
    samples = _along_axis(samples, place.axis - first, indexed.block)
    for axis, index in indexed.tensors.items():
        claim = _read(index.expand(indexed.block), axis, samples, source, N)
        claims += [] if claim is None else [_regular(claim)]
    # several axes may tell the samples apart by chance
    regular = [x for x in claims if isinstance(x, SampleAxis)]
    return [*regular, *claims, TABLE][0]


def _index_put(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``x[i, j] = values``: what is not overwritten stays."""
    if position == 0:
        return place
    if prod(source) == 1:
        return TABLE
    indexed, N = _indexed(node, out), _number_of_samples(place, out)
    if indexed is None:
        return None
    result = indexed.result(out)
    if place.axis not in indexed.tensors:
        return _broadcast(_moved(place, indexed.axis_of(place.axis)), result, source)
    index = indexed.tensors[place.axis].expand(indexed.block)
    index = torch.where(index < 0, index + out[place.axis], index)
    block = _written(_samples_of(place, out)[index.long()], indexed.block, N)
    if block is None:
        return None
    return _broadcast(_moved(block, indexed.start + block.axis), result, source)


def _index_select(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(source))
    if place.axis != axis:
        return place
    index, N = saved(node, "index").cpu(), _number_of_samples(place, out)
    samples = _samples_of(place, out)
    return _read(index.reshape(-1), axis, samples, source, N) or TABLE


def _index_add(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(out))
    if position == 0 or (place.axis != axis and len(source) == len(out)):
        return place
    index, N = saved(node, "index").cpu(), _number_of_samples(place, out)
    if len(source) != len(out):
        return None
    return _Assigned(axis, _samples_of(place, out)[index.reshape(-1).long()], N)


def _gather(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(out))
    if place.axis != axis:
        return place if source[place.axis] == out[place.axis] else None
    index, N = saved(node, "index").cpu(), _number_of_samples(place, out)
    samples = _along_axis(_samples_of(place, out), axis, out)
    return _read(index, axis, samples, source, N) or TABLE


def _scatter(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    (axis,) = saved_axes(node, "dim", len(out))
    if position == 0:
        return place
    if place.axis != axis:
        return place if source[place.axis] == out[place.axis] else None
    index, N = saved(node, "index").cpu(), _number_of_samples(place, out)
    return _written(_samples_of(place, out)[index], source, N)


def _embedding(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    return _moved(place, 1) if place.axis == len(out) - 1 else TABLE


def _embedding_bag(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    if position == 0:
        return place if place.axis == 1 else TABLE
    bags, N = saved(node, "result1").cpu(), _number_of_samples(place, out)
    if place.axis == 1 or tuple(bags.shape) != source:
        return None
    return _written(_samples_of(place, out)[bags], source, N)


def _table(*_: Any) -> Claim:
    return TABLE


# --- nodes that do not say what they do


def _asked(node: Node, place: Place, out: Shape, position: int, source: Shape) -> RuleClaim:
    """Samples do not interact if their gradients can be scaled before or after the node.

    The factors are powers of two, so that rounding is the same.
    """
    N, metadata = _number_of_samples(place, out), input_metadata(node, 0)
    possible: list[Place] = [*_places(source, N)]
    if isinstance(place, _Assigned):
        axes = [x for x, length in enumerate(source) if length == out[place.axis]]
        possible = [*(_moved(place, axis) for axis in axes), *possible]
    elif place in possible:  # the likely one comes first
        possible = [place, *possible]
    if not possible:
        return TABLE
    generator = torch.Generator(metadata.device).manual_seed(0)
    g = torch.rand(out, generator=generator, device=metadata.device).add_(1).to(metadata.dtype)
    base = 8 if g.dtype.itemsize < 4 else 32

    def factors(place: Place, digit: int, like: Tensor) -> Tensor:
        n = _samples_of(place, tuple(like.shape))
        factors = torch.ones_like(n, dtype=g.real.dtype).ldexp(n // base**digit % base)
        return _along_axis((factors * (n >= 0)).to(like.device), place.axis, like.shape)

    g *= factors(place, 0, g) > 0  # of entries without influence, nothing is asked
    plain, digit = gradients_of_inputs(node, g)[position], 0
    if plain is None or not bool(plain.any()):
        return False
    while base**digit < N and possible:
        scaled = gradients_of_inputs(node, g * factors(place, digit, g))[position]
        possible = [
            x
            for x in possible
            if scaled is not None and torch.equal(scaled, plain * factors(x, digit, plain))
        ]
        digit += 1
    return possible[0] if possible else None


# --- the rules by the names of nodes


def _named(names: str, rule: Rule) -> dict[str, Rule]:
    """Names without a number are those of the node of the first signature."""
    return {x if re.search(r"Backward\d$", x) else f"{x}Backward0": rule for x in names.split()}


_ELEMENTWISE = """
    Abs Acos Acosh Alias Angle Asin Asinh Atan Atanh Bernoulli Ceil Celu Clamp ClampMax ClampMin
    Clone Conj ConjPhysical Cos Cosh Deg2Rad Digamma Elu Erf Erfc Erfinv Exp Exp2 Expm1 Floor
    Frac FusedDropout Gelu Hardshrink Hardsigmoid Hardswish Hardtanh I0 IndexFill LazyClone
    LeakyRelu Lgamma Lift LiftFresh Log Log10 Log1P Log2 LogSigmoid Logit Mish Mvlgamma NanToNum
    NativeDropout Neg NegView PinMemory Polygamma Rad2Deg Reciprocal Relu Round RoundBackward1
    RreluWithNoise Rsqrt Sgn Sigmoid Sign Silu Sin Sinc Sinh Softplus Softshrink SpecialEntr
    SpecialErfcx SpecialI0E SpecialI1 SpecialI1E SpecialLogNdtr SpecialNdtri Sqrt Tan Tanh
    Threshold ToCopy Tril Triu Trunc

    Add AddBackward1 Addcdiv Addcmul Atan2 CeluBackward1 ClampBackward1 ClampMaxBackward1
    ClampMinBackward1 Complex Copysign CopysignBackward1 Div DivBackward1 DivBackward2
    DivBackward3 EluBackward1 Fmax Fmin Fmod FmodBackward1 Hypot Igamma Igammac Ldexp
    LeakyReluBackward1 Lerp LerpBackward1 Logaddexp Logaddexp2 MaskedFill MaskedFillBackward1
    Maximum Minimum Mul MulBackward1 Nextafter Polar Pow PowBackward0 PowBackward1 PowBackward2
    PreluKernel Remainder RemainderBackward1 Rsub RsubBackward1 SpecialXlog1Py
    SpecialXlog1PyBackward1 SpecialXlog1PyBackward2 SpecialZeta SpecialZetaBackward1
    SpecialZetaBackward2 Sub SubBackward1 ThresholdBackward1 Where Xlogy XlogyBackward1
    XlogyBackward2

    BinaryCrossEntropy BinaryCrossEntropyWithLogits HuberLoss MseLoss SmoothL1Loss
    SoftMarginLoss

    BinaryCrossEntropyBackward EluBackward GeluBackward HardshrinkBackward HardswishBackward
    HardtanhBackward HuberLossBackward LeakyReluBackward LogSigmoidBackward MseLossBackward
    NativeDropoutBackward PreluKernelBackward RreluWithNoiseBackward SigmoidBackward
    SmoothL1LossBackward SoftMarginLossBackward SoftplusBackward SoftshrinkBackward TanhBackward
    ThresholdBackward
"""
#: The last axes of the input interact, as many as the number says.
_TRAILING = {
    0: "ViewAsReal",
    1: "NllLoss ViewAsComplex",
    2: """
        AffineGridGenerator Cholesky CholeskyInverse CholeskySolve Col2Im
        CudnnAffineGridGenerator LinalgCholeskyEx LinalgDet LinalgEigh LinalgInvEx
        LinalgMatrixExp LinalgPinv LinalgQr LinalgSlogdet LinalgSolveEx LinalgSolveTriangular
        LinalgSvd MaxUnpool2D MkldnnAdaptiveAvgPool2D MkldnnMaxPool2D TriangularSolve
    """,
    3: "Im2Col MaxUnpool3D NllLoss2D PixelShuffle PixelUnshuffle",
}
#: Likewise; the gradients of these are nodes, too.
_POOLS = {
    1: """
        ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D
        UpsampleNearestExact1D
    """,
    2: """
        AdaptiveAvgPool2D AdaptiveMaxPool2D AvgPool2D FractionalMaxPool2D MaxPool2D
        MaxPool2DWithIndices ReflectionPad2D ReplicationPad2D UpsampleBicubic2D
        UpsampleBicubic2DAa UpsampleBilinear2D UpsampleBilinear2DAa UpsampleNearest2D
        UpsampleNearestExact2D
    """,
    3: """
        AdaptiveAvgPool3D AdaptiveMaxPool3D AvgPool3D FractionalMaxPool3D MaxPool3DWithIndices
        ReflectionPad3D ReplicationPad3D UpsampleNearest3D UpsampleNearestExact3D
        UpsampleTrilinear3D
    """,
}
_SPLITS = "Split SplitWithSizes UnsafeSplit UnsafeSplitWithSizes"
_RULES: dict[str, Rule] = {
    "torch::autograd::CopyBackwards": _elementwise,
    "torch::autograd::CopySlices": _asked,
    **_named(_ELEMENTWISE, _elementwise),
    **{
        name: rule
        for table in (_TRAILING, _POOLS)
        for number, names in table.items()
        for name, rule in _named(names, partial(_trailing, number)).items()
    },
    **{
        name: rule
        for number, names in _POOLS.items()
        for kind in names.split()
        for name, rule in _named(f"{kind}Backward", partial(_trailing, number)).items()
    },
    **_named(
        "Cummax Cummin Cumprod Cumsum FftC2C FftC2R FftR2C Glu GluBackward LinalgCross Logcumsumexp"
        " LogSoftmax LogSoftmaxBackwardData SafeSoftmax Softmax SoftmaxBackwardData Sort"
        " SortBackward1 Topk",
        partial(_along, "dim"),
    ),
    **_named("Rot90", partial(_along, "dims")),
    **_named("Flip", _flip),
    **_named("Roll", _roll),
    **_named("View UnsafeView ReshapeAlias", _view),
    **_named("Transpose TransposeBackward1", _transpose),
    **_named("T TBackward1", _matrix_transpose),
    **_named("Permute", _permute),
    **_named("Unsqueeze UnsqueezeBackward1 SelectBackward", _unsqueeze),
    **_named(" ".join(f"SqueezeBackward{k}" for k in range(6)), _squeeze),
    **_named("Select Unbind", _select),
    **_named(
        "Amax Amin Aminmax Kthvalue LinalgVectorNorm Logsumexp Max MeanBackward1 MedianBackward1"
        " Min Mode NanmedianBackward1 Nansum NormBackward1 NormBackward3 ProdBackward1 Std"
        " StdMean SumBackward1 Var VarMean",
        _reduce,
    ),
    **_named("Diagonal", _diagonal),
    **_named("Unfold", _unfold),
    **_named("UnfoldBackward SliceBackward", _folded),
    **_named("ConstantPadNd", _pad),
    **_named("Expand", _elementwise),
    **_named("Repeat", _repeat),
    **_named("Slice", _slice),
    **_named(_SPLITS, partial(_split, 0)),
    **_named("Cat", _cat),
    **_named("Stack", _stack),
    **_named("Mm Bmm", partial(_product, 0)),
    **_named("Addmm Baddbmm", partial(_product, 1)),
    **_named("Addbmm", _sum_of_products),
    **_named("Mv", partial(_matrix_vector, 0)),
    **_named("Addmv", partial(_matrix_vector, 1)),
    **_named("Addr", _outer),
    **_named("Linear", _linear),
    **_named("GroupedMm", _grouped),
    **_named("Trilinear", _trilinear),
    **_named("Cdist EuclideanDist", _distances),
    **_named("Convolution ConvolutionOverrideable", _convolution),
    **_named("ConvolutionBackward", _convolution_backward),
    **_named(
        "ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention"
        " ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention"
        " ScaledDotProductFusedAttentionOverrideable",
        _attention,
    ),
    **_named("NativeLayerNorm FusedRmsNorm", _layer_norm),
    **_named("NativeLayerNormBackward", _layer_norm_backward),
    **_named("NativeGroupNorm", _group_norm),
    **_named(
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm NativeBatchNormLegit"
        " NativeBatchNormLegitBackward1",
        partial(_batch_norm, "training"),
    ),
    **_named("NativeBatchNormLegitNoTraining BatchNormNoUpdate", partial(_batch_norm, False)),
    **_named("BatchNormWithUpdate", partial(_batch_norm, True)),
    **_named("NativeBatchNormBackward", _batch_norm_backward),
    **_named("ThnnFusedLstmCell ThnnFusedGruCell", _cell),
    **_named("GridSampler2D GridSampler3D GridSampler2DCpuFallback CudnnGridSampler", _grid),
    **_named("Index UnsafeIndex", _index),
    **_named("IndexPut IndexPutImpl UnsafeIndexPut", _index_put),
    **_named("IndexSelect", _index_select),
    **_named("IndexAdd IndexCopy IndexReduce", _index_add),
    **_named("Gather", _gather),
    **_named("Scatter ScatterBackward1 ScatterAdd ScatterReduce", _scatter),
    **_named("Embedding", _embedding),
    **_named("EmbeddingBag", _embedding_bag),
    **_named("Take", _table),
    **_named("AsStrided AsStridedBackward1 PackPaddedSequence", _asked),
}

#: Nodes whose output is a part of the input along an axis.
_PARTS = _named(f"{_SPLITS} Select Slice Unbind", _table).keys()
#: Nodes of several outputs. Of other nodes, only the first output is known to have samples.
_SEVERAL = _named(
    f"{_SPLITS} Aminmax FusedRmsNorm LinalgEigh LinalgQr LinalgSlogdet LinalgSvd NativeGroupNorm"
    " NativeLayerNorm PreluKernelBackward StdMean ThnnFusedLstmCell Unbind VarMean",
    _table,
).keys()
_STARTING = _named(_SPLITS, _table).keys()


def _rule_of(node: Node, name: str, number: int) -> Rule | None:
    """Return the rule of a node for one of its outputs."""
    if number == 0:
        rule = _RULES.get(name)
        is_asked = rule is None and is_users_function(node) and len(node._input_metadata) == 1
        return _asked if is_asked else rule
    if name in _STARTING:
        return partial(_split, number)
    return _RULES[name] if name in _SEVERAL else None
