"""Parameters that are sharded over processes, each of which is gathered when a module reads it.

Processes need not be in step. What one of them needs of the others is a *request*: a parameter, the
other parts of a vector, or to add a gradient to the parts of a sum. Before each collective there is
a *round*, in which each process says what it requests. All of them then serve all requests.

On most batches a process requests the same, in the same order. At its first request on a batch, it
also says what it expects to request after that. If all say the same, this is *agreed*: all serve
these requests in their order, without rounds. Whoever requests something else, or is done, serves
what is agreed first. So the order of collectives is the same in all processes, whatever they do.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from curvlinops.support.columns import Columns
from curvlinops.support.torch_internals import (
    distributed_tensors,
    fsdp_dtypes,
    modules_of,
    reshard,
    tensor_tables,
    version_of,
    with_attributes,
    without_torch_function,
)
from curvlinops.team.fully_shard import casting_hooks, check_modules, groups_of
from curvlinops.team.layout import GatheredColumns
from curvlinops.team.messages import (
    all_gather,
    begin_gather,
    empty_whole,
    gather_parts,
    reduce_scatter,
)
from curvlinops.team.scattering import (
    PRODUCTS,
    Gather,
    ShardedParameter,
    has_tangent,
    stand_in,
)

T = TypeVar("T")


class Kind(IntEnum):
    """What a process requests."""

    NOTHING = 0  #: The process is done.
    PARAMETER = 1  #: Gather a parameter.
    VECTORS = 2  #: Gather the tensors for a parameter of some vectors.
    SUM = 3  #: Add tensors for a parameter to some sums.


class Request(NamedTuple):
    """What a process requests of all: of vectors and sums, columns from ``first`` to ``stop``.

    ``number`` is that of a parameter among those of the module for ``PARAMETER``, else among those
    that are differentiated.
    """

    kind: int
    number: int = 0
    first: int = 0
    stop: int = 1


_NOTHING = Request(Kind.NOTHING)


_UNKNOWN: tuple[tuple, tuple] = (), ()


class Schedule:
    """The requests of a process on earlier batches, in their order."""

    def __init__(self) -> None:
        #: By task and first request, a pair: the requests that followed, if the latest two batches
        #: agree, else none; and those of the latest batch.
        self._known: dict[tuple, tuple[tuple, tuple]] = {}
        self._task: Hashable = None
        self._requests: list[Any] = []

    def begin(self, task: Hashable) -> None:
        """Note that the next requests are for a batch in a task; ``None`` for anything else."""
        if self._task is not None and self._requests:
            key, latest = (self._task, self._requests[0]), tuple(self._requests[1:])
            _, before = self._known.get(key, _UNKNOWN)
            self._known[key] = latest if latest == before else (), latest
        self._task, self._requests = task, []

    def next(self, request: Any) -> tuple:
        """Note a request; return those that will follow, if it is the first one of a batch."""
        self._requests.append(request)
        if len(self._requests) > 1:
            return ()
        repeated, _ = self._known.get((self._task, request), _UNKNOWN)
        return repeated


#: The group of all processes of a mesh, by the group of its replicas. A new one takes connections.
_MEMBERS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


class Shards:
    """The parameters of a module that ``fully_shard`` has sharded; without arguments, none.

    All take part in the collectives of all requests. A process that is done takes part in rounds
    until all are done, see ``settle``. So processes may evaluate the model at different numbers of
    batches or columns, in fallbacks, or not at all after an error.

    A process differentiates its own part of the risk with respect to whole parameters, of which it
    never has more than a few in memory: each is gathered when it is read, and so are vectors that
    are multiplied. A whole gradient is added to the parts of a sum as soon as it is there.

    Attributes:
        group: The processes that have the shards of each parameter.
        size: Their number.
        replicas: The processes that have copies of this process's shards; ``None`` if there are
            none.
        params: The sharded parameters that are differentiated, by name.
        dtypes: Those in which parameters are read.
        products: Calls that are replaced where a graph is differentiated twice, if there are any.
        is_sharing: Whether processes share vectors and sums, see ``product``.
        has_added: Whether something was added to the present columns of sums.
    """

    # what holds if no parameter is sharded
    group, replicas, size = None, None, 1
    params: Mapping[str, Any] = {}
    dtypes: frozenset[torch.dtype] = frozenset()
    products: Mapping[Any, Any] = {}
    has_added = is_sharing = False
    _numbers: Mapping[int, int] = {}
    _gathered: Mapping[Any, tuple[int, torch.dtype]] = {}
    _depth, _latest = 0, None

    def __init__(self, module: nn.Module | None = None, sharded: Mapping[str, Any] | None = None):
        if module is None or not sharded:
            return
        check_modules(module)
        self.group, self.replicas = groups_of(sharded)
        self._ranks = distributed.get_process_group_ranks(self.group)
        self.size = self.group.size()
        some = next(iter(sharded.values()))
        self._mesh, self._device = some.device_mesh, some.to_local().device
        self._module, self._depth = module, 0
        self._latest: tuple[int, Tensor] | None = None  # a module may read it several times
        #: The numbers of gathered parameters that are in memory, and their dtypes.
        self._gathered: WeakKeyDictionary[Any, tuple[int, torch.dtype]] = WeakKeyDictionary()
        self.params, self._names = {}, dict[int, str]()
        self._vectors: Columns = {}
        self._sums: Columns = {}
        self._columns, self.has_added, self.is_sharing = slice(0, 1), False, False
        #: What all processes request next, in this order, without rounds.
        self._agreed = deque[Request]()
        #: The first of these if it is in flight: its memory, and what waits for it.
        self._ahead: tuple[Tensor, Any] | None = None
        self._numbers: dict[int, int] = {}
        self.find()

    def __bool__(self) -> bool:
        """Return whether any parameter is sharded."""
        return self.group is not None

    @cached_property
    def members(self) -> Any:
        """The processes that have shards of any copy."""
        if self.replicas is None or self.replicas.size() == 1:
            return self.group
        if self.replicas not in _MEMBERS:
            ranks = self._mesh.mesh.flatten().tolist()
            is_all = len(ranks) == distributed.get_world_size()
            _MEMBERS[self.replicas] = (
                distributed.group.WORLD
                if is_all
                else distributed.new_group(ranks, use_local_synchronization=True)
            )
        return _MEMBERS[self.replicas]

    def check_processes(self, group: Any) -> None:
        """Refuse a group that lacks processes with shards or copies, or has some of others."""
        ranks = [] if group is None else distributed.get_process_group_ranks(group)
        if self.size > 1 and not set(self._ranks) <= set(ranks):
            raise ValueError(
                f"The model is sharded over the processes {self._ranks}, which compute together. "
                "Pass the group of all processes as process_group, and to each its part of the "
                "data."
            )
        num_copies = 1 if self.replicas is None else self.replicas.size()
        if self.params and len(ranks or self._ranks) != self.size * num_copies:
            raise ValueError(
                f"process_group has {len(ranks)} processes, but the parameters are sharded over "
                f"{self.size}, with {num_copies} copies. For copies on the other processes, call "
                "fully_shard with a device mesh of two axes, for replicas and shards."
            )

    def check_training(self) -> None:
        """Refuse SyncBatchNorm in train mode, in which processes communicate."""
        for name, child in self._module.named_modules() if self else ():
            if isinstance(child, nn.SyncBatchNorm) and child.training:
                raise ValueError(
                    f"Module '{name}' of a sharded model is SyncBatchNorm in train mode, in which "
                    "processes communicate. Call model.eval()."
                )

    # --- rounds

    @property
    def is_open(self) -> bool:
        """Whether parameters may be gathered: all processes take part until they settle."""
        return self._depth > 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow gathers, in all processes. The last of them must be followed by ``settle``."""
        if self.group is None:
            yield
            return
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self.forget()
                self._agreed.clear()  # settling may have failed
                self._ahead = None

    def settle(self) -> None:
        """Serve the requests of other processes until none has any more."""
        if not self.is_open:
            return
        self.forget()
        self._schedule.begin(None)
        is_found = False
        with _plain_calls():
            self._serve_agreed()
            while (requests := self._round(_NOTHING)) != [_NOTHING]:
                if not is_found:
                    self.find()
                    is_found = True
                for request in requests:
                    self._serve(request)

    def each(self, items: Iterable[T], task: Hashable) -> Iterator[T]:
        """Yield batches, or what was kept of them, and note where the requests of one begin.

        Requests are expected to be those of earlier batches of the same task.
        """

        def begun(item: T) -> T:
            self.forget()  # what was gathered last is requested again on each batch
            columns = next(chain(self._vectors.values(), self._sums.values()), ())
            self._schedule.begin((task, len(columns)))
            return item

        return iter(items) if self.group is None else map(begun, items)

    def _round(self, own: Request, expected: tuple[Request, ...] = ()) -> list[Request]:
        """Say what this process requests; return what all request, each request once.

        If all processes request and expect the same, what follows is agreed.
        """
        if self.size == 1:
            return [own]
        if not self.is_open:
            raise RuntimeError(
                "A model with sharded parameters was evaluated where other processes may not "
                "evaluate theirs. Report this as a bug."
            )
        kind = {"dtype": torch.int64, "device": self._device}
        numbers = torch.tensor((*own, hash(expected)), **kind)  # of integers: the same everywhere
        every = numbers.new_empty(self.size * len(numbers))
        all_gather(every, numbers, self.group)
        every = {tuple(x) for x in every.view(self.size, -1).tolist()}
        if len(every) == 1:
            self._agreed.extend(expected)
        return sorted({Request(*x[:-1]) for x in every})

    def _ask(self, own: Request, tensor: Tensor | None = None) -> Any:
        """Return what this process requests, see ``_serve``; add ``[*shape, k]`` to a sum."""
        # before the round: without memory, this process still serves others
        memory = self._memory(own)
        if tensor is not None:
            memory[: len(tensor)], memory[len(tensor) :] = tensor, 0
        expected = self._schedule.next(own)
        self._serve_agreed(until=own)
        if self._agreed:
            found = self._serve(own, memory)
            self._agreed.popleft()
            self._begin_next()
            return found
        for request in self._round(own, expected):
            if request == own:
                found = self._serve(request, memory)
            else:
                self._serve(request)
        self._begin_next()
        return found

    def _serve_agreed(self, until: Request | None = None) -> None:
        """Serve what other processes request as agreed, up to a request of this process."""
        while self._agreed and self._agreed[0] != until:
            self._serve(self._agreed[0])
            self._agreed.popleft()

    def _begin_next(self) -> None:
        """Begin to gather the parameter that is agreed next, while this process computes."""
        if self._agreed and self._agreed[0].kind == Kind.PARAMETER:
            memory = self._memory(self._agreed[0])
            self._ahead = memory, self._begin(self._agreed[0].number, memory)

    def _begin(self, number: int, memory: Tensor) -> Any:
        part = self._tensors[number].to_local().to(self._dtypes[number])
        return begin_gather(memory, part, self.group)

    def _memory(self, request: Request) -> Tensor:
        """Return memory for a whole parameter, or for whole columns ``[*shape, k]``."""
        kind, number, first, stop = request
        if self._ahead is not None and self._agreed[0] == request:
            return self._ahead[0]
        if kind == Kind.PARAMETER:
            part = self._tensors[number].to_local()[:0].to(self._dtypes[number])
            return empty_whole(part, len(self._tensors[number]), self.group)
        parameter = list(self.params.values())[number]
        columns = self._zeros((1, *parameter.shape[1:], stop - first))
        return empty_whole(columns, len(parameter), self.group)

    def _serve(self, request: Request, memory: Tensor | None = None) -> Tensor | None:
        """Take part in the collective of a request, in memory for the result or with a summand."""
        kind, number, first, stop = request
        if kind == Kind.NOTHING:
            return None
        is_mine = memory is not None
        memory = self._memory(request) if memory is None else memory
        if kind == Kind.PARAMETER:
            work = self._begin(number, memory) if self._ahead is None else self._ahead[1]
            self._ahead = None
            work.wait()
            return memory
        name, parameter = list(self.params.items())[number]
        local = parameter.to_local()
        # the axis of columns is the last one here
        shape = stop - first, *local.shape
        if kind == Kind.VECTORS:
            vectors = self._vectors.get(name)
            columns = self._zeros(shape) if vectors is None else vectors[first:stop]
            return gather_parts(memory, columns.movedim(0, -1), self.group)
        if not is_mine:
            memory.zero_()
        part = memory.new_empty(len(memory) // self.size, *memory.shape[1:])
        reduce_scatter(part, memory, self.group)
        sums = self._sums.get(name)
        if sums is not None:
            sums[first:stop] += part[: len(local)].movedim(-1, 0)
        return None

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype, device=self._device)

    # --- gathers

    def find(self) -> None:
        """Look up the module's parameters, which have the same numbers in all processes.

        Those that FSDP keeps whole until a backward pass are sharded again.
        """
        if self.group is None:
            return
        reshard(self._module)
        tables = (tensor_tables(module)[0] for module in modules_of([self._module]))
        present = {id(x): x for table in tables for x in dict.values(table) if x is not None}
        self._tensors = list(present.values())
        before = list(self._numbers.values())
        self._numbers = {
            id(x): number
            for number, x in enumerate(self._tensors)
            if isinstance(x, distributed_tensors())
        }
        if list(self._numbers.values()) != before:
            self._schedule = Schedule()
        dtypes = fsdp_dtypes(self._module)
        self._dtypes = [dtypes.get(id(x), x.dtype) for x in self._tensors]
        self.dtypes = frozenset(self._dtypes)

    def is_sharded(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor is one of the sharded parameters."""
        return id(tensor) in self._numbers

    def gather(self, number: int) -> Tensor:
        """Return a parameter, of its full shape."""
        if self._latest is not None and self._latest[0] == number:
            return self._latest[1]
        self.forget()
        with _plain_calls():
            full = self._ask(Request(Kind.PARAMETER, number))
            full = with_attributes(full[: len(self._tensors[number])], self._tensors[number])
            self._gathered[full.untyped_storage()] = number, full.dtype
        self._latest = number, full
        return full

    def forget(self) -> None:
        """Free the parameter that was gathered last, if nothing else has it."""
        self._latest = None

    # --- derivatives

    def differentiate(self, params: Mapping[str, Any], dtype: torch.dtype) -> None:
        """Say which parameters are differentiated, sharded or not, and the dtype of vectors."""
        kind = distributed_tensors()
        self.params, self.dtype = {n: x for n, x in params.items() if isinstance(x, kind)}, dtype
        self.products = PRODUCTS if self.params else {}
        self._order = {name: number for number, name in enumerate(self.params)}
        self._names = {id(parameter): name for name, parameter in self.params.items()}

    @contextmanager
    def product(self, vectors: Columns, sums: Columns) -> Iterator[None]:
        """Let all processes gather vectors, and add gradients to sums, ``[K, *part]`` each.

        All must be done inside of the context, see ``settle``.
        """
        self._vectors, self._sums, self._columns = vectors, sums, slice(0, 1)
        self.is_sharing = True
        try:
            yield
        finally:
            self._vectors, self._sums, self.is_sharing = {}, {}, False

    def at_columns(self, columns: slice) -> None:
        """Say which columns of vectors and sums the next backward pass is for."""
        self._columns, self.has_added = columns, False

    def cotangent(self, name: str, num_columns: int) -> Tensor:
        """Return zeros without memory that stand for vectors for a parameter."""
        parameter = self.params[name]
        return stand_in(parameter, (num_columns, *parameter.shape))

    def unsummed(self, columns: Columns) -> Columns:
        """Return the gradients that were not added to sums."""
        if not self.params:
            return columns
        return {name: x for name, x in columns.items() if name not in self.params}

    def vectors(self, name: str) -> Tensor:
        """Return the present columns of the vectors for a parameter, ``[k, *shape]``."""
        parameter = self.params[name]
        with _plain_calls():
            full = self._ask(self._request(Kind.VECTORS, name))
            return full[: len(parameter)].movedim(-1, 0)

    def whole(self, columns: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return vectors of which each tensor is gathered when it is read; inside ``product``."""
        return GatheredColumns(columns, self._whole) if self.params else columns

    def _whole(self, name: str, part: Tensor) -> Tensor:
        if name not in self.params:
            return part
        self.at_columns(slice(0, len(part)))
        return self.vectors(name)

    def add(self, name: str, gradients: Tensor) -> None:
        """Add gradients of a whole parameter, ``[k, *shape]``, to the present columns of sums."""
        self.has_added = True
        with _plain_calls():
            self._ask(self._request(Kind.SUM, name), gradients.movedim(0, -1))

    def _request(self, kind: Kind, name: str) -> Request:
        return Request(kind, self._order[name], self._columns.start, self._columns.stop)

    # --- evaluations

    def table(
        self, contents: Mapping[str, Tensor | None], leaves: Mapping[str, Tensor]
    ) -> "GatheringTable | None":
        """Return a module's table of parameters that gathers sharded ones, if there are any."""
        is_any = self._numbers and any(map(self.is_sharded, contents.values()))
        return GatheringTable(contents, self, leaves) if is_any else None

    def hooks(self, module: nn.Module) -> Iterable[tuple[dict, dict]]:
        """Return a module's tables of hooks, and their replacements, see ``casting_hooks``."""
        return () if self.group is None else casting_hooks(module)

    def read(self, tensor: Tensor | None, leaves: Mapping[str, Tensor]) -> Tensor | None:
        """Return the parameter of full shape for a sharded one, any other tensor unchanged.

        In graphs, ``leaves`` stand for some sharded parameters, by name. If one has a tangent, this
        stands for a vector, which is gathered, too.
        """
        number = self._numbers.get(id(tensor))
        if number is None:
            return tensor
        full, name = self.gather(number), self._names.get(id(tensor))
        leaf = None if name is None else leaves.get(name)
        if leaf is None or not (leaf.requires_grad or has_tangent(leaf)):
            return full
        is_summed = getattr(leaf, "is_summed", False)
        gathered_from = ShardedParameter(leaf, self, name, number, is_summed)
        with torch.enable_grad(), without_torch_function():
            values = with_attributes(Gather.apply(full, *gathered_from), tensor)
        values.gathered_from = gathered_from
        return values

    def saved_by_number(self) -> AbstractContextManager:
        """Return a context in which autograd saves gathered parameters by their numbers."""
        hooks = torch.autograd.graph.saved_tensors_hooks
        return nullcontext() if self.group is None else hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> "tuple[Tensor, int] | SavedParameter":
        found = self._found(x)
        if found is not None and found[1] == x.dtype:
            return SavedParameter(found[0], tuple(x.shape), x.stride(), x.storage_offset())
        # a node that saves its own output must not hold itself, in a cycle that no collector sees
        with without_torch_function():
            return x.detach(), version_of(x)

    def _unpack(self, saved: "tuple[Tensor, int] | SavedParameter") -> Tensor:
        if isinstance(saved, SavedParameter):
            full = self.gather(saved.number)
            with _plain_calls():
                return full.as_strided(saved.shape, saved.strides, saved.offset)
        x, version = saved
        if version_of(x) != version:  # which autograd compares only where there are no hooks
            raise RuntimeError(
                "One of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {list(x.shape)}."
            )
        return x

    def source_of(self, x: Tensor) -> Tensor | None:
        """Return the sharded parameter of which a tensor, or its base, was gathered."""
        found = self._found(x)
        return None if found is None else self._tensors[found[0]]

    def _found(self, x: Tensor) -> tuple[int, torch.dtype] | None:
        """Return the number and the dtype of the parameter whose gathered values a tensor views."""
        if not self._gathered:
            return None
        try:
            return self._gathered.get(x.untyped_storage())
        except RuntimeError:  # it has no memory of its own
            return None


#: No parameter is sharded: each process has all of them.
WHOLE = Shards()


def shards_of(module: nn.Module) -> Shards:
    """Return the sharded parameters of a module, see ``Shards.find``."""
    reshard(module)
    kind = distributed_tensors()
    named = module.named_parameters() if kind else ()
    return Shards(module, {name: x for name, x in named if isinstance(x, kind)})


class SavedParameter(NamedTuple):
    """What autograd saves of a view of a gathered parameter: where it lies in its memory."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class GatheringTable(dict):
    """A module's table of parameters, which gathers a sharded one when it is read."""

    def __init__(
        self, contents: Mapping[str, Tensor | None], shards: Shards, leaves: Mapping[str, Tensor]
    ):
        super().__init__(contents)
        self._shards, self._leaves = shards, leaves

    def __getitem__(self, name: str) -> Tensor | None:
        return self._read(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or a default."""
        return self._read(super().get(name, default))

    def _read(self, tensor: Any) -> Any:
        return self._shards.read(tensor, self._leaves)

    def values(self) -> Any:
        """Yield the parameters one by one."""
        return (self[name] for name in self)

    def items(self) -> Any:
        """Yield names and parameters one by one."""
        return ((name, self[name]) for name in self)


@contextmanager
def _plain_calls() -> Iterator[None]:
    """Let calls of the package itself be seen by no mode, and recorded in no graph."""
    with torch.inference_mode(False), torch.no_grad(), without_torch_function():
        yield
