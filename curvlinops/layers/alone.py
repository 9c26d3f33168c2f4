"""Gradients of samples whose loss needs the model's graph: each sample is a batch of its own."""

import logging

import torch
from torch import Tensor

from curvlinops.autodiff import backward
from curvlinops.layers.check import TOLERANCES
from curvlinops.layers.gradients import DenseGradient, Entries
from curvlinops.layers.groups import Group
from curvlinops.linear_operator.space import Columns, add
from curvlinops.risk.data import Batch
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.memory import lacks_memory
from curvlinops.support.pytree import select_samples

_LOGGER = logging.getLogger("curvlinops")


class SamplesAlone:
    """Computes gradients of losses that are no function of the output alone, sample by sample.

    Such a loss differentiates the output with respect to the input (a PINN), or uses the
    parameters itself (weight decay). A sample's loss is that of a batch that consists of this
    sample alone. On the first batch with several samples, the gradients are compared with that of
    the whole batch, to which they must add up.

    Args:
        name: Names the operator in messages.

    Attributes:
        fallbacks: Why parameters are treated sample by sample.
    """

    def __init__(self, name: str):
        self._name = name
        self._checked = False
        self.fallbacks: dict[str, str] = {}

    def group(self, problem: BatchProblem) -> Group:
        """Return the gradients of a batch's samples, computed when they are asked for."""
        self._say(problem)
        num_samples = len(backward.evaluate(problem))
        if num_samples > 1 and not self._checked:
            _check_sum(problem, num_samples)
            self._checked = True
        space = problem.space

        def rows(samples: slice | Tensor) -> Tensor:
            wanted = torch.arange(num_samples, device="cpu")[
                samples if isinstance(samples, slice) else samples.cpu()
            ]
            out = space.zeros(len(wanted))
            for place, n in enumerate(wanted.tolist()):
                _, columns = _gradient_alone(problem, n, num_samples)
                add(out, slice(place, place + 1), columns)
            return space.join(out).unsqueeze(0)

        return space.names, DenseGradient(rows, 1, num_samples, Entries.all([space.dim]))

    def rows(self, problem: BatchProblem) -> Columns:
        """Return the gradients of a batch's samples, ``{name: [N, entries]}``."""
        _, form = self.group(problem)
        rows = form.rows(slice(0, form.num_samples))[0]
        return {name: rows[:, problem.space.slice(name)] for name in problem.space.names}

    def _say(self, problem: BatchProblem) -> None:
        if self.fallbacks:
            return
        reason = _reason(problem)
        self.fallbacks = dict.fromkeys(problem.space.names, reason)
        _LOGGER.warning("%s: gradients are computed sample by sample: %s.", self._name, reason)


def _reason(problem: BatchProblem) -> str:
    return f"{problem.loss.name} differentiates the model's output, or uses the parameters itself"


def _gradient_alone(problem: BatchProblem, n: int, num_samples: int) -> tuple[Tensor, Columns]:
    """Return the loss of one sample, and its gradient (one column)."""
    alone = _alone(problem, n, num_samples)

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        if len(output) != 1:
            raise ValueError(
                f"the batch cannot be cut. Its tensors with a first axis of length {num_samples} "
                f"were, and the model still returned {len(output)} outputs. Let the data yield "
                "such tensors, in dictionaries, lists or tuples, or batches of single samples."
            )
        return alone.loss_sum(output)

    try:
        value, gradient, _ = backward.gradient(alone, loss)
    except Exception as error:  # whatever model and loss raise
        if lacks_memory(error):
            raise
        raise ValueError(
            f"{_reason(problem)}: its gradients are computed one sample at a time, which fails for "
            f"sample {n} of batch {problem.batch.index}: {error}"
        ) from error
    return value, gradient


def _check_sum(problem: BatchProblem, num_samples: int) -> None:
    """Compare the samples' losses and their gradients with those of the batch.

    Raises:
        ValueError: If they do not add up.
    """
    space = problem.space
    total, gradient, _ = backward.gradient(problem, problem.loss_sum)
    rest, size = space.join(gradient).clone(), 0.0
    value, largest = total.double(), 0.0
    for n in range(num_samples):
        loss, columns = _gradient_alone(problem, n, num_samples)
        row = space.join(columns)
        rest -= row
        value, largest = value - loss.double(), largest + float(loss.double().abs())
        size += float(row.double().norm())
    tolerance = max(TOLERANCES[leaf.dtype] for leaf in problem.leaves().values())
    off = float(rest.double().norm()) > tolerance * size + 1e-12
    if off or float(value.abs()) > tolerance * largest + 1e-12:
        raise ValueError(
            f"The loss {problem.loss.name} of batch {problem.batch.index}, or its gradient, is not "
            f"the {problem.loss.reduction} over the losses of its {num_samples} samples alone, so "
            "that gradients of single samples are not defined: it couples the samples, or has a "
            "part that belongs to none of them. (With reduction='mean', weight decay is a part of "
            "each sample's loss; with reduction='sum', multiply it by the number of samples.)"
        )


def _alone(problem: BatchProblem, n: int, num_samples: int) -> BatchProblem:
    """Return a batch that consists of one sample.

    Tensors whose first axis numbers the samples are cut; what is one tensor in X and y (points at
    which a loss differentiates) stays one.
    """
    X, y = select_samples((problem.batch.X, problem.batch.y), slice(n, n + 1), num_samples)
    return problem.on(Batch(problem.batch.index, X, y))
