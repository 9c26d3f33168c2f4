"""A small network with BatchNorm and dropout, and what a training run has at its end."""

import random
from copy import deepcopy
from typing import Any

import numpy as np
import problems
import torch
from torch import Tensor, nn

CE = nn.CrossEntropyLoss()


def network(dtype: torch.dtype = torch.float64, pixels: int = 5, classes: int = 3) -> nn.Sequential:
    """Return a network in train mode whose running statistics are not the initial ones."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Tanh(), nn.Flatten(),
        nn.Dropout(0.3), nn.Linear(2 * (pixels - 2) ** 2, classes),
    ).to(dtype)  # fmt: skip
    model(torch.randn(16, 1, pixels, pixels, dtype=dtype))
    return model


def batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list[tuple[Tensor, Tensor]]:
    """Return images and classes."""
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(n, 1, 5, 5, dtype=dtype, generator=generator),
            torch.randint(3, (n,), generator=generator),
        )
        for n in sizes
    ]


def in_eval_mode(model: nn.Module, data: list) -> problems.Problem:
    """Return the problem of a copy of the model in eval mode, for the references."""
    copy = deepcopy(model).eval()
    return problems.Problem(copy, CE, dict(copy.named_parameters()), data, mc=True)


def flags(model: nn.Module) -> list[bool]:
    """Return the train flags of all modules."""
    return [module.training for module in model.modules()]


def random_numbers() -> list[Any]:
    """Return the states of the global generators."""
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]
