"""Gradients of single samples."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from curvlinops.autodiff.mode_selection import NoDerivativeError
from curvlinops.autodiff.modes import Push
from curvlinops.layers.alone import SamplesAlone
from curvlinops.layers.forms import Form
from curvlinops.layers.groups import Bounds, Group, add_sums, in_turns, write_rows, written
from curvlinops.layers.samples import SampleBackward
from curvlinops.linear_operator.columns import add
from curvlinops.linear_operator.space import Columns, ParameterSpace, flat
from curvlinops.operators.rows import AddRows, RowMaps, RowPlaces, RowsLinearOperator, row_indices
from curvlinops.risk.empirical_risk import BatchProblem
from curvlinops.support.arguments import check_choice
from curvlinops.support.norms import wide
from curvlinops.support.torch_modes import in_default_modes

#: Takes gradients of some samples, and their places among the rows.
Visit = Callable[[list[Group], Tensor], None]


@dataclass(eq=False, repr=False, kw_only=True)
class PerSampleGradientLinearOperator(RowsLinearOperator):
    """The matrix whose rows are the gradients of the samples' losses.

    Of shape ``[N, D]``: row n is the sum of the gradients of sample n's terms, without the factor c
    of the empirical risk. For a loss with ``reduction="mean"`` and one term per sample, row n is
    the gradient of ``loss(model(x_n), y_n)`` alone, and the gradient of the risk is
    ``op.T @ ones / N``: the mean of the rows, not their sum. Ignored targets contribute zero.

    Norms, inner products and moments do not form the matrix where the layers are known; products
    do for models that can be differentiated only once. A loss that differentiates the output, or
    uses the parameters, is evaluated sample by sample. For other
    arguments and errors see ``DataLinearOperator``; there are no blocks.

    Args:
        subsampling: Indices of the rows to keep, in that order; only those are computed.
        terms: ``"sample"``, or ``"term"`` for a row for each term, such as a token or pixel (see
            ``EFLinearOperator``). Terms interact in most models, so that these rows take a
            backward pass for each term of a sample.

    Raises:
        ValueError: If ``terms`` is neither of both, an index is no row, blocks are wanted, or
            samples interact in the model.
    """

    subsampling: Iterable[int] | Tensor | None = None
    terms: str = "sample"

    _per_sample = True

    def __post_init__(self) -> None:
        """Check the options, too."""
        check_choice("terms", self.terms, ("term", "sample"))
        self._selective = self.subsampling is not None
        self._fallbacks: dict[str, str] = {}
        super().__post_init__()
        if len(self._blocks) > 1:
            raise ValueError("A matrix of gradients has no diagonal blocks: omit block_sizes.")
        self._forget()

    def _reconsider(self) -> None:
        super()._reconsider()
        self._forget()

    def _forget(self) -> None:
        self._alone = SamplesAlone(type(self).__name__)
        self._lacking: list[int] = []  # batches whose products lack a derivative

    @property
    def fallbacks(self) -> dict[str, str]:
        """The parameters whose gradients take a backward pass for each sample, and why.

        Those of the last call of a method that needs single gradients; empty before the first.
        """
        return dict(self._fallbacks)

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        self._all = self._rows()
        self._indices = row_indices(self.subsampling, self._all.dim, self._all.device)
        rows = ParameterSpace.flat(len(self._indices), self._all.dtype, self._all.device)
        return self.risk.space, rows, False

    def to_device(self, device: torch.device | str) -> "PerSampleGradientLinearOperator":
        """Move the operator itself, see ``DataLinearOperator``."""
        super().to_device(device)
        self._all, self._indices = self._all.to(self.device), self._indices.to(self.device)
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
        problem.terms(output)  # checks that output and target fit
        return wide(problem.loss.gradient(output, problem.batch.y))

    def _prepare(self, problem: BatchProblem, num_products: int) -> Push:
        if not problem.loss_needs_graph and not self._lacking:
            try:
                return super()._prepare(problem, num_products)
            except NoDerivativeError:  # of second order, and in forward mode
                if self.autodiff != "auto":
                    raise
                self._lacking.append(problem.batch.index)
        rows = self._keep(problem, self._written, "rows")
        return lambda V: sum(flat(v) @ rows[name].T for name, v in V.items())

    def _written(self, problem: BatchProblem) -> Columns:
        """Return the rows of a batch, ``{name: [M, entries]}``."""
        _, count, at = self._turns(problem)
        rows = [written(at(turn), problem.space) for turn in range(count)]
        return {n: torch.stack([x[n] for x in rows], 1).flatten(0, 1) for n in rows[0]}

    def _linearize_adjoint(self, problem: BatchProblem) -> tuple[AddRows, int]:
        if not problem.loss_needs_graph:
            return super()._linearize_adjoint(problem)
        rows = self._alone.rows(problem)
        self._fallbacks = self._alone.fallbacks

        def apply(u: Tensor, out: Columns) -> None:
            add(out, slice(None), {name: (u @ rows[name]).view_as(x) for name, x in out.items()})

        return apply, len(next(iter(rows.values())))

    def _skips(self, place: slice | None) -> bool:
        return self._selective and place is not None and not bool(self._within(place).any())

    def _within(self, place: slice) -> Tensor:
        return (self._indices >= place.start) & (self._indices < place.stop)

    def _apply(self, columns: Columns) -> Columns:
        return {"": self._push(columns, self._all)[""][:, self._indices]}

    def _apply_adjoint(self, columns: Columns) -> Columns:
        return self._apply_adjoint_restricted(columns, self.domain.names)

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        return self._apply(columns)

    def _apply_adjoint_restricted(self, columns: Columns, names: list[str]) -> Columns:
        rows = self._all.zeros(columns[""].shape[0])
        rows[""].index_add_(1, self._indices, columns[""])
        return self._pull(rows, self._all, names)

    # --- beyond products

    @in_default_modes
    def dense(self) -> Tensor:
        """Return the matrix, ``[N, D]``."""
        return self.domain.join(self._write(self.domain.together(self.shape[0])))

    def to_dense(self) -> Tensor:
        """Return the matrix, ``[N, D]``; the same as ``dense``, of any size."""
        return self.dense()

    @in_default_modes
    def gradients(self) -> list[Tensor] | dict[str, Tensor]:
        """Return the rows as tensors ``[N, *shape]``, a list or dictionary as ``params`` is.

        The same numbers as in ``dense``, without one large block of memory.
        """
        return self.risk.model.pack(self._write(self.domain.apart(self.shape[0])))

    def _write(self, out: Columns) -> Columns:
        """Write all rows to ``{name: [N, *shape]}``, and return these."""
        bounds = Bounds()

        def visit(groups: list[Group], where: Tensor) -> None:
            bounds.add(groups)
            place = slice(int(where[0]), int(where[-1]) + 1)
            if place.stop - place.start == len(where):
                write_rows(groups, self.domain, out, place)
                return
            rows = self.domain.apart(len(where))
            write_rows(groups, self.domain, rows)
            for name, x in rows.items():
                out[name][where] = x

        self._visit("gradients", visit)
        out = {name: out[name] for name in self.domain.names}
        if rest := bounds.others(out):
            self._check_finite(rest, self.domain.restricted(list(rest)))
        return out

    @in_default_modes
    def norms(self) -> Tensor:
        """Return the norm of each row, ``[N]``."""
        squares = self.codomain.zeros(1)[""][0]

        def visit(groups: list[Group], where: Tensor) -> None:
            squares[where] = sum(form.squared_norms()[0] for _, form in groups).to(squares.dtype)

        self._visit("norms", visit)
        self._check(squares)
        return squares.sqrt()

    @in_default_modes
    def gram(self) -> Tensor:
        """Return the inner products of all rows, ``op @ op.T`` as a matrix ``[N, N]``."""
        batches: list[tuple[list[Group], Tensor]] = []
        self._visit("gram", lambda groups, where: batches.append((groups, where[None])), whole=True)
        if self._alone.fallbacks:  # pairs of batches would compute all rows anew
            rows = self.dense()
            return rows @ rows.T
        return self._gram(batches)

    @in_default_modes
    def second_moment(self) -> Tensor:
        """Return the mean of the rows' squared entries, ``[D]``."""
        return self._means("second_moment", lambda f: f.sum_of_squares()[None], self.domain)[0]

    @in_default_modes
    def variance(self) -> Tensor:
        """Return the variance of each column over the rows (divided by N), ``[D]``."""
        space = ParameterSpace(self.domain.shapes, torch.float64, self.device)
        means = self._means("variance", lambda form: form.to(space.dtype).moments(), space, 2)
        return (means[1] - means[0].square()).clamp(min=0.0).to(self.torch_dtype)

    def _means(
        self, name: str, of: Callable[[Form], Tensor], space: ParameterSpace, num: int = 1
    ) -> Tensor:
        """Return sums over samples, ``[num, *parameter]``, divided by N."""
        out = space.zeros(num)
        self._visit(name, lambda groups, _: add_sums(out, groups, of, space))
        self._check_finite(out, space)
        return space.join(out) / self.shape[0]

    def _visit(self, description: str, visit: Visit, whole: bool = False) -> None:
        """Call ``visit`` with gradients until all rows that are wanted had their turn.

        Args:
            description: What for, in the progress bar.
            visit: What is done with them.
            whole: Whether it gets all of a batch at once.
        """
        with self._batches(description) as batches:
            places = RowPlaces(self, self._all.dim)
            for problem in places.wanted(batches):
                num_samples, count, at = self._turns(problem)
                place = places.next(num_samples * count)
                if place is None:
                    continue
                where = self._within(place).nonzero().flatten()
                local = self._indices[where] - place.start
                if whole and count > 1:
                    order = (local % count).argsort(stable=True)
                    visit([in_turns(at, local[order], count, problem.space)], where[order])
                    continue
                for turn in (local % count).unique().tolist():
                    chosen, mine = at(turn), local % count == turn
                    if self._selective:
                        samples = local[mine] // count
                        chosen = [(names, form.select(samples)) for names, form in chosen]
                    visit(chosen, where[mine])

    def _turns(self, problem: BatchProblem) -> tuple[int, int, Callable[[int], list[Group]]]:
        """Prepare the gradients of a batch, of one row of each sample at a time.

        Returns:
            The number of samples, how many neighboring rows each has, and a function of the place
            among these.
        """
        if problem.loss_needs_graph:
            group = self._alone.group(problem)
            self._fallbacks = self._alone.fallbacks
            return group[1].num_samples, 1, lambda _: [group]
        found = problem.known(SampleBackward, type(self).__name__)
        samples = found.capture(problem)
        self._fallbacks, output = samples.fallbacks, samples.output
        gradient = self._loss_gradient(problem, output).unsqueeze(0)
        if self.terms == "sample":
            return len(output), 1, lambda _: samples.backward(gradient.to(output.dtype), last=True)
        terms = problem.loss.to_terms(gradient)
        count = max(terms.shape[1] // max(len(output), 1), 1)

        def at(turn: int) -> list[Group]:
            alone = torch.zeros_like(terms)
            alone[:, turn::count] = terms[:, turn::count]
            return samples.backward(problem.loss.from_terms(alone, output).to(output.dtype))

        return len(output), count, at
