"""What ``fully_shard`` casts by a ``MixedPrecisionPolicy``, and its hooks on modules."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.support.pytree import map_leaves
from curvlinops.support.torch_internals import forward_hooks, fsdp_policy, is_fsdp_hook


def check_policy(where: str, module: nn.Module) -> None:
    """Refuse a policy of a module with a dtype that whole parameters must not have.

    Raises:
        TypeError: If there is one.
    """
    dtype = getattr(fsdp_policy(module), "param_dtype", None)
    if dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"{where} is sharded with MixedPrecisionPolicy(param_dtype={dtype}), whose range is "
            "too narrow for products with arbitrary vectors. Use torch.bfloat16, which has the "
            "range of float32, or omit param_dtype."
        )


def casting_hooks(module: nn.Module) -> list[tuple[dict, dict]]:
    """Return a module's tables of forward hooks, and these with only the casts of FSDP's hooks."""
    policy = fsdp_policy(module)
    inputs = policy.param_dtype if policy and policy.cast_forward_inputs else None
    outputs = policy and policy.output_dtype

    def cast_inputs(module: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return _cast(args, inputs), _cast(kwargs, inputs)

    def cast_outputs(module: nn.Module, args: tuple, output: Any) -> Any:
        return _cast(output, outputs)

    after, before = forward_hooks(module)
    return [
        *_replaced(after, cast_outputs if outputs else None),
        *_replaced(before, cast_inputs if inputs else None),
    ]


def _replaced(table: dict, cast: Callable | None) -> list[tuple[dict, dict]]:
    """Return a table of hooks, if there are any, and one with a cast in place of FSDP's hook."""
    hooks = {key: cast if is_fsdp_hook(hook) else hook for key, hook in table.items()}
    return [(table, {key: hook for key, hook in hooks.items() if hook})] if table else []


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in nested containers."""

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x

    return map_leaves(tree, cast)
