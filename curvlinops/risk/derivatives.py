"""Products with derivatives of model and loss on a batch.

``hessian``, ``jacobian`` and ``gauss_newton`` compute all that does not depend on the vectors, and
return a function of the vectors. They differentiate the graph of a backward pass, which serves
closures, checkpoints, custom autograd functions, and many products. ``torch.func`` is not used: it
is slower on all our benchmarks, refuses data-dependent models, and ``jvp(jacrev)`` and
``grad(jvp)`` are wrong through normalization layers (PyTorch 2.13).

Only a single Gauss-Newton product, whose graph is not kept, takes forward mode for ``J v``, as it
is faster. Forward mode is wrong for some operations, so that each such product is checked.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.autodiff.backward import explained, in_chunks, room_for, vjp, vjp_columns
from curvlinops.autodiff.linear import Linear
from curvlinops.linear_operator.space import Columns, add, norm
from curvlinops.risk.batch_problem import BatchProblem, Recording, Seed
from curvlinops.risk.custom_functions import check_jacobian
from curvlinops.support.norms import double_dot
from curvlinops.support.refusals import lacks_memory
from curvlinops.support.rng import GeneratorStates, preserved_rng, seeded
from curvlinops.support.torch_internals import prepare_forward_mode, without_torch_function

#: ``apply(V, out) -> weight``: adds the product with the columns ``V`` (some or all parameters; the
#: others count as zero), summed over the batch's terms, to the columns ``out`` (the parameters that
#: are wanted), in place. Returns the batch's weight, its share of the normalization.
Apply = Callable[[Columns, Columns], Tensor]

#: Largest relative difference of an inner product that is computed by forward and backward mode.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}

#: A function of the model's output that also returns the batch's weight.
Head = Callable[[Tensor], tuple[Any, Tensor]]

Tensors = Mapping[str, Tensor]


# --- derivatives of first order


def evaluate(problem: BatchProblem) -> Tensor:
    """Return the output, without its graph."""
    if problem.is_first:
        with problem.recording("once") as recording:
            return recording.output.detach()
    evaluation = problem.evaluation(problem.constants(), "once")
    with evaluation.active():
        return problem.output(evaluation).detach()


def gradient(problem: BatchProblem, head: Head) -> tuple[Tensor, Columns, Tensor]:
    """Return a scalar function of the output, its gradient (one column), and the weight."""
    with problem.recording("once") as (_, leaves, output):
        with problem.formulas():
            loss, weight = head(output)
        grads = vjp({"": loss}, {"": None}, leaves, retain=not problem.can_substitute)
    out = problem.space.zeros(1)
    add(out, 0, grads)
    return loss.detach(), out, weight


def transposed_jacobian(
    problem: BatchProblem, chunk_size: int | None = None
) -> tuple[Linear, Tensor]:
    """Return ``apply(U, out)``, which adds ``J^T U``, and the output.

    U has the shape ``[K, *output]``, or fewer axes; like an ``Apply``, the function works in place.

    Args:
        problem: The model on a batch.
        chunk_size: The number of columns in one backward pass.
    """
    with problem.recording("once") as recording:
        evaluation, leaves, output = recording

    def product(u: Columns, inputs: Tensors) -> Columns:
        return vjp_columns({"": output}, u, inputs)

    chunks = in_chunks(product, chunk_size, (output,), problem.model.shards)
    context, copies = evaluation.of_graph([output])

    def apply(U: Tensor, out: Columns) -> None:
        inputs = {name: leaves[name] for name in out}
        cotangents = {"": U.reshape(U.shape[0], *output.shape)}
        with context():
            for rows, part in chunks(cotangents, {"": output.dtype}, inputs):
                add(out, rows, part)

    return Linear(apply, (output, *copies)), output.detach()


# --- derivatives of second order, by backward passes through backward passes


def hessian(
    problem: BatchProblem,
    head: Callable[[Tensor], tuple[Seed, Tensor]],
    chunk_size: int | None = None,
    single: bool = False,
) -> Linear:
    """Prepare products with the Hessian of a scalar function of the output.

    Args:
        problem: The model on a batch.
        head: Returns the ``Seed`` of the function's backward pass, differentiable, and the weight.
        chunk_size: The number of columns in one backward pass, see ``in_chunks``.
        single: Whether there is one product with one column, which frees the graph.
    """
    with problem.recording("twice") as (evaluation, leaves, output), explained():
        with problem.formulas():
            (start, cotangent), weight = head(output)
        with problem.keeping_graph(start):
            grads = vjp({"": start}, {"": cotangent}, leaves, create_graph=True)

    def product(v: Columns, inputs: Tensors) -> Columns:
        return vjp_columns(grads, v, inputs, not single)

    tensors = tuple(x for x in grads.values() if x is not None)
    context = evaluation.of_graph(tensors, single)
    return _by_columns(problem, Linear(product, tensors), context, leaves, weight, chunk_size)


def jacobian(
    problem: BatchProblem,
    head: Callable[[Tensor], tuple[Linear, int]],
    chunk_size: int | None = None,
) -> Linear:
    """Prepare products with the Jacobian of a linear function of the output.

    Args:
        problem: The model on a batch.
        head: Returns the function, ``[K, *output] -> [K, M]``, at the given output, and M.
        chunk_size: See ``hessian``.

    Returns:
        An ``Apply`` that adds to ``{"": [K, M]}``, and returns nothing.
    """
    with problem.recording("twice") as recording, explained():
        evaluation, leaves, output = recording
        linear_map, num_rows = head(output.detach())
        jvp = _double_vjp(problem, recording)

    tensors = jvp.tensors + linear_map.tensors
    chunks = in_chunks(
        lambda v: {"": linear_map(jvp(v))}, chunk_size, tensors, problem.model.shards
    )
    (context, copies), dtypes = evaluation.of_graph([output]), _dtypes(leaves)

    def apply(V: Columns, out: Columns) -> None:
        with context(), explained():
            for rows, part in chunks(V, dtypes):
                add(out, rows, part)

    return Linear(apply, tensors + copies, num_rows)


def gauss_newton(
    problem: BatchProblem, head: Head, chunk_size: int | None = None, single: bool = False
) -> Linear:
    """Prepare products with ``J^T B J``, J the Jacobian of the output.

    Args:
        problem: The model on a batch.
        head: Returns a function ``[K, *output] -> [K, *output]`` that multiplies with B at the
            given output, and the weight.
        chunk_size: See ``hessian``.
        single: See ``hessian``.
    """
    # hooks are compared with backward passes, which tangents do not take
    is_forward = single and not (problem.space.in_parts or problem.facts.hooks)
    if is_forward and not (problem.facts.stops_gradients or problem.facts.lacks_tangents):
        return Linear(_single_gauss_newton(problem, head), ())  # it evaluates the model itself
    return _gauss_newton(problem, head, chunk_size, single)


def _gauss_newton(
    problem: BatchProblem, head: Head, chunk_size: int | None = None, single: bool = False
) -> Linear:
    """Prepare products by backward passes only, see ``gauss_newton``."""
    with problem.recording("twice") as recording, explained():
        evaluation, leaves, output = recording
        with problem.formulas():
            curvature, weight = head(output.detach())
        jvp = _double_vjp(problem, recording)

    def product(v: Columns, inputs: Tensors) -> Columns:
        u = jvp(v)
        with without_torch_function():  # an evaluation watches what the model calls
            u = curvature(u)
        return vjp_columns({"": output}, {"": u}, inputs, not single)

    linear = Linear(product, jvp.tensors + curvature.tensors)
    context = evaluation.of_graph([output], single)
    return _by_columns(problem, linear, context, leaves, weight, chunk_size)


def _double_vjp(problem: BatchProblem, recording: Recording) -> Linear:
    """Return ``V -> J V``: ``J^T w`` is linear in ``w``, and J its transposed derivative."""
    _, leaves, output = recording
    w = torch.zeros_like(output)
    with problem.keeping_graph(output) as is_new:
        if is_new:  # zeros would hide what is lost
            w.normal_(generator=seeded(w.device, 0))
        w.requires_grad_()
        transposed = vjp({"": output}, {"": w}, leaves, create_graph=True)

    def jvp(v: Columns) -> Tensor:
        return vjp_columns(transposed, v, {"": w})[""]

    if problem.uncompared:
        check_jacobian(problem, recording, jvp)
    return Linear(jvp, (output, w, *(x for x in transposed.values() if x is not None)))


def _by_columns(
    problem: BatchProblem,
    product: Linear,
    context: tuple[Callable[[], AbstractContextManager], tuple[Tensor, ...]],
    leaves: Tensors,
    weight: Tensor,
    chunk_size: int | None,
) -> Linear:
    """Return the ``Apply`` of a product; for its context see ``Evaluation.of_graph``."""
    chunks = in_chunks(product.apply, chunk_size, product.tensors, problem.model.shards)
    (context, copies), dtypes = context, _dtypes(leaves)

    def apply(V: Columns, out: Columns) -> Tensor:
        inputs = {name: leaves[name] for name in out}
        with context(), explained():
            for rows, part in chunks(V, dtypes, inputs):
                add(out, rows, part)
        return weight

    return Linear(apply, product.tensors + copies)


def _dtypes(leaves: Tensors) -> dict[str, torch.dtype]:
    return {name: leaf.dtype for name, leaf in leaves.items()}


# --- a single Gauss-Newton product, by forward mode


def _single_gauss_newton(problem: BatchProblem, head: Head) -> Apply:
    """Prepare one product with one column, whose ``J v`` is a tangent.

    Autograd records the tangents, too, if ``J v`` and the graph for ``J^T`` come from one forward
    pass, and needs two to four times the memory; with checkpoints, many times. A larger graph is
    therefore built in a pass of its own, after one for the tangents alone.
    """
    facts = problem.facts
    together = room_for(2, facts.graph_bytes, problem.space.device) and not facts.has_checkpoints
    linearize = _record_with_tangent if together else _record_after_tangent

    def product(v: Tensors, names: list[str]) -> tuple[Tensors, Tensor, bool, bool]:
        recording, tangent = linearize(problem, v)
        evaluation, leaves, output = recording
        with evaluation.active():
            problem.look_at_loss(output)
            with problem.formulas():
                curvature, weight = head(output.detach())
                u = curvature(tangent.unsqueeze(0)).squeeze(0)
            inputs = {name: leaves[name] for name in {**v, **dict.fromkeys(names)}}
            grads = vjp({"": output}, {"": u}, inputs, retain=False)
        # <J v, B J v> = <v, G v>: the left by forward mode, the right by the backward pass. Zero
        # equals zero also if forward mode has lost the tangents
        Gv = {name: grads[name] for name in v if grads[name] is not None}
        is_zero = not Gv or not bool(tangent.any())
        is_right = not is_zero and _agree(({"": tangent}, {"": u}), ({n: v[n] for n in Gv}, Gv))
        return grads, weight, is_right, is_zero

    def apply(V: Columns, out: Columns) -> Tensor:
        states, params = GeneratorStates(), problem.model.params
        v = {name: column[0].detach().to(params[name].dtype) for name, column in V.items()}
        try:
            grads, weight, is_right, is_zero = product(v, list(out))
        except (RuntimeError, TypeError) as error:  # an operation without forward mode
            if lacks_memory(error):
                raise
            is_right = is_zero = False
        if not is_right:
            states.restore()
            if not is_zero:
                problem.facts.lacks_tangents = True
            return _gauss_newton(problem, head, single=True)(V, out)
        add(out, 0, {name: grads[name] for name in out})
        return weight

    return apply


def _agree(first: tuple[Tensors, Tensors], second: tuple[Tensors, Tensors]) -> bool:
    """Return whether the inner products of two vectors, and of two others, agree to rounding."""
    one, two = (
        float(sum(double_dot(x, ys[name]) for name, x in xs.items())) for xs, ys in (first, second)
    )
    dtypes = {x.dtype for tensors in (*first, *second) for x in tensors.values()}
    tolerance = max(_TOLERANCES.get(dtype, 0.1) for dtype in dtypes)
    error = abs(one - two) - tolerance * max(abs(one), abs(two))
    if error <= 0:
        return True
    rounding = 50 * max(torch.finfo(dtype).eps for dtype in dtypes)
    return error <= rounding * max(norm(xs) * norm(ys) for xs, ys in (first, second))


def _record_with_tangent(problem: BatchProblem, v: Tensors) -> tuple[Recording, Tensor]:
    """Compute output and tangent in one pass."""
    with _dual_evaluation(problem, v, problem.leaves()) as (recording, tangent):
        pass
    return recording, tangent


def _record_after_tangent(problem: BatchProblem, v: Tensors) -> tuple[Recording, Tensor]:
    """Compute the tangent first, without a graph, then the output again, with a graph."""
    with preserved_rng(), _dual_evaluation(problem, v, problem.constants()) as (_, tangent):
        pass  # the same Dropout in both
    with problem.recording("once") as recording:
        return recording, tangent


@contextmanager
def _dual_evaluation(
    problem: BatchProblem, v: Tensors, leaves: dict[str, Tensor]
) -> Iterator[tuple[Recording, Tensor]]:
    """Evaluate the model with parameters that carry the tangents ``v``.

    Yields:
        The recording, with the parameters that carry tangents, and the output's tangent. The exit
        of the context clears tangents, which would be carried backward.
    """
    prepare_forward_mode()
    with forward_ad.dual_level():
        duals = {n: forward_ad.make_dual(x, v[n]) if n in v else x for n, x in leaves.items()}
        evaluation = problem.evaluation(duals, "forward")
        with evaluation.active():
            dual = problem.output(evaluation)
            problem.check_memory(dual, leaves)
            output, tangent = forward_ad.unpack_dual(dual)
            tangent = torch.zeros_like(output) if tangent is None else tangent.detach()
            yield Recording(evaluation, duals, output), tangent
