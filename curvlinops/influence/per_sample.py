"""Gradients of single samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from curvlinops.autodiff.linear import Linear
from curvlinops.influence.low_rank import LowRankColumns
from curvlinops.influence.scoring import NOT_DIFFERENTIABLE, all_scores, vectors_of
from curvlinops.layers.gradients import PerSampleGradient
from curvlinops.layers.samples import SampleBackward
from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.losses.base import DependentLossError
from curvlinops.operators.rows import (
    RowMaps,
    RowSlices,
    RowsLinearOperator,
    row_indices,
    together,
)
from curvlinops.operators.sample_rows import (
    GradientsOfRows,
    SampleRows,
    add_products,
    add_sums,
    add_transposed,
    by_sample,
    finite_by_rows,
    graph_or_rows,
    loss_gradient,
    merged,
    num_rows,
    products,
    rows_of,
    shapes_of,
    write_rows,
)
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batches
from curvlinops.risk.key import key_of
from curvlinops.support.arguments import check_choice, check_count
from curvlinops.support.digest import checksum
from curvlinops.support.keys import Key
from curvlinops.support.norms import wide
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import GeneratorStates, apart
from curvlinops.support.torch_modes import in_default_modes


@dataclass(eq=False, repr=False, kw_only=True)
class PerSampleGradientLinearOperator(RowsLinearOperator):
    """The matrix whose rows are the gradients of the samples' losses.

    Of shape ``[N, D]``: row n is the sum of the gradients of sample n's terms, without the factor c
    of the empirical risk. For a loss with ``reduction="mean"`` and one term per sample, row n is
    the gradient of ``loss(model(x_n), y_n)`` alone, and the gradient of the risk is
    ``op.T @ ones / N``: the mean of the rows, not their sum. Ignored targets contribute zero.

    N is the number of the output's rows; of flattened outputs ``[N * T, C]``, it is
    ``batch_size_fn(X)``.

    Norms, inner products and moments do not form the matrix if the layers have rules. Products form
    it only if the model can be differentiated only once. A loss that differentiates the output, or
    uses the parameters, is evaluated sample by sample. For other arguments and errors see
    ``DataLinearOperator``; there are no blocks.

    Args:
        subsampling: Indices of the rows to keep, in that order. Batches without such rows are
            skipped; of other batches, all rows are computed. Batches must keep their shapes.
        terms: ``"sample"``, or ``"term"`` for a row for each term, such as a token or pixel. These
            rows take a backward pass for each term of a sample.

    Raises:
        ValueError: If ``terms`` is unknown, an index is out of range, blocks are wanted, or
            samples interact in the model.
    """

    subsampling: Iterable[int] | Tensor | None = None
    terms: str = "sample"

    _per_sample = True

    def _check_options(self) -> None:
        check_choice("terms", self.terms, ("term", "sample"))
        self._fallbacks: dict[str, str] = {}
        self._wanted: Tensor | None = None  # rows, in their order
        if self.subsampling is not None:
            self._wanted = row_indices(self.subsampling, self.risk.space.device)
        if len(self._blocks) > 1:
            raise ValueError("A matrix of gradients has no diagonal blocks: omit block_sizes.")

    @property
    def fallbacks(self) -> dict[str, str]:
        """The parameters whose gradients take a backward pass for each sample, and why.

        Those of the last call of a method that needs single gradients; empty before the first.
        """
        return dict(self._fallbacks)

    @together
    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        self._shapes: list[tuple[torch.Size, ...]] = []  # of each batch's tensors
        self._indices: Tensor | None = None  # of wanted rows, among those of batches in use
        self._all = self._rows()
        rows = self._all if self._wanted is None else self._select(self._wanted)
        return self.risk.space, rows, False

    # --- subsampling

    def _rows_shape(self, problem: BatchProblem, output: Tensor) -> tuple[int, ...]:
        self._shapes.append(shapes_of(problem))
        return super()._rows_shape(problem, output)

    def _select(self, wanted: Tensor) -> ParameterSpace:
        """Find the batches that have wanted rows, and return the space of these rows."""
        everything, device = self._all, self._all.device
        first, last = wanted.aminmax() if len(wanted) else (0, -1)
        if first < 0 or last >= everything.dim:
            raise ValueError(
                f"subsampling has indices from {int(first)} to {int(last)}, but the data has "
                f"{everything.dim} rows."
            )
        lengths = torch.tensor(self._lengths, device=device)
        has_wanted = torch.zeros(len(lengths), dtype=torch.bool, device=device)
        has_wanted[torch.searchsorted(lengths.cumsum(0), wanted, right=True)] = True
        is_kept = has_wanted.repeat_interleave(lengths)
        self._has_wanted = has_wanted.tolist()
        self._indices = (is_kept.cumsum(0) - 1)[wanted]

        def of(dim: int) -> ParameterSpace:
            return ParameterSpace.flat(dim, everything.dtype, device)

        self._all = of(int(is_kept.sum()))
        return of(len(wanted))

    @contextmanager
    def _batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        with super()._batches(description, data) as batches:
            is_any = self._indices is None and not self.risk.model.shards.params
            yield batches if is_any else self._with_wanted_rows(batches)

    def _with_wanted_rows(self, batches: Iterator[BatchProblem]) -> Iterator[BatchProblem]:
        """Yield the batches that have wanted rows; refuse other shapes than at construction."""
        for problem in batches:
            index = problem.batch.index
            if index >= len(self._shapes) or self._shapes[index] != shapes_of(problem):
                raise RuntimeError(
                    f"Batch {index} of the data has other shapes than at construction. With "
                    "subsampling=, batches must keep their lengths, and so must those of sharded "
                    "models. Build a new operator."
                )
            if self._indices is None or self._has_wanted[index]:
                yield problem

    def _chosen(self, x: Tensor) -> Tensor:
        """Return the wanted ones of all rows."""
        return x if self._indices is None else x[self._indices]

    def to_device(self, device: torch.device | str) -> "PerSampleGradientLinearOperator":
        """Move the operator itself, see ``DataLinearOperator``."""
        super().to_device(device)
        self._all = self._all.to(self.device)
        self._indices = None if self._indices is None else self._indices.to(self.device)
        return self

    def _num_rows(self, problem: BatchProblem, output: Tensor) -> int:
        return num_rows(problem, output, self.terms)

    def _row_maps(self, problem: BatchProblem, output: Tensor) -> RowMaps:
        problem.weight(output)  # raises if output and target do not fit
        gradient, shape, dtype = loss_gradient(problem, output), output.shape, output.dtype
        if self.terms == "term":
            loss = problem.loss
            g = loss.to_terms(gradient.unsqueeze(0))
            return (
                Linear(lambda z: (loss.to_terms(z) * g).sum(-1), (g,)),
                Linear(lambda u: loss.from_terms(u.unsqueeze(-1) * g, output), (g, output)),
            )
        split = by_sample(problem, output)
        g = split(gradient.unsqueeze(0))
        return (
            Linear(lambda z: (split(wide(z)) * g).sum(-1), (g,)),
            Linear(lambda u: (u.unsqueeze(-1) * g).reshape(len(u), *shape).to(dtype), (g,)),
        )

    def _rows_of(self, problem: BatchProblem, together: bool = False) -> SampleRows:
        rows = rows_of(problem, self.terms, type(self).__name__, together=together)
        self._fallbacks = rows.fallbacks
        return rows

    def _prepare(self, problem: BatchProblem, is_kept: bool, num_products: int) -> Linear:
        if self.risk.model.shards.params:  # layer by layer, as a process has few whole layers

            def apply(V: Columns, out: Tensor) -> None:
                out += products(self._rows_of(problem), self.risk.model.shards.whole(V)).T

            tensors = tuple(leaves((problem.batch.X, problem.batch.y)))
            return Linear(apply, tensors, self._lengths[problem.batch.index])
        # kept graphs are faster; so are graphs for one column of a small net, and for many terms of
        # a sample
        if is_kept or num_products < 2 or self.terms == "term":
            return super()._prepare(problem, is_kept, num_products)
        return self._by_layer(problem)

    def _by_layer(self, problem: BatchProblem) -> Linear:
        """Prepare products layer by layer; with a graph where parameters have no rule."""
        has_fallbacks = problem.rules(SampleBackward, type(self).__name__, True).fallbacks
        states = GeneratorStates()
        rows = None if has_fallbacks else self._rows_of(problem, together=True)
        if rows is None or (rows.fallbacks and not problem.loss_needs_graph):
            states.restore()
            return self._linearize(problem, single=False)

        def apply(V: Columns, out: Tensor) -> None:
            out += products(rows, V).T

        return Linear(apply, (), rows.num_rows)  # it is used once

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        from_graph = partial(super()._linearize, problem, single)
        return graph_or_rows(problem, from_graph, lambda: self._from_rows(problem, add_products))

    def _linearize_transpose(self, problem: BatchProblem) -> Linear:
        if not problem.loss_needs_graph:
            with suppress(DependentLossError):  # as it was not on earlier batches
                return super()._linearize_transpose(problem)
        return self._from_rows(problem, add_transposed)

    def _from_rows(self, problem: BatchProblem, product: Callable[..., None]) -> Linear:
        """Prepare products with the rows of a batch, which are kept."""
        rows = self._rows_of(problem)
        written = rows.written(self.domain)
        return Linear(partial(product, written), tuple(written.values()), rows.num_rows)

    @finite_by_rows
    def _apply(self, columns: Tensor) -> Tensor:
        return self._chosen(self._push(columns, self._all).T).T

    def _apply_transpose(self, columns: Tensor) -> Tensor:
        if self._indices is not None:
            columns = self._all.zeros(len(columns)).index_add_(1, self._indices, columns)
        return self._vjp(columns, self._all)

    def _by_batch(
        self,
        task: str,
        of: Callable[[BatchProblem], Tensor],
        done: Tensor | None = None,
        is_apart: bool = False,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield numbers of the wanted rows of each batch: which rows they are, ``[n]``, ``[n, *]``.

        Tools for gradients of samples are made of this method, of ``_rows_of`` and ``_key``. ``of``
        computes the numbers of all rows of a batch. Batches whose wanted rows are all ``done`` are
        left out. If it ``is_apart``, model and random numbers are as the caller leaves them in
        between.
        """
        slices = RowSlices(self._all.dim)

        def found(problems: Iterable[BatchProblem]) -> Iterator[tuple[Tensor, Tensor]]:
            for problem in problems:
                yield from self._of_batch(problem, slices, of, done)

        def of_each() -> Iterator[tuple[Tensor, Tensor]]:
            for number, batch in enumerate(apart(self.data)):
                data = Batches([batch], self.batch_size_fn, first=number)
                with self._batches(f"{task} of batch {number}", data) as problems:
                    some = list(found(problems))
                yield from some

        def of_all() -> Iterator[tuple[Tensor, Tensor]]:
            with self._batches(task) as problems:
                yield from found(problems)

        return slices.of(of_each() if is_apart else of_all())

    def _of_batch(
        self,
        problem: BatchProblem,
        slices: RowSlices,
        of: Callable[[BatchProblem], Tensor],
        done: Tensor | None,
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the wanted rows of a batch and what is computed of them, if there are some."""
        if done is not None and done.any():
            rows = slices.following(self._lengths[problem.batch.index])
            if bool(done[self._chosen_of(rows)[0].to(done.device)].all()):
                slices.next(rows.stop - rows.start)
                return []
        found = of(problem)
        chosen, own = self._chosen_of(slices.next(len(found)))
        found = found if own is None else found[own]
        self._check(found)
        return [(chosen, found)] if len(chosen) else []

    def _chosen_of(self, batch_rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return where wanted rows of a batch are in the result, and which rows of it they are."""
        if self._indices is None:
            return torch.arange(batch_rows.start, batch_rows.stop, device=self.device), None
        is_own = (self._indices >= batch_rows.start) & (self._indices < batch_rows.stop)
        return is_own.nonzero()[:, 0], self._indices[is_own] - batch_rows.start

    def _key(self, options: Mapping[str, Any]) -> Key:
        """Return what numbers of all rows belong to, if they depend on further options."""
        rows = {
            "number of rows": self.shape[0],
            "terms": self.terms,
            "subsampling": None if self._wanted is None else checksum(self._wanted.cpu()),
        }
        return key_of(self, rows | dict(options))

    # --- beyond products

    @in_default_modes
    @together
    def scores(
        self, P: Any, out: str | Path | None = None, per_position: bool = False
    ) -> Tensor | np.ndarray:
        """Return the inner products of the rows with K vectors, ``[N, K]``: ``rows @ P``.

        They are computed layer by layer, without the rows. With preconditioned gradients of queries
        as vectors they are influence functions.

        Args:
            P: A vector ``[D]``, K vectors as columns ``[D, K]``, a list or dictionary of tensors
                ``[*shape, K]``, or the result of ``low_rank``.
            out: A directory to which scores are written every half a minute, and at the end. If a
                run is killed, the same call continues it: scores that were written are not computed
                again. They must belong to the same options, model, loss, vectors and first batch,
                which are compared by numbers.
            per_position: Whether to return what each of a sequence's T positions adds,
                ``[N, T, K]``: the inner products with the part of the gradient that goes through
                the layers at this position. Their sum over positions is the sequence's score. Rows
                for single terms (``terms="term"``) are another quantity: the gradients of the terms
                at one position, through all positions before. All layers must have equally many
                positions, in the same order: that these are tokens is not checked.

        Returns:
            A tensor, without the last axis if P is one vector; a NumPy array if P is one. Autograd
            follows it to P, without ``out`` and ``per_position``.

        Raises:
            ValueError: If P does not fit, ``out`` has scores of something else or damaged files, or
                a layer does not have the sequence's positions.
            OSError: If files cannot be written.
        """
        return all_scores(self, P, out, per_position)

    @in_default_modes
    def low_rank(self, P: Any, rank: int) -> LowRankColumns:
        """Return vectors whose matrices are replaced by the nearest ones of low rank.

        Scores with them take less time, and they take less memory. A parameter ``[out, *in]`` is a
        matrix ``[out, in]``; vectors, and matrices with no larger rank, stay as they are. A score's
        error is at most ``relative_error`` times the norms of row and vector. Singular values below
        about 1e-8 times the largest are not told apart.

        Grosse et al., Studying large language model generalization with influence functions, 2023,
        arXiv:2308.03296, section 3.2.2.

        Args:
            P: See ``scores``.
            rank: The rank r. A matrix takes ``r (out + in)`` numbers.
        """
        given = vectors_of(self, P)
        if given.has_low_rank:
            raise ValueError("The vectors have a low rank already.")
        if given.is_followed:
            raise ValueError(f"Vectors of low rank {NOT_DIFFERENTIABLE}")
        rank = check_count("rank", rank)
        return LowRankColumns(self.domain.gathered(given.columns), rank, given.is_single)

    @in_default_modes
    @together
    def dense(self) -> Tensor:
        """Return the matrix, ``[N, D]``."""
        space = self.domain.whole
        rows = space.empty(self._all.dim)
        self._write(space.views(rows))
        return self._chosen(rows)

    def to_dense(self) -> Tensor:
        """Return the matrix, ``[N, D]``; the same as ``dense``, of any size."""
        return self.dense()

    @in_default_modes
    @together
    def gradients(self) -> list[Tensor] | dict[str, Tensor]:
        """Return the rows as tensors ``[N, *shape]``, a list or dictionary as ``params`` is.

        The same numbers as in ``dense``, without one large block of memory.
        """
        rows = self._write(self.domain.whole.lazy_empty(self._all.dim))
        return self.risk.model.pack({name: self._chosen(x) for name, x in rows.items()})

    @together
    def _write(self, out: Columns) -> Columns:
        """Write all rows to ``{name: [M, *shape]}``, and return these."""
        with self._batches("gradients") as batches:
            for pieces, view in self._gradients(batches):
                write_rows(pieces, out, view)
        out = {name: out[name] for name in self.domain.names}
        self._check_finite(not_finite(out))
        return out

    @in_default_modes
    @together
    def norms(self) -> Tensor:
        """Return the norm of each row, ``[N]``."""
        squares = self._all.zeros(1)[0]
        with self._batches("norms") as batches:
            for pieces, view in self._gradients(batches, together=True):
                for samples, gradients in pieces:
                    view(squares)[:, samples] += sum(
                        gradient.squared_norms() for gradient in gradients.values()
                    )
        squares = self._chosen(squares)
        self._check(squares)
        return squares.sqrt()

    @in_default_modes
    @together
    def gram(self) -> Tensor:
        """Return the inner products of all rows, ``op @ op.T`` as a matrix ``[N, N]``."""
        numbers = torch.arange(self._all.dim, device=self.device)
        with self._batches("gram") as batches:
            gradients = self._gradients(batches)
            pairs = [(merged(pieces), view(numbers)) for pieces, view in gradients]
        return self._chosen(self._chosen(self._gram(pairs)).T)

    @in_default_modes
    def second_moment(self) -> Tensor:
        """Return the mean of the rows' squared entries, ``[D]``."""
        if self._indices is not None:
            return self.dense().square().mean(0)
        space = self.domain.whole
        return self._means("second_moment", lambda g: g.sum_of_squares()[None], space)[0]

    @in_default_modes
    def variance(self) -> Tensor:
        """Return the variance of each column over the rows (divided by N), ``[D]``."""
        if self._indices is not None:
            return self.dense().double().var(0, correction=0).to(self.torch_dtype)
        space = ParameterSpace(self.domain.shapes, torch.float64, self.device)
        means = self._means("variance", _moments, space, 2)
        return (means[1] - means[0].square()).clamp(min=0.0).to(self.torch_dtype)

    @together
    def _means(
        self,
        name: str,
        of: Callable[[PerSampleGradient], Tensor],
        space: ParameterSpace,
        num: int = 1,
    ) -> Tensor:
        """Return sums over samples, ``[num, *parameter]``, divided by N."""
        out = space.zeros(num)
        sums = space.views(out)
        with self._batches(name) as batches:
            for pieces, _ in self._gradients(batches, together=True):
                add_sums(sums, pieces, of)
        self._check_finite(space.not_finite(out))
        return out / self.shape[0]

    def _gradients(
        self, batches: Iterable[BatchProblem], together: bool = False
    ) -> Iterator[GradientsOfRows]:
        """Yield gradients of V vectors and N samples, and which of all rows they are."""
        slices = RowSlices(self._all.dim)
        for problem in slices.of(batches):
            batch_rows = self._rows_of(problem, together)
            rows, gradients = slices.next(batch_rows.num_rows), batch_rows.gradients
            for pieces, view in gradients:
                yield pieces, lambda x, rows=rows, view=view: view(x[rows])


def _moments(gradient: PerSampleGradient) -> Tensor:
    """Return the sums of all gradients, and of their squares, in float64, ``[2, *shape]``."""
    gradient = gradient.to(torch.float64)
    return torch.stack([gradient.sum_over_samples().sum(0), gradient.sum_of_squares()])
