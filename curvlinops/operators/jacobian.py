"""The Jacobian of the model's outputs, and its transpose."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.core import autodiff
from curvlinops.core.choice import Mode
from curvlinops.core.modes import Push
from curvlinops.core.risk import BatchRisk
from curvlinops.core.space import Columns, ParameterSpace
from curvlinops.operators.base import DataLinearOperator


class OutputsLinearOperator(DataLinearOperator):
    """What the Jacobian and its transpose share: products in both directions."""

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
        autodiff: str = "auto",
    ):
        super().__init__(
            model_func,
            None,
            params,
            data,
            progressbar,
            check_deterministic,
            num_data,
            None,
            batch_size_fn,
            cache=cache,
            chunk_size=chunk_size,
            autodiff=autodiff,
        )

    def _wrap_loss(self, loss_func: Any, reduction: str | None) -> None:
        return None

    def _linearize(self, bound: BatchRisk, mode: Mode) -> Push:
        return mode.jacobian(bound)

    def _outputs(self) -> ParameterSpace:
        """Return the space of all data's outputs, flattened one batch after the other."""
        space = self.risk.space
        return ParameterSpace.flat(self.risk.count_outputs(), space.dtype, space.device)

    def _push(self, columns: Columns, outputs: ParameterSpace) -> Columns:
        """Multiply parameter vectors with the Jacobian."""
        num_columns = next(iter(columns.values())).shape[0]
        if num_columns == 0:
            return outputs.zeros(0)
        parts: list[Tensor] = []

        def step(bound: BatchRisk) -> None:
            tangents = self._prepare(bound, num_columns)(columns)
            parts.append(tangents.flatten(1).to(outputs.dtype))

        self._run(step)
        _check_length(sum(part.shape[1] for part in parts), outputs.dim)
        out = {"": torch.cat(parts, dim=1)}
        self._check_finite(out, outputs)
        return out

    def _pull(self, columns: Columns, outputs: ParameterSpace) -> Columns:
        """Multiply output vectors with the transposed Jacobian."""
        rows = columns[""]
        out = self.risk.space.zeros(rows.shape[0])

        def build(bound: BatchRisk) -> tuple[Callable, int]:
            return autodiff.transposed_jacobian(bound, self._chunk_size)

        start = 0

        def step(bound: BatchRisk) -> None:
            nonlocal start
            apply, size = self._keep(bound, build, "transposed")
            _check_length(start + size, outputs.dim, at_most=True)
            apply(rows[:, start : start + size], out)
            start += size

        if rows.shape[0] == 0:
            return out
        self._run(step)
        _check_length(start, outputs.dim)
        self._check_finite(out, self.risk.space)
        return out


class JacobianLinearOperator(OutputsLinearOperator):
    """The Jacobian of the model's outputs with respect to the parameters.

    Of shape ``[N*C, D]``: rows are the entries of the outputs, flattened row-major, batch by batch
    in the order of the data. Targets are not used.

    For arguments, attributes and errors see ``DataLinearOperator``; there is no ``loss_func``, and
    there are no blocks.
    """

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        return self.risk.space, self._outputs(), False

    def _apply(self, columns: Columns) -> Columns:
        return self._push(columns, self.codomain)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._pull(columns, self.codomain)


class TransposedJacobianLinearOperator(OutputsLinearOperator):
    """The transpose of ``JacobianLinearOperator``, of shape ``[D, N*C]``."""

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        return self._outputs(), self.risk.space, False

    def _apply(self, columns: Columns) -> Columns:
        return self._pull(columns, self.domain)

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._push(columns, self.domain)

    @property
    def space(self) -> ParameterSpace:
        """The space of the parameters."""
        return self.codomain


def _check_length(found: int, expected: int, at_most: bool = False) -> None:
    if found > expected or (found != expected and not at_most):
        raise RuntimeError(
            f"The model's outputs have {found} entries in total, at construction they had "
            f"{expected}. Data or model have changed; build a new operator."
        )
