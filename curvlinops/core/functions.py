"""What autograd functions and formulas share: which gradients are wanted, precision, transforms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def wanted(ctx: Any) -> list[bool]:
    """Return of which tensors among the inputs the running backward pass asks for the gradient.

    ``ctx.needs_input_grad`` says which inputs require gradients at all; a backward pass for some
    of the inputs of a graph asks for less.
    """
    return [node is not None and _will_run(node) for node, _ in ctx.next_functions]


def _will_run(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf, for which it is not implemented
        return True


class WithDerivative(torch.autograd.Function):
    """A value, and how to multiply vectors with its symmetric derivative.

    ``apply(x, value, multiply)`` returns ``value`` as a function of ``x`` of the same shape, with
    derivative ``multiply``, which takes and returns ``[K, *x]``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, multiply: Callable) -> Tensor:
        """Return the value."""
        ctx.multiply = multiply
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        """Multiply with the derivative."""
        return ctx.multiply(v.unsqueeze(0)).squeeze(0), None, None

    @staticmethod
    def jvp(ctx: Any, v: Tensor, *_: None) -> Tensor:
        """Multiply with the derivative."""
        return ctx.multiply(v.unsqueeze(0)).squeeze(0)


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` is active, whose tensors mean something else."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32 or wider."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
