"""What ``fully_shard`` does to modules: placements that are refused, and casts by its policy."""

from collections.abc import Callable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, distributed, nn

from curvlinops.support.pytree import map_leaves
from curvlinops.support.torch_internals import (
    distributed_tensors,
    forward_hooks,
    fsdp_policy,
    is_fsdp_hook,
    is_tensor_parallel_hook,
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


# --- what is refused

_WHOLE = (
    "Give each process a model with all parameters, with values as by "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True."
)


def groups_of(sharded: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the processes with the shards of all parameters, and those with the same shards."""
    groups = {name: _groups_of(name, parameter) for name, parameter in sharded.items()}
    first, (group, replicas) = next(iter(groups.items()))
    ranks = distributed.get_process_group_ranks(group)
    for name, (other, _) in groups.items():
        if distributed.get_process_group_ranks(other) != ranks:
            raise TypeError(
                f"'{name}' is sharded over other processes than '{first}'. Call fully_shard with "
                f"one mesh. {_WHOLE}"
            )
    return group, replicas


def _groups_of(name: str, parameter: Any) -> tuple[Any, Any]:
    """Return the processes that have the shards of a parameter, and those with the same shard."""
    from torch.distributed.tensor import Replicate, Shard

    placements, mesh = parameter.placements, parameter.device_mesh
    sharded = [axis for axis, x in enumerate(placements) if type(x) is not Replicate]
    others = [axis for axis in range(mesh.ndim) if axis not in sharded]
    if len(sharded) != 1 or placements[sharded[0]] != Shard(0) or len(others) > 1:
        raise TypeError(
            f"'{name}' has the placements {list(placements)}. Supported are parameters that "
            f"fully_shard shards along their first axis over one axis of the mesh. {_WHOLE}"
        )
    if parameter.to_local().device.type != mesh.device_type:
        raise TypeError(
            f"'{name}' is offloaded to {parameter.to_local().device}, which is not supported: omit "
            "offload_policy in fully_shard."
        )
    return mesh.get_group(sharded[0]), mesh.get_group(others[0]) if others else None


def check_modules(module: nn.Module) -> None:
    """Refuse modules that need sharded parameters in another way than by reading them."""
    for name, child in module.named_modules():
        where = f"The model's module '{name}'" if name else "The model"
        hooks = chain.from_iterable(table.values() for table in forward_hooks(child))
        if any(map(is_tensor_parallel_hook, hooks)):
            raise TypeError(
                f"{where} is parallelized by torch.distributed.tensor.parallel, which is "
                f"not supported. {_WHOLE}"
            )
        sharded = distributed_tensors()
        if isinstance(child, nn.RNNBase) and any(
            isinstance(x, sharded) for x in child.parameters(recurse=False)
        ):
            raise TypeError(
                f"{where} ({type(child).__name__}) has sharded parameters and keeps them "
                "in a list of its own. Leave it out: fully_shard(..., "
                "ignored_params=set(module.parameters()))."
            )
        _check_policy(where, child)


def _check_policy(where: str, module: nn.Module) -> None:
    """Refuse a policy of a module with a dtype that whole parameters must not have."""
    dtype = getattr(fsdp_policy(module), "param_dtype", None)
    if dtype not in (None, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(
            f"{where} is sharded with MixedPrecisionPolicy(param_dtype={dtype}), whose range is "
            "too narrow for products with arbitrary vectors. Use torch.bfloat16, which has the "
            "range of float32, or omit param_dtype."
        )
