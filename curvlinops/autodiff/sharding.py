"""Parameters that are sharded over processes, each of which is gathered when a module reads it."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed, nn

from curvlinops.autodiff.parameters import with_attributes
from curvlinops.support.torch_internals import (
    all_gather,
    distributed_tensors,
    forward_hooks,
    fsdp_policies,
    is_tensor_parallel_hook,
    modules_of,
    reshard,
    tensor_tables,
    without_torch_function,
)

_WHOLE = (
    "Give each process a model with all parameters, with values as by "
    "torch.distributed.checkpoint.state_dict.get_model_state_dict with full_state_dict=True."
)

#: The number that a process says in a round if it needs no parameter any more.
_NONE = -1


class Shards:
    """The parameters of a module that ``fully_shard`` has sharded, as constants of evaluations.

    Before each gather there is a *round*, in which each process says which parameter it needs. All
    take part in the gathers of all parameters that any of them needs. A process that is done takes
    part in rounds until all are done, see ``settle``. So processes may evaluate the model at
    different numbers of batches or columns, in fallbacks, or not at all after an error.

    Args:
        module: The module.
        sharded: Its sharded parameters by name.

    Attributes:
        group: The processes that have the shards of each parameter.
        size: Their number.

    Raises:
        TypeError: If a parameter is sharded in another way than along its first axis over one group
            of processes, or its module needs it whole.
    """

    def __init__(self, module: nn.Module, sharded: Mapping[str, Any]):
        _check_modules(module)
        groups = {name: _group_of(name, parameter) for name, parameter in sharded.items()}
        self.group = next(iter(groups.values()))
        self._ranks = distributed.get_process_group_ranks(self.group)
        for name, group in groups.items():
            if distributed.get_process_group_ranks(group) != self._ranks:
                raise TypeError(
                    f"'{name}' is sharded over other processes than '{next(iter(groups))}'. Call "
                    f"fully_shard with one mesh. {_WHOLE}"
                )
        self.size = self.group.size()
        self._device = next(iter(sharded.values())).to_local().device
        self._module, self._depth = module, 0
        self._latest: tuple[int, Tensor] | None = None  # a module may read it several times
        #: The numbers of gathered parameters that are in memory, and their dtypes.
        self._gathered: WeakKeyDictionary[Any, tuple[int, torch.dtype]] = WeakKeyDictionary()
        self.find()

    @classmethod
    def of(cls, module: nn.Module) -> "Shards | None":
        """Return those of a module, ``None`` if it has none, see ``find``."""
        reshard(module)
        kind = distributed_tensors()
        sharded = {name: x for name, x in module.named_parameters() if isinstance(x, kind)}
        return cls(module, sharded) if sharded else None

    def check_processes(self, group: Any) -> None:
        """Refuse a group of processes that lacks some with shards.

        Raises:
            ValueError: If there are several processes, and ``group`` does not have all.
        """
        ranks = [] if group is None else distributed.get_process_group_ranks(group)
        if self.size > 1 and not set(self._ranks) <= set(ranks):
            raise ValueError(
                f"The model is sharded over the processes {self._ranks}, which compute together. "
                "Pass the group of all processes as process_group, and to each its part of the "
                "data."
            )

    # --- rounds

    @property
    def is_open(self) -> bool:
        """Whether parameters may be gathered: all processes take part until they settle."""
        return self._depth > 0

    @contextmanager
    def open(self) -> Iterator[None]:
        """Allow gathers, in all processes. The last of them must be followed by ``settle``."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._latest = None

    def settle(self) -> None:
        """Take part in the gathers of other processes until none needs a parameter any more."""
        if not self.is_open:
            return
        self._latest, is_found = None, False
        with _plain_calls():
            while (wanted := self._round(_NONE)) != [_NONE]:
                if not is_found:
                    self.find()
                    is_found = True
                for number in wanted:
                    if number != _NONE:
                        self._gather(number, self._empty(number))

    def _round(self, number: int) -> list[int]:
        """Say which parameter this process needs; return what all say, each number once."""
        if self.size == 1:
            return [number]
        if not self.is_open:
            raise RuntimeError(
                "A model with sharded parameters was evaluated where other processes may not "
                "evaluate theirs. Report this as a bug."
            )
        kind = {"dtype": torch.int64, "device": self._device}
        own, every = torch.tensor([number], **kind), torch.empty(self.size, **kind)
        all_gather(every, own, self.group)
        return sorted(set(every.tolist()))

    # --- gathers

    def find(self) -> None:
        """Look up the module's parameters, which have the same numbers in all processes.

        Those that FSDP keeps whole until a backward pass are sharded again.
        """
        reshard(self._module)
        tables = (tensor_tables(module)[0] for module in modules_of([self._module]))
        present = {id(x): x for table in tables for x in dict.values(table) if x is not None}
        self._tensors = list(present.values())
        self._numbers = {
            id(x): number
            for number, x in enumerate(self._tensors)
            if isinstance(x, distributed_tensors())
        }

    def parts(self) -> list[Tensor]:
        """Return the parts of all sharded parameters that this process has."""
        return [self._tensors[number].to_local() for number in self._numbers.values()]

    def is_sharded(self, tensor: Tensor | None) -> bool:
        """Return whether a tensor is one of the sharded parameters."""
        return id(tensor) in self._numbers

    def gather(self, number: int) -> Tensor:
        """Return a parameter, of its full shape."""
        if self._latest is not None and self._latest[0] == number:
            return self._latest[1]
        with _plain_calls():
            # before the round: after an error here, other processes are still served
            full = self._empty(number)
            for wanted in self._round(number):
                if wanted != _NONE:
                    self._gather(wanted, full if wanted == number else self._empty(wanted))
            full = with_attributes(full[: len(self._tensors[number])], self._tensors[number])
            self._gathered[full.untyped_storage()] = number, full.dtype
        self._latest = number, full
        return full

    def _empty(self, number: int) -> Tensor:
        """Return memory for all shards of a parameter, which are padded to the same length."""
        parameter = self._tensors[number]
        length = -(-len(parameter) // self.size) * self.size
        return parameter.to_local().new_empty(length, *parameter.shape[1:])

    def _gather(self, number: int, full: Tensor) -> None:
        local, length = self._tensors[number].to_local(), len(full) // self.size
        if len(local) < length:
            padding = local.new_zeros(length - len(local), *local.shape[1:])
            local = torch.cat([local, padding])
        all_gather(full, local.contiguous(), self.group)

    # --- evaluations

    def table(self, contents: Mapping[str, Tensor | None]) -> "GatheringTable":
        """Return a module's table of parameters, which gathers a sharded one when it is read."""
        return GatheringTable(contents, self)

    def whole(self, tensor: Tensor | None) -> Tensor | None:
        """Return the parameter of full shape for a sharded one, any other tensor unchanged."""
        number = self._numbers.get(id(tensor))
        return tensor if number is None else self.gather(number)

    def saved_by_number(self) -> AbstractContextManager:
        """Return a context in which autograd saves gathered parameters by their numbers."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, x: Tensor) -> "Tensor | SavedParameter":
        try:
            number, dtype = self._gathered.get(x.untyped_storage(), (_NONE, x.dtype))
        except RuntimeError:  # it has no memory of its own
            return x
        if number == _NONE or dtype != x.dtype:
            return x
        return SavedParameter(number, tuple(x.shape), x.stride(), x.storage_offset())

    def _unpack(self, saved: "Tensor | SavedParameter") -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        full = self.gather(saved.number)
        with _plain_calls():
            return full.as_strided(saved.shape, saved.strides, saved.offset)


class SavedParameter(NamedTuple):
    """What autograd saves of a view of a gathered parameter: where it lies in its memory."""

    number: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


class GatheringTable(dict):
    """A module's table of parameters, which gathers a sharded parameter when it is read.

    Args:
        contents: The parameters by name.
        shards: The sharded ones.
    """

    def __init__(self, contents: Mapping[str, Tensor | None], shards: Shards):
        super().__init__(contents)
        self._shards = shards

    def __getitem__(self, name: str) -> Tensor | None:
        return self._shards.whole(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:
        """Return a parameter, or a default."""
        return self._shards.whole(super().get(name, default))

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


# --- what is refused


def _group_of(name: str, parameter: Any) -> Any:
    """Return the processes that have the shards of a parameter."""
    from torch.distributed.tensor import Replicate, Shard

    placements, mesh = parameter.placements, parameter.device_mesh
    sharded = [axis for axis, x in enumerate(placements) if type(x) is not Replicate]
    if len(sharded) != 1 or placements[sharded[0]] != Shard(0):
        raise TypeError(
            f"'{name}' has the placements {list(placements)}. Supported are parameters that "
            f"fully_shard shards along their first axis over one axis of the mesh. {_WHOLE}"
        )
    if parameter.to_local().device.type != mesh.device_type:
        raise TypeError(
            f"'{name}' is offloaded to {parameter.to_local().device}, which is not supported: omit "
            "offload_policy in fully_shard."
        )
    return mesh.get_group(sharded[0])


def _check_modules(module: nn.Module) -> None:
    """Refuse modules that need sharded parameters in another way than by reading them."""
    for name, child in module.named_modules():
        where = f"The model's module '{name}'" if name else "The model"
        hooks = chain.from_iterable(table.values() for table in forward_hooks(child))
        if any(map(is_tensor_parallel_hook, hooks)):
            raise TypeError(
                f"{where} is parallelized by torch.distributed.tensor.parallel, which is "
                f"not supported. {_WHOLE}"
            )
        sharded = distributed_tensors()
        if isinstance(child, nn.RNNBase) and any(
            isinstance(x, sharded) for x in child.parameters(recurse=False)
        ):
            raise TypeError(
                f"{where} ({type(child).__name__}) has sharded parameters and keeps them "
                "in a list of its own. Leave it out: fully_shard(..., "
                "ignored_params=set(module.parameters()))."
            )
        for policy in fsdp_policies(child):
            dtype = policy.param_dtype or policy.output_dtype
            if dtype is not None:
                raise TypeError(
                    f"{where} is sharded with a MixedPrecisionPolicy ({dtype}), which is "
                    "not supported: the model is evaluated in the dtype of its parameters. Build "
                    "it without mp_policy, perhaps with parameters of that dtype."
                )


def check_training(module: nn.Module) -> None:
    """Refuse modules of a sharded model that communicate in train mode.

    Raises:
        ValueError: If there is SyncBatchNorm in train mode.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm) and child.training:
            raise ValueError(
                f"Module '{name}' of a sharded model is SyncBatchNorm in train mode, in which "
                "processes communicate. Call model.eval()."
            )
