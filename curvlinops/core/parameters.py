"""The user's parameters: their names, and what they must be."""

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from curvlinops.core.arguments import as_integer

_COMPLEX = (
    " Let the model have its real and imaginary parts as a real parameter with a last axis of "
    "length 2, and call torch.view_as_complex in its forward pass."
)


def named_parameters(module: nn.Module) -> tuple[dict[str, nn.Parameter], nn.Module]:
    """Return a module's parameters by every name they have, and the module without wrappers."""
    names = dict(module.named_parameters(remove_duplicate=False))
    wrappers = nn.DataParallel | nn.parallel.DistributedDataParallel
    while True:
        if isinstance(module, wrappers):
            module = module.module
        elif hasattr(module, "_orig_mod"):  # torch.compile; has no double backward
            module = module._orig_mod
        else:
            break
        names |= dict(module.named_parameters(remove_duplicate=False))
    return names, module


def without_ties(params: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Drop further names of one tied parameter, as in ``state_dict()`` of a tied model."""
    first: dict[int, str] = {}
    kept = {}
    for name, param in params.items():
        other = first.setdefault(id(own[name]), name)
        if other == name:
            kept[name] = param
        elif not torch.equal(param, params[other]):
            raise ValueError(
                f"'{other}' and '{name}' in params are one tied parameter of the model, but have "
                "different values."
            )
    return kept


def check_distinct(params: list[Tensor], names: Mapping[int, str]) -> None:
    """Refuse a parameter that occurs twice, by the name that its id has."""
    seen = set()
    for param in params:
        if id(param) in seen:
            raise ValueError(f"Parameter '{names[id(param)]}' occurs twice in params.")
        seen.add(id(param))


def check_params(params: Mapping[str, Tensor]) -> None:
    """Refuse parameters that have no values yet, are not real, or not on one device."""
    check_initialized(params)
    for name, param in params.items():
        if not param.is_floating_point():
            raise TypeError(
                f"Parameter '{name}' has dtype {param.dtype}; only real floating-point parameters "
                f"can be differentiated.{_COMPLEX if param.is_complex() else ''}"
            )
    devices = {str(param.device) for param in params.values()}
    if len(devices) > 1:
        raise ValueError(
            f"Parameters lie on several devices, {sorted(devices)}. Move the model to one."
        )
    if devices == {"meta"}:
        raise ValueError(
            f"Parameter '{next(iter(params))}' is on the meta device, which has no values. Load "
            "the model's weights first, or call model.to_empty(device=...) and initialize it."
        )


def check_initialized(tensors: Mapping[str, Tensor]) -> None:
    """Refuse parameters and buffers of lazy modules that no input has given a shape."""
    names = [name for name, tensor in tensors.items() if is_lazy(tensor)]
    if names:
        raise ValueError(
            f"{names} are not initialized: lazy modules, such as LazyLinear, get shapes from their "
            "first input. Run the model once before, on any batch."
        )


def alias(param: Tensor) -> Tensor:
    """Return the same values without history (a copy where autograd refuses the tensor)."""
    values = param.detach().clone() if param.is_inference() else param.detach()
    return with_attributes(values, param)


def with_attributes(values: Tensor, param: Tensor) -> Tensor:
    """Give a tensor that replaces a parameter what users and libraries have attached to this."""
    for name, value in vars(param).items():
        if name not in vars(values):
            setattr(values, name, copy.copy(value) if type(value) in (list, dict, set) else value)
    return values


def split_blocks(names: list[str], sizes: list[int] | None) -> list[list[str]]:
    """Return the names in each diagonal block, given how many there are.

    Raises:
        ValueError: If the sizes do not add up.
    """
    if sizes is None:
        return [names]
    found = [as_integer(size) for size in sizes] if isinstance(sizes, list | tuple) else [None]
    if None in found or min(found, default=0) < 1 or sum(found) != len(names):
        raise ValueError(
            f"block_sizes must be positive integers that add up to the number of parameters, "
            f"{len(names)}; got {sizes}."
        )
    rest = iter(names)
    return [[next(rest) for _ in range(size)] for size in found]
