"""The Jacobian of the model's outputs, and its transpose."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.linear import Linear
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.operators.rows import (
    RowMaps,
    RowSlices,
    RowsLinearOperator,
    TransposedLinearOperator,
    together,
)
from curvlinops.operators.sample_rows import merged, write_rows
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.torch_modes import in_default_modes


@dataclass(eq=False, repr=False)
class JacobianLinearOperator(RowsLinearOperator):
    """The Jacobian of the model's outputs with respect to the parameters.

    Of shape ``[N*C, D]``: rows are the entries of the outputs, flattened row-major, batch by batch
    in the order of the data. Targets are not used. A list of tensors, one for each parameter, gives
    a list of one tensor of the outputs' shape, ``[N, ..., C]`` (``[N*C]`` where batches' outputs
    have unequal shapes); a dictionary gives the flat vector.

    For arguments, attributes and errors see ``DataLinearOperator``; there is no ``loss_func``, and
    there are no blocks.
    """

    # arguments that the Jacobian does not have
    loss_func: None = field(init=False, default=None)
    block_sizes: None = field(init=False, default=None)
    reduction: None = field(init=False, default=None)
    process_group: None = field(init=False, default=None)

    def _wrap_loss(self, loss_func: Any, reduction: str | None) -> None:
        return None

    def _row_maps(self, problem: BatchProblem, output: Tensor) -> RowMaps:
        shape = output.shape
        return Linear(lambda z: z.flatten(1), ()), Linear(lambda u: u.reshape(len(u), *shape), ())

    def _num_rows(self, problem: BatchProblem, output: Tensor) -> int:
        return output.numel()

    def _rows_shape(self, problem: BatchProblem, output: Tensor) -> tuple[int, ...]:
        return tuple(output.shape)

    @in_default_modes
    @together
    def gram(self) -> Tensor:
        """Return the neural tangent kernel, ``J @ J.T`` of the Jacobian J, as ``[N*C, N*C]``.

        (Jacot et al., Neural tangent kernel, NeurIPS 2018.) Computed from layers' inputs and output
        gradients, without the Jacobian, where that is cheaper.
        """
        with self._batches("gram") as batches:
            numbers = torch.arange(sum(self._lengths), device=self.device)
            pairs = [
                (merged(x.backward(_units(x), last=True)), _by_output(numbers[rows], x))
                for x, rows in self._gradients(batches)
            ]
        return self._gram(pairs)

    @together
    def _row_by_row(self) -> Tensor:
        """Return the matrix from the gradients of all samples at once."""
        dense = self.domain.whole.empty(self.shape[0])
        with self._batches("to_dense") as batches:
            for gradients, rows in self._gradients(batches):
                _write(gradients, self.domain.whole.views(dense[rows]))
        self._check_finite(self.domain.whole.not_finite(dense))
        return dense

    def _by_sample(self, task: str) -> Iterator[Tensor]:
        """Yield the rows of one batch after the other, by sample, ``[N, C, D]``."""
        with self._batches(task) as batches:
            for gradients, _ in self._gradients(batches):
                rows = self.domain.empty(gradients.output.numel())
                _write(gradients, self.domain.views(rows))
                self._check(rows)
                if len(rows):
                    yield rows.unflatten(0, (gradients.num_samples, -1))

    def _gradients(
        self, batches: Iterable[BatchProblem]
    ) -> Iterator[tuple[SampleGradients, slice]]:
        """Yield each batch's gradients, and which of all rows they are."""
        slices = RowSlices(sum(self._lengths))
        for problem in slices.of(batches):
            backward = problem.rules(SampleBackward, type(self).__name__, False)
            gradients = backward.capture(problem)
            yield gradients, slices.next(gradients.output.numel())

    @together
    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        return self.risk.space, self._rows(), False

    def _apply(self, columns: Tensor) -> Tensor:
        return self._push(columns, self.codomain)

    def _apply_transpose(self, columns: Tensor) -> Tensor:
        return self._vjp(columns, self.codomain)


def TransposedJacobianLinearOperator(
    model_func: nn.Module | Callable,
    params: Iterable[Tensor] | Mapping[str, Tensor],
    data: Iterable[tuple[Any, Any]],
    progressbar: bool = False,
    check_deterministic: bool = True,
    num_data: int | None = None,
    batch_size_fn: Callable[[Any], int] | None = None,
    *,
    cache: str | int = "auto",
    chunk_size: int | None = None,
) -> TransposedLinearOperator:
    """Return the transpose of the Jacobian, ``JacobianLinearOperator(...).T``, ``[D, N*C]``.

    For arguments and errors see ``JacobianLinearOperator``.
    """
    problem = model_func, params, data
    options = progressbar, check_deterministic, num_data, batch_size_fn
    return JacobianLinearOperator(*problem, *options, cache=cache, chunk_size=chunk_size).T


def _write(gradients: SampleGradients, out: Columns) -> None:
    """Write the rows of a batch to ``{name: [M, *shape]}``."""
    units, start = _units(gradients), 0
    for u in units.split(gradients.vectors_at_once):
        some = slice(start, start := start + len(u))
        rows = {name: _by_output(x, gradients)[some] for name, x in out.items()}
        write_rows(gradients.backward(u, last=start == len(units)), rows, lambda x: x)


def _by_output(rows: Tensor, gradients: SampleGradients) -> Tensor:
    """Return the rows of a batch, ``[M, *]``, as those of N samples' C outputs, ``[C, N, *]``."""
    num = gradients.num_samples
    return rows.unflatten(0, (num, len(rows) // max(num, 1))).transpose(0, 1)


def _units(gradients: SampleGradients) -> Tensor:
    """Return a unit vector for each of a sample's C outputs, the same for all: ``[C, *output]``."""
    output, num = gradients.output, gradients.num_samples
    size = output.numel() // max(num, 1)
    eye = torch.eye(size, dtype=output.dtype, device=output.device)
    return eye.repeat(1, num).reshape(size, *output.shape)
