"""Private handles of PyTorch without which the package can be imported, but not used."""

import importlib
from typing import Any

import torch


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


current_function_modes = internal("torch.overrides", "_get_current_function_mode_stack")
current_dispatch_modes = internal(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack"
)
run_backward = internal("torch.autograd.graph", "_engine_run_backward")

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
