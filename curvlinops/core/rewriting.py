"""Calls of the model that are replaced, because PyTorch's own derivatives are wrong or missing.

``Rewriting`` is active in every forward pass and every backward pass (which recomputes
checkpointed parts of the forward). To change how a call is differentiated, add a line to
``DECOMPOSITIONS``; to refuse a call, raise in its decomposition.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from curvlinops.core.activations import ACTIVATIONS
from curvlinops.core.convolution import CONVOLUTIONS
from curvlinops.core.functions import in_transform
from curvlinops.core.lookups import LOOKUPS, check_lookup
from curvlinops.core.normalization import NORMALIZATIONS
from curvlinops.core.parameters import spread_error
from curvlinops.core.pytree import leaves
from curvlinops.core.recurrent import RECURRENT


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return ``g v / |v|``; the fused kernel's double backward is off by 1-9 %."""
    return v * (g / _norm_except_dim(v, 2, dim))


def _norm_except_dim(v: Tensor, pow: int = 2, dim: int = 0) -> Tensor:
    if dim == -1:
        return v.norm(pow)
    return v.norm(pow, [axis for axis in range(v.ndim) if axis != dim % v.ndim], keepdim=True)


def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    """Return the hard sigmoid, whose kernel can be differentiated only once."""
    out = F.relu6(input + 3) / 6
    return input.copy_(out) if inplace else out


def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str | None = None) -> Tensor:
    """Return all distances; the fused kernel's backward is wrong under ``vmap``, and its last."""
    if not (in_transform() or _has_derivative(x1) or _has_derivative(x2)):
        return torch.cdist(x1, x2, p)  # without all differences in memory
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, dim=-1)


def _has_derivative(x: Tensor) -> bool:
    if x.requires_grad and torch.is_grad_enabled():
        return True
    return forward_ad._current_level >= 0 and _has_tangent(x)


def check_modules(module: nn.Module) -> None:
    """Refuse a model with a module that cannot be differentiated, by the module's name.

    Raises:
        TypeError: If the model contains TorchScript, or is spread over processes.
        ValueError: If the gradient of a module is not one, or its forward changes parameters.
    """
    library = sys.modules.get("torch.distributed.fsdp")  # imported by whoever spreads a module
    spread = () if library is None else library.FullyShardedDataParallel
    for name, child in module.named_modules():
        where = f"The model's module '{name}'" if name else "The model"
        if isinstance(child, spread):
            raise spread_error(f"{where} is FullyShardedDataParallel")
        if isinstance(child, torch.jit.ScriptModule):
            raise TypeError(
                f"{where} is TorchScript, whose parameters cannot be replaced. "
                "Pass the original module."
            )
        if isinstance(child, nn.Embedding | nn.EmbeddingBag):
            kind = f"'{name}' ({type(child).__name__})"
            check_lookup(kind, child.max_norm, child.scale_grad_by_freq)


DECOMPOSITIONS: dict[Callable, Callable] = {
    torch.norm_except_dim: _norm_except_dim,
    F.hardsigmoid: _hardsigmoid,
    torch.cdist: _cdist,
    **LOOKUPS,
    **RECURRENT,
}
if hasattr(torch, "_weight_norm"):  # what torch.nn.utils.parametrizations.weight_norm calls
    DECOMPOSITIONS[torch._weight_norm] = _weight_norm

#: In addition, where the graph of the backward pass is differentiated.
FOR_DOUBLE_BACKWARD = DECOMPOSITIONS | CONVOLUTIONS | NORMALIZATIONS | ACTIVATIONS


_CONSTANT = (
    "The model makes constants of its parameters (torch.no_grad, torch.inference_mode, or "
    "torch.autograd.grad without create_graph), which forward mode would differentiate. Pass "
    "autodiff='reverse'."
)


def _differentiable_gradient(*args: Any, create_graph: bool = False, **kwargs: Any) -> tuple:
    """Return gradients with a graph; those without one would have tangents."""
    if not create_graph:
        raise NotImplementedError(_CONSTANT)
    return torch.autograd.grad(*args, create_graph=True, **kwargs)


class Rewriting(TorchFunctionMode):
    """Replaces the calls in ``DECOMPOSITIONS`` while it is active.

    Args:
        table: The replacements.
        tangents: Whether forward mode runs. It carries tangents through what is constant for a
            backward pass: such models are refused.

    Raises:
        NotImplementedError: If ``tangents`` meet a constant.
    """

    def __init__(self, table: dict[Callable, Callable], tangents: bool = False):
        super().__init__()
        self._table = table | {torch.autograd.grad: _differentiable_gradient} if tangents else table
        self._tangents = tangents
        self._stopped = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the replacement of ``func``, or ``func`` itself."""
        kwargs = kwargs or {}
        if self._tangents and func is torch._C._set_grad_enabled:
            self._switch(*args)
        out = self._table.get(func, func)(*args, **kwargs)
        if self._tangents and self._is_constant((args, kwargs), out):
            raise NotImplementedError(_CONSTANT)
        return out

    def _switch(self, enabled: bool) -> None:
        # else a backward pass, or a custom function, runs, where C++ stopped gradients
        if enabled != torch.is_grad_enabled() and forward_ad._is_fwd_grad_enabled():
            self._stopped = not enabled

    def _is_constant(self, inputs: Any, out: Any) -> bool:
        """Return whether autograd takes an output for a constant, of what has a tangent."""
        if torch.is_inference_mode_enabled():  # there are no tangents here, but views get theirs
            return any(not x.is_inference() for x in leaves(out))
        return self._stopped and bool(leaves(out)) and any(map(_has_tangent, leaves(inputs)))


def _has_tangent(x: Tensor) -> bool:
    return forward_ad.unpack_dual(x).tangent is not None
