"""Products with derivatives of model and loss on a batch.

``hessian``, ``jacobian`` and ``gauss_newton`` compute all that does not depend on the vectors, and
return a function of the vectors. They differentiate the graph of a backward pass, which serves
closures, checkpoints, custom autograd functions, and many products. ``torch.func`` is not used: it
is slower on all our benchmarks, refuses data-dependent models, and ``jvp(jacrev)`` and
``grad(jvp)`` are wrong through normalization layers (PyTorch 2.13).

Only a single Gauss-Newton product, whose graph is not kept, takes forward mode for ``J v``, as it
is faster. Forward mode is wrong for some operations, so that each such product is checked.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from math import nan
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge

from curvlinops.autodiff.backward import Tensors, explained, in_chunks, vjp, vjp_columns
from curvlinops.autodiff.evaluation import Evaluation, check_graph
from curvlinops.autodiff.linear import Linear
from curvlinops.linear_operator.space import Columns, add, norm
from curvlinops.risk.batch_problem import BatchProblem, Recording, Seed
from curvlinops.risk.checks.custom_functions import check_jacobian
from curvlinops.support.autograd_graph import Output, graph_nodes, runs_python
from curvlinops.support.devices import bytes_of_pass
from curvlinops.support.norms import double_dot
from curvlinops.support.refusals import is_of_processes, lacks_memory
from curvlinops.support.rng import GeneratorStates, preserved_rng, seeded
from curvlinops.support.torch_internals import prepare_forward_mode, without_torch_function
from curvlinops.team.scattering import is_stand_in

#: ``apply(V, out) -> weight``: adds the product with the columns ``V`` (some or all parameters; the
#: others count as zero), summed over the batch's terms, to the columns ``out`` (the parameters that
#: are wanted), in place. Returns the batch's weight, its share of the normalization.
Apply = Callable[[Columns, Columns], Tensor]

#: Largest relative difference of an inner product that is computed by forward and backward mode.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}

#: A function of the model's output that also returns the batch's weight.
Head = Callable[[Tensor], tuple[Any, Tensor]]


# --- derivatives of first order


def evaluate(problem: BatchProblem) -> Tensor:
    """Return the output, without its graph."""
    if problem.is_first:
        with problem.recording("once") as recording:
            return recording.output.detach()
    with problem.evaluation(problem.constants(), "once").active() as evaluation:
        return problem.output(evaluation).detach()


def gradient(problem: BatchProblem, head: Head) -> tuple[Tensor, Columns, Tensor]:
    """Return a scalar function of the output, its gradient (one column), and the weight."""
    with problem.recording("once") as (_, leaves, output):
        with problem.formulas():
            loss, weight = head(output)
        grads = vjp({"": loss}, {"": None}, leaves, retain=not problem.model.substitutable)
    out = problem.space.views(problem.space.zeros(1))
    add(out, 0, grads)
    return loss.detach(), out, weight


def transposed_jacobian(
    problem: BatchProblem, chunk_size: int | None = None
) -> tuple[Linear, Tensor]:
    """Return ``apply(U, out)``, which adds ``J^T U``, and the output.

    U has the shape ``[K, *output]``, or fewer axes; like an ``Apply``, the function works in place.
    """
    with problem.recording("once") as (evaluation, leaves, output):
        pass

    def product(u: Columns, inputs: Tensors) -> Columns:
        return vjp_columns({"": output}, u, inputs)

    chunks = in_chunks(product, chunk_size, (output,), problem.model.shards)

    def apply(U: Tensor, out: Columns) -> None:
        inputs = {name: leaves[name] for name in out}
        cotangents = {"": U.reshape(U.shape[0], *output.shape)}
        for rows, part in chunks(cotangents, inputs):
            add(out, rows, part)

    return _kept(evaluation, Linear(apply, (output,))), output.detach()


# --- derivatives of second order, by backward passes through backward passes


def hessian(
    problem: BatchProblem,
    head: Callable[[Tensor], tuple[Seed, Tensor]],
    chunk_size: int | None = None,
    single: bool = False,
) -> Linear:
    """Prepare products with the Hessian of a scalar function of the output.

    The head returns the ``Seed`` of the function's backward pass, differentiable, and the weight.
    A ``single`` product with one column frees the graph; others have ``chunk_size`` columns in one
    backward pass, see ``in_chunks``.
    """

    def prepare(recording: Recording) -> tuple[Linear, Tensor]:
        _, leaves, output = recording
        with problem.formulas():
            (start, cotangent), weight = head(output)
        grads, names = _vjp_with_graph(problem, start, cotangent, leaves)

        def product(v: Columns, inputs: Tensors) -> Columns:
            with explained(names):
                return vjp_columns(grads, v, inputs, not single)

        return Linear(product, tuple(x for x in grads.values() if x is not None)), weight

    return _by_columns(problem, prepare, chunk_size, single)


def jacobian(
    problem: BatchProblem,
    head: Callable[[Tensor], tuple[Linear, int]],
    chunk_size: int | None = None,
) -> Linear:
    """Prepare products with the Jacobian of a linear function of the output.

    The head returns this function at an output, ``[K, *output] -> [K, M]``, and M. The result is a
    function ``apply(V, out)`` that adds to ``[K, M]``, in place.
    """
    with problem.recording("twice") as recording:
        evaluation, _, output = recording
        linear_map, num_rows = head(output.detach())
        jvp = _double_vjp(problem, recording)

    tensors = jvp.tensors + linear_map.tensors
    chunks = in_chunks(
        lambda v: {"": linear_map(jvp(v))}, chunk_size, tensors, problem.model.shards
    )

    def apply(V: Columns, out: Tensor) -> None:
        for rows, part in chunks(V):
            out[rows] += part[""]

    return _kept(evaluation, Linear(apply, tensors, num_rows))


def gauss_newton(
    problem: BatchProblem, head: Head, chunk_size: int | None = None, single: bool = False
) -> Linear:
    """Prepare products with ``J^T B J``, J the Jacobian of the output; see ``hessian``.

    The head returns a function ``[K, *output] -> [K, *output]`` that multiplies with B at an
    output, and the weight.
    """
    # hooks are compared with backward passes, which tangents do not take
    is_forward = single and not problem.learned().hooks
    if is_forward and not (problem.learned().stops_gradients or problem.seen.lacks_tangents):
        return Linear(_single_gauss_newton(problem, head), ())  # it evaluates the model itself
    return _gauss_newton(problem, head, chunk_size, single)


def _gauss_newton(
    problem: BatchProblem, head: Head, chunk_size: int | None = None, single: bool = False
) -> Linear:
    """Prepare products by backward passes only, see ``gauss_newton``."""

    def prepare(recording: Recording) -> tuple[Linear, Tensor]:
        output = recording.output
        with problem.formulas():
            curvature, weight = head(output.detach())
        jvp = _double_vjp(problem, recording)

        def product(v: Columns, inputs: Tensors) -> Columns:
            Jv = jvp(v)
            with without_torch_function():  # an evaluation watches what the model calls
                u = curvature(Jv)
                if problem.space.in_parts and len(u) == 1:  # other batches may have tangents
                    _note_product(problem, Jv, u)
            return vjp_columns({"": output}, {"": u}, inputs, not single)

        return Linear(product, jvp.tensors + curvature.tensors), weight

    return _by_columns(problem, prepare, chunk_size, single)


def _vjp_with_graph(
    problem: BatchProblem, start: Tensor, cotangent: Tensor | None, leaves: Tensors
) -> tuple[dict[str, Output | None], list[str]]:
    """Return where gradients left their graph, and the names of custom functions in them."""
    constant = cotangent if cotangent is None else cotangent.detach()
    ordinary = partial(vjp, {"": start}, {"": constant}, leaves)
    names = problem.functions.names
    with problem.functions.keeping_graph(start, cotangent), explained(names, ordinary):
        grads = vjp({"": start}, {"": cotangent}, leaves, create_graph=True)
    with without_torch_function():  # an evaluation watches what the model reads, not this
        return {name: _without_numbers(x) for name, x in grads.items()}, names


def _without_numbers(gradient: Tensor | None) -> Output | None:
    """Return a gradient's place in its graph, unless it has no memory anyway."""
    if gradient is None or is_stand_in(gradient):
        return gradient
    return get_gradient_edge(gradient) if gradient.requires_grad else None


def _double_vjp(problem: BatchProblem, recording: Recording) -> Linear:
    """Return ``V -> J V``: ``J^T w`` is linear in ``w``, and J its transposed derivative."""
    _, leaves, output = recording
    w = torch.zeros_like(output).requires_grad_()
    if problem.functions.key(w) not in problem.seen.kept:  # zeros would hide what a graph loses
        w = torch.empty_like(w).normal_(generator=seeded(w.device, 0)).requires_grad_()
    transposed, names = _vjp_with_graph(problem, output, w, leaves)

    def jvp(v: Columns) -> Tensor:
        with explained(names):
            return vjp_columns(transposed, v, {"": w})[""]

    if problem.uncompared:
        check_jacobian(problem, recording, jvp)
    return Linear(jvp, (output, w, *(x for x in transposed.values() if x is not None)))


def _by_columns(
    problem: BatchProblem,
    prepare: Callable[[Recording], tuple[Linear, Tensor]],
    chunk_size: int | None,
    single: bool,
) -> Linear:
    """Return the ``Apply`` of a product that is prepared, with the weight, from a recording."""

    def linear(recording: Recording) -> Linear:
        (product, weight), leaves = prepare(recording), recording.leaves
        chunks = in_chunks(product.apply, chunk_size, product.tensors, problem.model.shards)

        def apply(V: Columns, out: Columns) -> Tensor:
            for rows, part in chunks(V, {name: leaves[name] for name in out}):
                add(out, rows, part)
            return weight

        return Linear(apply, product.tensors)

    def once(V: Columns, out: Columns) -> Tensor:
        with problem.recording("twice") as recording:
            return linear(recording).apply(V, out)

    if single:  # in the context of its recording, which takes time to enter
        return Linear(once, ())
    with problem.recording("twice") as recording:
        product = linear(recording)
    return _kept(recording.evaluation, product)


def _kept(evaluation: Evaluation, product: Linear) -> Linear:
    """Return a product that enters the context that its graph needs."""
    context, copies = evaluation.of_graph(lambda: runs_python(graph_nodes(*product.tensors)))

    def apply(V: Any, out: Columns) -> Any:
        with context():
            return product.apply(V, out)

    return Linear(apply, product.tensors + copies, product.num_rows)


# --- a single Gauss-Newton product, by forward mode


def _single_gauss_newton(problem: BatchProblem, head: Head) -> Apply:
    """Prepare one product with one column, whose ``J v`` is a tangent.

    Autograd records the tangents, too, if ``J v`` and the graph for ``J^T`` come from one forward
    pass, and needs two to four times the memory; with checkpoints, many times. Graphs above 16 MiB
    (128 MiB on accelerators) are therefore built in a pass of their own, after one for the tangents
    alone. This takes 10 to 20 % of a product's time; smaller graphs are not worth it.
    """
    in_parts, shards = problem.space.in_parts, problem.model.shards
    is_small = 4 * problem.learned().graph_bytes <= bytes_of_pass(problem.space.device)
    together = is_small and not in_parts

    def product(v: Tensors, names: list[str]) -> tuple[Tensors, Tensor, bool, bool]:
        if together:
            recorded = _dual_evaluation(problem, v, problem.leaves())
        else:
            recorded = _recorded_after_tangent(problem, v)
        with recorded as ((_, leaves, output), tangent):
            problem.look_at_loss(output)
            with problem.formulas():
                curvature, weight = head(output.detach())
                u = curvature(tangent.unsqueeze(0)).squeeze(0)
            inputs = {name: leaves[name] for name in {**v, **dict.fromkeys(names)}}
            grads = vjp({"": output}, {"": u}, inputs, retain=False)
        # <J v, B J v> = <v, G v>: the left by forward mode, the right by the backward pass. Zero
        # equals zero also if forward mode has lost the tangents
        if in_parts:  # the right is known at the end of the product, of all processes
            _note_product(problem, tangent, u, is_forward=True)
            is_zero = not bool(tangent.any())
            return grads, weight, not is_zero, is_zero
        Gv = {name: grads[name] for name in v if grads[name] is not None}
        is_zero = not Gv or not bool(tangent.any())
        is_compared = not (is_zero or problem.learned().hooks)
        is_right = is_compared and _agree(({"": tangent}, {"": u}), ({n: v[n] for n in Gv}, Gv))
        return grads, weight, is_right, is_zero

    def apply(V: Columns, out: Columns) -> Tensor:
        if in_parts and not V.keys() == out.keys() == problem.space.shapes.keys():
            return _gauss_newton(problem, head, single=True)(V, out)
        states, params = GeneratorStates(), problem.model.params
        shards.at_columns(slice(0, 1))
        columns = V | {name: shards.cotangent(name, 1) for name in V if name in shards.params}
        v = {name: column[0].detach().to(params[name].dtype) for name, column in columns.items()}
        try:
            grads, weight, is_right, is_zero = product(v, list(out))
        except (RuntimeError, TypeError) as error:  # an operation without forward mode
            if lacks_memory(error) or is_of_processes(error) or shards.has_added:
                raise
            is_right = is_zero = False
        if not is_right:
            states.restore()
            if not is_zero:
                problem.seen.lacks_tangents = True
            return _gauss_newton(problem, head, single=True)(V, out)
        add(out, 0, {name: grads[name] for name in out})
        return weight

    return apply


def _agree(first: tuple[Tensors, Tensors], second: tuple[Tensors, Tensors]) -> bool:
    """Return whether the inner products of two vectors, and of two others, agree to rounding."""
    one, two = (_dot([*xs.values()], [ys[name] for name in xs]) for xs, ys in (first, second))
    dtypes = {x.dtype for tensors in (*first, *second) for x in tensors.values()}
    error, largest = abs(one - two), max(abs(one), abs(two))
    if error <= allowed_error(largest, 0.0, dtypes):
        return True
    size = max(norm(xs) * norm(ys) for xs, ys in (first, second))
    return error <= allowed_error(largest, size, dtypes)


def _note_product(problem: BatchProblem, Jv: Tensor, u: Tensor, is_forward: bool = False) -> None:
    """Add ``<J v, B J v>`` of a batch to that of all, see ``EmpiricalRisk.has_right_tangents``."""
    inner = nan if is_forward and problem.learned().hooks else float(double_dot(Jv, u))
    dtypes, sums = {*problem.model.shards.dtypes, Jv.dtype, u.dtype}, problem.risk.tangents
    sums["number"] += is_forward
    sums["inner"] += inner
    sums["error"] += allowed_error(inner, norm({"": Jv}) * norm({"": u}), dtypes)


def allowed_error(inner: float, size: float, dtypes: Iterable[torch.dtype]) -> float:
    """Return the largest error of an inner product of vectors, given the product of their norms."""
    tolerance = max(_TOLERANCES.get(dtype, 0.1) for dtype in dtypes)
    rounding = 50 * max(torch.finfo(dtype).eps for dtype in dtypes)
    return tolerance * abs(inner) + rounding * size


def _dot(xs: list[Tensor], ys: list[Tensor]) -> float:
    """Return the inner product of all numbers of some tensors."""
    if sum(x.numel() for x in xs) <= 2**18:  # copies take less time than calls
        xs, ys = ([torch.cat([x.reshape(-1) for x in tensors])] for tensors in (xs, ys))
    return float(sum(map(double_dot, xs, ys)))


@contextmanager
def _recorded_after_tangent(
    problem: BatchProblem, v: Tensors
) -> Iterator[tuple[Recording, Tensor]]:
    """Compute the tangent first, without a graph, then the output again, with a graph."""
    with preserved_rng(), _dual_evaluation(problem, v, problem.constants()) as (_, tangent):
        pass  # the same Dropout in both
    with problem.recording("once") as recording:
        yield recording, tangent


@contextmanager
def _dual_evaluation(
    problem: BatchProblem, v: Tensors, leaves: dict[str, Tensor]
) -> Iterator[tuple[Recording, Tensor]]:
    """Evaluate the model with parameters that carry the tangents ``v``; yield the output's tangent.

    Tangents, which would be carried backward, are cleared before.
    """
    prepare_forward_mode()
    with ExitStack() as stack:
        with forward_ad.dual_level():
            duals = {n: forward_ad.make_dual(x, v[n]) if n in v else x for n, x in leaves.items()}
            evaluation = stack.enter_context(problem.evaluation(duals, "forward").active())
            dual = problem.output(evaluation)
            check_graph(graph_nodes(dual), problem.model, leaves, must_depend=False)
            output, tangent = forward_ad.unpack_dual(dual)
            tangent = torch.zeros_like(output) if tangent is None else tangent.detach()
        yield Recording(evaluation, duals, output), tangent
