"""Derivatives with respect to sharded parameters.

A gathered parameter is a function of a leaf, which stands for it in the graph and has no memory.
In forward mode, the leaf has a tangent that stands for a vector, which is gathered. The backward
pass adds the gradient of the whole parameter to a sum, of which each process has a part. If the
gradient is differentiated again, the vector that multiplies it is gathered.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.support.torch_internals import has_hooks, wanted_gradients


class ShardedParameter(NamedTuple):
    """What a parameter of full shape was gathered from: a leaf, a ``stand_in`` of that shape.

    ``number`` counts the parameters of the module. If ``is_summed``, gradients are added to sums of
    all processes, see ``Shards.product``; else they are those of this process, of full shape.
    """

    leaf: Tensor
    shards: Any
    name: str
    number: int
    is_summed: bool


class Gather(torch.autograd.Function):
    """A gathered parameter, as a function of the leaf that stands for it."""

    @staticmethod
    def forward(full: Tensor, *parameter: Any) -> Tensor:
        """Return the gathered parameter."""
        return full.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep what derivatives need."""
        _, _, *ctx.rest = inputs
        ctx.dtype = output.dtype
        ctx.set_materialize_grads(False)  # zeros would take memory

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple:
        """Pass the gradient to where it belongs."""
        found = None if gradient is None else _scattered(gradient, *ctx.rest)
        return None, found, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        """Gather the vector for which the leaf's tangent stands."""
        shards, name, *_ = ctx.rest
        return shards.vectors(name)[0].to(ctx.dtype)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, *args: Any) -> tuple:
        """Do the same outside of ``vmap``: no column has a parameter of its own."""
        return Gather.apply(*args), None


class Scatter(torch.autograd.Function):
    """The gradient of a whole parameter; what is returned stands for it and has no memory.

    The gradient itself is added to a sum, or dropped if it is only differentiated again.
    """

    @staticmethod
    def forward(gradient: Tensor, shards: Any, name: str, is_added: bool) -> Tensor:
        """Add the gradient to a sum, perhaps."""
        if is_added:
            shards.add(name, gradient.unsqueeze(0))
        return stand_in(shards.params[name])  # in its dtype, since a cast would take memory

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep what the backward pass needs."""
        gradient, ctx.shards, ctx.name, _ = inputs
        ctx.dtype = gradient.dtype

    @staticmethod
    def backward(ctx: Any, vector: Tensor) -> tuple:
        """Gather the vector that multiplies the gradient; a stand-in was passed."""
        return Vector.apply(vector, ctx.shards, ctx.name, ctx.dtype), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, gradient: Tensor, *args: Any) -> tuple:
        """Do the same for several columns."""
        shards, name, is_added = args
        gradient = gradient.movedim(in_dims[0], 0)
        if is_added:
            shards.add(name, gradient)
        return stand_in(shards.params[name], gradient.shape), 0


class Vector(torch.autograd.Function):
    """The gathered vector for a parameter, given what stands for it."""

    @staticmethod
    def forward(zeros: Tensor, shards: Any, name: str, dtype: torch.dtype) -> Tensor:
        """Gather the vector."""
        return shards.vectors(name)[0].to(dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep nothing: a vector is not differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: tuple, zeros: Tensor, *args: Any) -> tuple:
        """Gather several vectors."""
        shards, name, dtype = args
        return shards.vectors(name).to(dtype), 0


def _scattered(
    gradient: Tensor, shards: Any, name: str, number: int, is_summed: bool
) -> Tensor | None:
    """Return a gradient, what stands for it if it is differentiated again, or add it to a sum."""
    if not is_summed:
        return gradient
    if not shards.is_sharing:
        raise RuntimeError(
            "A graph with sharded parameters was differentiated where processes do not share sums. "
            "Report this as a bug."
        )
    is_added = not torch.is_grad_enabled()
    part = Scatter.apply(gradient, shards, name, is_added)
    return None if is_added else part


class Times(torch.autograd.Function):
    """``x @ W.T``, or ``x @ W``, with a sharded matrix W.

    The graph of a backward pass multiplies with W, too. As an operation on the leaf, each product
    adds its own contribution to a gradient at once. Of a gathered W, autograd would hold all
    contributions of the backward pass until those of the forward pass are there.
    """

    @staticmethod
    def forward(x: Tensor, *arguments: Any) -> Tensor:
        """Multiply, given a ``ShardedParameter``, and whether it is transposed."""
        *parameter, is_transposed = arguments
        source = ShardedParameter(*parameter)
        W = source.shards.gather(source.number)
        return x @ (W.T if is_transposed else W)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        """Keep what the backward pass needs."""
        x, leaf, *ctx.rest, ctx.is_transposed = inputs
        ctx.save_for_backward(x, leaf)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple:
        """Multiply by the transposed matrix, and add the gradient to a sum."""
        (x, leaf), (for_x, for_leaf, *_) = ctx.saved_tensors, wanted_gradients(ctx)
        gradient = None
        if for_leaf:
            rows, columns = (g, x) if ctx.is_transposed else (x, g)
            gradient = rows.flatten(0, -2).T @ columns.flatten(0, -2)
            gradient = _scattered(gradient, *ctx.rest)
        g = Times.apply(g, leaf, *ctx.rest, not ctx.is_transposed) if for_x else None
        return g, gradient, None, None, None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, *args: Any) -> tuple:
        """Multiply several columns."""
        return Times.apply(x.movedim(in_dims[0], 0), *args), 0


def _factor(x: Any, W: Any) -> ShardedParameter | None:
    """Return what a matrix W that multiplies x was gathered from, if ``Times`` computes the same.

    Not with axes to be broadcast, in other dtypes (as by autocast), or with hooks on W.
    """
    parameter = getattr(W, "gathered_from", None)
    if parameter is None or W.ndim != 2 or x.ndim < 2 or x.dtype != W.dtype:
        return None
    if torch.is_autocast_enabled(W.device.type) or has_hooks(W):
        return None
    # an alias, since autograd does not tell whether it needs the gradient of a leaf
    return parameter._replace(leaf=parameter.leaf.view(parameter.leaf.shape))


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    parameter = _factor(input, weight)
    if parameter is None:
        return F.linear(input, weight, bias)
    out = Times.apply(input, *parameter, True)
    return out if bias is None else out + bias


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, **options: Any) -> Tensor:
    parameter = _factor(mat1, mat2)
    if parameter is None or options:
        return torch.addmm(input, mat1, mat2, **options)
    return input + Times.apply(mat1, *parameter, False)


def _matmul(input: Tensor, other: Tensor, **options: Any) -> Tensor:
    parameter = _factor(input, other)
    if parameter is None or options:
        return torch.matmul(input, other, **options)
    return Times.apply(input, *parameter, False)


#: Calls that are replaced where the graph of a backward pass is differentiated.
PRODUCTS: dict[Callable, Callable] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    torch.matmul: _matmul,
    Tensor.matmul: _matmul,
    Tensor.__matmul__: _matmul,
}


def stand_in(like: Tensor, shape: tuple[int, ...] | None = None) -> Tensor:
    """Return zeros that have no memory, by default of the shape of a tensor."""
    zero = torch.zeros((), dtype=like.dtype, device=like.device)
    return zero.expand(like.shape if shape is None else shape)


def has_tangent(x: Tensor) -> bool:
    """Return whether a tensor has a tangent of forward mode."""
    return forward_ad.unpack_dual(x).tangent is not None


def is_stand_in(x: Tensor) -> bool:
    """Return whether a tensor has many entries and the memory of one."""
    return x.numel() > 1 and not any(x.stride())
