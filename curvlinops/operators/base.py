"""The base class of all operators over a data set."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from curvlinops.autodiff.backward import Apply
from curvlinops.autodiff.mode_selection import (
    Mode,
    adjoint_of_jacobian,
    allowed_modes,
    choose,
)
from curvlinops.autodiff.model import train_flags, wrap_model
from curvlinops.autodiff.modes import Reverse
from curvlinops.autodiff.parameters import split_blocks
from curvlinops.linear_operator.operator import TorchLinearOperator
from curvlinops.linear_operator.space import Columns, ParameterSpace, not_finite
from curvlinops.losses import Loss, wrap_loss
from curvlinops.risk.data import Batches
from curvlinops.risk.determinism import check_repeatable
from curvlinops.risk.distributed import Ranks
from curvlinops.risk.empirical_risk import OVERFLOW, BatchProblem, EmpiricalRisk
from curvlinops.risk.graph_cache import GraphCache, check_cache
from curvlinops.risk.sample_coupling import report_batch_statistics
from curvlinops.support.arguments import as_device, check_choice, check_count
from curvlinops.support.rng import preserved_rng
from curvlinops.support.torch_modes import exclusive, in_default_modes


@dataclass(eq=False, repr=False)
class DataLinearOperator(TorchLinearOperator):
    """A linear operator defined by a model, a loss, and all of a data set.

    Subclasses with options of their own are dataclasses, too, with a field for each of these.

    Args:
        model_func: The model. A ``torch.nn.Module``; or, with dictionary ``params``, a function
            ``(params, X) -> output``; or, with a list ``params``, a function ``X -> output`` that
            uses those very tensors. The output is one tensor, batch axis first.
        loss_func: The loss: a PyTorch loss module, or a function ``(output, target) -> scalar``
            that adds up or averages over samples.
        params: The D parameters with respect to which the model is differentiated: a list of
            tensors, or a dictionary from names to tensors (whose values may differ from the
            module's).
        data: An iterable over pairs ``(X, y)``, the same in each pass. X may be any nesting of
            dictionaries, lists, tuples and dataclasses with tensors; y, too, or ``None``.
        progressbar: Whether to show a progress bar during passes over the data. Solvers show one
            bar for all of their products, with the rate and the residual.
        check_deterministic: Whether to check at construction, by two passes over the data, that
            data, loss and gradient repeat, and on each batch that a loss of no known kind adds up
            over samples. Operators of single samples also check that the samples of a batch do not
            interact.
        num_data: Number of samples in ``data``, checked in each pass if given.
        block_sizes: Number of parameters (entries of ``params``) in each diagonal block. Default:
            one block, the full matrix.
        batch_size_fn: Number of samples of an X. Default: length of the tensors' first axis.
        reduction: For a plain function as loss: ``"sum"`` or ``"mean"`` over samples. Default: the
            reduction of the loss module.
        cache: The graphs that are kept between products, until model, parameters, loss or data
            change: ``"none"``, all (``"graph"``), or as many as fit into a number of bytes.
            ``"auto"`` keeps up to a quarter of the free memory (on the CPU at most 4 GiB), from the
            second product in a row. Kept graphs change the time, not the numbers.
        chunk_size: Number of columns in one backward pass. Default: as many as need 64 MiB
            (512 MiB on a GPU).
        autodiff: ``"forward"``, ``"reverse"``, or ``"auto"``: the faster one that passes a dot-test
            on the first batch. Later operators on the same model take the same mode.
        process_group: A ``torch.distributed.ProcessGroup``. Each process has a part of the data,
            and all multiply together. Default: one process with all data.

    Attributes:
        risk: Model, loss and data as the empirical risk L.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument does not fit the others; the message says which and why.
        RuntimeError: If data or model are not deterministic; the message names the cause.
    """

    #: Whether the quantity is defined sample by sample, so that samples must not be coupled.
    _per_sample = False

    #: Whether graphs are kept between products, so that changes of the model have to be noticed.
    _keeps_graphs = True

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
    autodiff: str = "auto"
    process_group: "torch.distributed.ProcessGroup | None" = None

    def __post_init__(self) -> None:
        """Check the arguments, and the first batches."""
        self.cache = check_cache(self.cache, self.autodiff)
        name = type(self).__name__
        check_choice("autodiff", self.autodiff, ("auto", "forward", "reverse"))
        if self.chunk_size is not None:
            self.chunk_size = check_count("chunk_size", self.chunk_size)
        if isinstance(self.params, Iterator):  # it yields its tensors only once
            self.params = list(self.params)
        with (ranks := Ranks(self.process_group)).raise_on_all_ranks(), exclusive():
            model = wrap_model(self.model_func, self.params)
            loss = self._wrap_loss(self.loss_func, self.reduction)
            batches = Batches(self.data, self.batch_size_fn, self.num_data)
            self.risk = EmpiricalRisk(model, loss, batches, self.progressbar, name, ranks)
            self._blocks = split_blocks(self.risk.space.names, self.block_sizes)
        del self.process_group  # the ranks have it, and can be copied
        self._modes = allowed_modes(model, self.autodiff, Reverse(self.chunk_size))
        self._cache = GraphCache(self.cache if self._keeps_graphs else "none", name)
        self._checked = set[tuple[bool, ...]]()
        with ranks.synchronized(self.risk, "__init__", blocks=self._blocks), exclusive():
            self._check_model()
        super().__init__(*self._spaces())

    # --- what a subclass says

    def _linearize(self, problem: BatchProblem, mode: Mode) -> Apply:
        """Do all on a batch that does not depend on the vectors; return what does."""
        raise NotImplementedError

    def _wrap_loss(self, loss_func: Any, reduction: str | None) -> Loss | None:
        return wrap_loss(loss_func, reduction)

    def _spaces(self) -> tuple[ParameterSpace, ParameterSpace, bool]:
        """Return domain, codomain, and whether the operator is self-adjoint."""
        return self.risk.space, self.risk.space, True

    def _choose(self, problem: BatchProblem, many: bool) -> tuple[Mode, bool]:
        """Choose the mode for one or for many products with the same graph, see ``choose``.

        A single Jacobian product is cheaper in forward mode, further ones are in reverse mode.
        """
        modes = self._modes if many else self._modes[::-1]

        def only_terms(output: Tensor) -> tuple[None, Tensor]:
            return None, problem.terms(output)

        return choose(modes, adjoint_of_jacobian, problem, only_terms)

    # --- products

    def _apply(self, columns: Columns) -> Columns:
        return self._sum(columns, self.space)

    def _apply_restricted(self, columns: Columns, names: list[str]) -> Columns:
        return self._sum(columns, self.space.restricted(names))

    def _sum(self, columns: Columns, codomain: ParameterSpace) -> Columns:
        """Multiply some tensors of vectors, for some tensors of the product."""
        num_columns = next(iter(columns.values())).shape[0]
        flat = codomain.empty(num_columns).zero_()
        out, names = codomain.split(flat), codomain.names
        both = (([n for n in b if n in columns], [n for n in b if n in out]) for b in self._blocks)
        both = [(inputs, outputs) for inputs, outputs in both if inputs and outputs]
        if num_columns == 0 or not both:
            return out
        total, ranks = 0.0, self.risk.ranks
        with (
            self._together("matmat", columns, wanted=names) as columns,
            self._batches("matmat") as batches,
        ):
            for problem in batches:
                apply = self._prepare(problem, num_columns * len(both))
                for inputs, outputs in both:
                    V, product = {n: columns[n] for n in inputs}, {n: out[n] for n in outputs}
                    terms = apply(V, product)
                total = total + terms
        flat = ranks.add(flat)
        flat *= self.risk.scale(ranks.total(total))
        self._check_finite(out, flat)
        return out

    def _prepare(self, problem: BatchProblem, num_products: int) -> Apply:
        """Linearize on a batch for a number of products, unless that is kept from before."""
        key = ("", problem.batch.index)
        if (kept := self._cache.get(key, problem.batch)) is not None:
            return kept
        keeps = self._cache.wants(key)
        mode = self._mode_for(problem, many=self._are_many(num_products) or keeps)
        if not isinstance(mode, Reverse):  # forward mode has no graph
            return self._linearize(problem, mode)
        mode = replace(mode, once=num_products == 1 and not keeps and problem.can_substitute)
        return self._keep(problem, lambda own: self._linearize(own, mode))

    def _are_many(self, num_products: int) -> bool:
        """Return whether the graph of a backward pass pays for a number of products."""
        return num_products > 1

    def _keep(
        self, problem: BatchProblem, build: Callable[[BatchProblem], Any], kind: str = ""
    ) -> Any:
        """Return the result of ``build`` for a batch, kept from an earlier product if possible."""
        key = (kind, problem.batch.index)
        return self._cache.get_or_build(key, problem.batch, lambda own: build(problem.on(own)))

    @contextmanager
    def _batches(
        self, description: str, data: Batches | None = None
    ) -> Iterator[Iterator[BatchProblem]]:
        """Pass over the data with what is kept, see ``EmpiricalRisk.batches``."""
        with exclusive():
            self._follow_changes()
            with self.risk.batches(description, data) as batches:
                yield batches

    def _follow_changes(self) -> None:
        self.risk.model.follow()
        try:
            changed = self._cache.check(self._dependencies(), self.device)
            if changed is None:
                changed = self._flags != train_flags(self.risk.model.roots)
            if changed:
                self._reconsider()
        except Exception:  # the next product shall meet it, too
            self._forget_changes()
            raise

    def _forget_changes(self) -> None:
        """Look at model and loss again at the next product; free what is kept."""
        self._cache.clear()
        self._flags = None

    def _reconsider(self) -> None:
        """Draw conclusions about model and loss again, after something in them has changed."""
        self.risk.reconsider(self._wrap_loss(self.loss_func, self.reduction))
        self._check_model()

    def _mode_for(self, problem: BatchProblem, many: bool) -> Mode:
        """Return the mode for one or for many products with one batch's graph."""
        key = ("mode", type(self), self.autodiff, self.chunk_size, many)
        known = self.risk.shared(problem)
        signature, mode = known.get(key, (None, None))
        if signature == problem.facts.signature:
            return mode
        with preserved_rng():  # the product draws as if there was no test
            mode, was_tested = self._choose(problem, many)
        if was_tested:  # else another batch may tell
            known[key] = problem.facts.signature, mode
        return mode

    def _dependencies(self) -> list:
        """Return everything that products depend on, except for the data."""
        loss, model = [self.loss_func, self.reduction], self.risk.model
        if not self._cache.keeps:  # then it matters only how model and loss are understood
            return [*loss, *train_flags(model.roots)]
        options = self._settings().values()
        return [*loss, *model.dependencies(), self.chunk_size, self.autodiff, *options]

    def _settings(self) -> dict[str, Any]:
        """Return the operator's own options that are numbers or strings, by name."""
        options = ((name, getattr(self, name)) for name in _own_arguments(type(self)))
        return {name: x for name, x in options if isinstance(x, int | float | str)}

    def _together(self, task: str, columns: Columns | None = None, **details: Any) -> Any:
        """Return a context in which all ranks pass over their data, see ``Ranks``."""
        if self.risk.ranks.size == 1:
            return nullcontext(columns)
        options = self._settings() | {"seed": None}  # ranks never draw the same numbers
        return self.risk.ranks.synchronized(self.risk, task, columns, options=options, **details)

    def clear_cache(self) -> None:
        """Free the memory of the graphs that are kept, and look at model and loss again."""
        with exclusive():
            self._forget_changes()

    def _description(self) -> list[str]:
        loss = self.risk.loss
        about = [] if loss is None else [loss.name, f"reduction={loss.reduction!r}"]
        sizes = [len(block) for block in self._blocks]
        blocks = [f"block_sizes={sizes}"] if len(sizes) > 1 else []
        return [*about, self.risk.data.describe(), *blocks]

    def _arguments(self) -> dict[str, Any]:
        return super()._arguments() | {"cache": self.cache}

    # --- beyond products

    @in_default_modes
    def gradient_and_loss(self) -> tuple[list[Tensor] | dict[str, Tensor], Tensor]:
        """Return the gradient of L and its value.

        Returns:
            The gradient, a list or dictionary of tensors as ``params`` is, and a scalar tensor.
        """
        if self.risk.loss is None:
            raise ValueError(f"{type(self).__name__} has no loss.")
        with exclusive():
            self._follow_changes()
            columns, loss = self.risk.gradient_and_loss()
        return self.risk.model.pack({name: column[0] for name, column in columns.items()}), loss

    def to_device(self, device: torch.device | str) -> "DataLinearOperator":
        """Move the operator itself, and the user's module and loss, to another device.

        Operators made of it before, such as sums, do not follow: make them again.
        """
        self.clear_cache()
        self.risk.to(device := as_device(device))
        self.domain, self.codomain = self.domain.to(device), self.codomain.to(device)
        return self

    # --- checks

    def _check_model(self) -> None:
        """Check the model once for each combination of train flags."""
        flags = train_flags(self.risk.model.roots)
        if flags not in self._checked:
            singles_of = type(self).__name__ if self._per_sample else None
            report_batch_statistics(self.risk.model.roots, singles_of)
            if self.check_deterministic:
                check_repeatable(self.risk, self._per_sample)
            self._checked.add(flags)
        self._flags = flags

    def _check_finite(self, out: Columns, flat: Tensor | None = None) -> None:
        """Refuse a product that is not finite; ``flat`` has its numbers in one tensor."""
        if (name := not_finite(out, flat)) is None:
            return
        if self.risk.loss is not None:
            self.risk.gradient_and_loss()  # names the batch, if it is to blame
        where = f" in parameter '{name}'" if name else ""
        raise ValueError(
            f"The product with {type(self).__name__} is not finite{where}, though the vector is: a "
            f"derivative does not exist (norm or sqrt at zero?), or {OVERFLOW}."
        )


@functools.cache
def _own_arguments(cls: type[DataLinearOperator]) -> tuple[str, ...]:
    shared = {field.name for field in fields(DataLinearOperator)}
    return tuple(field.name for field in fields(cls) if field.name not in shared)
