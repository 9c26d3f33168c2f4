"""Parameters that are added to inputs, multiply them, or enter another elementwise function."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.rules import Slope, Use, broadcast, handles


def _slope(
    function: Callable, args: list, options: dict, argument: int | str, shape: torch.Size
) -> Tensor:
    """Return the derivative with respect to one of an elementwise function's real arguments.

    Of a complex function it is conjugate: the real part of its product with a gradient counts.
    """
    args, options = list(args), dict(options)
    container = args if isinstance(argument, int) else options
    with torch.enable_grad():
        container[argument] = container[argument].expand(shape).clone().requires_grad_()
        out = function(*args, **options).sum()
        components = [out.real, out.imag] if out.is_complex() else [out]
        slopes = [
            torch.autograd.grad(
                component,
                container[argument],
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )[0]
            for component in components
        ]
    return torch.complex(*slopes).conj() if out.is_complex() else slopes[0]


def _elementwise(function: Callable) -> Callable[..., dict[int | str, Use]]:
    def uses(*args: Any, **options: Any) -> dict[int | str, Use]:
        arguments = {**dict(enumerate(args)), **options}
        tensors = {argument: x for argument, x in arguments.items() if isinstance(x, Tensor)}
        shape = torch.broadcast_shapes(*(x.shape for x in tensors.values()))
        is_plain = len(arguments) == 2 and not any(x.is_complex() for x in tensors.values())
        is_sum = function is torch.add and is_plain

        def slope(argument: int | str) -> Slope:
            if is_sum:
                return 1.0
            return partial(_slope, function, args, options, argument, shape)

        return {
            argument: broadcast(x.shape, shape, slope(argument))
            for argument, x in tensors.items()
            if x.is_floating_point()
        }

    return uses


def _reversed(function: Callable) -> Callable:
    return lambda input, other, **options: function(other, input, **options)


def _masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, value, input)


#: An equivalent that writes nothing in place, and the names of each elementwise function.
_ELEMENTWISE = {
    torch.add: "add __add__ __radd__ __iadd__",
    torch.sub: "sub subtract __sub__ __isub__",
    _reversed(torch.sub): "rsub __rsub__",
    torch.mul: "mul multiply __mul__ __rmul__ __imul__",
    torch.div: "div divide true_divide __truediv__ __itruediv__",
    _reversed(torch.div): "__rdiv__",
    torch.pow: "pow __pow__ __ipow__",
    torch.float_power: "float_power",
    torch.remainder: "remainder __mod__ __imod__",
    torch.fmod: "fmod",
    torch.maximum: "maximum max",
    torch.minimum: "minimum min",
    torch.fmax: "fmax",
    torch.fmin: "fmin",
    torch.clamp: "clamp clip",
    torch.clamp_min: "clamp_min",
    torch.clamp_max: "clamp_max",
    torch.copysign: "copysign",
    _masked_fill: "masked_fill",
    torch.lerp: "lerp",
    torch.addcmul: "addcmul",
    torch.addcdiv: "addcdiv",
    torch.atan2: "atan2 arctan2",
    torch.hypot: "hypot",
    torch.ldexp: "ldexp",
    torch.xlogy: "xlogy",
    torch.special.xlog1py: "xlog1py",
    torch.logaddexp: "logaddexp",
    torch.logaddexp2: "logaddexp2",
}


def _register(function: Callable, name: str) -> None:
    """Register all calls of an elementwise function that have a name."""
    for owner in (torch, torch.special, Tensor):
        for known in (name, f"{name}_"):
            call = getattr(owner, known, None)
            if call is not None:
                in_place = known != name or name.startswith("__i")
                handles(call, in_place=in_place)(_elementwise(function))


for _function, _names in _ELEMENTWISE.items():
    for _name in _names.split():
        _register(_function, _name)
# their arguments are in another order than those of the method
handles(torch.where)(_elementwise(torch.where))
handles(Tensor.where)(_elementwise(Tensor.where))


@handles(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to, repeats=True)
def expand(input: Tensor, *size: Any) -> dict[str, Use]:
    """A parameter for each sample, such as a class token."""
    return {"input": broadcast(input.shape, input.expand(*size).shape)}


@handles(Tensor.expand_as, repeats=True)
def expand_as(input: Tensor, other: Tensor) -> dict[str, Use]:
    """The same, with the shape of another tensor."""
    return {"input": broadcast(input.shape, other.shape)}


@handles(Tensor.repeat, Tensor.tile, torch.tile, repeats=True)
def repeat(input: Tensor, *sizes: Any, **options: Any) -> dict[str, Use]:
    """The same, with copies side by side along any axis."""
    counts = sizes or tuple(options.values())
    counts = counts[0] if isinstance(counts[0], tuple | list) else counts
    num_axes = max(len(counts), input.ndim)
    counts = (1,) * (num_axes - len(counts)) + tuple(counts)
    lengths = (1,) * (num_axes - input.ndim) + tuple(input.shape)
    # each axis falls into copies and entries
    apart = [length for pair in zip(counts, lengths, strict=True) for length in pair]
    single = [length for entries in lengths for length in (1, entries)]
    use = broadcast(single, apart)

    def to_rows(g: Tensor) -> Tensor:
        return use.to_rows(g.reshape(-1, *apart))

    return {"input": Use(use.row_shape, to_rows, use.gradient)}


# --- scale and shift of normalized inputs


def _affine(
    shape: torch.Size, normalize: Callable[[], Tensor], aligned: int, **arguments: Tensor | None
) -> dict[str, Use]:
    uses = {}
    for name, argument in arguments.items():
        if argument is not None:
            slope = normalize if name == "weight" else 1.0
            uses[name] = broadcast(argument.shape, shape, slope, aligned)
    return uses


@handles(torch.layer_norm)
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> dict[str, Use]:
    """Normalized over the last axes."""
    normalize = partial(torch.layer_norm, input, normalized_shape, None, None, eps)
    return _affine(input.shape, normalize, 0, weight=weight, bias=bias)


@handles(torch.rms_norm)
def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> dict[str, Use]:
    """Divided by the root mean square over the last axes."""
    normalize = partial(torch.rms_norm, input, normalized_shape, None, eps)
    return _affine(input.shape, normalize, 0, weight=weight)


@handles(torch.group_norm)
def group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> dict[str, Use]:
    """Normalized over groups of channels."""
    normalize = partial(torch.group_norm, input, num_groups, None, None, eps)
    return _affine(input.shape, normalize, input.ndim - 2, weight=weight, bias=bias)


@handles(torch.batch_norm)
def batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> dict[str, Use]:
    """Normalized by running statistics; those of the batch would couple the samples."""
    if training:
        return {}
    # a later call may write to the running statistics
    statistics = running_mean.detach().clone(), running_var.detach().clone()
    normalize = partial(
        torch.batch_norm, input, None, None, *statistics, False, momentum, eps, cudnn_enabled
    )
    return _affine(input.shape, normalize, max(input.ndim - 2, 0), weight=weight, bias=bias)


@handles(torch.instance_norm)
def instance_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> dict[str, Use]:
    """Normalized over space, or by running statistics."""
    # the statistics are the user's: not to be updated once more
    statistics = (
        (None, None)
        if use_input_stats
        else (running_mean.detach().clone(), running_var.detach().clone())
    )
    normalize = partial(
        torch.instance_norm, input, None, None, *statistics, use_input_stats, momentum, eps, True
    )
    return _affine(input.shape, normalize, input.ndim - 2, weight=weight, bias=bias)


@handles(torch.prelu)
def prelu(input: Tensor, weight: Tensor) -> dict[str, Use]:
    """The slope on the negative side, of each channel or of all."""
    aligned = max(input.ndim - 2, 0) if weight.ndim == 1 and input.ndim > 0 else 0
    shape = weight.shape
    return {"weight": broadcast(shape, input.shape, partial(input.clamp, max=0.0), aligned)}
