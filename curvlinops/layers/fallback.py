"""Gradients of single samples without rules, one sample at a time.

Each sample is a batch of its own, by ``vmap`` over the samples where the model allows that, else
sample by sample. Where a batch cannot be cut, gradients pass the graph of the whole batch, which
takes time quadratic in the number of samples.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from curvlinops.autodiff.backward import vjp_columns
from curvlinops.layers.check import Comparison
from curvlinops.layers.gradients import DenseGradient, Piece, chunks
from curvlinops.linear_operator.space import Columns, ParameterSpace
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.checks.coupling import COUPLED, differs
from curvlinops.risk.data import Batch
from curvlinops.support.pytree import has_length, leaves, map_leaves, select_samples
from curvlinops.support.refusals import is_refusal
from curvlinops.support.warnings import first_line

_LOGGER = logging.getLogger("curvlinops")


def check_layers(problem: BatchProblem, names: Iterable[str], reasons: Mapping[str, str]) -> None:
    """Refuse, by name, sharded parameters whose gradients are computed sample by sample."""
    for name in names:
        if name in problem.model.shards.params:
            reason = reasons.get(name, "it is not known to which samples its layer's rows belong")
            raise NotImplementedError(
                f"Parameter '{name}' is sharded, and its gradients of single samples cannot be "
                f"computed layer by layer: {reason}. Leave it out of params, or write a rule for "
                "the call (see the page Extending)."
            )


class InteractingError(ValueError):
    """Samples have other gradients alone, so that gradients of single samples are not defined."""


class _Task(NamedTuple):
    """Vectors ``u`` to backpropagate through an output, and the parameters that get gradients."""

    problem: BatchProblem
    space: ParameterSpace
    #: The model's output on the batch, ``[N, S, *]``; vectors are ``[V, N, S, *]``.
    output: Tensor
    u: Tensor
    #: The samples whose gradients are wanted.
    samples: slice
    #: Adds gradients of ``[K, *output]`` to K columns, through the batch's graph.
    apply: Callable[[Tensor, Columns], None]

    def check_output(self, output: Tensor, samples: slice) -> None:
        """Raise an error if samples alone have other outputs than in the batch."""
        expected = self.output[samples]
        precision = self.problem.risk.facts.precision
        if output.shape != expected.shape or differs(output, expected, expected, precision):
            raise ValueError("samples alone have other outputs.")


class OneByOne:
    """Backpropagates vectors to parameters without rules, sample by sample.

    Each batch is computed by the first way whose gradients agree with the batch's graph. If
    ``independent``, samples that interact are refused.
    """

    def __init__(self, independent: bool):
        #: Whether only the graph of the whole batch has the gradients.
        self._independent, self._has_warned, self.is_whole = independent, False, False

    def gradients(
        self,
        problem: BatchProblem,
        apply: Callable[[Tensor, Columns], None],
        output: Tensor,
        num_samples: int,
        u: Tensor,
        names: list[str],
    ) -> Iterator[Piece]:
        """Yield the gradients of some samples; ``apply`` adds those of ``[K, *output]``."""
        space = problem.space.restricted(names)
        sizes = num_samples, len(output) // max(num_samples, 1)
        output, u = output.unflatten(0, sizes), u.unflatten(1, sizes)
        for samples in chunks(num_samples, len(u) * space.dim):
            task = _Task(problem, space, output, u, samples, apply)
            columns = {name: x.to(space.dtype) for name, x in self._compute(task).items()}
            yield samples, {name: DenseGradient(columns[name]) for name in names}

    def _compute(self, task: _Task) -> Columns:
        """Return gradients ``[V, n, *parameter]``."""
        if self.is_whole or not task.u.numel() or len(task.output) == 1:
            return _in_whole(task)
        reason = ""
        for way in (_by_vmap, _in_a_loop):
            try:
                gradients = way(task)
                _check_gradients(gradients, task)
                return gradients
            except Exception as error:  # a user's model may raise anything on a part of a batch
                is_defined = not (self._independent and isinstance(error, InteractingError))
                if not (is_defined and is_refusal(error)):
                    raise
                reason = first_line(error).rstrip(".")
        if not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                "The samples of batch %d cannot be evaluated alone (%s). Their gradients pass the "
                "graph of the whole batch, which takes time quadratic in the number of samples. "
                "Let X consist of tensors whose first axis numbers the samples, or let the data "
                "yield batches of one sample.",
                task.problem.batch.index,
                reason,
            )
        return _in_whole(task)


def _by_vmap(task: _Task) -> Columns:
    """Return gradients ``[V, n, *parameter]``, of all samples in one pass."""
    problem, X = task.problem, task.problem.batch.X
    if not problem.model.substitutable:
        raise NotImplementedError("no closures.")
    values = problem.constants()
    parameters = {name: values[name] for name in task.space.names}
    cut = {id(leaf): leaf for leaf in leaves(X) if has_length(leaf, task.u.shape[1])}

    def of_one(tensors: list[Tensor], u: Tensor) -> tuple[Tensor, Columns]:
        tensor_of = dict(zip(cut, tensors, strict=True))
        one = map_leaves(
            X, lambda leaf: tensor_of[id(leaf)].unsqueeze(0) if id(leaf) in tensor_of else leaf
        )

        def function(parameters: Columns) -> Tensor:
            with problem.evaluation({**values, **parameters}, "once").active() as evaluation:
                return problem.on(Batch(problem.batch.index, one, None)).output(evaluation)

        output, vjp = torch.func.vjp(function, parameters)
        return output, torch.func.vmap(lambda v: vjp(v)[0])(u)

    tensors = [leaf.detach()[task.samples] for leaf in cut.values()]
    outputs, rows = torch.func.vmap(of_one, (0, 1), (0, 1))(tensors, task.u[:, task.samples])
    task.check_output(outputs.detach(), task.samples)
    return {name: x.detach() for name, x in rows.items()}


def _in_a_loop(task: _Task) -> Columns:
    """Return gradients ``[V, n, *parameter]``, with a forward pass for each sample."""
    problem, rows = task.problem, []
    for n in range(task.samples.start, task.samples.stop):
        one = sample_alone(problem, n, *task.output.shape[:2])
        with one.recording("once") as (_, leaves, output):
            task.check_output(output.unsqueeze(0), slice(n, n + 1))
            inputs = {name: leaves[name] for name in task.space.names}
            rows.append(vjp_columns({"": output}, {"": task.u[:, n]}, inputs))
    return {name: torch.stack([row[name] for row in rows], 1) for name in task.space.names}


def _in_whole(task: _Task) -> Columns:
    """Return gradients ``[V, n, *parameter]``, through the graph of the whole batch."""
    u = task.u[:, task.samples]
    sizes = u.shape[:2]
    alone = task.u.new_zeros(*sizes, *task.u.shape[1:])
    numbers = torch.arange(sizes[1], device=u.device)
    alone[:, numbers, numbers + task.samples.start] = u
    out = task.space.views(task.space.zeros(sizes.numel()))
    task.apply(alone.flatten(0, 1).flatten(1, 2), out)
    return {name: x.unflatten(0, sizes) for name, x in out.items()}


def _check_gradients(gradients: Columns, task: _Task) -> None:
    """Raise an InteractingError if the batch's graph gives other gradients of these samples."""
    some, truth = torch.zeros_like(task.u), task.space.views(task.space.zeros(len(task.u)))
    some[:, task.samples] = task.u[:, task.samples]
    task.apply(some.flatten(1, 2), truth)
    dtype = task.output.dtype
    comparison = Comparison(dtype, torch.finfo(dtype).eps)
    for name, x in gradients.items():
        sums, total = x.sum(1)[None], truth[name][None]
        comparison.add({name: x}, sums, total, _absolute_sums, of_two_passes=[name])
    if comparison.wrong():
        raise InteractingError(f"{COUPLED} (Samples alone have other gradients.)")


def _absolute_sums(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.stack([x.abs().sum(1) for x in gradients.values()])


def sample_alone(problem: BatchProblem, n: int, num_samples: int, num_rows: int) -> BatchProblem:
    """Return the problem on a batch that consists of one sample.

    Tensors whose first axis numbers the samples are cut, and targets whose first axis numbers the
    rows of the output; what is one tensor in X and y (points at which a loss differentiates) stays
    one.
    """
    X, y = select_samples((problem.batch.X, problem.batch.y), slice(n, n + 1), num_samples)
    if num_rows > 1:
        y = select_samples(y, slice(n * num_rows, (n + 1) * num_rows), num_samples * num_rows)
    return problem.on(Batch(problem.batch.index, X, y))
