"""The Jacobian of the model's outputs, and its transpose."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.layers.gradients import PerSampleGradient, merged
from curvlinops.layers.samples import SampleBackward
from curvlinops.linear_operator.operator import AdjointLinearOperator
from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.operators.rows import RowMaps, RowSlices, RowsLinearOperator, flat
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

    # what the Jacobian does not have
    loss_func: None = field(init=False, default=None)
    block_sizes: None = field(init=False, default=None)
    reduction: None = field(init=False, default=None)
    process_group: None = field(init=False, default=None)

    def _wrap_loss(self, loss_func: Any, reduction: str | None) -> None:
        return None

    def _row_maps(self, problem: BatchProblem, output: Tensor) -> RowMaps:
        return flat(output)

    def _num_rows(self, problem: BatchProblem, output: Tensor) -> int:
        return output.numel()

    def _rows_shape(self, problem: BatchProblem, output: Tensor) -> tuple[int, ...]:
        return tuple(output.shape)

    @in_default_modes
    def gram(self) -> Tensor:
        """Return the neural tangent kernel, ``J @ J.T`` of the Jacobian J, as ``[N*C, N*C]``.

        (Jacot et al., Neural tangent kernel, NeurIPS 2018.) Computed from layers' inputs and output
        gradients, without the Jacobian, where that is cheaper.
        """
        batches: list[tuple[dict[str, PerSampleGradient], Tensor]] = []
        with self._batches("gram") as passed:
            slices = RowSlices(sum(self._lengths))
            for problem in slices.of(passed):
                backward = problem.rules(SampleBackward, type(self).__name__, False)
                gradients = backward.capture(problem)
                output = gradients.output
                num_rows = len(output) // max(gradients.num_samples, 1)
                size = max(num_rows, 1) * output.shape[1:].numel()  # of a sample's output
                eye = torch.eye(size, dtype=output.dtype, device=output.device)
                u = eye.repeat(1, gradients.num_samples).reshape(size, *output.shape)
                span = slices.next(output.numel())
                rows = torch.arange(span.start, span.stop, device=output.device)
                by_name = merged(gradients.backward(u, last=True))
                batches.append((by_name, rows.reshape(-1, size).T))
        return self._gram(batches)

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        return self.risk.space, self._rows(), False

    def _apply(self, columns: Columns) -> Columns:
        return self._push(columns, self.codomain)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._vjp(columns, self.codomain, self.domain.names)

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        return self._push(columns, self.codomain)

    def _apply_adjoint_restricted(self, columns: Columns, names: list[str]) -> Columns:
        return self._vjp(columns, self.codomain, names)


class TransposedJacobianLinearOperator(AdjointLinearOperator):
    """The transpose of the Jacobian, ``JacobianLinearOperator(...).T``, of shape ``[D, N*C]``.

    For arguments and errors see ``JacobianLinearOperator``.
    """

    _refused_keywords = JacobianLinearOperator._refused_keywords

    def __init__(
        self,
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
    ):
        problem = model_func, params, data
        options = progressbar, check_deterministic, num_data, batch_size_fn
        super().__init__(
            JacobianLinearOperator(*problem, *options, cache=cache, chunk_size=chunk_size)
        )

    def to_device(self, device: torch.device | str) -> "TransposedJacobianLinearOperator":
        """Move the operator itself, see ``DataLinearOperator``."""
        AdjointLinearOperator.__init__(self, self.operator.to_device(device))
        return self
