"""Gradients of single samples for parameters that no rule knows.

Each sample's share of the output is backpropagated on its own: by ``vmap`` over the samples, where
the model allows that; sample by sample; or through the graph of the whole batch, which takes time
quadratic in the number of samples, but needs no batch that can be cut.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from curvlinops.autodiff.backward import Problem, vjp_columns
from curvlinops.layers.check import disagreeing, sample_weights
from curvlinops.layers.gradients import DenseGradient, Entries
from curvlinops.layers.groups import Group
from curvlinops.linear_operator.space import Columns
from curvlinops.risk.data import Batch
from curvlinops.risk.sample_coupling import differs
from curvlinops.support.autograd_graph import mean_size
from curvlinops.support.memory import lacks_memory
from curvlinops.support.pytree import has_length, leaves, map_leaves, select_samples

_LOGGER = logging.getLogger("curvlinops")


#: Operations of whole batches on so many bytes take about as long as a model's overhead for each
#: sample.
_SMALL = 24 * 2**10


#: Ways that need single samples, the fastest first.
WAYS = "vmap", "loop"


class Shares:
    """Backpropagates shares of a batch's samples.

    Args:
        problem: The model on the batch.
        apply: Adds gradients of ``[K, *output]`` to K columns, through the graph of the batch.
        output: The model's output, samples first.
        names: The parameters.
        ways: Those of ``WAYS`` that have not failed on an earlier batch, and whether they were seen
            to agree with the graph of a whole batch; it learns.
    """

    def __init__(
        self,
        problem: Problem,
        apply: Callable[[Tensor, Columns], None],
        output: Tensor,
        names: list[str],
        ways: dict[str, bool],
    ):
        self._problem, self._apply, self._output = problem, apply, output
        self._space, self._ways = problem.space.restricted(names), ways

    def group(self, u: Tensor) -> Group:
        """Return the gradients of all samples, computed when they are asked for.

        Args:
            u: What is backpropagated, ``[V, *output]``.
        """
        num_samples = u.shape[1]

        def rows(samples: slice | Tensor) -> Tensor:
            wanted = torch.arange(num_samples, device=u.device)[samples]
            return self._space.join(self._compute(u, wanted)).unflatten(0, (len(u), len(wanted)))

        return self._space.names, DenseGradient(
            rows, len(u), num_samples, Entries.all([self._space.dim])
        )

    def _compute(self, u: Tensor, wanted: Tensor) -> Columns:
        """Return gradients ``[V * n, *parameter]`` of some samples."""
        for way in list(self._ways) if len(wanted) and u.numel() else []:
            if way == "loop" and len(u) * mean_size(self._apply) < _SMALL:
                continue
            try:
                found = {"vmap": self._by_vmap, "loop": self._in_a_loop}[way](u, wanted)
                if not self._ways[way]:
                    self._check(found, u, wanted)
                    self._ways[way] = True
            except Exception as error:  # whatever the user's model raises on parts of a batch
                if lacks_memory(error):
                    raise
                _LOGGER.info("Samples are not backpropagated by way of %s: %s", way, error)
                del self._ways[way]
            else:
                return {name: x.flatten(0, 1) for name, x in found.items()}
        return self._in_whole(u, wanted)

    def _in_whole(self, u: Tensor, wanted: Tensor) -> Columns:
        place = torch.arange(len(wanted), device=u.device)
        alone = u.new_zeros(len(u), len(wanted), *u.shape[1:])
        alone[:, place, wanted] = u[:, wanted]
        out = self._space.zeros(len(u) * len(wanted))
        self._apply(alone.flatten(0, 1), out)
        return out

    def _by_vmap(self, u: Tensor, wanted: Tensor) -> Columns:
        problem, X = self._problem, self._problem.batch.X
        if not problem.can_substitute:
            raise NotImplementedError("no closures.")
        values = problem.constants()
        own = {name: values[name] for name in self._space.names}
        cut = {id(leaf): leaf for leaf in leaves(X) if has_length(leaf, u.shape[1])}

        def of_one(parts: list[Tensor], u: Tensor) -> tuple[Tensor, Columns]:
            part_of = dict(zip(cut, parts, strict=True))
            one = map_leaves(
                X, lambda leaf: part_of[id(leaf)].unsqueeze(0) if id(leaf) in part_of else leaf
            )

            def function(own: Columns) -> Tensor:
                evaluation = problem.evaluation({**values, **own}, "once")
                with evaluation.active():
                    return problem.on(Batch(problem.batch.index, one, None)).output(evaluation)

            output, vjp = torch.func.vjp(function, own)
            return output.squeeze(0), torch.func.vmap(lambda v: vjp(v.unsqueeze(0))[0])(u)

        parts = [leaf.detach()[wanted] for leaf in cut.values()]
        found, rows = torch.func.vmap(of_one, (0, 1), (0, 1))(parts, u[:, wanted])
        self._check_output(found.detach(), wanted)
        return {name: x.detach() for name, x in rows.items()}

    def _in_a_loop(self, u: Tensor, wanted: Tensor) -> Columns:
        problem, rows = self._problem, []
        for n in wanted.tolist():
            here = slice(n, n + 1)
            part = Batch(
                problem.batch.index, select_samples(problem.batch.X, here, u.shape[1]), None
            )
            with problem.on(part).recording("once") as (_, leaves, output):
                self._check_output(output, wanted.new_tensor([n]))
                inputs = {name: leaves[name] for name in self._space.names}
                rows.append(vjp_columns({"": output}, {"": u[:, here]}, inputs))
        return {name: torch.stack([row[name] for row in rows], 1) for name in self._space.names}

    def _check_output(self, found: Tensor, wanted: Tensor) -> None:
        expected = self._output[wanted]
        if found.shape != expected.shape or differs(found, expected, expected):
            raise ValueError("samples alone have other outputs.")

    def _check(self, found: Columns, u: Tensor, wanted: Tensor) -> None:
        """Compare with the graph of the whole batch, with another weight for each sample."""
        r = sample_weights(u.shape[1], u)
        some = torch.zeros_like(u)
        some[:, wanted] = (u * r.reshape(-1, *(1,) * (u.ndim - 2)))[:, wanted]
        truth = self._space.zeros(len(u))
        self._apply(some, truth)

        def total(x: Tensor) -> Tensor:
            return torch.einsum("vn...,n->v...", x, r[wanted].to(x))

        own = {name: total(x) for name, x in found.items()}
        summands = {name: total(x.abs()) for name, x in found.items()}
        dtype = self._output.dtype
        eps = torch.finfo(dtype).eps
        if disagreeing(self._space.names, own, summands, truth, dtype, eps):
            raise ValueError("samples alone have other gradients.")
