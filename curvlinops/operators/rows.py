"""Operators with a row for each output, sample or term: products with the outputs' Jacobian."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.layers.gradients import PerSampleGradient
from curvlinops.linear_operator.operator import Product, TorchLinearOperator
from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.operators.base import DataLinearOperator
from curvlinops.operators.gram import gram
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batches
from curvlinops.risk.derivatives import evaluate, jacobian, transposed_jacobian
from curvlinops.support.digest import digest
from curvlinops.support.torch_modes import exclusive

#: Two functions that are adjoint to each other: from outputs ``[K, *output]`` to rows ``[K, M]``,
#: and back.
RowMaps = tuple[Linear, Linear]

_OTHER_ORDER = (
    "is another one than when the operator was built, so that its rows belong to other samples: "
    "the loader takes another order after each pass, as those of transformers' "
    "Trainer.get_train_dataloader() and of accelerate do. Pass a loader without "
    "shuffling, such as trainer.get_eval_dataloader(train_dataset) or DataLoader(dataset, "
    "shuffle=False). If the data has changed, build a new operator."
)

Item = TypeVar("Item")
P = ParamSpec("P")
R = TypeVar("R")


def together(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method that evaluates the model: processes with shards of it all call it.

    Each has the rows of its own data. An error in one process is raised in all.
    """

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.risk.peers.raise_once():
            return method(self, *args, **kwargs)

    return run


class RowsLinearOperator(DataLinearOperator):
    """A linear function of each batch's outputs, times the outputs' Jacobian.

    A subclass says which, and in which direction it multiplies. If parameters are sharded, each
    process has the rows of its own data, and transposed products add up over all processes.
    """

    _adds_data = False
    __matmul__: Product[Tensor]

    def __post_init__(self) -> None:
        """Refuse process groups, too: later checks would be those of several processes."""
        if self.process_group is not None:
            raise ValueError(
                f"{type(self).__name__} has rows for the data of one process: omit process_group."
            )
        self._digests = dict[tuple[torch.device, int], list[tuple]]()  # of each batch
        super().__post_init__()

    def _row_maps(self, problem: BatchProblem, output: Tensor) -> RowMaps:
        """Return the linear function at a given output, and its adjoint."""
        raise NotImplementedError

    def _num_rows(self, problem: BatchProblem, output: Tensor) -> int:
        """Return the number of a batch's rows."""
        raise NotImplementedError

    def _rows_shape(self, problem: BatchProblem, output: Tensor) -> tuple[int, ...]:
        """Return the shape of a batch's rows in lists, samples first; asked at construction."""
        return (self._num_rows(problem, output),)

    def _apply_transpose(self, columns: Tensor) -> Tensor:
        """Multiply columns by the transpose, see ``_apply``."""
        raise NotImplementedError

    def _transposed(self) -> "TransposedLinearOperator":
        return TransposedLinearOperator(self)

    @contextmanager
    def _batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        with super()._batches(description, data) as batches:
            yield map(self._in_order, batches)

    def _in_order(self, problem: BatchProblem) -> BatchProblem:
        """Return a problem; refuse another batch than at construction, unless data is a list."""
        if self.check_deterministic and not isinstance(self.data, list | tuple):
            batch, device = problem.batch, self.risk.space.device
            found = digest((batch.X, batch.y))
            if self._digests.setdefault((device, batch.index), found) != found:
                raise RuntimeError(f"Batch {batch.index} of the data {_OTHER_ORDER}")
        return problem

    _check_model = together(DataLinearOperator._check_model)
    to_dense = together(DataLinearOperator.to_dense)
    gradient_and_loss = together(DataLinearOperator.gradient_and_loss)

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        def head(output: Tensor) -> tuple[Linear, int]:
            return self._row_maps(problem, output)[0], self._num_rows(problem, output)

        return jacobian(problem, head, self.chunk_size)

    def _linearize_transpose(self, problem: BatchProblem) -> Linear:
        """Prepare transposed products on a batch, of columns ``[K, M]``."""
        transposed, output = transposed_jacobian(problem, self.chunk_size)
        up = self._row_maps(problem, output)[1]

        def add_rows(U: Tensor, out: Columns) -> None:
            transposed.apply(up.apply(U), out)

        tensors = transposed.tensors + up.tensors
        return Linear(add_rows, tensors, self._num_rows(problem, output))

    @together
    def _rows(self) -> ParameterSpace:
        """Return the space of all rows, one batch after the other."""
        shapes: list[tuple[int, ...]] = []
        with self.risk.batches("count_rows") as batches:
            for problem in map(self._in_order, batches):
                output = self._first_output
                if output is None or problem.batch.index:
                    output = evaluate(problem)
                    problem.check_numbers(output)
                shapes.append(self._rows_shape(problem, output))
        self._lengths = [prod(shape) for shape in shapes]
        alike = len({shape[1:] for shape in shapes}) == 1
        shape = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        space = self.risk.space
        return ParameterSpace(
            {"": shape if alike else (sum(self._lengths),)}, space.dtype, space.device
        )

    @together
    def _push(self, columns: Tensor, rows: ParameterSpace) -> Tensor:
        """Multiply columns of parameters, ``[K, dim]``; return those of rows."""
        num_columns = len(columns)
        self._check_number(num_columns)
        out = rows.zeros(num_columns)
        if num_columns == 0:
            return out
        V, build = self.domain.views(columns), partial(self._prepare, num_products=num_columns)
        with self.risk.adding.sharing(V), self._built(build) as batches:
            slices = RowSlices(rows.dim)
            for linear in slices.of(batches):
                linear.apply(V, out[:, slices.next(linear.num_rows)])
        self._check(out)
        return out

    @together
    def _vjp(self, columns: Tensor, rows: ParameterSpace) -> Tensor:
        """Multiply columns of rows by the transpose."""
        num_columns, space = len(columns), self.domain
        self._check_number(num_columns)
        out = space.zeros(num_columns)
        if num_columns == 0:
            return out

        def build(problem: BatchProblem, is_kept: bool) -> Linear:
            return self._linearize_transpose(problem)

        # of the rows of all processes
        summing, sums = self.risk.adding.summing({}, out, space), space.views(out)
        with summing, self._built(build, "rmatmat") as batches:
            slices = RowSlices(rows.dim)
            for linear in slices.of(batches):
                linear.apply(columns[:, slices.next(linear.num_rows)], sums)
        self._check_finite(space.not_finite(out))
        return out

    def _check_number(self, num_columns: int) -> None:
        """Refuse other numbers of vectors in other processes, if parameters are sharded."""
        numbers = self.risk.adding.gather_objects(num_columns)
        if len(set(numbers)) > 1:
            raise ValueError(
                f"Processes multiply different numbers of vectors at once: {numbers}. Each has a "
                "part of the parameters, so that all must multiply equally many."
            )

    def _gram(self, batches: list[tuple[dict[str, PerSampleGradient], Tensor]]) -> Tensor:
        """Return the inner products of all rows, whose numbers in each batch are ``[V, N]``."""
        if not batches:
            return torch.zeros(0, 0, dtype=self.torch_dtype, device=self.device)
        rows = torch.cat([numbers.flatten() for _, numbers in batches])
        with exclusive():  # some gradients take backward passes
            products = gram([gradients for gradients, _ in batches], self.risk.space.empty(0))
        out = torch.empty_like(products)
        out[rows[:, None], rows] = products
        self._check(out)
        return out

    def _check(self, out: Tensor) -> None:
        self._check_finite(not_finite({"": out}))


class TransposedLinearOperator(TorchLinearOperator):
    """The transpose of an operator with a row for each output, sample or term."""

    def __init__(self, operator: RowsLinearOperator):
        self.operator = operator
        super().__init__(operator.codomain, operator.domain)

    def _operands(self) -> tuple[TorchLinearOperator, ...]:
        return (self.operator,)

    def _apply(self, columns: Tensor) -> Tensor:
        return self.operator._apply_transpose(columns)

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> TorchLinearOperator:
        return self.operator._part(columns, rows)._transposed()

    def _transposed(self) -> RowsLinearOperator:
        return self.operator

    def _formula(self) -> str:
        return f"{self.operator._formula()}.T"

    def to_device(self, device: torch.device | str) -> "TransposedLinearOperator":
        """Move the operator itself, see ``DataLinearOperator``."""
        TransposedLinearOperator.__init__(self, self.operator.to_device(device))
        return self


class RowSlices:
    """Says which of all rows belong to each batch."""

    def __init__(self, dim: int):
        self._dim, self._start = dim, 0

    def of(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yield what belongs to each batch, for which ``next`` is called; refuse missing rows."""
        yield from batches
        if self._start != self._dim:
            raise RuntimeError(
                f"The data has {self._start} rows, at construction it had {self._dim}. Data or "
                "model have changed; build a new operator."
            )

    def following(self, num_rows: int) -> slice:
        """Return the next slice, and stay before it."""
        return slice(self._start, self._start + num_rows)

    def next(self, num_rows: int) -> slice:
        """Return the slice of a batch's rows; refuse more rows than at construction."""
        rows = self.following(num_rows)
        if rows.stop > self._dim:
            raise RuntimeError(
                f"The data has other batches than at construction, or the model other outputs: "
                f"{num_rows} rows after the first {self._start} of {self._dim}. Build a new "
                "operator."
            )
        self._start = rows.stop
        return rows


def row_indices(subsampling: Any, device: torch.device) -> Tensor:
    """Return indices of rows as a vector of integers."""
    try:
        given = subsampling if isinstance(subsampling, Tensor) else list(subsampling)
        indices = torch.as_tensor(given, device=device)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"subsampling must be a list of indices of rows, got {subsampling!r}."
        ) from error
    if indices.ndim == 1 and not len(indices):
        return indices.to(torch.int64)
    if indices.ndim != 1 or indices.dtype.is_floating_point or indices.dtype == torch.bool:
        raise ValueError(
            "subsampling must be a list of indices of rows, got "
            f"{indices.dtype} of shape {list(indices.shape)}."
        )
    return indices.to(torch.int64)
