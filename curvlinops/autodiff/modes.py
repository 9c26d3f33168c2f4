"""Products with derivatives of a model, in forward and in reverse mode.

Both modes have the same functions. Each takes a model on a batch, computes everything that does not
depend on the vectors, and returns an ``Apply`` (for the Jacobian a ``JVP``).

- ``Reverse`` differentiates the graph of a backward pass. It serves closures, checkpoints and
  custom autograd functions, and the graph serves many products.
- ``Forward`` attaches tangents to the parameters (``torch.autograd.forward_ad``) and runs the
  ordinary forward and backward passes. It is the faster one for a single product with a
  Jacobian. ``torch.func`` is not used: it is slower on all our benchmarks, refuses data-dependent
  models, and its compositions ``jvp(jacrev)`` and ``grad(jvp)`` are wrong through normalization
  layers (PyTorch 2.13).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.autodiff.backward import (
    Apply,
    Head,
    Problem,
    Tensors,
    in_chunks,
    room_for,
    single_columns,
    vjp,
    vjp_columns,
)
from curvlinops.autodiff.evaluation import Evaluation
from curvlinops.linear_operator.space import Columns, add
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_internals import without_torch_function

#: ``jvp(V) -> J V``, ``[K, M]``, for columns of the parameters.
JVP = Callable[[Columns], Tensor]

#: Returns a linear function ``[K, *output] -> [K, M]`` at a given output.
OutputHead = Callable[[Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Reverse:
    """Backward passes through the graph of a backward pass.

    Attributes:
        chunk_size: The number of columns in one backward pass, see ``in_chunks``.
        once: Whether there is one product with one column, which frees the graph.
    """

    chunk_size: int | None = None
    once: bool = False

    def hessian(self, problem: Problem, head: Head) -> Apply:
        """Prepare products with the Hessian of a scalar function of the output.

        Args:
            problem: The model on a batch.
            head: Returns the ``Seed`` of the function's backward pass, differentiable, and the
                terms.
        """
        with problem.recording("twice") as (evaluation, leaves, output):
            (start, cotangent), terms = head(output)
            grads = vjp({"": start}, {"": cotangent}, leaves, create_graph=True)

        def product(v: Columns, inputs: Tensors) -> Columns:
            return vjp_columns(grads, v, inputs, not self.once)

        return self._by_columns(product, problem, evaluation, leaves, terms)

    def jacobian(self, problem: Problem, head: OutputHead) -> JVP:
        """Prepare products with the Jacobian of a linear function of the output.

        Args:
            problem: The model on a batch.
            head: Returns the function, ``[K, *output] -> [K, M]``, at the given output.
        """
        with problem.recording("twice") as (evaluation, leaves, output):
            linear_map = head(output.detach())
            jvp = _double_vjp(output, leaves)

        chunks = in_chunks(lambda v: {"": linear_map(jvp(v))}, self.chunk_size)
        dtypes = _dtypes(problem)

        def apply(V: Columns) -> Tensor:
            with evaluation.active():
                return torch.cat([part[""] for _, part in chunks(V, dtypes)])

        return apply

    def gauss_newton(self, problem: Problem, head: Head) -> Apply:
        """Prepare products with ``J^T B J``, J the Jacobian of the output.

        Args:
            problem: The model on a batch.
            head: Returns a function ``[K, *output] -> [K, *output]`` that multiplies with B at
                the given output, and the terms.
        """
        with problem.recording("twice") as (evaluation, leaves, output):
            curvature, terms = head(output.detach())
            jvp = _double_vjp(output, leaves)

        def product(v: Columns, inputs: Tensors) -> Columns:
            u = jvp(v)
            with without_torch_function():  # an evaluation watches what the model calls
                u = curvature(u)
            return vjp_columns({"": output}, {"": u}, inputs, not self.once)

        return self._by_columns(product, problem, evaluation, leaves, terms)

    def _by_columns(
        self,
        product: Callable,
        problem: Problem,
        evaluation: Evaluation,
        leaves: Tensors,
        terms: Tensor,
    ) -> Apply:
        chunks = in_chunks(product, self.chunk_size)
        dtypes = _dtypes(problem)

        def apply(V: Columns, out: Columns) -> Tensor:
            inputs = {name: leaves[name] for name in out}
            with evaluation.active():
                for rows, part in chunks(V, dtypes, inputs):
                    add(out, rows, part)
            return terms

        return apply


@dataclass(frozen=True)
class Forward:
    """Tangents that travel along the ordinary forward and backward pass."""

    def hessian(self, problem: Problem, head: Head) -> Apply:
        """Prepare products with the Hessian of a scalar function of the output; see ``Reverse``."""

        def product(v: Tensors, names: list[str]) -> tuple[Tensors, Tensor]:
            with _dual_evaluation(problem, v) as (_, duals, output):
                (start, cotangent), terms = head(output)
                inputs = {name: duals[name] for name in names}
                grads = vjp({"": start}, {"": cotangent}, inputs, retain=False)
                return {name: _tangent(grad) for name, grad in grads.items()}, terms

        return _apply_each(problem, product)

    def jacobian(self, problem: Problem, head: OutputHead) -> JVP:
        """Prepare products with the Jacobian of a function of the output; see ``Reverse``."""

        def apply(V: Columns) -> Tensor:
            products = []
            for v in single_columns(V, _dtypes(problem)):
                products.append(
                    _push_forward(problem, v, lambda z, tangent: head(z)(tangent.unsqueeze(0)))
                )
            return torch.cat(products)

        return apply

    def gauss_newton(self, problem: Problem, head: Head) -> Apply:
        """Prepare products with ``J^T B J``, J the Jacobian of the output; see ``Reverse``.

        ``J v`` and the graph for ``J^T`` come from one forward pass while that graph is small. But
        autograd records the tangents, too, and needs two to four times the memory. A larger graph
        is therefore built in a pass of its own, after one for the tangents alone.
        """
        together = room_for(2, problem.facts.graph_bytes, problem.space.device)
        linearize = _record_with_tangent if together else _record_after_tangent

        def product(v: Tensors, names: list[str]) -> tuple[Tensors, Tensor]:
            evaluation, leaves, output, tangent = linearize(problem, v)
            with evaluation.active():
                curvature, terms = head(output.detach())
                u = curvature(tangent.unsqueeze(0)).squeeze(0)
                inputs = {name: leaves[name] for name in names}
                return vjp({"": output}, {"": u}, inputs, retain=False), terms

        return _apply_each(problem, product)


#: An evaluation, its leaves, its output and the tangent of the output.
_Recorded = tuple[Evaluation, Tensors, Tensor, Tensor]


def _record_with_tangent(problem: Problem, v: Tensors) -> _Recorded:
    """Compute output and tangent in one pass."""
    with _dual_evaluation(problem, v) as (evaluation, duals, dual):
        tangent = _tangent(dual, like=dual).detach()
        output = forward_ad.unpack_dual(dual).primal
    # the exit of the level clears tangents: they would be carried backward
    return evaluation, duals, output, tangent


def _record_after_tangent(problem: Problem, v: Tensors) -> _Recorded:
    """Compute the tangent first, without a graph, then the output again, with a graph."""
    with preserved_rng():  # the same Dropout in both
        tangent = _push_forward(problem, v, lambda _, tangent: tangent)
    with problem.recording("once") as recording:
        return *recording, tangent


def _push_forward(problem: Problem, v: Tensors, use: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a function of the output and of its tangent ``J v``; nothing is recorded."""
    with _dual_evaluation(problem, v, requires_grad=False) as (_, _, dual):
        tangent = _tangent(dual, like=dual).detach()
        return use(forward_ad.unpack_dual(dual).primal.detach(), tangent)


def _apply_each(problem: Problem, product: Callable) -> Apply:
    """Apply a product of one vector to each column."""

    def apply(V: Columns, out: Columns) -> Tensor:
        for index, v in enumerate(single_columns(V, _dtypes(problem))):
            part, terms = product(v, list(out))
            add(out, index, part)
        return terms

    return apply


def _dtypes(problem: Problem) -> dict[str, torch.dtype]:
    return {name: leaf.dtype for name, leaf in problem.leaves().items()}


@contextmanager
def _dual_evaluation(
    problem: Problem, v: Tensors, requires_grad: bool = True
) -> Iterator[tuple[Evaluation, dict[str, Tensor], Tensor]]:
    """Evaluate the model with parameters that carry the tangents ``v``.

    Yields:
        The evaluation, which is active, these parameters, and the output with its tangent.
    """
    leaves = problem.leaves() if requires_grad else problem.constants()
    with forward_ad.dual_level():
        duals = {
            name: forward_ad.make_dual(leaf, v[name]) if name in v else leaf
            for name, leaf in leaves.items()
        }
        evaluation = problem.evaluation(duals, "forward")
        with evaluation.active():
            output = problem.output(evaluation)
            problem.check_memory(output, leaves)
            yield evaluation, duals, output


def _tangent(dual: Tensor | None, like: Tensor | None = None) -> Tensor | None:
    """Return a dual tensor's tangent. If it has none, return zeros like ``like`` or ``None``."""
    tangent = None if dual is None else forward_ad.unpack_dual(dual).tangent
    return torch.zeros_like(like) if tangent is None and like is not None else tangent


def _double_vjp(output: Tensor, leaves: Tensors) -> Callable[[Columns], Tensor]:
    """Return ``V -> J V``: ``J^T w`` is linear in ``w``, and J its transposed derivative."""
    w = torch.zeros_like(output, requires_grad=True)
    transposed = vjp({"": output}, {"": w}, leaves, create_graph=True)
    return lambda v: vjp_columns(transposed, v, {"": w})[""]
