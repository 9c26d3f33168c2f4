"""Parameters that are added to inputs, or multiply them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from curvlinops.layers.uses import Use, broadcast, handles


def _slope(function: Callable, args: list, place: int, options: dict, shape: torch.Size) -> Tensor:
    """Return the derivative with respect to one of an elementwise function's arguments."""
    args = list(args)
    with torch.enable_grad():
        args[place] = args[place].expand(shape).clone().requires_grad_()
        return torch.autograd.grad(function(*args, **options).sum(), args[place])[0]


def _binary(function: Callable) -> Callable[..., dict[str, Use]]:
    def uses(input: Any, other: Any, **options: Any) -> dict[str, Use]:
        args = [input, other]
        shape = torch.broadcast_shapes(*(x.shape for x in args if isinstance(x, Tensor)))
        return {
            name: broadcast(
                argument.shape, shape, partial(_slope, function, args, place, options, shape)
            )
            for place, (name, argument) in enumerate(zip(("input", "other"), args, strict=True))
            if isinstance(argument, Tensor) and argument.is_floating_point()
        }

    return uses


def _reversed(function: Callable) -> Callable:
    return lambda input, other, **options: function(other, input, **options)


#: An equivalent that writes nothing in place, for each way to call an elementwise function.
_BINARY = {
    torch.add: (torch.add, Tensor.add, Tensor.add_, Tensor.__add__, Tensor.__radd__),
    torch.sub: (torch.sub, torch.subtract, Tensor.sub, Tensor.sub_, Tensor.__sub__),
    _reversed(torch.sub): (torch.rsub, Tensor.__rsub__),
    torch.mul: (torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.__mul__),
    torch.div: (torch.div, torch.divide, Tensor.div, Tensor.div_, Tensor.__truediv__),
    _reversed(torch.div): (Tensor.__rdiv__,),
    torch.pow: (torch.pow, Tensor.pow, Tensor.__pow__),
    torch.maximum: (torch.maximum, Tensor.maximum),
    torch.minimum: (torch.minimum, Tensor.minimum),
}
for _function, _calls in _BINARY.items():
    handles(*_calls)(_binary(_function))
handles(Tensor.__rmul__)(_binary(torch.mul))
handles(Tensor.__iadd__)(_binary(torch.add))
handles(Tensor.__imul__)(_binary(torch.mul))


@handles(Tensor.expand, torch.broadcast_to, Tensor.broadcast_to)
def expand(input: Tensor, *size: Any) -> dict[str, Use]:
    """A parameter for each sample, such as a class token."""
    return {"input": broadcast(input.shape, input.expand(*size).shape)}


@handles(Tensor.expand_as)
def expand_as(input: Tensor, other: Tensor) -> dict[str, Use]:
    """The same, with the shape of another tensor."""
    return {"input": broadcast(input.shape, other.shape)}
