"""Private handles of PyTorch without which the package can be imported, but not used."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
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
