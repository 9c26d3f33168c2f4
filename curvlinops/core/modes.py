"""Products with derivatives of a model, in forward and in reverse mode.

Both modes offer the same functions. Each takes a model bound to a batch and returns an
``Apply`` (for the Jacobian a ``Push``); what does not depend on the vectors is done before, once.
They are built on two idioms only, each compared with finite differences through every layer of the
test suite:

- ``Reverse`` differentiates the graph of a backward pass. It serves closures, checkpoints and
  custom autograd functions, and the graph serves many products.
- ``Forward`` attaches tangents to the parameters (``torch.autograd.forward_ad``) and runs the
  ordinary forward and backward passes. It is the faster one for a single product with a
  Jacobian. ``torch.func`` is not used: it is slower on all our benchmarks, refuses data-dependent
  models, and its compositions ``jvp(jacrev)`` and ``grad(jvp)`` are wrong through normalization
  layers (PyTorch 2.13).
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from curvlinops.core.autodiff import (
    Apply,
    BoundModel,
    Head,
    Tensors,
    fitted_seed,
    pull,
    pull_columns,
)
from curvlinops.core.columns import add, in_chunks, room_for, single_columns
from curvlinops.core.float16 import Fit, fitted, unfitted
from curvlinops.core.scope import Scope
from curvlinops.core.seeds import preserved_rng
from curvlinops.core.space import Columns

with warnings.catch_warnings():
    # the first use of forward mode imports this, which warns of PyTorch's own torch.jit.script
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp

#: ``push(V) -> J V``, ``[K, M]``, for columns of the parameters.
Push = Callable[[Columns], Tensor]

#: Returns a linear function ``[K, *output] -> [K, M]`` at a given output.
OutputHead = Callable[[Tensor], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Reverse:
    """Backward passes through the graph of a backward pass.

    Attributes:
        chunk_size: How many columns a backward pass carries at once; see ``in_chunks``.
        once: Whether products are for one column, once: the graph is freed meanwhile.
    """

    chunk_size: int | None = None
    once: bool = False

    def hessian(self, bound: BoundModel, head: Head) -> Apply:
        """Prepare products with the Hessian of a scalar function of the output.

        Args:
            bound: The model on a batch.
            head: Returns the ``Seed`` of the function's backward pass, differentiable, and the
                terms.
        """
        with bound.recording("reverse") as (scope, leaves, output):
            seed, terms = head(output)
            (start, cotangent), factor = fitted_seed(seed, fit := bound.seen.fit)
            grads = pull({"": start}, {"": cotangent}, leaves, create_graph=True)

        def product(v: Columns, inputs: Tensors) -> Columns:
            found = pull_columns(grads, v, inputs, not self.once, fit.vectors)
            return unfitted(found, factor)

        return self._by_columns(product, bound, scope, leaves, terms)

    def jacobian(self, bound: BoundModel, head: OutputHead) -> Push:
        """Prepare products with the Jacobian of a linear function of the output.

        Args:
            bound: The model on a batch.
            head: Returns the function, ``[K, *output] -> [K, M]``, at the given output.
        """
        with bound.recording("reverse") as (scope, leaves, output):
            down = head(output.detach())
            push = _double_vjp(output, leaves, bound.seen.fit)

        chunks = in_chunks(lambda v: {"": down(push(v))}, self.chunk_size)
        dtypes = _dtypes(bound)

        def apply(V: Columns) -> Tensor:
            with scope.active():
                return torch.cat([part[""] for _, part in chunks(V, dtypes)])

        return apply

    def gauss_newton(self, bound: BoundModel, head: Head) -> Apply:
        """Prepare products with ``J^T B J``, J the Jacobian of the output.

        Args:
            bound: The model on a batch.
            head: Returns a function ``[K, *output] -> [K, *output]`` that multiplies with B at
                the given output, and the terms.
        """
        with bound.recording("reverse") as (scope, leaves, output):
            curvature, terms = head(output.detach())
            push = _double_vjp(output, leaves, fit := bound.seen.fit)

        def product(v: Columns, inputs: Tensors) -> Columns:
            u = curvature(push(v))
            return pull_columns({"": output}, {"": u}, inputs, not self.once, fit.outputs)

        return self._by_columns(product, bound, scope, leaves, terms)

    def _by_columns(
        self, product: Callable, bound: BoundModel, scope: Scope, leaves: Tensors, terms: Tensor
    ) -> Apply:
        chunks = in_chunks(product, self.chunk_size)
        dtypes = _dtypes(bound)

        def apply(V: Columns, out: Columns) -> Tensor:
            inputs = {name: leaves[name] for name in out}
            with scope.active():
                for rows, part in chunks(V, dtypes, inputs):
                    add(out, rows, part)
            return terms

        return apply


@dataclass(frozen=True)
class Forward:
    """Tangents that travel along the ordinary forward and backward pass."""

    def hessian(self, bound: BoundModel, head: Head) -> Apply:
        """Prepare products with the Hessian of a scalar function of the output; see ``Reverse``."""

        def product(v: Tensors, names: list[str]) -> tuple[Tensors, Tensor]:
            with forward_ad.dual_level():
                scope, duals, factor = _dual_scope(bound, v)
                with scope.active():
                    seed, terms = head(bound.output(scope))
                    (start, cotangent), own = fitted_seed(seed, bound.seen.fit)
                    inputs = {name: duals[name] for name in names}
                    grads = pull({"": start}, {"": cotangent}, inputs, retain=False)
                    tangents = {name: _tangent(grad, factor) for name, grad in grads.items()}
                    return unfitted(tangents, own), terms

        return _apply_each(bound, product)

    def jacobian(self, bound: BoundModel, head: OutputHead) -> Push:
        """Prepare products with the Jacobian of a function of the output; see ``Reverse``."""

        def apply(V: Columns) -> Tensor:
            products = []
            for v in single_columns(V, _dtypes(bound)):
                products.append(
                    _push_forward(bound, v, lambda z, tangent: head(z)(tangent.unsqueeze(0)))
                )
            return torch.cat(products)

        return apply

    def gauss_newton(self, bound: BoundModel, head: Head) -> Apply:
        """Prepare products with ``J^T B J``, J the Jacobian of the output; see ``Reverse``.

        ``J v`` and the graph for ``J^T`` come from one forward pass while that graph is small. But
        autograd records the tangents, too, and needs two to four times the memory. A larger graph
        is therefore built in a pass of its own, after one for the tangents alone.
        """
        together = room_for(2, bound.seen.graph_bytes, bound.space.device)
        linearize = _record_with_tangent if together else _record_after_tangent

        def product(v: Tensors, names: list[str]) -> tuple[Tensors, Tensor]:
            scope, leaves, output, tangent = linearize(bound, v)
            with scope.active():
                curvature, terms = head(output.detach())
                u = curvature(tangent.unsqueeze(0)).squeeze(0)
                inputs = {name: leaves[name] for name in names}
                order = bound.seen.fit.outputs
                return pull({"": output}, {"": u}, inputs, retain=False, order=order), terms

        return _apply_each(bound, product)


#: A scope, the leaves and the output of the graph that was built in it, and the output's tangent.
_Recorded = tuple[Scope, Tensors, Tensor, Tensor]


def _record_with_tangent(bound: BoundModel, v: Tensors) -> _Recorded:
    """Compute output and tangent in one pass."""
    with forward_ad.dual_level():
        scope, duals, factor = _dual_scope(bound, v)
        with scope.active():
            dual = bound.output(scope)
            tangent = _tangent(dual, factor, like=dual).detach()
            output = forward_ad.unpack_dual(dual).primal
    # the exit of the level clears tangents: they would be carried backward
    return scope, duals, output, tangent


def _record_after_tangent(bound: BoundModel, v: Tensors) -> _Recorded:
    """Compute the tangent first, without a graph, then the output again, with a graph."""
    with preserved_rng():  # the same Dropout in both
        tangent = _push_forward(bound, v, lambda _, tangent: tangent)
    with bound.recording("gradient") as evaluation:
        return *evaluation, tangent


def _push_forward(bound: BoundModel, v: Tensors, use: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return a function of the output and of its tangent ``J v``; nothing is recorded."""
    with forward_ad.dual_level():
        scope, _, factor = _dual_scope(bound, v, requires_grad=False)
        with scope.active():
            dual = bound.output(scope)
            tangent = _tangent(dual, factor, like=dual).detach()
            return use(forward_ad.unpack_dual(dual).primal.detach(), tangent)


def _apply_each(bound: BoundModel, product: Callable) -> Apply:
    """Apply a product of one vector to each column."""

    def apply(V: Columns, out: Columns) -> Tensor:
        for index, v in enumerate(single_columns(V, _dtypes(bound))):
            part, terms = product(v, list(out))
            add(out, index, part)
        return terms

    return apply


def _dtypes(bound: BoundModel) -> dict[str, torch.dtype]:
    fit = bound.seen.fit
    return {name: fit.dtype(leaf.dtype) for name, leaf in bound.leaves().items()}


def _dual_scope(
    bound: BoundModel, v: Tensors, requires_grad: bool = True
) -> tuple[Scope, dict[str, Tensor], Tensor | None]:
    """Return a scope in which the parameters carry the tangents ``v``, times a factor, and this."""
    leaves = bound.leaves() if requires_grad else bound.constants()
    v, factor = fitted(v, bound.seen.fit.vectors)
    duals = {
        name: forward_ad.make_dual(leaf, v[name].to(leaf.dtype)) if name in v else leaf
        for name, leaf in leaves.items()
    }
    return bound.scope(duals, "forward"), duals, factor


def _tangent(
    dual: Tensor | None, factor: Tensor | None, like: Tensor | None = None
) -> Tensor | None:
    """Return a dual tensor's tangent without a factor of ``_dual_scope``.

    If it has none, return zeros like ``like`` or ``None``.
    """
    tangent = None if dual is None else forward_ad.unpack_dual(dual).tangent
    tangent = torch.zeros_like(like) if tangent is None and like is not None else tangent
    return unfitted({"": tangent}, factor)[""]


def _double_vjp(output: Tensor, leaves: Tensors, fit: Fit) -> Callable[[Columns], Tensor]:
    """Return ``V -> J V``: ``J^T w`` is linear in ``w``, and J its transposed derivative."""
    w = torch.zeros_like(output, requires_grad=True)
    pulled = pull({"": output}, {"": w}, leaves, create_graph=True)
    return lambda v: pull_columns(pulled, v, {"": w}, order=fit.vectors)[""]
