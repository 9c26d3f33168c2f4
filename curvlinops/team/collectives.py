"""Collectives on tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed


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
    """Return memory for the parts of all processes, see ``gather_parts``.

    Args:
        part: This process's part.
        length: The number of rows that the processes have together.
        group: The processes.
    """
    return part.new_empty(-(-length // group.size()) * group.size(), *part.shape[1:])


def gather_parts(out: Tensor, part: Tensor, group: Any) -> Tensor:
    """Write the parts of all processes, one after the other; return where.

    Args:
        out: Where to write them. It has equally many rows for each process.
        part: This process's part, which is padded with zeros if it has fewer rows.
        group: The processes.
    """
    begin_gather(out, part, group).wait()
    return out


def begin_gather(out: Tensor, part: Tensor, group: Any) -> Any:
    """Begin what ``gather_parts`` does; return an object with a method that waits for the end."""
    padding = len(out) // group.size() - len(part)
    if padding:
        part = torch.cat([part, part.new_zeros(padding, *part.shape[1:])])
    return all_gather(out, part.contiguous(), group, async_op=True)
