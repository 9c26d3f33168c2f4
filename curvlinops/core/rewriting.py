"""Calls of the model that are replaced, because PyTorch's own derivatives are wrong or missing.

``Rewriting`` is active in every forward pass and every backward pass (which recomputes
checkpointed parts of the forward). To change how a call is differentiated, add a line to
``DECOMPOSITIONS``; to refuse a call, raise in its decomposition.
"""

import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map

from curvlinops.core.activations import ACTIVATIONS
from curvlinops.core.control_flow import CONTROL_FLOW
from curvlinops.core.convolution import CONVOLUTIONS
from curvlinops.core.functions import in_transform
from curvlinops.core.loans import FunctionMode
from curvlinops.core.lookups import LOOKUPS, check_lookup
from curvlinops.core.normalization import NORMALIZATIONS
from curvlinops.core.parameters import spread_error
from curvlinops.core.recurrent import RECURRENT

_GENERATED = BuiltinFunctionType | MethodDescriptorType


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
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


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
    torch._weight_norm: _weight_norm,
    torch.norm_except_dim: _norm_except_dim,
    F.hardsigmoid: _hardsigmoid,
    torch.cdist: _cdist,
    # what exported programs call
    torch._C._nn.hardsigmoid: _hardsigmoid,
    torch.ops.aten._cdist_forward.default: _cdist,
    torch.ops.aten.cdist.default: _cdist,
    **LOOKUPS,
    **RECURRENT,
    **CONTROL_FLOW,
}

#: In addition, where the graph of the backward pass is differentiated.
FOR_DOUBLE_BACKWARD = DECOMPOSITIONS | CONVOLUTIONS | NORMALIZATIONS | ACTIVATIONS


def _eager(func: Callable) -> Callable:
    """Return the function that is called in eager mode for an operation of an exported program."""
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return func
    name = func.overloadpacket.__name__
    # both are generated from the operation's schema; functions in Python may take other arguments
    found = (getattr(place, name, None) for place in (torch, torch._C._nn, Tensor))
    return next((each for each in found if isinstance(each, _GENERATED)), func)


def _constant_gradient(*args: Any, create_graph: bool = False, **kwargs: Any) -> tuple:
    """Return gradients whose tangents end where their graph does; PyTorch's have tangents."""
    grads = torch.autograd.grad(*args, create_graph=create_graph, **kwargs)
    if create_graph:
        return grads
    return tuple(None if grad is None else grad.detach() for grad in grads)


class Rewriting(FunctionMode):
    """Replaces the calls in ``DECOMPOSITIONS`` while it is active.

    Args:
        table: The replacements.
        tangents: Whether forward mode runs. Then what is constant for a backward pass, made under
            ``torch.no_grad`` or by a gradient without a graph, is constant for tangents, too;
            PyTorch lets them pass.
    """

    def __init__(self, table: dict[Callable, Callable], tangents: bool = False):
        super().__init__()
        self._table = table | {torch.autograd.grad: _constant_gradient} if tangents else table
        self._tangents = tangents
        self._stopped = False

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Call the replacement of ``func``, or ``func`` itself."""
        func = _eager(func)
        if self._tangents and func is torch._C._set_grad_enabled:
            self._set_fwd_grad_enabled(*args)
        if func in CONTROL_FLOW:
            with self:  # what the branches call is replaced, too
                return self._table[func](*args, **(kwargs or {}))
        out = self._table.get(func, func)(*args, **(kwargs or {}))
        stopped = self._stopped or (self._tangents and torch.is_inference_mode_enabled())
        return _without_tangents(out, args) if stopped else out

    def _set_fwd_grad_enabled(self, enabled: bool) -> None:
        if enabled == torch.is_grad_enabled():
            return  # as in hooks that save tensors: C++, which stops gradients there, says no word
        # where another one has stopped tangents, as in a custom function's forward, they stay so
        if self._stopped or forward_ad._is_fwd_grad_enabled():
            torch._C._set_fwd_grad_enabled(enabled)
            self._stopped = not enabled


def _without_tangents(out: Any, args: tuple) -> Any:
    """Detach views: they have their base's tangent as soon as forward mode is on again."""
    if isinstance(out, Tensor):
        is_new_view = out._is_view() and not any(out is arg for arg in args)
        return out.detach() if is_new_view else out
    if isinstance(out, list | tuple):
        return tree_map(lambda part: _without_tangents(part, args), out)
    return (_without_tangents(part, args) for part in out) if isinstance(out, Iterator) else out
