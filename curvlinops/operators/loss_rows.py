"""Gradients of losses that are no function of the output alone, sample by sample."""

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from curvlinops.layers.check import tolerance_of
from curvlinops.layers.fallback import check_layers, sample_alone
from curvlinops.layers.gradients import DenseGradient, Piece, chunks
from curvlinops.linear_operator.space import Columns, add
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.derivatives import evaluate, gradient
from curvlinops.support.columns import flat
from curvlinops.support.refusals import is_refusal

_LOGGER = logging.getLogger("curvlinops")


class LossesOneByOne:
    """Computes gradients of losses that are no function of the output alone, sample by sample.

    Such a loss differentiates the output with respect to the input (a PINN), or uses the
    parameters itself (weight decay). A sample's loss is the loss of a batch that consists of this
    sample alone. On the first batch with several samples, the gradients must add up to the gradient
    of the whole batch. Messages name the operator.
    """

    #: A check of one operator's data does not hold for another operator's data.
    is_shared = False

    def __init__(self, name: str):
        self._name = name
        self._checked = False
        self.fallbacks: dict[str, str] = {}  # why parameters are treated sample by sample

    def gradients(self, problem: BatchProblem) -> tuple[int, Iterator[Piece], Tensor]:
        """Return a batch's number of samples, the gradients of some at a time, and its weight."""
        reasons = dict.fromkeys(problem.space.names, _reason(problem))
        check_layers(problem, problem.space.names, reasons)
        if not self.fallbacks:
            self.fallbacks = reasons
            _LOGGER.warning(
                "%s: gradients are computed sample by sample: %s. If it differentiates the output, "
                "let the model return the derivatives: then they take one pass (see the page "
                "PINNs).",
                self._name,
                _reason(problem),
            )
        output = evaluate(problem)
        num_samples = problem.samples_of(output)
        sizes = num_samples, len(output) // max(num_samples, 1)
        if num_samples > 1 and not self._checked:
            _check_sum(problem, *sizes)
            self._checked = True
        return num_samples, _loss_gradients(problem, *sizes), problem.weight(output)


def _reason(problem: BatchProblem) -> str:
    return f"{problem.loss.name} differentiates the model's output, or uses the parameters itself"


def _loss_gradients(problem: BatchProblem, num_samples: int, num_rows: int) -> Iterator[Piece]:
    for samples in chunks(num_samples, problem.space.dim):
        out = problem.space.views(problem.space.zeros(samples.stop - samples.start))
        for i, n in enumerate(range(samples.start, samples.stop)):
            add(out, slice(i, i + 1), _loss_gradient(problem, n, num_samples, num_rows)[1])
        yield samples, {name: DenseGradient(x.unsqueeze(0)) for name, x in out.items()}


def _loss_gradient(
    problem: BatchProblem, n: int, num_samples: int, num_rows: int
) -> tuple[Tensor, Columns]:
    """Return the loss of one sample, and its gradient (one column); see ``sample_alone``."""
    one = sample_alone(problem, n, num_samples, num_rows)

    def loss(output: Tensor) -> tuple[Tensor, Tensor]:
        if len(output) != num_rows:
            raise ValueError(
                f"the batch cannot be cut. Its tensors with a first axis of length {num_samples} "
                f"were, and the model still returned {len(output)} outputs. Let the data yield "
                "such tensors, in dictionaries, lists or tuples, or batches of single samples."
            )
        return one.loss_sum(output)

    try:
        value, columns, _ = gradient(one, loss)
    except Exception as error:  # a user's model or loss may raise anything
        if not is_refusal(error):
            raise
        raise ValueError(
            f"{_reason(problem)}: its gradients are computed one sample at a time, which fails for "
            f"sample {n} of batch {problem.batch.index}: {error}"
        ) from error
    return value, columns


def _joined(columns: Columns) -> Tensor:
    return torch.cat([flat(x) for x in columns.values()], 1)


def _check_sum(problem: BatchProblem, num_samples: int, num_rows: int) -> None:
    """Refuse a batch whose samples' losses, or their gradients, do not add up to its own."""
    total, columns, _ = gradient(problem, problem.loss_sum)
    rest, size = _joined(columns), 0.0
    value, largest = total.double(), 0.0
    for n in range(num_samples):
        loss, columns = _loss_gradient(problem, n, num_samples, num_rows)
        row = _joined(columns)
        rest -= row
        value, largest = value - loss.double(), largest + float(loss.double().abs())
        size += float(row.double().norm())
    tolerance = max(tolerance_of(leaf.dtype) for leaf in problem.leaves().values())
    off = float(rest.double().norm()) > tolerance * size + 1e-12
    if off or float(value.abs()) > tolerance * largest + 1e-12:
        raise ValueError(
            f"The loss {problem.loss.name} of batch {problem.batch.index}, or its gradient, is not "
            f"the {problem.loss.reduction} over the losses of its {num_samples} samples alone, so "
            "that gradients of single samples are not defined: it couples the samples, or has a "
            "part that belongs to none of them. (With reduction='mean', weight decay is a part of "
            "each sample's loss; with reduction='sum', multiply it by the number of samples.)"
        )
