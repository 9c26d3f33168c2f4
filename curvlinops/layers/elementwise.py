"""Parameters that are added to inputs, multiply them, or enter another elementwise function."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.forms import Direct, Form
from curvlinops.layers.uses import Sort, Use, broadcast, handles


def _slope(
    function: Callable, args: list, options: dict, place: int | str, shape: torch.Size
) -> Tensor:
    """Return the derivative with respect to one of an elementwise function's real arguments.

    Of a complex function it is conjugate: the real part of its product with a gradient counts.
    """
    args, options = list(args), dict(options)
    where = args if isinstance(place, int) else options
    with torch.enable_grad():
        where[place] = where[place].expand(shape).clone().requires_grad_()
        out = function(*args, **options).sum()
        parts = [out.real, out.imag] if out.is_complex() else [out]
        slopes = [
            torch.autograd.grad(
                part, where[place], retain_graph=True, allow_unused=True, materialize_grads=True
            )[0]
            for part in parts
        ]
    return torch.complex(*slopes).conj() if out.is_complex() else slopes[0]


def _elementwise(function: Callable) -> Callable[..., dict[int | str, Use]]:
    def uses(*args: Any, **options: Any) -> dict[int | str, Use]:
        places = {**dict(enumerate(args)), **options}
        tensors = {place: x for place, x in places.items() if isinstance(x, Tensor)}
        shape = torch.broadcast_shapes(*(x.shape for x in tensors.values()))
        return {
            place: broadcast(x.shape, shape, partial(_slope, function, args, options, place, shape))
            for place, x in tensors.items()
            if x.is_floating_point()
        }

    return uses


def _reversed(function: Callable) -> Callable:
    return lambda input, other, **options: function(other, input, **options)


def _masked_fill(input: Tensor, mask: Tensor, value: Any) -> Tensor:
    return torch.where(mask, value, input)


#: An equivalent that writes nothing in place, for each way to call an elementwise function.
_ELEMENTWISE = {
    torch.add: (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    torch.sub: (torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__),
    _reversed(torch.sub): (torch.rsub, Tensor.__rsub__),
    torch.mul: (torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.__mul__),
    torch.div: (
        *(torch.div, torch.divide, torch.true_divide),
        *(Tensor.div, Tensor.div_, Tensor.true_divide, Tensor.__truediv__),
    ),
    _reversed(torch.div): (Tensor.__rdiv__,),
    torch.pow: (torch.pow, Tensor.pow, Tensor.__pow__),
    torch.float_power: (torch.float_power, Tensor.float_power),
    torch.maximum: (torch.maximum, Tensor.maximum, torch.max, Tensor.max),
    torch.minimum: (torch.minimum, Tensor.minimum, torch.min, Tensor.min),
    torch.clamp: (torch.clamp, Tensor.clamp, torch.clip, Tensor.clip),
    torch.where: (torch.where,),
    Tensor.where: (Tensor.where,),
    _masked_fill: (torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_),
    torch.lerp: (torch.lerp, Tensor.lerp),
    torch.addcmul: (torch.addcmul, Tensor.addcmul),
    torch.addcdiv: (torch.addcdiv, Tensor.addcdiv),
    torch.atan2: (torch.atan2, Tensor.atan2, torch.arctan2, Tensor.arctan2),
    torch.hypot: (torch.hypot, Tensor.hypot),
    torch.xlogy: (torch.xlogy, Tensor.xlogy),
    torch.logaddexp: (torch.logaddexp, Tensor.logaddexp),
}
for _function, _calls in _ELEMENTWISE.items():
    handles(*_calls)(_elementwise(_function))
handles(Tensor.__rmul__)(_elementwise(torch.mul))
handles(Tensor.__iadd__)(_elementwise(torch.add))
handles(Tensor.__imul__)(_elementwise(torch.mul))

#: With a parameter alone these make one of more entries, e.g. a token for each sample.
REPEATING = {
    *(Tensor.expand, Tensor.expand_as, torch.broadcast_to, Tensor.broadcast_to),
    *(Tensor.repeat, Tensor.tile, torch.tile),
}


@handles(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to)
def expand(input: Tensor, *size: Any) -> dict[str, Use]:
    """A parameter for each sample, such as a class token."""
    return {"input": broadcast(input.shape, input.expand(*size).shape)}


@handles(Tensor.expand_as)
def expand_as(input: Tensor, other: Tensor) -> dict[str, Use]:
    """The same, with the shape of another tensor."""
    return {"input": broadcast(input.shape, other.shape)}


@handles(Tensor.repeat, Tensor.tile, torch.tile)
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

    def split(g: Tensor) -> Tensor:
        return use.split(g.reshape(-1, *apart))

    def form(g: Tensor, sort: Sort) -> Form:
        return Direct.of(g.sum(2).reshape(*g.shape[:2], *input.shape))

    return {"input": Use(use.lead, split, form)}
