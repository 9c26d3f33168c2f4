"""Sums over the data of several processes: the only place that knows of ranks.

All ranks do the same in the same order, and meet where ``Ranks`` says so. What is between two
meetings is up to each of them: modes, graphs that are kept, whether something is computed again.
An error waits there until all have met, so that no rank waits for one that does not come.
"""

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, distributed

from curvlinops.core.norms import double_norm
from curvlinops.core.replicas import checksums
from curvlinops.core.space import Columns, flat


class Ranks:
    """The processes that have a part of the data each.

    Args:
        group: A ``torch.distributed.ProcessGroup``; ``None`` for a process that is alone, for which
            all methods return what they are given.

    Attributes:
        size: How many processes there are.
        rank: The number of this one among them.

    Raises:
        TypeError: If it is no group, or this process does not belong to it.
    """

    def __init__(self, group: Any = None):
        known = distributed.is_available() and isinstance(group, distributed.ProcessGroup)
        if group is not None and not known:
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup to which this process "
                f"belongs, such as torch.distributed.group.WORLD, got {group!r}."
            )
        self.group = group
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
        """Return the number of a batch among those of all ranks, which take turns."""
        return index * self.size + self.rank

    # --- doing something together

    @contextmanager
    def together(
        self, risk: Any, task: str, columns: Columns | None = None, **details: Any
    ) -> Iterator[Columns | None]:
        """Let all ranks pass over their data; raise an error on all if there is one on any.

        Args:
            risk: The ``EmpiricalRisk``. Its parameters must be the same on all ranks.
            task: What is computed.
            columns: What is multiplied.
            **details: What else must be the same, as far as ``repr`` shows it.

        Yields:
            The first rank's columns.

        Raises:
            ValueError: If the ranks do different things, or parameters or vectors differ.
            RuntimeError: If there is an error on another rank.
        """
        if self.size == 1:
            yield columns
            return
        self._compare(risk, _description(risk, task, columns) | details)
        shared = None if columns is None else self._first(columns)
        with self.guarded(risk):
            if columns is not None:
                _check_in_step(columns, shared)
            yield shared

    @contextmanager
    def guarded(self, risk: Any = None) -> Iterator[None]:
        """Raise an error on all ranks if there is one on any.

        Args:
            risk: If given, the lengths of its terms must agree.

        Raises:
            ValueError: If they do not.
            RuntimeError: If there is an error on another rank.
        """
        if self.size == 1:
            yield
            return
        try:
            yield
        except Exception as error:
            self._report(f"{type(error).__name__}: {error}", risk)
            raise
        self._report(None, risk)

    def _report(self, message: str | None, risk: Any) -> None:
        """Tell the other ranks about an error, and hear of theirs."""
        length = getattr(risk, "term_size", None) or 0
        failed, lengths = self.gather([message is not None, length]).T.tolist()
        if any(failed):
            messages = self.gather_objects(message)
            if message is None:
                raise RuntimeError(f"There was an error on another rank. {self._listed(messages)}")
        elif len({*lengths} - {0}) > 1:
            raise ValueError(
                "Outputs have last axes of different lengths, so that their mean is not defined. "
                f"Use reduction='sum', or data that agree. {self._listed(lengths)}"
            )

    def _compare(self, risk: Any, task: Mapping[str, Any]) -> None:
        """Refuse to begin unless all ranks do the same with the same parameters.

        Args:
            risk: The ``EmpiricalRisk``.
            task: What this rank does.
        """
        sums, tolerance = checksums(risk), 100 * torch.finfo(risk.space.dtype).eps
        code = crc32(repr(dict(task)).encode())
        # neither is lost among others of larger parameters
        angles, lengths = (sum(column) for column in zip(*sums.values(), strict=True))
        codes, *found = self.gather([code, angles, lengths]).T.tolist()
        if len({*codes}) > 1:
            tasks = self.gather_objects({key: repr(value) for key, value in task.items()})
            key = next(k for t in tasks for k in t if any(o.get(k) != t[k] for o in tasks))
            raise ValueError(
                f"All ranks must do the same, but they differ in {key}. "
                f"{self._listed([t.get(key) for t in tasks])}"
            )
        # of NaN nothing is said here
        if any(max(values) - min(values) > tolerance * len(sums) for values in found):
            every = self.gather_objects(dict(sums))
            each = {n: zip(*(own[n] for own in every), strict=True) for n in sums}
            names = [
                name
                for name, numbers in each.items()
                if any(max(values) - min(values) > tolerance for values in numbers)
            ]
            raise ValueError(
                f"Ranks have different values of {', '.join(names)}. Give all the same, e.g. "
                "with torch.distributed.broadcast, or as DistributedDataParallel does."
            )

    def _listed(self, values: Iterable[Any]) -> str:
        """Return what ranks say for themselves, by the numbers that users know."""
        names = distributed.get_process_group_ranks(self.group)
        found = zip(names, values, strict=True)
        return "; ".join(f"Rank {name}: {value}" for name, value in found if value is not None)

    # --- collectives

    def total(self, number: Tensor | float) -> Tensor | float:
        """Return the sum of a number on each rank, summed in float64."""
        if self.size == 1:
            return number
        found = self.gather([float(number)]).sum()
        return found.to(number.device) if isinstance(number, Tensor) else float(found)

    def largest(self, number: int) -> int:
        """Return the largest of a number on each rank."""
        return number if self.size == 1 else int(self.gather([number]).max())

    def add(self, tensor: Tensor) -> Tensor:
        """Add all ranks' tensors to each other, in place if they are contiguous; return them."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        distributed.all_reduce(tensor, group=self.group)
        return tensor

    def add_all(self, tensors: Mapping[Any, Tensor], device: torch.device) -> dict[Any, Tensor]:
        """Return the sums of tensors by name, which some ranks may lack."""
        if self.size == 1:
            return dict(tensors)
        own = {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()}
        known: dict[Any, tuple] = {}
        for other in self.gather_objects(own):
            known |= {key: kind for key, kind in other.items() if key not in known}
        found = {}
        for key, (shape, dtype) in known.items():
            tensor = tensors.get(key)
            if tensor is None:
                tensor = torch.zeros(shape, dtype=dtype, device=device)
            found[key] = self.add(tensor)
        return found

    def first(self, tensor: Tensor) -> Tensor:
        """Return a copy of the first rank's tensor."""
        if self.size == 1:
            return tensor
        tensor = tensor.clone(memory_format=torch.contiguous_format)
        distributed.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def _first(self, columns: Columns) -> Columns:
        """Return the first rank's columns, which it sends in one tensor."""
        flat = torch.cat([column.flatten() for column in columns.values()])
        distributed.broadcast(flat, group=self.group, group_src=0)
        parts = flat.split([column.numel() for column in columns.values()])
        return {n: part.view_as(columns[n]) for n, part in zip(columns, parts, strict=True)}

    def gather(self, numbers: Sequence[float]) -> Tensor:
        """Return as many numbers of each rank, ``[size, len(numbers)]``, in float64."""
        # of all collectives, only sums exist for all backends and devices
        table = torch.zeros(self.size, len(numbers), dtype=torch.float64, device=self._device)
        table[self.rank] = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return self.add(table)

    def gather_objects(self, value: Any) -> list[Any]:
        """Return a small object of each rank."""
        data = torch.tensor(list(pickle.dumps(value)), dtype=torch.uint8, device=self._device)
        sizes = [int(size) for size in self.gather([len(data)])]
        table = torch.zeros(self.size, max(sizes), dtype=torch.uint8, device=self._device)
        table[self.rank, : len(data)] = data
        rows = self.add(table).cpu().numpy()
        return [pickle.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]

    @property
    def _device(self) -> torch.device:
        """Where numbers are exchanged."""
        backend = str(distributed.get_backend(self.group))
        return torch.device("cuda" if "nccl" in backend and "gloo" not in backend else "cpu")


def _check_in_step(own: Columns, shared: Columns) -> None:
    """Refuse vectors that are others than those of the first rank, but for rounding."""

    def squares(columns: Iterable[Tensor]) -> Tensor:
        norms = [double_norm(flat(column), dim=1) for column in columns]
        return torch.stack(norms).square().sum(0)

    eps = torch.finfo(next(iter(own.values())).dtype).eps
    if bool((squares(own[n] - shared[n] for n in own) > eps * squares(shared.values())).any()):
        raise ValueError(
            "The vectors are not those of the first rank, which all multiply. Give solvers and "
            "estimators the same start on all ranks, by v0, seed or rng."
        )


def _description(risk: Any, task: str, columns: Columns | None) -> dict[str, Any]:
    """Return what must be the same on all ranks."""
    params, vectors = risk.model.params, columns or {}
    return {
        "operation": f"{risk.name}.{task}",
        "loss": None if risk.loss is None else risk.loss.description,
        **{f"parameter '{n}'": (tuple(x.shape), x.dtype) for n, x in params.items()},
        **{f"vectors for '{n}'": tuple(x.shape) for n, x in vectors.items()},
        "the order of parameters": list(params),
    }
