"""Eval mode for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from curvlinops.autodiff.used_modules import find_modules


@contextmanager
def eval_mode(model_func: Any) -> Iterator[None]:
    """Clear the train flags of a model's modules, and restore each of them afterwards.

    ``train()`` and ``eval()`` are not called: what else a module does there, such as merging an
    adapter into its weights, need not be reversible.
    """
    modules = [module for root in find_modules(model_func) for module in root.modules()]
    flags = [module.training for module in modules]
    try:
        for module in modules:
            module.training = False
        yield
    finally:
        for module, flag in zip(modules, flags, strict=True):
            module.training = flag
