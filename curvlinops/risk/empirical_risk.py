"""The empirical risk: model, loss, parameters and data; sums over all batches."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn
from tqdm import tqdm

from curvlinops.autodiff.model import Model
from curvlinops.linear_operator.sharded_space import space_of
from curvlinops.linear_operator.space import Columns, add
from curvlinops.losses.base import Loss
from curvlinops.risk.agreement import description
from curvlinops.risk.batch_problem import BatchProblem
from curvlinops.risk.data import Batch, Batches
from curvlinops.risk.derivatives import allowed_error, gradient
from curvlinops.risk.model_facts import ModelFacts, Rules, Seen, rules_of
from curvlinops.support.pytree import leaves
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_modes import exclusive
from curvlinops.team.team import Team, Totals


class EmpiricalRisk:
    """``L = c * sum_t l_t`` over all terms of all batches.

    It is the only place for iteration over data, normalization and progress. ``ranks`` are the
    processes that have other data of the same risk; ``peers`` of them evaluate the model together,
    and products of ``adding`` are added up. With ``checks``, custom autograd functions are
    compared; with ``per_sample``, the loss has to add up over samples, even if one batch is all
    data. In a pass, ``term_size`` is the length of the outputs' last axis, if batches must agree;
    ``tangents`` are sums over batches for ``has_right_tangents``.
    """

    def __init__(
        self,
        model: Model,
        loss: Loss | None,
        batches: Batches,
        progressbar: bool,
        name: str,
        ranks: Team,
        checks: bool,
        per_sample: bool,
    ):
        self.model, self.loss, self.data = model, loss, batches
        self.progressbar, self.name, self.ranks, self.checks = progressbar, name, ranks, checks
        self.per_sample, self.space = per_sample, space_of(model.params)
        self.peers, self.adding = ranks.peers, ranks.adding
        self.facts, self.term_size = ModelFacts(), None
        self.tangents: Totals = {}

    # --- facts about the model

    def invalidate(self) -> None:
        """Forget the facts about model and loss; ``Samples`` stay: a product cannot count rows."""
        if self.facts.rules is not None:
            self.facts.rules.forget()
        self.facts = ModelFacts()

    def use(self, loss: Loss | None) -> None:
        """Use the model as it is now, and a loss."""
        self.model.refresh()
        self.loss = loss
        self.set_loss_needs_graph(self.facts.loss_needs_graph)

    def set_loss_needs_graph(self, needs_graph: bool) -> None:
        """Note whether the loss needs the graph of the output, and tell the loss."""
        self.facts.loss_needs_graph = needs_graph
        if self.loss is not None:
            self.loss.needs_graph = needs_graph

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers of model and loss by name."""
        found = self.model.tensors()
        if self.loss is not None and isinstance(self.loss.module, nn.Module):
            module = self.loss.module
            own = (*module.named_parameters(), *module.named_buffers())
            found |= {f"{name} of the loss": tensor for name, tensor in own}
        return found

    def rules(self, batch: Batch) -> Rules:
        """Return the rules of the model's layers, for such batches and such a loss."""
        if self.facts.rules is None:
            tensors = [*self.model.params.values(), *leaves((batch.X, batch.y))]
            shapes = tuple(None if x.is_nested else x.shape for x in tensors)
            kinds = tuple((x.dtype, x.device, x.layout) for x in tensors)
            loss = None if self.loss is None else repr(self.loss.description)
            # functions call parameters by their numbers
            own = () if self.model.substitutable else tuple(map(id, self.model.params.values()))
            key = (self.model.train_flags, shapes, kinds, tuple(self.model.params), own, loss)
            self.facts.rules = rules_of(self.model.source, key)
        return self.facts.rules

    def has_right_tangents(self, totals: Totals, v: Tensor, Gv: Tensor) -> bool:
        """Compare ``<v, G v>`` of all processes with the sum of ``<J v, B J v>`` of all batches.

        If they differ, further products with the model do without forward mode, of which at least
        one tangent ``J v`` is wrong. ``G v`` is not normalized yet.
        """
        if not totals.get("number"):
            return True
        inner, *squares = (float(self.space.dots(x, y)) for x, y in ((v, Gv), (v, v), (Gv, Gv)))
        dtypes = self.model.shards.dtypes | {v.dtype}
        error = max(totals["error"], allowed_error(inner, prod(squares) ** 0.5, dtypes))
        is_right = abs(inner - totals["inner"]) <= error
        if not is_right:
            self.facts.rules.get(Seen).lacks_tangents = True
        return is_right

    def is_all_data(self, batch: Batch) -> bool:
        """Return whether a batch is all data, and its samples do not matter by themselves."""
        if self.per_sample or batch.index > 0 or self.ranks.size > 1:
            return False
        return self.data.length == 1

    # --- several processes

    def any(self, flag: bool) -> bool:
        """Return whether a flag is true in any process with parts of vectors.

        Where an error in one process is raised in all anyway, the flag is this process's own.
        """
        return flag if self.model.shards.is_open else self.space.any(flag)

    # --- passes over the data

    @contextmanager
    def batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        """Pass over the data, in a loop inside of a context. There are no other passes over data.

        Inside the context, no other thread evaluates models, PyTorch has its default modes, and
        the global random number generators are restored at the end. Errors name the batch.
        """
        data, device = data or self.data, self.space.device
        items = data.data
        if self.progressbar:
            items = tqdm(items, f"{self.name}.{description} on {device}", leave=False)
        current: Batch | None = None  # the batch that is in use
        self.term_size = None

        def problems() -> Iterator[BatchProblem]:
            nonlocal current
            for current in self.model.shards.each(data.iterate(items, device), description):
                yield BatchProblem(self, current)
                current = None

        with exclusive(), preserved_rng():  # loaders draw random numbers, too
            try:
                yield problems()
            except Exception as error:
                # e.g. numbers that are not finite may have led to wrong conclusions
                self.invalidate()
                if current is not None:
                    current.name_in(error, self.model.params.values())
                raise

    def scale(self, weight: Tensor | float) -> float:
        """Return ``c``, given the sum of the batches' weights; refuse a risk without terms."""
        if self.loss is None:
            return 1.0
        if float(weight) == 0.0:
            raise ValueError(
                "The data has no term: all targets are ignored, or all weights are zero. The "
                "empirical risk is not defined."
            )
        return 1.0 if self.loss.reduction == "sum" else 1.0 / float(weight)

    def gradient_and_loss(self) -> tuple[Columns, Tensor]:
        """Return gradient (one column) and value of ``L`` over all data, which are finite."""
        name, team = "gradient_and_loss", self.adding
        with team.sending():
            self.term_size, flat = None, self.space.zeros(1)
            total = self.space.views(flat)
        task = team.task(lambda: description(self, name))
        with (
            team.summing({}, flat, self.space),
            task as totals,
            self.batches(name) as batches,
        ):
            for problem in batches:
                value, columns, share = gradient(problem, problem.loss_sum)
                problem.check_finite(value, columns)
                totals["loss"] += value
                totals["weight"] += share
                add(total, slice(None), columns)
        loss = totals["loss"].to(value.dtype)
        scale = self.scale(totals["weight"])
        flat *= scale
        if self.model.shards.params:
            parameter = self.space.not_finite(flat)
            if self.any(parameter is not None):
                where = "" if parameter is None else f" in parameter '{parameter}'"
                raise ValueError(f"The gradient is not finite{where}, though the loss is.")
        return total, loss * scale

    def to(self, device: torch.device | str) -> None:
        """Move model, parameters and loss to another device."""
        self.model.to(device)
        if self.loss is not None:
            self.loss.to(device)
        self.space = space_of(self.model.params)
        self.invalidate()
