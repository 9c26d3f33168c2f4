"""Processes that compute together.

A product of several processes is a *task*: each passes over its own data, all say what they have
done, and with which vectors, and if these agree numbers are added up. Between two calls that
communicate each process is free in how it computes: what it keeps, what it computes again. A
process with an error still takes part in the next communication, so that no other process hangs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from hashlib import blake2b
from math import fsum
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from curvlinops.support.columns import Columns, flat
from curvlinops.support.digest import sketch
from curvlinops.team.messages import (
    empty_whole,
    gather_objects,
    gather_parts,
    listed,
    sending_errors,
)
from curvlinops.team.shards import WHOLE, Shards

#: Returns what all processes must have in common, by the name that a message gives it. ``None`` is
#: not known.
Describe = Callable[[], Mapping[str, Any]]

#: A number of Python.
Number = TypeVar("Number", int, float)

#: Numbers by name: those of this process inside of a task, then their sums over processes.
Totals = dict[str, Tensor | float]


def _together(method: Callable[..., Iterator[Any]]) -> Callable[..., AbstractContextManager[Any]]:
    """Make a context of a method; a process alone gets one that does nothing, with its totals."""
    context = contextmanager(method)

    @wraps(method)
    def enter(team: "Team", *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        if team.is_alone:
            return nullcontext(defaultdict(float))
        return context(team, *args, **kwargs)

    return enter


class Team:
    """Processes that compute together, each with a copy of the model, or one process alone.

    They may have whole parameters beside sharded ones, ``shards``. All call the methods that
    communicate, in the same order. Those of a process that ``is_alone``, and has all of the data,
    return what they are given.
    """

    def __init__(self, group: Any = None, shards: Shards = WHOLE):
        self.group, self.shards = group, shards
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        self.is_alone = group is None or (self.size == 1 and not shards.params)

    def __deepcopy__(self, memo: dict) -> "Team":
        return self  # the processes stay the same

    def __getstate__(self) -> dict:
        if self.group is not None:
            raise TypeError(
                "An operator with a process_group cannot be pickled: other processes have parts of "
                "its data. To save Kronecker factors, use save() or state_dict()."
            )
        return vars(self)

    # --- other teams

    @property
    def peers(self) -> "Team":
        """The processes that evaluate the model together: all, or those with its shards.

        Copies of shards count, too.
        """
        has_no_group = self.group is None and bool(self.shards)
        return team_of(self.shards.members, self.shards) if has_no_group else self

    @property
    def adding(self) -> "Team":
        """The processes whose products are added up: with sharded vectors, all peers."""
        return self.peers if self.shards.params else self

    @property
    def in_step(self) -> "Team":
        """The processes that do the same at the same time: each is alone while it gathers."""
        if self.is_alone:
            return self
        if self.shards.is_open:
            return ALONE
        return team_of(self.group) if self.shards else self

    def number(self, index: int) -> int:
        """Return the number of this process's batch among those of all, which alternate."""
        return index * self.size + self.rank

    # --- errors

    def sending(self) -> AbstractContextManager[None]:
        """Return a context whose errors are sent to the others, which gather objects next."""
        return nullcontext() if self.is_alone else sending_errors(self.gather_objects)

    @_together
    def raise_on_all_ranks(self) -> Iterator[None]:
        """Raise an error in all processes if there is one in any.

        Sharded parameters can be gathered inside.
        """
        with self.shards.open(), self.sending():
            yield
            self.gather_objects(None)

    def raise_once(self) -> AbstractContextManager[None]:
        """Return the same context, unless parameters can be gathered already."""
        return nullcontext() if self.shards.is_open else self.raise_on_all_ranks()

    # --- passes over data

    @_together
    def task(
        self, describe: Describe, columns: Tensor | None = None, space: Any = None
    ) -> Iterator[Totals]:
        """Let each process pass over its own data, and add to totals, which are then those of all.

        Processes that describe different things, or multiply different columns of a space, are
        refused; an error in one is raised in all. Call this before ``sharing`` and ``summing``, and
        enter it inside of them.
        """
        totals: Totals = defaultdict(float)
        with self.shards.open(), self.sending():
            yield totals
            own = {name: float(number) for name, number in totals.items()}
            every = self._agree(describe(), self._sketches(columns, space), own)
        for name, number in totals.items():
            total = fsum(each.get(name, 0.0) for each in every)
            totals[name] = (
                torch.tensor(total, dtype=torch.float64, device=number.device)
                if isinstance(number, Tensor)
                else total
            )

    def sharing(self, vectors: Columns, sums: Columns | None = None) -> AbstractContextManager:
        """Return a context in which processes share vectors and sums, see ``Shards.product``.

        Afterwards all have passed over their data, or there is an error in all.
        """
        return nullcontext()

    @_together
    def summing(self, vectors: Columns, sums: Tensor, space: Any) -> Iterator[None]:
        """Add up the sums of all after a task, which raises the errors of all.

        This process's sums, or its parts of them, ``[K, dim]`` in a space, are overwritten.
        """
        yield
        self.add(sums)

    def check_same(self, columns: Tensor) -> None:
        """Refuse vectors that are not the same in all processes, up to rounding."""
        if not self.is_alone:
            with self.sending():
                self._agree({}, self._sketches(columns, None), None)

    def _agree(
        self, description: Mapping[str, Any], sketches: Mapping[Any, list[float]], value: Any
    ) -> list[Any]:
        """Return a value of each process, if all have done the same with the same vectors."""
        texts = {key: None if x is None else repr(x) for key, x in description.items()}
        compared = blake2b(repr(texts).encode(), digest_size=16).digest()
        every = self.gather_objects((compared, sketches, value))
        all_compared, all_sketches, values = zip(*every, strict=True)
        if len({*all_compared}) > 1:
            all_texts = self.gather_objects(texts)
            for key in _different(all_texts):
                raise ValueError(
                    f"All ranks must do the same, but they differ in {key}. "
                    f"{listed((each.get(key) for each in all_texts), self.group)}"
                )
        for key in {key for each in all_sketches for key in each}:
            if not _are_close([each[key] for each in all_sketches if key in each]):
                raise ValueError(
                    "Ranks multiply different vectors, and all must multiply the same. Give "
                    "solvers and estimators the same start on all ranks, by v0, seed or rng."
                )
        return list(values)

    def _sketches(self, columns: Tensor | None, space: Any) -> dict[Any, list[float]]:
        """Return numbers of columns that are to be compared."""
        return {} if columns is None else {"": _sketch(columns)}

    # --- collectives

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the objects of all processes, in the order of ranks; raise their errors.

        Before that, serve the requests of others until all are here.
        """
        if self.is_alone:
            return [value]
        self.shards.settle()
        return gather_objects(value, self.group)

    def largest(self, number: Number) -> Number:
        """Return the largest of a number in each process."""
        return max(self.gather_objects(number))

    def any(self, answer: Callable[[], bool]) -> bool:
        """Ask each process; return whether the answer of any is true."""
        if self.is_alone:
            return answer()
        with self.sending():
            return any(self.gather_objects(answer()))

    def add(self, tensor: Tensor, to: int | None = None) -> Tensor:
        """Add all processes' tensors, in place if they are contiguous; return the sum.

        With ``to``, that rank alone gets the sum; others get meaningless numbers.
        """
        if self.is_alone:
            return tensor
        self.shards.settle()
        tensor = tensor.contiguous()
        if to is None:
            distributed.all_reduce(tensor, group=self.group)
        else:
            distributed.reduce(tensor, group=self.group, group_dst=to)
        return tensor

    def joined(self, part: Tensor, length: int) -> Tensor:
        """Return the rows of all processes, ``length`` in equal parts but for the last one."""
        if self.is_alone:
            return part
        return gather_parts(empty_whole(part, length, self.group), part, self.group)[:length]

    def add_all(
        self,
        tensors: Mapping[Any, Tensor],
        device: torch.device,
        holders: Callable[[Any], Sequence[int]] | None = None,
    ) -> dict[Any, Tensor]:
        """Return the sums over processes of tensors by name, which are overwritten.

        A missing tensor counts as zero. By default all ranks get a sum, else its ``holders``.
        """
        if self.is_alone:
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
        """Return the tensors of all processes by key; one tensor under several keys stays one."""
        if self.is_alone:
            return dict(tensors)
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
        if self.is_alone:
            return tensor
        self.shards.settle()
        distributed.broadcast(tensor, group=self.group, group_src=source)
        return tensor


#: A process alone.
ALONE = Team()


class ShardedTeam(Team):
    """Processes that have parts of the parameters, and of vectors; perhaps with copies of both."""

    def task(
        self, describe: Describe, columns: Tensor | None = None, space: Any = None
    ) -> AbstractContextManager[Totals]:
        """Compare at once, too, since processes communicate in the pass."""
        with self.sending():
            self._agree(describe(), {}, None)
        return super().task(describe, columns, space)

    def _sketches(self, columns: Tensor | None, space: Any) -> dict[Any, list[float]]:
        """Return numbers of vectors of whole parameters, and of parts that have copies."""
        if columns is None:
            return {}
        views, parts = space.views(columns), self.shards.params
        groups = {"": [flat(x) for name, x in views.items() if name not in parts]}
        if self.shards.replicas is not None:
            groups[self.shards.group.rank()] = [flat(x) for n, x in views.items() if n in parts]
        return {key: _sketch(torch.cat(some, 1)) for key, some in groups.items() if some}

    @contextmanager
    def sharing(self, vectors: Columns, sums: Columns | None = None) -> Iterator[None]:
        """Let processes share vectors and sums."""
        with self.shards.product(vectors, sums or {}), self.raise_on_all_ranks():
            yield

    @contextmanager
    def summing(self, vectors: Columns, sums: Tensor, space: Any) -> Iterator[None]:
        """Share vectors and sums, then add up copies, and sums for whole parameters."""
        with self.sharing(vectors, space.views(sums)):
            yield
        replicas = team_of(self.shards.replicas)
        for name in space.names:
            part = sums[:, space.slice(name)]
            team = replicas if name in self.shards.params else self
            part.copy_(team.add(part.contiguous()))


def team_of(group: Any, shards: Shards = WHOLE) -> Team:
    """Return the processes of a group, or one alone, of a model with these sharded parameters."""
    is_group = distributed.is_available() and isinstance(group, distributed.ProcessGroup)
    if group is not None and not is_group:
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup to which this process "
            f"belongs, such as torch.distributed.group.WORLD, got {group!r}."
        )
    is_sharded = group is not None and bool(shards.params)
    return (ShardedTeam if is_sharded else Team)(group, shards)


def largest(teams: Iterable[Team]) -> Team:
    """Return the team with the most processes."""
    return max(teams, key=lambda team: team.size, default=ALONE)


def _different(reports: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the keys under which ranks have different values, of those that know one."""
    reports = list(reports)
    keys = dict.fromkeys(key for report in reports for key in report)
    return [key for key in keys if len({report.get(key) for report in reports} - {None}) > 1]


def _sketch(columns: Tensor) -> list[float]:
    """Return the tolerance of vectors ``[K, dim]``, and numbers that tell them from others."""
    options = {"dtype": columns.dtype, "device": columns.device}
    # one vector, whatever the order of the columns in memory
    one = torch.linspace(1.0, 2.0, len(columns), **options) @ columns
    norm, *numbers = sketch(one).tolist()
    return [10 * torch.finfo(columns.dtype).eps ** 0.5 * norm, norm, *numbers]


def _are_close(sketches: Sequence[list[float]]) -> bool:
    """Return whether vectors with these sketches are the same up to rounding."""
    tolerance = max(numbers[0] for numbers in sketches)
    return all(max(some) - min(some) <= tolerance for some in zip(*sketches, strict=True))
