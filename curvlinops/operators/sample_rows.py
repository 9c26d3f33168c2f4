"""The rows of a batch: gradients of the losses of its samples, or of its terms."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from curvlinops.autodiff.backward import NoDerivativeError
from curvlinops.autodiff.linear import Linear
from curvlinops.layers.factors import PositionGradients
from curvlinops.layers.gradients import (
    DenseGradient,
    Entries,
    LowRank,
    PerSampleGradient,
    Piece,
)
from curvlinops.layers.samples import SampleBackward, SampleGradients
from curvlinops.linear_operator.space import Columns, ParameterSpace, add
from curvlinops.losses.base import DependentLossError
from curvlinops.operators.base import DataLinearOperator, NotFiniteError
from curvlinops.operators.loss_rows import LossesOneByOne
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.support.columns import flat
from curvlinops.support.norms import wide
from curvlinops.support.pytree import leaves

_NO_POSITIONS = (
    "Scores by position need layers that see each position of the sequences once: leave the others "
    "out of params, or ask for per_position=False."
)

T = TypeVar("T", bound=DataLinearOperator)

#: The gradients of V vectors and N samples, and a function that returns the view ``[V, N, *]`` of
#: rows ``[M, *]`` that belongs to them.
GradientsOfRows = tuple[Iterable[Piece], Callable[[Tensor], Tensor]]


class SampleRows(NamedTuple):
    """The M rows of a batch of N samples, not yet written down."""

    num_samples: int
    num_rows: int
    gradients: Iterable[GradientsOfRows]  # they can be iterated once
    weight: Tensor  # the number, or total weight, of the batch's loss terms
    fallbacks: dict[str, str]  # the parameters that take a backward pass for each sample, and why

    def written(self, space: ParameterSpace) -> Columns:
        """Return the rows, ``{name: [M, entries]}``."""
        rows = space.lazy_empty(self.num_rows)
        for pieces, view in self.gradients:
            write_rows(pieces, rows, view)
        return {name: flat(rows[name]) for name in space.names}  # gradients arrive in any order


def rows_of(
    problem: BatchProblem,
    terms: str,
    name: str,
    independent: bool = True,
    together: bool = False,
) -> SampleRows:
    """Return the rows of a batch, one for each ``"term"`` or ``"sample"``.

    A sample is one term of a loss that is no function of the output alone. Samples that interact
    are refused if they must be ``independent``. If ``together``, gradients may have ``parts``.
    """
    samples = None
    if not problem.loss_needs_graph:
        samples = problem.rules(SampleBackward, name, independent).capture(problem)
    if problem.loss_needs_graph:  # perhaps only on this batch
        _check_terms(problem, terms)
        alone = problem.rules(LossesOneByOne, name)
        num_samples, pieces, weight = alone.gradients(problem)
        return SampleRows(num_samples, num_samples, [(pieces, _all)], weight, alone.fallbacks)
    output, num_samples = samples.output, samples.num_samples
    gradient, weight = loss_gradient(problem, output), samples.weight
    num = num_rows(problem, output, terms)
    if num == num_samples:
        pieces = samples.backward(gradient.unsqueeze(0).to(output.dtype), True, together)
        return SampleRows(num, num, [(pieces, _all)], weight, samples.fallbacks)
    samples.check()  # rows of terms are computed later
    by_term = _by_term(problem, samples, gradient, together)
    return SampleRows(num_samples, num, by_term, weight, samples.fallbacks)


def _all(rows: Tensor) -> Tensor:
    """Return all rows, for one vector."""
    return rows.unsqueeze(0)


def _by_term(
    problem: BatchProblem, samples: SampleGradients, gradient: Tensor, together: bool
) -> Iterator[GradientsOfRows]:
    """Yield gradients of one or several terms of each sample at a time."""
    loss, output = problem.loss, samples.output
    terms = loss.to_terms(gradient.unsqueeze(0))[0]
    sizes = samples.num_samples, max(len(terms) // max(samples.num_samples, 1), 1)
    terms, step = terms.unflatten(0, sizes), samples.vectors_at_once
    for start in range(0, sizes[1], step):
        some = torch.arange(start, min(start + step, sizes[1]), device=terms.device)
        alone = terms.new_zeros(len(some), *terms.shape)
        alone[some - start, :, some] = terms[:, some].transpose(0, 1)
        u = loss.from_terms(alone.flatten(1, 2), output)

        def view(x: Tensor, start: int = start) -> Tensor:
            return x.unflatten(0, sizes).transpose(0, 1)[start : start + step]

        yield samples.backward(u.to(output.dtype), False, together), view


# --- rows of tensors, and sums of them


def write_rows(pieces: Iterable[Piece], out: Columns, view: Callable[[Tensor], Tensor]) -> None:
    """Write gradients to the view ``[V, N, *]`` of ``{name: [M, *shape]}``, and free them."""
    for samples, gradients in pieces:
        for name in list(gradients):
            gradient, rows = gradients.pop(name), view(out[name])[:, samples]
            for some in gradient.slices():
                gradient.write(some, rows[:, some])


def add_sums(
    out: Columns, pieces: Iterable[Piece], of: Callable[[PerSampleGradient], Tensor]
) -> None:
    """Add sums over samples, ``[K, *parameter]``, to ``{name: [K, *shape]}``."""
    for _, gradients in pieces:
        for name, gradient in gradients.items():
            sums = {name: of(gradient)}
            if gradient.parts:
                values = sums[name].unflatten(1, (len(gradient.parts), 1, -1)).unbind(1)
                pairs = zip(gradient.parts, values, strict=True)
                sums = {name: entries.spread(x)[:, 0] for (name, entries), x in pairs}
            add(out, slice(None), sums)


def merged(pieces: Iterable[Piece]) -> dict[str, PerSampleGradient]:
    """Return the gradients of all samples; those of several pieces are written side by side."""
    by_name: dict[str, list[PerSampleGradient]] = {}
    for _, gradients in pieces:
        for name, gradient in gradients.items():
            by_name.setdefault(name, []).append(gradient)
    return {name: _joined(gradients) for name, gradients in by_name.items()}


def _joined(gradients: list[PerSampleGradient]) -> PerSampleGradient:
    if len(gradients) == 1:
        return gradients[0]
    return DenseGradient(torch.cat([gradient.rows(slice(None)) for gradient in gradients], 1))


# --- inner products with vectors


def products(rows: SampleRows, columns: Mapping[str, Tensor | LowRank]) -> Tensor:
    """Return the products of rows with K columns ``[K, *shape]``, layer by layer, ``[M, K]``."""
    num_columns, like = shape_of(columns)
    out = like.new_zeros(rows.num_rows, num_columns)
    for pieces, view in rows.gradients:
        for samples, gradients in pieces:
            for name in list(gradients):  # they are freed on the way
                gradient = gradients.pop(name)
                parts = gradient.parts
                if parts and not columns.keys().isdisjoint(dict(parts)):
                    vectors = _side_by_side(columns, parts, like)
                elif not parts and name in columns:
                    vectors = columns[name]
                else:
                    continue
                view(out)[:, samples] += gradient.to(like.dtype).products(vectors)
    return out


def _side_by_side(
    columns: Mapping[str, Tensor], parts: Iterable[tuple[str, Entries]], like: Tensor
) -> Tensor:
    """Return the entries of columns that belong to gradients of several parameters."""
    zero = like.new_zeros(1, 1)
    return torch.cat(
        [
            entries.read(columns[name]).flatten(1)
            if name in columns
            else zero.expand(len(like), entries.view.size)
            for name, entries in parts
        ],
        dim=1,
    )


def products_by_position(
    problem: BatchProblem, columns: Mapping[str, Tensor | LowRank], name: str
) -> Tensor:
    """Return what each of a sequence's T positions adds to ``products``, ``[N, T, K]``."""
    if problem.loss_needs_graph:
        raise ValueError(f"The loss is no function of the output alone. {_NO_POSITIONS}")
    samples = problem.rules(SampleBackward, name, True).capture(problem)
    samples.check()
    if samples.fallbacks:
        raise ValueError(
            f"No layer's rule is known for {', '.join(map(repr, samples.fallbacks))}. "
            f"{_NO_POSITIONS}"
        )
    gradient = loss_gradient(problem, samples.output).unsqueeze(0).to(samples.output.dtype)
    (num_columns, like), out, first = shape_of(columns), None, ""
    arrived = samples.arrive(gradient, last=True)
    for use in samples.uses:
        parameter = use.name
        if parameter not in columns:
            continue
        gradients = arrived.take(use, by_position=True, elementwise=True).to(like.dtype)
        if use.samples is None or not isinstance(gradients, PositionGradients):
            raise ValueError(
                f"The layer of parameter '{parameter}' has no positions: it uses a function of the "
                f"parameter, or no axis of samples. {_NO_POSITIONS}"
            )
        products = gradients.products_by_position(columns[parameter])
        if out is None:
            out, first = products[0], parameter
        elif out.shape != products.shape[1:]:
            raise ValueError(
                f"The layer of parameter '{parameter}' has {products.shape[2]} positions for each "
                f"sample, that of '{first}' {out.shape[1]}. {_NO_POSITIONS}"
            )
        else:
            out = out + products[0]
    return like.new_zeros(samples.num_samples, 0, num_columns) if out is None else out


def shape_of(columns: Mapping[str, Tensor | LowRank]) -> tuple[int, Tensor]:
    """Return the number of columns, and a tensor of their dtype and device."""
    column = next(iter(getattr(columns, "parts", columns).values()))
    like = column.left if isinstance(column, LowRank) else column
    return len(like), like


# --- samples, terms, and the loss


def shapes_of(problem: BatchProblem) -> tuple[torch.Size, ...]:
    """Return the shapes of a batch's tensors."""
    return tuple(tensor.shape for tensor in leaves((problem.batch.X, problem.batch.y)))


def by_sample(problem: BatchProblem, output: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that makes ``[K, N, entries of a sample]`` of columns ``[K, *output]``."""
    num_samples = problem.samples_of(output)
    sizes = num_samples, output.numel() // max(num_samples, 1)
    return lambda columns: columns.reshape(len(columns), *sizes)


def num_rows(problem: BatchProblem, output: Tensor, terms: str) -> int:
    """Return the number of a batch's rows, see ``rows_of``."""
    _check_terms(problem, terms)
    if terms == "sample" or problem.loss_needs_graph:
        return problem.samples_of(output)
    return problem.loss.to_terms(output.unsqueeze(0)).shape[1]


def _check_terms(problem: BatchProblem, terms: str) -> None:
    """Refuse rows of terms if the loss of a sample has several, and parameters of the model."""
    if terms == "term" and problem.loss_needs_graph and problem.loss.has_parameters:
        raise ValueError(
            f"params has parameters of the head of {problem.loss.name}. Then there are gradients "
            "of samples (terms='sample'), but not of single terms. Leave the head (and a table of "
            "tokens that is tied to it) out of params, or take CrossEntropyLoss of the logits."
        )


def loss_gradient(problem: BatchProblem, output: Tensor) -> Tensor:
    """Return the loss's gradient with respect to an output that fits its target."""
    return wide(problem.loss.gradient(output, problem.batch.y))


# --- products


def add_products(rows: Columns, V: Columns, out: Tensor) -> None:
    """Add the products of rows ``[M, entries]`` with K columns to ``[K, M]``."""
    out += multiply(rows, V)


def multiply(rows: Columns, V: Columns) -> Tensor:
    """Return the products of rows ``[M, entries]`` with K columns, ``[K, M]``."""
    return sum(flat(v) @ rows[name].T for name, v in V.items())


def add_transposed(rows: Columns, u: Tensor, out: Columns) -> None:
    """Add rows ``[M, entries]`` with weights ``[K, M]`` to columns, in place."""
    add(out, slice(None), {name: (u @ rows[name]).view_as(x) for name, x in out.items()})


def graph_or_rows(
    problem: BatchProblem, from_graph: Callable[[], Linear], from_rows: Callable[[], Linear]
) -> Linear:
    """Prepare products with a graph; where that has no second derivatives, with rows."""
    if problem.loss_needs_graph or problem.learned().lacks_derivative:
        return from_rows()

    def otherwise(error: Exception) -> Linear:
        if isinstance(error, NoDerivativeError):
            problem.learned().lacks_derivative = True
        return from_rows()

    try:
        apply, has_graph = from_graph(), True
    except (NoDerivativeError, DependentLossError) as error:
        return otherwise(error)

    def product(*args: Any) -> Any:
        nonlocal apply, has_graph
        if has_graph and problem.risk.facts.lacks_derivative:  # as another product has shown
            apply, has_graph = from_rows(), False
        try:
            return apply(*args)
        except (NoDerivativeError, DependentLossError) as error:
            apply, has_graph = otherwise(error), False
        return apply(*args)

    return Linear(product, apply.tensors, apply.num_rows)


def finite_by_rows(product: Callable[[T, Tensor], Tensor]) -> Callable[[T, Tensor], Tensor]:
    """Decorate a product with a graph or rows: it takes rows if it is not finite with graphs.

    Where gradients are finite, their derivative with respect to a cotangent may be zero times
    infinity, as that of padding that a layer masks after it has divided by zero.
    """

    @wraps(product)
    def run(self: T, columns: Tensor) -> Tensor:
        try:
            return product(self, columns)
        except NotFiniteError:
            facts = self.risk.facts
            if facts.lacks_derivative or self.risk.space.in_parts:
                raise
            facts.lacks_derivative = True
        try:
            return product(self, columns)
        except NotFiniteError:
            facts.lacks_derivative = False
            raise

    return run
