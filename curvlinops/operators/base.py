"""The base class of all operators over a data set."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, fields
from functools import cache, partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.linear import Linear
from curvlinops.autodiff.model import wrap_model
from curvlinops.autodiff.parameters import check_complete, split_blocks
from curvlinops.autodiff.used_modules import find_modules
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import ParameterSpace
from curvlinops.losses import Loss, wrap_loss
from curvlinops.risk.agreement import description
from curvlinops.risk.batch_problem import NO_DERIVATIVE, OVERFLOW, BatchProblem
from curvlinops.risk.checks.coupling import report_batch_statistics
from curvlinops.risk.checks.first_batch import check_first_batch
from curvlinops.risk.data import Batches
from curvlinops.risk.empirical_risk import EmpiricalRisk
from curvlinops.risk.linearization import (
    Build,
    FreshProducts,
    Linearization,
    budget_of,
    check_cache,
)
from curvlinops.support.arguments import as_device, check_count, check_flag
from curvlinops.support.torch_modes import exclusive, in_default_modes
from curvlinops.team.team import Team, Totals, team_of


@dataclass(eq=False, repr=False)
class DataLinearOperator(TorchLinearOperator):
    """A linear operator defined by a model, a loss, and all of a data set.

    Subclasses with options of their own are dataclasses, too, with a field for each of these.

    Args:
        model_func: The model. A ``torch.nn.Module``; or, with dictionary ``params``, a function
            ``(params, X) -> output``; or, with a list ``params``, a function ``X -> output`` that
            uses the very tensors of this list. The output is one tensor, batch axis first.
        loss_func: The loss: a PyTorch loss module, or a function ``(output, target) -> scalar``
            that adds up or averages over samples, which is checked on the first batch. If ``data``
            has the length one, Hessian and GGN take any function of the batch.
        params: The D parameters with respect to which the model is differentiated: a list of
            tensors, or a dictionary from names to tensors (whose values may differ from the
            module's).
        data: An iterable over pairs ``(X, y)``, the same in each pass. X may be any nesting of
            dictionaries, lists, tuples and dataclasses with tensors; y, too, or ``None``.
        progressbar: Whether to show a progress bar during passes over the data.
        check_deterministic: Whether to check at construction, on the first batch, that data and
            loss repeat (and the gradient, where that does not follow), and that samples do not
            interact in the model. They may interact if one batch is all data, except in operators
            that need single samples. In products, the derivatives of custom autograd functions are
            checked, too (see the page Conventions).
        num_data: Number of samples in ``data``, checked in each pass if given.
        block_sizes: Number of parameters (entries of ``params``) in each diagonal block. Default:
            one block, the full matrix.
        batch_size_fn: Number of samples of an X. Default: length of the tensors' first axis. For
            gradients of samples, flattened outputs ``[N * T, C]`` need it.
        reduction: For a plain function as loss: ``"sum"`` or ``"mean"`` over samples. Default: the
            reduction of the loss module.
        cache: The memory for what products share inside of ``linearized()``: a number of bytes,
            ``"none"``, or ``"auto"``: 2 GiB on the CPU, a quarter of the free memory of a GPU.
        chunk_size: Number of columns in one backward pass. Default: as many as need 64 MiB
            (512 MiB on a GPU).
        process_group: A ``torch.distributed.ProcessGroup``. Each process has a part of the data,
            and all multiply together. Default: one process with all data. Sharded models need it
            (see the page Several processes).

    Attributes:
        risk: Model, loss and data as the empirical risk L.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument does not fit the others; the message says which and why.
        RuntimeError: If data or model are not deterministic; the message names the cause.
    """

    #: Whether the quantity is defined sample by sample, so that samples must not be coupled.
    _per_sample = False
    #: Whether the quantity is a sum over data, so that several processes may have parts of it.
    _adds_data = True

    model_func: nn.Module | Callable
    loss_func: nn.Module | Callable | None
    params: Iterable[Tensor] | Mapping[str, Tensor]
    data: Iterable[tuple[Any, Any]]
    progressbar: bool = False
    check_deterministic: bool = True
    num_data: int | None = None
    block_sizes: list[int] | None = None
    batch_size_fn: Callable[[Any], int] | None = None
    _: KW_ONLY
    reduction: str | None = None
    cache: str | int = "auto"
    chunk_size: int | None = None
    process_group: "torch.distributed.ProcessGroup | None" = None

    @in_default_modes
    def __post_init__(self) -> None:
        """Check the arguments, and the first batch."""
        with team_of(self.process_group).raise_on_all_ranks(), exclusive():
            self.cache = check_cache(self.cache)
            if self.chunk_size is not None:
                self.chunk_size = check_count("chunk_size", self.chunk_size)
            if isinstance(self.params, Iterator):  # it yields its tensors only once
                self.params = list(self.params)
            model = wrap_model(self.model_func, self.params)
        ranks = team_of(self.process_group, model.shards)
        with ranks.peers.raise_on_all_ranks(), exclusive():
            self.risk = EmpiricalRisk(
                model,
                self._wrap_loss(self.loss_func, self.reduction),
                Batches(self.data, self.batch_size_fn, self.num_data),
                self.progressbar,
                type(self).__name__,
                ranks,
                self.check_deterministic,
                self._per_sample,
            )
            # data first: users who forget the brackets pass X and y in their place
            check_flag("progressbar", self.progressbar)
            check_flag("check_deterministic", self.check_deterministic)
            self._blocks = split_blocks(self.risk.space.names, self.block_sizes)
            self._fresh = FreshProducts()
            self._linearizations = dict[int, Linearization]()  # by thread
            self._first_output: Tensor | None = None  # a tensor like it, if it was checked
            self._check_shards()
            if self.num_data is not None:
                check_count("num_data", self.num_data, at_least=0)
            self._check_options()
        with self._together("__init__", with_values=True, blocks=self._blocks), exclusive():
            self._check_model()
        super().__init__(*self._spaces())

    # --- methods of subclasses

    def _check_options(self) -> None:
        """Check the options of the subclass, before the model is evaluated.

        Options are checked here only: model, loss, parameters and data are known.
        """

    def _linearize(self, problem: BatchProblem, single: bool) -> Linear:
        """Do all on a batch that does not depend on vectors; return a function of ``V, out``.

        If there is a single product with one column, the function may free its graph.
        """
        raise NotImplementedError

    def _wrap_loss(self, loss_func: Any, reduction: str | None) -> Loss | None:
        return wrap_loss(loss_func, reduction)

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        """Return domain, codomain, and whether the operator is self-adjoint."""
        return self.risk.space, self.risk.space, True

    # --- products

    @property
    def _begins_with_gather(self) -> bool:
        return not self.risk.model.shards

    @property
    def _team(self) -> Team:
        return self.risk.peers.in_step

    def _apply(self, columns: Tensor) -> Tensor:
        num_columns, domain, codomain = len(columns), self.domain, self.codomain
        with self.risk.ranks.sending():
            out = codomain.zeros(num_columns)
        V, sums, names = domain.views(columns), codomain.views(out), list(codomain.shapes)
        blocks = (
            ({n: V[n] for n in block if n in V}, {n: sums[n] for n in block if n in sums})
            for block in self._blocks
        )
        blocks = [(inputs, outputs) for inputs, outputs in blocks if inputs and outputs]
        together = self._together("matmat", columns, wanted=names)
        with self.risk.adding.summing(V, out, codomain), together as totals:
            if num_columns == 0 or not blocks:
                return out
            build = partial(self._prepare, num_products=num_columns * len(blocks))
            with self._built(build) as built:
                for linear in built:
                    weights = [linear.apply(inputs, outputs) for inputs, outputs in blocks]
                    totals["weight"] += weights[-1]
            if codomain.in_parts:
                totals |= self.risk.tangents
        if not self.risk.has_right_tangents(totals, columns, out):
            return self._apply(columns)  # by backward passes
        out *= self.risk.scale(totals["weight"])
        self._check_finite(codomain.not_finite(out))
        return out

    def _part(self, rows: ParameterSpace, columns: ParameterSpace) -> "DataLinearOperator":
        """Return an operator that differentiates with respect to some of the parameters only.

        All else, such as what is kept inside of ``linearized()``, it shares with this one.
        """
        part = object.__new__(type(self))
        vars(part).update(vars(self))
        part.domain, part.codomain, part.shape = columns, rows, (rows.dim, columns.dim)
        part.self_adjoint = rows.names == columns.names
        return part

    def _prepare(self, problem: BatchProblem, is_kept: bool, num_products: int) -> Linear:
        """Do all on a batch that does not depend on the vectors, for a number of products."""
        single = num_products == 1 and not is_kept and problem.model.substitutable
        return self._linearize(problem, single)

    @contextmanager
    def _built(self, build: Build, task: str = "matmat") -> Iterator[Iterator[Linear]]:
        """Yield what is built of each batch for a task; inside of ``linearized()`` what is kept."""
        shared = self._shared
        if shared is None:
            self._fresh.note(type(self).__name__, self.risk.model.params.values())
            with self._batches(task) as batches:
                yield (build(problem, False) for problem in batches)
            return
        with exclusive():
            shared.check()
            if (kept := shared.all(task)) is not None:
                yield self.risk.model.shards.each(kept, task)
                return
            with self._batches(task) as batches:
                yield shared.each(task, batches, build)

    @property
    def _shared(self) -> Linearization | None:
        """What products share in this thread; ``None`` outside of ``linearized()``."""
        return self._linearizations.get(get_ident())

    @contextmanager
    def linearized(self) -> Iterator[None]:
        """Take model, loss and data as constant, so that products share graphs; see ``cache``.

        The first product keeps all work that does not depend on its vectors, batch by batch. Once
        all batches are kept, no data is read, moved or compared. The memory is freed at the end.
        The context may be entered again inside, and belongs to the thread that enters it.

        Raises:
            RuntimeError: In products inside, if PyTorch tells that a parameter or buffer was
                written to. Other changes of model, loss and data are not noticed.
        """
        if self._shared is not None:
            yield
            return
        self._linearizations[get_ident()] = shared = self._linearization()
        try:
            yield
        finally:
            del self._linearizations[get_ident()]
            shared.close()

    @in_default_modes
    def _linearization(self) -> Linearization:
        several = self._team.size > 1  # if not, processes may be in different steps of a pass
        comparing = self._together("linearized", with_values=True) if several else nullcontext()
        with self._team.raise_on_all_ranks(), comparing, exclusive():
            self.risk.model.refresh()
            tensors = self.risk.tensors()
        return Linearization(type(self).__name__, budget_of(self.cache, self.device), tensors)

    @contextmanager
    def _batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        """Pass over the data with model and loss as they are now, see ``EmpiricalRisk``."""
        with exclusive():
            self.risk.use(self._wrap_loss(self.loss_func, self.reduction))
            if self.risk.facts.train_flags != self.risk.model.train_flags:
                self._check_model()
            with self.risk.batches(description, data) as batches:
                yield batches

    def _together(
        self,
        task: str,
        columns: Tensor | None = None,
        with_values: bool = False,
        **details: Any,
    ) -> AbstractContextManager[Totals]:
        """Let all processes pass over their data, see ``Team.task``."""
        self.risk.term_size = None
        self.risk.tangents = {"number": 0, "inner": 0.0, "error": 0.0}

        def describe() -> dict[str, Any]:
            same = description(self.risk, task, columns, with_values)
            own = {f"option '{name}'": getattr(self, name) for name in _own_arguments(type(self))}
            options = {name: x for name, x in own.items() if isinstance(x, int | float | str)}
            return same | details | options

        space = None if columns is None else self.domain
        return self.risk.ranks.task(describe, columns, space)

    def _description(self) -> list[str]:
        loss = self.risk.loss
        about = [] if loss is None else [loss.name, f"reduction={loss.reduction!r}"]
        sizes = [len(block) for block in self._blocks]
        blocks = [f"block_sizes={sizes}"] if len(sizes) > 1 else []
        size, ranks = self.risk.data.describe(), self.risk.ranks
        if ranks.size > 1:
            size = f"{size} on rank {ranks.rank} of {ranks.size}"
        return [*about, size, *blocks]

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"cache": self.cache}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the process group, which the ranks have, and can copy."""
        return vars(self) | {"process_group": None, "_linearizations": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.process_group = self.risk.ranks.group

    # --- beyond products

    @in_default_modes
    def gradient_and_loss(self) -> tuple[list[Tensor] | dict[str, Tensor], Tensor]:
        """Return the gradient of L and its value.

        Returns:
            The gradient, a list or dictionary of tensors as ``params`` is, and a scalar tensor.
            Gradients of sharded parameters are DTensors, as these are.
        """
        if self.risk.loss is None:
            raise ValueError(f"{type(self).__name__} has no loss.")
        with exclusive():
            with self.risk.ranks.sending():
                self.risk.use(self._wrap_loss(self.loss_func, self.reduction))
            columns, loss = self.risk.gradient_and_loss()
        gradient = self.risk.space.wholes({name: x[0] for name, x in columns.items()})
        return self.risk.model.pack(gradient), loss

    def to_device(self, device: torch.device | str) -> "DataLinearOperator":
        """Move the operator itself, and the user's module and loss, to another device.

        Operators that were built from it, such as sums, do not follow: build them again.
        """
        if (shared := self._shared) is not None:
            shared.close()  # kept graphs are on the other device
        with exclusive():
            self.risk.to(device := as_device(device))
        self.domain, self.codomain = self.domain.to(device), self.codomain.to(device)
        return self

    # --- checks

    def _check_shards(self) -> None:
        """Refuse a sharded model without the group of its processes, or a sharded loss."""
        if not (shards := self.risk.model.shards):
            return
        if self._adds_data:
            shards.check_processes(self.process_group)
        for root, *_ in find_modules(self.loss_func):
            if root is not self.risk.model.module:
                check_complete(dict(root.named_parameters()))

    def _check_model(self) -> None:
        """Check the model with its present train flags."""
        self.risk.invalidate()
        self.risk.model.shards.check_training()
        singles_of = type(self).__name__ if self._per_sample else None
        report_batch_statistics(self.risk.model.roots, singles_of)
        if self.check_deterministic:
            self._first_output = check_first_batch(self.risk)
        self.risk.facts.train_flags = self.risk.model.train_flags

    def _check_finite(self, name: str | None) -> None:
        """Refuse a product that is not finite, given the name of such a tensor, if there is one."""
        if not self.risk.any(name is not None):
            return
        if self.risk.loss is not None and not self.risk.model.shards.is_open:
            self.risk.gradient_and_loss()  # names the batch, if it is to blame
        where = f" in parameter '{name}'" if name else ""
        raise NotFiniteError(
            f"The product with {type(self).__name__} is not finite{where}, though the vector is: "
            f"{NO_DERIVATIVE}, or {OVERFLOW}."
        )


class NotFiniteError(ValueError):
    """A product is not finite, though the vector is, and the loss with its gradient."""


@cache
def _own_arguments(cls: type[DataLinearOperator]) -> tuple[str, ...]:
    """Return the names of a class's own options, without the seed."""
    shared = {"seed", *(field.name for field in fields(DataLinearOperator))}
    return tuple(field.name for field in fields(cls) if field.name not in shared)
