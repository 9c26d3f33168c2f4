"""The user's parameters: their names, and the checks of their kinds."""

from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvlinops.linear_operator.space import match_names
from curvlinops.support.arguments import MAPPINGS, as_integer
from curvlinops.support.torch_internals import (
    distributed_tensors,
    original_module,
    with_attributes,
)

_COMPLEX = (
    " Let the model have its real and imaginary parts as a real parameter with a last axis of "
    "length 2, and call torch.view_as_complex in its forward pass."
)


def read_params(params: Any) -> Mapping[str, Tensor] | list[Tensor]:
    """Return the user's dictionary itself, or a list, after checking what it contains."""
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        hint = " The Jacobian takes no loss: (model, params, data)." if callable(params) else ""
        raise TypeError(
            "params must be a list of tensors or a dictionary from names to tensors, got "
            f"{type(params).__name__}. Pass list(model.parameters()).{hint}"
        )
    if isinstance(params, Set):
        raise TypeError("params is a set, whose order is arbitrary. Pass a list or a dictionary.")
    params = params if isinstance(params, MAPPINGS) else list(params)
    if not len(params):
        raise ValueError(
            "params is empty. If it was a generator such as model.parameters(), it was already "
            "used up; pass a list."
        )
    for key, param in params.items() if isinstance(params, MAPPINGS) else enumerate(params):
        if not isinstance(param, Tensor):
            raise TypeError(
                f"Entry {key!r} of params is a {type(param).__name__}, not a tensor. Pass "
                "list(model.parameters()) or dict(model.named_parameters())."
            )
    return params


def named_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], nn.Module]:
    """Return a module's parameters by every name they have, and the module without wrappers."""
    names = dict(module.named_parameters(remove_duplicate=False))
    while (inner := _inner(module)) is not module:
        module = inner
        names |= dict(module.named_parameters(remove_duplicate=False))
    return names, module


def _inner(module: nn.Module) -> nn.Module:
    """Return the module that a wrapper has, or the module itself if it is none."""
    if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return module.module
    return original_module(module)  # compiled code has no double backward


def select_parameters(module: nn.Module, *patterns: str) -> dict[str, nn.Parameter]:
    """Return some parameters of a module, as the argument ``params`` of operators.

    Args:
        module: The module.
        *patterns: Names of parameters; names of submodules, which stand for all of their
            parameters; or globs for either. ``"*.attn.*"`` matches ``h.0.attn.proj.weight``, and
            ``"*"`` everything.

    Returns:
        The parameters by name, in the order of the module; a tied one once. The entries are the
        module's own tensors. Frozen parameters are included.

    Raises:
        TypeError: If the module is no module, or a pattern no string.
        ValueError: If a pattern matches no parameter, or there is no pattern.

    Example:
        >>> from torch import nn
        >>> from curvlinops import select_parameters
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> list(select_parameters(model, "2", "*.bias"))
        ['0.bias', '2.weight', '2.bias']
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
    if not patterns:
        raise ValueError("Pass the names or globs of parameters; '*' is all of them.")
    if wrong := [pattern for pattern in patterns if not isinstance(pattern, str)]:
        raise TypeError(f"Names and globs of parameters must be strings, got {wrong}.")
    named, _ = named_parameters(module)
    chosen = set(match_names(list(named), patterns, "patterns"))
    first = {id(named[name]): name for name in reversed(named) if name in chosen}
    return {name: param for name, param in named.items() if first.get(id(param)) == name}


def kind_of(param: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    """Return the traits of a parameter that must not change."""
    return param.shape, param.dtype, param.device


def find_ties(parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Return further names of one tied parameter, as in ``state_dict()``, with its first name."""
    first: dict[int, str] = {}
    pairs = ((name, first.setdefault(id(param), name)) for name, param in parameters.items())
    return {name: other for name, other in pairs if other != name}


def check_ties(params: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
    """Refuse different values of one tied parameter."""
    for name, other in ties.items():
        if params[name] is not params[other] and not torch.equal(params[name], params[other]):
            raise ValueError(
                f"'{other}' and '{name}' in params are one tied parameter of the model, but have "
                "different values."
            )


def check_distinct(params: list[Tensor], names: Mapping[int, str]) -> None:
    """Refuse a parameter that occurs twice, by the name that its id has."""
    seen = set()
    for param in params:
        if id(param) in seen:
            raise ValueError(f"Parameter '{names[id(param)]}' occurs twice in params.")
        seen.add(id(param))


def check_params(params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that are not real, have no values, or are not on one device."""
    for name, param in params.items():
        if not param.is_floating_point() or param.dtype.itemsize == 1:  # those of eight bits
            raise TypeError(
                f"Parameter '{name}' has dtype {param.dtype}; only real floating-point parameters "
                "of at least 16 bits can be differentiated."
                f"{_COMPLEX if param.is_complex() else ''}"
            )
        if param.dtype == torch.float16:
            raise TypeError(
                f"Parameter '{name}' is in float16, whose range is too narrow for products with "
                "arbitrary vectors. Convert what is in params to bfloat16, which has the range of "
                "float32, or to float32; frozen parameters that are not in params may stay float16."
            )
    devices = {param.device for param in params.values()}
    if len(devices) > 1:
        names = sorted(map(str, devices))
        raise ValueError(f"Parameters lie on several devices, {names}. Move the model to one.")
    if devices == {torch.device("meta")}:
        raise ValueError(
            f"Parameter '{next(iter(params))}' is on the meta device, which has no values. Load "
            "the model's weights first, or call model.to_empty(device=...) and initialize it."
        )


def check_complete(tensors: Mapping[str, Tensor]) -> None:
    """Refuse parameters and buffers without values, or with values on other processes."""
    names = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if names:
        raise ValueError(
            f"{names} are not initialized: lazy modules, such as LazyLinear, get shapes from their "
            "first input. Run the model once before, on any batch."
        )
    spread = distributed_tensors()
    if names := [name for name, tensor in tensors.items() if isinstance(tensor, spread)]:
        raise spread_error(f"{names} are DTensors")


def spread_error(subject: str) -> TypeError:
    """Return the error that parameters are spread over processes."""
    return TypeError(
        f"{subject}: each process has only a part of the parameters. Only parameters of a Module "
        "may be sharded, by torch.distributed.fsdp.fully_shard. In params, pass the module's own "
        "tensors. Or give each process a model with all parameters, with values as by "
        "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True. "
        "The data can be spread in any case, see process_group."
    )


def without_history(param: Tensor) -> Tensor:
    """Return the same values without history (a copy where autograd refuses the tensor)."""
    values = param.detach().clone() if param.is_inference() else param.detach()
    return with_attributes(values, param)


def split_blocks(names: list[str], sizes: list[int] | None) -> list[list[str]]:
    """Return the names in each diagonal block, given how many there are."""
    if sizes is None:
        return [names]
    counts = [as_integer(size) for size in sizes] if isinstance(sizes, list | tuple) else [None]
    if None in counts or min(counts, default=0) < 1 or sum(counts) != len(names):
        raise ValueError(
            f"block_sizes must be positive integers that add up to the number of parameters, "
            f"{len(names)}; got {sizes}."
        )
    remaining = iter(names)
    return [[next(remaining) for _ in range(size)] for size in counts]
