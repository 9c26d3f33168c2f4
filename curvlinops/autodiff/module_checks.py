"""Refuses models with modules that cannot be differentiated."""

import sys

import torch
from torch import nn

from curvlinops.autodiff.overrides.embedding import check_options
from curvlinops.autodiff.parameters import spread_error


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
            check_options(kind, child.max_norm, child.scale_grad_by_freq)
