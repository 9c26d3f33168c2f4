"""Digests of tensors, bit by bit, to compare them without copies."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from curvlinops.support.devices import entries_at_once
from curvlinops.support.pytree import leaves
from curvlinops.support.torch_internals import strided_tensors


def digest(tree: Any) -> list[tuple]:
    """Return shape, dtype and checksum of each tensor in nested containers."""
    tensors = [part for tensor in leaves(tree) for part in strided_tensors(tensor)]
    sums = torch.stack([checksum(x).cpu() for x in tensors]).tolist() if tensors else []
    return [(tuple(x.shape), x.dtype, number) for x, number in zip(tensors, sums, strict=True)]


def checksum(tensor: Tensor) -> Tensor:
    """Return a weighted sum of a tensor's bits, modulo 2^64: the same on all devices, exactly.

    Of a large tensor it is the checksum of the sums of its blocks.
    """
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    words = tensor.resolve_neg().reshape(-1).contiguous()
    if words.numel() < 2:  # which is contiguous with any stride
        words = words.as_strided(words.shape, (1,))
    words = words.view({1: torch.uint8, 2: torch.int16}.get(words.itemsize, torch.int32))
    while len(words) > _BLOCK:
        words = _block_sums(words).view(torch.int32)
    return (words * _weights(words.device)[: len(words)]).sum()


#: The number of words that are summed with different weights.
_BLOCK = 2**15


def _block_sums(words: Tensor) -> Tensor:
    """Return the weighted sum of each block of words."""
    weights = _weights(words.device)
    full, rest = words.split([len(words) // _BLOCK * _BLOCK, len(words) % _BLOCK])
    # several blocks at once where that saves time, not where products would leave the cache
    parts = full.view(-1, _BLOCK).split(entries_at_once(words, _BLOCK) // _BLOCK)
    last = (rest * weights[: len(rest)]).sum()
    return torch.cat([*((part * weights).sum(1) for part in parts), last[None]])


@cache
def _weights(device: torch.device) -> Tensor:
    """Return random odd numbers of 64 bits, the same in all processes."""
    generator = torch.Generator().manual_seed(0)
    kind = {"dtype": torch.int64, "device": "cpu", "generator": generator}
    return (torch.randint(-(2**63), 2**63 - 1, (_BLOCK,), **kind) | 1).to(device)
