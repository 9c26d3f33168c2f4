"""What processes send each other: tensors, objects, and errors that are raised in all."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed

#: The bytes of a message. Longer objects take further messages.
_MESSAGE = 512


class Failure(NamedTuple):
    """What a process with an error sends instead of the next object: kind and text of the error."""

    message: str


def gather_objects(value: Any, group: Any) -> list[Any]:
    """Return the objects of all processes of a group, by rank; raise a ``Failure``."""
    values = _exchanged(value, group)
    if not isinstance(value, Failure):
        failures = [x.message if isinstance(x, Failure) else None for x in values]
        if any(failures):
            error = RuntimeError(f"There was an error on another rank. {listed(failures, group)}")
            _mark_sent(error)
            raise error
    return values


def _exchanged(value: Any, group: Any) -> list[Any]:
    """Return the objects of all processes, in one collective if all are short."""
    packed, size = pickle.dumps(value), group.size()
    short = packed if len(packed) <= _MESSAGE else b""  # a pickle does not begin with a zero
    backends = distributed.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
    own = torch.frombuffer(bytearray(short.ljust(_MESSAGE, b"\0")), dtype=torch.uint8)
    every = torch.empty(size * _MESSAGE, dtype=torch.uint8, device=device)
    all_gather(every, own.to(device), group)
    messages = [x.numpy().tobytes() for x in every.cpu().view(size, -1)]
    if all(message[0] for message in messages):
        return [pickle.loads(message) for message in messages]
    values = [None] * size
    distributed.all_gather_object(values, value, group=group)
    return values


@contextmanager
def sending_errors(send: Callable[[Failure], Any]) -> Iterator[None]:
    """Send an error to the other processes, which raise it where they gather objects next.

    An error is sent once, so that these contexts may be nested. Ctrl-C and SystemExit are errors.
    """
    try:
        yield
    except GeneratorExit:  # nothing failed
        raise
    except BaseException as error:
        if not _is_sent(error):
            send(Failure(f"{type(error).__name__}: {error}"))
            _mark_sent(error)
        raise


def listed(values: Iterable[Any], group: Any) -> str:
    """Return a message with each global rank and its value; ``None`` is left out."""
    pairs = zip(distributed.get_process_group_ranks(group), values, strict=True)
    return "; ".join(f"Rank {rank}: {value}" for rank, value in pairs if value is not None)


def _mark_sent(error: BaseException) -> None:
    error.is_sent = True  # type: ignore[attr-defined]


def _is_sent(error: BaseException | None) -> bool:
    """Return whether all processes know of an error, or of the error that caused it."""
    return error is not None and (getattr(error, "is_sent", False) or _is_sent(error.__cause__))


# --- tensors


def all_gather(out: Tensor, tensor: Tensor, group: Any, async_op: bool = False) -> Any:
    """Write the tensors of all processes to one, one after the other; see ``begin_gather``."""
    gather = _collective("all_gather_single", "all_gather_into_tensor")
    return gather(out, tensor, group=group, async_op=async_op)


def reduce_scatter(out: Tensor, tensor: Tensor, group: Any) -> None:
    """Add up the tensors of all processes, and write this process's part of the sum."""
    _collective("reduce_scatter_single", "reduce_scatter_tensor")(out, tensor, group=group)


def _collective(name: str, former_name: str) -> Callable:
    # PyTorch 2.13 has renamed both
    return getattr(distributed, name, None) or getattr(distributed, former_name)


def empty_whole(part: Tensor, length: int, group: Any) -> Tensor:
    """Return memory for the parts of all processes, ``length`` rows, see ``gather_parts``."""
    return part.new_empty(-(-length // group.size()) * group.size(), *part.shape[1:])


def gather_parts(out: Tensor, part: Tensor, group: Any) -> Tensor:
    """Write the parts of all processes, one after the other; return where.

    ``out`` has equally many rows for each process; a part with fewer is padded with zeros.
    """
    begin_gather(out, part, group).wait()
    return out


def begin_gather(out: Tensor, part: Tensor, group: Any) -> Any:
    """Begin what ``gather_parts`` does; return an object with a method that waits for the end."""
    padding = len(out) // group.size() - len(part)
    if padding:
        part = torch.cat([part, part.new_zeros(padding, *part.shape[1:])])
    return all_gather(out, part.contiguous(), group, async_op=True)
