"""Proves from autograd's graph which axis of each node's output numbers the samples.

A node's output has an axis of samples if each of its entries influences the outputs of one sample
only, the one whose number is its place on that axis. The model's output has it on axis 0. From
there it is followed back, node by node, to the inputs of each node. Nothing is believed: what is
not proved is unknown, and so is everything that reaches the output through it.

There are two proofs. Rules for frequent nodes need shapes and saved arguments alone. All other
nodes, and those whose rule proves nothing, are asked: they are called with gradients that are
scaled by another power of two for each sample. The scale of the gradient that they return for an
entry of an input then tells to which sample the entry belongs, or that it belongs to several.

The first proof holds for all graphs with these shapes and arguments, the second one for the numbers
of the batch whose graph it is.
"""

import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from functools import cache, partial
from math import prod
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import torch
from torch import Size, Tensor
from torch.autograd.graph import GradientEdge

from curvlinops.support.torch_internals import (
    can_be_called,
    gradients_of_inputs,
    input_metadata,
    saved,
    saved_axes,
    shape_of_output,
)

#: A node of autograd's graph.
Node: TypeAlias = Any
Shape: TypeAlias = tuple[int, ...]


class SampleAxis(NamedTuple):
    """The axis that numbers the samples: its length is ``before * N * after``.

    The entry at ``i`` belongs to the sample ``(i // after) % N``. Positions ``before`` are a slower
    index than the sample, positions ``after`` a faster one.
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
    """An axis along which entries belong to samples in any order; -1: they influence no output."""

    axis: int
    samples: Tensor
    N: int


class _OfOneSample(NamedTuple):
    """The whole tensor belongs to a sample, as in a loop over samples."""

    sample: int
    N: int


#: Where the samples are in a tensor.
Place: TypeAlias = SampleAxis | _Assigned
#: A statement about a tensor. ``None``: no statement. ``False``: it does not influence this output.
Claim: TypeAlias = Place | _OfOneSample | Constant | Literal[False] | None
#: A rule for a node: it gets the node, the place of the samples in an output, the output's shape,
#: and the position and shape of an input. If it returns ``None``, the node is asked.
AxisRule: TypeAlias = Callable[[Node, Place, Shape, int, Shape], Claim]


def sample_axes(
    output_edge: GradientEdge,
    output_shape: Shape | Size,
    num_samples: int,
    order: Sequence[Node],
    asked: list[Node] | None = None,
) -> dict[tuple[Node, int], SampleAxis | Constant]:
    """Find the axis of samples, or a constant, for nodes of a graph and numbers of their outputs.

    Axis 0 of the output numbers the samples; of length ``N * S``, they are the slower index. What
    is not proved is absent, and so are leaves. If no node was ``asked``, this holds for the numbers
    of all batches whose graphs have the same shapes and arguments.
    """
    root, length = output_edge.node, output_shape[0] if output_shape else 0
    if num_samples < 2 or length == 0 or length % num_samples:
        return {}
    found: dict[Node, dict[int, Claim]] = {}
    found[root] = {output_edge.output_nr: SampleAxis(0, 1, length // num_samples)}
    shape_of = cache(shape_of_output)
    for node in reversed(order):
        outputs = found.get(node)
        if outputs is None:
            continue
        sources = [
            (position, source, output)
            for position, (source, output) in enumerate(node.next_functions)
            if source is not None and source.next_functions
        ]
        for number, place in outputs.items():
            if isinstance(place, _Assigned):
                place = outputs[number] = _regular(place)
            new = _claims(node, number, place, sources, shape_of, asked)
            for claim, (_, source, output) in zip(new, sources, strict=True):
                if claim is False:
                    continue
                claims = found.setdefault(source, {})
                if output in claims:
                    claim = _merged(claims[output], claim)
                claims[output] = claim
    return {
        (node, number): claim
        for node, claims in found.items()
        for number, claim in claims.items()
        if isinstance(claim, (SampleAxis, Constant))  # faster than a union
    }


def _claims(
    node: Node,
    number: int,
    place: Claim,
    sources: Sequence[tuple[int, Node, int]],
    shape_of: Callable[[Node, int], Shape],
    asked: list[Node] | None,
) -> Sequence[Claim]:
    """Return what follows for some inputs from the place of the samples in an output."""
    if place is None or isinstance(place, Constant):
        return [place] * len(sources)
    kind = _kind(node.name())
    is_one = isinstance(place, _OfOneSample)
    if is_one and kind not in _PARTS:
        return [place] * len(sources)
    claims: list[Claim] = [None] * len(sources)
    rule = _rule_of(kind) if (number == 0 or kind in _SEVERAL) and not is_one else None
    try:
        out = shape_of(node, number)
        for k, (position, source, output) in enumerate(sources if rule else ()):
            try:
                claims[k] = rule(node, place, out, position, shape_of(source, output))
            except AttributeError:
                break  # another version of PyTorch, or another signature, saves other arguments
        if None not in claims or not can_be_called(node):
            return claims
        if asked is not None:
            asked.append(node)
        N, samples = _number_of_samples(place, out), _asked(node, number, place, out)
        for k, (position, source, output) in enumerate(sources):
            if claims[k] is None:
                claims[k] = None if samples[position] is None else _found(samples[position], N)
            if claims[k] is None and not is_one:
                claims[k] = _unproved(kind, place, out, shape_of(source, output))
    except RuntimeError:
        pass  # a shape is not known, or a saved tensor is no longer there
    return claims


def _number_of_samples(place: Place | _OfOneSample, shape: Shape) -> int:
    if isinstance(place, SampleAxis):
        return shape[place.axis] // (place.before * place.after)
    return place.N


def _moved(place: Place, axis: int) -> Place:
    """The same place along another axis."""
    return place if axis == place.axis else place._replace(axis=axis)


def _samples_of(place: Place, length: int, N: int) -> Tensor:
    """Return the sample of each entry along the axis of the samples, on the CPU."""
    if isinstance(place, _Assigned):
        return place.samples
    return torch.arange(length, device="cpu") // place.after % N


def _only(place: Claim) -> Claim:
    """Return the sample to which all entries belong that influence an output, if it is one."""
    if not isinstance(place, _Assigned):
        return place
    used = {*place.samples.tolist()} - {-1}
    return _OfOneSample(used.pop(), place.N) if len(used) == 1 else None


def _regular(place: _Assigned) -> Place | _OfOneSample:
    """Return the axis of samples that says the same, if there is one."""
    length, N = len(place.samples), place.N
    runs = torch.unique_consecutive(place.samples, return_counts=True)[1].tolist()
    for after in (length // N, 1, *runs[:2]):
        before, rest = divmod(length, N * after) if after else (0, 0)
        if before and not rest:
            regular = SampleAxis(place.axis, before, after)
            if _agree(place.samples, _samples_of(regular, length, N)):
                return regular
    return _only(place) or place


def _agree(one: Tensor, other: Tensor) -> bool:
    return bool(((one == other) | (one < 0) | (other < 0)).all())


def _merged(one: Claim, other: Claim) -> Claim:
    """Return the statement of two nodes about a tensor that both use, if they agree."""
    if one is None or other is None:
        return None
    if not (isinstance(one, _Assigned) or isinstance(other, _Assigned)):
        is_unaxed = isinstance(one, Constant | _OfOneSample) and not isinstance(other, SampleAxis)
        return one if one == other else TABLE if is_unaxed else None
    if not isinstance(one, _Assigned):
        one, other = other, one
    if not isinstance(other, Place) or one.axis != other.axis:
        one = _only(one)
        return one if one == _only(other) else None
    samples = _samples_of(other, len(one.samples), one.N)
    if not _agree(one.samples, samples):
        return None
    if isinstance(other, SampleAxis):
        return other
    return one._replace(samples=torch.maximum(one.samples, samples))


# --- nodes without a rule, and those whose rule proves nothing


def _along_axis(samples: Tensor, axis: int, ndim: int) -> Tensor:
    """Let the samples of the entries along an axis broadcast to a tensor."""
    return samples.reshape(-1, *[1] * (ndim - axis - 1))


def _asked(node: Node, number: int, place: Place | _OfOneSample, out: Shape) -> list[Tensor | None]:
    """Return the sample of each entry of each input, see ``_decoded``.

    Gradients are multiples of a small number, so that the order of a sum does not matter; factors
    are powers of two, so that rounding is the same.
    """
    N, metadata = _number_of_samples(place, out), input_metadata(node, number)
    device = metadata.device
    g = torch.empty(out, dtype=metadata.dtype, device=device)
    real = torch.view_as_real(g) if g.is_complex() else g
    steps = 2 ** (4 * real.dtype.itemsize)
    real.random_(1, steps, generator=torch.Generator(device).manual_seed(0)).div_(steps)
    if isinstance(place, _OfOneSample):
        n = torch.tensor(place.sample, device=device)
    else:
        samples = _samples_of(place, out[place.axis], N)
        n = _along_axis(samples, place.axis, len(out)).to(device)
    bits = 3 if real.dtype.itemsize < 4 else 5
    powers = torch.tensor([2.0**k for k in range(2**bits)], dtype=real.dtype, device=device)
    factors = [powers[(n >> shift) % len(powers)] for shift in range(0, (N - 1).bit_length(), bits)]
    g = g * (n >= 0)  # of entries without influence, nothing is asked
    answers = [gradients_of_inputs(node, g * factor, number) for factor in (1, *factors)]
    return [_decoded(powers, *gradients) for gradients in zip(*answers, strict=True)]


def _decoded(powers: Tensor, plain: Tensor | None, *scaled: Tensor | None) -> Tensor | None:
    """Return the sample of each entry; -1 if it has no gradient, ``None`` if one has several."""
    if plain is None:
        return torch.tensor(-1, device="cpu")
    if plain.layout is not torch.strided or not bool(plain.isfinite().all()):
        return None
    samples, base = torch.zeros_like(plain, dtype=torch.int32), len(powers)
    for digit, x in enumerate(scaled):
        if x is None:
            return None
        power = (x / plain).abs().log2().nan_to_num(0, 0, 0).round().clamp(0, base - 1).int()
        if not torch.equal(x, plain * powers.to(plain)[power]):
            return None
        samples += power * base**digit
    return samples.masked_fill(plain == 0, -1)


def _found(samples: Tensor, N: int) -> Claim:
    """Return the axis along which entries belong to samples, given the sample of each entry."""
    if not bool((samples >= 0).any()):
        return False
    highest = samples.max()
    if bool((samples == highest).all()):
        return _OfOneSample(int(highest), N)
    places = []
    for axis, length in enumerate(samples.shape):
        along = samples.movedim(axis, 0).reshape(length, -1).amax(1)
        if _agree(samples, _along_axis(along, axis, samples.ndim)):
            place = _Assigned(axis, along.cpu(), N)
            likely = isinstance(_regular(place), SampleAxis), int((along < 0).sum())
            places.append((*likely, -axis, place))
    return max(places)[-1] if places else None  # several axes may do by chance


def _unproved(kind: str, place: Place, out: Shape, source: Shape) -> Claim:
    """Return the statement about an input whose entries belong to several samples."""
    if kind in _READS:
        return TABLE
    is_broadcast = len(source) <= len(out) and all(
        length in (1, full) for length, full in zip(source[::-1], out[::-1], strict=False)
    )
    if is_broadcast and _elementwise(None, place, out, 0, source) is CONSTANT:
        return CONSTANT
    N = _number_of_samples(place, out)
    return TABLE if all(length % N for length in source) else None


# --- rules


def _elementwise(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Entries of the output depend on the entries at the same place in a broadcast input."""
    axis = place.axis - len(out) + len(source)
    if axis < 0 or source[axis] == 1:
        return CONSTANT
    return _moved(place, axis) if source[axis] == out[place.axis] else None


def _repeat(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """Copies of the input, one after the other along each axis."""
    axis = place.axis - len(out) + len(source)
    is_whole = axis >= 0 and isinstance(place, SampleAxis) and place.after % source[axis] == 0
    return CONSTANT if is_whole else _elementwise(node, place, out, position, source)


def _along(name: str, node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Only entries along some axes interact, which the input or the output may be without."""
    ndim = max(len(source), len(out))
    axes = saved_axes(node, name, ndim)
    kept = [axis for axis in range(ndim) if axis not in axes]
    axis = place.axis if len(out) == ndim else kept[place.axis]
    if axis in axes:
        return None
    own = axis if len(source) == ndim else kept.index(axis)
    return _moved(place, own) if source[own : own + 1] == (out[place.axis],) else None


def _trailing(number: int, node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    """Only entries along the last axes interact."""
    first = len(source) - number
    return place if place.axis < first and source[:first] == out[:first] else None


def _rows(
    inputs: int, axes: Callable, node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """Some inputs have the first axes of the output, and all samples read the others."""
    if place.axis >= axes(node, out):
        return None
    if position >= inputs:
        return TABLE
    return place if source[place.axis : place.axis + 1] == (out[place.axis],) else None


def _not_normalized(node: Node, out: Shape) -> int:
    return len(out) - len(saved(node, "normalized_shape"))


def _view(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    return reshaped(place, out, source) if isinstance(place, SampleAxis) else None


def reshaped(place: SampleAxis, shape: Shape, new_shape: Shape) -> SampleAxis | None:
    """Return the axis of samples in another shape with the same entries in the same order."""
    if prod(new_shape) != prod(shape) or prod(shape) == 0:
        return None
    N = _number_of_samples(place, shape)
    inner = place.after * prod(shape[place.axis + 1 :])  # entries from one sample to the next
    for axis, length in reversed([*enumerate(new_shape)]):
        after, rest = divmod(inner, prod(new_shape[axis + 1 :]))
        if rest:
            return None
        if length % (N * after) == 0:
            return SampleAxis(axis, length // (N * after), after)
    return None


def _transpose(node: Node, place: Place, out: Shape, *_: Any) -> Claim:
    (first,), (second,) = (saved_axes(node, x, len(out)) for x in ("dim0", "dim1"))
    return _moved(place, {first: second, second: first}.get(place.axis, place.axis))


def _permute(node: Node, place: Place, out: Shape, *_: Any) -> Claim:
    return _moved(place, saved_axes(node, "dims", len(out))[place.axis])


def _pad(node: Node, place: Place, out: Shape, _: int, source: Shape) -> Claim:
    last = 2 * (len(out) - 1 - place.axis)  # the last axis comes first
    return None if any(saved(node, "pad")[last : last + 2]) else place


def _product(
    first: int, node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """``[b r i], [b i o] -> [b r o]``, with or without b; what is added comes in front."""
    if position < first:
        return _elementwise(node, place, out, position, source)
    rows = len(out) - 2
    is_own = place.axis < rows or (position == first) == (place.axis == rows)
    return place if is_own else TABLE


def _grouped(node: Node, place: Place, out: Shape, position: int, source: Shape) -> Claim:
    """``[r i], [e i o] -> [r o]``, with one of the matrices for each row."""
    if place.axis != 0 or len(out) != 2 or len(source) != 2 + position:
        return None
    return TABLE if position else place


def _attention(node: Node, place: Place, *given: Any) -> Claim:
    """Queries ``[b h r i]``, keys ``[b h s i]``, values ``[b h s o]``, a bias ``[b h r s]``."""
    return _elementwise(node, place, *given) if place.axis < 2 else None


def _batch_norm(
    inputs: int, name: str, node: Node, place: Place, out: Shape, position: int, source: Shape
) -> Claim:
    """Channels do not interact; the entries of one do in training."""
    if position >= inputs:
        return _moved(place, 0) if place.axis == 1 else TABLE
    return place if place.axis == 1 or not saved(node, name) else None


def _table(number: int, node: Node, place: Place, out: Shape, position: int, _: Shape) -> Claim:
    """All samples read one of the inputs."""
    return TABLE if position == number else None


# --- the rules by the names of nodes, without the number of the signature

_ELEMENTWISE = """
    Abs Alias Clamp ClampMax ClampMin Clone Cos Cosh Elu Erf Exp Expm1 FusedDropout Gelu
    Hardsigmoid Hardswish Hardtanh LeakyRelu Log Log1P LogSigmoid Mish NativeDropout Neg Pow
    Reciprocal Relu Rsqrt Sigmoid Silu Sin Sinh Softplus Softshrink Sqrt Tanh Threshold ToCopy
    Tril Triu

    Add Addcdiv Addcmul Atan2 Complex CopyBackwards Div Expand Lerp MaskedFill Maximum Minimum
    Mul PreluKernel Rsub Sub Where

    EluBackward GeluBackward HardswishBackward HardtanhBackward LeakyReluBackward
    LogSigmoidBackward PreluKernelBackward SigmoidBackward SoftplusBackward SoftshrinkBackward
    TanhBackward ThresholdBackward
"""
_SPLITS = "Split SplitWithSizes Unbind UnsafeSplit UnsafeSplitWithSizes"
_RULES: dict[str, AxisRule] = {
    kind: rule
    for kinds, rule in {
        _ELEMENTWISE: _elementwise,
        """
            Amax Amin Cat Cumsum Gather Glu IndexAdd IndexCopy IndexSelect LinalgVectorNorm
            Logcumsumexp LogSoftmax LogSoftmaxBackwardData Logsumexp Max Mean Min Norm Prod
            SafeSoftmax Scatter ScatterAdd ScatterReduce Select SelectBackward Slice
            SliceBackward Softmax SoftmaxBackwardData Sort Stack Std Sum Topk Unsqueeze
            Var VarMean
        """: partial(_along, "dim"),
        _SPLITS: partial(_along, "dim"),
        "Flip Roll": partial(_along, "dims"),
        "ViewAsReal": partial(_trailing, 0),
        "ViewAsComplex": partial(_trailing, 1),
        "Col2Im": partial(_trailing, 2),
        "Im2Col PixelShuffle PixelUnshuffle": partial(_trailing, 3),
        "Linear": partial(_rows, 1, lambda node, out: len(out) - 1),
        "Convolution ConvolutionOverrideable": partial(_rows, 1, lambda *_: 1),
        "ConvolutionBackward CudnnGridSampler GridSampler2D GridSampler3D": partial(
            _rows, 2, lambda *_: 1
        ),
        "ThnnFusedLstmCell ThnnFusedGruCell": partial(_rows, 3, lambda *_: 1),
        "NativeGroupNorm": partial(_rows, 1, lambda node, out: saved(node, "N") == out[0]),
        "NativeLayerNorm FusedRmsNorm": partial(_rows, 1, _not_normalized),
        "NativeLayerNormBackward": partial(_rows, 4, _not_normalized),
        "NativeBatchNorm CudnnBatchNorm MiopenBatchNorm": partial(_batch_norm, 1, "training"),
        "NativeBatchNormBackward": partial(_batch_norm, 2, "train"),
        "View UnsafeView ReshapeAlias Squeeze": _view,
        "Transpose": _transpose,
        "T": lambda node, place, out, *_: _moved(place, len(out) - 1 - place.axis),
        "Permute": _permute,
        "Repeat": _repeat,
        "ConstantPadNd": _pad,
        "Mm Bmm": partial(_product, 0),
        "Addmm Baddbmm": partial(_product, 1),
        "GroupedMm": _grouped,
        """
            ScaledDotProductFlashAttentionForCpu ScaledDotProductFlashAttention
            ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
            ScaledDotProductFusedAttentionOverrideable
        """: _attention,
        "Embedding EmbeddingBag": partial(_table, 0),
        "Mv": partial(_table, 1),
        "Addbmm Addmv": partial(_table, 2),
    }.items()
    for kind in kinds.split()
}
#: Pools, padding, and other sizes of images, and their derivatives: they know 1, 2, or 3 axes.
_OF_IMAGES = re.compile(r"(?:\w*Pool|Upsample\w+|ReflectionPad|ReplicationPad)([123])D")
#: Nodes that read a part of the input, and those of them that may read it for several samples.
_READS = {"Gather", "Index", "IndexSelect", "Take", "UnsafeIndex"}
_PARTS = {"Select", "Slice", *_SPLITS.split(), *_READS}
#: Nodes of several outputs. Of other nodes, the rule is for the first output only.
_SEVERAL = {"FusedRmsNorm", "NativeGroupNorm", "NativeLayerNorm", "PreluKernelBackward", "VarMean"}
_SEVERAL |= {"ThnnFusedLstmCell", *_SPLITS.split()}


@cache
def _kind(name: str) -> str:
    return re.sub(r"Backward\d+$", "", name.removeprefix("torch::autograd::"))


@cache
def _rule_of(kind: str) -> AxisRule | None:
    images = _OF_IMAGES.match(kind)
    return partial(_trailing, int(images[1])) if images else _RULES.get(kind)
