"""Sums over the data of several processes.

All ranks call the methods of ``Ranks`` that communicate, in the same order. Between two such calls
each rank is free in how it computes: what it keeps, what it computes again.
A rank with an error still takes part in the next communication, so that no other rank hangs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import blake2b
from math import fsum
from typing import Any

import torch
from torch import Tensor, distributed, nn

from curvlinops.support.columns import Columns, flat
from curvlinops.support.digest import checksum, digest
from curvlinops.support.torch_internals import distributed_tensors
from curvlinops.team.messages import gather_objects, listed, sending_errors

#: If this environment variable is set, products compare parameters in ``linearized()``, too.
COMPARES_ALWAYS = "CURVLINOPS_COMPARE_PROCESSES"


@dataclass
class Task:
    """A pass of all ranks over their data.

    Attributes:
        columns: The first rank's vectors.
        term_size: The length of the outputs' last axis, if all ranks must agree on it.
        totals: Numbers by name: those of this rank inside of the context, then their sums over
            ranks.
    """

    columns: Columns | None = None
    term_size: int | None = None
    totals: dict[str, Tensor | float] = field(default_factory=lambda: defaultdict(float))


class Ranks:
    """The processes over which the data is distributed.

    Args:
        group: A ``torch.distributed.ProcessGroup``; ``None`` for a single process, for which all
            methods return their arguments.
        shards: The parameters of the model that are sharded over processes, which are gathered
            inside of ``raise_on_all_ranks`` only.

    Attributes:
        size: The number of processes.
        rank: The rank of this process in the group.

    Raises:
        TypeError: If ``group`` is not a process group, or this process does not belong to it.
    """

    def __init__(self, group: Any = None, shards: Any = None):
        is_group = distributed.is_available() and isinstance(group, distributed.ProcessGroup)
        if group is not None and not is_group:
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup to which this process "
                f"belongs, such as torch.distributed.group.WORLD, got {group!r}."
            )
        self.group, self.shards = group, shards
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())

    def __deepcopy__(self, memo: dict) -> "Ranks":
        return self  # the processes stay the same

    def __getstate__(self) -> dict:
        if self.group is not None:
            raise TypeError(
                "An operator with a process_group cannot be pickled: other processes have parts of "
                "its data. To save Kronecker factors, use save() or state_dict()."
            )
        return vars(self)

    def number(self, index: int) -> int:
        """Return the global number of this rank's batch; batches alternate between ranks."""
        return index * self.size + self.rank

    # --- synchronization

    @contextmanager
    def synchronized(
        self,
        risk: Any,
        task: str,
        columns: Columns | None = None,
        with_values: bool = True,
        **details: Any,
    ) -> Iterator[Task]:
        """Check that all ranks compute the same thing, then pass over the data of each rank.

        Before the pass, ranks gather checksums of all that is compared, after it numbers to add up.

        Args:
            risk: The ``EmpiricalRisk``. Its parameters must be the same on all ranks.
            task: The name of the computation.
            columns: The vectors that are multiplied.
            with_values: Whether the values of parameters and buffers are compared, too.
            **details: Further values whose ``repr`` must be the same on all ranks.

        Yields:
            The task, with the first rank's columns.

        Raises:
            ValueError: If the ranks do different things, or parameters or vectors differ.
            RuntimeError: If there is an error on another rank.
        """
        current = Task(columns)
        if self.size == 1:
            yield current
            return
        with sending_errors(self.gather_objects):
            description = _description(risk, task, columns) | details
            checksums = checksums_of(risk) if with_values else {}
            vectors = _joined(columns) if columns else None
            if not self._compare(description, checksums, vectors):
                current.columns = self.first_of(columns, self.group)
            with self.raise_on_all_ranks(current):
                yield current
                current.term_size = risk.term_size

    def sending(self) -> AbstractContextManager[None]:
        """Return a context whose errors are sent to the other ranks, which gather objects next."""
        return nullcontext() if self.size == 1 else sending_errors(self.gather_objects)

    @contextmanager
    def raise_on_all_ranks(self, task: Task | None = None) -> Iterator[None]:
        """Raise an error on all ranks if there is one on any.

        Args:
            task: If given, the numbers of all ranks are added up, and the sizes of terms must
                agree.

        Raises:
            ValueError: If they do not.
            RuntimeError: If there is an error on another rank.
        """
        if self.size == 1:
            yield
            return
        with (
            nullcontext() if self.shards is None else self.shards.open(),
            sending_errors(self.gather_objects),
        ):
            yield
            if task is None:
                self.gather_objects(None)
                return
            own = {name: float(number) for name, number in task.totals.items()}
            sizes, numbers = zip(*self.gather_objects((task.term_size, own)), strict=True)
        for name, number in task.totals.items():
            total = fsum(each.get(name, 0.0) for each in numbers)
            task.totals[name] = (
                torch.tensor(total, dtype=torch.float64, device=number.device)
                if isinstance(number, Tensor)
                else total
            )
        if len({*sizes} - {None}) > 1:
            raise ValueError(
                "Outputs have last axes of different lengths, so that their mean is not defined. "
                f"Use reduction='sum', or data that agree. {listed(sizes, self.group)}"
            )

    def _compare(
        self, description: Mapping[str, Any], checksums: Mapping[str, int], vectors: Tensor | None
    ) -> bool:
        """Refuse to begin unless all ranks do the same, with the same parameters.

        Returns:
            Whether their vectors are the same, bit by bit.
        """
        texts = {key: repr(value) for key, value in description.items()}
        compared = blake2b(repr((texts, checksums)).encode(), digest_size=16).digest()
        number = None if vectors is None else digest(vectors)
        all_compared, numbers = zip(*self.gather_objects((compared, number)), strict=True)
        if len({*all_compared}) == 1:
            return all(number == numbers[0] for number in numbers)
        all_texts, all_checksums = zip(*self.gather_objects((texts, checksums)), strict=True)
        for key in _different(all_texts):
            raise ValueError(
                f"All ranks must do the same, but they differ in {key}. "
                f"{listed((each.get(key) for each in all_texts), self.group)}"
            )
        if names := _different(all_checksums):
            raise ValueError(
                f"Ranks have different values of {', '.join(names)}. Give all the same, e.g. with "
                "torch.distributed.broadcast, or as DistributedDataParallel does."
            )
        raise AssertionError("Ranks differ in nothing. Report this as a bug.")

    # --- collectives

    def _settle(self) -> None:
        """Take part in gathers of shards until all ranks are here, before they communicate."""
        if self.shards is not None:
            self.shards.settle()

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks.

        Raises:
            RuntimeError: If there was an error on another rank, see ``raise_on_all_ranks``.
        """
        if self.size == 1:
            return [value]
        self._settle()
        return gather_objects(value, self.group)

    def largest(self, number: int) -> int:
        """Return the largest of a number on each rank."""
        return max(self.gather_objects(number))

    def add(self, tensor: Tensor, to: int | None = None) -> Tensor:
        """Add all ranks' tensors to each other, in place if they are contiguous; return the sum.

        Args:
            tensor: This rank's tensor.
            to: The rank that gets the sum; others get meaningless numbers. Default: all get it.
        """
        if self.size == 1:
            return tensor
        self._settle()
        tensor = tensor.contiguous()
        if to is None:
            distributed.all_reduce(tensor, group=self.group)
        else:
            distributed.reduce(tensor, group=self.group, group_dst=to)
        return tensor

    def add_all(
        self,
        tensors: Mapping[Any, Tensor],
        device: torch.device,
        holders: Callable[[Any], Sequence[int]] | None = None,
    ) -> dict[Any, Tensor]:
        """Return the sums over ranks of tensors by name; a missing tensor counts as zero.

        Args:
            tensors: The tensors of this rank, which are overwritten.
            device: The device of missing ones.
            holders: Returns the ranks that get a sum. Default: all do.
        """
        if self.size == 1:
            return dict(tensors)
        kinds: dict[Any, tuple] = {}
        for other in self.gather_objects({key: (x.shape, x.dtype) for key, x in tensors.items()}):
            kinds = other | kinds
        with self.raise_on_all_ranks():
            parts = {
                key: torch.zeros(shape, dtype=dtype, device=device)
                if (tensor := tensors.get(key)) is None
                else tensor.contiguous()
                for key, (shape, dtype) in kinds.items()
            }
        sums = {}
        for key, part in parts.items():
            ranks = range(self.size) if holders is None else holders(key)
            total = self.add(part, to=ranks[0] if len(ranks) == 1 else None)
            if self.rank in ranks:
                sums[key] = total
        return sums

    def exchange(self, tensors: Mapping[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
        """Return the tensors of all ranks by key; one tensor under several keys stays one."""
        memory = {key: (x.data_ptr(), x.shape, x.stride(), x.dtype) for key, x in tensors.items()}
        distinct = {memory[key]: x for key, x in tensors.items()}
        place = {where: i for i, where in enumerate(distinct)}
        own = [(x.shape, x.dtype) for x in distinct.values()]
        places = {key: place[where] for key, where in memory.items()}
        kinds, keys = zip(*self.gather_objects((own, places)), strict=True)
        with self.raise_on_all_ranks():
            parts = [
                [x.contiguous() for x in distinct.values()]
                if rank == self.rank
                else [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in of_rank]
                for rank, of_rank in enumerate(kinds)
            ]
        for rank, of_rank in enumerate(parts):
            for part in of_rank:
                self.broadcast(part, rank)
        return {key: parts[rank][i] for rank, x in enumerate(keys) for key, i in x.items()}

    def broadcast(self, tensor: Tensor, source: int) -> Tensor:
        """Return a rank's tensor, written to this rank's, which must be contiguous."""
        if self.size > 1:
            self._settle()
            distributed.broadcast(tensor, group=self.group, group_src=source)
        return tensor

    def agreed(self, columns: Columns) -> Columns:
        """Return the first rank's columns.

        Raises:
            ValueError: If this rank's do not agree with them to rounding.
            RuntimeError: If another rank's do not.
        """
        numbers = self.gather_objects(digest(_joined(columns)))
        are_same = all(number == numbers[0] for number in numbers)
        return columns if are_same else self.first_of(columns, self.group)

    def first_of(self, columns: Columns, group: Any) -> Columns:
        """Return the columns of the first one of a group of some ranks, see ``agreed``.

        All ranks call it, each with its group.
        """
        first = (own := _joined(columns)).clone()
        self._settle()
        distributed.broadcast(first, group=group, group_src=0)
        difference, size = (
            torch.linalg.vector_norm(x, dim=1, dtype=torch.float64) for x in (own - first, first)
        )
        with self.raise_on_all_ranks():
            if not bool((difference <= torch.finfo(own.dtype).eps ** 0.5 * size).all()):
                raise ValueError(
                    "The vectors are not those of the first rank, which all multiply. Give solvers "
                    "and estimators the same start on all ranks, by v0, seed or rng."
                )
        parts = first.split([flat(column).shape[1] for column in columns.values()], 1)
        return {n: part.view_as(columns[n]) for n, part in zip(columns, parts, strict=True)}


def peers_of(ranks: Ranks) -> Ranks:
    """Return the processes that evaluate the model together: all, or those with its shards.

    Copies of shards count, too.
    """
    is_alone = ranks.group is None and ranks.shards is not None
    return Ranks(ranks.shards.members, ranks.shards) if is_alone else ranks


# --- what must be the same on all ranks


def _joined(columns: Columns) -> Tensor:
    return torch.cat([flat(column) for column in columns.values()], 1)


def _different(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys under which ranks have different values."""
    reports = list(reports)
    keys = dict.fromkeys(key for report in reports for key in report)
    return [key for key in keys if len({report.get(key) for report in reports}) > 1]


def _description(risk: Any, task: str, columns: Columns | None) -> dict[str, Any]:
    """Return the operation, and the shapes and dtypes of its parameters and vectors."""
    params, vectors = risk.model.params, columns or {}
    return {
        "operation": f"{risk.name}.{task}",
        "loss": None if risk.loss is None else risk.loss.description,
        **{f"parameter '{n}'": (tuple(x.shape), x.dtype) for n, x in params.items()},
        **{f"vectors for '{n}'": tuple(x.shape) for n, x in vectors.items()},
        "the order of parameters": list(params),
    }


def checksums_of(risk: Any) -> dict[str, int]:
    """Return checksums of parameters and buffers, frozen ones included, sharded ones not."""
    params, sharded = risk.model.params, set(risk.model.sharded)
    tensors = {name: x for name, x in params.items() if name not in sharded}
    replaced = set(map(id, params.values()))
    modules = [*risk.model.roots, getattr(risk.loss, "module", None)]
    for number, module in enumerate(x for x in modules if isinstance(x, nn.Module)):
        for name, x in module.state_dict(keep_vars=True).items():
            is_local = isinstance(x, Tensor) and not isinstance(x, distributed_tensors())
            is_dense = is_local and x.is_floating_point() and not x.is_sparse
            if is_dense and id(x) not in replaced and name not in params:
                tensors[f"{name} of module {number} (frozen parameter or buffer)"] = x
    if not tensors:
        return {}
    sums = torch.stack([checksum(x).to(risk.space.device) for x in tensors.values()])
    return dict(zip(tensors, sums.tolist(), strict=True))
