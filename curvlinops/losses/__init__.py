"""Losses: the only code that depends on the loss. One file per family."""

import functools
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import nn

from curvlinops.losses.base import KNOWN_LOSSES, Loss
from curvlinops.losses.cross_entropy import CrossEntropy, NegativeLogLikelihood
from curvlinops.losses.elementwise import (
    BinaryCrossEntropy,
    Huber,
    PoissonNLL,
    ProbabilityCrossEntropy,
    SquaredError,
)
from curvlinops.losses.generic import AdditiveLoss
from curvlinops.losses.linear_cross_entropy import LinearCrossEntropy, LinearCrossEntropyLoss
from curvlinops.support.torch_internals import forward_hooks

__all__ = ["LinearCrossEntropyLoss", "Loss", "wrap_loss"]

# to add a loss in closed form, write a class and add a line here
_LOSSES: list[tuple[type[nn.Module], Callable, type[Loss]]] = [
    (nn.MSELoss, F.mse_loss, SquaredError),
    (nn.CrossEntropyLoss, F.cross_entropy, CrossEntropy),
    (nn.NLLLoss, F.nll_loss, NegativeLogLikelihood),
    (nn.BCEWithLogitsLoss, F.binary_cross_entropy_with_logits, BinaryCrossEntropy),
    (nn.BCELoss, F.binary_cross_entropy, ProbabilityCrossEntropy),
    (nn.PoissonNLLLoss, F.poisson_nll_loss, PoissonNLL),
    (nn.HuberLoss, F.huber_loss, Huber),
    (nn.SmoothL1Loss, F.smooth_l1_loss, Huber),
]
KNOWN_LOSSES.update({module: kind for module, _, kind in _LOSSES})
KNOWN_LOSSES[LinearCrossEntropyLoss] = LinearCrossEntropy
_MODULES = {function: module for module, function, _ in _LOSSES}


def wrap_loss(loss_func: Any, reduction: str | None = None) -> Loss:
    """Return the loss in closed form if there is one, else as a function of samples.

    PyTorch's functional losses may have keywords bound by ``functools.partial``.
    """
    if isinstance(loss_func, type):
        raise TypeError(f"loss_func is the class {loss_func.__name__}; pass an instance of it.")
    if not callable(loss_func):
        raise TypeError(f"loss_func must be callable, got {type(loss_func).__name__}.")
    loss_func = getattr(loss_func, "_orig_mod", loss_func)  # the module that was compiled
    loss_func = _as_module(loss_func)
    kind, own = _kind(loss_func), getattr(loss_func, "reduction", None)
    own = "mean" if own == "batchmean" and kind is AdditiveLoss else own
    for source, value in (("the loss's reduction", own), ("reduction", reduction)):
        if value not in (None, "sum", "mean"):
            raise ValueError(f"{source} is {value!r}, expected 'sum' or 'mean'.")
    if own is not None and reduction is not None and own != reduction:
        raise ValueError(f"reduction={reduction!r} contradicts the loss's own, {own!r}.")
    if own is None and reduction is None:
        name = getattr(loss_func, "__name__", type(loss_func).__name__)
        raise ValueError(
            f"The loss {name} does not say how it reduces over samples. Pass reduction='sum' or "
            "reduction='mean'."
        )
    return kind(loss_func, reduction or own)


def _as_module(loss_func: Any) -> Any:
    """Return the module of one of PyTorch's functional losses, with its options."""
    partial = isinstance(loss_func, functools.partial)
    function = loss_func.func if partial else loss_func
    try:
        module = _MODULES.get(function)
    except TypeError:  # not hashable
        return loss_func
    if module is None or (partial and loss_func.args):
        return loss_func
    try:
        return module(**loss_func.keywords) if partial else module()
    except TypeError:  # an option that only the function has
        return loss_func


def _kind(loss_func: Any) -> type[Loss]:
    for known, kind in KNOWN_LOSSES.items():
        if isinstance(loss_func, known) and _computes_the_same(loss_func, known):
            return kind
    return AdditiveLoss


def _computes_the_same(loss_func: nn.Module, known: type[nn.Module]) -> bool:
    """Return whether a loss has the forward method of a known class, and no hooks."""
    return (
        type(loss_func).forward is known.forward
        and type(loss_func).__call__ is nn.Module.__call__
        and "forward" not in vars(loss_func)
        and not any(forward_hooks(loss_func))
    )
