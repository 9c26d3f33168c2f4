"""Proves from autograd's graph where the samples are in a layer's output.

Samples are axis 0 of the model's output. From there their place is followed back, node by node. A
rule holds for all values of the tensors: what depends on values, as a permutation by an index, a
mask or a matrix does, has no rule. Whatever no rule proves is unknown.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any, NamedTuple

from torch import Tensor

from curvlinops.support.torch_internals import input_metadata

#: Saved axes that count from the end are unsigned numbers.
_WRAPPED = 2**64

#: Nodes all of whose outputs have the samples in one place; of others only the first is followed.
_SEVERAL = {"Split", "SplitWithSizes", "UnsafeSplit", "UnsafeSplitWithSizes", "StdMean"}
_SEVERAL |= {"Unbind", "VarMean"}


class Place(NamedTuple):
    """Where the samples are in a tensor: on an axis of length ``before * N * after``."""

    axis: int
    before: int
    after: int


#: The nodes that a node reads, each with the number of its output; ``None`` for constants.
_Edges = tuple[tuple[Any, int], ...]


class _Step:
    """A node of the graph, and the place of the samples in its output."""

    def __init__(self, node: Any, sources: "_Edges", place: Place, num_samples: int):
        self.node, self.sources, self.place, self.num_samples = node, sources, place, num_samples
        self.shape = input_metadata(node, 0).shape
        self.ndim = len(self.shape)

    def source_shape(self, i: int = 0) -> Sequence[int]:
        """Return the shape of an input that has a graph."""
        return input_metadata(*self.sources[i]).shape

    def axes(self, name: str = "dim", ndim: int | None = None) -> list[int]:
        """Return axes that the node has saved, none if it takes all axes."""
        ndim, saved = ndim or self.ndim, getattr(self.node, f"_saved_{name}", None)
        saved = saved if isinstance(saved, tuple) else () if saved is None else (saved,)
        return [axis % ndim if axis < ndim else axis - _WRAPPED + ndim for axis in saved]

    def at(self, axis: int) -> Place:
        """Return the place on another axis."""
        return Place(axis, self.place.before, self.place.after)

    def aligned(self, i: int) -> Place | None:
        """Return the place on the same axis, counted from the last one, of an input."""
        if i >= len(self.sources) or self.sources[i][0] is None:
            return None
        shape = self.source_shape(i)
        axis = self.place.axis - self.ndim + len(shape)
        if axis < 0 or shape[axis] != self.shape[self.place.axis]:
            return None
        return self.place if axis == self.place.axis else self.at(axis)


#: The places in the inputs of a node, by position; what is missing or ``None`` is unknown.
Places = Mapping[int, Place | None]
Rule = Callable[[_Step], Places]


def _elementwise(step: _Step) -> Places:
    """Each entry depends on entries at the same place; other axes may be broadcast."""
    return {i: step.aligned(i) for i in range(len(step.sources))}


def _along(step: _Step, name: str = "dim") -> Places:
    """The same for what mixes entries along some axes only."""
    axes = step.axes(name)
    return {} if not axes or step.place.axis in axes else _elementwise(step)


def _last(num_axes: int, *inputs: int) -> Rule:
    """Return the rule of what mixes entries along the last axes only, for some of its inputs."""

    def rule(step: _Step) -> Places:
        inside = step.place.axis < step.ndim - num_axes
        return {i: step.aligned(i) for i in inputs} if inside else {}

    return rule


def _normalized(step: _Step) -> Places:
    return _last(len(step.node._saved_normalized_shape), 0)(step)


def _padded(step: _Step) -> Places:
    return _last(len(step.node._saved_pad) // 2, 0)(step)


def _batch_norm(step: _Step) -> Places:
    # in train mode, channels are normalized one by one, with the samples in them for instance norms
    return {0: step.place} if not step.node._saved_training or step.place.axis == 1 else {}


def _batches(*inputs: int) -> Rule:
    """Return the rule of what has samples on axis 0 only, for some of its inputs."""

    def rule(step: _Step) -> Places:
        return dict.fromkeys(inputs, step.place) if step.place.axis == 0 else {}

    return rule


def _reshaped(step: _Step) -> Places:
    """The same entries in the same order, in other axes."""
    outer, left = prod(step.shape[: step.place.axis]) * step.place.before, 1
    for axis, length in enumerate(step.source_shape()):
        before, rest = divmod(outer, max(left, 1))
        after, more = divmod(length, max(before * step.num_samples, 1))
        if before and after and rest == more == 0:
            return {0: Place(axis, before, after)}
        left *= length
    return {}


def _restrided(step: _Step) -> Places:
    """What ends a mean over images that are channels last: the same entries, stored otherwise."""
    is_same = [*step.node._saved_size] == [*step.source_shape()]
    is_mean = _operation(step.sources[0][0]) == "Mean"
    in_place = step.node.name() == "AsStridedBackward1"
    return {0: step.place} if is_same and is_mean and in_place else {}


def _reduced(step: _Step) -> Places:
    """Sums, means and the like along some axes, which may be kept with length one."""
    ndim = len(step.source_shape())
    axes = step.axes(ndim=ndim)
    if not axes or (step.node._saved_keepdim and step.place.axis in axes):
        return {}
    kept = range(ndim) if step.node._saved_keepdim else [x for x in range(ndim) if x not in axes]
    return {0: step.at(kept[step.place.axis])}


def _selected(step: _Step) -> Places:
    (axis,) = step.axes(ndim=step.ndim + 1)
    return {0: step.at(step.place.axis + (step.place.axis >= axis))}


def _stacked(step: _Step) -> Places:
    (axis,) = step.axes()
    place = step.at(step.place.axis - (step.place.axis > axis))
    return {} if step.place.axis == axis else dict.fromkeys(range(len(step.sources)), place)


def _transposed(step: _Step) -> Places:
    (a,), (b,) = step.axes("dim0"), step.axes("dim1")
    return {0: step.at({a: b, b: a}.get(step.place.axis, step.place.axis))}


def _permuted(step: _Step) -> Places:
    return {0: step.at(step.axes("dims")[step.place.axis])}


def _matrix_transposed(step: _Step) -> Places:
    return {0: step.at(step.ndim - 1 - step.place.axis)}


def _product(added: int) -> Rule:
    """Return the rule of products of matrices, to which ``added`` inputs in front are added."""

    def rule(step: _Step) -> Places:
        left, right, axis = added, added + 1, step.place.axis
        found = {i: step.aligned(i) for i in range(added)}
        if step.ndim == 3 and axis == 0:  # a product for each sample
            return found | {left: step.place, right: step.place}
        # rows of the first factor, or columns of the second one; a vector has no columns
        is_row = axis == max(step.ndim - 2, 0)
        return found | {left if is_row else right: step.place}

    return rule


def _trilinear(step: _Step) -> Places:
    """Products of three factors, which lack some of the axes."""
    lacking = (step.axes(name) for name in ("expand1", "expand2", "expand3"))
    is_kept = step.place.axis == 0 and 0 not in step.axes("sumdim")
    return {i: step.place for i, axes in enumerate(lacking) if is_kept and 0 not in axes}


def _by_name(rules: Mapping[str, Rule]) -> dict[str, Rule]:
    return {name: rule for names, rule in rules.items() for name in names.split()}


_ELEMENTWISE = (
    "Abs Acos Acosh Add Addcdiv Addcmul Alias Angle Asin Asinh Atan Atan2 Atanh Ceil Celu Clamp "
    "ClampMax ClampMin Clone Complex Conj Copysign Cos Cosh Digamma Div Elu Erf Erfc Erfinv Exp "
    "Exp2 Expand Expm1 Floor Fmax Fmin Fmod Frac Gelu Hardshrink Hardsigmoid Hardswish Hardtanh "
    "Hypot LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid Logaddexp Logaddexp2 Logit "
    "MaskedFill Maximum Minimum Mish Mul NanToNum NativeDropout Neg Polar Pow PreluKernel "
    "Reciprocal Relu Remainder Repeat Round RreluWithNoise Rsqrt Rsub Sgn Sigmoid Sign Silu Sin "
    "Sinc Sinh Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Tril Triu Trunc Where Xlogy"
)
_ALONG = (
    "Cat Cummax Cummin Cumprod Cumsum Gather Glu IndexAdd IndexCopy IndexFill IndexSelect "
    "LogSoftmax Logcumsumexp SafeSoftmax Scatter ScatterAdd ScatterReduce Slice Softmax Sort Split "
    "SplitWithSizes Topk UnsafeSplit UnsafeSplitWithSizes"
)
_REDUCED = "Amax Amin LinalgVectorNorm Logsumexp Max Mean Median Min Nansum Norm Prod Std StdMean"
_LAST_TWO = (
    "AdaptiveAvgPool2D AdaptiveMaxPool2D AvgPool2D MaxPool2DWithIndices MkldnnMaxPool2D "
    "ReflectionPad2D ReplicationPad2D UpsampleBicubic2D UpsampleBicubic2DAa UpsampleBilinear2D "
    "UpsampleBilinear2DAa UpsampleNearest2D UpsampleNearestExact2D"
)
_LAST_THREE = (
    "AdaptiveAvgPool3D AdaptiveMaxPool3D AvgPool3D MaxPool3DWithIndices MkldnnMaxPool3D "
    "PixelShuffle PixelUnshuffle ReflectionPad3D ReplicationPad3D UpsampleNearest3D "
    "UpsampleNearestExact3D UpsampleTrilinear3D"
)
_ATTENTION = (
    "ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention "
    "ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu"
)
#: The rules of PyTorch's operations.
_RULES = _by_name(
    {
        _ELEMENTWISE: _elementwise,
        _ALONG: _along,
        "Flip Roll": lambda step: _along(step, "dims"),
        f"{_REDUCED} Sum Var VarMean": _reduced,
        "ReshapeAlias Squeeze UnsafeView Unsqueeze View": _reshaped,
        "AsStrided": _restrided,
        "Permute": _permuted,
        "Transpose": _transposed,
        "T": _matrix_transposed,
        "Select Unbind": _selected,
        "Stack": _stacked,
        "Bmm Mm Mv": _product(0),
        "Addmm Addmv Baddbmm": _product(1),
        "Trilinear": _trilinear,
        "Cdist": _last(2, 0, 1),
        _ATTENTION: _last(2, 0, 1, 2, 3),
        "ReflectionPad1D ReplicationPad1D UpsampleLinear1D UpsampleNearest1D": _last(1, 0),
        _LAST_TWO: _last(2, 0),
        _LAST_THREE: _last(3, 0),
        "ConstantPadNd": _padded,
        "ChannelShuffle Col2Im Convolution Im2Col NativeGroupNorm": _batches(0),
        "GridSampler2D GridSampler3D": _batches(0, 1),
        "FusedRmsNorm NativeLayerNorm": _normalized,
        "CudnnBatchNorm MiopenBatchNorm NativeBatchNorm": _batch_norm,
    }
)


def _operation(node: Any) -> str:
    """Return the operation of PyTorch that a node is of; ``""`` for the user's own functions."""
    return _without_number(node.name())


@cache
def _without_number(name: str) -> str:
    return name.rstrip("0123456789").removesuffix("Backward") if name[-1:].isdigit() else ""


def find_places(output: Tensor, num_samples: int) -> dict[Any, Place]:
    """Return where the samples are in the outputs of nodes, as far as that is proved.

    Args:
        output: The model's output. Each sample has the same number of neighboring rows.
        num_samples: N.

    Returns:
        The places by node. They are those of its first output, see ``place_in``.
    """
    root = output.grad_fn
    if root is None or not is_followed(root, output.output_nr):
        return {}
    found: dict[Any, Place | None] = {root: Place(0, 1, len(output) // num_samples)}
    for node, edges in _consumers_first(root):
        place, inputs = found[node], dict[int, Place | None]()
        if place is not None and (rule := _RULES.get(_operation(node))) is not None:
            inputs = rule(_Step(node, edges, place, num_samples))
        for i, (source, number) in enumerate(edges):
            if source is not None:
                new = inputs.get(i) if is_followed(source, number) else None
                # consumers have to agree
                found[source] = new if found.get(source, new) == new else None
    return {node: place for node, place in found.items() if place is not None}


def is_followed(node: Any, output_nr: int) -> bool:
    """Return whether a node's place is that of one of its outputs."""
    return output_nr == 0 or _operation(node) in _SEVERAL


def _consumers_first(root: Any) -> list[tuple[Any, _Edges]]:
    """Return all nodes of a graph and what they read, each behind all those that read it."""
    order: list[tuple[Any, _Edges]] = []
    seen = {None}
    stack: list[tuple[Any, _Edges | None]] = [(root, None)]
    while stack:
        node, edges = stack.pop()
        if edges is not None:
            order.append((node, edges))
        elif node not in seen:
            seen.add(node)
            edges = node.next_functions
            stack.append((node, edges))
            stack += [(source, None) for source, _ in edges if source not in seen]
    return order[::-1]
