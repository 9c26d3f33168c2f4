"""Private handles of PyTorch without which the package can be imported, but not used."""

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules import module as modules
from torch.nn.utils import parametrize


def internal(module: str, name: str) -> Any:
    """Return a function or class from a private place, or one that raises where it is used.

    Args:
        module: The module's name, such as ``"torch.overrides"``.
        name: The name in the module.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):

        def missing(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(
                f"PyTorch {torch.__version__} has no {module}.{name}, without which this version "
                "of curvlinops cannot do that. Install another version of one of them."
            )

        return missing


#: Nested containers: ``tree_flatten``, ``tree_unflatten``, ``tree_leaves``, ``tree_is_leaf``.
pytree = importlib.import_module("torch.utils._pytree")
#: A context in which no ``TorchFunctionMode`` or tensor subclass sees calls.
without_torch_function = internal("torch._C", "DisableTorchFunction")


def input_metadata(node: Any, number: int) -> Any:
    """Return what has the ``shape`` and ``dtype`` of the gradient that a node gets, by number.

    It is the gradient of the node's output with this number.
    """
    return node._input_metadata[number]


def saved_values(node: Any) -> list[Any]:
    """Return what a node of a graph keeps; tensors are the attribute ``data`` of these."""
    values = [getattr(node, name) for name in _saved_names(type(node))[0]]
    return [x for one in values for x in (one if isinstance(one, list | tuple) else [one])]


def plain_values(node: Any) -> list[Any]:
    """Return the arguments of a node's operation that are no tensors, such as axes."""
    return [getattr(node, name) for name in _saved_names(type(node))[1]]


@functools.cache
def _saved_names(kind: type) -> tuple[list[str], list[str]]:
    """Return the attributes of a kind of node that hold tensors, and those with other values."""
    raw = [name for name in dir(kind) if name.startswith("_raw_saved")]
    saved = [name for name in dir(kind) if name.startswith("_saved_")]
    return raw, [name for name in saved if f"_raw{name}" not in raw]


def function_of(node: Any) -> type:
    """Return the ``torch.autograd.Function`` of a node with a Python backward pass."""
    return type(node)._forward_cls


_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks", "_global_forward_hooks_always_called"),
    *("_global_forward_hooks_with_kwargs", "_global_buffer_registration_hooks"),
    *("_global_parameter_registration_hooks", "_global_module_registration_hooks"),
)


def global_hooks() -> list[dict]:
    """Return the hooks on all modules, by kind."""
    return [getattr(modules, name, {}) for name in _GLOBAL_HOOKS]


current_function_modes = internal("torch.overrides", "_get_current_function_mode_stack")
current_dispatch_modes = internal(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"
)
run_backward = internal("torch.autograd.graph", "_engine_run_backward")


@contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Compute parametrized weights anew from the parameters in use, see ``parametrize.cached``."""
    cached = parametrize._cache_enabled
    parametrize._cache_enabled = 0
    try:
        yield
    finally:
        parametrize._cache_enabled = cached


# What replaces calls of a model needs these.
set_grad_enabled = internal("torch._C", "_set_grad_enabled")
set_tangents_enabled = internal("torch._C", "_set_fwd_grad_enabled")
are_tangents_enabled = internal("torch._C", "_is_fwd_grad_enabled")
#: What ``torch.nn.utils.parametrizations.weight_norm`` calls.
weight_norm = getattr(torch, "_weight_norm", None)
_graph_task = internal("torch._C", "_current_graph_task_id")
_will_run = internal("torch._C", "_will_engine_execute_node")
_transforms = internal("torch._C._functorch", "peek_interpreter_stack")


def in_backward() -> bool:
    """Return whether this thread runs a backward pass."""
    return _graph_task() != -1


def in_transform() -> bool:
    """Return whether a transform of ``torch.func`` is active, whose tensors mean something else."""
    return _transforms() is not None


def wanted_gradients(ctx: Any) -> list[bool]:
    """Return for which inputs of a custom function the running backward pass needs gradients.

    ``ctx.needs_input_grad`` says which inputs require gradients at all; a backward pass for some
    of the inputs of a graph needs less.
    """
    return [node is not None and _is_wanted(node) for node, _ in ctx.next_functions]


def _is_wanted(node: Any) -> bool:
    try:
        return _will_run(node)
    except RuntimeError:  # a leaf, for which it is not implemented
        return True
