"""How an axis of an operation's output is found again in its inputs, see ``flow``.

To add an operation, write a function for the name of its node in graphs, less ``Backward0``. Which
axis it returns must follow from shapes, options and indices, whatever the other numbers are.
"""

import re
from collections.abc import Callable
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import torch


class Move(NamedTuple):
    """An axis of a node's output, to be followed to an input.

    Attributes:
        node: The node.
        place: The number of the input.
        axis: The axis of the output.
        out: The output's shape.
        shape: The input's shape.
    """

    node: Any
    place: int
    axis: int
    out: tuple[int, ...]
    shape: tuple[int, ...]


#: By the name of an operation: which axis of the input corresponds to that of the output. Entries
#: with one index on the latter depend on no others than those with the same index on the former. If
#: there is none, ``None``, or an axis of another length.
_RULES: dict[str, Callable[[Move], int | None]] = {}


def source_axis(move: Move) -> int | None:
    """Return the input's axis that numbers the same things as the output's, if there is one."""
    rule = _RULES.get(operation(move.node))
    axis = None if rule is None else rule(move)
    if axis is None or not 0 <= axis < len(move.shape) or move.shape[axis] != move.out[move.axis]:
        return None
    return axis


def operation(node: Any) -> str | None:
    """Return which of PyTorch's operations a node is, ``None`` for custom functions."""
    return _operation(node.name())


@lru_cache(maxsize=1024)
def _operation(name: str) -> str | None:
    found = re.fullmatch(r"(\w+?)Backward\d+", name)  # those of custom functions have no number
    return None if found is None else found[1]


def _rule(names: str) -> Callable[[Callable], Callable]:
    def register(rule: Callable[[Move], int | None]) -> Callable[[Move], int | None]:
        _RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def _signed(number: int) -> int:
    """Return an option that may be negative, which nodes show without a sign."""
    return number - 2**64 if number >= 2**63 else number


def _dims(move: Move, num_axes: int) -> set[int]:
    """Return on which axes an operation acts; if it does not say so, on all."""
    node = move.node
    value = getattr(node, "_saved_dim", None)
    value = getattr(node, "_saved_dims", None) if value is None else value
    values = value if isinstance(value, tuple) else () if value is None else (value,)
    return {_signed(number) % num_axes for number in values} or set(range(num_axes))


@_rule(
    """Abs Acos Acosh Add Addcdiv Addcmul Asin Asinh Atan Atan2 Atanh Ceil Celu Clamp ClampMax
    ClampMin Clone Cos Cosh Div Elu Erf Erfc Erfinv Exp Exp2 Expand Expm1 Fill Floor Frac Gelu
    Hardshrink Hardsigmoid Hardswish Hardtanh LeakyRelu Lerp Lgamma Log Log10 Log1P Log2 LogSigmoid
    Logaddexp Logaddexp2 Logit MaskedFill Maximum Minimum Mish Mul NanToNum NativeDropout Neg Pow
    PreluKernel Reciprocal Relu Repeat Round Rsqrt Rsub Selu Sgn Sigmoid Sign Silu Sin Sinc Sinh
    Softplus Softshrink Sqrt Sub Tan Tanh Threshold ToCopy Tril Triu Trunc Where Xlogy"""
)
def _elementwise(move: Move) -> int:
    """The last axes of all inputs belong together."""
    return move.axis - (len(move.out) - len(move.shape))


@_rule("Permute")
def _permute(move: Move) -> int:
    return _signed(move.node._saved_dims[move.axis]) % len(move.out)


@_rule("T")
def _t(move: Move) -> int:
    return len(move.out) - 1 - move.axis


@_rule("Transpose")
def _transpose(move: Move) -> int:
    first, second = move.node._saved_dim0, move.node._saved_dim1
    first, second = _signed(first) % len(move.out), _signed(second) % len(move.out)
    return {first: second, second: first}.get(move.axis, move.axis)


@_rule(
    """Cummax Cummin Cumprod Cumsum FftC2C FftC2R FftR2C Flip Gather Glu IndexSelect LogSoftmax
    Logcumsumexp Roll Slice Softmax Sort Split SplitWithSizes Topk UnsafeSplit"""
)
def _along(move: Move) -> int | None:
    """Return the axis, unless the operation acts on it."""
    return None if move.place or move.axis in _dims(move, len(move.out)) else move.axis


@_rule("Cat")
def _cat(move: Move) -> int | None:
    """The same for any number of inputs."""
    return _along(move._replace(place=0)) if len(move.shape) == len(move.out) else None


@_rule("Index")
def _index(move: Move) -> int | None:
    """Neighboring axes are indexed, behind the axis, or with it in its order, as by a range."""
    indices = move.node._saved_indices
    where = [dim for dim, index in enumerate(indices) if index is not None]
    if where != list(range(where[0], where[-1] + 1)):
        return None
    first = indices[where[0]]
    in_order = first.ndim == 1 and first.dtype == torch.int64 and move.axis == where[0]
    if in_order and all(index.ndim == 1 for index in indices[where[0] : where[-1] + 1]):
        in_order = torch.equal(first, torch.arange(move.shape[move.axis], device=first.device))
        return move.axis if in_order else None
    return move.axis if move.axis < where[0] else None


@_rule("AsStrided")
def _as_strided(move: Move) -> int | None:
    """What global pooling makes of a mean, which PyTorch returns in contiguous memory."""
    source, node = move.node.next_functions[move.place][0], move.node
    if operation(source) != "Mean" or move.out != move.shape or node._saved_storage_offset:
        return None
    strides = [prod(move.out[axis + 1 :]) for axis in range(len(move.out))]
    found = zip(move.out, node._saved_stride, strides, strict=True)
    dense = all(length == 1 or stride == expected for length, stride, expected in found)
    return move.axis if dense else None


@_rule("Stack")
def _stack(move: Move) -> int | None:
    (dim,) = _dims(move, len(move.out))
    return None if move.axis == dim else move.axis - (move.axis > dim)


@_rule("Select Unbind")
def _select(move: Move) -> int:
    (dim,) = _dims(move, len(move.shape))
    return move.axis + (move.axis >= dim)


@_rule(
    """Amax Amin LinalgVectorNorm Logsumexp Max Mean Min Nansum Norm Prod Std StdMean Sum Var
    VarMean"""
)
def _reduction(move: Move) -> int | None:
    """Return the axis, unless it is a summary of another one."""
    num_axes = len(move.shape)
    dims = _dims(move, num_axes)
    if len(move.out) == num_axes:
        return None if move.axis in dims else move.axis
    kept = [axis for axis in range(num_axes) if axis not in dims]
    return kept[move.axis] if len(kept) == len(move.out) else None


@_rule("Mm Bmm")
def _product(move: Move) -> int | None:
    """Of matrices ``[*batch, n, k]`` and ``[*batch, k, m]``."""
    last = len(move.out) - 1
    summed = (last, last - 1)[move.place]
    return None if move.axis == summed else move.axis


@_rule("Addmm Baddbmm")
def _added_product(move: Move) -> int | None:
    return _product(move._replace(place=move.place - 1)) if move.place else _elementwise(move)


@_rule(
    """ScaledDotProductCudnnAttention ScaledDotProductEfficientAttention
    ScaledDotProductFlashAttention ScaledDotProductFlashAttentionForCpu"""
)
def _attention(move: Move) -> int | None:
    """Of queries, keys and values ``[batch, heads, positions, features]``."""
    return move.axis if move.place < 3 and move.axis < 2 else None


@_rule("ChannelShuffle Convolution NativeGroupNorm")
def _first_axis(move: Move) -> int | None:
    """What ``[N, C, *]`` and parameters become."""
    return 0 if move.place == 0 and move.axis == 0 else None


@_rule("Im2Col Col2Im")
def _patches(move: Move) -> int | None:
    """Of ``[N, C, H, W]``, ``[N, C * kernel, positions]``."""
    return 0 if move.axis == 0 and len(move.out) + len(move.shape) == 7 else None


@_rule("Unfold")
def _unfold(move: Move) -> int | None:
    dim = _signed(move.node._saved_dimension) % len(move.shape)
    return None if move.axis == dim else move.axis  # the last one is new


@_rule("NativeBatchNorm CudnnBatchNorm MiopenBatchNorm")
def _batch_norm(move: Move) -> int | None:
    """In train mode, channels are apart."""
    apart = move.axis == 1 or not getattr(move.node, "_saved_training", True)
    return move.axis if move.place == 0 and apart else None


@_rule("NativeLayerNorm FusedRmsNorm")
def _layer_norm(move: Move) -> int | None:
    kept = len(move.out) - len(move.node._saved_normalized_shape)
    return move.axis if move.place == 0 and move.axis < kept else None


@_rule("ConstantPadNd")
def _padding(move: Move) -> int | None:
    pad, begin = move.node._saved_pad, 2 * (len(move.out) - 1 - move.axis)
    return None if any(pad[begin : begin + 2]) else move.axis


@_rule(
    """AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool2D AdaptiveMaxPool3D AvgPool2D AvgPool3D
    FractionalMaxPool2D FractionalMaxPool3D MaxPool2DWithIndices MaxPool3DWithIndices
    ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D
    ReplicationPad3D UpsampleBicubic2D UpsampleBilinear2D UpsampleLinear1D UpsampleNearest1D
    UpsampleNearest2D UpsampleNearest3D UpsampleNearestExact1D UpsampleNearestExact2D
    UpsampleNearestExact3D UpsampleTrilinear3D"""
)
def _spatial(move: Move) -> int | None:
    """On as many of the last axes as the name says."""
    num_axes = int(re.search(r"(\d)D", operation(move.node))[1])
    return move.axis if move.axis < len(move.out) - num_axes else None


@_rule("PixelShuffle PixelUnshuffle")
def _shuffle(move: Move) -> int | None:
    return move.axis if move.axis < len(move.out) - 3 else None
