"""Gradients of single samples."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError
from curvlinops.layers.fallback import LossesOneByOne
from curvlinops.layers.gradients import PerSampleGradient, Piece, add_sums, merged, write_rows
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.space import Columns, ParameterSpace, add, flat
from curvlinops.losses.base import DependentLossError
from curvlinops.operators.rows import (
    AddRows,
    RowMaps,
    RowPlaces,
    RowsLinearOperator,
    check_indices,
    row_indices,
)
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batch, Batches
from curvlinops.risk.derivatives import JVP, evaluate
from curvlinops.risk.sample_coupling import differs
from curvlinops.support.arguments import check_choice
from curvlinops.support.norms import wide
from curvlinops.support.pytree import leaves, select_samples
from curvlinops.support.refusals import is_refusal
from curvlinops.support.torch_modes import in_default_modes

#: Returns the view ``[V, N, *]`` of rows ``[M, *]`` that belongs to V vectors and N samples.
Place = Callable[[Tensor], Tensor]

#: The gradients of V vectors and N samples, and which of all rows they are.
Placed = tuple[Iterable[Piece], Place]


class Selection(NamedTuple):
    """The samples of a batch that have wanted rows.

    Attributes:
        shapes: The shapes of the batch's tensors.
        samples: The samples that have wanted rows; ``None`` for all, as the batch cannot be cut.
        rows: The rows of these samples among all rows of the data.
        stop: The number of rows of all batches up to this one.
    """

    shapes: list[torch.Size]
    samples: list[int] | None
    rows: Tensor
    stop: int


@dataclass(eq=False, repr=False, kw_only=True)
class PerSampleGradientLinearOperator(RowsLinearOperator):
    """The matrix whose rows are the gradients of the samples' losses.

    Of shape ``[N, D]``: row n is the sum of the gradients of sample n's terms, without the factor c
    of the empirical risk. For a loss with ``reduction="mean"`` and one term per sample, row n is
    the gradient of ``loss(model(x_n), y_n)`` alone, and the gradient of the risk is
    ``op.T @ ones / N``: the mean of the rows, not their sum. Ignored targets contribute zero.

    Norms, inner products and moments do not form the matrix if the layers have rules. Products form
    it only if the model can be differentiated only once. A loss that differentiates the output, or
    uses the parameters, is evaluated sample by sample. For other arguments and errors see
    ``DataLinearOperator``; there are no blocks.

    Args:
        subsampling: Indices of the rows to keep, in that order. Batches are cut to these samples,
            if the model then computes the same outputs.
        terms: ``"sample"``, or ``"term"`` for a row for each term, such as a token or pixel. These
            rows take a backward pass for each term of a sample.

    Raises:
        ValueError: If ``terms`` is unknown, an index is out of range, blocks are wanted, or
            samples interact in the model.
    """

    subsampling: Iterable[int] | Tensor | None = None
    terms: str = "sample"

    _per_sample = True

    def __post_init__(self) -> None:
        """Check the operator's own options, too."""
        check_choice("terms", self.terms, ("term", "sample"))
        self._fallbacks: dict[str, str] = {}
        super().__post_init__()
        if len(self._blocks) > 1:
            raise ValueError("A matrix of gradients has no diagonal blocks: omit block_sizes.")

    @property
    def fallbacks(self) -> dict[str, str]:
        """The parameters whose gradients take a backward pass for each sample, and why.

        Those of the last call of a method that needs single gradients; empty before the first.
        """
        return dict(self._fallbacks)

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        self._indices: Tensor | None = None  # of the wanted ones of all rows
        self._selections: list[Selection] = []
        wanted = self.subsampling
        self._wanted = None if wanted is None else row_indices(wanted, self.risk.space.device)
        self._all = self._rows()
        num_rows = self._all.dim
        if self._wanted is not None:
            check_indices(self._wanted, num_rows)
            num_rows = len(self._wanted)
            kept = torch.cat([selection.rows for selection in self._selections])
            self._indices = torch.searchsorted(kept, self._wanted)
            self._all = ParameterSpace.flat(len(kept), self._all.dtype, self._all.device)
        rows = ParameterSpace.flat(num_rows, self._all.dtype, self._all.device)
        return self.risk.space, rows, False

    # --- subsampling

    def _rows_shape(self, problem: BatchProblem, output: Tensor) -> tuple[int, ...]:
        shape = super()._rows_shape(problem, output)
        if self._wanted is not None:
            self._select(problem, output, shape[0])
        return shape

    def _select(self, problem: BatchProblem, output: Tensor, num_rows: int) -> None:
        """Find out which samples of the next batch have wanted rows."""
        start = self._selections[-1].stop if self._selections else 0
        stop = start + num_rows
        rows, samples = torch.arange(start, stop, device=self._wanted.device), None
        wanted = torch.isin(rows, self._wanted)
        if not bool(wanted.any()):
            rows, samples = rows[:0], []
        elif (chosen := self._samples_of(problem, output, wanted)) is not None:
            rows, samples = rows.reshape(len(output), -1)[chosen].flatten(), chosen.tolist()
        self._selections.append(Selection(_shapes(problem), samples, rows, stop))

    def _samples_of(self, problem: BatchProblem, output: Tensor, wanted: Tensor) -> Tensor | None:
        """Return the samples with wanted rows, ``None`` if the batch cannot be cut to them."""
        try:
            num_samples = problem.num_samples
        except ValueError:  # it is not evident
            return None
        sizes = {len(output), *(len(y) for y in leaves(problem.batch.y) if y.ndim)}
        if sizes != {num_samples}:
            return None
        have = wanted.reshape(num_samples, -1).any(1)
        if int(have.sum()) == 1:  # models may treat a single sample in another way
            have[1 if bool(have[0]) else 0] = True
        samples = have.nonzero().flatten()
        if len(samples) == num_samples:
            return None
        try:
            few, expected = evaluate(_cut(problem, samples.tolist())), output[samples]
        except Exception as error:  # a user's model may raise anything on a part of a batch
            if not is_refusal(error):
                raise
            return None
        is_same = few.shape == expected.shape and not differs(few, expected, output)
        return samples if is_same else None

    @contextmanager
    def _batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        with super()._batches(description, data) as batches:
            yield batches if self._indices is None else self._selected(batches)

    def _selected(self, batches: Iterator[BatchProblem]) -> Iterator[BatchProblem]:
        """Yield the batches, cut to the samples that have wanted rows.

        Raises:
            RuntimeError: If rows may not be where they were at construction.
        """
        for problem in batches:
            index = problem.batch.index
            known = self._selections[index] if index < len(self._selections) else None
            if known is None or known.shapes != _shapes(problem):
                raise RuntimeError(
                    f"Batch {index} of the data has other shapes than at construction. With "
                    "subsampling=, batches must keep their lengths. Build a new operator."
                )
            if known.samples is None:
                yield problem
            elif known.samples:
                yield _cut(problem, known.samples)

    def _chosen(self, x: Tensor) -> Tensor:
        """Return the wanted ones of all rows."""
        return x if self._indices is None else x[self._indices]

    def to_device(self, device: torch.device | str) -> "PerSampleGradientLinearOperator":
        """Move the operator itself, see ``DataLinearOperator``."""
        super().to_device(device)
        self._all = self._all.to(self.device)
        self._indices = None if self._indices is None else self._indices.to(self.device)
        return self

    def _num_rows(self, output: Tensor) -> int:
        if self.terms == "sample":
            return output.shape[0]
        return self.risk.loss.to_terms(output.unsqueeze(0)).shape[1]

    def _row_maps(self, problem: BatchProblem, output: Tensor) -> RowMaps:
        gradient, loss = self._loss_gradient(problem, output), problem.loss
        if self.terms == "term":
            g = loss.to_terms(gradient.unsqueeze(0))
            return (
                lambda z: (loss.to_terms(z) * g).sum(-1),
                lambda u: loss.from_terms(u.unsqueeze(-1) * g, output),
            )
        ones = (1,) * (output.ndim - 1)
        return (
            lambda z: (wide(z) * gradient).reshape(*z.shape[:2], prod(z.shape[2:])).sum(-1),
            lambda u: (u.reshape(*u.shape, *ones) * gradient).to(output.dtype),
        )

    @staticmethod
    def _loss_gradient(problem: BatchProblem, output: Tensor) -> Tensor:
        problem.weight(output)  # checks that output and target fit
        return wide(problem.loss.gradient(output, problem.batch.y))

    def _linearize(self, problem: BatchProblem, single: bool) -> JVP:
        if problem.loss_needs_graph or problem.facts.lacks_derivative:
            return self._from_rows(problem)
        try:
            multiply = super()._linearize(problem, single)
        except (NoDerivativeError, DependentLossError):
            return self._from_rows(problem)

        def apply(V: Columns) -> Tensor:
            nonlocal multiply
            try:
                return multiply(V)
            except NoDerivativeError:
                problem.learn(lacks_derivative=True)
                multiply = self._from_rows(problem)
            return multiply(V)

        return apply

    def _from_rows(self, problem: BatchProblem) -> JVP:
        """Prepare products with the matrix itself."""
        rows = self._written(problem)
        return lambda V: sum(flat(v) @ rows[name].T for name, v in V.items())

    def _written(self, problem: BatchProblem) -> Columns:
        """Return the rows of a batch, ``{name: [M, entries]}``."""
        num_rows, gradients = self._backward(problem)
        rows = self.domain.lazy_empty(num_rows)
        for pieces, place in gradients:
            write_rows(pieces, rows, place)
        return {name: flat(x) for name, x in rows.items()}

    def _linearize_adjoint(self, problem: BatchProblem) -> tuple[AddRows, int]:
        if not problem.loss_needs_graph:
            with suppress(DependentLossError):  # as it was not on earlier batches
                return super()._linearize_adjoint(problem)
        rows = self._written(problem)

        def apply(u: Tensor, out: Columns) -> None:
            add(out, slice(None), {name: (u @ rows[name]).view_as(x) for name, x in out.items()})

        return apply, len(next(iter(rows.values())))

    def _apply(self, columns: Columns) -> Columns:
        return {"": self._chosen(self._push(columns, self._all)[""].T).T}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._apply_adjoint_restricted(columns, self.domain.names)

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        return self._apply(columns)

    def _apply_adjoint_restricted(self, columns: Columns, names: list[str]) -> Columns:
        if self._indices is not None:
            rows = self._all.zeros(len(columns[""]))
            rows[""].index_add_(1, self._indices, columns[""])
            columns = rows
        return self._vjp(columns, self._all, names)

    # --- beyond products

    @in_default_modes
    def dense(self) -> Tensor:
        """Return the matrix, ``[N, D]``."""
        return self._chosen(
            self.domain.join(self._write(self.domain.split(self.domain.empty(self._all.dim))))
        )

    def to_dense(self) -> Tensor:
        """Return the matrix, ``[N, D]``; the same as ``dense``, of any size."""
        return self.dense()

    @in_default_modes
    def gradients(self) -> list[Tensor] | dict[str, Tensor]:
        """Return the rows as tensors ``[N, *shape]``, a list or dictionary as ``params`` is.

        The same numbers as in ``dense``, without one large block of memory.
        """
        rows = self._write(self.domain.lazy_empty(self._all.dim))
        return self.risk.model.pack({name: self._chosen(x) for name, x in rows.items()})

    def _write(self, out: Columns) -> Columns:
        """Write all rows to ``{name: [M, *shape]}``, and return these."""
        with self._batches("gradients") as batches:
            for pieces, place in self._gradients(batches):
                write_rows(pieces, out, place)
        out = {name: out[name] for name in self.domain.names}
        self._check_finite(out)
        return out

    @in_default_modes
    def norms(self) -> Tensor:
        """Return the norm of each row, ``[N]``."""
        squares = self._all.zeros(1)[""][0]
        with self._batches("norms") as batches:
            for pieces, place in self._gradients(batches):
                for samples, gradients in pieces:
                    place(squares)[:, samples] += sum(
                        gradient.squared_norms() for gradient in gradients.values()
                    )
        squares = self._chosen(squares)
        self._check(squares)
        return squares.sqrt()

    @in_default_modes
    def gram(self) -> Tensor:
        """Return the inner products of all rows, ``op @ op.T`` as a matrix ``[N, N]``."""
        numbers = torch.arange(self._all.dim, device=self.device)
        with self._batches("gram") as batches:
            gradients = self._gradients(batches)
            found = [(merged(pieces), place(numbers)) for pieces, place in gradients]
        return self._chosen(self._chosen(self._gram(found)).T)

    @in_default_modes
    def second_moment(self) -> Tensor:
        """Return the mean of the rows' squared entries, ``[D]``."""
        if self._indices is not None:
            return self.dense().square().mean(0)
        return self._means("second_moment", lambda g: g.sum_of_squares()[None], self.domain)[0]

    @in_default_modes
    def variance(self) -> Tensor:
        """Return the variance of each column over the rows (divided by N), ``[D]``."""
        if self._indices is not None:
            return self.dense().double().var(0, correction=0).to(self.torch_dtype)
        space = ParameterSpace(self.domain.shapes, torch.float64, self.device)
        means = self._means("variance", _moments, space, 2)
        return (means[1] - means[0].square()).clamp(min=0.0).to(self.torch_dtype)

    def _means(
        self,
        name: str,
        of: Callable[[PerSampleGradient], Tensor],
        space: ParameterSpace,
        num: int = 1,
    ) -> Tensor:
        """Return sums over samples, ``[num, *parameter]``, divided by N."""
        out = space.zeros(num)
        with self._batches(name) as batches:
            for pieces, _ in self._gradients(batches):
                add_sums(out, pieces, of)
        self._check_finite(out)
        return space.join(out) / self.shape[0]

    def _gradients(self, batches: Iterable[BatchProblem]) -> Iterator[Placed]:
        """Yield gradients of V vectors and N samples, and which of all rows they are."""
        places = RowPlaces(self._all.dim)
        for problem in places.of(batches):
            num_rows, gradients = self._backward(problem)
            rows = places.next(num_rows)
            for pieces, place in gradients:
                yield pieces, lambda x, rows=rows, place=place: place(x[rows])

    def _backward(self, problem: BatchProblem) -> tuple[int, Iterator[Placed]]:
        """Return the number of a batch's rows, their gradients, and the places of these."""
        samples = None
        if not problem.loss_needs_graph:
            samples = problem.rules(SampleBackward, type(self).__name__).capture(problem)
        if problem.loss_needs_graph:  # perhaps only on this batch
            alone = problem.rules(LossesOneByOne, type(self).__name__)
            num_samples, pieces = alone.gradients(problem)
            self._fallbacks = alone.fallbacks
            return num_samples, iter([(pieces, lambda x: x.unsqueeze(0))])
        self._fallbacks, output = samples.fallbacks, samples.output
        gradient = self._loss_gradient(problem, output).unsqueeze(0)
        if self.terms == "sample":
            gradients = samples.backward(gradient.to(output.dtype), last=True)
            return len(output), iter([(gradients, lambda x: x.unsqueeze(0))])
        num_terms = problem.loss.to_terms(gradient).shape[1]
        return num_terms, self._by_term(problem, samples, gradient)

    def _by_term(
        self, problem: BatchProblem, samples: SampleGradients, gradient: Tensor
    ) -> Iterator[Placed]:
        """Yield gradients of one or several terms of each sample at a time."""
        loss, output = problem.loss, samples.output
        terms = loss.to_terms(gradient)[0]
        sizes = len(output), max(len(terms) // max(len(output), 1), 1)
        terms, step = terms.unflatten(0, sizes), samples.vectors_at_once
        for start in range(0, sizes[1], step):
            some = torch.arange(start, min(start + step, sizes[1]), device=terms.device)
            alone = terms.new_zeros(len(some), *terms.shape)
            alone[some - start, :, some] = terms[:, some].transpose(0, 1)
            u = loss.from_terms(alone.flatten(1, 2), output)

            def place(x: Tensor, start: int = start) -> Tensor:
                return x.unflatten(0, sizes).transpose(0, 1)[start : start + step]

            yield samples.backward(u.to(output.dtype)), place


def _moments(gradient: PerSampleGradient) -> Tensor:
    """Return the sums of all gradients, and of their squares, in float64, ``[2, *shape]``."""
    gradient = gradient.to(torch.float64)
    return torch.stack([gradient.sum_over_samples().sum(0), gradient.sum_of_squares()])


def _shapes(problem: BatchProblem) -> list[torch.Size]:
    return [tensor.shape for tensor in leaves((problem.batch.X, problem.batch.y))]


def _cut(problem: BatchProblem, samples: list[int]) -> BatchProblem:
    """Return the problem on some samples of the batch."""
    X, y = select_samples((problem.batch.X, problem.batch.y), samples, problem.num_samples)
    return problem.on(Batch(problem.batch.index, X, y))
