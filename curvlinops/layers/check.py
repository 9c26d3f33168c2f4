"""Checks of what the rules find, and of whether samples are independent.

Gradients of samples have to add up to autograd's. Sums in which every sample has another weight
also show gradients that were assigned to the wrong sample.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from curvlinops.core.autodiff import BoundModel, pull
from curvlinops.core.data import Batch, map_leaves
from curvlinops.core.independence import COUPLED, differs
from curvlinops.layers.detection import weights

_LOGGER = logging.getLogger("curvlinops")

Tensors = Mapping[str, Tensor]


def probe(output: Tensor) -> Tensor:
    """Return random numbers in an output's shape, always the same."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(output.shape, generator=generator, dtype=torch.float64, device="cpu")
    return random.to(output.device, output.dtype)


def weighted_probe(output: Tensor, r: Tensor) -> Tensor:
    """Return the same, times weights ``[N]`` of the samples."""
    return probe(output) * r.reshape(-1, *(1,) * (output.ndim - 1))


def by_samples(output: Tensor, num_samples: int | None) -> Tensor:
    """Give samples an axis of their own in front of their rows; ``None`` if each row is one.

    Raises:
        ValueError: If samples have unequal numbers of rows.
    """
    if num_samples is None:
        return output
    if len(output) == 0:
        return output.unsqueeze(1)
    if num_samples == 0 or len(output) % num_samples:
        raise ValueError(
            f"The model's output has {len(output)} rows for {num_samples} samples; those of an "
            "earlier batch had as many rows each. Give samples an axis in front of their rows, or "
            "say with batch_size_fn how many a batch has."
        )
    return output.unflatten(0, (num_samples, -1))


def has_parts(bound: BoundModel, output: Tensor) -> bool:
    """Return whether a batch has fewer samples than its output has rows, as many for each."""
    try:
        num_samples = bound.num_samples
    except ValueError:  # not evident
        return False
    return 0 < num_samples < len(output) and len(output) % num_samples == 0


def autograd_sums(bound: BoundModel, num_samples: int | None) -> dict[str, Tensor]:
    """Return autograd's gradients of a weighted sum of the output, in a forward pass of its own.

    Args:
        bound: The model on a batch.
        num_samples: See ``RecordedBatch``.
    """
    leaves = bound.leaves()
    scope = bound.scope(leaves, "gradient")
    with scope.active():
        output = by_samples(bound.output(scope), num_samples)
        u = weighted_probe(output.detach(), weights(len(output), output.detach()))
        found = pull({"": output}, {"": u}, leaves, retain=False)
    return {
        name: torch.zeros_like(leaf) if found[name] is None else found[name]
        for name, leaf in leaves.items()
    }


def disagreeing(
    names: Iterable[str],
    own: Tensors,
    summands: Tensors,
    truth: Tensors,
    tolerance: float,
    eps: float,
) -> list[str]:
    """Return the parameters for which two sums differ.

    Args:
        names: The parameters to compare.
        own: The rules' sums; what is not there is zero.
        summands: The sums of the absolute values of all that ``own`` is made of.
        truth: Autograd's sums.
        tolerance: The relative error of gradients.
        eps: That of the output's dtype.
    """
    # of what adds up to about zero, rounding errors are left
    noise = max(0.01 * tolerance, 2 * eps)
    wrong = []
    for name in names:
        zero = torch.zeros_like(truth[name])
        size = _norm(truth[name]) + torch.finfo(torch.float32).tiny
        error = _norm(own.get(name, zero).to(zero.device) - truth[name])
        total = _norm(summands.get(name, zero))
        if not error <= tolerance * size + noise * total + 1e-12:
            wrong.append(name)
    return wrong


def _norm(x: Tensor) -> float:
    # in float64, of which no copy is made
    norms = [
        torch.linalg.vector_norm(part, dtype=torch.float64) for part in x.flatten().split(2**17)
    ]
    return float(torch.linalg.vector_norm(torch.stack(norms)))


def check_independent(bound: BoundModel, output: Tensor) -> None:
    """Refuse a model whose output for a sample depends on the other samples of the batch.

    Raises:
        ValueError: If the first sample alone has another output. Nothing is said of inputs that
            cannot be cut.
    """
    num_samples = len(output)

    def first(leaf: Any) -> Any:
        cut = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == num_samples
        return leaf[:1] if cut else leaf

    X, y = map_leaves((bound.batch.X, None), first)
    alone = bound.on(Batch(bound.batch.index, X, y))
    scope = alone.scope(alone.leaves(), "gradient")
    try:
        with scope.active():
            found = alone.output(scope)[0].detach()
    except Exception as error:
        _LOGGER.info("Whether samples interact could not be checked: %s", error)
        return
    expected = output[0].detach()
    if differs(found, expected, output):
        raise ValueError(COUPLED)
